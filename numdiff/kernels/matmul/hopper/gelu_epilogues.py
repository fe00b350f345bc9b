"""GELU and its derivative at the end of Hopper's products, so that neither is a separate pass.

    GELU            u = accumulator + bias and GELU(u), two tiles at once
    GELU'           accumulator · GELU'(u), in the tile of shared memory into which `exchange` has loaded u, and from
                    which it stores the results (exchange.py)
    GELU' and GELU  where GELU(u) is wanted, too, for the weight's gradient (fc2's dyᵀ·GELU(u)): one multiplication
                    more, and a second tile, which is stored where u was. So it is not kept from the forward on

A tile of 128 × 256 takes GELU about 2,600 cycles, of them 2,048 for tanh, and GELU' about 4,300, of
them 4,096 for an exponential and a reciprocal.

SOURCE
    fast_gelu.py.
READ NEXT
    swiglu_epilogues.py
"""

from ....device import cuda, device_inline, int32
from ....device.tensor_core import pack_half2, unpack_half2
from .fast_gelu import fast_gelu, fast_gelu_gradient, gelu_and_gradient
from .staging import (
    await_tiles,
    bias_of,
    load_words,
    loaded_tile,
    return_tile,
    return_words,
    send_both,
    store_two,
)

# Forward ------------------------------------------------------------------------------------------


@device_inline
def gelu_words(block, words, activated, acc, place, staging):
    """A thread's words of u = accumulator + bias, and of GELU(u)."""
    for j in range(8):
        b0, b1 = bias_of(block, j, place, staging)
        for half in range(2):
            i = 32 * block + 4 * j + 2 * half
            u0, u1 = acc[i] + b0, acc[i + 1] + b1
            words[2 * j + half] = pack_half2(u0, u1)
            activated[2 * j + half] = pack_half2(fast_gelu(u0), fast_gelu(u1))


@device_inline
def write_gelu(block, turn, amax, acc, gates, place, staging, target):
    """u = accumulator + bias, if it is kept, and GELU(u), by way of a tile in shared memory for
    each.

    The arithmetic comes before the wait: meanwhile TMA reads the tiles of the block before.
    """
    work, keeps_u = target.work, target.epilogue.has_residual
    column = int32(place.first_column + 64 * block)
    if column < work.N and place.first_row < work.M:
        words, activated = cuda.local.array(16, "uint32"), cuda.local.array(16, "uint32")
        gelu_words(block, words, activated, acc, place, staging)
        await_tiles()
        store_two(words, activated, keeps_u, staging.at, place, staging)
        send_both(keeps_u, column, place, staging, target.maps)
    return turn, amax


# Backward -----------------------------------------------------------------------------------------


@device_inline
def gelu_gradient_words(block, words, acc):
    """accumulator · GELU'(u) in place of a thread's words of u."""
    for j in range(8):
        for half in range(2):
            i = 32 * block + 4 * j + 2 * half
            u0, u1 = unpack_half2(words[2 * j + half])
            words[2 * j + half] = pack_half2(
                acc[i] * fast_gelu_gradient(u0), acc[i + 1] * fast_gelu_gradient(u1)
            )


@device_inline
def write_gelu_gradient(block, turn, amax, acc, gates, place, staging, target):
    """accumulator · GELU'(u), in the tile that holds u."""
    work = target.work
    if int32(place.first_column + 64 * block) < work.N and place.first_row < work.M:
        tile = loaded_tile(turn, 1, staging)
        words = cuda.local.array(16, "uint32")
        load_words(words, tile, place, staging)
        gelu_gradient_words(block, words, acc)
        turn = return_words(words, turn, tile, place, staging)
    return turn, amax


@device_inline
def write_gelu_again_gradient(block, turn, amax, acc, gates, place, staging, target):
    """As `write_gelu_gradient`, and GELU(u) in the next tile."""
    work = target.work
    if int32(place.first_column + 64 * block) < work.N and place.first_row < work.M:
        tile = loaded_tile(turn, 2, staging)
        words, activated = cuda.local.array(16, "uint32"), cuda.local.array(16, "uint32")
        load_words(words, tile, place, staging)
        for j in range(8):
            for half in range(2):
                i = 32 * block + 4 * j + 2 * half
                u0, u1 = unpack_half2(words[2 * j + half])
                y0, slope0 = gelu_and_gradient(u0)
                y1, slope1 = gelu_and_gradient(u1)
                words[2 * j + half] = pack_half2(acc[i] * slope0, acc[i + 1] * slope1)
                activated[2 * j + half] = pack_half2(y0, y1)
        store_two(words, activated, True, tile, place, staging)
        turn = return_tile(turn, place, staging)
    return turn, amax
