"""PyTorch's sampling of the same model, to compare numdiff's with. Only the torch_* files need
PyTorch.

It is written as one would write it in PyTorch for speed. Weights are in the 16-bit type, images are
channels-last if the model has convolutions, and both halves of guidance are one batch. An
evaluation (the model, guidance, the estimate of x_0) is compiled as one function. Between two
evaluations there are only the few additions of the sampler's step. The mathematics is that of
numdiff/diffusion/denoiser.py and samplers.py, in whose units x = x_0 + sigma · eps.
"""

import itertools
import math

import numpy as np

from ..diffusion import samplers
from ..errors import NumdiffError
from ..training import kinds
from .torch_step import TorchTwin

# The samplers: denoise(x, sigma) -> (x_0, the learned variance); noise(i): normal noise like x ----


def linear(*terms):
    """Σ scalar · tensor of pairs, as a new tensor."""
    (a, x), *others = terms
    y = a * x
    for b, u in others:
        y.add_(u, alpha=b)
    return y


def ddpm(denoise, x, sigmas, noise, variance):
    for i, (now, then) in enumerate(itertools.pairwise(sigmas)):
        x_0, v = denoise(x, now)
        if then == 0:
            return x_0
        a = then**2 / now**2
        small, large = then**2 * (1 - a), (now**2 - then**2) * (1 + then**2) / (1 + now**2)
        if variance == "learned":
            low, high = math.log(small), math.log(large)
            fresh = (0.5 * (low + (v + 1) * (0.5 * (high - low)))).exp_().mul_(noise(i))
            x = linear((a, x), (1 - a, x_0), (1.0, fresh))
        else:
            x = linear(
                (a, x), (1 - a, x_0), (math.sqrt(large if variance == "large" else small), noise(i))
            )
    return x


def ddim(denoise, x, sigmas, noise, eta):
    for i, (now, then) in enumerate(itertools.pairwise(sigmas)):
        x_0, _ = denoise(x, now)
        fresh = eta * then * math.sqrt(1 - then**2 / now**2)
        a = math.sqrt(max(then**2 - fresh**2, 0.0)) / now
        x = linear((a, x), (1 - a, x_0), *([(fresh, noise(i))] if fresh > 0 else []))
    return x


def euler(denoise, x, sigmas, noise, eta=0.0):
    """Euler's steps; with eta > 0 ancestral ones."""
    for i, (now, then) in enumerate(itertools.pairwise(sigmas)):
        x_0, _ = denoise(x, now)
        up = eta * math.sqrt(then**2 * (now**2 - then**2) / now**2)
        a = math.sqrt(max(then**2 - up**2, 0.0)) / now
        x = linear((a, x), (1 - a, x_0), *([(up, noise(i))] if up > 0 else []))
    return x


def heun(denoise, x, sigmas, noise):
    for now, then in itertools.pairwise(sigmas):
        x_0, _ = denoise(x, now)
        slope = linear((1 / now, x), (-1 / now, x_0))
        ahead = linear((1.0, x), (then - now, slope))
        if samplers.corrected(now, then):
            x_0, _ = denoise(ahead, then)
            half = (then - now) / 2
            ahead = linear((1.0, x), (half, slope), (half / then, ahead), (-half / then, x_0))
        x = ahead
    return x


def heun_in_time(denoise, x, sigmas, noise):
    for now, then in itertools.pairwise(sigmas):
        t, s = now / (1 + now), then / (1 + then)
        x_0, _ = denoise(x, now)
        ahead = linear((then / now, x), (1 - then / now, x_0))
        if then > 0:
            flow, half = linear(((1 - t) / t, x), (-1 / t, x_0)), (s - t) / 2
            x_0, _ = denoise(ahead, then)
            ahead = linear(
                ((1 - t) / (1 - s), x),
                (half / (1 - s), flow),
                (half / s, ahead),
                (-half / (1 - s) / s, x_0),
            )
        x = ahead
    return x


def dpm_solver_pp_2m(denoise, x, sigmas, noise):
    last = before = None
    for now, then in itertools.pairwise(sigmas):
        x_0 = denoise(x, now)[0].clone()  # the next replay of a graph overwrites its results
        h = math.log(now / then) if then > 0 else math.inf
        weight = 0.0 if last is None or then == 0 else h / (2 * before)
        a = then / now
        x = linear(
            (a, x), ((1 + weight) * (1 - a), x_0), *([(-weight * (1 - a), last)] if weight else [])
        )
        last, before = x_0, h
    return x


