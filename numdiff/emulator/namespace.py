"""The meaning of names inside a kernel: `cuda`, `math`, types, device functions, intrinsics.

A kernel's globals and closure are looked through once; whatever belongs to Numba or has other rules
on a GPU is replaced. Numba itself is recognised by its names and never imported here.
"""

import builtins
import functools
import math
import sys
import types as python_types

import numpy as np

from . import functions, values
from .arrays import CheckedArray, IntegerArray
from .conversions import fma
from .faults import Missing, Unsupported
from .functions import MATH, EmulatedMath
from .libdevice import Libdevice
from .overloads import overloaded, overloads_of
from .values import dtype_of, is_numbas, numbas_name, scalar, type_named
from .vectors import vector_types
from .whole_arrays import WHOLE

TWINS = {}  # id of an intrinsic -> (intrinsic, its twin)
WARP = 32


def twin(intrinsic):
    """Decorator: the function that the emulator calls where a kernel calls `intrinsic`.

    The twin gets the machine first, then the call's arguments as a kernel holds them (values.py).
    """

    def register(function):
        TWINS[id(intrinsic)] = (intrinsic, function)
        return function

    return register


def is_numba(value):
    module = getattr(type(value), "__module__", None) or ""
    return isinstance(module, str) and is_numbas(module)


class Namespace:
    """An object of attributes; a missing one raises `Unsupported` with its name."""

    def __init__(self, name, attributes):
        self.__dict__.update(attributes)
        self._name = name

    def __getattr__(self, attribute):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise Unsupported(f"the emulator does not know {self._name}.{attribute}")


