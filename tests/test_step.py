"""DecodeStep: whatever is drafted, the tokens are those of the target alone, and the cache is that of its sequence.

Kernels run in the simulator, or on a GPU where there is one. The target is a table of random logits, one row for each
sequence of (token, position), which it reads from the rows of the cache and from the tree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numba import cuda
from test_verify_attention import big_endian, change, misaligned, read_only, value

import ddtree_numba as dd
from ddtree_numba import step as step_module
from ddtree_numba.accept.accepted import shapes as accepted_shapes
from ddtree_numba.device.runtime import SIMULATOR
from ddtree_numba.step import DecodeStep
from ddtree_numba.tree.draft_tree import DTYPES

VOCABULARY = 7
POSITIONS = 3
CAPACITY = 30
NAN = np.float32(np.nan)
FIELDS = tuple(accepted_shapes(0, 0))

Row = tuple[int, int]


@pytest.fixture
def quick_topk(monkeypatch):
    """topk_logprobs by its mirror, which takes the simulator a hundredth of the kernel's time."""
    if SIMULATOR:
        monkeypatch.setattr(
            step_module, "topk_logprobs", functools.partial(dd.topk_logprobs, variant="threshold_numpy")
        )


# The target


@functools.cache
def logits_after(sequence: tuple[Row, ...]) -> np.ndarray:
    """The target's logits behind tokens at positions."""
    rng = np.random.default_rng([n for row in sequence for n in row])
    return (2 * rng.standard_normal(VOCABULARY)).astype(np.float32)


def rows_of(tokens: list[int]) -> tuple[Row, ...]:
    return tuple((token, position) for position, token in enumerate(tokens))


