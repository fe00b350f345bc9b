"""Flash attention in float32 on tensor cores, rung 4: two mma for what the other units do in 32
instructions, without losing digits. Read the files in this order.

    products.py    float32 on the tensor cores: a product of tf32, and one of bfloat16 for what that leaves out
    forward.py     kernels/attention/forward_half.py in float32
    backward.py    likewise

`lacks`, `forward_of` and `backward_of` are what kernels/attention/launcher.py takes from an
extension.

SOURCE
    products.py
READ NEXT
    products.py
"""

from ....device.specialise import Variants
from ....kernels.attention.launcher import HEAD_SIZES, head_size, lacks_memory, lacks_small_heads
from . import backward, forward

forward_kernels = Variants(HEAD_SIZES, forward.make_forward)
backward_kernels = Variants(HEAD_SIZES, backward.make_backward)


def lacks(HS, limit):
    """None if there are kernels for heads of HS channels where a block may have `limit` bytes of
    shared memory, else a clause with what they need."""
    return lacks_small_heads(HS) or lacks_memory(HS, backward.shared_bytes(HS), limit)


def forward_of(qkv, heads):
    """(queries of a block, threads, kernel, bytes of shared memory)"""
    HS = head_size(qkv, heads)
    return forward.QUERIES, forward.THREADS, forward_kernels[HS], forward.shared_bytes(HS)


def backward_of(qkv, heads):
    """(keys of a block, warps, kernel, bytes of shared memory)"""
    HS = head_size(qkv, heads)
    return backward.KEYS, backward.WARPS, backward_kernels[HS], backward.shared_bytes(HS)
