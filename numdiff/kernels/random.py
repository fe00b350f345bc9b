"""Random numbers by counting: uniform, normal and integers that depend on nothing but their place.

MATHEMATICS
    words = Philox4x32-10(counter = (element // 4, samples[b], step, seed >> 32), key = (seed mod 2³², purpose))
    uniform  u = (word >> 8) · 2⁻²⁴                            in [0, 1); element e takes word e mod 4
    normal   from two words (Box–Muller): u₁ = ((word_a >> 8) + 1) · 2⁻²⁴ in (0, 1], u₂ = (word_b >> 8) · 2⁻²⁴
             r = √(-2 ln u₁);  z_a = r · cos 2πu₂,  z_b = r · sin 2πu₂      elements 0,1 and 2,3 of four share a pair
    integers ⌊word · high / 2³²⌋ of word 0                     in [0, high)
    `element` counts within one sample, `samples[b]` is the sample's number in the whole run. So a
    number does not depend on the batch it is drawn in, nor on the device: uniform and integers
    agree bit by bit on all engines, the normal to rounding.
SHAPES
    samples (B,) uint32, step (1,) uint32 → y (B, ...) float32; integers (B,) int32
    step and samples are arrays on the engine, since a captured step is replayed while they change.
VERSIONS
    v1 naive: one thread an element: makes four words and uses one.
    v2 vectorised: one thread four elements: all four words are used, and leave by one 16-byte
    store.
LAUNCH
    as fuse/, which writes both
DETERMINISM
    a pure function of (seed, purpose, step, sample, element).
COST
    bytes: 4 n, written once. v2 spends about 200 PTX instructions on four uniform numbers and 330
    on four normal ones, for one 16-byte store: here arithmetic, not memory, may be the roof.
SOURCE
    Salmon et al. 2011 (Philox); Box and Muller 1958, "A note on the generation of random normal
    deviates".
READ NEXT
    dropout.py, which draws its mask from the same words.
"""

import math
from typing import NamedTuple

import numpy as np

from ..device import cuda, empty, float32, int32, launch, uint32
from ..device.philox import philox4x32, philox_columns_reference
from .fuse import EACH, Operation, Place, as_it_is, fuse
from .operation import PURPOSE, SEED, Problem, counters, integers, operation, single

BLOCK = 256  # threads
# counters of four words that the reference makes at a time: its six uint64 arrays stay in the cache
CHUNK = 8192

# What a number is for. Two purposes never share a number. Below 256, as dropout adds 256 · layer.
# 7 is free; 8 is that of class dropout (diffusion/class_dropout.py).
PURPOSE_INIT = 1  # first weights
PURPOSE_TIMESTEP = 2  # the timestep of a training image
PURPOSE_NOISE = 3  # the noise added to a training image
PURPOSE_FLIP = 4  # whether a training image is mirrored
PURPOSE_DROPOUT = 5  # masks
PURPOSE_SAMPLER = 6  # first and later noise of a sampler

TO_UNIT = np.float32(2.0**-24)  # 24 bits, as many as a float32 holds exactly
DROP_BITS, EIGHTH_TURN = np.uint32(8), np.int32(1 << 21)
RADIANS = np.float32(2.0 * math.pi * 2.0**-24)  # of one step of u₂
# Taylor coefficients of sin x / x and cos x in x², enough for |x| ≤ π/4 in float32 (the next terms
# are below 3e-8)
S1, S2, S3, S4 = (np.float32(c) for c in (-1 / 6, 1 / 120, -1 / 5040, 1 / 362880))
C1, C2, C3, C4 = (np.float32(c) for c in (-1 / 2, 1 / 24, -1 / 720, 1 / 40320))


# References ---------------------------------------------------------------------------------------


def seed_words(seed):
    """The seed's low and high 32 bits."""
    return uint32(seed & 0xFFFFFFFF), uint32((seed >> 32) & 0xFFFFFFFF)


