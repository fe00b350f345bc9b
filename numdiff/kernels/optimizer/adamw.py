"""AdamW over one flat buffer of parameters; clipping, the skip of a broken step, EMA and float16
copy in the same pass.

MATHEMATICS                                       t = step + 1, the number of this update, from 1
    g = gradient · u · c,  c = min(1, clip_norm / (gradient_norm + 10⁻⁶)) if clip_norm > 0, else 1
    u is 1, or 1 / S where the loss was scaled by S (loss_scale.py); gradient_norm is that of gradient · u
    m = β₁ m + (1 - β₁) g        v = β₂ v + (1 - β₂) g²
    weight = (1 - lr · decay) · weight - lr · m̂ / (√v̂ + eps),   m̂ = m / (1 - β₁ᵗ),  v̂ = v / (1 - β₂ᵗ)
    1 - βᵗ is computed as -expm1(t · ln β), with ln β made in float64 on the host: in float32 1 - 0.999ᵗ would lose its
    last digits to cancellation. Nothing changes where gradient_norm is not finite.
    ema, if given, then follows the new weight as in ema.py; half, if given, is the new weight rounded to float16
    or bfloat16.
SHAPES
    weight, gradient, m, v, ema flat (n,) float32; half (n,) float16 or bfloat16; step (1,) uint32;
    learning_rate, gradient_norm, unscale (1,) float32
    The three scalars are on the device: a captured training step is replayed while they change.
VERSIONS
    v1 naive: one thread an element.
    v2 vectorised: one thread four elements, by 16-byte loads and stores. The average and the copy
       are kernels of their own.
    v3 fused: v2 with both in the same pass: 38 n bytes where three kernels move 46 n. With neither
       it takes as long as v2 (H200: 0.99×); it is chosen then, too, so that one kernel is compiled.
    Of some ranges of the buffer alone, where extras/muon/update.py updates the others: v3 with a block a range.
LAUNCH
    v1 ceil(n / 256) blocks of 256 threads; v2, v3 a quarter of them; of ranges, a block each.
DETERMINISM
    elementwise.
COST
    bytes: 28 n (four reads, three writes), 8 n more with an average, 2 n more with a copy; FLOPs
    about 15 n. Roof: memory bandwidth.
SOURCE
    Kingma and Ba 2014, arXiv:1412.6980, algorithm 1.
    Decoupled decay: Loshchilov and Hutter 2017, arXiv:1711.05101, algorithm 2.
READ NEXT
    ema.py, the average by itself.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from ...device import cuda, device_inline, float32, int32, launch, load4, store4, upload
from ...device.four import add4, scale4, subtract4
from ..cpu.adamw import Factors, adamw_cpu, can_update
from ..elementwise import cast_into
from ..operation import (
    Problem,
    Version,
    half,
    integers,
    lacks_multiple,
    numbers,
    operation,
    positive,
    single,
)
from .ema import ema_update, rest_of, rest_of_average

BLOCK = 256  # threads
CLIP_EPSILON = 1e-6  # keeps a zero norm from dividing
# stands for log(0), where a beta is zero: its exponential is zero, in float32 and float64
LOG_OF_ZERO = -1e4


def log_of(beta):
    return math.log(beta) if beta else LOG_OF_ZERO


# What an update is given --------------------------------------------------------------------------


class State(NamedTuple):
    """Arrays (1,) on the engine: what may change from one step to the next.

    step: uint32, the updates already done; learning_rate, gradient_norm: float32; unscale: float32,
    by which the gradients are multiplied first, None for 1
    """

    step: Any
    learning_rate: Any
    gradient_norm: Any
    unscale: Any = None


class Rule(NamedTuple):
    """AdamW's constants; clip_norm: the norm to which the gradient is clipped, 0 for none."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_norm: float = 0.0


class AdamWCopies(NamedTuple):
    """What is written with each new weight, flat arrays like it or None.

    ema: its average of this decay, with warm-up unless not `warmup` (ema.py); half: its 16-bit copy
    """

    ema: Any = None
    decay: float = 0.0
    half: Any = None
    warmup: bool = True


# Reference ----------------------------------------------------------------------------------------


def clip_reference(norm, clip_norm, unscale):
    return (min(1.0, clip_norm / (norm + CLIP_EPSILON)) if clip_norm > 0 else 1.0) * unscale


