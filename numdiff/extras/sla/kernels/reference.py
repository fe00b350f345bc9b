"""Sparse-linear attention's reference in NumPy, and its cost.

MATHEMATICS, for each image and head, q k v dy (T, HS); blocks i of 64 queries, blocks j of 64 keys, N of each
    choice     P_ij = mean(q of i) · (mean(k of j) − mean(k)); the largest `count` of row i are its critical blocks C_i.
               The gradient does not go through it. choice.py has it, in an arithmetic that gives
               all engines the same.
    sparse     o_s = softmax attention of the queries of i over the keys of C_i alone (../reference.py)
    linear     φ(x) = softmax of a row over its HS channels;  H_j = Σ_t φ(k_t) v_tᵀ  and  z_j = Σ_t φ(k_t), t in block j
               S_i = (Σ_j H_j − Σ_{j in C_i} H_j) / N           Z_i likewise of z        r = 1 / (φ(q)·Z_i)
               o_l = r φ(q) S_i: linear attention over all other keys; 0 where C_i are all blocks
    together   y = o_s + o_l Wᵀ + b, with W (HS, HS) and b (HS,) of the layer, the same for all heads
    all keys   S_i = Σ_j H_j / N for every i, likewise Z_i, A and a: nothing is left out, C_i included. The sparse part,
               W and b are as before; so are all formulas, with empty C_i, and r < 0 or 0 does not
               occur.
    The 1/N cancels in o_l. It keeps S_i, a mean over blocks, in float16's range however long the
    sequence is.
BACKWARD
    dW = Σ dyᵀ o_l, db = Σ dy, dO = dy W is the gradient of o_l, and D = dO·o_l row by row
    sparse     ../reference.py's, whose row sum is dy·o_s = dy·(y − b) − D: o_s is not kept
    queries    dφ(q) = r (dO S_iᵀ − D Z_iᵀ)        A_i = (r φ(q))ᵀ dO        a_i = Σ_t r_t φ(q_t) D_t
    keys       R_j = (Σ_i A_i − Σ_{i: j in C_i} A_i) / N, ρ_j of a likewise;   dφ(k) = v R_jᵀ − ρ_j,   dv += φ(k) R_j
    softmax    dx += φ(x) (dφ(x) − φ(x)·dφ(x))
CANCELLATION
    Totals minus the critical ones leave out what S_i is not to have, but not its rounding: with
    sums of N blocks in float32 the error of Z_i is at most (N + count) 2⁻²⁴ Σ_j z_j / N, whatever
    is left. (H_j may be rounded to float16: the totals are those of the rounded ones, and what goes
    is what came.) Where the blocks are alike that is a relative error of 2⁻²⁴ (N + count) N / (N −
    count). But critical blocks are those that look like the query: with peaked φ they can hold all
    but a trace of the sum, and the trace is then rounding, of any sign. So φ(q)·Z_i is at least
    FLOOR of φ(q)·Z of all blocks, which is above that error up to N = 8,000: where the floor holds,
    less than a thousandth of a row's weight is outside of C_i, o_l is small instead of arbitrary,
    and r counts as a constant (r < 0 says so).
SHAPES
    qkv (B, T, 3C), C = heads · HS, in either order of the channels (../reference.py); y, dy (B, T,
    C) what the backward is given, `Kept`: critical (B, heads, N, count) int32, rising; logsumexp
    and r (B, heads, T); S (B, heads, N, HS, HS), Z (B, heads, N, HS). On a GPU S is of qkv's type,
    all other numbers float32.
    T is arbitrary from 65 on: the last block has what is left, and its means and sums are over
    that.
SOURCE
    Zhang et al. 2025, "SLA: Beyond Sparsity in Diffusion Transformers via Fine-Tunable
    Sparse-Linear Attention", arXiv:2509.24006, section 4 and algorithms 1 and 2; P's mean of k and
    `all keys`: the authors' public code, github.com/thu-ml/SLA (which adds 1e-5 to φ(q)·Z, about T
    / HS there). FLOOR is the project's.
READ NEXT
    choice.py
"""

import math
from typing import NamedTuple

import numpy as np

from ....device import over_batch
from ....dtypes import is_half, working_type
from ....kernels.attention.unfused import merge_heads, split_heads
from .choice import BLOCK, blocks_of, choose_blocks, count_of

FLOOR = 2.0**-10  # share of the whole denominator that what is left of it counts for at least
MAX_SCORES = 1 << 20  # in a working set


class Kept(NamedTuple):
    """The arrays that a forward keeps for its backward: see SHAPES."""

    critical: object
    logsumexp: object
    r: object
    S: object
    Z: object


