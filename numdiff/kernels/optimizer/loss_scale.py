"""Dynamic loss scaling: what keeps small gradients alive in float16, decided on the device.

Float16 ends at 6·10⁻⁸ below and 65,504 above, and many gradients of a diffusion model are under the
lower end. So the loss is multiplied by a large number before the backward pass, and the gradients
divided by it in the optimiser. A scale too large makes a gradient infinite; then the step is
skipped, and the scale lowered. The host reads none of this: a captured step decides for itself, at
every replay.

MATHEMATICS                                       norm: of the gradients as they come, S times too large
    a clean step, whose norm is finite      gradient_norm = norm / S, unscale = 1 / S
        doubling                            S = 2 S after `interval` clean steps in a row
        log2                                S = 2^0.001 S at each clean step
    a step that overflowed                  gradient_norm = NaN, at which adamw.py and ema.py change nothing;
        doubling: S = S / 2; log2: S = S / 2; skipped += 1
SHAPES
    gradient_norm, scale, unscale (1,) float32; counts (3,) int32: clean steps since the scale last
    changed, steps skipped, steps skipped in a row
VERSIONS
    v1 one thread.
LAUNCH
    one block of one thread.
DETERMINISM
    one thread.
COST
    a few bytes.
SOURCE
    Micikevicius et al. 2017, "Mixed Precision Training", arXiv:1710.03740, section 3.2. The
    doubling rule with an interval of 2000 is that of PyTorch's GradScaler; the log2 rule, +0.001 or
    -1 a step, that of guided-diffusion.
READ NEXT
    matmul/mma.py, the first of the kernels in float16.
"""

import math

import numpy as np

from ...device import cuda, float32, int32, launch
from ..operation import Problem, integers, numbers, operation, single

DOUBLING, LOG2 = 0, 1  # rules of growth
RULES = {"doubling": DOUBLING, "log2": LOG2}
LARGEST, SMALLEST = 2.0**40, 2.0**-20  # between which the scale stays
LOG2_GROWTH = np.float32(2.0**0.001)


# Reference ----------------------------------------------------------------------------------------


def loss_scale_update_reference(
    gradient_norm, scale, unscale, counts, rule="doubling", interval=2000
):
    unscale[0] = 1 / scale[0]
    if math.isfinite(gradient_norm[0]):
        gradient_norm[0] *= unscale[0]
        counts[:] = counts[0] + 1, counts[1], 0
        if rule == "log2":
            scale[0] = min(scale[0] * LOG2_GROWTH, np.float32(LARGEST))
        elif counts[0] >= interval:
            scale[0] = min(scale[0] * np.float32(2), np.float32(LARGEST))
            counts[0] = 0
    else:
        gradient_norm[0] = np.nan
        scale[0] = max(scale[0] * np.float32(0.5), np.float32(SMALLEST))
        counts[:] = 0, counts[1] + 1, counts[2] + 1


# v1: one thread -----------------------------------------------------------------------------------


@cuda.jit
def loss_scale_update_kernel_v1(gradient_norm, scale, unscale, counts, rule, interval):
    used, norm = scale[0], gradient_norm[0]
    factor = float32(1) / used
    unscale[0] = factor
    if math.isfinite(norm):
        gradient_norm[0] = norm * factor
        clean = int32(counts[0] + int32(1))
        if rule == LOG2:
            scale[0] = min(used * LOG2_GROWTH, float32(LARGEST))
        elif clean >= interval:
            scale[0] = min(used * float32(2), float32(LARGEST))
            clean = int32(0)
        counts[0] = clean
        counts[2] = int32(0)
    else:
        gradient_norm[0] = float32(math.nan)
        scale[0] = max(used * float32(0.5), float32(SMALLEST))
        counts[0] = int32(0)
        counts[1] += int32(1)
        counts[2] += int32(1)


# Cost ---------------------------------------------------------------------------------------------


def loss_scale_update_cost():
    return 40, 2


# Operations ---------------------------------------------------------------------------------------


def _check(rule, interval):
    if rule not in RULES or interval < 1:
        raise ValueError(
            f"loss scaling follows the rule doubling or log2, at an interval of 1 or more steps; not "
            f"{rule!r} and {interval}"
        )


STATE = {"scale": numbers([1024.0]), "unscale": numbers([0.5]), "counts": integers([3, 0, 0])}


@operation(
    reference=loss_scale_update_reference,
    cost=loss_scale_update_cost,
    check=_check,
    problems=[
        *(
            Problem(rule, gradient_norm=numbers([4.0]), **STATE, rule=rule, interval=4)
            for rule in RULES
        ),
        Problem("not finite", gradient_norm=numbers([np.inf]), **STATE),
        Problem(
            gradient_norm=single(1),
            scale=single(1),
            unscale=single(1),
            counts=integers([3, 2, 1]),
            measured=True,
        ),
    ],
    writes=("gradient_norm", "scale", "unscale", "counts"),
)
def loss_scale_update(gradient_norm, scale, unscale, counts, rule="doubling", interval=2000):
    """From the norm of scaled gradients: their true norm (NaN: skip), 1 / the scale that they had,
    the next scale.

    All in place. rule: "doubling", after `interval` clean steps, or "log2".
    """
    launch(
        loss_scale_update_kernel_v1,
        1,
        1,
        gradient_norm,
        scale,
        unscale,
        counts,
        RULES[rule],
        int(interval),
    )
