"""Gate and residual: a branch is scaled, channel by channel, by what its image is conditioned on,
and added to x.

MATHEMATICS
        y[b, t, c] = x[b, t, c] + gate[b, c] · h[b, t, c]
        dx = dy          dh = gate · dy          dgate[b, c] = Σ_t dy · h
    With the gate at zero, as adaLN-Zero starts, every block of the network is the identity.
SHAPES
    x, h, y, dy, dh (B, ..., C) float32, channels last, T tokens; gate, dgate (B, C)
VERSIONS
    v1 naive: one thread an element, backward a thread a channel of an image; v2 vectorised: four
    channels a thread, the backward's sums in a tree in the same pass (C a multiple of 4). fuse/
    writes both.
LAUNCH, DETERMINISM
    as fuse/
COST
    bytes: 12 n forward, 12 n backward (dx is dy itself and costs nothing). Roof: memory bandwidth.
SOURCE
    Peebles and Xie 2023, arXiv:2212.09748, section 3.2 (adaLN-Zero: α); Goyal et al. 2017,
    arXiv:1706.02677, section 5.1, for starting residual branches at zero.
READ NEXT
    bias_gelu.py, which stands inside the branch; gate_adaln/, this and the norm that follows in one
    pass.
"""

import numpy as np

from ...device import over_batch
from ...dtypes import in_single
from ..fuse import EACH, PER_SAMPLE, UNCHANGED, Operation, fuse
from ..operation import Problem, half, operation, single

# References ---------------------------------------------------------------------------------------


@in_single()
def gate_forward_reference(x, h, gate):
    y = np.empty_like(x)
    rows, branch, out = (a.reshape(len(x), -1, x.shape[-1]) for a in (x, h, y))

    def images(i):
        np.multiply(branch[i], gate[i, None], out=out[i])
        out[i] += rows[i]

    over_batch(images, len(x), x.size)
    return y


@in_single(1)
def gate_backward_reference(dy, h, gate):
    dh, dgate = np.empty_like(h), np.empty_like(gate)
    g, branch, out = (a.reshape(len(h), -1, h.shape[-1]) for a in (dy, h, dh))

    def images(i):
        np.multiply(g[i], gate[i, None], out=out[i])
        np.einsum("btc,btc->bc", g[i], branch[i], out=dgate[i])

    over_batch(images, len(h), h.size)
    return dh, dgate


# Kernels ------------------------------------------------------------------------------------------


def gated(x, h, gate):
    return x + gate * h


def gated_dh(dy, gate):
    return dy * gate


def gated_dgate(dy, h):
    return dy * h


GATE = fuse(
    EACH,
    Operation(gated, EACH, PER_SAMPLE, x=UNCHANGED, h=gated_dh, gate=gated_dgate),
    EACH,
    name="gate",
    module=__name__,
)


# Cost ---------------------------------------------------------------------------------------------


def gate_forward_cost(B, T, C):
    """(bytes, FLOPs) over B images of T tokens of C channels."""
    return 4 * (3 * B * T * C + B * C), 2 * B * T * C


def gate_backward_cost(B, T, C):
    return 4 * (3 * B * T * C + 2 * B * C), 3 * B * T * C


# Operations ---------------------------------------------------------------------------------------

TOKENS, VECTOR = half(64, 256, 768), half(64, 768)  # of a DiT-B/2, for the benchmark
SHAPES = (2, 3, 36), (1, 2, 132), (2, 2, 7)


@operation(
    reference=gate_forward_reference,
    cost=gate_forward_cost,
    check=lambda x, h, gate: GATE.check(x, h, gate),
    versions=GATE.versions(),
    problems=[
        *(
            Problem(x=single(*shape), h=single(*shape), gate=single(shape[0], shape[2]))
            for shape in SHAPES
        ),
        Problem(x=half(2, 5, 8), h=half(2, 5, 8), gate=half(2, 8)),
        Problem(x=TOKENS, h=TOKENS, gate=VECTOR, measured=True),
    ],
)
def gate_forward(x, h, gate, version=None):
    """x (B, ..., C) + gate (B, C) · h (B, ..., C), as a new array."""
    return GATE.forward(x, h, gate, version=version.number)


@operation(
    reference=gate_backward_reference,
    cost=gate_backward_cost,
    check=lambda dy, h, gate: GATE.check(dy, h, gate),
    versions=GATE.versions("backward", of="dy"),
    problems=[
        *(
            Problem(dy=single(*shape), h=single(*shape), gate=single(shape[0], shape[2]))
            for shape in SHAPES
        ),
        Problem(dy=half(2, 5, 8), h=half(2, 5, 8), gate=half(2, 8)),
        Problem(dy=TOKENS, h=TOKENS, gate=VECTOR, measured=True),
    ],
)
def gate_backward(dy, h, gate, version=None):
    """(dh, dgate (B, C)); the gradient of x is `dy` itself."""
    return tuple(GATE.backward(dy, None, h, gate, version=version.number)[1:])
