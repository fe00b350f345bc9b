"""What the launchers of rungs 5 and 6 are given: the operands of a product, and what is fused to
it.

SOURCE
    plain bookkeeping.
READ NEXT
    mma.py
"""

from typing import NamedTuple

from ...device import DeviceArray


class ProductOperand(NamedTuple):
    """A, B or C of a product: a matrix, a batch of them, or a pair that is one matrix.

    array: (rows, columns) in its stored layout; those of a batch one below the other; or a
    `Stacked`
    transposed: the product reads its transpose
    count: matrices of a batch
    second: None, or of a pair the columns that follow those of `array` (TWO MATRICES AS ONE in
    hopper/producer.py)
    """

    array: object
    transposed: bool = False
    count: int = 1
    second: object = None

    @property
    def extents(self):
        """(rows, columns) of one matrix, as the product reads it."""
        rows, columns = len(self.array) // self.count, self.array.shape[1]
        columns += 0 if self.second is None else self.second.shape[1]
        return (columns, rows) if self.transposed else (rows, columns)


class ProductFused(NamedTuple):
    """What a launch makes of a product: C = alpha · A·B + bias + residual, or more. Rung 5 has no
    more than GELU.

    bias: (N,) float32; residual: like C, of 16 bits; accumulate: add to what a float32 C holds
    row_sums: (M,), to which the sums of A's rows are added; for a float32 C and an A that is
    transposed
    symmetric: a `Symmetric` (extras/muon/symmetric.py), if hopper/'s `takes_batch`, also for one
        product: one half of each C is computed, and `diagonal` is added to the numbers on its
        diagonal
    activation, other: with a C of 16 bits
        gate: for A·Bᵀ; residual is a `Gated`, other what is added
        gelu: for A·Bᵀ; other is like C, and is given GELU(C); C itself is written only if keeps_u
        gelu_gradient: for A·B without bias and residual; a factor GELU'(other)
        gelu_again_gradient: the same, and other becomes GELU(other)
        layer_scale: for A·Bᵀ; other is like C, and is given residual + scale · C, scale (N,)
        float32; keeps_u as above
        swiglu: for A·Bᵀ; B and bias have 2 · N rows, C is (M, 2 · N), and other, (M, N), is given
            SwiGLU(C); keeps_u as above. Without keeps_u C may be anything
        swiglu_gradient: for A·B without bias and residual; C becomes SwiGLU's dx (M, 2 · N) at x =
            other, like C, with A·B as dy
    """

    bias: object = None
    residual: object = None
    alpha: float = 1.0
    accumulate: bool = False
    row_sums: object = None
    activation: str = ""
    other: object = None
    keeps_u: bool = True
    scale: object = None
    symmetric: object = None
    diagonal: float = 0.0

    @property
    def halves(self):
        """How many columns of C, side by side, one of A·B becomes: 2 if B has the rows of two
        halves."""
        return 2 if self.activation == "swiglu" else 1


class Product(NamedTuple):
    """C = A·B, with what is fused to it."""

    a: ProductOperand
    b: ProductOperand
    c: ProductOperand
    fused: ProductFused = ProductFused()  # noqa: B008 - never changed


class Stacked:
    """Arrays of one shape at equal distances in memory, as one: one below the other.

    flat: the memory from the first to the last as one array; gap: elements between the end of one
    and the start of the next
    """

    def __init__(self, arrays):
        first, last = arrays[0], arrays[-1]
        self.arrays, self.dtype, self.backend = arrays, first.dtype, first.backend
        self.shape = len(arrays) * first.shape[0], *first.shape[1:]
        length = (last.offset + last.nbytes - first.offset) // first.dtype.itemsize
        self.flat = DeviceArray(self.backend, (length,), self.dtype, first.memory, first.offset)
        self.gap = (distance(arrays) - first.nbytes) // first.dtype.itemsize

    def __len__(self):
        return self.shape[0]


def distance(arrays):
    """Bytes from each of the arrays to the next; None if they are not at equal distances, of 16
    bytes each."""
    first = arrays[0]
    if any(
        a.memory is not first.memory or a.shape != first.shape or a.dtype != first.dtype
        for a in arrays
    ):
        return None
    steps = {b.offset - a.offset for a, b in zip(arrays, arrays[1:], strict=False)} or {
        first.nbytes
    }
    step = steps.pop()
    return None if steps or step < first.nbytes or step % 16 or first.offset % 16 else step
