"""A third kind of model, as a program of one's own would add it: one class, one record."""

import numpy as np

from numdiff.nn import functional as F
from numdiff.nn.layers import Conv2d, Embedding, Linear
from numdiff.nn.model import Model, constructor_options
from numdiff.settings import SAME, setting
from numdiff.training.kinds import ModelKind


class Toy(Model):
    """Two convolutions, and the timestep's embedding between them."""

    kind = "toy"

    def __init__(
        self,
        image_size=32,
        in_channels=3,
        width=16,
        depth=1,
        num_classes=None,
        class_dropout=0.0,
        learn_sigma=False,
        device="auto",
        seed=0,
    ):
        self.options = constructor_options(locals())
        self.image_size, self.in_channels, self.width = image_size, in_channels, width
        self.out_channels, self.learn_sigma = in_channels * (2 if learn_sigma else 1), learn_sigma
        self.num_classes, self.class_dropout = num_classes, class_dropout
        self.first, self.embed = Conv2d(in_channels, width), Linear(width, width)
        if num_classes is not None:
            self.labels = Embedding(num_classes, width)
        self.last = Conv2d(width, self.out_channels)
        self._finish(device, seed)

    def forward(self, x, t, y=None, randomness=None):
        self.check_inputs(t, y)
        e = self.embed(F.timestep_embedding(t, self.width))
        if y is not None:
            e = F.add(e, self.labels(y))
        return F.cast(self.last(F.silu(self.first(F.cast(x, self.dtype), channel=e))), np.float32)


class ToySettings:
    width: int = setting(16, "Channels inside.", unit="N", low=4, high=64, model=SAME)
    depth: int = setting(
        1, "Not the DiT's setting of that name.", unit="N", low=1, high=4, model=SAME
    )


TOY = ModelKind(
    "toy",
    "Toy",
    "tests.training.toy:Toy",
    settings=ToySettings,
    presets={
        "small": {
            "image_size": 16,
            "batch": 4,
            "steps": 3,
            "warmup_steps": 1,
            "sample_count": 2,
            "sample_steps": 2,
            "log_every": 1,
            "width": 8,
        }
    },
    default_preset={"cpu": "small", "cuda": "small"},
)
