"""GroupNorm v1: one block for each group, three passes over what it normalises.

MATHEMATICS, SHAPES
    as in reference.py
VERSIONS
    v1 block-per-group: two passes for mean and variance, a third to normalise. But a group of C/G =
       2 to 16 channels is only 8 to 64 bytes at each pixel: the memory delivers whole sectors of 32
       bytes, whose rest another block fetches again.
LAUNCH
    grid (G, B), 256 threads, 1 KiB of shared memory; backward 2 KiB
DETERMINISM
    sums of threads are added in an order that the shape alone decides.
COST
    x is read three times and y written once; backward x and dy twice, dx written once. Roof: memory
    bandwidth.
SOURCE
    reference.py; the tree: reduce/trees.py.
READ NEXT
    chunks.py, whose blocks read whole sectors.
"""

import math
from typing import Any, NamedTuple

from ...device import cuda, float32, launch
from ..elementwise import silu, silu_gradient
from ..reduce.trees import BLOCK, tree_sum

BLOCK2 = 2 * BLOCK  # shared elements where a thread brings two sums


class NormVectors(NamedTuple):
    """weight, bias (C,); mean, rstd (B · G,)"""

    weight: Any
    bias: Any
    mean: Any
    rstd: Any


# The arithmetic of one element --------------------------------------------------------------------


@cuda.jit(device=True)
def affine(xhat, weight, bias, activate):
    z = xhat * weight + bias
    return silu(z) if activate else z


@cuda.jit(device=True)
def affine_gradient(dy, xhat, weight, bias, activate):
    """Gradient of z = xhat · weight + bias."""
    return silu_gradient(dy, xhat * weight + bias) if activate else dy


# Kernels ------------------------------------------------------------------------------------------


@cuda.jit
def groupnorm_forward_kernel_v1(x, weight, bias, y, mean, rstd, P, C, width, eps, activate):
    tile = cuda.shared.array(BLOCK, float32)
    t = cuda.threadIdx.x
    group, b = cuda.blockIdx.x, cuda.blockIdx.y
    m = P * width
    total = float32(0)
    for e in range(t, m, BLOCK):  # element e of the group: pixel e // width, channel e % width
        total += float32(x[(b * P + e // width) * C + group * width + e % width])
    tile[t] = total
    tree_sum(tile, 1, t, 1, BLOCK)
    average = tile[0] / float32(m)
    cuda.syncthreads()  # all have read tile[0] before it is written again
    total = float32(0)
    for e in range(t, m, BLOCK):
        d = float32(x[(b * P + e // width) * C + group * width + e % width]) - average
        total += d * d
    tile[t] = total
    tree_sum(tile, 1, t, 1, BLOCK)
    scale = float32(1) / math.sqrt(tile[0] / float32(m) + eps)
    for e in range(t, m, BLOCK):
        c = group * width + e % width
        i = (b * P + e // width) * C + c
        y[i] = affine((float32(x[i]) - average) * scale, weight[c], bias[c], activate)
    if t == 0:
        mean[b * cuda.gridDim.x + group] = average
        rstd[b * cuda.gridDim.x + group] = scale


@cuda.jit
def groupnorm_backward_kernel_v1(dy, x, vectors, residual, dx, sums, P, C, width, activate, adds):
    """dx, and the channel sums (2, B, C) of g · xhat and g; vectors: `NormVectors`."""
    weight, bias, mean, rstd = vectors
    tile = cuda.shared.array(BLOCK2, float32)
    t = cuda.threadIdx.x
    group, b = cuda.blockIdx.x, cuda.blockIdx.y
    average, scale = mean[b * cuda.gridDim.x + group], rstd[b * cuda.gridDim.x + group]
    average_h = average_hx = float32(0)
    for c in range(group * width, group * width + width):
        sum_gx = sum_g = float32(0)
        for p in range(t, P, BLOCK):
            i = (b * P + p) * C + c
            xhat = (float32(x[i]) - average) * scale
            g = affine_gradient(float32(dy[i]), xhat, weight[c], bias[c], activate)
            sum_gx += g * xhat
            sum_g += g
        tile[t], tile[BLOCK + t] = sum_gx, sum_g
        tree_sum(tile, 2, t, 1, BLOCK)
        average_hx += tile[0] * weight[c]
        average_h += tile[BLOCK] * weight[c]
        if t == 0:
            sums[b * C + c] = tile[0]
            sums[(cuda.gridDim.y + b) * C + c] = tile[BLOCK]
        cuda.syncthreads()  # all have read the sums before the next channel's are written
    average_h /= float32(P * width)
    average_hx /= float32(P * width)
    for e in range(t, P * width, BLOCK):
        c = group * width + e % width
        i = (b * P + e // width) * C + c
        xhat = (float32(x[i]) - average) * scale
        h = affine_gradient(float32(dy[i]), xhat, weight[c], bias[c], activate) * weight[c]
        value = scale * (h - average_h - xhat * average_hx)
        dx[i] = value + float32(residual[i]) if adds else value


def groups_forward(x, weight, bias, y, mean, rstd, P, groups, eps, activate):
    """y, mean (B, G) and rstd of x (B, ..., C), P pixels, for arrays that launcher.py has checked."""
    B, C = x.shape[0], x.shape[-1]
    launch(
        groupnorm_forward_kernel_v1,
        (groups, B),
        BLOCK,
        x.reshape(-1),
        weight,
        bias,
        y.reshape(-1),
        mean.reshape(-1),
        rstd.reshape(-1),
        P,
        C,
        C // groups,
        eps,
        int(activate),
    )


def groups_backward(dy, x, weight, bias, mean, rstd, residual, dx, sums, P, groups, activate):
    """dx, and the channel sums (2, B, C) of g · xhat and g. residual: None, or like dx, which is
    added to it"""
    B, C = x.shape[0], x.shape[-1]
    launch(
        groupnorm_backward_kernel_v1,
        (groups, B),
        BLOCK,
        dy.reshape(-1),
        x.reshape(-1),
        NormVectors(weight, bias, mean.reshape(-1), rstd.reshape(-1)),
        (x if residual is None else residual).reshape(-1),  # not read without
        dx.reshape(-1),
        sums.reshape(-1),
        P,
        C,
        C // groups,
        int(activate),
        int(residual is not None),
    )
