"""How long a training step takes: medians of many, after a warm-up, on whatever device is there."""
import resource
import time

import numpy as np

from ..errors import UsageError
from .build import build_model, build_trainer


class RandomImages:
    """A stand-in for a dataset: the same random images for every step, so that no disk is measured."""

    def __init__(self, count, size, channels, classes=None):
        generator = np.random.default_rng(0)
        self.shape = (count, size, size, channels)
        self.images = generator.integers(0, 256, self.shape, np.uint8)
        self.labels = None if classes is None else generator.integers(0, classes, count).astype(np.int32)


def bench_step(options, steps=20, warmup=5):
    """Times of `steps` training steps of the model and batch that `options` (a TrainOptions) describe.

    Returns a dict: ms (median), ms_fastest, ms_slowest, first_step_s (compiling or loading the kernels included),
    tflops, images_per_second, peak_mib, peak_of ("device arenas" or "process"), parameters, flops_per_step, device.
    """
    if steps < 1 or warmup < 0:
        raise UsageError("--steps must be at least 1 and --warmup at least 0.")
    started = time.perf_counter()
    num_classes = 9 if options.class_cond else None
    model = build_model(options, options.channels or 3, num_classes)
    images = RandomImages(options.batch, options.image_size, model.in_channels, num_classes)
    trainer = build_trainer(options, model, images)
    step = trainer.step_function
    step.load(images.images, images.labels)
    step.run()
    step.synchronize()
    first = time.perf_counter() - started
    for _ in range(warmup):
        step.run()
    step.synchronize()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step.run()
        step.synchronize()
        times.append(time.perf_counter() - start)
    times.sort()
    median = times[len(times) // 2]
    gpu = model.backend
    peak = gpu.peak_bytes if gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"device": getattr(model.backend, "device_name", "cpu (NumPy)"), "ms": median * 1e3,
            "ms_fastest": times[0] * 1e3, "ms_slowest": times[-1] * 1e3, "first_step_s": first,
            "tflops": trainer.flops_per_step / median / 1e12, "images_per_second": options.batch / median,
            "peak_mib": peak / 2**20, "peak_of": "device arenas" if gpu else "process",
            "parameters": model.parameters.count, "flops_per_step": trainer.flops_per_step}
