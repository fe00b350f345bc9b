"""numdiff compared with public code on this machine: models with random weights, transport,
schedules, samplers.

    python tests/reference/compare_public.py SiT LightningDiT k-diffusion edm

Each argument is a checkout: of willisma/SiT, hustvl/LightningDiT, crowsonkb/k-diffusion or
NVlabs/edm, recognised by its files. Nothing of them is part of numdiff: they are imported from the
checkout, and run on the CPU in float32. It needs PyTorch and what they import (timm with
torchvision, einops, torchdiffeq, torchsde, scipy, tqdm); of fairscale only names are requested.

A line says what is compared and the largest difference, as a share of the largest number; samples
of a distribution are compared by their quantiles. Exit code 1 where one is larger than its bound.
"""

import argparse
import contextlib
import importlib
import os
import pathlib
import sys
import tempfile
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # LightningDiT's blocks ask for torch.compile

import numpy as np
import torch

import numdiff
from numdiff.diffusion import Diffusion, samplers
from numdiff.diffusion.paths import LinearPath
from numdiff.diffusion.schedule import karras_sigmas
from numdiff.extras.convert.dit import without_padding
from numdiff.extras.convert.flow import with_time_reversed
from numdiff.extras.convert.layout import to_torch_layout
from numdiff.extras.convert.models import convert
from numdiff.nn import Tape, Tensor

FAIRSCALE = (
    "fairscale fairscale.nn fairscale.nn.model_parallel fairscale.nn.model_parallel.initialize "
    "fairscale.nn.model_parallel.layers"
).split()
MEAN, STD = 0.3, 0.5  # of the images for which there is an exact model
SHAPE = 4, 8, 8, 4
SIZES = {"input_size": 8, "in_channels": 4, "patch_size": 2, "depth": 2, "num_classes": 5}
ROUNDING, QUANTILE = 2e-5, 5e-3  # bounds: of float32's rounding; of 200,000 draws' quantiles
DRAWS = 200_000
failed = []


def report(what, got, want, bound=ROUNDING):
    got, want = (np.asarray(a, np.float64) for a in (got, want))
    off = (
        float(np.abs(got - want).max() / np.abs(want).max()) if got.shape == want.shape else np.inf
    )
    print(f"  {what:66} {off:8.1e}{'' if off <= bound else f'   MORE than {bound:g}'}", flush=True)
    if not off <= bound:
        failed.append(what)


@contextlib.contextmanager
def importing(repo):
    """Modules are found in a checkout, and forgotten afterwards: several have one called `models`."""
    before = set(sys.modules)
    sys.path.insert(0, str(repo))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(repo))
        for name in set(sys.modules) - before:
            if str(repo) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


def to_nchw(array):
    return torch.from_numpy(
        np.ascontiguousarray(np.asarray(array, np.float32).transpose(0, 3, 1, 2))
    )


def to_nhwc(tensor):
    return tensor.detach().numpy().transpose(0, 2, 3, 1)


def normal(seed, shape=SHAPE):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# Models -------------------------------------------------------------------------------------------


