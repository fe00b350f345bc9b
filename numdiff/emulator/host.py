"""The host's side of an emulated GPU: its arrays, and a context in which Numba's own launches come to it.

Inside `with device():` a kernel made by `cuda.jit` is launched as always, `kernel[grid, block](…)`; `cuda.to_device`,
`cuda.device_array` and their kin give `EmulatedArray`s. Outside, nothing changes. Numba is patched if it has been
imported, and never imported from here.
"""
import contextlib
import functools
import sys

import numpy as np

from .arguments import why_refused
from .arrays import contiguous_strides
from .faults import LaunchRefused, Unsupported
from .launch import MAX_BLOCK, MAX_GRID, MAX_THREADS, Emulator
from .memory import GLOBAL, Memory
from .memory_spaces import STATIC_SHARED
from .namespace import Namespace
from .values import dtype_of, scalar, type_named


class EmulatedArray:
    """An array in the emulated GPU's memory, with the methods of Numba's device arrays; uninitialised without
    `contents`."""

    def __init__(self, shape, dtype=np.float64, contents=None, order="C"):
        self.shape = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(n) for n in shape)
        self.dtype = np.dtype(dtype)
        self.memory = Memory(GLOBAL, self.nbytes)
        self.memory.address = self.memory.bytes.ctypes.data
        strides = contiguous_strides(self.shape[::-1] if order == "F" else self.shape, self.dtype.itemsize)
        self.offset, self.strides = 0, strides[::-1] if order == "F" else strides
        if contents is not None:
            self._host()[...] = contents
            self._mark_written()

    @property
    def size(self):
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self):
        return self.size * self.dtype.itemsize

    @property
    def ndim(self):
        return len(self.shape)

    def _host(self):
        """The contents as a NumPy array that shares the memory."""
        return np.ndarray(self.shape, self.dtype, self.memory.bytes, self.offset, self.strides)

    def emulated_memory(self):
        return self.memory, self.offset, self.shape, self.dtype, self.strides

    def _view(self, data):
        """An array of the same memory: `data` is a view of `_host()`."""
        view = EmulatedArray.__new__(EmulatedArray)
        view.shape, view.dtype, view.strides, view.memory = data.shape, data.dtype, data.strides, self.memory
        view.offset = data.ctypes.data - self.memory.address
        return view

    def _mark_written(self):
        if self._host().flags.c_contiguous:
            self.memory.mark_written(self.offset, self.offset + self.nbytes)
        else:
            np.ndarray(self.shape + (self.dtype.itemsize,), np.uint8, self.memory.valid, self.offset,
                       self.strides + (1,))[...] = 1

    @property
    def T(self):
        return self._view(self._host().T)

    def transpose(self, axes=None):
        return self._view(self._host().transpose(axes))

    def view(self, dtype):
        return self._view(self._host().view(dtype))

    def is_c_contiguous(self):
        return self._host().flags.c_contiguous

    def is_f_contiguous(self):
        return self._host().flags.f_contiguous

    @property
    def alloc_size(self):
        return self.nbytes

    def squeeze(self, axis=None, stream=0):
        return self._view(self._host().squeeze(axis))

    def split(self, section, stream=0):
        """Views of `section` elements each."""
        return (self[start:start + section] for start in range(0, self.size, section))

    def __len__(self):
        return self.shape[0]

    def copy_to_host(self, ary=None, stream=0):
        """The contents as a NumPy array, or into `ary`."""
        if ary is None:
            return self._host().copy(order="A")
        self._refuse_other(ary)
        ary[...] = self._host()
        return ary

    def copy_to_device(self, ary, stream=0):
        self._refuse_other(ary)
        self._host()[...] = ary.copy_to_host() if isinstance(ary, EmulatedArray) else ary
        self._mark_written()

    def _refuse_other(self, ary):
        """Raise where an array to copy from or to has another shape or type, as Numba does."""
        if np.ndim(ary) and (ary.shape, ary.dtype) != (self.shape, self.dtype):
            raise ValueError(f"the array on the device has the shape {self.shape} and the type {self.dtype}, the other "
                             f"{ary.shape} and {ary.dtype}: a copy needs the same")

    def __getitem__(self, index):
        """A number, or a view of the device's memory."""
        part = self._host()[index]
        return self._view(part) if isinstance(part, np.ndarray) else part

    def __setitem__(self, index, value):
        part = self._host()[index]
        if isinstance(part, np.ndarray):
            self._view(part).copy_to_device(value)
        else:
            self._host()[index] = value
            at = index if isinstance(index, tuple) else (index,)
            start = self.offset + sum(int(i) % n * s for i, n, s in zip(at, self.shape, self.strides, strict=True))
            self.memory.mark_written(start, start + self.dtype.itemsize)

    def __array__(self, dtype=None, copy=None):
        return self._host().astype(dtype or self.dtype)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def reshape(self, *shape, order="C"):
        shape = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        data = self._host().reshape(shape, order=order)
        if not np.shares_memory(data, self._host()):
            raise ValueError("only contiguous arrays can be reshaped on a device")
        return self._view(data)

    def ravel(self, order="C"):
        return self.reshape(self.size, order=order)

    def __repr__(self):
        return f"EmulatedArray(shape={self.shape}, dtype={self.dtype})"