def adamw_update_reference(weight, gradient, m, v, state, rule, copies=None, ranges=None):
    copies = copies or AdamWCopies()
    factors = _factors(state, rule, copies)
    if factors is None:
        return
    fits = can_update(weight, gradient, m, v, copies.ema)
    update = adamw_cpu if fits else _update_in_place
    for start, stop in [(0, weight.size)] if ranges is None else ranges.pieces:
        w, g, m_, v_, average, half = (
            a if a is None else a[start:stop]
            for a in (weight, gradient, m, v, copies.ema, copies.half)
        )
        update(w, g, m_, v_, average, factors)
        if half is not None:
            cast_into(w, half)


def _factors(state, rule, copies):
    """The `Factors` of this update; None for one that is left out, since its gradient is broken."""
    beta1, beta2, eps, weight_decay, clip_norm = rule
    unscale = 1.0 if state.unscale is None else float(state.unscale[0])
    norm, rate = float(state.gradient_norm[0]), float(state.learning_rate[0])
    t = int(state.step[0]) + 1
    if not math.isfinite(norm):
        return None
    clip = clip_reference(norm, clip_norm, unscale)
    # √(1 - β₂ᵗ), drawn out of the root: √v̂ = √v / root2
    root2 = math.sqrt(-math.expm1(t * log_of(beta2)))
    return Factors(
        m=beta1,
        gradient=clip * (1.0 - beta1),
        v=beta2,
        square=clip * clip * (1.0 - beta2),
        eps=eps * root2,
        step=rate * root2 / -math.expm1(t * log_of(beta1)),
        weight=1.0 - rate * weight_decay,
        average=rest_of_average(state.step, copies.decay, copies.warmup),
    )


def _update_in_place(weight, gradient, m, v, ema, factors):
    m *= factors.m
    m += gradient * factors.gradient
    v *= factors.v
    v += gradient * gradient * factors.square
    weight *= factors.weight
    weight -= m / (np.sqrt(v) + factors.eps) * factors.step
    if ema is not None:
        ema += (weight - ema) * factors.average


# What a kernel is given ---------------------------------------------------------------------------


class AdamWArrays(NamedTuple):
    """Flat (n,): what an update reads, and all but the gradient what it writes."""

    weight: Any
    gradient: Any
    m: Any
    v: Any


class Settings(NamedTuple):
    """rest1 = 1 - β₁, rest2 = 1 - β₂ and the logarithms come from the host's float64, free of
    cancellation."""

    beta1: float
    rest1: float
    log_beta1: float
    beta2: float
    rest2: float
    log_beta2: float
    eps: float
    decay: float
    clip_norm: float


class Followers(NamedTuple):
    """What follows the new weight (v3). averages: 0 where there is no `ema`, 1 with warm-up, 2
    without, and `rest` is 1 - its decay; halves: whether there is a `half`. What is not there is
    neither read nor written."""

    ema: Any
    rest: float
    averages: int
    half: Any
    halves: int


class Ranges(NamedTuple):
    """Parts of a flat buffer. pieces: (R, 2) int64 on the engine, as `zero_ranges.pieces` gives
    them, starts and ends in multiples of 4; elements: in all of them."""

    pieces: Any
    elements: int


class AdamWShared(NamedTuple):
    """What all elements of a step share: clip is c · u, keep 1 - lr · decay, root2 √(1 - β₂ᵗ)."""

    clip: float
    keep: float
    step_size: float
    eps_root2: float


# Device functions ---------------------------------------------------------------------------------


@device_inline
def clip_of(state, clip_norm):
    """c · u"""
    clip = float32(1)
    if clip_norm > float32(0):
        clip = min(float32(1), clip_norm / (state.gradient_norm[0] + float32(CLIP_EPSILON)))
    return clip * state.unscale[0]


@device_inline
def shared_of(state, settings):
    t = float32(state.step[0]) + float32(1)
    rate = state.learning_rate[0]
    root2 = math.sqrt(-math.expm1(t * settings.log_beta2))
    return AdamWShared(
        clip_of(state, settings.clip_norm),
        float32(1) - rate * settings.decay,
        rate * root2 / -math.expm1(t * settings.log_beta1),
        settings.eps * root2,
    )


@device_inline
def updated(w, g, m, v, shared, settings):
    """New (weight, m, v) of one element."""
    g *= shared.clip
    m = settings.beta1 * m + settings.rest1 * g
    v = settings.beta2 * v + settings.rest2 * (g * g)
    return shared.keep * w - shared.step_size * (m / (math.sqrt(v) + shared.eps_root2)), m, v


