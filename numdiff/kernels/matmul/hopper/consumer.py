"""A consumer of Hopper's matmul: a warpgroup multiplies its 64 rows of a tile, and writes the
results.

    prefetch        the bias, requested before the main loop, needed after it: staging.py
    main loop       main_loop.py
    complete        of a tile that is cut among blocks: parts.py
    write           one block of 64 columns after the other: epilogue.py

SOURCE
    kernel.py.
READ NEXT
    main_loop.py
"""

from ....device import cuda, device_inline, int32, uint32
from ....device.limits import WARP, WARPGROUP
from ....device.pipeline import consumer_start
from ....device.specialise import Field
from .layout import ACCUMULATORS, BLOCKS, BM, BOX_BYTES, FP8, MAIN_LOOP
from .staging import GemmPlace
from .work import next_unit, tile_at

prefetch, stage_bias, write, finish = (
    Field("EPILOGUE", name) for name in ("prefetch", "stage", "write", "finish")
)
complete, target_of = Field("SCHEDULER", "complete"), Field("SCHEDULER", "target_of")
GATES = 32  # of eight columns each, in the widest tile


@device_inline
def consume(ring, staging, unit, walk, target):
    """A warpgroup multiplies its 64 rows of all work tiles of the block, and writes the results."""
    acc, gates = cuda.local.array(ACCUMULATORS, "float32"), cuda.local.array(GATES, "uint32")
    arrays, work = target.arrays, target.work
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
    while unit < walk.last:
        tile = tile_at(unit, walk, work)
        place = GemmPlace(
            int32(tile.row * BM + consumer * 64),
            int32(tile.column * (BLOCKS * 64)),
            thread_row,
            lane,
        )
        b0, b1 = prefetch(gates, place, target)
        steps = int32(tile.end_k - tile.first_k)
        stage, parity = MAIN_LOOP(acc, ring, stage, parity, steps, a_offset, elected)
        if FP8:
            for i in range(ACCUMULATORS):
                acc[i] *= scale
        stage_bias(staging, b0, b1)
        if not complete(acc, tile, consumer, staging, target):
            unit = next_unit(unit, tile, walk, work)
            continue
        mine = target_of(tile, target)
        # block by block of 64 columns, not in a loop: accumulators stay in registers only under
        # constant indices
        turn, amax = write(0, turn, amax, acc, gates, place, staging, mine)
        if BLOCKS > 1:
            turn, amax = write(1, turn, amax, acc, gates, place, staging, mine)
        if BLOCKS > 2:
            turn, amax = write(2, turn, amax, acc, gates, place, staging, mine)
        if BLOCKS > 3:
            turn, amax = write(3, turn, amax, acc, gates, place, staging, mine)
        unit = next_unit(unit, tile, walk, work)
    finish(amax, arrays, lane, elected)
