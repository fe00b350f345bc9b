"""Class dropout: in training, some images lose their class, so that one model learns with and
without it.

MATHEMATICS
    y[b] = null where u_b < p, else label[b];   u_b uniform in [0, 1), counted as in random.py
    u has 24 bits, so u < p is the integer comparison (word >> 8) < round(p · 2²⁴): the same images on every engine.
    Classifier-free guidance then evaluates the model twice, once with the null class. Nothing is differentiated.
SHAPES
    labels, y (B,) int32; step (1,) uint32; samples (B,) uint32, the samples' numbers in the run
VERSIONS
    v1 one thread a label.
LAUNCH
    ceil(B / 256) blocks of 256 threads.
DETERMINISM
    a pure function of (seed, step, sample).
COST
    nothing to speak of.
SOURCE
    Ho and Salimans 2022, arXiv:2207.12598, algorithm 1; p = 0.1 as in Peebles and Xie 2023,
    arXiv:2212.09748.
READ NEXT
    numdiff/nn/dit.py.
"""

import numpy as np

from ...device import cuda, empty_like, int32, launch, uint32
from ...device.philox import philox4x32
from ..dropout import check_probability
from ..operation import SEED, Problem, counters, filled, integers, operation
from ..random import DROP_BITS, check_counters, random_elements_reference, seed_words

BLOCK = 256  # threads
PURPOSE_CLASS_DROPOUT = 8  # in addition to the purposes of random.py


def class_dropout_forward_reference(labels, probability, null_class, seed, step, samples):
    threshold = uint32(round(probability * 2**24))
    dropped = random_elements_reference(
        lambda words: words >> DROP_BITS < threshold,
        np.bool_,
        (len(labels), 1),
        seed,
        PURPOSE_CLASS_DROPOUT,
        step,
        samples,
    )[:, 0]
    return np.where(dropped, np.int32(null_class), labels)


# v1: one thread a label ---------------------------------------------------------------------------


@cuda.jit
def class_dropout_forward_kernel_v1(
    labels, y, threshold, null_class, seed_low, seed_high, purpose, step, samples
):
    b = cuda.grid(1)
    if b < y.size:
        word, _, _, _ = philox4x32(uint32(0), samples[b], step[0], seed_high, seed_low, purpose)
        y[b] = int32(null_class) if (word >> DROP_BITS) < threshold else labels[b]


# Cost ---------------------------------------------------------------------------------------------


def class_dropout_forward_cost(batch):
    return 12 * batch, 0


# Operations ---------------------------------------------------------------------------------------


def _check(labels, probability, step, samples):
    if labels.ndim != 1 or labels.dtype != np.int32:
        raise ValueError(f"labels must be int32 (B,), got {labels.dtype}{tuple(labels.shape)}")
    check_counters(step, samples, labels.shape[0])
    check_probability(probability)


@operation(
    reference=class_dropout_forward_reference,
    cost=lambda labels: class_dropout_forward_cost(labels.size),
    check=_check,
    problems=[
        Problem(
            labels=integers(np.arange(7)), probability=0.4, null_class=7, seed=SEED, **counters(7)
        ),
        Problem(
            labels=filled((64,), lambda rng: rng.integers(0, 1000, 64), np.int32),
            probability=0.1,
            null_class=1000,
            seed=1,
            step=integers([7], np.uint32),
            samples=integers(np.arange(64), np.uint32),
            measured=True,
        ),
    ],
)
def class_dropout_forward(labels, probability, null_class, seed, step, samples):
    """labels int32 (B,), each replaced by `null_class` with this probability, as a new array."""
    y = empty_like(labels)
    low, high = seed_words(seed)
    launch(
        class_dropout_forward_kernel_v1,
        -(-y.size // BLOCK),
        BLOCK,
        labels,
        y,
        uint32(round(probability * 2**24)),
        int32(null_class),
        low,
        high,
        uint32(PURPOSE_CLASS_DROPOUT),
        step,
        samples,
    )
    return y
