"""The host's side of an emulated GPU: a context in which Numba's own launches come to it.

Inside `with device():` a kernel made by `cuda.jit` is launched as always, `kernel[grid, block](…)`;
`cuda.to_device`, `cuda.device_array` and their kin give `EmulatedArray`s. Outside, nothing changes.
Numba is patched if it has been imported, and never imported from here. Where it is not installed,
stand_in.py takes its place.
"""

import contextlib
import functools
import importlib.util
import itertools
import operator
import sys
import weakref
from typing import NamedTuple

import numpy as np

from . import stand_in
from .arguments import why_refused
from .compiled import (
    OF_THE_COMPILER,
    overload_of,
    patch_compiler,
    patch_context,
    refused_without_compiler,
)
from .device_arrays import EmulatedArray, device_memset, from_interface, on_device
from .faults import LaunchRefused, Unsupported
from .film import WARPS, Film
from .launch import MAX_BLOCK, MAX_GRID, MAX_THREADS, Emulator
from .memory_spaces import STATIC_SHARED
from .namespace import Namespace
from .signatures import signatures_of, type_of
from .values import is_numbas, scalar
from .vectorized import guvectorize, vectorize


class Launcher:
    """What `kernel[grid, block, stream, shared]` gives inside the context."""

    def __init__(self, machine, kernel, grid, block, stream=0, shared=0):
        self._arguments = machine, kernel, grid, block, shared

    def __reduce__(self):
        _, kernel, grid, block, shared = self._arguments
        return operator.getitem, (kernel, (grid, block, 0, shared))

    def __call__(self, *arguments, **named):
        machine, kernel, grid, block, shared = self._arguments
        if named:
            raise LaunchRefused(
                f"{kernel.__name__}: a kernel takes no arguments by name; give {', '.join(named)} by "
                "place."
            )
        for extension in reversed(getattr(kernel, "targetoptions", {}).get("extensions") or ()):
            arguments = [
                extension.prepare_args(type_of(a), a, stream=0, retr=[])[1] for a in arguments
            ]
        machine.launch(kernel, grid, block, *arguments, shared=shared)


def configured(machine, kernel, configuration):
    """`kernel[grid, block, stream, shared]`"""
    if not isinstance(configuration, tuple) or not 2 <= len(configuration) <= 4:
        raise LaunchRefused(
            f"{kernel.__name__}[…] takes a grid and a block, then a stream and bytes of shared memory "
            f"if need be: {kernel.__name__}[grid, block](…)."
        )
    return Launcher(machine, kernel, *configuration)


