"""Attention without the T × T matrix: FlashAttention forward and backward. Read the files in this
order.

    unfused.py             three operations in a row, with the T × T matrix; what all others are held against
    reference.py       what is computed, how the backward does without the probabilities, and what it costs
    ../../extras/levels/attention/  lectures, on any GPU: v1 naive: a thread a row; v2 register-tiled: rows in registers
    heads.py               what all share: where a head is, the sums D of the rows, partial dq added over chunks
    fragments.py           tiles of float16 for the tensor cores
    forward_half.py    v3 mma: float16, mma.sync: probabilities never leave the registers
    backward_half.py   v3 mma: scores transposed; 256 keys a block, so that most images need no second pass
    hopper_tiles.py        the same tiles for wgmma: loaded by TMA, named by descriptors
    forward_hopper.py  v5 hopper: float16, wgmma: a warpgroup only fetches, two multiply, softmax overlaps products
    backward_hopper/   v5 hopper: 128 keys a warpgroup, dS through shared memory, the next head's keys prefetched
    ../../extras/tf32/attention/  v4 tf32-bf16: v3 in float32, by a product of tf32 and one of bfloat16 for the rest
    problems.py            what the check, the tests and the benchmark run
    choice.py          what tiles, chunks and versions are estimated to take
    launcher.py        which of them runs


SHAPES
    qkv (B, T, 3C), C = heads · HS; y, dy (B, T, C); all float32 (v1, v2, v4), or all float16 or
    bfloat16 (v1, v3, v5); logsumexp (B, heads, T) float32. T is arbitrary; on a GPU HS is 32, 64 or 72, with v3
    also 128, and unfused.py takes all others.
COST
    forward 4·B·heads·T²·HS FLOPs, backward 10·B·heads·T²·HS (v1: 14). Memory and the bytes that
    have to move are linear in T, where unfused.py writes and reads T² probabilities several times.
    Roof: arithmetic. v3, HS 64, 16 queries and 64 keys
    forward: 64 mma, and 16 loads of fragments where 32 queries share them; 1024 powers of two,
    which take as long as 40 mma. v4: 128 mma of tf32, half as large, and 128 of bfloat16, each of
    which takes as long as one of v3's.
SOURCE
    Dao et al. 2022, "FlashAttention: Fast and Memory-Efficient Exact Attention", arXiv:2205.14135;
    Dao 2023, "FlashAttention-2", arXiv:2307.08691.
READ NEXT
    reference.py
"""

from .launcher import (
    HEAD_SIZES,
    WIDE_HEADS,
    flash_attention_backward,
    flash_attention_forward,
    flash_attention_supports,
)
from .reference import (
    flash_attention_backward_cost,
    flash_attention_backward_reference,
    flash_attention_forward_cost,
    flash_attention_forward_reference,
)
from .unfused import (
    attention_backward,
    attention_forward,
    single_head_attention_forward,
)

__all__ = [
    "HEAD_SIZES",
    "WIDE_HEADS",
    "attention_backward",
    "attention_forward",
    "flash_attention_backward",
    "flash_attention_backward_cost",
    "flash_attention_backward_reference",
    "flash_attention_forward",
    "flash_attention_forward_cost",
    "flash_attention_forward_reference",
    "flash_attention_supports",
    "single_head_attention_forward",
]
