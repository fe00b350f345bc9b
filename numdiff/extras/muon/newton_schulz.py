"""Newton–Schulz iterations: the nearest orthogonal matrix, nearly, by matrix products alone.

MATHEMATICS
    X = U·S·Vᵀ with singular values S ≤ 1. One iteration, with a = 3.4445, b = -4.7750, c = 2.0315:
        X ← a X + b (X·Xᵀ) X + c (X·Xᵀ)² X = U · (a S + b S³ + c S⁵) · Vᵀ
    acts on each singular value alone. Near zero it multiplies by a, so five iterations bring all
    from 1/500 on into [0.68, 1.21]; they do not converge to 1, which costs nothing in training and
    saves iterations.
    X·Xᵀ is taken on the smaller side: where X has more rows than columns, X ← X (a + b XᵀX + c
    (XᵀX)²).
BY WAY OF THE GRAM MATRIX
    X enters the factor through G = X·Xᵀ alone: B = a I + b G + c G² and X ← B X, so the next Gram
    matrix is B G B, for which no X is needed. Of several iterations in a row
        B = a I + b G + c G²,        Q ← B Q,        G ← B G B,        and at the end X ← Q X.
    With s the smaller side and l the larger, two of them take 2 s² l + 5 s³ multiply-adds instead
    of 4 s² l + 2 s³. All but Q X are symmetric, because polynomials of one matrix commute:
    `matmul_symmetric` computes one half.
    G has the squares of the singular values. What float16 rounds away of them returns when X is
    formed again and its Gram matrix taken: after two iterations, one, and two (`parts_of`). Then
    the result is as far from the exact one as by single iterations: 1e-3 to 4e-2 of its norm for
    random matrices, low rank with noise, a condition of 10⁶, and one singular value fifty times the
    others. Five in a row would be up to thirty times as far. In float32 three and two suffice.
    On the host, where products are dear, float32 makes all five in a row, without b on G, which
    would round it: within 3e-3 of the result's norm, also where G has lost singular values below
    2⁻¹² of the largest.
NO PASS BETWEEN THE PRODUCTS. A product adds a `residual` with a factor of one, and a number to the
    diagonal. In a row of iterations b G is kept instead of G: B = (c / b²) (b G)² + (b G) + a I. A
    single one adds no matrix at all, by completing the square: B = c (G + h I)² + (a - c h²) I with
    h = b / 2c. x begins as a⁵ X and is a⁵⁻ᵏ X after k iterations, of which the next G knows. The
    better for float16: the first X of a 768 × 768 matrix has numbers of about 1/768, many of them
    subnormal there; 485 times as large they keep all their bits.
SHAPES
    x (batch, rows, columns) float32, or float16 with float32 sums; the result likewise
LAUNCH
    15 products where l < 2 s, else 17, each of the whole batch in one launch: for float16 wgmma, or
    mma.sync where 128 does not divide the extents (wgmma's tiles must not reach into the next
    matrix). A transpose is a flag of the product.
DETERMINISM
    that of the products: a fixed order for each sum.
COST
    FLOPs, a symmetric product counted as half: of k iterations in a row 3 s² l + (4 k - 3) s³ for a
    matrix;
    bytes: each product's operands, residual and result. Roof: arithmetic, but for matrices below
    about 256 × 256.
SOURCE
    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks",
    kellerjordan.github.io/posts/muon, with these coefficients. The iteration: Björck and Bowie
    1971, "An iterative algorithm for computing the best estimate of an orthogonal matrix", SIAM J.
    Numer. Anal. 8.
READ NEXT
    update.py, which does this to the momentum.
"""

import numpy as np

from ...device import is_device
from ...dtypes import is_half
from ...kernels.matmul import matmul_forward
from ...kernels.operation import Problem, filled, half, operation
from .symmetric import matmul_symmetric

# the largest slope at zero for which five iterations stay within about 0.3 of one
A, B, C = 3.4445, -4.7750, 2.0315
STEPS = 5
FIRST = A**STEPS  # what the first x is multiplied by
SHIFT = B / (2 * C)  # h
REST = A - C * SHIFT**2
# of the estimate: ns of a launch, of 64 of K, of a tile's end
TILE, LAUNCH, STEP, EPILOGUE = 128, 3000.0, 530.0, 640.0
WIDE = 2  # l / s from which iterations in a row pay


def newton_schulz_reference(x, steps=STEPS):
    """As the first two lines of MATHEMATICS say it: X in, X out, in x's dtype."""
    for _ in range(steps):
        gram = x @ x.swapaxes(-1, -2)
        x = A * x + (B * gram + C * (gram @ gram)) @ x
    return x


def parts_of(shape, dtype, steps=STEPS):
    """How many iterations are made in a row before X is formed again: numbers that add up to
    `steps`."""
    small, large = sorted(shape[1:])
    if large < WIDE * small:
        return (1,) * steps
    left, parts = steps, []
    for count in (2, 1, 2) if is_half(dtype) else (3, 2):
        parts.append(min(count, left))
        left -= parts[-1]
    return tuple(filter(None, parts)) + (1,) * left


