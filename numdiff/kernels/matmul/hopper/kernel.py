"""Matmul in float16, rung 6: Hopper's wgmma, fed by TMA (sm_90a).

MATHEMATICS
    C = alpha · A·B + bias + residual, or what an epilogue makes of A·B: GELU, SwiGLU, their derivatives, a gate, a
    layer's scale; and the sums of A's rows
SHAPES
    A (M, K), B (K, N)    float16 or bfloat16, each with its neighbours in memory along k, or along m or n
    bias (N,)             float32
    residual, C (M, N)    like A; or C float32, and no residual
WHAT IS NEW, AND WHY IT PAYS
    wgmma: four warps issue one instruction that multiplies 64 × 16 by 16 × up to 256, both straight from shared memory.
        Rung 5 spends an instruction on every 16 × 8 × 16 and loads its operands into registers
        first.
    TMA: one thread requests a whole tile from the tensor memory accelerator. No thread computes an
        address, no register holds data in flight, and elements outside a matrix arrive as zeros.
    Warp specialisation: warpgroup 0 only loads tiles, warpgroups 1 and 2 only multiply. Between
        them are STAGES pairs of tiles in shared memory, with two mbarriers for each: `full`, on
        which TMA counts bytes, and `empty`, at which its readers arrive afterwards: the two
        consumers, and the warps that add up rows.
    Persistence: there are as many blocks as multiprocessors, and each takes every gridDim-th tile
        of C. While the consumers write one tile, the producer already fetches the first stages of
        the next.
A BLOCK'S TILE is 128 × BN, one half of the rows for each consumer, which holds them as BN / 2
    float32 a thread. BN is 256, 192, 128 or 64. A step of 64 along K brings (128 + BN) · 128 bytes
    for 128 · BN · 64 multiply-adds: the wider the tile, the fewer bytes from the L2 cache, which is
    what limits this kernel; the narrower, the better a small product fills the GPU. ../choice.py
    chooses.
ROLES  (384 threads: three warpgroups)
    thread 0 loads tiles of A and B          `produce`: every transpose, pairs of blocks, batches
    warps 1, 2 overlap the products          `sum_rows`, of A: a bias's gradient; or `exchange`, by a thread of each:
                                             tiles that an epilogue needs, such as u for GELU', and
                                             its results
    warpgroups 1, 2 multiply, and write      `consume`: `main_loop`, then an epilogue
WHAT ONE TEXT SERVES, each explained where it is done
    sums that are long, in slices            work.py
    transposes, two matrices as one, pairs of blocks, batches    producer.py
    results that are symmetric               symmetric_epilogue.py
    weights at equal distances in memory     ../stack.py
    several products in one launch           group_schedule.py, ../group.py
    operands of 8 bits                       ../hopper_fp8.py
LAUNCH
    grid min(units, multiprocessors); 384 threads; STAGES · (128 + BN) · 128 + 32768 bytes of dynamic shared memory, or
    65536 with TWO_TILES_STAGES stages. The kernel is compiled for 168 registers a thread; the producer gives back all
    but 40, the consumers take 232 (56 and 224 where the kernel can make row sums).
NEEDS
    sm_90a; all contiguous extents multiples of 8, because TMA needs rows that are multiples of 16 bytes; otherwise M, N
    and K are free, but for a batch.
DETERMINISM
    each output is summed in the order of k by one warpgroup; slices in their order.
COST
    ../reference.py
SOURCE
    PTX ISA, sections 9.7.15 (wgmma) and 9.7.9.27 (cp.async.bulk.tensor).
READ NEXT
    layout.py
"""

import itertools

