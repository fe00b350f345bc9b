"""Sparse-linear attention on arrays: which kernels run, and in which order.

FORWARD
    prepare, totals, choose, forward; in version 3 the totals are those of z alone, and S comes
    before the forward. From 65 blocks on that is what runs: an H200, T 16,384, 12 heads of 64: 291
    instead of 316 µs with top-k 5 %, 771 instead of 929 with 20 %
BACKWARD
    queries, dq, transpose, totals, dkv, and the sums of W's and b's gradients over all blocks of
    queries
SOURCE
    the project's own.
READ NEXT
    ../../transformer/adaln.py, what stands around attention in a DiT's block.
"""

import functools
import math

import numpy as np

from ....device import empty, is_device, launch
from ....device.half import in_bfloat16
from ....device.limits import MAX_BLOCKS_YZ, MAX_ELEMENTS, WARP, multiprocessors_of, shared_limit
from ....device.specialise import Variants
from ....dtypes import HALVES, is_half, working_type
from ....errors import TooManyElementsError
from ....kernels.attention.launcher import HEAD_SIZES, layout
from ....kernels.attention.unfused import check
from ....kernels.operation import Version, operation
from ....kernels.reduce.second_pass import add_rows
from . import choice, forward_half, lists_half, prepare_half, queries_half, rest_half, simple
from .choice import BLOCK, SlaProblem, blocks_of, count_of
from .lists_half import SlaListGradients
from .problems import problems
from .reference import (
    Kept,
    sla_backward_cost,
    sla_backward_reference,
    sla_forward_cost,
    sla_forward_reference,
    without,
)
from .tiles_half import THREADS

SMALL_HEAD = 8  # which models do not have: the emulator's, where a thread's work would take minutes
MAX_SHARES = 256  # of dW and db, to be added up for a head
OF_SHARE = 0.4  # a share's bytes, written and read, in those of a block of queries
# up to which version 2 takes the forward: a tile of version 3's product is 64 by 128 of them
MMA_BLOCKS = 64
RESIDENT = 2  # blocks of the queries kernel on a multiprocessor

kernels_v1 = {
    (HS, name): kernel
    for HS in (SMALL_HEAD, *HEAD_SIZES)
    for name, kernel in zip(
        ("prepare", "forward", "queries", "dq", "dkv"), simple.make_kernels(HS), strict=True
    )
}
prepare_kernels_v2 = Variants(HEAD_SIZES, prepare_half.make_prepare)
forward_kernels_v2 = Variants(HEAD_SIZES, forward_half.make_forward)
forward_kernels_v3 = Variants(HEAD_SIZES, lambda HS: forward_half.make_forward(HS, given=True))
rest_kernel_v3 = rest_half.make_rest()
queries_kernels_v2 = Variants(HEAD_SIZES, queries_half.make_queries)
dq_kernels_v2 = Variants(HEAD_SIZES, lists_half.make_dq)
dkv_kernels_v2 = Variants(HEAD_SIZES, lists_half.make_dkv)


def problem_of(qkv, heads, order, count, all_keys=False):
    """(HS, grid, Problem)"""
    B, T, width = qkv.shape
    HS, head_step, part = layout(qkv, heads, order)
    N = blocks_of(T)
    return (
        HS,
        (N, heads, B),
        SlaProblem(T, width, head_step, part, N, count, 1 / math.sqrt(HS), int(not all_keys)),
    )


