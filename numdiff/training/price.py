"""The memory that a training step will take, and the number of its kernels, foreseen before one has
run: on a stand-in for the GPU, which launches nothing and hands out addresses as the arena does. A
process on the CPU takes about as much for the same arrays, besides what it has without them."""

import functools
import pathlib

import numpy as np

from ..device.arena import Arena
from ..device.gpu import CONTEXT
from ..device.loop_cache import has_loops
from ..device.planned import CARDS
from ..diffusion.memory import Measuring, bytes_for
from ..errors import NumdiffError
from ..sizes import sides
from . import kinds
from .build import build_trainer, count_parameters
from .compiling import PlannedRank
from .forecast import checkpoint_bytes, peak_memory
from .kinds.kind import imported
from .previews import draws


class Shapes:
    """As much of a dataset as a trainer asks for before its first step."""

    def __init__(self, options, channels):
        self.shape = options.batch, *sides(options.image_size), channels
        self.dtype = np.dtype(np.uint8 if channels in (1, 3) else np.float32)
        self.labels = np.zeros(options.batch, np.int32)


# Bytes that a process on the CPU takes in addition, as measured: libraries that draw and write
# pictures, and buffers of samples and of matrix products
BESIDES = 28 << 20
# …the copy of the weights and moments that a checkpoint is written from: the share of it that does
# not fit into memory that the step has released
COPIED = 0.5
# …Numba's compiler, where the cache has no loops
COMPILING = 37 << 20
# …and of LLVM's library, which runs the loops: the system counts pages once they are read
LLVM = 65 << 20
# Bytes of a GPU in addition to the context and the arenas' segments: kernels and graphs, as measured
BESIDES_ON_GPU = 10 << 20


class PlannedGpu(Measuring):
    """A `Measuring` device with the arenas of a GPU, which records nothing."""

    def __init__(self, gpu):
        super().__init__(gpu)
        self.arenas = []
        self.arena = self.new_arena()

    def new_arena(self):
        taken = []
        self.arenas.append(Arena(lambda nbytes: taken.append(nbytes) or sum(taken) - nbytes))
        return self.arenas[-1]

    @functools.cached_property
    def inference_arena(self):
        return self.new_arena()

    def capture(self, function):
        function()
        return lambda: None


def foreseen_step(options, sizes, backend, base, ranks=1):
    """(bytes of a rank at its peak, launches of a step), or (None, 0) where they cannot be foreseen:
    on a GPU of all that the process takes there, on a CPU (backend None) of its process, which has
    `base` of them so far (`base_memory`)."""
    if backend is not None and not hasattr(backend, "arenas"):
        return None, 0  # the emulator
    try:
        if backend is None:
            more = BESIDES + COPIED * state_bytes(options, sizes) + (not has_loops()) * COMPILING
            return int(base + more + foreseen_peak(options, sizes, CARDS[-1], ranks)), 0
        reserved, launches = foreseen_segments(options, sizes, backend, ranks)
        return CONTEXT + BESIDES_ON_GPU + reserved, launches
    except NumdiffError:  # what NumPy takes and no kernel does
        return None, 0


def base_memory():
    """Bytes that this process has had at most, with the pages of LLVM that it has yet to read."""
    return peak_memory() + max(0, LLVM - library_bytes("llvmlite"))


def library_bytes(name):
    """Bytes of a library's file that are in this process's memory; LLVM where the system does not
    say, so that nothing is added."""
    try:
        lines = pathlib.Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return LLVM
    found, counts = 0, False
    for line in lines:
        if "-" in line.partition(" ")[0]:  # an address range begins a mapping
            counts = name in line.rpartition("/")[2]
        elif counts and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found


def state_bytes(options, sizes):
    """Bytes of what a checkpoint is written from."""
    return checkpoint_bytes(options, count_parameters(options.model, sizes)[0])


def foreseen_peak(options, sizes, gpu, ranks=1):
    """Bytes of the arrays that one rank has at once in a step, with what it keeps between steps, on
    a `Gpu` or a `Card`; sizes: the options of the model's constructor."""
    trainer, device = planned_trainer(options, sizes, gpu, ranks)
    trainer.step_function.run()
    arena = trainer.step_function.arena
    return device.arena.used_bytes + arena.peak_bytes if arena else device.arena.peak_bytes


def foreseen_segments(options, sizes, gpu, ranks=1):
    """(bytes of the arenas' segments once a rank has run, recorded and drawn, launches of a step)."""
    trainer, device = planned_trainer(options, sizes, gpu, ranks)
    model, before = trainer.model, device.launches
    trainer.step_function.run()
    launches = device.launches - before
    # recorded, the step allocates again, from segments that are now there
    trainer.step_function.run()
    more = 0
    if draws(options, model):
        previews = imported(kinds.get(options.model).previews)(trainer, options)
        if previews.measures:
            with device.within(device.inference_arena):
                previews.rehearse()
        else:
            with trainer.ema_weights():
                sampling = previews.make_sampling()
                more = bytes_for(sampling, model, sampling.batch, device.arenas[:2])
    return sum(arena.reserved_bytes for arena in device.arenas) + more, launches


def planned_trainer(options, sizes, gpu, ranks):
    """(a trainer on a `PlannedGpu`, that)."""
    device, channels = PlannedGpu(gpu), sizes["in_channels"]
    model, data = (
        kinds.get(options.model).model_class(**sizes, device=device, seed=None),
        Shapes(options, channels),
    )
    options = options.changed(init=None, flip=options.flip and data.dtype == np.uint8)
    return build_trainer(options, model, data, communicator=PlannedRank(ranks)), device


def with_and_without(options, sizes, gpu):
    """The peaks of a step that recomputes as `--recompute` says, and of one that recomputes
    nothing, in MiB."""
    return [
        foreseen_peak(options.changed(recompute=part), sizes, gpu) / 2**20
        for part in (options.recompute, "no")
    ]
