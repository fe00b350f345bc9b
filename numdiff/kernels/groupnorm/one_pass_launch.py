"""Version 3's kernels, launched as a `Plan` says (plan.py): of any tile, or in 16 bits by parts of
16 or 32 channels.

SOURCE
    one_pass.py
READ NEXT
    launcher.py
"""

import numpy as np

from ...device import empty, empty_like, launch
from ..concat import Pair, parts_of
from ..reduce.second_pass import Sum, add_parts, joined
from .clusters import BACKWARD_CLUSTERS, FORWARD_CLUSTERS
from .one_pass import OnePassCut, groupnorm_forward_kernel_v3
from .one_pass_backward import BackwardCut, counters, groupnorm_backward_kernel_v3
from .one_pass_half import BACKWARD_HALF, HalfCut
from .one_pass_half_forward import FORWARD_HALF, ForwardCut
from .vectors import VECTOR, NormVectorShape


def threads_of(plan):
    """Of a block: as `launch` takes them for a tile of parts, one number; else (of a pixel,
    pixels)."""
    lanes = plan.tile // VECTOR
    return lanes * plan.rows if plan.part else (lanes, plan.rows)


def cluster_of(plan):
    return (1, 1, plan.blocks) if plan.blocks > 1 else 1


def one_pass_forward(x, weight, bias, groups, eps, silu, plan):
    """As `groupnorm_forward` of launcher.py."""
    B, C = x.shape[0], x.shape[-1]
    first, second, seam = parts_of(x)
    y = empty(x.shape, x.dtype, like=first)
    mean, rstd = (empty((B, groups), np.float32, like=first) for _ in range(2))
    arrays = (
        Pair(first.reshape(-1), second.reshape(-1)),
        weight,
        bias,
        y.reshape(-1),
        mean.reshape(-1),
        rstd.reshape(-1),
    )
    shape = NormVectorShape(x.size // (B * C * plan.blocks), C, seam, C // groups)
    if plan.part:
        kernel = (FORWARD_HALF if plan.blocks == 1 else FORWARD_CLUSTERS)[plan.part]
        cut = ForwardCut(
            plan.tile // plan.part, plan.rows, plan.origins, plan.ring, plan.folded, groups
        )
    else:
        kernel = groupnorm_forward_kernel_v3
        cut = OnePassCut(plan.tile * groups // C, plan.ring, plan.held, plan.share)
    launch(
        kernel,
        (C // plan.tile, B, plan.blocks),
        threads_of(plan),
        *arrays,
        shape,
        cut,
        float(eps),
        int(silu),
        shared=plan.shared,
        cluster=cluster_of(plan),
    )
    return y, mean, rstd


def takes_two(x, plan):
    """Whether `one_pass_backward` adds two residuals."""
    return bool(plan.part) and not isinstance(x, Pair)


def one_pass_backward(
    dy, x, weight, bias, statistics, gradients, groups, silu, plan, residual=None, second=None
):
    """As `groupnorm_backward` of launcher.py. statistics: (mean, rstd); gradients: (dweight, dbias);
    second: another residual, only where `takes_two`."""
    dweight, dbias = gradients
    B, C = x.shape[0], x.shape[-1]
    dx = Pair(*map(empty_like, x)) if isinstance(x, Pair) else empty_like(x)
    totals, seam = empty((2, B, C), np.float32, like=dy), parts_of(x)[2]
    x_, residual_, dx_ = (
        Pair(*(part.reshape(-1) for part in parts_of(a)[:2]))
        for a in (x, x if residual is None else residual, dx)
    )
    if second is not None:
        residual_ = Pair(residual_.a, second.reshape(-1))
    arguments = (
        dy.reshape(-1),
        x_,
        (weight, bias),
        tuple(statistic.reshape(-1) for statistic in statistics),
        residual_,
        dx_,
        totals.reshape(-1),
    )
    shape = NormVectorShape(x.size // (B * C * plan.blocks), C, seam, C // groups)
    last = int(silu), int(residual is not None)
    if plan.part:
        both = joined(dweight, dbias)
        # of totals: (2, B, C), or (B, 2, C) where one sum is enough
        steps = (C, B * C) if both is None else (2 * C, C)
        kernels = BACKWARD_HALF if plan.blocks == 1 else BACKWARD_CLUSTERS
        launch(
            kernels[plan.part, second is not None],
            (C // plan.tile, B, plan.blocks),
            threads_of(plan),
            *arguments,
            shape,
            HalfCut(
                plan.tile // plan.part, plan.rows, plan.ring, plan.near, plan.folded, groups, *steps
            ),
            *last,
            shared=plan.shared,
            cluster=cluster_of(plan),
        )
        add_parts(
            [Sum(totals[:1], B, dweight, True), Sum(totals[1:], B, dbias, True)]
            if both is None
            else [Sum(totals, B, both, True)],
            waits=True,
        )
    else:
        launch(
            groupnorm_backward_kernel_v3,
            (C // plan.tile, B),
            threads_of(plan),
            *arguments,
            (*gradients, counters(dy.backend)),
            shape,
            BackwardCut(plan.tile * groups // C, plan.ring, plan.held, plan.share, plan.team_bits),
            *last,
            shared=plan.shared,
        )
    return dx
