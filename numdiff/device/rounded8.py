"""Rounding to E4M3 in kernels that write what a layer in FP8 reads.

They round to float16 first, as if a pass came afterwards, and keep the largest magnitudes as the two
float16 of a word, `most`.

SOURCE  extras/fp8/quantise.py, which has the scales.
"""

from . import cuda, float32, int32, uint32
from .float8 import larger_halves, pack_e4m3x4
from .limits import FULL_MASK
from .tensor_core import pack_half2, store_words2, unpack_half2, word_of

MAGNITUDES = uint32(0x7FFF7FFF)  # of two float16 in a word
PARTIALS = 1024  # places of a tensor's largest magnitudes


@cuda.jit(device=True, forceinline=True)
def larger(a, b):
    return a if a > b else b


@cuda.jit(device=True, forceinline=True)
def scaled(x, factor):
    """x · factor; NaN for an infinity, of which x · 0 is one: a product and a multiply-add."""
    return x * factor + x * float32(0)


@cuda.jit(device=True, forceinline=True)
def rounded4(a, b, c, d, factor, most):
    """Four float32, rounded to float16, times factor as a word of E4M3; the larger of `most` and
    their magnitudes."""
    low, high = pack_half2(a, b), pack_half2(c, d)
    most = larger_halves(larger_halves(most, low & MAGNITUDES), high & MAGNITUDES)
    a, b = unpack_half2(low)
    c, d = unpack_half2(high)
    return pack_e4m3x4(
        scaled(a, factor), scaled(b, factor), scaled(c, factor), scaled(d, factor)
    ), most


@cuda.jit(device=True, forceinline=True)
def store_rounded8(y, i, x, factor, most):
    """y[i …] = eight float32 times factor as E4M3; the next `most`."""
    a, most = rounded4(x[0], x[1], x[2], x[3], factor, most)
    b, most = rounded4(x[4], x[5], x[6], x[7], factor, most)
    store_words2(y, i, a, b)
    return most


@cuda.jit(device=True, forceinline=True)
def keep_largest(amax, place, most, lane):
    """The largest of a warp's magnitudes and the value in this place: a comparison of integers, so
    exact in whatever order."""
    a, b = unpack_half2(most)
    distance, bits = int32(16), int32(larger(word_of(a), word_of(b)))  # below 2³¹
    while distance > 0:
        bits = larger(bits, cuda.shfl_xor_sync(FULL_MASK, bits, distance))
        distance = int32(distance // 2)
    if lane == 0:
        cuda.atomic.max(amax, place % PARTIALS, uint32(bits))
