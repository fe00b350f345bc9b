"""Telemetry: the numbers of a training step, written to a ring on the device and read by the host
many steps later.

MATHEMATICS
    ring[step mod R] = (loss · scale, gradient norm, learning rate, loss scale, steps skipped)
SHAPES
    ring float32 (R, 5); step uint32 (1,); loss, gradient_norm, learning_rate, loss_scale float32
    (1,); counts int32 (3,) as in loss_scale.py
VERSIONS
    v1 five threads, one number each.
LAUNCH
    one block of five threads.
DETERMINISM
    one writer an element.
COST
    negligible compared with a launch. The point is what it saves: reading a loss on the host waits
    for the whole device.
SOURCE
    plain bookkeeping, no source.
READ NEXT
    diffusion/sampler.py, what is launched between two evaluations of the model.
"""

import numpy as np

from ...device import cuda, download, float32, launch
from ..operation import Problem, integers, numbers, operation, single


def telemetry_record_reference(
    ring, step, loss, gradient_norm, learning_rate, loss_scale, counts, scale=1.0
):
    ring[int(step[0]) % len(ring)] = (
        loss[0] * scale,
        gradient_norm[0],
        learning_rate[0],
        loss_scale[0],
        counts[1],
    )


@cuda.jit
def telemetry_record_kernel_v1(
    ring, step, loss, gradient_norm, learning_rate, loss_scale, counts, scale
):
    row = int(step[0]) % ring.shape[0]
    column = cuda.threadIdx.x
    if column == 0:
        ring[row, 0] = loss[0] * scale
    elif column == 1:
        ring[row, 1] = gradient_norm[0]
    elif column == 2:
        ring[row, 2] = learning_rate[0]
    elif column == 3:
        ring[row, 3] = loss_scale[0]
    else:
        ring[row, 4] = float32(counts[1])


# Cost ---------------------------------------------------------------------------------------------


def telemetry_record_cost():
    """(bytes, FLOPs) of one row."""
    return 44, 1


# Operations ---------------------------------------------------------------------------------------

STATE = {
    "loss": single(1),
    "gradient_norm": numbers([4.0]),
    "learning_rate": numbers([1e-3]),
    "loss_scale": numbers([1024.0]),
    "counts": integers([3, 2, 1]),
}
ONE = single(1)


@operation(
    reference=telemetry_record_reference,
    cost=telemetry_record_cost,
    problems=[
        Problem(ring=single(4, 5), step=integers([7], np.uint32), **STATE, scale=0.5),
        Problem(
            ring=single(1024, 5),
            step=integers([7], np.uint32),
            loss=ONE,
            gradient_norm=ONE,
            learning_rate=ONE,
            loss_scale=ONE,
            counts=integers([3, 2, 1]),
            measured=True,
        ),
    ],
    writes=("ring",),
)
def telemetry_record(ring, step, loss, gradient_norm, learning_rate, loss_scale, counts, scale=1.0):
    """Write this step's row of the ring, in place."""
    launch(
        telemetry_record_kernel_v1,
        1,
        5,
        ring,
        step,
        loss,
        gradient_norm,
        learning_rate,
        loss_scale,
        counts,
        scale,
    )


def telemetry_read(ring, first, stop):
    """Rows of steps first … stop-1 (at most R of them), oldest first: NumPy float32 (stop - first,
    5). Waits."""
    rows = download(ring)
    return rows[[step % len(rows) for step in range(first, stop)]]