@device_inline
def update4(arrays, i, shared, settings):
    """Update elements i to i + 3; their new weights."""
    w0, w1, w2, w3 = load4(arrays.weight, i)
    g0, g1, g2, g3 = load4(arrays.gradient, i)
    m0, m1, m2, m3 = load4(arrays.m, i)
    v0, v1, v2, v3 = load4(arrays.v, i)
    w0, m0, v0 = updated(w0, g0, m0, v0, shared, settings)
    w1, m1, v1 = updated(w1, g1, m1, v1, shared, settings)
    w2, m2, v2 = updated(w2, g2, m2, v2, shared, settings)
    w3, m3, v3 = updated(w3, g3, m3, v3, shared, settings)
    weights = w0, w1, w2, w3
    store4(arrays.weight, i, *weights)
    store4(arrays.m, i, m0, m1, m2, m3)
    store4(arrays.v, i, v0, v1, v2, v3)
    return weights


@device_inline
def follow4(followers, state, i, weights):
    """Move the average towards the new weights i to i + 3, and copy them."""
    if followers.averages:
        r = rest_of(state.step, followers.rest, followers.averages == int32(1))
        average = load4(followers.ema, i)
        store4(followers.ema, i, *add4(average, scale4(r, subtract4(weights, average))))
    if followers.halves:
        store4(followers.half, i, *weights)


# v1: one thread an element ------------------------------------------------------------------------


@cuda.jit
def adamw_update_kernel_v1(arrays, state, settings):
    weight, gradient, m, v = arrays
    i = cuda.grid(1)
    if i < weight.size and math.isfinite(state.gradient_norm[0]):
        shared = shared_of(state, settings)
        weight[i], m[i], v[i] = updated(weight[i], gradient[i], m[i], v[i], shared, settings)


# v2: one thread four elements ---------------------------------------------------------------------


@cuda.jit
def adamw_update_kernel_v2(arrays, state, settings):
    i = cuda.grid(1) * 4
    if i < arrays.weight.size and math.isfinite(state.gradient_norm[0]):
        update4(arrays, i, shared_of(state, settings), settings)


# v3: the average and the float16 copy in the same pass --------------------------------------------
# The new weight is in a register: the average's and the copy's kernels would each read it back from
# memory.


@cuda.jit
def adamw_update_kernel_v3(arrays, state, settings, followers):
    i = cuda.grid(1) * 4
    if i < arrays.weight.size and math.isfinite(state.gradient_norm[0]):
        follow4(followers, state, i, update4(arrays, i, shared_of(state, settings), settings))


# v3 over ranges: a block each, which takes four elements a thread until its range ends ------------


@cuda.jit
def adamw_update_ranges_kernel(arrays, state, settings, followers, pieces):
    if math.isfinite(state.gradient_norm[0]):
        shared = shared_of(state, settings)
        start, stop = pieces[cuda.blockIdx.x, 0], pieces[cuda.blockIdx.x, 1]
        for i in range(start + int32(cuda.threadIdx.x) * 4, stop, BLOCK * 4):
            follow4(followers, state, i, update4(arrays, i, shared, settings))


# What all updates share ---------------------------------------------------------------------------


def check_flat(**arrays):
    """The one length of flat arrays, None aside; a `ValueError` where they differ."""
    names, given = ", ".join(list(arrays)[:-1]), [a for a in arrays.values() if a is not None]
    n = given[0].size
    if any(a.shape != (n,) for a in given):
        raise ValueError(
            f"{names} and {list(arrays)[-1]} must be flat and of one length, got "
            f"{[tuple(a.shape) for a in given]}"
        )
    return n


def followers_of(weight, copies):
    """`Followers` as kernels take them: `weight` stands for an array that is not there."""
    return Followers(
        weight if copies.ema is None else copies.ema,
        float32(1.0 - copies.decay),
        0 if copies.ema is None else 1 if copies.warmup else 2,
        weight if copies.half is None else copies.half,
        int(copies.half is not None),
    )


def follow(weight, state, copies):
    """What follows the new weight, where it is there, in passes of their own."""
    if copies.ema is not None:
        ema_update(copies.ema, weight, state.step, state.gradient_norm, copies.decay, copies.warmup)
    if copies.half is not None:
        cast_into(weight, copies.half)


# Cost ---------------------------------------------------------------------------------------------


def adamw_update_cost(n, ema=False, half=False):
    return (28 + 8 * ema + 2 * half) * n, (15 + 3 * ema) * n


