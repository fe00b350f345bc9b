"""Columns: the equal parts of one wide array, used in place, and a place for their gradients to
meet.

MATHEMATICS
    as chunk.py: part_k[b, c] = x[b, k·C + c]; backward dx[b, k·C + c] = Σ_p partial[b, p, k·C + c],
    0 for a part that was not used. The gradient of a part is often a sum over tokens that several
    blocks share: each block (p) leaves its share in `partial`, next to those of the other parts,
    and one pass adds them all up.
SHAPES
    x, dx (B, n·C) float16 or float32; partial (B, blocks, n·C) float32
VERSIONS
    v1 a thread adds up four columns.
LAUNCH
    forward: none. Backward: ceil(B · n · C / 1024) blocks of 256 threads. No shared memory.
DETERMINISM
    the blocks' shares are added in order.
COST
    forward: nothing, where chunk.py copies. Backward: 4 · blocks bytes read and 2 or 4 written an
    element.
SOURCE
    nothing to cite.
READ NEXT
    diffusion/class_dropout.py.
"""

import numpy as np

from ...device import DeviceArray, cuda, download, empty, float32, is_device, launch, load4, store4
from ...device.common import divide
from ..operation import Problem, operation, single
from ..reduce.trees import sample_sum
from .chunk import chunk_backward_reference

BLOCK = 256  # threads
MASK = 63  # parts whose gradients a kernel can select by the bits of an int64


class RowColumns:
    """Columns `first` to `first` + C of a device array (B, pitch). As an array it has a shape and a
    type.

    sums: the `RowColumnSums` in which the gradients of the columns of one array meet
    """

    __slots__ = ("array", "first", "shape", "sums")

    def __init__(self, array, first, width, sums):
        self.array, self.first, self.shape, self.sums = array, first, (array.shape[0], width), sums

    dtype = property(lambda self: self.array.dtype)
    pitch = property(lambda self: self.array.shape[1])

    @property
    def flat(self):
        """What a kernel reads: element b · pitch + first + c is column c of image b."""
        return self.array.reshape(-1)

    def __array__(self, dtype=None, copy=None):
        return download(self.array)[:, self.first : self.first + self.shape[1]].astype(
            dtype or self.dtype
        )


class RowColumnSums:
    """The gradients of the columns of one array (B, N), as several blocks' shares of each:
    `partial` (B, blocks, N)."""

    __slots__ = ("shape", "partial", "written")

    def __init__(self, shape):
        self.shape, self.partial, self.written = shape, None, set()

    @property
    def blocks(self):
        """Blocks per image; None until a place is requested."""
        return self.partial and self.partial.shape[1]

    def place(self, columns, blocks):
        """(`partial` as one long array, the gradient of these columns): the caller is about to
        write it."""
        if self.partial is None:
            self.partial = empty(
                (self.shape[0], blocks, self.shape[1]), np.float32, like=columns.array
            )
        if columns.first in self.written or blocks != self.blocks:
            raise ValueError(
                "each part of an array takes one gradient, from an operation on as many tokens as its "
                "neighbours'; use chunk for parts that are used twice or separately"
            )
        self.written.add(columns.first)
        return self.partial.reshape(-1), ColumnSums(self, columns.first, columns.shape[1])


class ColumnSums:
    """The gradient of some columns: their place in a `RowColumnSums`."""

    __slots__ = ("sums", "first", "width")

    def __init__(self, sums, first, width):
        self.sums, self.first, self.width = sums, first, width

    def whole(self):
        """The gradient as an array (B, C), if these columns are all there are."""
        partial = self.sums.partial
        return partial.reshape(self.sums.shape) if partial.shape[1] == 1 else sample_sum(partial)

    def __array__(self, dtype=None, copy=None):
        total = download(self.sums.partial)[:, :, self.first : self.first + self.width].sum(1)
        return total if dtype is None else total.astype(dtype)


# v1: four columns a thread ------------------------------------------------------------------------


