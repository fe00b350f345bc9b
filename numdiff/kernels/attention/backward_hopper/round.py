"""One round of flash attention's backward: 64 queries by 64 keys of a consumer, from scores to dv
and dk.

    Sᵀ = k·qᵀ, dPᵀ = v·dyᵀ   are started together; when Sᵀ is complete, dPᵀ still runs
    Pᵀ = exp(Sᵀ - L)         in registers; packed, it is the left operand of dv += Pᵀ·dy, in its layout
    dSᵀ = Pᵀ (dPᵀ - D)       likewise, of dk += dSᵀ·q; and it goes to shared memory, where dq needs it from all keys
    With HS 72 there are registers for 32 queries at a time only, in a loop that the compilers may not unroll: ptxas
    keeps everything that two straight pieces of code share. `opaque` hides a number from them for the same reason.
L and D come from shared memory, two queries at a time: a thread has columns 2 · (lane & 3) … of
each eight queries.

SOURCE
    ../reference.py; Dao 2023, "FlashAttention-2", arXiv:2307.08691, algorithm 2; PTX ISA, section
    9.7.15 (wgmma).
READ NEXT
    row_sums.py, where D comes from.
"""

from typing import NamedTuple

from ....device import device_inline, int32, opaque, uint32
from ....device.mbarrier import bar_sync, mbarrier_wait
from ....device.specialise import Constant
from ....device.tensor_core import float_of, load_words2, store_word
from ....device.wgmma import wgmma_commit, wgmma_fence, wgmma_wait_0
from ..backward_half import probability
from ..fragments import CHUNK, pack
from .layout import DS_ROW, HS, QUERIES, ROW, N
from .products import add_queries, multiply_along, wait_for_scores

