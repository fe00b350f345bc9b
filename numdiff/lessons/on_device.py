"""A learner's kernel on a real device, after the emulator has found it right: its result, and how
long it takes."""

import time

import numpy as np

from ..device import download, empty, launch, synchronize, upload
from . import advice

REPEATS = 20  # launches that are timed together


def run_on(backend, module, learner, seed=0):
    """(right, seconds of one call) on the first problem of a puzzle.

    The problems are tiny, so the time is mostly that of the launch.
    """
    grid, block, inputs = next(iter(module.problems(np.random.default_rng(seed))))
    expected = module.specification(*inputs)
    given = [upload(value, backend) if isinstance(value, np.ndarray) else value for value in inputs]
    out = empty(expected.shape, expected.dtype, like=backend)

    def run(kernel, grid, block, *arguments):
        launch(kernel, grid, block, *arguments)

    run.empty = lambda shape, dtype: empty(shape, dtype, like=backend)

    def call():
        if hasattr(module, "launch"):
            module.launch(run, learner, grid, block, given, out)
        else:
            run(learner.kernel, grid, block, *given, out)

    call()
    right = advice.close(download(out), expected, 1e-2 if expected.itemsize < 4 else 1e-4).all()
    begun = time.perf_counter()
    for _ in range(REPEATS):
        call()
    synchronize(out)
    return bool(right), (time.perf_counter() - begun) / REPEATS


def gpu_line(puzzle, path):
    """One line about the learner's file on this machine's GPU; None without a GPU."""
    from ..device import get_gpu, why_no_gpu
    from .judge import load, read

    if why_no_gpu():
        return None
    try:
        gpu = get_gpu()
        right, seconds = run_on(gpu, puzzle.module, load(read(path), path))
    except Exception as error:  # whatever Numba and the driver say
        first, *_ = (str(error).strip() or "no reason given").splitlines()
        return f"On this machine's GPU it does not run: {type(error).__name__}: {first}"
    result = "the same result" if right else "another result"
    return f"On the {gpu.device_name}: {result}, {1e6 * seconds:.1f} µs for a call."
