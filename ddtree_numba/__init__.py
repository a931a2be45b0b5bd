"""DDTree's GPU kernels for speculative decoding, in Python: tree-verify MLA attention as Numba CUDA kernels.

Each kernel stands beside its NumPy mirror and is checked against an independent float64 oracle. Importing this package
turns Numba's simulator on where there is no usable GPU, so import it before `numba.cuda`.
"""

from ddtree_numba.device import runtime as _runtime  # noqa: F401  # isort: skip  (chooses the backend: before numba.cuda)

from ddtree_numba import compare, kdtr
from ddtree_numba._version import __version__
from ddtree_numba.attention.scale import DEEPSEEK_V3_SM_SCALE, KIMI_K2_SM_SCALE, yarn_sm_scale
from ddtree_numba.attention.verify import verify_attention
from ddtree_numba.masks import mask_from_parents, pack_mask, unpack_mask

__all__ = [
    "DEEPSEEK_V3_SM_SCALE",
    "KIMI_K2_SM_SCALE",
    "__version__",
    "compare",
    "kdtr",
    "mask_from_parents",
    "pack_mask",
    "unpack_mask",
    "verify_attention",
    "yarn_sm_scale",
]
