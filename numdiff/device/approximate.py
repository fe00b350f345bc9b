"""The hardware's approximate special functions: one instruction each, accurate to all but the last
few bits.

    tanh_approximate(x)     relative error at most 2⁻¹¹
    power_of_two(x)         2ˣ, at most 2⁻²²; 0 where that is below 2⁻¹²⁶
    reciprocal(x)           1/x, to one unit in the last place; 0 where that is below 2⁻¹²⁶

The emulator gives the correctly rounded values.

SOURCE  PTX ISA, section 9.7.3: `tanh.approx.f32` (sm_75 and later), `ex2.approx.ftz.f32`, `rcp.approx.ftz.f32`.
"""

import numpy as np
from numba.cuda import types
from numba.cuda.extending import intrinsic

from ..emulator import twin
from .inline_ptx import F32, statement

SMALLEST = np.float32(2.0**-126)  # normal number


@intrinsic
def tanh_approximate(typingctx, x):
    return types.float32(types.float32), statement("tanh.approx.f32 $0, $1;", [F32])


@twin(tanh_approximate)
def _tanh_approximate(machine, x):
    return np.tanh(np.float32(x))


@intrinsic
def power_of_two(typingctx, x):
    return types.float32(types.float32), statement("ex2.approx.ftz.f32 $0, $1;", [F32])


@twin(power_of_two)
def _power_of_two(machine, x):
    result = np.exp2(np.float32(x))
    return result if not result < SMALLEST else np.float32(0)


@intrinsic
def reciprocal(typingctx, x):
    """1/x of a float32, to one unit in the last place; 0 where that is below 2⁻¹²⁶."""
    return types.float32(types.float32), statement("rcp.approx.ftz.f32 $0, $1;", [F32])


@twin(reciprocal)
def _reciprocal(machine, x):
    result = np.float32(1) / np.float32(x)
    return result if not abs(result) < SMALLEST else np.float32(0)
