"""A byte-level BPE tokenizer trained on the user's text: no download, and it encodes any text."""

from transformers import PreTrainedTokenizerFast


def train(texts, vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of at most vocab_size tokens: <s>, </s>, <pad>, the 256 bytes, and merges.

    texts: iterator of str. Raises ValueError for a vocabulary without room for a merge.
    """
    from tokenizers import ByteLevelBPETokenizer, Tokenizer

    special = ["<s>", "</s>", "<pad>"]
    smallest = 256 + len(special) + 1
    if vocab_size < smallest:
        raise ValueError(
            f"hfpatch: --train_tokenizer must be {smallest} or more, got {vocab_size}. Raise it."
        )
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(
        texts, vocab_size, min_frequency=0, show_progress=False, special_tokens=special
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(made.to_str()),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