def random_elements_reference(transform, dtype, shape, seed, purpose, step, samples):
    """transform(words (n, 4) uint32) → (n, 4) of dtype, over all elements of an array (B, ...); a
    chunk at a time."""
    count = math.prod(shape[1:])
    fours = -(-count // 4)
    y = np.empty((len(samples) * fours, 4), dtype)
    low, high = (np.uint64(w) for w in seed_words(seed))
    for start in range(0, len(y), CHUNK):
        sample, four = np.divmod(
            np.arange(start, min(start + CHUNK, len(y)), dtype=np.uint64), np.uint64(fours)
        )
        rest = [
            samples[sample].astype(np.uint64),
            np.full_like(four, step[0]),
            np.full_like(four, high),
        ]
        words = np.empty((len(four), 4), np.uint32)
        for i, column in enumerate(philox_columns_reference(four, *rest, low, np.uint64(purpose))):
            words[:, i] = column
        y[start : start + len(four)] = transform(words)
    return y.reshape(len(samples), 4 * fours)[:, :count].reshape(shape)


def uniform_from_words(words):
    return (words >> DROP_BITS) * TO_UNIT


def normal_from_words(words):
    steps = (words >> DROP_BITS).astype(np.float32)
    radius = np.sqrt(np.float32(-2) * np.log((steps[:, 0::2] + np.float32(1)) * TO_UNIT))
    angle = steps[:, 1::2] * RADIANS
    steps[:, 0::2], steps[:, 1::2] = radius * np.cos(angle), radius * np.sin(angle)
    return steps


def random_uniform_reference(shape, seed, purpose, step, samples, like=None):
    return random_elements_reference(
        uniform_from_words, np.float32, shape, seed, purpose, step, samples
    )


def random_normal_reference(shape, seed, purpose, step, samples, like=None):
    return random_elements_reference(
        normal_from_words, np.float32, shape, seed, purpose, step, samples
    )


def random_integers_reference(seed, purpose, step, samples, high):
    def multiply_high(words):
        return (words * np.uint64(high) >> np.uint64(32)).astype(np.int32)

    return random_elements_reference(
        multiply_high, np.int32, (len(samples), 1), seed, purpose, step, samples
    )[:, 0]


# Device functions ---------------------------------------------------------------------------------


@cuda.jit(device=True)
def uniform_of(word):
    return float32(int32(word >> DROP_BITS)) * TO_UNIT


@cuda.jit(device=True)
def cosine_sine(quarter, x):
    """(cos, sin) of quarter · π/2 + x, |x| ≤ π/4: two short polynomials, exchanged and signed by
    the quarter turn.

    math.cos must be ready for an angle of any size, and keeps a table in slow memory and float64
    code for it.
    """
    x2 = x * x
    sine = x * (float32(1) + x2 * (S1 + x2 * (S2 + x2 * (S3 + x2 * S4))))
    cosine = float32(1) + x2 * (C1 + x2 * (C2 + x2 * (C3 + x2 * C4)))
    if quarter & 1:
        cosine, sine = sine, cosine
    if (quarter + 1) & 2:  # second and third quarter
        cosine = -cosine
    if quarter & 2:  # third and fourth
        sine = -sine
    return cosine, sine


@cuda.jit(device=True)
def normal_pair(word_a, word_b):
    """Two normals of two words.

    The angle's 24 bits say exactly to which quarter turn it is nearest, and how far it is from it:
    nothing is rounded on the way to the polynomials.
    """
    radius = math.sqrt(
        float32(-2) * math.log(float32(int32(word_a >> DROP_BITS) + int32(1)) * TO_UNIT)
    )
    angle = int32(word_b >> DROP_BITS)
    quarter = int32((angle + EIGHTH_TURN) >> 22)  # 0 … 4, to the nearest axis
    cosine, sine = cosine_sine(quarter, float32(int32(angle - (quarter << 22))) * RADIANS)
    return radius * cosine, radius * sine


# Kernels ------------------------------------------------------------------------------------------


class Counters(NamedTuple):
    """What numbers words, as kernels take it. count: elements of a sample; step (1,) and samples
    (B,): arrays."""

    count: int
    seed_low: int
    seed_high: int
    purpose: int
    step: object
    samples: object


@cuda.jit(device=True)
def place_of(counters, i):
    """(sample b, element e of it) of element i; all unsigned, as int64 with uint64 would give
    float64."""
    b = uint32(i) // counters.count
    return b, uint32(i) - b * counters.count


@cuda.jit(device=True)
def four_words(counters, i):
    """The words of the four elements among which element i is."""
    b, e = place_of(counters, i)
    return philox4x32(
        uint32(e // uint32(4)),
        counters.samples[b],
        counters.step[0],
        counters.seed_high,
        counters.seed_low,
        counters.purpose,
    )


@cuda.jit(device=True)
def one_word(counters, i):
    w0, w1, w2, w3 = four_words(counters, i)
    k = place_of(counters, i)[1] % uint32(4)
    return w0 if k == 0 else w1 if k == 1 else w2 if k == 2 else w3


@cuda.jit(device=True)
def eight_words(counters, i):
    return four_words(counters, i) + four_words(counters, i + 4)


@cuda.jit(device=True)
def four_normals(counters, i):
    w0, w1, w2, w3 = four_words(counters, i)
    z0, z1 = normal_pair(w0, w1)
    z2, z3 = normal_pair(w2, w3)
    return z0, z1, z2, z3


@cuda.jit(device=True)
def one_normal(counters, i):
    w0, w1, w2, w3 = four_words(counters, i)
    k = place_of(counters, i)[1] % uint32(4)
    first, second = normal_pair(w0 if k < 2 else w2, w1 if k < 2 else w3)
    return first if k % uint32(2) == 0 else second


def words_reference(counters, shape):
    seed = int(counters.seed_low) + (int(counters.seed_high) << 32)
    return random_elements_reference(
        lambda words: words,
        np.uint32,
        shape,
        seed,
        counters.purpose,
        counters.step,
        counters.samples,
    )


# What a chain of fuse/ may read: a word of each element, or a normal number made of it
WORDS = Place("Counters", loads={1: one_word, 4: four_words, 8: eight_words}, numpy=words_reference)
NORMALS = Place("Counters", loads={1: one_normal, 4: four_normals})

UNIFORM = fuse(WORDS, Operation(uniform_of), EACH, name="random_uniform", module=__name__)
NORMAL = fuse(NORMALS, Operation(as_it_is), EACH, name="random_normal", module=__name__)


@cuda.jit
def random_integers_kernel_v1(y, high, seed_low, seed_high, purpose, step, samples):
    b = cuda.grid(1)
    if b < y.size:
        word, _, _, _ = philox4x32(uint32(0), samples[b], step[0], seed_high, seed_low, purpose)
        y[b] = int32((np.uint64(word) * np.uint64(high)) >> np.uint64(32))


# Counters -----------------------------------------------------------------------------------------


def check_counters(step, samples, batch):
    """The counters as every user of Philox needs them."""
    if step.shape != (1,) or step.dtype != np.uint32:
        raise ValueError(
            f"step must be one uint32 in an array of shape (1,), got {step.dtype}{tuple(step.shape)}"
        )
    if samples.shape != (batch,) or samples.dtype != np.uint32:
        raise ValueError(
            f"samples must be the batch's {batch} sample numbers as uint32, "
            f"got {samples.dtype}{tuple(samples.shape)}"
        )


def count_of(shape, seed, purpose, step, samples):
    """The `Counters` of an array of this shape."""
    check_counters(step, samples, shape[0])
    return Counters(uint32(math.prod(shape[1:])), *seed_words(seed), uint32(purpose), step, samples)


# Cost ---------------------------------------------------------------------------------------------


def random_uniform_cost(n):
    """(bytes, FLOPs); the integer work of Philox is not counted as FLOPs."""
    return 4 * n, n


def random_normal_cost(n):
    """(bytes, FLOPs): 25 for the two numbers of a Box-Muller pair."""
    return 4 * n, 25 * n // 2


# Operations ---------------------------------------------------------------------------------------


def _check(shape, step, samples):
    check_counters(step, samples, shape[0])


def _check_integers(step, samples, high):
    check_counters(step, samples, samples.shape[0])
    if not 0 < high < 2**31:
        raise ValueError(f"high must be in 1 … 2^31 - 1, got {high}")


KEY = {"seed": SEED, "purpose": PURPOSE}


@operation(
    reference=random_uniform_reference,
    cost=random_uniform_cost,
    check=_check,
    versions=UNIFORM.versions(of="shape"),
    problems=[
        Problem("2×3×4", shape=(2, 3, 4), **KEY, **counters(2)),
        Problem("3×5×7", shape=(3, 5, 7), **KEY, **counters(3)),
    ],
)
def random_uniform(shape, seed, purpose, step, samples, like=None, version=None):
    """Uniform float32 in [0, 1), on the engine of `samples` (`like` is not needed)."""
    return UNIFORM.forward(
        count_of(shape, seed, purpose, step, samples),
        version=version.number,
        out=empty(shape, np.float32, like=samples),
    )


@operation(
    reference=random_normal_reference,
    cost=random_normal_cost,
    check=_check,
    versions=NORMAL.versions(of="shape"),
    problems=[
        Problem("2×3×4", shape=(2, 3, 4), **KEY, **counters(2)),
        Problem("3×5×7", shape=(3, 5, 7), **KEY, **counters(3)),
        Problem(
            shape=(32, 64, 64, 3),
            seed=1,
            purpose=PURPOSE,
            step=integers([7], np.uint32),
            samples=integers(np.arange(32), np.uint32),
            like=single(32, 64, 64, 3),
            measured=True,
        ),
    ],
)
def random_normal(shape, seed, purpose, step, samples, like=None, version=None):
    """Normal float32 of mean 0 and variance 1, on the engine of `samples` (`like` is not needed)."""
    return NORMAL.forward(
        count_of(shape, seed, purpose, step, samples),
        version=version.number,
        out=empty(shape, np.float32, like=samples),
    )


@operation(
    reference=random_integers_reference,
    check=_check_integers,
    problems=[Problem("five", **KEY, **counters(5), high=1000)],
)
def random_integers(seed, purpose, step, samples, high):
    """One int32 in [0, high) for every sample."""
    y = empty(samples.shape, np.int32, like=samples)
    low, top = seed_words(seed)
    launch(
        random_integers_kernel_v1,
        -(-y.size // BLOCK),
        BLOCK,
        y,
        uint32(high),
        low,
        top,
        uint32(purpose),
        step,
        samples,
    )
    return y
