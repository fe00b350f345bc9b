"""What the launchers of rungs 5 and 6 are given: the operands of a product, and what is fused to
it.

SOURCE
    plain bookkeeping.
READ NEXT
    mma.py
"""

from typing import NamedTuple


class Operand(NamedTuple):
    """A, B or C of a product: a matrix, a batch of them, or a pair that is one matrix.

    array: (rows, columns) in its stored layout; those of a batch one below the other
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


class Fused(NamedTuple):
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
