"""Flash attention backward, rung 5: all five products with Hopper's wgmma, fed by TMA (sm_90a).

WHAT IS NEW, AND WHY IT PAYS
    Rung 3 issues an mma.sync for every 16 × 8 × 16 and loads fragments for it. Here one instruction
    multiplies 64 keys by 64 queries for each 16 columns, straight from shared memory, and one
    thread, of a warpgroup that does little else, loads all tiles by TMA (../hopper_tiles.py): for
    the next queries, and for the keys of the next head while this one is computed. So memory, which
    limits this kernel at 256 tokens, is never idle.
    Two warps of that warpgroup compute D = Σ dy · y from tiles in shared memory: each number of dy
    and y is read from memory once, and neither a separate kernel nor an array for D is needed.
A UNIT is a head's keys, or a chunk of them, in tiles of 256: 128 for each of two consumers, which
    keep their dk and dv in registers while the queries pass by, 64 at a time. A block takes every
    gridDim-th unit.
A ROUND, for 64 queries and twice 64 keys of a consumer:
    Sᵀ = k·qᵀ, dPᵀ = v·dyᵀ   both sides from shared memory
    Pᵀ, dSᵀ                  in registers, packed: they are the left operands of dv += Pᵀ·dy and dk += dSᵀ·q
    dSᵀ                      to shared memory, too. When both consumers' are there each makes half of the columns of
                             dq = dS·k, summed over all 256 keys; dSᵀ and k are read across, as they
                             are
    While one consumer computes P and dS, the other multiplies.
REGISTERS decide the rest. dk and dv of 128 keys are 128 of a thread's (HS 64), S, dP and what is
    packed up to 96: just enough if the products of one half of the keys are complete before those
    of the next begin. With HS 72 it takes products of 32 queries, in a loop: ptxas keeps everything
    that two straight pieces of code share. Places in shared memory are counted in 16 bytes, so that
    half of a descriptor is a constant.
LAUNCH
    grid min(units, multiprocessors), 384 threads; dynamic shared memory, KiB: two buffers of k and
    v, dSᵀ, three stages of q and dy (two for HS 72), y: for HS 32, 64, 72: 127, 219, 224. Compiled
    for 168 registers a thread, of which the producer keeps 40 and the consumers get 232.
NEEDS
    sm_90a; qkv, dy, y and dqkv at multiples of 16 bytes. Keys beyond T are computed as if they were
    there, and not
    written: it is at its best where T is a multiple of 256, or large.
ACCURACY
    operands, P and dS are float16, all sums float32; dq of several tiles of keys is added in
    float32.
DETERMINISM
    each number is summed by one warpgroup in the order of the loops, and chunks are added in order.
SOURCE
    ../reference.py; Dao 2023, "FlashAttention-2", arXiv:2307.08691, algorithm 2; Shah et al. 2024,
    "FlashAttention-3", arXiv:2407.08608, section 3; PTX ISA, section 9.7.15.
READ NEXT
    ../../../nn/dit.py, whose blocks call all this.
"""

from ....device import cuda, device_inline, float32, int32, launch, opaque, uint32
from ....device.half import in_bfloat16
from ....device.limits import WARP
from ....device.mbarrier import bar_sync, smem_u32
from ....device.pipeline import (
    advance,
    barrier_at,
    consumer_release,
    consumer_start,
    consumer_wait,
    producer_acquire,
    producer_start,
    stage_at,
)
from ....device.requires import requires
from ....device.specialise import Constant, Variants, specialise
from ....device.tma import (
    fence_proxy_async,
    tma_store_commit,
    tma_store_wait_0,
    tma_store_wait_read_0,
)
from ....device.wgmma import make_setmaxnreg, wgmma_commit, wgmma_fence
from ..backward_half import write_dq
from ..fragments import CHUNK, clear
from ..hopper_tiles import fetch_tile, maps_of, stash, write_tile
from .layout import (
    BARRIERS,
    BUFFER,
    COLUMNS,
    CONSUMER_KEYS,
    DS_ROW,
    HS,
    KEYS,
    NINTH,
    Q_TILE,
    QUERIES,
    ROW,
    ROWS,
    STAGE,
    STAGES_AT,
    STATISTICS,
    TILE,
    AttentionBackwardMaps,
    make_rings,
    set_up,
    shared_bytes,
    this_consumer,
    work_tile,
)
from .products import multiply_keys, multiply_ninth, wait_8, wait_for_accumulators, wait_for_dq
from .round import (
    CONSUMERS,
    DS_FREE,
    AttentionRoundGradients,
    AttentionRoundQueries,
    AttentionRoundRegisters,
    add_keys,
)
from .row_sums import make_statistics

