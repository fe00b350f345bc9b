"""The trainer: the loop over steps, and nothing else; for scripts of your own (the README has one
of 30 lines).

`run.py` puts a run folder, reports, pictures and checkpoints around it.
"""

import dataclasses
import functools
import itertools
import math
import numbers
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import extensions
from ..configs import TrainerConfig
from ..configuration import configured_by
from ..data.fingerprint import fingerprint
from ..data.loader import Loader
from ..device import copy_into, download, fill_zero
from ..diffusion.process import make_diffusion
from ..distributed.communicator import current
from ..errors import NumdiffError, OutOfMemoryError, TooManyElementsError, UsageError, shown
from ..nn import AdamW
from ..nn.flops import step_flops
from ..nn.model import Model
from ..nn.optimizer import OF_PRECISION, PATIENCE, LossScale
from ..nn.partition import Partition
from ..progress import progress
from ..settings import COMMON, config_class, configure, say, shared
from ..sizes import image_shape
from .compiling import compile_for, plan_of, planned_rank
from .initial import start_from
from .memory import room_of, say_what_fits
from .precision import SCALES_LOSS, compute_in, precision_on
from .step import RING, TrainingStep

if TYPE_CHECKING:
    from ..data.dataset import Dataset
    from ..diffusion import Diffusion
    from ..diffusion.reconstruction import Reconstruction

# most steps between two reports, so that the ring never overwrites an unreported step
UNREPORTED = RING // 2


