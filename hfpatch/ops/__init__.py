"""The fused operations, usable on their own.

A public file has one operation, or two that share their loop: its plain-torch version, the op, its
fake and its autograd. Files whose name begins with an underscore have pieces of them.
"""

from hfpatch.ops.linear_cross_entropy import linear_cross_entropy, linear_log_prob
from hfpatch.ops.rms_norm import add_rms_norm, rms_norm
from hfpatch.ops.rope import rope
from hfpatch.ops.swiglu import swiglu

__all__ = [
    "add_rms_norm",
    "linear_cross_entropy",
    "linear_log_prob",
    "rms_norm",
    "rope",
    "swiglu",
]