def choose_some(N, batch, multiprocessors):
    """How many blocks of queries a block of version 2's queries kernel takes: as ends soonest, and
    writes least."""

    def rounds(shares):
        return -(-shares * batch // (RESIDENT * multiprocessors)) * (-(-N // shares) + OF_SHARE)

    return -(-N // min(range(1, min(N, MAX_SHARES) + 1), key=rounds))


def long_list(count):
    """How many blocks of queries make a list of version 2's dkv kernel long, which then goes first;
    0: none does.

    `count` is their mean length. An H200, T 16,384, 12 heads of 64, top-k 5 %: forward and backward
    take 1,118 µs instead of 1,186 where keys are skewed, as a trained model's are, and 1,128
    instead of 1,126 where they are not.
    """
    return 3 * count // 2


def _extents(qkv):
    """(B, T, C)"""
    return qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3


def add_up(x, small, grid, like, both=True):
    """(sums of x (B, heads, N, …) over N, those of small): float32. both: False for the second
    alone, twice."""
    N, heads, B = grid
    small_total = empty((B, heads, *small.shape[3:]), np.float32, like=like)
    total = empty((B, heads, *x.shape[3:]), np.float32, like=like) if both else small_total
    size, small_size = math.prod(x.shape[3:]) if both else 0, math.prod(small.shape[3:])
    blocks = -(-size // choice.COLUMNS) + -(-small_size // choice.COLUMNS)
    launch(
        choice.sla_totals_kernel,
        (blocks, heads, B),
        choice.THREADS,
        x.reshape(-1),
        small.reshape(-1),
        total.reshape(-1),
        small_total.reshape(-1),
        N,
        size,
        small_size,
    )
    return total, small_total


def sum_rest(H, left, S):
    """S (B, heads, N, HS, HS) from H, the same shape and type, and left (B, heads, N, ceil(N /
    32)), the `bits_left` of the lists: version 3's."""
    B, heads, N, HS, _ = H.shape
    if not is_device(H):
        for where in np.ndindex(B, heads):
            bits = np.unpackbits(left[where].view(np.uint8), axis=-1, count=N, bitorder="little")
            summed = H[where].astype(working_type(H.dtype))
            S[where] = without(summed, 1 - bits.astype(summed.dtype))
        return
    blocks = HS * HS // rest_half.COLUMNS * -(-N // rest_half.QUERIES)
    launch(
        in_bfloat16(rest_kernel_v3, H.dtype),
        (blocks, heads, B),
        THREADS,
        H.reshape(-1),
        left.reshape(-1),
        S.reshape(-1),
        N,
        HS * HS,
        shared=rest_half.shared_bytes(N),
    )


# Which version runs -------------------------------------------------------------------------------


def _check(qkv, others, weight, bias, heads, order):
    """Raise what is wrong with the operands. others: arrays of qkv's type but weight"""
    check(qkv, heads, order)
    B, T, width = qkv.shape
    HS = width // (3 * heads)
    if tuple(weight.shape) != (HS, HS) or tuple(bias.shape) != (HS,):
        raise ValueError(
            f"weight {tuple(weight.shape)} and bias {tuple(bias.shape)} of sparse-linear attention must "
            f"be ({HS}, {HS}) and ({HS},), the head size of qkv {tuple(qkv.shape)} with {heads} heads"
        )
    if T <= BLOCK:
        raise ValueError(
            f"sparse-linear attention chooses among blocks of {BLOCK} tokens, and {T} are one "
            "block; use flash_attention_forward"
        )
    if not is_device(qkv):
        return
    others = *others, weight
    if (
        not (is_half(qkv.dtype) or qkv.dtype == np.float32)
        or any(a.dtype != qkv.dtype for a in others)
        or bias.dtype != np.float32
    ):
        raise ValueError(
            "on a GPU, sparse-linear attention takes qkv, dy, y and weight all float32, float16 or "
            f"bfloat16, and bias float32, not {', '.join(str(a.dtype) for a in (qkv, *others, bias))}; "
            "use cast_forward first"
        )
    if HS not in (SMALL_HEAD, *HEAD_SIZES):
        raise ValueError(
            f"sparse-linear attention has kernels for heads of 32, 64 and 72 channels, not {HS}"
        )
    if max(B, heads) > MAX_BLOCKS_YZ or T * width >= MAX_ELEMENTS:
        raise TooManyElementsError(
            f"qkv {tuple(qkv.shape)} with {heads} heads is more than one launch can count; "
            "split the batch"
        )
    if 4 * choice.ROWS * blocks_of(T) > shared_limit(qkv) - choice.TILE_BYTES - 1024:
        raise ValueError(
            f"{T} tokens have {blocks_of(T)} blocks, whose choice does not fit into shared memory; use "
            "fewer tokens"
        )


def _check_forward(qkv, weight, bias, heads, topk, order):
    _check(qkv, (), weight, bias, heads, order)
    if not 0 < topk <= 1:
        raise ValueError(f"topk {topk} is no share of the blocks; use more than 0 and at most 1")


def _check_backward(dy, qkv, y, kept, weight, bias, heads, order):
    _check(qkv, (dy, y, kept.S), weight, bias, heads, order)


def _lacks_tiles(qkv, heads, weight, *others):
    """What version 2 needs and these arrays lack."""
    HS = qkv.shape[2] // (3 * heads)
    if HS not in HEAD_SIZES:
        return f"needs heads of 32, 64 or 72 channels, not {HS}"
    if max(forward_half.shared_bytes(HS), lists_half.dkv_bytes(HS)) >= shared_limit(qkv):
        return f"needs more shared memory for heads of {HS} channels than a block may have on this device"
    if any(a.offset % 16 for a in (qkv, weight, *others)):
        return "moves 16 bytes at a time, and an array starts in between"
    return None


def _lacks_room(qkv, heads, weight):
    """What version 3 needs and these arrays lack."""
    if rest_half.shared_bytes(blocks_of(qkv.shape[1])) > shared_limit(qkv) - 1024:
        return f"has no room in shared memory for what {qkv.shape[1]} tokens choose"
    return _lacks_tiles(qkv, heads, weight)


def _backward_lacks_tiles(dy, qkv, y, kept, weight, heads):
    return _lacks_tiles(qkv, heads, weight, dy, y, kept.S)


def choose(qkv, HS, grid, problem, version):
    """((critical, its `bits_left`), (H, z with the sums of k), their totals): what comes before a
    query meets a key."""
    N, heads, B = grid

    def made(*shape, dtype=np.float32):
        return empty((B, heads, *shape), dtype, like=qkv)

    q_mean, H, z = made(N, HS), made(N, HS, HS, dtype=qkv.dtype), made(N, 2, HS)
    kernel, threads, nbytes = kernels_v1[HS, "prepare"], BLOCK, 0
    if version > 1:
        kernel, threads = in_bfloat16(prepare_kernels_v2[HS], qkv.dtype), THREADS
        nbytes = prepare_half.shared_bytes(HS)
    launch(
        kernel,
        grid,
        threads,
        qkv.reshape(-1),
        q_mean.reshape(-1),
        H.reshape(-1),
        z.reshape(-1),
        problem,
        shared=nbytes,
    )
    totals = add_up(H, z, grid, qkv, both=version < 3)
    critical, left = made(N, problem.count, dtype=np.int32), made(N, -(-N // WARP), dtype=np.int32)
    launch(
        choice.sla_choose_kernel,
        (-(-N // choice.ROWS), heads, B),
        choice.THREADS,
        q_mean.reshape(-1),
        z.reshape(-1),
        totals[1].reshape(-1),
        critical.reshape(-1),
        left.reshape(-1),
        problem,
        HS,
        shared=4 * choice.ROWS * N,
    )
    return (critical, left), (H, z), totals


# Operations ---------------------------------------------------------------------------------------


@operation(
    reference=sla_forward_reference,
    check=_check_forward,
    problems=functools.partial(problems, False, sum_rest),
    cost=lambda qkv, heads, topk: sla_forward_cost(
        *_extents(qkv), heads, count_of(topk, blocks_of(qkv.shape[1]))
    ),
    versions=[
        Version("naive"),
        Version(
            "mma",
            forward_kernels_v2,
            dtypes=HALVES,
            of=("qkv", "heads", "weight"),
            fits=_lacks_tiles,
        ),
        Version(
            "product",
            forward_kernels_v3,
            dtypes=HALVES,
            fits=_lacks_room,
            pays=lambda qkv: blocks_of(qkv.shape[1]) > MMA_BLOCKS,
        ),
    ],
)
def sla_forward(
    qkv, weight, bias, heads, topk, order="legacy", keeps=True, all_keys=False, version=None
):
    """(y (B, T, C), `Kept`) of qkv (B, T, 3C), weight (HS, HS) and bias (HS,): reference.py.

    topk: share of the blocks that are critical, above 0 and at most 1; keeps: False if no backward
    will follow
    all_keys: whether the linear part takes all keys, instead of leaving the critical blocks out
    """
    B, T, width = qkv.shape
    HS, grid, problem = problem_of(qkv, heads, order, count_of(topk, blocks_of(T)), all_keys)
    N = problem.N

    (critical, left), parts, totals = choose(qkv, HS, grid, problem, version.number)

    def made(*shape, dtype=np.float32):
        return empty((B, heads, *shape), dtype, like=qkv)

    y, given = empty((B, T, width // 3), qkv.dtype, like=qkv), version.name == "product"
    if keeps:
        kept = Kept(critical, made(T), made(T), made(N, HS, HS, dtype=qkv.dtype), made(N, HS))
    else:  # stand-ins that are not written
        H, z = parts
        kept = Kept(critical, z, z, made(N, HS, HS, dtype=qkv.dtype) if given else H, z)
    arguments = (
        qkv.reshape(-1),
        critical.reshape(-1),
        tuple(a.reshape(-1) for a in parts),
        tuple(a.reshape(-1) for a in totals),
        (weight.reshape(-1), bias),
        y.reshape(-1),
        *(a.reshape(-1) for a in kept[1:]),
        problem,
        int(keeps),
    )
    if version.name == "naive":
        launch(kernels_v1[HS, "forward"], grid, BLOCK, *arguments)
    else:
        if given:
            sum_rest(parts[0], left, kept.S)
        launch(
            in_bfloat16(version.kernel[HS], qkv.dtype),
            grid,
            THREADS,
            *arguments,
            shared=forward_half.shared_bytes(HS, given),
        )
    return y, kept if keeps else None


@operation(
    reference=sla_backward_reference,
    check=_check_backward,
    problems=functools.partial(problems, True),
    cost=lambda qkv, heads, kept: sla_backward_cost(*_extents(qkv), heads, kept.critical.shape[-1]),
    versions=[
        Version("naive"),
        Version("mma", dkv_kernels_v2, dtypes=HALVES, fits=_backward_lacks_tiles),
    ],
    writes=("dweight", "dbias"),
)
def sla_backward(
    dy,
    qkv,
    y,
    kept,
    weight,
    bias,
    dweight,
    dbias,
    heads,
    order="legacy",
    all_keys=False,
    version=None,
):
    """dqkv (B, T, 3C) from dy (B, T, C) and what the forward took and gave; adds to dweight and
    dbias, float32, where they are not None. all_keys: as in the forward."""
    B, T, _ = qkv.shape
    HS, grid, problem = problem_of(qkv, heads, order, kept.critical.shape[-1], all_keys)
    N = problem.N

    def made(*shape, dtype=np.float32):
        return empty((B, heads, *shape), dtype, like=qkv)

    naive = version.name == "naive"
    some = 1 if naive else choose_some(N, B * heads, multiprocessors_of(qkv))
    shares = -(-N // some)
    dqkv, sums = empty(qkv.shape, qkv.dtype, like=qkv), made(T)
    A, a, parts, bias_parts = (
        made(N, HS, HS, dtype=qkv.dtype),
        made(N, HS),
        made(shares, HS, HS),
        made(shares, HS),
    )
    lists, counts = made(N, N, dtype=np.int32), made(N, dtype=np.int32)
    flat_dy, flat, flat_y, to, flat_sums, flat_A, flat_a = (
        x.reshape(-1) for x in (dy, qkv, y, dqkv, sums, A, a)
    )
    flat_lists, flat_counts = lists.reshape(-1), counts.reshape(-1)
    critical, logsumexp, r, S, Z = (x.reshape(-1) for x in kept)
    layer, out = (weight.reshape(-1), bias), (parts.reshape(-1), bias_parts.reshape(-1))
    queries = flat_dy, flat, flat_y, layer, (r, S, Z), to, flat_sums, flat_A, flat_a, out, problem
    of_q = flat_dy, flat, critical, logsumexp, flat_sums, to, problem
    if naive:
        launch(kernels_v1[HS, "queries"], grid, BLOCK, *queries)
        launch(kernels_v1[HS, "dq"], grid, BLOCK, *of_q)
    else:
        launch(
            in_bfloat16(queries_kernels_v2[HS], qkv.dtype),
            (shares, heads, B),
            THREADS,
            *queries,
            some,
            shared=queries_half.shared_bytes(HS),
        )
        launch(
            in_bfloat16(dq_kernels_v2[HS], qkv.dtype),
            grid,
            THREADS,
            *of_q,
            shared=lists_half.dq_bytes(HS),
        )
    launch(
        choice.sla_transpose_kernel,
        (-(-N // choice.ROWS), heads, B),
        choice.THREADS,
        critical,
        flat_lists,
        flat_counts,
        N,
        problem.count,
    )
    totals = tuple(x.reshape(-1) for x in add_up(A, a, grid, qkv))
    given = SlaListGradients(logsumexp, flat_sums, flat_A, flat_a)
    of_keys = flat_dy, flat, flat_lists, flat_counts, given, totals, to, problem
    if naive:
        launch(kernels_v1[HS, "dkv"], grid, BLOCK, *of_keys)
    else:
        long = long_list(problem.count) if 2 * B <= MAX_BLOCKS_YZ else 0
        launch(
            in_bfloat16(dkv_kernels_v2[HS], qkv.dtype),
            (N, grid[1], 2 * B if long else B),
            THREADS,
            *of_keys,
            long,
            shared=lists_half.dkv_bytes(HS),
        )
    if dweight is not None:
        add_rows(parts.reshape(-1, HS * HS), dweight.reshape(-1))
    if dbias is not None:
        add_rows(bias_parts.reshape(-1, HS), dbias)
    return dqkv