@dataclass
class Target:
    """Stands for a model. Its first layer's rows are (token, position), its second layer's are made of these."""

    batch: int
    page_size: int | None = None
    capacity: int = CAPACITY
    caches: list[np.ndarray] = field(init=False)
    table: np.ndarray | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        places = (self.batch, self.capacity)
        if self.page_size is not None:
            pages = -(-self.capacity // self.page_size)
            order = np.random.default_rng(0).permutation(self.batch * pages + 2)
            self.table = order[: self.batch * pages].reshape(self.batch, pages).astype(np.int32)
            places = (order.size, self.page_size)
        self.caches = [np.full((*places, 2), -7, np.int32), np.full((*places, 1, 3), -7.0, np.float32)]

    def place(self, b: int, row: int) -> tuple[int, int]:
        if self.table is None:
            return b, row
        page, slot = divmod(row, self.caches[0].shape[1])
        return int(self.table[b, page]), slot

    def write(self, b: int, row: int, contents: Row) -> None:
        self.caches[0][self.place(b, row)] = contents
        self.caches[1][self.place(b, row)] = 100 * contents[0] + contents[1]

    def prefix(self, b: int, length: int) -> tuple[Row, ...]:
        """The first rows of a request, the same in both layers."""
        rows = [tuple(self.caches[0][self.place(b, row)].tolist()) for row in range(length)]
        for row, (token, position) in enumerate(rows):
            assert (self.caches[1][self.place(b, row)] == 100 * token + position).all()
        return tuple(rows)

    def prefill(self, b: int, tokens: list[int]) -> None:
        for row, contents in enumerate(rows_of(tokens)):
            self.write(b, row, contents)

    def __call__(self, tree: dd.DraftTree, positions: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """NaN behind what is no node of a tree."""
        logits = np.full((*tree.tokens.shape, VOCABULARY), NAN)
        for b, count in enumerate(tree.num_nodes.tolist()):
            seen: list[tuple[Row, ...]] = []
            for node in range(count):
                row = int(tree.tokens[b, node]), int(positions[b, node])
                self.write(b, int(lengths[b]) + node, row)
                before = seen[tree.parents[b, node]] if node else self.prefix(b, int(lengths[b]))
                seen.append((*before, row))
                logits[b, node] = logits_after(seen[node])
        return logits


def plain_greedy(prompts: list[list[int]], count: int) -> list[list[int]]:
    """The target alone, one token at a time."""
    tokens = [list(prompt) for prompt in prompts]
    for sequence in tokens:
        for _ in range(count):
            sequence.append(int(logits_after(rows_of(sequence)).argmax()))
    return tokens


def plain_sampled(prompts: list[list[int]], count: int, seeds: np.ndarray, **law: Any) -> list[list[int]]:
    """One token at a time, by accept_sampled on trees of a root alone."""
    tokens = [list(prompt) for prompt in prompts]
    batch = len(tokens)
    none = np.zeros((batch, 1, 1), np.float32), np.zeros((batch, 1, 1), np.int32)
    for _ in range(count):
        tree = dd.build_tree(*none, np.array([sequence[-1] for sequence in tokens], np.int32), 0)
        logits = np.array([[logits_after(rows_of(sequence))] for sequence in tokens])
        positions = np.array([len(sequence) - 1 for sequence in tokens], np.int32)
        found = dd.accept_sampled(tree, dd.target_probs(logits, **law), seeds=seeds, positions=positions)
        for sequence, token in zip(tokens, found.bonus_tokens.tolist(), strict=True):
            sequence.append(token)
    return tokens


# Drafters: logits [L, V] from the tokens that the target will choose

Drafter = Callable[[np.random.Generator, list[int]], np.ndarray]


def good(rng: np.random.Generator, future: list[int], weight: float = 9.0) -> np.ndarray:
    logits = rng.standard_normal((POSITIONS, VOCABULARY)).astype(np.float32)
    for position, token in enumerate(future[:POSITIONS]):
        logits[position, token] += weight
    return logits


def bad(rng: np.random.Generator, future: list[int]) -> np.ndarray:
    return good(rng, future, weight=-99.0)


def at_random(rng: np.random.Generator, future: list[int]) -> np.ndarray:
    return good(rng, future, weight=0.0)


DRAFTERS: dict[str, Drafter] = {f.__name__: f for f in (good, bad, at_random)}
PROMPTS = [[1, 5, 0], [0], [6, 6, 2, 3]]


def decode(step: DecodeStep, target: Target, plain: list[list[int]], count: int, **options: Any) -> dict[str, int]:
    """Decode until each request has ``count`` new tokens; the number of steps that each drafter took.

    After each step the tokens are a prefix of ``plain``, and the cache is that of all but the last of them.
    """
    rng = np.random.default_rng(1)
    tokens = [list(prompt) for prompt in PROMPTS]
    for b, prompt in enumerate(PROMPTS):
        target.prefill(b, prompt[:-1])
    roots = np.array([prompt[-1] for prompt in PROMPTS], np.int32)
    lengths = np.array([len(prompt) - 1 for prompt in PROMPTS], np.int32)
    steps = dict.fromkeys(DRAFTERS, 0)
    while (roots >= 0).any():
        going_on = np.flatnonzero(roots >= 0)
        futures = [plain[b][len(tokens[b]) :] for b in range(len(PROMPTS))]
        drafts = np.array([draft(rng, future) for draft, future in zip(DRAFTERS.values(), futures, strict=True)])
        accepted = step(drafts, roots, lengths, target, kv_caches=target.caches, block_table=target.table, **options)
        assert accepted is step.accepted and not accepted.flags.any()
        np.testing.assert_array_equal(step.positions, step.live_lengths[:, None] + step.tree.depths)
        for b, name in enumerate(DRAFTERS):
            emitted = [token for token in accepted.tokens[b].tolist() if token >= 0]
            assert len(emitted) == accepted.num_accepted[b] == (accepted.nodes[b] >= 0).sum()
            assert (len(emitted) > 0) == (b in going_on)
            tokens[b] += emitted
            assert tokens[b] == plain[b][: len(tokens[b])], name
            assert lengths[b] == len(tokens[b]) - 1
            assert target.prefix(b, int(lengths[b])) == rows_of(tokens[b][:-1]), name
            if b in going_on:
                assert roots[b] == tokens[b][-1]
                steps[name] += 1
            if len(tokens[b]) >= len(PROMPTS[b]) + count:
                roots[b] = -1
    return steps


# Decoding


def step_of(batch: int = len(PROMPTS), **options: Any) -> DecodeStep:
    sizes = {"batch": batch, "draft_positions": POSITIONS, "vocabulary": VOCABULARY, "tree_budget": 3}
    return DecodeStep(np.zeros(1), **sizes | options)


@pytest.mark.parametrize(("page_size", "options"), [(None, {}), (3, {"candidates": VOCABULARY})])
def test_greedy_tokens_are_those_of_the_target_alone(quick_topk, page_size, options):
    plain = plain_greedy(PROMPTS, 5 + POSITIONS)
    steps = decode(step_of(**options), Target(len(PROMPTS), page_size), plain, 5)
    assert steps["good"] == 2 and steps["bad"] == 5


@pytest.mark.parametrize("options", [{"tree_budget": 0}, {"tree_budget": 2, "candidates": 1}], ids=str)
def test_smaller_trees(quick_topk, options):
    step = step_of(**options)
    assert step.accepted.nodes.shape == (3, 1 + step.tree_budget)
    steps = decode(step, Target(len(PROMPTS)), plain_greedy(PROMPTS, 3 + POSITIONS), 3)
    assert steps["bad"] == 3 and steps["good"] == (3 if step.tree_budget == 0 else 1)


def test_sampled_tokens_are_those_of_sampling_from_the_target_alone(quick_topk):
    law = {
        "temperature": np.array([1.0, 0.7, 0.0], np.float32),
        "top_k": np.array([0, 4, 3], np.int32),
        "top_p": np.array([1.0, 0.9, 0.8], np.float32),
    }
    seeds = np.array([5, -1, 2**62])
    plain, greedy = plain_sampled(PROMPTS, 3 + POSITIONS, seeds, **law), plain_greedy(PROMPTS, 3 + POSITIONS)
    assert [x == y for x, y in zip(plain, greedy, strict=True)] == [False, False, True]
    steps = decode(step_of(sampled=True), Target(len(PROMPTS)), plain, 3, seeds=seeds, **law)
    assert steps["good"] == 1 and steps["bad"] == 3


@pytest.mark.parametrize("sampled", [False, True])
def test_a_step_is_the_chain_of_its_operators(request, sampled):
    if sampled:
        request.getfixturevalue("quick_topk")
    rng = np.random.default_rng(3)
    batch, budget = 2, 2
    drafts = rng.standard_normal((batch, 1, 5)).astype(np.float32)
    logits = rng.standard_normal((batch, budget + 1, 5)).astype(np.float32)
    law: dict[str, Any] = {}
    if sampled:
        law = {"temperature": np.array([0.5, 2.0], np.float32), "top_k": 3, "top_p": 0.9}
    seeds = np.array([1, 2]) if sampled else None
    roots, lengths = np.array([3, 0], np.int32), np.array([2, 4], np.int32)
    cache = rng.standard_normal((batch, 12, 3)).astype(np.float32)

    tree = dd.build_tree(*step_module.topk_logprobs(drafts, 2), roots, budget)
    if sampled:
        accepted = dd.accept_sampled(
            tree, dd.target_probs(logits, **law), seeds=seeds, positions=lengths, stop_tokens=4
        )
    else:
        accepted = dd.accept_greedy(tree, dd.argmax_tokens(logits), stop_tokens=4)
    moved, longer = cache.copy(), lengths.copy()
    dd.compact_kv(moved, longer, accepted)
    going_on = accepted.flags == 0

    step = DecodeStep(
        cache, batch=batch, draft_positions=1, vocabulary=5, tree_budget=budget, sampled=sampled, stop_tokens=[4]
    )
    found = step(drafts, roots, lengths, lambda *seen: logits, kv_caches=cache, seeds=seeds, **law)
    for name in DTYPES:
        np.testing.assert_array_equal(getattr(step.tree, name), getattr(tree, name), name)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(found, name), getattr(accepted, name), name)
    assert cache.tobytes() == moved.tobytes()
    np.testing.assert_array_equal(lengths, longer)
    np.testing.assert_array_equal(roots, np.where(going_on, accepted.bonus_tokens, -1))


def test_numba_arrays():
    rng = np.random.default_rng(4)
    drafts, logits = (rng.standard_normal((2, n, VOCABULARY)).astype(np.float32) for n in (1, 4))
    cache = rng.standard_normal((2, 12, 4)).astype(np.float32)
    roots, lengths = np.array([3, -1], np.int32), np.array([2, 4], np.int32)
    on_device = [cuda.to_device(x) for x in (drafts, roots, lengths, cache, logits)]
    expected = step_of(2, draft_positions=1)(drafts, roots, lengths, lambda *seen: logits, kv_caches=cache)

    step = DecodeStep(on_device[0], batch=2, draft_positions=1, vocabulary=VOCABULARY, tree_budget=3)
    found = step(*on_device[:3], lambda *seen: on_device[4], kv_caches=[on_device[3]])
    kind = type(on_device[0])
    assert {type(getattr(found, name)) for name in FIELDS} == {kind} == {type(getattr(step.tree, n)) for n in DTYPES}
    assert type(step.positions) is type(step.live_lengths) is kind
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(found, name).copy_to_host(), getattr(expected, name), name)
    for x, exact in zip(on_device[1:4], (roots, lengths, cache), strict=True):
        np.testing.assert_array_equal(x.copy_to_host(), exact)
    with pytest.raises(TypeError, match="cache_seqlens is a numpy array; this step works on numba arrays"):
        step(*on_device[:2], lengths, lambda *seen: on_device[4])
    with pytest.raises(TypeError, match="target_forward's logits is a numpy array; this step works on numba arrays"):
        step(*on_device[:3], lambda *seen: logits)


