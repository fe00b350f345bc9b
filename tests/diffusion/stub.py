"""A stand-in for a trained model: x_0 of class c is N(MEANS[c], STD²), and so its answers have a
closed form."""

import numpy as np

from numdiff.device import upload
from numdiff.diffusion import Diffusion, Sampling, sample
from numdiff.nn import Tensor
from tests.training.toy import Toy

STD = 0.15
MEANS = np.array([-0.5, 0.0, 0.6])
NULL = 3  # its x_0 has mean 0.1


class GaussianModel:
    """What `Sampling` needs of a model, with exact answers, for NumPy arrays."""

    def __init__(
        self,
        prediction="eps",
        classes=True,
        null=True,
        learn_sigma=False,
        channels=3,
        size=4,
        **diffusion,
    ):
        self.diffusion = {"prediction": prediction, **diffusion}
        self.options = {"learn_sigma": learn_sigma}
        self.image_size, self.in_channels, self.learn_sigma = size, channels, learn_sigma
        self.out_channels = channels * (1 + learn_sigma)
        self.num_classes = len(MEANS) if classes else None
        self.null_class = NULL if classes and null else None
        self.backend, self.meta, self.calls = None, {}, 0
        self._diffusion = Diffusion(**self.diffusion)

    def level(self, t):
        """(a, s) of the model's noise-level input."""
        path = self.diffusion.get("path", "discrete")
        if path == "linear":
            t = t / self._diffusion.timestep_scale
            return 1 - t, t
        if path == "edm":
            c_in = 1 / np.sqrt(np.exp(8 * t) + self._diffusion.sigma_data**2)
            return c_in, c_in * np.exp(4 * t)
        alpha_bar = np.exp(
            np.interp(t, np.arange(self._diffusion.steps), np.log(self._diffusion.alpha_bar))
        )
        return np.sqrt(alpha_bar), np.sqrt(1 - alpha_bar)

    def __call__(self, x, t, y=None):
        self.calls += 1
        a, s = (v.reshape(-1, 1, 1, 1) for v in self.level(np.asarray(t, np.float64)))
        mean = np.append(MEANS, 0.1)[np.full(len(t), NULL) if y is None else y].reshape(-1, 1, 1, 1)
        x_0 = mean + a * STD**2 / (a**2 * STD**2 + s**2) * (x.data - a * mean)
        eps = (x.data - a * x_0) / s
        data = self._diffusion.sigma_data  # EDM's F: D = c_skip · x + c_out · F, x = x_t / c_in
        answer = {
            "eps": eps,
            "v": a * eps - s * x_0,
            "x_0": x_0,
            "flow": eps - x_0,
            "edm": (x_0 - data**2 / ((s / a) ** 2 + data**2) * x.data / a)
            * np.sqrt((s / a) ** 2 + data**2)
            / (s / a * data),
        }[self._diffusion.prediction]
        if self.learn_sigma:
            answer = np.concatenate([answer, np.zeros_like(answer)], -1)
        return Tensor(upload(answer.astype(np.float32)))


def check_devices_agree(engine, **how):
    """Sampling on an engine gives the CPU's images: planned, in the emulator, and on a GPU from a
    recorded graph."""
    how = {"count": 1, "steps": 2, **how}
    sampling = Sampling(Toy(8, width=4, device=engine.device), **how)
    if not engine.computes:
        sampling.rehearse()
        return
    ((_, made),) = sampling.batches()
    difference = made.astype(int) - sample(Toy(8, width=4, device="cpu"), **how)
    assert np.abs(difference).max() <= 1
