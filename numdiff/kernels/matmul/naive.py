"""Matmul, rung 1: one thread computes one output.

WHAT IT DOES
    Thread (row, column) walks along row `row` of A and column `column` of B and sums the products. The mathematics
    is in reference.py, the arguments in operands.py.
WHY IT IS SLOW
    Every multiply-add needs two loads from memory: for M = N = K = 4096 that is 2 · 4096³ loads, 550 GB, of which each
    number is the same one fetched 4096 times. Caches catch a part; the load instructions remain, two for each
    multiply-add, and a multiprocessor can issue at most one load for four multiply-adds.
WHAT IT DOES RIGHT
    Neighbouring threads (threadIdx.x) take neighbouring columns, so where b_column is 1 a warp's loads of B and its
    stores to C are neighbours in memory: one request instead of 32. Its loads of A are one address, a broadcast.
MEASURED
    NVIDIA H200, 2026-11-22, PyTorch 2.11.0: numdiff bench kernels --of files
    matmul_forward, 2048×2048, 2048×2048, float32
        v1    11,886 µs  1.45 TFLOP/s    2 % of arithmetic     3 % of cuBLAS
LAUNCH
    grid (ceil(M / 16) · ceil(N / 16), inner, outer), blocks of 16 × 16 threads.
DETERMINISM
    one thread sums its products in the order of k.
SOURCE
    the definition of the product; the papers of the ladder are named in `__init__.py`.
READ NEXT
    tiled.py, where a block fetches each number once for all its threads.
"""
from ...device import cuda, float32
from .operands import first_output, write_output

BLOCK = 16  # 16 × 16 = 256 threads


@cuda.jit
def matmul_forward_kernel_v1(a, b, c, bias, M, N, K, K_last, a_row, a_k, b_k, b_column, c_row, a_outer, a_inner,
                             b_outer, b_inner, c_outer, c_inner, alpha, has_bias, accumulate):
    first_row, first_column = first_output(N, BLOCK, BLOCK)
    row, column = first_row + cuda.threadIdx.y, first_column + cuda.threadIdx.x
    inner, outer = cuda.blockIdx.y, cuda.blockIdx.z
    length = K_last if inner == cuda.gridDim.y - 1 else K
    if row < M and column < N:
        a_start = outer * a_outer + inner * a_inner + row * a_row
        b_start = outer * b_outer + inner * b_inner + column * b_column
        total = float32(0)
        for k in range(length):
            total += a[a_start + k * a_k] * b[b_start + k * b_k]
        i = outer * c_outer + inner * c_inner + row * c_row + column
        write_output(c, i, total, column, bias, alpha, has_bias, accumulate)