class Launcher:
    """What `kernel[grid, block, stream, shared]` gives inside the context."""

    def __init__(self, machine, kernel, grid, block, stream=0, shared=0):
        self._arguments = machine, kernel, grid, block, shared

    def __call__(self, *arguments, **named):
        machine, kernel, grid, block, shared = self._arguments
        if named:
            raise LaunchRefused(f"{kernel.__name__}: a kernel takes no arguments by name; give {', '.join(named)} by "
                                "place.")
        machine.launch(kernel, grid, block, *arguments, shared=shared)


def configured(machine, kernel, configuration):
    """`kernel[grid, block, stream, shared]`"""
    if not isinstance(configuration, tuple) or not 2 <= len(configuration) <= 4:
        raise LaunchRefused(f"{kernel.__name__}[…] takes a grid and a block, then a stream and bytes of shared memory "
                            f"if need be: {kernel.__name__}[grid, block](…).")
    return Launcher(machine, kernel, *configuration)


class EmulatedKernel:
    """A kernel that was made inside the context by a `cuda.jit` that would need a GPU (one with a signature).

    signatures: the types of its arguments, one tuple for each signature
    """

    def __init__(self, machine, function, options, signatures=()):
        self._machine, self.py_func, self.targetoptions = machine, function, options
        self.__name__, self._signatures = function.__name__, signatures

    def __getitem__(self, configuration):
        return configured(self._machine, self, configuration)

    def converted(self, arguments):
        """The arguments in the types of the signature that fits: Numba casts numbers, and refuses other arrays."""
        if not self._signatures:
            return arguments
        fitting = [types for types in self._signatures
                   if len(types) == len(arguments) and all(map(_fits, types, arguments))]
        if not fitting:
            known = " or ".join(f"({', '.join(map(str, types))})" for types in self._signatures)
            raise LaunchRefused(f"{self.__name__}: its signature has {known}; these arguments are "
                                f"({', '.join(map(_described, arguments))}).")
        return [a if hasattr(a, "shape") and a.shape or type_named(str(t)) is None else type_named(str(t))(scalar(a))
                for t, a in zip(fitting[0], arguments, strict=True)]

    def forall(self, count, tpb=128, stream=0, sharedmem=0):
        return Launcher(self._machine, self, -(-count // (tpb or 128)), tpb or 128, stream, sharedmem)

    def __call__(self, *arguments):  # a device function, called from the host by mistake or from a test
        return self.py_func(*arguments)


def _fits(kind, argument):
    """Whether an argument is what a signature's type says, as far as arrays go."""
    shape = getattr(argument, "shape", ())
    if not hasattr(kind, "ndim"):
        return not shape
    dtype = type_named(str(kind.dtype))
    return len(shape) == kind.ndim and (dtype is None or dtype_of(dtype) == argument.dtype)


def _described(argument):
    shape = getattr(argument, "shape", ())
    return f"{argument.dtype}[{', '.join(':' * len(shape))}]" if shape else type(argument).__name__


def _signatures_of(given):
    """[types of the arguments] of what was given to `cuda.jit`: a signature, a string, or a list of them."""
    read = sys.modules["numba.cuda.core.sigutils"].normalize_signature
    return [read(one)[0] for one in (given if isinstance(given, list) else [given])]


class _Stream:
    """Work on a stream is done at once."""

    def synchronize(self):
        pass

    @contextlib.contextmanager
    def auto_synchronize(self):
        yield self


class _Event:
    def record(self, stream=0):
        pass

    synchronize = wait = record

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


class Reduce:
    """What `cuda.reduce` makes of a function of two numbers: a reduction of arrays, here one number after the other."""

    def __init__(self, machine, function):
        self._function = machine.function(function)

    def __call__(self, arr, size=None, res=None, init=0, stream=0):
        numbers = np.asarray(arr)[:size]
        result = functools.reduce(self._function, (scalar(v) for v in numbers), scalar(numbers.dtype.type(init)))
        if res is None:
            return numbers.dtype.type(result)
        res[0] = result
        return None


class _Device(Namespace):
    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def _emulated_gpu(machine):
    """What `cuda.get_current_device()` gives."""
    return _Device("get_current_device()", {
        "name": "emulated GPU", "id": 0, "compute_capability": machine.cc, "WARP_SIZE": 32, "MULTIPROCESSOR_COUNT": 2,
        "MAX_THREADS_PER_BLOCK": MAX_THREADS, "MAX_SHARED_MEMORY_PER_BLOCK": STATIC_SHARED,
        **{f"MAX_{what}_DIM_{axis}": size for what, sizes in (("BLOCK", MAX_BLOCK), ("GRID", MAX_GRID))
           for axis, size in zip("XYZ", sizes, strict=True)}, "reset": lambda: None, "synchronize": lambda: None})


# Functions of numba.cuda for the host that need a GPU and have no counterpart here.
_NEED_A_GPU = ("as_cuda_array", "current_context", "declare_device", "detect", "external_stream",
               "from_cuda_array_interface", "list_devices", "open_ipc_array", "profile_start", "profile_stop",
               "profiling", "set_memory_manager")


def _replacements(machine, module):
    """Names of `numba.cuda` that need a GPU -> what they are in the emulator."""
    jit = module.jit

    def emulated_jit(function=None, *positional, device=False, **options):
        if callable(function) and not isinstance(function, (str, tuple, list)) and not hasattr(function, "args"):
            return jit(function, *positional, device=device, **options)
        if function is None and not positional:
            return jit(device=device, **options)
        signatures = [] if device or function is None else _signatures_of(function)
        return lambda python: EmulatedKernel(machine, python, {**options, "device": device}, signatures)

    def to_device(obj, stream=0, copy=True, to=None):
        if to is not None:
            to.copy_to_device(obj)
            return to
        obj = np.asarray(obj)
        refused = why_refused(obj)
        if refused:
            raise LaunchRefused(f"cuda.to_device takes arrays of numbers or records: this is {refused}.")
        return EmulatedArray(obj.shape, obj.dtype, obj, "F" if obj.flags.fnc else "C")

    def device_array(shape, dtype=np.float64, strides=None, order="C", stream=0):
        return EmulatedArray(shape, dtype, None, order)

    def device_array_like(ary, stream=0):
        flags = ary.flags if isinstance(ary, np.ndarray) else ary._host().flags
        return EmulatedArray(ary.shape, ary.dtype, None, "F" if flags.fnc else "C")

    def host_array(shape, dtype=np.float64, strides=None, order="C", **options):
        return np.empty(shape, dtype, order)

    def missing(name):
        def refuse(*arguments, **named):
            raise Unsupported(f"the emulator does not know {name}, which needs a GPU")
        return refuse

    @contextlib.contextmanager
    def nothing(*arrays, stream=0):
        yield

    return {**{name: missing(f"cuda.{name}") for name in _NEED_A_GPU}, "pinned": nothing, "defer_cleanup": nothing,
            "reduce": lambda function: Reduce(machine, function), "Reduce": lambda function: Reduce(machine, function),
            "event_elapsed_time": lambda start, end: start.elapsed_time(end), "vectorize": missing("cuda.vectorize"),
            "guvectorize": missing("cuda.guvectorize"), "get_current_device": lambda: _emulated_gpu(machine),
            "gpus": [_emulated_gpu(machine)], "close": lambda: None,
            "mapped_array_like": lambda ary: np.empty_like(ary), "per_thread_default_stream": _Stream,
            "legacy_default_stream": _Stream, "jit": emulated_jit, "to_device": to_device, "device_array": device_array,
            "device_array_like": device_array_like,
            "pinned_array": host_array, "pinned_array_like": lambda ary: np.empty_like(ary), "mapped_array": host_array,
            "managed_array": host_array, "synchronize": lambda: None, "stream": _Stream, "default_stream": _Stream,
            "event": lambda timing=True: _Event(), "is_available": lambda: True, "select_device": lambda index: None}


def _for_other_targets(numba, name):
    """numba.vectorize and numba.guvectorize, but not for target="cuda"."""
    original = getattr(numba, name)

    def call(*arguments, **options):
        if options.get("target") == "cuda":
            raise Unsupported(f"the emulator does not know numba.{name}: write a @cuda.jit kernel")
        return original(*arguments, **options)
    return call


@contextlib.contextmanager
def device(cc=(9, 0), checks=True, order="forward", seed=0, on_fault="raise", float64=None, break_at=None,
           recorder=None, tracer=None, patience=5.0):
    """An emulated GPU, as a context; inside, Numba's own `kernel[grid, block](...)` runs on it too.

    cc: compute capability (limits of shared memory); checks: True, False, or names (`numdiff.emulator.CHECKS`)
    order: "forward", "reversed" or "shuffled" by `seed`: in which order threads take their turns
    on_fault: "raise" a `KernelFault` after a launch with faults, or "collect" them in the emulator's `faults`
    float64: True where float64 arithmetic is meant; None: where a kernel is given a float64 array
    break_at: (block, thread), two triples: where `breakpoint()` in a kernel stops; None: at the first thread
    recorder, tracer: see counts.py and trace.py; patience: seconds after which a loop that waits is called endless
    """
    machine = Emulator(cc, checks, order, seed, on_fault, float64, patience, recorder, tracer)
    if break_at is not None and (not isinstance(break_at, tuple) or [
            len(at) if isinstance(at, tuple) else 0 for at in break_at] != [3, 3]):
        raise ValueError(f"break_at {break_at!r} must be a block and a thread, such as ((0, 0, 0), (5, 0, 0)).")
    machine.stop_at = break_at
    module = sys.modules.get("numba.cuda")
    undo = []

    def patch(owner, name, value):
        undo.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, value)

    if module is not None:
        for name, value in _replacements(machine, module).items():
            if name in module.__dict__:
                patch(module, name, value)
        for name in ("vectorize", "guvectorize"):
            patch(sys.modules["numba"], name, _for_other_targets(sys.modules["numba"], name))
        dispatcher = getattr(sys.modules.get("numba.cuda.dispatcher"), "CUDADispatcher", None)
        if dispatcher is not None:
            patch(dispatcher, "__getitem__", lambda kernel, configuration: configured(machine, kernel, configuration))
            patch(dispatcher, "specialize", lambda kernel, *arguments: kernel)
            patch(dispatcher, "configure",
                  lambda kernel, grid, block, stream=0, sharedmem=0: Launcher(machine, kernel, grid, block, stream,
                                                                              sharedmem))
            patch(dispatcher, "forall", lambda kernel, count, tpb=128, stream=0,
                  sharedmem=0: Launcher(machine, kernel, -(-count // (tpb or 128)), tpb or 128, stream, sharedmem))
    try:
        yield machine
    finally:
        for owner, name, value in reversed(undo):
            setattr(owner, name, value)
