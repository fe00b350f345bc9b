"""GroupNorm, rung 3: one kernel a pass, which keeps what it normalises in shared memory.

WHAT IS NEW, AND WHY IT PAYS
    A block owns whole groups of one sample with all their pixels, so nothing is left for other kernels to join: forward
    is 1 launch where version 2 has 3, backward 2 for 4, and each that waits for the one before costs about 3 µs. What
    is read stays in shared memory for the later sweeps over it. Copies by cp.async need no registers on the way, so
    all of the block's reading is under way at once, and sums begin while the rest still travels.
    SiLU is four instructions besides a product: 2ˣ and 1/x as the hardware has them.
TILE
    `tile` neighbouring channels (whole groups, a multiple of 4) with all pixels, as a ring of STAGES chunks of pixels.
    If four chunks are all, each is read once. If not, a sweep starts with the chunks that the one before left behind
    and reads the others again, from the L2 cache most likely, while it works on these.
    A thread keeps four channels; it reads what it copied itself, so that only sums need barriers.
LAUNCH
    grid (C / tile, B), block (tile / 4, rows): whole warps, up to 512 threads. Dynamic shared memory: the sums of all
    threads (up to 12 or 24 KiB), then the ring. `choose_plan` estimates the time of every tile and takes the best.
DETERMINISM
    no atomics: a thread adds its pixels, a warp the threads' sums, in an order that the plan decides, and so the shape,
    the type and the size of the device.
ACCURACY
    The mean first, then squares about the mean. Arithmetic is float32 for arrays of float16 too. Beside `math.exp`
    and a rounded division SiLU differs by at most 2⁻²¹ of its value where |z| < 16.
COST
    forward: x read and y written once; backward: x and dy read and dx written once. Roof: memory bandwidth.
SOURCE
    groupnorm.py for the mathematics; PTX ISA, sections 9.7.3.14 (rcp.approx.ftz.f32) and 9.7.9.25.3 (cp.async).
READ NEXT
    layernorm.py
"""
import functools
import math
import sys
from dataclasses import dataclass

import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from ..device import cuda, empty, empty_like, float32, int32, launch, load4, store4
from ..device.async_copy import cp_async_commit, cp_async_wait
from ..device.inline_ptx import F32, GLOBAL, I32, I64, SHARED, element_pointer, emit, require_contiguous, statement
from ..emulator import twin
from ..emulator.group_copies import start_copy
from .flash_attention.exponential import power_of_two
from .flash_attention.launcher import MULTIPROCESSORS, SHARED_LIMIT, multiprocessors_of, shared_limit
from .layernorm import warp_sum
from .reduce import add_column_sums

WARP = 32
THREADS = 512  # at most: 16 warps hide a multiprocessor's latencies where its shared memory is filled by one block
FEW_THREADS = 256  # where several blocks find room
STAGES = 4  # chunks of the ring
PENDING = STAGES - 1  # chunks that may be on their way while the oldest is used
LOG2_E = float32(math.log2(math.e))
RESERVED = 1 << 10  # bytes of shared memory that the system takes for each block
REGISTERS = 65536  # of a multiprocessor
FORWARD_REGISTERS, BACKWARD_REGISTERS = 64, 96  # of a thread, as compiled for sm_80 and sm_90a, rounded up

# What the estimates count with, in bytes a nanosecond and nanoseconds
MEMORY = 3000
L2 = 5500
L2_BYTES = 40 << 20  # what is read again must have come within so many bytes
ONE_MULTIPROCESSOR = 45  # that one of them can take, however idle the others are
LAUNCH = 3000  # from the end of one kernel to the start of the next, filling and draining included
BLOCK_LATENCY = 2000  # first bytes, barriers, last bytes: not hidden where all blocks run at the same time
TURN = 50  # of a thread, for one of its pixels: arithmetic that does not run while memory is waited for
SECTOR = 32  # bytes that memory delivers together


# Intrinsics -----------------------------------------------------------------------------------------------------------

