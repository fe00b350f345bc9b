"""Embeddings: the sinusoids of a timestep, and the learned row of a class.

MATHEMATICS
    timestep   half = dim // 2,  f_i = max_period^(-i / half), i = 0 … half - 1
               y[b] = cos(t_b f_0) … cos(t_b f_half-1), sin(t_b f_0) … sin(t_b f_half-1), and one 0 if dim is odd
    class      y[b] = weight[label_b];        dweight[n] += Σ dy[b] over the samples b of class n, in order of b
SHAPES
    t (B,) int32 or float32 → (B, dim) float32;  labels (B,) int32, weight (N, C) → (B, C); dy (B, C), dweight (N, C)
VERSIONS
    timestep v1 one thread an output; an image's row is computed from its own timestep.
    class, forward: v1 naive: one thread an element; v2 vectorised: one thread four elements.
    class, backward: v1 per-class: one thread a (class, channel) that reads all labels: N · C · B
    reads; v2 per-sample: one thread a (sample, channel). The first sample of a class gathers for
    all of its class, the others stop: B · C · B reads, and classes outside the batch cost nothing.
    Same order of additions, same bits.
LAUNCH
    ceil(threads / 256) blocks of 256.
DETERMINISM
    each output has one owner thread, which adds in the order of the batch. The usual scatter with
    atomics does not.
COST
    bytes: 4 B dim; class forward 8 B C; backward 8 B C to 12 B C. All far too small to meet any
    roof.
SOURCE
    Vaswani et al. 2017, arXiv:1706.03762, section 3.5; cosines first, as in Dhariwal and Nichol
    2021, arXiv:2105.05233.
READ NEXT
    dropout.py.
"""

import math

import numpy as np

from ..device import cuda, empty, float32, int32, launch, load4, store4, uint32
from .operation import (
    Problem,
    Version,
    filled,
    integers,
    lacks_multiple,
    naive_and_vectorised,
    operation,
    single,
)
from .random import cosine_sine

BLOCK = 256  # threads
NAN = np.float32(np.nan)
TWO_OVER_PI = np.float32(2 / math.pi)
# π/2 in three parts. The first two have 11 bits each, so that their products with a whole number
# below 2¹³ are exact.
PART_1 = round(math.pi / 2 * 2**10) / 2**10
PART_2 = round((math.pi / 2 - PART_1) * 2**22) / 2**22
PART_1, PART_2, PART_3 = (
    np.float32(PART_1),
    np.float32(PART_2),
    np.float32(math.pi / 2 - PART_1 - PART_2),
)


# References ---------------------------------------------------------------------------------------


def timestep_embedding_forward_reference(t, dim, max_period=10000.0):
    half = dim // 2
    angle = t.astype(np.float64)[:, None] * np.exp(
        -math.log(max_period) * np.arange(half) / max(half, 1)
    )
    y = np.zeros((len(t), dim), np.float64 if t.dtype == np.float64 else np.float32)
    y[:, :half], y[:, half : 2 * half] = np.cos(angle), np.sin(angle)
    return y


def embedding_forward_reference(labels, weight):
    return weight[labels]


def embedding_backward_reference(dy, labels, dweight):
    np.add.at(dweight, labels, dy)


# Device function ----------------------------------------------------------------------------------


@cuda.jit(device=True)
def cosine_sine_of(angle):
    """(cos, sin) of an angle up to ±12,000: less the nearest multiple of π/2, part by part (Cody
    and Waite)."""
    quarter = int32(angle * TWO_OVER_PI + (float32(0.5) if angle >= float32(0) else float32(-0.5)))
    q = float32(quarter)
    return cosine_sine(quarter, ((angle - q * PART_1) - q * PART_2) - q * PART_3)


# v1: one thread an output -------------------------------------------------------------------------