@dataclass
class StepReport:
    """What one step gave: its number, mean loss, global gradient norm (before clipping) and
    learning rate.

    In float16 also the loss scale after it and how many steps were skipped so far; the norm of a
    skipped one is NaN.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    loss_scale: float = 1.0
    skipped: int = 0


def check_objects(model, dataset):
    """Raise a `UsageError` for anything but a model and a dataset."""
    if not isinstance(model, Model):
        raise UsageError(
            f"a Trainer takes a model, such as a numdiff.nn.UNet, and not {shown(model)}."
        )
    if len(getattr(dataset, "shape", ())) != 4 or not hasattr(dataset, "labels"):
        raise UsageError(
            f"a Trainer takes a dataset, as numdiff.data.open_dataset gives it, and not {shown(dataset)}."
        )


def check_rate(config):
    """Raise a `UsageError` for a schedule of the learning rate, or an average, that cannot be."""
    if config.total_steps < 0 or config.cosine and not config.total_steps:
        raise UsageError(
            f"total_steps {say(config.total_steps)} must be at least {int(config.cosine)}"
            f"{', to end a cosine' * config.cosine}."
        )
    if config.ema_decay is not None and config.ema_halflife:
        raise UsageError("ema_decay and ema_halflife exclude each other: give one of them.")


def check_images(model, dataset):
    """Raise a `UsageError` for a dataset whose images or labels the model does not take."""
    shape = image_shape(model)
    if tuple(dataset.shape[1:]) != shape:
        raise UsageError(
            "the dataset's images are {}×{}×{}, and the model takes {}×{}×{}: open the dataset with "
            "the model's image_size, or build the model for it.".format(*dataset.shape[1:], *shape)
        )
    classes = model.num_classes
    if classes is not None and dataset.labels is None:
        raise UsageError(
            "the model has classes and the dataset has no labels: build the model without "
            "num_classes, or import the images with labels."
        )
    if classes is not None and not (
        0 <= np.min(dataset.labels) and np.max(dataset.labels) < classes
    ):
        raise UsageError(
            f"the dataset's labels go from {np.min(dataset.labels)} to {np.max(dataset.labels)}, and "
            f"the model has {classes} classes, from 0: build it with as many as there are."
        )
    if model.out_channels != model.in_channels * (2 if model.learn_sigma else 1):
        raise UsageError(
            f"the model takes {model.in_channels} channels and gives {model.out_channels}: to be "
            "trained here it must give as many, or with learn_sigma twice as many; build it without "
            "out_channels."
        )


def check_denoiser(model):
    """Raise a `UsageError` for a model that removes no noise, such as an autoencoder."""
    if hasattr(model, "moments"):
        raise UsageError(
            "an Autoencoder is not trained as a diffusion model: give objective=Reconstruction(), of "
            "numdiff.diffusion.reconstruction."
        )


def optimizer_of(name):
    """The module of an optimizer that an extension adds: `make`, `atoms` and `describe`; None of
    AdamW."""
    return None if name == "adamw" else extensions.find("optimizer", name, f"--optimizer {name}")


class NonFiniteError(NumdiffError):
    """The loss or the gradient is no longer finite; the weights are those before that step."""


@configured_by(config_class("trainer"))
class Trainer:
    """Trains a model on a dataset.

    model: UNet or DiT; dataset: a `numdiff.data` Dataset of the model's image size
    diffusion: Diffusion options, a dict of steps, schedule, prediction, timestep_scale, vlb_weight
    objective: what to minimise in place of a diffusion's loss: a `Reconstruction`, of an autoencoder
    communicator: of the ranks that train together (default: what `distributed.connect` gave, else a
        single process). All must make the same Trainer and call the same methods; all use rank 0's
        weights
    cosine, total_steps: whether the learning rate falls to zero, and when
    ema_halflife, ema_decay: one of them; the decay, per step, is 0.5 ** (batch / ema_halflife) On
    the CPU tf32 computes as fp32; fp16 needs a GPU, fp8 one from 8.9 on. bf16 needs no loss scale.
    Neither eager nor recompute changes a bit.
    init: weights that the model starts from, a path as of `--init`; rows of classes by their names
    in the dataset Attributes origin: what was taken from `init`, or None; step: optimiser steps
    done; config: the settings, checked; model, optimizer, diffusion.
    """

    def __init__(
        self,
        model: Model,
        dataset: "Dataset",
        config: TrainerConfig | None = None,
        *,
        diffusion: "dict | Diffusion | None" = None,
        objective: "Reconstruction | None" = None,
        communicator: Any = None,
        **settings: Any,
    ):
        self.config = s = configure("trainer", config, settings, "Trainer")
        check_objects(model, dataset)
        check_rate(s)
        check_images(model, dataset)
        self.communicator = communicator or current()
        part, microbatch = split_batch(
            s.batch,
            s.microbatch,
            **ranks_of(self.communicator, s.shard_update, model.backend is not None),
        )
        shares = shares_update(s.shard_update, self.communicator, model.backend, s.optimizer)
        self.model, self.dataset, self.seed = model, dataset, s.seed
        if self.communicator.size > 1:
            self.communicator.check_data(dataset, self.communicator.build(lambda: self.fingerprint))
        self._given = {"diffusion": diffusion, "objective": objective}
        self.diffusion = None
        if objective is None:
            check_denoiser(model)
            self.diffusion = make_diffusion(diffusion, model.backend)
            model.diffusion = self.diffusion.options
        elif hasattr(objective, "check"):
            objective.check(model, dataset)
        else:
            raise UsageError(
                f"objective must be a Reconstruction, and not {shown(objective)}: give one, or a "
                "diffusion."
            )
        self.objective = objective or self.diffusion
        self.origin = None
        if s.init is not None:
            self.origin = self.communicator.first(
                start_from, model, dataset, s.init, s.init_weights, self.objective.options
            )
        self._share_weights()
        self.precision, scale = precision_on(s.precision, model.backend), None
        model.parameters.freeze(s.freeze)
        for adapter in extensions.active("adapter", s):
            self.origin = adapter.attach(model, s, self.origin)
        if s.recompute != "no":
            model.recompute_blocks(s.recompute)
        compute_in(model, self.precision, s.fp8_promotion)
        if self.precision in SCALES_LOSS:
            scale = LossScale(
                model.parameters.data, s.loss_scale, s.loss_scale_rule, s.loss_scale_interval
            )
        self.partition = self._make_partition(shares) if self.communicator.size > 1 else None
        self.optimizer = self._make_optimizer(loss_scale=scale, partition=self.partition)
        self.exchange = self.communicator.exchange(model.parameters, self.partition)
        if self.partition:
            self.partition.exchange = self.exchange
        if model.parameters.float8 is not None:
            model.parameters.float8.of_ranks = self.exchange.largest
        self.step_function = TrainingStep(
            model,
            self.objective,
            self.optimizer,
            part,
            microbatch,
            s.flip,
            seed=s.seed,
            capture=not s.eager,
            part=(self.communicator.rank, self.communicator.size),
            exchange=self.exchange,
            dtype=getattr(dataset, "dtype", np.uint8),
        )
        self.batch = s.batch
        self.step = 0  # optimiser steps done
        # whether the first `run` compiles kernels in parallel
        self.compiles_ahead = hasattr(model.backend, "cache")
        self._loader = None

    def _make_partition(self, shares):
        parameters, found = self.model.parameters, optimizer_of(self.config.optimizer)
        atoms = found.atoms(self.model) if found else ()
        try:
            return Partition(parameters, self.communicator, shares, atoms)
        # a rank would have nothing, as where a few large matrices are all there is
        except UsageError:
            if self.config.shard_update == "yes":
                raise
            return Partition(parameters, self.communicator, False, atoms)

    def _make_optimizer(self, **more):
        s, parameters = self.config, self.model.parameters
        ema_decay = s.ema_decay
        if ema_decay is None:
            ema_decay = 0.5 ** (s.batch / s.ema_halflife) if s.ema_halflife else 0.0
        config = shared("trainer", s.optimizer, s, ema_decay=ema_decay)
        found = optimizer_of(s.optimizer)
        return (
            found.make(self.model, config, **more) if found else AdamW(parameters, config, **more)
        )

    def twin(self, model: Model, communicator: Any, **changed: Any) -> "Trainer":
        """A trainer of the same dataset with the same settings, but for those `changed`, which trains
        another model and starts from no file: for planning."""
        config = dataclasses.replace(self.config, init=None, **changed)
        return type(self)(model, self.dataset, config, **self._given, communicator=communicator)

    def __getstate__(self):
        raise UsageError(
            "a Trainer holds a captured step and a loader's thread: copy or pickle its model and "
            "optimizer together, or keep what state() gives."
        )

    @functools.cached_property
    def fingerprint(self):
        """The dataset's identity: `numdiff.data.fingerprint`."""
        return fingerprint(self.dataset)

    @property
    def flops_per_step(self) -> int:
        """FLOPs of one step: the forward pass, and twice as many for the backward pass, less what
        is frozen."""
        parameters = dict(self.model.named_parameters())
        frozen = {name for name, parameter in parameters.items() if parameter.frozen}
        return step_flops(self.model.products(), parameters, frozen) * self.batch

    def run(
        self, steps: int, report_every: int = UNREPORTED, stop: Callable[[], object] | None = None
    ) -> Iterator[list[StepReport]]:
        """Train `steps` more steps; yields a list of `StepReport`s, one for each step, up to every
        multiple of `report_every` and up to the last.

        On a GPU a list comes a few steps late, as only the end waits for the device. stop: called
        after each step; True, on any rank, ends the run there. Raises `NonFiniteError` at the
        report of a step whose loss or gradient was not finite; no later step has changed the
        weights then.
        """
        for name, value in (("steps", steps), ("report_every", report_every)):
            if (
                isinstance(value, bool)
                or not isinstance(value, numbers.Integral)
                or value < (name == "report_every")
            ):
                raise UsageError(
                    f"{name} must be a whole number of at least {int(name == 'report_every')}, and not "
                    f"{shown(value)}."
                )
        if self.compiles_ahead:
            self._compile_ahead()
        step, last = self.step_function, self.step + steps
        reported = asked = self.step
        self._open_loader()
        while self.step < last:
            step.load(*next(self._loader))
            self._run_step(step)
            self.step += 1
            progress.doing = f"after step {self.step}"
            if stop is not None and self.communicator.largest(int(stop())):
                last = self.step
            due = (
                self.step == last
                or self.step % report_every == 0
                or self.step - asked >= UNREPORTED
            )
            if asked > reported and (due or self.step - asked >= step.lag):
                yield self._reports(reported, asked)
                reported = asked
            if due:
                step.ask()
                asked = self.step
                if step.lag == 0 or self.step == last:
                    yield self._reports(reported, asked)
                    reported = asked

    def _run_step(self, step):
        try:
            step.run()
            return
        except (OutOfMemoryError, TooManyElementsError):
            if not hasattr(self.model.backend, "memory_info"):
                raise
        # all is free here
        raise OutOfMemoryError(say_what_fits(self, planned_rank(self.communicator), room_of(self)))

    def _compile_ahead(self):
        """Compile the kernels of a step into the cache on all cores, before the first step launches
        them one by one."""
        self.compiles_ahead = False
        compile_for(self.model, lambda card: plan_of(self, card), self.communicator)

    def _reports(self, first, stop):
        rows, first_bad_step, status = self.step_function.answer(first, stop)
        self.exchange.check(status)
        self._gather_masters()  # the receiver of the reports may read the weights
        reports = [
            StepReport(first + i, *map(float, row[:4]), int(row[4])) for i, row in enumerate(rows)
        ]
        if self.precision in SCALES_LOSS:
            if first_bad_step >= 0:
                self._stop_skipping(reports[-1])
            return reports
        for report in reports:
            if not (math.isfinite(report.loss) and math.isfinite(report.gradient_norm)):
                self._stop_nonfinite(report)
        return reports

    def _stop_skipping(self, report):
        raise NonFiniteError(
            f"{PATIENCE} steps in a row overflowed in float16, the last at loss scale "
            f"{report.loss_scale:g} (after step {report.step + 1}, {report.skipped} skipped in "
            "all): the training has diverged; continue from a checkpoint (they are intact) with "
            "--resume and --precision fp32, or start a new run with a smaller --learning-rate."
        )

    def _stop_nonfinite(self, report):
        self.load_state({**self.state(), "step": np.array([report.step], np.uint32)})
        self._open_loader()
        self.step_function.load(*next(self._loader))
        names = self.communicator.gather(self.step_function.name_first_nonfinite())
        name = next(
            (n for n in names if n),
            "the global gradient norm is the first non-finite tensor (the squares of "
            "the gradients overflow)",
        )
        raise NonFiniteError(
            f"step {report.step + 1} gave loss {report.loss:g}, gradient norm "
            f"{report.gradient_norm:g}: {name}; start a new run with a smaller --learning-rate or a "
            "--clip-norm (the checkpoints before that step are intact)."
        )

    def check_finite(self, state: dict[str, np.ndarray] | None = None) -> None:
        """Raise a `NonFiniteError` that names the first weight or optimiser value that is not
        finite; state: the result of `state()`, if it is at hand."""
        for buffer, flat in (state or self.state()).items():
            if flat.dtype == np.float32 and not np.isfinite(flat).all():
                for entry in self.model.parameters.index:
                    start, count = entry["offset"], math.prod(entry["shape"])
                    if not np.isfinite(flat[start : start + count]).all():
                        raise NonFiniteError(
                            f"after step {self.step}, {entry['name']} in {buffer!r} is the first "
                            "non-finite tensor; start a new run with a smaller --learning-rate."
                        )

    def _open_loader(self):
        if self._loader is None or self._loader.step != self.step:
            self.close()
            self._loader = Loader(
                self.dataset,
                self.batch,
                self.seed,
                start_step=self.step,
                rank=self.communicator.rank,
                ranks=self.communicator.size,
                backend=self.model.backend,
            )
            # where nothing else closes it
            self._closes_loader = weakref.finalize(self, self._loader.close)

    def close(self) -> None:
        """Stop the loader's thread."""
        if self._loader is not None:
            self._closes_loader()
            self._loader = None

    @property
    def shares_update(self) -> bool:
        """Whether each rank updates its part of the weights alone."""
        return bool(self.partition and self.partition.sharded)

    def state(self, everywhere: bool = True) -> dict[str, np.ndarray] | None:
        """{name: NumPy array} of everything that a bitwise resume needs. Collective where ranks
        share the update.

        everywhere: on every rank; else None on all but rank 0
        """
        if everywhere or self.communicator.rank == 0 or self.shares_update:
            self._gather_masters()
            state = {
                "parameters": download(self.model.parameters.data),
                **self.optimizer.state(everywhere),
            }
            return state if everywhere or self.communicator.rank == 0 else None
        return None

    def averages(self) -> dict[str, np.ndarray]:
        """{name: NumPy array} of what the optimizer's extensions keep, such as the averages of
        ema_std, on rank 0; the others have nothing of use. Collective where ranks share the update.
        """
        if self.communicator.rank and not self.shares_update:
            return {}
        return {
            name: self.optimizer.whole(array, False)
            for name, array in self.optimizer.averages().items()
        }

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue from `state()` of another trainer of the same model and settings; a
        `NumdiffError` for another. Scales of FP8 are left where they belong to other layers, those
        of a numdiff before this; a step finds them."""
        weights, shapes = self.model.parameters.data, self.optimizer.shapes()
        state = {
            name: array
            for name, array in state.items()
            if not name.startswith("fp8_") or name in shapes and array.shape == shapes[name][0]
        }
        for name, (shape, dtype) in {
            "parameters": (tuple(weights.shape), weights.dtype),
            **shapes,
        }.items():
            if name in state and (state[name].shape != shape or state[name].dtype != dtype):
                raise NumdiffError(
                    f"the checkpoint's {name!r} is {state[name].dtype} {state[name].shape} and this "
                    f"run's {dtype} {shape}; resume with the run's own options."
                )
            if name not in state and name != "updates" and not name.startswith(OF_PRECISION):
                raise NumdiffError(
                    f"the checkpoint has no {name!r}, so that training cannot continue from it; resume "
                    "from a checkpoint of this run."
                )
        self.model.parameters.load_flat(state["parameters"])
        self.optimizer.load_state(state)
        self.step = int(state["step"][0])

    def _share_weights(self):
        """All ranks begin with rank 0's weights."""
        if self.communicator.size > 1:
            weights = download(self.model.parameters.data)
            self.communicator.broadcast(weights)
            self.model.parameters.load_flat(weights)

    def check_ranks(self) -> None:
        """Raise a `NumdiffError` if the weights, or what scales in FP8 are made of, are not the
        same, bit by bit, on all ranks. Collective."""
        if self.communicator.size > 1:
            weights, where = self.model.parameters, f"after step {self.step} the weights"
            # as received; the next line rounds them again
            if self.shares_update and weights.half is not None:
                self.communicator.check_same(download(weights.half), f"{where} in 16 bits")
            self._gather_masters()
            self.communicator.check_same(download(weights.data), where)
            if (float8 := weights.float8) is not None:
                self.communicator.check_same(
                    download(float8.history), f"after step {self.step} the magnitudes in fp8"
                )

    def _gather_masters(self):
        if self.partition:
            self.partition.gather_masters()

    @contextmanager
    def ema_weights(self) -> Iterator[Model]:
        """Within the context the model computes with the averaged weights (with the plain ones if
        there is no EMA).

        If ranks share the update it is collective, and the average is stored in the gradient
        buffer, which no step needs in between.
        """
        self._gather_masters()  # which are rounded again at the end
        parameters, ema = self.model.parameters, self.optimizer.ema
        lent = ema is not None and self.shares_update
        if lent:
            copy_into(parameters.grad, self.optimizer.whole(ema))
        if ema is not None:
            parameters.bind(parameters.grad if lent else ema)
        try:
            yield self.model
        finally:
            parameters.bind(parameters.data)
            if lent:
                fill_zero(parameters.grad)


