"""How many images fit into the memory of a GPU at a time: computed when a batch did not fit."""
import contextlib
import math

import numpy as np

from ..device.arena import SEGMENT, Arena
from ..device.ptx import PtxDevice
from ..dtypes import is_half
from ..errors import TooManyElementsError


class Measuring(PtxDevice):
    """A stand-in for a GPU that launches nothing and hands out addresses as its arena would. Attribute arena."""

    plans = True
    arenas = (None,)  # what is to last (device.lasting) is not counted

    def __init__(self, gpu):
        super().__init__()
        self.capability, self.multiprocessors, self.device_name = gpu.capability, gpu.multiprocessors, gpu.device_name
        self.arena = None

    def allocate(self, nbytes):
        return self.arena and self.arena.allocate(nbytes)

    @contextlib.contextmanager
    def within(self, arena):
        outer, self.arena = self.arena, arena
        try:
            yield
        finally:
            self.arena = outer

    @staticmethod
    def pointer(array):
        return 0

    def download(self, array):
        return np.ones(array.shape, array.dtype)

    def launch(self, *_):
        pass


def measuring_twin(model, device=None):
    """The same model on a `Measuring` device."""
    twin = type(model)(**model.options, device=device or Measuring(model.backend), seed=None)
    twin.diffusion, twin.tf32 = model.diffusion, model.tf32
    if is_half(model.dtype):
        twin.compute_in_half(model.dtype)
    return twin


def bytes_for(sampling, twin, batch):
    """Bytes that a GPU needs, besides the model, for batches of this many images of a `Sampling`."""
    device, taken = twin.backend, []
    guide = sampling.guide and measuring_twin(sampling.guide, device)
    device.arena = Arena(lambda nbytes: taken.append(nbytes) or sum(taken) - nbytes)
    try:
        sampling.new_run(batch, twin, guide).rehearse()
    finally:
        device.arena = None
    return sum(taken)


def largest_batch(sampling, room):
    """The largest batch for which `room` bytes suffice, to within 1/64; 0 if not even one image fits."""
    twin, low, high = measuring_twin(sampling.model), 0, sampling.batch
    while high - low > max(1, low // 64):
        middle, fits = (low + high) // 2, False
        with contextlib.suppress(TooManyElementsError):
            fits = bytes_for(sampling, twin, middle) + SEGMENT <= room
        low, high = (middle, high) if fits else (low, middle)
    return low


def say_what_counts(sampling):
    """The sentence for a `Sampling` whose batch has more elements than kernels can count."""
    most = largest_batch(sampling, math.inf)
    advice = f"use --batch {most} or less" if most else "one has, too: use a smaller model"
    return f"{sampling.batch:,} images at a time have arrays of 2³¹ elements or more, which is too many; {advice}."


def say_what_fits(sampling, arena=None):
    """The sentence for a `Sampling` whose batch is too large for the memory of its GPU; arena: of its steps."""
    gpu = sampling.model.backend
    arenas = {gpu.arenas[0], arena or gpu.inference_arena}
    room = gpu.memory_info()[0] + sum(a.reserved_bytes - a.used_bytes for a in arenas)
    most = largest_batch(sampling, room)
    advice = f"use --batch {most} or less" if most else "nor does one image: use a smaller model or --precision fp16"
    return (f"{sampling.batch:,} images at a time do not fit into the {room >> 20:,} MiB that {gpu.device_name} has "
            f"left beside the model; {advice}.")
