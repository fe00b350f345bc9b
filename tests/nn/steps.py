"""Training steps of small models, whose bits tests compare."""

import numpy as np

from numdiff.diffusion import Diffusion
from numdiff.distributed.buckets import BucketPlan, WatchBackward, touched_by
from numdiff.nn import AdamW, Muon
from numdiff.nn.optimizer import LossScale
from numdiff.training.precision import compute_in
from numdiff.training.step import TrainingStep
from tests.models import small_dit, small_unet, without_zeros


def dit(device="cpu", **options):
    sizes = {"patch_size": 2, "hidden_size": 32, "depth": 3, "num_classes": 3}
    return small_dit(**{**sizes, "device": device, **options})


def unet(device="cpu", **options):
    sizes = {"channel_mult": (1, 2), "attention_resolutions": (4,)}
    return small_unet(**{**sizes, "device": device, **options})


def step_of(model, optimizer="adamw", precision="fp32", batch=4, microbatch=None, capture=True):
    """A step of the model, with a batch loaded."""
    compute_in(without_zeros(model), precision)
    half = precision in ("fp16", "fp8")
    scale = LossScale(model.parameters.data, 1024.0) if half else None
    how = {"learning_rate": 1e-3, "ema_decay": 0.9, "loss_scale": scale}
    if optimizer == "adamw":
        optimizer = AdamW(model.parameters, **how)
    else:
        optimizer = Muon(model.parameters, model.matrices(), **how)
    diffusion = Diffusion(backend=model.backend)
    step = TrainingStep(model, diffusion, optimizer, batch, microbatch, flip=True, capture=capture)
    pixels = np.random.default_rng(0).integers(0, 256, step.images.shape, np.uint8)
    labels = np.arange(batch, dtype=np.int32)
    step.load(pixels, labels % model.num_classes if model.num_classes else None)
    return step


def watch_buckets(step):
    """(buckets, what leaves): the plan of the exchange between ranks for this step, and a
    dictionary to which each bucket is added as it is when the exchange takes it."""
    model = step.model
    plan, left = BucketPlan(model.parameters, size=1 << 10), {}

    class Watcher:
        def begin(self, records):
            plan.make(touched_by(records))

        def played(self, number):
            for bucket in plan.leaving.get(number, ()):
                left[bucket] = model.parameters.grad[slice(*plan.buckets[bucket])].copy()

    step.exchange.watch = lambda: WatchBackward(Watcher())
    return plan.buckets, left


def check_what_left(step, buckets, left):
    """All buckets have left, with the gradients as they are at the step's end."""
    assert len(left) == len(buckets) > 5
    for bucket, gradient in left.items():
        whole = step.model.parameters.grad[slice(*buckets[bucket])]
        np.testing.assert_array_equal(gradient, whole)