class Resolver:
    """Turns the objects that a kernel names into what they are in the emulator of one machine."""

    def __init__(self, machine):
        self.machine = machine
        self.cuda = emulated_cuda(machine)
        self.types = Namespace(
            "numba.types",
            {
                **values.TYPES,
                **{alias: values.TYPES[name] for alias, name in values.ALIASES.items()},
            },
        )
        self.numpy, self.libdevice = EmulatedNumpy(machine), Libdevice()
        self.math, self.builtins = MATH, functions.BUILTINS
        if "float64" in machine.checks:
            self.math = EmulatedMath(self._noticed_float64)
            self.builtins = {
                **functions.BUILTINS,
                "min": functions.choose(min, self._noticed_float64),
                "max": functions.choose(max, self._noticed_float64),
            }
        if machine.recorder is not None:
            machine.recorder.count_functions(self)

    def _noticed_float64(self, name):
        machine = self.machine
        if not machine.float64_is_meant:
            machine.report(
                "float64",
                f"{name} of integers or float64 is float64 arithmetic in a kernel without "
                "float64 arrays: cast its arguments",
                machine.site_here(),
            )

    def __call__(self, name, value):
        """The stand-in of `value`, which a kernel knows as `name`."""
        if isinstance(value, python_types.ModuleType):
            return self.module(value)
        registered = TWINS.get(id(value))
        if registered is not None:
            return self.bind(registered[1])
        if callable(value) and (overloads := overloads_of(value)):
            return overloaded(self.machine, name, overloads)
        if isinstance(value, (bool, int, str, bytes, type(None))) and not isinstance(
            value, np.generic
        ):
            return value
        if isinstance(value, (float, complex, np.generic)):
            return scalar(value)
        if isinstance(value, tuple):
            members = [self(name, v) for v in value]
            return type(value)(*members) if hasattr(value, "_fields") else tuple(members)
        if isinstance(value, np.ndarray):
            return self.machine.constant_array(name, value)
        # read and written where it is, as Numba keeps its address
        if hasattr(value, "__cuda_array_interface__"):
            return self.machine.captured_array(name, value)
        if value is cuda_range:
            return value
        if isinstance(value, type):
            if issubclass(value, np.generic):
                return type_named(np.dtype(value).name) or value
            if value in _BUILTIN_TYPES:
                return self.builtins[value.__name__]
            return self._stub(value)
        if hasattr(value, "py_func"):
            return self.machine.device_function(value)
        if is_numba(value):
            return self.numba_object(name, value)
        if isinstance(value, python_types.BuiltinFunctionType):
            if getattr(math, value.__name__, None) is value:
                return getattr(self.math, value.__name__)
            return (
                self.builtins.get(value.__name__, value)
                if getattr(builtins, value.__name__, None) is value
                else value
            )
        if isinstance(value, python_types.FunctionType):
            if numbas_name(value.__module__ or "") == "numba.cuda.cg":
                return getattr(self.cuda.cg, value.__name__)
            if is_numbas(value.__module__):
                return self.cuda.__dict__.get(value.__name__) or self._missing(
                    f"{value.__module__}.{value.__name__}"
                )
            return self.machine.function(value)
        if isinstance(value, np.ufunc):
            return getattr(self.numpy, value.__name__)
        if isinstance(value, functools.partial):
            return Missing(
                f"neither Numba nor the emulator knows functools.partial, which {name} is: write a device "
                "function"
            )
        return value

    def bind(self, function):
        # no frame of its own: a twin finds its kernel one frame up
        return functools.partial(function, self.machine)

    def module(self, module):
        name = numbas_name(module.__name__)
        if name == "math":
            return self.math
        if name == "numpy":
            return self.numpy
        if name in ("numba.cuda", "numba.cuda.simulator"):
            return self.cuda
        if name.endswith("libdevice") or name.endswith("mathimpl"):
            return self.libdevice
        if name in ("numba.cuda.types", "numba.types", "numba.core.types"):
            return self.types
        if name == "numba":
            return Namespace(
                "numba",
                {
                    **self.types.__dict__,
                    "cuda": self.cuda,
                    "types": self.types,
                    "literal_unroll": self.cuda.literal_unroll,
                    "from_dtype": np.dtype,
                    "prange": range,
                },
            )
        if name == "numba.cuda.cg":
            return self.cuda.cg
        if name == "operator":
            return module
        if is_numbas(module.__name__) and name.rpartition(".")[2] in (
            "shared",
            "local",
            "const",
            "atomic",
            "fp16",
        ):
            return self.cuda.__dict__[name.rpartition(".")[2]]
        return ResolvingModule(self, module)

    def _stub(self, value):
        """`cuda.threadIdx` and the like, imported by name: Numba's stubs are classes. Any other
        class is itself."""
        if not is_numbas(value.__module__):
            return value
        if value.__name__ == "laneid":
            return Missing("the emulator does not know laneid imported by name: write cuda.laneid")
        return self.cuda.__dict__.get(value.__name__) or self._missing(value.__name__)

    def numba_object(self, name, value):
        kind = type_named(str(getattr(value, "name", "")))
        if kind is not None:
            return kind
        if isinstance(getattr(value, "dtype", None), np.dtype):  # of a record, by numba.from_dtype
            return value.dtype
        stub = self.cuda.__dict__.get(getattr(value, "__name__", ""))
        return stub if stub is not None else self._missing(getattr(value, "__name__", None) or name)

    @staticmethod
    def _missing(name):
        return Missing(f"the emulator does not know {name}: give it a twin with {__package__}.twin")


_BUILTIN_TYPES = (int, float, bool, complex)
cuda_range = range


class ResolvingModule:
    """Another module, whose members are resolved as they are requested."""

    def __init__(self, resolver, module):
        self._resolver, self._module, self._found = resolver, module, {}

    def __getattr__(self, name):
        value = getattr(self._module, name)
        found = self._found.get(name)
        if found is None or found[0] is not value:
            found = self._found[name] = value, self._resolver(name, value)
        return found[1]


_ARRAYS = (CheckedArray, IntegerArray, np.ndarray)


