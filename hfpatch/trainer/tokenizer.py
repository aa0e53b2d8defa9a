"""A byte-level BPE tokenizer trained on the user's text: no download, and it encodes any text."""

from transformers import PreTrainedTokenizerFast


def train(texts, vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of at most vocab_size tokens: <s>, </s>, <pad>, the 256 bytes, and merges.

    texts: iterator of str. Raises ValueError for a vocabulary without room for a merge.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = ["<s>", "</s>", "<pad>"]
    smallest = 256 + len(special) + 1
    if vocab_size < smallest:
        raise ValueError(
            f"hfpatch: --train_tokenizer must be {smallest} or more, got {vocab_size}. Raise it."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