def shares_update(setting, communicator, backend, optimizer):
    """Whether the ranks share the update, by --shard-update; a `UsageError` if there is one rank."""
    if setting == "yes" and communicator.size == 1:
        raise UsageError(
            "--shard-update yes shares the update among the ranks of mpiexec, and this process is alone: "
            "leave it out, or start several."
        )
    return communicator.size > 1 and (
        setting == "yes"
        or setting == "auto"
        and (backend is None or communicator.hosts == 1 and optimizer == "adamw")
    )


def split_batch(batch, microbatch, ranks, fixed=False, least=1, most=math.inf):
    """(images a step of each rank, images of a forward pass); a `UsageError` if they do not divide
    evenly.

    fixed: the batch is that of a run that continues, so that only another number of ranks is
    advised
    least, most: numbers of ranks that this run can have otherwise
    """
    if batch % ranks:
        fitting = [count for count in ranks_for(batch, microbatch, ranks) if least <= count <= most]
        near = [] if fixed else batches_for(batch, microbatch, ranks)
        remedies = [f"start {either(fitting)} rank{'s' * (fitting != [1])}"] if fitting else []
        remedies += [f"use --batch {either(near)}"] if near else []
        raise UsageError(
            f"{'the run has ' * fixed}--batch {batch}, which {ranks} ranks cannot share evenly: "
            f"{', or '.join(remedies)}."
        )
    part = batch // ranks
    # what fits in one rank's memory fits in every rank's
    microbatch = min(microbatch or part, part)
    if part % microbatch:
        whose = (
            f"each rank's {part} images of --batch {batch} are"
            if ranks > 1
            else f"--batch {batch} is"
        )
        fits = max(m for m in range(1, microbatch) if part % m == 0)
        raise UsageError(f"{whose} not divisible by --microbatch {microbatch}: use {fits}.")
    return part, microbatch