CONSUMERS = 256  # threads
DS_FREE = 2  # a named barrier of both consumers: dS is no longer read
# from k's place to v's, and from q's to dy's
V, DY = Constant(lambda TILE: TILE // CHUNK), Constant(lambda Q_TILE: Q_TILE // CHUNK)


class AttentionRoundRegisters(NamedTuple):
    """A consumer thread's registers: S, then P, and dP, then dS, of 64 keys; P and dS packed; its
    columns of dq."""

    s: object
    ds: object
    words: object
    ds_words: object
    dq: object
    dq_ninth: object


class AttentionRoundGradients(NamedTuple):
    """dk and dv of 64 keys, and of their ninth parts: accumulators that a thread keeps while the
    queries pass by."""

    dk: object
    dk_ninth: object
    dv: object
    dv_ninth: object


class AttentionRoundQueries(NamedTuple):
    """A tile's places of q and of its ninth part, which dy follows; the barrier of L and D, its
    parity, and where in shared memory this thread's are."""

    q: int
    q_ninth: int
    barrier: int
    parity: int
    statistics_at: int


@device_inline
def probabilities(N, s, shared, at, c):
    """A thread's scores become probabilities; at: of L of its first query, in shared memory."""
    for j in range(N // 8):
        w = load_words2(shared, int32(at + 32 * j))
        L0, L1 = float_of(w[0]), float_of(w[1])
        s[4 * j], s[4 * j + 1] = probability(s[4 * j], c, L0), probability(s[4 * j + 1], c, L1)
        s[4 * j + 2], s[4 * j + 3] = (
            probability(s[4 * j + 2], c, L0),
            probability(s[4 * j + 3], c, L1),
        )


@device_inline
def score_gradients(N, s, p, shared, at):
    """dP becomes dS = P (dP − D); at: of D of the thread's first query."""
    for j in range(N // 8):
        w = load_words2(shared, int32(at + 32 * j))
        D0, D1 = float_of(w[0]), float_of(w[1])
        s[4 * j], s[4 * j + 1] = p[4 * j] * (s[4 * j] - D0), p[4 * j + 1] * (s[4 * j + 1] - D1)
        s[4 * j + 2], s[4 * j + 3] = (
            p[4 * j + 2] * (s[4 * j + 2] - D0),
            p[4 * j + 3] * (s[4 * j + 3] - D1),
        )


@device_inline
def pack_all(N, words, s):
    for i in range(N // 16):
        pack(words, i, s, 8 * i)


@device_inline
def store_ds(N, shared, at, words, chunk):
    """A thread's dS of N queries into shared memory, from a chunk of its key's row on; at: its word
    in the row's first.

    The rows, 128 bytes, are swizzled as TMA does it.
    """
    at = opaque(at)
    for i in range(N // 16):
        place, next_place = (
            int32(at ^ ((chunk + 2 * i) * CHUNK)),
            int32(at ^ ((chunk + 2 * i + 1) * CHUNK)),
        )
        store_word(shared, place, words[4 * i])
        store_word(shared, int32(place + 8 * DS_ROW), words[4 * i + 1])
        store_word(shared, next_place, words[4 * i + 2])
        store_word(shared, int32(next_place + 8 * DS_ROW), words[4 * i + 3])


@device_inline
def add_block(r, accumulators, k, k_ninth, tile, zeros, shared, c, ds_at, chunk, first):
    """dv += P · dy and dk += dS · q for 64 keys and N queries; dS goes to shared memory, from a
    chunk of a row on.

    k: places, which those of v follow; first: whether dS may still be read for dq. On return S, dS
    and P are free, and with HS over 32 all products are done.
    """
    zeros = uint32(zeros)
    k, k_ninth = uint32(opaque(k)), uint32(opaque(k_ninth))
    q, q_ninth = uint32(opaque(tile.q)), uint32(opaque(tile.q_ninth))
    wgmma_fence()
    multiply_along(HS, N, r.s, k, k_ninth, q, q_ninth, zeros)
    wgmma_commit()
    multiply_along(
        HS, N, r.ds, k + uint32(V), k_ninth + uint32(V), q + uint32(DY), q_ninth + uint32(DY), zeros
    )
    wgmma_commit()

    mbarrier_wait(tile.barrier, uint32(tile.parity))
    wait_for_scores(N, r.s)
    probabilities(N, r.s, shared, tile.statistics_at, c)
    pack_all(N, r.words, r.s)
    wgmma_fence()
    add_queries(
        HS, N, accumulators.dv, accumulators.dv_ninth, r.words, q + uint32(DY), q_ninth + uint32(DY)
    )
    wgmma_commit()

    wait_for_scores(N, r.ds)
    score_gradients(N, r.ds, r.s, shared, int32(tile.statistics_at + 4 * QUERIES))
    pack_all(N, r.ds_words, r.ds)
    wgmma_fence()
    add_queries(HS, N, accumulators.dk, accumulators.dk_ninth, r.ds_words, q, q_ninth)
    wgmma_commit()
    if first:
        bar_sync(uint32(DS_FREE), uint32(CONSUMERS))
    store_ds(N, shared, ds_at, r.ds_words, chunk)
    if HS > 32:
        wgmma_wait_0()  # there are no registers for the next products, too


@device_inline
def add_keys(r, accumulators, k, k_ninth, tile, zeros, shared, c, ds_at, first):
    """`add_block` for 64 keys and all queries of a tile: at once, or N in a loop."""
    if N == QUERIES:
        add_block(r, accumulators, k, k_ninth, tile, zeros, shared, c, ds_at, 0, first)
    else:
        query = opaque(int32(0))
        while query < QUERIES:
            part = AttentionRoundQueries(
                int32(tile.q + query * (ROW // CHUNK)),
                int32(tile.q_ninth + query),
                tile.barrier,
                tile.parity,
                int32(tile.statistics_at + 4 * query),
            )
            add_block(
                r,
                accumulators,
                k,
                k_ninth,
                part,
                zeros,
                shared,
                c,
                ds_at,
                query >> 3,
                first and query == 0,
            )
            query = int32(query + N)
