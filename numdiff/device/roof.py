"""A card's limits: its arithmetic by the maker's data sheet, its memory by measuring copies.

The makers' figures are for dense matrices with float32 accumulators. Where a card is not in the
table, its arithmetic is that of its multiprocessors' tensor cores at the highest clock that the
driver reports, which few cards hold under load.
"""

import time

from . import empty, synchronize

# TFLOP/s by the makers' data sheets: name begins with -> (float16, TF32)
PUBLISHED = {
    "NVIDIA H100 80GB HBM3": (989.4, 494.7),
    "NVIDIA H100 PCIe": (756.0, 378.0),
    "NVIDIA H200": (989.4, 494.7),
    "NVIDIA GH200": (989.4, 494.7),
    "NVIDIA A100": (312.0, 156.0),
    "NVIDIA L40S": (362.0, 183.0),
    "NVIDIA L4": (121.0, 60.0),
    "NVIDIA A10": (125.0, 62.5),
}
# FLOPs of a multiprocessor per clock with float16 operands, by compute capability; TF32 halves it,
# and so do GeForce cards, whose float32 accumulation takes twice as long
PER_CLOCK = {
    (7, 5): 1024,
    (8, 0): 2048,
    (8, 6): 1024,
    (8, 7): 1024,
    (8, 9): 1024,
    (9, 0): 4096,
    (10, 0): 8192,
    (12, 0): 1024,
}
COPIED = 256 << 20  # bytes, several times a second-level cache
PRECISIONS = ("fp32", "tf32", "fp16", "fp8")
FLOAT8 = (8, 9), (9, 0), (12, 0)  # with products of E4M3 that numdiff has: extras/fp8/mma.py


def peak_flops(backend, precision):
    """FLOP/s that the card reaches at best in "fp32", "tf32", "fp16" ("bf16" is as fast) or "fp8",
    twice as fast where `mma.sync` or `wgmma` multiply E4M3; None if it is unknown."""
    if precision == "fp8":
        if tuple(getattr(backend, "capability", ())) not in FLOAT8:
            return None
        half = peak_flops(backend, "fp16")
        return half and 2 * half
    float32 = getattr(backend, "peak_float32_flops", None)
    if float32 is None or precision == "fp32":
        return float32
    row = 1 if precision == "tf32" else 0
    for name in sorted(PUBLISHED, key=len, reverse=True):
        if backend.device_name.startswith(name):
            return PUBLISHED[name][row] * 1e12
    per_clock = PER_CLOCK.get(tuple(backend.capability))
    if per_clock is None or (row and backend.capability < (8, 0)):
        return None
    clock = backend.device.properties.clock_rate * 1e3
    halved = 2 if "GeForce" in backend.device_name else 1
    return per_clock / (1 + row) / halved * backend.multiprocessors * clock


def memory_bandwidth(backend, repeats=5):
    """Bytes a second, read and written, in the best of several copies; None if there is no device."""
    if getattr(backend, "peak_float32_flops", None) is None:
        return None
    source, target = (
        empty(min(COPIED, backend.memory_info()[0] // 8), "uint8", backend) for _ in range(2)
    )
    best = float("inf")
    for _ in range(repeats):
        synchronize(backend)
        start = time.perf_counter()
        for _ in range(4):
            backend.copy(source, target)
        synchronize(backend)
        best = min(best, time.perf_counter() - start)
    return 2 * 4 * source.nbytes / best


class Roof:
    """Peaks of a card, and the least time that some work can take."""

    def __init__(self, backend):
        self.backend, self.bandwidth = backend, memory_bandwidth(backend)

    def flops(self, precision):
        return peak_flops(self.backend, precision) if self.backend is not None else None

    def share(self, seconds, moved, flops, precision):
        """(share of the roof, "memory" or "arithmetic": which one), or (None, None)."""
        peak = self.flops(precision)
        if not self.bandwidth or not seconds:
            return None, None
        by_memory = (moved or 0) / self.bandwidth
        by_arithmetic = (flops or 0) / peak if peak else 0.0
        kind = "memory" if by_memory >= by_arithmetic else "arithmetic"
        return max(by_memory, by_arithmetic) / seconds, kind