@intrinsic
def copy4(typingctx, target, to, source, index):
    """Start a copy of four elements, source[index …] to the shared array's target[to …]; both multiples of 4."""
    require_contiguous("copy4", source)
    nbytes = 4 * source.dtype.bitwidth // 8
    kind = "cg" if nbytes == 16 else "ca"

    def codegen(context, builder, sig, args):
        addresses = [builder.addrspacecast(pointer, ir.PointerType(pointer.type.pointee, space)) for space, pointer in (
            (SHARED, element_pointer(context, builder, sig.args[0], args[0], args[1])),
            (GLOBAL, element_pointer(context, builder, sig.args[2], args[2], args[3])))]
        operands = [builder.ptrtoint(a, kind) for a, kind in zip(addresses, (I32, I64), strict=True)]
        emit(builder, f"cp.async.{kind}.shared.global [$0], [$1], {nbytes};", (), operands, ordered=True)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64), codegen


@twin(copy4)
def _copy4(machine, target, to, source, index):
    size = source.dtype.itemsize
    start_copy(machine, machine.shared_address(target) + int(to) * size, source, index, 4 * size, 4 * size,
               sys._getframe(2))


@intrinsic
def reciprocal(typingctx, x):
    """1/x of a float32, to one unit in the last place; 0 where that is below 2⁻¹²⁶."""
    return types.float32(types.float32), statement("rcp.approx.ftz.f32 $0, $1;", [F32])


@twin(reciprocal)
def _reciprocal(machine, x):
    with np.errstate(divide="ignore"):
        result = np.float32(1) / np.float32(x)
    return result if not abs(result) < np.float32(2.0**-126) else np.float32(0)


# Device functions -----------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def sigmoid(z):
    return reciprocal(float32(1) + power_of_two(-LOG2_E * z))


@cuda.jit(device=True, forceinline=True)
def affine(xhat, weight, bias, activate):
    z = xhat * weight + bias
    return z * sigmoid(z) if activate else z


@cuda.jit(device=True, forceinline=True)
def affine_gradient(dy, xhat, weight, bias, activate):
    """Gradient of z = xhat · weight + bias."""
    if activate:
        z = xhat * weight + bias
        s = sigmoid(z)
        return dy * s * (float32(1) + z * (float32(1) - s))
    return dy


@cuda.jit(device=True, forceinline=True)
def wrapped(q, chunks):
    return int32(q - chunks) if q >= chunks else int32(q)


@cuda.jit(device=True, forceinline=True)
def refill(kept, at, source, start, j, q, chunks, chunk, row, rows, P, C):
    """At turn j, over chunk q: start this thread's copies of the chunk whose turn is STAGES later, if there is one.

    kept, at: its first place in the stage; source, start: its four channels of pixel 0
    """
    if j + STAGES < chunks:
        first = wrapped(q + STAGES, chunks) * chunk
        p, end = int32(first + row), int32(min(first + chunk, P))
        i, step, turn = start + p * C, int32(rows * C), int32(rows * 4 * cuda.blockDim.x)
        while p < end:
            copy4(kept, at, source, i)
            p, at, i = int32(p + rows), int32(at + turn), i + step


@cuda.jit(device=True, forceinline=True)
def rows_sum(sums, first, pitch, rows, lane):
    """The sum of a column of the threads' sums, in all lanes of the warp."""
    total = float32(0)
    while lane < rows:
        total += sums[first + lane * pitch]
        lane += WARP
    return warp_sum(total)


@cuda.jit(device=True, forceinline=True)
def group_averages(sums, pitch, rows, averages, groups, width, m, warp, warps, lane):
    """averages[group] from the threads' sums of each of its channels; all threads call it, and may read the result."""
    cuda.syncthreads()  # all have brought their sums
    group = warp
    while group < groups:
        total = float32(0)
        r = lane
        while r < rows:
            for c in range(width):
                total += sums[r * pitch + group * width + c]
            r += WARP
        total = warp_sum(total)
        if lane == 0:
            sums[averages + group] = total / m
        group += warps
    cuda.syncthreads()


