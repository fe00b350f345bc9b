"""Running a sampler's plan over one batch: on a GPU each kind of step is captured once and
replayed.

Everything that changes from step to step is in device memory: the table of the plan's coefficients
and the step number, which a kernel increments. Results that a step passes to the next are in arrays
at fixed addresses. So for up to TOGETHER steps of a kind the host launches one graph, and nothing
is read back before the batch is done.
"""

import numpy as np

from .. import kernels as K
from ..device import Replayed, copy_into, empty_like, fill_zero, upload, with_dtype, zeros
from ..device.batch_invariance import many_evaluations
from ..device.traffic import Pace
from ..kernels.diffusion.sampler import blend, combine, weighted_sum
from ..kernels.optimizer.step_state import next_row
from ..kernels.random import PURPOSE_SAMPLER, random_normal
from .ahead import TOGETHER, ConditioningAhead, steps_ahead


class SamplerRun:
    """The arrays of a batch of `size` images, and the steps of a `Plan` over them.

    denoiser: a `Denoiser` without labels; shape: of an image, (H, W, C); given: {name: NumPy array
    (H, W, C)} of the plan's further arrays; eager: launch each kernel from Python; arena: as
    `Replayed`'s; where one is given, memory is borrowed, so nothing is computed ahead for later
    steps, which would take more
    """

    def __init__(self, plan, denoiser, size, shape, given=(), eager=False, arena=None):
        self.plan, self.denoiser, self.eager, self.arena = plan, denoiser, eager, arena
        self.model, self.backend = denoiser.model, denoiser.model.backend
        self.shape = (size, *shape)
        self.samples, self.first = (
            zeros(size, np.uint32, self.backend),
            zeros(1, np.uint32, self.backend),
        )
        self.labels = None
        if self.model.num_classes is not None:
            self.labels = zeros(size * denoiser.copies, np.int32, self.backend)
        self.table = upload(plan.table, self.backend)
        self.step, self.row = (
            zeros(1, np.uint32, self.backend),
            zeros(plan.table.shape[1], np.uint32, self.backend),
        )
        self.numbers = with_dtype(self.row, np.float32)
        self.kept = [zeros(self.shape, np.float32, self.backend) for _ in range(plan.places)]
        self.given = {
            name: upload(np.broadcast_to(array, self.shape), self.backend)
            for name, array in dict(given).items()
        }
        rows = size * denoiser.copies
        steps = 0 if arena is not None else steps_ahead(self.model, rows, len(plan.steps))
        self.ahead = (
            ConditioningAhead(self.model, self.table, self.step, rows, steps) if steps else None
        )
        self._replays, self._pace = {}, Pace(self.backend)

    def noise(self, seeds):
        """The starting noise, float32 (size, H, W, C), of images with these seeds, uint32 (size,)."""
        copy_into(self.samples, seeds)
        return random_normal(self.shape, 0, PURPOSE_SAMPLER, self.first, self.samples)

    def __call__(self, noise, seeds, labels=None, before=None, after=None):
        """The finished images (size, H, W, C), from the starting noise; the array is overwritten by
        the next call.

        seeds: uint32 (size,), of the noise that steps add; labels: int32 NumPy (size,), or None
        before: called with the images x and the step's numbers, a float32 NumPy row, before each
            evaluation of the model; after: called without arguments once for each evaluation, when
            it has been launched
        """
        copy_into(self.samples, seeds)
        if labels is not None:
            labels = self.denoiser.with_null(labels)
            copy_into(self.labels, labels)
            if self.ahead:
                copy_into(self.ahead.labels, np.tile(labels, self.ahead.steps))
        self.rewind()
        self.start(noise)
        with many_evaluations():
            for number, step, count in self.parts(alone=bool(before)):
                if self.ahead and number % self.ahead.steps == 0:
                    self._replayed("ahead", self.ahead.launch)()
                if before and step.asks:
                    before(
                        self.kept[step.operations[0].inputs[0][1]],
                        self.plan.table[number].view(np.float32),
                    )
                self._replayed(
                    (step, count), lambda step=step, count=count: self.launch(step, count)
                )()
                self._pace()
                if after and step.asks:
                    for _ in range(count):
                        after()
        return self.kept[0]

    def parts(self, alone=False):
        """(number of its first step, step, how many) of each part of the plan that is one graph:
        TOGETHER steps of one kind, or one step; alone: always one."""
        number, steps = 0, self.plan.steps
        most = 1 if alone or self.eager or not hasattr(self.backend, "capture") else TOGETHER
        while number < len(steps):
            end = number + most
            same = end <= len(steps) and len(set(steps[number:end])) == 1
            # conditioning is computed between graphs, ahead of its first step
            if same and self.ahead:
                same = number // self.ahead.steps == (end - 1) // self.ahead.steps
            count = end - number if same else 1
            yield number, steps[number], count
            number += count

    def start(self, noise):
        """Begin with this noise."""
        copy_into(self.kept[0], combine((self.plan.start_scale, noise)))

    def rewind(self):
        """Go back to the table's first row."""
        fill_zero(self.step)

    def _replayed(self, name, function):
        """The `Replayed` function of this name, such as a step's, for the models as they are now."""
        models = [self.model, *([self.denoiser.guide.model] if self.denoiser.guide else [])]
        key = (
            name,
            tuple(model.place() for model in models) if hasattr(self.backend, "capture") else None,
        )
        if key not in self._replays:
            self._replays[key] = Replayed(function, self.backend, self.arena, self.eager)
        return self._replays[key]

    def rehearse(self):
        """Launch every kind of step once, kernel by kernel."""
        if self.ahead:
            self.ahead.launch()
        for step in dict.fromkeys(self.plan.steps):
            self.launch(step)
            self.rewind()

    def launch(self, step, count=1):
        """Launch the kernels of the next `count` steps in the table, all of this kind."""
        for _ in range(count):
            self._launch_next(step)

    def _launch_next(self, step):
        next_row(self.table, self.step, self.row)
        made = []

        def array(place):
            kind, which = place
            return {"given": self.given, "kept": self.kept, "made": made}[kind][which]

        for name, inputs, _, first, count in step.operations:
            results = self._compute(name, [array(i) for i in inputs], slice(first, first + count))
            made.extend(results if isinstance(results, tuple) else (results,))
        self._keep([array(place) for place in step.leaves])

    def _compute(self, name, inputs, place):
        numbers = self.numbers[place]
        if name in ("denoise", "denoise_unguided"):
            return self.denoiser.estimate(
                *inputs,
                numbers,
                self.labels,
                self.ahead.of_step() if self.ahead else (),
                guided=name == "denoise",
            )
        if name == "noise":
            return random_normal(self.shape, 0, PURPOSE_SAMPLER, self.row[place], self.samples)
        if name == "combine":
            return weighted_sum(numbers, *inputs)
        return K.learned_step(*inputs, numbers) if name == "learned_step" else blend(*inputs)

    def _keep(self, arrays):
        """Copy what the step leaves to where the next one expects it."""
        moved = [
            any(array is kept for kept in self.kept) and array is not self.kept[i]
            for i, array in enumerate(arrays)
        ]
        # from one place to another: through a buffer, as one copy may overwrite what another reads
        if any(moved):
            arrays = [
                _copy(array) if aside else array for array, aside in zip(arrays, moved, strict=True)
            ]
        for array, place in zip(arrays, self.kept, strict=False):
            if array is not place:
                copy_into(place, array)


def _copy(array):
    new = empty_like(array)
    copy_into(new, array)
    return new
