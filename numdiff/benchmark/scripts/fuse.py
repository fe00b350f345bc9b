"""Chains of fuse/ on a GPU in float16: microseconds of separate operations and of one kernel, by
four and by eight.

    python -m numdiff.benchmark.scripts.fuse

x · (1 + scale) + shift, SiLU and dropout, of a UNet's 32 images of 64 × 64 pixels of 64 channels,
forward and backward; then chains of one operation, which numdiff's own launchers run by four. The
rate is of the bytes which a chain must move. Time is the median of nine replays of a CUDA graph of
fifty calls, all in turn.
"""

import numpy as np

from numdiff.benchmark.scripts import half_conv as timing
from numdiff.device import get_gpu, synchronize, upload
from numdiff.kernels.dropout import DROP, drop_operands, dropout_backward, dropout_forward
from numdiff.kernels.elementwise import (
    gelu,
    gelu_gradient,
    silu,
    silu_backward,
    silu_forward,
    silu_gradient,
)
from numdiff.kernels.fuse import EACH, PER_CHANNEL, PER_SAMPLE, UNCHANGED, Operation, fuse
from numdiff.kernels.scale_shift import (
    scale_shift_backward,
    scale_shift_forward,
    scaled,
    scaled_dscale,
    scaled_dx,
)
from numdiff.kernels.transformer.bias_gelu import biased
from numdiff.kernels.transformer.gate import gated, gated_dgate, gated_dh

SCALED = Operation(
    scaled, PER_SAMPLE, PER_SAMPLE, x=scaled_dx, scale=scaled_dscale, shift=UNCHANGED
)
SILU = Operation(silu, x=silu_gradient)
GATED = Operation(gated, EACH, PER_SAMPLE, x=UNCHANGED, h=gated_dh, gate=gated_dgate)
BIASED = Operation(biased, PER_CHANNEL, x=UNCHANGED, bias=UNCHANGED)


def jobs(gpu):
    """{what is timed: (function, bytes)}."""
    rng = np.random.default_rng(0)

    def draw(*shape, dtype=np.float16):
        return upload(rng.standard_normal(shape, dtype=np.float32).astype(dtype), gpu)

    x, dy, h = (draw(32, 64, 64, 64) for _ in range(3))
    scale, shift = draw(32, 64), draw(32, 64)
    u, du, bias = draw(16384, 3072), draw(16384, 3072), draw(3072, dtype=np.float32)
    counters = upload(np.zeros(1, np.uint32), gpu), upload(np.arange(32, dtype=np.uint32), gpu)
    where = 0.1, 7, 0, *counters
    z = scale_shift_forward(x, scale, shift)

    def backward_apart():
        return scale_shift_backward(silu_backward(dropout_backward(dy, *where), z), x, scale)

    found = {
        "scale, SiLU, dropout: separate": (
            lambda: dropout_forward(silu_forward(scale_shift_forward(x, scale, shift)), *where),
            2 * x.nbytes,
        ),
        "their gradients: separate": (backward_apart, 3 * x.nbytes),
    }
    operands = scale, shift, *drop_operands(x.shape, *where)
    chains = {
        "scale, SiLU, dropout": (fuse(EACH, SCALED, SILU, DROP, EACH), dy, (x, *operands), 2, 3),
        "SiLU": (fuse(EACH, SILU, EACH), dy, (x,), 2, 3),
        "scale and shift": (fuse(EACH, SCALED, EACH), dy, (x, scale, shift), 2, 3),
        "gate": (fuse(EACH, GATED, EACH), dy, (x, h, scale), 3, 3),
        "bias and GELU": (
            fuse(EACH, BIASED, Operation(gelu, x=gelu_gradient), EACH),
            du,
            (u, bias),
            2,
            3,
        ),
    }
    for name, (chain, g, given, forward, backward) in chains.items():
        for version, width in ((2, "four"), (3, "eight")):
            found[f"{name}: by {width}"] = (
                lambda c=chain, a=given, v=version: c.forward(*a, version=v),
                forward * given[0].nbytes,
            )
            found[f"{name}, gradients: by {width}"] = (
                lambda c=chain, g=g, a=given, v=version: c.backward(g, *a, version=v),
                backward * given[0].nbytes,
            )
    return found


def main():
    gpu = get_gpu()
    print(gpu.device_name)
    timing.CALLS, timing.REPLAYS = 50, 9
    found = jobs(gpu)
    times = timing.measured(
        [
            (timing.replay(gpu, gpu.new_arena(), function), lambda: synchronize(gpu))
            for function, _ in found.values()
        ]
    )
    for (name, (_, moved)), time in zip(found.items(), times, strict=True):
        print(f"{name:40} {time:8.1f} µs  {moved / time / 1e3:6,.0f} GB/s")


if __name__ == "__main__":
    main()
