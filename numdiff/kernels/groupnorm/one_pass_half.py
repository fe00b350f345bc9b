"""GroupNorm's backward in one pass, float16, by warps of sixteen channels: sums without meetings, counting apart.

WHAT IS NEW, AND WHY IT PAYS
    In the one-pass backward for any tile (one_pass.py) nothing travels for half of the time. Here:
    Sums meet once. A warp has 16 channels of 16 pixels, two threads each, and a thread 16 sums of its own: in four
    steps threads exchange halves of what they have, 8 + 4 + 2 + 1 shuffles, and lane n is left with the warp's sum
    number n: of g · xhat for lanes 0 to 15, of g for the others. Each warp then adds the sums of all warps for itself
    and gets its averages by shuffles: one barrier instead of three, and 2 KiB of shared memory where the threads' sums
    took 32. Where groups do not divide 16, a tile is as many sixteens (`parts`) as whole groups make, and a second
    barrier joins those groups that lie across.
    Everything stays. With that room 64×64 pixels of x and dy leave only an eighth over, which is kept in registers
    (`near` turns of a thread, one or two): nothing is read twice, and nothing is asked for late.
    Counting is a warp's own work. Each part has a last warp without pixels: it writes the part's sums, counts them, and
    if it is the last of all samples' adds these up, lane n column n, while the other warps write dx. Nobody waits.
    The residual comes to the L2 cache behind x and dy, which takes no registers, and is asked for four turns at once.
    dx is two products: g · scale + (x · slope + offset), where slope and offset contain both averages and the mean.
    From sm_90 on up to eight blocks, a cluster, share a tile's pixels where one has no room for them: after the barrier
    each leaves its sums where the others read them (clusters.py).
LAUNCH
    grid (C / tile, B, blocks of a cluster); block parts · (team + 1) warps, those with pixels first, of each turn's 16
    pixels one after the other for all parts. Dynamic shared memory: 128 bytes for each warp with pixels, 128 more for
    each of several parts, then the pixels. 96 registers: five warps in each quarter of a multiprocessor.
DETERMINISM, ACCURACY, COST, SOURCE
    as one_pass.py
READ NEXT
    clusters.py.
"""
from ...device import afresh, cuda, float32, int32, uint32
from ...device.approximate import reciprocal
from ...device.async_copy import cp_async_commit, cp_async_wait
from ...device.cluster import cluster_address, cluster_sync, cluster_sync_relaxed, load_cluster_4
from ...device.mbarrier import smem_u32
from ..common import divide
from .vectors import (
    PARTS,
    VECTOR,
    WARP,
    WARP_BITS,
    WORDS,
    add8,
    by_sign,
    clear,
    copy8,
    fence,
    fetch8,
    find_groups,
    gradient8,
    lanes_sum,
    load8,
    locate,
    numbers8,
    one_of,
    prefetch_l2,
    store8,
    words8,
)

PART = 16  # channels: 32 bytes of a pixel, as memory delivers them
PIXELS = 16  # of a warp: two threads each
MOST = 640  # threads: with the 96 registers that each needs, a multiprocessor has room for 20 warps
NEAR = 2  # turns that registers may keep
EVERYBODY = 0xFFFFFFFF


@cuda.jit(device=True, forceinline=True)
def accumulate(value, d, total_gx, total_g):
    for k in range(VECTOR):
        total_gx[k] += d[k] * value[k]
        total_g[k] += d[k]


@cuda.jit(device=True, forceinline=True)
def halve(values, count, bit, lane):
    """values[0 … count/2 - 1]: the half of `values` that lanes with this `bit` keep, of this lane and its partner."""
    side, half = -int32(lane & bit), count // 2
    for k in range(half):
        mine = by_sign(side, values[k], values[half + k])
        other = by_sign(side, values[half + k], values[k])
        values[k] = mine + cuda.shfl_xor_sync(EVERYBODY, other, bit)


@cuda.jit(device=True, forceinline=True)
def warp_sum(total_gx, total_g, lane):
    """Lane n: the warp's sum number n; lanes of even and odd number bring channels 0 to 7 and 8 to 15."""
    side = -int32(lane & 16)
    for k in range(VECTOR):
        mine = by_sign(side, total_gx[k], total_g[k])
        other = by_sign(side, total_g[k], total_gx[k])
        total_gx[k] = mine + cuda.shfl_xor_sync(EVERYBODY, other, 16)
    halve(total_gx, 8, 8, lane)
    halve(total_gx, 4, 4, lane)
    halve(total_gx, 2, 2, lane)
    column = int32((lane & 16) + VECTOR * (lane & 1) + ((lane >> 1) & 7))
    return column, total_gx[0]


