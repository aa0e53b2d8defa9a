"""Every private name of torch, transformers, accelerate, DeepSpeed, TRL and PEFT that the core
needs. What the lab or the trainer alone needs is in lab/compat.py and trainer/compat.py.

setup.cfg says which versions of torch and transformers have these names. There is a fallback only
where a version in that range lacks one. tests/test_compat.py finds private names elsewhere.
"""

from hfpatch.compat.engines import *  # noqa: F403
from hfpatch.compat.models import *  # noqa: F403
from hfpatch.compat.modules import *  # noqa: F403
from hfpatch.compat.scans import *  # noqa: F403
from hfpatch.compat.states import *  # noqa: F403
from hfpatch.compat.tensors import *  # noqa: F403
from hfpatch.compat.turns import *  # noqa: F403
