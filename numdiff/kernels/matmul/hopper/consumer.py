"""A consumer of Hopper's matmul: a warpgroup multiplies its 64 rows of a tile, and writes the
results.

    bias            requested before the main loop, needed after it: staging.py
    main loop       main_loop.py
    parts           of a tile that is cut among blocks: parts.py
    epilogue        one block of 64 columns after the other; the kernel's constants choose which (`write_block`)

SOURCE
    kernel.py.
READ NEXT
    main_loop.py
"""

from ....device import cuda, int32, uint32
from ....device.eight import array_of
from ....device.limits import WARP, WARPGROUP
from ....device.mbarrier import bar_sync
from ....device.pipeline import consumer_start
from ....device.tma import tma_store_wait_0
from ...quantise import keep_largest
from .epilogues import (
    epilogue_float,
    epilogue_gate,
    epilogue_half,
    epilogue_layer_scale,
    prefetch_gates,
)
from .fp8_epilogues import epilogue_gelu_eight, epilogue_gelu_gradient_eight
from .gelu_epilogues import epilogue_gelu, epilogue_gelu_again_gradient, epilogue_gelu_gradient
from .group_schedule import of_product
from .layout import (
    A_ALONG_M,
    ACCUMULATORS,
    B_ALONG_N,
    BATCHED,
    BIASED,
    BLOCKS,
    BM,
    BN,
    BOX_BYTES,
    COLUMNS,
    EIGHT,
    EXCHANGES,
    FP8,
    GATE,
    GELU,
    GELU_AGAIN_GRADIENT,
    GELU_GRADIENT,
    GROUPED,
    GROUPS,
    HALF,
    LAYER_SCALE,
    PROMOTED,
    STACKED,
    SWIGLU,
    SWIGLU_GRADIENT,
    SYMMETRIC,
    Arrays,
    Extent,
)
from .main_loop import main_loop, promoted_loop
from .parts import join_parts
from .staging import Place, prefetch_bias, stage_bias
from .swiglu_epilogues import epilogue_swiglu, epilogue_swiglu_gradient, prefetch_biases
from .symmetric_epilogue import epilogue_symmetric
from .work import is_work, next_unit, tile_at