def six_always(*seen: Any) -> np.ndarray:
    logits = np.zeros((2, 4, VOCABULARY), np.float32)
    logits[..., 6] = 1
    return logits


def test_without_caches_nothing_is_moved_and_lengths_grow(quick_topk):
    roots, lengths = np.array([1, 2], np.int32), np.array([0, 700], np.int32)
    drafts = np.zeros((2, POSITIONS, VOCABULARY), np.float32)
    drafts[..., 6] = 9
    accepted = step_of(2)(drafts, roots, lengths, six_always)
    assert accepted.num_accepted.tolist() == [4, 4] and roots.tolist() == [6, 6]
    assert lengths.tolist() == [4, 704]


def test_a_request_whose_rows_have_no_room_ends(quick_topk):
    roots, lengths = np.array([1, 2], np.int32), np.array([8, 9], np.int32)
    drafts = np.zeros((2, POSITIONS, VOCABULARY), np.float32)
    drafts[..., 6] = 9
    cache = np.random.default_rng(0).standard_normal((2, 12, 3))
    before = cache.copy()
    step_of(2)(drafts, roots, lengths, six_always, kv_caches=cache)
    assert lengths.tolist() == [12, 9] and roots.tolist() == [6, -1]
    assert cache.tobytes() == before.tobytes()  # the path is a chain: all rows stand where they should