from ....device import cuda, int32, uint32
from ....device.cluster import cluster_sync
from ....device.eight import array_of
from ....device.limits import WARPGROUP
from ....device.mbarrier import fence_barrier_init, mbarrier_init, smem_u32
from ....device.pipeline import barrier_at, init_ring, make_ring
from ....device.requires import requires
from ....device.specialise import Constant, Variants, specialise
from ....device.tma import tma_prefetch
from ....device.wgmma import make_setmaxnreg
from .consumer import consume
from .exchange import exchange
from .group_schedule import PRODUCTS, walk_of
from .layout import (
    ACTIVATIONS,
    BARRIERS,
    BIASES,
    BLOCKS,
    BN,
    BOX_BYTES,
    EIGHT,
    EXCHANGES,
    GELU,
    GELU_AGAIN_GRADIENT,
    GROUPED,
    HALF,
    LAYER_SCALE,
    PAIRED,
    RELEASES,
    ROW_SUMS,
    STAGE_BYTES,
    STAGE_COUNT,
    STAGES,
    SWIGLU,
    SYMMETRIC_WIDTHS,
    THREADS,
    TILES_OF_BLOCK,
)
from .producer import produce
from .row_sums import sum_rows
from .staging import Staging

PAIR_WIDTHS, PAIR_ACTIVATIONS = (256, 192), ("gelu", "gelu_gradient", "gelu_again_gradient")
# of a producer's and a consumer's thread, by ROW_SUMS
REGISTERS = {False: (40, 232), True: (56, 224)}
give_registers = Constant(lambda ROW_SUMS: make_setmaxnreg(REGISTERS[ROW_SUMS][0], False))
take_registers = Constant(lambda ROW_SUMS: make_setmaxnreg(REGISTERS[ROW_SUMS][1], True))


# Set-up -------------------------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def set_up(ring, loaded, ready, maps, epilogue):
    """Make all barriers, and bring the tensor maps to TMA's cache; by one thread."""
    init_ring(ring, 1, RELEASES + 2 if ROW_SUMS and epilogue.has_row_sums else RELEASES)
    if EXCHANGES:
        for tile in range(4):
            mbarrier_init(barrier_at(loaded, tile), uint32(1))
            mbarrier_init(barrier_at(ready, tile), uint32(4))  # a lane of each warp
    fence_barrier_init()
    if GROUPED:
        for product in range(PRODUCTS):
            tma_prefetch(array_of(int32(product), maps.a))
            tma_prefetch(array_of(int32(product), maps.b))
        return
    tma_prefetch(maps.a)
    tma_prefetch(maps.b)
    if HALF:
        tma_prefetch(maps.c)
    if GELU or LAYER_SCALE or SWIGLU or EXCHANGES:
        tma_prefetch(maps.d)
    tma_prefetch(maps.second)


@cuda.jit(device=True, forceinline=True)
def make_staging(consumer, tiles, base, biases, loaded, ready):
    """The `Staging` of a consumer."""
    return Staging(
        tiles,
        base,
        int32(STAGE_COUNT * STAGE_BYTES + consumer * 2 * TILES_OF_BLOCK * BOX_BYTES),
        biases,
        int32(consumer * BN),
        barrier_at(loaded, 2 * consumer),
        barrier_at(ready, 2 * consumer),
    )


# The kernel ---------------------------------------------------------------------------------------


