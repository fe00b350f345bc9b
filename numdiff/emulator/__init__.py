"""Runs any kernel of this project without a GPU, thread by thread, and reports its faults.

    from numdiff import emulator

    with emulator.device(order="shuffled", seed=1) as gpu:
        kernel[grid, block](x, y)          # a @cuda.jit kernel, as always; or:
        gpu.launch(kernel, grid, block, x, y, shared=0)

A kernel with a fault ends in a `KernelFault`, whose `faults` each say kind, file, line, block and
thread. `numdiff kernels check` does this for the project's own kernels, `python -m numdiff.emulator
script.py` for a program, and `pytest --emulate` for tests.

Read values.py (Numba's numbers), arithmetic.py and functions.py (what is done with them), memory.py
(what is known about every byte), arrays.py (how a kernel sees it), access.py and races.py (what is
checked), threads.py (threads and blocks), schedule.py (the order of threads), loops.py (threads
that wait in loops), launch.py (a launch), arguments.py and memory_spaces.py (its arrays) and
reports.py (its faults). rewrite.py, linking.py and namespace.py turn a kernel's source into a
function that calls them.

All is imported on first use: pytest imports this package for its plugin, in projects without
kernels too.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from .counts import Recorder, count
    from .device_arrays import EmulatedArray
    from .faults import Fault, KernelFault, LaunchRefused, Place, Unsupported
    from .film import Film
    from .host import device, install, trace, uninstall
    from .launch import CHECKS, ORDERS, Emulator, Float64Warning
    from .namespace import twin

__version__ = "0.1.0"  # as numdiff's; the distribution of the emulator alone reads it here

__all__ = [
    "CHECKS",
    "ORDERS",
    "EmulatedArray",
    "Emulator",
    "Fault",
    "Film",
    "Float64Warning",
    "KernelFault",
    "LaunchRefused",
    "Place",
    "Recorder",
    "Unsupported",
    "count",
    "device",
    "install",
    "trace",
    "twin",
    "uninstall",
]
_MODULES = {
    "counts": ("Recorder", "count"),
    "device_arrays": ("EmulatedArray",),
    "film": ("Film",),
    "faults": ("Fault", "KernelFault", "LaunchRefused", "Place", "Unsupported"),
    "host": ("device", "install", "trace", "uninstall"),
    "namespace": ("twin",),
    "launch": ("CHECKS", "ORDERS", "Emulator", "Float64Warning"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(
        importlib.import_module(f".{_MODULE_OF[name]}", __name__), name
    )
    return value


def __dir__():
    return __all__
