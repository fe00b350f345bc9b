"""Problems of matmul, from its first kernel to FP8, and of what makes bytes for that."""
import numpy as np

from ...float8 import bits_of
from ...kernels import matmul, quantise
from .problem import D, N, T, half, integers, single


def add_problems(add, rng):
    square = {"a": single(2048, 2048), "b": single(2048, 2048)}
    add(matmul.matmul_forward, versions=(1, 2, 3, 4), **square)
    large = {"a": half(8192, 8192), "b": half(8192, 8192)}
    add(matmul.matmul_forward, versions=(5,), precision="tf32", a=single(8192, 8192),
        b=single(8192, 8192))
    add(matmul.matmul_forward, versions=(5, 6), transpose_b=True, **large)

    bits = integers(np.tile(bits_of(rng.standard_normal((256, 8192), np.float32)), (32, 1)), np.uint8)
    fp8 = {"precision": "fp8", "a": bits, "b": bits, "scale_a": single(1), "scale_b": single(1)}
    add(matmul.matmul_fp8_forward, **fp8)
    add(matmul.matmul_fp8_forward, note="not promoted", promoted=False, **fp8)
    # DiT-B/2's fc1, its weight's gradient: dyᵀ and xᵀ
    windows = np.lib.stride_tricks.sliding_window_view(bits_of(rng.standard_normal(N * T + 4 * D, np.float32)), N * T)
    add(matmul.matmul_fp8_gradient, precision="fp8", a=integers(windows[:4 * D], np.uint8),
        b=integers(windows[:D], np.uint8), scale_a=single(1), scale_b=single(1), out=single(4 * D, D),
        accumulate=False)
    amax = integers(np.zeros(quantise.PARTIALS), np.uint32)
    lines = np.lib.stride_tricks.sliding_window_view(bits_of(rng.standard_normal(N * T + D, np.float32)), D)
    layer = {"precision": "fp8", "a": integers(lines[:N * T], np.uint8), "scale_a": single(1), "scale_b": single(1)}
    for note, into in (("to float16", None), ("to E4M3", [single(1), amax])):  # its forward, its output's gradient
        add(matmul.matmul_fp8_gelu_forward, note=note, b=integers(lines[:4 * D], np.uint8),
            bias=single(4 * D), into=into, **layer)
        add(matmul.matmul_fp8_gelu_backward, note=note, b=integers(lines[:4 * D], np.uint8),
            u=half(N * T, 4 * D), into=into, **layer)
