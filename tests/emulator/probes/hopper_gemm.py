"""The GEMM kernel of the project's first experiment, unchanged but for its imports: C = A·Bᵀ in
float16, TMA and wgmma."""

# ruff: noqa: B007
import numpy as np
from numba.cuda import types

from numdiff.device import cuda
from numdiff.device.mbarrier import (
    fence_barrier_init,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    smem_u32,
)
from numdiff.device.tma import tma_load_2d
from numdiff.device.wgmma import (
    make_wgmma,
    make_wgmma_wait,
    setmaxnreg_dec_40,
    setmaxnreg_inc_232,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait_1,
)

u32, u64, i32 = np.uint32, np.uint64, np.int32
BM, BK, THREADS = 128, 64, 384


@cuda.jit(device=True, forceinline=True)
def smem_descriptor(address):
    """wgmma descriptor of a K-major tile of 64 halves a row, 128-byte swizzle, 1024 bytes between
    8-row groups."""
    return (
        u64((address & u32(0x3FFFF)) >> u32(4))
        | (u64(1) << u64(16))
        | (u64(64) << u64(32))
        | (u64(1) << u64(62))
    )


def make_gemm(BN, STAGES):
    wgmma, wgmma_wait_all = make_wgmma(BN), make_wgmma_wait(BN)
    R, BARRIERS = BN // 2, 2 * STAGES
    A_BYTES, B_BYTES = BM * BK * 2, BN * BK * 2
    STAGE = A_BYTES + B_BYTES
    GROUP = 16  # row blocks that share a sweep of column blocks, so that B stays in L2

    def gemm(map_a, map_b, c, k):
        tiles = cuda.shared.array(0, types.uint8, alignment=1024)
        barriers = cuda.shared.array(BARRIERS, types.uint64)  # full[STAGES], empty[STAGES]
        base, full0 = smem_u32(tiles), smem_u32(barriers)
        empty0 = full0 + u32(8 * STAGES)
        tid = cuda.threadIdx.x
        warpgroup = tid // 128
        if tid == 0:
            for s in range(STAGES):
                mbarrier_init(full0 + u32(8 * s), u32(1))
                mbarrier_init(empty0 + u32(8 * s), u32(2))
            fence_barrier_init()
        cuda.syncthreads()
        columns = c.shape[1] // BN
        per_group = GROUP * columns
        inside = cuda.blockIdx.x % per_group
        m0 = (cuda.blockIdx.x // per_group * GROUP + inside % GROUP) * BM
        n0 = (inside // GROUP) * BN
        k_tiles = k // BK
        if warpgroup == 0:
            setmaxnreg_dec_40()
            if tid == 0:
                stage, parity = 0, 1
                for kt in range(k_tiles):
                    full = full0 + u32(8) * u32(stage)
                    mbarrier_wait(empty0 + u32(8) * u32(stage), u32(parity))
                    mbarrier_expect_tx(full, u32(STAGE))
                    a = base + u32(stage) * u32(STAGE)
                    tma_load_2d(a, map_a, full, u32(kt * BK), u32(m0))
                    tma_load_2d(a + u32(A_BYTES), map_b, full, u32(kt * BK), u32(n0))
                    stage += 1
                    if stage == STAGES:
                        stage, parity = 0, parity ^ 1
        else:
            setmaxnreg_inc_232()
            acc = cuda.local.array(R, types.float32)
            row_bytes = u32(warpgroup - 1) * u32(64 * BK * 2)
            mbarrier_wait(full0, u32(0))
            da, db = smem_descriptor(base + row_bytes), smem_descriptor(base + u32(A_BYTES))
            wgmma_fence()
            wgmma(acc, da, db, i32(0))  # first k-step: D = A·B, so acc needs no zeroing
            wgmma(acc, da + u64(2), db + u64(2), i32(1))
            wgmma(acc, da + u64(4), db + u64(4), i32(1))
            wgmma(acc, da + u64(6), db + u64(6), i32(1))
            wgmma_commit()
            stage, parity = 1, 0
            for kt in range(1, k_tiles):
                mbarrier_wait(full0 + u32(8) * u32(stage), u32(parity))
                a = base + u32(stage) * u32(STAGE)
                da, db = smem_descriptor(a + row_bytes), smem_descriptor(a + u32(A_BYTES))
                wgmma_fence()
                wgmma(acc, da, db, i32(1))
                wgmma(acc, da + u64(2), db + u64(2), i32(1))
                wgmma(acc, da + u64(4), db + u64(4), i32(1))
                wgmma(acc, da + u64(6), db + u64(6), i32(1))
                wgmma_commit()
                wgmma_wait_1()  # the previous stage has been read: hand it back
                if tid % 128 == 0:
                    previous = stage - 1 if stage > 0 else STAGES - 1
                    mbarrier_arrive(empty0 + u32(8) * u32(previous))
                stage += 1
                if stage == STAGES:
                    stage, parity = 0, parity ^ 1
            wgmma_wait_all(acc)
            warp, lane = (tid % 128) // 32, tid % 32
            row = m0 + (warpgroup - 1) * 64 + warp * 16 + lane // 4
            col = n0 + (lane % 4) * 2
            for j in range(R // 4):
                c[row, col + j * 8] = types.float16(acc[4 * j])
                c[row, col + j * 8 + 1] = types.float16(acc[4 * j + 1])
                c[row + 8, col + j * 8] = types.float16(acc[4 * j + 2])
                c[row + 8, col + j * 8 + 1] = types.float16(acc[4 * j + 3])

    return gemm, STAGES * STAGE


SIGNATURE = types.void(types.uint8[::1], types.uint8[::1], types.float16[:, ::1], types.int64)