@cuda.jit(device=True, forceinline=True)
def ask(residual, p, P, rows, i, step, before_0, before_1, before_2, before_3):
    """For the residual of a thread's next four pixels. All at once: ptxas has one thing to wait for for all of them."""
    if p < P:
        fetch8(residual, i, before_0)
    if p + rows < P:
        fetch8(residual, i + step, before_1)
    if p + 2 * rows < P:
        fetch8(residual, i + 2 * step, before_2)
    if p + 3 * rows < P:
        fetch8(residual, i + 3 * step, before_3)


@cuda.jit(device=True, forceinline=True)
def finish8(dx, i, value, d, scales, slopes, offsets, before, adds):
    """dx of one pixel."""
    for k in range(VECTOR):
        d[k] = d[k] * scales[k] + (value[k] * slopes[k] + offsets[k])
    if adds:
        add8(dx, before, d)
    store8(dx, i, d)


@cuda.jit(device=True, forceinline=True)
def add_samples(totals, dweight, dbias, channel, is_bias, C, B):
    """One column: dweight or dbias of `channel` += the sums over the samples of `totals` (2, B, C)."""
    part = cuda.local.array(16, float32)
    at, b = int32(B * C + channel if is_bias else channel), int32(0)
    total = dbias[channel] if is_bias else dweight[channel]
    while b + 16 <= B:  # sixteen at once: each takes its time
        for k in range(16):
            part[k] = totals[at + k * C]
        for k in range(8):
            part[k] += part[k + 8]
        for k in range(4):
            part[k] += part[k + 4]
        total += (part[0] + part[2]) + (part[1] + part[3])
        b, at = int32(b + 16), int32(at + 16 * C)
    while b < B:
        total += totals[at]
        b, at = int32(b + 1), int32(at + C)
    if is_bias:
        dbias[channel] = total
    else:
        dweight[channel] = total


@cuda.jit(device=True, forceinline=True)
def locate_pixels(clusters, c, row, b, P, C, seam, rows):
    """`locate` for a row of the pixels that this block of a cluster has."""
    if not clusters:
        return locate(c, row, b, P, C, seam, rows)
    mine = afresh(P)  # so that nothing of this is kept
    return locate(c, int32(row + mine * cuda.blockIdx.z), b, int32(mine * cuda.gridDim.z), C, seam, rows)


@cuda.jit(device=True, forceinline=True)
def sum_of_blocks(address, lane, blocks):
    """Number `lane` of the 32 at a shared address of each block of the cluster, added in their order."""
    total = float32(0)
    address += uint32(16 * (lane >> 2))
    for rank in range(0, blocks, 2):  # two at once: each is several hundred cycles away
        a0, a1, a2, a3 = load_cluster_4(cluster_address(address, uint32(rank)))
        b0, b1, b2, b3 = load_cluster_4(cluster_address(address, uint32(rank + 1)))
        odd, high = -int32(lane & 1), -int32(lane & 2)
        a = by_sign(high, by_sign(odd, a0, a1), by_sign(odd, a2, a3))
        total = (total + a) + by_sign(high, by_sign(odd, b0, b1), by_sign(odd, b2, b3))
    return total


CLUSTERS = False  # in clusters.py's copy of the kernel: True


