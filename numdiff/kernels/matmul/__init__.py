"""Matrix multiplication: the ladder, one rung a file. Read them in this order.

    reference.py        what is computed, the derived gradients, and what it costs
    operands.py         how a kernel is told where its matrices lie: transposes and batches without copies
    first.py            rung 0, with six arguments; and what coalescing is
    naive.py            v1  one thread, one output
    tiled.py            v2  tiles in shared memory: each number fetched once for a whole block
    register_tiles.py   v3  a tile of outputs in each thread's registers: each number read once for several outputs
    vectorised.py       v4  16-byte loads, 8 × 8 outputs a thread, the next tile fetched while this one is used
    split_k.py          a long sum shared by many blocks
    mma.py              v5  float16 on the tensor cores of sm_80 and later: mma.sync, ldmatrix, cp.async
    tf32.py             v5  float32 on the same units, rounded to tf32 on the way, where the device's switch says so
    hopper.py           v6  float16 on Hopper: wgmma, the copy engine, warps that only fetch or only multiply
    epilogues.py   what becomes of its sums: bias, residual, GELU, sums of rows
    fast_gelu.py        GELU in few instructions
    launcher.py         which of them runs

float32, 2048³ on one H100, TFLOP/s: v1 0.9, v2 6.1, v3 10.1, v4 38.9; v4 at 4096³ 41 to 44, by transpose case.

SOURCE
    the tiling by levels of memory: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", ACM TOMS
    34 (2008), section 4; on GPUs: Volkov and Demmel, "Benchmarking GPUs to Tune Dense Linear Algebra", SC 2008.
"""
from .launcher import (
    gelu_supports,
    matmul_backward,
    matmul_forward,
    matmul_gelu_backward,
    matmul_gelu_forward,
    matmul_pair_backward,
    matmul_pair_forward,
    matmul_pair_gradient,
    matmul_strided,
    pair_supports,
)
from .operands import Matrices
from .reference import matmul_forward_cost, matmul_forward_reference

__all__ = ["Matrices", "gelu_supports", "matmul_backward", "matmul_forward", "matmul_forward_cost",
           "matmul_forward_reference", "matmul_gelu_backward", "matmul_gelu_forward", "matmul_pair_backward",
           "matmul_pair_forward", "matmul_pair_gradient", "matmul_strided", "pair_supports"]
