"""AdamW with a learning-rate schedule, clipping by global norm and an EMA of the weights; its state is on the device.

`update()` launches kernels and reads nothing back: the step number, the learning rate and the gradient norm are arrays
of one element at fixed addresses, so a training step can be replayed without the host.
"""
import numpy as np

from ..device import copy_into, download, upload, zeros
from ..kernels.adamw import adamw_update
from ..kernels.grad_norm import global_norm
from ..kernels.step_state import latch_nonfinite, learning_rate_forward, step_advance


class AdamW:
    """Optimiser of a model's `FlatParameters`.

    learning_rate: after `warmup_steps` of linear warm-up; constant, or with `cosine` falling to zero at `total_steps`
    clip_norm: largest global gradient norm (0: no clipping); weight_decay: decoupled, on every parameter
    ema_decay: per step; 0 keeps no average
    Attributes m, v, ema: flat arrays like the parameters; step uint32 (1,): updates done; gradient_norm, rate (1,).
    """

    def __init__(self, parameters, learning_rate=1e-4, warmup_steps=0, total_steps=0, cosine=False, beta1=0.9,
                 beta2=0.999, eps=1e-8, weight_decay=0.0, clip_norm=0.0, ema_decay=0.0):
        self.parameters = parameters
        self.schedule = (learning_rate, warmup_steps, total_steps, cosine)
        self.adam = (beta1, beta2, eps, weight_decay, clip_norm)
        self.ema_decay = ema_decay
        like = parameters.data
        self.m, self.v = zeros(parameters.total, np.float32, like), zeros(parameters.total, np.float32, like)
        self.ema = zeros(parameters.total, np.float32, like) if ema_decay else None
        if ema_decay:
            copy_into(self.ema, parameters.data)
        self.step = zeros(1, np.uint32, like)
        self.rate = zeros(1, np.float32, like)
        self.first_bad_step = upload(np.array([-1], np.int32), like)  # -1: none yet
        self.gradient_norm = zeros(1, np.float32, like)
        self.unscale = upload(np.ones(1, np.float32), like)

    def update(self, loss, before_advance=None):
        """One update from the accumulated gradients. Changes nothing once `loss` or the norm was not finite.

        before_advance: called before the step number moves on (the trainer records the step's telemetry there).
        """
        weights = self.parameters
        self.gradient_norm = global_norm(weights.grad)
        latch_nonfinite(self.first_bad_step, loss, self.gradient_norm, self.step)
        learning_rate_forward(self.step, self.rate, *self.schedule)
        adamw_update(weights.data, weights.grad, self.m, self.v, self.step, self.rate, self.gradient_norm, *self.adam,
                     unscale=self.unscale, ema=self.ema, ema_decay=self.ema_decay)
        if before_advance:
            before_advance()
        step_advance(self.step)

    def state(self):
        """{name: NumPy array}: what a bitwise resume needs, beside the parameters themselves."""
        arrays = {"m": self.m, "v": self.v, "step": self.step}
        if self.ema is not None:
            arrays["ema"] = self.ema
        return {name: download(array) for name, array in arrays.items()}

    def load_state(self, state):
        for name in ("m", "v", "step") + (("ema",) if self.ema is not None else ()):
            copy_into(getattr(self, name), np.asarray(state[name]))
