"""Cases of convolutions in float32, and of depthwise ones."""
import numpy as np

from .. import conv2d, depthwise
from ..conv2d import im2col, im2win
from .case import HALF_TOLERANCE, TOLERANCE, Case, in_place, normal, one


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