# Slots without a request


@pytest.mark.parametrize("sampled", [False, True])
def test_idle_slots_are_inert(quick_topk, sampled):
    target = Target(3)
    target.prefill(1, [4, 2])
    roots, lengths = np.array([-1, 3, -(2**31)], np.int32), np.array([7, 2, -5], np.int32)
    before = [cache.copy() for cache in target.caches]
    drafts = np.random.default_rng(0).standard_normal((3, POSITIONS, VOCABULARY)).astype(np.float32)
    drafts[0] = NAN
    step = step_of(3, sampled=sampled)
    seen: list[dd.DraftTree] = []

    def forward(tree: dd.DraftTree, positions: np.ndarray, live_lengths: np.ndarray) -> np.ndarray:
        seen.append(tree.to_host())
        assert live_lengths.tolist() == [0, 2, 0] and not positions[[0, 2]].any()
        return target(tree, positions, live_lengths)

    law = {"seeds": np.arange(3), "temperature": np.array([NAN, 1.0, -1.0], np.float32)} if sampled else {}
    accepted = step(drafts, roots, lengths, forward, kv_caches=target.caches, **law)
    tree = seen[0]
    for idle in (0, 2):
        assert tree.num_nodes[idle] == 0
        for name in ("tokens", "parents", "first_child", "next_sibling"):
            assert (getattr(tree, name)[idle] == -1).all(), name
        for name in ("depths", "input_ids", "tree_mask"):
            assert not getattr(tree, name)[idle].any(), name
        assert np.isneginf(tree.scores[idle]).all()
        assert accepted.num_accepted[idle] == accepted.flags[idle] == 0 and accepted.bonus_tokens[idle] == -1
        assert (accepted.nodes[idle] == -1).all() and (accepted.tokens[idle] == -1).all()
        for cache, old in zip(target.caches, before, strict=True):
            assert cache[idle].tobytes() == old[idle].tobytes()
    assert tree.num_nodes[1] == 4 and accepted.num_accepted[1] >= 1
    assert roots.tolist() == [-1, accepted.bonus_tokens[1], -(2**31)]
    assert lengths.tolist() == [7, 2 + accepted.num_accepted[1], -5]


