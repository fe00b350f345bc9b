"""Which kernel normalises: the version for a shape, a type and a device, forward and backward.

SHAPES
    as in reference.py; x, dx and residual may be Pairs (concat.py): version 3 reads and writes two arrays, the others
    join them first
VERSIONS
    v1 block-per-group: a block a group (groups.py).
    v2 chunked: blocks own a chunk of pixels with all channels (chunks.py).
    v3 one-pass: a block keeps some groups of a sample in shared memory: one kernel a pass, x read once, the last block
       adds the parameters' gradients (one_pass.py, one_pass_backward.py), or a later launch does,
       with other layers' (one_pass_half.py, in 16 bits). C a multiple of 8. Taken where
       `choose_plan` (plan.py) forecasts less than
       `version_2_estimate`: not where its blocks would be too few, or each much larger than shared
       memory.
    v4 known-statistics: forward, where a convolution left the statistics with its float16 result:
       reads and writes in turn (normalise.py).
    Arrays of the host: cpu/groupnorm.py.
DETERMINISM
    no atomics on numbers: sums of threads, chunks, groups and samples are added in an order that the shape and the
    size of the device decide.
SOURCE
    reference.py.
"""

import numpy as np

from ...device import empty, empty_like
from ...device.batch_invariance import nominal_extent
from ..concat import Pair
from ..cpu.groupnorm import groupnorm_backward_cpu, groupnorm_forward_cpu
from ..elementwise import add_forward
from ..operation import Version, operation
from ..operation.versions import capped
from ..reduce.second_pass import add_rows
from .chunks import chunks_backward, chunks_forward
from .groups import groups_backward, groups_forward
from .normalise import normalise_forward, normalise_supports
from .one_pass_launch import one_pass_backward, one_pass_forward, takes_two
from .plan import plan_for, version_2_estimate
from .problems import problems
from .reference import groupnorm_backward_cost, groupnorm_forward_cost

# What NumPy's arrays go to ------------------------------------------------------------------------


def forward_on_cpu(x, weight, bias, groups, eps=1e-5, silu=False, statistics=None):
    x = x.joined() if isinstance(x, Pair) else x
    return groupnorm_forward_cpu(x, weight, bias, groups, eps, silu)


def backward_on_cpu(
    dy, x, weight, bias, mean, rstd, dweight, dbias, groups, silu=False, residual=None
):
    residual = add_forward(*residual) if is_two(residual) else residual
    if isinstance(x, Pair):
        residual = None if residual is None else residual.joined()
        return x.parted(
            groupnorm_backward_cpu(
                dy, x.joined(), weight, bias, mean, rstd, dweight, dbias, groups, silu, residual
            )
        )
    return groupnorm_backward_cpu(
        dy, x, weight, bias, mean, rstd, dweight, dbias, groups, silu, residual
    )


# Which version runs -------------------------------------------------------------------------------


def _check(x, weight, bias, groups):
    C = x.shape[-1]
    if C % groups:
        raise ValueError(
            f"groupnorm: {C} channels cannot be cut into {groups} groups; choose a divisor of {C}"
        )
    if tuple(weight.shape) != (C,) or tuple(bias.shape) != (C,):
        raise ValueError(
            f"groupnorm: weight and bias must have shape ({C},), the last axis of x (channels last), "
            f"not {tuple(weight.shape)} and {tuple(bias.shape)}"
        )


def is_two(residual):
    """Whether these are two residuals, not one, which may be a `Pair`."""
    return isinstance(residual, tuple) and not isinstance(residual, Pair)


def _check_backward(x, weight, bias, groups, residual):
    _check(x, weight, bias, groups)
    for given in residual if is_two(residual) else (residual,):
        if given is not None and (tuple(given.shape) != tuple(x.shape) or given.dtype != x.dtype):
            raise ValueError(
                f"groupnorm: the residual, {given.dtype}{tuple(given.shape)}, must be an array like x, "
                f"{x.dtype}{tuple(x.shape)}"
            )


