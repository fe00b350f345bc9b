"""Scale and shift of every channel by the conditioning (scale-shift norm of the UNet, adaptive
LayerNorm of the DiT).

MATHEMATICS
        y[b, p, c] = x[b, p, c] · (1 + scale[b, c]) + shift[b, c]
        dx = dy · (1 + scale)          dscale[b, c] = Σ_p dy · x          dshift[b, c] = Σ_p dy
    The 1 makes a network whose scale and shift are still zero the one without conditioning.
SHAPES
    x, y, dx, dy (B, ..., C) float32, channels last, P pixels; scale, shift, dscale, dshift (B, C)
VERSIONS
    v1 naive: one thread an element, backward a thread a channel of a sample; v2 vectorised: four
    channels a thread, the backward's sums in a tree in the same pass (C a multiple of 4). fuse/
    writes both.
LAUNCH, DETERMINISM
    as fuse/
COST
    bytes: 8 n forward, 12 n backward; 3 and 5 FLOPs an element. Roof: memory bandwidth.
SOURCE
    Perez et al. 2017, arXiv:1709.07871, eq. 2 (FiLM); Dhariwal and Nichol 2021, arXiv:2105.05233,
    eq. 3 (AdaGN).
READ NEXT
    groupnorm/reference.py, whose output this scales.
"""

import numpy as np

from ..device import float32
from ..dtypes import in_single
from .fuse import EACH, PER_SAMPLE, UNCHANGED, Operation, fuse
from .operation import Problem, half, operation, single
from .reduce.trees import sample_sum_reference

# References ---------------------------------------------------------------------------------------


@in_single()
def scale_shift_forward_reference(x, scale, shift):
    y = x.reshape(len(x), -1, x.shape[-1]) * (1 + scale)[:, None]
    y += shift[:, None]
    return y.reshape(x.shape)


@in_single(1, 2)
def scale_shift_backward_reference(dy, x, scale):
    g, pixels = (a.reshape(len(x), -1, x.shape[-1]) for a in (dy, x))
    dx = g * (1 + scale)[:, None]
    return dx.reshape(x.shape), np.einsum("bpc,bpc->bc", g, pixels), sample_sum_reference(g)


# Kernels ------------------------------------------------------------------------------------------


def scaled(x, scale, shift):
    return x * (float32(1) + scale) + shift


def scaled_dx(dy, scale):
    return dy * (float32(1) + scale)


def scaled_dscale(dy, x):
    return dy * x


SCALE_SHIFT = fuse(
    EACH,
    Operation(scaled, PER_SAMPLE, PER_SAMPLE, x=scaled_dx, scale=scaled_dscale, shift=UNCHANGED),
    EACH,
    name="scale_shift",
    module=__name__,
)


# Cost ---------------------------------------------------------------------------------------------


def scale_shift_forward_cost(B, P, C):
    """(bytes, FLOPs) over B samples of P pixels of C channels."""
    return 4 * (2 * B * P * C + 2 * B * C), 3 * B * P * C


def scale_shift_backward_cost(B, P, C):
    return 4 * (3 * B * P * C + 3 * B * C), 5 * B * P * C


# Operations ---------------------------------------------------------------------------------------

IMAGE, VECTOR = half(32, 64, 64, 64), half(32, 64)  # of the UNet, for the benchmark


@operation(
    reference=scale_shift_forward_reference,
    cost=scale_shift_forward_cost,
    check=lambda x, scale, shift: SCALE_SHIFT.check(x, scale, shift),
    versions=SCALE_SHIFT.versions(),
    problems=[
        Problem(x=single(2, 3, 8), scale=single(2, 8), shift=single(2, 8)),
        Problem(x=single(4, 9, 33), scale=single(4, 33), shift=single(4, 33)),
        Problem(x=IMAGE, scale=VECTOR, shift=VECTOR, measured=True),
    ],
)
def scale_shift_forward(x, scale, shift, version=None):
    """x (B, ..., C) · (1 + scale (B, C)) + shift (B, C) at every pixel, as a new array."""
    return SCALE_SHIFT.forward(x, scale, shift, version=version.number)


@operation(
    reference=scale_shift_backward_reference,
    cost=scale_shift_backward_cost,
    check=lambda x, scale: SCALE_SHIFT.check(x, scale, None),
    versions=SCALE_SHIFT.versions("backward"),
    problems=[
        Problem(dy=single(2, 3, 8), x=single(2, 3, 8), scale=single(2, 8)),
        Problem(dy=single(4, 9, 33), x=single(4, 9, 33), scale=single(4, 33)),
        Problem(dy=single(2, 5, 5, 516), x=single(2, 5, 5, 516), scale=single(2, 516), fast=False),
        Problem(dy=IMAGE, x=IMAGE, scale=VECTOR, measured=True),
    ],
)
def scale_shift_backward(dy, x, scale, version=None):
    """(dx, dscale (B, C), dshift (B, C))."""
    return tuple(SCALE_SHIFT.backward(dy, x, scale, None, version=version.number))
