"""Matmul, rung 1: one thread computes one output.

WHAT IT DOES
    Thread (row, column) walks along row `row` of A and column `column` of B and sums the products.
    The mathematics is in reference.py, the arguments in operands.py.
WHY IT IS SLOW
    Every multiply-add needs two loads from memory: for M = N = K = 4096 that is 2 · 4096³ loads,
    550 GB, of which each number is the same one fetched 4096 times. Caches catch a part; the load
    instructions remain, two for each multiply-add, and a multiprocessor can issue at most one load
    for four multiply-adds.
WHAT IT DOES RIGHT
    Neighbouring threads (threadIdx.x) take neighbouring columns, so where b_column is 1 a warp's
    loads of B and its stores to C are neighbours in memory: one request instead of 32. Its loads of
    A are one address, a broadcast.
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
from .operands import first_output, length_of, start_of_c, starts_of, write_output

BLOCK = 16  # 16 × 16 = 256 threads


@cuda.jit
def matmul_forward_kernel_v1(a, b, c, bias, shape, strides, epilogue):
    first_row, first_column = first_output(shape.N, BLOCK, BLOCK)
    row, column = first_row + cuda.threadIdx.y, first_column + cuda.threadIdx.x
    length = length_of(shape)
    if row < shape.M and column < shape.N:
        a_start, b_start = starts_of(strides)
        a_start, b_start = a_start + row * strides.a_row, b_start + column * strides.b_column
        total = float32(0)
        for k in range(length):
            total += a[a_start + k * strides.a_k] * b[b_start + k * strides.b_k]
        write_output(
            c, start_of_c(strides) + row * strides.c_row + column, total, column, bias, epilogue
        )
