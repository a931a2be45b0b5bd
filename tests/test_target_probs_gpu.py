"""target_probs on a CUDA GPU: every kind of array, full vocabularies, both ways of finding the border, streams, graphs.

What holds on any backend is in test_target_probs.py, which runs on the GPU too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_target_probs import CASES, EPS, UNDERFLOW, check, logits_of
from test_verify_attention_gpu import (
    SLEEP_CYCLES,
    TO_KIND,
    each_device_kind,
    each_kind,
    kind_of,
    library,
    to_host,
)

from ddtree_numba.accept.target_probs import target_probs
from ddtree_numba.device.runtime import SIMULATOR

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(SIMULATOR, reason="kernels run in the simulator here; these tests need a CUDA GPU"),
]

VOCABULARY = 163_840


def random_logits(*shape: int, dtype: str = "bfloat16", std: float = 3.0, seed: int = 0) -> Any:
    torch = library("torch")
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * std).to(getattr(torch, dtype))


def check_beside_torch(probs: Any, logits: Any, temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Against PyTorch's softmax, sort and cumsum in float64."""
    torch = library("torch")
    assert probs.dtype == torch.float32
    x = logits.double()
    z = (x - x.amax(-1, keepdim=True)) / float(np.float32(temperature))
    far = z.abs()
    p = torch.softmax(z, -1)
    values = torch.sort(x, dim=-1, descending=True).values
    expected = values[..., -1:]
    if top_k is not None:
        expected = values[..., top_k - 1 : top_k]
        assert bool((probs[x < expected] == 0).all())
        p = torch.where(x >= expected, p, 0.0)
        p /= p.sum(-1, keepdim=True)
    wanted = 1.0 if top_p is None else float(np.float32(top_p))
    if wanted < 1:
        falling = torch.sort(p, dim=-1, descending=True).values  # the order of the logits: p rises with them
        at = (torch.cumsum(falling, -1) < wanted).sum(-1, keepdim=True)
        expected = values.gather(-1, at.clamp(max=values.shape[-1] - 1))
    border = torch.where(probs > 0, x, float("inf")).amin(-1, keepdim=True)
    mass_error = EPS * (4 + 3 * (p * far).sum(-1))
    enough = torch.where(x >= border, p, 0.0).sum(-1) >= wanted - mass_error
    not_more = torch.where(x > border, p, 0.0).sum(-1) <= wanted + mass_error
    assert bool(((border == expected)[..., 0] | (enough & not_more)).all())
    exact = torch.where(x >= border, p, 0.0)
    exact /= exact.sum(-1, keepdim=True)
    bound = EPS * exact * (4 + 1.5 * far + 1.5 * (exact * far).sum(-1, keepdim=True)) + UNDERFLOW
    assert float(((probs.double() - exact).abs() / bound).max()) <= 1
    assert bool((probs <= 1).all())


# All cases, in every kind


@each_kind
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_every_kind(case, kind):
    _, logits, *controls = case
    logits = np.ascontiguousarray(logits)
    probs = target_probs(TO_KIND[kind](logits), *controls)
    assert kind_of(probs) == kind
    check(to_host(probs), logits, *controls)


@each_device_kind
def test_controls_of_requests(kind):
    logits = logits_of(3, 2, 1000)
    controls = np.float32([0.0, 0.7, 1.0]), np.int32([5, 40, 0]), np.float32([1.0, 0.9, 0.5])
    out = TO_KIND[kind](np.full_like(logits, np.nan))
    assert target_probs(TO_KIND[kind](logits), *map(TO_KIND[kind], controls), out=out) is out
    check(to_host(out), logits, *controls)


# Full vocabularies

CONTROLS = [(0.6, None, None), (0.7, 50, None), (1.0, 50, 0.9), (0.8, None, 0.95), (1.0, 1, None), (0.6, 1024, 0.99)]