@cuda.jit
def columns_backward_kernel_v1(partial, dx, blocks, first, width, N, C, used):
    """Of N columns those from `first` on, as many as dx is wide. used: bit k says that their part k
    has a gradient; -1, that all have."""
    i = cuda.grid(1) * 4
    if i < dx.size:
        b, n = divide(i, width)
        k, _ = divide(n, C)
        s0 = s1 = s2 = s3 = float32(0)
        if used == -1 or used >> k & 1:
            for p in range(blocks):
                x0, x1, x2, x3 = load4(partial, (b * blocks + p) * N + first + n)
                s0 += x0
                s1 += x1
                s2 += x2
                s3 += x3
        store4(dx, i, s0, s1, s2, s3)


# Launchers ----------------------------------------------------------------------------------------


def columns_forward(x, count):
    """The `count` parts of x (B, count · C): views of a NumPy array, `RowColumns` of a device
    array."""
    if x.ndim != 2 or count < 1 or x.shape[1] % count:
        raise ValueError(
            f"columns are equal parts of (B, n·C), and {tuple(x.shape)} has not {count}"
        )
    C = x.shape[1] // count
    if not is_device(x):
        return [x[:, k * C : (k + 1) * C] for k in range(count)]
    if C % 4:
        raise ValueError(
            f"columns are read four at a time, and {C} is not a multiple of 4; use chunk"
        )
    sums = RowColumnSums(x.shape)
    return [RowColumns(x, k * C, C, sums) for k in range(count)]


def join_columns(parts, dtype=np.float32):
    """dx (B, n·C) from the gradients of the n parts, as the kernels that read them gave them; None:
    not used.

    parts: all, or some that are neighbours. On a device the gradients stay where they met until a
    call gives all.
    """
    given = next(p for p in parts if p is not None)
    if not isinstance(given, ColumnSums):
        return chunk_backward_reference(parts)
    sums, C = given.sums, given.width
    first, width = given.first - C * parts.index(given), C * len(parts)
    used = (
        -1 if None not in parts else sum(1 << k for k, part in enumerate(parts) if part is not None)
    )
    if used >= 1 << MASK:
        raise ValueError(
            f"of {len(parts)} parts each must be used, or none after the first {MASK}; use chunk"
        )
    dx = columns_backward(sums.partial, len(parts), first, used, dtype, C)
    if width == sums.shape[1]:
        sums.partial, sums.written = None, set()
    return dx


def as_columns(vector):
    """A whole array (B, C) as columns of itself; columns as they are."""
    return (
        RowColumns(vector, 0, vector.shape[1], RowColumnSums(vector.shape))
        if isinstance(vector, DeviceArray)
        else vector
    )


# Operation ----------------------------------------------------------------------------------------


def columns_backward_reference(partial, count, first=0, used=-1, dtype=np.float32, width=None):
    columns = partial.shape[2] // count if width is None else width
    dx = partial.sum(1)[:, first : first + columns * count]
    for k in range(count):
        if used != -1 and not used >> k & 1:
            dx[:, k * columns : (k + 1) * columns] = 0
    return dx


@operation(
    reference=columns_backward_reference,
    problems=[
        Problem(partial=single(2, 3, 24), count=3),
        Problem("unused", partial=single(2, 3, 24), count=3, used=0b101),
        Problem("neighbours", partial=single(2, 1, 24), count=2, first=8, width=8),
        Problem(partial=single(64, 4, 6 * 768), count=6, measured=True),
    ],
)
def columns_backward(partial, count, first=0, used=-1, dtype=np.float32, width=None):
    """dx (B, count · width), a new array: sums over the blocks of partial (B, blocks, N), of
    columns from `first` on.

    width: of a part; None: partial has `count` parts; used: bit k says that part k has a gradient,
    else its columns are 0; -1: all have
    """
    B, blocks, N = partial.shape
    columns = N // count if width is None else width
    dx = empty((B, columns * count), dtype, like=partial)
    launch(
        columns_backward_kernel_v1,
        -(-dx.size // (4 * BLOCK)),
        BLOCK,
        partial.reshape(-1),
        dx.reshape(-1),
        blocks,
        first,
        columns * count,
        N,
        columns,
        used,
    )
    return dx
