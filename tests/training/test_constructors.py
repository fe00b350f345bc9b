"""What the public constructors say of any value: it is taken, or refused in one sentence, at once."""

import inspect

import numpy as np
import pytest

from numdiff.diffusion import Diffusion, Sampling
from numdiff.errors import NumdiffError, UsageError
from numdiff.nn import AdamW, DiT, Muon, UNet
from numdiff.training import Trainer
from tests.diffusion.stub import GaussianModel
from tests.models import small_dit, small_unet
from tests.training.test_trainer import FixedImages
from tests.training.toy import Toy

VALUES = (
    0,
    -1,
    7,
    0.0,
    -1.5,
    1e300,
    float("nan"),
    float("inf"),
    2**31,
    2**63,
    -(2**40),
    True,
    None,
    "x",
    "",
    (),
    (0,),
    (float("nan"),),
    {},
    b"x",
    1j,
    object(),
    np.float32(1),
    np.array([1, 2]),
    np.zeros((2, 2)),
    "x" * 999,
    "a\nb",
    [1] * 999,
    {1: ["x"] * 99},
    10**400,
    -(10**400),
    [10**400],
    10**5000,
)
TOY = Toy(image_size=8, width=8, device="cpu", seed=0)
PICTURE = {"known": np.zeros((4, 4, 3), np.float32), "mask": np.zeros((4, 4), np.float32)}
WITH = {
    **dict.fromkeys(("known", "mask", "jump", "resamples"), PICTURE),
    "variance": {"sampler": "ddpm"},
    **dict.fromkeys(("s_tmin", "s_tmax", "s_noise"), {"sampler": "heun", "s_churn": 1.0}),
    "s_churn": {"sampler": "heun"},
    "cfg_interval": {"cfg_scale": 2.0},
    "cfg_channels": {"cfg_scale": 2.0},
}


def sampled(**given):
    sampling = Sampling(GaussianModel(steps=10), **{"count": 2, "steps": 2, **given})
    if not given.keys() & {"count", "batch", "steps"}:
        list(sampling.batches())


@pytest.mark.parametrize(
    "made, leaves_out, usual",
    [
        (small_unet, (), UNet),
        (small_dit, (), DiT),
        (lambda **given: AdamW(**{"parameters": TOY.parameters, **given}), (), AdamW),
        (lambda **given: Muon(**{"parameters": TOY.parameters, "matrices": {}, **given}), (), Muon),
        (
            lambda **given: Trainer(
                **{"model": TOY, "dataset": FixedImages(), "batch": 4, **given}
            ),
            ("communicator",),
            Trainer,
        ),
        (lambda **given: Diffusion(**given), ("backend",), Diffusion),
        (sampled, ("model", "arena"), Sampling),
    ],
    ids=["UNet", "DiT", "AdamW", "Muon", "Trainer", "Diffusion", "Sampling"],
)
def test_any_value_is_taken_or_refused(made, leaves_out, usual):
    for name in inspect.signature(usual.__init__).parameters.keys() - {"self", *leaves_out}:
        for value in VALUES:
            more = WITH.get(name, {}) if usual is Sampling else {}
            try:
                made(**{**more, name: value})
            except NumdiffError as error:
                assert len(str(error)) < 400 and "\n" not in str(error), (name, value, str(error))


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: small_unet(in_channels=0), "in_channels 0 must be at least 1."),
        (
            lambda: small_unet(in_channels=2**31),
            "in_channels 2,147,483,648 must be at most 16,384.",
        ),
        (
            lambda: small_unet(in_channels=10**400),
            r"in_channels must be a number between -2\^64 and 2\^64\.",
        ),
        (
            lambda: small_unet(seed=np.zeros((2, 2))),
            r"seed array\(\[\[0., 0.\], \[0., 0.\]\]\) must be",
        ),
        (
            lambda: small_unet(block="x" * 999),
            "block 'x{59}… is not known: use 'resnet' or 'convnext'.",
        ),
        (lambda: small_unet(max_period=float("nan")), "max_period nan must be a finite number."),
        (
            lambda: small_unet(num_classes=1 << 24, device="cpu"),
            r"the model would have 2,147,.* parameters, and kernels",
        ),
        (
            lambda: small_unet(device=3),
            "device must be 'auto', 'cpu', 'cuda' or 'emulator', and not the int 3",
        ),
        (lambda: small_dit(mlp_ratio=float("inf")), "mlp_ratio inf must be a finite number."),
        (lambda: AdamW(TOY), "AdamW takes no .* as parameters: give model.parameters."),
        (
            lambda: sampled(**PICTURE, resamples=10**9),
            "resamples 1,000,000,000 times 2 steps are more than 100,000",
        ),
        (lambda: sampled(eta="x"), "eta must be a number or None, and not the str 'x'."),
    ],
)
def test_what_is_said_of_a_wrong_value(make, says):
    with pytest.raises(UsageError, match=f"^{says}"):
        make()
