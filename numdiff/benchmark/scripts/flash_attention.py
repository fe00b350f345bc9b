"""Flash attention on a GPU, its versions and matmul, softmax, matmul side by side in one run.

    python -m numdiff.benchmark.scripts.flash_attention
    python -m numdiff.benchmark.scripts.flash_attention --lengths 256 1024 --head-sizes 64 --repeats
    50

float32: matmul, softmax, matmul; version 2; version 4. float16: versions 3 and 5, and PyTorch's
scaled_dot_product_attention where PyTorch is installed (on q, k and v as it wants them: its copies
out of qkv are not counted). Everything timed is captured once and replayed, as in a training step:
forward, backward from what the forward left, and both. The ways take turns; before each, the
second-level cache is overwritten; events stand around the replay. Times are medians in µs; "pred"
is the time that was predicted, from the rates below; MiB is what matmuls and version 4 take in
addition to qkv and dy. The errors are those of versions 4, 3 and 5, the larger of y's and dqkv's
against float64 in the 2-norm, on one image and one head of that length.
"""

import argparse
import functools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from numdiff.device import download, get_gpu, upload
from numdiff.kernels import (
    attention_backward,
    attention_forward,
    flash_attention_backward,
    flash_attention_forward,
)
from numdiff.kernels.attention import flash_attention_backward_cost, flash_attention_forward_cost

# name, B, T, heads, HS
SHAPES = [
    ("UNet 16x16", 32, 256, 6, 32),
    ("UNet 8x8", 32, 64, 8, 32),
    ("DiT-B/2", 64, 256, 12, 64),
    ("DiT-XL/2", 32, 256, 16, 72),
    ("long", 16, 1024, 6, 64),
    ("long", 16, 1024, 6, 72),
    ("longer", 4, 4096, 6, 64),
]
PASSES = {"forward": (True, False), "backward": (False, True), "both": (True, True)}
# TFLOP/s forward and backward that were predicted for an H100, by version and head size, from
# instructions counted
RATES = {
    (4, 32): (49, 39),
    (4, 64): (76, 70),
    (4, 72): (77, 71),
    (3, 32): (150, 130),
    (3, 64): (230, 220),
    (3, 72): (210, 180),
}
LAUNCHES = 1, 3  # of them, at most, forward and backward
LAUNCH = 1.5  # µs, from one kernel of a graph to the next
FLUSH = 256 << 20  # bytes, several times a second-level cache
WARMUP = 3


class ReplayClock:
    """Two events of the driver in the GPU's stream."""

    def __init__(self, gpu):
        self.gpu, self.driver = gpu, gpu._driver
        self.events = [gpu.check(self.driver.cuEventCreate(0)) for _ in range(2)]
        self.flush = upload(np.zeros(FLUSH, np.uint8), gpu)

    def milliseconds(self, replay):
        gpu, (start, end) = self.gpu, self.events
        gpu.fill(self.flush, 0)
        gpu.check(self.driver.cuEventRecord(start, gpu.stream_handle))
        replay()
        gpu.check(self.driver.cuEventRecord(end, gpu.stream_handle))
        gpu.synchronize()
        return float(gpu.check(self.driver.cuEventElapsedTime(start, end)))


def capture(gpu, arena, function):
    """(what replays function(), the bytes that it takes). All captures may share an arena: they run
    one by one."""
    with gpu.within(arena):
        function()  # compiles the kernels, and lets the arena grow
        gpu.synchronize()
        arena.peak_bytes = arena.used_bytes
        before = arena.used_bytes
        return gpu.capture(function), arena.peak_bytes - before


class Flash:
    """Flash attention of one version, as its two passes; `kept` is what the first leaves for the
    second."""

    def __init__(self, version=None, dtype=np.float16):
        self.version, self.dtype = version, dtype

    def forward(self, qkv, heads):
        return flash_attention_forward(qkv, heads, version=self.version)

    def backward(self, dy, qkv, kept, heads):
        return flash_attention_backward(dy, qkv, *kept, heads, version=self.version)


class Matmuls:
    dtype = np.float32

    def forward(self, qkv, heads):
        return attention_forward(qkv, heads)

    def backward(self, dy, qkv, kept, heads):
        return attention_backward(dy, qkv, kept[1], heads)


WAYS = {
    "matmuls": Matmuls(),
    "v2": Flash(2, np.float32),
    "v4": Flash(4, np.float32),
    "v3": Flash(3),
    "v5": Flash(5),
}


def inputs(gpu, rng, B, T, heads, HS, dtype):
    C = heads * HS
    return [
        upload(rng.standard_normal((B, T, width), dtype=np.float32).astype(dtype), gpu)
        for width in (3 * C, C)
    ]


def compile_way(way, shape):
    """In a separate process: run once, so that the kernels are found in the cache on disk."""
    gpu, way, heads = get_gpu(), WAYS[way], shape[2]
    qkv, dy = inputs(gpu, np.random.default_rng(0), *shape, way.dtype)
    result = way.backward(dy, qkv, way.forward(qkv, heads), heads)
    return bool(np.isfinite(download(result).astype(np.float32)).all())


