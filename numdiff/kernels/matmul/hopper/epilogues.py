"""Epilogues of Hopper's matmul: what becomes of the accumulators.

AN EPILOGUE runs on the consumers while the tensor cores are idle. The main loop of a 128 × 256 tile
    takes about 16,000 cycles for K = 768, so every thousand cycles of an epilogue cost 6 %, and it
    is kept short:

    float16         alpha · accumulator + bias + residual; TMA writes one tile while the next is made (staging.py)
    float32         pairs of lanes exchange halves, so that each writes 16 bytes of one row
    gate            residual + gate · (accumulator + bias), the gate a row for each image: how a DiT joins its branches,
                    if no backward needs the branch itself. The residual arrives by `exchange`
                    (exchange.py); the gates are loaded into registers before the main loop
    layer scale     z = accumulator + bias and residual + scale · z, two tiles at once

    GELU, GELU'     gelu_epilogues.py; as E4M3, for a next product of 8 bits, extras/fp8/epilogues.py
    SwiGLU          swiglu_epilogues.py
    symmetric       extras/muon/symmetric_epilogue.py

FIRST ALL LOADS, then the arithmetic, last all stores: the compilers move no load past a store, and
    nothing would overlap. Results beyond the edges are computed from the last rows and columns that
    exist, and never written.

SOURCE
    kernel.py; PTX ISA, section 9.7.9.27 (cp.async.bulk.tensor).
READ NEXT
    exchange.py
"""

from ....device import cuda, device_inline, int32, uint32
from ....device.mbarrier import bar_sync
from ....device.tensor_core import load_word, pack_half2, unpack_half2
from ....device.tma import tma_store_2d, tma_store_commit
from ..split_half import write_fragment
from .layout import A_ALONG_M, B_ALONG_N, BN, BOX_BYTES
from .staging import (
    await_tile,
    await_tiles,
    bias_elements,
    bias_of,
    load_words,
    loaded_tile,
    offer_tiles,
    prefetch_bias,
    return_words,
    send_both,
    stage_bias,
    store_two,
    store_words,
)


@device_inline
def half_block(block, turn, acc, place, staging, seam, residual, target):
    """alpha · accumulator + bias + residual by way of a tile in shared memory; the next turn.

    turn: counts the tiles, which use the two buffers alternately
    seam: the result's columns from here on belong to the matrix of `maps.second`
    """
    first_row, first_column, thread_row, lane = place
    maps, work, epilogue = target.maps, target.work, target.epilogue
    M, N = work.M, work.N
    column = int32(first_column + 64 * block)
    if column < N and first_row < M:  # the same for the whole warpgroup
        words = cuda.local.array(16, "uint32")
        if epilogue.has_residual:
            for j in range(8):
                n = min(int32(column + 8 * j + lane % 4 * 2), int32(N - 2))
                for half in range(2):
                    row = min(int32(first_row + thread_row + 8 * half), int32(M - 1))
                    words[2 * j + half] = load_word(residual, row * N + n)
        for j in range(8):
            b0, b1 = bias_of(block, j, place, staging)
            for half in range(2):
                i = 32 * block + 4 * j + 2 * half
                v0, v1 = epilogue.alpha * acc[i] + b0, epilogue.alpha * acc[i + 1] + b1
                if epilogue.has_residual:
                    r0, r1 = unpack_half2(words[2 * j + half])
                    v0, v1 = v0 + r0, v1 + r1
                words[2 * j + half] = pack_half2(v0, v1)
        await_tile()
        tile = int32(staging.at + (turn & 1) * BOX_BYTES)
        store_words(words, tile, place, staging)
        offer_tiles()
        if cuda.threadIdx.x % 128 == 0:
            source = staging.base + uint32(tile)
            if column < seam:
                tma_store_2d(source, maps.c, uint32(column), uint32(first_row))
            else:
                tma_store_2d(source, maps.second, uint32(column - seam), uint32(first_row))
            tma_store_commit()
        turn = int32(turn + 1)
    return turn


@device_inline
def write_half(block, turn, amax, acc, gates, place, staging, target):
    """`half_block` of one matrix, or of two side by side."""
    work = target.work
    seam = int32(work.matrices.seam if B_ALONG_N and not A_ALONG_M else work.N)
    turn = half_block(block, turn, acc, place, staging, seam, target.arrays.residual, target)
    return turn, amax


@device_inline
def write_half_of_batch(block, turn, amax, acc, gates, place, staging, target):
    """`half_block` of a batch."""
    seam = int32(target.work.N)
    turn = half_block(block, turn, acc, place, staging, seam, target.arrays.residual, target)
    return turn, amax


@device_inline
def write_half_of_stack(block, turn, amax, acc, gates, place, staging, target):
    """`half_block` of a stack, which has no residual."""
    seam = int32(target.work.N)
    turn = half_block(block, turn, acc, place, staging, seam, target.arrays.c, target)
    return turn, amax


