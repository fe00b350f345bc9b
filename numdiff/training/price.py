"""The memory that a training step will take, and the number of its kernels, foreseen before one has
run: on a stand-in for the GPU, which launches nothing and hands out addresses as the arena does. A
process on the CPU takes about as much for the same arrays, besides what it has without them."""

from typing import NamedTuple

import numpy as np

from ..device.arena import Arena
from ..device.gpu import CONTEXT
from ..device.planned import CARDS
from ..diffusion.memory import Measuring
from ..errors import NumdiffError
from ..sizes import sides
from . import kinds
from .build import build_trainer
from .compiling import PlannedRank
from .kinds.kind import imported
from .previews import draws


class Shapes:
    """As much of a dataset as a trainer asks for before its first step."""

    def __init__(self, options, channels):
        self.shape = options.batch, *sides(options.image_size), channels
        self.dtype = np.dtype(np.uint8 if channels in (1, 3) else np.float32)
        self.labels = np.zeros(options.batch, np.int32)


# bytes that a process on the CPU takes besides: compiled loops, buffers of the matrix products, and
# the drawing of samples and of the loss, as measured
BESIDES = 60 << 20
# …and of a GPU besides the context and the arenas' segments: kernels and graphs, as measured
BESIDES_ON_GPU = 10 << 20


class PlannedStep(NamedTuple):
    """What a step takes of a rank. peak: bytes of its arrays at once, with what it keeps between
    steps; reserved: of the arenas' segments, and with the grids' ones; launches: of kernels."""

    peak: int
    reserved: int
    launches: int


def foreseen_step(options, sizes, backend, base, ranks=1):
    """(bytes of a rank at its peak, launches of a step), or (None, 0) where they cannot be foreseen:
    on a GPU of all that the process takes there, on a CPU (backend None) of its process, which has
    `base` of them so far."""
    if backend is not None and not hasattr(backend, "arenas"):
        return None, 0  # the emulator
    try:
        planned = planned_step(options, sizes, backend or CARDS[-1], ranks)
    except NumdiffError:  # what NumPy takes and no kernel does
        return None, 0
    if backend is None:
        return base + BESIDES + planned.peak, 0
    return CONTEXT + BESIDES_ON_GPU + planned.reserved, planned.launches


def foreseen_peak(options, sizes, gpu, ranks=1):
    """Bytes that one rank has at once in a step, with what it keeps between steps, on a `Gpu` or a
    `Card`; sizes: the options of the model's constructor."""
    return planned_step(options, sizes, gpu, ranks).peak


def planned_step(options, sizes, gpu, ranks=1):
    """The `PlannedStep` of a run with these options, of which one step and one grid are launched on
    a stand-in for the GPU."""
    device, channels = Measuring(gpu), sizes["in_channels"]

    def arena():
        taken = []
        return Arena(lambda nbytes: taken.append(nbytes) or sum(taken) - nbytes)

    kept = device.arena = arena()
    model, data = (
        kinds.get(options.model).model_class(**sizes, device=device, seed=None),
        Shapes(options, channels),
    )
    options = options.changed(init=None, flip=options.flip and data.dtype == np.uint8)
    trainer = build_trainer(options, model, data, communicator=PlannedRank(ranks))
    step = device.arena = arena()
    device.launches = 0
    trainer.step_function.run()
    launches, reserved = device.launches, step.reserved_bytes
    previews = imported(kinds.get(options.model).previews)(trainer, options)
    if previews.measures and draws(options, model):  # others compute in the memory of the step
        drawn = device.arena = arena()
        previews.rehearse()
        reserved += drawn.reserved_bytes
    return PlannedStep(kept.used_bytes + step.peak_bytes, kept.reserved_bytes + reserved, launches)


def with_and_without(options, sizes, gpu):
    """The peaks of a step that recomputes as `--recompute` says, and of one that recomputes
    nothing, in MiB."""
    return [
        foreseen_peak(options.changed(recompute=part), sizes, gpu) / 2**20
        for part in (options.recompute, "no")
    ]
