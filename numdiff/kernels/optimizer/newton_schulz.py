"""Newton–Schulz iterations: the nearest orthogonal matrix, nearly, by matrix products alone.

MATHEMATICS
    X = U·S·Vᵀ with singular values S ≤ 1. One iteration, with a = 3.4445, b = -4.7750, c = 2.0315:
        X ← a X + b (X·Xᵀ) X + c (X·Xᵀ)² X = U · (a S + b S³ + c S⁵) · Vᵀ
    acts on each singular value alone. Near zero it multiplies by a, so five iterations bring all from 1/500 on into
    [0.68, 1.21]; they do not converge to 1, which costs nothing in training and saves iterations.
    X·Xᵀ is taken on the smaller side: where X has more rows than columns, X ← X (a + b XᵀX + c (XᵀX)²).
THREE PRODUCTS AN ITERATION, and no pass between them. A product adds a `residual` with a factor of one, so the other
    factors are moved: with G = b X·Xᵀ
        b X·Xᵀ + c (X·Xᵀ)² = G + (c / b²) G·G =: F,            a X + F X = a (X + (1 / a) F X)
    and the a outside is left out. Instead x begins as a⁵ X and is a⁵⁻ᵏ X after k iterations, of which the next G knows.
    The better for float16, too: the first X of a 768 × 768 matrix has numbers of about 1/768, many of them subnormal
    there; 485 times as large they keep all their bits.
SHAPES
    x (batch, rows, columns) float32, or float16 with float32 sums; the result likewise
LAUNCH
    15 products, each of the whole batch in one launch, by matmul_forward: for float16 wgmma, or mma.sync where 128 does
    not divide the extents (wgmma's tiles must not reach into the next matrix). A transpose is a flag of the product.
DETERMINISM
    that of the products: a fixed order for each sum.
COST
    FLOPs: 5 · batch · (4 s² l + 2 s³), s the smaller side and l the larger; bytes: 5 · batch · (3 s l + 4 s²) numbers.
    Roof: arithmetic, but for matrices below about 256 × 256.
SOURCE
    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks", kellerjordan.github.io/posts/muon,
    with these coefficients. The iteration: Björck and Bowie 1971, "An iterative algorithm for computing the best
    estimate of an orthogonal matrix", SIAM J. Numer. Anal. 8.
READ NEXT
    muon.py, which does this to the momentum.
"""
from ..matmul import matmul_forward

A, B, C = 3.4445, -4.7750, 2.0315  # the largest slope at zero for which five iterations stay within about 0.3 of one
STEPS = 5
FIRST = A**STEPS  # what the first x is multiplied by


def newton_schulz_reference(x, steps=STEPS):
    """As the first two lines of MATHEMATICS say it: X in, X out, in x's dtype."""
    for _ in range(steps):
        gram = x @ x.swapaxes(-1, -2)
        x = A * x + (B * gram + C * (gram @ gram)) @ x
    return x


def newton_schulz(x, steps=STEPS):
    """U · p(S) · Vᵀ of each matrix U · S · Vᵀ, p so many iterations, as a new array.

    x (batch, rows, columns): A ** steps times the matrices (`FIRST`), whose singular values are at most 1
    """
    if x.ndim != 3:
        raise ValueError(f"x {x.shape} must be a batch of matrices (batch, rows, columns); use x.reshape(1, …) for one")
    tall = x.shape[1] > x.shape[2]
    for k in range(steps):
        unit = A ** (k - steps)  # X is this times x
        gram = matmul_forward(x, x, transpose_a=tall, transpose_b=not tall, alpha=B * unit * unit)
        factor = matmul_forward(gram, gram, alpha=C / (B * B), residual=gram)
        x = matmul_forward(*((x, factor) if tall else (factor, x)), alpha=1 / A, residual=x)
    return x


def newton_schulz_cost(shape, steps=STEPS, itemsize=4):
    """(bytes, FLOPs): of each product both operands, the residual and the result; what is two of them once."""
    batch, small, large = shape[0], *sorted(shape[1:])
    return (steps * batch * itemsize * (3 * small * large + 4 * small**2),
            steps * batch * (4 * small**2 * large + 2 * small**3))
