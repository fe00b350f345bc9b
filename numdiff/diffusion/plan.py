"""A sampler's plan, made before it runs: the same few operations in every step, with other numbers.

A sampler of samplers.py is a function over arrays. Given `Value`s instead of arrays it computes
nothing, but records what it would compute: a `SamplerPlan`. A step begins where the model is evaluated.
Most steps of a plan differ only in their numbers (coefficients, timesteps, noise counters). The
plan keeps these in a table with one row per step, which goes to the device as a whole. So a step is
recorded once and replayed with one row after the other.

    plan = Plan(euler, denoise, sigmas, {})       steps: [(denoise, slope, combine)] × 50, table: uint32 (50, 9)
    plan.steps[0] == plan.steps[1]                True: one CUDA graph serves both

The functions `combine` and `blend` of this module are those of kernels/diffusion/sampler.py for
arrays, `learned_step` is that of `numdiff.kernels`.
"""

import math
from typing import NamedTuple

import numpy as np

from .. import kernels as K
from ..kernels.diffusion import sampler as kernels


class Value:
    """An array of a plan, whose contents are not known yet."""

    __slots__ = ("plan", "number")

    def __init__(self, plan, number):
        self.plan, self.number = plan, number


def combine(*terms):
    """Σ scalar · array over one to three pairs (scalar, array)."""
    scalars, arrays = zip(*terms, strict=True)
    if isinstance(arrays[0], Value):
        return arrays[0].plan.note("combine", arrays, scalars)
    return kernels.weighted_sum(scalars, *arrays)


def learned_step(x, x_0, prediction, noise, a, b, low, high):
    """a · x + b · x_0 + noise of the variance that prediction's second C channels choose."""
    if isinstance(x, Value):
        return x.plan.note("learned_step", (x, x_0, prediction, noise), (a, b, low, high))
    return K.learned_step(x, x_0, prediction, noise, (a, b, low, high))


def blend(mask, known, x):
    """known where mask is 1, x where it is 0."""
    if isinstance(x, Value):
        return x.plan.note("blend", (mask, known, x))
    return kernels.blend(mask, known, x)


class SamplerOperation(NamedTuple):
    """One operation of a step: its name, where its inputs are, how many results it has, and where
    its numbers are.

    inputs: ("given", name) an array that stays the same; ("kept", i) what the previous step has
        left in place i; or ("made", i) the i-th result of this step
    """

    name: str
    inputs: tuple
    results: int
    first: int
    numbers: int


class SamplerStep(NamedTuple):
    """A step: its operations, and which arrays it leaves for the next, as `SamplerOperation.inputs` names
    them."""

    operations: tuple
    leaves: tuple

    @property
    def asks(self):
        """Whether the model is evaluated, which is then the first operation."""
        return bool(self.operations) and self.operations[0].name in ("denoise", "denoise_unguided")

    @property
    def guided(self):
        """Whether it is evaluated with the guidance that there is."""
        return self.asks and self.operations[0].name == "denoise"


class SamplerPlan:
    """What `sampler(denoise, x, sigmas, noise, **settings)` does.

    numbers_of(sigma): what `denoise` needs to know about a level, as floats; given: names of
    further arrays that the sampler takes, as keywords; guided(sigma): whether there is guidance at
    a level (default: at all of them);
    start_scale: as a path has it (default: of whole timesteps).
    Attributes: steps, a list of `SamplerStep`s; table, uint32 (steps, width): their numbers, those of an
    operation from column `first` on, as the bits of float32 (the counter of noise is an integer);
    places: how many arrays a step leaves at most. Before the first step, place 0 holds the starting
    noise times `start_scale`; after the last one it holds the result.
    """

    def __init__(
        self,
        sampler,
        numbers_of,
        sigmas,
        settings,
        given=(),
        guided=lambda sigma: True,
        start_scale=None,
    ):
        self._numbers_of, self._guided, self._count = numbers_of, guided, 0
        # the operations of each step: (name, numbers of the inputs, of the results, place, numbers)
        self._made = [[]]
        self._rows = [[]]
        start = self._new()
        self._given = {self._new(): name for name in given}
        values = {name: Value(self, number) for number, name in self._given.items()}
        result = sampler(
            _Denoise(self), Value(self, start), sigmas, self._noise, **settings, **values
        )
        if not self._made[0]:  # nothing to do before the model is evaluated
            del self._made[0], self._rows[0]
        self.steps = self._finish(start, result.number)
        width = max(map(len, self._rows))
        self.table = np.array(
            [row + [0] * (width - len(row)) for row in self._rows], np.uint32
        ).reshape(-1, width)
        self.places = max(1, *(len(step.leaves) for step in self.steps))
        self.start_scale = math.sqrt(1 + sigmas[0] ** 2) if start_scale is None else start_scale

    def _new(self):
        self._count += 1
        return self._count - 1

    def note(self, name, inputs, numbers=(), results=1):
        """Record an operation over `Value`s; returns its result, or a tuple of results."""
        row, made = self._rows[-1], [self._new() for _ in range(results)]
        words = (
            np.array(numbers, np.uint32 if name == "noise" else np.float32).view(np.uint32).tolist()
        )
        self._made[-1].append(
            (name, [value.number for value in inputs], made, len(row), len(words))
        )
        row.extend(words)
        values = tuple(Value(self, number) for number in made)
        return values[0] if results == 1 else values

    def _noise(self, i):
        return self.note("noise", (), [i + 1])  # counter 0 is the starting noise

    def ask(self, x, sigma):
        """(x_0, the model's answer); begins a step."""
        self._made.append([])
        self._rows.append([])
        name = "denoise" if self._guided(sigma) else "denoise_unguided"
        return self.note(name, (x,), self._numbers_of(sigma), results=2)

    def _finish(self, start, result):
        last_use = {result: len(self._made)}
        for number, operations in enumerate(self._made):
            for _, inputs, *_ in operations:
                last_use.update({i: max(number, last_use.get(i, 0)) for i in inputs})
        kept, steps = [start], []
        for number, operations in enumerate(self._made):
            where = {value: ("given", name) for value, name in self._given.items()}
            where |= {value: ("kept", place) for place, value in enumerate(kept)}
            noted, made = [], 0
            for name, inputs, results, first, numbers in operations:
                noted.append(
                    SamplerOperation(
                        name, tuple(where[i] for i in inputs), len(results), first, numbers
                    )
                )
                for value in results:
                    where[value], made = ("made", made), made + 1
            kept = sorted(v for v in where if v not in self._given and last_use.get(v, -1) > number)
            steps.append(SamplerStep(tuple(noted), tuple(where[v] for v in kept)))
        return steps


class _Denoise:
    """The `denoise` of a sampler while it is planned."""

    def __init__(self, plan):
        self._plan = plan

    def __call__(self, x, sigma):
        return self._plan.ask(x, sigma)[0]

    def with_prediction(self, x, sigma):
        return self._plan.ask(x, sigma)
