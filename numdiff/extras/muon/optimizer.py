"""Muon for the weights that are matrices, AdamW for all others, as a training run takes it.

`make`, `atoms` and `describe` are what a trainer takes from an optimizer of an extension.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...configs import MuonConfig
from ...configuration import configured_by
from ...device import AnyArray, is_device, side_by_side, upload
from ...device.limits import multiprocessors_of
from ...device.side_stream import at_once
from ...errors import UsageError, shown
from ...kernels.optimizer.adamw import AdamWCopies, Ranges
from ...kernels.optimizer.zero_ranges import pieces
from ...nn.module import ALIGNMENT, FlatParameters, frozen_by
from ...nn.optimizer import AdamW, LossScale, within
from ...nn.partition import Partition
from ...settings import COMMON, check_value, config_class
from .newton_schulz import newton_schulz_cost
from .update import MuonStack, alike, muon_update

# numbers of all of Muon's stacks up to which they share the GPU; larger ones fill it, one by one
AT_ONCE = 64 << 20


@configured_by(config_class("muon"))
class Muon(AdamW):
    """Muon for the weights that are matrices, AdamW for all others: see update.py.

    matrices: {name: how many matrices, one below the other} of those weights, as `Model.matrices`
        gives them; a weight of more than two axes counts as (first, all others)
    Learning rate, weight decay, clipping and average are the same for all; beta1, beta2 and eps are
    AdamW's. The momentum is stored in `m`, under the name "momentum" in the state, so that AdamW
    cannot continue from it. Muon's part of `v` exists and stays zero.
    Attributes stacks: [`MuonStack`], the matrices by their shape; rest: `Ranges`, where AdamW
    updates.
    """

    reader = "muon"

    def __init__(
        self,
        parameters: FlatParameters,
        matrices: dict[str, int],
        config: MuonConfig | None = None,
        *,
        loss_scale: LossScale | None = None,
        partition: Partition | None = None,
        **settings: Any,
    ):
        super().__init__(parameters, config, loss_scale=loss_scale, partition=partition, **settings)
        check_value(COMMON["muon_momentum"], self.config.momentum, "momentum")
        if not isinstance(matrices, Mapping):
            raise UsageError(
                f"Muon takes matrices as model.matrices() gives them, and not {shown(matrices)}."
            )
        if not matrices:
            raise UsageError(
                "Muon needs weights that are matrices, and matrices names none: use AdamW."
            )
        self.matrices = matrices
        self._lay_out()

    def _lay_out(self):
        self.stacks, self.rest = _stacks(self.parameters, self.matrices, self.first, self.stop)
        # for the cores to share: one matrix each, the largest first
        if not is_device(self.parameters.data):
            singly = (
                stack._replace(starts=stack.starts[i : i + 1])
                for stack in self.stacks
                for i in range(len(stack.starts))
            )
            self._singly = sorted(
                singly, key=lambda s: -newton_schulz_cost((1, s.rows, s.columns))[1]
            )
        self._trained_ranges = self.parameters.trained_ranges

    def _update_weights(self):
        weights, s = self.parameters, self.config
        if weights.trained_ranges != self._trained_ranges:  # others were frozen since the last step
            self._lay_out()

        def update(stack):
            muon_update(
                self._own(weights.data),
                self._own(weights.grad),
                self.m,
                stack,
                self._state(),
                s.momentum,
                s.weight_decay,
                s.clip_norm,
                AdamWCopies(self.ema, s.ema_decay, self._own(weights.half), s.ema_warmup),
            )

        def rest():
            self._adamw(0, self.stop - self.first, self.rest)

        if not is_device(weights.data):
            for _ in side_by_side(
                lambda task: task(), [rest, *(functools.partial(update, s) for s in self._singly)]
            ):
                pass
            return
        tasks = [*(functools.partial(update, stack) for stack in self.stacks), rest]
        if sum(len(stack.starts) * stack.rows * stack.columns for stack in self.stacks) <= AT_ONCE:
            at_once(weights.data.backend, tasks)
            return
        for task in tasks:
            task()

    def arrays(self) -> dict[str, AnyArray]:
        arrays = super().arrays()
        return {"momentum": arrays.pop("m"), **arrays}


def matrices_in(parameters, matrices):
    """[(how many, rows, columns, first element, end)] of the matrices that are trained, as `Muon`
    takes them, the end with the gap behind it."""
    if missing := [name for name in matrices if name not in parameters.parameters]:
        raise UsageError(
            f"matrices names {missing[0]!r}, and the model has no such parameter: use model.matrices()."
        )
    for entry in parameters.index:
        name, shape, first = entry["name"], entry["shape"], entry["offset"]
        count = matrices.get(name, 0)
        if not count or parameters.parameters[name].frozen:
            continue
        (rows, left), columns = divmod(shape[0], count), math.prod(shape[1:])
        if left or len(shape) < 2:
            raise UsageError(
                f"{name} of shape {tuple(shape)} is not {count} matrices one below the other: give a "
                "number that divides its rows."
            )
        yield (
            count,
            rows,
            columns,
            first,
            first + -(-count * rows * columns // ALIGNMENT) * ALIGNMENT,
        )


def _stacks(parameters, matrices, low, high):
    """([`MuonStack`] of the matrices of each shape, `Ranges` of all else) of what is trained in
    elements low … high-1 of the buffers, counted from `low`."""
    starts, rest = {}, list(parameters.trained_ranges)
    for count, rows, columns, first, end in matrices_in(parameters, matrices):
        starts.setdefault((rows, columns), []).extend(
            first + i * rows * columns for i in range(count)
        )
        at = next(i for i, (start, stop) in enumerate(rest) if start <= first < stop)
        rest[at : at + 1] = [
            (start, stop)
            for start, stop in ((rest[at][0], first), (end, rest[at][1]))
            if start < stop
        ]
    like, rest = parameters.data, within(rest, low, high)
    return (
        list(_stacked(starts, like, parameters.half is not None and is_device(like), low, high)),
        Ranges(upload(pieces(rest), like), sum(stop - start for start, stop in rest)),
    )


def _stacked(starts, like, share, low=0, high=math.inf):
    """The `MuonStack`s of {shape: where its matrices begin}: one for each shape, or, with `share`,
    one
    for several where that takes less time; of the matrices that begin in low … high-1. Which shapes
    share one all matrices decide."""
    shapes = {shape: len(found) for shape, found in starts.items()}
    padded = (
        alike(shapes, multiprocessors_of(like)) if share else {shape: shape for shape in shapes}
    )
    own = {
        shape: [start - low for start in found if low <= start < high]
        for shape, found in starts.items()
    }
    for common in dict.fromkeys(padded.values()):
        members = [shape for shape in shapes if padded[shape] == common]
        found = [start for shape in members for start in own[shape]]
        if not found:
            continue
        extents = None
        if members != [common]:
            extents = upload(
                np.concatenate([np.tile(shape, len(own[shape])) for shape in members]).astype(
                    np.int64
                ),
                like,
            )
        yield MuonStack(upload(np.array(found, np.int64), like), *common, extents)


def make(model, config, **more):
    """The optimizer of a model."""
    return Muon(model.parameters, matrices_of(model), config, **more)


def atoms(model):
    """[(first element, end)] of the buffers that one rank must have whole: the matrices."""
    return [(start, stop) for *_, start, stop in matrices_in(model.parameters, matrices_of(model))]


def matrices_of(model):
    """`model.matrices()`, of which Muon needs one."""
    if matrices := model.matrices():
        return matrices
    raise UsageError(
        f"--optimizer muon is for weight matrices in a model's blocks, and this {model.kind} has none: "
        "give --optimizer adamw."
    )


def flops(model):
    """FLOPs of the Newton–Schulz products of an update."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    found = 0
    for name, count in matrices_of(model).items():
        rows = shapes[name][0] // count
        stack = count, rows, math.prod(shapes[name]) // (count * rows)
        found += newton_schulz_cost(stack, itemsize=2)[1]
    return found


def describe(options, model):
    """One line about what Muon trains of a model, built or only laid out."""
    matrices, shapes = matrices_of(model), {name: p.shape for name, p in model.named_parameters()}
    frozen = frozen_by(options.freeze, shapes) if options.freeze else ()
    matrices = {name: count for name, count in matrices.items() if name not in frozen}
    count = sum(math.prod(shapes[name]) for name in matrices)
    return (
        f"Muon, momentum {options.muon_momentum:g}, for {sum(matrices.values())} matrices, {count:,} of "
        f"{sum(map(math.prod, shapes.values())):,} parameters; AdamW for the others"
    )
