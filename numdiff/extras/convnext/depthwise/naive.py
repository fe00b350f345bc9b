"""Depthwise convolution v1: one thread an output.

MATHEMATICS, SHAPES
    as in reference.py
VERSIONS
    v1 naive: one thread an output, which reads kernel² pixels and as many weights. The weight
       gradient: one thread a weight, which reads all images.
LAUNCH
    256 threads a block, as many blocks as outputs or weights need.
DETERMINISM
    a thread sums in the order of its loops.
COST
    the caches serve the kernel² reads of a pixel; two loads for each product. A weight's thread
    reads 2 numbers of memory for each product, and kernel² · C threads are too few to hide that.
SOURCE
    reference.py.
READ NEXT
    tiled.py, where neighbours share what they read.
"""

from typing import NamedTuple

from ....device import cuda, float32
from ....device.common import divide

BLOCK = 256  # threads


class NaiveDepthwiseImage(NamedTuple):
    """Of x and y (·, H, W, C); flip: 1 to count the taps from the other end; bias, channel: whether
    there is one."""

    H: int
    W: int
    C: int
    flip: int
    bias: int
    channel: int


@cuda.jit
def depthwise_forward_kernel_v1(x, weight, bias, channel, y, kernel, image):
    H, W, C = image.H, image.W, image.C
    out = cuda.grid(1)
    if out < y.size:
        pixel, c = divide(out, C)
        row, j = divide(pixel, W)
        b, i = divide(row, H)
        total = bias[c] if image.bias else float32(0)
        if image.channel:
            total += channel[b * C + c]
        for r in range(kernel):
            h = i + r - kernel // 2
            for s in range(kernel):
                w = j + s - kernel // 2
                if h >= 0 and h < H and w >= 0 and w < W:
                    tap = r * kernel + s
                    if image.flip:
                        tap = kernel * kernel - 1 - tap
                    total += float32(x[((b * H + h) * W + w) * C + c]) * float32(
                        weight[tap * C + c]
                    )
        y[out] = total


@cuda.jit
def depthwise_weight_gradient_kernel_v1(dy, x, dweight, B, H, W, C, kernel):
    out = cuda.grid(1)
    if out < dweight.size:
        tap, c = divide(out, C)
        r, s = divide(tap, kernel)
        total = float32(0)
        for b in range(B):
            for i in range(H):
                h = i + r - kernel // 2
                # a sum for each row: a running sum over 100,000 pixels would lose two digits
                row_total = float32(0)
                for j in range(W):
                    w = j + s - kernel // 2
                    if h >= 0 and h < H and w >= 0 and w < W:
                        row_total += float32(dy[((b * H + i) * W + j) * C + c]) * float32(
                            x[((b * H + h) * W + w) * C + c]
                        )
                total += row_total
        dweight[out] += total
