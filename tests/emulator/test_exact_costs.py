"""The cost functions of the project's kernels against what the emulator counts: a line for each
case.

It has the operation, what is given to it, its cost, and additional reads, writes and FLOPs. `u`
makes an array of random float32; side: bytes; more: FLOPs that the kernel does and the cost leaves
out. test_costs.py says what a cost counts.
"""

import pathlib

import numpy as np
import pytest

from numdiff.device import upload
from numdiff.extras import qk_norm_rope
from numdiff.extras.convnext import depthwise
from numdiff.extras.im2win import windows as im2win
from numdiff.extras.learned_variance import vlb
from numdiff.extras.post_hoc_ema import power_ema
from numdiff.extras.rms_norm import rmsnorm
from numdiff.kernels import attention as flash_attention
from numdiff.kernels import bias, concat, embedding, random, resample, scale_shift, window
from numdiff.kernels.conv2d import im2col
from numdiff.kernels.diffusion import (
    ahead,
    class_dropout,
    images,
    l1,
    mse,
    posterior,
    q_sample,
    sampler,
)
from numdiff.kernels.norms import layernorm
from numdiff.kernels.operation import kernel_modules
from numdiff.kernels.optimizer import ema, grad_norm, step_state, telemetry, zero_ranges
from numdiff.kernels.reduce import trees as reduce
from numdiff.kernels.transformer import (
    adaln,
    bias_gelu,
    chunk,
    gate,
    gate_adaln,
    patchify,
    swiglu,
)
from tests.conftest import exhaustive
from tests.emulator.counted import B, C, Counted, N, P, number, samples, steps


def case(operation, cost, side=0, more=0, versions=(1, 2)):
    return [
        pytest.param(
            operation, v, cost, side, more, id=f"{cost[0].__name__.removesuffix('_cost')}-v{v}"
        )
        for v in versions
    ]


def predicted(u):
    """What the hybrid loss is given."""
    tables = [u.full(value, 9) for value in (0.5, -3, 1)]
    return u(B, P, 2 * C), u(B, P, C), u(B, P, C), steps(u, B), *tables, 0.001


# the common part of others; a few bytes; warps that read their inputs again for each sample, from
# the cache
NOT_YET = {  # to be counted, too
    "muon_apply_cost",
    "muon_momentum_cost",
    "newton_schulz_cost",
    "qk_norm_rope_backward_cost",
}
NOT_COUNTED = {
    "elementwise_cost",
    "levels_forward_cost",
    "loss_scale_update_cost",
    "latch_skips_cost",
    "count_update_cost",
    "linear_group_forward_cost",
    "linear_group_backward_cost",
    "matmul_first_forward_cost",
    "matmul_level_forward_cost",
    "matmul_mma_level_forward_cost",
    # of two counted kernels
    "conv2d_level_forward_cost",
    "depthwise_layernorm_forward_cost",
    *NOT_YET,
}
TABLES = 4 * B + 2 * 4 * B  # bytes of B timesteps and what they name in two tables