class EmulatedNumpy:
    """`np` in a kernel: its types are casts, its functions work on one number, or on arrays element
    by element."""

    def __init__(self, machine):
        self._machine = machine

    def _elementwise(self, function):
        def one(*numbers):
            return scalar(function(*[int(n) if isinstance(n, int) else n for n in numbers]))

        def call(*arguments):
            arrays = [a for a in arguments if a.__class__ in _ARRAYS]
            if not arrays:
                return one(*arguments)
            if len(arguments) != function.nin + 1:
                raise Unsupported(
                    f"the emulator knows np.{function.__name__} of arrays with an array for the result "
                    "only"
                )
            *inputs, out = arguments
            for index in np.ndindex(tuple(out.shape)):
                numbers = [
                    a[index[len(index) - a.ndim :]] if a.__class__ in _ARRAYS else a for a in inputs
                ]
                out[index] = one(*numbers)
            return out

        return call

    def __getattr__(self, name):
        kind = type_named(name)
        if kind is not None:
            return kind
        if name in WHOLE or name in ("amin", "amax"):
            return WHOLE[name.removeprefix("a") if name[1:] in ("min", "max") else name]
        if name == "random":
            return Missing(
                "neither Numba nor the emulator knows np.random in a kernel: use numba.cuda.random"
            )
        value = getattr(np, name)
        if isinstance(value, float):
            return np.float64(value)
        if isinstance(value, np.ufunc):
            return self._elementwise(value)
        return value


def _bits_of(value):
    """(value without sign, width) of an integer."""
    width = 64 if value.__class__ in (int, values.UInt64, bool) else 32
    return int(value) & (1 << width) - 1, width


def emulated_cuda(machine):
    """The object that a kernel finds under the name `cuda`."""
    frame = sys._getframe

    # indices --------------------------------------------------------------------------------------

    t, b, bd, gd = machine.thread_index, machine.block_index, machine.block_dim, machine.grid_dim

    def grid(ndim=None):
        if ndim not in (1, 2, 3):
            raise ValueError(f"cuda.grid({ndim}): the number of dimensions is 1, 2 or 3")
        x = t.x + b.x * bd.x
        if ndim == 1:
            return x
        y = t.y + b.y * bd.y
        return (x, y) if ndim == 2 else (x, y, t.z + b.z * bd.z)

    def gridsize(ndim=None):
        if ndim not in (1, 2, 3):
            raise ValueError(f"cuda.gridsize({ndim}): the number of dimensions is 1, 2 or 3")
        sizes = (bd.x * gd.x, bd.y * gd.y, bd.z * gd.z)
        return sizes[0] if ndim == 1 else sizes[:ndim]

    # barriers -------------------------------------------------------------------------------------

    def syncthreads():
        machine.scheduler.syncthreads(frame(1))

    def as_int(of):
        return lambda predicates: values.Int32(of(predicates))

    def syncthreads_count(predicate):
        return machine.scheduler.meet("syncthreads_count", bool(predicate), as_int(sum), frame(1))

    def syncthreads_and(predicate):
        return machine.scheduler.meet("syncthreads_and", bool(predicate), as_int(all), frame(1))

    def syncthreads_or(predicate):
        return machine.scheduler.meet("syncthreads_or", bool(predicate), as_int(any), frame(1))

    def threadfence():
        if machine.checked:
            machine.access.fence()

    def threadfence_block():
        if machine.checked:
            machine.access.fence(everywhere=False)

    # memory ---------------------------------------------------------------------------------------

    def shared_array(shape=None, dtype=None, alignment=None, **named):
        return machine.shared_array(
            shape, element_type("shared", dtype, **named), alignment, frame(1)
        )

    def local_array(shape=None, dtype=None, alignment=None, **named):
        return machine.local_array(shape, element_type("local", dtype, **named), frame(1))

    def element_type(space, dtype=None, type=None):
        if dtype is None and type is None:
            raise TypeError(f"cuda.{space}.array needs a dtype")
        return dtype_of(type if dtype is None else dtype)

    def array_like(array):
        return machine.constant_array("constant", array)

    # integers and floats --------------------------------------------------------------------------

    def popc(x):
        return values.Int32(bin(_bits_of(x)[0]).count("1"))

    def clz(x):
        bits, width = _bits_of(x)
        return values.Int32(width - bits.bit_length())

    def brev(x):
        bits, width = _bits_of(x)
        kind = values.TYPES[f"{'u' if x.__class__ in values.UNSIGNED else ''}int{width}"]
        return kind(int(f"{bits:0{width}b}"[::-1], 2))

    def ffs(x):
        bits, _ = _bits_of(x)
        return values.Int32((bits & -bits).bit_length())

    def selp(condition, a, b):
        return a if condition else b

    def cbrt(x):
        return x.__class__(math.copysign(abs(float(x)) ** (1 / 3), float(x)) if x else x)

    def load_hinted(array, index):
        return array[index]

    def store_hinted(array, index, value):
        array[index] = value

    from .warp import warp_functions

    namespace = {
        **vector_types(),
        **dict.fromkeys(("ldca", "ldcg", "ldcs", "ldlu", "ldcv"), load_hinted),
        **dict.fromkeys(("stcg", "stcs", "stwb", "stwt"), store_hinted),
        "threadIdx": t,
        "blockIdx": b,
        "blockDim": bd,
        "gridDim": gd,
        "warpsize": WARP,
        "grid": grid,
        "gridsize": gridsize,
        "syncthreads": syncthreads,
        "syncthreads_count": syncthreads_count,
        "syncthreads_and": syncthreads_and,
        "syncthreads_or": syncthreads_or,
        "threadfence": threadfence,
        "threadfence_block": threadfence_block,
        "threadfence_system": threadfence,
        "shared": Namespace("cuda.shared", {"array": shared_array}),
        "local": Namespace("cuda.local", {"array": local_array}),
        "const": Namespace("cuda.const", {"array_like": array_like}),
        "popc": popc,
        "clz": clz,
        "brev": brev,
        "ffs": ffs,
        "selp": selp,
        "literal_unroll": lambda values: values,
        "fma": lambda a, b, c: fma(a, b, c),
        "cbrt": cbrt,
        "nanosleep": lambda ns: machine.scheduler.yield_turn(frame(1)),
        **warp_functions(machine),
        **values.TYPES,
        **{alias: values.TYPES[name] for alias, name in values.ALIASES.items()},
    }
    from .atomics import Atomic

    namespace["atomic"] = Atomic(machine)
    namespace["fp16"] = Namespace("cuda.fp16", _half_functions())
    namespace["cg"] = Namespace(
        "cuda.cg",
        {
            "this_grid": lambda: Namespace(
                "grid group", {"sync": lambda: machine.scheduler.grid_meet(frame(1))}
            )
        },
    )
    namespace["libdevice"] = Libdevice()
    namespace["types"] = Namespace("cuda.types", values.TYPES)
    return EmulatedCuda(machine, namespace)


