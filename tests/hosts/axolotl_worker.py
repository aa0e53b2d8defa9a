"""One rank of a YAML's training by Axolotl's own functions. What `as_if_on_gpus` does makes the
engine real on a CPU.

    torchrun --nproc_per_node 2 axolotl_worker.py ENGINE FILE.yaml FOLDER
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import deepspeed
import torch
from accelerate import ParallelismConfig, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from engines import common
from test_axolotl import trained_by

from hfpatch.context.classes import is_patched


def as_if_on_gpus(engine: str) -> None:
    """Axolotl asks for GPUs' processes anew, names a GPU for FSDP2's mesh, and ends the processes'
    group before weights could be gathered.
    """
    if engine == "deepspeed":
        # else it builds an extension, half a minute of C++
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo")
        PartialState(backend="gloo").distributed_type = DistributedType.DEEPSPEED
    else:
        common.as_if_on_gpus()
    AcceleratorState._reset_state = staticmethod(lambda *args, **kwargs: None)
    build = ParallelismConfig.build_device_mesh
    ParallelismConfig.build_device_mesh = lambda config, kind: build(config, "cpu")
    torch.distributed.destroy_process_group = lambda *args: None


def main(engine: str, file: str, folder: str) -> None:
    """Writes rank{n}.json, and the first rank the trained weights, whole."""
    common.quiet()
    as_if_on_gpus(engine)
    model, losses = trained_by(Path(file))
    weights = dict(model.named_parameters())
    sharded = all(hasattr(w, "ds_tensor") or hasattr(w, "full_tensor") for w in weights.values())
    gathered = nullcontext()
    if engine == "deepspeed":
        gathered = deepspeed.zero.GatheredParameters(list(weights.values()))
    with gathered:
        plain = {name: weight.detach() for name, weight in weights.items()}
        whole = {n: getattr(w, "full_tensor", w.clone)() for n, w in plain.items()}
    if torch.distributed.get_rank() == 0:
        torch.save(whole, Path(folder) / "weights.pt")
    layers = [m for m in model.modules() if type(m).__name__.endswith("LlamaDecoderLayer")]
    tiled = [is_patched(m) and m._hfpatch.condition.reason is None for m in layers]
    common.report(folder, losses=losses, sharded=sharded, layers=tiled)


if __name__ == "__main__":
    main(*sys.argv[1:])
