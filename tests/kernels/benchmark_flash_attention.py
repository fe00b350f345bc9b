"""Flash attention against matmul, softmax, matmul on a GPU: time, TFLOP/s, memory and error, side by side in one run.

    python -m tests.kernels.benchmark_flash_attention
    python -m tests.kernels.benchmark_flash_attention --lengths 256 1024 --head-sizes 64 --repeats 50

Each of the four things timed (either way, forward, and forward with backward) is captured once and replayed, as in a
training step. They take turns; before each, the second-level cache is overwritten; events of the driver stand around
the replay. Times are medians, TFLOP/s count the products that each way computes (flash: 2 + 5, the other: 2 + 4),
MiB are what a way takes beside its inputs qkv and dy. The error is flash attention's largest, of y and of dqkv against
float64 in the 2-norm, on one image and one head of that length.
"""
import argparse

import numpy as np

from numdiff.device import download, get_gpu, upload
from numdiff.kernels import (
    attention_backward,
    attention_forward,
    flash_attention_backward,
    flash_attention_forward,
)
from numdiff.kernels.flash_attention import flash_attention_backward_cost, flash_attention_forward_cost

FLUSH = 256 << 20  # bytes, several times a second-level cache
WARMUP = 3


class Clock:
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


def medians(clock, replays, repeats):
    """Median milliseconds of each of some replays, which take turns."""
    times = np.array([[clock.milliseconds(replay) for replay in replays] for _ in range(WARMUP + repeats)])
    return np.median(times[WARMUP:], axis=0)


def capture(gpu, arena, function):
    """(what replays function(), the bytes that it takes). All captures may share an arena: they run one by one."""
    with gpu.within(arena):
        function()  # compiles the kernels, and lets the arena grow
        gpu.synchronize()
        arena.peak_bytes = arena.used_bytes
        before = arena.used_bytes
        return gpu.capture(function), arena.peak_bytes - before


def flash(qkv, dy, heads, backward):
    y, logsumexp = flash_attention_forward(qkv, heads)
    return flash_attention_backward(dy, qkv, y, logsumexp, heads) if backward else y


def matmuls(qkv, dy, heads, backward):
    y, probabilities = attention_forward(qkv, heads)
    return attention_backward(dy, qkv, probabilities, heads) if backward else y


def error(gpu, rng, T, HS):
    """The larger relative error of y and dqkv, on one image and head."""
    qkv, dy = (rng.standard_normal((1, T, width), dtype=np.float32) for width in (3 * HS, HS))
    worst = 0.0
    for backward in (False, True):
        got = download(flash(upload(qkv, gpu), upload(dy, gpu), 1, backward))
        want = flash(qkv.astype(np.float64), dy.astype(np.float64), 1, backward)
        worst = max(worst, np.linalg.norm(got - want) / np.linalg.norm(want))
    return worst


def measure(gpu, arena, clock, rng, B, T, heads, HS, repeats):
    """(milliseconds, bytes) of flash and matmuls forward, then of both forward with backward."""
    C = heads * HS
    qkv, dy = (upload(rng.standard_normal((B, T, width), dtype=np.float32), gpu) for width in (3 * C, C))
    replays, nbytes = zip(*(capture(gpu, arena, lambda way=way, backward=backward: way(qkv, dy, heads, backward))
                            for backward in (False, True) for way in (flash, matmuls)), strict=True)
    return medians(clock, replays, repeats), nbytes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-sizes", type=int, nargs="+", default=[32, 64, 72])
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024, 2048, 4096], metavar="T")
    parser.add_argument("--tokens", type=int, default=16384, help="of all images together: B is tokens / T")
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    gpu, rng = get_gpu(), np.random.default_rng(0)
    arena, clock = gpu.new_arena(), Clock(gpu)
    print(f"{gpu.device_name}, {options.heads} heads; flash | matmuls | times as fast; TFLOP/s")
    print("  HS     T    B | forward, ms                  | with backward, ms            | TFLOP/s forward, with b. | "
          "MiB with backward | error")
    for HS in options.head_sizes:
        for T in options.lengths:
            B, C = max(1, options.tokens // T), options.heads * HS
            ms, nbytes = measure(gpu, arena, clock, rng, B, T, options.heads, HS, options.repeats)
            forward = flash_attention_forward_cost(B, T, C, options.heads)[1]
            flash_flops = forward + flash_attention_backward_cost(B, T, C, options.heads)[1]
            flops = np.array([forward, forward, flash_flops, 3 * forward])
            rates = flops / ms / 1e9
            print(f"{HS:4} {T:5} {B:4} | {ms[0]:8.3f} | {ms[1]:8.3f} | {ms[1] / ms[0]:6.2f} | {ms[2]:8.3f} | "
                  f"{ms[3]:8.3f} | {ms[3] / ms[2]:6.2f} | {rates[0]:5.1f} {rates[1]:5.1f}  {rates[2]:5.1f} "
                  f"{rates[3]:5.1f} | {nbytes[2] / 2**20:8.1f} {nbytes[3] / 2**20:8.1f} | {error(gpu, rng, T, HS):.1e}",
                  flush=True)


if __name__ == "__main__":
    main()
