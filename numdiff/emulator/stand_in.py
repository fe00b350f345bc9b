"""`numba` and `numba.cuda` for programs on a machine without Numba: what they call around their
kernels.

Numba takes half a gigabyte, and does not exist for WebAssembly. The emulator needs the plain
function under `@cuda.jit` only, so that a program of kernels runs without Numba. Its `from numba
import cuda` finds the modules of this file inside `emulator.device()`, and only if Numba is not
installed. What needs Numba's compiler or its types says so: signatures, `vectorize` and
`guvectorize`, `numba.cuda.random`.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

import numpy as np

from .faults import Unsupported
from .signatures import NO_SIGNATURES
from .values import ALIASES, DTYPES, TYPES

NAMES = ("numba", "numba.cuda", "numba.cuda.dispatcher", "numba.types")
HOST = (
    "to_device",
    "device_array",
    "device_array_like",
    "pinned_array",
    "pinned_array_like",
    "mapped_array",
    "mapped_array_like",
    "managed_array",
    "synchronize",
    "stream",
    "default_stream",
    "event",
    "event_elapsed_time",
    "is_available",
    "select_device",
    "current_context",
    "list_devices",
    "detect",
    "profile_start",
    "profile_stop",
    "profiling",
    "get_current_device",
    "gpus",
    "close",
    "pinned",
    "defer_cleanup",
    "reduce",
    "Reduce",
    # of numba.cuda: host.py has them
    "vectorize",
    "guvectorize",
    "is_cuda_array",
    "as_cuda_array",
)
KERNEL = (
    "threadIdx",
    "blockIdx",
    "blockDim",
    "gridDim",
    "warpsize",
    "laneid",
    "grid",
    "gridsize",
    "syncthreads",
    "syncwarp",
    "shared",
    "local",
    "const",
    "atomic",
    "shfl_sync",
    "shfl_up_sync",
    "shfl_down_sync",
    "shfl_xor_sync",
    "all_sync",
    "any_sync",
    "eq_sync",
    "ballot_sync",
    "activemask",
    "threadfence",
    "fma",
    "popc",
)


class Type:
    """A type of Numba's, such as `numba.float32`: in a kernel a cast, and the type of a shared
    array."""

    def __init__(self, name):
        self.name = name

    def __call__(self, value):
        return DTYPES[self.name].type(value)

    def __repr__(self):
        return self.name

    def __getitem__(self, shape):
        raise Unsupported(NO_SIGNATURES)


Type.__module__ = "numba.types"


class CUDADispatcher:
    """What the stand-in's `cuda.jit` gives; the emulator's context gives it its launches."""

    def __init__(self, function, options):
        self.py_func, self.targetoptions, self.__name__ = function, options, function.__name__
        self.__doc__ = function.__doc__

    def __getitem__(self, configuration):
        raise Unsupported(
            f"{self.__name__} is launched outside of `with {__package__}.device():`, and Numba, which "
            "would compile it for a GPU, is not installed"
        )

    def __call__(self, *arguments):
        return self.py_func(*arguments)


CUDADispatcher.__module__ = "numba.cuda.dispatcher"


def jit(function=None, *signatures, **options):
    if signatures or function is not None and not isinstance(function, types.FunctionType):
        raise Unsupported(NO_SIGNATURES)
    return (
        CUDADispatcher(function, options)
        if function is not None
        else lambda python: CUDADispatcher(python, options)
    )


def njit(function=None, *signatures, **options):
    """numba.njit and numba.jit: the function itself; kernels that call it run its text."""
    return function if isinstance(function, types.FunctionType) else lambda python: python


def _missing(name):
    def refuse(*arguments, **named):
        raise Unsupported(
            f"{name} needs Numba, or an emulator's context: pip install numba numba-cuda, or use `with "
            f"{__package__}.device():`"
        )

    return refuse


def _kernel_name(name):
    """What a program imports by name from numba.cuda for its kernels: a class of this name, as
    Numba's stubs are."""
    return type(name, (), {"__module__": "numba.cuda.stubs"})


class _Loader(importlib.abc.Loader):
    def create_module(self, spec):
        return None

    def exec_module(self, module):
        kinds = {name: Type(ALIASES.get(name, name)) for name in (*TYPES, *ALIASES)}
        if module.__name__ in ("numba", "numba.types"):
            vars(module).update(kinds)
        if module.__name__ == "numba":
            module.__path__, module.__version__ = [], "0"
            module.njit = module.jit = njit
            module.prange = range
            module.from_dtype = np.dtype
            module.vectorize, module.guvectorize = (
                _missing("numba.vectorize"),
                _missing("numba.guvectorize"),
            )
            module.types = importlib.import_module("numba.types")
        elif module.__name__ == "numba.cuda":
            module.__path__ = []
            vars(module).update({name: _missing(f"cuda.{name}") for name in HOST}, jit=jit)
            vars(module).update({name: _kernel_name(name) for name in KERNEL}, **kinds)
            module.types = importlib.import_module("numba.types")
            importlib.import_module("numba.cuda.dispatcher")
        elif module.__name__ == "numba.cuda.dispatcher":
            module.CUDADispatcher = CUDADispatcher


class Finder(importlib.abc.MetaPathFinder):
    """Finds the stand-ins where nothing else has found Numba: it is the last finder."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, _Loader()) if name in NAMES else None


FINDER = Finder()


def provide():
    """Give programs the stand-ins if Numba is not installed. They stay until `withdraw`."""
    if (
        FINDER not in sys.meta_path
        and "numba" not in sys.modules
        and importlib.util.find_spec("numba") is None
    ):
        sys.meta_path.append(FINDER)
        return True
    return False


def withdraw():
    """No longer provide them; modules that a program has imported stay."""
    if FINDER in sys.meta_path:
        sys.meta_path.remove(FINDER)