EXACT = [
    *case(
        lambda u, v: l1.l1_forward(u(N), u(N), version=v),
        (l1.l1_forward_cost, N),
        3 * 4,  # a block's partial sum is written and read, the result written
        None,
        versions=[1],
    ),
    *case(
        lambda u, v: l1.l1_backward(u(N), u(N), version=v),
        (l1.l1_backward_cost, N),
        4,
        None,
        versions=[1],
    ),
    *case(
        lambda u, v: posterior.posterior_sample_forward(u(B, P, 2 * C), u(B, P, C), version=v),
        (posterior.posterior_sample_forward_cost, N),
        0,
        None,
        versions=[1],
    ),
    *case(
        lambda u, v: posterior.posterior_sample_backward(
            u(B, P, C), u(B, P, 2 * C), u(B, P, C), version=v
        ),
        (posterior.posterior_sample_backward_cost, N),
        0,
        None,
        versions=[1],
    ),
    *case(
        lambda u, v: posterior.posterior_kl_forward(u(B, P, 2 * C), version=v),
        (posterior.posterior_kl_forward_cost, N),
        3 * 4,  # a block's partial sum is written and read, the result written
        None,
        versions=[1],
    ),
    *case(
        lambda u, v: posterior.posterior_kl_backward(u(B, P, 2 * C), version=v),
        (posterior.posterior_kl_backward_cost, N),
        4,
        None,
        versions=[1],
    ),
    *case(
        lambda u, v: bias.bias_add_forward(u(B * P, C), u(C), version=v),
        (bias.bias_add_forward_cost, B * P, C),
    ),
    *case(
        lambda u, v: bias.channel_add_forward(u(B, P, C), u(B, C), version=v),
        (bias.channel_add_forward_cost, B, P, C),
    ),
    *case(
        lambda u, v: reduce.sample_sum(u(B, P, C), version=v),
        (reduce.sample_sum_cost, B, P, C),
        versions=[1],
    ),
    *case(
        lambda u, v: bias.channel_add_backward(u(B, P, C)),
        (bias.channel_add_backward_cost, B, P, C),
        more=None,
        versions=[None],
    ),
    *case(
        lambda u, v: scale_shift.scale_shift_forward(u(B, P, C), u(B, C), u(B, C), version=v),
        (scale_shift.scale_shift_forward_cost, B, P, C),
    ),
    *case(
        lambda u, v: scale_shift.scale_shift_backward(u(B, P, C), u(B, P, C), u(B, C), version=v),
        (scale_shift.scale_shift_backward_cost, B, P, C),
        versions=[1],
    ),
    # v2: trees of two sums
    *case(
        lambda u, v: scale_shift.scale_shift_backward(u(B, P, C), u(B, P, C), u(B, C), version=v),
        (scale_shift.scale_shift_backward_cost, B, P, C),
        more=None,
        versions=[2],
    ),
    # each thread multiplies two scalars
    *case(
        lambda u, v: mse.mse_backward(u(B, P, C), u(B, P, C), 0.5, version=v),
        (mse.mse_backward_cost, N),
        4,
        N,
        versions=[1],
    ),
    *case(
        lambda u, v: mse.mse_backward(u(B, P, C), u(B, P, C), 0.5, version=v),
        (mse.mse_backward_cost, N),
        4,
        N // 4,
        versions=[2],
    ),
    *case(
        lambda u, v: q_sample.q_sample_forward(
            u(B, P, C), u(B, P, C), steps(u, B), u(9), u(9), version=v
        ),
        (q_sample.q_sample_forward_cost, N),
        TABLES,
    ),
    *case(
        lambda u, v: q_sample.velocity_forward(
            u(B, P, C), u(B, P, C), steps(u, B), u(9), u(9), version=v
        ),
        (q_sample.velocity_forward_cost, N),
        TABLES,
    ),
    *case(
        lambda u, v: q_sample.weigh_forward(u(B, P, C), steps(u, B), u(9), version=v),
        (q_sample.weigh_forward_cost, N),
        4 * B + 4 * B,
    ),
    *case(
        lambda u, v: sampler.weighted_sum(u(3), u(B, P, C), u(B, P, C), u(B, P, C), version=v),
        (sampler.weighted_sum_cost, N),
        3 * 4,
    ),
    *case(
        lambda u, v: sampler.estimate_x_0(u(B, P, C), u(B, P, C), u(2), clip=False, version=v),
        (sampler.estimate_x_0_cost, N),
        2 * 4,
    ),
    # the timesteps are written, too
    *case(
        lambda u, v: sampler.model_input(u(B, P, C), u(2), 2, version=v),
        (sampler.model_input_cost, N, 2),
        2 * 4 + 2 * 4 * B,
    ),
    *case(
        lambda u, v: sampler.guide(u(B, P, C), u(B, P, C), 2.0, C),
        (sampler.guide_cost, N),
        versions=[None],
    ),
    # an exponential, which is no FLOP here, and is two of the cost's ten: it is a power of two of a
    # product
    *case(
        lambda u, v: sampler.learned_step(u(B, P, C), u(B, P, C), u(B, P, 2 * C), u(B, P, C), u(4)),
        (sampler.learned_step_cost, N),
        4 * 4,
        more=N,
        versions=[None],
    ),
    # where nothing is masked, what is known is not read
    *case(
        lambda u, v: sampler.blend(u.full(0, B, P, C), u(B, P, C), u(B, P, C)),
        (sampler.blend_cost, N),
        -4 * N,
        versions=[None],
    ),
    *case(
        lambda u, v: resample.avgpool_forward(u(B, 4, 4, C), version=v),
        (resample.avgpool_forward_cost, B, 4, 4, C),
    ),
    *case(
        lambda u, v: resample.avgpool_backward(u(B, 2, 2, C), version=v),
        (resample.avgpool_backward_cost, B, 2, 2, C),
    ),
    # the kernel that spreads a gradient serves upsampling, too, with a factor of 1
    *case(
        lambda u, v: resample.upsample_forward(u(B, 2, 2, C), version=v),
        (resample.upsample_forward_cost, B, 2, 2, C),
        more=B * 16 * C,
    ),
    *case(
        lambda u, v: resample.upsample_backward(u(B, 4, 4, C), version=v),
        (resample.upsample_backward_cost, B, 4, 4, C),
    ),
    *case(
        lambda u, v: window.window_forward(u(B, 4, 4, C), -1, 1, 6, 5, version=v),
        (window.window_forward_cost, np.empty((B, 4, 4, C)), -1, 1, 6, 5),
    ),
    *case(
        lambda u, v: concat.concat_forward(u(P, C), u(P, 4), version=v),
        (concat.concat_forward_cost, P, C, 4),
    ),
    *case(
        lambda u, v: concat.concat_backward(u(P, C), 8, version=v),
        (concat.concat_backward_cost, P, 8, C - 8),
    ),
    *case(
        lambda u, v: images.images_forward(
            upload(np.ones((B, 3, 4, 3), np.uint8), u.device), number(u, 1, np.int32, B), version=v
        ),
        (images.images_forward_cost, (B, 3, 4, 3)),
        4 * B,
    ),
    *case(
        lambda u, v: im2col.im2col_forward(u(1, 4, 5, 4), 3, 1, version=v),
        (im2col.im2col_forward_cost, 1, 4, 5, 4, 3),
    ),
    # 50 of the 180 places of the patches are padding: their gradients are not read
    *case(
        lambda u, v: im2win.im2win_forward(u(1, 4, 5, 4), 3, 1, version=v),
        (im2win.im2win_forward_cost, 1, 4, 5, 4, 3),
    ),
    *case(
        lambda u, v: im2col.im2col_backward(u(1, 4, 5, 3, 3, 4), (1, 4, 5, 4), 3, 1, version=v),
        (im2col.im2col_backward_cost, 1, 4, 5, 4, 3),
        -4 * 50 * 4,
        -50 * 4,
    ),
    # weights; what is added to each sum, here zero
    *case(
        lambda u, v: depthwise.depthwise_forward(u(1, 8, 8, 16), u(3, 3, 16), version=v),
        (depthwise.depthwise_forward_cost, 1, 8, 8, 16, 3),
        4 * 9 * 16,
        8 * 8 * 16,
        versions=[2],
    ),
    *case(
        lambda u, v: depthwise.depthwise_input_gradient(u(1, 8, 8, 16), u(3, 3, 16), version=v),
        (depthwise.depthwise_input_gradient_cost, 1, 8, 8, 16, 3),
        4 * 9 * 16,
        8 * 8 * 16,
        versions=[2],
    ),
    # a chunk's sums and the gradient, each written and read; sums over lanes
    *case(
        lambda u, v: depthwise.depthwise_weight_gradient(
            u(1, 8, 8, 16), u(1, 8, 8, 16), u(3, 3, 16), version=v
        ),
        (depthwise.depthwise_weight_gradient_cost, 1, 8, 8, 16, 3),
        4 * 4 * 9 * 16,
        None,
        versions=[2],
    ),
    *case(
        lambda u, v: embedding.embedding_forward(steps(u, 4), u(5, C), version=v),
        (embedding.embedding_forward_cost, 4, C),
        4 * 4,
    ),
    # each row is summed from zero, then added to
    *case(
        lambda u, v: embedding.embedding_backward(u(4, C), steps(u, 4), u(4, C), version=v),
        (embedding.embedding_backward_cost, 4, C),
        4 * 4,
        4 * C,
    ),
    *case(
        lambda u, v: random.random_uniform((B, P, C), 7, 1, *samples(u), version=v),
        (random.random_uniform_cost, N),
        4 + 4 * B,
    ),
    *case(
        lambda u, v: random.random_normal((B, P, C), 7, 1, *samples(u), version=v),
        (random.random_normal_cost, N),
        4 + 4 * B,
        versions=[2],
    ),
    # v1 makes a pair for every number
    *case(
        lambda u, v: random.random_normal((B, P, C), 7, 1, *samples(u), version=v),
        (random.random_normal_cost, N),
        4 + 4 * B,
        25 * N // 2,
        versions=[1],
    ),
    # each thread works out the rate of the warm-up: an addition and a division
    *case(
        lambda u, v: ema.ema_update(u(N), u(N), number(u, 3, np.uint32), u(1), 0.99, version=v),
        (ema.ema_update_cost, N),
        8,
        2 * N,
        versions=[1],
    ),
    *case(
        lambda u, v: ema.ema_update(u(N), u(N), number(u, 3, np.uint32), u(1), 0.99, version=v),
        (ema.ema_update_cost, N),
        8,
        2 * N // 4,
        versions=[2],
    ),
    # each thread works out the rate of both averages: a product and a change of sign, in addition
    # to division, log1p, expm1
    *case(
        lambda u, v: power_ema.power_ema_update(
            u(2, N), u(N), number(u, 3, np.uint32), u(1), u(2), version=v
        ),
        (power_ema.power_ema_update_cost, 2 * N, 2),
        16,
        2 * 2 * N,
        versions=[1],
    ),
    *case(
        lambda u, v: power_ema.power_ema_update(
            u(2, N), u(N), number(u, 3, np.uint32), u(1), u(2), version=v
        ),
        (power_ema.power_ema_update_cost, 2 * N, 2),
        16,
        2 * 2 * N // 4,
        versions=[2],
    ),
    *case(
        lambda u, v: step_state.step_advance(number(u, 3, np.uint32)),
        (step_state.step_advance_cost,),
        versions=[None],
    ),
    *case(
        lambda u, v: step_state.next_row(
            number(u, 3, np.uint32, 16 * 4).reshape(4, 16),
            number(u, 3, np.uint32),
            number(u, 0, np.uint32, 16),
        ),
        (step_state.next_row_cost, 16),
        versions=[None],
    ),
    *case(
        lambda u, v: ahead.timesteps_ahead(
            number(u, 3, np.uint32, 16 * 4).reshape(4, 16),
            number(u, 1, np.uint32),
            number(u, 0, np.uint32),
            u(6),
            2,
        ),
        (ahead.timesteps_ahead_cost, 6, 3),
        versions=[None],
    ),
    *case(lambda u, v: ahead.place(u(4, 24), u(4, 8), 8, version=v), (ahead.place_cost, 4, 8)),
    *case(
        lambda u, v: ahead.take(
            u(4, 24), number(u, 3, np.uint32), number(u, 1, np.uint32), u(24), version=v
        ),
        (ahead.take_cost, 24),
    ),
    *case(
        lambda u, v: images.pixels_forward(u(B, 3, 4, 3)),
        (images.pixels_forward_cost, B * 36),
        more=None,
        versions=[None],
    ),
    # what is finite is not written down: the step is not read
    *case(
        lambda u, v: step_state.latch_nonfinite(
            number(u, -1, np.int32), u(1), u(1), number(u, 3, np.uint32)
        ),
        (step_state.latch_nonfinite_cost,),
        -4,
        versions=[None],
    ),
    *case(
        lambda u, v: zero_ranges.zero_ranges(
            u(N), upload(zero_ranges.pieces([(0, N - 3)]), u.device)
        ),
        (zero_ranges.zero_ranges_cost, N - 3),
        16,
        versions=[None],
    ),  # the range itself
    *case(
        lambda u, v: telemetry.telemetry_record(
            u(4, 5), number(u, 3, np.uint32), u(1), u(1), u(1), u(1), number(u, 3, np.int32, 3), 0.5
        ),
        (telemetry.telemetry_record_cost,),
        versions=[None],
    ),
    # a polynomial for the sine: the cost has 5 for a rate on the cosine
    *case(
        lambda u, v: step_state.learning_rate_forward(
            number(u, 3, np.uint32), u(1), 1e-3, 2, 10, True
        ),
        (step_state.learning_rate_forward_cost,),
        more=None,
        versions=[None],
    ),
    *case(
        lambda u, v: embedding.timestep_embedding_forward(steps(u, 4), 8),
        (embedding.timestep_embedding_forward_cost, 4, 8),
        more=None,
        versions=[None],
    ),
    # rows by warps: each lane joins in the five steps of two butterflies, and finishes the
    # statistics for itself
    *case(
        lambda u, v: layernorm.layernorm_forward(u(8, C), u(C), u(C), version=v),
        (layernorm.layernorm_forward_cost, 8, C),
        4 * (2 * C + 2 * 8),
        8 * 32 * (2 * 5 + 4),
        versions=[2],
    ),
    # statistics and weights, both gradients read and written; the rest of the FLOPs are trees
    *case(
        lambda u, v: layernorm.layernorm_backward(
            u(8, C), u(8, C), u(C), u(8), u(8), u(C), u(C), version=v
        ),
        (layernorm.layernorm_backward_cost, 8, C),
        4 * (2 * 2 * 8 + C + 4 * C),
        None,
        versions=[1],
    ),
    *case(
        lambda u, v: rmsnorm.rmsnorm_forward(u(8, C), u(C), version=v),
        (rmsnorm.rmsnorm_forward_cost, 8, C),
        4 * (C + 8),
        None,
        versions=[2, 3],
    ),
    # statistics and weight, a block's sums written and read, and the gradient, too
    *case(
        lambda u, v: rmsnorm.rmsnorm_backward(u(8, C), u(8, C), u(C), u(8), u(C), version=v),
        (rmsnorm.rmsnorm_backward_cost, 8, C),
        4 * (8 + C + 4 * C),
        None,
        versions=[3],
    ),
    *case(
        lambda u, v: grad_norm.global_norm(u(1000), version=v),
        (grad_norm.global_norm_cost, 1000),
        3 * 4,
        None,
    ),
    *case(
        lambda u, v: grad_norm.squares_of_pieces(
            u(1000), upload(np.array([(0, 400), (400, 1000)]), u.device), u(2)
        ),
        (grad_norm.squares_of_pieces_cost, 1000, 2),
        0,
        None,
        versions=[None],
    ),
    *case(
        lambda u, v: grad_norm.root_of_sum(u(300)),
        (grad_norm.root_of_sum_cost, 300),
        0,
        None,
        versions=[None],
    ),
    *case(
        lambda u, v: mse.mse_forward(u(B, P, C), u(B, P, C), version=v),
        (mse.mse_forward_cost, N),
        3 * 4,
        None,
    ),
    *case(
        lambda u, v: reduce.total_sum(u(123), version=v),
        (reduce.total_sum_cost, 123),
        2 * 4,
        None,
        versions=[1, 2],
    ),
    *case(
        lambda u, v: reduce.column_sum(u(B * P, C), version=v),
        (bias.bias_add_backward_cost, B * P, C),
        0,
        0,
        versions=[1],
    ),
    # a DiT's: trees of sums, and tanh as a quotient, come on top
    *case(
        lambda u, v: adaln.adaln_forward(u(B, 2, C), u(B, C), u(B, C), version=v),
        (adaln.adaln_forward_cost, B, 2, C),
        more=None,
    ),
    *case(
        lambda u, v: adaln.adaln_backward(
            u(B, 2, C), u(B, 2, C), u(B, C), u(B * 2), u(B * 2), version=v
        ),
        (adaln.adaln_backward_cost, B, 2, C),
        more=None,
    ),
    *case(
        lambda u, v: gate.gate_forward(u(B, P, C), u(B, P, C), u(B, C), version=v),
        (gate.gate_forward_cost, B, P, C),
    ),
    *case(
        lambda u, v: gate.gate_backward(u(B, P, C), u(B, P, C), u(B, C), version=v),
        (gate.gate_backward_cost, B, P, C),
        versions=[1],
    ),
    *case(
        lambda u, v: gate.gate_backward(u(B, P, C), u(B, P, C), u(B, C), version=v),
        (gate.gate_backward_cost, B, P, C),
        more=None,
        versions=[2],
    ),
    *case(
        lambda u, v: gate_adaln.gate_adaln_forward(
            u(B, P, C), u(B, P, C), u(B, C), u(B, C), u(B, C), version=v
        ),
        (gate_adaln.gate_adaln_forward_cost, B, P, C),
        more=None,
        versions=[2],
    ),
    *case(
        lambda u, v: gate_adaln.gate_adaln_backward(
            *(u(B, P, C) for _ in range(4)),
            *(u(B, C) for _ in range(3)),
            u(B * P),
            u(B * P),
            version=v,
        ),
        (gate_adaln.gate_adaln_backward_cost, B, P, C),
        more=None,
        versions=[2],
    ),
    # of x instead of z: as many bytes
    *case(
        lambda u, v: gate_adaln.gate_adaln_backward(
            *(u(B, P, C) for _ in range(2)),
            None,
            u(B, P, C),
            *(u(B, C) for _ in range(3)),
            u(B * P),
            u(B * P),
            version=v,
            x=u(B, P, C),
        ),
        (gate_adaln.gate_adaln_backward_cost, B, P, C),
        more=None,
        versions=[2],
    ),
    *case(
        lambda u, v: bias_gelu.bias_gelu_forward(u(P, C), u(C), version=v),
        (bias_gelu.bias_gelu_forward_cost, P, C),
        more=-P * C,
    ),
    # it writes sums, and reads them in a second pass
    *case(
        lambda u, v: bias_gelu.bias_gelu_backward(u(P, C), u(P, C), u(C), u(C), version=v),
        (bias_gelu.bias_gelu_backward_cost, P, C),
        2 * 4 * C,
        None,
    ),
    *case(
        lambda u, v: swiglu.swiglu_forward(u(P, 2 * C), version=v),
        (swiglu.swiglu_forward_cost, P, 2 * C),
        more=None,
    ),
    *case(
        lambda u, v: swiglu.swiglu_backward(u(P, C), u(P, 2 * C), version=v),
        (swiglu.swiglu_backward_cost, P, 2 * C),
        more=None,
    ),
    # q and k of one head of 8, in place
    *case(
        lambda u, v: qk_norm_rope.qk_norm_rope_forward(
            u(B, P, 24), 1, u(8), u(8), u(2, P, 8), in_place=True, version=v
        ),
        (qk_norm_rope.qk_norm_rope_forward_cost, B, P, 8, 1),
        more=None,
    ),
    *case(
        lambda u, v: chunk.chunk_forward(u(B, 6 * C), 6),
        (chunk.chunk_forward_cost, B * 6 * C),
        versions=[None],
    ),
    *case(
        lambda u, v: patchify.patchify_forward(u(B, 4, 4, C), 2, version=v),
        (patchify.patchify_forward_cost, B * 16 * C),
    ),
    *case(
        lambda u, v: class_dropout.class_dropout_forward(steps(u, B), 0.3, 5, 7, *samples(u)),
        (class_dropout.class_dropout_forward_cost, B),
        4,
        versions=[None],
    ),
    # timesteps and three tables; the blocks' sums are written and read
    *case(
        lambda u, v: vlb.hybrid_loss_forward(*predicted(u), version=v),
        (vlb.hybrid_loss_forward_cost, N),
        4 * B + 3 * 4 * B + 3 * 4,
        None,
    ),
    *case(
        lambda u, v: vlb.hybrid_loss_backward(*predicted(u), version=v),
        (vlb.hybrid_loss_backward_cost, N),
        4 * B + 3 * 4 * B + 4,
        None,
    ),
    *case(
        lambda u, v: flash_attention.flash_attention_forward(u(1, 64, 3 * 32), 1, version=v),
        (flash_attention.flash_attention_forward_cost, 1, 64, 32, 1),
        more=None,
    ),
    # the rows' sums are written and read, and dq is accumulated in place
    *case(
        lambda u, v: flash_attention.flash_attention_backward(
            u(1, 64, 32), u(1, 64, 3 * 32), u(1, 64, 32), u(1, 1, 64), 1, version=v
        ),
        (flash_attention.flash_attention_backward_cost, 1, 64, 32, 1),
        4 * 64 * (2 + 32),
        None,
        versions=[2],
    ),
    *case(
        lambda u, v: step_state.latch_skips(
            number(u, -1, np.int32), number(u, 0, np.int32, 3), u(1), number(u, 3, np.uint32), 5
        ),
        (step_state.latch_skips_cost,),
        -8,
        versions=[None],
    ),
    *case(
        lambda u, v: step_state.count_update(number(u, 3, np.uint32), u(1)),
        (step_state.count_update_cost,),
        versions=[None],
    ),
]

