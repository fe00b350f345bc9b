"""Problems of gates and norms that round for a layer in FP8, for the records of
kernels/transformer/gate_adaln/.

SOURCE
    plain bookkeeping; kernels/operation/problem.py says what a problem is.
"""

import functools

import numpy as np

from ...device.rounded8 import PARTIALS
from ...kernels.operation import Problem, half, numbers, single
from ...kernels.transformer.gate_adaln import gate_adaln_backward, gate_adaln_forward
from ...kernels.transformer.gate_adaln.forward import EIGHT_KEYS
from ...kernels.transformer.gate_adaln.problems import backward_problem, forward_problem
from .quantise import HISTORY, Scale8, scale_update

EIGHT_TOLERANCE = 0.02  # float32 and float64 round few numbers to neighbours, a bit of some byte


def of_eight():
    """Every kernel whose y, or dh, is bytes; with them the scale that their largest magnitude
    gives."""

    def inputs(rng, shape, norm):
        B, _, C = shape
        # 1 + scale > 0, or a zero's sign would depend on whether 0 is added
        made = {
            name: rng.integers(-7, 9, of).astype(np.float16) / 8
            for name, of in (
                ("x", shape),
                ("h", shape),
                ("dz", shape),
                ("dy", shape),
                ("gate", (B, C)),
                ("shift", (B, C)),
                ("scale", (B, C)),
            )
        }
        z = made["x"].astype(np.float64)
        mean = np.zeros(B * shape[1]) if norm.rms else z.mean(2).reshape(-1)
        made["rstd"] = 1 / np.sqrt(
            ((z - mean.reshape(*shape[:2], 1)) ** 2).mean(2).reshape(-1) + 1e-6
        )
        return {
            **made,
            "mean": mean,
            "weight": rng.integers(1, 4, C).astype(np.float32),
            "unit": np.float32([1]),
            "scale_8": np.float32([2.0**-5]),
            "history": np.zeros((1, HISTORY), np.float32),
            "amax": np.zeros(PARTIALS, np.uint32),
            "dweight": np.zeros(C),
        }

    def rounding(a, function):
        """What `function(Scale8(scale, amax))` gives, bytes as their numbers, and the scale from amax."""
        amax = a.amax.copy() if isinstance(a.amax, np.ndarray) else a.amax
        found = function(Scale8(a.scale_8, amax))
        scale_update(amax.reshape(1, PARTIALS), a.history, a.unit)
        return (a.unit, *(array for array in found if array is not None))

    def forward(a, version, norm):
        return rounding(
            a,
            lambda into: gate_adaln_forward(
                a.x,
                a.h,
                a.gate,
                a.shift if norm.shifted else None,
                a.scale,
                weight=a.weight if norm.weighted else None,
                norm=norm.kind,
                version=version,
                into=into,
            ),
        )

    def backward(a, version, norm):
        more = {"weight": a.weight, "dweight": a.dweight} if norm.weighted else {}
        return rounding(
            a,
            lambda into: gate_adaln_backward(
                a.dz,
                a.dy,
                a.x,
                a.h,
                (a.gate, a.shift if norm.shifted else None, a.scale),
                None if norm.rms else a.mean,
                a.rstd,
                version=version,
                dh_into=into,
                **more,
            ),
        )

    for sweeps, _, norm in EIGHT_KEYS:
        C = 256 * sweeps - 240
        for is_backward, function in ((False, forward), (True, backward)):
            yield (
                is_backward,
                Problem(
                    f"{norm}, to e4m3, {C} channels",
                    inputs=functools.partial(inputs, shape=(1, 2, C), norm=norm),
                    run=functools.partial(function, norm=norm),
                    versions=("fused",),
                    tolerance=EIGHT_TOLERANCE,
                    fast=False,
                ),
            )


def problems(is_backward):
    """[Problem] of a direction: each kernel, then a DiT-B/2's."""
    amax = numbers(np.zeros(PARTIALS), np.uint32)
    given = {"array": half, "measured": True, "versions": ("fused",), "note": "to E4M3"}
    scale, shape = Scale8(single(1), amax), (64, 256, 768)
    return [
        *(problem for backward, problem in of_eight() if backward == is_backward),
        backward_problem(shape, dh_into=scale, **given)
        if is_backward
        else forward_problem(shape, into=scale, **given),
    ]


forward = functools.partial(problems, False)
backward = functools.partial(problems, True)
