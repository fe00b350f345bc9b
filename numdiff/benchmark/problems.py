"""A problem or two for each file of numdiff.kernels: what `numdiff bench kernels --of files` measures.

The shapes are a model's: of the UNet that `numdiff train unet` makes (batch 32, 64 × 64 pixels), of a DiT-B/2 (batch
64, 256 tokens of 768), and square products for the ladder of matmul. The rows under MEASURED in a file's docstring are
those of its problems (tests/kernels/write_figures.py writes it).
"""
import dataclasses
import functools
import inspect
import warnings
from typing import NamedTuple

import numpy as np

from ..device import empty
from ..device.planned import Planned, card_of
from ..device.roof import Roof
from ..errors import NumdiffError, UsageError
from ..float8 import bits_of
from ..kernels import (
    attention,
    bias,
    concat,
    conv2d,
    depthwise,
    dropout,
    elementwise,
    embedding,
    groupnorm,
    layernorm,
    linear,
    linear_gradients,
    linear_group,
    linear_stack,
    matmul,
    peer_pieces,
    peer_reduce,
    quantise,
    random,
    reduce,
    resample,
    rmsnorm,
    scale_shift,
    softmax,
)
from ..kernels.attention import (
    backward,
    backward_half,
    backward_tf32_bf16,
    forward,
    forward_half,
    forward_hopper,
    forward_tf32_bf16,
    sla,
)
from ..kernels.attention.backward_hopper import kernel as backward_hopper
from ..kernels.conv2d import (
    direct,
    im2col,
    im2win,
    implicit,
    implicit_weight_gradient,
    narrow,
)
from ..kernels.conv2d import levels as conv2d_levels
from ..kernels.conv2d import mma as conv2d_mma
from ..kernels.conv2d.hopper import convolution as conv2d_hopper
from ..kernels.conv2d.hopper import weight_gradient as conv2d_hopper_gradient
from ..kernels.conv2d.hopper import weight_gradient_3x3 as conv2d_hopper_gradient_3x3
from ..kernels.conv2d.levels import halo, shifted_boxes
from ..kernels.conv2d.narrow_half import launcher as narrow_half
from ..kernels.conv2d.tf32 import launcher as conv2d_tf32
from ..kernels.diffusion import ahead, class_dropout, images, mse, q_sample, sampler, vlb
from ..kernels.diffusion import levels as noise_levels
from ..kernels.groupnorm import chunks, groups, normalise, one_pass, one_pass_half
from ..kernels.matmul import first, hopper, hopper_fp8, levels, mma, naive, register_tiles, tf32, tiled, vectorised
from ..kernels.matmul.levels import double_buffer, one_tile, persistent, producer_consumer, tma_store
from ..kernels.optimizer import (
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
from ..kernels.transformer import adaln, bias_gelu, chunk, columns, gate, gate_adaln, patchify, qk_norm_rope, swiglu
from .costs import cost_of
from .kernels import (
    Array,
    Measured,
    Recorded,
    bench_call,
    call_with,
    conv2d_input_gradient,
    conv2d_weight_gradient,
    for_each,
    versions_of,
)

B, SIDE, C = 32, 64, 64  # the UNet's batch, image and channels
N, T, D, HEADS = 64, 256, 768, 12  # the DiT's batch, tokens, width and heads
HEAD = D // HEADS  # channels of a head
PARAMETERS = 20_494_272  # of the UNet
WIDTHS = 64, 64, 64, 128, 128, 192, 192, 256, 256, 256, 256  # of its blocks, roughly, each with a timestep layer
TIMESTEPS, CLASSES = 1000, 1000
SEED, PURPOSE = 1, 3


def columns_backward(partial, count):
    """dx of `columns`, from the partial sums (B, chunks, count · C) that the operations on its parts have left."""
    B, _, width = partial.shape
    sums = columns.Sums((B, width))
    sums.partial = partial
    return columns.columns_backward([columns.ColumnSums(sums, k * width // count, width // count)
                                     for k in range(count)])


def layers_of(flat):
    """[(weight (n, 4 · C), bias (n,))] of WIDTHS, as views of one array."""
    layers, at = [], 0
    for n in WIDTHS:
        end = at + n * 4 * C
        layers.append((flat[at:end].reshape(n, 4 * C), flat[end:end + n]))
        at = end + 4 * n
    return layers


def linear_group_forward(x, flat, version=None):
    """The timestep layers of a UNet, whose weights are views of one array."""
    return linear_group.linear_group_forward(x, layers_of(flat), version)


def linear_group_backward(x, flat, gradients, dys, version=None):
    """Their gradients, added to `gradients`."""
    return linear_group.linear_group_backward(dys, x, layers_of(flat), layers_of(gradients), version)


DEPTH = 12  # blocks of a DiT-B, each with a layer (6 · D, D) for its conditioning


def stack_of(weights, biases, D):
    """(weights, biases) of DEPTH layers that lie one after the other in two arrays."""
    N = 6 * D
    return ([weights[at:at + N * D].reshape(N, D) for at in range(0, DEPTH * N * D, N * D)],
            [biases[at:at + N] for at in range(0, DEPTH * N, N)])


def linear_stack_forward(x, weight, bias):
    """The conditioning of all blocks of a DiT; weight, bias: those of all layers, flat."""
    return linear_stack.linear_stack_forward(x, [*zip(*stack_of(weight, bias, x.shape[1]), strict=True)])


def linear_stack_backward(x, dy, weight, dweight, dbias):
    """Its gradients, written, and the bias's added to."""
    weights, _ = stack_of(weight, dbias, x.shape[1])
    gradients = [*zip(*stack_of(dweight, dbias, x.shape[1]), strict=True)]
    return linear_stack.linear_stack_backward(dy, x, weights, gradients, False)


def linear_stack_forward_cost(B, C):
    return linear_stack.linear_stack_forward_cost(B, C, DEPTH * 6 * C)


def linear_stack_backward_cost(B, C):
    return linear_stack.linear_stack_backward_cost(B, C, DEPTH * 6 * C, accumulate=False)


def block_sizes(D):
    """(N, K) of the weights of a DiT's block: qkv, proj, fc1, fc2."""
    return (3 * D, D), (D, D), (4 * D, D), (D, 4 * D)


def linear_gradients_backward(x, others, dys, dweight, dbias):
    """The gradients of a block's weights, written, and the biases' added to, as views of two arrays; x, others: the
    layers' inputs (R, K), dys: what comes back to them (R, N)."""
    layers, at, place = [], 0, 0
    for (N, K), dy_i, x_i in zip(block_sizes(x.shape[1]), dys, (x, *others), strict=True):
        layers.append((dy_i, x_i, dweight[at:at + N * K].reshape(N, K), dbias[place:place + N]))
        at, place = at + N * K, place + N
    linear_gradients.linear_gradients_backward(layers, False)


def linear_gradients_backward_cost(rows, C):
    return linear_gradients.linear_gradients_backward_cost(rows, block_sizes(C), False)


class Problem(NamedTuple):
    """One call. files: {module: the versions whose figures stand in it, or None for all}; versions: None for all."""

    call: Recorded
    files: dict[str, tuple | None]
    versions: tuple | None = None
    precision: str = "fp32"
    note: str = ""

    @property
    def name(self):
        """What identifies it, also in the file of results."""
        dtype = "tf32" if self.precision == "tf32" else self.call.dtype
        return f"{self.call.name}, {self.call.shape()}, {dtype}" + f" ({self.note})" * bool(self.note)


def half(*shape):
    return Array(shape, np.dtype(np.float16))


def single(*shape):
    return Array(shape, np.dtype(np.float32))


def integers(values, dtype=np.int32):
    values = np.asarray(values, dtype)
    return Array(values.shape, values.dtype, values)


def numbered(arguments):
    """The same arguments, each array numbered separately: one that is used twice is made twice."""
    count = iter(range(1 << 20))

    def one(value):
        if isinstance(value, Array):
            return Array(value.shape, value.dtype, value.values, next(count), value.positive)
        return for_each(one, value)
    return {name: one(value) for name, value in arguments.items()}


@functools.cache
def problems():
    """[Problem] of all files, in the order of their README."""
    rng = np.random.default_rng(0)
    t, samples, step = integers(rng.integers(0, TIMESTEPS, B)), integers(np.arange(B), np.uint32), integers(
        [7], np.uint32)
    labels = integers(rng.integers(0, CLASSES, N))
    image, pixels, tokens, rows = half(B, SIDE, SIDE, C), single(B, SIDE, SIDE, 3), half(N, T, D), (N * T, D)
    found = []

    def add(function, *files, versions=None, precision=None, note="", moved=0, **arguments):
        """files: modules, default the function's own; a tuple (module, version, …) for some of its versions.

        moved: bytes, where the arrays do not determine them
        """
        bound = inspect.signature(function).bind(**arguments)
        bound.apply_defaults()
        given = numbered({k: v for k, v in bound.arguments.items() if k != "version"})
        for k, v in given.items():
            if k in ("v", "rstd", "logsumexp") and isinstance(v, Array):
                given[k] = Array(v.shape, v.dtype, v.values, v.place, True)
        call = Recorded(function, given, moved, None, True)
        where = {}
        for item in files or (inspect.getmodule(function),):
            module, *some = item if isinstance(item, tuple) else (item,)
            where[module.__name__] = tuple(some) or None
        precision = precision or ("fp16" if call.dtype == np.float16 else "fp32")
        found.append(Problem(call, where, versions, precision, note))

    add(elementwise.add_forward, a=image, b=image)
    add(elementwise.silu_forward, x=image)
    add(reduce.column_sum, x=single(B * SIDE * SIDE, C))
    add(reduce.sample_sum, x=single(B, SIDE * SIDE, C))
    add(bias.bias_add_forward, x=half(*rows), bias=single(D))
    add(bias.channel_add_forward, x=single(B, SIDE, SIDE, C), e=single(B, C))
    add(scale_shift.scale_shift_forward, x=image, scale=half(B, C), shift=half(B, C))
    add(scale_shift.scale_shift_backward, dy=image, x=image, scale=half(B, C))
    add(images.images_forward, images=integers(rng.integers(0, 256, (B, SIDE, SIDE, 3)), np.uint8),
        flip=integers(rng.integers(0, 2, B)))
    add(q_sample.q_sample_forward, x_0=pixels, eps=pixels, t=t, sqrt_alpha_bar=single(TIMESTEPS),
        sqrt_one_minus_alpha_bar=single(TIMESTEPS))
    add(q_sample.weigh_forward, x=pixels, t=t, weight=single(TIMESTEPS))
    add(noise_levels.levels_forward, seed=SEED, purpose=PURPOSE, step=step, samples=samples,
        path=noise_levels.LINEAR, prediction="flow", normal=True)
    add(random.random_normal, shape=(B, SIDE, SIDE, 3), seed=SEED, purpose=PURPOSE, step=step, samples=samples,
        like=pixels)
    add(softmax.softmax_forward, x=single(B * 6 * 256, 256), scale=0.125)
    add(softmax.softmax_backward, dy=single(B * 6 * 256, 256), y=single(B * 6 * 256, 256), scale=0.125)
    add(layernorm.layernorm_forward, x=half(*rows), weight=single(D), bias=single(D))
    add(layernorm.layernorm_backward, dy=half(*rows), x=half(*rows), weight=single(D), mean=single(N * T),
        rstd=single(N * T), dweight=single(D), dbias=single(D))
    pixels_128 = half(B, 1024, 128)  # of a ConvNeXt block
    add(layernorm.layernorm_backward, dy=pixels_128, x=pixels_128, weight=single(128), mean=single(B * 1024),
        rstd=single(B * 1024), dweight=single(128), dbias=single(128), images=B)
    add(rmsnorm.rmsnorm_forward, x=half(*rows), weight=single(D))
    add(rmsnorm.rmsnorm_backward, dy=half(*rows), x=half(*rows), weight=single(D), rstd=single(N * T),
        dweight=single(D))
    norm = {"weight": single(C), "bias": single(C), "groups": 32, "silu": True}
    add(groupnorm.groupnorm_forward, groupnorm.launcher, (groups, 1), (chunks, 2), (one_pass, 3), versions=(1, 2, 3),
        x=image, **norm)
    add(groupnorm.groupnorm_forward, groupnorm.launcher, normalise, versions=(4,), note="statistics known", x=image,
        statistics=single(B, SIDE * SIDE // 64, 2, C // 2), **norm)
    add(groupnorm.groupnorm_backward, groupnorm.launcher, (groups, 1), (chunks, 2), (one_pass_half, 3),
        versions=(1, 2, 3), dy=image, x=image, mean=single(B, 32), rstd=single(B, 32), dweight=single(C),
        dbias=single(C), **norm)

    square = {"a": single(2048, 2048), "b": single(2048, 2048)}
    ladder = (naive, 1), (tiled, 2), (register_tiles, 3), (vectorised, 4)
    add(first.matmul_first_forward, **square)
    add(matmul.matmul_forward, matmul, *ladder, versions=(1, 2, 3, 4), **square)
    large = {"a": half(8192, 8192), "b": half(8192, 8192)}
    add(matmul.matmul_forward, matmul, tf32, versions=(5,), precision="tf32", a=single(8192, 8192),
        b=single(8192, 8192))
    add(levels.matmul_level_forward, levels, (one_tile, 1), (double_buffer, 2), (producer_consumer, 3),
        (persistent, 4), (tma_store, 5), **large)
    add(matmul.matmul_forward, matmul, (mma, 5), (hopper, 6), (levels, 6), versions=(5, 6), transpose_b=True, **large)

    bits = integers(np.tile(bits_of(rng.standard_normal((256, 8192), np.float32)), (32, 1)), np.uint8)
    fp8 = {"precision": "fp8", "a": bits, "b": bits, "scale_a": single(1), "scale_b": single(1)}
    add(matmul.matmul_fp8_forward, hopper_fp8, **fp8)
    add(matmul.matmul_fp8_forward, hopper_fp8, note="not promoted", promoted=False, **fp8)
    # DiT-B/2's fc1, its weight's gradient: dyᵀ and xᵀ
    windows = np.lib.stride_tricks.sliding_window_view(bits_of(rng.standard_normal(N * T + 4 * D, np.float32)), N * T)
    add(matmul.matmul_fp8_gradient, hopper_fp8, precision="fp8", a=integers(windows[:4 * D], np.uint8),
        b=integers(windows[:D], np.uint8), scale_a=single(1), scale_b=single(1), out=single(4 * D, D),
        accumulate=False)
    amax = integers(np.zeros(quantise.PARTIALS), np.uint32)
    lines = np.lib.stride_tricks.sliding_window_view(bits_of(rng.standard_normal(N * T + D, np.float32)), D)
    layer = {"precision": "fp8", "a": integers(lines[:N * T], np.uint8), "scale_a": single(1), "scale_b": single(1)}
    for note, into in (("to float16", None), ("to E4M3", [single(1), amax])):  # its forward, its output's gradient
        add(matmul.matmul_fp8_gelu_forward, hopper_fp8, note=note, b=integers(lines[:4 * D], np.uint8),
            bias=single(4 * D), into=into, **layer)
        add(matmul.matmul_fp8_gelu_backward, hopper_fp8, note=note, b=integers(lines[:4 * D], np.uint8),
            u=half(N * T, 4 * D), into=into, **layer)
    hidden = half(N * T, 4 * D)
    add(quantise.quantise_forward, x=hidden, scale=single(1), amax=amax)
    add(quantise.quantise_both, x=hidden, scale=single(1), amax=amax, sums=single(4 * D))
    add(quantise.columns_of, rows=Array((N * T, 4 * D), np.dtype(np.uint8)), scale=single(1),
        sums=single(4 * D))

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
    add(conv2d_weight_gradient, narrow, versions=(3,), dy=x, x=pixels, dweight=single(C, 3, 3, 3), stride=1)
    weight = half(C, 3, 3, C)
    add(conv2d.conv2d_forward, conv2d.launcher, (conv2d_mma, 4), (conv2d_hopper, 5, 6), x=image, weight=weight)
    add(conv2d_input_gradient, conv2d.launcher, (conv2d_mma, 4), (conv2d_hopper, 5, 6), versions=(1, 4, 5, 6),
        dy=image, weight=weight, x=image, stride=1)
    add(conv2d_weight_gradient, conv2d.launcher, (conv2d_mma, 4), (conv2d_hopper_gradient_3x3, 5, 6),
        versions=(1, 4, 5, 6), dy=image, x=image, dweight=single(C, 3, 3, C), stride=1)
    add(conv2d_weight_gradient, conv2d_hopper_gradient, note="1 × 1 taps", versions=(5, 6), dy=half(B, 32, 32, 128),
        x=half(B, 32, 32, 128), dweight=single(128, 1, 1, 128), stride=1)
    thin = half(B, SIDE, SIDE, 3)
    add(conv2d.conv2d_forward, narrow_half, versions=(3,), x=thin, weight=half(C, 3, 3, 3))
    add(conv2d.conv2d_forward, narrow_half, versions=(3,), x=image, weight=half(3, 3, 3, C))
    add(conv2d_input_gradient, narrow_half, versions=(3,), dy=thin, weight=half(3, 3, 3, C), x=image,
        stride=1)
    add(conv2d_weight_gradient, narrow_half, versions=(3,), dy=thin, x=image, dweight=single(3, 3, 3, C),
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

    add(linear.linear_forward, versions=(5, 6), x=tokens, weight=half(3 * D, D), bias=single(3 * D))
    add(linear.linear_backward, versions=(5, 6), dy=half(N, T, 3 * D), x=tokens, weight=half(3 * D, D),
        dweight=single(3 * D, D), dbias=single(3 * D))
    flat = single(sum(WIDTHS) * (4 * C + 4))
    add(linear_group_forward, linear_group, x=single(B, 4 * C), flat=flat)
    add(linear_group_backward, linear_group, x=single(B, 4 * C), flat=flat, gradients=flat,
        dys=[single(B, n) for n in WIDTHS])
    rows = DEPTH * 6 * D
    add(linear_stack_forward, linear_stack, x=half(N, D), weight=half(rows * D), bias=single(rows))
    add(linear_stack_backward, linear_stack, x=half(N, D), dy=half(N, rows), weight=half(rows * D),
        dweight=single(rows * D), dbias=single(rows))
    dys, inputs = ([half(N * T, size[i]) for size in block_sizes(D)] for i in range(2))
    add(linear_gradients_backward, linear_gradients, x=inputs[0], others=inputs[1:], dys=dys,
        dweight=single(12 * D * D), dbias=single(9 * D))
    qkv = single(B, 256, 3 * 192)
    add(attention.attention_forward, qkv=qkv, heads=6)
    add(attention.attention_backward, dy=single(B, 256, 192), qkv=qkv, probabilities=single(B, 6, 256, 256), heads=6)

    add(resample.avgpool_forward, x=image)
    add(resample.upsample_forward, x=half(B, 32, 32, 128))
    add(concat.concat_forward, a=half(B, SIDE, SIDE, 128), b=image)
    add(concat.concat_backward, dy=half(B, SIDE, SIDE, 192), channels_a=128)
    add(embedding.timestep_embedding_forward, t=t, dim=128)
    add(embedding.embedding_forward, labels=labels, weight=single(CLASSES + 1, D))
    add(embedding.embedding_backward, dy=single(N, D), labels=labels, dweight=single(CLASSES + 1, D))
    add(dropout.dropout_forward, x=image, probability=0.1, seed=SEED, layer=1, step=step, samples=samples)
    add(mse.mse_forward, prediction=pixels, target=pixels)
    add(mse.mse_backward, prediction=pixels, target=pixels)
    flat, one = single(PARAMETERS), single(1)
    starts = np.arange(0, PARAMETERS - zero_ranges.PIECE, 18_976)
    add(zero_ranges.zero_ranges, note="86 % of it", flat=flat,
        ranges=integers(np.stack((starts, starts + zero_ranges.PIECE), 1), np.int64),
        moved=4 * zero_ranges.PIECE * len(starts))
    add(grad_norm.global_norm, x=flat)
    edges = np.append(np.arange(0, PARAMETERS, 16384), PARAMETERS)  # as nn/partition.py cuts it
    add(grad_norm.squares_of_pieces, x=flat, pieces=integers(np.stack((edges[:-1], edges[1:]), 1), np.int64),
        partials=single(len(edges) - 1), moved=4 * PARAMETERS)
    update = {"weight": flat, "gradient": flat, "m": flat, "v": flat, "step": step, "learning_rate": one,
              "gradient_norm": one, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "clip_norm": 1.0}
    add(adamw.adamw_update, **update)
    add(adamw.adamw_update, note="with average and copy", ema=flat, ema_decay=0.998, half=half(PARAMETERS), **update)
    blocks = 12  # of a DiT-B: the weights of fc1, and those of q, k, v and the projection
    starts = integers(np.arange(blocks) * (4 * 768 * 768), np.int64)
    many = single(blocks * 4 * 768 * 768)
    stack = muon.Stack(starts, 4 * 768, 768)
    add(muon.muon_momentum, gradient=many, m=many, stack=stack, gradient_norm=one, momentum=0.95, clip_norm=1.0,
        dtype=np.float16)
    add(muon.muon_apply, weight=many, x=half(blocks, 4 * 768, 768), stack=stack, step=step, learning_rate=one,
        gradient_norm=one, weight_decay=0.0, ema=many, ema_decay=0.998, half=half(many.shape[0]))
    for shape in ((blocks, 4 * 768, 768), (4 * blocks, 768, 768)):
        add(newton_schulz.newton_schulz, x=half(*shape))
    add(ema.ema_update, ema=flat, weight=flat, step=step, gradient_norm=one, decay=0.998)
    add(power_ema.power_ema_update, ema=single(2, PARAMETERS), weight=flat, updates=step, gradient_norm=one,
        exponents=single(2))
    add(step_state.learning_rate_forward, step=step, learning_rate=one, base=1e-3, warmup_steps=200, total_steps=8000,
        cosine=True)
    counts = integers([3, 2, 1])
    add(telemetry.telemetry_record, ring=single(1024, 5), step=step, loss=one, gradient_norm=one, learning_rate=one,
        loss_scale=one, counts=counts)
    add(loss_scale.loss_scale_update, gradient_norm=one, scale=one, unscale=one, counts=counts)
    add(sampler.estimate_x_0, x=pixels, prediction=pixels, weights=(1.3, -0.8))
    add(sampler.model_input, x=pixels, numbers=single(B))

    steps, width = 50, 12 * 8 * 6 * D  # a sampler's, of eight images
    add(ahead.place, ahead=half(steps, width), source=half(steps, width // 12), offset=0,
        moved=ahead.place_cost(steps, width // 12, 2)[0])
    add(ahead.take, ahead=half(steps, width), step=step, begin=integers([0], np.uint32), row=half(width),
        moved=ahead.take_cost(width, 2)[0])

    heads = {"heads": HEADS, "order": "new"}
    attended = {"dy": half(N, T, D), "qkv": half(N, T, 3 * D), "y": tokens, "logsumexp": single(N, HEADS, T), **heads}
    add(attention.flash_attention_forward, attention, (forward_half, 3), (forward_hopper, 5),
        qkv=half(N, T, 3 * D), **heads)
    add(attention.flash_attention_backward, attention, (backward_half, 3), (backward_hopper, 5),
        **attended)
    add(attention.flash_attention_forward, attention, (forward, 2), (forward_tf32_bf16, 4),
        qkv=single(8, 1024, 3 * 512), heads=8)
    add(attention.flash_attention_backward, attention, (backward, 2), (backward_tf32_bf16, 4),
        dy=single(8, 1024, 512), qkv=single(8, 1024, 3 * 512), y=single(8, 1024, 512), logsumexp=single(8, 8, 1024),
        heads=8)
    # 256 × 256 and 512 × 512 pixels in patches of 4; DiT-XL's heads
    for length, least, count, head in ((4096, 1, HEADS, HEAD), (16384, 2, HEADS, HEAD), (4096, 1, 16, 72)):
        blocks, width = length // 64, count * head
        lists = np.stack([np.sort(rng.permutation(blocks)[:sla.count_of(0.05, blocks)]) for _ in range(count * blocks)])
        kept = sla.Kept(integers(lists.reshape(1, count, blocks, -1)), single(1, count, length),
                        single(1, count, length), half(1, count, blocks, head, head), single(1, count, blocks, head))
        layer = {"weight": half(head, head), "bias": single(head), "heads": count, "order": "new"}
        add(sla.sla_forward, sla, versions=tuple(range(least, 4)), qkv=half(1, length, 3 * width), topk=0.05, **layer)
        add(sla.sla_backward, sla, versions=tuple(range(least, 3)), dy=half(1, length, width),
            qkv=half(1, length, 3 * width), y=half(1, length, width), kept=kept,
            dweight=single(head, head), dbias=single(head), **layer)
    shift = half(N, D)
    add(adaln.adaln_forward, x=tokens, shift=shift, scale=shift)
    add(adaln.adaln_backward, dy=tokens, x=tokens, scale=shift, mean=single(N * T), rstd=single(N * T))
    add(gate.gate_forward, x=tokens, h=tokens, gate=shift)
    add(gate.gate_backward, dy=tokens, h=tokens, gate=shift)
    add(gate_adaln.gate_adaln_forward, x=tokens, h=tokens, gate=shift, shift=shift, scale=shift)
    add(gate_adaln.gate_adaln_backward, dz=tokens, dy=tokens, z=tokens, h=tokens, gate=shift, shift=shift,
        scale=shift, mean=single(N * T), rstd=single(N * T))
    add(gate_adaln.gate_adaln_backward, note="of x", dz=tokens, dy=tokens, z=None, h=tokens, gate=shift, shift=shift,
        scale=shift, mean=single(N * T), rstd=single(N * T), x=tokens)
    add(gate_adaln.gate_adaln_forward, versions=(2,), note="to E4M3", x=tokens, h=tokens, gate=shift, shift=shift,
        scale=shift, into=[single(1), amax])
    add(gate_adaln.gate_adaln_backward, versions=(2,), note="to E4M3", dz=tokens, dy=tokens, z=tokens, h=tokens,
        gate=shift, shift=shift, scale=shift, mean=single(N * T), rstd=single(N * T), dh_into=[single(1), amax])
    for note, given in (("RMSNorm", {"shift": shift}), ("RMSNorm, no shift", {"shift": None})):
        given = {"scale": shift, "weight": single(D), **given}
        back = {"rstd": single(N * T), "dweight": single(D)}
        add(adaln.adaln_forward, x=tokens, norm="rms", note=note, **given)
        add(adaln.adaln_backward, dy=tokens, x=tokens, scale=shift, weight=single(D), mean=None, note=note,
            need_dshift=given["shift"] is not None, **back)
        seam, alone = {"h": tokens, "gate": shift}, {"h": None, "gate": None}
        gradients = {"dz": tokens, "dy": tokens, "z": tokens, "mean": None, **back}
        add(gate_adaln.gate_adaln_forward, x=tokens, norm="rms", note=note, **seam, **given)
        add(gate_adaln.gate_adaln_backward, note=note, **gradients, **seam, **given)
        add(gate_adaln.gate_adaln_forward, x=tokens, norm="rms", note=f"{note}, no gate", **alone, **given)
        add(gate_adaln.gate_adaln_backward, note=f"{note}, no gate", **gradients, **alone, **given)
    add(bias_gelu.bias_gelu_forward, x=half(N, T, 4 * D), bias=single(4 * D))
    add(bias_gelu.bias_gelu_backward, dy=half(N, T, 4 * D), x=half(N, T, 4 * D), bias=single(4 * D),
        dbias=single(4 * D))
    turn = {"heads": HEADS, "q_weight": single(D // HEADS), "k_weight": single(D // HEADS),
            "rotation": single(2, T, D // HEADS), "in_place": True}
    add(qk_norm_rope.qk_norm_rope_forward, qkv=half(N, T, 3 * D), **turn, note="training")
    add(qk_norm_rope.qk_norm_rope_forward, qkv=half(N, T, 3 * D), **turn, keeps=False)
    add(qk_norm_rope.qk_norm_rope_backward, dy=half(N, T, 3 * D), kept=half(N, T, 2 * D), **turn,
        dq_weight=single(D // HEADS), dk_weight=single(D // HEADS))
    hidden = 8 * D // 3
    add(swiglu.swiglu_forward, x=half(N, T, 2 * hidden))
    add(swiglu.swiglu_backward, dy=half(N, T, hidden), x=half(N, T, 2 * hidden))
    latents = single(N, 32, 32, 4)
    add(patchify.patchify_forward, x=half(N, 32, 32, 4), patch=2)
    add(patchify.unpatchify_forward, tokens=single(N, T, 32), patch=2, height=32, width=32)
    add(chunk.chunk_forward, x=half(N, 6 * D), count=6)
    add(columns_backward, columns, partial=single(N, 4, 6 * D), count=6)
    samples = integers(np.arange(N), np.uint32)
    add(class_dropout.class_dropout_forward, labels=labels, probability=0.1, null_class=CLASSES, seed=SEED, step=step,
        samples=samples)
    table = single(TIMESTEPS)
    hybrid = {"prediction": single(N, 32, 32, 8), "target": latents, "x_0": latents,
              "t": integers(rng.integers(0, TIMESTEPS, N)), "k": table, "low": table, "width": table, "weight": 1.44}
    add(vlb.hybrid_loss_forward, **hybrid)
    add(vlb.hybrid_loss_backward, **hybrid)
    add(peer_reduce.peer_reduce_scatter, note="both ranks' arrays on one card", buffers=[flat, single(PARAMETERS)],
        rank=0, moved=3 * 4 * PARAMETERS // 2)
    add(peer_pieces.peer_copy_pieces, note="both ranks' arrays on one card", buffers=[flat], y=single(PARAMETERS),
        pieces=integers(peer_pieces.pieces_of([(0, 0, 0, PARAMETERS // 4)]), np.int64), moved=2 * PARAMETERS)
    return found


def without_memory(call, backend):
    """A call's arguments on a device that only records launches."""
    made = {}

    def one(value):
        if isinstance(value, Array):
            return made.setdefault(value.place, empty(value.shape, value.dtype, backend))
        return for_each(one, value)
    return {name: one(value) for name, value in call.arguments.items()}


def plan(found, card):
    """([Problem] with what each must move and compute, [Key] of all kernels that they launch), by a device that only
    records what a card of this kind would run. A problem for which such a card has no version is left out."""
    backend, priced = Planned(card), []
    for problem in found:
        call, arguments = problem.call, without_memory(problem.call, backend)
        cost = None
        for version in problem.versions or (None, *versions_of(call.function)):
            try:
                result = call_with(call.function, arguments, version)
            except (ValueError, NumdiffError):  # not for these operands
                continue
            bound = inspect.signature(call.function).bind(**arguments)
            bound.apply_defaults()
            cost = cost or cost_of(call.function, bound.arguments, result)
        if cost is not None:
            priced.append(problem._replace(call=dataclasses.replace(call, moved=call.moved or cost[0],
                                                             flops=cost[1])))
    return priced, list(backend.kernels)


def bench_files(backend, operations=(), echo=print):
    """Yields the rows of every problem, as `bench_kernels` does, with `problem` (its name) besides.

    backend: a GPU, whose kernels are compiled in parallel beforehand; operations: names, none for all
    """
    from ..training.compiling import compile_ahead
    found, keys = plan(problems_named(operations), card_of(backend))
    compile_ahead(keys, backend.cache, echo)
    measured, roof = Measured(backend), Roof(backend)
    for problem in found:
        try:
            for row in bench_call(problem.call, measured, roof, problem.precision, versions=problem.versions):
                yield {"problem": problem.name, **row}
        except Exception as fault:  # the failure of one problem must not hide the others
            warnings.warn(f"{problem.name} failed: {type(fault).__name__}: {fault}", stacklevel=2)


def problems_named(operations):
    """Those of `problems()` of these operations; a `UsageError` for one that has none."""
    found = problems()
    names = sorted({problem.call.name for problem in found})
    for operation in operations:
        if not any(name == operation or name.startswith(operation + "_") for name in names):
            raise UsageError(f"no file's problem is of an operation {operation!r}: use some of {', '.join(names)}.")
    return [problem for problem in found if not operations or any(
        problem.call.name == o or problem.call.name.startswith(o + "_") for o in operations)]
