"""How many images fit into the memory of a GPU at a time: computed when a batch did not fit."""

import contextlib
import math

import numpy as np

from ..device.arena import SEGMENT, Arena
from ..device.limits import check_grid
from ..device.ptx import PtxDevice
from ..errors import TooManyElementsError


class Measuring(PtxDevice):
    """A stand-in for a GPU that launches nothing and hands out addresses as its arena would.
    Attributes arena; launches: how many kernels it was given."""

    plans = True
    arenas = (None,)  # what is to last (device.lasting) is not counted

    def __init__(self, gpu):
        super().__init__()
        self.capability, self.multiprocessors, self.device_name = (
            gpu.capability,
            gpu.multiprocessors,
            gpu.device_name,
        )
        self.shared_limit = gpu.shared_limit
        self.arena, self.launches = None, 0

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

    def launch(self, kernel, grid, *_):
        check_grid(grid)
        self.launches += 1


def measuring_twin(model, device=None):
    """The same model on a `Measuring` device."""
    twin = type(model)(**model.options, device=device or Measuring(model.backend), seed=None)
    twin.diffusion = model.diffusion
    twin.compute_like(model)
    return twin


def bytes_for(sampling, twin, batch, arenas=()):
    """Bytes that batches of this many images of a `Sampling` take from a GPU, besides what it has
    taken already.

    arenas: the two that its arrays come from, those of the steps from the second; what is free
    there is made use of
    """
    device, taken = twin.backend, []

    def take(nbytes):
        taken.append(nbytes)
        return (1 << 60) + sum(taken) - nbytes  # far from all real addresses

    first, second = [arena.twin(take) for arena in arenas] or (Arena(take), Arena(take))
    guide = sampling.guide and measuring_twin(sampling.guide, device)
    with device.within(first):
        run = sampling.new_run(batch, twin, guide)
        noise = run.noise(np.zeros(batch, np.uint32))  # which is there until the images are done
        run.start(noise)
        with device.within(second):
            run.rehearse()
        sampling.finished(run.kept[0])
    return sum(taken)


def largest_batch(sampling, room, arenas=()):
    """The largest batch for which `room` bytes suffice, to within 1/64; 0 if not even one image
    fits. arenas: as of `bytes_for`."""
    twin, low, high = measuring_twin(sampling.model), 0, sampling.batch
    while high - low > max(1, low // 64):
        middle, fits = (low + high) // 2, False
        with contextlib.suppress(TooManyElementsError):
            fits = bytes_for(sampling, twin, middle, arenas) + SEGMENT <= room
        low, high = (middle, high) if fits else (low, middle)
    return low


def say_what_counts(sampling):
    """The sentence for a `Sampling` whose batch has more elements, or blocks, than kernels count."""
    most = largest_batch(sampling, math.inf)
    advice = f"use --batch {most} or less" if most else "one is, too: use a smaller model"
    return f"{sampling.batch:,} images at a time are more than kernels count in 32 bits; {advice}."


def say_what_fits(sampling, arena=None):
    """The sentence for a `Sampling` whose batch is too large for the memory of its GPU; arena: of
    its steps."""
    gpu = sampling.model.backend
    arenas, room = (gpu.arenas[0], arena or gpu.inference_arena), gpu.memory_info()[0]
    most = largest_batch(sampling, room, arenas)
    room += sum(a.reserved_bytes - a.used_bytes for a in set(arenas))
    advice = (
        f"use --batch {most} or less"
        if most
        else "nor does one image: use a smaller model or --precision fp16"
    )
    return (
        f"{sampling.batch:,} images at a time do not fit into the {room >> 20:,} MiB that {gpu.device_name} has "
        f"left after the model; {advice}."
    )
