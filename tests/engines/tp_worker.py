"""Two gloo processes that share each weight: tensor parallelism through transformers' tp_plan="auto"."""

import sys
import warnings
from pathlib import Path

import common
import torch
import torch.distributed as dist
import vocab_cases
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

import hfpatch
from hfpatch.checkpoint import session as session_module
from hfpatch.ops import VocabShard


def load(folder: Path) -> LlamaForCausalLM:
    """The model of `common`, each rank with its half of every projection."""
    if dist.get_rank() == 0 and not folder.exists():
        common.make_model().save_pretrained(folder)
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # 5.23 renames the argument; 4.57 knows this one alone
        return LlamaForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32).train()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model) -> dict[str, torch.Tensor]:
    for batch in common.micro_batches():
        model(**batch, num_items_in_batch=torch.tensor(common.label_count())).loss.backward()
    found = {name: whole(p.grad) for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def held(model, shared: bool) -> tuple[int, int, dict]:
    """Host bytes that one step's checkpoints take on this rank, those of the gathered tile, and the gradients."""
    hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="host", tile=12))
    find, session_module.tensor_parallel_group = session_module.tensor_parallel_group, lambda _: None
    if shared:
        session_module.tensor_parallel_group = find
    found = gradients(model)
    session_module.tensor_parallel_group = find
    session = model.model.layers[0]._hfpatch_session
    assert (session.shards is not None) is shared
    gathered = session.shards.buffer.numel() * session.shards.buffer.element_size() if shared else 0
    return session.transfers.pool.bytes_held, gathered, found


def main(folder: str) -> None:
    common.quiet()
    warnings.filterwarnings("error", "`torch.distributed", FutureWarning)  # a collective of ours by an old name
    shim = common.as_if_on_gpus()
    out = Path(folder)

    def make():
        model = load(out / "start")
        report = hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(tile=10, keep=("qkv",)))
        assert report.count("checkpointing") == 2
        return model, str(report)

    words, chunk = [], VocabShard.chunk_
    VocabShard.chunk_ = lambda self, logits, *args: words.append(logits.shape[1]) or chunk(self, logits, *args)
    model, said = make()
    local = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
    split = sum(p.numel() for p in model.parameters() if isinstance(p, DTensor))
    # tiles of 5 tokens do not divide between two ranks; those of 6, which wait on the host, do
    found = {"tiles of 5": common.worst("plain", gradients(model))}
    whole_bytes, _, alone = held(make()[0], shared=False)
    shared_bytes, gathered, together = held(make()[0], shared=True)
    found |= {"kept whole": common.worst("plain", alone), "kept in parts": common.worst("plain", together)}
    # transformers checkpoints no optimizer of a model sharded at load time, so there is nothing to resume from.
    trainer = common.train(model, out / "whole", batch=2, save_only_model=True, **shim)
    trainer.save_model(str(out / "final"))
    VocabShard.chunk_ = chunk
    common.report(
        folder, losses=common.losses(trainer), local=local, split=split, said=said, worst=found,
        whole_bytes=whole_bytes, shared_bytes=shared_bytes, gathered=gathered, words=words,
        vocab=vocab_cases.main(),
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
