"""SwiGLU: half of the channels, through a SiLU, gate the other half.

MATHEMATICS
        y = silu(a) · b,   a = x[…, :H], b = x[…, H:]          silu(a) = a · s, s = 1 / (1 + e^-a)
        da = dy · b · s · (1 + a · (1 - s))          db = dy · silu(a)
SHAPES
    x, dx (…, 2 · H), y, dy (…, H) float16 or float32; the other axes read as rows
VERSIONS
    v1 naive: one thread an element of y.
    v2 vectorised: one thread eight neighbours, 16 bytes of float16 in one instruction; e^-a and the quotient by the
       hardware's approximate instructions, whose errors are float32's last bits. (H a multiple of 8; sm_80)
LAUNCH
    v1 ceil(n / 256) blocks of 256 threads for n elements of y, v2 an eighth. No shared memory.
DETERMINISM
    each output is written by one thread, from its own inputs: same bits every run.
COST
    in passes over an array of n elements: 3 forward, 5 backward. 3 and 9 FLOPs an element, and an exponential.
    Roof: memory bandwidth. The bias before it is the matmul's, which adds it and makes its gradient without a pass of
    its own.
SOURCE
    Shazeer 2020, arXiv:2002.05202, eq. 6.
READ NEXT
    gate_adaln.py, four passes in one; matmul/swiglu_epilogues.py: where Hopper's kernels run the products on both
    sides, SwiGLU is part of them, and this file's kernels do not run.
"""
import numpy as np

from ...device import cuda, empty, empty_like, float32, int64, is_device, launch, over_batch
from ...device.eight import load8, store8
from ...device.requires import requires, supports
from ...dtypes import working_type
from ..common import divide
from ..elementwise import BLOCK, silu, silu_gradient
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


# v1: one thread an element --------------------------------------------------------------------------------------------

@cuda.jit
def swiglu_forward_kernel_v1(x, y, H):
    i = cuda.grid(1)
    if i < y.size:
        at = i // H * 2 * H + i % H
        y[i] = silu(float32(x[at])) * float32(x[at + H])


@cuda.jit
def swiglu_backward_kernel_v1(dy, x, dx, H):
    i = cuda.grid(1)
    if i < dy.size:
        at = i // H * 2 * H + i % H
        g, a = float32(dy[i]), float32(x[at])
        dx[at] = silu_gradient(g * float32(x[at + H]), a)
        dx[at + H] = g * silu(a)


# v2: eight neighbours a thread ----------------------------------------------------------------------------------------
# A row's two halves are H apart, a multiple of 8, so a thread's eight lie within one row. Four neighbours of float16
# would be 8 bytes: twice the instructions, with half as much under way.

@cuda.jit(device=True, forceinline=True)
def gated(a, b):
    """silu(a) · b."""
    return a * sigmoid(a) * b


@cuda.jit(device=True, forceinline=True)
def gate_gradients(g, a, b):
    """(da, db)."""
    s = sigmoid(a)
    y = a * s
    return g * b * (s + y - y * s), g * y


@cuda.jit(device=True, forceinline=True)
def place(i, H):
    """Where the eight channels of the gate are in x, of which the i-th eight of y come."""
    row, c = divide(i, H // 8)
    return int64(row) * 2 * H + c * 8


@requires("8.0")
@cuda.jit
def swiglu_forward_kernel_v2(x, y, H):
    i = cuda.grid(1)
    if i < y.size // 8:
        at = place(i, H)
        a, b = load8(x, at), load8(x, at + H)
        store8(y, int64(i) * 8, (
            gated(a[0], b[0]), gated(a[1], b[1]), gated(a[2], b[2]), gated(a[3], b[3]),
            gated(a[4], b[4]), gated(a[5], b[5]), gated(a[6], b[6]), gated(a[7], b[7])))


@requires("8.0")
@cuda.jit
def swiglu_backward_kernel_v2(dy, x, dx, H):
    i = cuda.grid(1)
    if i < dy.size // 8:
        at = place(i, H)
        g, a, b = load8(dy, int64(i) * 8), load8(x, at), load8(x, at + H)
        a0, b0 = gate_gradients(g[0], a[0], b[0])
        a1, b1 = gate_gradients(g[1], a[1], b[1])
        a2, b2 = gate_gradients(g[2], a[2], b[2])
        a3, b3 = gate_gradients(g[3], a[3], b[3])
        a4, b4 = gate_gradients(g[4], a[4], b[4])
        a5, b5 = gate_gradients(g[5], a[5], b[5])
        a6, b6 = gate_gradients(g[6], a[6], b[6])
        a7, b7 = gate_gradients(g[7], a[7], b[7])
        store8(dx, at, (a0, a1, a2, a3, a4, a5, a6, a7))
        store8(dx, at + H, (b0, b1, b2, b3, b4, b5, b6, b7))


# Launchers ------------------------------------------------------------------------------------------------------------

def _check(x, version):
    """(H, version)."""
    if x.shape[-1] % 2:
        raise ValueError(f"swiglu takes gate and value side by side, an even number of channels, not {x.shape[-1]}")
    H = x.shape[-1] // 2
    fits = H % 8 == 0 and (not is_device(x) or supports(x, swiglu_forward_kernel_v2, swiglu_backward_kernel_v2))
    if version == 2 and not fits:
        raise ValueError(f"version 2 (vectorised) takes eight channels at a time, on a device of capability 8.0, and "
                         f"{H} must be a multiple of 8; use version=1")
    return H, version or (2 if fits else 1)


def _launch(kernel_v1, kernel_v2, version, n, *arguments):
    kernel, width = (kernel_v1, 1) if version == 1 else (kernel_v2, 8)
    launch(kernel, -(-n // (width * BLOCK)), BLOCK, *(a.reshape(-1) for a in arguments[:-1]), arguments[-1])


@versions_by_name
def swiglu_forward(x, version=None):
    """silu(first half of the channels) · second half, as a new array (…, H)."""
    H, version = _check(x, version)
    if not is_device(x):
        return swiglu_forward_reference(x)
    y = empty((*x.shape[:-1], H), x.dtype, like=x)
    _launch(swiglu_forward_kernel_v1, swiglu_forward_kernel_v2, version, y.size, x, y, H)
    return y


@versions_by_name
def swiglu_backward(dy, x, version=None):
    """dx (…, 2 · H) from dy (…, H) and the forward's input x."""
    H, version = _check(x, version)
    if not is_device(x):
        return swiglu_backward_reference(dy, x)
    dx = empty_like(x)
    _launch(swiglu_backward_kernel_v1, swiglu_backward_kernel_v2, version, dy.size, dy, x, dx, H)
    return dx


# Cost -----------------------------------------------------------------------------------------------------------------

def swiglu_forward_cost(rows, C, itemsize=4):
    """(bytes, FLOPs) of an x with C = 2 · H channels."""
    return 3 * itemsize * rows * C // 2, 3 * rows * C // 2


def swiglu_backward_cost(rows, C, itemsize=4):
    return 5 * itemsize * rows * C // 2, 9 * rows * C // 2