SAMPLERS = {
    "ddpm": ddpm,
    "ddim": ddim,
    "euler": euler,
    "euler-ancestral": euler,
    "heun": heun,
    "dpm++2m": dpm_solver_pp_2m,
}


class TorchSample(TorchTwin):
    """Batches of samples from the twin. mode: of MODES; precision: of PRECISIONS.

    sampling: numdiff's `Sampling` of the same model, whose sampler, levels, settings, classes and
    guidance it takes Attributes noise(i): normal noise of step i (-1: the start); first_s: seconds
    of building, compiling and the first
    batch; images: the last batch, on the host, uint8 (B, H, W, C), or float32 of latents.
    """

    def __init__(self, options, sampling, mode="eager", precision="fp32"):
        if sampling.sampler not in SAMPLERS:
            raise NumdiffError(
                f"there is no {sampling.sampler} for PyTorch; use {', '.join(SAMPLERS)}, or leave "
                "--versus out."
            )
        super().__init__(options, mode, precision)
        torch = self.torch
        self.model = self.model.to(self.half or torch.float32).eval()
        if self.cuda:  # as if the weights had been loaded in this type
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        in_time = sampling.function is samplers.heun_in_time
        self.sampling, self.function = (
            sampling,
            heun_in_time if in_time else SAMPLERS[sampling.sampler],
        )
        (height, width, channels), batch = sampling.shape, sampling.batch
        layout = (
            torch.channels_last
            if kinds.get(options.model).twin_channels_last
            else torch.contiguous_format
        )
        generator = torch.Generator(self.device).manual_seed(0)
        self.noise = lambda i: torch.randn(
            (batch, channels, height, width), generator=generator, device=self.device
        ).to(memory_format=layout)
        guided = sampling.cfg_scale not in (None, 1)
        self.labels = None
        if self.classes is not None:
            labels = torch.from_numpy(sampling.labels.astype(np.int64))
            if guided:
                labels = torch.cat((labels, torch.full_like(labels, sampling.model.null_class)))
            self.labels = labels.to(self.device)
        images = batch * (2 if guided else 1)
        # sigma -> timesteps, [√ᾱ, a, b], on the device: one compiled function serves all levels
        self.levels = {}
        for sigma in filter(None, sampling.sigmas):
            t, *numbers = sampling.denoiser.numbers(sigma)
            self.levels[sigma] = (
                torch.full((images,), float(t), device=self.device),
                torch.tensor(numbers, dtype=torch.float32, device=self.device),
            )
        self.evaluate = self.compiled(self._evaluation(channels, guided))
        self.run_first()

    def _evaluation(self, channels, guided):
        torch, model, sampling = self.torch, self.model, self.sampling
        clip, scale, count = sampling.clip, sampling.cfg_scale, sampling.cfg_channels or channels
        dtype, learned = self.half or torch.float32, sampling.settings.get("variance") == "learned"

        def evaluate(x, t, numbers, labels):
            root, a, b = numbers.unbind()
            x_t = (root * x).to(dtype)
            answer = model(torch.cat((x_t, x_t)) if guided else x_t, t, labels).float()
            if guided:
                answer, unconditional = answer.chunk(2)
                first, u = answer[:, :count], unconditional[:, :count]
                answer = torch.cat((u + scale * (first - u), answer[:, count:]), 1)
            x_0 = a * x + b * answer[:, :channels]
            return x_0.clamp(-1, 1) if clip else x_0, answer[
                :, channels : 2 * channels
            ] if learned else None

        return evaluate

    def run(self):
        sampling, torch = self.sampling, self.torch
        with torch.no_grad():
            x = sampling.plan.start_scale * self.noise(-1)
            x = self.function(
                lambda x, sigma: self.evaluate(x, *self.levels[sigma], self.labels),
                x,
                sampling.sigmas,
                self.noise,
                **sampling.settings,
            )
            if sampling.pixels:
                x = (x * 127.5 + 127.5).round_().clamp_(0, 255).to(torch.uint8)
            self.images = x.permute(0, 2, 3, 1).cpu().numpy()
