"""Philox4x32-10: random bits that are a function of a key and a counter, and of nothing else.

There is no state to keep: whoever knows a request's seed and a position gets that position's bits, in any order, on any
device, in any batch. Ten rounds of two multiplications each turn counter and key into four words; two words are used.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; Random123's philox4x32.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

ROUNDS = 10
MULTIPLIER_0 = np.uint64(0xD2511F53)
MULTIPLIER_1 = np.uint64(0xCD9E8D57)
WEYL_0 = np.uint64(0x9E3779B9)
WEYL_1 = np.uint64(0xBB67AE85)
WORD = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


@cuda.jit(device=True, inline="always")
def random_bits(key, counter):
    """64 random bits as uint64: words 0 (upper half) and 1 of philox4x32 of a 64-bit key, and a 64-bit counter.

    Lower halves are word 0 of key and counter, upper halves word 1; the counter's words 2 and 3 are 0.
    """
    k_0, k_1 = key & WORD, key >> HALF
    c_0, c_1, c_2, c_3 = counter & WORD, counter >> HALF, np.uint64(0), np.uint64(0)
    for _ in range(ROUNDS):
        product_0 = MULTIPLIER_0 * c_0
        product_1 = MULTIPLIER_1 * c_2
        c_0, c_1 = (product_1 >> HALF) ^ c_1 ^ k_0, product_1 & WORD
        c_2, c_3 = (product_0 >> HALF) ^ c_3 ^ k_1, product_0 & WORD
        k_0, k_1 = (k_0 + WEYL_0) & WORD, (k_1 + WEYL_1) & WORD
    return (c_0 << HALF) | c_1


def mirror_random_bits(key: int, counter: int) -> int:
    """The same in Python's integers."""
    word = int(WORD)
    k_0, k_1 = key & word, key >> 32 & word
    c_0, c_1, c_2, c_3 = counter & word, counter >> 32 & word, 0, 0
    for _ in range(ROUNDS):
        high_0, low_0 = divmod(int(MULTIPLIER_0) * c_0, 1 << 32)
        high_1, low_1 = divmod(int(MULTIPLIER_1) * c_2, 1 << 32)
        c_0, c_1, c_2, c_3 = high_1 ^ c_1 ^ k_0, low_1, high_0 ^ c_3 ^ k_1, low_0
        k_0, k_1 = (k_0 + int(WEYL_0)) & word, (k_1 + int(WEYL_1)) & word
    return c_0 << 32 | c_1