# Operations ---------------------------------------------------------------------------------------


def _check(weight, gradient, m, v, rule, copies):
    ema, half = (copies.ema, copies.half) if copies else (None, None)
    check_flat(weight=weight, gradient=gradient, m=m, v=v, ema=ema, half=half)
    if not (0 <= rule.beta1 < 1 and 0 <= rule.beta2 < 1 and rule.eps > 0):
        raise ValueError(
            f"AdamW needs 0 <= beta < 1 and eps > 0, got {rule.beta1}, {rule.beta2} and {rule.eps}"
        )


def _lacks_whole(ranges):
    return None if ranges is None else "updates all elements, and ranges are given"


def _small(n, pieces=False, **more):
    """A problem of n elements; pieces: only of ranges of them."""
    given = {
        **dict.fromkeys(("weight", "gradient", "m"), single(n)),
        "v": positive(n),
        "state": State(integers([3], np.uint32), numbers([1e-3]), numbers([4.0])),
        "rule": Rule(0.9, 0.999, 1e-8, 0.01, 1.0),
    }
    if pieces:
        given["ranges"] = Ranges(integers([(0, 8), (16, 24)], np.int64), 16)
    return Problem(**{**given, **more})


def _followed(n):
    """The average, the copy and the scale that a step in float16 has."""
    return {
        "state": State(integers([3], np.uint32), numbers([1e-3]), numbers([4.0]), numbers([0.5])),
        "copies": AdamWCopies(single(n), 0.99, numbers(np.zeros(n), np.float16)),
        "tolerance": 1e-3,
        "bfloat16": True,
    }


def _measured(**more):
    """A problem of the UNet's parameters."""
    flat, one = single(20_494_272), single(1)
    return Problem(
        weight=flat,
        gradient=flat,
        m=flat,
        v=positive(*flat.shape),
        state=State(integers([7], np.uint32), one, one),
        rule=Rule(0.9, 0.99, 1e-8, 0.0, 1.0),
        measured=True,
        **more,
    )


@operation(
    reference=adamw_update_reference,
    cost=adamw_update_cost,
    exact_bytes=True,
    check=_check,
    versions=[
        Version("naive", adamw_update_kernel_v1, width=1, fits=_lacks_whole),
        Version(
            "vectorised",
            adamw_update_kernel_v2,
            width=4,
            fits=lambda weight, ranges: _lacks_whole(ranges) or lacks_multiple(4, weight.size),
        ),
        Version(
            "fused",
            adamw_update_kernel_v3,
            width=4,
            of_ranges=adamw_update_ranges_kernel,
            fits=lambda weight: lacks_multiple(4, weight.size),
        ),
    ],
    problems=[
        _small(24),
        _small(7),
        _small(7, label="followed, odd", **_followed(7)),
        _small(24, label="followed", **_followed(24)),
        _small(24, label="ranges", pieces=True, **_followed(24)),
        _measured(),
        _measured(
            note="with average and copy",
            copies=AdamWCopies(single(20_494_272), 0.998, half(20_494_272)),
        ),
    ],
    writes=("weight", "m", "v", "copies"),
)
def adamw_update(weight, gradient, m, v, state, rule, copies=None, ranges=None, version=None):
    """One AdamW update of flat arrays (n,), in place.

    state: `State`; rule: `Rule`; copies: `AdamWCopies`, None for none; ranges: `Ranges`, if only
    these are updated
    """
    copies = copies or AdamWCopies()
    if state.unscale is None:
        state = state._replace(unscale=upload(np.ones(1, np.float32), weight))
    scalars = (
        rule.beta1,
        1.0 - rule.beta1,
        log_of(rule.beta1),
        rule.beta2,
        1.0 - rule.beta2,
        log_of(rule.beta2),
        rule.eps,
        rule.weight_decay,
        rule.clip_norm,
    )
    arguments = AdamWArrays(weight, gradient, m, v), state, Settings._make(map(float32, scalars))
    blocks = -(-weight.size // (version.width * BLOCK))
    if version.name == "fused":
        followers = followers_of(weight, copies)
        if ranges is None:
            launch(version.kernel, blocks, BLOCK, *arguments, followers)
        elif ranges.elements:
            launch(
                version.of_ranges,
                ranges.pieces.shape[0],
                BLOCK,
                *arguments,
                followers,
                ranges.pieces,
            )
        return
    launch(version.kernel, blocks, BLOCK, *arguments)
    follow(weight, state, copies)