def test_an_idle_slot_changes_nothing_for_the_others(quick_topk):
    rng = np.random.default_rng(5)
    drafts, logits = (rng.standard_normal((2, n, VOCABULARY)).astype(np.float32) for n in (POSITIONS, 4))
    step, found = step_of(2), []
    for second in (2, -1):
        roots, lengths = np.array([1, second], np.int32), np.array([3, 3], np.int32)
        accepted = step(drafts, roots, lengths, lambda *seen: logits).to_host()
        found.append([getattr(accepted, name)[0].tolist() for name in FIELDS] + [roots[0], lengths[0]])
    assert found[0] == found[1]


@pytest.mark.parametrize("page_size", [None, 3])
def test_no_requests(page_size):
    step = step_of(0)
    none = np.zeros(0, np.int32)
    target = Target(0, page_size)
    drafts = np.zeros((0, POSITIONS, VOCABULARY), np.float32)
    for caches in ((), target.caches):
        table = target.table if len(caches) else None
        accepted = step(drafts, none, none.copy(), target, kv_caches=caches, block_table=table)
        assert accepted.nodes.shape == (0, 1 + POSITIONS) and accepted.num_accepted.shape == (0,)


# Where requests end


@pytest.mark.parametrize(("drafter", "as_array"), [(good, False), (bad, True)])
def test_a_stop_token_ends_its_request(quick_topk, drafter, as_array):
    """Once as an accepted node, once as the bonus token; the other request goes on."""
    rng = np.random.default_rng(0)
    plain = plain_greedy(PROMPTS[:1], 6)[0]
    stop = plain[4]  # the second new token
    emitted = plain[3 : plain.index(stop, 3) + 1]
    stop_tokens = np.array([[stop, -1], [VOCABULARY, VOCABULARY]]) if as_array else stop
    other = [next(token for token in range(VOCABULARY) if token != stop)] * 6
    step, target = step_of(2, stop_tokens=stop_tokens), Target(2)
    target.prefill(0, PROMPTS[0][:-1])
    roots, lengths = np.array([PROMPTS[0][-1], 1], np.int32), np.array([2, 0], np.int32)
    found: list[int] = []

    def forward(*seen: Any) -> np.ndarray:
        logits = target(*seen)
        logits[1] = -1
        logits[1, :, other[0]] = 1
        return logits

    for n in range(10):
        drafts = np.array([drafter(rng, plain[3 + len(found) :]), good(rng, other, weight=99.0)])
        accepted = step(drafts, roots, lengths, forward, kv_caches=target.caches)
        found += [token for token in accepted.tokens[0].tolist() if token >= 0]
        assert roots[1] == other[0] and lengths[1] == 4 * (n + 1)
        if roots[0] < 0:
            break
        assert accepted.flags[0] == 0
    assert found == emitted and roots[0] == -1
    assert accepted.flags.tolist() == [dd.STOPPED, 0]
    as_a_node = drafter is good
    assert accepted.bonus_tokens[0] == (-1 if as_a_node else stop)
    # The prefix holds what was emitted, but a stop token that was the bonus.
    rows = rows_of([*PROMPTS[0], *emitted])
    assert target.prefix(0, int(lengths[0])) == rows[: len(rows) - (not as_a_node)]
    before, length = target.caches[0][0].copy(), lengths[0]
    accepted = step(drafts, roots, lengths, forward, kv_caches=target.caches)
    assert accepted.num_accepted[0] == 0 and lengths[0] == length and roots[0] == -1
    np.testing.assert_array_equal(target.caches[0][0], before)


