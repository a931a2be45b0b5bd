"""The peers of verify_attention compute what they are taken for. On the CPU, where their packages are installed.

What the packages themselves compute is checked where it is measured: against float64, ahead of the clock. Here it is
how they are called: layouts, masks, scales, and what becomes of their results.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import ddtree_numba as dd
from refs import oracle

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "profiling"))

import peers  # noqa: E402

SCALE, RANK, WIDTH = 0.3, 16, 24
BATCH, NODES, HEADS, PREFIX = 2, 5, 3, 70


def problem_of(torch, dtype="float32", prefixes=(PREFIX, PREFIX)):
    """Random inputs on the CPU, and the exact results."""
    random = np.random.default_rng(0)
    parents = np.array([[-1, 0, 0, 1, 1], [-1, 0, 1, 2, 0]])
    inputs = {
        "q": random.normal(size=(BATCH, NODES, HEADS, WIDTH)).astype(np.float32),
        "kv_cache": random.normal(size=(BATCH, PREFIX + NODES, WIDTH)).astype(np.float32),
        "cache_seqlens": np.array(prefixes, np.int32),
        "tree_mask": dd.mask_from_parents(parents),
    }
    given = {name: torch.from_numpy(x) for name, x in inputs.items()}
    for name in ("q", "kv_cache"):
        given[name] = given[name].to(getattr(torch, dtype))
        inputs[name] = given[name].float().numpy()
    parts = []
    for b, length in enumerate(prefixes):
        one = slice(b, b + 1)
        parts.append((given["q"][one], given["kv_cache"][one, : length + NODES], given["tree_mask"][one]))
    if len(set(prefixes)) == 1:
        parts = [(given["q"], given["kv_cache"], given["tree_mask"])]
    results = {
        "out": torch.empty((BATCH, NODES, HEADS, RANK), dtype=given["q"].dtype),
        "lse": torch.empty((BATCH, NODES, HEADS)),
    }
    exact = oracle.verify_attention(**inputs, sm_scale=SCALE, kv_lora_rank=RANK)
    return peers.Problem(torch, given, parts, results, SCALE), inputs, exact


def check(peer, exact, dtype="float32"):
    """Within the bounds under which a peer is timed."""
    out, lse = peer.call(*peer.arrays)
    bound, lse_bound = peers.BOUNDS[dtype]
    assert np.linalg.norm(out.double().numpy() - exact[0]) <= bound * np.linalg.norm(exact[0])
    if lse is not None:
        assert tuple(lse.shape) == exact[1].shape
        assert np.all(np.abs(lse.double().numpy() - exact[1]) <= lse_bound * np.maximum(1, np.abs(exact[1])))


@pytest.mark.parametrize("dtype", peers.BOUNDS)
@pytest.mark.parametrize("name", ["torch_eager", "torch_compiled", "torch_sdpa", "torch_flex"])
def test_pytorch_is_asked_for_tree_attention(name, dtype, monkeypatch):
    torch = pytest.importorskip("torch")
    from torch.nn.attention import flex_attention

    # Compiling takes a minute here and changes nothing in how it is called; flex_attention warns where it is not.
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    peers.compiled_attention.cache_clear()
    peers.compiled_flex.cache_clear()
    problem, _, exact = problem_of(torch, dtype)
    check(peers.PEERS[name](problem), exact, dtype)
    assert (name in peers.NOTES) == (name == "torch_sdpa")
    peers.compiled_attention.cache_clear()
    peers.compiled_flex.cache_clear()


def test_eager_takes_different_lengths():
    torch = pytest.importorskip("torch")
    problem, _, exact = problem_of(torch, prefixes=(PREFIX, 0))
    check(peers.eager(problem), exact)
    with pytest.raises(ValueError, match="equal lengths"):
        peers.sdpa(problem)


def causal(inputs):
    """The exact results with a chain in place of each tree."""
    return oracle.verify_attention(**(inputs | {"tree_mask": None}), sm_scale=SCALE, kv_lora_rank=RANK)


def test_flashmla_is_called_as_its_interface_says(monkeypatch):
    """Pages of 64 rows with a head axis, lengths that count the tree, an lse of [B, H, Q]."""
    torch = pytest.importorskip("torch")
    module = ModuleType("flash_mla")

    def attention(q, cache, table, lengths, width, metadata, splits, softmax_scale, causal):
        assert cache.shape[1:] == (64, 1, WIDTH) and (metadata, splits) == ("metadata", "splits") and causal
        given = (q.numpy(), cache[:, :, 0].numpy(), lengths.numpy() - q.shape[1], None)
        found = oracle.verify_attention(*given, sm_scale=softmax_scale, kv_lora_rank=width, block_table=table.numpy())
        out, lse = (torch.from_numpy(x).float() for x in found)
        return out, lse.transpose(1, 2).contiguous()

    def metadata(lengths, rows, kv_heads):
        assert (rows, kv_heads) == (NODES * HEADS, 1)
        return "metadata", "splits"

    module.get_mla_metadata, module.flash_mla_with_kvcache = metadata, attention
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    problem, inputs, exact = problem_of(torch)
    check(peers.flashmla(problem), causal(inputs))
    assert np.abs(exact[0] - causal(inputs)[0]).max() > 0.01  # a tree is no chain


def test_flashinfer_is_called_as_its_interface_says(monkeypatch):
    """Rows of all requests behind each other, latent and rotary parts apart, page lists, an lse of base 2."""
    torch = pytest.importorskip("torch")
    module = ModuleType("flashinfer.mla")

    class Wrapper:
        def __init__(self, workspace, backend):
            assert workspace.nbytes >= 128 << 20 and backend

        def plan(self, starts, page_starts, page_ids, lengths, heads, rank, rope, page, causal, scale, q_type, kv_type):
            assert (heads, rank, rope, causal, q_type) == (HEADS, RANK, WIDTH - RANK, True, kv_type)
            assert starts.tolist() == [0, NODES, 2 * NODES]
            counts = page_starts.diff().tolist()
            assert counts == [-(-int(n) // page) for n in lengths]
            self.table, self.lengths, self.scale = page_ids.view(BATCH, -1).numpy(), lengths.numpy(), scale

        def run(self, q_nope, q_pe, ckv, kpe, return_lse):
            q = torch.cat([q_nope, q_pe], -1).view(BATCH, NODES, HEADS, WIDTH).numpy()
            cache = torch.cat([ckv, kpe], -1).numpy()
            widths = {"sm_scale": self.scale, "kv_lora_rank": q_nope.shape[2], "block_table": self.table}
            out, lse = oracle.verify_attention(q, cache, self.lengths - NODES, None, **widths)
            found = torch.from_numpy(out).float().flatten(0, 1), torch.from_numpy(lse / np.log(2)).float().flatten(0, 1)
            return found if return_lse else found[0]

    module.BatchMLAPagedAttentionWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module)
    problem, inputs, _ = problem_of(torch)
    check(peers.flashinfer(problem), causal(inputs))


def test_peers_that_are_not_installed_are_left_out(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert [name for name in peers.PEERS if peers.takes(name, "bfloat16")] == [
        *("torch_eager", "torch_compiled", "torch_sdpa", "torch_flex")
    ]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert [name for name in peers.PEERS if not peers.takes(name, "float32")] == ["flashinfer", "flashmla"]
    assert all(peers.takes(name, "bfloat16") for name in peers.PEERS)


# The kernel in Triton runs in its interpreter, which is chosen before the kernel is made: in another process.

TRITON = """
import sys
sys.path[:0] = {paths!r}
import numpy as np
import torch
import triton_attention
from refs import oracle

