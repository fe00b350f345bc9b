"""Problems of what a UNet has besides, of a training step's last kernels, and of sampling."""
import numpy as np

from ...kernels.diffusion import ahead, mse, sampler
from ...kernels.optimizer import (
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
from .problem import PARAMETERS, PIXELS, STEP, B, D, half, integers, single


def add_problems(add, t, labels):
    add(mse.mse_forward, prediction=PIXELS, target=PIXELS)
    add(mse.mse_backward, prediction=PIXELS, target=PIXELS)
    flat, one = single(PARAMETERS), single(1)
    starts = np.arange(0, PARAMETERS - zero_ranges.PIECE, 18_976)
    add(zero_ranges.zero_ranges, note="86 % of it", flat=flat,
        ranges=integers(np.stack((starts, starts + zero_ranges.PIECE), 1), np.int64),
        moved=4 * zero_ranges.PIECE * len(starts))
    add(grad_norm.global_norm, x=flat)
    edges = np.append(np.arange(0, PARAMETERS, 16384), PARAMETERS)  # as nn/partition.py cuts it
    add(grad_norm.squares_of_pieces, x=flat, pieces=integers(np.stack((edges[:-1], edges[1:]), 1), np.int64),
        partials=single(len(edges) - 1), moved=4 * PARAMETERS)
    update = {"weight": flat, "gradient": flat, "m": flat, "v": flat, "step": STEP, "learning_rate": one,
              "gradient_norm": one, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "clip_norm": 1.0}
    add(adamw.adamw_update, **update)
    add(adamw.adamw_update, note="with average and copy", ema=flat, ema_decay=0.998, half=half(PARAMETERS), **update)
    blocks = 12  # of a DiT-B: the weights of fc1, and those of q, k, v and the projection
    starts = integers(np.arange(blocks) * (4 * 768 * 768), np.int64)
    many = single(blocks * 4 * 768 * 768)
    stack = muon.Stack(starts, 4 * 768, 768)
    add(muon.muon_momentum, gradient=many, m=many, stack=stack, gradient_norm=one, momentum=0.95, clip_norm=1.0,
        dtype=np.float16)
    add(muon.muon_apply, weight=many, x=half(blocks, 4 * 768, 768), stack=stack, step=STEP, learning_rate=one,
        gradient_norm=one, weight_decay=0.0, ema=many, ema_decay=0.998, half=half(many.shape[0]))
    for shape in ((blocks, 4 * 768, 768), (4 * blocks, 768, 768)):
        add(newton_schulz.newton_schulz, x=half(*shape))
    add(ema.ema_update, ema=flat, weight=flat, step=STEP, gradient_norm=one, decay=0.998)
    add(power_ema.power_ema_update, ema=single(2, PARAMETERS), weight=flat, updates=STEP, gradient_norm=one,
        exponents=single(2))
    add(step_state.learning_rate_forward, step=STEP, learning_rate=one, base=1e-3, warmup_steps=200, total_steps=8000,
        cosine=True)
    counts = integers([3, 2, 1])
    add(telemetry.telemetry_record, ring=single(1024, 5), step=STEP, loss=one, gradient_norm=one, learning_rate=one,
        loss_scale=one, counts=counts)
    add(loss_scale.loss_scale_update, gradient_norm=one, scale=one, unscale=one, counts=counts)
    add(sampler.estimate_x_0, x=PIXELS, prediction=PIXELS, weights=(1.3, -0.8))
    add(sampler.model_input, x=PIXELS, numbers=single(B))

    steps, width = 50, 12 * 8 * 6 * D  # a sampler's, of eight images
    add(ahead.place, ahead=half(steps, width), source=half(steps, width // 12), offset=0,
        moved=ahead.place_cost(steps, width // 12, 2)[0])
    add(ahead.take, ahead=half(steps, width), step=STEP, begin=integers([0], np.uint32), row=half(width),
        moved=ahead.take_cost(width, 2)[0])
