"""Cases of the tensor-core kernels: float16 operands, float32 sums."""
import numpy as np

from ...device import empty, is_device
from .. import bias, conv2d
from ..conv2d import mma_halo, mma_halo_gradient
from ..conv2d.hopper import convolution as conv2d_hopper
from ..conv2d.hopper import weight_gradient as conv2d_hopper_gradient
from ..conv2d.hopper import weight_gradient_3x3 as conv2d_hopper_gradient_3x3
from ..groupnorm.normalise import channel_statistics_reference
from .case import HALF_TOLERANCE, Case


def halves(**shapes):
    """Inputs that are normal float16 arrays of these shapes."""
    return lambda rng: {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}


def convolution_cases():
    """Every kernel of the float16 convolution; those of version 6 with one tap, where they can, as nine take long."""
    def operands(h, w, c, n, size, stride=1):
        def make(rng):
            shapes = {"x": (1, h, w, c), "weight": (n, size, size, c),
                      "dy": (1, (h - 1) // stride + 1, (w - 1) // stride + 1, n)}
            return {**halves(**shapes)(rng), "dweight": rng.standard_normal(shapes["weight"]).astype(np.float32),
                    "dbias": rng.standard_normal(n).astype(np.float32)}
        return make

    def gradients(a, function):
        function(a.dy, a.x, a.dweight, a.dbias)
        return a.dweight, a.dbias

    kernels = conv2d_hopper.conv2d_forward_kernels_v6
    for *tile, taps, size in ((64, 1, 1, 3), *((*key, key[2]) for key in kernels)):
        tile, inputs = tuple(tile), operands(2, 3, 8, 8, size)
        label = f"float16, tile {tile}, {size} × {size}, {taps} at once"

        def forward(a, v, tile=tile, taps=taps):
            if not is_device(a.x):
                return (conv2d.conv2d_forward_reference(a.x, a.weight),)
            return (conv2d_hopper.hopper_convolution(a.x, a.weight, None, empty(a.dy.shape, a.x.dtype, like=a.x),
                                                     only=tile, taps_per_stage=taps),)

        def gradient(a, v, tile=tile, taps=taps):
            if not is_device(a.x):
                return (conv2d.conv2d_backward_reference(a.dy, a.x, a.weight, a.dweight),)
            return (conv2d_hopper.hopper_convolution(a.dy, a.weight, None, empty(a.x.shape, a.x.dtype, like=a.x),
                                                     gradient=True, only=tile, taps_per_stage=taps),)

        yield Case("conv2d", inputs, forward, tolerance=HALF_TOLERANCE, label=label)
        yield Case("conv2d_input_gradient", inputs, gradient, tolerance=HALF_TOLERANCE, label=label)

    def increased(a, v):
        return (conv2d.conv2d_backward(a.dy, a.x, a.weight, a.dweight, None, need_dx=True, version=v, residual=a.x),)

    yield Case("conv2d_input_gradient", operands(3, 9, 8, 8, 3), increased, (6,), HALF_TOLERANCE,
               "float16, with a residual")

    for bn, sub in (32, 1), (64, 2), (96, 2), (128, 1):  # rows of either width, tiles of either size
        n = bn if sub == 2 else bn + 8  # a second tile, of which little exists

        def left(a, v, tile=(bn, sub)):
            if not is_device(a.x):
                y = conv2d.conv2d_forward_reference(a.x, a.weight, a.dbias, residual=a.dy)
                return y, channel_statistics_reference(y)
            statistics, y = conv2d.channel_statistics(a.x, a.weight, least=0), empty(a.dy.shape, a.x.dtype, like=a.x)
            conv2d_hopper.hopper_convolution(a.x, a.weight, a.dbias, y, residual=a.dy, only=tile, taps_per_stage=1,
                                             statistics=statistics)
            return y, statistics

        yield Case("conv2d", operands(8, 8, 8, n, 1), left, tolerance=HALF_TOLERANCE,
                   label=f"float16, tile {(bn, sub)}, statistics")

    def reference(dy, x, dweight, dbias):
        conv2d.conv2d_backward_reference(dy, x, np.zeros_like(dweight), dweight, dbias, need_dx=False)

    for width, parts, pixels, blocks in ((64, 2, 64, 2), (32, 4, 64, 2), (16, 5, 64, 5), (64, 1, 128, 1),
                                         (32, 1, 128, 1), (16, 2, 128, 1), *((n, 1, 256, 1) for n in (64, 32, 16))):
        def in_tiles(a, v, only=(width, parts, pixels, blocks)):
            if not is_device(a.x):
                return *gradients(a, reference), bias.channel_add_backward(a.dy)
            dchannel = empty((len(a.dy), a.dy.shape[3]), np.float32, like=a.dy)
            conv2d_hopper_gradient_3x3.hopper_weight_gradient_3x3(a.dy, a.x, a.dweight, a.dbias, only=only,
                                                                  dchannel=dchannel)
            return a.dweight, a.dbias, dchannel

        channels = {5: 16, 2: width}.get(blocks, 8)  # the share of every block has some; of two, each of its vectors
        yield Case("conv2d_weight_gradient", operands(2, 3 if parts == 1 else 33, channels, 8, 3), in_tiles,
                   label=f"float16, tile of {width}, {pixels} pixels, {parts} parts, {blocks} blocks a cluster")

    def general(dy, x, dweight, dbias):
        conv2d_hopper_gradient.hopper_weight_gradient(dy, x, dweight, dbias, general=True)

    yield Case("conv2d_weight_gradient", operands(2, 3, 8, 8, 1),
               lambda a, v: gradients(a, general if is_device(a.x) else reference), label="float16, any kernel")

    # by mma.sync: 3 × 3 taps of stride 1 in every tile
    for seg, frags, flipped in mma_halo.KERNELS:
        def in_tile(a, v, only=(seg, frags), flipped=flipped):
            if not is_device(a.x):
                if flipped:
                    return (conv2d.conv2d_backward_reference(a.dy, a.x, a.weight, a.dweight),)
                return (conv2d.conv2d_forward_reference(a.x, a.weight, a.dbias, residual=a.dy),)
            if flipped:
                return (mma_halo.halo_forward(a.dy, a.weight, None, empty(a.x.shape, a.x.dtype, like=a.x), flipped=True,
                                              only=only),)
            return (mma_halo.halo_forward(a.x, a.weight, a.dbias, empty(a.dy.shape, a.x.dtype, like=a.x),
                                          residual=a.dy, only=only),)

        yield Case("conv2d_input_gradient" if flipped else "conv2d", operands(2, 3, 8, 8, 3), in_tile,
                   tolerance=HALF_TOLERANCE, label=f"float16, mma, segments of {seg}, {64 * frags} pixels",
                   fast=(seg, frags) == (8, 2))
    for *only, sums in mma_halo_gradient.KERNELS:
        def weight_in_tile(a, v, only=tuple(only), sums=sums):
            dbias = a.dbias if sums else None
            if is_device(a.x):
                mma_halo_gradient.halo_weight_gradient(a.dy, a.x, a.dweight, dbias=dbias, only=only)
            else:
                conv2d.conv2d_backward_reference(a.dy, a.x, a.weight, a.dweight, dbias, need_dx=False)
            return (a.dweight, a.dbias)

        yield Case("conv2d_weight_gradient", operands(2, 3, 8, 8, 3), weight_in_tile, tolerance=HALF_TOLERANCE,
                   label=f"float16, mma, segments of {only[0]}, {only[1]} stages{', and sums' * sums}",
                   fast=only == [8, 2] and sums)

    # by mma.sync, and with few channels on one side: from 3, from 5, to 3
    for version, (h, w, c, n, size, stride) in ((4, (3, 2, 8, 8, 1, 2)), (3, (2, 3, 3, 8, 3, 1)),
                                                (3, (2, 2, 5, 8, 3, 1)), (3, (3, 2, 8, 3, 3, 1))):
        label = f"float16, {c} → {n}"
        yield Case("conv2d", operands(h, w, c, n, size, stride), lambda a, v, stride=stride: (
            conv2d.conv2d_forward(a.x, a.weight, None, stride, version=v),), (version,), HALF_TOLERANCE, label)

        def backward(a, v, stride=stride, need_dx=version == 4 or n == 3):
            dx = conv2d.conv2d_backward(a.dy, a.x, a.weight, a.dweight, a.dbias, stride, need_dx, v)
            return (dx, a.dweight, a.dbias) if need_dx else (a.dweight, a.dbias)

        yield Case("conv2d_backward", operands(h, w, c, n, size, stride), backward, (version,), HALF_TOLERANCE, label)
