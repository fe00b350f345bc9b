"""The memory that a training step will take, foreseen before one has run: its peak on a stand-in
for the GPU, which launches nothing and hands out addresses as the arena does."""

import numpy as np

from ..device.arena import Arena
from ..diffusion.memory import Measuring
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


def foreseen_peak(options, sizes, gpu):
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
    trainer = build_trainer(options, model, data, communicator=PlannedRank())
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
