"""Every private name of torch, transformers, accelerate, DeepSpeed, TRL and PEFT that the core
needs, one function for each, with a fallback or an error for a version without the name. What the
lab or the trainer alone needs is in lab/compat.py and trainer/compat.py.

tests/test_compat.py removes each name in turn, and finds private names elsewhere. Names are looked
up on use: a missing one costs only the feature that needs it, never `import hfpatch`.
"""

from hfpatch.compat.engines import *  # noqa: F403
from hfpatch.compat.models import *  # noqa: F403
from hfpatch.compat.modules import *  # noqa: F403
from hfpatch.compat.scans import *  # noqa: F403
from hfpatch.compat.states import *  # noqa: F403
from hfpatch.compat.tensors import *  # noqa: F403
from hfpatch.compat.turns import *  # noqa: F403
