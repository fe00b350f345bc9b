"""Problems of the small operations, and of the norms."""
import numpy as np

from ...kernels import groupnorm
from ...kernels.diffusion import images, q_sample
from ...kernels.diffusion import levels as noise_levels
from .problem import IMAGE, PIXELS, PURPOSE, SAMPLES, SEED, SIDE, STEP, TIMESTEPS, B, C, integers, single


def add_problems(add, rng, t):
    add(images.images_forward, images=integers(rng.integers(0, 256, (B, SIDE, SIDE, 3)), np.uint8),
        flip=integers(rng.integers(0, 2, B)))
    add(q_sample.q_sample_forward, x_0=PIXELS, eps=PIXELS, t=t, sqrt_alpha_bar=single(TIMESTEPS),
        sqrt_one_minus_alpha_bar=single(TIMESTEPS))
    add(q_sample.weigh_forward, x=PIXELS, t=t, weight=single(TIMESTEPS))
    add(noise_levels.levels_forward, seed=SEED, purpose=PURPOSE, step=STEP, samples=SAMPLES,
        path=noise_levels.LINEAR, prediction="flow", normal=True)
    norm = {"weight": single(C), "bias": single(C), "groups": 32, "silu": True}
    add(groupnorm.groupnorm_forward,
        versions=(1, 2, 3), x=IMAGE, **norm)
    wide = single(B, SIDE, SIDE, C)
    add(groupnorm.groupnorm_forward, versions=(2, 3), x=wide, **norm)
    add(groupnorm.groupnorm_forward, versions=(4,), note="statistics known", x=IMAGE,
        statistics=single(B, SIDE * SIDE // 64, 2, C // 2), **norm)
    add(groupnorm.groupnorm_backward,
        versions=(1, 2, 3), dy=IMAGE, x=IMAGE, mean=single(B, 32), rstd=single(B, 32), dweight=single(C),
        dbias=single(C), **norm)
    add(groupnorm.groupnorm_backward, versions=(2, 3), dy=wide, x=wide, mean=single(B, 32),
        rstd=single(B, 32), dweight=single(C), dbias=single(C), **norm)