def torch_replay(B, T, heads, HS, forward, backward):
    """What replays PyTorch's attention in float16, or None."""
    try:
        import torch
    except ImportError:
        return None
    q, k, v = (
        torch.randn(B, heads, T, HS, device="cuda", dtype=torch.float16, requires_grad=True)
        for _ in "qkv"
    )
    dy = torch.randn_like(q)
    attention, side = torch.nn.functional.scaled_dot_product_attention, torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = attention(q, k, v)

    def work():
        if backward:
            return torch.autograd.grad(
                attention(q, k, v) if forward else y, (q, k, v), dy, retain_graph=not forward
            )
        with torch.no_grad():
            return attention(q, k, v)

    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded, stream=side):
        kept = work()

    flush = torch.empty(FLUSH, dtype=torch.uint8, device="cuda")

    def milliseconds():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(side):
            # meanwhile what follows is launched: as in `ReplayClock`, launching is not in the time
            flush.zero_()
            start.record()
            recorded.replay()
            end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    milliseconds.kept = y, kept
    return milliseconds


def error(gpu, rng, T, HS, way):
    """The larger relative error of y and dqkv, on one image and head."""
    qkv, dy = inputs(gpu, rng, 1, T, 1, HS, way.dtype)
    kept, exact = way.forward(qkv, 1), [download(a).astype(np.float64) for a in (qkv, dy)]
    kept_exactly = way.forward(exact[0], 1)
    worst = 0.0
    for got, want in (
        (kept[0], kept_exactly[0]),
        (way.backward(dy, qkv, kept, 1), way.backward(exact[1], exact[0], kept_exactly, 1)),
    ):
        worst = max(
            worst, np.linalg.norm(download(got).astype(np.float64) - want) / np.linalg.norm(want)
        )
    return worst


def flops_and_prediction(shape, passes, version=None):
    """FLOPs of the passes (forward, backward), and the µs that were predicted for a version."""
    B, T, heads, HS = shape
    costs = [
        cost(B, T, heads * HS, heads)[1]
        for cost in (flash_attention_forward_cost, flash_attention_backward_cost)
    ]
    rates = RATES.get((version, HS), (np.inf, np.inf))
    return (
        sum(f for f, wanted in zip(costs, passes, strict=True) if wanted),
        sum(
            f / rate / 1e6 + n * LAUNCH
            for f, rate, n, wanted in zip(costs, rates, LAUNCHES, passes, strict=True)
            if wanted
        ),
    )


def measure(gpu, arena, clock, rng, shape, passes, repeats):
    """{way: median µs}, {way: bytes} of all ways, which take turns."""
    heads, given = (
        shape[2],
        {dtype: inputs(gpu, rng, *shape, dtype) for dtype in (np.float32, np.float16)},
    )
    replays, nbytes = {}, {}
    for name, way in WAYS.items():
        qkv, dy = given[way.dtype]
        before = None if passes[0] else way.forward(qkv, heads)

        def work(way=way, qkv=qkv, dy=dy, before=before):
            kept = way.forward(qkv, heads) if passes[0] else before
            return way.backward(dy, qkv, kept, heads) if passes[1] else kept

        replay, nbytes[name] = capture(gpu, arena, work)
        replays[name] = functools.partial(clock.milliseconds, replay)
    in_torch = torch_replay(*shape, *passes)
    if in_torch:
        replays["torch"] = in_torch
    times = np.array([[replay() for replay in replays.values()] for _ in range(WARMUP + repeats)])[
        WARMUP:
    ]
    return dict(zip(replays, 1e3 * np.median(times, axis=0), strict=True)), nbytes


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head-sizes", type=int, nargs="+", default=[32, 64, 72])
    parser.add_argument(
        "--lengths", type=int, nargs="+", metavar="T", help="instead of the models' shapes"
    )
    parser.add_argument(
        "--tokens", type=int, default=16384, help="of all images together: B is tokens / T"
    )
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    rows = SHAPES
    if options.lengths:
        rows = [
            ("", max(1, options.tokens // T), T, options.heads, HS)
            for HS in options.head_sizes
            for T in options.lengths
        ]
    with ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {
            (way, *row[1:]): pool.submit(compile_way, way, row[1:]) for row in rows for way in WAYS
        }
        for job, done in jobs.items():
            if not done.result():
                print(f"not finite: {job}")
    gpu, rng = get_gpu(), np.random.default_rng(0)
    arena, clock = gpu.new_arena(), ReplayClock(gpu)
    print(
        f"{gpu.device_name}; µs; x: times as fast as matmuls; TF: TFLOP/s that flash attention computes"
    )
    print(
        "                 B    T heads HS          | matmuls      v2      v4  pred     x    TF |      v3  pred    TF"
        "      v5    TF   torch |   MiB matmuls, v4 | error v4, v3, v5"
    )
    for name, *shape in rows:
        B, T, heads, HS = shape
        for label, passes in PASSES.items():
            us, nbytes = measure(gpu, arena, clock, rng, shape, passes, options.repeats)
            flops, in_4 = flops_and_prediction(shape, passes, 4)
            _, in_3 = flops_and_prediction(shape, passes, 3)
            line = (
                f"{name:12} {B:5} {T:4} {heads:5} {HS:2} {label:8} | "
                f"{us['matmuls']:7.1f} {us['v2']:7.1f} {us['v4']:7.1f} {in_4:5.0f} "
                f"{us['matmuls'] / us['v4']:5.2f} {flops / us['v4'] / 1e6:5.1f} | {us['v3']:7.1f} {in_3:5.0f} "
                f"{flops / us['v3'] / 1e6:5.1f} {us['v5']:7.1f} {flops / us['v5'] / 1e6:5.1f} "
                f"{us.get('torch', np.nan):7.1f} | {nbytes['matmuls'] / 2**20:8.1f} {nbytes['v4'] / 2**20:8.1f}"
            )
            if label == "both":
                line += " | " + " ".join(
                    f"{error(gpu, rng, T, HS, WAYS[way]):.1e}" for way in ("v4", "v3", "v5")
                )
            print(line, flush=True)


if __name__ == "__main__":
    main()
