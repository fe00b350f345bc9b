"""Flash attention before tensor cores: rung 1 and rung 2 of the ladder whose other rungs are in
kernels/attention/. Read the files in this order, after kernels/attention/reference.py.

    simple.py      v1, naive: one thread a row; tiles of the other side in shared memory; the online softmax
    patches.py         what a warp does with tiles: 4 × 4 patches in registers, 16-byte loads, no bank conflicts
    forward.py     v2, register-tiled: 64 scores and up to 72 outputs a thread, the softmax once a tile
    backward.py    v2, register-tiled: dq, dk and dv in one kernel, five products instead of seven, without atomics
    problems.py        what the check and the tests run

No model runs them: version 4, extras/tf32/attention/, needs less shared memory, and took 248 µs where
version 2 took 454 (H200, 8 images of 1024 tokens). `numdiff kernels check flash_attention --version
register-tiled` does.

`lacks`, `forward_of` and `backward_of` are what kernels/attention/launcher.py takes from an extension.

SHAPES
    as in kernels/attention/reference.py; float32, of v1 also float16 and bfloat16
COST
    as kernels/attention/; v1's backward 14·B·heads·T²·HS FLOPs. Of the instructions in the loops of
    v2, as compiled for sm_90a, 74, 83 and 82 % are multiply-adds forward, 74, 81 and 80 % backward
    (HS 32, 64, 72): v2 can reach no larger share of a GPU's float32 peak. In addition, reading
    shared memory takes 72, 56 and 59 % of the multiply-adds' time forward, 98, 80 and 88 % backward.
SOURCE
    kernels/attention/reference.py
READ NEXT
    simple.py
"""

import itertools

from ....device.batch_invariance import nominal_extent
from ....device.limits import WARP, multiprocessors_of, shared_limit
from ....device.specialise import Variants
from ....kernels.attention.launcher import (
    HEAD_SIZES,
    head_size,
    lacks_memory,
    lacks_small_heads,
)
from . import backward, forward
from .patches import KEYS

forward_kernels = Variants(
    itertools.product(HEAD_SIZES, (4, 2)), lambda key: forward.make_forward(*key)
)
backward_kernels = Variants(HEAD_SIZES, backward.make_backward)


# time of a row in a block of two warps, for 1 in one of four: it shares its keys with fewer
SMALL_BLOCK = 1.2


def idling(warps):
    """How much longer work takes with too few warps to hide each other's waits; registers leave
    room for eight."""
    return 1 + 4 / min(warps, 8)


def lacks(HS, limit):
    """None if there are kernels for heads of HS channels where a block may have `limit` bytes of
    shared memory, else a clause with what they need."""
    return lacks_small_heads(HS) or lacks_memory(HS, 4 * backward.shared_floats(HS), limit)


def choose_warps(HS, batch, T, multiprocessors, limit):
    """4 or 2 warps a block of the forward, or None if neither finds the shared memory."""

    def rows(warps):
        queries = forward.WARP_QUERIES * warps
        blocks = -(-batch * -(-T // queries) // multiprocessors)
        return blocks * queries * idling(blocks * warps) * (1 if warps == 4 else SMALL_BLOCK)

    return min(
        (warps for warps in (4, 2) if 4 * forward.shared_floats(HS, warps) <= limit),
        key=rows,
        default=None,
    )


def forward_of(qkv, heads):
    """(queries of a block, threads, kernel, bytes of shared memory)"""
    B, T, _ = qkv.shape
    HS = head_size(qkv, heads)
    warps = choose_warps(
        HS, nominal_extent(B) * heads, T, multiprocessors_of(qkv), shared_limit(qkv)
    )
    return (
        forward.WARP_QUERIES * warps,
        WARP * warps,
        forward_kernels[HS, warps],
        4 * forward.shared_floats(HS, warps),
    )


def backward_of(qkv, heads):
    """(keys of a block, warps, kernel, bytes of shared memory)"""
    HS = head_size(qkv, heads)
    return KEYS, backward.WARPS, backward_kernels[HS], 4 * backward.shared_floats(HS)
