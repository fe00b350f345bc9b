"""How long a batch of samples takes through the public interface: medians after a warm-up, on any
device.

The first batch compiles or loads kernels and captures graphs, as the second may, too; both are
reported separately, and later ones do not pay for this. Where PyTorch is measured, too, the two
take turns, batch by batch.
"""

import math
import time

import numpy as np

from ..device import is_planned
from ..device.planned import collect
from ..device.roof import peak_flops
from ..diffusion import Sampling
from ..errors import UsageError
from ..nn.flops import forward_flops
from ..training import kinds
from ..training.build import diffusion_options, model_options
from ..training.compiling import compiling
from ..training.inference import calibrate, inference_model
from ..training.precision import compute_in
from . import CLASSES
from .step import MeasuredJob, beside_torch, random_values, seconds_in_turns, summary


class NumdiffSample(MeasuredJob):
    """Batches of `options.batch` samples from a random model that the options describe; the rest as
    `Sampling` takes.

    Attributes sampling, model; images: the last batch, on the host; first_s, second_s: seconds of
    the first batch, including building the model, and of the second.
    """

    def __init__(self, options, **sampling):
        started = time.perf_counter()
        self.options = options
        if options.device == "cuda":
            with compiling(lambda card: plan_samples(options, sampling, card)):
                pass
        self.model = random_model(options)
        self.backend = self.model.backend
        self.sampling = Sampling(
            self.model, count=options.batch, batch=options.batch, eager=options.eager, **sampling
        )
        self.run()
        self.first_s = time.perf_counter() - started
        started = time.perf_counter()
        self.run()
        self.second_s = time.perf_counter() - started

    @property
    def images_asked(self):
        """Images of one evaluation: with guidance each is evaluated twice."""
        return self.options.batch * (1 if self.sampling.cfg_scale in (None, 1) else 2)

    def run(self):
        ((_, self.images),) = self.sampling.batches()


def plan_samples(options, sampling, card):
    """[Key] of the kernels of a batch of samples on a card."""

    def work(device):
        model = random_model(options.changed(device=device))
        Sampling(model, count=options.batch, batch=options.batch, **sampling).rehearse()

    return collect(work, card)


def random_model(options):
    """The model that the options describe, with random weights and in their precision, as
    `numdiff.load` makes it for inference."""
    num_classes = (options.num_classes or CLASSES) if options.class_cond else None
    sizes = model_options(options, options.channels or 3, num_classes)
    kind = kinds.get(options.model).model_class
    planned = is_planned(options.device)
    if planned:
        model = kind(**sizes, device=options.device)
    else:
        model = inference_model(
            kind, sizes, options.device, lambda made: random_weights(made, options.seed)
        )
    model.diffusion = diffusion_options(options)
    if options.precision == "fp8":
        model.compute_in_float8(evaluates=True)
    else:
        compute_in(model, options.precision)
    if not planned:
        model.parameters.release()
        if options.precision == "fp8":
            calibrate(model)
    return model


def random_weights(parameters, seed):
    """{name: float32 array} of a model's initial values, with random ones in place of zeros, as
    `fill_zeros` has them."""
    arrays, zero = {}, []
    for entry, values in parameters.initial_values(seed):
        name, shape = entry["name"], entry["shape"]
        if values is None:
            zero.append((name, shape))
        else:
            arrays[name] = np.broadcast_to(values, shape)
    random = random_values(max((math.prod(shape) for _, shape in zero), default=0))
    return arrays | {name: random[: math.prod(shape)].reshape(shape) for name, shape in zero}


def bench_sample(options, batches=5, warmup=1, versus=(), started=None, **sampling):
    """Times of `batches` batches of samples from the model and batch that `options` (a
    TrainOptions) describe.

    versus, started: as `bench_step`; sampling: sampler, steps, cfg_scale and more, as `Sampling`
    takes them Returns a dict: ms (of a batch, median), ms_fastest, ms_slowest, ms_per_evaluation,
    evaluations (a batch), images_asked (of one evaluation), first_batch_s (compiling or loading the
    kernels included), second_batch_s, images_per_second, tflops, mfu, peak_mib, peak_of,
    parameters, flops_per_evaluation, device; and versus: a list of dicts as `beside_torch` gives,
    with ms_fastest, ms_slowest, ms_per_evaluation, images_per_second, tflops and mfu.
    """
    if batches < 1 or warmup < 0:
        raise UsageError("--batches must be at least 1 and --warmup at least 0.")
    if versus:
        from .torch_step import require_torch

        require_torch()
    ours = NumdiffSample(options, **sampling)
    backend, evaluations = ours.backend, ours.sampling.evaluations
    flops = forward_flops(ours.model) * ours.images_asked

    def summarise(seconds, precision=None):
        peak = peak_flops(backend, precision or options.precision)
        found = summary(seconds, flops * evaluations, options.batch, peak)
        return {**found, "ms_per_evaluation": found["ms"] / evaluations}

    def make(mode, precision):
        from .torch_sample import TorchSample

        return TorchSample(options, ours.sampling, mode, precision)

    times, others = beside_torch(ours, versus, make, batches, warmup, summarise, started)
    times = times or seconds_in_turns([ours], batches, warmup)[0]
    return {
        "device": getattr(backend, "device_name", "cpu (NumPy)"),
        **summarise(times),
        "evaluations": evaluations,
        "images_asked": ours.images_asked,
        "first_batch_s": ours.first_s,
        "second_batch_s": ours.second_s,
        "peak_mib": ours.peak_bytes / 2**20,
        "peak_of": "device arenas" if backend else "process",
        "parameters": ours.model.parameters.count,
        "flops_per_evaluation": flops,
        "versus": others,
    }
