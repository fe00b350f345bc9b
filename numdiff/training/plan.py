"""The kernels of a training step and of its previews, known before the first step, and compiled side by side.

    with compiling(lambda card: plan_run(options, dataset, card, communicator), communicator, echo):
        …build the model…                       meanwhile
    …the first step…                            launches what is in the cache

A twin of the model and of its trainer is built on a stand-in for the GPU (device/planned.py), where one step and one
batch of samples are gone through without anything being computed. Ranks of one host share the work: the first of them
does it for all, on the cores of all, and the others wait.
"""
import contextlib
import dataclasses
import sys
import time

import numpy as np

from .. import progress
from ..device import get_gpu, why_no_gpu
from ..device.compile_ahead import CompileAhead
from ..device.kernel_cache import KernelCache
from ..device.planned import card_of, cards_with, collect
from ..diffusion import Sampling
from ..diffusion.sampling import PIXEL_CHANNELS
from ..errors import NumdiffError, UsageError
from ..kernels.peer_reduce import MAX_RANKS
from ..progress_bar import progress_bar
from .distributed import Alone, current
from .exchange import NoExchange, PeerExchange
from .options import resolve

EVERY = 5.0  # seconds between lines where there is no terminal


def aside(line):
    """Say something that is no result."""
    print(line, file=sys.stderr, flush=True)


class PlannedRank(Alone):
    """The communicator of a trainer that is only planned: one rank of `size`."""

    def __init__(self, size=1, hosts=1, transport="auto"):
        self.size, self.hosts, self.transport = size, hosts, transport

    def exchange(self, parameters):
        return NoExchange()

    def build(self, function, *arguments):
        """Nothing: what ranks compare is compared by the real ones."""


def plan_trainer(trainer, communicator):
    """Launch what a training step does, on the stand-in on which this trainer was built."""
    step = trainer.step_function
    step.run()
    if (communicator.size > 1 and communicator.hosts == 1 and communicator.size <= MAX_RANKS
            and communicator.transport in ("auto", "peer")):
        PeerExchange.planned(trainer.model.parameters, communicator.size)


def plan_sampling(model, *how, **more):
    """[Key] by card: of the kernels that sampling from this model launches; how, more: as `Sampling` takes."""
    return lambda card: collect(lambda device: Sampling(twin(model, device), *how, **more).rehearse(), card)


def plan_run(options, dataset, card, communicator=None):
    """[Key] of the kernels of a run, its previews included, on a card. communicator: of the ranks that train (or what
    has its size, hosts and transport)."""
    communicator = communicator or PlannedRank()

    def work(device):
        trainer = planned_trainer(options, dataset, device, communicator)
        plan_trainer(trainer, communicator)
        plan_previews(trainer, options, communicator.size)

    return collect(work, card)


def plan_previews(trainer, options, ranks):
    """Launch what the pictures of a run do, whichever of its ranks makes them."""
    from .previews import Previews
    from .run import draws
    parts = {}  # how many images -> a rank that makes so many
    for rank in range(ranks if draws(options, trainer.model) else 0):
        trainer.communicator.rank = rank
        previews = Previews(trainer, options)
        parts.setdefault(previews.stop - previews.first, previews)
    for previews in parts.values():
        previews.rehearse()


def planned_trainer(options, dataset, device, communicator):
    """The trainer of a run, on a stand-in for its GPU."""
    from .build import build_model, build_trainer
    options = dataclasses.replace(options, device=device)
    classes = len(dataset.classes) if options.class_cond else None
    ranks = PlannedRank(communicator.size, communicator.hosts, communicator.transport)
    return build_trainer(options, build_model(options, dataset.shape[3], classes), dataset, communicator=ranks)


def twin(model, device):
    """The same model on a stand-in for its GPU: its shapes alone."""
    other = type(model)(**model.options, device=device)
    other.diffusion, other.tf32 = model.diffusion, model.tf32
    if model.dtype == np.float16:
        other.compute_in_half()
    return other


def plan_of(trainer, card):
    """[Key] of the kernels of a trainer's step on a card."""
    communicator = trainer.communicator

    def work(device):
        ranks = PlannedRank(communicator.size, communicator.hosts, communicator.transport)
        plan_trainer(type(trainer)(twin(trainer.model, device), trainer.dataset, **trainer.settings,
                                   communicator=ranks), communicator)

    return collect(work, card)


class Shown:
    """Tells how many kernels are left: a bar on a terminal, else a line now and then."""

    def __init__(self, count, workers, echo):
        self.count, self.echo, self.said = count, echo, time.perf_counter()
        self.started, self.kernels = self.said, f"{count} kernel{'s' * (count > 1)}"
        self.bar = progress_bar(count, "compiling", "kernel")
        if self.bar.disable:
            echo(f"compiling {self.kernels} in {workers} process{'es' * (workers > 1)}, once for this machine")

    def __call__(self, left):
        now = time.perf_counter()
        self.bar.to(self.count - left)
        if self.bar.disable and left and now - self.said >= EVERY:
            self.echo(f"compiling {self.kernels}, {left} left")
            self.said = now

    def done(self, faults):
        self.bar.close()
        self.echo(f"compiled  {self.kernels} in {time.perf_counter() - self.started:.1f} s")
        for key, why in faults.items():
            self.echo(f"{key.name} could not be compiled ahead ({why}); it is compiled when it is launched.")


