"""DecodeStep on a CUDA GPU: a step in one graph, its replays beside eager steps, attention in it, kinds, streams.

What holds on any backend is in test_step.py, which runs on the GPU too. Targets are PyTorch operations that never wait
for the GPU, so that they can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_trees_gpu import carrier, spoil, tensors_of
from test_verify_attention_gpu import SLEEP_CYCLES, TO_KIND, each_device_kind, kind_of, library, to_host, to_torch

import ddtree_numba as dd
from ddtree_numba.accept.accepted import shapes as accepted_shapes
from ddtree_numba.device.runtime import SIMULATOR
from ddtree_numba.step import DecodeStep
from ddtree_numba.tree.draft_tree import DTYPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(SIMULATOR, reason="kernels run in the simulator here; these tests need a CUDA GPU"),
]

BATCH, POSITIONS, BUDGET, CAPACITY = 4, 4, 12, 600
FIELDS = tuple(accepted_shapes(0, 0))
each_law = pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])


# A target whose logits are a function of the last two tokens and the position


class Markov:
    """Rows of its cache are (token, position); the token before the root is read from there."""

    vocabulary, states = 512, 4099

    def __init__(self, batch: int = BATCH, num_nodes: int = BUDGET + 1) -> None:
        torch = library("torch")
        generator = torch.Generator("cuda").manual_seed(0)
        self.table = 2 * torch.randn((self.states, self.vocabulary), device="cuda", generator=generator)
        self.cache = torch.zeros((batch, CAPACITY, 2), dtype=torch.int32, device="cuda")
        self.logits = torch.empty((batch, num_nodes, self.vocabulary), device="cuda")
        self.nodes = torch.arange(num_nodes, device="cuda")

    def state(self, before: Any, token: Any, position: Any) -> Any:
        return (31 * before + 17 * token + 7 * position) % self.states

    def token_before(self, lengths: Any) -> Any:
        """Of each root; 0 where there is none."""
        last = (lengths.long() - 1).clamp(min=0)[:, None, None].expand(-1, -1, 2)
        return self.cache.gather(1, last)[:, 0, 0].long() * (lengths > 0)

    def __call__(self, tree: dd.DraftTree, positions: Any, lengths: Any) -> Any:
        torch = library("torch")
        write_rows(self.cache, tree, lengths, torch.stack([tree.input_ids, positions], dim=-1))
        tokens = tree.input_ids.long()
        before = tokens.gather(1, tree.parents.long().clamp(min=0))
        before = torch.where(self.nodes == 0, self.token_before(lengths)[:, None], before)
        states = self.state(before, tokens, positions.long())
        torch.index_select(self.table, 0, states.flatten(), out=self.logits.flatten(0, 1))
        return self.logits

    def draft(self, roots: Any, lengths: Any, noise: Any) -> Any:
        """The target's own logits along its likeliest path, with noise [B, L, V]."""
        torch = library("torch")
        before, token, position = self.token_before(lengths), roots.long().clamp(min=0), lengths.long()
        drafts = []
        for _ in range(noise.shape[1]):
            logits = self.table[self.state(before, token, position)]
            drafts.append(logits)
            before, token, position = token, logits.argmax(-1), position + 1
        return torch.stack(drafts, dim=1) + noise

    def plain(self, prompt: list[int], count: int) -> list[int]:
        """A prompt and the likeliest tokens behind it, one at a time."""
        likeliest = self.table.argmax(-1).tolist()
        tokens = list(prompt)
        for _ in range(count):
            before = tokens[-2] if len(tokens) > 1 else 0
            tokens.append(likeliest[self.state(before, tokens[-1], len(tokens) - 1)])
        return tokens


def write_rows(cache: Any, tree: dd.DraftTree, lengths: Any, new: Any) -> None:
    """Rows of the nodes [B, Q, D] to behind the prefixes; nothing in idle slots."""
    torch = library("torch")
    rows = lengths.long()[:, None] + torch.arange(tree.tokens.shape[1], device="cuda")
    at = rows[..., None].expand(-1, -1, cache.shape[2])
    cache.scatter_(1, at, torch.where(tree.num_nodes[:, None, None] > 0, new, cache.gather(1, at)))


def step_of(target: Any, batch: int = BATCH, **options: Any) -> DecodeStep:
    sizes = {"batch": batch, "draft_positions": POSITIONS, "vocabulary": target.vocabulary, "tree_budget": BUDGET}
    return DecodeStep(target.logits, **sizes | options)


