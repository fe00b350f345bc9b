"""Time matmul's float16 rungs on a GPU, compared with cuBLAS (torch.matmul) if PyTorch is
installed.

    python -m numdiff.benchmark.scripts.half_matmul [--only PATTERN …] [--versions 6,5] [--rounds 9] [--no-row-sums]
    python -m numdiff.benchmark.scripts.half_matmul --only 'w*' --width 128     with tiles so wide, whatever is chosen
    python -m numdiff.benchmark.scripts.half_matmul --pairs no,yes              blocks alone, then in pairs

Each product is checked first: some rows against float64, and all of it against PyTorch's. Then both
are recorded as CUDA graphs of several launches over rotating buffers, which are replayed
alternately; printed are medians. A weight's gradient is added to a float32 array here, with the
bias's gradient unless --no-row-sums, while cuBLAS writes a new float16 one; fc1-gelu,
fc2-gelu-gradient, w12-swiglu and w3-swiglu-gradient have an activation or its backward at their
end, and cuBLAS has none; fc2-gelu-again-gradient writes GELU(u) over u as well, as training does.
predicted: the launcher's estimate.
"""

import argparse
import contextlib
import fnmatch
import itertools
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from numdiff.device import download, get_gpu, upload, zeros
from numdiff.kernels import matmul_forward, tuning
from numdiff.kernels.elementwise import gelu_backward, gelu_forward
from numdiff.kernels.matmul import (
    choice,
    matmul_gelu_backward,
    matmul_gelu_forward,
    matmul_swiglu_backward,
    matmul_swiglu_forward,
    mma,
)
from numdiff.kernels.matmul.hopper import epilogue, layout
from numdiff.kernels.matmul.hopper import kernel as hopper
from numdiff.kernels.matmul.hopper.launcher import GemmTiling, launch_hopper
from numdiff.kernels.matmul.product import ProductOperand
from numdiff.kernels.transformer.swiglu import swiglu_backward_reference, swiglu_forward_reference

ROWS = 64 * 256  # tokens of DiT-B/2 at batch 64
SMALL_ROWS = 16 * 2 * 256  # of DiT-S/2, 16 images with guidance
# name, N, K
LAYERS = (("qkv", 2304, 768), ("proj", 768, 768), ("fc1", 3072, 768), ("fc2", 768, 3072))
# name -> M, N, K, transpose_a, transpose_b, dtype of the result
CASES = {
    "8192": (8192, 8192, 8192, False, True, np.float16),
    "4096": (4096, 4096, 4096, False, True, np.float16),
}
for name, n, k in LAYERS:
    CASES[f"{name}-forward"] = ROWS, n, k, False, True, np.float16
    CASES[f"{name}-dgrad"] = ROWS, k, n, False, False, np.float16
    CASES[f"{name}-wgrad"] = n, k, ROWS, True, False, np.float32
for name, n, k in (("qkv", 1152, 384), ("proj", 384, 384), ("fc1", 1536, 384), ("fc2", 384, 1536)):
    CASES[f"s-{name}-forward"] = SMALL_ROWS, n, k, False, True, np.float16
# a SwiGLU's layers in LightningDiT-B/2
CASES["w12-forward"] = ROWS, 2 * 2048, 768, False, True, np.float16
CASES["w3-dgrad"] = ROWS, 2048, 768, False, False, np.float16
# case -> what is at its end, ours, and in float64
ENDS = {
    "fc1-gelu": (
        "gelu",
        lambda a, b, bias, u: matmul_gelu_forward(a, b, bias)[1],
        lambda c, u: gelu_forward(c),
    ),
    "fc2-gelu-gradient": (
        "gelu_gradient",
        lambda a, b, bias, u: matmul_gelu_backward(a, b, u),
        gelu_backward,
    ),
    "fc2-gelu-again-gradient": (
        "gelu_again_gradient",
        lambda a, b, bias, u: matmul_gelu_backward(a, b, u, True)[0],
        gelu_backward,
    ),
    "w12-swiglu": (
        "swiglu",
        lambda a, b, bias, u: matmul_swiglu_forward(a, b, bias)[1],
        lambda c, u: swiglu_forward_reference(c),
    ),
    "w3-swiglu-gradient": (
        "swiglu_gradient",
        lambda a, b, bias, u: matmul_swiglu_backward(a, b, u),
        swiglu_backward_reference,
    ),
}
CASES |= dict(
    zip(
        ENDS,
        (
            CASES[name]
            for name in ("fc1-forward", "fc2-dgrad", "fc2-dgrad", "w12-forward", "w3-dgrad")
        ),
        strict=True,
    )
)
POOL = 2**23 - 9  # random numbers, repeated: no multiple of a row


@contextlib.contextmanager
def only(pairs):
    """Within the context blocks of rung 6 work alone ("no"), in pairs ("yes"), or as the launcher
    chooses ("auto")."""
    before = choice.PAIRS
    choice.PAIRS = {"no": False, "yes": True, "auto": None}[pairs]
    try:
        with contextlib.nullcontext() if pairs == "auto" else tuning.ignored():
            yield
    finally:
        choice.PAIRS = before