def sla_forward_reference(
    qkv, weight, bias, heads, topk, order="legacy", keeps=True, all_keys=False
):
    """(y, Kept) of qkv (B, T, 3C), weight (HS, HS), bias (HS,), with the share `topk` of the blocks
    critical in each row. keeps: False: None instead of `Kept`. all_keys: whether the linear part
    takes the critical blocks, too."""
    B, T, width = qkv.shape
    count = count_of(topk, blocks_of(T))
    q, k, v, W, b = (
        np.asarray(a, working_type(a.dtype))
        for a in (*split_heads(qkv, heads, order), weight, bias)
    )
    N, HS = blocks_of(T), q.shape[-1]
    kept = Kept(
        np.empty((B, heads, N, count), np.int32),
        np.empty((B, heads, T), q.dtype),
        np.empty((B, heads, T), q.dtype),
        np.empty((B, heads, N, HS, HS), q.dtype),
        np.empty((B, heads, N, HS), q.dtype),
    )
    y = np.empty((B, T, width // 3), qkv.dtype)
    out = merge_heads(y, heads)

    def work(part):
        for h in range(part.start, part.stop):
            where = divmod(h, heads)
            kept.critical[where] = choose_blocks(q[where], k[where], count)
            attended, *rest = _forward_of_head(
                q[where], k[where], v[where], kept.critical[where], all_keys
            )
            out[where] = attended[0] + attended[1] @ W.T + b
            for array, value in zip(kept[1:], rest, strict=True):
                array[where] = value

    over_batch(work, B * heads, B * heads * T * count * BLOCK)
    if not keeps:
        return y, None
    return y, kept._replace(S=kept.S.astype(qkv.dtype)) if is_half(qkv.dtype) else kept


def sla_backward_reference(
    dy, qkv, y, kept, weight, bias, dweight, dbias, heads, order="legacy", all_keys=False
):
    """dqkv; adds to dweight and dbias, float32 on any device, where they are not None."""
    B, T, _ = qkv.shape
    q, k, v, W, b, g = (
        np.asarray(a, working_type(a.dtype))
        for a in (*split_heads(qkv, heads, order), weight, bias, merge_heads(dy, heads))
    )
    o = np.asarray(merge_heads(y, heads), q.dtype) - b
    S = np.asarray(kept.S, q.dtype)
    dqkv = np.empty_like(qkv)
    gradients = split_heads(dqkv, heads, order)
    dW = np.empty((B * heads, *W.shape), W.dtype)

    def work(part):
        for h in range(part.start, part.stop):
            where = divmod(h, heads)
            given = (a[where] for a in (kept.critical, kept.logsumexp, kept.r, S, kept.Z))
            *found, dW[h] = _backward_of_head(
                g[where], q[where], k[where], v[where], o[where], *given, W, all_keys
            )
            for gradient, value in zip(gradients, found, strict=True):
                gradient[where] = value

    over_batch(work, B * heads, B * heads * T * kept.critical.shape[-1] * BLOCK)
    if dweight is not None:
        dweight += dW.sum(0)
    if dbias is not None:
        dbias += g.sum((0, 1, 2))
    return dqkv


# One head -----------------------------------------------------------------------------------------


def feature(x):
    """φ: the softmax of each row over its channels."""
    p = np.exp(x - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def feature_backward(dphi, phi):
    return phi * (dphi - (phi * dphi).sum(-1, keepdims=True))


def in_blocks(x):
    """x (T, …) as (N, 64, …), filled up with zeros."""
    N = blocks_of(len(x))
    filled = np.zeros((N * BLOCK, *x.shape[1:]), x.dtype)
    filled[: len(x)] = x
    return filled.reshape(N, BLOCK, *x.shape[1:])


def without(parts, left_out):
    """The total of parts (N, …) minus those that `left_out` (N, N), 0 or 1, names in each row, over
    N."""
    rest = parts.sum(0) - np.tensordot(left_out, parts, 1)
    return rest / parts.dtype.type(len(parts))


def pieces(N, count):
    """Slices of blocks of queries whose scores are a working set."""
    some = max(1, MAX_SCORES // (BLOCK * BLOCK * count))
    return [slice(i, min(i + some, N)) for i in range(0, N, some)]


def scores(q, keys, critical, T):
    """The scores (blocks, 64, count · 64) of some blocks' queries and their critical keys; those
    beyond T are −inf."""
    gathered = keys[critical].reshape(len(critical), -1, keys.shape[-1])
    s = np.matmul(q, gathered.swapaxes(-1, -2)) / q.dtype.type(math.sqrt(q.shape[-1]))
    token = (critical[..., None] * BLOCK + np.arange(BLOCK)).reshape(len(critical), 1, -1)
    return np.where(token < T, s, -np.inf)


def chosen_of(critical, dtype):
    chosen = np.zeros((len(critical), len(critical)), dtype)
    np.put_along_axis(chosen, critical, 1, -1)
    return chosen


def _forward_of_head(q, k, v, critical, all_keys):
    """((o_s, o_l), logsumexp, r, S, Z) of one head, q k v (T, HS)."""
    T, (N, count) = len(q), critical.shape
    phi_q, phi_k = feature(q), feature(k)
    qs, ks, vs, fq, fk = map(in_blocks, (q, k, v, phi_q, phi_k))
    o, logsumexp = np.empty_like(qs), np.empty(qs.shape[:2], q.dtype)
    for i in pieces(N, count):
        s = scores(qs[i], ks, critical[i], T)
        m = s.max(-1, keepdims=True)
        p = np.exp(s - m)
        l = p.sum(-1, keepdims=True)
        o[i] = np.matmul(p, vs[critical[i]].reshape(len(p), -1, v.shape[-1])) / l
        logsumexp[i] = (m + np.log(l))[..., 0]
    H, z = np.matmul(fk.swapaxes(-1, -2), vs), fk.sum(1)
    left_out = chosen_of(critical[:, :0] if all_keys else critical, q.dtype)
    S, Z = without(H, left_out), without(z, left_out)
    r = denominator(fq, z, Z, 0 if all_keys else count)
    linear = np.matmul(fq, S) * np.where(fq.any(-1), r, 0)[..., None]
    flat = (a.reshape(-1, *a.shape[2:])[:T] for a in (o, linear, logsumexp, r))
    o, linear, logsumexp, r = flat
    return (o, linear), logsumexp, r, S, Z


def denominator(fq, z, Z, count):
    """r (N, 64): 1 / (φ(q)·Z), negative where the floor holds, 0 where every block is critical."""
    if count == len(z):
        return np.zeros(fq.shape[:2], fq.dtype)
    left, floor = np.matmul(fq, Z[..., None])[..., 0], FLOOR * np.matmul(fq, z.sum(0) / len(z))
    with np.errstate(divide="ignore"):  # of tokens that are not there
        return np.where(left >= floor, 1 / left, -1 / floor).astype(fq.dtype)


def _backward_of_head(dy, q, k, v, o, critical, logsumexp, r, S, Z, W, all_keys):
    """(dq, dk, dv, dW) of one head; o: y without the bias."""
    T, (N, count) = len(q), critical.shape
    scale = q.dtype.type(1 / math.sqrt(q.shape[-1]))
    constant, r = r <= 0, np.abs(r)
    phi_q, phi_k, dO = feature(q), feature(k), dy @ W
    qs, ks, vs, gs, fq, fk, dOs, rs = map(in_blocks, (q, k, v, dy, phi_q, phi_k, dO, r))
    linear = np.matmul(fq, S) * rs[..., None]
    full = (dOs * linear).sum(-1)
    D = np.where(in_blocks(constant), 0, full)
    sums = (in_blocks(o) * gs).sum(-1) - full  # dy · o_s
    dW = np.tensordot(gs, linear, ((0, 1), (0, 1)))

    dfq = rs[..., None] * (np.matmul(dOs, S.swapaxes(-1, -2)) - D[..., None] * Z[:, None])
    weighted = rs[..., None] * fq
    left_out = chosen_of(critical[:, :0] if all_keys else critical, q.dtype).T
    R = without(np.matmul(weighted.swapaxes(-1, -2), dOs), left_out)
    rho = without((weighted * D[..., None]).sum(1), left_out)
    dfk = np.matmul(vs, R.swapaxes(-1, -2)) - rho[:, None]
    dq, dk, dv = feature_backward(dfq, fq), feature_backward(dfk, fk), np.matmul(fk, R)
    L = in_blocks(logsumexp)
    for i in pieces(N, count):
        p = np.exp(scores(qs[i], ks, critical[i], T) - L[i][..., None])
        gathered = [a[critical[i]].reshape(len(p), -1, a.shape[-1]) for a in (ks, vs)]
        ds = p * (np.matmul(gs[i], gathered[1].swapaxes(-1, -2)) - sums[i][..., None]) * scale
        dq[i] += np.matmul(ds, gathered[0])
        for block, row in enumerate(range(i.start, i.stop)):  # a row has a block once
            dk[critical[row]] += np.matmul(ds[block].T, qs[row]).reshape(count, BLOCK, -1)
            dv[critical[row]] += np.matmul(p[block].T, gs[row]).reshape(count, BLOCK, -1)
    return *(a.reshape(-1, a.shape[-1])[:T] for a in (dq, dk, dv)), dW


# Costs --------------------------------------------------------------------------------------------


def sla_forward_cost(B, T, C, heads, count):
    """(bytes, FLOPs): qkv read, y and logsumexp written; scores and outputs of the critical blocks;
    H, φ(q) S and W."""
    N, HS = blocks_of(T), C // heads
    pairs = N * count * BLOCK * BLOCK
    return 4 * (4 * B * T * C + B * heads * T), 4 * B * C * pairs + 6 * B * T * C * HS


def sla_backward_cost(B, T, C, heads, count):
    """qkv, y, dy and logsumexp read, dqkv written; five products of the critical blocks; dO, o_l,
    dW, A, dφ(q), dφ(k) and dv of the linear part."""
    N, HS = blocks_of(T), C // heads
    pairs = N * count * BLOCK * BLOCK
    return 4 * (8 * B * T * C + B * heads * T), 10 * B * C * pairs + 14 * B * T * C * HS
