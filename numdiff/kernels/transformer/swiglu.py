"""SwiGLU: half of the channels, through a SiLU, gate the other half.

MATHEMATICS
        y = silu(a) · b,   a = x[…, :H], b = x[…, H:]          silu(a) = a · s, s = 1 / (1 + e^-a)
        da = dy · b · s · (1 + a · (1 - s))          db = dy · silu(a)
SHAPES
    x, dx (…, 2 · H), y, dy (…, H) float16 or float32; the other axes read as rows
VERSIONS
    v1 naive: one thread an element of y. fuse/ writes both.
    v2 vectorised: one thread eight neighbours, 16 bytes of float16 in one instruction. (H a
    multiple of 8; sm_80) e^-a and the quotient are the hardware's approximate instructions, whose
    errors are float32's last bits.
LAUNCH, DETERMINISM
    as fuse/
COST
    in passes over an array of n elements: 3 forward, 5 backward. 3 and 9 FLOPs an element, and an
    exponential.
    Roof: memory bandwidth. The bias before it is the matmul's, which adds it and makes its gradient
    without a pass of its own.
SOURCE
    Shazeer 2020, arXiv:2002.05202, eq. 6.
READ NEXT
    gate_adaln/, four passes in one; matmul/activations.py: where Hopper's kernels run the products
    on both sides, SwiGLU is part of them, and this file's kernels do not run.
"""

import numpy as np

from ...device import device_inline, empty, empty_like, int64, on_host, over_batch, uint32
from ...device.common import divide
from ...dtypes import in_single
from ..cpu.exp import sigmoid as sigmoid_on_host
from ..fuse import EACH, Operation, Place, fuse
from ..groupnorm.vectors import sigmoid
from ..operation import Problem, half, operation, single

LOWEST = 80  # of -a, for which e^-a is still a float32
PARALLEL_THRESHOLD_FACTOR = 6  # an element is 6 times cheaper than the threshold assumes
ONE = np.float32(1)

# References ---------------------------------------------------------------------------------------


def _sigmoid(a):
    return 1 / (1 + np.exp(np.minimum(-a, LOWEST)))


@in_single()
def swiglu_forward_reference(x):
    a, b = np.split(x, 2, axis=-1)
    return a * _sigmoid(a) * b


@in_single()
def swiglu_backward_reference(dy, x):
    a, b = np.split(x, 2, axis=-1)
    s = _sigmoid(a)
    return np.concatenate((dy * b * s * (1 + a * (1 - s)), dy * a * s), axis=-1)


# Where there is no GPU: loops compiled for the host -----------------------------------------------


@on_host
def swiglu_rows(x, y):
    H = y.shape[1]
    for row in range(len(x)):
        a, b = x[row, :H], x[row, H:]
        for c in range(H):
            y[row, c] = a[c] * sigmoid_on_host(a[c]) * b[c]


@on_host
def swiglu_gradient_rows(dy, x, dx):
    H = dy.shape[1]
    for row in range(len(x)):
        a, b = x[row, :H], x[row, H:]
        da, db = dx[row, :H], dx[row, H:]
        for c in range(H):
            s = sigmoid_on_host(a[c])
            da[c] = dy[row, c] * b[c] * s * (ONE + a[c] * (ONE - s))
            db[c] = dy[row, c] * a[c] * s


def _over_rows(function, *arrays):
    rows = [array.reshape(-1, array.shape[-1]) for array in arrays]
    work = sum(a.size for a in arrays) // PARALLEL_THRESHOLD_FACTOR
    over_batch(lambda some: function(*(r[some] for r in rows)), len(rows[0]), work)
    return arrays[-1]


@in_single()
def swiglu_forward_cpu(x):
    if x.dtype != np.float32:
        return swiglu_forward_reference(x)
    x = np.ascontiguousarray(x)
    return _over_rows(swiglu_rows, x, np.empty((*x.shape[:-1], x.shape[-1] // 2), np.float32))


@in_single()
def swiglu_backward_cpu(dy, x):
    if x.dtype != np.float32:
        return swiglu_backward_reference(dy, x)
    dy, x = np.ascontiguousarray(dy), np.ascontiguousarray(x)
    return _over_rows(swiglu_gradient_rows, dy, x, np.empty_like(x))


# Kernels ------------------------------------------------------------------------------------------
# A row's two halves are H apart, a multiple of 8 in version 2, so a thread's eight are within one
# row. Four neighbours of float16 would be 8 bytes: twice the instructions, with half as much under
# way.


@device_inline
def gate_at(i, H, width):
    """The gate's channel in x for the i-th element of y; i and H are multiples of the width."""
    row, c = divide(np.uint64(i) // np.uint64(width), uint32(H) // uint32(width))
    return int64(row) * 2 * H + c * width


@device_inline
def gated(a, b):
    return a * sigmoid(a) * b


@device_inline
def gate_gradients(dy, a, b):
    """(da, db)."""
    s = sigmoid(a)
    y = a * s
    return dy * b * (s + y - y * s), dy * y


FIRST, SECOND = (
    Place("(…, 2 · H)", lambda shape: (*shape[:-1], 2 * shape[-1]), index, gate_at=gate_at)
    for index in ("gate_at(i, C, {width})", "gate_at(i, C, {width}) + C")
)
SWIGLU = fuse(
    FIRST,
    Operation(gated, SECOND, gradients=gate_gradients),
    EACH,
    name="swiglu",
    module=__name__,
    widths=(1, 8),
)


# Cost ---------------------------------------------------------------------------------------------


def swiglu_forward_cost(rows, C, itemsize=4):
    """(bytes, FLOPs) of an x with C = 2 · H channels."""
    return 3 * itemsize * rows * C // 2, 3 * rows * C // 2


def swiglu_backward_cost(rows, C, itemsize=4):
    return 5 * itemsize * rows * C // 2, 9 * rows * C // 2


# Operations ---------------------------------------------------------------------------------------


def _check(x):
    if x.shape[-1] % 2:
        raise ValueError(
            f"swiglu takes gate and value side by side, an even number of channels, not {x.shape[-1]}"
        )


def _halved(x):
    """The shape of y."""
    return (*x.shape[:-1], x.shape[-1] // 2)


HIDDEN = 8 * 768 // 3  # of a LightningDiT-B/2, for the benchmark


@operation(
    reference=swiglu_forward_cpu,
    cost=swiglu_forward_cost,
    check=_check,
    versions=SWIGLU.versions(shape_of=_halved),
    problems=[
        Problem(x=single(3, 24)),
        Problem(x=single(3, 16)),
        Problem(x=half(3, 32), bfloat16=True),
        Problem(x=half(64, 256, 2 * HIDDEN), measured=True),
    ],
)
def swiglu_forward(x, version=None):
    """silu(first half of the channels) · second half, as a new array (…, H)."""
    return SWIGLU.forward(x, x, version=version.number, out=empty(_halved(x), x.dtype, like=x))


@operation(
    reference=swiglu_backward_cpu,
    cost=swiglu_backward_cost,
    versions=SWIGLU.versions("backward", of="dy"),
    problems=[
        *(
            Problem(dy=array(3, H), x=array(3, 2 * H), bfloat16=array is half)
            for H, array in ((12, single), (8, single), (16, half))
        ),
        Problem(dy=half(64, 256, HIDDEN), x=half(64, 256, 2 * HIDDEN), measured=True),
    ],
)
def swiglu_backward(dy, x, version=None):
    """dx (…, 2 · H) from dy (…, H) and the forward's input x."""
    dx = empty_like(x)
    SWIGLU.backward(dy, x, x, version=version.number, into={"a": dx, "b": dx})
    return dx