@device_inline
def prefetch_bias_of_stack(gates, place, target):
    """As `prefetch_bias`, of the bias of the tile's weight."""
    work = target.work
    matrix = int32(uint32(place.first_column) // uint32(work.matrices.rows))
    gap = matrix * target.arrays.gaps.bias_gap
    return bias_elements(
        target.arrays.bias, place.first_column + gap, work.N + gap, target.epilogue.has_bias
    )


@device_inline
def float_block(block, acc, place, start, target):
    """64 × 64 outputs of a warpgroup as float32, 16 bytes a lane; c from `start` on."""
    first_row, first_column, thread_row, lane = place
    arrays, work = target.arrays, target.work
    column = int32(first_column + 64 * block)
    if column < work.N and first_row < work.M:
        for j in range(8):
            i = 32 * block + 4 * j
            write_fragment(
                arrays.c,
                start,
                acc[i],
                acc[i + 1],
                acc[i + 2],
                acc[i + 3],
                int32(first_row + thread_row),
                int32(column + 8 * j),
                lane,
                work,
                arrays.bias,
                target.epilogue,
            )


@device_inline
def write_float(block, turn, amax, acc, gates, place, staging, target):
    """`float_block` of a slice of K."""
    float_block(block, acc, place, target.part * (target.work.M * target.work.N), target)
    return turn, amax


@device_inline
def write_float_of_stack(block, turn, amax, acc, gates, place, staging, target):
    """`float_block` of a slice of K, or of the gradients of a stack's weights."""
    work = target.work
    start = target.part * (work.M * work.N)
    if A_ALONG_M:
        start = (
            int32(uint32(place.first_row) // uint32(work.matrices.rows)) * target.arrays.gaps.gap
        )
    float_block(block, acc, place, start, target)
    return turn, amax


@device_inline
def write_float_of_group(block, turn, amax, acc, gates, place, staging, target):
    """`float_block` of a product of a group."""
    float_block(block, acc, place, target.part, target)
    return turn, amax


# A gate -------------------------------------------------------------------------------------------


@device_inline
def prefetch_gates(gates, place, target):
    """As `prefetch_bias`, and a thread's gates of a tile: a word for each group of eight columns.

    Its two rows, eight apart, are of one image, as images have a multiple of 16.
    """
    b0, b1 = prefetch_bias(gates, place, target)
    gated, work = target.arrays.gated, target.work
    row = min(int32(place.first_row + place.thread_row), int32(work.M - 1))
    at = int32(uint32(row) // uint32(gated.tokens)) * gated.pitch + gated.first
    for j in range(BN // 8):
        gates[j] = load_word(
            gated.gate,
            at + min(int32(place.first_column + 8 * j + place.lane % 4 * 2), int32(work.N - 2)),
        )
    return b0, b1


@device_inline
def stage_gates(staging, b0, b1):
    """As `stage_bias`, which here may come before all have read the last tile's."""
    bar_sync(uint32(cuda.threadIdx.x // 128), uint32(128))
    stage_bias(staging, b0, b1)


@device_inline
def write_gate(block, turn, amax, acc, gates, place, staging, target):
    """residual + gate · (accumulator + bias), in the tile that holds the residual.

    The sum in brackets is rounded first, as it is where a separate kernel gates it and adds: the
    same bits.
    """
    work = target.work
    if int32(place.first_column + 64 * block) < work.N and place.first_row < work.M:
        tile = loaded_tile(turn, 1, staging)
        words = cuda.local.array(16, "uint32")
        load_words(words, tile, place, staging)
        for j in range(8):
            b0, b1 = bias_of(block, j, place, staging)
            g0, g1 = unpack_half2(gates[8 * block + j])
            for half in range(2):
                i = 32 * block + 4 * j + 2 * half
                h0, h1 = unpack_half2(pack_half2(acc[i] + b0, acc[i + 1] + b1))
                r0, r1 = unpack_half2(words[2 * j + half])
                words[2 * j + half] = pack_half2(r0 + g0 * h0, r1 + g1 * h1)
        return return_words(words, turn, tile, place, staging), amax
    return turn, amax


# A layer's scale ----------------------------------------------------------------------------------


@device_inline
def write_layer_scale(block, turn, amax, acc, gates, place, staging, target):
    """z = accumulator + bias, if it is kept, and residual + scale · z, by way of a tile in shared
    memory for each."""
    work, arrays, keeps_z = target.work, target.arrays, target.epilogue.has_residual
    first_row, first_column, thread_row, lane = place
    column = int32(first_column + 64 * block)
    if column < work.N and first_row < work.M:
        words, scaled = cuda.local.array(16, "uint32"), cuda.local.array(16, "uint32")
        for j in range(8):
            n = min(int32(column + 8 * j + lane % 4 * 2), int32(work.N - 2))
            for half in range(2):
                row = min(int32(first_row + thread_row + 8 * half), int32(work.M - 1))
                scaled[2 * j + half] = load_word(arrays.residual, row * work.N + n)
        for j in range(8):
            b0, b1 = bias_of(block, j, place, staging)
            n = min(int32(column + 8 * j + lane % 4 * 2), int32(work.N - 2))
            s0, s1 = arrays.scale[uint32(n)], arrays.scale[uint32(n + 1)]
            for half in range(2):
                i = 32 * block + 4 * j + 2 * half
                z0, z1 = acc[i] + b0, acc[i + 1] + b1
                r0, r1 = unpack_half2(scaled[2 * j + half])
                words[2 * j + half] = pack_half2(z0, z1)
                scaled[2 * j + half] = pack_half2(r0 + s0 * z0, r1 + s1 * z1)
        await_tiles()
        store_two(words, scaled, keeps_z, staging.at, place, staging)
        send_both(keeps_z, column, place, staging, target.maps)
    return turn, amax
