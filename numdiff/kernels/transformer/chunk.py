"""Chunks: one wide vector an image cut into equal parts, as adaLN's linear layer gives six for
every block, where the fast kernels of gate_adaln/ do not read them where they are.

MATHEMATICS
    forward    part_i[b, c] = x[b, i·C + c]         backward    dx[b, i·C + c] = dpart_i[b, c], 0 for a part not used
SHAPES
    x, dx (B, n·C), parts n arrays (B, C) float32
LAUNCH
    n - 1 of ../concat.py, which splits and joins two arrays. They are small, a few hundred kilobytes.
DETERMINISM
    copies.
SOURCE
    nothing to cite.
READ NEXT
    columns.py, which copies nothing.
"""

import functools

import numpy as np

from ...device import zeros
from ..concat import concat_backward, concat_forward
from ..elementwise import cast_forward
from ..operation import Problem, half, operation, single

# References ---------------------------------------------------------------------------------------


def chunk_forward_reference(x, count):
    return list(np.ascontiguousarray(x.reshape(len(x), count, -1).swapaxes(0, 1)))


def chunk_backward_reference(parts):
    shape = next(p.shape for p in parts if p is not None)
    dtype = next(p.dtype for p in parts if p is not None)
    return np.concatenate([np.zeros(shape, dtype) if p is None else p for p in parts], axis=1)


# Operations ---------------------------------------------------------------------------------------


def _check_forward(x, count):
    if x.ndim != 2 or count < 1 or x.shape[1] % count:
        raise ValueError(f"chunk cuts (B, n·C) into parts, and not {tuple(x.shape)} into {count}")


def _check_backward(parts):
    given = next(p for p in parts if p is not None)
    if any(p is not None and p.shape != given.shape for p in parts):
        raise ValueError("chunk joins parts of one shape")


@operation(
    reference=chunk_forward_reference,
    check=_check_forward,
    problems=[
        *(Problem(x=single(3, 4 * count), count=count) for count in (2, 6)),
        Problem(x=half(3, 12), count=3),
    ],
)
def chunk_forward(x, count):
    """The `count` parts (B, C) of x (B, count · C), float32."""
    rest = x if x.dtype == np.float32 else cast_forward(x, np.float32)
    parts = []
    for _ in range(count - 1):
        part, rest = concat_backward(rest, x.shape[1] // count)
        parts.append(part)
    return [*parts, rest]


@operation(
    reference=chunk_backward_reference,
    check=_check_backward,
    problems=[
        *(Problem(f"{count} parts", parts=[single(3, 4)] * count) for count in (2, 6)),
        Problem("unused part", parts=[None, single(3, 4)]),
    ],
)
def chunk_backward(parts):
    """dx (B, n·C) from the n gradients (B, C) of the parts; None if a part was not used."""
    given = next(p for p in parts if p is not None)
    return functools.reduce(
        concat_forward, (zeros(given.shape, like=given) if p is None else p for p in parts)
    )