def test_a_request_ends_where_the_target_has_no_token(quick_topk):
    target = Target(2)
    roots, lengths = np.array([1, 2], np.int32), np.zeros(2, np.int32)

    def forward(*seen: Any) -> np.ndarray:
        logits = target(*seen)
        logits[0, 0, 3] = NAN
        return logits

    drafts = np.zeros((2, POSITIONS, VOCABULARY), np.float32)
    accepted = step_of(2)(drafts, roots, lengths, forward, kv_caches=target.caches)
    assert accepted.flags.tolist() == [dd.BAD_TARGET, 0]
    assert roots[0] == -1 and roots[1] >= 0
    assert lengths[0] == 1, "the root is part of the prefix"
    assert target.prefix(0, 1) == rows_of([1])


# Wrong arguments: one exception that names the argument; nothing has run, nothing is written


def right_arguments() -> dict[str, Any]:
    return {
        "draft_logits": np.zeros((2, POSITIONS, VOCABULARY), np.float32),
        "root_tokens": np.array([1, 2], np.int32),
        "cache_seqlens": np.array([3, 4], np.int32),
        "kv_caches": [np.ones((2, 12, 4), np.float32)],
        "block_table": None,
    }


def right_law() -> dict[str, Any]:
    return {"seeds": np.array([1, 2]), "temperature": np.ones(2, np.float32)}


CONSTRUCTOR_ERRORS: list[tuple[str, type[Exception], dict[str, Any]]] = [
    *[
        (rf"{name} is {size}; it must be at least {least}", ValueError, {name: size})
        for name, size, least in (
            ("batch", -1, 0),
            ("draft_positions", 0, 1),
            ("vocabulary", 0, 1),
            ("tree_budget", -1, 0),
        )
    ],
    *[
        (rf"{name} is {size!r}; it must be an integer", TypeError, {name: size})
        for name in ("batch", "draft_positions", "vocabulary", "tree_budget", "candidates")
        for size in (2.0, True)
    ],
    ("candidates is 0; it must be between 1 and 7", ValueError, {"candidates": 0}),
    ("candidates is 8; it must be between 1 and 7", ValueError, {"candidates": 8}),
    ("candidates is 1025; it must be between 1 and 1024", ValueError, {"candidates": 1025, "vocabulary": 2000}),
    ("like is a builtins.list", TypeError, {"like": [0.0]}),
    ("tree_budget is 4095; it must be .*4094", ValueError, {"tree_budget": 4095}),
    ("vocabulary is 524289; .* at most 524288", ValueError, {"vocabulary": 2**19 + 1, "sampled": True, "batch": 0}),
    ("vocabulary is 2147483648", ValueError, {"vocabulary": 2**31, "batch": 0}),
]