def compile_ahead(keys, cache, echo=print, on=None):
    """Compile the kernels that are not in the cache, and show how it goes; returns {key: why} of those that failed."""
    compilation = CompileAhead(keys, cache, on=on)
    return finish(compilation, echo)


def finish(compilation, echo):
    """Wait for a `CompileAhead`, and show how it goes."""
    if not compilation.wanted:
        return {}
    shown = Shown(len(compilation.wanted), compilation.workers, echo)
    with contextlib.closing(shown.bar), progress.compiling():
        faults = compilation.finish(shown, 1.0)
    shown.done(faults)
    return faults


@contextlib.contextmanager
def compiling(plan, communicator=None, echo=aside):
    """Context: kernels are compiled beside what is done within it, and all are there at its end. Collective.

    plan(card): [Key] of the kernels that are wanted on a card. Does nothing where this process computes on no GPU.
    """
    communicator = communicator or current()
    gpu = get_gpu()
    cards = communicator.on_host(card_of(gpu))
    leads = communicator.local_rank == 0
    compilations = communicator.build(lambda: begin(plan, cards, gpu, communicator) if leads else [])
    try:
        yield
        communicator.build(lambda: [finish(compilation, echo) for compilation in compilations])
    finally:
        for compilation in compilations:
            compilation.close()
    gpu.cache.more = communicator.on_host(gpu.cache.more)[0]


class Described:
    """A stand-in for a dataset that is not here: its shape and classes alone. Other than one or three channels are
    latents'."""

    def __init__(self, size, channels, classes=None):
        self.shape, self.channels, self.classes = (1, size, size, channels), channels, range(classes or 0)
        self.labels = None if classes is None else np.zeros(1, np.int32)
        self.dtype = np.dtype(np.uint8 if channels in PIXEL_CHANNELS else np.float32)


def compile_run(given, capability=None, ranks=1, echo=print):
    """Compile the kernels of the run that these settings describe, on this machine for another one or for its own.

    given: as `resolve` takes; capability: "9.0", of the GPUs that will train (None: that of the GPU here); ranks: how
    many of them. The cache's folder must be writable. Raises `NumdiffError` where a kernel cannot be compiled.
    """
    from .build import build_dataset
    if not capability and (reason := why_no_gpu()):
        raise UsageError(f"there is no GPU here to compile for ({reason}): say for which, as in --capability 9.0.")
    cards = cards_with(parse_capability(capability)) if capability else [card_of(get_gpu())]
    options = resolve(given, cards[0].capability)
    if options.channels and (options.num_classes or not options.class_cond):
        dataset = Described(options.image_size, options.channels, options.num_classes)
        options.flip = options.flip and dataset.dtype == np.uint8
    else:
        dataset = build_dataset(options)
    keys = list(dict.fromkeys(key for card in cards for key in plan_run(options, dataset, card, PlannedRank(ranks))))
    cache = KernelCache(cards[0].capability)
    with contextlib.closing(CompileAhead(keys, cache, complain=refuse)) as compilation:
        faults = finish(compilation, echo)
    if faults:
        key, why = next(iter(faults.items()))
        raise NumdiffError(f"{len(faults)} of {len(keys)} kernels could not be compiled, {key.name} for one: {why}.")
    echo(f"{len(keys)} kernels for compute capability {'.'.join(map(str, cache.capability))} are in {cache.folder}"
         f"{'' if compilation.wanted else ', all of them already'}")


def parse_capability(text):
    """"9.0" as (9, 0)."""
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal() and len(text) < 9):
        raise UsageError(f"--capability {text} is no compute capability; give one as 9.0.")
    return int(major), int(minor)


def refuse(complaint):
    """A cache that cannot be written is no place to fill."""
    raise NumdiffError(f"{complaint.split(': kernels are')[0]}; set NUMDIFF_CACHE_DIR to a folder that can be.")


def compile_for(model, plan, communicator=None, echo=aside):
    """Compile the kernels that plan(card) gives, where the model is on a GPU. Collective."""
    if hasattr(model.backend, "cache"):
        with compiling(plan, communicator or current(), echo):
            pass


def begin(plan, cards, gpu, communicator):
    """[CompileAhead] for the cards of this host's ranks, which mostly are alike."""
    caches, found = {gpu.cache.capability: gpu.cache}, []
    for capability in dict.fromkeys(card.capability for card in cards):
        alike = dict.fromkeys(card for card in cards if card.capability == capability)
        keys = dict.fromkeys(key for card in alike for key in plan(card))
        cache = caches.get(capability) or type(gpu.cache)(capability)
        found.append(CompileAhead(keys, cache, on=communicator.host_cores))
    return found
