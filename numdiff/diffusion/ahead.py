"""The conditioning of a sampler's next steps, computed together: many rows for one reading of the
weights."""

import numpy as np

from ..device import empty, zeros
from ..device.batch_invariance import batch_invariant
from ..kernels.diffusion.ahead import are_vectors, place, take, timesteps_ahead
from ..kernels.linear.group import split

# that the conditioning of the steps to come may take; as much again while it is computed, which is
# then free for activations
MAX_BYTES = 64 << 20
MIN_STEPS = 2  # for which it is worth while
TOGETHER = 5  # steps of a captured graph: between two graphs a GPU is idle for some 5 µs


def steps_ahead(model, rows, steps):
    """For how many of a plan's steps to compute ahead, of `rows` samples each; 0: not at all."""
    # a CPU gains nothing by it
    if model.backend is None or not hasattr(model, "conditioning_columns"):
        return 0
    columns, dtype = model.conditioning_columns()
    if not are_vectors(*(rows * n for n in columns), itemsize=dtype.itemsize):
        return 0
    fits = min(steps, MAX_BYTES // (sum(columns) * rows * dtype.itemsize))
    if TOGETHER <= fits < steps:  # no graph then ends between two computations
        fits -= fits % TOGETHER
    return fits if fits >= MIN_STEPS else 0


class ConditioningAhead:
    """A model's `conditioning` for `rows` samples at each of the next `steps` steps.

    table, step: those of a `Run`, whose first column is the timestep. `launch` computes the next
    `steps` steps, from the one that `step` stands at; `of_step` gives the one that `next_row` has
    begun. labels: int32 (steps · rows,) on the engine, those of a step again and again; None for a
    model without classes.
    """

    def __init__(self, model, table, step, rows, steps):
        self.model, self.table, self.step, self.rows, self.steps = model, table, step, rows, steps
        backend, (self.columns, dtype) = model.backend, model.conditioning_columns()
        self.begin, self.t = zeros(1, np.uint32, backend), zeros(steps * rows, np.float32, backend)
        self.labels = None if model.num_classes is None else zeros(steps * rows, np.int32, backend)
        self.all = zeros((steps, rows * sum(self.columns)), dtype, backend)
        self.row = empty(self.all.shape[1:], dtype, backend)
        self.parts = split(self.row, rows, self.columns)

    def launch(self):
        timesteps_ahead(self.table, self.step, self.begin, self.t, self.rows)
        offset = 0
        with batch_invariant(len(self.t)), self.model.arithmetic():
            for part in self.model.conditioning(self.t, self.labels):
                part = part.data.reshape(self.steps, -1)
                place(self.all, part, offset)
                offset += part.shape[1]

    def of_step(self):
        """The arrays for the step that has begun, which the next step overwrites."""
        take(self.all, self.step, self.begin, self.row)
        return self.parts
