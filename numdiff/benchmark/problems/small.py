"""Problems of the small operations, and of the norms."""

from ...kernels import groupnorm
from .problem import IMAGE, SIDE, B, C, single


def add_problems(add, rng, t):
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
