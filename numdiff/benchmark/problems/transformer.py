"""Problems of attention in one kernel."""
from ...kernels import attention
from .problem import HEADS, TOKENS, D, N, T, half, single


def add_problems(add):
    heads = {"heads": HEADS, "order": "new"}
    attended = {"dy": half(N, T, D), "qkv": half(N, T, 3 * D), "y": TOKENS, "logsumexp": single(N, HEADS, T), **heads}
    add(attention.flash_attention_forward,
        qkv=half(N, T, 3 * D), **heads)
    add(attention.flash_attention_backward,
        **attended)
    add(attention.flash_attention_forward,
        qkv=single(8, 1024, 3 * 512), heads=8)
    add(attention.flash_attention_backward,
        dy=single(8, 1024, 512), qkv=single(8, 1024, 3 * 512), y=single(8, 1024, 512), logsumexp=single(8, 8, 1024),
        heads=8)
