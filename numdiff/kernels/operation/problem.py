"""A problem: the arguments of one call of an operation, with the shapes and the kinds of numbers of
its arrays.

    Problem(x=single(3, 7), scale=0.7)                                a small one, which every version must solve
    Problem(x=single(49152, 256), scale=0.125, measured=True)         of a model's size: the benchmark measures it

An operation's record (record.py) has a list of them. `numdiff kernels check` and the tests run
the small ones in the emulator, against float64; `numdiff bench kernels --of files` times the others
on a GPU.
"""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...dtypes import float16

# relative error in the 2-norm against float64
TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}


@dataclass(frozen=True)
class Array:
    """An array of a problem: standard normal numbers of this shape and dtype, or given values.

    values: an array, or a function of a `numpy.random.Generator` that returns one; None for normal
    numbers
    place: arguments with the same place are one array
    positive: absolute values, as a variance or a reciprocal standard deviation has
    """

    shape: tuple
    dtype: object = np.dtype(np.float32)
    values: object = None
    place: int = 0
    positive: bool = False

    def __repr__(self):
        return "×".join(map(str, self.shape))

    def make(self, rng):
        """The array in NumPy, floats in float64 that are exact in this dtype."""
        if self.values is not None:
            return np.asarray(
                self.values(rng) if callable(self.values) else self.values, self.dtype
            )
        numbers = rng.standard_normal(self.shape)
        return (np.abs(numbers) if self.positive else numbers).astype(self.dtype)


def single(*shape):
    """float32, standard normal."""
    return Array(shape)


def positive(*shape):
    """float32, absolute values of standard normal numbers."""
    return Array(shape, positive=True)


def half(*shape):
    """float16, standard normal."""
    return Array(shape, np.dtype(float16))


def integers(values, dtype=np.int32):
    """These integers."""
    return numbers(values, dtype)


def numbers(values, dtype=np.float32):
    """These numbers."""
    values = np.asarray(values, dtype)
    return Array(values.shape, values.dtype, values)


def filled(shape, values, dtype=np.float32):
    """What `values(rng)` returns, an array of this shape and dtype."""
    return Array(tuple(shape), np.dtype(dtype), values)


def _within(name, value):
    """(name, Array) of each `Array` in an argument."""
    if isinstance(value, Array):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for i, each in enumerate(value):
            yield from _within(f"{name}.{i}", each)


def _with_arrays(name, value, arrays):
    """An argument with arrays in place of each `Array`."""
    if name in arrays:
        return arrays[name]
    if not isinstance(value, (list, tuple)):
        return value
    items = [_with_arrays(f"{name}.{i}", each, arrays) for i, each in enumerate(value)]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


@contextlib.contextmanager
def replaced(module, **values):
    """Context: names of a module have these values, such as a choice of tiles. module: its name"""
    module = sys.modules[module]
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


SEED, PURPOSE = 1234567890123, 3  # of random numbers, for problems


def counters(batch):
    """{name: Array}: the step and the samples' numbers in the run, which count random numbers
    (random.py)."""
    return {
        "step": Array((1,), np.dtype(np.uint32), [5]),
        "samples": Array((batch,), np.dtype(np.uint32), lambda rng: rng.permutation(100)[:batch]),
    }


class Problem:
    """One call of an operation. Every further keyword is an argument of the operation: an `Array`,
    a list or NamedTuple with some, or what is passed as it is.

    label: what identifies it among the operation's problems; None: the shapes of its first arrays,
    and their dtype
    tolerance: relative error in the 2-norm that a version may have against float64; None: that of
    the dtype
    bfloat16: check and tests run it with bfloat16 arrays in place of its float16 ones, too;
        "exhaustive": of the tests only the exhaustive ones
    fast: the quick tests run it in the emulator; otherwise only the exhaustive ones do; or the
        names of the versions that the quick tests run
    once: tests run it in one thread order: it is long, and others have what two orders could show
    only_compiled: tests compile it and do not run it, since others run each two of its kernel's
    constants
    measured: of a model's size, so that the benchmark times it, and neither check nor tests run it;
        "not yet": and its figures are still to be measured
    versions: names of the versions that run it; (): the one that the operation chooses; None: every
    version that fits
    inputs: a function of a `numpy.random.Generator` that returns {name: array}, where arrays depend
    on one another
    derived: a function of {name: array}, the arrays so far, that returns further ones, such as a
    row's mean of its x
    within: a function that returns a context in which the call is made, such as a plan that only
    large shapes have
    run: a function of (inputs as attributes, version) in place of the call of the operation
    call: a function of the arguments in place of the operation, such as one that makes the
        operation's arguments from views of an array; check and benchmark call it, with `version=`
        where the operation has versions
    precision: the roof of the benchmark ("fp32", "tf32", "fp16", "fp8"); None: that of the dtype
    note: words that the benchmark adds to the problem's name
    moved, flops: what the benchmark counts, where the arrays do not determine them
    arguments: {name: value} of those of the operation
    """

    tolerance: float | None = None
    bfloat16: bool | str = False
    fast: bool | tuple = True
    once: bool = False
    only_compiled: bool = False
    measured: bool | str = False
    versions: tuple | None = None
    inputs: Callable | None = None
    derived: Callable | None = None
    within: Callable | None = None
    run: Callable | None = None
    call: Callable | None = None
    precision: str | None = None
    note: str = ""
    moved: int = 0
    flops: int | None = None

    def __init__(self, label=None, **given):
        self.label = label
        for name in SETTINGS & given.keys():
            setattr(self, name, given.pop(name))
        self.arguments = given
        if label is None:
            words = [str(array) for array in self.arrays().values()][:2]
            self.label = ", ".join([*words, *([self.dtype] if self.dtype != "float32" else [])])

    def arrays(self):
        """{name: Array} of the arguments that are arrays; one in a list, tuple or NamedTuple is
        called "buffers.0"."""
        return {
            name: array
            for argument, value in self.arguments.items()
            for name, array in _within(argument, value)
        }

    def bound(self, arrays):
        """{name: value}: the arguments with these arrays, {name: array}, in their places, and what
        was derived."""
        return {
            **{name: array for name, array in arrays.items() if "." not in name},
            **{name: _with_arrays(name, value, arrays) for name, value in self.arguments.items()},
        }

    def make(self, rng):
        """{name: NumPy array} of the arrays."""
        made = {} if self.inputs is None else dict(self.inputs(rng))
        made = {**{name: array.make(rng) for name, array in self.arrays().items()}, **made}
        return made if self.derived is None else {**made, **self.derived(made)}

    @property
    def dtype(self):
        """Name of the dtype of the first array of floats; "float32" where there is none."""
        return next(
            (array.dtype.name for array in self.arrays().values() if array.dtype.name in TOLERANCE),
            "float32",
        )

    @property
    def allowed(self):
        """The relative error that a version may have."""
        return TOLERANCE[self.dtype] if self.tolerance is None else self.tolerance


SETTINGS = (
    Problem.__annotations__.keys()
)  # of a problem; other keywords are the operation's arguments
