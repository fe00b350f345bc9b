"""The convolution kernel of the project's first experiment, unchanged but for its imports: 3 × 3,
channels last, float16.

An implicit GEMM: for each filter tap its A tile is one shifted TMA box of the input; rows and
columns outside are zeros.
"""

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
from numdiff.device.tensor_core import pack_half2
from numdiff.device.tma import tma_load_2d, tma_load_4d
from numdiff.device.wgmma import (
    make_wgmma,
    make_wgmma_wait,
    setmaxnreg_dec_40,
    setmaxnreg_inc_232,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait_1,
)

from .hopper_gemm import BK, BM, smem_descriptor

u32, u64, i32 = np.uint32, np.uint64, np.int32


def make_conv3x3(BN, STAGES):
    wgmma, wgmma_wait_all = make_wgmma(BN), make_wgmma_wait(BN)
    R, BARRIERS = BN // 2, 2 * STAGES
    A_BYTES, B_BYTES = BM * BK * 2, BN * BK * 2
    STAGE = A_BYTES + B_BYTES

    def conv3x3(map_x, map_w, y, height, width, channels):
        """y: uint32 view (pixels, C_out / 2); map_w: weight as (C_out, 9 * C_in), K-major."""
        tiles = cuda.shared.array(0, types.uint8, alignment=1024)
        barriers = cuda.shared.array(BARRIERS, types.uint64)
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
        n0, m0 = cuda.blockIdx.x * BN, cuda.blockIdx.y * BM
        channel_blocks = channels // BK
        if warpgroup == 0:
            setmaxnreg_dec_40()
            if tid == 0:
                image = m0 // (height * width)
                h0 = (m0 % (height * width)) // width
                stage, parity = 0, 1
                for r in range(3):
                    for s in range(3):
                        for cb in range(channel_blocks):
                            full = full0 + u32(8) * u32(stage)
                            mbarrier_wait(empty0 + u32(8) * u32(stage), u32(parity))
                            mbarrier_expect_tx(full, u32(STAGE))
                            a = base + u32(stage) * u32(STAGE)
                            tma_load_4d(
                                a,
                                map_x,
                                full,
                                u32(cb * BK),
                                u32(s - 1),
                                u32(h0 + r - 1),
                                u32(image),
                            )
                            tma_load_2d(
                                a + u32(A_BYTES),
                                map_w,
                                full,
                                u32((r * 3 + s) * channels + cb * BK),
                                u32(n0),
                            )
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
            wgmma(acc, da, db, i32(0))
            wgmma(acc, da + u64(2), db + u64(2), i32(1))
            wgmma(acc, da + u64(4), db + u64(4), i32(1))
            wgmma(acc, da + u64(6), db + u64(6), i32(1))
            wgmma_commit()
            stage, parity = 1, 0
            for kt in range(1, 9 * channel_blocks):
                mbarrier_wait(full0 + u32(8) * u32(stage), u32(parity))
                a = base + u32(stage) * u32(STAGE)
                da, db = smem_descriptor(a + row_bytes), smem_descriptor(a + u32(A_BYTES))
                wgmma_fence()
                wgmma(acc, da, db, i32(1))
                wgmma(acc, da + u64(2), db + u64(2), i32(1))
                wgmma(acc, da + u64(4), db + u64(4), i32(1))
                wgmma(acc, da + u64(6), db + u64(6), i32(1))
                wgmma_commit()
                wgmma_wait_1()
                if tid % 128 == 0:
                    previous = stage - 1 if stage > 0 else STAGES - 1
                    mbarrier_arrive(empty0 + u32(8) * u32(previous))
                stage += 1
                if stage == STAGES:
                    stage, parity = 0, parity ^ 1
            wgmma_wait_all(acc)
            warp, lane = (tid % 128) // 32, tid % 32
            row = m0 + (warpgroup - 1) * 64 + warp * 16 + lane // 4
            col = n0 // 2 + lane % 4
            for j in range(R // 4):
                y[row, col + j * 4] = pack_half2(acc[4 * j], acc[4 * j + 1])
                y[row + 8, col + j * 4] = pack_half2(acc[4 * j + 2], acc[4 * j + 3])

    return conv3x3, STAGES * STAGE


SIGNATURE = types.void(
    types.uint8[::1], types.uint8[::1], types.uint32[:, ::1], types.int64, types.int64, types.int64
)


def reference(x, w):
    """Float64 NHWC 3x3 convolution, padding 1; w is (C_out, 3, 3, C_in)."""
    n, h, wd, _ = x.shape
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return sum(padded[:, r : r + h, s : s + wd] @ w[:, r, s].T for r in range(3) for s in range(3))
