"""Gate, residual and the adaptive norm after it: the seam between two branches of a transformer.

MATHEMATICS, for token t of image b; all but h's product is ../gate.py, then ../adaln.py
        z = x + gate[b] · h          y = LayerNorm(z) · (1 + scale[b]) + shift[b]          both z and y are results
    Backward, from dy and from what arrives for z itself, dz: with xhat the normalised z, f = dy · (1 + scale),
        g = dz + rstd · (f - average(f) - xhat · average(f · xhat))          all of z's gradient
        dx = g       dh = gate · g       dgate = Σ_t g · h       dshift = Σ_t dy       dscale = Σ_t dy · xhat
    Without h (the norm before a network's first branch) z is x and there is no gate. RMSNorm, a
    weight and no shift as in norms/row_norm.py, each on its own: f = dy · weight · (1 + scale), and Σ_t
    dy · xhat gives both dscale and dweight.
SHAPES
    x, h, z, y and their gradients (B, T, C) float16, bfloat16 or float32; gate, shift, scale (B, C), arrays or
    `Columns`; weight, dweight (C,), mean, rstd (B · T,) float32. dgate, dshift, dscale: float32 (B, C) for arrays, for
    columns what ../columns.py adds up
ACCURACY
    z is rounded to its type before it is normalised, so that the backward sees the same one.
MEMORY
    The backward needs z, h and what is smaller. Given x instead of z, it makes z of x, h and the gate, which it reads
    anyway, with the same bits: where x is kept for another operation z need not be. Between a DiT's two branches no z
    is: 24 MiB a block of DiT-B/2 at batch 64, 18 of DiT-XL/2 at 32.
COST
    in passes over an array of n elements: 4 forward, where one after the other they take 5; 6 backward, where they take
    3 for the gate, 3 for dx, 2 for the sums and 3 for the addition. Roof: memory bandwidth.
SOURCE
    Peebles and Xie 2023, arXiv:2212.09748, section 3.2 and figure 3; Yao, Yang, Wang 2025, arXiv:2501.01423 (the block
    with RMSNorm).
READ NEXT
    ../../cpu/gate_adaln.py
"""

from ....dtypes import in_single
from ..adaln import adaln_backward_reference, adaln_forward_reference
from ..gate import gate_backward_reference, gate_forward_reference


@in_single(2, 3)
def gate_adaln_forward_reference(x, h, gate, shift, scale, eps=1e-6, weight=None, norm="layer"):
    z = x if h is None else gate_forward_reference(x, h, gate)
    return (z, *adaln_forward_reference(z, shift, scale, eps, weight, norm))


@in_single(2, 3, 4)
def gate_adaln_backward_reference(
    dz, dy, z, h, gate, shift, scale, mean, rstd, weight=None, dweight=None
):
    dx, dshift, dscale = adaln_backward_reference(
        dy, z, scale, mean, rstd, weight, dweight, shift is not None
    )
    if dz is not None:
        dx += dz
    dh, dgate = (None, None) if h is None else gate_backward_reference(dx, h, gate)
    return dx, dh, dgate, dshift, dscale


def gate_adaln_forward_cost(B, T, C, itemsize=4):
    """(bytes, FLOPs) over B images of T tokens of C channels."""
    return itemsize * (4 * B * T * C + 3 * B * C) + 8 * B * T, 12 * B * T * C


def gate_adaln_backward_cost(B, T, C, itemsize=4):
    return itemsize * (6 * B * T * C + 2 * B * C) + 4 * (3 * B * C + 2 * B * T), 20 * B * T * C
