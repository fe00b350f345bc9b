"""Cases of GroupNorm."""
import math

import numpy as np

from .. import groupnorm
from ..concat import Pair
from ..groupnorm import plan as groupnorm_plan
from ..groupnorm.normalise import channel_statistics_reference
from ..groupnorm.one_pass_launch import one_pass_backward, one_pass_forward
from .case import HALF_TOLERANCE, Case, normal


def norms_cases():
    C, G = 16, 4
    for silu in (False, True):
        label = "silu" if silu else ""
        yield Case("groupnorm", normal(x=(1, 3, 3, C), weight=(C,), bias=(C,)),
                   lambda a, v, s=silu: groupnorm.groupnorm_forward(a.x, a.weight, a.bias, G, silu=s, version=v),
                   (1, 2, 3), label=label)

        def inputs(rng, silu=silu):
            made = normal(dy=(2, 3, 3, C), x=(2, 3, 3, C), residual=(2, 3, 3, C), weight=(C,), bias=(C,), dweight=(C,),
                          dbias=(C,))(rng)
            _, made["mean"], made["rstd"] = groupnorm.groupnorm_forward(made["x"], made["weight"], made["bias"], G)
            return made

        yield Case("groupnorm_backward", inputs, lambda a, v, s=silu: (groupnorm.groupnorm_backward(
            a.dy, a.x, a.weight, a.bias, a.mean, a.rstd, a.dweight, a.dbias, G, silu=s,
            residual=a.residual if s else None, version=v), a.dweight, a.dbias), (1, 2, 3), label=label)

    def again(a, plan):
        """Version 3 with little shared memory: it has to read again what does not fit."""
        sizes = (1, a.x.shape[1], 8, 4, a.x.dtype.itemsize)
        return groupnorm_plan.make_plan(*sizes, plan, 8, 32, 3900 if plan else 2000, 132)

    def inputs(rng):
        made = normal(dy=(1, 70, 8), x=(1, 70, 8), residual=(1, 70, 8), weight=(8,), bias=(8,), dweight=(8,),
                      dbias=(8,))(rng)
        made = {name: a.astype(np.float16 if a.ndim == 3 else np.float32) for name, a in made.items()}
        _, made["mean"], made["rstd"] = groupnorm.groupnorm_forward(made["x"].astype(np.float32), made["weight"],
                                                                    made["bias"], 2)
        return made

    def forward(a, v):
        if v is None:
            return groupnorm.groupnorm_forward(a.x, a.weight, a.bias, 2, silu=True)
        return one_pass_forward(a.x, a.weight, a.bias, 2, 1e-5, True, again(a, False))

    def backward(a, v):
        arguments = a.dy, a.x, a.weight, a.bias, a.mean, a.rstd, a.dweight, a.dbias, 2, True
        if v is None:
            dx = groupnorm.groupnorm_backward(*arguments, residual=a.residual)
        else:
            dx = one_pass_backward(*arguments, again(a, True), a.residual)
        return dx, a.dweight, a.dbias

    yield Case("groupnorm", inputs, forward, (3,), HALF_TOLERANCE, label="float16, reads again")
    yield Case("groupnorm_backward", inputs, backward, (3,), HALF_TOLERANCE, label="float16, reads again")

    def half_plan(shape, groups, backward, part, team, cluster, near=0):
        """Of version 3 by parts of 16 or 32 channels: `near` turns of the pixels in registers, `cluster` blocks."""
        B, P, C = shape
        sizes, limit = (B, P, C, C // groups, backward, part, team), 1 << 17
        if near:
            plan = groupnorm_plan.make_plan_half(*sizes, limit, 132, cluster)
            limit = plan.shared - near * 4 * plan.rows * plan.tile
        plan = groupnorm_plan.make_plan_half(*sizes, limit, 132, cluster)
        assert plan.near == near
        return plan

    def half_label(shape, groups, part, cluster):
        count = math.lcm(shape[2] // groups, part) // part
        return (f"float16, {count} times {'sixteen' if part == 16 else 'thirty-two'} channels"
                + (f", {cluster} blocks a cluster" if cluster > 1 else ""))

    def half_forward(shape, groups, part, team, silu, cluster=1):
        """Version 3's forward in 16 bits."""
        B, P, C = shape

        def inputs(rng):
            made = normal(x=shape, weight=(C,), bias=(C,))(rng)
            return {name: a.astype(np.float16 if a.ndim == 3 else np.float32) for name, a in made.items()}

        def run(a, v):
            if v is None:
                return groupnorm.groupnorm_forward(a.x, a.weight, a.bias, groups, silu=silu)
            return one_pass_forward(a.x, a.weight, a.bias, groups, 1e-5, silu,
                                    half_plan(shape, groups, False, part, team, cluster))

        return Case("groupnorm", inputs, run, (3,), HALF_TOLERANCE, half_label(shape, groups, part, cluster))

    def half_backward(shape, groups, part, team, silu, cluster=1, near=0, two=False):
        """Version 3's backward in 16 bits; two: residuals."""
        B, P, C = shape

        def inputs(rng):
            made = normal(dy=shape, x=shape, residual=shape, second=shape, weight=(C,), bias=(C,), dweight=(C,),
                          dbias=(C,))(rng)
            made = {name: a.astype(np.float16 if a.ndim == 3 else np.float32) for name, a in made.items()}
            _, made["mean"], made["rstd"] = groupnorm.groupnorm_forward(made["x"].astype(np.float32), made["weight"],
                                                                        made["bias"], groups)
            return made

        def run(a, v):
            arguments = a.dy, a.x, a.weight, a.bias, a.mean, a.rstd, a.dweight, a.dbias, groups, silu
            residual, second = a.residual if silu else None, a.second if two else None
            if v is None:
                dx = groupnorm.groupnorm_backward(*arguments, residual=residual, second=second)
            else:
                dx = one_pass_backward(*arguments, half_plan(shape, groups, True, part, team, cluster, near), residual,
                                       second)
            return dx, a.dweight, a.dbias

        return Case("groupnorm_backward", inputs, run, (3,), HALF_TOLERANCE,
                    half_label(shape, groups, part, cluster) + (f", {near} turns in registers" if near else "")
                    + (", two residuals" if two else ""))

    def inputs(rng):
        made = normal(dy=(2, 9, 24), x=(2, 9, 16), x_2=(2, 9, 8), residual=(2, 9, 16), residual_2=(2, 9, 8),
                      weight=(24,), bias=(24,), dweight=(24,), dbias=(24,))(rng)
        made = {name: a.astype(np.float16 if a.ndim == 3 else np.float32) for name, a in made.items()}
        _, made["mean"], made["rstd"] = groupnorm.groupnorm_forward(
            np.concatenate((made["x"], made["x_2"]), axis=2).astype(np.float32), made["weight"], made["bias"], 2)
        return made

    yield Case("groupnorm", inputs, lambda a, v: groupnorm.groupnorm_forward(
        Pair(a.x, a.x_2), a.weight, a.bias, 2, silu=True, version=v), (3,), HALF_TOLERANCE, "float16, two arrays")
    yield Case("groupnorm_backward", inputs, lambda a, v: (*groupnorm.groupnorm_backward(
        a.dy, Pair(a.x, a.x_2), a.weight, a.bias, a.mean, a.rstd, a.dweight, a.dbias, 2, True,
        Pair(a.residual, a.residual_2), v), a.dweight, a.dbias), (3,), HALF_TOLERANCE, "float16, two arrays")

    def known(two):
        """Of one array; of two, the first an image of which each pixel was taken four times."""
        def inputs(rng):
            small, x_2 = (rng.standard_normal(shape).astype(np.float16) for shape in ((2, 8, 8, 16), (2, 16, 16, 8)))
            x = small.repeat(2, axis=1).repeat(2, axis=2) if two else small
            weight, bias = rng.standard_normal((2, 24 if two else 16)).astype(np.float32)
            known, known_2 = (channel_statistics_reference(a.astype(np.float32)) for a in (small, x_2))
            return {"x": x, "x_2": x_2, "known": known, "known_2": known_2, "weight": weight, "bias": bias}

        def run(a, v):
            x, statistics = (Pair(a.x, a.x_2), (a.known, a.known_2)) if two else (a.x, a.known)
            return groupnorm.groupnorm_forward(x, a.weight, a.bias, 4, silu=two, version=v, statistics=statistics)

        return Case("groupnorm", inputs, run, (4,), HALF_TOLERANCE, "two arrays" if two else "")

    yield known(False)
    yield known(True)
    for make in (half_forward, half_backward):
        yield make((2, 37, 32), 8, 16, 2, True)
        yield make((2, 20, 96), 16, 16, 1, True)
        yield make((2, 19, 32), 8, 32, 2, True)
        yield make((2, 10, 96), 16, 32, 1, False)
        yield make((1, 40, 48), 8, 16, 1, True, cluster=4)
        yield make((2, 36, 64), 8, 32, 2, True, cluster=2)
    yield half_backward((2, 96, 16), 4, 16, 1, True, near=2)
    yield half_backward((2, 48, 16), 4, 16, 1, False, near=1)
    yield half_backward((1, 48, 32), 4, 32, 2, True, near=1)
    yield half_backward((1, 112, 16), 2, 16, 1, True, near=2, two=True)
    yield half_backward((1, 24, 32), 2, 32, 1, True, two=True)
    yield half_backward((1, 24, 32), 2, 32, 1, True, cluster=2, two=True)
    yield half_backward((1, 32, 16), 2, 16, 1, True, cluster=2, two=True)
