"""Cases of chains that are fused."""
from .. import elementwise, fuse, scale_shift
from ..fuse import EACH, PER_CHANNEL, PER_SAMPLE, UNCHANGED, Operation
from ..transformer import gate
from .case import HALF_TOLERANCE, TOLERANCE, Case, normal, one
from .half import halves


def fused_cases():
    """A chain with an operand at each place, and sums for both that have them; eight at a time also in float16."""
    scaled = Operation(scale_shift.scaled, PER_SAMPLE, PER_CHANNEL, x=scale_shift.scaled_dx,
                       scale=scale_shift.scaled_dscale, shift=UNCHANGED)
    gated = Operation(gate.gated, EACH, PER_SAMPLE, x=UNCHANGED, h=gate.gated_dh, gate=gate.gated_dgate)
    chain = fuse.fuse(EACH, scaled, Operation(elementwise.silu, x=elementwise.silu_gradient), gated, EACH, name="fused")
    for B, P, C, versions, half in ((2, 3, 5, (1,), False), (2, 3, 8, (1, 2, 3), False), (2, 3, 16, (3,), True),
                                    (1, 2051, 4, (2,), False)):  # two chunks of rows, the second of three
        given = {"x": (B, P, C), "scale": (B, C), "shift": (C,), "h": (B, P, C), "gate": (B, C)}
        label, arrays = f"{C} channels{', float16' * half}{', two chunks' * (P > 3)}", halves if half else normal
        tolerance = HALF_TOLERANCE if half else TOLERANCE
        if P == 3:
            yield Case("fused", arrays(**given), one(lambda a, v: chain.forward(*(
                getattr(a, n) for n in chain.arguments), version=v)), versions, tolerance, label)
        yield Case("fused_backward", arrays(dy=(B, P, C), **given), lambda a, v: tuple(chain.backward(
            a.dy, *(getattr(a, n) for n in chain.arguments), version=v)), versions, tolerance, label)