place = "cuda" if torch.cuda.is_available() else "cpu"
random = np.random.default_rng(0)


def check(dtype, prefixes, page_size, splits):
    batch, nodes, heads, rank, width, keys = len(prefixes), 5, 7, 32, 48, max(prefixes) + 5
    inputs = {{
        "q": random.normal(size=(batch, nodes, heads, width)).astype(dtype),
        "kv_cache": random.normal(size=(batch, keys, width)).astype(dtype),
        "cache_seqlens": np.array(prefixes, np.int32),
        "tree_mask": random.random((batch, nodes, nodes)) < 0.5,
    }}
    inputs["tree_mask"][0, 0] = False
    if page_size:
        pages = -(-keys // page_size)
        inputs["kv_cache"] = random.normal(size=(batch * pages + 3, page_size, width)).astype(dtype)
        inputs["block_table"] = random.permutation(batch * pages + 3)[: batch * pages].astype(np.int32)
        inputs["block_table"] = inputs["block_table"].reshape(batch, pages)
    exact, exact_lse = oracle.verify_attention(**inputs, sm_scale=0.2, kv_lora_rank=rank)
    given = {{name: torch.from_numpy(x).to(place) for name, x in inputs.items()}}
    out = torch.full(exact.shape, -7.0, dtype=given["q"].dtype, device=place)
    lse = torch.full(exact_lse.shape, -7.0, device=place)
    call = triton_attention.attention(torch, given, out, lse, sm_scale=0.2, multiprocessors=4, splits=splits)
    call(given["q"], given["kv_cache"])
    error = np.linalg.norm(out.double().cpu().numpy() - exact) / np.linalg.norm(exact)
    assert error < (1e-6 if dtype == np.float32 else 1e-3), error
    lse = lse.cpu().numpy()
    assert np.array_equal(np.isneginf(lse), np.isneginf(exact_lse))  # a node that sees nothing
    seen = ~np.isneginf(lse)
    assert np.abs(lse[seen] - exact_lse[seen]).max() < (1e-5 if dtype == np.float32 else 1e-3)


check(np.float32, (0, 40), 0, 1)
check(np.float32, (0, 90), 0, 4)  # more parts than the first request has tiles
check(np.float16, (70, 9), 8, 3)
check(np.float16, (150,), 16, None)
"""


def interpreter_runs():
    """Up to NumPy 2.3: since then an array of one element is no number, as which it takes the bounds of loops."""
    return np.lib.NumpyVersion(np.__version__) < "2.4.0"


def test_the_triton_kernel_computes_tree_attention():
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        if not interpreter_runs():
            pytest.skip("Triton's interpreter needs NumPy before 2.4, and there is no GPU")
        environment["TRITON_INTERPRET"] = "1"
    code = TRITON.format(paths=[str(ROOT / "profiling"), str(ROOT)])
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_keys_are_split_so_that_programs_fill_the_gpu():
    pytest.importorskip("triton")
    import triton_attention

    assert triton_attention.parts(1000, 64, 132) == 1  # enough without
    assert triton_attention.parts(1, 1, 132) == 1  # nothing to split
    assert triton_attention.parts(17, 2049, 132) == 23  # 391 programs, five less than three waves
    for programs in (1, 2, 17, 72, 131, 133):
        for tiles in (1, 3, 33, 2049):
            assert 1 <= triton_attention.parts(programs, tiles, 132) <= min(tiles, triton_attention.MOST_SPLITS)
