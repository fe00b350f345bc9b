"""e^a for loops that are compiled for the host's cores (`on_host`), many numbers at once.

MATHEMATICS
    e^a = 2ⁿ · eʳ with n = ⌊a / ln 2 + 1/2⌋, so |r| ≤ ln 2 / 2; eʳ by Taylor's series up to r⁷ / 7!;
    2ⁿ is a float32 whose exponent is n. C's expf, which Numba would call, takes one number at a
    time, ten times as long.
SHAPES
    one float32, between -87 and 88, within 2e-7 of it; beyond those, e to the nearer of them
SOURCE
    Cody and Waite 1980, "Software Manual for the Elementary Functions", section 6: ln 2 in two
    parts, the first of so few digits that n times it is exact.
READ NEXT
    groupnorm.py, which takes it.
"""

import math

import numpy as np

from ...device import on_host

F = np.float32
LOG2_E, HIGH, LOW = F(1 / math.log(2)), F(0.693359375), F(math.log(2) - 0.693359375)
LOWEST, HIGHEST = F(-87), F(88)  # beyond them e^a is not a normal float32
C2, C3, C4, C5, C6, C7 = (F(1 / math.factorial(k)) for k in range(2, 8))


@on_host
def exponential(a):
    a = min(max(a, LOWEST), HIGHEST)
    n = np.floor(a * LOG2_E + F(0.5))
    r = (a - n * HIGH) - n * LOW
    series = r + r * r * (C2 + r * (C3 + r * (C4 + r * (C5 + r * (C6 + r * C7)))))
    return (F(1) + series) * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(
        np.float32
    )


@on_host
def sigmoid(a):
    return F(1) / (F(1) + exponential(-a))