def kernel_of(case, version, multiprocessors):
    """(kernel, what identifies it, the launcher's estimate in µs, tile, slices, whether by pairs of
    blocks)."""
    M, N, K, transpose_a, transpose_b, dtype = CASES[case]
    half = dtype == np.float16
    product = choice.HalfProduct(1, M, N, K, 2 if half else 4, across=transpose_a)
    tile, slices, paired, ns = choice.choose_half_tile(version, product, not half, multiprocessors)
    key = (tile[1] if version == 6 else tile, transpose_a, not transpose_b, half)
    kernel = (
        mma.KERNELS[(tile, mma.TILES[tile].stages, *key[1:3], mma.PLAIN)]
        if version == 5
        else (hopper.PAIR_KERNELS if paired else hopper.KERNELS)[key]
    )
    if case in ENDS and version == 6:
        name = ENDS[case][0]
        key = min(width for width in epilogue.ACTIVATIONS[name] if width >= tile[1]), name
        kernel = (hopper.PAIR_ACTIVATION_KERNELS if paired else hopper.ACTIVATION_KERNELS)[key]
        tile = tile[0], key[0]
    return kernel, key, ns / 1e3, tile, slices, paired


def compile_kernel(version, key, paired):
    """In a separate process: launch a kernel once on small matrices, so that it is found in the
    cache on disk."""
    choice.PAIRS, choice.pairs_fit = paired, lambda *_: paired
    gpu = get_gpu()
    a, b = (upload(np.ones((64, 64), np.float16), gpu) for _ in "ab")
    if len(key) == 2:
        choice.choose_half = lambda *_, **more: ((layout.BM, key[0]), 1, 0.0)
        ((ours, exact),) = (ends[1:] for ends in ENDS.values() if ends[0] == key[1])
        halves = 2 if "swiglu" in key[1] else 1
        rows = 64 * (halves if key[1] == "swiglu" else 1)
        b, u = upload(np.ones((rows, 64), np.float16), gpu), np.ones((64, 64 * halves), np.float16)
        result = download(ours(a, b, zeros(rows, np.float32, gpu), upload(u, gpu)))
        result = (
            result.astype(np.float64) * 64 / exact(np.full((64, rows), 64.0), u.astype(np.float64))
        )
        return tuple(float(np.round(f(result))) for f in (np.min, np.max))
    tile, transpose_a, across, half = key
    c = zeros((64, 64), np.float16 if half else np.float32, gpu)
    operands = ProductOperand(a, transpose_a), ProductOperand(b, not across), ProductOperand(c)
    if version == 6:
        launch_hopper(*operands, GemmTiling(tile, paired=paired))
    else:
        mma.launch_mma(*operands, tile)
    return float(download(c).min()), float(download(c).max())


