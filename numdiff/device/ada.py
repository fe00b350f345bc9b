"""PTX of kernels that round to E4M3, for Ada (sm_89).

Ada converts float32 to E4M3 and multiplies it, but has no integer maximum of two halves of a word,
by which such kernels keep the largest magnitude. They keep their text; `for_ada` replaces this
instruction in their PTX:

    max.u16x2       two maxima of 16 bits

SOURCE  PTX ISA, sections 9.7.1.13 (`max`, "Target ISA Notes") and 9.7.9.21 (`cvt`).
"""

import re

from .requires import required

FLOAT8, HALVES = (8, 9), (9, 0)  # the first compute capabilities with E4M3 and with max.u16x2
LARGER = re.compile(r"max\.u16x2 ([^,]+), ([^,]+), ([^;]+);")
TWO = (
    r"{ .reg .b16 a, b, c, d; mov.b32 {a, b}, \2; mov.b32 {c, d}, \3; max.u16 a, a, c; "
    r"max.u16 b, b, d; mov.b32 \1, {a, b}; }"
)


def lacks_halves(capability, kernel):
    """Whether a card of this compute capability needs `for_ada` of a kernel."""
    return required(kernel)[:2] == FLOAT8 and tuple(capability[:2]) < HALVES


def for_ada(ptx):
    """The PTX text with the instructions that sm_89 has."""
    return LARGER.sub(TWO, ptx)