@pytest.mark.parametrize(
    ("message", "exception", "options"), CONSTRUCTOR_ERRORS, ids=[e[0] for e in CONSTRUCTOR_ERRORS]
)
def test_wrong_sizes(message, exception, options):
    options = dict(options)
    like = options.pop("like", np.zeros(1))
    sizes = {"batch": 2, "draft_positions": POSITIONS, "vocabulary": VOCABULARY, "tree_budget": 3}
    with pytest.raises(exception, match=message):
        DecodeStep(like, **sizes | options)


def test_largest_sizes():
    step = DecodeStep(np.zeros(1), batch=0, draft_positions=1, vocabulary=2000, tree_budget=4094)
    assert step.tree.tokens.shape == (0, 4095)
    assert DecodeStep(np.zeros(1), batch=0, draft_positions=1, vocabulary=2**19, tree_budget=0, sampled=True).sampled


ERRORS: list[tuple[str, str, type[Exception], Any]] = [
    ("draft is None", "draft_logits is a builtins.NoneType", TypeError, value("draft_logits", None)),
    ("draft of other positions", r"draft_logits has shape \[2, 2, 7\]; it must be .* = \[2, 3, 7\]", ValueError,
     change("draft_logits", lambda x: x[:, :2])),
    ("draft is float64", "logits has dtype float64", TypeError, change("draft_logits", lambda x: x.astype(np.float64))),
    ("roots are None", "root_tokens is a builtins.NoneType", TypeError, value("root_tokens", None)),
    ("roots are int64", "root_tokens has dtype int64; it must be int32", TypeError,
     change("root_tokens", lambda x: x.astype(np.int64))),
    ("a root too few", r"root_tokens has shape \[1\]", ValueError, change("root_tokens", lambda x: x[:1])),
    ("roots are read-only", "root_tokens is read-only", ValueError, change("root_tokens", read_only)),
    ("roots are misaligned", "root_tokens .* is not aligned", ValueError, change("root_tokens", misaligned)),
    ("lengths are int64", "cache_seqlens has dtype int64; it must be int32", TypeError,
     change("cache_seqlens", lambda x: x.astype(np.int64))),
    ("lengths have two axes", r"cache_seqlens has shape \[2, 1\]", ValueError,
     change("cache_seqlens", lambda x: x[:, None])),
    ("lengths are read-only", "cache_seqlens is read-only", ValueError, change("cache_seqlens", read_only)),
    ("lengths are big-endian", "cache_seqlens has dtype >i4", TypeError, change("cache_seqlens", big_endian)),
    ("roots are the lengths", "overlaps", ValueError, lambda a: {"root_tokens": a["cache_seqlens"]}),
    ("seeds for a greedy step", "are for steps made with sampled=True", ValueError, value("seeds", np.arange(2))),
    ("top_p for a greedy step", "are for steps made with sampled=True", ValueError, value("top_p", 0.5)),
    ("cache of another batch", r"kv_caches has shape \[1, 12, 4\]", ValueError,
     change("kv_caches", lambda x: [x[0][:1]])),
    ("cache is read-only", "kv_caches is read-only", ValueError, change("kv_caches", lambda x: [read_only(x[0])])),
    ("one cache twice", "the same cache twice", ValueError, change("kv_caches", lambda x: x * 2)),
    ("cache is None", "kv_caches is a builtins.NoneType", TypeError, value("kv_caches", None)),
    ("table is int64", "block_table has dtype int64", TypeError, value("block_table", np.zeros((2, 3), np.int64))),
    ("table of one request", r"block_table has shape \[1, 3\]", ValueError,
     value("block_table", np.zeros((1, 3), np.int32))),
    ("cache holds the lengths", r"kv_caches overlaps cache_seqlens|cache_seqlens overlaps kv_caches", ValueError,
     lambda a: {"kv_caches": [cache := np.zeros((2, 12, 4), np.int32)], "cache_seqlens": cache[:, 0, 0]}),
    ("cache holds the roots", r"kv_caches overlaps root_tokens|root_tokens overlaps kv_caches", ValueError,
     lambda a: {"kv_caches": [cache := np.zeros((2, 12, 4), np.int32)], "root_tokens": cache[:, 0, 0]}),
]  # fmt: skip
SAMPLED_ERRORS: list[tuple[str, str, type[Exception], Any]] = [
    ("no seeds", "needs seeds and temperature", ValueError, value("seeds", None)),
    ("no temperature", "needs seeds and temperature", ValueError, value("temperature", None)),
    ("seeds are int32", "seeds has dtype int32", TypeError, change("seeds", lambda x: x.astype(np.int32))),
    ("seeds of one request", r"seeds has shape \[1\]", ValueError, change("seeds", lambda x: x[:1])),
    ("temperature is negative", "temperature is -1.0", ValueError, value("temperature", -1.0)),
    ("temperature is float64", "temperature has dtype float64", TypeError, value("temperature", np.ones(2))),
    ("top_k is a float", "top_k is 2.5", TypeError, value("top_k", 2.5)),
    ("top_p is 0", "top_p is 0", ValueError, value("top_p", 0)),
]


