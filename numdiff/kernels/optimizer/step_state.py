"""The scalars of a training step, kept where a replayed step can find them: on the device.

A captured step is replayed without a word from the host, so what changes from step to step must
change itself. These kernels have one thread each; they cost a launch and nothing else.

MATHEMATICS
    learning rate   warm-up, while step < warmup_steps:   base · (step + 1) / warmup_steps
                    then constant:                        base
                    or cosine to 0 at total_steps:        base · sin²(π/2 · (total - step) / (total - warmup))
                    = base · (1 + cos(π · (step - warmup) / (total - warmup))) / 2, which would not end in 0 exactly
    advance         step = step + 1
    latch           the first step whose loss or gradient norm is not finite is remembered, and from it on
                    gradient_norm is set to NaN. adamw.py and ema.py change nothing at a norm that is not finite:
                    the weights stay at the last good step until the host looks, however many steps later that is.
                    With loss scaling (loss_scale.py) a step may be skipped; `patience` skips in a row are too many.
    next row        row = table[step], then step = step + 1: the numbers of a sampler's next step
    count           updates = updates + 1 where gradient_norm is finite: Adam's t, which skipped steps leave alone
SHAPES
    step, updates (1,) uint32; learning_rate, loss, gradient_norm (1,) float32; first_bad_step (1,)
    int32, -1 for none; counts (3,) int32 as in loss_scale.py; table (steps, width) and row (width,)
    uint32, the bits of whatever numbers
VERSIONS
    v1.
LAUNCH
    one block of one thread; next row: of a warp.
DETERMINISM
    one thread writes each number.
COST
    a few bytes.
SOURCE
    cosine: Loshchilov and Hutter 2016, arXiv:1608.03983, eq. 5, without restarts.
READ NEXT
    diffusion/sampler.py.
"""

import math

import numpy as np

from ...device import cuda, float32, int32, launch, uint32
from ..embedding import cosine_sine_of
from ..operation import Problem, filled, integers, numbers, operation, single

HALF_PI = np.float32(math.pi / 2)
WARP = 32
NAN = np.float32(np.nan)


# References ---------------------------------------------------------------------------------------


def learning_rate_forward_reference(step, learning_rate, base, warmup_steps, total_steps, cosine):
    s = int(step[0])
    if s < warmup_steps:
        learning_rate[0] = base * (s + 1) / warmup_steps
    elif not cosine:
        learning_rate[0] = base
    else:
        left, whole = max(total_steps - s, 0), max(total_steps - warmup_steps, 1)
        learning_rate[0] = base * math.sin(math.pi / 2 * left / whole) ** 2


def latch_nonfinite_reference(first_bad_step, loss, gradient_norm, step):
    if first_bad_step[0] < 0 and not (np.isfinite(loss[0]) and np.isfinite(gradient_norm[0])):
        first_bad_step[0] = step[0]
    if first_bad_step[0] >= 0:
        gradient_norm[0] = np.nan


def latch_skips_reference(first_bad_step, counts, gradient_norm, step, patience):
    if first_bad_step[0] < 0 and counts[2] >= patience:
        first_bad_step[0] = step[0]
    if first_bad_step[0] >= 0:
        gradient_norm[0] = np.nan


def step_advance_reference(step):
    step += uint32(1)


def count_update_reference(updates, gradient_norm):
    if math.isfinite(gradient_norm[0]):
        updates += uint32(1)


def next_row_reference(table, step, row):
    row[...] = table[step[0]]
    step += uint32(1)


# Kernels ------------------------------------------------------------------------------------------


@cuda.jit
def learning_rate_kernel_v1(step, learning_rate, base, warmup_steps, total_steps, cosine):
    s = int32(step[0])
    rate = base
    if s < warmup_steps:
        rate = base * float32(int32(s + 1)) / float32(warmup_steps)
    elif cosine:
        left, whole = (
            max(int32(total_steps - s), int32(0)),
            max(int32(total_steps - warmup_steps), int32(1)),
        )
        _, root = cosine_sine_of(HALF_PI * (float32(left) / float32(whole)))
        rate = base * root * root
    learning_rate[0] = rate


@cuda.jit
def step_advance_kernel_v1(step):
    step[0] = uint32(step[0] + uint32(1))


@cuda.jit
def latch_nonfinite_kernel_v1(first_bad_step, loss, gradient_norm, step):
    first = first_bad_step[0]
    if first < 0 and not (math.isfinite(loss[0]) and math.isfinite(gradient_norm[0])):
        first = int32(step[0])
        first_bad_step[0] = first
    if first >= 0:
        gradient_norm[0] = NAN


@cuda.jit
def latch_skips_kernel_v1(first_bad_step, counts, gradient_norm, step, patience):
    first = first_bad_step[0]
    if first < 0 and counts[2] >= patience:
        first = int32(step[0])
        first_bad_step[0] = first
    if first >= 0:
        gradient_norm[0] = NAN


