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
WHAT ONE TEXT SERVES: `kernel_for` gives it a main loop, the operands of the producer, a tile scheduler and an
    epilogue, each a device function or a record of such. Explained where it is done:
    sums that are long, in slices            work.py
    transposes, two matrices as one, pairs of blocks, batches    producer.py
    results that are symmetric               extras/muon/symmetric_epilogue.py
    weights at equal distances in memory     ../products.py
    several products in one launch           group_schedule.py, ../group.py
    operands of 8 bits                       extras/fp8/matmul.py
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

from ....device import cuda, device_inline, int32, uint32
from ....device.limits import WARPGROUP
from ....device.mbarrier import fence_barrier_init, mbarrier_init, smem_u32
from ....device.pipeline import barrier_at, init_ring, make_ring
from ....device.requires import requires
from ....device.specialise import Field, Variants, specialise
from ....device.wgmma import make_setmaxnreg
from .consumer import consume
from .epilogue import ACTIVATIONS, EPILOGUES
from .layout import (
    A_BYTES,
    BARRIERS,
    BIASES,
    BK,
    BN,
    ROW_SUMS,
    STAGE_COUNT,
    STAGES,
    THREADS,
    GemmShared,
    Target,
)
from .main_loop import main_loop, promoted_loop
from .producer import BATCH, GROUP, HALVES, MATRICES, STACK, produce
from .staging import make_staging
from .work import GROUPED, PAIRED, PLAIN

PAIR_WIDTHS, PAIR_ACTIVATIONS = (256, 192), ("gelu", "gelu_gradient", "gelu_again_gradient")
give_40, give_56 = make_setmaxnreg(40, False), make_setmaxnreg(56, False)
take_232, take_224 = make_setmaxnreg(232, True), make_setmaxnreg(224, True)
start, paired = Field("SCHEDULER", "start"), Field("SCHEDULER", "paired")
prefetch_maps, exchanges, assist = (
    Field("EPILOGUE", name) for name in ("prefetch_maps", "exchanges", "assist")
)


# Set-up -------------------------------------------------------------------------------------------


@device_inline
def set_up(shared, maps, epilogue):
    """Make all barriers, and bring the tensor maps to TMA's cache; by one thread."""
    releases = 4 if paired else 2  # of a stage, by the warpgroups that read it
    init_ring(shared.ring, 1, releases + 2 if ROW_SUMS and epilogue.has_row_sums else releases)
    if exchanges:
        for tile in range(4):
            mbarrier_init(barrier_at(shared.loaded, tile), uint32(1))
            mbarrier_init(barrier_at(shared.ready, tile), uint32(4))  # a lane of each warp
    fence_barrier_init()
    prefetch_maps(maps)


@device_inline
def give_registers():
    if ROW_SUMS:
        give_56()
    else:
        give_40()


@device_inline
def take_registers():
    if ROW_SUMS:
        take_224()
    else:
        take_232()


# The kernel ---------------------------------------------------------------------------------------


