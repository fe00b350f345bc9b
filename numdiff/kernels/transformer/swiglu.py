"""SwiGLU: half of the channels, through a SiLU, gate the other half.

MATHEMATICS
        y = silu(a) · b,   a = x[…, :H], b = x[…, H:]          silu(a) = a · s, s = 1 / (1 + e^-a)
        da = dy · b · s · (1 + a · (1 - s))          db = dy · silu(a)
SHAPES
    x, dx (…, 2 · H), y, dy (…, H) float16 or float32; the other axes read as rows
VERSIONS
    v1 naive: one thread an element of y. fuse/ writes both.
    v2 vectorised: one thread eight neighbours, 16 bytes of float16 in one instruction. (H a multiple of 8; sm_80)
    e^-a and the quotient are the hardware's approximate instructions, whose errors are float32's last bits.
MEASURED
    NVIDIA H200, 2026-11-26, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    swiglu_forward, 64×256×4096, float16
        v1       125 µs    1,605 GB/s   39 % of memory
        v2*     48.9 µs    4,115 GB/s  100 % of memory   2.56 × v1
    swiglu_backward, 64×256×2048, 64×256×4096, float16
        v1       151 µs    2,217 GB/s   54 % of memory
        v2*     80.9 µs    4,150 GB/s  101 % of memory   1.87 × v1
LAUNCH, DETERMINISM
    as fuse/
COST
    in passes over an array of n elements: 3 forward, 5 backward. 3 and 9 FLOPs an element, and an exponential.
    Roof: memory bandwidth. The bias before it is the matmul's, which adds it and makes its gradient without a pass of
    its own.
SOURCE
    Shazeer 2020, arXiv:2002.05202, eq. 6.
READ NEXT
    gate_adaln/, four passes in one; matmul/activations.py: where Hopper's kernels run the products on both
    sides, SwiGLU is part of them, and this file's kernels do not run.
"""
import numpy as np

from ...device import cuda, empty, empty_like, int64, is_device, over_batch, uint32
from ...dtypes import working_type
from ..common import divide
from ..fuse import EACH, Operation, Place, fuse
from ..groupnorm.vectors import sigmoid
from ..versions import versions_by_name

LOWEST = 80  # of -a, for which e^-a is still a float32
ROWS = 64  # that the reference takes at a time: its temporaries stay in the cache

# References -----------------------------------------------------------------------------------------------------------

def _over_rows(function, out, *arrays):
    """function(some rows of out, of each array …, in the type that NumPy computes in), ROWS at a time."""
    rows = [array.reshape(-1, array.shape[-1]) for array in (out, *arrays)]

    def part(several):
        for first in range(several.start, several.stop, ROWS):
            i = slice(first, min(first + ROWS, several.stop))
            function(rows[0][i], *(r[i].astype(working_type(r.dtype), copy=False) for r in rows[1:]))

    over_batch(part, len(rows[0]), sum(array.size for array in arrays))


def _sigmoid(a):
    s = np.minimum(-a, LOWEST)
    np.exp(s, out=s)
    s += 1
    return np.reciprocal(s, out=s)


def swiglu_forward_reference(x):
    H = x.shape[-1] // 2

    def some(y, rows):
        a, b = rows[:, :H], rows[:, H:]
        s = _sigmoid(a)
        s *= a
        s *= b
        y[...] = s

    y = np.empty((*x.shape[:-1], H), x.dtype)
    _over_rows(some, y, x)
    return y


def swiglu_backward_reference(dy, x):
    H = x.shape[-1] // 2

    def some(dx, g, rows):
        a, b = rows[:, :H], rows[:, H:]
        s = _sigmoid(a)
        gate = a * s
        dx[:, H:] = g * gate
        s += gate - gate * s  # silu'(a)
        s *= b
        s *= g
        dx[:, :H] = s

    dx = np.empty_like(x)
    _over_rows(some, dx, dy, x)
    return dx


# Kernels --------------------------------------------------------------------------------------------------------------
# A row's two halves are H apart, a multiple of 8 in version 2, so a thread's eight lie within one row. Four neighbours
# of float16 would be 8 bytes: twice the instructions, with half as much under way.

@cuda.jit(device=True, forceinline=True)
def gate_at(i, H, width):
    """Where the gate's channel is in x, of which the i-th element of y comes; i and H are multiples of the width."""
    row, c = divide(np.uint64(i) // np.uint64(width), uint32(H) // uint32(width))
    return int64(row) * 2 * H + c * width


@cuda.jit(device=True, forceinline=True)
def gated(a, b):
    return a * sigmoid(a) * b


@cuda.jit(device=True, forceinline=True)
def gate_gradients(dy, a, b):
    """(da, db)."""
    s = sigmoid(a)
    y = a * s
    return dy * b * (s + y - y * s), dy * y


FIRST, SECOND = (Place("(…, 2 · H)", lambda shape: (*shape[:-1], 2 * shape[-1]), index, gate_at=gate_at)
                 for index in ("gate_at(i, C, {width})", "gate_at(i, C, {width}) + C"))
SWIGLU = fuse(FIRST, Operation(gated, SECOND, gradients=gate_gradients), EACH, name="swiglu", module=__name__,
              widths=(1, 8))


# Launchers ------------------------------------------------------------------------------------------------------------

@versions_by_name
def swiglu_forward(x, version=None):
    """silu(first half of the channels) · second half, as a new array (…, H)."""
    if x.shape[-1] % 2:
        raise ValueError(f"swiglu takes gate and value side by side, an even number of channels, not {x.shape[-1]}")
    if not is_device(x):
        return swiglu_forward_reference(x)
    return SWIGLU.forward(x, x, version=version, out=empty((*x.shape[:-1], x.shape[-1] // 2), x.dtype, like=x))


@versions_by_name
def swiglu_backward(dy, x, version=None):
    """dx (…, 2 · H) from dy (…, H) and the forward's input x."""
    if not is_device(x):
        return swiglu_backward_reference(dy, x)
    dx = empty_like(x)
    SWIGLU.backward(dy, x, x, version=version, into={"a": dx, "b": dx})
    return dx


# Cost -----------------------------------------------------------------------------------------------------------------

def swiglu_forward_cost(rows, C, itemsize=4):
    """(bytes, FLOPs) of an x with C = 2 · H channels."""
    return 3 * itemsize * rows * C // 2, 3 * rows * C // 2


def swiglu_backward_cost(rows, C, itemsize=4):
    return 5 * itemsize * rows * C // 2, 9 * rows * C // 2