@pytest.mark.parametrize(
    ("sampled", "message", "exception", "changes"),
    [*((False, *e[1:]) for e in ERRORS), *((True, *e[1:]) for e in SAMPLED_ERRORS)],
    ids=[*(e[0] for e in ERRORS), *(f"sampled: {e[0]}" for e in SAMPLED_ERRORS)],
)
def test_wrong_arguments(quick_topk, sampled, message, exception, changes):
    step = step_of(2, sampled=sampled)
    right = right_arguments() | (right_law() if sampled else {})
    before = [right[name].tobytes() for name in ("root_tokens", "cache_seqlens")] + [right["kv_caches"][0].tobytes()]

    def forward(*seen: Any) -> Any:
        pytest.fail("the target was asked")

    with pytest.raises(exception, match=message) as caught:
        step(target_forward=forward, **right | changes(right))
    assert "\n" not in str(caught.value)
    after = [right[name].tobytes() for name in ("root_tokens", "cache_seqlens")] + [right["kv_caches"][0].tobytes()]
    assert before == after, "something was written"


def test_a_step_refuses_its_own_results_as_its_state(quick_topk):
    step = step_of(2)
    right = right_arguments()
    for name, mine in (("root_tokens", step.accepted.bonus_tokens), ("cache_seqlens", step.live_lengths)):
        mine[:] = right[name]
        with pytest.raises(ValueError, match=f"{name} overlaps"):
            step(target_forward=lambda *seen: np.zeros((2, 4, VOCABULARY), np.float32), **right | {name: mine})


@pytest.mark.parametrize("stop_tokens", [-1, [3, 2**31], np.array([[1], [2], [3]])], ids=str)
def test_stop_tokens_that_are_none_are_refused(quick_topk, stop_tokens):
    def forward(*seen: Any) -> Any:
        pytest.fail("the target was asked")

    with pytest.raises(ValueError, match="stop"):
        step_of(2, stop_tokens=stop_tokens)(target_forward=forward, **right_arguments())


@pytest.mark.parametrize(
    ("make", "exception", "message"),
    [
        (lambda: None, TypeError, "target_forward's logits is a builtins.NoneType"),
        (
            lambda: np.zeros((2, 5, VOCABULARY), np.float32),
            ValueError,
            r"target_forward's logits has shape \[2, 5, 7\]",
        ),
        (lambda: np.zeros((2, 4, VOCABULARY)), TypeError, "logits has dtype float64"),
    ],
)
def test_wrong_logits_of_the_target(quick_topk, make, exception, message):
    right = right_arguments()
    with pytest.raises(exception, match=message):
        step_of(2)(target_forward=lambda *seen: make(), **right)
    for name, x in right_arguments().items():
        np.testing.assert_array_equal(right[name], x, name)


def test_torch_tensors_on_the_cpu_are_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="like is a PyTorch tensor on cpu"):
        DecodeStep(torch.zeros(1), batch=1, draft_positions=1, vocabulary=2, tree_budget=1)
