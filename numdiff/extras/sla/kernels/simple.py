"""Sparse-linear attention, rung 1: a block of 64 threads has a block of 64 rows, one a thread.

WHAT IT DOES
    prepare     for each block of keys: φ(k) in shared memory, H and z from it; the mean of q, the sum of k
    forward     for each block of queries: its critical blocks pass by in shared memory, and every thread takes its row
                through them (../simple.py's online softmax). Then S = (total − the critical ones'
                H) / N takes their place, and a row's linear part is two products of a vector and a
                matrix.
    backward    queries: all that needs no keys, and A and a of the block; then dq over the list of critical blocks;
                then, a block of keys at a time, dk and dv over the list of queries for which it is critical, and the
                linear part's from the total of A without theirs.
WHY IT IS SLOW
    as ../simple.py: a thread's rows are in local memory, and every multiply-add waits for two
    loads.
LAUNCH
    grid (N, heads, B), blocks of 64 threads; static shared memory 2 · 64 · HS numbers and a few:
    17, 34, 38 KiB.
DETERMINISM
    one thread sums over keys, queries or blocks in their order.
SOURCE
    reference.py.
READ NEXT
    tiles_half.py
"""

import math

from ....device import cuda, float32
from ....kernels.attention.heads import LOWEST
from .choice import BLOCK, RUN, head_number, rows_of_block

LEAST_SHARE = float32(2.0**-10)  # reference.FLOOR


@cuda.jit(device=True)
def score(q, tile, row, HS):
    """The dot product of a thread's own row and a row of a tile."""
    total = float32(0)
    for d in range(HS):
        total += q[d] * tile[row * HS + d]
    return total


@cuda.jit(device=True)
def add_scaled(o, factor, tile, row, HS):
    """o += factor · a row of a tile."""
    for d in range(HS):
        o[d] += factor * tile[row * HS + d]


@cuda.jit(device=True)
def start_of_head(problem):
    """The start of a head's q in qkv."""
    return cuda.blockIdx.z * problem.T * problem.width + cuda.blockIdx.y * problem.head_step