@cuda.jit
def count_update_kernel_v1(updates, gradient_norm):
    if math.isfinite(gradient_norm[0]):
        updates[0] = uint32(updates[0] + uint32(1))


@cuda.jit
def next_row_kernel_v1(table, step, row):
    s, width, t = step[0], uint32(row.size), uint32(cuda.threadIdx.x)
    cuda.syncthreads()  # all know which row, before it is another
    i = t
    while i < width:
        row[i] = table[s * width + i]
        i = uint32(i + uint32(WARP))
    if t == 0:
        step[0] = uint32(s + uint32(1))


# Cost ---------------------------------------------------------------------------------------------


def learning_rate_forward_cost():
    return 8, 5


def step_advance_cost():
    return 8, 0


def latch_nonfinite_cost():
    return 16, 0


def latch_skips_cost():
    return 16, 0


def count_update_cost():
    return 12, 0


def next_row_cost(width):
    return 8 * width + 8, 0


# Operations ---------------------------------------------------------------------------------------

STEP, NORM = integers([3], np.uint32), numbers([4.0])


@operation(
    reference=learning_rate_forward_reference,
    cost=learning_rate_forward_cost,
    problems=[
        *(
            Problem(
                "cosine" if cosine else "constant",
                step=STEP,
                learning_rate=numbers([1e-3]),
                base=1e-3,
                warmup_steps=2,
                total_steps=10,
                cosine=cosine,
            )
            for cosine in (False, True)
        ),
        Problem(
            step=integers([7], np.uint32),
            learning_rate=single(1),
            base=1e-3,
            warmup_steps=200,
            total_steps=8000,
            cosine=True,
            measured=True,
        ),
    ],
    writes=("learning_rate",),
)
def learning_rate_forward(step, learning_rate, base, warmup_steps, total_steps, cosine):
    """Writes this step's learning rate into `learning_rate`."""
    launch(
        learning_rate_kernel_v1,
        1,
        1,
        step,
        learning_rate,
        float(base),
        int(warmup_steps),
        int(total_steps),
        int(cosine),
    )


@operation(
    reference=step_advance_reference,
    cost=step_advance_cost,
    problems=[Problem(step=STEP)],
    writes=("step",),
)
def step_advance(step):
    """step += 1, in place."""
    launch(step_advance_kernel_v1, 1, 1, step)


@operation(
    reference=latch_nonfinite_reference,
    cost=latch_nonfinite_cost,
    problems=[
        Problem(
            label,
            first_bad_step=integers([-1]),
            loss=numbers([loss]),
            gradient_norm=NORM,
            step=STEP,
        )
        for label, loss in (("finite", 0.5), ("infinite", np.inf))
    ],
    writes=("first_bad_step", "gradient_norm"),
)
def latch_nonfinite(first_bad_step, loss, gradient_norm, step):
    """Remembers the first step that is not finite, and from it on makes gradient_norm NaN, so that
    updates stop."""
    launch(latch_nonfinite_kernel_v1, 1, 1, first_bad_step, loss, gradient_norm, step)


@operation(
    reference=latch_skips_reference,
    cost=latch_skips_cost,
    problems=[
        Problem(
            f"patience of {patience}",
            first_bad_step=integers([-1]),
            counts=integers([3, 0, 0]),
            gradient_norm=NORM,
            step=STEP,
            patience=patience,
        )
        for patience in (0, 5)
    ],
    writes=("first_bad_step", "gradient_norm"),
)
def latch_skips(first_bad_step, counts, gradient_norm, step, patience):
    """Remembers the step at which `patience` in a row were skipped, and from it on stops all
    updates."""
    launch(latch_skips_kernel_v1, 1, 1, first_bad_step, counts, gradient_norm, step, int(patience))


@operation(
    reference=count_update_reference,
    cost=count_update_cost,
    problems=[Problem(updates=STEP, gradient_norm=NORM)],
    writes=("updates",),
)
def count_update(updates, gradient_norm):
    """updates += 1, in place, if the norm is finite."""
    launch(count_update_kernel_v1, 1, 1, updates, gradient_norm)


def _check_row(table, row):
    if (
        table.dtype != row.dtype
        or row.dtype != np.uint32
        or tuple(row.shape) != tuple(table.shape[1:])
    ):
        raise ValueError(
            f"table {table.dtype}{tuple(table.shape)} and row {row.dtype}{tuple(row.shape)} must be "
            "uint32, (steps, width) and (width,)"
        )


@operation(
    reference=next_row_reference,
    cost=lambda row: next_row_cost(row.size),
    exact_bytes=True,
    check=_check_row,
    problems=[
        Problem(
            table=filled((3, 40), lambda rng: rng.integers(0, 2**32, (3, 40)), np.uint32),
            step=integers([1], np.uint32),
            row=integers(np.zeros(40), np.uint32),
        )
    ],
    writes=("step", "row"),
)
def next_row(table, step, row):
    """row = table[step], then step += 1, in place. The table has a row for that step."""
    launch(next_row_kernel_v1, 1, WARP, table.reshape(-1), step, row)
