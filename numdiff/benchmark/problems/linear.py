"""Problems of linear layers, and of attention in three operations."""
from ...kernels import attention, linear
from .problem import TOKENS, B, D, N, T, half, single


def add_problems(add):
    add(linear.linear_forward, versions=(5, 6), x=TOKENS, weight=half(3 * D, D), bias=single(3 * D))
    add(linear.linear_backward, versions=(5, 6), dy=half(N, T, 3 * D), x=TOKENS, weight=half(3 * D, D),
        dweight=single(3 * D, D), dbias=single(3 * D))
    qkv = single(B, 256, 3 * 192)
    add(attention.attention_forward, qkv=qkv, heads=6)
    add(attention.attention_backward, dy=single(B, 256, 192), qkv=qkv, probabilities=single(B, 6, 256, 256), heads=6)