@requires("9.0a")
def gemm(maps, arrays, work, epilogue):
    """maps: `Maps`, arrays: `Arrays`, work: `Work`, epilogue: `Epilogue`."""
    tiles = cuda.shared.array(0, "uint8", alignment=1024)
    barriers = cuda.shared.array(BARRIERS, "uint64")
    biases = cuda.shared.array(BIASES, "float32")
    base = smem_u32(tiles)
    ring = make_ring(base, A_BYTES + BN * BK * 2, STAGE_COUNT, smem_u32(barriers))
    loaded, ready = (
        barrier_at(ring.full, 2 * STAGE_COUNT),
        barrier_at(ring.full, 2 * STAGE_COUNT + 4),
    )
    shared = GemmShared(ring, tiles, base, biases, loaded, ready)
    target = Target(int32(0), maps, arrays, work, epilogue)
    t = int32(cuda.threadIdx.x)
    if t == 0:
        set_up(shared, maps, epilogue)
    unit, walk = start(work)
    warpgroup = int32(t // WARPGROUP)
    if warpgroup == 0:
        give_registers()
        if t == 0:
            produce(ring, unit, walk, maps, work)
        else:
            assist(t, shared, unit, walk, target)
    else:
        take_registers()
        consume(ring, make_staging(int32(warpgroup - 1), shared), unit, walk, target)


# Its variants -------------------------------------------------------------------------------------


def kernel_for(
    BN,
    a_along_m,
    b_along_n,
    epilogue,
    operands=MATRICES,
    scheduler=PLAIN,
    fp8=False,
    promoted=False,
    module=None,
    parts=None,
):
    """The kernel for one width of tile and one case of transposes.

    epilogue: a key of `EPILOGUES`, or the name of `parts`, an `EpilogueParts`; operands: an
        `Operands`; scheduler: a `Scheduler`
    fp8, promoted: of extras/fp8/matmul.py; module: of another module's kernel its name
    """
    case = f"{'t' if a_along_m else 'n'}{'n' if b_along_n else 't'}{'_fp8' * fp8}{'_promoted' * promoted}"
    return specialise(
        gemm,
        name=f"gemm_hopper_{BN}_{case}_{epilogue}{'_pair' * scheduler.paired}",
        module=module,
        launch_bounds=(THREADS, 1),  # setmaxnreg needs both numbers
        BN=BN,
        A_ALONG_M=a_along_m,
        B_ALONG_N=b_along_n,
        FP8=fp8,
        MAIN_LOOP=promoted_loop if promoted else main_loop,
        OPERANDS=operands,
        SCHEDULER=scheduler,
        EPILOGUE=parts or EPILOGUES[epilogue],
    )


def activation_kernel(BN, activation, scheduler=PLAIN, **other):
    """The kernel whose epilogue is an activation."""
    operands = HALVES if activation == "swiglu" else MATRICES
    return kernel_for(
        BN, False, activation.endswith("_gradient"), activation, operands, scheduler, **other
    )


BOTH = (False, True)
KERNELS = Variants(
    itertools.product(STAGES, BOTH, BOTH, BOTH),
    lambda key: kernel_for(*key[:3], "half" if key[3] else "float"),
)
BATCH_KERNELS = Variants(
    itertools.product(STAGES, BOTH, BOTH), lambda key: kernel_for(*key, "batch", BATCH)
)
# A·Bᵀ with a float32 result, such as the scores of attention
BATCH_FLOAT_KERNELS = Variants(
    STAGES,
    lambda width: kernel_for(width, False, False, "batch_float", BATCH, parts=EPILOGUES["float"]),
)
ACTIVATION_KERNELS = Variants(
    [(BN, name) for name, widths in ACTIVATIONS.items() for BN in widths],
    lambda key: activation_kernel(*key),
)
# of pairs those that were measured to be faster somewhere (docs/log/kernels.md), with the widths
# that are
PAIR_KERNELS = Variants(
    [(BN, False, across, True) for BN in PAIR_WIDTHS for across in BOTH],
    lambda key: kernel_for(*key[:3], "half", scheduler=PAIRED),
)
PAIR_ACTIVATION_KERNELS = Variants(
    itertools.product(PAIR_WIDTHS, PAIR_ACTIVATIONS),
    lambda key: activation_kernel(*key, scheduler=PAIRED),
)
# weights at equal distances: forward, input gradient, weight gradient
STACK_KERNELS = Variants(
    [
        *itertools.product((256, 128), (False,), (False,), (True,)),
        *itertools.product((192, 128, 64), BOTH, (True,), (False,)),
    ],
    lambda key: kernel_for(*key[:3], "half_stack" if key[3] else "float_stack", STACK),
)
# the weight gradients of several products, split where they do not fill a round
GROUP_KERNELS = Variants(
    (256, 192, 128), lambda BN: kernel_for(BN, True, True, "float_group", GROUP, GROUPED)
)
