"""Problems of attention in one kernel, of the transformer's operations, and of several GPUs."""
import numpy as np

from ...kernels import attention
from ...kernels.attention import (
    sla,
)
from .problem import HEAD, HEADS, TOKENS, D, N, T, half, integers, single


def add_problems(add, rng, labels):
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
    # 256 × 256 and 512 × 512 pixels in patches of 4; DiT-XL's heads
    for length, least, count, head in ((4096, 1, HEADS, HEAD), (16384, 2, HEADS, HEAD), (4096, 1, 16, 72)):
        blocks, width = length // 64, count * head
        lists = np.stack([np.sort(rng.permutation(blocks)[:sla.count_of(0.05, blocks)]) for _ in range(count * blocks)])
        kept = sla.Kept(integers(lists.reshape(1, count, blocks, -1)), single(1, count, length),
                        single(1, count, length), half(1, count, blocks, head, head), single(1, count, blocks, head))
        layer = {"weight": half(head, head), "bias": single(head), "heads": count, "order": "new"}
        add(sla.sla_forward, versions=tuple(range(least, 4)), qkv=half(1, length, 3 * width), topk=0.05, **layer)
        add(sla.sla_backward, versions=tuple(range(least, 3)), dy=half(1, length, width),
            qkv=half(1, length, 3 * width), y=half(1, length, width), kept=kept,
            dweight=single(head, head), dbias=single(head), **layer)