@cuda.jit
def timestep_embedding_forward_kernel_v1(t, y, log_step):
    """log_step = -ln(max_period) / half."""
    i = cuda.grid(1)
    if i < y.size:
        dim = uint32(y.shape[1])
        b = uint32(i) // dim
        k = int32(uint32(i) - b * dim)
        half = int32(y.shape[1] // 2)
        frequency = int32(k - half) if k >= half else k
        cosine, sine = cosine_sine_of(float32(t[b]) * math.exp(log_step * float32(frequency)))
        y[b, k] = cosine if k < half else sine if k < 2 * half else float32(0)


@cuda.jit
def embedding_forward_kernel_v1(labels, weight, y):
    i = cuda.grid(1)
    if i < y.size:
        channels = uint32(y.shape[1])
        b = uint32(i) // channels
        c = uint32(i) - b * channels
        label = labels[b]
        # for a label that does not exist: the loss shows it, where a wrong row would go unnoticed
        value = NAN
        if 0 <= label < weight.shape[0]:
            value = weight[label, c]
        y[b, c] = value


@cuda.jit
def embedding_backward_kernel_v1(dy, labels, dweight):
    i = cuda.grid(1)
    if i < dweight.size:
        channels = uint32(dweight.shape[1])
        n = uint32(i) // channels
        c = uint32(i) - n * channels
        total = float32(0)
        for b in range(dy.shape[0]):
            if labels[b] == int32(n):
                total += dy[b, c]
        dweight[n, c] += total


# v2: forward by four elements; backward owned by the first sample of a class ----------------------


@cuda.jit
def embedding_forward_kernel_v2(labels, weight, y, channels):
    """weight and y as flat rows; channels is a multiple of 4."""
    i = cuda.grid(1) * 4
    if i < y.size:
        b = uint32(i) // channels
        c = uint32(i) - b * channels
        label = labels[b]
        w0, w1, w2, w3 = NAN, NAN, NAN, NAN
        if label >= 0 and uint32(label) < uint32(weight.size) // channels:
            w0, w1, w2, w3 = load4(weight, uint32(label) * channels + c)
        store4(y, i, w0, w1, w2, w3)


@cuda.jit
def embedding_backward_kernel_v2(dy, labels, dweight):
    i = cuda.grid(1)
    if i < dy.size:
        channels = uint32(dy.shape[1])
        b = int32(uint32(i) // channels)
        c = uint32(i) - uint32(b) * channels
        label = labels[b]
        first = 0 <= label < dweight.shape[0]
        for before in range(b):
            if labels[before] == label:
                first = False
        if first:
            total = float32(0)
            for later in range(b, dy.shape[0]):
                if labels[later] == label:
                    total += dy[later, c]
            dweight[label, c] += total


# Cost ---------------------------------------------------------------------------------------------


def timestep_embedding_forward_cost(batch, dim):
    return 4 * batch * (dim + 1), 4 * batch * dim


def embedding_forward_cost(batch, channels):
    return 8 * batch * channels, 0


def embedding_backward_cost(batch, channels):
    return 12 * batch * channels, batch * channels


# Operations ---------------------------------------------------------------------------------------


def _labels(batch, classes):
    """Random labels of a problem."""
    return filled((batch,), lambda rng: rng.integers(0, classes, batch), np.int32)


@operation(
    reference=timestep_embedding_forward_reference,
    cost=lambda t, dim: timestep_embedding_forward_cost(t.size, dim),
    problems=[
        Problem(t=integers([0, 7, 999]), dim=9, tolerance=5e-5),
        Problem(t=_labels(32, 1000), dim=128, measured=True),
    ],
)
def timestep_embedding_forward(t, dim, max_period=10000.0):
    """Sinusoids of each timestep, (B, dim): cosines, then sines."""
    y = empty((t.shape[0], dim), np.float32, like=t)
    launch(
        timestep_embedding_forward_kernel_v1,
        -(-y.size // BLOCK),
        BLOCK,
        t,
        y,
        float32(-math.log(max_period) / max(dim // 2, 1)),
    )
    return y


def _check_labels(labels, batch):
    if labels.shape != (batch,) or labels.dtype != np.int32:
        raise ValueError(
            f"labels must be int32 of shape ({batch},), got {labels.dtype}{tuple(labels.shape)}"
        )


def _check_backward(dy, labels, dweight):
    _check_labels(labels, dy.shape[0])
    if dy.shape[1:] != dweight.shape[1:]:
        raise ValueError(
            f"dy {tuple(dy.shape)} and dweight {tuple(dweight.shape)} differ in channels"
        )


@operation(
    reference=embedding_forward_reference,
    cost=lambda labels, weight: embedding_forward_cost(labels.size, weight.shape[1]),
    check=lambda labels: _check_labels(labels, labels.shape[0]),
    versions=naive_and_vectorised(
        embedding_forward_kernel_v1,
        embedding_forward_kernel_v2,
        lambda weight: lacks_multiple(4, weight.shape[1], "channels"),
    ),
    problems=[
        Problem(labels=integers([2, 0, 2, 1]), weight=single(3, 8)),
        Problem(labels=_labels(9, 4), weight=single(4, 33)),
        Problem(labels=_labels(6, 1000), weight=single(1000, 16)),
        Problem(labels=_labels(64, 1000), weight=single(1001, 768), measured=True),
    ],
)
def embedding_forward(labels, weight, version=None):
    """weight[labels]; on a device a label outside the table gives a row of NaN."""
    channels = weight.shape[1]
    y = empty((labels.shape[0], channels), weight.dtype, like=weight)
    if version.name == "naive":
        launch(version.kernel, -(-y.size // BLOCK), BLOCK, labels, weight, y)
    else:
        launch(
            version.kernel,
            -(-y.size // (4 * BLOCK)),
            BLOCK,
            labels,
            weight.reshape(-1),
            y.reshape(-1),
            uint32(channels),
        )
    return y


@operation(
    reference=embedding_backward_reference,
    cost=lambda dy: embedding_backward_cost(*dy.shape),
    check=_check_backward,
    versions=[
        Version("per-class", embedding_backward_kernel_v1),
        Version("per-sample", embedding_backward_kernel_v2),
    ],
    problems=[
        Problem(dy=single(4, 8), labels=integers([2, 0, 2, 1]), dweight=single(3, 8)),
        Problem(dy=single(9, 33), labels=_labels(9, 4), dweight=single(4, 33)),
        Problem(dy=single(6, 16), labels=_labels(6, 1000), dweight=single(1000, 16), fast=False),
        Problem(
            dy=single(64, 768), labels=_labels(64, 1000), dweight=single(1001, 768), measured=True
        ),
    ],
    writes=("dweight",),
)
def embedding_backward(dy, labels, dweight, version=None):
    """Adds every sample's dy into its class's row of dweight, in place."""
    threads = dweight.size if version.name == "per-class" else dy.size
    launch(version.kernel, -(-threads // BLOCK), BLOCK, dy, labels, dweight)