def capture(call: Callable[[], Any]) -> Any:
    """One graph of a call, which has run once on another stream."""
    torch = library("torch")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # a synchronization in here is an error
        call()
    return graph


class Requests:
    """What a step reads and writes, in memory that stays; ``law`` is for sampling."""

    def __init__(self, target: Any, sampled: bool = False, batch: int = BATCH) -> None:
        torch = library("torch")
        self.drafts = torch.zeros((batch, POSITIONS, target.vocabulary), device="cuda")
        self.roots = torch.ones(batch, dtype=torch.int32, device="cuda")
        self.lengths = torch.ones(batch, dtype=torch.int32, device="cuda")
        self.law: dict[str, Any] = {}
        if sampled:
            self.law = {
                "seeds": torch.arange(batch, device="cuda"),
                "temperature": torch.ones(batch, device="cuda"),
                "top_k": torch.zeros(batch, dtype=torch.int32, device="cuda"),
                "top_p": torch.ones(batch, device="cuda"),
            }

    def tensors(self) -> list[Any]:
        return [self.drafts, self.roots, self.lengths, *self.law.values()]

    def set_to(self, other: Requests) -> None:
        for x, new in zip(self.tensors(), other.tensors(), strict=True):
            x.copy_(new)

    def run(self, step: DecodeStep, target: Any) -> dd.Accepted:
        return step(self.drafts, self.roots, self.lengths, target, kv_caches=target.cache, **self.law)


def results_of(step: DecodeStep) -> list[Any]:
    path = [getattr(step.accepted, name) for name in FIELDS]
    return [*tensors_of(step.tree), *path, step.positions, step.live_lengths]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    torch = library("torch")
    for n, (x, exact) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(carrier(x), carrier(exact)), f"array {n}"


# A step in one graph


@each_law
def test_a_thousand_replays_are_eager_steps(sampled):
    torch = library("torch")
    target, other = Markov(), Markov()
    requests, clones = Requests(target, sampled), Requests(other, sampled)
    step, eager = step_of(target, sampled=sampled), step_of(other, sampled=sampled)
    graph = capture(lambda: requests.run(step, target))
    generator = torch.Generator("cuda").manual_seed(1)
    noise = torch.randn((16, *requests.drafts.shape), device="cuda", generator=generator)
    accepted, live = (torch.zeros(BATCH, dtype=torch.int64, device="cuda") for _ in range(2))
    for n in range(1000):
        if n % 40 == 0:  # requests come and go; 40 steps of 5 tokens fit the cache
            requests.lengths.random_(0, 300, generator=generator)
            requests.roots.random_(-200, target.vocabulary, generator=generator)
            target.cache.random_(0, target.vocabulary, generator=generator)
        if sampled:
            requests.law["seeds"].random_(generator=generator)
            for name, most in (("temperature", 2.0), ("top_p", 1.0)):
                requests.law[name].uniform_(0.01, most, generator=generator)
            requests.law["top_k"].random_(0, 50, generator=generator)
            requests.law["temperature"][n % BATCH] = 0
        requests.drafts.copy_(target.draft(requests.roots, requests.lengths, noise[n % 16]))
        clones.set_to(requests)
        other.cache.copy_(target.cache)
        live += requests.roots >= 0
        if n % 100 == 0:
            spoil(*results_of(step))
        graph.replay()
        clones.run(eager, other)
        assert_same(results_of(step), results_of(eager))
        assert_same([*requests.tensors(), target.cache], [*clones.tensors(), other.cache])
        accepted += step.accepted.num_accepted
    assert bool((accepted > (1.1 if sampled else 1.5) * live).all()), "hardly any drafted token was accepted"


def prompts_of(target: Markov, requests: Requests, prompts: list[list[int]]) -> None:
    """Fill the cache with all but the last token of each prompt."""
    torch = library("torch")
    for b, prompt in enumerate(prompts):
        rows = [[token, position] for position, token in enumerate(prompt[:-1])]
        target.cache[b, : len(rows)] = torch.tensor(rows, dtype=torch.int32, device="cuda").reshape(-1, 2)
        requests.roots[b] = prompt[-1]
        requests.lengths[b] = len(prompt) - 1


PROMPTS = [[5, 9, 300], [0], [511, 7], [1, 2, 3, 4, 5, 6]]


