"""2ˣ as the hardware has it, one instruction: with `math.exp2` three more go with each, to serve results below 2⁻¹²⁶.

Such results are 0 here, which is nothing to a sum whose largest term is 1. Relative error at most 2⁻²².

SOURCE  PTX ISA, section 9.7.3, `ex2.approx.ftz.f32`.
"""
import numpy as np
from numba.cuda import types
from numba.cuda.extending import intrinsic

from ...device.inline_ptx import F32, statement
from ...emulator import twin

SMALLEST = np.float32(2.0**-126)  # normal number


@intrinsic
def power_of_two(typingctx, x):
    """2ˣ of a float32."""
    return types.float32(types.float32), statement("ex2.approx.ftz.f32 $0, $1;", [F32])


@twin(power_of_two)
def _power_of_two(machine, x):
    result = np.exp2(np.float32(x))
    return result if not result < SMALLEST else np.float32(0)
