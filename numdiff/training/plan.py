"""The kernels of a training step and of its previews, found before the first step; compiling.py
compiles them.

    with compiling(lambda card: plan_run(options, dataset, card, communicator), communicator, echo):
        …build the model…                       meanwhile
    …the first step…                            launches what is in the cache

    compile_run(given, capability="9.0")        for another machine, which has such a GPU
"""

import contextlib

import numpy as np

from ..device import get_gpu, why_no_gpu
from ..device.compile_ahead import CompileAhead
from ..device.kernel_cache import KernelCache
from ..device.planned import card_of, cards_with, collect
from ..diffusion.sampling import PIXEL_CHANNELS
from ..errors import NumdiffError, UsageError
from ..sizes import sides
from . import kinds
from .build import build_dataset, build_model, build_trainer
from .compiling import PlannedRank, finish, plan_trainer, planned_rank
from .kinds.kind import imported
from .options import resolve
from .previews import draws


def plan_run(options, dataset, card, communicator=None):
    """[Key] of the kernels of a run, its previews included, on a card. communicator: of the ranks
    that train (or an object with its size, hosts and transport)."""
    communicator = communicator or PlannedRank()

    def work(device):
        trainer = planned_trainer(options, dataset, device, communicator)
        plan_trainer(trainer, communicator)
        if trainer.shares_update and options.optimizer == "muon":  # each rank has other matrices
            for rank in range(1, communicator.size):
                plan_trainer(
                    planned_trainer(options, dataset, device, communicator, rank), communicator
                )
        plan_previews(trainer, options, communicator.size)

    return collect(work, card)


def plan_previews(trainer, options, ranks):
    """Launch the kernels of a run's previews, whichever of its ranks makes them."""
    parts = {}  # number of images -> a rank that makes that many
    for rank in range(ranks if draws(options, trainer.model) else 0):
        trainer.communicator.rank = rank
        previews = imported(kinds.get(options.model).previews)(trainer, options)
        parts.setdefault(previews.stop - previews.first, previews)
    for previews in parts.values():
        previews.rehearse()


def planned_trainer(options, dataset, device, communicator, rank=0):
    """The trainer of a rank of a run, on a stand-in for its GPU."""
    options = options.changed(device=device, init=None)
    classes = len(dataset.classes) if options.class_cond else None
    ranks = planned_rank(communicator)
    ranks.rank = rank
    return build_trainer(
        options, build_model(options, dataset.shape[3], classes), dataset, communicator=ranks
    )


class Described:
    """A stand-in for an absent dataset: only its shape and classes. Other channel counts than one
    or three mean latents."""

    def __init__(self, size, channels, classes=None):
        self.shape, self.channels, self.classes = (
            (1, *sides(size), channels),
            channels,
            range(classes or 0),
        )
        self.labels = None if classes is None else np.zeros(1, np.int32)
        self.dtype = np.dtype(np.uint8 if channels in PIXEL_CHANNELS else np.float32)


def compile_run(given, capability=None, ranks=1, echo=print):
    """Compile the kernels of the run that these settings describe, on this machine for another one
    or for its own.

    given: as `resolve` takes; capability: "9.0", of the GPUs that will train (None: that of the GPU
    here); ranks: how many of them. The cache's folder must be writable. Raises `NumdiffError` where
    a kernel cannot be compiled.
    """
    if given.get("device") in ("cpu", "emulator"):
        raise UsageError(
            f"--device {given['device']} runs no compiled kernels: leave it out, to compile those of "
            "a GPU."
        )
    if not capability and (reason := why_no_gpu()):
        raise UsageError(
            f"there is no GPU here to compile for ({reason}): say for which one, as in --capability 9.0."
        )
    cards = cards_with(parse_capability(capability)) if capability else [card_of(get_gpu())]
    options = resolve(given, cards[0].capability)
    if options.channels and (options.num_classes or not options.class_cond):
        dataset = Described(options.image_size, options.channels, options.num_classes)
        options.flip = options.flip and dataset.dtype == np.uint8
    else:
        dataset = build_dataset(options)
    keys = list(
        dict.fromkeys(
            key for card in cards for key in plan_run(options, dataset, card, PlannedRank(ranks))
        )
    )
    cache = KernelCache(cards[0].compiled_for)
    with contextlib.closing(CompileAhead(keys, cache, complain=refuse)) as compilation:
        faults = finish(compilation, echo)
    if faults:
        key, why = next(iter(faults.items()))
        raise NumdiffError(
            f"{len(faults)} of {len(keys)} kernels could not be compiled, such as {key.name}: {why}."
        )
    echo(
        f"{len(keys)} kernels for compute capability {'.'.join(map(str, cache.capability[:2]))} are in {cache.folder}"
        f"{'' if compilation.wanted else ', all of them already'}"
    )


def parse_capability(text):
    """ "9.0" as (9, 0)."""
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal() and len(text) < 9):
        raise UsageError(f"--capability {text} is not a compute capability; give one such as 9.0.")
    return int(major), int(minor)


def refuse(complaint):
    """Called where the cache cannot be used: raises, as there is nothing to fill."""
    raise NumdiffError(
        f"{complaint.split(': kernels are')[0]}; set NUMDIFF_CACHE_DIR to a folder of your own."
    )
