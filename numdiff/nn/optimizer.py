"""AdamW with a learning-rate schedule, clipping by global norm and an EMA of the weights,
their state on the device.

`update()` launches kernels and reads nothing back. The step number, the learning rate and the
gradient norm are arrays of one element at fixed addresses, so a training step can be replayed
without the host.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import extensions
from ..configs import AdamWConfig
from ..configuration import configured_by
from ..device import AnyArray, copy_into, download, upload, zeros
from ..errors import UsageError, shown
from ..kernels.optimizer.adamw import AdamWCopies, Rule, State, adamw_update
from ..kernels.optimizer.grad_norm import global_norm
from ..kernels.optimizer.loss_scale import loss_scale_update
from ..kernels.optimizer.step_state import (
    count_update,
    latch_nonfinite,
    latch_skips,
    learning_rate_forward,
    step_advance,
)
from ..settings import config_class, configure
from .module import FlatParameters
from .partition import Partition

# of the state; all else is like the parameters
SCALARS = "step", "updates", "loss_scale", "loss_scale_counts", "fp8_scale", "fp8_history"
# how buffers begin that a state of another precision does not have
OF_PRECISION = "loss_scale", "fp8_"
PATIENCE = 50  # steps skipped in a row after which nothing helps any more


class LossScale:
    """By how much the loss is multiplied before the backward pass, so that float16 holds its
    gradients.

    rule: "doubling" after `interval` clean steps in a row, or "log2", a thousandth of an octave a
    step; both halve it at an overflow. Attributes scale, unscale float32 (1,), counts int32 (3,):
    see kernels/optimizer/loss_scale.py.
    """

    def __init__(self, like, start=2.0**16, rule="doubling", interval=2000):
        self.rule, self.interval = rule, interval
        self.scale, self.unscale = (
            upload(np.array([start], np.float32), like),
            zeros(1, np.float32, like),
        )
        self.counts = zeros(3, np.int32, like)

    def update(self, gradient_norm, first_bad_step, step):
        """From the norm of scaled gradients their own; NaN if this step is to be skipped; the next
        scale."""
        loss_scale_update(
            gradient_norm, self.scale, self.unscale, self.counts, self.rule, self.interval
        )
        latch_skips(first_bad_step, self.counts, gradient_norm, step, PATIENCE)


class NoLossScale:
    """Float32 needs none: a scale of one, and the first gradient that is not finite ends the run."""

    def __init__(self, like):
        self.scale = self.unscale = upload(np.ones(1, np.float32), like)
        self.counts = zeros(3, np.int32, like)


@configured_by(config_class("adamw"))
class AdamW:
    """Optimiser of a model's `FlatParameters`.

    The rate warms up linearly, then is constant or, with `cosine`, falls to zero at `total_steps`.
    The gradient is clipped to a global norm (0: not), every parameter decays decoupled; 0 for
    ema_decay keeps no averaged weights.
    loss_scale: a `LossScale` where the gradients come scaled
    partition: a `Partition`, where several ranks train together; each then updates its part
    (nn/partition.py) Frozen parameters (`FlatParameters.freeze`) keep their bits, and so does their
    average. Attributes config: the settings, checked; m, v, ema: flat arrays like the
    parameters, or like this rank's part of them; step uint32 (1,): steps done; updates uint32 (1,):
    those that were not skipped; gradient_norm, rate (1,); extensions: what extensions keep
    (extensions.py): each has update(weights, updates, gradient_norm), with this rank's part of the
    weights, and arrays(), which names what a checkpoint stores.
    """

    reader = "adamw"  # of the table in settings.py

    def __init__(
        self,
        parameters: FlatParameters,
        config: AdamWConfig | None = None,
        *,
        loss_scale: LossScale | None = None,
        partition: Partition | None = None,
        **settings: Any,
    ):
        for name, value, has in (
            ("parameters", parameters, "total"),
            ("partition", partition, "first"),
            ("loss_scale", loss_scale, "unscale"),
        ):
            if not (hasattr(value, has) or value is None and name != "parameters"):
                advice = ": give model.parameters" * (name == "parameters")
                raise UsageError(
                    f"{type(self).__name__} takes no {shown(value)} as {name}{advice}."
                )
        self.parameters, self.partition = parameters, partition
        self.first, self.stop = (
            (partition.first, partition.stop) if partition else (0, parameters.total)
        )
        own = self.stop - self.first
        self.config = configure(self.reader, config, settings, type(self).__name__)
        like = parameters.data
        self.m, self.v = zeros(own, np.float32, like), zeros(own, np.float32, like)
        self.ema = zeros(own, np.float32, like) if self.config.ema_decay else None
        if self.ema is not None:
            copy_into(self.ema, parameters.data[self.first : self.stop])
        self.extensions = [
            kind(self.config, self._own(like))
            for kind in extensions.active("optimizer_state", self.config)
        ]
        self.step, self.updates = zeros(1, np.uint32, like), zeros(1, np.uint32, like)
        self.rate = zeros(1, np.float32, like)
        self.first_bad_step = upload(np.array([-1], np.int32), like)  # -1: none yet
        self.gradient_norm = zeros(1, np.float32, like)
        self.loss_scale = NoLossScale(like) if loss_scale is None else loss_scale

    def __getstate__(self):
        """For copies (`copy.deepcopy((model, optimizer))` keeps the two together) and pickles."""
        if self.parameters._bound is not self.parameters.data:
            raise UsageError(
                "an optimizer can only be copied or pickled outside of ema_weights(): leave the context "
                "first."
            )
        return vars(self).copy()

    def update(self, loss: AnyArray, before_advance: Callable | None = None) -> None:
        """One update from the accumulated gradients. Changes nothing once `loss` or the norm was
        not finite; with a `LossScale` nothing in this step, but for the scale, and nothing more
        once too many steps were skipped.

        before_advance: called before the step number moves on (the trainer records the step's
        telemetry there).
        """
        weights = self.parameters
        if self.partition:
            self.gradient_norm = self.partition.norm()
        else:
            self.gradient_norm = global_norm(weights.grad, ranges=weights.trained_ranges)
        if isinstance(self.loss_scale, LossScale):
            self.loss_scale.update(self.gradient_norm, self.first_bad_step, self.step)
        else:
            latch_nonfinite(self.first_bad_step, loss, self.gradient_norm, self.step)
        s = self.config
        learning_rate_forward(
            self.step, self.rate, s.learning_rate, s.warmup_steps, s.total_steps, s.cosine
        )
        self._update_weights()
        count_update(self.updates, self.gradient_norm)
        for extension in self.extensions:
            extension.update(self._own(weights.data), self.updates, self.gradient_norm)
        if self.partition:
            self.partition.gather_weights()
        weights.refresh()
        if before_advance:
            before_advance()
        step_advance(self.step)

    def _own(self, flat):
        """This rank's part of a flat array like the parameters."""
        return None if flat is None else flat[self.first : self.stop]

    def _trained(self):
        """[(start, stop)] of what is trained of this rank's part, counted from its first element."""
        return within(self.parameters.trained_ranges, self.first, self.stop)

    def _update_weights(self):
        """Weights, moments, average and float16 copy, from the gradients."""
        if parts := self.partition and self.partition.weight_parts():
            for start, stop in parts:
                if start < stop:
                    self._adamw(start - self.first, stop - self.first)
                self.partition.exchange.send_weights()
            return
        for start, stop in self._trained():
            self._adamw(start, stop)

    def _adamw(self, start, stop, ranges=None):
        """AdamW's step of these elements of the own part, or of ranges of them."""
        weights, s = self.parameters, self.config
        weight, gradient, m, v, ema, half = (
            None if flat is None else flat[start:stop]
            for flat in (
                self._own(weights.data),
                self._own(weights.grad),
                self.m,
                self.v,
                self.ema,
                self._own(weights.half),
            )
        )
        adamw_update(
            weight,
            gradient,
            m,
            v,
            self._state(),
            Rule(s.beta1, s.beta2, s.eps, s.weight_decay, s.clip_norm),
            AdamWCopies(ema, s.ema_decay, half, s.ema_warmup),
            ranges,
        )

    def _state(self):
        return State(self.updates, self.rate, self.gradient_norm, self.loss_scale.unscale)

    def whole(self, array: AnyArray, everywhere: bool = True) -> np.ndarray | None:
        """A flat array of the state, as a NumPy array with all ranks' parts. Collective where ranks
        have parts.

        everywhere: on every rank; else None on all but rank 0, where ranks have parts
        """
        array = download(array)
        return self.partition.whole(array, everywhere) if self.partition else array

    def state(self, everywhere: bool = True) -> dict[str, np.ndarray]:
        """{name: NumPy array}: what a bitwise resume needs in addition to the parameters;
        everywhere: as `whole` takes it."""
        return {
            name: download(array) if name in SCALARS else self.whole(array, everywhere)
            for name, array in self.arrays().items()
        }

    def shapes(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """{name: (shape, dtype)} of `state()`."""
        return {
            name: (tuple(array.shape) if name in SCALARS else (self.parameters.total,), array.dtype)
            for name, array in self.arrays().items()
        }

    def state_bytes(self) -> dict[str, tuple[int, int]]:
        """{name: (bytes that this rank holds, bytes of all ranks' parts)} of the flat arrays of the
        state."""
        return {
            name: (array.nbytes, 4 * self.parameters.total)
            for name, array in self.arrays().items()
            if name not in SCALARS
        }

    def arrays(self) -> dict[str, AnyArray]:
        """{name: array on the device} of the state, of which flat ones hold this rank's part."""
        arrays = {"m": self.m, "v": self.v, "step": self.step, "updates": self.updates}
        if self.ema is not None:
            arrays["ema"] = self.ema
        arrays.update(self.averages())
        if isinstance(self.loss_scale, LossScale):
            arrays.update(
                loss_scale=self.loss_scale.scale, loss_scale_counts=self.loss_scale.counts
            )
        if getattr(self.parameters, "float8", None) is not None:
            arrays.update(self.parameters.float8.arrays())
        return arrays

    def averages(self) -> dict[str, AnyArray]:
        """{name: array on the device (n,)} that extensions keep, such as the averages of ema_std."""
        return {
            name: array
            for extension in self.extensions
            for name, array in extension.arrays().items()
        }

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue from `state()`; what a state of another precision does not have keeps its first
        value."""
        state = {"updates": state["step"], **state}  # of before steps could be skipped
        for name, array in self.arrays().items():
            if name in state or not name.startswith(OF_PRECISION):
                value = np.asarray(state[name])
                copy_into(array, value if name in SCALARS else self._own(value))


def within(ranges, first, stop):
    """The parts of [(start, stop)] within first … stop, counted from first."""
    inside = ((max(a, first) - first, min(b, stop) - first) for a, b in ranges)
    return [(a, b) for a, b in inside if a < b]