def ranks_of(communicator, shard_update, on_gpus):
    """{argument of `split_batch`: value}: the ranks that there are, and what limits their number."""
    return {
        "ranks": communicator.size,
        "least": 2 if shard_update == "yes" else 1,
        "most": communicator.size if on_gpus else math.inf,
    }


def fits_ranks(batch, microbatch, ranks):
    """Whether `split_batch`, and the check of the options before it, accept them."""
    part = batch // ranks
    return not (
        batch % ranks or microbatch and (batch % microbatch or part % min(microbatch, part))
    )


def ranks_for(batch, microbatch, ranks):
    """Numbers of ranks near `ranks` that can share a batch: up to two below it, and the next above
    it."""
    below = [
        count for count in range(1, min(ranks, batch + 1)) if fits_ranks(batch, microbatch, count)
    ]
    above = (count for count in range(ranks + 1, batch + 1) if fits_ranks(batch, microbatch, count))
    return [*below[-2:], *itertools.islice(above, 1)]


def batches_for(batch, microbatch, ranks):
    """The nearest batches, below and above, that `ranks` ranks can divide."""
    step = math.lcm(ranks, microbatch or 1)
    ways = (
        range(batch - 1, max(0, batch - 1 - step * ranks), -1),
        range(batch + 1, batch + 1 + step * ranks),
    )
    found = [
        next((other for other in way if fits_ranks(other, microbatch, ranks)), None) for way in ways
    ]
    return [other for other in found if other and other <= COMMON["batch"].high]


def either(numbers):
    """1, 2 or 4."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last
