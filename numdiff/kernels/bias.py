"""Adding one vector to every pixel: a bias to all samples, or a vector of its own to each sample.

MATHEMATICS
    bias_add      y[b, p, c] = x[b, p, c] + bias[c]         dx = dy,  dbias[c] += Σ_{b,p} dy[b, p, c]
    channel_add   y[b, p, c] = x[b, p, c] + e[b, c]         dx = dy,  de[b, c] = Σ_p dy[b, p, c]
    A broadcast's backward is a sum over what was broadcast: see reduce/trees.py.
SHAPES
    x, y (B, ..., C) float32, channels last; bias (C,); e (B, C)
VERSIONS
    v1 naive: one thread an element; v2 vectorised: four neighbouring channels (C a multiple of 4).
    fuse/ writes both.
LAUNCH, DETERMINISM
    as fuse/
COST
    bytes: 8 n forward, 4 n backward; one addition an element. Roof: memory bandwidth. So where a
    matmul or convolution comes before, its epilogue adds the bias at no cost.
SOURCE
    the timestep's vector e added after a ResBlock's first convolution: Ho et al. 2020,
    arXiv:2006.11239, appendix B.
READ NEXT
    scale_shift.py, which multiplies as well.
"""

from ..dtypes import in_single
from .fuse import EACH, PER_SAMPLE, Operation, fuse
from .operation import Problem, half, operation, single
from .reduce.trees import column_sum, column_sum_cost, sample_sum, sample_sum_cost

# References ---------------------------------------------------------------------------------------


@in_single()
def bias_add_forward_reference(x, bias):
    return x + bias


@in_single()
def channel_add_forward_reference(x, e):
    return (x.reshape(len(x), -1, x.shape[-1]) + e[:, None]).reshape(x.shape)


# Kernels ------------------------------------------------------------------------------------------
# One chain serves both: the bias is the case of a single sample that is as long as the whole array.


def plus(x, e):
    return x + e


CHANNEL_ADD = fuse(EACH, Operation(plus, PER_SAMPLE), EACH, name="channel_add", module=__name__)


# Cost ---------------------------------------------------------------------------------------------


def bias_add_forward_cost(M, C):
    """(bytes, FLOPs) over M rows of C channels."""
    return 4 * (2 * M * C + C), M * C


def bias_add_backward_cost(M, C):
    return column_sum_cost(M, C)


def channel_add_forward_cost(B, P, C):
    """(bytes, FLOPs) over B samples of P pixels of C channels."""
    return 4 * (2 * B * P * C + B * C), B * P * C


def channel_add_backward_cost(B, P, C):
    return sample_sum_cost(B, P, C)


# Operations ---------------------------------------------------------------------------------------


def _check_bias(x, bias):
    if tuple(bias.shape) != (x.shape[-1],):
        raise ValueError(
            f"bias_add: bias must have shape ({x.shape[-1]},), x's last axis, not {tuple(bias.shape)}."
        )


@operation(
    reference=bias_add_forward_reference,
    cost=bias_add_forward_cost,
    check=_check_bias,
    versions=CHANNEL_ADD.versions(),
    problems=[
        Problem(x=single(5, 8), bias=single(8)),
        Problem(x=single(4, 9, 33), bias=single(33)),
        Problem(x=half(64 * 256, 768), bias=single(768), measured=True),
    ],
)
def bias_add_forward(x, bias, version=None):
    """x (..., C) + bias (C,), as a new array."""
    rows = x.reshape(1, -1, x.shape[-1])
    return CHANNEL_ADD.forward(rows, bias.reshape(1, -1), version=version.number).reshape(x.shape)


def bias_add_backward(dy, dbias):
    """Adds the gradient of the bias into `dbias`; the gradient of x is `dy` itself."""
    column_sum(dy, out=dbias)


@operation(
    reference=channel_add_forward_reference,
    cost=channel_add_forward_cost,
    check=lambda x, e: CHANNEL_ADD.check(x, e),
    versions=CHANNEL_ADD.versions(),
    problems=[
        Problem(x=single(2, 3, 8), e=single(2, 8)),
        Problem(x=single(4, 9, 33), e=single(4, 33)),
        Problem(x=single(6, 20), e=single(6, 20)),
        Problem(x=single(32, 64, 64, 64), e=single(32, 64), measured=True),
    ],
)
def channel_add_forward(x, e, version=None):
    """x (B, ..., C) + e (B, C) at every pixel, as a new array."""
    return CHANNEL_ADD.forward(x, e, version=version.number)


def channel_add_backward(dy):
    """de (B, C); the gradient of x is `dy` itself."""
    return sample_sum(dy)
