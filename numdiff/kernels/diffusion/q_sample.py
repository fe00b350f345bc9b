"""The forward diffusion process: noise an image to a timestep, the velocity that a model may
predict, a weight.

MATHEMATICS
    x_t = √ᾱ_t · x_0 + √(1 - ᾱ_t) · eps
    v_t = √ᾱ_t · eps - √(1 - ᾱ_t) · x_0             x_t turned by 90°: x_0 = √ᾱ_t · x_t - √(1 - ᾱ_t) · v_t
    y = w_t · x                                     and so dx = w_t · dy: a weight of each timestep in the loss
    The first two are not differentiated: they are made from data. Any p_t · x_0 + q_t · eps is a q_sample, too.
SHAPES
    x_0, eps (B, ...) float32; t (B,) int32, one timestep an image; tables √ᾱ, √(1 - ᾱ), w (T,)
    float32
VERSIONS
    v1 naive: one thread an element.
    v2 vectorised: one thread four elements of one sample, by 16-byte loads and stores; they share
       the division that finds it.
LAUNCH, DETERMINISM
    as fuse/
COST
    bytes: 12 n (two reads, one write), 8 n for the weight. Roof: memory bandwidth.
SOURCE
    Ho, Jain and Abbeel 2020, arXiv:2006.11239, eq. 4; v: Salimans and Ho 2022, arXiv:2202.00512,
    appendix D.
READ NEXT
    mse.py, which compares the model's answer with eps or v.
"""

import math
from typing import NamedTuple

import numpy as np

from ...device import cuda, uint32
from ...dtypes import in_single
from ..fuse import EACH, Operation, Place, fuse
from ..operation import Problem, filled, operation, single


def per_sample(table, t, ndim):
    """table[t] shaped (B, 1, ..., 1)."""
    return table[t].reshape((-1,) + (1,) * (ndim - 1))


# References ---------------------------------------------------------------------------------------


@in_single()
def q_sample_forward_reference(x_0, eps, t, sqrt_alpha_bar, sqrt_one_minus_alpha_bar):
    return (
        per_sample(sqrt_alpha_bar, t, x_0.ndim) * x_0
        + per_sample(sqrt_one_minus_alpha_bar, t, x_0.ndim) * eps
    )


@in_single()
def velocity_forward_reference(x_0, eps, t, sqrt_alpha_bar, sqrt_one_minus_alpha_bar):
    return (
        per_sample(sqrt_alpha_bar, t, x_0.ndim) * eps
        - per_sample(sqrt_one_minus_alpha_bar, t, x_0.ndim) * x_0
    )


@in_single()
def weigh_forward_reference(x, t, weight):
    return per_sample(weight, t, x.ndim) * x


# Kernels ------------------------------------------------------------------------------------------


class Tables(NamedTuple):
    """Two values for each timestep, and the timesteps t (B,) of samples of `count` elements."""

    first: object
    second: object
    t: object
    count: int


