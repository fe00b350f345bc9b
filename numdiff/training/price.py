"""The memory that a training step will take, foreseen before one has run: its peak on a stand-in
for the GPU, which launches nothing and hands out addresses as the arena does. A process on the CPU
takes about as much for the same arrays, besides what it has without them."""

import numpy as np

from ..device.arena import Arena
from ..device.planned import CARDS
from ..diffusion.memory import Measuring
from ..errors import NumdiffError
from ..sizes import sides
from . import kinds
from .build import build_trainer
from .compiling import PlannedRank


class Shapes:
    """As much of a dataset as a trainer asks for before its first step."""

    def __init__(self, options, channels):
        self.shape = options.batch, *sides(options.image_size), channels
        self.dtype = np.dtype(np.uint8 if channels in (1, 3) else np.float32)
        self.labels = np.zeros(options.batch, np.int32)


# bytes that a process on the CPU takes besides: compiled loops, buffers of the matrix products, and
# the drawing of samples and of the loss, as measured
BESIDES = 60 << 20


def foreseen_memory(options, sizes, backend, base, ranks=1):
    """Bytes of a rank at its peak, or None where they cannot be foreseen: on a GPU of its arrays
    there, on a CPU (backend None) of its process, which has `base` of them so far."""
    if backend is not None and not hasattr(backend, "arenas"):
        return None  # the emulator
    try:
        if backend is not None:
            return foreseen_peak(options, sizes, backend, ranks)
        return base + BESIDES + foreseen_peak(options, sizes, CARDS[-1], ranks)
    except NumdiffError:  # what NumPy takes and no kernel does
        return None


def foreseen_peak(options, sizes, gpu, ranks=1):
    """Bytes that one rank has at once in a step, with what it keeps between steps, on a `Gpu` or a
    `Card`; sizes: the options of the model's constructor."""
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
    device.arena = arena()
    trainer.step_function.run()
    return kept.used_bytes + device.arena.peak_bytes


def with_and_without(options, sizes, gpu):
    """The peaks of a step that recomputes as `--recompute` says, and of one that recomputes
    nothing, in MiB."""
    return [
        foreseen_peak(options.changed(recompute=part), sizes, gpu) / 2**20
        for part in (options.recompute, "no")
    ]
