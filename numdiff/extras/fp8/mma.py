"""Matmul in E4M3 by mma.sync, the rung below Hopper's: for cards of compute capability 8.9 (Ada), 10.0
and 12.0 (Blackwell).

MATHEMATICS, SHAPES
    as matmul.py
WHAT IS NEW, AND WHY IT PAYS
    mma m16n8k32 multiplies 32 of k where float16's multiplies 16. Ada has twice float16's peak in
        E4M3.
    The kernel is that of kernels/matmul/mma.py: two neighbours along k, two bytes, take the place
        of one float16. A row of 32 k in E4M3 and one of 16 k in float16 have the same bytes, and
        lanes hold the same bytes of a fragment. So the copies, stages, swizzles and `ldmatrix` are
        unchanged. PRODUCT and WRITE_ROWS are two other device functions.
    Both operands along k: `ldmatrix.trans` moves pairs of bytes, and would keep two k together.
    PROMOTION: tensor cores add E4M3 products up with fewer bits than float32 has. Promoted, each
        product of 32 of k starts from zero, and a float32 addition takes it into the sum. These
        additions overlap the products of other warps.
    SCALES are on the device, and multiply the sums before the epilogue, as in matmul.py.
EPILOGUES
    float16, with bias and residual; GELU and its derivative, as float16 or as bytes; float32 for a
        weight's gradient, in slices of K. SwiGLU and its derivative run as a separate pass.
LAUNCH
    as kernels/matmul/mma.py; 48 to 96 KiB of shared memory, which 8.9 and 12.0 have
NEEDS
    sm_89; K a multiple of 16, N one of 8
DETERMINISM
    one warp sums each output in the order of k; slices are added in their order.
FIGURES
    not timed yet on any card
SOURCE
    PTX ISA, section 9.7.14.5 (mma.m16n8k32); Zhang et al. 2024, "SageAttention2", arXiv:2411.10958,
    section 3.3, on the bits that Ada keeps of a sum of E4M3 products.
READ NEXT
    mma_epilogues.py
"""

import itertools
from typing import NamedTuple

import numpy as np

from ...device import DeviceArray, device_inline, empty, float32, launch
from ...device.limits import multiprocessors_of
from ...device.requires import requires
from ...device.specialise import Variants
from ...device.tensor_core import mma_m16n8k32_e4m3, mma_m16n8k32_e4m3_into
from ...kernels.matmul.mma import make_kernel
from ...kernels.matmul.mma_layout import (
    ACTIVATIONS,
    ADDING,
    GELU,
    GELU_GRADIENT,
    PLAIN,
    MmaEpilogue,
    Tile,
    stage_bytes,
    threads_of,
    work_of,
)
from ...kernels.matmul.split_half import add_partials, unused
from .mma_epilogues import write_bytes, write_scaled

# a warp has 64 × 32 or 32 × 32 of a tile: promoted products of 64 × 64 would spill registers
FP8_TILES = {(128, 128): Tile(2, 4, 32, 4, 1), (64, 64): Tile(2, 2, 32, 3, 3)}
# estimates for a multiprocessor of an RTX 4090, from its data sheet: multiply-adds of E4M3, bytes from
# the L2 cache
PRODUCTS_PER_CYCLE, BYTES_PER_CYCLE = 512, 10
LAUNCH_CYCLES = 5000  # of a second kernel
SLICES, SHORTEST_SLICE = (2, 3, 4, 6, 8, 12, 16, 24, 32), 1024  # of K


@device_inline
def add_plain(sums, first, a, b):
    """sums[first … first + 3] += a · b, added by the tensor cores."""
    mma_m16n8k32_e4m3_into(sums, first, a, b)


@device_inline
def add_promoted(sums, first, a, b):
    """sums[first … first + 3] += a · b, added in float32."""
    zero = float32(0)
    product = mma_m16n8k32_e4m3(a, b, (zero, zero, zero, zero))
    sums[first] += product[0]
    sums[first + 1] += product[1]
    sums[first + 2] += product[2]
    sums[first + 3] += product[3]


def make_fp8_kernel(tile, promoted, end, to_bytes=False):
    """The kernel of a tile and an epilogue (mma_layout.py). to_bytes: its activation is rounded to
    E4M3"""
    kernel = make_kernel(
        tile,
        FP8_TILES[tile].stages,
        False,
        False,
        end,
        module=__name__,
        product=add_promoted if promoted else add_plain,
        write_rows=write_bytes if to_bytes else write_scaled,
        kind=f"_e4m3{'_promoted' * promoted}{'_bytes' * to_bytes}",
        layout=FP8_TILES[tile],
    )
    return requires("8.9")(kernel)


