"""Problems of convolutions, dense and depthwise."""
from ...kernels import conv2d, depthwise
from ...kernels.conv2d import direct, im2col, im2win, implicit, implicit_weight_gradient, narrow
from ...kernels.conv2d import levels as conv2d_levels
from ...kernels.conv2d import mma as conv2d_mma
from ...kernels.conv2d.hopper import convolution as conv2d_hopper
from ...kernels.conv2d.hopper import weight_gradient as conv2d_hopper_gradient
from ...kernels.conv2d.hopper import weight_gradient_3x3 as conv2d_hopper_gradient_3x3
from ...kernels.conv2d.levels import halo, shifted_boxes
from ...kernels.conv2d.narrow_half import launcher as narrow_half
from ...kernels.conv2d.tf32 import launcher as conv2d_tf32
from ..kernels import conv2d_input_gradient, conv2d_weight_gradient
from .problem import IMAGE, PIXELS, SIDE, B, C, half, single


def add_problems(add):
    add(im2col.im2col_forward, x=half(B, SIDE, SIDE, C), kernel=3)
    add(im2col.im2col_backward, dcol=half(B, SIDE, SIDE, 3, 3, C), x_shape=(B, SIDE, SIDE, C), kernel=3)
    add(im2win.im2win_forward, x=single(B, SIDE, SIDE, C), kernel=3)
    x, weight = single(B, SIDE, SIDE, C), single(C, 3, 3, C)
    add(conv2d.conv2d_forward, conv2d.launcher, (direct, 1, 2), (implicit, 3), (im2win, 7),
        versions=(1, 2, 3, 7), x=x, weight=weight)
    add(conv2d.conv2d_forward, conv2d.launcher, conv2d_tf32, versions=(4,), precision="tf32", x=x, weight=weight)
    add(conv2d_input_gradient, conv2d.launcher, (direct, 2), (implicit, 3), (im2win, 7), versions=(2, 3, 7), dy=x,
        weight=weight, x=x, stride=1)
    add(conv2d_weight_gradient, conv2d.launcher, (direct, 2), (implicit_weight_gradient, 3), (im2win, 7),
        versions=(2, 3, 7), dy=x, x=x, dweight=weight, stride=1)
    add(conv2d_weight_gradient, conv2d_tf32, versions=(4,), precision="tf32", dy=x, x=x, dweight=weight, stride=1)
    add(conv2d.conv2d_forward, narrow, versions=(3,), x=x, weight=single(3, 3, 3, C))
    add(conv2d_weight_gradient, narrow, versions=(3,), dy=x, x=PIXELS, dweight=single(C, 3, 3, 3), stride=1)
    weight = half(C, 3, 3, C)
    add(conv2d.conv2d_forward, conv2d.launcher, (conv2d_mma, 4), (conv2d_hopper, 5, 6), x=IMAGE, weight=weight)
    add(conv2d_input_gradient, conv2d.launcher, (conv2d_mma, 4), (conv2d_hopper, 5, 6), versions=(1, 4, 5, 6),
        dy=IMAGE, weight=weight, x=IMAGE, stride=1)
    add(conv2d_weight_gradient, conv2d.launcher, (conv2d_mma, 4), (conv2d_hopper_gradient_3x3, 5, 6),
        versions=(1, 4, 5, 6), dy=IMAGE, x=IMAGE, dweight=single(C, 3, 3, C), stride=1)
    add(conv2d_weight_gradient, conv2d_hopper_gradient, note="1 × 1 taps", versions=(5, 6), dy=half(B, 32, 32, 128),
        x=half(B, 32, 32, 128), dweight=single(128, 1, 1, 128), stride=1)
    thin = half(B, SIDE, SIDE, 3)
    add(conv2d.conv2d_forward, narrow_half, versions=(3,), x=thin, weight=half(C, 3, 3, 3))
    add(conv2d.conv2d_forward, narrow_half, versions=(3,), x=IMAGE, weight=half(3, 3, 3, C))
    add(conv2d_input_gradient, narrow_half, versions=(3,), dy=thin, weight=half(3, 3, 3, C), x=IMAGE,
        stride=1)
    add(conv2d_weight_gradient, narrow_half, versions=(3,), dy=thin, x=IMAGE, dweight=single(3, 3, 3, C),
        stride=1)
    wide, weight = half(B, 32, 32, 256), half(256, 3, 3, 256)
    add(conv2d_levels.conv2d_level_forward, conv2d_levels, (shifted_boxes, 1), (halo, 2), x=wide, weight=weight)
    add(conv2d.conv2d_forward, conv2d_levels, (conv2d_hopper, 6), versions=(6,), x=wide, weight=weight)

    sevens, weight = half(B, 32, 32, 128), half(7, 7, 128)  # of a ConvNeXt block
    rungs, simple = (depthwise.launcher, (depthwise.tiled, 2), (depthwise.mma, 3)), (depthwise.naive, 1)
    by_tma, gradient_by_tma = (depthwise.hopper, 4), (depthwise.hopper_weight_gradient, 4)
    add(depthwise.depthwise_forward, *rungs, by_tma, simple, x=sevens, weight=weight, bias=single(128),
        channel=single(B, 128))
    add(depthwise.depthwise_input_gradient, *rungs, by_tma, simple, dy=sevens, weight=weight)
    add(depthwise.depthwise_weight_gradient, *rungs, gradient_by_tma, simple, dy=sevens, x=sevens,
        dweight=single(7, 7, 128))
    add(depthwise.depthwise_layernorm_forward, depthwise.layernorm, x=sevens, weight=weight, bias=single(128),
        channel=single(B, 128), gain=single(128), offset=single(128))
    sevens, weight = half(2 * B, 56, 56, 96), half(7, 7, 96)  # and of the first of ConvNeXt-T
    add(depthwise.depthwise_forward, *rungs, by_tma, x=sevens, weight=weight, versions=(2, 3, 4))
    add(depthwise.depthwise_input_gradient, *rungs, by_tma, dy=sevens, weight=weight, versions=(2, 3, 4))
    add(depthwise.depthwise_weight_gradient, *rungs, gradient_by_tma, dy=sevens, x=sevens, dweight=single(7, 7, 96),
        versions=(2, 3, 4))
