"""Every private name of torch, transformers, accelerate, DeepSpeed, TRL and PEFT that the package
needs: a function each, with what happens where the name is gone (tests/test_compat.py takes each
away, and finds private names elsewhere).

Names are looked up when they are used: one that is gone costs what needs it, never `import
    hfpatch`.
"""

from hfpatch.compat.engines import *  # noqa: F403
from hfpatch.compat.models import *  # noqa: F403
from hfpatch.compat.modules import *  # noqa: F403
from hfpatch.compat.scans import *  # noqa: F403
from hfpatch.compat.states import *  # noqa: F403
from hfpatch.compat.tensors import *  # noqa: F403
from hfpatch.compat.turns import *  # noqa: F403
