"""Telemetry: the numbers of a training step, written to a ring on the device and read by the host many steps later.

MATHEMATICS
    ring[step mod R] = (loss · scale, gradient norm, learning rate)
SHAPES
    ring float32 (R, 3); step uint32 (1,); loss, gradient_norm, learning_rate float32 (1,)
VERSIONS
    v1 three threads, one number each.
LAUNCH
    one block of three threads.
DETERMINISM
    one writer an element.
COST
    nothing beside a launch. The point is what it saves: reading a loss on the host waits for the whole device.
SOURCE
    plain bookkeeping, no source.
READ NEXT
    step_state.py, the other scalars that live on the device.
"""
from ..device import cuda, download, is_device, launch


def telemetry_record_reference(ring, step, loss, gradient_norm, learning_rate, scale):
    ring[int(step[0]) % len(ring)] = loss[0] * scale, gradient_norm[0], learning_rate[0]


@cuda.jit
def telemetry_record_kernel_v1(ring, step, loss, gradient_norm, learning_rate, scale):
    row = int(step[0]) % ring.shape[0]
    column = cuda.threadIdx.x
    if column == 0:
        ring[row, 0] = loss[0] * scale
    elif column == 1:
        ring[row, 1] = gradient_norm[0]
    else:
        ring[row, 2] = learning_rate[0]


def telemetry_record(ring, step, loss, gradient_norm, learning_rate, scale=1.0):
    """Write this step's row of the ring, in place."""
    if not is_device(ring):
        telemetry_record_reference(ring, step, loss, gradient_norm, learning_rate, scale)
    else:
        launch(telemetry_record_kernel_v1, 1, 3, ring, step, loss, gradient_norm, learning_rate, scale)


def telemetry_read(ring, first, stop):
    """Rows of steps first … stop-1 (at most R of them), oldest first: NumPy float32 (stop - first, 3). Waits."""
    rows = download(ring)
    return rows[[step % len(rows) for step in range(first, stop)]]


def telemetry_record_cost():
    """(bytes, FLOPs) of one row."""
    return 28, 1
