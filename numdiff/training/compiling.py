"""Kernels compiled in parallel before they are launched, and which kernels a trainer's step and
sampling need.

    with compiling(lambda card: plan_of(trainer, card), communicator, echo):
        …prepare the data…                      meanwhile
    …the first step…                            launches what is in the cache

A twin of what is going to run is built on a stand-in for the GPU (device/planned.py), where it runs
without computing anything. On each host the first rank compiles for all, on the cores of all, and
the others wait. plan.py has the kernels of a whole run.
"""

import contextlib
import dataclasses
import sys
import time

import numpy as np

from .. import progress
from ..device import get_gpu, zeros
from ..device.compile_ahead import CompileAhead
from ..device.planned import card_of, collect
from ..diffusion import Sampling
from ..distributed.communicator import Alone, current
from ..distributed.exchange_base import Mail, NoExchange
from ..errors import TooManyElementsError, UsageError
from ..extensions import available
from ..progress_bar import progress_bar
from .memory import say_what_fits

EVERY = 5.0  # seconds between lines where there is no terminal


def aside(line):
    """Print a line that is not a result."""
    print(line, file=sys.stderr, flush=True)


class PlannedRank(Alone):
    """The communicator of a trainer that is only planned: of one rank among `size`."""

    def __init__(self, size=1, hosts=1, transport="auto"):
        self.size, self.hosts, self.transport = size, hosts, transport

    def exchange(self, parameters, partition=None):
        return NoExchange()

    def gather_parts(self, part, bounds, everywhere=True):
        """An array of the right shape."""
        return np.zeros(bounds[-1], part.dtype)

    def build(self, function, *arguments):
        """Does nothing: comparisons are left to the real ranks."""


def planned_rank(communicator):
    """A `PlannedRank` of a job like the communicator's."""
    return PlannedRank(communicator.size, communicator.hosts, communicator.transport)


def plan_trainer(trainer, communicator):
    """Launch the kernels of a training step on the stand-in on which this trainer was built."""
    try:
        trainer.step_function.run()
    except TooManyElementsError:
        raise UsageError(say_what_fits(trainer, trainer.communicator)) from None
    if communicator.size > 1:
        parameters = trainer.model.parameters
        Mail(parameters, 0, communicator.size, parameters.grad).write(
            zeros(1, np.float32, parameters.grad)
        )
        partition = trainer.partition if trainer.shares_update else None
        for name, transport in available("transport").items():
            if communicator.transport in ("auto", name):
                transport.plan(communicator, parameters, partition)


def plan_sampling(model, config):
    """A function: card -> [Key] of the kernels that sampling from this model launches; config: a
    `SamplingConfig`."""

    def work(device):
        guide = config.guide and twin(config.guide, device)
        Sampling(twin(model, device), dataclasses.replace(config, guide=guide)).rehearse()

    return lambda card: collect(work, card)


def twin(model, device):
    """The same model on a stand-in for its GPU: only its shapes."""
    other = type(model)(**model.options, device=device)
    other.diffusion = model.diffusion
    other.compute_like(model)
    return other


def plan_of(trainer, card):
    """[Key] of the kernels of a trainer's step on a card."""
    communicator = trainer.communicator

    def work(device):
        model = twin(trainer.model, device)
        plan_trainer(trainer.twin(model, planned_rank(communicator)), communicator)

    return collect(work, card)


class CompilationProgress:
    """Shows how many kernels are left: by a bar on a terminal, else by a line now and then."""

    def __init__(self, count, workers, echo):
        self.count, self.echo, self.said = count, echo, time.perf_counter()
        self.started, self.kernels = self.said, f"{count} kernel{'s' * (count > 1)}"
        self.bar = progress_bar(count, "compiling", "kernel")
        if self.bar.disable:
            echo(
                f"compiling {self.kernels} in {workers} process{'es' * (workers > 1)}, once for this machine"
            )

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
            self.echo(
                f"{key.name} could not be compiled ahead ({why}); it is compiled when it is launched."
            )


def compile_ahead(keys, cache, echo=print, on=None):
    """Compile the kernels that are not in the cache, and show how it goes; returns {key: why} of
    those that failed."""
    compilation = CompileAhead(keys, cache, on=on)
    return finish(compilation, echo)


def finish(compilation, echo):
    """Wait for a `CompileAhead`, and show how it goes."""
    if not compilation.wanted:
        return {}
    shown = CompilationProgress(len(compilation.wanted), compilation.workers, echo)
    with contextlib.closing(shown.bar), progress.compiling():
        faults = compilation.finish(shown, 1.0)
    shown.done(faults)
    return faults


@contextlib.contextmanager
def compiling(plan, communicator=None, echo=aside):
    """Context: kernels are compiled while its body runs, and all are ready at its end. Collective.

    plan(card): [Key] of the kernels that are wanted on a card. Does nothing where this process
    computes on no GPU.
    """
    communicator = communicator or current()
    gpu = get_gpu()
    cards = communicator.on_host(card_of(gpu))
    leads = communicator.local_rank == 0
    compilations = communicator.build(
        lambda: begin(plan, cards, gpu, communicator) if leads else []
    )
    try:
        yield
        communicator.build(lambda: [finish(compilation, echo) for compilation in compilations])
    finally:
        for compilation in compilations:
            compilation.close()
    gpu.cache.more = communicator.on_host(gpu.cache.more)[0]


def compile_for(model, plan, communicator=None, echo=aside):
    """Compile the kernels that plan(card) gives, where the model is on a GPU. Collective."""
    if hasattr(model.backend, "cache"):
        with compiling(plan, communicator or current(), echo):
            pass


def begin(plan, cards, gpu, communicator):
    """[CompileAhead] for the cards of this host's ranks, which are mostly alike."""
    caches, found = {gpu.cache.capability: gpu.cache}, []
    for capability in dict.fromkeys(card.compiled_for for card in cards):
        alike = dict.fromkeys(card for card in cards if card.compiled_for == capability)
        keys = dict.fromkeys(key for card in alike for key in plan(card))
        cache = caches.get(capability) or type(gpu.cache)(capability)
        found.append(CompileAhead(keys, cache, on=communicator.host_cores))
    return found
