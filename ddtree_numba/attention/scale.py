"""The softmax scale of MLA models: 1/sqrt of the *unabsorbed* head dimension, times YaRN's correction squared.

It is never D**-0.5: absorption widens the dot product to kv_lora_rank + qk_rope_head_dim, but the scores stay those of
the heads that the model was trained with, qk_nope_head_dim + qk_rope_head_dim = 192 wide.

Source: YaRN (Peng et al., arXiv 2309.00071); DeepSeek-V3's model code, `softmax_scale` and `yarn_get_mscale`.
"""

from __future__ import annotations

import math
import sys
from numbers import Real

from ddtree_numba.device.arrays import require_integer, shown


def yarn_sm_scale(factor: float, qk_head_dim: int = 192, mscale_all_dim: float = 1.0) -> float:
    """Softmax scale of an MLA model whose context was extended by YaRN.

    Parameters
    ----------
    factor : float
        The model's rope_scaling factor; 1 or less means no extension.
    qk_head_dim : int
        qk_nope_head_dim + qk_rope_head_dim.
    mscale_all_dim : float
        The model's rope_scaling entry of that name.

    Returns
    -------
    float
        qk_head_dim**-0.5 * (0.1 * mscale_all_dim * ln(factor) + 1)**2

    Raises
    ------
    TypeError
        An argument is no number, or qk_head_dim no integer.
    ValueError
        A number is not finite, or qk_head_dim below 1.
    """
    for name, value in (("factor", factor), ("mscale_all_dim", mscale_all_dim)):
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} is {shown(value)}; it must be a number")
        if not abs(value) <= sys.float_info.max:  # NaN fails this too
            raise ValueError(f"{name} is {shown(value)}; it must be finite")
    factor, mscale_all_dim = float(factor), float(mscale_all_dim)  # in float64, whatever they came in
    qk_head_dim = require_integer("qk_head_dim", qk_head_dim)
    if qk_head_dim < 1:
        raise ValueError(f"qk_head_dim is {qk_head_dim}; it must be at least 1")
    mscale = 0.1 * mscale_all_dim * math.log(factor) + 1.0 if factor > 1 else 1.0
    return qk_head_dim**-0.5 * mscale * mscale


KIMI_K2_SM_SCALE: float = yarn_sm_scale(64.0)
"""Kimi K2.x: rope factor 64, 0.144680."""

DEEPSEEK_V3_SM_SCALE: float = yarn_sm_scale(40.0)
"""DeepSeek-V3 and R1: rope factor 40, 0.135234."""