@cuda.jit(device=True, forceinline=True)
def write_block(block, turn, amax, acc, gates, place, staging, part, maps, arrays, work, epilogue):
    """The epilogue of a warpgroup's block of 64 columns (of SwiGLU: of a pair of blocks); returns
    the next turn of its two tiles in shared memory, and with `EIGHT` the largest magnitudes so far,
    two float16: amax."""
    if EIGHT:
        if GELU_GRADIENT:
            turn, amax = epilogue_gelu_gradient_eight(
                block, turn, amax, acc, place, staging, arrays.scale_c, work
            )
        else:
            amax = epilogue_gelu_eight(
                block, amax, acc, place, staging, maps, arrays.scale_c, work, epilogue.has_residual
            )
    elif GELU_GRADIENT:
        turn = epilogue_gelu_gradient(block, turn, acc, place, staging, work)
    elif GELU_AGAIN_GRADIENT:
        turn = epilogue_gelu_again_gradient(block, turn, acc, place, staging, work)
    elif GATE:
        turn = epilogue_gate(block, turn, acc, gates, place, staging, work)
    elif GELU:
        epilogue_gelu(block, acc, place, staging, maps, work, epilogue.has_residual)
    elif LAYER_SCALE:
        epilogue_layer_scale(
            block,
            acc,
            place,
            staging,
            maps,
            arrays.residual,
            arrays.row_sums,
            work,
            epilogue.has_residual,
        )
    elif SWIGLU_GRADIENT:
        turn = epilogue_swiglu_gradient(block, turn, acc, place, staging, work)
    elif SWIGLU:
        turn = epilogue_swiglu(
            block, BLOCKS, turn, acc, place, staging, maps, work, epilogue.has_residual
        )
    elif SYMMETRIC:
        epilogue_symmetric(block, acc, place, staging, maps, arrays.residual, work, epilogue)
    elif HALF:
        seam = int32(
            work.seam if B_ALONG_N and not A_ALONG_M and not BATCHED and not STACKED else work.N
        )
        if STACKED:
            turn = epilogue_half(
                block, turn, acc, place, staging, seam, maps, arrays.c, work, epilogue
            )
        else:
            turn = epilogue_half(
                block, turn, acc, place, staging, seam, maps, arrays.residual, work, epilogue
            )
    else:
        start = part if GROUPED else part * (work.M * work.N)
        if STACKED and A_ALONG_M:
            start = int32(uint32(place.first_row) // uint32(work.seam)) * arrays.residual.gap
        epilogue_float(block, acc, place, arrays.c, start, arrays.bias, work, epilogue)
    return turn, amax


@cuda.jit(device=True, forceinline=True)
def consume(ring, staging, unit, stride, maps, arrays, work, epilogue):
    """A warpgroup multiplies its 64 rows of all work tiles of the block, and writes the results."""
    acc, gates = cuda.local.array(ACCUMULATORS, "float32"), cuda.local.array(GROUPS, "uint32")
    t = int32(cuda.threadIdx.x)
    consumer, elected, lane = int32(t // WARPGROUP - 1), t % WARPGROUP == 0, int32(t % WARP)
    # of its first output, within the warpgroup's 64
    thread_row = int32(t % WARPGROUP // WARP * 16 + lane // 4)
    # 64 rows of 64 k, or a box of 64 k × 64 rows: as many bytes
    a_offset = uint32(consumer) * uint32(BOX_BYTES)
    turn, amax = int32(0), uint32(0)
    if FP8:
        scale = arrays.scale_a[0] * arrays.scale_b[0]
    stage, parity = consumer_start()
    while is_work(unit, stride, work):
        tile = tile_at(unit, stride, work)
        place = Place(
            int32(tile.row * BM + consumer * 64), int32(tile.column * COLUMNS), thread_row, lane
        )
        if SWIGLU:
            b0, b1 = prefetch_biases(BN, arrays.bias, place.first_column, work.N, epilogue.has_bias)
        elif BIASED:  # the bias comes while the tile is multiplied
            gap = int32(0)
            if STACKED:
                gap = (
                    int32(uint32(place.first_column) // uint32(work.seam))
                    * arrays.residual.bias_gap
                )
            b0, b1 = prefetch_bias(
                BN, arrays.bias, place.first_column + gap, work.N + gap, epilogue.has_bias
            )
        if GATE:
            prefetch_gates(gates, GROUPS, arrays.residual, place, work)
        steps = int32(tile.end_k - tile.first_k)
        if PROMOTED:
            stage, parity = promoted_loop(acc, ring, stage, parity, steps, a_offset, elected)
        else:
            stage, parity = main_loop(acc, ring, stage, parity, steps, a_offset, elected)
        if FP8:
            for i in range(ACCUMULATORS):
                acc[i] *= scale
        if GATE:
            bar_sync(uint32(consumer + 1), uint32(WARPGROUP))  # all have read the last tile's bias
        if BIASED:
            stage_bias(BN, staging, b0, b1)
        part, target, extent = tile.part, arrays, work
        if GROUPED:
            if tile.number >= work.whole and not join_parts(
                acc, tile, consumer, arrays.bias, arrays.residual, staging, work
            ):
                unit = next_unit(unit, tile, stride, work)
                continue
            c = array_of(tile.product, arrays.c)
            part, target = int32(0), Arrays(c, c, c, c)
            extent = Extent(of_product(tile.product, work.M), of_product(tile.product, work.N))
        # block by block of 64 columns, not in a loop: accumulators stay in registers only under
        # constant indices
        turn, amax = write_block(
            0, turn, amax, acc, gates, place, staging, part, maps, target, extent, epilogue
        )
        if BLOCKS > 1:
            turn, amax = write_block(
                1, turn, amax, acc, gates, place, staging, part, maps, target, extent, epilogue
            )
        if BLOCKS > 2:
            turn, amax = write_block(
                2, turn, amax, acc, gates, place, staging, part, maps, target, extent, epilogue
            )
        if BLOCKS > 3:
            turn, amax = write_block(
                3, turn, amax, acc, gates, place, staging, part, maps, target, extent, epilogue
            )
        unit = next_unit(unit, tile, stride, work)
    if EIGHT:
        keep_largest(arrays.amax, int32(cuda.blockIdx.x), amax, lane)
    if HALF and not EXCHANGES and elected:
        tma_store_wait_0()
