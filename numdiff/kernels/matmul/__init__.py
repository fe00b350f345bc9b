"""Matrix multiplication: the ladder, one rung a file. Read them in this order.

    reference.py        what is computed, the derived gradients, and what it costs
    operands.py         how a kernel receives its matrices' strides: transposes and batches without copies
    first.py            rung 0, with six arguments; and what coalescing is
    naive.py            v1 naive: one thread, one output
    tiled.py            v2 tiled: tiles in shared memory: each number fetched once for a whole block
    register_tiles.py   v3 register-tiled: outputs in each thread's registers, each number read once for several of them
    vectorised.py       v4 vectorised: 16-byte loads, 8 × 8 outputs a thread, the next tile prefetched
    split_k.py          a long sum shared by many blocks
    product.py          what the next rungs multiply, and what is fused to it
    mma.py              v5 mma: float16 on the tensor cores of sm_80 and later: mma.sync, ldmatrix, cp.async
    mma_layout.py       its tiles, constants and arguments
    mma_epilogues.py    what becomes of its sums: float16 or float32, a residual, GELU
    mma_group.py        the gradients of several weights in one launch of it, from a table of units
    split_half.py       sums of these products in slices: float32 results, and the pass that adds slices up
    hopper/             v6 hopper: float16 on Hopper: wgmma, TMA, warps that only fetch or only multiply; its epilogues
    group.py                the gradients of several weights in one launch of it
    products.py         the launch of products of v5 and v6, one or several, and of weights at equal distances
    choice.py           which tile, and how many slices of K, by estimated times
    launcher.py         which rung runs: what everything above calls
    problems.py             small problems of matmul and of the following
    activations.py          products with GELU, SwiGLU, a gate or a layer's scale in the same kernel
    pair.py                 products of two arrays that are read as one
    ../../extras/fp8/      hopper/ on E4M3, floats of 8 bits: the top rung
    ../../extras/levels/   the ladders of mma.sync and wgmma: one idea a level, on the way to v5 and v6

SOURCE
    the tiling by levels of memory: Goto and van de Geijn, "Anatomy of High-Performance Matrix
    Multiplication", ACM TOMS 34 (2008), section 4; on GPUs: Volkov and Demmel, "Benchmarking GPUs
    to Tune Dense Linear Algebra", SC 2008.
"""

from .activations import (
    activation_supports,
    gelu_supports,
    matmul_gate_forward,
    matmul_gelu_backward,
    matmul_gelu_forward,
    matmul_layer_scale_forward,
    matmul_swiglu_backward,
    matmul_swiglu_forward,
)
from .hopper.layout import Gated
from .launcher import matmul_backward, matmul_forward, matmul_strided
from .operands import Matrices
from .pair import matmul_pair_backward, matmul_pair_forward, matmul_pair_gradient, pair_supports
from .reference import matmul_forward_cost, matmul_forward_reference

__all__ = [
    "Gated",
    "Matrices",
    "activation_supports",
    "gelu_supports",
    "matmul_backward",
    "matmul_forward",
    "matmul_forward_cost",
    "matmul_forward_reference",
    "matmul_gate_forward",
    "matmul_gelu_backward",
    "matmul_gelu_forward",
    "matmul_layer_scale_forward",
    "matmul_pair_backward",
    "matmul_pair_forward",
    "matmul_pair_gradient",
    "matmul_strided",
    "matmul_swiglu_backward",
    "matmul_swiglu_forward",
    "pair_supports",
]
