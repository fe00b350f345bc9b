"""Time matmul's rungs and the UNet's convolutions on a GPU: medians of five means, after two
warm-up calls.

    python -m tests.kernels.benchmark
"""

import time

import numpy as np

from numdiff.device import get_gpu, synchronize, upload
from numdiff.kernels import conv2d_forward, matmul_forward

CONVOLUTIONS = (
    (64, 64, 64),
    (64, 192, 64),
    (32, 128, 128),
    (32, 256, 128),
    (16, 192, 192),
    (8, 256, 256),
)  # size, C_in, C_out


def seconds(function, gpu, calls=5):
    means = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize(gpu)
        means.append((time.perf_counter() - start) / calls)
    return sorted(means[2:])[2]


def main():
    gpu, rng = get_gpu(), np.random.default_rng(0)
    print(gpu.device_name)

    def draw(*shape):
        return upload(rng.standard_normal(shape, dtype=np.float32), gpu)

    for n, versions in ((2048, (1, 2, 3, 4)), (4096, (4,))):
        a, b = draw(n, n), draw(n, n)
        for version in versions:
            t = seconds(
                lambda a=a, b=b, v=version: matmul_forward(a, b, transpose_b=True, version=v), gpu
            )
            print(f"matmul {n}³ v{version}: {1e6 * t:,.0f} µs, {2 * n**3 / t / 1e12:.1f} TFLOP/s")
    for size, inputs, outputs in CONVOLUTIONS:
        x, weight = draw(32, size, size, inputs), draw(outputs, 3, 3, inputs)
        t = seconds(lambda x=x, w=weight: conv2d_forward(x, w), gpu)
        flops = 2 * 32 * size * size * 9 * inputs * outputs
        print(
            f"conv2d {size}×{size} {inputs} to {outputs}: {1e6 * t:,.0f} µs, {flops / t / 1e12:.1f} TFLOP/s"
        )


if __name__ == "__main__":
    main()
