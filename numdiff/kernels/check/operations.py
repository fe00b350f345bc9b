"""Cases of the operations that every model uses."""
import math

import numpy as np

from .. import (
    bias,
    concat,
    conv2d,
    depthwise,
    dropout,
    elementwise,
    embedding,
    fuse,
    groupnorm,
    layernorm,
    linear,
    linear_group,
    matmul,
    random,
    reduce,
    resample,
    rmsnorm,
    scale_shift,
    second_pass,
    softmax,
)
from ..attention import unfused as attention
from ..concat import Pair
from ..conv2d import im2col, im2win
from ..diffusion import ahead, images, levels, mse, q_sample, sampler
from ..fuse import EACH, PER_CHANNEL, PER_SAMPLE, UNCHANGED, Operation
from ..groupnorm import plan as groupnorm_plan
from ..groupnorm.normalise import channel_statistics_reference
from ..groupnorm.one_pass import one_pass_forward
from ..groupnorm.one_pass_backward import one_pass_backward
from ..matmul import launcher, vectorised
from ..optimizer import (
    adamw,
    ema,
    grad_norm,
    loss_scale,
    muon,
    newton_schulz,
    power_ema,
    step_state,
    telemetry,
    zero_ranges,
)
from ..transformer import gate
from .case import (
    HALF_TOLERANCE,
    PURPOSE,
    SEED,
    TOLERANCE,
    Case,
    in_place,
    normal,
    one,
    with_counters,
    with_plain_sums,
    with_timesteps,
)
from .half import halves


def elementwise_cases():
    for shape in ((3, 5), (4, 8)):
        four = shape[1] % 4 == 0
        versions, label = ((1, 2) if four else (1,)), str(shape)
        yield Case("add", normal(a=shape, b=shape), one(lambda a, v: elementwise.add_forward(a.a, a.b, version=v)),
                   versions, label=label)
        for name in ("silu", "gelu"):
            forward = getattr(elementwise, f"{name}_forward")
            backward = getattr(elementwise, f"{name}_backward")
            yield Case(name, normal(x=shape), one(lambda a, v, f=forward: f(a.x, version=v)), versions, label=label)
            yield Case(f"{name}_backward", normal(dy=shape, x=shape),
                       one(lambda a, v, f=backward: f(a.dy, a.x, version=v)), versions, label=label)
    for shape in ((3, 4), (3, 5)):
        yield Case("cast", normal(x=shape), one(lambda a, v: elementwise.cast_forward(a.x, np.float16, version=v)),
                   (1, 2) if shape[1] == 4 else (1,), 1e-3, str(shape))


def fused_cases():
    """A chain with an operand at each place, and sums for both that have them; eight at a time also in float16."""
    scaled = Operation(scale_shift.scaled, PER_SAMPLE, PER_CHANNEL, x=scale_shift.scaled_dx,
                       scale=scale_shift.scaled_dscale, shift=UNCHANGED)
    gated = Operation(gate.gated, EACH, PER_SAMPLE, x=UNCHANGED, h=gate.gated_dh, gate=gate.gated_dgate)
    chain = fuse.fuse(EACH, scaled, Operation(elementwise.silu, x=elementwise.silu_gradient), gated, EACH, name="fused")
    for B, P, C, versions, half in ((2, 3, 5, (1,), False), (2, 3, 8, (1, 2, 3), False), (2, 3, 16, (3,), True),
                                    (1, 2051, 4, (2,), False)):  # two chunks of rows, the second of three
        given = {"x": (B, P, C), "scale": (B, C), "shift": (C,), "h": (B, P, C), "gate": (B, C)}
        label, arrays = f"{C} channels{', float16' * half}{', two chunks' * (P > 3)}", halves if half else normal
        tolerance = HALF_TOLERANCE if half else TOLERANCE
        if P == 3:
            yield Case("fused", arrays(**given), one(lambda a, v: chain.forward(*(
                getattr(a, n) for n in chain.arguments), version=v)), versions, tolerance, label)
        yield Case("fused_backward", arrays(dy=(B, P, C), **given), lambda a, v: tuple(chain.backward(
            a.dy, *(getattr(a, n) for n in chain.arguments), version=v)), versions, tolerance, label)


