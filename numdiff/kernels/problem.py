"""A problem: the arguments of one call of an operation, with the shapes and the kinds of numbers of its arrays.

    Problem(x=single(3, 7), scale=0.7)                                a small one, which every version must solve
    Problem(x=single(49152, 256), scale=0.125, measured=True)         of a model's size: the benchmark measures it

An operation's record (operation.py) has a list of them. `numdiff kernels check` and the tests run the small ones in the
emulator, against float64; `numdiff bench kernels --of files` times the others on a GPU.
"""
from dataclasses import dataclass, field

import numpy as np

from ..dtypes import float16

TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}  # relative error in the 2-norm against float64


@dataclass(frozen=True)
class Array:
    """An array of a problem: standard normal numbers of this shape and dtype, or given values.

    values: an array, or a function of a `numpy.random.Generator` that returns one; None for normal numbers
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
            return np.asarray(self.values(rng) if callable(self.values) else self.values, self.dtype)
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
    values = np.asarray(values, dtype)
    return Array(values.shape, values.dtype, values)


def filled(shape, values, dtype=np.float32):
    """What `values(rng)` returns, an array of this shape and dtype."""
    return Array(tuple(shape), np.dtype(dtype), values)


@dataclass
class Problem:
    """One call of an operation. Every further keyword is an argument of the operation: an `Array`, or what is passed
    as it is.

    label: what identifies it among the operation's problems; None: the shapes of its first arrays
    tolerance: relative error in the 2-norm that a version may have against float64; None: that of the dtype
    fast: the quick tests run it in the emulator; otherwise only the exhaustive ones do
    measured: of a model's size, so that the benchmark times it, and neither check nor tests run it
    versions: names of the versions that run it; None: every version that fits
    inputs: a function of a `numpy.random.Generator` that returns {name: array}, where arrays depend on one another
    run: a function of (inputs as attributes, version) in place of the call of the operation
    precision: the roof of the benchmark ("fp32", "tf32", "fp16", "fp8"); None: that of the dtype
    """

    label: str | None = None
    tolerance: float | None = None
    fast: bool = True
    measured: bool = False
    versions: tuple | None = None
    inputs: object = None
    run: object = None
    precision: str | None = None
    arguments: dict = field(default_factory=dict)

    def __init__(self, label=None, *, tolerance=None, fast=True, measured=False, versions=None, inputs=None, run=None,
                 precision=None, **arguments):
        self.label, self.tolerance, self.fast, self.measured = label, tolerance, fast, measured
        self.versions, self.inputs, self.run, self.precision = versions, inputs, run, precision
        self.arguments = arguments
        if label is None:
            self.label = ", ".join(str(array) for array in list(self.arrays().values())[:2])

    def arrays(self):
        """{name: Array} of the arguments that are arrays."""
        return {name: value for name, value in self.arguments.items() if isinstance(value, Array)}

    def make(self, rng):
        """{name: NumPy array} of the arguments that are arrays."""
        made = {} if self.inputs is None else dict(self.inputs(rng))
        return {**{name: array.make(rng) for name, array in self.arrays().items()}, **made}

    @property
    def dtype(self):
        """Name of the dtype of the first array of floats; "float32" where there is none."""
        return next((array.dtype.name for array in self.arrays().values() if array.dtype.name in TOLERANCE), "float32")

    @property
    def allowed(self):
        """The relative error that a version may have."""
        return TOLERANCE[self.dtype] if self.tolerance is None else self.tolerance