@requires("9.0a")
def gemm(maps, arrays, work, epilogue):
    """maps: `Maps`, arrays: `Arrays`, work: `Work`, epilogue: `Epilogue`."""
    tiles = cuda.shared.array(0, "uint8", alignment=1024)
    barriers = cuda.shared.array(BARRIERS, "uint64")
    biases = cuda.shared.array(BIASES, "float32")
    base = smem_u32(tiles)
    ring = make_ring(base, STAGE_BYTES, STAGE_COUNT, smem_u32(barriers))
    loaded, ready = (
        barrier_at(ring.full, 2 * STAGE_COUNT),
        barrier_at(ring.full, 2 * STAGE_COUNT + 4),
    )
    t = int32(cuda.threadIdx.x)
    if t == 0:
        set_up(ring, loaded, ready, maps, epilogue)
    if PAIRED:
        cluster_sync()
        unit, blocks = int32(cuda.blockIdx.x // 2), int32(cuda.gridDim.x // 2)
    else:
        cuda.syncthreads()
        unit, blocks = int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
    if GROUPED:
        unit, stride = walk_of(unit, blocks, work)
    else:
        stride = int32(work.units if unit < work.alone else int32(blocks - work.alone))
    warpgroup = int32(t // WARPGROUP)
    if warpgroup == 0:
        give_registers()
        if t == 0:
            produce(ring, unit, stride, maps, work)
        elif EXCHANGES:
            if t == 32:
                exchange(
                    PAIRED,
                    TILES_OF_BLOCK,
                    GELU_AGAIN_GRADIENT,
                    EIGHT,
                    0,
                    BLOCKS,
                    unit,
                    stride,
                    make_staging(0, tiles, base, biases, loaded, ready),
                    maps,
                    work,
                )
            elif t == 64:
                exchange(
                    PAIRED,
                    TILES_OF_BLOCK,
                    GELU_AGAIN_GRADIENT,
                    EIGHT,
                    1,
                    BLOCKS,
                    unit,
                    stride,
                    make_staging(1, tiles, base, biases, loaded, ready),
                    maps,
                    work,
                )
        elif ROW_SUMS:
            if epilogue.has_row_sums and t >= 32 and t < 96:
                sum_rows(ring, tiles, unit, stride, arrays, work, epilogue.has_row_sums)
    else:
        take_registers()
        staging = make_staging(int32(warpgroup - 1), tiles, base, biases, loaded, ready)
        consume(ring, staging, unit, stride, maps, arrays, work, epilogue)


# Its variants -------------------------------------------------------------------------------------


def kernel_for(
    BN,
    a_along_m,
    b_along_n,
    half,
    activation="",
    batched=False,
    symmetric=False,
    fp8=False,
    promoted=False,
    eight=False,
    module=None,
    paired=False,
    stacked=False,
    grouped=False,
):
    """The kernel for one width of tile, one case of transposes and one kind of result.

    activation: "", or a key of `ACTIVATIONS`: what happens in its epilogue
    batched: for several products; symmetric: for several that are; paired: for pairs of blocks;
        stacked: for weights at equal distances; grouped: for several products of different sizes
    fp8, promoted, eight, module: of ../hopper_fp8.py
    """
    case = f"{'t' if a_along_m else 'n'}{'n' if b_along_n else 't'}{'_fp8' * fp8}{'_promoted' * promoted}"
    kind = activation or (
        "symmetric" if symmetric else "batch" if batched else "half" if half else "float"
    )
    kind += "_eight" * eight + "_pair" * paired + "_stack" * stacked + "_group" * grouped
    return specialise(
        gemm,
        name=f"gemm_hopper_{BN}_{case}_{kind}",
        module=module,
        PAIRED=paired,
        BATCHED=batched,
        SYMMETRIC=symmetric,
        STACKED=stacked,
        GROUPED=grouped,
        FP8=fp8,
        PROMOTED=promoted,
        EIGHT=eight,
        launch_bounds=(THREADS, 1),  # setmaxnreg needs both numbers
        BN=BN,
        A_ALONG_M=a_along_m,
        B_ALONG_N=b_along_n,
        HALF=half,
        **{name.upper(): activation == name for name in ACTIVATIONS},
    )


BOTH = (False, True)
KERNELS = Variants(itertools.product(STAGES, BOTH, BOTH, BOTH), lambda key: kernel_for(*key))
BATCH_KERNELS = Variants(
    itertools.product(STAGES, BOTH, BOTH), lambda key: kernel_for(*key, True, batched=True)
)
SYMMETRIC_KERNELS = Variants(
    [(BN, across, across) for BN in SYMMETRIC_WIDTHS for across in BOTH],
    lambda key: kernel_for(*key, True, batched=True, symmetric=True),
)
ACTIVATION_KERNELS = Variants(
    [(BN, name) for name, widths in ACTIVATIONS.items() for BN in widths],
    lambda key: kernel_for(key[0], False, key[1].endswith("_gradient"), True, key[1]),
)
# of pairs those that were measured to be faster somewhere (docs/log/kernels.md), with the widths
# that are
PAIR_KERNELS = Variants(
    [(BN, False, across, True) for BN in PAIR_WIDTHS for across in BOTH],
    lambda key: kernel_for(*key, paired=True),
)
PAIR_ACTIVATION_KERNELS = Variants(
    itertools.product(PAIR_WIDTHS, PAIR_ACTIVATIONS),
    lambda key: kernel_for(key[0], False, key[1].endswith("_gradient"), True, key[1], paired=True),
)