def compare_model(what, public, heads):
    """Outputs and gradients of a public model, in eval, with random numbers in all of its weights,
    and of the model that `numdiff convert` makes of them."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in public.named_parameters():
            if p.requires_grad:
                p.copy_(
                    torch.randn_like(p) * (0.1 if p.ndim > 1 else 0.3)
                    + ("norm" in name and p.ndim == 1)
                )
    public.eval()
    with tempfile.TemporaryDirectory() as folder:
        state, out = pathlib.Path(folder) / "public.npz", pathlib.Path(folder) / "numdiff.h5"
        np.savez(state, **{name: a.numpy() for name, a in public.state_dict().items()})
        convert(state, out, diffusion={"path": "linear"}, num_heads=heads)
        model = numdiff.load(out, "cpu", precision="fp32")
    # 5: the null class
    t, labels, g = np.float32([0.01, 0.3, 0.7, 0.98]), np.int32([0, 3, 2, 5]), normal(3)
    theirs = to_nchw(normal(2)).requires_grad_()
    answer = public(theirs, torch.from_numpy(1 - t), torch.from_numpy(labels).long())
    (answer * to_nchw(g)).sum().backward()
    leaf = Tensor(normal(2), requires_grad=True)
    with Tape() as tape:
        ours = model(leaf, t, labels)
    tape.backward(ours, -g)
    report(f"{what}: output", -ours.data, to_nhwc(answer), 1e-4)
    report(f"{what}: gradient of x", leaf.grad, to_nhwc(theirs.grad), 1e-4)
    gradients = with_time_reversed(
        without_padding(to_torch_layout(model.gradients()), model.options)
    )
    wanted = {name: p.grad.numpy() for name, p in public.named_parameters() if p.requires_grad}
    if set(gradients) != set(wanted):
        failed.append(what)
        print(f"  {what}: names differ: {sorted(set(gradients) ^ set(wanted))[:5]}")
        return
    scale = max(np.abs(a).max() for a in wanted.values())
    # of a learned variance, which is cut off, numdiff has none
    last = {name: len(a) for name, a in gradients.items()}
    worst = max(
        wanted,
        key=lambda name: (
            -1
            if len(wanted[name]) != last[name]
            else np.abs(gradients[name].reshape(wanted[name].shape) - wanted[name]).max()
        ),
    )
    off = np.abs(gradients[worst].reshape(wanted[worst].shape) - wanted[worst]).max() / scale
    report(f"{what}: gradients of {len(wanted)} tensors", [1 + off], [1], 1e-4)


def compare_sit(repo):
    with importing(repo) as module:
        models = module("models")
        for variance in (False, True):
            public = models.SiT(learn_sigma=variance, hidden_size=48, num_heads=3, **SIZES)
            compare_model(f"SiT{', learn_sigma' * variance}", public, 3)
        compare_transport("SiT", module("transport"))


def compare_lightning(repo):
    for name in FAIRSCALE:  # models/rmsnorm.py imports it for unused classes
        sys.modules.setdefault(name, MagicMock())
    sizes = {**SIZES, "hidden_size": 40, "num_heads": 2}
    published = {"use_swiglu": True, "use_rope": True, "use_rmsnorm": True}
    with importing(repo) as module:
        models = module("models.lightningdit")
        for more in (
            {},
            {"use_swiglu": True},
            {"use_rope": True},
            {"use_rmsnorm": True},
            published,
            {**published, "use_qknorm": True, "wo_shift": True},
        ):
            said = ", ".join(name.removeprefix("use_") for name in more) or "plain"
            compare_model(f"LightningDiT, {said}", models.LightningDiT(**sizes, **more), 2)
        compare_transport("LightningDiT", module("transport"))


# Transport ----------------------------------------------------------------------------------------


def drawn(count, **settings):
    """(a Diffusion of the linear path, the levels that it draws)."""
    diffusion = Diffusion(path="linear", **settings)
    return diffusion, diffusion.draw(7, np.uint32([4]), np.arange(count, dtype=np.uint32))


def compare_transport(name, transport):
    """x_t, target and loss at the same times; how times are drawn; an ODE's steps with an exact
    model."""
    made = transport.create_transport("Linear", "velocity")
    diffusion, levels = drawn(len(normal(0)))
    image, eps, answer = normal(4), normal(5), normal(6)
    t = 1 - np.asarray(levels.seen, np.float32)  # counted from noise
    inputs = torch.from_numpy(t), to_nchw(eps), to_nchw(image)
    _, x_t, velocity = made.path_sampler.plan(*inputs)
    report(f"{name}'s transport: x_t", diffusion.q_sample(image, eps, levels), to_nhwc(x_t))
    target = diffusion.target(image, eps, levels)
    report(f"{name}'s transport: target", -target, to_nhwc(velocity))
    made.sample = lambda *_: inputs
    theirs = made.training_losses(lambda x, t: to_nchw(answer), to_nchw(image))["loss"].mean()
    report(
        f"{name}'s transport: loss",
        diffusion.loss(Tensor(-answer), target, image, levels).data,
        [float(theirs)],
    )
    ways = {"uniform": ({}, {}, {})}
    if name == "LightningDiT":
        ways |= {
            "logit-normal": (
                {"use_lognorm": True},
                {},
                {"time_sampling": "logit-normal", "noise_mean": 0.0, "noise_std": 1.0},
            ),
            "logit-normal, shifted": (
                {"use_lognorm": True, "shift_lg": True},
                {"shifted_mu": 0.8},
                {"time_sampling": "logit-normal", "noise_mean": -0.8, "noise_std": 1.0},
            ),
        }
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002 - scipy's, which it asks
    at = np.linspace(0.01, 0.99, 50)
    for way, (options, given, ours) in ways.items():
        theirs = transport.create_transport("Linear", "velocity", **options).sample(
            torch.zeros(DRAWS, 1), **given
        )[0]
        _, levels = drawn(DRAWS, **ours)
        report(
            f"{name}'s times, {way}: quantiles",
            np.quantile(1 - np.asarray(levels.seen), at),
            np.quantile(theirs.numpy(), at),
            QUANTILE,
        )
    for shift in (1.0, *[0.3] * (name == "LightningDiT")):
        compare_ode(name, transport, shift)


def exact(x, sigma):
    """The estimate of x_0 where images are normal, each number on its own; x = x_0 + sigma · eps."""
    return (MEAN * sigma**2 + STD**2 * x) / (sigma**2 + STD**2)


def compare_ode(name, transport, shift):
    """Euler's 20 steps in t: theirs from t = 0, pure noise, numdiff's from where 1e-4 of an image
    is left."""
    steps, noise = 20, normal(8)

    def velocity(x, t):
        t = float(t.reshape(-1)[0])
        variance = t**2 * STD**2 + (1 - t) ** 2
        off = (x - t * MEAN) / variance
        return MEAN + t * STD**2 * off - (1 - t) * off

    sampler = transport.Sampler(transport.create_transport("Linear", "velocity"))
    more = {"timestep_shift": shift} if name == "LightningDiT" else {}
    theirs = sampler.sample_ode(sampling_method="euler", num_steps=steps + 1, **more)(
        to_nchw(noise), velocity
    )[-1]
    sigmas = LinearPath(shift=1 / shift).sigmas("time", steps)
    ours = samplers.euler(exact, np.float32(sigmas[0]) * noise, sigmas)
    report(
        f"{name}'s sample_ode, euler{f', timestep_shift {shift}' if more else ''}",
        ours,
        to_nhwc(theirs),
        1e-3,
    )


# Schedules and samplers ---------------------------------------------------------------------------


def compare_k_diffusion(repo):
    # without what its __init__ imports
    package, utils = ModuleType("k_diffusion"), ModuleType("k_diffusion.utils")
    package.__path__, package.utils = [str(repo / "k_diffusion")], utils
    utils.append_dims = lambda x, dims: x.reshape(x.shape + (1,) * (dims - x.ndim))
    sys.modules |= {"k_diffusion": package, "k_diffusion.utils": utils}
    theirs = importlib.import_module("k_diffusion.sampling")
    for low, high, rho in ((0.002, 80.0, 7.0), (0.03, 14.6, 7.0)):
        sigmas = theirs.get_sigmas_karras(12, low, high, rho)
        ours = [*karras_sigmas(np.array([low, high]), 12), 0.0]
        report(f"k-diffusion's get_sigmas_karras, {low:g} to {high:g}", ours, sigmas.numpy())
        x, noises = np.float32(high) * normal(9), [normal(20 + i) for i in range(12)]
        given = iter(noises)
        for name, function, more in (
            ("sample_euler", samplers.euler, {}),
            ("sample_heun", samplers.heun, {}),
            ("sample_dpmpp_2m", samplers.dpm_solver_pp_2m, {}),
            (
                "sample_euler_ancestral",
                samplers.euler_ancestral,
                {"noise_sampler": lambda *_, given=given: to_nchw(next(given))},
            ),
        ):
            wanted = getattr(theirs, name)(
                lambda x, sigma, **_: exact(x, float(sigma[0])),
                to_nchw(x),
                sigmas,
                disable=True,
                **more,
            )
            got = function(exact, x, ours, lambda i, noises=noises: noises[i])
            report(f"k-diffusion's {name}, {low:g} to {high:g}", got, to_nhwc(wanted), 1e-4)


def compare_edm(repo):
    with importing(repo) as module:
        generate, losses, networks = (
            module(name) for name in ("generate", "training.loss", "training.networks")
        )
        x, noises = normal(9), [normal(20 + i) for i in range(18)]
        sigmas = [*karras_sigmas(np.array([0.002, 80.0]), 18), 0.0]

        class Exact:
            sigma_min, sigma_max, round_sigma = 0, np.inf, staticmethod(torch.as_tensor)

            def __call__(self, x, sigma, labels):
                return exact(x, float(sigma))

        for churn in (0.0, 30.0):
            given = iter(noises)
            wanted = generate.edm_sampler(
                Exact(),
                to_nchw(x),
                S_churn=churn,
                S_min=0.05,
                S_max=50,
                S_noise=1.003,
                randn_like=lambda _, given=given: to_nchw(next(given)),
            )
            more = (
                {"s_churn": churn, "s_tmin": 0.05, "s_tmax": 50, "s_noise": 1.003} if churn else {}
            )
            got = samplers.heun(exact, np.float32(80) * x, sigmas, lambda i: noises[i], **more)
            report(f"EDM's edm_sampler, 18 steps, S_churn {churn:g}", got, to_nhwc(wanted), 1e-4)
        compare_edm_loss(losses, networks)


def compare_edm_loss(losses, networks):
    """EDMLoss of an EDMPrecond whose network answers the same numbers, at the levels that numdiff
    draws."""
    diffusion = Diffusion(path="edm")
    image, eps, answer = normal(4), normal(5), normal(6)
    levels = diffusion.draw(7, np.uint32([4]), np.arange(len(image), dtype=np.uint32))
    sigma = np.asarray(levels.noise, np.float64) / np.asarray(levels.signal, np.float64)
    seen = SimpleNamespace()

    class Network(torch.nn.Module):
        def forward(self, x, c_noise, *_, **__):
            seen.x, seen.c_noise = x, c_noise
            return to_nchw(answer)

    net = networks.EDMPrecond.__new__(networks.EDMPrecond)
    torch.nn.Module.__init__(net)
    net.label_dim, net.use_fp16, net.sigma_data, net.model = 0, False, 0.5, Network()
    loss = losses.EDMLoss()
    z = torch.from_numpy((np.log(sigma) - loss.P_mean) / loss.P_std).float().reshape(-1, 1, 1, 1)
    randn, randn_like = torch.randn, torch.randn_like
    torch.randn, torch.randn_like = lambda *_, **__: z, lambda x, **_: to_nchw(eps)
    try:
        theirs = loss(net, to_nchw(image), None, None)
    finally:
        torch.randn, torch.randn_like = randn, randn_like
    report(
        "EDM's EDMPrecond: what the network sees",
        diffusion.q_sample(image, eps, levels),
        to_nhwc(seen.x),
    )
    report("EDM's EDMPrecond: c_noise", levels.seen, seen.c_noise.reshape(-1).numpy())
    target = diffusion.target(image, eps, levels)
    report(
        "EDM's EDMLoss",
        diffusion.loss(Tensor(answer), target, image, levels).data,
        [float(theirs.mean())],
        1e-4,
    )


KNOWN = {
    "models/lightningdit.py": compare_lightning,
    "transport/path.py": compare_sit,
    "k_diffusion/sampling.py": compare_k_diffusion,
    "training/loss.py": compare_edm,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("repo", nargs="+", type=pathlib.Path)
    for repo in parser.parse_args().repo:
        compare = next(
            (function for file, function in KNOWN.items() if (repo / file).is_file()), None
        )
        if compare is None:
            parser.error(f"{repo} is no checkout of SiT, LightningDiT, k-diffusion or EDM")
        print(repo)
        compare(repo.resolve())
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