BOTH = True, False  # promoted, or not
MMA_KERNELS = Variants(
    itertools.product(FP8_TILES, BOTH, (PLAIN, ADDING, GELU, GELU_GRADIENT)),
    lambda key: make_fp8_kernel(*key),
)
MMA_EIGHT_KERNELS = Variants(
    itertools.product(FP8_TILES, BOTH, (GELU, GELU_GRADIENT)),
    lambda key: make_fp8_kernel(*key, to_bytes=True),
)


def choose_mma_tile(M, N, K, multiprocessors, can_split=False):
    """(tile, slices of K) with the lowest estimate, in cycles."""

    def estimate(tile, slices):
        (rows, columns), k = tile, -(-K // slices)
        products, bytes_in = rows * columns * k / PRODUCTS_PER_CYCLE, (rows + columns) * k
        cycles = max(products, bytes_in / BYTES_PER_CYCLE) + 4 * rows * columns / BYTES_PER_CYCLE
        rounds = -(-slices * -(-M // rows) * -(-N // columns) // multiprocessors)
        second = 8 * slices * M * N / (BYTES_PER_CYCLE * multiprocessors) + LAUNCH_CYCLES
        return rounds * cycles + (second if slices > 1 else 0)

    most = max(1, K // SHORTEST_SLICE) if can_split else 1
    choices = itertools.product(FP8_TILES, {1, *(s for s in SLICES if s <= most)})
    return min(choices, key=lambda choice: (estimate(*choice), choice))


def pairs_of(x):
    """A matrix of bytes as the 16-bit elements that the kernel copies, flat."""
    return DeviceArray(x.backend, (x.nbytes // 2,), np.uint16, x.memory, x.offset)


class MmaFp8Arrays(NamedTuple):
    """`MmaArrays` of mma_layout.py, with the scales of A and B, float32 (1,) each."""

    c: object
    bias: object
    other: object
    scale_a: object
    scale_b: object


class MmaEightArrays(NamedTuple):
    """`MmaFp8Arrays` where the activation is bytes, with its scale and the place of its largest
    magnitudes."""

    c: object
    bias: object
    other: object
    scale_a: object
    scale_b: object
    scale_c: object
    amax: object


def launch_mma_fp8(a, b, c, scales, promoted, fused, into=None, M_nominal=None, can_split=False):
    """c = or += scale_a · scale_b · a·bᵀ, with what is fused to it.

    a (M, K), b (N, K): bytes; c (M, N) float16, bytes or float32; scales: (scale_a, scale_b)
    fused: a `ProductFused` whose activation is "", "gelu" or "gelu_gradient"
    into: (scale, amax) of what the activation gives, where that is bytes
    M_nominal: the rows by which a tile is chosen; can_split: whether K may be cut in slices
    """
    (M, K), N, activation = a.shape, len(b), fused.activation
    multiprocessors = multiprocessors_of(a)
    tile, slices = choose_mma_tile(M_nominal or M, N, K, multiprocessors, can_split)
    layout, nothing = FP8_TILES[tile], unused(a)
    work = work_of(1, M, N, K // 2, tile, slices)
    slices = work.slices
    target = empty((slices * M * N,), np.float32, like=a) if slices > 1 else c.reshape(-1)
    end, other = PLAIN, target
    if activation:
        end, other = ACTIVATIONS[activation], fused.other.reshape(-1)
    elif fused.residual is not None:
        end, other = ADDING, fused.residual.reshape(-1)
    elif fused.accumulate and slices == 1:
        end = ADDING
    if activation == "gelu" and not fused.keeps_u:  # C is not written
        target = DeviceArray(a.backend, (a.nbytes // 2,), np.float16, a.memory, a.offset)
    bias = nothing if fused.bias is None else fused.bias
    arrays = MmaFp8Arrays(target, bias, other, *scales)
    kernel = MMA_KERNELS[tile, promoted, end]
    if into is not None:
        arrays, kernel = MmaEightArrays(*arrays, *into), MMA_EIGHT_KERNELS[tile, promoted, end]
    launch(
        kernel,
        min(work.units, multiprocessors * layout.blocks),
        threads_of(layout),
        pairs_of(a),
        pairs_of(b),
        arrays,
        work,
        MmaEpilogue(1.0, int(fused.bias is not None), int(fused.keeps_u)),
        shared=layout.stages * stage_bytes(tile),
    )
    if slices > 1:
        add_partials(target, c, slices, nothing, 1.0, 0, fused.accumulate)