THREADS = 384  # a producer and two consumer warpgroups
DS_COMPLETE, OWN = 1, 2  # named barriers: of both consumers; each one's own is OWN + its warpgroup

ACCUMULATORS = Constant(lambda COLUMNS: COLUMNS // 2)  # of dk, or dv, of 64 keys, in a thread
SCORES, WORDS, DQ = (
    Constant(lambda N: N // 2),
    Constant(lambda N: N // 4),
    Constant(lambda COLUMNS: COLUMNS // 4),
)

producer_registers, consumer_registers = make_setmaxnreg(40, False), make_setmaxnreg(232, True)


# The producer -------------------------------------------------------------------------------------


@device_inline
def produce(maps, rings, p):
    """The producer, one thread: loads each tile of k and v by TMA, and with it all tiles of q, dy
    and y.

    It waits for a buffer of k and v until both consumers have stored the results that took its
    place, for a stage of q and dy until both have computed their dq, and for y until its sums D are
    computed.
    """
    stage, parity = producer_start()
    buffer, k_parity = producer_start()
    y_stage, y_parity = producer_start()
    unit = int32(cuda.blockIdx.x)
    while unit < p.units:
        image, head, first_key, end, _ = work_tile(unit, p)
        column = int32(head * p.head_step)
        while first_key < end:
            full, k = (
                producer_acquire(rings.keys, buffer, k_parity, BUFFER),
                stage_at(rings.keys, buffer),
            )
            fetch_tile(
                HS, KEYS, k, maps.k, maps.k_ninth, full, int32(column + p.part), first_key, image
            )
            fetch_tile(
                HS,
                KEYS,
                k + uint32(TILE),
                maps.k,
                maps.k_ninth,
                full,
                int32(column + 2 * p.part),
                first_key,
                image,
            )
            buffer, k_parity = advance(rings.keys, buffer, k_parity)
            first = int32(0)
            while first < p.T:
                full, q = (
                    producer_acquire(rings.queries, stage, parity, 2 * Q_TILE),
                    stage_at(rings.queries, stage),
                )
                fetch_tile(HS, QUERIES, q, maps.q, maps.q_ninth, full, column, first, image)
                fetch_tile(
                    HS,
                    QUERIES,
                    q + uint32(Q_TILE),
                    maps.dy,
                    maps.dy_ninth,
                    full,
                    int32(head * HS),
                    first,
                    image,
                )
                full = producer_acquire(rings.y, y_stage, y_parity, Q_TILE)
                fetch_tile(
                    HS,
                    QUERIES,
                    rings.y.base,
                    maps.y,
                    maps.y_ninth,
                    full,
                    int32(head * HS),
                    first,
                    image,
                )
                y_stage, y_parity = advance(rings.y, y_stage, y_parity)
                stage, parity = advance(rings.queries, stage, parity)
                first = int32(first + QUERIES)
            first_key = int32(first_key + KEYS)
        unit = int32(unit + cuda.gridDim.x)


# Consumers ----------------------------------------------------------------------------------------


@device_inline
def write_queries(columns, dq_out, at, exists, dq, scale, fresh, lane):
    """A thread's share of `columns` columns of dq; at: of its first four numbers."""
    for j in range(columns // 8):
        write_dq(dq_out, at + 8 * j, exists, dq, 4 * j, scale, fresh, lane)


@device_inline
def write_dq_tile(r, me, all_place, queries, stage, dq_out, out_at, first, fresh, p):
    """dq of a tile of queries, of which each consumer has half of the columns; the last eight of 72
    are the second's.

    Called by both consumers when their dS is stored; they wait for each other's, and release the
    stage of q and dy.
    """
    fence_proxy_async()
    bar_sync(uint32(DS_COMPLETE), uint32(CONSUMERS))
    wgmma_fence()
    keys = uint32(opaque(all_place))
    multiply_keys(HS, r.dq, uint32(opaque(me.ds_place)), keys + uint32(me.side))
    wgmma_commit()
    wait_for_dq(HS, r.dq)
    if me.elected:
        consumer_release(queries, stage)
    query = int32(first + me.query)
    write_queries(
        COLUMNS // 2, dq_out, out_at + query * p.dq_row, query < p.T, r.dq, p.scale, fresh, me.lane
    )
    if HS == 72 and me.number == 1:
        wgmma_fence()
        multiply_ninth(r.dq_ninth, uint32(opaque(me.ds_place)), keys + uint32(NINTH // CHUNK))
        wgmma_commit()
        wait_8(r.dq_ninth)
        write_queries(
            8,
            dq_out,
            out_at + query * p.dq_row + COLUMNS // 2,
            query < p.T,
            r.dq_ninth,
            p.scale,
            fresh,
            me.lane,
        )


@device_inline
def clear_accumulators(accumulators):
    clear(accumulators.dk, ACCUMULATORS)
    clear(accumulators.dv, ACCUMULATORS)
    if HS == 72:
        clear(accumulators.dk_ninth, 4)
        clear(accumulators.dv_ninth, 4)


@device_inline
def stash_keys(shared, base, me, gradients_0, gradients_1, k_at, scale):
    """dk and dv of this consumer's keys, float16, where their k and v were; returns where, for the
    store by TMA.

    The consumer's rows of v are free by now; so are those of k once both have computed their dq
    (DS_FREE).
    """
    wait_for_accumulators(HS, gradients_0.dk, gradients_0.dk_ninth)
    wait_for_accumulators(HS, gradients_1.dk, gradients_1.dk_ninth)
    wait_for_accumulators(HS, gradients_0.dv, gradients_0.dv_ninth)
    wait_for_accumulators(HS, gradients_1.dv, gradients_1.dv_ninth)
    tile, ninth = int32(k_at + me.own_at), int32(k_at + me.own_ninth_at)
    one = float32(1)
    stash(
        HS,
        shared,
        int32(tile + TILE),
        int32(ninth + TILE),
        gradients_0.dv,
        gradients_0.dv_ninth,
        one,
        one,
    )
    stash(
        HS,
        shared,
        int32(tile + (TILE + ROWS * ROW)),
        int32(ninth + (TILE + ROWS * CHUNK)),
        gradients_1.dv,
        gradients_1.dv_ninth,
        one,
        one,
    )
    bar_sync(uint32(DS_FREE), uint32(CONSUMERS))
    stash(HS, shared, tile, ninth, gradients_0.dk, gradients_0.dk_ninth, scale, scale)
    stash(
        HS,
        shared,
        int32(tile + ROWS * ROW),
        int32(ninth + ROWS * CHUNK),
        gradients_1.dk,
        gradients_1.dk_ninth,
        scale,
        scale,
    )
    fence_proxy_async()
    bar_sync(uint32(OWN + 1 + me.number), uint32(128))
    return base + uint32(tile), base + uint32(ninth)


@device_inline
def consume(shared, base, r, gradients_0, gradients_1, rings, maps, dq_out, p):
    """A consumer, 128 threads: dk and dv of 128 of each tile's 256 keys, and half of the columns of
    dq.

    It waits for k and v, q and dy, L and D; it releases q and dy when dq is made, k and v when dk
    and dv, which take their place, have been read by TMA.
    """
    me = this_consumer(base, p.scale)
    stage, parity = consumer_start()
    buffer, k_parity = consumer_start()
    owed = False  # whether this thread's stores may still read the other buffer of k and v
    unit = int32(cuda.blockIdx.x)
    while unit < p.units:
        image, head, first_key, end, chunk = work_tile(unit, p)
        own_column = int32(me.number * (COLUMNS // 2) + (me.lane & 2) * 2)
        out_at = (chunk * p.images + image) * p.T * p.dq_row + head * p.dq_head + own_column
        fresh = True  # the chunk's first tile of keys finds nothing to add to
        while first_key < end:
            k_at = int32(buffer * BUFFER)
            all_place = int32(me.base_place + k_at // CHUNK)
            k, k_ninth = (
                int32(all_place + me.own_at // CHUNK),
                int32(all_place + me.own_ninth_at // CHUNK),
            )
            clear_accumulators(gradients_0)
            clear_accumulators(gradients_1)
            consumer_wait(rings.keys, buffer, k_parity)
            first = int32(0)
            while first < p.T:
                at = int32(STAGES_AT + stage * STAGE)
                q = int32(me.base_place + at // CHUNK)
                tile = AttentionRoundQueries(
                    q,
                    int32(q + QUERIES * ROW // CHUNK),
                    barrier_at(rings.statistics, stage),
                    parity,
                    int32(at + STATISTICS + (me.lane & 3) * 8),
                )
                consumer_wait(rings.queries, stage, parity)
                add_keys(r, gradients_0, k, k_ninth, tile, me.zeros, shared, me.c, me.ds_at, True)
                if me.elected and owed:
                    tma_store_wait_read_0()
                    consumer_release(rings.keys, buffer ^ 1)
                owed = False
                add_keys(
                    r,
                    gradients_1,
                    int32(k + ROWS * ROW // CHUNK),
                    int32(k_ninth + ROWS),
                    tile,
                    me.zeros,
                    shared,
                    me.c,
                    int32(me.ds_at + ROWS * DS_ROW),
                    False,
                )
                write_dq_tile(
                    r, me, all_place, rings.queries, stage, dq_out, out_at, first, fresh, p
                )
                stage, parity = advance(rings.queries, stage, parity)
                first = int32(first + QUERIES)

            tile_at, ninth_at = stash_keys(
                shared, base, me, gradients_0, gradients_1, k_at, p.scale
            )
            row = int32(first_key + me.number * CONSUMER_KEYS)
            if me.elected and row < p.T:
                column = int32(head * p.head_step + p.part)
                write_tile(HS, tile_at, ninth_at, maps.out, maps.out_ninth, column, row, image)
                write_tile(
                    HS,
                    tile_at + uint32(TILE),
                    ninth_at + uint32(TILE),
                    maps.out,
                    maps.out_ninth,
                    int32(column + p.part),
                    row,
                    image,
                )
                tma_store_commit()
            owed = True
            buffer, k_parity = advance(rings.keys, buffer, k_parity)
            first_key = int32(first_key + KEYS)
            fresh = False
        unit = int32(unit + cuda.gridDim.x)
    if me.elected:
        tma_store_wait_0()


# The kernel ---------------------------------------------------------------------------------------


@requires("9.0a")
def backward(maps, logsumexp, dq_out, p):
    """dk and dv of dqkv, and dq in dq_out: dqkv itself, or float32. maps: `AttentionBackwardMaps`,
    p: a `Problem`."""
    shared = cuda.shared.array(0, "uint8", alignment=1024)
    barriers = cuda.shared.array(BARRIERS, "uint64")
    base = smem_u32(shared)
    rings = make_rings(base, smem_u32(barriers))
    set_up(shared, rings, maps)
    t = int32(cuda.threadIdx.x)
    if t >> 7 == 0:
        producer_registers()
        if t == 0:
            produce(maps, rings, p)
        elif t >= WARP and t < 3 * WARP:
            make_statistics(shared, logsumexp, rings, p)
    else:
        consumer_registers()
        r = AttentionRoundRegisters(
            cuda.local.array(SCORES, "float32"),
            cuda.local.array(SCORES, "float32"),
            cuda.local.array(WORDS, "uint32"),
            cuda.local.array(WORDS, "uint32"),
            cuda.local.array(DQ, "float32"),
            cuda.local.array(4, "float32"),
        )
        gradients_0 = AttentionRoundGradients(
            cuda.local.array(ACCUMULATORS, "float32"),
            cuda.local.array(4, "float32"),
            cuda.local.array(ACCUMULATORS, "float32"),
            cuda.local.array(4, "float32"),
        )
        gradients_1 = AttentionRoundGradients(
            cuda.local.array(ACCUMULATORS, "float32"),
            cuda.local.array(4, "float32"),
            cuda.local.array(ACCUMULATORS, "float32"),
            cuda.local.array(4, "float32"),
        )
        consume(shared, base, r, gradients_0, gradients_1, rings, maps, dq_out, p)


backward_kernels_v5 = Variants(
    (32, 64, 72),
    lambda size: specialise(
        backward,
        name=f"flash_attention_backward_kernel_v5_{size}",
        launch_bounds=(THREADS, 1),
        HS=size,
    ),
)


def launch_backward(dy, qkv, y, logsumexp, dqkv, dq, HS, problem, multiprocessors):
    """dk and dv of dqkv (B, T, 3C), and dq in the flat array `dq`; y (B, T, C) and logsumexp (B,
    heads, T) as usual.

    dq: dqkv's own (dq_row 3C, dq_head head_step) where one tile has all keys; else float32 (chunks,
        B, T, heads, HS), dq_row heads · HS, dq_head HS, for backward.add_chunks_kernel
    problem: `Problem`; its chunks and chunk_tiles as `choose_chunks` gives them for tiles of KEYS
    """
    kernel = in_bfloat16(backward_kernels_v5[HS], qkv.dtype)
    launch(
        kernel,
        min(problem.units, multiprocessors),
        THREADS,
        AttentionBackwardMaps(
            *maps_of(qkv, HS, QUERIES),
            *maps_of(qkv, HS, KEYS),
            *maps_of(dy, HS, QUERIES),
            *maps_of(y, HS, QUERIES),
            *maps_of(dqkv, HS, CONSUMER_KEYS),
        ),
        logsumexp.reshape(-1),
        dq,
        problem,
        shared=shared_bytes(HS),
    )
