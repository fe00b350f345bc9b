"""Products whose results are symmetric, such as X·Xᵀ: half of the arithmetic where rung 6 runs.

    C = alpha · A·B + residual + diagonal · I        what a step of Newton and Schulz is made of

Which products are symmetric, and how one half becomes both: symmetric_epilogue.py. Muon's
are (newton_schulz.py).

SOURCE
    kernels/matmul/reference.py.
"""

import functools
from typing import NamedTuple

import numpy as np

from ...device import cuda, empty, float32, launch
from ...device.batch_invariance import nominal_extent
from ...device.requires import supports
from ...dtypes import is_half, working_type
from ...kernels.matmul.choice import HALF_TILES, by_eight
from ...kernels.matmul.hopper.kernel import KERNELS
from ...kernels.matmul.hopper.launcher import takes_batch
from ...kernels.matmul.hopper.layout import BK, BM
from ...kernels.matmul.launcher import matmul_forward
from ...kernels.matmul.product import Product, ProductFused, ProductOperand
from ...kernels.matmul.products import launch_products
from ...kernels.matmul.reference import matmul_forward_reference
from ...kernels.operation import Problem, filled, half, operation, replaced
from ...kernels.operation.versions import capped
from .symmetric_epilogue import SYMMETRIC_KERNELS, SYMMETRIC_WIDTHS, tiles_of

DIAGONAL_BLOCK = 128


class Symmetric(NamedTuple):
    """What Hopper's launch takes of a symmetric result: the width of its tiles, its kernels, and
    tiles_of(n, width)."""

    width: int
    kernels: object = SYMMETRIC_KERNELS
    tiles_of: object = tiles_of


@functools.lru_cache(maxsize=4096)
def choose_symmetric(batch, N, K, multiprocessors):
    """The width of rung 6's tiles with the lowest estimate, of those on and below the diagonals."""

    def estimate(width):
        step, epilogue = HALF_TILES[6][BM, width]
        rounds = -(-batch * tiles_of(N, width) // multiprocessors)
        return rounds * (K // BK * step + 2 * epilogue)  # two tiles are stored

    return min(SYMMETRIC_WIDTHS, key=estimate)


@cuda.jit
def add_diagonal_kernel(c, n, value):
    """c (count, n, n): value is added where row == column; a thread for each, a row of blocks for
    each matrix."""
    i = cuda.grid(1)
    if i < n:
        at = (cuda.blockIdx.y * n + i) * n + i
        c[at] = c.dtype.type(float32(c[at]) + value)


def _symmetric_in_one(a, b, residual, N, K):
    """True where rung 6 computes one half."""
    return (
        is_half(a.dtype)
        and a.dtype == b.dtype
        and supports(a, KERNELS)
        and capped("matmul", 6) == 6
        and takes_batch(N, K, a.dtype)
        and by_eight((a, b, residual), (N, K))
    )


def _check(a, b, transpose_a, transpose_b, residual):
    (N, K), batch = (a.shape[:0:-1] if transpose_a else a.shape[1:]), a.shape[0]
    if a.ndim != 3 or tuple(b.shape) != ((batch, N, K) if transpose_b else (batch, K, N)):
        raise ValueError(
            f"a {a.shape} and b {b.shape} must be batches of matrices whose products are symmetric; check "
            "transpose_a and transpose_b"
        )
    if residual is not None and tuple(residual.shape) != (batch, N, N):
        raise ValueError(f"residual has shape {residual.shape}, the product has {(batch, N, N)}")


def matmul_symmetric_reference(
    a, b, transpose_a=False, transpose_b=False, alpha=1.0, diagonal=0.0, residual=None
):
    N, batch = a.shape[-1 if transpose_a else 1], a.shape[0]
    working = working_type(a.dtype)
    left = a.astype(working, copy=False)
    # NumPy computes one half of x·xᵀ, too
    right = left if b is a else b.astype(working, copy=False)
    c = matmul_forward_reference(left, right, transpose_a, transpose_b, None, alpha)
    if residual is not None:
        c += residual
    c.reshape(batch, -1)[:, :: N + 1] += c.dtype.type(diagonal)
    return c.astype(a.dtype, copy=False)


def _symmetric_problem(call, width, transpose_a, N, batch=1, K=64, fast=True):
    """X·Xᵀ or XᵀX; 128 rows have blocks on, below and above the diagonal, 256 a second row of
    tiles."""

    def residual(rng):
        numbers = rng.standard_normal((batch, N, N))
        return numbers + numbers.swapaxes(1, 2)

    x = half(batch, K, N) if transpose_a else half(batch, N, K)
    return Problem(
        f"float16, {'xᵀ·x' if transpose_a else 'x·xᵀ'}, {f'tile {width}' if width else 'by a pass'}",
        x=x,
        residual=filled((batch, N, N), residual, np.float16),
        fast=fast,
        call=call,
        transpose=transpose_a,
        within=functools.partial(replaced, __name__, choose_symmetric=lambda *_: width),
    )


def symmetric_problems(call):
    """[Problem] of matmul_symmetric. call: the product of x with itself, from x, residual and
    transpose"""
    found = []
    for width, transpose_a, _ in SYMMETRIC_KERNELS:
        N, batch = (128, 1) if width != 128 else (256, 1) if transpose_a else (128, 2)
        found.append(
            _symmetric_problem(
                call, width, transpose_a, N, batch, fast=transpose_a == (width == 128)
            )
        )
    return [*found, _symmetric_problem(call, None, False, 24, K=8)]


def _with_itself(x, residual, transpose):
    return matmul_symmetric(x, x, transpose, not transpose, 0.5, -1.5, residual)


@operation(
    reference=matmul_symmetric_reference,
    check=_check,
    problems=functools.partial(symmetric_problems, _with_itself),
)
def matmul_symmetric(
    a, b, transpose_a=False, transpose_b=False, alpha=1.0, diagonal=0.0, residual=None
):
    """alpha · A·B + residual + diagonal · I of products that are symmetric, as a new array (batch,
    N, N).

    a (batch, N, K), or (batch, K, N) with transpose_a; b (batch, K, N), or (batch, N, K) with
    transpose_b; residual (batch, N, N), symmetric. That A·B is, is not checked: X·Xᵀ, or A·B of
    symmetric matrices that commute. On Hopper only one half is computed, in float16 or bfloat16
    where 128 divides N and 64 divides K; elsewhere all of it, and the diagonal by a separate pass.
    """
    (N, K), batch = (a.shape[:0:-1] if transpose_a else a.shape[1:]), a.shape[0]
    if _symmetric_in_one(a, b, residual, N, K):
        c = empty((batch, N, N), a.dtype, like=a)
        width = choose_symmetric(nominal_extent(batch), N, K, a.backend.multiprocessors)
        operands = [
            ProductOperand(x.reshape(-1, x.shape[-1]), transposed, batch)
            for x, transposed in ((a, transpose_a), (b, transpose_b), (c, False))
        ]
        fused = ProductFused(None, residual, alpha, symmetric=Symmetric(width), diagonal=diagonal)
        launch_products([Product(*operands, fused)], 6)
        return c
    c = matmul_forward(a, b, transpose_a, transpose_b, alpha=alpha, residual=residual)
    if diagonal:
        launch(
            add_diagonal_kernel,
            (-(-N // DIAGONAL_BLOCK), batch),
            DIAGONAL_BLOCK,
            c.reshape(-1),
            N,
            float32(diagonal),
        )
    return c
