"""Dropout whose mask is never stored: backward draws the same random words again.

MATHEMATICS
    y = x · k / (1 - p),   k = 1 where u ≥ p, else 0;   u uniform in [0, 1), counted as in random.py
    dx = dy · k / (1 - p)                                the same function: dropout_backward = dropout of dy
    u has 24 bits, so u ≥ p is the integer comparison (word >> 8) ≥ round(p · 2²⁴): the same mask on every engine.
SHAPES
    x (B, ...) float32; step (1,) uint32; samples (B,) uint32, the samples' numbers in the run
VERSIONS
    v1 naive: one thread an element: makes four words and uses one.
    v2 vectorised: one thread four elements: one Philox block, 16-byte load and store.
LAUNCH
    as fuse/, which writes both
DETERMINISM
    the mask is a pure function of (seed, layer, step, sample, element).
COST
    bytes: 8 n, where a stored mask would cost one more write and read. v2 spends about 200 PTX
    instructions on four elements, most of them on Philox.
SOURCE
    Srivastava et al. 2014, JMLR 15, section 4, in the inverted form that leaves inference alone.
READ NEXT
    optimizer/adamw.py.
"""

import numpy as np

from ..device import float32, uint32
from ..dtypes import in_single
from .fuse import EACH, NUMBER, Operation, fuse, select
from .operation import SEED, Problem, counters, half, integers, operation, single
from .random import (
    DROP_BITS,
    PURPOSE_DROPOUT,
    WORDS,
    check_counters,
    count_of,
    random_elements_reference,
)


@in_single()
def dropout_forward_reference(x, probability, seed, layer, step, samples):
    threshold = uint32(round(probability * 2**24))
    kept = random_elements_reference(
        lambda words: words >> DROP_BITS >= threshold,
        np.bool_,
        x.shape,
        seed,
        PURPOSE_DROPOUT + 256 * layer,
        step,
        samples,
    )
    y = x * x.dtype.type(1.0 / (1.0 - probability))
    y *= kept
    return y


def dropout_backward_reference(dy, probability, seed, layer, step, samples):
    return dropout_forward_reference(dy, probability, seed, layer, step, samples)


# Kernels ------------------------------------------------------------------------------------------


def dropped(x, word, threshold, scale):
    return select((word >> DROP_BITS) >= threshold, x * scale, float32(0))


def dropped_dx(dy, word, threshold, scale):
    return select((word >> DROP_BITS) >= threshold, dy * scale, float32(0))


# for chains; `drop_operands` makes its operands
DROP = Operation(dropped, WORDS, NUMBER, NUMBER, x=dropped_dx)
DROPOUT = fuse(
    EACH, Operation(dropped, WORDS, NUMBER, NUMBER), EACH, name="dropout", module=__name__
)


def check_probability(probability):
    if not 0.0 <= probability < 1.0:
        raise ValueError(f"a dropout probability is in [0, 1), got {probability}")


def drop_operands(shape, probability, seed, layer, step, samples):
    """The operands of DROP for an x of this shape: (word, threshold, scale); the others as of
    `dropout_forward`."""
    check_probability(probability)
    return (
        count_of(shape, seed, PURPOSE_DROPOUT + 256 * layer, step, samples),
        uint32(round(probability * 2**24)),
        float32(1.0 / (1.0 - probability)),
    )


# Cost ---------------------------------------------------------------------------------------------


def dropout_forward_cost(n):
    return 8 * n, n


def dropout_backward_cost(n):
    return dropout_forward_cost(n)


# Operations ---------------------------------------------------------------------------------------


def _check(x, probability, step, samples):
    check_probability(probability)
    check_counters(step, samples, x.shape[0])


DRAWN = {"probability": 0.3, "seed": SEED, "layer": 1}


@operation(
    reference=dropout_forward_reference,
    cost=dropout_forward_cost,
    check=_check,
    versions=DROPOUT.versions(),
    problems=[
        Problem(x=single(2, 3, 4), **DRAWN, **counters(2)),
        Problem(x=single(3, 5, 7), **DRAWN, **counters(3)),
        Problem(x=half(2, 8), **DRAWN, **counters(2)),
        Problem(
            x=half(32, 64, 64, 64),
            probability=0.1,
            seed=1,
            layer=1,
            step=integers([7], np.uint32),
            samples=integers(np.arange(32), np.uint32),
            measured=True,
        ),
    ],
)
def dropout_forward(x, probability, seed, layer, step, samples, version=None):
    """x with each element zeroed with this probability and the others scaled by 1 / (1 -
    probability)."""
    return DROPOUT.forward(
        x, *drop_operands(x.shape, probability, seed, layer, step, samples), version=version.number
    )


@operation(
    reference=dropout_backward_reference,
    cost=dropout_backward_cost,
    versions=DROPOUT.versions(of="dy"),
    check=lambda dy, probability, step, samples: _check(dy, probability, step, samples),
    problems=[
        Problem(dy=single(2, 3, 4), **DRAWN, **counters(2)),
        Problem(dy=single(3, 5, 7), **DRAWN, **counters(3)),
    ],
)
def dropout_backward(dy, probability, seed, layer, step, samples, version=None):
    """dx: the mask and scale of the forward with the same arguments, applied to dy."""
    return dropout_forward(dy, probability, seed, layer, step, samples, version=version.number)