def _factor(x, tall, alpha, count):
    """Q of `count` iterations; alpha · x·xᵀ is X·Xᵀ (of a tall x: xᵀ·x)."""
    if count == 1:
        gram = matmul_symmetric(x, x, tall, not tall, alpha, SHIFT)
        return matmul_symmetric(gram, gram, transpose_b=True, alpha=C, diagonal=REST)
    gram, q = matmul_symmetric(x, x, tall, not tall, B * alpha), None  # b G
    for k in range(count):
        b = matmul_symmetric(
            gram, gram, transpose_b=True, alpha=C / (B * B), diagonal=A, residual=gram
        )
        q = b if q is None else matmul_symmetric(b, q, transpose_b=True)
        if k < count - 1:
            gram = matmul_symmetric(
                matmul_symmetric(b, gram, transpose_b=True), b, transpose_b=True
            )
    return q


def _on_the_host(x, steps):
    """In float32 or float64, of which BLAS multiplies an array and its transpose by half."""
    tall, (small, large) = x.shape[1] > x.shape[2], sorted(x.shape[1:])
    x = x * x.dtype.type(A**-steps)
    for count in (steps,) if large >= WIDE * small else (1,) * steps:
        transposed, q = x.swapaxes(1, 2), None
        gram = transposed @ x if tall else x @ transposed
        for k in range(count):
            b = gram @ gram.swapaxes(1, 2)
            b *= C
            b += B * gram
            b.reshape(len(b), -1)[:, :: small + 1] += x.dtype.type(A)
            q = b if q is None else b @ q
            if k < count - 1:
                gram = b @ gram @ b
        x = x @ q if tall else q @ x
    return x


def newton_schulz_cost(shape, steps=STEPS, itemsize=4):
    """(bytes, FLOPs): of each product both operands, the residual and the result; what is two of
    them once."""
    batch, small, large = shape[0], *sorted(shape[1:])
    parts = parts_of(shape, np.float16 if itemsize == 2 else np.float32, steps)
    squares = sum(4 * k - 3 for k in parts)  # products of s × s matrices
    # s × s matrices that these read and write
    read = sum(2 if k == 1 else 11 * k - 9 for k in parts)
    return (
        batch * itemsize * (len(parts) * (3 * small * large + 2 * small**2) + read * small**2),
        batch * (len(parts) * 3 * small**2 * large + squares * small**3),
    )


def _unit(shape, dtype=np.float32):
    """A times matrices of Frobenius norm 1, of a problem: the input of one iteration."""

    def values(rng):
        x = rng.standard_normal(shape)
        return A * x / np.linalg.norm(x, axis=(1, 2), keepdims=True)

    return filled(shape, values, dtype)


# One iteration in the small problems: the others launch the same kernels.
@operation(
    cost=newton_schulz_cost,
    problems=[
        Problem(x=_unit((2, 3, 2)), steps=1),
        Problem(x=_unit((2, 8, 16), np.float16), steps=1, fast=False),
        *(
            Problem(x=half(*shape), measured=True)
            for shape in ((12, 4 * 768, 768), (4 * 12, 768, 768))
        ),
    ],
)
def newton_schulz(x, steps=STEPS):
    """U · p(S) · Vᵀ of each matrix U · S · Vᵀ, p after `steps` iterations, as a new array.

    x (batch, rows, columns): A ** steps times the matrices (`FIRST`), whose singular values are at
    most 1
    """
    if x.ndim != 3:
        raise ValueError(
            f"x {x.shape} must be a batch of matrices (batch, rows, columns); use x.reshape(1, …) for one"
        )
    if not is_device(x) and not is_half(x.dtype):
        return _on_the_host(x, steps)
    tall, left = x.shape[1] > x.shape[2], steps
    for count in parts_of(x.shape, x.dtype, steps):
        q = _factor(x, tall, A ** (-2 * left), count)  # X is A ** -left times x
        x = matmul_forward(*((x, q) if tall else (q, x)), alpha=A**-count)
        left -= count
    return x


def newton_schulz_estimate(shape, multiprocessors):
    """Nanoseconds of the float16 products, roughly: launches, and rounds of tiles of 128 × 128 with
    steps along K.

    What 128 does not divide has no wgmma, computes both halves, and needs a pass for each diagonal.
    """
    batch, small, large = shape[0], *sorted(shape[1:])
    fast = small % TILE == 0 and large % TILE == 0
    m, n = -(-small // TILE), -(-large // TILE)

    def product(tiles, K, passes=0):
        rounds = -(-batch * tiles // multiprocessors)
        return (1 + passes) * LAUNCH + rounds * (-(-K // 64) * STEP * (1 if fast else 2) + EPILOGUE)

    parts = parts_of(shape, np.float16)
    squares = sum(4 * k - 3 for k in parts)
    half = m * (m + 1) // 2 if fast else m * m
    return (
        len(parts) * (product(half, large) + product(m * n, small))
        + squares * product(half, small, not fast)
        + 3 * LAUNCH
    )
