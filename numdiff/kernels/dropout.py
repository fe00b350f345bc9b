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
MEASURED
    NVIDIA H200, 2026-11-22, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    dropout_forward, 32×64×64×64, 1, float16
        v1      59.5 µs      564 GB/s   14 % of memory
        v2*     16.6 µs    2,025 GB/s   49 % of memory   3.59 × v1
LAUNCH
    v1 ceil(n / 256) blocks of 256 threads; v2 a quarter of them.
DETERMINISM
    the mask is a pure function of (seed, layer, step, sample, element).
COST
    bytes: 8 n, where a stored mask would cost one more write and read. v2 spends about 200 PTX instructions on four
    elements, most of them on Philox.
SOURCE
    Srivastava et al. 2014, JMLR 15, section 4, in the inverted form that leaves inference alone.
READ NEXT
    optimizer/adamw.py.
"""
import math

import numpy as np

from ..device import cuda, empty_like, float32, is_device, launch, load4, store4, uint32
from ..device.philox import philox4x32
from ..dtypes import in_single
from .random import (
    BLOCK,
    DROP_BITS,
    PURPOSE_DROPOUT,
    check_counters,
    choose_version,
    random_elements_reference,
    seed_words,
)
from .versions import versions_by_name


@in_single()
def dropout_forward_reference(x, probability, seed, layer, step, samples):
    threshold = uint32(round(probability * 2 ** 24))
    kept = random_elements_reference(lambda words: words >> DROP_BITS >= threshold, np.bool_, x.shape, seed,
                                     PURPOSE_DROPOUT + 256 * layer, step, samples)
    y = x * x.dtype.type(1.0 / (1.0 - probability))
    y *= kept
    return y


# v1: one thread an element --------------------------------------------------------------------------------------------

@cuda.jit
def dropout_forward_kernel_v1(x, y, count, threshold, scale, seed_low, seed_high, purpose, step, samples):
    i = cuda.grid(1)
    if i < y.size:
        b = uint32(i) // count  # sample b, element e of it
        e = uint32(i) - b * count
        w0, w1, w2, w3 = philox4x32(uint32(e // uint32(4)), samples[b], step[0], seed_high, seed_low, purpose)
        k = e % uint32(4)
        word = w0 if k == 0 else w1 if k == 1 else w2 if k == 2 else w3
        y[i] = float32(x[i]) * scale if (word >> DROP_BITS) >= threshold else float32(0)


# v2: one thread four elements -----------------------------------------------------------------------------------------

@cuda.jit
def dropout_forward_kernel_v2(x, y, count, threshold, scale, seed_low, seed_high, purpose, step, samples):
    i = cuda.grid(1) * 4
    if i < y.size:
        b = uint32(i) // count
        e = uint32(i) - b * count
        w0, w1, w2, w3 = philox4x32(uint32(e // uint32(4)), samples[b], step[0], seed_high, seed_low, purpose)
        x0, x1, x2, x3 = load4(x, i)
        store4(y, i, x0 * scale if (w0 >> DROP_BITS) >= threshold else float32(0),
               x1 * scale if (w1 >> DROP_BITS) >= threshold else float32(0),
               x2 * scale if (w2 >> DROP_BITS) >= threshold else float32(0),
               x3 * scale if (w3 >> DROP_BITS) >= threshold else float32(0))


# Launchers ------------------------------------------------------------------------------------------------------------

@versions_by_name
def dropout_forward(x, probability, seed, layer, step, samples, version=None):
    """x with each element zeroed with this probability and the others scaled by 1 / (1 - probability)."""
    check_counters(step, samples, x.shape[0])
    if not 0.0 <= probability < 1.0:
        raise ValueError(f"a dropout probability lies in [0, 1), got {probability}")
    if not is_device(x):
        return dropout_forward_reference(x, probability, seed, layer, step, samples)
    count = math.prod(x.shape[1:])
    version = choose_version(version, count, "dropout")
    y = empty_like(x)
    low, high = seed_words(seed)
    kernel, threads = (dropout_forward_kernel_v1, x.size) if version == 1 else (dropout_forward_kernel_v2, x.size // 4)
    launch(kernel, -(-threads // BLOCK), BLOCK, x.reshape(-1), y.reshape(-1), uint32(count),
           uint32(round(probability * 2 ** 24)), float32(1.0 / (1.0 - probability)), low, high,
           uint32(PURPOSE_DROPOUT + 256 * layer), step, samples)
    return y


@versions_by_name
def dropout_backward(dy, probability, seed, layer, step, samples, version=None):
    """dx: the mask and scale of the forward with the same arguments, applied to dy."""
    return dropout_forward(dy, probability, seed, layer, step, samples, version)


def dropout_forward_cost(n):
    return 8 * n, n


def dropout_backward_cost(n):
    return dropout_forward_cost(n)