def sets_of(nbytes):
    """How many sets of buffers are used in turn: more than the L2 cache holds."""
    return int(np.clip(-(-150e6 // nbytes), 2, 8))


def graph(gpu, function, count):
    """Replays `count` calls of function(i), which have run once already."""
    arena = gpu.new_arena()
    with gpu.within(arena):
        for i in range(count):
            function(i)
        gpu.synchronize()
        return gpu.capture(lambda: [function(i) for i in range(count)])


def torch_graph(torch, function, count):
    for i in range(count):
        function(i)
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        for i in range(count):
            function(i)
    return recorded.replay


def milliseconds(replay, synchronize):
    start = time.perf_counter()
    replay()
    synchronize()
    return 1e3 * (time.perf_counter() - start)


def measure(gpu, torch, case, version, rounds, pool, row_sums):
    M, N, K, transpose_a, transpose_b, dtype = CASES[case]
    a = np.resize(pool, (K, M) if transpose_a else (M, K))
    b = np.resize(pool[1::2], (N, K) if transpose_b else (K, N))
    kernel, key, predicted, tile, slices, paired = kernel_of(case, version, gpu.multiprocessors)
    sets = sets_of(a.nbytes + b.nbytes)
    ours = [[upload(a, gpu), upload(b, gpu), zeros((M, N), dtype, gpu)] for _ in range(sets)]
    accumulate = dtype == np.float32
    sums = zeros(M, np.float32, gpu) if accumulate and row_sums else None
    bias, u, inputs = zeros(N, np.float32, gpu), None, [None] * sets
    if "gradient" in case:
        u = np.resize(pool[2::3], (M, 2 * N if "swiglu" in case else N))
        inputs = [upload(u, gpu) for _ in range(sets)]

    def run(i):
        x, y, out = ours[i % sets]
        if case in ENDS:
            ours[i % sets][2] = ENDS[case][1](x, y, bias, inputs[i % sets])
        else:
            matmul_forward(
                x,
                y,
                transpose_a,
                transpose_b,
                out=out,
                accumulate=accumulate,
                version=version,
                row_sums=sums,
            )

    if not accumulate:
        gpu.fill(ours[0][2], 0xFF)
    run(0)
    rows = slice(M // 2, M // 2 + 16)
    left = (a[:, rows].T if transpose_a else a[rows]).astype(np.float64)
    wide = b.astype(np.float32 if b.size > 2**25 else np.float64)
    want = left @ (wide.T if transpose_b else wide)
    if case in ENDS:
        want = ENDS[case][2](want, None if u is None else u[rows].astype(np.float64))
    error = np.linalg.norm(download(ours[0][2][rows]) - want) / np.linalg.norm(want)
    count = int(np.clip(3000 / predicted, 2, 40))
    others, theirs, away = [], [], float("nan")
    if sums is not None:
        exact = a.sum(0, dtype=np.float64)
        error = max(error, float(np.linalg.norm(download(sums) - exact) / np.linalg.norm(exact)))
    if torch is not None:
        tensors = [
            (
                torch.from_numpy(a).cuda(),
                torch.from_numpy(b).cuda(),
                torch.empty((M, N), dtype=torch.float16, device="cuda"),
            )
            for _ in range(sets)
        ]

        def run_torch(i):
            x, y, out = tensors[i % sets]
            torch.mm(x.T if transpose_a else x, y.T if transpose_b else y, out=out)

        run_torch(0)
        if case not in ENDS:
            full = torch.from_numpy(download(ours[0][2])).cuda().float()
            away = float((full - tensors[0][2].float()).norm() / full.norm())
        theirs = torch_graph(torch, run_torch, count)
    mine, timings = graph(gpu, run, count), []
    for i in range(rounds + 2):
        ms = milliseconds(mine, gpu.synchronize)
        other = milliseconds(theirs, torch.cuda.synchronize) if torch is not None else float("nan")
        if i >= 2:
            timings.append(ms)
            others.append(other)
    us, us_torch = (1e3 * float(np.median(t)) / count for t in (timings, others))
    tflops = 2e-6 * M * N * K / us
    registers = max((k.regs_per_thread for k in kernel.overloads.values()), default=0)
    what = f"{tile[0]}×{tile[1]}" + (f" /{slices}" if slices > 1 else "") + " pairs" * paired
    shape = f"{M}×{N}×{K}"
    print(
        f"{case:18s} {shape:>18} v{version} {what:16s} {us:8.1f} {predicted:9.1f} {tflops:8.0f} {us_torch:8.1f} "
        f"{100 * us_torch / us:6.0f} % {registers:5d} {error:9.1e} {away:9.1e}"
        + ("" if error < 2e-3 and not away > 2e-3 else "   WRONG"),
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        nargs="*",
        default=["*"],
        help=f"of {', '.join(CASES)}, or patterns such as '*wgrad'",
    )
    parser.add_argument("--versions", default="6")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--no-row-sums", action="store_true", help="weight gradients without the bias's"
    )
    parser.add_argument(
        "--pairs", default="auto", help="whether blocks work in pairs: no, yes or auto, or several"
    )
    parser.add_argument(
        "--width", type=int, choices=sorted(layout.STAGES), help="version 6 with tiles so wide"
    )
    options = parser.parse_args()
    if options.width:
        fixed = {
            6: {tile: ns for tile, ns in choice.HALF_TILES[6].items() if tile[1] == options.width}
        }
        choice.HALF_TILES |= fixed
    cases = [c for c in CASES if any(fnmatch.fnmatch(c, p) for p in options.only)]
    versions = [int(v) for v in options.versions.split(",")]
    start = time.perf_counter()
    gpu = get_gpu()
    keys = set()
    for pairs in options.pairs.split(","):
        with only(pairs):
            found = ((v, kernel_of(c, v, gpu.multiprocessors)) for c in cases for v in versions)
            keys |= {(v, one[1], one[-1]) for v, one in found}
    with ProcessPoolExecutor(min(len(keys), 12), multiprocessing.get_context("spawn")) as workers:
        jobs = [(key, workers.submit(compile_kernel, *key)) for key in keys]
        pool = np.random.default_rng(0).standard_normal(POOL, dtype=np.float32).astype(np.float16)
        try:
            import torch
        except ImportError:
            torch = None
        for key, job in jobs:
            if job.result() != (64.0, 64.0):
                print(f"kernel {key}: 64 ones give {job.result()}")
    print(
        f"{gpu.device_name}, {gpu.multiprocessors} multiprocessors; {len(keys)} kernels compiled in "
        f"{time.perf_counter() - start:.0f} s; {f'PyTorch {torch.__version__}' if torch else 'no PyTorch'}"
    )
    print(
        f"{'product':18s} {'M×N×K':>18} {'tile /slices':>15} {'µs':>8} {'predicted':>9} {'TFLOP/s':>8} {'cuBLAS':>8} "
        f"{'speed':>8} {'regs':>5} {'error':>9} {'to torch':>9}"
    )
    for case in cases:
        for version, pairs in itertools.product(versions, options.pairs.split(",")):
            with only(pairs):
                measure(gpu, torch, case, version, options.rounds, pool, not options.no_row_sums)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