@cuda.jit(device=True, forceinline=True)
def of_groups(values, first, c, width):
    """The values of the groups that channels c to c + 3 belong to."""
    return (values[first + c // width], values[first + (c + 1) // width], values[first + (c + 2) // width],
            values[first + (c + 3) // width])


# Forward --------------------------------------------------------------------------------------------------------------
# `kept` sees the same memory as `sums`, from element `ring` on. A sweep s visits chunk (s · (chunks - STAGES) + j) mod
# chunks at its turn j, in stage (s · chunks + j) mod STAGES: its first STAGES chunks are those that are still there.

@cuda.jit(launch_bounds=THREADS)
def groupnorm_forward_kernel_v3(x, weight, bias, y, mean, rstd, P, C, width, pitch, ring, chunk, chunks, eps, activate):
    sums = cuda.shared.array(0, float32, alignment=128)
    kept = cuda.shared.array(0, x.dtype.type, alignment=128)
    lanes, rows = int32(cuda.blockDim.x), int32(cuda.blockDim.y)
    row, tile = int32(cuda.threadIdx.y), int32(4 * cuda.blockDim.x)
    t = int32(row * lanes + cuda.threadIdx.x)
    lane, warp, warps = int32(t % WARP), int32(t // WARP), int32(lanes * rows // WARP)
    in_tile = int32(4 * cuda.threadIdx.x)
    c = int32(cuda.blockIdx.x * tile + in_tile)
    b, groups = cuda.blockIdx.y, int32(tile // width)
    start = b * P * C + c  # of pixel 0
    own = int32(ring + row * tile + in_tile)  # this thread's place in a stage
    turn, step = int32(rows * tile), int32(rows * C)  # from a thread's pixel to its next: in a stage, in the array
    averages = rows * pitch  # of the groups: what follows the threads' sums

    for j in range(STAGES):
        refill(kept, int32(own + j * chunk * tile), x, start, j - STAGES, j - STAGES, chunks, chunk, row, rows, P, C)
        cp_async_commit()
    m = float32(P * width)
    visit, q = int32(0), int32(0)

    s0 = s1 = s2 = s3 = float32(0)
    for j in range(chunks):
        cp_async_wait(PENDING)
        stage = int32(own + (visit & PENDING) * chunk * tile)
        at, p, end = stage, int32(q * chunk + row), int32(min(q * chunk + chunk, P))
        while p < end:
            x0, x1, x2, x3 = load4(kept, at)
            s0 += x0
            s1 += x1
            s2 += x2
            s3 += x3
            p, at = int32(p + rows), int32(at + turn)
        refill(kept, stage, x, start, j, q, chunks, chunk, row, rows, P, C)
        cp_async_commit()
        visit, q = int32(visit + 1), wrapped(q + 1, chunks)
    store4(sums, row * pitch + in_tile, s0, s1, s2, s3)
    group_averages(sums, pitch, rows, averages, groups, width, m, warp, warps, lane)
    m0, m1, m2, m3 = of_groups(sums, averages, in_tile, width)

    s0 = s1 = s2 = s3 = float32(0)
    q = int32(chunks - STAGES)
    for j in range(chunks):
        cp_async_wait(PENDING)
        stage = int32(own + (visit & PENDING) * chunk * tile)
        at, p, end = stage, int32(q * chunk + row), int32(min(q * chunk + chunk, P))
        while p < end:
            x0, x1, x2, x3 = load4(kept, at)
            x0, x1, x2, x3 = x0 - m0, x1 - m1, x2 - m2, x3 - m3
            s0 += x0 * x0
            s1 += x1 * x1
            s2 += x2 * x2
            s3 += x3 * x3
            p, at = int32(p + rows), int32(at + turn)
        refill(kept, stage, x, start, j, q, chunks, chunk, row, rows, P, C)
        cp_async_commit()
        visit, q = int32(visit + 1), wrapped(q + 1, chunks)
    store4(sums, row * pitch + in_tile, s0, s1, s2, s3)
    group_averages(sums, pitch, rows, averages + groups, groups, width, m, warp, warps, lane)
    r0, r1, r2, r3 = of_groups(sums, averages + groups, in_tile, width)
    r0, r1 = float32(1) / math.sqrt(r0 + eps), float32(1) / math.sqrt(r1 + eps)
    r2, r3 = float32(1) / math.sqrt(r2 + eps), float32(1) / math.sqrt(r3 + eps)
    group = t
    while group < groups:
        i = b * (C // width) + cuda.blockIdx.x * groups + group
        mean[i] = sums[averages + group]
        rstd[i] = float32(1) / math.sqrt(sums[averages + groups + group] + eps)
        group += lanes * rows

    w0, w1, w2, w3 = load4(weight, c)
    v0, v1, v2, v3 = load4(bias, c)
    w0, w1, w2, w3 = w0 * r0, w1 * r1, w2 * r2, w3 * r3
    q = wrapped(2 * (chunks - STAGES), chunks)
    for j in range(chunks):
        cp_async_wait(PENDING)
        stage = int32(own + (visit & PENDING) * chunk * tile)
        at, p, end = stage, int32(q * chunk + row), int32(min(q * chunk + chunk, P))
        i = start + p * C
        while p < end:
            x0, x1, x2, x3 = load4(kept, at)
            store4(y, i, affine(x0 - m0, w0, v0, activate), affine(x1 - m1, w1, v1, activate),
                   affine(x2 - m2, w2, v2, activate), affine(x3 - m3, w3, v3, activate))
            p, at, i = int32(p + rows), int32(at + turn), i + step
        refill(kept, stage, x, start, j, q, chunks, chunk, row, rows, P, C)
        cp_async_commit()
        visit, q = int32(visit + 1), wrapped(q + 1, chunks)


# Backward -------------------------------------------------------------------------------------------------------------
# A stage holds a chunk of x, then one of dy. g is computed twice, which is cheaper than keeping it in float32.

@cuda.jit(launch_bounds=THREADS)
def groupnorm_backward_kernel_v3(dy, x, weight, bias, mean, rstd, dx, totals, P, C, width, pitch, ring, chunk, chunks,
                                 activate):
    """dx, and the channel sums (2, B, C) of g · xhat and g."""
    sums = cuda.shared.array(0, float32, alignment=128)
    kept = cuda.shared.array(0, x.dtype.type, alignment=128)
    lanes, rows = int32(cuda.blockDim.x), int32(cuda.blockDim.y)
    row, tile = int32(cuda.threadIdx.y), int32(4 * cuda.blockDim.x)
    t = int32(row * lanes + cuda.threadIdx.x)
    lane, warp, warps = int32(t % WARP), int32(t // WARP), int32(lanes * rows // WARP)
    in_tile = int32(4 * cuda.threadIdx.x)
    c = int32(cuda.blockIdx.x * tile + in_tile)
    b, groups = cuda.blockIdx.y, int32(tile // width)
    start = b * P * C + c  # of pixel 0
    own = int32(ring + row * tile + in_tile)  # this thread's place in a stage
    turn, step = int32(rows * tile), int32(rows * C)  # from a thread's pixel to its next: in a stage, in the array
    channels = 2 * rows * pitch  # the sums of channels, 2 · tile: what follows the threads'; then averages of groups
    averages = channels + 2 * tile
    half = int32(chunk * tile)  # from x to dy in a stage

    for j in range(STAGES):
        n, stage = j - STAGES, int32(own + 2 * j * half)
        refill(kept, stage, x, start, n, n, chunks, chunk, row, rows, P, C)
        refill(kept, int32(stage + half), dy, start, n, n, chunks, chunk, row, rows, P, C)
        cp_async_commit()
    m0, m1, m2, m3 = of_groups(mean, b * (C // width), c, width)
    r0, r1, r2, r3 = of_groups(rstd, b * (C // width), c, width)
    w0, w1, w2, w3 = load4(weight, c)
    v0, v1, v2, v3 = load4(bias, c)
    visit, q = int32(0), int32(0)

    a0 = a1 = a2 = a3 = s0 = s1 = s2 = s3 = float32(0)
    for j in range(chunks):
        cp_async_wait(PENDING)
        stage = int32(own + (visit & PENDING) * 2 * half)
        at, p, end = stage, int32(q * chunk + row), int32(min(q * chunk + chunk, P))
        while p < end:
            x0, x1, x2, x3 = load4(kept, at)
            d0, d1, d2, d3 = load4(kept, at + half)
            x0, x1, x2, x3 = (x0 - m0) * r0, (x1 - m1) * r1, (x2 - m2) * r2, (x3 - m3) * r3
            d0, d1 = affine_gradient(d0, x0, w0, v0, activate), affine_gradient(d1, x1, w1, v1, activate)
            d2, d3 = affine_gradient(d2, x2, w2, v2, activate), affine_gradient(d3, x3, w3, v3, activate)
            a0 += d0 * x0
            a1 += d1 * x1
            a2 += d2 * x2
            a3 += d3 * x3
            s0 += d0
            s1 += d1
            s2 += d2
            s3 += d3
            p, at = int32(p + rows), int32(at + turn)
        refill(kept, stage, x, start, j, q, chunks, chunk, row, rows, P, C)
        refill(kept, int32(stage + half), dy, start, j, q, chunks, chunk, row, rows, P, C)
        cp_async_commit()
        visit, q = int32(visit + 1), wrapped(q + 1, chunks)
    store4(sums, row * pitch + in_tile, a0, a1, a2, a3)
    store4(sums, (rows + row) * pitch + in_tile, s0, s1, s2, s3)
    cuda.syncthreads()
    n = warp
    while n < tile:
        sum_gx = rows_sum(sums, n, pitch, rows, lane)
        sum_g = rows_sum(sums, rows * pitch + n, pitch, rows, lane)
        if lane == 0:
            i = b * C + cuda.blockIdx.x * tile + n
            totals[i], totals[cuda.gridDim.y * C + i] = sum_gx, sum_g
            w = weight[cuda.blockIdx.x * tile + n]
            sums[channels + n], sums[channels + tile + n] = sum_gx * w, sum_g * w
        n += warps
    cuda.syncthreads()
    n = t
    while n < 2 * groups:  # those of h · xhat, then those of h: their channels follow each other, too
        total = float32(0)
        for k in range(width):
            total += sums[channels + n * width + k]
        sums[averages + n] = total / float32(P * width)
        n += lanes * rows
    cuda.syncthreads()
    k0, k1, k2, k3 = of_groups(sums, averages, in_tile, width)
    h0, h1, h2, h3 = of_groups(sums, averages + groups, in_tile, width)

    q = int32(chunks - STAGES)
    for j in range(chunks):
        cp_async_wait(PENDING)
        stage = int32(own + (visit & PENDING) * 2 * half)
        at, p, end = stage, int32(q * chunk + row), int32(min(q * chunk + chunk, P))
        i = start + p * C
        while p < end:
            x0, x1, x2, x3 = load4(kept, at)
            d0, d1, d2, d3 = load4(kept, at + half)
            x0, x1, x2, x3 = (x0 - m0) * r0, (x1 - m1) * r1, (x2 - m2) * r2, (x3 - m3) * r3
            d0, d1 = affine_gradient(d0, x0, w0, v0, activate), affine_gradient(d1, x1, w1, v1, activate)
            d2, d3 = affine_gradient(d2, x2, w2, v2, activate), affine_gradient(d3, x3, w3, v3, activate)
            store4(dx, i, r0 * (d0 * w0 - h0 - x0 * k0), r1 * (d1 * w1 - h1 - x1 * k1),
                   r2 * (d2 * w2 - h2 - x2 * k2), r3 * (d3 * w3 - h3 - x3 * k3))
            p, at, i = int32(p + rows), int32(at + turn), i + step
        refill(kept, stage, x, start, j, q, chunks, chunk, row, rows, P, C)
        refill(kept, int32(stage + half), dy, start, j, q, chunks, chunk, row, rows, P, C)
        cp_async_commit()
        visit, q = int32(visit + 1), wrapped(q + 1, chunks)


# Which tile -----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Plan:
    """How the blocks of version 3 are cut. ns: the estimate; ring: element at which it starts; shared: bytes."""

    ns: float
    tile: int
    rows: int
    pitch: int
    ring: int
    chunk: int
    chunks: int
    shared: int


def pixel_sectors(tile, itemsize):
    """Sectors that `tile` channels of a pixel touch, on average over the tiles of an array."""
    nbytes = tile * itemsize
    starts = range(0, nbytes * SECTOR // math.gcd(nbytes, SECTOR), nbytes)
    return sum(-(-(s % SECTOR + nbytes) // SECTOR) for s in starts) / len(starts)


def make_plan(B, P, C, width, itemsize, backward, tile, threads, limit, multiprocessors):
    """The `Plan` of one tile, or None if it does not fit."""
    arrays, sweeps = (2, 2) if backward else (1, 3)
    lanes = tile // 4
    step = WARP // math.gcd(lanes, WARP)  # rows of threads that make whole warps
    if lanes * step > threads:
        return None
    rows = min(threads // (lanes * step), -(-P // step)) * step
    pitch = tile if lanes % 2 else tile + 4  # 4 times an odd number: rows begin in eight different banks
    floats = arrays * rows * pitch + 2 * tile // width + (2 * tile if backward else 0)
    ring = -(-4 * floats // 16) * 16  # bytes
    pixel = arrays * tile * itemsize
    chunk = min(-(-P // (STAGES * rows)), (limit - ring) // (STAGES * pixel * rows)) * rows
    if chunk <= 0:
        return None
    chunks = max(STAGES, -(-P // chunk))
    shared = ring + STAGES * chunk * pixel
    blocks, registers = B * (C // tile), BACKWARD_REGISTERS if backward else FORWARD_REGISTERS
    resident = min((limit + RESERVED) // (shared + RESERVED), REGISTERS // (registers * lanes * rows), 32)
    waves, running = -(-blocks // (max(resident, 1) * multiprocessors)), min(blocks, multiprocessors)
    again = arrays * (sweeps - 1) * (chunks - STAGES) / chunks  # arrays' worth of second readings
    nbytes, sectors = P * tile * itemsize, P * SECTOR * pixel_sectors(tile, itemsize)
    missed = again if running * arrays * nbytes > L2_BYTES else 0
    ns = -(-blocks // multiprocessors) * max(
        (arrays + missed + 1) * nbytes * running / MEMORY, (arrays + again + 1) * sectors * running / L2,
        (arrays + again + 1) * sectors / ONE_MULTIPROCESSOR)
    ns += waves * (BLOCK_LATENCY + -(-P // rows) * TURN)
    return Plan(LAUNCH + ns, tile, rows, pitch, ring // itemsize, chunk, chunks, shared)


@functools.cache
def choose_plan(B, P, C, width, itemsize, backward, limit=SHARED_LIMIT, multiprocessors=MULTIPROCESSORS):
    """The `Plan` with the shortest estimate (of equals the one with more blocks), or None if no tile fits."""
    unit = math.lcm(width, 4)
    tiles = [n for n in range(unit, min(C, 4 * THREADS) + 1, unit) if C % n == 0]
    plans = []
    for tile in tiles:
        for threads in (FEW_THREADS, THREADS):
            plans.append(make_plan(B, P, C, width, itemsize, backward, tile, threads, limit, multiprocessors))
    return min((p for p in plans if p is not None), key=lambda p: p.ns, default=None)


def version_2_estimate(B, P, C, itemsize, backward):
    """Nanoseconds of version 2: three launches, the second reading from L2 where all of it fits."""
    arrays, n = 2 if backward else 1, B * P * C * itemsize
    return 3 * LAUNCH + (arrays + 1 + arrays * (1 if arrays * n > L2_BYTES else 0.5)) * n / MEMORY


def plan_for(x, width, backward):
    """`choose_plan` for an array, None too where version 3 does not exist."""
    if x.shape[-1] % 4 or x.dtype not in (np.float16, np.float32) or tuple(x.backend.capability)[:2] < (8, 0):
        return None
    B, C = x.shape[0], x.shape[-1]
    return choose_plan(B, x.size // (B * C), C, width, x.dtype.itemsize, backward, shared_limit(x),
                       multiprocessors_of(x))


# Launchers ------------------------------------------------------------------------------------------------------------

def one_pass_forward(x, weight, bias, groups, eps, silu, plan):
    B, C = x.shape[0], x.shape[-1]
    y, mean, rstd = empty_like(x), empty((B, groups), np.float32, like=x), empty((B, groups), np.float32, like=x)
    launch(groupnorm_forward_kernel_v3, (C // plan.tile, B), (plan.tile // 4, plan.rows), x.reshape(-1), weight, bias,
           y.reshape(-1), mean.reshape(-1), rstd.reshape(-1), x.size // (B * C), C, C // groups, plan.pitch, plan.ring,
           plan.chunk, plan.chunks, float(eps), int(silu), shared=plan.shared)
    return y, mean, rstd


def one_pass_backward(dy, x, weight, bias, mean, rstd, dweight, dbias, groups, silu, plan):
    B, C = x.shape[0], x.shape[-1]
    dx, totals = empty_like(x), empty((2, B, C), np.float32, like=x)
    launch(groupnorm_backward_kernel_v3, (C // plan.tile, B), (plan.tile // 4, plan.rows), dy.reshape(-1),
           x.reshape(-1), weight, bias, mean.reshape(-1), rstd.reshape(-1), dx.reshape(-1), totals.reshape(-1),
           x.size // (B * C), C, C // groups, plan.pitch, plan.ring, plan.chunk, plan.chunks, int(silu),
           shared=plan.shared)
    add_column_sums(totals, dweight, dbias)
    return dx
