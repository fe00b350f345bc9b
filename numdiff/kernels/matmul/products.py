"""The launch of products of 16 bits, one or several: which rung, which tile, and one launch for all
where there is a kernel for that.

    launch_products([Product(a, b, c, fused), …])

    one             C = A·B with what is fused to it, of rung 5 or 6. A, B and C are matrices, batches of them,
                    pairs that are one matrix (`Operand.second`), or stacks (`Stacked`).
    several         C_p = or += A_pᵀ·B_p with one K, a block's weight gradients: group.py on rung 6, mma_group.py
                    on rung 5

STACKS are weights of one shape at equal distances in memory, taken as one matrix, on rung 6:

    forward    y (B, G·N) = x (B, K) · Wᵀ + bias        W (G·N, K): G weights (N, K), one below the other
    backward   dx (B, K) = dy (B, G·N) · W              the sum over all G·N in slices
               dW (G·N, K) = dyᵀ · x                    dbias (G·N,): the sums of dyᵀ's rows, by the same kernel

SOURCE
    choice.py, for tiles and slices.
READ NEXT
    launcher.py
"""

import numpy as np

from ...device import is_device
from ...device.limits import multiprocessors_of
from ...device.requires import supports
from ...dtypes import is_half
from ..operation.versions import capped
from . import group, mma, mma_group
from .choice import MMA_GAIN, HalfProduct, as_nominal, choose_half_tile, half_tile
from .hopper.epilogue import ACTIVATIONS
from .hopper.kernel import KERNELS
from .hopper.launcher import GemmTiling, launch_hopper
from .hopper.layout import BK, BM
from .mma_layout import ACTIVATION_TILES
from .mma_layout import ACTIVATIONS as ACTIVATIONS_5
from .product import Stacked

# of tiles, those that divide are taken, widest first
STACK_WIDTHS, STACK_GRADIENT_WIDTHS = (256, 128), (192, 128, 64)


def rung_of(x, activation=""):
    """The rung on tensor cores that takes products of x, an array, with this activation: 6, 5, or 0
    where there is none."""
    if not is_device(x) or not is_half(x.dtype):
        return 0
    if supports(x, KERNELS) and capped("matmul", 6) == 6:
        return 6
    takes = not activation or activation in ACTIVATIONS_5
    return 5 if takes and supports(x, mma.KERNELS) and capped("matmul", 5) == 5 else 0


def launch_products(products, rung=None):
    """Compute `Product`s of 16-bit matrices, whose K and dtype are one; rung: 5 or 6, None: the
    highest."""
    a, b, c, fused = products[0]
    rung = rung or rung_of(a.array, fused.activation)
    if len(products) > 1 or _goes_alone_to_group(a, b, c, fused, rung):
        (group if rung == 6 else mma_group).launch_group(products)
    elif rung == 5:
        tile, slices, _ = _estimated(a, b, c, fused, rung)
        if fused.activation and tile not in ACTIVATION_TILES:
            tile = min(ACTIVATION_TILES)
        mma.launch_mma(a, b, c, tile, slices, fused)
    elif fused.symmetric:
        launch_hopper(a, b, c, GemmTiling(fused.symmetric.width), fused)
    elif isinstance(b.array, Stacked) or isinstance(c.array, Stacked):
        launch_hopper(a, b, c, _stack_tiling(a, b, c), fused)
    else:
        (_, width), slices, paired = _estimated(a, b, c, fused, rung)
        if fused.activation:
            width = min(w for w in ACTIVATIONS[fused.activation] if w >= width)
        launch_hopper(a, b, c, GemmTiling(width, slices, paired), fused)


def _goes_alone_to_group(a, b, c, fused, rung):
    """Whether one product takes less time by rung 5's table of units than in equal slices."""
    (M, K), (_, N) = a.extents, b.extents
    return (
        rung == 5
        and a.transposed
        and not b.transposed
        and a.count == 1
        and fused.bias is None
        and fused.alpha == 1
        and c.array.dtype == np.float32
        and mma_group.pays(M, N, K, multiprocessors_of(a.array))
    )


def _estimated(a, b, c, fused, rung):
    """(tile, slices of K, whether in pairs of blocks), by choice.py."""
    can_split = a.count == 1 and (rung == 5 or c.array.dtype == np.float32)
    can_split = can_split and not fused.activation
    return half_tile(a.array.backend, rung, half_product(a, b, c, fused), can_split)


def half_product(a, b, c, fused):
    """The `HalfProduct` of operands, with the nominal batch."""
    (M, K), (_, N) = a.extents, b.extents
    nbytes = c.array.dtype.itemsize * (2 if fused.activation else 1)
    added = 0 if fused.residual is None else 2
    return HalfProduct(*as_nominal(a.count, M), N, K, nbytes, added, a.transposed)


def cheaper_rung(a, b, c, fused):
    """6, or 5 where that takes clearly less time, by the estimates: of small or narrow results,
    whose sums it can split, and of short sums."""
    product, splits = half_product(a, b, c, fused), a.count == 1

    def ns(rung, can_split):
        return choose_half_tile(rung, product, can_split, multiprocessors_of(a.array))[3]

    return 5 if ns(5, splits) < MMA_GAIN * ns(6, splits and product.nbytes == 4) else 6


def stack_fits(N, K):
    """Whether tiles divide weights (N, K) of a stack."""
    return N % BM == 0 and K % BK == 0


def _stack_tiling(a, b, c):
    (rows, inner), (_, columns) = a.extents, b.extents
    if b.transposed:  # forward: no tile reaches over a weight's end
        rows_of_one = len(b.array.arrays[0])
        return GemmTiling(next(width for width in STACK_WIDTHS if rows_of_one % width == 0))
    width = next(width for width in STACK_GRADIENT_WIDTHS if columns % width == 0)
    if a.transposed:
        return GemmTiling(width)
    tiles = -(-rows // BM) * (columns // width)
    return GemmTiling(width, max(1, min(multiprocessors_of(a.array) // tiles, inner // BK)))
