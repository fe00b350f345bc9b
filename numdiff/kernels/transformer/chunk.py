"""Chunks: one wide vector an image cut into equal parts, as adaLN's linear layer gives six for
every block.

MATHEMATICS
    forward    part_i[b, c] = x[b, i·C + c]         backward    dx[b, i·C + c] = dpart_i[b, c], 0 for a part not used
SHAPES
    x, dx (B, n·C) float32; parts n arrays (B, C), which are slices of one array (n, B, C); n ≤ 6
VERSIONS
    v1 one thread an element. The arrays are small, a few hundred kilobytes: there is nothing to
    gain by more.
LAUNCH
    ceil(B · n · C / 256) blocks of 256 threads. No shared memory.
DETERMINISM
    a copy.
COST
    bytes: 8 n for n elements.
SOURCE
    nothing to cite.
READ NEXT
    columns.py, which copies nothing.
"""

import numpy as np

from ...device import cuda, empty, float32, launch, zeros
from ...device.common import divide
from ..operation import Problem, half, operation, single

BLOCK = 256  # threads
MAX_PARTS = 6  # parts: shift, scale and gate of attention, and of the MLP


# References ---------------------------------------------------------------------------------------


def chunk_forward_reference(x, count):
    return list(np.ascontiguousarray(x.reshape(len(x), count, -1).swapaxes(0, 1)))


def chunk_backward_reference(parts):
    shape = next(p.shape for p in parts if p is not None)
    dtype = next(p.dtype for p in parts if p is not None)
    return np.concatenate([np.zeros(shape, dtype) if p is None else p for p in parts], axis=1)


# v1: one thread an element ------------------------------------------------------------------------


@cuda.jit
def chunk_forward_kernel_v1(x, parts, count, C):
    i = cuda.grid(1)
    if i < x.size:
        b, rest = divide(i, count * C)
        k, c = divide(rest, C)
        parts[k * (x.size // count) + b * C + c] = x[i]


@cuda.jit
def chunk_backward_kernel_v1(p0, p1, p2, p3, p4, p5, dx, count, C):
    i = cuda.grid(1)
    if i < dx.size:
        b, rest = divide(i, count * C)
        k, c = divide(rest, C)
        j = b * C + c
        value = float32(0)
        if k == 0:
            value = p0[j]
        elif k == 1:
            value = p1[j]
        elif k == 2:
            value = p2[j]
        elif k == 3:
            value = p3[j]
        elif k == 4:
            value = p4[j]
        else:
            value = p5[j]
        dx[i] = value


# Cost ---------------------------------------------------------------------------------------------


def chunk_forward_cost(n):
    """(bytes, FLOPs) for n elements in all; the backward costs the same."""
    return 8 * n, 0


# Operations ---------------------------------------------------------------------------------------


def _check_forward(x, count):
    if x.ndim != 2 or not 0 < count <= MAX_PARTS or x.shape[1] % count:
        raise ValueError(
            f"chunk cuts (B, n·C) into at most {MAX_PARTS} parts, and not {tuple(x.shape)} into {count}"
        )


def _check_backward(parts):
    given = next(p for p in parts if p is not None)
    if len(parts) > MAX_PARTS or any(p is not None and p.shape != given.shape for p in parts):
        raise ValueError(f"chunk joins at most {MAX_PARTS} parts of one shape")


@operation(
    reference=chunk_forward_reference,
    cost=chunk_forward_cost,
    check=_check_forward,
    problems=[
        *(Problem(x=single(3, 4 * count), count=count) for count in (2, 6)),
        Problem(x=half(64, 6 * 768), count=6, measured=True),
    ],
)
def chunk_forward(x, count):
    """The `count` parts (B, C) of x (B, count · C), one after the other in memory."""
    B, C = x.shape[0], x.shape[1] // count
    parts = empty((count * B, C), np.float32, like=x)
    launch(
        chunk_forward_kernel_v1,
        -(-x.size // BLOCK),
        BLOCK,
        x.reshape(-1),
        parts.reshape(-1),
        count,
        C,
    )
    return [parts[k * B : (k + 1) * B] for k in range(count)]


@operation(
    reference=chunk_backward_reference,
    cost=chunk_forward_cost,
    check=_check_backward,
    problems=[
        *(Problem(f"{count} parts", parts=[single(3, 4)] * count) for count in (2, 6)),
        Problem("unused part", parts=[None, single(3, 4)]),
    ],
)
def chunk_backward(parts):
    """dx (B, n·C) from the n gradients (B, C) of the parts; None if a part was not used."""
    given = next(p for p in parts if p is not None)
    (B, C), count = given.shape, len(parts)
    flat = [(zeros((B, C), like=given) if p is None else p).reshape(-1) for p in parts]
    dx = empty((B, count * C), np.float32, like=given)
    launch(
        chunk_backward_kernel_v1,
        -(-dx.size // BLOCK),
        BLOCK,
        *flat,
        *flat[-1:] * (MAX_PARTS - count),
        dx.reshape(-1),
        count,
        C,
    )
    return dx