@cuda.jit(device=True)
def load_tile(tile, at, x, start, step, rows, HS):
    """tile[at …] = a block's rows from x[start], `step` apart; zeros from row `rows` on."""
    for i in range(cuda.threadIdx.x, BLOCK * HS, BLOCK):
        tile[at + i] = float32(x[start + i // HS * step + i % HS]) if i // HS < rows else float32(0)


@cuda.jit(device=True)
def load_row(row, x, at, exists, HS):
    for d in range(HS):
        row[d] = float32(x[at + d]) if exists else float32(0)


@cuda.jit(device=True)
def row_dot(a, b, HS):
    total = float32(0)
    for d in range(HS):
        total += a[d] * b[d]
    return total


@cuda.jit(device=True)
def sum_column(x, at, step, rows):
    """The sum of a block's column from x[at], in the order of choice.py."""
    total = float32(0)
    pair = float32(0)
    for run in range(BLOCK // RUN):
        part = float32(0)
        for r in range(run * RUN, min(rows, run * RUN + RUN)):
            part += float32(x[at + r * step])
        if run % 2:
            total += pair + part
        pair = part
    return total


@cuda.jit(device=True)
def feature_of(phi, x, HS):
    """phi = softmax of a row x."""
    m = x[0]
    for d in range(1, HS):
        m = max(m, x[d])
    total = float32(0)
    for d in range(HS):
        phi[d] = math.exp(x[d] - m)
        total += phi[d]
    for d in range(HS):
        phi[d] /= total


@cuda.jit(device=True)
def feature_gradient(dphi, phi, HS):
    """dphi becomes the gradient of the row whose feature is phi."""
    mean = row_dot(dphi, phi, HS)
    for d in range(HS):
        dphi[d] = phi[d] * (dphi[d] - mean)


@cuda.jit(device=True)
def rest_of(total, at, parts, parts_at, size, element, listed, list_at, count, N):
    """An element of (total − the listed blocks' parts) / N."""
    left = total[at + element]
    for n in range(count):
        left -= float32(parts[parts_at + listed[list_at + n] * size + element])
    return left / float32(N)


@cuda.jit(device=True)
def denominator(phi, small, z_total, at, N, HS):
    """r = 1 / (φ·Z) with Z in `small`; negative where that is less than LEAST_SHARE of φ·(all of
    z)."""
    left, whole = float32(0), float32(0)
    for c in range(HS):
        left += phi[c] * small[c]
        whole += phi[c] * z_total[at + c]
    floor = LEAST_SHARE * (whole / float32(N))
    return float32(1) / left if left >= floor else float32(-1) / floor


@cuda.jit(device=True)
def row_times(out, factor, row, matrix, at, HS):
    """out = factor · row · matrix."""
    for d in range(HS):
        out[d] = float32(0)
    for c in range(HS):
        for d in range(HS):
            out[d] += factor * row[c] * float32(matrix[at + c * HS + d])


@cuda.jit(device=True)
def column_products(out, at, tile, left, right, rows, HS):
    """out[at + c · HS + d] = Σ over a tile's rows of column c of the one, d of the other, from
    `left` and `right`."""
    for i in range(cuda.threadIdx.x, HS * HS, BLOCK):
        total = float32(0)
        for r in range(rows):
            total += tile[left + r * HS + i // HS] * tile[right + r * HS + i % HS]
        out[at + i] = total


def make_kernels(HS):
    """(prepare, forward, queries, dq, dkv) for one head size."""
    TILE, PAIR, SIZE = BLOCK * HS, 2 * BLOCK * HS, HS * HS

    def sla_prepare_kernel_v1(qkv, q_mean, H, z, problem):
        tile = cuda.shared.array(PAIR, float32)
        row = cuda.local.array(HS, float32)
        phi = cuda.local.array(HS, float32)
        T, width, j, t = problem.T, problem.width, cuda.blockIdx.x, cuda.threadIdx.x
        block, rows = head_number() * problem.N + j, rows_of_block(j, T)
        start = start_of_head(problem) + j * BLOCK * width
        for c in range(t, HS, BLOCK):
            q_mean[block * HS + c] = sum_column(qkv, start + c, width, rows) / float32(rows)
            z[block * 2 * HS + HS + c] = sum_column(qkv, start + problem.part + c, width, rows)
        load_row(row, qkv, start + problem.part + t * width, t < rows, HS)
        feature_of(phi, row, HS)
        for d in range(HS):
            tile[t * HS + d] = phi[d]
        load_tile(tile, TILE, qkv, start + 2 * problem.part, width, rows, HS)
        cuda.syncthreads()
        column_products(H, block * SIZE, tile, 0, TILE, rows, HS)
        for c in range(t, HS, BLOCK):
            total = float32(0)
            for r in range(rows):
                total += tile[r * HS + c]
            z[block * 2 * HS + c] = total

    def sla_forward_kernel_v1(
        qkv, lists, sums, totals, layer, y, logsumexp, r, S, Z, problem, keeps
    ):
        tile = cuda.shared.array(PAIR, float32)
        small = cuda.shared.array(HS, float32)
        q = cuda.local.array(HS, float32)
        o = cuda.local.array(HS, float32)
        linear = cuda.local.array(HS, float32)
        T, width, N, count = problem.T, problem.width, problem.N, problem.count
        excluded = count if problem.rest > 0 else 0  # listed blocks that the linear part leaves out
        head, i, t = head_number(), cuda.blockIdx.x, cuda.threadIdx.x
        start, query = start_of_head(problem), i * BLOCK + t
        inside, block = query < T, head * N + i
        load_row(q, qkv, start + query * width, inside, HS)
        for d in range(HS):
            o[d] = float32(0)
        m, l = LOWEST, float32(0)
        for n in range(count):
            j = lists[block * count + n]
            rows, at = rows_of_block(j, T), start + problem.part + j * BLOCK * width
            cuda.syncthreads()  # the tiles of the block before are free
            load_tile(tile, 0, qkv, at, width, rows, HS)
            load_tile(tile, TILE, qkv, at + problem.part, width, rows, HS)
            cuda.syncthreads()
            for key in range(rows):
                s = problem.scale * score(q, tile, key, HS)
                if s > m:  # what is there was measured against the old maximum
                    shrink = math.exp(m - s)
                    l *= shrink
                    for d in range(HS):
                        o[d] *= shrink
                    m = s
                p = math.exp(s - m)
                l += p
                add_scaled(o, p, tile[TILE:], key, HS)
        cuda.syncthreads()
        for e in range(t, SIZE, BLOCK):
            tile[e] = rest_of(
                totals[0],
                head * SIZE,
                sums[0],
                head * N * SIZE,
                SIZE,
                e,
                lists,
                block * count,
                excluded,
                N,
            )
            if keeps:
                S[block * SIZE + e] = tile[e]
        for c in range(t, HS, BLOCK):
            small[c] = rest_of(
                totals[1],
                head * 2 * HS,
                sums[1],
                head * N * 2 * HS,
                2 * HS,
                c,
                lists,
                block * count,
                excluded,
                N,
            )
            if keeps:
                Z[block * HS + c] = small[c]
        cuda.syncthreads()
        if inside:
            feature_of(q, q, HS)
            weight = (
                denominator(q, small, totals[1], head * 2 * HS, N, HS)
                if excluded < N
                else float32(0)
            )
            row_times(linear, abs(weight), q, tile, 0, HS)
            to = ((cuda.blockIdx.z * T + query) * cuda.gridDim.y + cuda.blockIdx.y) * HS
            for d in range(HS):
                o[d] /= l
                for c in range(HS):
                    o[d] += linear[c] * float32(layer[0][d * HS + c])
                y[to + d] = o[d] + layer[1][d]
            if keeps:
                logsumexp[head * T + query], r[head * T + query] = m + math.log(l), weight

    def sla_queries_kernel_v1(dy, qkv, y, layer, kept, dqkv, sums, A, a, out, problem):
        r, S, Z = kept
        tile = cuda.shared.array(PAIR, float32)
        means = cuda.shared.array(BLOCK, float32)
        phi = cuda.local.array(HS, float32)
        g = cuda.local.array(HS, float32)
        dO = cuda.local.array(HS, float32)
        linear = cuda.local.array(HS, float32)
        T, i, t = problem.T, cuda.blockIdx.x, cuda.threadIdx.x
        head, query = head_number(), i * BLOCK + t
        inside, rows, block = query < T, rows_of_block(i, T), head * problem.N + i
        at = start_of_head(problem) + query * problem.width
        of_y = ((cuda.blockIdx.z * T + query) * cuda.gridDim.y + cuda.blockIdx.y) * HS
        load_row(phi, qkv, at, inside, HS)
        feature_of(phi, phi, HS)
        load_row(g, dy, of_y, inside, HS)
        row_times(dO, float32(1), g, layer[0], 0, HS)
        weight = r[head * T + query] if inside else float32(0)
        row_times(linear, abs(weight), phi, S, block * SIZE, HS)
        D = row_dot(dO, linear, HS)
        if inside:
            total = -D
            for d in range(HS):
                total += g[d] * (float32(y[of_y + d]) - layer[1][d])
            sums[head * T + query] = total
        if weight < float32(0):
            D = float32(0)
        weight = abs(weight)
        means[t] = D
        for d in range(HS):
            tile[t * HS + d], tile[TILE + t * HS + d] = weight * phi[d], dO[d]
        cuda.syncthreads()
        column_products(A, block * SIZE, tile, 0, TILE, rows, HS)
        for c in range(t, HS, BLOCK):
            total = float32(0)
            for row in range(rows):
                total += tile[row * HS + c] * means[row]
            a[block * HS + c] = total
        cuda.syncthreads()
        for d in range(HS):
            tile[t * HS + d], tile[TILE + t * HS + d] = g[d], linear[d]
        cuda.syncthreads()
        column_products(out[0], block * SIZE, tile, 0, TILE, rows, HS)
        for c in range(t, HS, BLOCK):
            total = float32(0)
            for row in range(rows):
                total += tile[row * HS + c]
            out[1][block * HS + c] = total
        if inside:  # `linear` becomes dφ(q)
            for c in range(HS):
                total = -D * Z[block * HS + c]
                for d in range(HS):
                    total += dO[d] * float32(S[block * SIZE + c * HS + d])
                linear[c] = weight * total
            feature_gradient(linear, phi, HS)
            for c in range(HS):
                dqkv[at + c] = linear[c]

    def sla_dq_kernel_v1(dy, qkv, lists, logsumexp, sums, dqkv, problem):
        tile = cuda.shared.array(PAIR, float32)
        q = cuda.local.array(HS, float32)
        g = cuda.local.array(HS, float32)
        dq = cuda.local.array(HS, float32)
        T, width, count, t = problem.T, problem.width, problem.count, cuda.threadIdx.x
        head, start, query = head_number(), start_of_head(problem), cuda.blockIdx.x * BLOCK + t
        inside = query < T
        load_row(q, qkv, start + query * width, inside, HS)
        load_row(
            g,
            dy,
            ((cuda.blockIdx.z * T + query) * cuda.gridDim.y + cuda.blockIdx.y) * HS,
            inside,
            HS,
        )
        L = logsumexp[head * T + query] if inside else float32(0)
        mean = sums[head * T + query] if inside else float32(0)
        for d in range(HS):
            dq[d] = float32(0)
        for n in range(count):
            j = lists[(head * problem.N + cuda.blockIdx.x) * count + n]
            rows, at = rows_of_block(j, T), start + problem.part + j * BLOCK * width
            cuda.syncthreads()
            load_tile(tile, 0, qkv, at, width, rows, HS)
            load_tile(tile, TILE, qkv, at + problem.part, width, rows, HS)
            cuda.syncthreads()
            for key in range(rows):
                p = math.exp(min(problem.scale * score(q, tile, key, HS) - L, float32(0)))
                add_scaled(dq, p * (score(g, tile[TILE:], key, HS) - mean), tile, key, HS)
        if inside:
            for d in range(HS):
                to = start + query * width + d
                dqkv[to] = float32(dqkv[to]) + problem.scale * dq[d]

    def sla_dkv_kernel_v1(dy, qkv, lists, counts, given, totals, dqkv, problem):
        tile = cuda.shared.array(PAIR, float32)
        small = cuda.shared.array(HS, float32)
        k = cuda.local.array(HS, float32)
        v = cuda.local.array(HS, float32)
        dk = cuda.local.array(HS, float32)
        dv = cuda.local.array(HS, float32)
        T, width, N, t, heads = (
            problem.T,
            problem.width,
            problem.N,
            cuda.threadIdx.x,
            cuda.gridDim.y,
        )
        head, start, key = head_number(), start_of_head(problem), cuda.blockIdx.x * BLOCK + t
        block = head * N + cuda.blockIdx.x
        inside, at = key < T, start + problem.part + key * width
        load_row(k, qkv, at, inside, HS)
        load_row(v, qkv, at + problem.part, inside, HS)
        for d in range(HS):
            dk[d], dv[d] = float32(0), float32(0)
        for n in range(counts[block]):
            i = lists[block * N + n]
            rows = rows_of_block(i, T)
            cuda.syncthreads()
            load_tile(tile, 0, qkv, start + i * BLOCK * width, width, rows, HS)
            load_tile(
                tile,
                TILE,
                dy,
                ((cuda.blockIdx.z * T + i * BLOCK) * heads + cuda.blockIdx.y) * HS,
                heads * HS,
                rows,
                HS,
            )
            cuda.syncthreads()
            for query in range(rows):
                row = head * T + i * BLOCK + query
                p = math.exp(
                    min(
                        problem.scale * score(k, tile, query, HS) - given.logsumexp[row], float32(0)
                    )
                )
                add_scaled(dv, p, tile[TILE:], query, HS)
                add_scaled(
                    dk, p * (score(v, tile[TILE:], query, HS) - given.sums[row]), tile, query, HS
                )
        cuda.syncthreads()
        excluded = counts[block] if problem.rest > 0 else 0
        for e in range(t, SIZE, BLOCK):
            tile[e] = rest_of(
                totals[0],
                head * SIZE,
                given.A,
                head * N * SIZE,
                SIZE,
                e,
                lists,
                block * N,
                excluded,
                N,
            )
        for c in range(t, HS, BLOCK):
            small[c] = rest_of(
                totals[1], head * HS, given.a, head * N * HS, HS, c, lists, block * N, excluded, N
            )
        cuda.syncthreads()
        add_linear(k, v, dk, dv, tile, small, problem.scale, HS)
        if inside:
            for d in range(HS):
                dqkv[at + d], dqkv[at + problem.part + d] = dk[d], dv[d]

    made = (
        sla_prepare_kernel_v1,
        sla_forward_kernel_v1,
        sla_queries_kernel_v1,
        sla_dq_kernel_v1,
        sla_dkv_kernel_v1,
    )
    for kernel in made:
        kernel.__name__ = f"{kernel.__name__}_{HS}"
    return [cuda.jit(kernel) for kernel in made]


@cuda.jit(device=True)
def add_linear(k, v, dk, dv, R, rho, scale, HS):
    """dk = scale · dk + the gradient that dφ(k) = v Rᵀ − ρ gives, and dv += φ(k) R; k becomes φ(k)
    and v dφ(k)."""
    feature_of(k, k, HS)
    mean = float32(0)
    for c in range(HS):
        total = -rho[c]
        for d in range(HS):
            total += v[d] * R[c * HS + d]
            dv[d] += k[c] * R[c * HS + d]
        mean += k[c] * total
        dk[c] = scale * dk[c] + k[c] * total
    for c in range(HS):
        dk[c] -= mean * k[c]
