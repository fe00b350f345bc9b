"""The hardware's approximate special functions: one instruction each, accurate to all but the last
few bits.

    tanh_approximate(x)     relative error at most 2⁻¹¹
    power_of_two(x)         2ˣ, at most 2⁻²²; 0 where that is below 2⁻¹²⁶
    reciprocal(x)           1/x, to one unit in the last place; 0 where that is below 2⁻¹²⁶

The emulator gives the correctly rounded values.

SOURCE  PTX ISA, section 9.7.3: `tanh.approx.f32` (sm_75 and later), `ex2.approx.ftz.f32`, `rcp.approx.ftz.f32`.
"""

import numpy as np

from .inline_ptx import f32, instruction

SMALLEST = np.float32(2.0**-126)  # normal number


@instruction("tanh.approx.f32 $0, $1;")
def tanh_approximate(machine, x: f32) -> f32:
    """The hyperbolic tangent of a float32; relative error at most 2⁻¹¹."""
    return np.tanh(np.float32(x))


@instruction("ex2.approx.ftz.f32 $0, $1;")
def power_of_two(machine, x: f32) -> f32:
    """2ˣ of a float32; relative error at most 2⁻²², 0 where that is below 2⁻¹²⁶."""
    result = np.exp2(np.float32(x))
    return result if not result < SMALLEST else np.float32(0)


@instruction("rcp.approx.ftz.f32 $0, $1;")
def reciprocal(machine, x: f32) -> f32:
    """1/x of a float32, to one unit in the last place; 0 where that is below 2⁻¹²⁶."""
    result = np.float32(1) / np.float32(x)
    return result if not abs(result) < SMALLEST else np.float32(0)
