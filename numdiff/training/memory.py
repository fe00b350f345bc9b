"""How many images a training step can take through the model at a time: computed when there were
too many."""

import bisect
import math

from ..device.arena import SEGMENT, Arena
from ..diffusion.memory import Measuring, measuring_twin
from ..errors import TooManyElementsError


def bytes_for(trainer, communicator, microbatch):
    """Bytes that the GPU must have for a step's intermediate results, besides what a `Trainer`
    holds; NaN if that is more than kernels count."""
    device, taken = Measuring(trainer.model.backend), []
    model = measuring_twin(trainer.model, device)
    other = trainer.twin(model, communicator, microbatch=microbatch)
    device.arena = Arena(lambda nbytes: taken.append(nbytes) or sum(taken) - nbytes)
    try:
        other.step_function.run()
    except TooManyElementsError:
        return math.nan
    finally:
        device.arena = None
    return sum(taken)


def largest_microbatch(trainer, communicator, room):
    """The largest microbatch that divides the rank's part of the batch and for which `room` bytes
    suffice; 0 if there is no room for one image. communicator: a `PlannedRank` like the trainer's.
    """
    part = trainer.step_function.batch
    sizes = [n for n in range(1, trainer.step_function.microbatch + 1) if part % n == 0]
    return [0, *sizes][
        bisect.bisect_left(
            sizes, True, key=lambda n: not bytes_for(trainer, communicator, n) <= room
        )
    ]


def say_what_fits(trainer, communicator, room=None):
    """The message for a `Trainer` whose step takes too many images at a time.

    room: bytes that the GPU has left; None: unlimited, as the shortage is of the kernels' 32 bits
    """
    step, most = (
        trainer.step_function,
        largest_microbatch(trainer, communicator, math.inf if room is None else room),
    )
    why = (
        "are more than kernels count in 32 bits"
        if room is None
        else f"do not fit into the {room >> 20:,} MiB that {trainer.model.backend.device_name} has left after the "
        "model and its optimizer"
    )
    advice = (
        f"use --microbatch {most}, which gives the same step in {step.batch // most} parts"
        if most
        else "one does not fit, either: use a smaller model or --recompute"
    )
    return f"{step.microbatch:,} images at a time {why}; {advice}."


def room_of(trainer):
    """Bytes that the trainer's GPU has left for a step's intermediate results."""
    gpu = trainer.model.backend
    # a recorded step takes nothing from the first
    arena = trainer.step_function.arena or gpu.arenas[0]
    return max(0, gpu.memory_info()[0] + arena.reserved_bytes - arena.used_bytes - SEGMENT)