@cuda.jit(device=True)
def at_step(tables, i):
    # of sample b; a sample has `count` elements (uint32)
    step = tables.t[uint32(i) // tables.count]
    return tables.first[step], tables.second[step]


@cuda.jit(device=True)
def at_step_4(tables, i):
    """The same for four elements of one sample."""
    pair = at_step(tables, i)
    return pair, pair, pair, pair


AT_STEP = Place(
    "Tables",
    loads={1: at_step, 4: at_step_4},
    numpy=lambda tables, shape: tuple(
        per_sample(table, tables.t, len(shape)) for table in tables[:2]
    ),
)


def q_sampled(x_0, level, eps):
    return level[0] * x_0 + level[1] * eps


def velocity(x_0, level, eps):
    return level[0] * eps - level[1] * x_0


def weighed(x, level):
    return level[0] * x


Q_SAMPLE, VELOCITY = (
    fuse(EACH, Operation(function, AT_STEP, EACH), EACH, name=name, module=__name__)
    for function, name in ((q_sampled, "q_sample"), (velocity, "velocity"))
)
WEIGH = fuse(EACH, Operation(weighed, AT_STEP), EACH, name="weigh", module=__name__)


# Cost ---------------------------------------------------------------------------------------------


def q_sample_forward_cost(n):
    return 12 * n, 3 * n


def velocity_forward_cost(n):
    return 12 * n, 3 * n


def weigh_forward_cost(n):
    return 8 * n, n


# Operations ---------------------------------------------------------------------------------------


def _check(x_0, eps, t, sqrt_alpha_bar, sqrt_one_minus_alpha_bar):
    if x_0.shape != eps.shape:
        raise ValueError(f"x_0 {tuple(x_0.shape)} and eps {tuple(eps.shape)} differ in shape")
    if t.shape != (x_0.shape[0],) or t.dtype != "int32":
        raise ValueError(
            f"t must be one int32 for each of {x_0.shape[0]} samples, got {t.dtype}{tuple(t.shape)}"
        )
    if sqrt_alpha_bar.ndim != 1 or sqrt_alpha_bar.shape != sqrt_one_minus_alpha_bar.shape:
        raise ValueError("the two tables must be rows of one length, one value a timestep")


def _tables(x, t, first, second):
    return Tables(first, second, t, uint32(math.prod(x.shape[1:])))


def _problem(shape, steps, arrays, tables, **more):
    """A problem of timesteps below `steps`; arrays, tables: names of the arguments of this shape,
    and of tables."""
    B = shape[0]
    return Problem(
        **dict.fromkeys(arrays, single(*shape)),
        **dict.fromkeys(tables, single(steps)),
        t=filled((B,), lambda rng: rng.integers(0, steps, B), np.int32),
        **more,
    )


def _problems(arrays, tables, measured):
    """The problems of an operation: three small ones, and whether one is measured."""
    found = [_problem(shape, 10, arrays, tables) for shape in ((2, 3, 4), (3, 5, 7), (5, 3, 3, 2))]
    return found + (
        [_problem((32, 64, 64, 3), 1000, arrays, tables, measured=True)] if measured else []
    )


BOTH, TABLES = ("x_0", "eps"), ("sqrt_alpha_bar", "sqrt_one_minus_alpha_bar")


@operation(
    reference=q_sample_forward_reference,
    cost=q_sample_forward_cost,
    check=_check,
    versions=Q_SAMPLE.versions(of="x_0"),
    problems=_problems(BOTH, TABLES, True),
)
def q_sample_forward(x_0, eps, t, sqrt_alpha_bar, sqrt_one_minus_alpha_bar, version=None):
    """x_t of every sample at its own timestep t[b]."""
    return Q_SAMPLE.forward(
        x_0, _tables(x_0, t, sqrt_alpha_bar, sqrt_one_minus_alpha_bar), eps, version=version.number
    )


@operation(
    reference=velocity_forward_reference,
    cost=velocity_forward_cost,
    check=_check,
    versions=VELOCITY.versions(of="x_0"),
    problems=_problems(BOTH, TABLES, False),
)
def velocity_forward(x_0, eps, t, sqrt_alpha_bar, sqrt_one_minus_alpha_bar, version=None):
    """The v target of every sample at its own timestep t[b]."""
    return VELOCITY.forward(
        x_0, _tables(x_0, t, sqrt_alpha_bar, sqrt_one_minus_alpha_bar), eps, version=version.number
    )


@operation(
    reference=weigh_forward_reference,
    cost=weigh_forward_cost,
    versions=WEIGH.versions(),
    check=lambda x, t, weight: _check(x, x, t, weight, weight),
    problems=_problems(["x"], ["weight"], True),
)
def weigh_forward(x, t, weight, version=None):
    """Every sample of x (B, ...) times the weight of its own timestep t[b]; of dy, it is the
    gradient."""
    return WEIGH.forward(x, _tables(x, t, weight, weight), version=version.number)
