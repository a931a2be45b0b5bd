"""Ancestor masks on the host: bool [.., Q, Q] and packed uint32 [.., Q, ceil(Q/32)], and causal ones.

Row i sees column j when bit j % 32 of word j // 32 is set (little-endian), so that a mask of Q = 1025 nodes takes 33
words a row instead of 1025 bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def _as_array(name: str, x: Any, what: str) -> np.ndarray:
    """What NumPy makes of ``x``; a masked array loses its mask, and so is refused."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} is a MaskedArray; it must be {what}")
    try:
        return np.asarray(x)
    except ValueError:  # lists of different lengths
        raise TypeError(f"{name} is a {type(x).__qualname__} that makes no array; it must be {what}") from None


def pack_mask(mask: np.ndarray) -> np.ndarray:
    """Pack a bool mask into words.

    Parameters
    ----------
    mask : bool [.., Q, Q]
        ``mask[.., i, j]``: node i sees node j.

    Returns
    -------
    uint32 [.., Q, ceil(Q/32)]
        Bits past Q are 0.

    Raises
    ------
    TypeError
        ``mask`` is not bool.
    ValueError
        ``mask`` has no axis.
    """
    mask = _as_array("mask", mask, "bool")
    if mask.dtype != np.bool_:
        raise TypeError(f"mask has dtype {mask.dtype}; it must be bool")
    if mask.ndim == 0:
        raise ValueError("mask has shape []; it must be [.., Q]")
    num_words = -(-mask.shape[-1] // 32)
    padded = np.zeros((*mask.shape[:-1], 32 * num_words), np.bool_)
    padded[..., : mask.shape[-1]] = mask.view(np.uint8) & 1  # what kernels read of a bool
    octets = np.packbits(padded, axis=-1, bitorder="little")
    return octets.view("<u4").astype(np.uint32, copy=False)


def unpack_mask(words: np.ndarray, num_nodes: int) -> np.ndarray:
    """The inverse of `pack_mask`.

    Parameters
    ----------
    words : uint32 [.., Q, ceil(Q/32)]
    num_nodes : int
        Q, which the words alone do not tell.

    Returns
    -------
    bool [.., Q, Q]

    Raises
    ------
    TypeError
        ``words`` is not uint32.
    ValueError
        There are not ceil(Q/32) words a row.
    """
    words = _as_array("words", words, "uint32")
    if words.dtype != np.uint32:
        raise TypeError(f"words has dtype {words.dtype}; it must be uint32")
    if words.ndim == 0:
        raise ValueError("words has shape []; it must be [.., ceil(Q/32)]")
    if words.shape[-1] != -(-num_nodes // 32):
        raise ValueError(f"words has {words.shape[-1]} words a row; {num_nodes} nodes need {-(-num_nodes // 32)}")
    octets = np.ascontiguousarray(words, dtype="<u4").view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=num_nodes, bitorder="little").astype(np.bool_)


def mask_from_parents(parents: Any) -> np.ndarray:
    """Ancestor mask of a tree: node i sees itself and its ancestors.

    Parameters
    ----------
    parents : int [.., Q]
        Parent of each node, smaller than the node's own index; -1 for the root, which is node 0, and for padding,
        whose rows, and those of nodes below it, are all False.

    Returns
    -------
    bool [.., Q, Q]

    Raises
    ------
    TypeError
        ``parents`` is no array of integers.
    ValueError
        A parent is not smaller than its node, or below -1.
    """
    parents = _as_array("parents", parents, "an array of integers")
    if parents.dtype.kind not in "iu" or parents.ndim == 0:
        raise TypeError(f"parents has dtype {parents.dtype}, {parents.ndim} axes; it must be an array of integers")
    num_nodes = parents.shape[-1]
    if np.any(parents >= np.arange(num_nodes)) or np.any(parents < -1):
        raise ValueError("parents must hold -1 or the index of an earlier node")
    mask = np.zeros((*parents.shape, num_nodes), np.bool_)
    for i in range(num_nodes):
        parent = parents[..., i, None]
        of_parent = np.take_along_axis(mask, np.maximum(parent, 0)[..., None], axis=-2)[..., 0, :]
        mask[..., i, :] = of_parent & (parent >= 0)
        mask[..., i, i] = mask[..., i, :].any(axis=-1) | (i == 0)  # a child of padding is padding
    return mask


def causal_words(num_nodes: int) -> np.ndarray:
    """Packed mask of a chain: node i sees nodes 0..i. uint32 [Q, ceil(Q/32)]."""
    return pack_mask(np.tri(num_nodes, dtype=np.bool_))
