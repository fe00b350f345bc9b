"""Cases of convolutions in float32."""
from .. import conv2d
from ..conv2d import im2col
from ..conv2d.launcher import OTHERS
from .case import Case, normal, one


def convolutions_cases():
    for label, (size, c, n, kernel, stride), versions in (
            ("3×3", (3, 8, 20, 3, 1), (1, 2, 3, *OTHERS)), ("wide", (3, 8, 68, 3, 1), (3,)),
            ("odd", (4, 3, 19, 3, 1), (1, 2, 3, *OTHERS)),
            ("stride 2", (5, 4, 8, 3, 2), (1, 2, 3, *OTHERS)), ("wide, stride 2", (4, 8, 20, 3, 2), (3,)),
            ("5×5, stride 2", (4, 4, 8, 5, 2), OTHERS), ("in parts", (2, 16, 4, 3, 1), OTHERS),
            ("1×1, stride 2", (3, 4, 8, 1, 2), OTHERS), ("1×1, wide", (3, 8, 68, 1, 1), OTHERS),
            ("to 3 channels", (4, 8, 3, 3, 1), (3,)), ("1×1", (3, 8, 12, 1, 1), (None, *OTHERS))):
        shapes = {"x": (1, size, size, c), "weight": (n, kernel, kernel, c), "bias": (n,)}
        yield Case("conv2d", normal(**shapes), one(lambda a, v, s=stride: conv2d.conv2d_forward(
            a.x, a.weight, a.bias, s, version=v)), versions, label=label)
        out = -(-size // stride)
        shapes |= {"dy": (1, out, out, n), "dweight": (n, kernel, kernel, c), "dbias": (n,)}
        yield Case("conv2d_backward", normal(**shapes), lambda a, v, s=stride: (conv2d.conv2d_backward(
            a.dy, a.x, a.weight, a.dweight, a.dbias, s, version=v), a.dweight, a.dbias), versions, label=label)
    yield Case("im2col", normal(x=(1, 4, 5, 4)), one(lambda a, v: im2col.im2col_forward(a.x, 3, 1, version=v)), (1, 2))
    yield Case("im2col_backward", normal(dcol=(1, 4, 5, 3, 3, 4)),
               one(lambda a, v: im2col.im2col_backward(a.dcol, (1, 4, 5, 4), 3, 1, version=v)), (1, 2))
