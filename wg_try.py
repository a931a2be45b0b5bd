"""Try the wgmma draft on one Hopper GPU against float64: python3 wg_try.py check time"""
import ctypes, math, sys
import numpy as np, torch
from cuda.bindings import driver as drv
from numba import cuda
import ddtree_numba as dd
from ddtree_numba.attention import schedule, wgmma as W
dev, G = "cuda", torch.cuda.get_device_properties(0).multi_processor_count
SCALE = 192 ** -0.5
DT = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
TMA = {"bf16": drv.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, "f16": drv.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16}

def tensor_map(ptr, cols, rows, pages, row_bytes, page_bytes, kind):
    u64, u32 = drv.cuuint64_t, drv.cuuint32_t
    e, m = drv.cuTensorMapEncodeTiled(TMA[kind], 3, ptr, [u64(cols), u64(rows), u64(pages)], [u64(row_bytes), u64(page_bytes)],
        [u32(64), u32(64), u32(1)], [u32(1)] * 3, drv.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, drv.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        drv.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B, drv.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
    assert e == drv.CUresult.CUDA_SUCCESS, e
    return tuple(int(x) for x in np.frombuffer(ctypes.string_at(m.getPtr(), 128), np.int64))

def problem(B, H, Q, lens, kind="bf16", page=0, seed=0, poison=True):
    g = torch.Generator(device=dev).manual_seed(seed); rng = np.random.default_rng(seed)
    q = torch.randn(B, Q, H, 576, device=dev, generator=g).to(DT[kind])
    S = max(lens) + Q
    kv = torch.randn(B, S, 576, device=dev, generator=g).to(DT[kind])
    par = np.full((B, Q), -1)
    for i in range(1, Q): par[:, i] = rng.integers(max(0, i - 6), i, size=B)
    mask = dd.mask_from_parents(par)
    if poison:
        for b, n in enumerate(lens): kv[b, n + Q:] = float("nan")
    table = None
    if page:
        pad = -S % page; kp = torch.nn.functional.pad(kv, (0, 0, 0, pad), value=float("nan")).view(-1, page, 576)
        order = torch.randperm(len(kp), device=dev, generator=g); t = torch.empty_like(order); t[order] = torch.arange(len(kp), device=dev)
        return q, kp[order].contiguous(), t.int().view(B, -1).contiguous(), lens, mask, kv
    return q, kv, torch.arange(B, dtype=torch.int32, device=dev)[:, None].contiguous(), lens, mask, kv

def prepare(p, kind="bf16", out_kind="bf16", bool_mask=False):
    q, cache, table, lens, mask, _ = p
    B, Q, H, _ = q.shape; R = Q * H; rt = -(-R // 64); page = cache.shape[1]; S = page * table.shape[1]
    w = torch.from_numpy(dd.pack_mask(mask).view(np.int32)).to(dev) if not bool_mask else torch.from_numpy(mask).to(dev)
    most = S - Q; longest = -(-(most + Q) // 64)
    npieces = min(-(-B * rt * longest // G) + 4, B * rt + 4)
    slots = schedule.slots(rt, G)
    e = q.element_size()
    a = dict(maps=torch.zeros(G * 64, dtype=torch.int64, device=dev), pieces=torch.full((G, npieces, W.PIECE_FIELDS), -9, dtype=torch.int32, device=dev),
        plan=torch.zeros(W.STARTS + B + 1, dtype=torch.int32, device=dev), out=torch.full((B, R, 512), float("nan"), dtype=DT[out_kind], device=dev),
        lse=torch.full((B, R), float("nan"), device=dev), states=torch.full((slots, 64, 512), float("nan"), device=dev), sl=torch.full((slots, 64), float("nan"), device=dev),
        lens=torch.tensor(lens, dtype=torch.int32, device=dev), w=w, table=table, q=q, cache=cache)
    ca = cuda.as_cuda_array
    out = ca(a["out"].view(torch.uint16)) if out_kind == "bf16" else ca(a["out"])
    wm = ca(w.view(torch.uint32)) if not bool_mask else ca(w)
    m1 = tensor_map(q.data_ptr(), 512, R, B, 576 * e, R * 576 * e, kind); m2 = tensor_map(q.data_ptr() + 1024, 64, R, B, 576 * e, R * 576 * e, kind)
    m3 = tensor_map(cache.data_ptr(), 576, page, len(cache), 576 * e, page * 576 * e, kind)
    i = np.int32
    args = (m1, m2, m3, ca(table), ca(a["lens"]), wm, i(1 if bool_mask else 32), i(page), i(most), i(H), i(Q), np.float32(SCALE * math.log2(math.e)),
        ca(a["maps"]), ca(a["pieces"]), ca(a["plan"]), out, ca(a["lse"]), ca(a["states"]), ca(a["sl"]))
    cargs = (ca(a["plan"]), ca(a["states"]), ca(a["sl"]), out, ca(a["lse"]), i(rt), i(R), i(G))
    return a, args, cargs, (B * rt, 8)

seen = set()
def kernels(kind, out_kind, args, cargs):
    k, c = W.make_kernel(kind, out_kind), W.make_combine(out_kind)
    key = (kind, out_kind, args[5].dtype)
    if key not in seen:
        from numba.cuda.cudadrv.driver import driver, binding
        sig = tuple(cuda.np.typeof(x) if False else __import__("numba.cuda", fromlist=["typeof"]).typeof(x) for x in args) if False else None
        k.compile(tuple(k.typeof_pyval(x) for x in args))
        for o in k.overloads.values():
            f = o._codelibrary.get_cufunc()
            driver.cuKernelSetAttribute(binding.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, W.SHARED_BYTES, f.handle, f.device.id)
        seen.add(key)
    return k, c

def call(kind, out_kind, args, cargs, grid, stream=0):
    k, c = kernels(kind, out_kind, args, cargs)
    k[G, 384, stream, W.SHARED_BYTES](*args)
    c[grid, 256, stream](*cargs)

def exact(p):
    q, _, _, lens, mask, kv = p
    B, Q, H, _ = q.shape
    out = torch.zeros(B, Q * H, 512, dtype=torch.float64, device=dev); lse = torch.zeros(B, Q * H, dtype=torch.float64, device=dev)
    for b, n in enumerate(lens):
        k = kv[b, :n + Q].double(); s = (q[b].reshape(Q * H, 576).double() @ k.T).view(Q, H, n + Q) * SCALE
        s[:, :, n:].masked_fill_(~torch.from_numpy(mask[b]).to(dev)[:, None, :], -math.inf)
        lse[b] = torch.logsumexp(s, -1).flatten(); out[b] = (torch.softmax(s, -1) @ k[:, :512]).view(Q * H, 512)
    return out, lse

if "check" in sys.argv:
    for B, H, Q, lens in [(2, 8, 9, [37, 37]), (2, 16, 5, [195, 128]), (3, 40, 7, [1104, 57, 58]), (1, 64, 17, [2048]), (1, 8, 65, [3936]), (6, 64, 9, [2991, 1, 61, 1990, 55, 504]), (1, 4, 300, [100]), (40, 8, 3, list(range(1, 41)))]:
        for kind, out_kind, page, bm in (("bf16", "bf16", 0, False), ("bf16", "f32", 64, False), ("f16", "f16", 128, True)):
            p = problem(B, H, Q, lens, kind, page); o, l = exact(p)
            a, args, cargs, grid = prepare(p, kind, out_kind, bm)
            call(kind, out_kind, args, cargs, grid); torch.cuda.synchronize()
            print((B, H, Q, lens[:6]), kind, out_kind, page, "run", int(a["plan"][1]), "out", f"{((a['out'].double() - o).norm() / o.norm()).item():.1e}", "lse", f"{(a['lse'].double() - l).abs().max().item():.1e}", flush=True)
if "time" in sys.argv:
    flush = torch.empty(256 << 20, dtype=torch.int8, device=dev)
    for B, H, Q, pre in [(1, 64, 17, 2048), (8, 64, 9, 2048), (32, 64, 9, 8192), (32, 128, 2, 8192), (1, 64, 65, 32768), (64, 16, 33, 1024), (2, 8, 9, 37), (1, 64, 17, 131072), (1, 8, 9, 8192), (64, 128, 1, 4096)]:
        a, args, cargs, grid = prepare(problem(B, H, Q, [pre] * B, page=64)); g = torch.cuda.CUDAGraph()
        call("bf16", "bf16", args, cargs, grid); torch.cuda.synchronize()
        with torch.cuda.graph(g): call("bf16", "bf16", args, cargs, grid, cuda.external_stream(torch.cuda.current_stream().cuda_stream))
        us = []
        for _ in range(33):
            e0, e1 = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_(); torch.cuda._sleep(1000000); e0.record(); g.replay(); e1.record(); torch.cuda.synchronize(); us.append(e0.elapsed_time(e1) * 1e3)
        m = float(np.median(us[3:])); print((B, H, Q, pre), f"{m:.1f} us {2 * B * Q * H * (pre + Q) * 1088 / m / 1e6:.0f} TFLOP/s", flush=True)
