"""Compiling kernels side by side, in processes of their own, before one process needs them one after another.

Numba compiles a kernel in one thread, one with products of Hopper's tensor cores for half a minute. A `Planned` device
says which kernels some work will launch, and for arguments of which types; `compile_kernels` brings them into Numba's
cache on disk, where whoever launches them finds them.
"""
import contextlib
import multiprocessing
import signal
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, as_completed

import numpy as np

from ..device import cores, get_gpu
from ..device.gpu import type_of
from ..device.ptx import PtxDevice


class Planned(PtxDevice):
    """A stand-in for a GPU that runs nothing and notes what is launched.

    kernels: {(module, name, types of the arguments): None}, in the order of their first launches
    """

    def __init__(self, gpu):
        super().__init__()
        self.capability, self.multiprocessors, self.device_name = gpu.capability, gpu.multiprocessors, gpu.device_name
        self.kernels = {}

    def download(self, array):
        """Ones, so that no weight is taken for one that starts from zero."""
        return np.ones(array.shape, array.dtype)

    def launch(self, kernel, grid, block, args, *_):
        function = kernel.py_func
        self.kernels[function.__module__, function.__name__, tuple(type_of(a) for a in args)] = None


def kernels_by_name():
    """{(module, name): kernel} of all kernels of numdiff.kernels."""
    from ..kernels import check  # noqa: F401 - loads every module of numdiff.kernels
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("numdiff.kernels")]
    kernels = [kernel for module in modules for value in list(vars(module).values())
               for kernel in (value.values() if isinstance(value, dict) else [value])
               if hasattr(kernel, "py_func") and not kernel.targetoptions.get("device")]
    return {(kernel.py_func.__module__, kernel.py_func.__name__): kernel for kernel in kernels}


def compile_kernel(module, name, signature):
    """In a worker: compile one kernel, or find it on disk."""
    get_gpu()  # says where the cache is
    kernel = kernels_by_name()[module, name]
    kernel.enable_caching()
    kernel.compile(signature)


@contextlib.contextmanager
def deaf():
    """Processes that are started within the context never hear of Ctrl-C: it is this one's to explain."""
    if threading.current_thread() is not threading.main_thread():  # others may not set this
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def compile_kernels(kernels, echo=lambda line: None, work=compile_kernel, workers=None):
    """Compile (module, name, types of the arguments), several at a time: those for Hopper, which take longest, first.

    work: what a worker does with each; workers: processes (default: one a core)
    """
    context = multiprocessing.get_context("spawn")
    waiting = sorted(kernels, key=lambda kernel: "hopper" not in kernel[0])
    workers = min(workers or len(cores()), len(waiting))
    if not waiting:
        return
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(workers, context) as pool:
        with deaf():
            jobs = {pool.submit(work, *kernel): kernel for kernel in waiting}
        try:
            for done, job in enumerate(as_completed(jobs), 1):
                fault = job.exception()
                echo(f"compiled {done} of {len(jobs)}: {jobs[job][1]}" + (f", which failed: {fault}" if fault else ""))
        except BaseException:
            for worker in multiprocessing.active_children():
                if worker not in others:
                    worker.terminate()  # and no other job is begun
            raise
