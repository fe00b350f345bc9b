"""The two float types of 16 bits: NumPy's float16, and bfloat16, which ml_dtypes gives to NumPy.

    float16     1 sign, 5 exponent, 10 mantissa bits: 11 significant bits, from 2⁻²⁴ to 65,504
    bfloat16    1 sign, 8 exponent, 7 mantissa bits: 8 significant bits, float32's range

A bfloat16 array is an array like any other: NumPy's on the CPU and in the emulator, a `DeviceArray`
of this dtype on a GPU; device/bfloat16.py registers its element type with Numba. Nothing computes
in either type: kernels and references widen what they load to float32 (exactly: a bfloat16 is the
upper half of a float32) and round what they store once, to the nearest, ties to even.

SOURCE
    Kalamkar et al. 2019, "A Study of BFLOAT16 for Deep Learning Training", arXiv:1905.12322.
"""

import functools

import numpy as np

try:
    from ml_dtypes import bfloat16
# an environment that was set up before numdiff needed it: `half_of` says what to do
except ImportError:
    bfloat16 = None

from .errors import NumdiffError

float16 = np.float16
HALVES = {
    name: np.dtype(kind)
    for name, kind in (("float16", float16), ("bfloat16", bfloat16))
    if kind is not None
}
# the activations' type by the name of a precision
OF_PRECISION = {"fp16": "float16", "bf16": "bfloat16", "fp8": "float16"}


def is_half(dtype):
    """Whether this is float16 or bfloat16."""
    return dtype in HALVES.values()


def is_bfloat16(dtype):
    return dtype == HALVES.get("bfloat16", "S0")


def half_of(precision):
    """The dtype of activations and weight copies in "fp16", "bf16" or "fp8"; None for another
    precision."""
    name = OF_PRECISION.get(precision)
    if name == "bfloat16" and bfloat16 is None:
        raise NumdiffError("--precision bf16 needs the package ml_dtypes: pip install ml_dtypes.")
    return name and HALVES[name]


def working_type(dtype):
    """The type in which NumPy computes with numbers of this one: float32 for those of 16 bits."""
    return np.dtype(np.float32) if is_half(dtype) else np.dtype(dtype)


def in_single(*single):
    """Decorator of a NumPy reference: of arrays of 16 bits it computes in float32, and rounds what
    it gives once.

    single: positions of the results that stay float32, such as statistics and sums
    """

    def decorate(reference):
        @functools.wraps(reference)
        def rounding(*args, **options):
            half = next(
                (
                    a.dtype
                    for a in (*args, *options.values())
                    if isinstance(a, np.ndarray) and is_half(a.dtype)
                ),
                None,
            )
            if half is None:
                return reference(*args, **options)
            results = reference(
                *map(_widened, args), **{name: _widened(a) for name, a in options.items()}
            )
            if not isinstance(results, tuple):
                return results if 0 in single else _rounded(results, half)
            return tuple(r if i in single else _rounded(r, half) for i, r in enumerate(results))

        return rounding

    return decorate


def _widened(value):
    return (
        value.astype(np.float32)
        if isinstance(value, np.ndarray) and is_half(value.dtype)
        else value
    )


def _rounded(value, half):
    if not isinstance(value, np.ndarray) or value.dtype != np.float32:
        return value
    with np.errstate(over="ignore"):  # what is too large for float16 is infinite, as on a GPU
        return value.astype(half)