def for_all(machine, kernel, count, tpb=128, stream=0, sharedmem=0):
    """`kernel.forall(count)`; of no elements nothing is launched."""
    if count < 0:
        raise ValueError(f"{kernel.__name__}.forall({count}): a count of elements is not negative.")
    if count == 0:
        return lambda *arguments: None
    return Launcher(machine, kernel, -(-count // (tpb or 128)), tpb or 128, stream, sharedmem)


class EmulatedKernel:
    """A kernel that was made inside the context by a `cuda.jit` that would need a GPU (one with a
    signature).

    signatures: of each the types of the arguments and of the result
    """

    def __init__(self, machine, function, options, signatures=()):
        self._machine, self.py_func, self.targetoptions = machine, function, options
        self.__name__, self.signatures_given = function.__name__, signatures

    def __getitem__(self, configuration):
        return configured(self._machine, self, configuration)

    @property
    def overloads(self):
        """{types of the arguments: what is known of the kernel that Numba would have compiled for
        them}"""
        return {tuple(types): overload_of(self) for types, _ in self.signatures_given}

    def compile(self, signature):
        return overload_of(self)

    def forall(self, count, tpb=128, stream=0, sharedmem=0):
        return for_all(self._machine, self, count, tpb, stream, sharedmem)

    def configure(self, grid, block, stream=0, sharedmem=0):
        return Launcher(self._machine, self, grid, block, stream, sharedmem)

    def specialize(self, *arguments):
        return self

    def __getattr__(self, name):
        if name in OF_THE_COMPILER:
            return functools.partial(refused_without_compiler(name), self)
        raise AttributeError(f"{self.__name__} has no {name}")

    # a device function, called from the host by mistake or from a test
    def __call__(self, *arguments):
        return self.py_func(*arguments)


class _Stream:
    """Work on a stream is done at once."""

    external = False
    _handles = itertools.count(0x1000)

    def __init__(self, handle=None):
        self.external = handle is not None
        self.handle = next(self._handles) if handle is None else handle

    def __int__(self):
        return self.handle

    def synchronize(self):
        pass

    def add_callback(self, callback, arg=None):
        callback(self, 0, arg)

    async def async_done(self):
        return self

    @contextlib.contextmanager
    def auto_synchronize(self):
        yield self


class _Gpus(list):
    """`cuda.gpus`"""

    @property
    def current(self):
        return self[0]

    lst = property(lambda self: self)


class MappedArray(np.ndarray):
    """An array of `cuda.mapped_array`, `cuda.managed_array` or `cuda.pinned_array`: the host's,
    which kernels use in place."""

    stream = 0

    @property
    def __cuda_array_interface__(self):
        return {
            "shape": self.shape,
            "strides": None if self.flags.c_contiguous else self.strides,
            "version": 3,
            "typestr": self.dtype.str,
            "data": (self.ctypes.data, False),
            "stream": getattr(self.stream, "handle", None),
        }

    def copy_to_host(self, ary=None, stream=0):
        if ary is None:
            return np.array(self, subok=False)
        ary[...] = self
        return ary


class _Event:
    def record(self, stream=0):
        pass

    synchronize = wait = record

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


class Reduce:
    """What `cuda.reduce` makes of a function of two numbers: a reduction of arrays, here one number
    after the other."""

    def __init__(self, machine, function):
        self._function = machine.unchecked(function)

    def __call__(self, arr, size=None, res=None, init=0, stream=0):
        numbers = np.asarray(arr)[:size]
        result = functools.reduce(
            self._function, (scalar(v) for v in numbers), scalar(numbers.dtype.type(init))
        )
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
    return _Device(
        "get_current_device()",
        {
            "name": "emulated GPU",
            "id": 0,
            "compute_capability": machine.cc,
            "WARP_SIZE": 32,
            "MULTIPROCESSOR_COUNT": 2,
            "COMPUTE_CAPABILITY_MAJOR": machine.cc[0],
            "COMPUTE_CAPABILITY_MINOR": machine.cc[1],
            "uuid": "GPU-00000000-0000-0000-0000-000000000000",
            "supports_float16": machine.cc >= (5, 3),
            "supports_bfloat16": machine.cc >= (8, 0),
            "supports_fp8": machine.cc >= (8, 9),
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": machine.shared_limit,
            "MAX_THREADS_PER_MULTI_PROCESSOR": 2048,
            "UNIFIED_ADDRESSING": 1,
            "get_primary_context": lambda: _Context(machine),
            "MAX_THREADS_PER_BLOCK": MAX_THREADS,
            "MAX_SHARED_MEMORY_PER_BLOCK": STATIC_SHARED,
            **{
                f"MAX_{what}_DIM_{axis}": size
                for what, sizes in (("BLOCK", MAX_BLOCK), ("GRID", MAX_GRID))
                for axis, size in zip("XYZ", sizes, strict=True)
            },
            "reset": lambda: None,
            "synchronize": lambda: None,
        },
    )


# Functions of numba.cuda for the host that need a GPU and have no counterpart here.
_NEED_A_GPU = ("open_ipc_array", "set_memory_manager")
MEMORY = 80 << 30  # bytes that the emulated GPU says it has


class _Context(_Device):
    """What `cuda.current_context()` gives."""

    def __init__(self, machine):
        super().__init__(
            "current_context()",
            {
                "id": 0,
                "device": _emulated_gpu(machine),
                "reset": lambda: None,
                "synchronize": lambda: None,
                "push": lambda: None,
                "pop": lambda: None,
                "get_memory_info": lambda: _MemoryInfo(MEMORY, MEMORY),
                "create_stream": lambda *options: _Stream(),
                "create_event": lambda timing=True: _Event(),
                # memory is freed at once
                "get_default_stream": _Stream,
                "deallocations": (pending := []),
                "memory_manager": Namespace("the memory manager", {"deallocations": pending}),
            },
        )


class _MemoryInfo(NamedTuple):
    free: int
    total: int


def _replacements(machine, module):
    """Names of `numba.cuda` that need a GPU -> what they are in the emulator."""
    jit, mlir = module.jit, module.__name__ == MLIR

    def emulated_jit(function=None, *positional, device=False, **options):
        if (
            callable(function)
            and not isinstance(function, (str, tuple, list))
            and not hasattr(function, "args")
        ):
            return jit(function, *positional, device=device, **options)
        if function is None and not positional:
            return jit(device=device, **options)
        signatures = [] if function is None else signatures_of(function, mlir)
        return lambda python: EmulatedKernel(
            machine, python, {**options, "device": device}, signatures
        )

    def to_device(obj, stream=0, copy=True, to=None):
        if to is not None:
            to.copy_to_device(obj)
            return to
        obj = np.asarray(obj)
        refused = why_refused(obj)
        if refused:
            raise LaunchRefused(
                f"cuda.to_device takes arrays of numbers or records: this is {refused}."
            )
        return EmulatedArray(obj.shape, obj.dtype, obj, "F" if obj.flags.fnc else "C", stream)

    def device_array(shape, dtype=np.float64, strides=None, order="C", stream=0):
        return EmulatedArray(shape, dtype, None, order, stream)

    def device_array_like(ary, stream=0):
        flags = ary.flags if isinstance(ary, np.ndarray) else ary.on_host().flags
        return EmulatedArray(ary.shape, ary.dtype, None, "F" if flags.fnc else "C")

    def host_array_like(ary):
        return host_array(
            ary.shape, ary.dtype, order="F" if device_array_like(ary).flags.fnc else "C"
        )

    def host_array(shape, dtype=np.float64, strides=None, order="C", stream=0, **options):
        made = np.empty(shape, dtype, order).view(MappedArray)
        made.stream = stream
        return made

    def missing(name):
        def refuse(*arguments, **named):
            raise Unsupported(f"the emulator does not know {name}, which needs a GPU")

        return refuse

    def as_cuda_array(obj, sync=True):
        if not hasattr(obj, "__cuda_array_interface__"):
            raise TypeError("*obj* doesn't implement the cuda array interface.")
        made = on_device(obj)
        return imported(made) if made is not obj else obj

    def from_cuda_array_interface(desc, owner=None, sync=True):
        return imported(from_interface(desc))

    def imported(array):
        array.stream = _Stream(array.stream) if array.stream else 0
        return array

    @contextlib.contextmanager
    def nothing(*arrays, stream=0):
        yield

    @contextlib.contextmanager
    def mapped(*arrays, stream=0):
        yield arrays if len(arrays) > 1 else arrays[0]

    return {
        **{name: missing(f"cuda.{name}") for name in _NEED_A_GPU},
        "pinned": nothing,
        "mapped": mapped,
        "defer_cleanup": nothing,
        "reduce": lambda function: Reduce(machine, function),
        "Reduce": lambda function: Reduce(machine, function),
        "event_elapsed_time": lambda start, end: start.elapsed_time(end),
        "vectorize": vectorize(machine, mlir),
        "guvectorize": guvectorize(machine, mlir),
        "as_cuda_array": as_cuda_array,
        "from_cuda_array_interface": from_cuda_array_interface,
        "external_stream": _Stream,
        "is_cuda_array": lambda obj: hasattr(obj, "__cuda_array_interface__"),
        "current_context": lambda device=None: _Context(machine),
        "list_devices": lambda: [_emulated_gpu(machine)],
        "detect": lambda: print("Found 1 emulated GPU") or True,
        "profile_start": lambda: None,
        "profile_stop": lambda: None,
        "profiling": nothing,
        "get_current_device": lambda: _emulated_gpu(machine),
        "gpus": _Gpus([_emulated_gpu(machine)]),
        "close": lambda: None,
        "mapped_array_like": host_array_like,
        "per_thread_default_stream": _Stream,
        "legacy_default_stream": _Stream,
        "jit": emulated_jit,
        "to_device": to_device,
        "device_array": device_array,
        "device_array_like": device_array_like,
        "pinned_array": host_array,
        "pinned_array_like": host_array_like,
        "mapped_array": host_array,
        "managed_array": host_array,
        "synchronize": lambda: None,
        "stream": _Stream,
        "default_stream": _Stream,
        "event": lambda timing=True: _Event(),
        "is_available": lambda: True,
        "select_device": lambda index: None,
    }


def _for_other_targets(numba, name, here):
    """numba.vectorize and numba.guvectorize, which for target="cuda" are the emulator's."""
    original = getattr(numba, name)

    def call(*arguments, **options):
        return (here if options.get("target") == "cuda" else original)(*arguments, **options)

    return call


MLIR = "numba_cuda_mlir.cuda"
# by the module that `cuda` is
DISPATCHERS = {
    "numba.cuda": ("numba.cuda.dispatcher", "CUDADispatcher"),
    MLIR: ("numba_cuda_mlir.descriptor", "MLIRDispatcher"),
}
# where NUMBA_ENABLE_CUDASIM has put Numba's simulator into the place of its compiler
SIMULATED = "numba.cuda.simulator.kernel", "FakeCUDAKernel"


class _AtImport:
    """Calls `patch` once one of these modules has been imported: a finder that stands before the
    others."""

    def __init__(self, patch):
        self._patch, self._found = patch, set()
        sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, target=None):
        if name not in DISPATCHERS or name in self._found:
            return None
        self._found.add(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                self._patch(module)

            spec.loader.exec_module = exec_module
        return spec

    def remove(self):
        if self in (sys.meta_path or ()):  # None while Python ends
            sys.meta_path.remove(self)


_NOTHING = object()  # in the place of a name that an owner had not
# a module -> how many names it had when none was one of numba.cuda's
_SEEN = weakref.WeakKeyDictionary()


def _imported_by_name(ids):
    """(module, name, original) of functions of Numba that other modules have imported by their
    names."""
    # a module may be there under two names
    for module in {id(m): m for m in list(sys.modules.values())}.values():
        names = getattr(module, "__dict__", None)
        if (
            names is None
            or is_numbas(getattr(module, "__name__", None))
            or (_SEEN.get(module) == len(names))
        ):
            continue
        found = [(module, name, value) for name, value in list(names.items()) if id(value) in ids]
        if found:
            yield from found
        else:
            with contextlib.suppress(TypeError):
                _SEEN[module] = len(names)


def is_simulator(cuda):
    """Whether Numba's simulator has taken the place of the module `numba.cuda`, or None."""
    return cuda is not None and str(getattr(cuda.jit, "__module__", "")).startswith(
        "numba.cuda.simulator"
    )


@contextlib.contextmanager
def device(
    cc=(9, 0),
    checks=True,
    order="forward",
    seed=0,
    on_fault="raise",
    float64=None,
    break_at=None,
    recorder=None,
    trace=False,
    patience=5.0,
    compile=False,
):
    """An emulated GPU, as a context; inside, Numba's own `kernel[grid, block](...)` runs on it too.

    cc: compute capability (limits of shared memory); checks: True, False, or names
    (`numdiff.emulator.CHECKS`)
    order: "forward", "reversed" or "shuffled" by `seed`: in which order threads take their turns
    on_fault: "raise" a `KernelFault` after a launch with faults, or "collect" them in the
    emulator's `faults`
    float64: True where float64 arithmetic is meant; None: where a kernel is given a float64 array
    break_at: (block, thread), two triples: where `breakpoint()` in a kernel stops; None: at the
    first thread
    recorder: see counts.py; trace: True or a `Film`, to record a film of the launches, the
    machine's `film`
    patience: seconds after which a loop that waits is called endless
    compile: whether numba-cuda, which needs no GPU for it, first compiles each kernel for its
        arguments. It then raises its own errors for what it does not compile, and `overloads` and
        `inspect_asm()` give its results
    """
    film = Film() if trace is True else trace or None
    machine = Emulator(cc, checks, order, seed, on_fault, float64, patience, recorder, film)
    if break_at is not None and (
        not isinstance(break_at, tuple)
        or [len(at) if isinstance(at, tuple) else 0 for at in break_at] != [3, 3]
    ):
        raise ValueError(
            f"break_at {break_at!r} must be a block and a thread, such as ((0, 0, 0), (5, 0, 0))."
        )
    machine.stop_at = break_at
    undo = []

    def patch(owner, name, value):
        undo.append((owner, name, vars(owner).get(name, _NOTHING)))
        setattr(owner, name, value)

    def patch_all(module):
        simulated = is_simulator(module)
        if compile and simulated:
            raise Unsupported(
                "compile=True needs numba-cuda's compiler, and NUMBA_ENABLE_CUDASIM takes its place: "
                "unset it."
            )
        if compile and module.__name__ == MLIR:
            raise Unsupported(
                "compile=True needs numba-cuda: numba-cuda-mlir compiles for a GPU of the machine only."
            )
        news = [
            (module, name, value)
            for name, value in _replacements(machine, module).items()
            if name in module.__dict__ and not (compile and name == "jit")
        ]
        if module.__name__ != MLIR:
            numba = sys.modules["numba"]
            driver = sys.modules.get(f"{module.__name__}.cudadrv.driver")
            if hasattr(driver, "device_memset"):
                news.append((driver, "device_memset", device_memset))
            news += [
                (numba, name, _for_other_targets(numba, name, here))
                for name, here in (
                    ("vectorize", vectorize(machine)),
                    ("guvectorize", guvectorize(machine)),
                )
            ]
        by_original = {id(owner.__dict__[name]): value for owner, name, value in news}
        for owner, name, original in _imported_by_name(by_original):
            patch(owner, name, by_original[id(original)])
        for owner, name, value in news:
            patch(owner, name, value)
        where, what = SIMULATED if simulated else DISPATCHERS[module.__name__]
        dispatcher = getattr(sys.modules.get(where), what, None)
        if simulated:
            patch(dispatcher, "py_func", property(lambda kernel: kernel.fn))
        elif module.__name__ != MLIR:
            patch_context(module, _Context(machine), patch)
        if compile:
            patch_compiler(machine, module, patch)
        elif dispatcher is not None:
            patch(
                dispatcher,
                "__getitem__",
                lambda kernel, configuration: configured(machine, kernel, configuration),
            )
            patch(dispatcher, "specialize", lambda kernel, *arguments: kernel)
            patch(dispatcher, "compile", lambda kernel, signature: overload_of(kernel))
            for name in OF_THE_COMPILER:
                if hasattr(dispatcher, name):
                    patch(dispatcher, name, refused_without_compiler(name))
            patch(
                dispatcher,
                "configure",
                lambda kernel, grid, block, stream=0, sharedmem=0: Launcher(
                    machine, kernel, grid, block, stream, sharedmem
                ),
            )
            patch(
                dispatcher,
                "forall",
                lambda kernel, count, tpb=128, stream=0, sharedmem=0: for_all(
                    machine, kernel, count, tpb, stream, sharedmem
                ),
            )

    for name in DISPATCHERS:
        if name in sys.modules:
            patch_all(sys.modules[name])
    provided = stand_in.provide()
    at_import = None if all(name in sys.modules for name in DISPATCHERS) else _AtImport(patch_all)
    try:
        yield machine
    finally:
        if at_import is not None:
            at_import.remove()
        if provided:
            stand_in.withdraw()
        for owner, name, value in reversed(undo):
            if value is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


_installed = []  # contexts that `install` has entered


def install(**options):
    """Enter `device(**options)` until `uninstall()`, or the program's end; returns the emulator.

    At the top of a program, or of a conftest.py, before modules are imported whose kernels have
    signatures: Numba would compile those for a GPU while it imports them.
    """
    context = device(**options)
    machine = context.__enter__()
    _installed.append(context)
    return machine


def uninstall():
    """Leave what the last `install` has entered."""
    if _installed:
        _installed.pop().__exit__(None, None, None)


def trace(kernel=None, grid=None, block=None, *args, shared=0, cluster=1, warps=WARPS, **options):
    """The `Film` of one run of a kernel; without a kernel a context that gives the film of all
    launches inside.

    Faults of the kernel are in the film, `film.faults`, and are not raised unless on_fault="raise"
    is given.
    options: those of `device`; shared: bytes of dynamic shared memory; warps: how many are recorded
    at most
    """
    options.setdefault("on_fault", "collect")
    film = Film(warps)
    if kernel is None:
        return _filming(film, options)
    Emulator(film=film, **options).launch(
        kernel, grid, block, *args, shared=shared, cluster=cluster
    )
    return film


@contextlib.contextmanager
def _filming(film, options):
    with device(trace=film, **options):
        yield film