@cuda.jit(launch_bounds=MOST)
def groupnorm_backward_sixteen(dy, x, x_2, weight, bias, mean, rstd, residual, residual_2, dx, dx_2, totals, dweight,
                               dbias, counters, P, C, seam, width, parts, rows, ring, share, near, activate, adds):
    """As groupnorm_backward_kernel_v3. parts: of the tile, sixteen channels each; rows: pixels of a turn, 16 for each
    warp of a part; near: turns that registers keep, then P is a multiple of the rows; P: pixels of a block."""
    sums = cuda.shared.array(0, float32, alignment=128)
    kept = cuda.shared.array(0, x.dtype.type, alignment=128)
    value = cuda.local.array(VECTOR, float32)
    d = cuda.local.array(VECTOR, float32)
    total_gx = cuda.local.array(VECTOR, float32)
    total_g = cuda.local.array(VECTOR, float32)
    means = cuda.local.array(VECTOR, float32)
    scales = cuda.local.array(VECTOR, float32)
    shifts = cuda.local.array(VECTOR, float32)
    x_0 = cuda.local.array(WORDS, uint32)
    x_1 = cuda.local.array(WORDS, uint32)
    d_0 = cuda.local.array(WORDS, uint32)
    d_1 = cuda.local.array(WORDS, uint32)
    before_0 = cuda.local.array(WORDS, uint32)
    before_1 = cuda.local.array(WORDS, uint32)
    before_2 = cuda.local.array(WORDS, uint32)
    before_3 = cuda.local.array(WORDS, uint32)
    group = cuda.local.array(VECTOR, int32)
    t, team = int32(cuda.threadIdx.x), int32(rows >> 4)  # the warps of a part that have pixels
    lane, warp, warps, threads = int32(t & (WARP - 1)), int32(t >> WARP_BITS), int32(team * parts), 2 * rows * parts
    of_team, part = divide(warp, parts)
    row, in_part = int32(16 * of_team + (lane >> 1)), int32(VECTOR * (lane & 1))
    first_channel = int32((cuda.blockIdx.x * parts + part) * PART)
    c, b, B = int32(first_channel + in_part), int32(cuda.blockIdx.y), int32(cuda.gridDim.y)
    beyond, first, step = locate_pixels(CLUSTERS, c, row, b, P, C, seam, rows)
    _, first_dy, step_dy = locate_pixels(CLUSTERS, c, row, b, P, C, C, rows)
    half, turn = int32(VECTOR * threads), int32(2 * VECTOR * threads)  # in `kept`: from x to dy, to the next pixel
    own, own_row = int32(ring + VECTOR * t), int32(row + near * rows)

    if warp < warps:
        part_x = one_of(beyond, x, x_2)
        if near > 0:
            fetch8(part_x, first, x_0)
            fetch8(dy, first_dy, d_0)
        if near > 1:
            fetch8(part_x, first + step, x_1)
            fetch8(dy, first_dy + step_dy, d_1)
        p, at, i, i_dy = own_row, own, first + near * step, first_dy + near * step_dy
        for copies in range(PARTS):
            end = int32(min(near * rows + (copies + 1) * share, P))
            while p < end:
                copy8(kept, at, part_x, i)
                copy8(kept, at + half, dy, i_dy)
                p, at, i, i_dy = int32(p + rows), int32(at + turn), i + step, i_dy + step_dy
            cp_async_commit()
        if adds and (t & 1) == 0:  # both threads of a pixel have the same 32 bytes
            p, i, before_dx = row, first, one_of(beyond, residual, residual_2)
            while p < P:
                prefetch_l2(before_dx, i)
                p, i = int32(p + rows), i + step

    statistics = int32(b * divide(C, width)[0])
    find_groups(c, width, group)
    load8(weight, c, scales)
    load8(bias, c, shifts)
    for k in range(VECTOR):
        means[k] = mean[statistics + group[k]]
        scales[k] *= rstd[statistics + group[k]]

    if warp < warps:
        clear(total_gx)
        clear(total_g)
        if near > 0:
            numbers8(x, x_0, value)
            numbers8(x, d_0, d)
            gradient8(value, d, means, scales, shifts, activate)
            accumulate(value, d, total_gx, total_g)
            words8(x, d, d_0)
        if near > 1:
            numbers8(x, x_1, value)
            numbers8(x, d_1, d)
            gradient8(value, d, means, scales, shifts, activate)
            accumulate(value, d, total_gx, total_g)
            words8(x, d, d_1)
        p, at, end = own_row, own, int32(near * rows)
        for _ in range(PARTS):
            cp_async_commit()  # an empty group, so that PARTS of them may be left whichever part it is
            cp_async_wait(PARTS)
            end = int32(min(end + share, P))
            while p < end:
                load8(kept, at, value)
                load8(kept, at + half, d)
                gradient8(value, d, means, scales, shifts, activate)
                if activate:
                    store8(kept, at + half, d)
                accumulate(value, d, total_gx, total_g)
                p, at = int32(p + rows), int32(at + turn)
        column, total = warp_sum(total_gx, total_g, lane)
        sums[WARP * warp + column] = total
        # again: kept, they would take six registers
        beyond, first, step = locate_pixels(CLUSTERS, afresh(c), row, b, P, C, seam, rows)
        if adds:
            ask(one_of(beyond, residual, residual_2), row, P, rows, first, step, before_0, before_1, before_2, before_3)
    is_bias, channel = lane >= PART, int32(first_channel + (lane & (PART - 1)))  # of sum number `lane`
    column_group = divide(channel, width)[0]
    column_weight, r = weight[channel], rstd[statistics + column_group]
    cuda.syncthreads()

    total, w = float32(0), part
    while w + 3 * parts < warps:
        s0, s1, s2, s3 = (sums[WARP * w + lane], sums[WARP * (w + parts) + lane], sums[WARP * (w + 2 * parts) + lane],
                          sums[WARP * (w + 3 * parts) + lane])
        total += (s0 + s1) + (s2 + s3)
        w = int32(w + 4 * parts)
    while w < warps:
        total += sums[WARP * w + lane]
        w = int32(w + parts)
    if CLUSTERS:
        mine = int32(WARP * (warps + part) + (2 * PART * parts if parts > 1 else 0))
        if warp >= warps:
            sums[mine + lane] = total
        cluster_sync()
        total = sum_of_blocks(smem_u32(sums) + uint32(4 * mine), lane, int32(cuda.gridDim.z))
        cluster_sync_relaxed()  # nobody reads any more
    if not is_bias:
        total *= r  # xhat is rstd times what x is beside its mean
    average = total * column_weight
    if parts == 1:
        average = lanes_sum(average, width)
    else:  # groups lie across parts
        columns = int32(WARP * warps + (PART * parts if is_bias else 0) - cuda.blockIdx.x * PART * parts)
        if warp >= warps:
            sums[columns + channel] = average
        cuda.syncthreads()
        average = float32(0)
        for k in range(width):
            average += sums[columns + column_group * width + k]
    average *= r * reciprocal(float32((P * cuda.gridDim.z if CLUSTERS else P) * width))
    if not is_bias:
        average *= r

    if warp >= warps:
        if CLUSTERS and cuda.blockIdx.z > 0:  # the cluster's first block counts for all
            return
        totals[(B + b if is_bias else b) * C + channel] = total
        before_me = int32(0)
        cuda.syncwarp()
        if lane == 0:
            fence()  # what the warp has written is seen by whoever finds it counted
            before_me = int32(cuda.atomic.inc(counters, first_channel >> 4, uint32(B - 1)))
            fence()  # nothing that is read from here on is older than the count
        if cuda.shfl_sync(EVERYBODY, before_me, 0) == B - 1:
            cuda.syncwarp()
            add_samples(totals, dweight, dbias, channel, is_bias, C, B)
    else:
        for k in range(VECTOR):
            slope = cuda.shfl_sync(EVERYBODY, average, in_part + k)
            total_gx[k] = -slope
            total_g[k] = means[k] * slope - cuda.shfl_sync(EVERYBODY, average, PART + in_part + k)
        beyond, first, step = locate_pixels(CLUSTERS, afresh(c), row, b, P, C, seam, rows)
        p, at, i, part_dx = row, int32(own - near * turn), first, one_of(beyond, dx, dx_2)
        before_dx = one_of(beyond, residual, residual_2)
        while p < P:  # four pixels
            if p < near * rows:
                numbers8(x, x_0, value)
                numbers8(x, d_0, d)
            else:
                load8(kept, at, value)
                load8(kept, at + half, d)
            finish8(part_dx, i, value, d, scales, total_gx, total_g, before_0, adds)
            p, at, i = int32(p + rows), int32(at + turn), i + step
            if p < P:
                if p < near * rows:
                    numbers8(x, x_1, value)
                    numbers8(x, d_1, d)
                else:
                    load8(kept, at, value)
                    load8(kept, at + half, d)
                finish8(part_dx, i, value, d, scales, total_gx, total_g, before_1, adds)
            p, at, i = int32(p + rows), int32(at + turn), i + step
            if p < P:
                load8(kept, at, value)
                load8(kept, at + half, d)
                finish8(part_dx, i, value, d, scales, total_gx, total_g, before_2, adds)
            p, at, i = int32(p + rows), int32(at + turn), i + step
            if p < P:
                load8(kept, at, value)
                load8(kept, at + half, d)
                finish8(part_dx, i, value, d, scales, total_gx, total_g, before_3, adds)
            p, at, i = int32(p + rows), int32(at + turn), i + step
            if adds:
                ask(before_dx, p, P, rows, i, step, before_0, before_1, before_2, before_3)
