"""Philox: known answers, the kernel function against its mirror and the oracle, and that all bits count."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda

from ddtree_numba.device import philox
from ddtree_numba.device.arrays import view
from ddtree_numba.device.launch import launch
from refs import accept

THREADS = 4
LARGEST = 2**64 - 1


@cuda.jit
def bits_kernel(keys, counters, bits):
    n = cuda.grid(1)
    if n < bits.shape[0]:
        bits[n] = philox.random_bits(keys[n], counters[n])


def bits_of(keys: list[int], counters: list[int]) -> list[int]:
    """By the function that kernels call."""
    given = [np.array(x, np.uint64) for x in (keys, counters)]
    bits = np.zeros(len(keys), np.uint64)
    arguments = tuple(view(name, x) for name, x in zip(("keys", "counters", "bits"), (*given, bits), strict=True))
    launch(bits_kernel, (-(-len(keys) // THREADS), 1, 1), THREADS, arguments, results=1, shared_bytes=0)
    return bits.tolist()


def numbers(seed: int, count: int) -> list[int]:
    """Random ones of all 64 bits, and the ends of the halves."""
    ends = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, 2**63, LARGEST - 1, LARGEST]
    drawn = np.random.default_rng(seed).integers(0, LARGEST, count - len(ends), dtype=np.uint64, endpoint=True)
    return [*ends, *drawn.tolist()]


def test_the_known_answer():
    # Random123, kat_vectors: philox4x32 10, counter and key 0.
    known = 0x6627E8D5_E169C58D
    assert philox.mirror_random_bits(0, 0) == known
    assert bits_of([0], [0]) == [known]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_oracle_has_all_known_answers(counter, key, words):
    # Two of them have counters of four words: the oracle takes these, and the comparison below carries them on.
    assert accept.philox4x32(counter, key) == words


def test_the_words_of_pi_as_key_and_counter():
    # Lower halves are word 0: the key a4093822 299f31d0 has a4093822 as its lower half.
    key, counter = 0x299F31D0_A4093822, 0x85A308D3_243F6A88
    words = accept.philox4x32((0x243F6A88, 0x85A308D3, 0, 0), (0xA4093822, 0x299F31D0))
    assert philox.mirror_random_bits(key, counter) == words[0] << 32 | words[1]
    assert bits_of([key], [counter]) == [words[0] << 32 | words[1]]
    assert words != accept.philox4x32((0x85A308D3, 0x243F6A88, 0, 0), (0x299F31D0, 0xA4093822))


def test_mirror_against_the_oracle():
    for key, counter in zip(numbers(0, 500), numbers(1, 500)[::-1], strict=True):
        assert philox.mirror_random_bits(key, counter) == accept.position_bits(key, counter)
        signed = (x - 2**64 if x >= 2**63 else x for x in (key, counter))
        assert accept.position_bits(*signed) == philox.mirror_random_bits(key, counter)


def test_kernel_function_against_the_mirror():
    keys, counters = numbers(2, 61), numbers(3, 61)[::-1]
    expected = [philox.mirror_random_bits(key, counter) for key, counter in zip(keys, counters, strict=True)]
    assert bits_of(keys, counters) == expected
    assert len(set(expected)) == len(expected)


def test_every_bit_of_key_and_counter_counts():
    flips = [(1 << n, 0) for n in range(64)] + [(0, 1 << n) for n in range(64)]
    found = [philox.mirror_random_bits(*flip) for flip in flips]
    assert len({*found, philox.mirror_random_bits(0, 0)}) == 129
    # About half of the bits change: 12 and 52 of 64 are five standard deviations of 64 coins away.
    changed = [(x ^ philox.mirror_random_bits(0, 0)).bit_count() for x in found]
    assert all(12 <= n <= 52 for n in changed)
    assert abs(np.mean(changed) - 32) < 5 * 4 / 128**0.5


def test_bits_are_balanced():
    bits = np.array([philox.mirror_random_bits(7, n) for n in range(4000)], np.uint64)
    ones = np.array([((bits >> np.uint64(n)) & np.uint64(1)).sum(dtype=np.int64) for n in range(64)])
    assert (np.abs(ones - 2000) < 5 * 4000**0.5 / 2).all()
