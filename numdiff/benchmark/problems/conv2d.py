"""Problems of convolutions."""
from ...kernels import conv2d
from ...kernels.conv2d import im2col
from ...kernels.conv2d.launcher import OTHERS
from ..kernels import conv2d_input_gradient, conv2d_weight_gradient
from .problem import IMAGE, PIXELS, SIDE, B, C, half, single


def add_problems(add):
    add(im2col.im2col_forward, x=half(B, SIDE, SIDE, C), kernel=3)
    add(im2col.im2col_backward, dcol=half(B, SIDE, SIDE, 3, 3, C), x_shape=(B, SIDE, SIDE, C), kernel=3)
    x, weight = single(B, SIDE, SIDE, C), single(C, 3, 3, C)
    add(conv2d.conv2d_forward,
        versions=(1, 2, 3, *OTHERS), x=x, weight=weight)
    add(conv2d.conv2d_forward, versions=(4,), precision="tf32", x=x, weight=weight)
    add(conv2d_input_gradient, versions=(2, 3, *OTHERS), dy=x,
        weight=weight, x=x, stride=1)
    add(conv2d_weight_gradient,
        versions=(2, 3, *OTHERS), dy=x, x=x, dweight=weight, stride=1)
    add(conv2d_weight_gradient, versions=(4,), precision="tf32", dy=x, x=x, dweight=weight, stride=1)
    add(conv2d.conv2d_forward, versions=(3,), x=x, weight=single(3, 3, 3, C))
    add(conv2d_weight_gradient, versions=(3,), dy=x, x=PIXELS, dweight=single(C, 3, 3, 3), stride=1)
    weight = half(C, 3, 3, C)
    add(conv2d.conv2d_forward, x=IMAGE, weight=weight)
    add(conv2d_input_gradient, versions=(1, 4, 5, 6),
        dy=IMAGE, weight=weight, x=IMAGE, stride=1)
    add(conv2d_weight_gradient,
        versions=(1, 4, 5, 6), dy=IMAGE, x=IMAGE, dweight=single(C, 3, 3, C), stride=1)
    add(conv2d_weight_gradient, note="1 × 1 taps", versions=(5, 6), dy=half(B, 32, 32, 128),
        x=half(B, 32, 32, 128), dweight=single(128, 1, 1, 128), stride=1)
    thin = half(B, SIDE, SIDE, 3)
    add(conv2d.conv2d_forward, versions=(3,), x=thin, weight=half(C, 3, 3, 3))
    add(conv2d.conv2d_forward, versions=(3,), x=IMAGE, weight=half(3, 3, 3, C))
    add(conv2d_input_gradient, versions=(3,), dy=thin, weight=half(3, 3, 3, C), x=IMAGE,
        stride=1)
    add(conv2d_weight_gradient, versions=(3,), dy=thin, x=IMAGE, dweight=single(3, 3, 3, C),
        stride=1)
    wide, weight = half(B, 32, 32, 256), half(256, 3, 3, 256)
    add(conv2d.conv2d_forward, versions=(6,), x=wide, weight=weight)
