"""Accepting on a CUDA GPU: every kind of array, the caller's stream, graphs, full sizes, ten million draws.

What holds on any backend is in test_argmax_tokens.py, test_accept_greedy.py, test_accept_sampled.py,
test_verify_tree_greedy.py and test_philox.py, which run on the GPU too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from accept_cases import (
    FIELDS,
    NAN,
    UNSTAGED,
    changed,
    check_accepted,
    check_contract,
    check_tokens,
    chi_square_test,
    drafted_tree,
    following_targets,
    make_tree,
    mirrored_argmax,
    mirrored_greedy,
    mirrored_sampled,
)
from numba import cuda
from test_accept_greedy import garbage_targets, garbage_tree
from test_accept_sampled import favourites, random_probs
from test_trees_gpu import carrier, run_beside_another_stream, spoil
from test_verify_attention_gpu import (
    SLEEP_CYCLES,
    TO_KIND,
    each_device_kind,
    each_kind,
    kind_of,
    library,
    to_host,
    to_torch,
)
from test_verify_tree_greedy import READ, engine_arrays
from test_verify_tree_greedy import spoiled as spoiled_engine

import ddtree_numba as dd
from ddtree_numba.accept import sglang
from ddtree_numba.device.runtime import SIMULATOR
from ddtree_numba.tree.draft_tree import DTYPES
from refs import accept

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(SIMULATOR, reason="kernels run in the simulator here; these tests need a CUDA GPU"),
]

VOCABULARY = 163_840
RESULTS = ("predicts", "accept_index", "accept_token_num")


def tree_on(tree: dd.DraftTree, kind: str) -> dd.DraftTree:
    return changed(tree, **{name: TO_KIND[kind](getattr(tree, name)) for name in DTYPES})


def problem_of(seed: int, batch: int, tree_budget: int, vocabulary: int, dtype: str = "float32") -> dict[str, Any]:
    """A tree, targets that follow it, laws that favour it, and randomness; on the host."""
    rng = np.random.default_rng(seed)
    tree = drafted_tree(rng, batch, tree_budget, vocabulary=vocabulary)
    shape = batch, tree_budget + 1, vocabulary
    return {
        "tree": tree,
        "targets": following_targets(rng, tree, vocabulary=vocabulary),
        "probs": random_probs(rng, *shape, dtype=dtype, favoured=favourites(rng, tree, vocabulary)),
        "seeds": rng.integers(-(2**63), 2**63 - 1, batch),
        "positions": rng.integers(0, 10**6, batch).astype(np.int32),
        "uniforms": rng.random(shape[:2], np.float32),
        "stop_tokens": rng.integers(-1, vocabulary, (batch, 2)),
    }


def tensors_of(found: dd.Accepted) -> list[Any]:
    return [getattr(found, name) for name in FIELDS]


def random_logits(*shape: int, dtype: str = "float32", seed: int = 0) -> Any:
    torch = library("torch")
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * 3).to(getattr(torch, dtype))


def lowest_of_largest(logits: Any) -> Any:
    """int32 [B, Q] by PyTorch, a request at a time: its own argmax may take any of equals."""
    torch = library("torch")
    ids = torch.arange(logits.shape[2], device="cuda")
    found = []
    for x in logits:
        largest = x.amax(dim=-1, keepdim=True)  # NaN where there is one
        lowest = torch.where(x == largest, ids, logits.shape[2]).amin(dim=-1)
        found.append(torch.where(largest[:, 0].isnan(), -1, lowest))
    return torch.stack(found).int()


# Every kind


@each_kind
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_argmax_of_every_kind(dtype, kind):
    logits = np.random.default_rng(0).standard_normal((3, 5, 1000)).astype(np.float32)
    logits[1, 2, 700] = NAN
    logits[2, 3, [4, 900]] = 50
    x = TO_KIND[kind](to_host(to_torch(logits).to(getattr(library("torch"), dtype))))
    tokens = dd.argmax_tokens(x)
    assert kind_of(tokens) == kind
    exact = lowest_of_largest(to_torch(logits).to(getattr(library("torch"), dtype)))
    check_tokens(to_host(tokens), to_host(exact))
    assert to_host(tokens)[[1, 2], [2, 3]].tolist() == [-1, 4]


@each_kind
def test_walks_of_every_kind(kind):
    host = problem_of(1, 9, 40, 12)
    given = {name: TO_KIND[kind](x) for name, x in host.items() if name != "tree"}
    tree = tree_on(host["tree"], kind)
    greedy = dd.accept_greedy(tree, given["targets"], stop_tokens=given["stop_tokens"], validate=True)
    by_seed = dd.accept_sampled(
        tree, given["probs"], seeds=given["seeds"], positions=given["positions"], stop_tokens=[3]
    )
    by_uniform = dd.accept_sampled(tree, given["probs"], uniforms=given["uniforms"])
    for found in (greedy, by_seed, by_uniform):
        assert {kind_of(x) for x in tensors_of(found)} == {kind}
    check_accepted(greedy, mirrored_greedy(host["tree"], host["targets"], host["stop_tokens"]))
    draws = {"seeds": host["seeds"], "positions": host["positions"]}
    check_accepted(by_seed, mirrored_sampled(host["tree"], host["probs"], stop_tokens=[3], **draws))
    check_accepted(by_uniform, mirrored_sampled(host["tree"], host["probs"], uniforms=host["uniforms"]))
    assert by_seed.to_host().num_accepted.max() >= 3


@each_device_kind
def test_given_results(kind):
    host = problem_of(2, 5, 20, 12)
    tree, like = tree_on(host["tree"], kind), TO_KIND[kind](host["targets"])
    out = dd.Accepted.empty(like, 5, tree.max_depth)
    assert dd.accept_greedy(tree, like, out=out) is out
    check_accepted(out, mirrored_greedy(host["tree"], host["targets"]))
    uniforms = TO_KIND[kind](host["uniforms"])
    assert dd.accept_sampled(tree, TO_KIND[kind](host["probs"]), uniforms=uniforms, out=out) is out
    check_accepted(out, mirrored_sampled(host["tree"], host["probs"], uniforms=host["uniforms"]))
    tokens = TO_KIND[kind](np.zeros((5, 21), np.int32))
    assert dd.argmax_tokens(TO_KIND[kind](host["probs"]), out=tokens) is tokens
    check_tokens(to_host(tokens), mirrored_argmax(host["probs"]))


@each_kind
def test_sglang_arrays_of_every_kind(kind):
    rng = np.random.default_rng(3)
    tree = drafted_tree(rng, 40, 31, idle=False)
    given = engine_arrays(tree, following_targets(rng, tree))
    before = spoiled_engine(40, 32, 5)
    exact = accept.verify_tree_greedy(**before, **given)
    results = {name: TO_KIND[kind](x) for name, x in before.items()}
    dd.verify_tree_greedy(**results, **{name: TO_KIND[kind](x) for name, x in given.items()})
    for name, wanted in zip(RESULTS, exact, strict=True):
        check_tokens(to_host(results[name]), wanted, name)


@each_device_kind
def test_no_requests(kind):
    tree = dd.DraftTree.empty(TO_KIND[kind](np.zeros(3, np.float32)), 0, 6, 3)
    found = dd.accept_greedy(tree, TO_KIND[kind](np.zeros((0, 7), np.int32)))
    assert tuple(found.nodes.shape) == (0, 4)
    assert kind_of(found.nodes) == kind
    assert tuple(dd.argmax_tokens(TO_KIND[kind](np.zeros((0, 7, 5), np.float32))).shape) == (0, 7)


# Thousands of trees


@pytest.mark.parametrize("seed", range(6))
def test_six_thousand_greedy_trees(seed):
    rng = np.random.default_rng(1000 + seed)
    tree = drafted_tree(rng, 1000, int(rng.integers(10, 60)), vocabulary=5, length=8)
    targets = following_targets(rng, tree, vocabulary=5)
    stop_tokens = None if seed < 3 else rng.integers(-1, 12, (1000, 2))
    found = dd.accept_greedy(
        tree_on(tree, "torch"), to_torch(targets), stop_tokens=None if seed < 3 else to_torch(stop_tokens)
    )
    check_accepted(found, mirrored_greedy(tree, targets, stop_tokens))
    check_contract(found.to_host(), tree)
    assert found.to_host().num_accepted.max() >= 5


def test_trees_beyond_shared_memory():
    rng = np.random.default_rng(0)
    for tree_budget in (2047, 2048, UNSTAGED):
        tree = drafted_tree(rng, 5, tree_budget, vocabulary=5, length=8)
        targets = following_targets(rng, tree, vocabulary=5, dtype=np.int64)
        check_accepted(dd.accept_greedy(tree_on(tree, "torch"), to_torch(targets)), mirrored_greedy(tree, targets))


@pytest.mark.parametrize("num_nodes", [3, 50, UNSTAGED])
def test_garbage_ends(num_nodes):
    rng = np.random.default_rng(num_nodes)
    batch = 500 if num_nodes < 100 else 3  # chains of thousands of siblings take the mirror seconds a request
    tree = garbage_tree(rng, batch, num_nodes, max_depth=min(num_nodes, 30))
    targets = garbage_targets(rng, tree.tokens.shape)
    found = dd.accept_greedy(tree_on(tree, "torch"), to_torch(targets), stop_tokens=[2])
    check_accepted(found, mirrored_greedy(tree, targets, [2]))
    probs = random_probs(rng, batch, num_nodes, 4) if num_nodes < 100 else None
    if probs is not None:
        probs[rng.random(probs.shape[:2]) < 0.1, 2] = NAN
        probs[rng.random(probs.shape[:2]) < 0.1, 3] = -1
        uniforms = rng.random(probs.shape[:2])
        uniforms[::7] = NAN
        found = dd.accept_sampled(tree_on(tree, "torch"), to_torch(probs), uniforms=to_torch(uniforms))
        check_accepted(found, mirrored_sampled(tree, probs, uniforms=uniforms))


def test_garbage_in_the_arrays_of_sglang_ends():
    rng = np.random.default_rng(0)
    shape = 300, 20
    given = {name: rng.integers(0, 20, shape) for name in READ}
    given["candidates"], given["target_predict"] = rng.integers(-1, 2, shape), rng.integers(-1, 2, shape)
    given["retrive_index"] = np.arange(300 * 20).reshape(shape)  # requests write to places of their own
    wild = rng.choice([-(2**63), 2**63 - 1, -1, 2**32, 6000], shape)
    for name in READ[2:4]:
        given[name] = np.where(rng.random(shape) < 0.2, wild, given[name])
    before = spoiled_engine(300, 20, 7)
    by_mirror = {name: x.copy() for name, x in before.items()}
    sglang.mirror(*(given[name] for name in READ), *by_mirror.values())
    results = {name: to_torch(x) for name, x in before.items()}
    dd.verify_tree_greedy(**results, **{name: to_torch(x) for name, x in given.items()})
    for name in RESULTS:
        check_tokens(to_host(results[name]), by_mirror[name], name)


# Full sizes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_full_batch(dtype):
    torch = library("torch")
    batch, num_nodes = 64, 65
    if torch.cuda.mem_get_info()[0] < 16e9:
        pytest.skip("needs 16 GB of free GPU memory")
    rng = np.random.default_rng(7)
    tree = drafted_tree(rng, batch, num_nodes - 1, vocabulary=VOCABULARY, length=8)
    logits = random_logits(batch, num_nodes, VOCABULARY, dtype=dtype)
    # The sum of all exponentials is about e**16.5: a likely token has some 0.8 of the mass.
    favoured = to_torch(favourites(rng, tree, VOCABULARY)[..., None])
    logits.scatter_(2, favoured, 18.0)
    logits[5, 6, VOCABULARY - 1] = NAN
    tokens = dd.argmax_tokens(logits)
    assert torch.equal(tokens, lowest_of_largest(logits))
    assert int(tokens[5, 6]) == -1
    check_tokens(to_host(tokens[5:6, 4:8]), mirrored_argmax(to_host(logits[5:6, 4:8])))
    given = tree_on(tree, "torch")
    greedy = dd.accept_greedy(given, tokens)
    check_accepted(greedy, mirrored_greedy(tree, to_host(tokens)))

    probs = torch.softmax(logits.float(), dim=-1).to(logits.dtype)
    probs[5, 6] = NAN
    del logits
    seeds, positions = rng.integers(-(2**63), 2**63 - 1, batch), rng.integers(0, 10**6, batch).astype(np.int32)
    found = dd.accept_sampled(given, probs, seeds=to_torch(seeds), positions=to_torch(positions))
    host = found.to_host()
    assert host.num_accepted.max() >= 4
    # The mirror gets the rows of accepted nodes alone; it would refuse the others, which are zeros.
    rows = np.zeros((batch, num_nodes, VOCABULARY), to_host(probs[0, 0, :1]).dtype)
    for b, count in enumerate(host.num_accepted.tolist()):
        for node in host.nodes[b, :count].tolist():
            rows[b, node] = to_host(probs[b, node])
    check_accepted(found, mirrored_sampled(tree, rows, seeds=seeds, positions=positions))
    del probs
    torch.cuda.empty_cache()


@pytest.mark.parametrize("vocabulary", [151_643, 129_280, 32_001])
def test_argmax_of_vocabularies_of_any_size(vocabulary):
    torch = library("torch")
    for dtype in ("float32", "bfloat16"):
        logits = random_logits(3, 4, vocabulary, dtype=dtype)
        logits[2, 1, 5] = logits[2, 1, vocabulary - 1] = 60
        assert torch.equal(dd.argmax_tokens(logits), lowest_of_largest(logits))
        assert torch.equal(dd.argmax_tokens(logits[..., 1:]), lowest_of_largest(logits[..., 1:]))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_laws_of_many_tokens(dtype):
    rng = np.random.default_rng(0)
    for vocabulary in (1, 31, 1023, 4097, 50_001, 2**19):
        tree = make_tree(*[([-1], [0])] * 6)
        probs = random_probs(rng, 6, 1, vocabulary, dtype=dtype)
        probs[5] = 0
        probs[5, 0, -1] = 1
        uniforms = np.array([[0.0], [1e-9], [0.3], [1 - 2.0**-24], [1.0], [0.5]])
        found = dd.accept_sampled(tree_on(tree, "torch"), to_torch(probs), uniforms=to_torch(uniforms))
        check_accepted(found, mirrored_sampled(tree, probs, uniforms=uniforms))
        assert int(found.bonus_tokens[5]) == vocabulary - 1


def test_rows_beyond_two_to_the_31_elements():
    torch = library("torch")
    batch, num_nodes = 70, 190
    assert (batch - 1) * num_nodes * VOCABULARY > 2**31
    if torch.cuda.mem_get_info()[0] < 12e9:
        pytest.skip("needs 12 GB of free GPU memory")
    rng = np.random.default_rng(0)
    x = torch.empty((batch, num_nodes, VOCABULARY), dtype=torch.bfloat16, device="cuda").normal_(0.0, 1.0).clamp_(max=8)
    places = rng.integers(0, VOCABULARY, (batch, num_nodes, 2))
    places[-1, -1] = VOCABULARY - 1, VOCABULARY - 2
    x.scatter_(2, to_torch(places), 9.0)
    lowest, highest = places.min(axis=2).astype(np.int32), places.max(axis=2).astype(np.int32)
    check_tokens(to_host(dd.argmax_tokens(x)), lowest)
    for b, i in ((0, 0), (35, 100), (batch - 1, num_nodes - 2)):
        x[b, i, 3] = NAN
        lowest[b, i] = -1
    check_tokens(to_host(dd.argmax_tokens(x)), lowest)

    # As laws: half and half for two tokens. The trees are chains that carry one of them.
    x.zero_()
    x.scatter_(2, to_torch(places), 0.5)
    chain = make_tree(([-1, *range(num_nodes - 1)], [0] * num_nodes))
    tree = changed(chain, **{name: np.repeat(getattr(chain, name), batch, axis=0) for name in DTYPES})
    for u, wanted in ((0.25, places.min(axis=2)), (0.75, highest)):
        tree.tokens[:, 1:] = wanted[:, :-1]
        uniforms = torch.full((batch, num_nodes), u, device="cuda")
        found = dd.accept_sampled(tree_on(tree, "torch"), x, uniforms=uniforms).to_host()
        assert (found.num_accepted == num_nodes).all()
        check_tokens(found.tokens, wanted.astype(np.int32))
    del x
    torch.cuda.empty_cache()


# Streams and graphs


@pytest.mark.parametrize("results_given", [True, False])
def test_torch_stream_is_used_and_not_waited_for(results_given):
    torch = library("torch")
    first, later = problem_of(1, 16, 40, 64), problem_of(2, 16, 40, 64)
    names = ("targets", "probs", "seeds", "positions")
    tree = tree_on(first["tree"], "torch")
    stream = torch.cuda.Stream()
    given, new = ({name: to_torch(x[name]) for name in names} for x in (first, later))
    tokens = torch.empty((16, 41), dtype=torch.int32, device="cuda")
    outs = (
        [dd.Accepted.empty(given["targets"], 16, tree.max_depth) for _ in range(2)] if results_given else [None, None]
    )

    def step() -> Any:
        chosen = dd.argmax_tokens(given["probs"], out=tokens if results_given else None)
        greedy = dd.accept_greedy(tree, given["targets"], out=outs[0])
        draws = {"seeds": given["seeds"], "positions": given["positions"]}
        return chosen, greedy, dd.accept_sampled(tree, given["probs"], **draws, out=outs[1])

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # compiles, and leaves memory for the next results
        torch.cuda.synchronize()
        # The inputs get their values on the stream behind a sleep: only kernels behind both read them.
        torch.cuda._sleep(SLEEP_CYCLES)
        for name in names:
            given[name].copy_(new[name], non_blocking=True)
        chosen, greedy, sampled = step()
        done = torch.cuda.Event()
        done.record(stream)
        assert not done.query(), "a call waited for the GPU"
    stream.synchronize()
    check_tokens(to_host(chosen), mirrored_argmax(later["probs"]))
    check_accepted(greedy, mirrored_greedy(first["tree"], later["targets"]))
    draws = {"seeds": later["seeds"], "positions": later["positions"]}
    check_accepted(sampled, mirrored_sampled(first["tree"], later["probs"], **draws))


def test_cupy_stream_is_used_and_not_waited_for():
    cupy = library("cupy")
    source = """extern "C" __global__ void spin(long long cycles) {
        long long start = clock64();
        while (clock64() - start < cycles) {}
    }"""
    spin = cupy.RawKernel(source, "spin")
    first, later = problem_of(1, 16, 40, 64), problem_of(2, 16, 40, 64)
    tree = tree_on(first["tree"], "cupy")
    targets, uniforms, probs = (TO_KIND["cupy"](first[name]) for name in ("targets", "uniforms", "probs"))
    new = [TO_KIND["cupy"](later[name]) for name in ("targets", "uniforms")]
    outs = [dd.Accepted.empty(targets, 16, tree.max_depth) for _ in range(2)]
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:

        def step() -> None:
            dd.accept_greedy(tree, targets, out=outs[0])
            dd.accept_sampled(tree, probs, uniforms=uniforms, out=outs[1])

        step()
        spin((1,), (1,), (np.int64(1),))
        for x in new:
            cupy.copyto(cupy.empty_like(x), x)
        stream.synchronize()
        spin((1,), (1,), (np.int64(SLEEP_CYCLES),))
        for old, x in zip((targets, uniforms), new, strict=True):
            cupy.copyto(old, x)
        step()
        assert not stream.done, "a call waited for the GPU"
    stream.synchronize()
    check_accepted(outs[0], mirrored_greedy(first["tree"], later["targets"]))
    check_accepted(outs[1], mirrored_sampled(first["tree"], first["probs"], uniforms=later["uniforms"]))


def test_numba_default_stream_is_not_waited_for():
    torch = library("torch")
    host = problem_of(3, 16, 40, 64)
    tree, targets = tree_on(host["tree"], "numba"), TO_KIND["numba"](host["targets"])
    out = dd.Accepted.empty(targets, 16, tree.max_depth)
    dd.accept_greedy(tree, targets, out=out)
    cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)  # PyTorch's default stream is Numba's
    dd.accept_greedy(tree, targets, out=out)
    done = torch.cuda.Event()
    done.record()
    assert not done.query(), "the call waited for the GPU"
    check_accepted(out, mirrored_greedy(host["tree"], host["targets"]))


def test_all_operators_in_one_graph():
    torch = library("torch")
    batch, num_nodes, vocabulary = 32, 33, 1000
    first = problem_of(0, batch, num_nodes - 1, vocabulary)
    names = ("probs", "seeds", "positions", "uniforms", "stop_tokens")
    given = {name: to_torch(first[name]) for name in names}
    tree = tree_on(first["tree"], "torch")
    tokens = torch.empty((batch, num_nodes), dtype=torch.int32, device="cuda")
    outs = [dd.Accepted.empty(tokens, batch, tree.max_depth) for _ in range(3)]
    engine = {name: to_torch(x) for name, x in engine_arrays(first["tree"], first["targets"]).items()}
    results = {name: to_torch(x) for name, x in spoiled_engine(batch, num_nodes, 5).items()}

    def step() -> None:
        dd.argmax_tokens(given["probs"], out=tokens)
        dd.accept_greedy(tree, tokens, stop_tokens=given["stop_tokens"], out=outs[0])
        draws = {"seeds": given["seeds"], "positions": given["positions"]}
        dd.accept_sampled(tree, given["probs"], stop_tokens=[7, 8], out=outs[1], **draws)
        dd.accept_sampled(tree, given["probs"], uniforms=given["uniforms"], out=outs[2])
        dd.verify_tree_greedy(**results, **engine)

    step()  # compiles, and makes an array of the stop tokens
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # a synchronization or an allocation in here is an error
        step()
    drawn = []
    for seed in (1, 2, 3):
        rng = np.random.default_rng(seed)
        later = problem_of(seed, batch, num_nodes - 1, vocabulary)
        # The same laws and seeds twice: only the positions move on.
        later["probs"] = first["probs"] if seed < 3 else later["probs"]
        later["seeds"] = first["seeds"]
        for name in names:
            given[name].copy_(to_torch(later[name]))
        targets = following_targets(rng, first["tree"], vocabulary=vocabulary)
        engine["target_predict"].copy_(to_torch(targets.astype(np.int64)))
        before = spoiled_engine(batch, num_nodes, 5)
        for name in RESULTS:
            results[name].copy_(to_torch(before[name]))
        spoil(tokens, *(x for out in outs for x in tensors_of(out)))
        graph.replay()
        torch.cuda.synchronize()
        host = first["tree"]
        chosen = mirrored_argmax(later["probs"])
        check_tokens(to_host(tokens), chosen)
        check_accepted(outs[0], mirrored_greedy(host, chosen, later["stop_tokens"]))
        draws = {"seeds": later["seeds"], "positions": later["positions"]}
        check_accepted(outs[1], mirrored_sampled(host, later["probs"], stop_tokens=[7, 8], **draws))
        check_accepted(outs[2], mirrored_sampled(host, later["probs"], uniforms=later["uniforms"]))
        moved = engine_arrays(host, targets)
        for name, wanted in zip(RESULTS, accept.verify_tree_greedy(**before, **moved), strict=True):
            check_tokens(to_host(results[name]), wanted, name)
        drawn.append(to_host(outs[1].tokens).copy())
    assert (drawn[0] != drawn[1]).any(), "a replay at other positions drew the same"


def test_cupy_graph_replays_with_new_contents():
    cupy = library("cupy")
    first, later = problem_of(1, 16, 40, 64), problem_of(2, 16, 40, 64)
    tree = tree_on(first["tree"], "cupy")
    probs, seeds, positions = (TO_KIND["cupy"](first[name]) for name in ("probs", "seeds", "positions"))
    out = dd.Accepted.empty(probs, 16, tree.max_depth)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        dd.accept_sampled(tree, probs, seeds=seeds, positions=positions, out=out)
        stream.synchronize()
        stream.begin_capture()
        dd.accept_sampled(tree, probs, seeds=seeds, positions=positions, out=out)
        graph = stream.end_capture()
        for x, name in ((probs, "probs"), (seeds, "seeds"), (positions, "positions")):
            x.set(later[name])
        graph.launch(stream)
    stream.synchronize()
    draws = {"seeds": later["seeds"], "positions": later["positions"]}
    check_accepted(out, mirrored_sampled(first["tree"], later["probs"], **draws))


def test_a_hundred_runs_give_the_same_bits():
    torch = library("torch")
    rng = np.random.default_rng(0)
    tree = drafted_tree(rng, 132, 64, vocabulary=4000, length=8)
    logits = random_logits(132, 65, 4000, dtype="bfloat16")
    logits.scatter_(2, to_torch(favourites(rng, tree, 4000)[..., None]), 14.0)
    probs = torch.softmax(logits.float(), dim=-1)
    given = tree_on(tree, "torch")
    seeds, positions = to_torch(rng.integers(0, 2**62, 132)), to_torch(rng.integers(0, 99, 132))

    def step() -> list[Any]:
        tokens = dd.argmax_tokens(logits)
        walked = dd.accept_greedy(given, tokens), dd.accept_sampled(given, probs, seeds=seeds, positions=positions)
        return [tokens, *(x for found in walked for x in tensors_of(found))]

    first = step()
    assert int(first[-4].max()) >= 3, "no walk is long"
    run_beside_another_stream(step, first)
    torch.cuda.synchronize()


# Ten million draws


def two_levels() -> tuple[dd.DraftTree, np.ndarray]:
    """A tree of two levels, with equal siblings and a token without probability, and laws of 50 tokens."""
    vocabulary = 50
    tree = make_tree(([-1, 0, 0, 0, 1, 1, 2, 0], [0, 3, 7, 3, 11, 12, 13, 49]))
    rng = np.random.default_rng(50)
    rows = rng.random((1, 8, vocabulary)) ** 3 + 0.01
    rows[0, :, 49] = 0
    rows[0, 0, [3, 7]] += 2.5
    rows[0, 0, [20, 21]] += 1.5
    rows[0, 3] = rows[0, 1]  # equal siblings stand behind the same tokens
    return tree, (rows / rows.sum(axis=2, keepdims=True)).astype(np.float32)


def law_of(row: np.ndarray) -> np.ndarray:
    weights = np.array(accept.row_weights(row.astype(np.float64).tolist()), np.float64)
    return weights / weights.sum()


def expected_pairs(tree: dd.DraftTree, rows: np.ndarray) -> np.ndarray:
    """[V, V + 1]: probability of each first and second token; column 0: there is no second."""
    vocabulary = rows.shape[2]
    first, found = law_of(rows[0, 0]), np.zeros((vocabulary, vocabulary + 1))
    found[:, 0] = first
    for node, token in ((1, 3), (2, 7)):
        found[token, 0] = 0
        found[token, 1:] = first[token] * law_of(rows[0, node])
    return found


def counted_pairs(tree: dd.DraftTree, rows: np.ndarray, launches: int, batch: int) -> np.ndarray:
    """Counts of the pairs, over all launches, at fixed seeds."""
    torch = library("torch")
    vocabulary = rows.shape[2]
    # One tree and one set of laws for all requests, by a stride of 0.
    given = {name: to_torch(getattr(tree, name)) for name in DTYPES}
    many = changed(tree, **{name: x.expand(batch, *x.shape[1:]) for name, x in given.items()})
    probs = to_torch(rows).expand(batch, -1, -1)
    counts = torch.zeros(vocabulary * (vocabulary + 1), dtype=torch.int64, device="cuda")
    seeds = (
        torch.arange(batch, dtype=torch.int64, device="cuda") * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407
    )
    for launch in range(launches):
        positions = torch.full((batch,), 3 * launch, dtype=torch.int64, device="cuda")
        tokens = dd.accept_sampled(many, probs, seeds=seeds, positions=positions).tokens.long()
        assert tuple(tokens.shape) == (batch, 3)
        counts += torch.bincount(tokens[:, 0] * (vocabulary + 1) + tokens[:, 1] + 1, minlength=counts.numel())
    return to_host(counts).reshape(vocabulary, vocabulary + 1)


def test_ten_million_draws_have_the_law_of_the_target():
    tree, rows = two_levels()
    expected = expected_pairs(tree, rows)
    assert expected.sum() == pytest.approx(1, abs=1e-12)
    counts = counted_pairs(tree, rows, launches=20, batch=500_000)
    assert counts.sum() == 10**7
    assert chi_square_test(counts.sum(axis=1), law_of(rows[0, 0])) > 1e-3
    assert chi_square_test(counts, expected) > 1e-3
    assert counts[49].sum() == 0
    # A thousandth of the mass on another token shows, in the first draw and in the second.
    for node in (0, 1):
        biased = rows.copy()
        one, other = int(rows[0, node].argmax()), 21
        assert one != other
        biased[0, node, one] -= np.float32(1e-3)
        biased[0, node, other] += np.float32(1e-3)
        wrong = counted_pairs(tree, biased, launches=20, batch=500_000)
        assert chi_square_test(wrong, expected) < 1e-3
        if node == 0:
            assert chi_square_test(wrong.sum(axis=1), law_of(rows[0, 0])) < 1e-3


# Wrong places


def test_arrays_in_host_memory_beside_device_arrays_are_refused():
    host = problem_of(4, 4, 10, 8)
    tree = tree_on(host["tree"], "torch")
    with pytest.raises(ValueError, match=r"tree\.tokens is in GPU 0 and target_tokens in host memory"):
        dd.accept_greedy(tree, host["targets"])
    with pytest.raises(ValueError, match=r"tree\.tokens is in host memory and target_tokens in GPU 0"):
        dd.accept_greedy(host["tree"], to_torch(host["targets"]))
    with pytest.raises(ValueError, match=r"in GPU 0 and stop_tokens in host memory"):
        dd.accept_greedy(tree, to_torch(host["targets"]), stop_tokens=host["stop_tokens"])
    with pytest.raises(ValueError, match=r"in GPU 0 and uniforms in host memory"):
        dd.accept_sampled(tree, to_torch(host["probs"]), uniforms=host["uniforms"])
    with pytest.raises(ValueError, match=r"in GPU 0 and out\.nodes in host memory"):
        dd.accept_greedy(tree, to_torch(host["targets"]), out=dd.Accepted.empty(host["targets"], 4, tree.max_depth))
    with pytest.raises(ValueError, match="logits is in GPU 0 and out in host memory"):
        dd.argmax_tokens(to_torch(host["probs"]), out=np.zeros((4, 11), np.int32))
    check_accepted(dd.accept_greedy(tree, to_torch(host["targets"])), mirrored_greedy(host["tree"], host["targets"]))


def test_validate_finds_wrong_contents_on_the_device():
    host = problem_of(5, 4, 10, 8)
    host["tree"].first_child[3, 0] = 99
    tree = tree_on(host["tree"], "torch")
    for call in (
        lambda: dd.accept_greedy(tree, to_torch(host["targets"]), validate=True),
        lambda: dd.accept_sampled(tree, to_torch(host["probs"]), uniforms=to_torch(host["uniforms"]), validate=True),
    ):
        with pytest.raises(ValueError, match=r"tree\.first_child\[3, 0\] is 99"):
            call()


def test_strides_of_torch_tensors():
    torch = library("torch")
    host = problem_of(6, 5, 12, 40)

    def sliced(x: Any) -> Any:
        big = torch.zeros([2 * n + 1 for n in x.shape], dtype=x.dtype, device=x.device)
        inner = big[tuple(slice(1, None, 2) for _ in x.shape)]
        carrier(inner).copy_(carrier(x))
        return inner

    tree = tree_on(host["tree"], "torch")
    tree = changed(tree, **{name: sliced(getattr(tree, name)) for name in ("tokens", "first_child", "num_nodes")})
    found = dd.accept_greedy(tree, sliced(to_torch(host["targets"])))
    check_accepted(found, mirrored_greedy(host["tree"], host["targets"]))
    for probs in (
        sliced(to_torch(host["probs"])),
        to_torch(host["probs"]).transpose(0, 1).contiguous().transpose(0, 1),
    ):
        found = dd.accept_sampled(tree, probs, uniforms=sliced(to_torch(host["uniforms"])))
        check_accepted(found, mirrored_sampled(host["tree"], host["probs"], uniforms=host["uniforms"]))
        check_tokens(to_host(dd.argmax_tokens(probs)), mirrored_argmax(host["probs"]))


def test_a_gpu_that_is_not_the_current_one():
    torch = library("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    host = problem_of(7, 5, 12, 40)
    tree = changed(host["tree"], **{name: to_torch(getattr(host["tree"], name), "cuda:1") for name in DTYPES})
    found = dd.accept_greedy(tree, to_torch(host["targets"], "cuda:1"), stop_tokens=[3])
    assert {x.device.index for x in tensors_of(found)} == {1}
    check_accepted(found, mirrored_greedy(host["tree"], host["targets"], [3]))
    draws = {name: to_torch(host[name], "cuda:1") for name in ("seeds", "positions")}
    found = dd.accept_sampled(tree, to_torch(host["probs"], "cuda:1"), **draws)
    wanted = mirrored_sampled(host["tree"], host["probs"], seeds=host["seeds"], positions=host["positions"])
    check_accepted(found, wanted)
    assert torch.cuda.current_device() == 0