SPECIAL = {  # costs that count an exponential or a root as one
    random.random_normal_cost,
    vlb.hybrid_loss_backward_cost,
    posterior.posterior_sample_forward_cost,
    posterior.posterior_kl_backward_cost,
}


@exhaustive
@pytest.mark.parametrize("operation, version, cost, side, more", EXACT)
def test_costs(operation, version, cost, side, more):
    t = Counted(lambda u: operation(u, version)).total
    moved, flops = cost[0](*cost[1:])
    assert t.distinct_bytes == moved + side
    done = t.total_flops + (t.special if cost[0] in SPECIAL else 0)
    if more is None:  # the kernel's own trees and polynomials come on top
        assert done >= flops
    else:
        assert done == flops + more


def test_every_cost_function_is_held_against_counts():
    """A cost function without a count may be wrong."""
    files = __file__, pathlib.Path(__file__).with_name("test_costs.py")
    text = "\n".join(pathlib.Path(file).read_text(encoding="utf-8") for file in files)
    for module in kernel_modules():
        names = {
            n
            for n in vars(module)
            if n.endswith("_cost") and vars(module)[n].__module__ == module.__name__
        }
        missing = [n for n in sorted(names - NOT_COUNTED) if n not in text]
        assert missing == [], f"{module.__name__} has {missing}: hold them against counts here."