@pytest.mark.parametrize("controls", CONTROLS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_full_vocabularies(dtype, controls):
    logits = random_logits(4, 9, VOCABULARY, dtype=dtype)
    check_beside_torch(target_probs(logits, *controls), logits, *controls)


@pytest.mark.parametrize("vocabulary", [151_643, 151_644, 129_280, 2**19])
def test_vocabularies_of_any_size(vocabulary):
    for dtype in ("float32", "bfloat16"):
        logits = random_logits(1, 3, vocabulary, dtype=dtype)
        check_beside_torch(target_probs(logits, 0.7, 50, 0.9), logits, 0.7, 50, 0.9)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_that_are_searched(dtype):
    torch = library("torch")
    rising = torch.arange(VOCABULARY, device="cuda").div(2000.0).view(1, 1, -1).to(getattr(torch, dtype))
    flat = random_logits(1, 2, VOCABULARY, dtype=dtype, std=0.5)
    equal = torch.full_like(rising, 2.5)
    for logits in (rising, flat, equal):
        for controls in ((1.0, 50, None), (1.0, None, 0.9), (1.0, 5000, None), (0.9, 20_000, 0.8)):
            check_beside_torch(target_probs(logits, *controls), logits, *controls)


def test_masked_vocabularies():
    logits = random_logits(2, 2, VOCABULARY)
    logits[..., 17:] = -np.inf
    for controls in ((1.0, 50, None), (1.0, 5, 0.9), (1.0, None, 0.9), (1.0, None, None)):
        probs = target_probs(logits, *controls)
        assert bool((probs[..., 17:] == 0).all())
        alone = target_probs(logits[..., :17].contiguous(), *controls)
        assert bool((probs[..., :17] == alone).all())


def test_the_same_bits_in_any_batch_and_layout():
    torch = library("torch")
    logits = random_logits(3, 5, 50_001)
    probs = target_probs(logits, 0.8, 40, 0.9)
    spread = torch.stack([logits, logits], -1)[..., 0]
    for again in (target_probs(logits, 0.8, 40, 0.9), target_probs(spread, 0.8, 40, 0.9)):
        assert torch.equal(again, probs)
    assert torch.equal(target_probs(logits[1:2, 3:4], 0.8, 40, 0.9), probs[1:2, 3:4])


def test_arrays_beyond_two_to_the_31_elements():
    torch = library("torch")
    rows, vocabulary = 4_200, 2**19
    assert rows * vocabulary > 2**31
    if torch.cuda.mem_get_info()[0] < 16e9:
        pytest.skip("needs 16 GB of free GPU memory")
    logits = torch.empty((1, rows, vocabulary), dtype=torch.bfloat16, device="cuda").normal_(0.0, 3.0)
    probs = target_probs(logits, 0.7, 50, 0.9)
    for part in (slice(0, 1), slice(4095, 4097), slice(rows - 1, rows)):
        check_beside_torch(probs[:, part], logits[:, part], 0.7, 50, 0.9)
    del logits, probs
    torch.cuda.empty_cache()


# Streams and graphs


def test_torch_stream_is_used_and_not_waited_for():
    torch = library("torch")
    logits, later = random_logits(2, 3, 4096, seed=1), random_logits(2, 3, 4096, seed=2)
    out = torch.empty(2, 3, 4096, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        target_probs(logits, 0.7, 8, 0.9, out=out)  # compiles
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        logits.copy_(later, non_blocking=True)
        target_probs(logits, 0.7, 8, 0.9, out=out)
        done = torch.cuda.Event()
        done.record(stream)
        assert not done.query(), "a call waited for the GPU"
    stream.synchronize()
    check_beside_torch(out, later, 0.7, 8, 0.9)


@pytest.mark.parametrize("in_arrays", [False, True], ids=["numbers", "arrays"])
def test_a_captured_call_reads_new_contents(in_arrays):
    torch = library("torch")
    logits = random_logits(2, 3, 4096)
    out = torch.empty(2, 3, 4096, device="cuda")
    controls: Any = (0.7, 8, 0.9)
    if in_arrays:
        dtypes = (torch.float32, torch.int32, torch.float32)
        controls = [torch.full((2,), x, dtype=d, device="cuda") for x, d in zip(controls, dtypes, strict=True)]
    target_probs(logits, *controls, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        target_probs(logits, *controls, out=out)
    for seed in (1, 2):
        logits.copy_(random_logits(2, 3, 4096, seed=seed))
        expected = (0.7, 8, 0.9)
        if in_arrays and seed == 2:
            expected = (1.3, 20, 0.5)
            for x, number in zip(controls, expected, strict=True):
                x.fill_(number)
        out.fill_(np.nan)
        graph.replay()
        torch.cuda.synchronize()
        check_beside_torch(out, logits, *expected)