def replay(graph: Any, step: DecodeStep, target: Markov, requests: Requests, count: int) -> list[list[int]]:
    """The tokens that each request emits in some replays."""
    torch = library("torch")
    noise = torch.randn(requests.drafts.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    emitted = []
    for _ in range(count):
        requests.drafts.copy_(target.draft(requests.roots, requests.lengths, noise))
        graph.replay()
        emitted.append(step.accepted.tokens.clone())
    return [[token for row in torch.stack(emitted)[:, b].tolist() for token in row if token >= 0] for b in range(BATCH)]


def test_replays_decode_what_the_target_alone_decodes():
    target = Markov()
    step, requests = step_of(target), Requests(target)
    graph = capture(lambda: requests.run(step, target))
    prompts_of(target, requests, PROMPTS)
    emitted = replay(graph, step, target, requests, 60)
    lengths = requests.lengths.tolist()
    for b, prompt in enumerate(PROMPTS):
        plain = target.plain(prompt, len(emitted[b]))
        assert [*prompt, *emitted[b]] == plain
        assert len(emitted[b]) > 90, "few drafted tokens were accepted"
        assert lengths[b] == len(plain) - 1 and requests.roots[b].item() == plain[-1]
        rows = [[token, position] for position, token in enumerate(plain[:-1])]
        assert target.cache[b, : lengths[b]].tolist() == rows


@each_law
def test_a_graph_of_four_requests_runs_three(sampled):
    target = Markov()
    step, requests = step_of(target, sampled=sampled), Requests(target, sampled)
    graph = capture(lambda: requests.run(step, target))
    prompts_of(target, requests, PROMPTS)
    four = replay(graph, step, target, requests, 20)
    assert all(len(tokens) >= 20 for tokens in four)

    prompts_of(target, requests, PROMPTS)
    requests.roots[3] = -1
    requests.lengths[3] = 599  # of a request that has ended
    target.cache[3] = -77
    three = replay(graph, step, target, requests, 20)
    assert three[:3] == four[:3] and three[3] == []
    assert bool((target.cache[3] == -77).all())
    assert requests.lengths[3].item() == 599 and requests.roots[3].item() == -1
    assert step.live_lengths[3].item() == 0 and not step.tree.tree_mask[3].view(library("torch").int32).any()
    assert not step.tree.input_ids[3].any() and step.tree.num_nodes[3].item() == 0


def test_temperature_is_read_at_each_replay():
    target = Markov()
    step, requests = step_of(target, sampled=True), Requests(target, sampled=True)
    graph = capture(lambda: requests.run(step, target))
    found = {}
    for temperature in (0.0, 1.5, 0.0):
        requests.law["temperature"].fill_(temperature)
        prompts_of(target, requests, PROMPTS)
        emitted = replay(graph, step, target, requests, 10)
        assert found.setdefault(temperature, emitted) == emitted
    for b, prompt in enumerate(PROMPTS):
        plain = target.plain(prompt, len(found[0.0][b]))[len(prompt) :]
        assert found[0.0][b] == plain
        assert found[1.5][b] != plain[: len(found[1.5][b])]


def test_a_stop_token_ends_a_request_in_a_graph():
    target = Markov()
    requests = Requests(target)
    stop = to_torch(np.full((BATCH, 1), -1, np.int64))
    step = step_of(target, stop_tokens=stop)
    graph = capture(lambda: requests.run(step, target))
    plain = target.plain(PROMPTS[0], 40)[len(PROMPTS[0]) :]
    stop[0] = plain[7]  # not known when the graph was made
    prompts_of(target, requests, PROMPTS)
    emitted = replay(graph, step, target, requests, 20)
    assert emitted[0] == plain[: plain.index(plain[7]) + 1]
    assert requests.roots[0].item() == -1
    for b in (1, 2, 3):
        assert [*PROMPTS[b], *emitted[b]] == target.plain(PROMPTS[b], len(emitted[b])) and len(emitted[b]) >= 20


# With attention


class Attention:
    """One layer of attention over embeddings of tokens and positions; MLA's widths, few heads."""

    vocabulary, heads, sm_scale = 256, 4, 0.05

    def __init__(self, batch: int, num_nodes: int) -> None:
        torch = library("torch")
        generator = torch.Generator("cuda").manual_seed(0)

        def random(*shape: int) -> Any:
            return torch.randn(shape, device="cuda", generator=generator)

        self.of_queries, self.of_rows = random(self.vocabulary, self.heads * 576), random(self.vocabulary, 576)
        self.places_of_queries, self.places = random(CAPACITY, 576), random(CAPACITY, 576)
        self.head = random(self.heads * 512, self.vocabulary)
        self.cache = torch.zeros((batch, CAPACITY, 576), device="cuda")
        self.q = torch.empty((batch, num_nodes, self.heads, 576), device="cuda")
        self.out = torch.empty((batch, num_nodes, self.heads, 512), device="cuda")
        self.lse = torch.empty((batch, num_nodes, self.heads), device="cuda")
        self.logits = torch.empty((batch, num_nodes, self.vocabulary), device="cuda")
        nbytes = dd.workspace_bytes(batch, num_nodes, self.heads, CAPACITY - num_nodes)
        self.workspace = torch.empty(max(nbytes, 16), dtype=torch.uint8, device="cuda")

    def row(self, tokens: Any, positions: Any) -> Any:
        return self.of_rows[tokens.long()] + self.places[positions.long()]

    def __call__(self, tree: dd.DraftTree, positions: Any, lengths: Any) -> Any:
        torch = library("torch")
        self.q.copy_(self.of_queries[tree.input_ids.long()].view_as(self.q))
        self.q.add_(self.places_of_queries[positions.long()][:, :, None])
        write_rows(self.cache, tree, lengths, self.row(tree.input_ids, positions))
        dd.verify_attention(
            self.q, self.cache, lengths, tree.tree_mask, sm_scale=self.sm_scale, variant="flash", out=self.out,
            lse=self.lse, workspace=self.workspace,
        )  # fmt: skip
        torch.mm(self.out.flatten(2).flatten(0, 1), self.head, out=self.logits.flatten(0, 1))
        return self.logits

    def prefill(self, requests: Requests, prompts: list[list[int]]) -> None:
        torch = library("torch")
        self.cache.zero_()
        for b, prompt in enumerate(prompts):
            tokens = torch.tensor(prompt, device="cuda")
            self.cache[b, : len(prompt) - 1] = self.row(tokens, torch.arange(len(prompt), device="cuda"))[:-1]
            requests.roots[b] = prompt[-1]
            requests.lengths[b] = len(prompt) - 1


def test_attention_in_the_graph():
    """The tokens are those of the same model without a draft, and each replay is an eager step, bit for bit."""
    torch = library("torch")
    prompts = [[5, 9, 200], [0], [255, 7, 1, 1]]
    batch, count = len(prompts), 48

    alone = Attention(batch, 1)
    requests = Requests(alone, batch=batch)
    alone.prefill(requests, prompts)
    step = step_of(alone, batch, tree_budget=0)
    plain = [requests.run(step, alone).bonus_tokens.tolist() for _ in range(count + POSITIONS)]
    futures = [[tokens[b] for tokens in plain] for b in range(batch)]
    assert all(len(set(future)) > 10 for future in futures)

    target, other = Attention(batch, BUDGET + 1), Attention(batch, BUDGET + 1)
    requests, clones = Requests(target, batch=batch), Requests(other, batch=batch)
    step, eager = step_of(target, batch), step_of(other, batch)
    graph = capture(lambda: requests.run(step, target))
    target.prefill(requests, prompts)
    rng = np.random.default_rng(0)
    emitted: list[list[int]] = [[] for _ in prompts]
    steps = 0
    while min(map(len, emitted)) < count:
        drafts = rng.standard_normal(tuple(requests.drafts.shape)).astype(np.float32)
        for b, position in np.ndindex(batch, POSITIONS):
            known = futures[b][len(emitted[b]) + position : len(emitted[b]) + position + 1]
            drafts[b, position, known] += 4 * rng.random()  # sometimes the likeliest, sometimes not
        requests.drafts.copy_(to_torch(drafts))
        clones.set_to(requests)
        other.cache.copy_(target.cache)
        graph.replay()
        clones.run(eager, other)
        assert_same([*results_of(step), target.out, target.lse], [*results_of(eager), other.out, other.lse])
        assert_same([requests.roots, requests.lengths, target.cache], [clones.roots, clones.lengths, other.cache])
        for b, row in enumerate(step.accepted.tokens.tolist()):
            emitted[b] += [token for token in row if token >= 0]
            if len(emitted[b]) >= count:
                requests.roots[b] = -1
        steps += 1
    for b, tokens in enumerate(emitted):
        assert tokens == futures[b][: len(tokens)]
        rows = torch.tensor([*prompts[b], *tokens], device="cuda")[:-1]
        exact = target.row(rows, torch.arange(len(rows), device="cuda"))
        assert torch.equal(target.cache[b, : len(rows)], exact)
    assert steps < count, "no drafted token was accepted"


# Memory and streams


@each_law
def test_nothing_is_allocated(sampled):
    torch = library("torch")
    target = Markov()
    step, requests = step_of(target, sampled=sampled), Requests(target, sampled)
    target.logits.normal_()
    pages = torch.empty((40, 16, 576), dtype=torch.bfloat16, device="cuda").normal_()
    table = torch.randperm(40, device="cuda").reshape(BATCH, 10).int()

    def call() -> None:
        step(
            requests.drafts, requests.roots, requests.lengths, lambda *seen: target.logits, kv_caches=[pages],
            block_table=table, **requests.law,
        )  # fmt: skip

    def counts() -> tuple[int, int]:
        return torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]

    call()  # compiles
    torch.cuda.synchronize()
    before = counts()
    for _ in range(5):
        call()
    assert counts() == before
    graph = capture(call)
    torch.cuda.synchronize()
    before = counts()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert counts() == before


