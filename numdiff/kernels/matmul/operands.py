"""What every rung of the ladder is told: where its matrices lie.

A GEMM never needs to copy its operands into shape. It is told, for each operand, the distance in elements from one row
to the next and from one column to the next; a transpose swaps the two, and a batch adds two more distances: from
one image to the next (outer) and, within it, from one head to the next (inner). So attention multiplies slices of a
packed qkv array where they lie.

ARGUMENTS OF EVERY KERNEL
    a, b, c         flat float32 arrays that start at the first matrix
    bias            (N,), read only if has_bias
    M, N, K         c is (M, N), and K is summed over; in the batch's last matrix over K_last ≤ K (see split_k.py)
    a_row, a_k      element (m, k) of A lies at m·a_row + k·a_k; one of the two is usually 1
    b_k, b_column   element (k, n) of B lies at k·b_k + n·b_column
    c_row           element (m, n) of C lies at m·c_row + n
    *_outer, *_inner   the two batch distances of each operand
    alpha, has_bias, accumulate   what happens to a sum before it is written: see write_output

GRID OF EVERY KERNEL
    x the tiles of C, row by row (see first_output); y the inner batch, z the outer one. Only x may pass 65,535, and M
    counts pixels, so the tiles of both axes share it.
SOURCE
    the leading dimensions of the BLAS: Dongarra et al. 1990, "A Set of Level 3 BLAS", ACM TOMS 16.
"""
from typing import Any, NamedTuple

from ...device import cuda, int32


class Matrices(NamedTuple):
    """A batch of matrices inside an array; every distance counts elements."""

    array: Any
    row: int  # from one row to the next
    column: int  # from one column to the next
    outer: int = 0  # from one outer batch entry to the next
    inner: int = 0  # from one inner batch entry to the next
    start: int = 0  # where the first matrix starts

    @property
    def T(self):
        """The same matrices, transposed: nothing moves."""
        return self._replace(row=self.column, column=self.row)


@cuda.jit(device=True)
def first_output(N, tile_m, tile_n):
    """(row, column) of a block's first output. Blocks that run side by side share rows of A, the larger operand."""
    tiles_n = (N + tile_n - 1) // tile_n
    tile = cuda.blockIdx.x
    return int32(tile // tiles_n * tile_m), int32(tile % tiles_n * tile_n)


@cuda.jit(device=True)
def write_output(c, i, total, column, bias, alpha, has_bias, accumulate):
    """The epilogue: scale, bias and accumulation ride on a write that has to happen anyway."""
    value = alpha * total
    if has_bias:
        value += bias[column]
    if accumulate:
        value += c[i]
    c[i] = value
