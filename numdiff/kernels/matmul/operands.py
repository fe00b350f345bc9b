"""The operand arguments of every rung: the strides of its matrices.

A GEMM never needs to copy its operands into shape. It receives, for each operand, the stride in
elements from one row to the next and from one column to the next. A transpose swaps the two. A
batch adds two strides: from one image to the next (outer) and, within it, from one head to the next
(inner). So attention multiplies slices of a packed qkv array in place.

ARGUMENTS OF EVERY KERNEL
    a, b, c    flat float32 arrays that start at the first matrix
    bias       (N,), read only if has_bias
    shape      `ProductShape`: how large the matrices are
    strides    `Strides`: where their elements are
    epilogue   `ProductEpilogue`: what happens to a sum before it is written, see write_output

GRID OF EVERY KERNEL
    x the tiles of C, row by row (see first_output); y the inner batch, z the outer one. Only x may
    pass 65,535, and M counts pixels, so the tiles of both axes share it.
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


class ProductShape(NamedTuple):
    """c is (M, N), and K is summed over; in the batch's last matrix over K_last ≤ K (see
    split_k.py)."""

    M: int
    N: int
    K: int
    K_last: int


class Strides(NamedTuple):
    """Distances in elements: of one matrix, then the two of the batch for each operand.

    Element (m, k) of A is at m·a_row + k·a_k, one of which is usually 1; element (k, n) of B at
    k·b_k + n·b_column; element (m, n) of C at m·c_row + n.
    """

    a_row: int
    a_k: int
    b_k: int
    b_column: int
    c_row: int
    a_outer: int
    a_inner: int
    b_outer: int
    b_inner: int
    c_outer: int
    c_inner: int


class ProductEpilogue(NamedTuple):
    """c = alpha · sum, plus the bias if has_bias, plus what c held if accumulate."""

    alpha: float
    has_bias: int
    accumulate: int


@cuda.jit(device=True)
def starts_of(strides):
    """(where A begins, where B begins) of this block's matrices in the batch."""
    inner, outer = cuda.blockIdx.y, cuda.blockIdx.z
    return (
        outer * strides.a_outer + inner * strides.a_inner,
        outer * strides.b_outer + inner * strides.b_inner,
    )


@cuda.jit(device=True)
def start_of_c(strides):
    """The start of this block's matrix C."""
    return cuda.blockIdx.z * strides.c_outer + cuda.blockIdx.y * strides.c_inner


@cuda.jit(device=True)
def length_of(shape):
    """How many products this block's outputs sum."""
    return shape.K_last if cuda.blockIdx.y == cuda.gridDim.y - 1 else shape.K


@cuda.jit(device=True)
def first_output(N, tile_m, tile_n):
    """(row, column) of a block's first output. Blocks that run side by side share rows of A, the
    larger operand."""
    tiles_n = (N + tile_n - 1) // tile_n
    tile = cuda.blockIdx.x
    return int32(tile // tiles_n * tile_m), int32(tile % tiles_n * tile_n)


@cuda.jit(device=True)
def write_output(c, i, total, column, bias, epilogue):
    """The epilogue: scale, bias and accumulation ride on a write that has to happen anyway."""
    value = epilogue.alpha * total
    if epilogue.has_bias:
        value += bias[column]
    if epilogue.accumulate:
        value += c[i]
    c[i] = value