@each_law
def test_the_stream_is_used_and_not_waited_for(sampled):
    torch = library("torch")
    target, later = Markov(), torch.randn((BATCH, POSITIONS, Markov.vocabulary), device="cuda")
    step, requests = step_of(target, sampled=sampled), Requests(target, sampled)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        requests.run(step, target)  # compiles
        requests.roots.fill_(3)
        requests.lengths.fill_(1)
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        requests.drafts.copy_(later)
        requests.run(step, target)
        done = torch.cuda.Event()
        done.record(stream)
        assert not done.query(), "the step waited for the GPU"
    stream.synchronize()
    exact = dd.build_tree(*dd.topk_logprobs(later, BUDGET), torch.full_like(requests.roots, 3), BUDGET)
    assert_same(tensors_of(step.tree), tensors_of(exact))


@each_law
@each_device_kind
def test_every_kind(kind, sampled):
    rng = np.random.default_rng(0)
    sizes = {"batch": 3, "draft_positions": 3, "vocabulary": 100, "tree_budget": 7, "stop_tokens": 5}
    arrays = {
        "draft_logits": rng.standard_normal((3, 3, 100)).astype(np.float32),
        "root_tokens": np.array([1, -1, 99], np.int32),
        "cache_seqlens": np.array([4, 5, 0], np.int32),
        "kv_caches": rng.standard_normal((3, 20, 4)).astype(np.float32),
    }
    if sampled:
        arrays |= {"seeds": np.array([1, -2, 2**62]), "temperature": np.array([1, 0, 2], np.float32)}
    logits = rng.standard_normal((3, 8, 100)).astype(np.float32)
    found = []
    for to in (TO_KIND[kind], lambda x: x):
        given = {name: to(x.copy()) for name, x in arrays.items()}
        answer = to(logits)
        step = DecodeStep(given["kv_caches"], **sizes, sampled=sampled)
        step(target_forward=lambda *seen, answer=answer: answer, **given)
        assert len({kind_of(x) for x in (*results_of(step), *given.values())}) == 1
        tree, accepted = step.tree.to_host(), step.accepted.to_host()
        found.append(
            [getattr(tree, name) for name in DTYPES]
            + [getattr(accepted, name) for name in FIELDS]
            + [to_host(given[name]) for name in ("root_tokens", "cache_seqlens", "kv_caches")]
        )
    for x, exact in zip(*found, strict=True):
        assert x.tobytes() == exact.tobytes()