def _choose(x, groups, version, dy=None):
    """(version, version 3's plan); dy: in a backward. Of 2 and 3 the one that an estimate says is
    faster."""
    B, C = x.shape[0], x.shape[-1]
    P, plan = x.size // (B * C), None
    if version in (2, 3) and C % 4:
        name = "chunked" if version == 2 else "one-pass"
        raise ValueError(
            f"version {version} ({name}) takes four channels at a time, and {C} is not a multiple of 4; "
            "use version=1"
        )
    if version in (None, 3):
        plan = (
            plan_for(x, C // groups, dy is not None) if dy is None or dy.dtype == x.dtype else None
        )
        if version == 3 and plan is None:
            raise ValueError(
                f"version 3 (one-pass) finds no tile for groups of {C // groups} channels that a block "
                "of this device could keep, or dy is not of x's type; use version=2"
            )
        if version is None:
            estimate = version_2_estimate(nominal_extent(B), P, C, x.dtype.itemsize, dy is not None)
            version = capped(
                "groupnorm" if dy is None else "groupnorm_backward",
                1 if C % 4 else 3 if plan is not None and plan.ns < estimate else 2,
            )
    return version, plan


# Operations ---------------------------------------------------------------------------------------


@operation(
    reference=forward_on_cpu,
    cost=groupnorm_forward_cost,
    check=_check,
    chooses=True,
    versions=[
        Version("block-per-group"),
        Version("chunked"),
        Version("one-pass"),
        Version("known-statistics"),
    ],
    problems=problems(backward=False),
)
def groupnorm_forward(x, weight, bias, groups, eps=1e-5, silu=False, statistics=None, version=None):
    """(y, mean (B, G), rstd (B, G)) of x (B, ..., C), or a `Pair`; with `silu`, y = SiLU of the
    normalised x.

    statistics: what `conv2d_forward` left for x; of a `Pair` a tuple of both. None: nothing, of
    either
    """
    B, C = x.shape[0], x.shape[-1]
    given = statistics is not None and normalise_supports(x, groups, statistics)
    given = given and (version == 4 or capped("groupnorm", 4) == 4)
    if version == 4 and not given:
        raise ValueError(
            "version 4 (known-statistics) needs the statistics that a convolution left for x, float16 "
            "on a device, and groups of an even number of channels; use version=3"
        )
    chosen, plan = _choose(x, groups, version)
    if given and version in (None, 4):
        return normalise_forward(x, weight, bias, groups, eps, silu, statistics)
    if isinstance(x, Pair) and (chosen != 3 or plan is None):
        return groupnorm_forward(x.joined(), weight, bias, groups, eps, silu, version=version)
    if chosen == 3:
        return one_pass_forward(x, weight, bias, groups, eps, silu, plan)
    y = empty_like(x)
    mean, rstd = (empty((B, groups), np.float32, like=x) for _ in range(2))
    forward = groups_forward if chosen == 1 else chunks_forward
    forward(x, weight, bias, y, mean, rstd, x.size // (B * C), groups, float(eps), silu)
    return y, mean, rstd


@operation(
    reference=backward_on_cpu,
    cost=groupnorm_backward_cost,
    check=_check_backward,
    chooses=True,
    versions=[Version("block-per-group"), Version("chunked"), Version("one-pass")],
    problems=problems(backward=True),
    writes=("dweight", "dbias"),
)
def groupnorm_backward(
    dy,
    x,
    weight,
    bias,
    mean,
    rstd,
    dweight,
    dbias,
    groups,
    silu=False,
    residual=None,
    version=None,
):
    """dx; the gradients of weight and bias are added into `dweight` and `dbias`.

    residual: the gradient of x from the other branches of the graph, like dx, to which it is added;
        None: there is none. For a `Pair` x dx is one, too. A tuple of two, which are added to each
        other first (their sum is rounded); not for a `Pair`
    """
    B, C = x.shape[0], x.shape[-1]
    residual, second = residual if is_two(residual) else (residual, None)
    chosen, plan = _choose(x, groups, version, dy)
    if second is not None and not (chosen == 3 and plan is not None and takes_two(x, plan)):
        residual, second = add_forward(residual, second), None
    if isinstance(x, Pair) and (chosen != 3 or plan is None):
        residual = None if residual is None else residual.joined()
        return x.parted(
            groupnorm_backward(
                dy,
                x.joined(),
                weight,
                bias,
                mean,
                rstd,
                dweight,
                dbias,
                groups,
                silu,
                residual,
                version=version,
            )
        )
    if chosen == 3:
        return one_pass_backward(
            dy,
            x,
            weight,
            bias,
            (mean, rstd),
            (dweight, dbias),
            groups,
            silu,
            plan,
            residual,
            second,
        )
    dx, sums = empty_like(x), empty((2, B, C), np.float32, like=x)
    backward = groups_backward if chosen == 1 else chunks_backward
    backward(dy, x, weight, bias, mean, rstd, residual, dx, sums, x.size // (B * C), groups, silu)
    add_rows(sums, dweight, dbias)
    return dx
