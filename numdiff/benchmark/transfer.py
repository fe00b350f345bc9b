"""The cost of copies between host and device: one convolution with them, and on arrays that stay on
the device.

    to the device, kernel, back     each alone, launched and waited for
    together                        the three from call to answer
    resident                        the kernel on arrays that stay, many in a row in one graph: a share of its time

All by the host's clock. A program that copies its arrays for each operation pays the second figure.
numdiff's steps pay the third, and copy only a batch of images, concurrently with the step before.
"""

import statistics
import time

import numpy as np

from ..device import download, synchronize, upload
from ..errors import UsageError
from ..kernels.conv2d import conv2d_forward

TOGETHER = 20  # convolutions on resident arrays that are timed at once


def seconds(work, backend, repeats):
    """Median seconds of work(), each waited for."""
    work()
    synchronize(backend)
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        synchronize(backend)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def bench_transfer(backend, batch=1, size=32, channels=64, kernel=3, half=False, repeats=50):
    """Times of one convolution (batch, size, size, channels) to as many channels.

    Returns a dict of seconds: upload, kernel (launched alone, and waited for), download, together
    (the three without a wait between them), resident (of one among many on arrays that stay), and
    of bytes: up, down; and flops.
    """
    if backend is None:
        raise UsageError("--device cpu has no copies to measure; use a GPU.")
    generator = np.random.default_rng(0)
    dtype = np.float16 if half else np.float32
    x = generator.standard_normal((batch, size, size, channels), np.float32).astype(dtype)
    weight = generator.standard_normal((channels, kernel, kernel, channels), np.float32).astype(
        dtype
    )
    on_device = upload(x, backend), upload(weight, backend)

    def with_copies():
        return download(conv2d_forward(upload(x, backend), upload(weight, backend)))

    calls = TOGETHER if hasattr(backend, "capture") else 1

    def many():
        for _ in range(calls):
            conv2d_forward(*on_device)

    y = conv2d_forward(*on_device)
    found = {
        "upload": seconds(lambda: (upload(x, backend), upload(weight, backend)), backend, repeats),
        "kernel": seconds(lambda: conv2d_forward(*on_device), backend, repeats),
        "download": seconds(lambda: download(y), backend, repeats),
        "together": seconds(with_copies, backend, repeats),
    }
    run = many
    if hasattr(backend, "capture"):
        arena = backend.new_arena()
        with backend.within(arena):
            many()
            run = backend.capture(many)
    found["resident"] = seconds(run, backend, repeats) / calls
    return {
        **found,
        "up": x.nbytes + weight.nbytes,
        "down": y.nbytes,
        "flops": 2 * batch * size * size * channels * channels * kernel * kernel,
    }
