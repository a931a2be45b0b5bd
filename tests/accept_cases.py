"""Shared by the tests of accepting: trees with targets that follow them, calls of the mirrors, checks, chi-square."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from cases import BFLOAT16

import ddtree_numba as dd
from ddtree_numba.accept import accepted, argmax_tokens, greedy, sampled
from ddtree_numba.accept.accepted import NO_TOKEN
from ddtree_numba.device.arrays import view
from ddtree_numba.device.runtime import SIMULATOR
from ddtree_numba.tree.draft_tree import DTYPES
from refs import accept, trees

Arrays = dict[str, Any]

NAN, INF = math.nan, math.inf
FILLER = 77  # what results hold before a call
FIELDS = ("nodes", "num_accepted", "bonus_tokens", "flags", "tokens")
# A tree that fits the kernel's shared memory, and one that does not.
STAGED, UNSTAGED = 15 if SIMULATOR else 63, greedy.MAX_STAGED + 7


# Trees


def make_tree(*requests: tuple[list[int], list[int]], num_nodes: int = 0, max_depth: int | None = None) -> dd.DraftTree:
    """A batch of trees, each of parents and tokens, with room for ``num_nodes`` (default: those of the largest)."""
    parents, tokens = [parents for parents, _ in requests], [tokens for _, tokens in requests]
    num_nodes = num_nodes or max(map(len, parents))
    arrays = trees.assemble(parents, tokens, [[0.0] * len(p) for p in parents], num_nodes=num_nodes, max_depth=0)
    if max_depth is None:
        max_depth = int(arrays["depths"].max())
    return dd.DraftTree(**{name: arrays[name] for name in DTYPES}, max_depth=max_depth)


def changed(tree: dd.DraftTree, **arrays: Any) -> dd.DraftTree:
    """The tree with other arrays, or another bound on the depth."""
    given = {name: getattr(tree, name) for name in (*DTYPES, "max_depth")}
    return dd.DraftTree(**given | arrays)


def drafted_tree(
    rng: np.random.Generator,
    batch: int,
    tree_budget: int,
    *,
    vocabulary: int = 4,
    length: int = 6,
    candidates: int = 5,
    idle: bool = True,
) -> dd.DraftTree:
    """Trees that build_tree makes, of all sizes up to the budget; of more than two requests one may be idle.

    With few tokens siblings often have equal ones, and token 0 is among them.
    """
    shape = batch, length, candidates
    logprobs = -np.sort(rng.random(shape, np.float32) * np.float32(3), axis=2)
    for b in range(1, batch, 2):  # few positions, few candidates: small trees
        logprobs[b, int(rng.integers(length)) :] = -INF
        logprobs[b, :, 1 + int(rng.integers(min(candidates, 3))) :] = -INF
    ids = rng.integers(0, vocabulary, shape).astype(np.int32)
    roots = rng.integers(0, vocabulary, batch).astype(np.int32)
    tree = dd.build_tree(logprobs, ids, roots, tree_budget, variant="heap_numpy")
    if idle and batch > 2:
        tree.num_nodes[batch // 2] = 0
    return tree


def host_arrays(tree: dd.DraftTree) -> Arrays:
    """The tree as the oracle takes it."""
    host = tree.to_host()
    return {name: getattr(host, name) for name in DTYPES} | {"max_depth": tree.max_depth}


def following_targets(
    rng: np.random.Generator, tree: dd.DraftTree, *, vocabulary: int = 4, share: float = 0.85, dtype: Any = np.int32
) -> np.ndarray:
    """A token for each node: mostly that of one of its children, so that walks are long; else any."""
    host = tree.to_host()
    targets = rng.integers(0, vocabulary, host.tokens.shape)
    for b, count in enumerate(host.num_nodes.tolist()):
        for i in rng.permutation(np.arange(1, count)):
            if rng.random() < share:
                targets[b, host.parents[b, i]] = host.tokens[b, i]
    return targets.astype(dtype)


# The mirrors, with the arguments of the operators


def spoiled(batch: int, max_depth: int) -> dd.Accepted:
    """Results to write to, full of what no walk gives."""
    made = {name: np.full(shape, FILLER, np.int32) for name, shape in accepted.shapes(batch, max_depth).items()}
    return dd.Accepted(**made)


def stop_rows(stop_tokens: Any, batch: int) -> np.ndarray:
    """Stop tokens as the mirrors take them: [B, n]."""
    rows = np.atleast_1d(np.array([NO_TOKEN] if stop_tokens is None else stop_tokens, np.int64))
    return np.broadcast_to(rows, (batch, rows.shape[-1]))


def mirrored_greedy(tree: dd.DraftTree, targets: np.ndarray, stop_tokens: Any = None) -> dd.Accepted:
    batch = targets.shape[0]
    out = spoiled(batch, tree.max_depth)
    walked = tree.tokens, tree.first_child, tree.next_sibling, tree.num_nodes
    greedy.mirror(*walked, targets, stop_rows(stop_tokens, batch), *(getattr(out, name) for name in FIELDS))
    return out


def mirrored_sampled(
    tree: dd.DraftTree,
    probs: np.ndarray,
    *,
    seeds: Any = None,
    positions: Any = None,
    uniforms: Any = None,
    stop_tokens: Any = None,
) -> dd.Accepted:
    batch = probs.shape[0]
    out = spoiled(batch, tree.max_depth)
    walked = tree.tokens, tree.first_child, tree.next_sibling, tree.num_nodes
    if probs.dtype == BFLOAT16:
        probs = probs.view(np.uint16)
    draws = seeds, positions, uniforms
    sampled.mirror(*walked, probs, *draws, stop_rows(stop_tokens, batch), *(getattr(out, name) for name in FIELDS))
    return out


def mirrored_argmax(logits: np.ndarray) -> np.ndarray:
    """By way of the words that the kernel reads: of 8 bytes where rows can be read so."""
    x = view("logits", logits)
    tokens = np.full(logits.shape[:2], FILLER, np.int32)
    words, like, _ = argmax_tokens.arguments(x, view("out", tokens))
    argmax_tokens.mirror(words.as_numpy(), like.as_numpy(), tokens)
    return tokens


# Checks


def as_oracle_floats(x: np.ndarray) -> np.ndarray:
    """uint16 as the bfloat16 whose bits it has."""
    return x.view(BFLOAT16) if x.dtype == np.uint16 else x


def check_tokens(found: np.ndarray, wanted: np.ndarray, name: str = "tokens") -> None:
    """Raise AssertionError unless all are equal, and int32."""
    assert (found.dtype, found.shape) == (np.int32, wanted.shape), f"FAIL {name}: {found.dtype}{found.shape}"
    wrong = np.argwhere(found != wanted)
    if wrong.size:
        at = tuple(int(n) for n in wrong[0])
        raise AssertionError(f"FAIL {name}{list(at)}: {found[at]} for {wanted[at]}; {len(wrong)} differ")


def check_accepted(found: dd.Accepted, wanted: Arrays | dd.Accepted) -> None:
    """Raise AssertionError unless all results are those of the oracle, or of another call."""
    for name in FIELDS:
        exact = wanted[name] if isinstance(wanted, dict) else getattr(wanted, name)
        x = view(name, getattr(found, name)).to_host()
        check_tokens(x, np.asarray(exact), name)


def check_greedy(found: dd.Accepted, tree: dd.DraftTree, targets: np.ndarray, stop_tokens: Any = None) -> None:
    """Against the oracle."""
    check_accepted(found, accept.accept_greedy(host_arrays(tree), targets, stop_tokens))


def check_sampled(found: dd.Accepted, tree: dd.DraftTree, probs: np.ndarray, stop_tokens: Any = None, **draws) -> None:
    """Against the oracle."""
    exact = accept.accept_sampled(host_arrays(tree), as_oracle_floats(probs), stop_tokens=stop_tokens, **draws)
    check_accepted(found, exact)


def check_contract(found: dd.Accepted, tree: dd.DraftTree) -> None:
    """What holds of the results whatever is behind them: the links between nodes, tokens, bonus token and flags."""
    host = tree.to_host()
    for b, count in enumerate(found.num_accepted.tolist()):
        path, bonus, flags = found.nodes[b, :count].tolist(), int(found.bonus_tokens[b]), int(found.flags[b])
        assert (found.nodes[b, count:] == -1).all()
        assert 0 <= count <= tree.max_depth + 1
        if count == 0:
            assert (bonus, flags) == (-1, 0)
            assert (found.tokens[b] == -1).all()
            continue
        assert path[0] == 0
        assert host.parents[b, path].tolist() == [-1, *path[:-1]]
        emitted = [*host.tokens[b, path[1:]].tolist(), *([bonus] if bonus >= 0 else [])]
        assert found.tokens[b].tolist() == emitted + [-1] * (tree.max_depth + 1 - len(emitted))
        assert (bonus == -1) == bool(flags & dd.BAD_TARGET or (flags & dd.STOPPED and len(emitted) < count))


# Chi-square


def chi_square_survival(x: float, freedom: int) -> float:
    """Probability that a chi-square variable of so many degrees of freedom exceeds x.

    The upper regularized gamma function Q(freedom / 2, x / 2), by its series below a + 1 and by Lentz's continued
    fraction above.

    Source: Abramowitz and Stegun, 6.5.29, 6.5.31 and 26.4.19.
    """
    a, z = freedom / 2, x / 2
    if z <= 0:
        return 1.0
    front = math.exp(a * math.log(z) - z - math.lgamma(a))
    if z < a + 1:
        term = total = 1 / a
        n = a
        while term > total * 1e-17:
            n += 1
            term *= z / n
            total += term
        return 1 - front * total
    tiny = 1e-300
    b = z + 1 - a
    c, d = 1 / tiny, 1 / b
    fraction = d
    for n in range(1, 10_000):
        numerator = -n * (n - a)
        b += 2
        d = 1 / (numerator * d + b or tiny)
        c = b + numerator / c or tiny
        fraction *= d * c
        if abs(d * c - 1) < 1e-16:
            break
    return front * fraction


def chi_square_test(counts: Any, probabilities: Any, least: float = 20.0) -> float:
    """p value of counts against a law; outcomes of which fewer than ``least`` are expected are counted together."""
    counts, probabilities = np.asarray(counts, np.float64).ravel(), np.asarray(probabilities, np.float64).ravel()
    expected = counts.sum() * probabilities
    if (counts[expected == 0] > 0).any():
        return 0.0
    rare = expected < least
    seen, wanted = [*counts[~rare]], [*expected[~rare]]
    if expected[rare].sum() > 0:
        seen.append(counts[rare].sum())
        wanted.append(expected[rare].sum())
    difference = np.array(seen) - np.array(wanted)
    return chi_square_survival(float((difference**2 / np.array(wanted)).sum()), len(seen) - 1)


# Laws for the enumeration of draws

Law = Callable[[tuple[int, ...]], list[int]]
PARTS = 64  # a law's probabilities are whole numbers of these parts of 1, so that float64 and 44 bits hold them exactly


def random_law(seed: int, vocabulary: int, zeros: float = 0.3) -> Law:
    """A function of the tokens so far: the parts of 1 that each next token has."""

    def law(prefix: tuple[int, ...]) -> list[int]:
        rng = np.random.default_rng([seed, *prefix])
        weights = np.where(rng.random(vocabulary) < zeros, 0.0, rng.random(vocabulary) + 0.05)
        weights[int(rng.integers(vocabulary))] += 0.2
        parts = np.floor(weights / weights.sum() * PARTS).astype(int).tolist()
        parts[int(np.argmax(parts))] += PARTS - sum(parts)
        return parts

    return law


def rows_of_law(tree: dd.DraftTree, law: Law, vocabulary: int) -> np.ndarray:
    """float64 [1, Q, V]: the law behind each node of the first tree."""
    probs = np.zeros((1, tree.tokens.shape[1], vocabulary))
    paths: list[tuple[int, ...]] = []
    for i in range(int(tree.num_nodes[0])):
        parent = int(tree.parents[0, i])
        paths.append((*paths[parent], int(tree.tokens[0, i])) if parent >= 0 else ())
        probs[0, i] = np.array(law(paths[i])) / PARTS
    return probs
