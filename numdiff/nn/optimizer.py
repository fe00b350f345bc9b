"""AdamW with a learning-rate schedule, clipping by global norm and an EMA of the weights; its state is on the device.

`update()` launches kernels and reads nothing back: the step number, the learning rate and the gradient norm are arrays
of one element at fixed addresses, so a training step can be replayed without the host.
"""
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

from ..device import copy_into, download, upload, zeros
from ..errors import UsageError
from ..kernels.optimizer.adamw import adamw_update
from ..kernels.optimizer.grad_norm import global_norm
from ..kernels.optimizer.loss_scale import loss_scale_update
from ..kernels.optimizer.step_state import (
    count_update,
    latch_nonfinite,
    latch_skips,
    learning_rate_forward,
    step_advance,
)
from ..settings import complete, takes
from .module import FlatParameters

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..arguments import AdamWArguments

PATIENCE = 50  # steps skipped in a row after which nothing helps any more


class LossScale:
    """By how much the loss is multiplied before the backward pass, so that float16 holds its gradients.

    rule: "doubling" after `interval` clean steps in a row, or "log2", a thousandth of an octave a step; both halve it
    at an overflow. Attributes scale, unscale float32 (1,), counts int32 (3,): see kernels/optimizer/loss_scale.py.
    """

    def __init__(self, like, start=2.0**16, rule="doubling", interval=2000):
        self.rule, self.interval = rule, interval
        self.scale, self.unscale = upload(np.array([start], np.float32), like), zeros(1, np.float32, like)
        self.counts = zeros(3, np.int32, like)

    def update(self, gradient_norm, first_bad_step, step):
        """From the norm of scaled gradients their own; NaN where this step is to be skipped; the next scale."""
        loss_scale_update(gradient_norm, self.scale, self.unscale, self.counts, self.rule, self.interval)
        latch_skips(first_bad_step, self.counts, gradient_norm, step, PATIENCE)


class NoLossScale:
    """Float32 needs none: a scale of one, and the first gradient that is not finite ends the run."""

    def __init__(self, like):
        self.scale = self.unscale = upload(np.ones(1, np.float32), like)
        self.counts = zeros(3, np.int32, like)


@takes("adamw")
class AdamW:
    """Optimiser of a model's `FlatParameters`.

    The rate warms up linearly, then is constant or, with `cosine`, falls to zero at `total_steps`. The gradient is
    clipped to a global norm (0: not), every parameter decays decoupled; 0 for ema_decay keeps no averaged weights.
    loss_scale: a `LossScale` where the gradients come scaled
    Attributes settings: the arguments, all of them; m, v, ema: flat arrays like the parameters; step uint32 (1,): steps
    done; updates uint32 (1,): those that were not skipped; gradient_norm, rate (1,).
    """

    def __init__(self, parameters: FlatParameters, *, loss_scale: LossScale | None = None,
                 **settings: "Unpack[AdamWArguments]"):
        self.parameters = parameters
        self.settings = SimpleNamespace(**complete("adamw", settings, "AdamW"))
        like = parameters.data
        self.m, self.v = zeros(parameters.total, np.float32, like), zeros(parameters.total, np.float32, like)
        self.ema = zeros(parameters.total, np.float32, like) if self.settings.ema_decay else None
        if self.ema is not None:
            copy_into(self.ema, parameters.data)
        self.step, self.updates = zeros(1, np.uint32, like), zeros(1, np.uint32, like)
        self.rate = zeros(1, np.float32, like)
        self.first_bad_step = upload(np.array([-1], np.int32), like)  # -1: none yet
        self.gradient_norm = zeros(1, np.float32, like)
        self.loss_scale = loss_scale or NoLossScale(like)

    def __getstate__(self):
        """For copies (`copy.deepcopy((model, optimizer))` keeps the two together) and pickles."""
        if self.parameters._bound is not self.parameters.data:
            raise UsageError("an optimizer can only be copied or pickled outside of ema_weights(): leave the context "
                             "first.")
        return vars(self).copy()

    def update(self, loss, before_advance: Callable | None = None) -> None:
        """One update from the accumulated gradients. Changes nothing once `loss` or the norm was not finite; with a
        `LossScale` nothing in this step, but for the scale, and nothing more once too many steps were skipped.

        before_advance: called before the step number moves on (the trainer records the step's telemetry there).
        """
        weights = self.parameters
        self.gradient_norm = global_norm(weights.grad)
        if isinstance(self.loss_scale, LossScale):
            self.loss_scale.update(self.gradient_norm, self.first_bad_step, self.step)
        else:
            latch_nonfinite(self.first_bad_step, loss, self.gradient_norm, self.step)
        s = self.settings
        learning_rate_forward(self.step, self.rate, s.learning_rate, s.warmup_steps, s.total_steps, s.cosine)
        adamw_update(weights.data, weights.grad, self.m, self.v, self.updates, self.rate, self.gradient_norm, s.beta1,
                     s.beta2, s.eps, s.weight_decay, s.clip_norm, unscale=self.loss_scale.unscale, ema=self.ema,
                     ema_decay=s.ema_decay, half=weights.half, ema_warmup=s.ema_warmup)
        count_update(self.updates, self.gradient_norm)
        if before_advance:
            before_advance()
        step_advance(self.step)

    def state(self) -> dict[str, np.ndarray]:
        """{name: NumPy array}: what a bitwise resume needs, beside the parameters themselves."""
        return {name: download(array) for name, array in self.arrays().items()}

    def arrays(self):
        """{name: array on the device} of the state."""
        arrays = {"m": self.m, "v": self.v, "step": self.step, "updates": self.updates}
        if self.ema is not None:
            arrays["ema"] = self.ema
        if isinstance(self.loss_scale, LossScale):
            arrays.update(loss_scale=self.loss_scale.scale, loss_scale_counts=self.loss_scale.counts)
        return arrays

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue from `state()`; what a state of another precision does not have keeps its first value."""
        state = {"updates": state["step"], **state}  # of before steps could be skipped
        for name, array in self.arrays().items():
            if name in state or not name.startswith("loss_scale"):
                copy_into(array, np.asarray(state[name]))