def _half_functions():
    half = values.float16
    return {
        "hadd": lambda a, b: half(a) + half(b),
        "hsub": lambda a, b: half(a) - half(b),
        "hmul": lambda a, b: half(a) * half(b),
        "hdiv": lambda a, b: half(a) / half(b),
        "hfma": lambda a, b, c: fma(half(a), half(b), half(c)),
        "hneg": lambda a: -half(a),
        "habs": lambda a: abs(half(a)),
        "hmax": lambda a, b: max(half(a), half(b)),
        "hmin": lambda a, b: min(half(a), half(b)),
        "heq": lambda a, b: a == b,
        "hne": lambda a, b: a != b,
        "hgt": lambda a, b: a > b,
        "hge": lambda a, b: a >= b,
        "hlt": lambda a, b: a < b,
        "hle": lambda a, b: a <= b,
        **{
            "h" + name: getattr(MATH, name)
            for name in (
                "exp",
                "log",
                "log2",
                "sin",
                "cos",
                "sqrt",
                "floor",
                "ceil",
                "trunc",
                "exp2",
                "log10",
            )
        },
        "hexp10": functions.float_result(lambda x: 10.0**x, name="exp"),
        "hrsqrt": lambda a: (
            half(1 / math.sqrt(float(a))) if a > 0 else half(math.inf if a == 0 else math.nan)
        ),
        "hrcp": lambda a: half(np.float32(1) / np.float32(a)),
        "hrint": lambda a: half(np.rint(half(a))),
    }


class EmulatedCuda(Namespace):
    """`cuda` with its lane number, which differs from thread to thread."""

    def __init__(self, machine, attributes):
        super().__init__("cuda", attributes)
        self._machine = machine

    @property
    def laneid(self):
        return values.Int32(self._machine.thread.lane)

    @property
    def random(self):
        """numba.cuda.random: its generators are functions like a kernel's own."""
        found = next(
            sys.modules[name]
            for name in ("numba.cuda.random", "numba_cuda_mlir.numba_cuda.random")
            if name in sys.modules
        )
        return self._machine.resolver.module(found)