def reductions_cases():
    yield Case("column_sum", normal(x=(37, 12)), one(lambda a, v: reduce.column_sum(a.x, version=v)), (1, 2, 3))
    yield Case("column_sum", normal(x=(1100, 8)), one(lambda a, v: reduce.column_sum(a.x, version=v)), (2, 3),
               label="two passes")
    sizes = (1, 8), (70, 12), (3, 1100), (2, 4), (33, 4), (9, 260), (4, 16), (5, 8), (6, 12)  # the ninth comes alone
    given = {f"parts{k}": size for k, size in enumerate(sizes)} | {f"into{k}": (n,) for k, (_, n) in enumerate(sizes)}

    def of_parts(a, v):
        sums = [second_pass.Sum(getattr(a, f"parts{k}"), count, getattr(a, f"into{k}"), k % 2 == 0)
                for k, (count, _) in enumerate(sizes)]
        second_pass.add_parts(sums)
        return tuple(s.target for s in sums)

    yield Case("add_parts", normal(**given), of_parts)
    yield Case("sample_sum", normal(x=(2, 9, 8)), one(lambda a, v: reduce.sample_sum(a.x, version=v)), (1, 2, 3))
    yield Case("total_sum", normal(x=(3, 41)), one(lambda a, v: reduce.total_sum(a.x, version=v)), (1, 2))
    yield Case("bias_add", normal(x=(5, 8), bias=(8,)), one(lambda a, v: bias.bias_add_forward(a.x, a.bias, version=v)),
               (1, 2))
    yield Case("channel_add", normal(x=(2, 3, 8), e=(2, 8)),
               one(lambda a, v: bias.channel_add_forward(a.x, a.e, version=v)), (1, 2))
    yield Case("scale_shift", normal(x=(2, 3, 8), scale=(2, 8), shift=(2, 8)),
               one(lambda a, v: scale_shift.scale_shift_forward(a.x, a.scale, a.shift, version=v)), (1, 2))
    yield Case("scale_shift_backward", normal(dy=(2, 3, 8), x=(2, 3, 8), scale=(2, 8)),
               lambda a, v: scale_shift.scale_shift_backward(a.dy, a.x, a.scale, version=v), (1, 2))
    yield Case("softmax", normal(x=(3, 36)), one(lambda a, v: softmax.softmax_forward(a.x, 0.7, version=v)), (1, 2, 3))
    yield Case("softmax_backward", lambda rng: {"dy": rng.standard_normal((3, 36)),
                                                "y": rng.dirichlet(np.ones(36), 3)},
               one(lambda a, v: softmax.softmax_backward(a.dy, a.y, 0.7, version=v)), (1, 2, 3))
    yield Case("global_norm", normal(x=(1000,)), one(lambda a, v: grad_norm.global_norm(a.x, version=v)), (1, 2))

    def of_pieces(a, v):
        grad_norm.squares_of_pieces(a.x, a.pieces, a.partials)
        return grad_norm.root_of_sum(a.partials), a.partials

    yield Case("global_norm", lambda rng: {"x": rng.standard_normal(1096), "partials": np.zeros(3),
                                           "pieces": np.array([(0, 4), (64, 1096), (8, 16)])}, of_pieces,
               label="of pieces")
    for channels, versions in ((3, (1,)), (4, (1, 2))):
        yield Case("mse", normal(prediction=(2, 4, 4, 4), target=(2, 4, 4, channels)),
                   one(lambda a, v: mse.mse_forward(a.prediction, a.target, version=v)), versions,
                   label=f"of {channels}")
    yield Case("mse_backward", normal(prediction=(2, 4, 4, 4), target=(2, 4, 4, 4)),
               one(lambda a, v: mse.mse_backward(a.prediction, a.target, 0.5, version=v)), (1, 2))


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

    def sixteens(shape, groups, team, near, silu, cluster=1, two=False):
        """Version 3 for sixteen channels and more: `near` turns of the pixels in registers, `cluster` blocks; two
        residuals."""
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
                limit = 128 + (P // 16 - near) * 1024 if near else 1 << 17
                plan = groupnorm_plan.make_plan_half(B, P, C, C // groups, 2, team, limit, 132, cluster)
                assert plan.near == near
                dx = one_pass_backward(*arguments, plan, residual, second)
            return dx, a.dweight, a.dbias

        parts = f"float16, {math.lcm(C // groups, 16) // 16} times sixteen channels"
        return Case("groupnorm_backward", inputs, run, (3,), HALF_TOLERANCE,
                    label=f"{parts}, two residuals" if two else f"{parts}, {near} turns in registers" if near else
                    f"{parts}, {cluster} blocks a cluster" if cluster > 1 else parts)

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
    yield sixteens((2, 37, 32), 8, 2, 0, True)
    yield sixteens((2, 96, 16), 4, 1, 2, True)
    yield sixteens((2, 48, 16), 4, 1, 1, False)
    yield sixteens((2, 20, 96), 16, 1, 0, True)
    yield sixteens((2, 20, 48), 8, 1, 0, True, cluster=4)
    yield sixteens((1, 112, 16), 2, 1, 2, True, two=True)
    yield Case("layernorm", normal(x=(5, 36), weight=(36,), bias=(36,)),
               lambda a, v: layernorm.layernorm_forward(a.x, a.weight, a.bias, version=v), (1, 2))

    def inputs(rng):
        made = normal(dy=(5, 36), x=(5, 36), weight=(36,), dweight=(36,), dbias=(36,))(rng)
        _, made["mean"], made["rstd"] = layernorm.layernorm_forward(made["x"])
        return made

    def image_rows(*shape):
        def inputs(rng):
            C = shape[-1]
            made = normal(dy=shape, x=shape, weight=(C,), dweight=(C,), dbias=(C,))(rng)
            _, made["mean"], made["rstd"] = layernorm.layernorm_forward(made["x"])
            return made
        return inputs

    for half in (False, True):
        yield from rms_cases((5, 36), (1, 2), half, "")
        for columns in (40, 264, 520, 776, 1032):  # a kernel each
            yield from rms_cases((2, columns), (3,), half, f"{columns} columns")
    yield Case("layernorm_backward", inputs, lambda a, v: (layernorm.layernorm_backward(
        a.dy, a.x, a.weight, a.mean, a.rstd, a.dweight, a.dbias, version=v), a.dweight, a.dbias), (1, 2, 3))
    for B, shape in ((2, (2, 9, 132)), (1, (1, 260)), (1, (1, 388))):
        yield Case("layernorm_backward", image_rows(*shape), lambda a, v, B=B: (*layernorm.layernorm_backward(
            a.dy, a.x, a.weight, a.mean, a.rstd, a.dweight, a.dbias, v, B), a.dweight, a.dbias), (3,),
            label=f"sums of {B} images, {shape[-1]} columns")


def rms_cases(shape, versions, half, label):
    def inputs(rng):
        made = normal(dy=shape, x=shape, weight=shape[1:], dweight=shape[1:])(rng)
        made |= {name: made[name].astype(np.float16 if half else np.float64) for name in ("dy", "x")}
        return {**made, "rstd": rmsnorm.rmsnorm_forward(made["x"].astype(np.float64))[1]}

    more = versions, HALF_TOLERANCE if half else 1e-5, f"{label}{', ' * bool(label and half)}{'float16' * half}"
    yield Case("rmsnorm", inputs, lambda a, v: rmsnorm.rmsnorm_forward(a.x, a.weight, version=v), *more)
    wide = shape[1] > 256 and not half  # bfloat16, which has few columns alone, is to run all texts of float16
    backward = with_plain_sums(rmsnorm.rmsnorm_backward) if wide else rmsnorm.rmsnorm_backward
    yield Case("rmsnorm_backward", inputs, lambda a, v: (backward(a.dy, a.x, a.weight, a.rstd, a.dweight, v),
                                                         a.dweight), *more)


def products_cases():
    for transposes in ((False, False), (False, True), (True, False)):
        shape_a, shape_b = ((20, 12), (12, 24))
        yield Case("matmul", normal(a=shape_a[::-1] if transposes[0] else shape_a,
                                    b=shape_b[::-1] if transposes[1] else shape_b, bias=(24,)),
                   one(lambda a, v, t=transposes: matmul.matmul_forward(a.a, a.b, *t, bias=a.bias, alpha=0.5,
                                                                        version=v)),
                   (1, 2, 3, 4), label="".join("nt"[t] for t in transposes))
    yield Case("matmul", normal(a=(3, 5, 7), b=(3, 7, 9)), one(lambda a, v: matmul.matmul_forward(a.a, a.b, version=v)),
               (1, 2, 3), label="batch, odd")
    yield Case("matmul", normal(a=(20, 40), b=(40, 24)), one(lambda a, v: matmul.matmul_forward(a.a, a.b, version=v)),
               (2, 3), label="several tiles of K")  # each tile is written over what others may still read

    def tiled(tile):
        def run(a, version):
            tiles, vectorised.TILES = vectorised.TILES, (tile,)
            try:
                return (matmul.matmul_forward(a.a, a.b, version=version),)
            finally:
                vectorised.TILES = tiles
        return run

    for tile in vectorised.TILES:
        yield Case("matmul", normal(a=(68, 8), b=(8, 68)), tiled(tile), (4,), label=f"tile {tile[0]}×{tile[1]}")

    def split(a, version):
        choose, launcher.choose_tile = launcher.choose_tile, lambda *_: ((64, 64), 3)
        try:
            return (matmul.matmul_forward(a.a, a.b, version=version),)
        finally:
            launcher.choose_tile = choose

    yield Case("matmul", normal(a=(8, 44), b=(44, 4)), split, (3, 4), label="split K")
    yield Case("linear", normal(x=(5, 12), weight=(8, 12), bias=(8,)),
               one(lambda a, v: linear.linear_forward(a.x, a.weight, a.bias, version=v)), (None,))
    yield Case("linear_backward", normal(dy=(5, 8), x=(5, 12), weight=(8, 12), dweight=(8, 12), dbias=(8,)),
               lambda a, v: (linear.linear_backward(a.dy, a.x, a.weight, a.dweight, a.dbias), a.dweight, a.dbias))
    yield Case("linear_backward", normal(dy=(5, 8), x=(5, 12), weight=(8, 12), dweight=(8, 12), dbias=(8,)),
               lambda a, v: (linear.linear_backward(a.dy, a.x, a.weight, a.dweight, a.dbias, accumulate=False),
                             a.dweight, a.dbias), label="written")
    for order in ("legacy", "new"):
        yield Case("attention", normal(qkv=(1, 5, 24)),
                   lambda a, v, o=order: attention.attention_forward(a.qkv, 2, o), label=order)

        def inputs(rng, order=order):
            made = normal(qkv=(1, 5, 24), dy=(1, 5, 8))(rng)
            made["p"] = attention.attention_forward(made["qkv"], 2, order)[1]
            return made

        yield Case("attention_backward", inputs,
                   one(lambda a, v, o=order: attention.attention_backward(a.dy, a.qkv, a.p, 2, o)), label=order)


def grouped_cases():
    def layers(flat):  # K is 40: a warp takes two turns
        return [(flat[0:200].reshape(5, 40), flat[200:205]), (flat[208:328].reshape(3, 40), flat[328:331])]

    yield Case("linear_group", normal(x=(2, 40), flat=(340,)),
               lambda a, v: tuple(linear_group.linear_group_forward(a.x, layers(a.flat), version=v)), (1, 2))
    yield Case("linear_group_backward", normal(x=(2, 40), flat=(340,), gradient=(340,), dy0=(2, 5), dy1=(2, 3)),
               lambda a, v: (linear_group.linear_group_backward([a.dy0, a.dy1], a.x, layers(a.flat),
                                                                layers(a.gradient), version=v), a.gradient), (1, 2))
    yield Case("linear_group_backward", normal(x=(2, 40), flat=(340,), gradient=(340,), dy0=(2, 5), dy1=(2, 3)),
               lambda a, v: (linear_group.linear_group_backward([a.dy0, a.dy1], a.x, layers(a.flat), layers(a.gradient),
                                                                version=v, accumulate=False), a.gradient), (1, 2),
               label="written")


def convolutions_cases():
    for label, (size, c, n, kernel, stride), versions in (
            ("3×3", (3, 8, 20, 3, 1), (1, 2, 3, 7)), ("wide", (3, 8, 68, 3, 1), (3,)),
            ("odd", (4, 3, 19, 3, 1), (1, 2, 3, 7)),
            ("stride 2", (5, 4, 8, 3, 2), (1, 2, 3, 7)), ("wide, stride 2", (4, 8, 20, 3, 2), (3,)),
            ("5×5, stride 2", (4, 4, 8, 5, 2), (7,)), ("in parts", (2, 16, 4, 3, 1), (7,)),
            ("1×1, stride 2", (3, 4, 8, 1, 2), (7,)), ("1×1, wide", (3, 8, 68, 1, 1), (7,)),
            ("to 3 channels", (4, 8, 3, 3, 1), (3,)), ("1×1", (3, 8, 12, 1, 1), (None, 7))):
        shapes = {"x": (1, size, size, c), "weight": (n, kernel, kernel, c), "bias": (n,)}
        yield Case("conv2d", normal(**shapes), one(lambda a, v, s=stride: conv2d.conv2d_forward(
            a.x, a.weight, a.bias, s, version=v)), versions, label=label)
        out = -(-size // stride)
        shapes |= {"dy": (1, out, out, n), "dweight": (n, kernel, kernel, c), "dbias": (n,)}
        yield Case("conv2d_backward", normal(**shapes), lambda a, v, s=stride: (conv2d.conv2d_backward(
            a.dy, a.x, a.weight, a.dweight, a.dbias, s, version=v), a.dweight, a.dbias), versions, label=label)
    yield Case("im2col", normal(x=(1, 4, 5, 4)), one(lambda a, v: im2col.im2col_forward(a.x, 3, 1, version=v)), (1, 2))
    yield Case("im2win", normal(x=(1, 4, 5, 4)), one(lambda a, v: im2win.im2win_forward(a.x, 3, 2, version=v)), (1, 2))
    yield Case("im2col_backward", normal(dcol=(1, 4, 5, 3, 3, 4)),
               one(lambda a, v: im2col.im2col_backward(a.dcol, (1, 4, 5, 4), 3, 1, version=v)), (1, 2))


def depthwise_cases():
    """Tiles that the image does not fill, and a slice that the channels do not fill."""
    problems = [("three channels", (1, 4, 5, 3), 3, (1,), np.float32), ("3×3", (2, 5, 10, 8), 3, (1, 2), np.float32),
                ("3×3 float16, two slices", (1, 2, 9, 40), 3, (1, 2, 3, 4), np.float16),
                ("7×7 float16, two tiles", (1, 2, 34, 8), 7, (3, 4), np.float16),
                ("3×3 float16, five tiles", (1, 2, 130, 8), 3, (4,), np.float16)]
    problems += [(f"{k}×{k} float16, {rows} rows", (1, rows, 3, 8), k, (4,), np.float16)
                 for k in (3, 5, 7) for rows in (3, 17, 29)]
    problems += [(f"{k}×{k} float16, 17 wide", (1, 1, 17, 8), k, (3,), np.float16) for k in (3, 5)]
    problems += [(f"{k}×{k}{' float16' * (dtype == np.float16)}, {width} wide", (1, 2, width, 8), k,
                  (2, 3) if dtype == np.float16 else (2,), dtype)
                 for k in (3, 5, 7) for dtype in (np.float32, np.float16) for width in (3, 9)]
    for label, (B, H, W, C), kernel, versions, dtype in problems:
        shapes = {"x": (B, H, W, C), "dy": (B, H, W, C), "weight": (kernel, kernel, C)}
        vectors = normal(bias=(C,), channel=(B, C), dweight=(kernel, kernel, C))

        def inputs(rng, shapes=shapes, vectors=vectors, dtype=dtype):
            made = normal(**shapes)(rng)
            return {**({k: a.astype(dtype) for k, a in made.items()} if dtype == np.float16 else made), **vectors(rng)}

        def case(name, run, results=dtype, label=label, versions=versions, inputs=inputs):
            tolerance = HALF_TOLERANCE if results == np.float16 else TOLERANCE
            return Case(name, inputs, run, versions, tolerance, label)

        yield case("depthwise", one(lambda a, v: depthwise.depthwise_forward(a.x, a.weight, a.bias, a.channel, v)))
        yield case("depthwise_input_gradient", one(lambda a, v: depthwise.depthwise_input_gradient(a.dy, a.weight, v)))
        if 4 in versions:
            yield case("depthwise_input_gradient", one(lambda a, v: depthwise.depthwise_input_gradient(
                a.dy, a.weight, v, residual=a.x)), label=label + ", with a residual", versions=(4,))
        yield case("depthwise_weight_gradient", in_place(
            lambda a, v: depthwise.depthwise_weight_gradient(a.dy, a.x, a.dweight, v), "dweight"), np.float32)


def depthwise_layernorm_cases():
    """Rows of pixels that warps do not fill; in version 2 two slices, and each number of chunks that a warp has."""
    for B, H, W, C in ((1, 1, 17, 8), (1, 1, 3, 72), (1, 1, 1, 136), (1, 1, 1, 264), (1, 1, 1, 392)):
        def inputs(rng, B=B, H=H, W=W, C=C):
            made = normal(x=(B, H, W, C), weight=(7, 7, C))(rng)
            more = normal(bias=(C,), channel=(B, C), gain=(C,), offset=(C,))(rng)
            more["bias"] += np.float32(4)  # the means of the channels are results, too: none is nearly 0
            return {**{name: a.astype(np.float16) for name, a in made.items()}, **more}

        yield Case("depthwise_layernorm", inputs, lambda a, v: depthwise.depthwise_layernorm_forward(
            a.x, a.weight, a.bias, a.channel, a.gain, a.offset, version=v), (1, 2) if C == 8 else (2,), HALF_TOLERANCE,
            f"float16, {W} wide, {C} channels")


def movement_cases():
    for name, shape in (("avgpool_forward", (2, 4, 4, 8)), ("avgpool_backward", (2, 2, 2, 8)),
                        ("upsample_forward", (2, 2, 2, 8)), ("upsample_backward", (2, 4, 4, 8))):
        function = getattr(resample, name)
        yield Case(name.removesuffix("_forward"), normal(x=shape), one(lambda a, v, f=function: f(a.x, version=v)),
                   (1, 2, 3))
    yield Case("avgpool_backward", normal(x=(2, 2, 2, 8), residual=(2, 4, 4, 8)), one(
        lambda a, v: resample.avgpool_backward(a.x, version=v, residual=a.residual)), (1, 2, 3),
               label="with a residual")
    yield Case("concat", normal(a=(6, 8), b=(6, 4)), one(lambda a, v: concat.concat_forward(a.a, a.b, version=v)),
               (1, 2, 3))
    yield Case("concat_backward", normal(dy=(6, 12)), lambda a, v: concat.concat_backward(a.dy, 8, version=v),
               (1, 2, 3))

    def pictures(rng):
        return {"images": rng.integers(0, 256, (2, 3, 4, 3)).astype(np.uint8), "flip": np.array([0, 1], np.int32)}

    yield Case("images", pictures, one(lambda a, v: images.images_forward(a.images, a.flip, version=v)), (1, 2))
    yield Case("pixels", normal(x=(2, 3, 4, 3)), one(lambda a, v: images.pixels_forward(a.x)))

    def labels(rng):
        return {"labels": np.array([2, 0, 2, 1], np.int32), **normal(weight=(3, 8), dy=(4, 8), dweight=(3, 8))(rng)}

    yield Case("embedding", labels, one(lambda a, v: embedding.embedding_forward(a.labels, a.weight, version=v)),
               (1, 2))
    yield Case("embedding_backward", labels, in_place(
        lambda a, v: embedding.embedding_backward(a.dy, a.labels, a.dweight, version=v), "dweight"), (1, 2))
    yield Case("timestep_embedding", lambda rng: {"t": np.array([0, 7, 999], np.int32)},
               one(lambda a, v: embedding.timestep_embedding_forward(a.t, 9)), tolerance=5e-5)


def diffusion_cases():
    x = {"x_0": (2, 3, 4), "eps": (2, 3, 4)}
    yield Case("q_sample", with_timesteps(2, **x),
               one(lambda a, v: q_sample.q_sample_forward(a.x_0, a.eps, a.t, a.signal, a.noise, version=v)), (1, 2))
    yield Case("velocity", with_timesteps(2, **x),
               one(lambda a, v: q_sample.velocity_forward(a.x_0, a.eps, a.t, a.signal, a.noise, version=v)), (1, 2))
    yield Case("weigh", with_timesteps(2, **x),
               one(lambda a, v: q_sample.weigh_forward(a.x_0, a.t, a.signal, version=v)), (1, 2))
    for label, more in {"uniform": {"path": levels.LINEAR, "prediction": "flow", "shift": 3.0},
                        "logit-normal": {"path": levels.LINEAR, "prediction": "x_0", "loss": "flow", "normal": True},
                        "edm": {"path": levels.EDM, "prediction": "edm", "normal": True, "mean": -1.2, "std": 1.2},
                        "min-snr": {"path": levels.LINEAR, "prediction": "v", "loss": levels.MIN_SNR, "gamma": 5.0},
                        "eps": {"path": levels.EDM, "prediction": "eps", "loss": "edm", "normal": True}}.items():
        yield Case("levels", with_counters(5),
                   lambda a, v, m=more: levels.levels_forward(SEED, PURPOSE, a.step, a.samples, **m), label=label)
    shapes = {"x": (2, 3, 4), "u": (2, 3, 4), "v": (2, 3, 4)}
    for terms in (1, 2, 3):
        yield Case("combine", normal(**shapes), one(lambda a, v, n=terms: sampler.combine(
            *((0.3, a.x), (-1.2, a.u), (0.7, a.v))[:n], version=v)), (1, 2), label=f"{terms} terms")
    for clip in (False, True):
        yield Case("estimate_x_0", normal(x=(2, 3, 4), prediction=(2, 3, 4)),
                   one(lambda a, v, c=clip: sampler.estimate_x_0(a.x, a.prediction, (1.3, -0.8), clip=c, version=v)),
                   (1, 2), label="clipped" if clip else "")
    yield Case("guide", normal(c=(2, 3, 4), u=(2, 3, 4)), one(lambda a, v: sampler.guide(a.c, a.u, 2.5, 3)))
    yield Case("learned_step", normal(x=(2, 3, 4), x_0=(2, 3, 4), prediction=(2, 3, 8), noise=(2, 3, 4)),
               one(lambda a, v: sampler.learned_step(a.x, a.x_0, a.prediction, a.noise, (0.9, 0.2, -3.0, -1.0))))
    for copies in (1, 2):
        yield Case("model_input", normal(x=(2, 3, 4), numbers=(2,)),
                   lambda a, v, n=copies: sampler.model_input(a.x, a.numbers, n, version=v), (1, 2),
                   label=f"× {copies}")

    def masked(rng):
        return {**normal(known=(2, 3, 4), x=(2, 3, 4))(rng), "mask": rng.integers(0, 2, (2, 3, 4)).astype(np.float64)}

    yield Case("blend", masked, one(lambda a, v: sampler.blend(a.mask, a.known, a.x)))


def randomness_cases():
    shape = (2, 3, 4)
    for name in ("random_uniform", "random_normal"):
        function = getattr(random, name)
        yield Case(name, with_counters(2), one(lambda a, v, f=function: f(shape, SEED, PURPOSE, a.step, a.samples,
                                                                         version=v)), (1, 2))
    yield Case("random_integers", with_counters(5),
               one(lambda a, v: random.random_integers(SEED, PURPOSE, a.step, a.samples, 1000)))
    yield Case("dropout", with_counters(2, x=shape),
               one(lambda a, v: dropout.dropout_forward(a.x, 0.3, SEED, 1, a.step, a.samples, version=v)), (1, 2))
    yield Case("dropout_backward", with_counters(2, x=shape),
               one(lambda a, v: dropout.dropout_backward(a.x, 0.3, SEED, 1, a.step, a.samples, version=v)), (1, 2))


def muon_cases():
    for rows, columns, versions, extents in ((3, 5, (1,), None), (24, 16, (1, 2), None),
                                             (24, 16, (1, 2), (20, 12, 24, 16))):
        n = -(-rows * columns // 8) * 8

        def inputs(rng, rows=rows, columns=columns, n=n):
            return {**normal(weight=(3 * n,), gradient=(3 * n,), m=(3 * n,), ema=(3 * n,), x=(2, rows, columns))(rng),
                    "extents": np.array((20, 12, 24, 16)),
                    "half": np.zeros(3 * n, np.float16), "starts": np.array([0, 2 * n]), "norm": np.array([4.0]),
                    "unscale": np.array([0.5]), "rate": np.array([1e-2]), "step": np.array([3], np.uint32)}

        def stack(a, rows=rows, columns=columns, extents=extents):
            return muon.Stack(a.starts, rows, columns, extents and a.extents)

        label = f"{rows} × {columns}{', and a smaller one' if extents else ''}"
        yield Case("muon_momentum", inputs, lambda a, v, s=stack: (muon.muon_momentum(
            a.gradient, a.m, s(a), a.norm, 0.95, 1.0, a.unscale, version=v), a.m), versions, label=label)
        yield Case("muon_apply", inputs, in_place(lambda a, v, s=stack: muon.muon_apply(
            a.weight, a.x, s(a), a.step, a.rate, a.norm, 0.1, a.ema, 0.99, a.half, version=v), "weight", "ema", "half"),
            versions, 1e-3, label=label)
    for shape, dtype, tolerance in (((2, 3, 2), np.float64, 1e-5), ((2, 8, 16), np.float16, HALF_TOLERANCE)):
        yield Case("newton_schulz", lambda rng, s=shape, d=dtype: {"x": (newton_schulz.A * unit(rng, s)).astype(d)},
                   one(lambda a, v: newton_schulz.newton_schulz(a.x, 1)), tolerance=tolerance,
                   label=f"{shape[1]} × {shape[2]}")  # one iteration: the others launch the same kernels


def unit(rng, shape):
    """Matrices of Frobenius norm 1."""
    x = rng.standard_normal(shape)
    return x / np.linalg.norm(x, axis=(1, 2), keepdims=True)


def update_cases():
    def state(rng):
        made = normal(weight=(24,), gradient=(24,), m=(24,), ema=(24,), rate=(1,), loss=(1,))(rng)
        return {**made, "v": rng.random(24), "step": np.array([3], np.uint32), "norm": np.array([4.0]),
                "first_bad": np.array([-1], np.int32), "ring": np.zeros((4, 5)), "rate": np.array([1e-3]),
                "half": np.zeros(24, np.float16), "scale": np.array([1024.0]), "unscale": np.array([0.5]),
                "counts": np.array([3, 0, 0], np.int32)}

    yield Case("adamw", state, in_place(lambda a, v: adamw.adamw_update(
        a.weight, a.gradient, a.m, a.v, a.step, a.rate, a.norm, 0.9, 0.999, 1e-8, 0.01, 1.0, version=v),
        "weight", "m", "v"), (1, 2))
    yield Case("adamw", state, in_place(lambda a, v: adamw.adamw_update(
        a.weight, a.gradient, a.m, a.v, a.step, a.rate, a.norm, 0.9, 0.999, 1e-8, 0.01, 1.0, a.unscale, a.ema, 0.99,
        a.half, version=v), "weight", "m", "v", "ema", "half"), (3,), 1e-3, label="fused")
    parts = zero_ranges.pieces([(0, 8), (16, 24)])
    yield Case("adamw", lambda rng: {**state(rng), "pieces": parts}, in_place(lambda a, v: adamw.adamw_update(
        a.weight, a.gradient, a.m, a.v, a.step, a.rate, a.norm, 0.9, 0.999, 1e-8, 0.01, 1.0, a.unscale, a.ema, 0.99,
        a.half, version=v, ranges=adamw.Ranges(a.pieces, 16)), "weight", "m", "v", "ema", "half"), (3,), 1e-3,
        label="ranges")
    for rule in loss_scale.RULES:
        yield Case("loss_scale", state, in_place(lambda a, v, r=rule: loss_scale.loss_scale_update(
            a.norm, a.scale, a.unscale, a.counts, r, 4), "norm", "scale", "unscale", "counts"), label=rule)
    yield Case("ema", state, in_place(
        lambda a, v: ema.ema_update(a.ema, a.weight, a.step, a.norm, 0.99, version=v), "ema"), (1, 2))
    yield Case("power_ema", lambda rng: {**state(rng), "emas": rng.standard_normal((2, 24)),
                                         "exponents": power_ema.exponents_of((0.05, 0.1))}, in_place(
        lambda a, v: power_ema.power_ema_update(a.emas, a.weight, a.step, a.norm, a.exponents, version=v), "emas"),
        (1, 2))
    for cosine in (False, True):
        yield Case("learning_rate", state, in_place(lambda a, v, c=cosine: step_state.learning_rate_forward(
            a.step, a.rate, 1e-3, 2, 10, c), "rate"), label="cosine" if cosine else "constant")
    yield Case("step_advance", state, in_place(lambda a, v: step_state.step_advance(a.step), "step"))
    yield Case("next_row", lambda rng: {"table": rng.integers(0, 2**32, (3, 40)).astype(np.uint32),
                                        "step": np.array([1], np.uint32), "row": np.zeros(40, np.uint32)},
               in_place(lambda a, v: step_state.next_row(a.table, a.step, a.row), "step", "row"))
    for label, columns in (("rows of 16 bytes", (12, 8)), ("odd", (7, 3))):
        n = sum(columns)
        for name, function, written in (
                ("place", lambda a, v, at=columns[0]: ahead.place(a.ahead, a.source, at, version=v), "ahead"),
                ("take", lambda a, v: ahead.take(a.ahead, a.step, a.begin, a.row, version=v), "row")):
            yield Case(name, lambda rng, n=n, m=columns[1]: {
                "ahead": rng.standard_normal((5, n)), "source": rng.standard_normal((5, m)), "row": np.zeros(n),
                "step": np.array([9], np.uint32), "begin": np.array([6], np.uint32)}, in_place(function, written),
                (1, 2) if n % 4 == 0 else (1,), label=label)
    yield Case("timesteps_ahead", lambda rng: {
        "table": rng.standard_normal((4, 3)).astype(np.float32).view(np.uint32), "t": np.zeros(15),
        "step": np.array([2], np.uint32), "begin": np.zeros(1, np.uint32)},
        in_place(lambda a, v: ahead.timesteps_ahead(a.table, a.step, a.begin, a.t, 3), "begin", "t"))
    yield Case("latch_nonfinite", state, in_place(
        lambda a, v: step_state.latch_nonfinite(a.first_bad, a.loss, a.norm, a.step), "first_bad", "norm"))
    yield Case("zero_ranges", lambda rng: {"flat": rng.standard_normal(2500),
                                           "ranges": zero_ranges.pieces([(8, 13), (40, 2100), (2100, 2103)])},
               in_place(lambda a, v: zero_ranges.zero_ranges(a.flat, a.ranges), "flat"))
    yield Case("telemetry", state, in_place(
        lambda a, v: telemetry.telemetry_record(a.ring, a.step, a.loss, a.norm, a.rate, a.scale, a.counts, 0.5),
        "ring"))
    yield Case("latch_skips", state, in_place(
        lambda a, v: step_state.latch_skips(a.first_bad, a.counts, a.norm, a.step, 0), "first_bad", "norm"))
    yield Case("count_update", state, in_place(lambda a, v: step_state.count_update(a.step, a.norm), "step"))


GROUPS = (elementwise_cases, fused_cases, reductions_cases, norms_cases, products_cases, grouped_cases,
          convolutions_cases, depthwise_cases, depthwise_layernorm_cases, movement_cases,
          diffusion_cases, randomness_cases, muon_cases,
          update_cases)
