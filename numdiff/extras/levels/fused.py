"""A chain with an operand at each place, as an operation: scale and shift, SiLU, then a gate and a
residual.

No model uses it. The check and the tests run it, and so every text that kernels/fuse/ writes: with sums per
sample, with a sum per channel, and with neighbours of each width.

MATHEMATICS
    y = silu(x · (1 + scale[b]) + shift[c]) + gate[b] · h
SHAPES
    x, h, y (B, P, C), scale, gate (B, C), shift (C,)
VERSIONS
    v1 naive: one thread an element; v2 vectorised: four neighbours a thread; v3 eight: eight
    neighbours a thread.
LAUNCH, DETERMINISM, COST
    as kernels/fuse/__init__.py
SOURCE
    kernels/scale_shift.py, kernels/elementwise.py and kernels/transformer/gate.py, which have the three
    operations.
READ NEXT
    kernels/bias.py, then kernels/transformer/bias_gelu.py
"""

import numpy as np

from ...dtypes import in_single
from ...kernels.elementwise import silu, silu_forward_reference, silu_gradient
from ...kernels.fuse.chain import VERSIONS, WIDTHS, fuse
from ...kernels.fuse.operations import EACH, PER_CHANNEL, PER_SAMPLE, UNCHANGED, Operation
from ...kernels.operation import Problem, Version, half, lacks_multiple, operation, single
from ...kernels.scale_shift import scaled, scaled_dscale, scaled_dx
from ...kernels.transformer.gate import gated, gated_dgate, gated_dh

CHAIN = fuse(
    EACH,
    Operation(scaled, PER_SAMPLE, PER_CHANNEL, x=scaled_dx, scale=scaled_dscale, shift=UNCHANGED),
    Operation(silu, x=silu_gradient),
    Operation(gated, EACH, PER_SAMPLE, x=UNCHANGED, h=gated_dh, gate=gated_dgate),
    EACH,
    name="fused",
    module=__name__,
    widths=WIDTHS,
)


# References ---------------------------------------------------------------------------------------


@in_single()
def fused_forward_reference(x, scale, shift, h, gate):
    return silu_forward_reference(x * (1 + scale[:, None]) + shift) + gate[:, None] * h


@in_single(1, 2, 4)
def fused_backward_reference(dy, x, scale, shift, h, gate):
    """(dx, dscale, dshift, dh, dgate)"""
    z = x * (1 + scale[:, None]) + shift
    s = 1 / (1 + np.exp(-z))
    dz = dy * s * (1 + z * (1 - s))
    return (
        dz * (1 + scale[:, None]),
        (dz * x).sum(1),
        dz.sum((0, 1)),
        dy * gate[:, None],
        (dy * h).sum(1),
    )


# Operations ---------------------------------------------------------------------------------------


def _versions():
    """All of a chain's, in each type."""
    return [
        Version(
            name,
            number=number,
            requires="7.5" if width == 8 else None,
            of=("x",),
            fits=lambda x, width=width: lacks_multiple(width, x.shape[-1], "channels"),
        )
        for (name, number), width in zip(VERSIONS.items(), WIDTHS, strict=True)
    ]


def _problems(backward):
    """…the last, of which only the backward has more than others: two chunks of rows, the second of
    three."""
    found = []
    for (B, P, C), array, more in (
        ((2, 3, 5), single, {}),
        ((2, 3, 8), single, {}),
        ((2, 3, 16), half, {"versions": ("eight",), "bfloat16": True}),
        ((1, 2051, 4), single, {"versions": ("vectorised",)}),
    )[: 4 if backward else 3]:
        given = {
            "x": array(B, P, C),
            "scale": array(B, C),
            "shift": array(C),
            "h": array(B, P, C),
            "gate": array(B, C),
        }
        found.append(Problem(**({"dy": array(B, P, C)} if backward else {}), **given, **more))
    return found


@operation(
    reference=fused_forward_reference, versions=_versions(), problems=_problems(backward=False)
)
def fused_forward(x, scale, shift, h, gate, version=None):
    """y, a new array."""
    return CHAIN.forward(x, scale, shift, h, gate, version=version.number)


@operation(
    reference=fused_backward_reference, versions=_versions(), problems=_problems(backward=True)
)
def fused_backward(dy, x, scale, shift, h, gate, version=None):
    """(dx, dscale, dshift, dh, dgate), new arrays."""
    return tuple(CHAIN.backward(dy, x, scale, shift, h, gate, version=version.number))
