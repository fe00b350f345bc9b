"""GELU for the end of a product, in as few instructions as the hardware allows.

The tensor cores do 2048 multiply-adds a cycle; an epilogue runs on units that give 128 results a
cycle, and 16 for special functions such as tanh. So every instruction counts:

        y  = x/2 · (1 + tanh u),   u = √(2/π) · (x + 0.044715 x³)                    6 instructions, one of them special
        y' = s + 2 x s (1 - s) · du/dx,   s = (1 + tanh u) / 2 = 1 / (1 + e^-2u)    11 instructions, two of them special

tanh.approx is wrong by 2⁻¹¹ of its value at most, and so y by 2⁻¹² · |x|: half a unit in the last
place of the float16 that x > 0 is rounded to. In the derivative that error would be multiplied by x
· du/dx, which grows as x³. There s comes from an exponential and a reciprocal, both exact to 2⁻²²,
and 1 - s goes to zero faster than x³ grows.

y = x · s is then one multiplication more, by which the backward makes y again instead of keeping
it. That y is nearer to GELU than the forward's; they differ by the error of tanh.approx, and as the
backward reads x rounded.

SOURCE
    Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
READ NEXT
    gelu_epilogues.py
"""

import math

import numpy as np

from ....device import device_inline, float32
from ....device.approximate import power_of_two, reciprocal, tanh_approximate
from ...elementwise import GELU_CUBIC, GELU_SLOPE

CUBE = np.float32(GELU_SLOPE * GELU_CUBIC)  # u = x · (GELU_SLOPE + CUBE · x²)
# 2 du/dx = SLOPE_2 + CUBE_6 · x²
SLOPE_2, CUBE_6 = np.float32(2 * GELU_SLOPE), np.float32(6 * CUBE)
# e^-2u = 2^…
LOG_SLOPE, LOG_CUBE = (np.float32(-2 * math.log2(math.e) * float(c)) for c in (GELU_SLOPE, CUBE))


@device_inline
def fast_gelu(x):
    h = float32(0.5) * x
    return h + h * tanh_approximate(x * (GELU_SLOPE + CUBE * (x * x)))


@device_inline
def fast_gelu_gradient(x):
    square = x * x
    s = reciprocal(float32(1) + power_of_two(x * (LOG_SLOPE + LOG_CUBE * square)))
    return s + s * (float32(1) - s) * (x * (SLOPE_2 + CUBE_6 * square))


@device_inline
def gelu_and_gradient(x):
    """(y, y'), both from one s."""
    square = x * x
    s = reciprocal(float32(1) + power_of_two(x * (LOG_SLOPE + LOG_CUBE * square)))
    return x * s, s + s * (float32(1) - s) * (x * (SLOPE_2 + CUBE_6 * square))