def test_arrays_in_different_places_are_refused():
    target = Markov()
    step, requests = step_of(target), Requests(target)
    before = [x.clone() for x in (requests.roots, requests.lengths, target.cache)]
    right = {
        "draft_logits": requests.drafts,
        "root_tokens": requests.roots,
        "cache_seqlens": requests.lengths,
        "kv_caches": target.cache,
    }
    for name, x in right.items():
        with pytest.raises((TypeError, ValueError), match="works on torch arrays|or all on one GPU"):
            step(target_forward=lambda *seen: target.logits, **right | {name: to_host(x)})
    for x, old in zip((requests.roots, requests.lengths, target.cache), before, strict=True):
        assert bool((x == old).all())


def test_a_gpu_that_is_not_the_current_one():
    torch = library("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, n, 50)).astype(np.float32) for n in (3, 6)]
    found = []
    for device in ("cuda:0", "cuda:1"):
        drafts, logits = (to_torch(x, device) for x in arrays)
        roots, lengths = (torch.ones(2, dtype=torch.int32, device=device) for _ in range(2))
        step = DecodeStep(drafts, batch=2, draft_positions=3, vocabulary=50, tree_budget=5)
        step(drafts, roots, lengths, lambda *seen, logits=logits: logits)
        assert torch.cuda.current_device() == 0
        found.append([carrier(x).cpu() for x in (*results_of(step), roots, lengths)])
    assert_same(*found)
