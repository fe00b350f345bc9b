"""The diffusion process that a model is trained on: what it sees, what it is asked to predict."""
import numpy as np

from ..device import upload
from ..errors import UsageError
from ..kernels.q_sample import q_sample_forward, velocity_forward
from .schedule import alpha_bars

PREDICTIONS = ("eps", "v", "x_0")


class Diffusion:
    """A noise schedule and a prediction target.

    steps: T; schedule: "linear" or "cosine"
    prediction: what the model's output means: "eps" (the noise), "x_0" (the image), or
        "v" = √ᾱ·eps - √(1-ᾱ)·x_0 (Salimans and Ho 2022, arXiv:2202.00512, appendix D)
    backend: where the tables lie (None: NumPy)
    """

    def __init__(self, steps=1000, schedule="linear", prediction="eps", backend=None):
        if prediction not in PREDICTIONS:
            raise UsageError(f"unknown prediction {prediction!r}: use {', '.join(PREDICTIONS)}.")
        self.steps, self.schedule, self.prediction = steps, schedule, prediction
        self.alpha_bar = alpha_bars(schedule, steps)  # float64, on the host
        self.tables = (upload(np.sqrt(self.alpha_bar).astype(np.float32), backend),
                       upload(np.sqrt(1 - self.alpha_bar).astype(np.float32), backend))

    @property
    def options(self):
        return {"steps": self.steps, "schedule": self.schedule, "prediction": self.prediction}

    def q_sample(self, x_0, eps, t):
        """x_t = √ᾱ_t·x_0 + √(1-ᾱ_t)·eps for timesteps t, int32 (B,)."""
        return q_sample_forward(x_0, eps, t, *self.tables)

    def target(self, x_0, eps, t):
        """What the model should answer for x_t."""
        if self.prediction == "eps":
            return eps
        return x_0 if self.prediction == "x_0" else velocity_forward(x_0, eps, t, *self.tables)
