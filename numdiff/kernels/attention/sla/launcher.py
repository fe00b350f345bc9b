"""Sparse-linear attention on arrays: which kernels run, and in which order.

FORWARD
    summaries, totals, choose, forward
BACKWARD
    queries, dq, transpose, totals, dkv, and the sums of W's and b's gradients over all blocks of queries
SOURCE
    the project's own.
READ NEXT
    ../../transformer/adaln.py, what stands around attention in a DiT's block.
"""
import math

import numpy as np

from ....device import empty, is_device, launch
from ....device.limits import MAX_BLOCKS_YZ, MAX_ELEMENTS, shared_limit
from ....dtypes import is_half
from ...reduce import column_sum
from ...versions import versions_by_name
from ..launcher import HEAD_SIZES, layout
from ..unfused import check
from . import choice, simple
from .choice import BLOCK, Problem, blocks_of, count_of
from .reference import Kept, sla_backward_reference, sla_forward_reference

SMALL_HEAD = 8  # which models do not have: the emulator's, where a thread's work would take minutes

kernels_v1 = {(HS, name): kernel for HS in (SMALL_HEAD, *HEAD_SIZES) for name, kernel in zip(
    ("summaries", "forward", "queries", "dq", "dkv"), simple.make_kernels(HS), strict=True)}


def problem_of(qkv, heads, order, count):
    """(HS, grid, Problem)"""
    B, T, width = qkv.shape
    HS, head_step, part = layout(qkv, heads, order)
    N = blocks_of(T)
    return HS, (N, heads, B), Problem(T, width, head_step, part, N, count, 1 / math.sqrt(HS))


def add_up(x, small, grid, like):
    """(sums of x (B, heads, N, …) over N, those of small): float32."""
    N, heads, B = grid
    total = empty((B, heads, *x.shape[3:]), np.float32, like=like)
    small_total = empty((B, heads, *small.shape[3:]), np.float32, like=like)
    size, small_size = (math.prod(a.shape[3:]) for a in (x, small))
    blocks = -(-size // choice.COLUMNS) + -(-small_size // choice.COLUMNS)
    launch(choice.sla_totals_kernel, (blocks, heads, B), choice.THREADS, x.reshape(-1), small.reshape(-1),
           total.reshape(-1), small_total.reshape(-1), N, size, small_size)
    return total, small_total


def check_shapes(qkv, weight, bias, heads, order):
    """Raise a `ValueError` for what no engine takes."""
    check(qkv, heads, order)
    HS = qkv.shape[2] // (3 * heads)
    if tuple(weight.shape) != (HS, HS) or tuple(bias.shape) != (HS,):
        raise ValueError(f"weight {tuple(weight.shape)} and bias {tuple(bias.shape)} of sparse-linear attention must "
                         f"be ({HS}, {HS}) and ({HS},), the head size of qkv {tuple(qkv.shape)} with {heads} heads")
    if qkv.shape[1] <= BLOCK:
        raise ValueError(f"sparse-linear attention chooses among blocks of {BLOCK} tokens, and {qkv.shape[1]} are one "
                         "block; use flash_attention_forward")


def prepare(qkv, others, bias, heads):
    """The version that runs, after the checks that all launches share; others: arrays of qkv's type."""
    B, T, width = qkv.shape
    HS = width // (3 * heads)
    if not (is_half(qkv.dtype) or qkv.dtype == np.float32) or any(a.dtype != qkv.dtype for a in others) \
            or bias.dtype != np.float32:
        raise ValueError("on a GPU, sparse-linear attention takes qkv, dy, y and weight all float32, float16 or "
                         f"bfloat16, and bias float32, not {', '.join(str(a.dtype) for a in (qkv, *others, bias))}; "
                         "use cast_forward first")
    if HS not in (SMALL_HEAD, *HEAD_SIZES):
        raise ValueError(f"sparse-linear attention has kernels for heads of 32, 64 and 72 channels, not {HS}")
    if max(B, heads) > MAX_BLOCKS_YZ or T * width >= MAX_ELEMENTS:
        raise ValueError(f"qkv {tuple(qkv.shape)} with {heads} heads is more than one launch can count; split the "
                         "batch")
    if 4 * choice.ROWS * blocks_of(T) > shared_limit(qkv) - 1024:
        raise ValueError(f"{T} tokens have {blocks_of(T)} blocks, whose choice does not fit into shared memory; use "
                         "fewer tokens")


@versions_by_name
def sla_forward(qkv, weight, bias, heads, topk, order="legacy", keeps=True, version=None):
    """(y (B, T, C), `Kept`) of qkv (B, T, 3C), weight (HS, HS) and bias (HS,): reference.py.

    topk: share of the blocks that are critical, above 0 and at most 1; keeps: False if no backward will follow
    """
    check_shapes(qkv, weight, bias, heads, order)
    if not 0 < topk <= 1:
        raise ValueError(f"topk {topk} is no share of the blocks; use more than 0 and at most 1")
    count = count_of(topk, blocks_of(qkv.shape[1]))
    if not is_device(qkv):
        return sla_forward_reference(qkv, weight, bias, heads, count, order)
    prepare(qkv, (weight,), bias, heads)
    B, T, width = qkv.shape
    HS, grid, problem = problem_of(qkv, heads, order, count)
    N = problem.N

    def made(*shape, dtype=np.float32):
        return empty((B, heads, *shape), dtype, like=qkv)

    flat = qkv.reshape(-1)
    q_mean, H, z = made(N, HS), made(N, HS, HS, dtype=qkv.dtype), made(N, 2, HS)
    launch(kernels_v1[HS, "summaries"], grid, BLOCK, flat, *(a.reshape(-1) for a in (q_mean, H, z)), problem)
    H_total, z_total = add_up(H, z, grid, qkv)
    critical = made(N, count, dtype=np.int32)
    launch(choice.sla_choose_kernel, (-(-N // choice.ROWS), heads, B), choice.THREADS, q_mean.reshape(-1),
           z.reshape(-1), z_total.reshape(-1), critical.reshape(-1), problem, HS, shared=4 * choice.ROWS * N)
    kept = Kept(critical, made(T), made(T), made(N, HS, HS, dtype=qkv.dtype), made(N, HS))
    y = empty((B, T, width // 3), qkv.dtype, like=qkv)
    launch(kernels_v1[HS, "forward"], grid, BLOCK, flat, critical.reshape(-1), (H.reshape(-1), z.reshape(-1)),
           (H_total.reshape(-1), z_total.reshape(-1)), (weight.reshape(-1), bias), y.reshape(-1),
           *(a.reshape(-1) for a in kept[1:]), problem)
    return y, kept


@versions_by_name
def sla_backward(dy, qkv, y, kept, weight, bias, dweight, dbias, heads, order="legacy", version=None):
    """dqkv (B, T, 3C) from dy (B, T, C) and what the forward took and gave; adds to dweight and dbias, float32, where
    they are not None."""
    check_shapes(qkv, weight, bias, heads, order)
    if not is_device(qkv):
        return sla_backward_reference(dy, qkv, y, kept, weight, bias, dweight, dbias, heads, order)
    prepare(qkv, (dy, y, weight, kept.S), bias, heads)
    B, T, _ = qkv.shape
    HS, grid, problem = problem_of(qkv, heads, order, kept.critical.shape[-1])
    N = problem.N

    def made(*shape, dtype=np.float32):
        return empty((B, heads, *shape), dtype, like=qkv)

    dqkv, sums = empty(qkv.shape, qkv.dtype, like=qkv), made(T)
    A, a, parts, bias_parts = made(N, HS, HS, dtype=qkv.dtype), made(N, HS), made(N, HS * HS), made(N, HS)
    lists, counts = made(N, N, dtype=np.int32), made(N, dtype=np.int32)
    flat_dy, flat, flat_y, to = (x.reshape(-1) for x in (dy, qkv, y, dqkv))
    critical, logsumexp, r, S, Z = (x.reshape(-1) for x in kept)
    launch(kernels_v1[HS, "queries"], grid, BLOCK, flat_dy, flat, flat_y, (weight.reshape(-1), bias), r, S, Z, to,
           *(x.reshape(-1) for x in (sums, A, a, parts, bias_parts)), problem)
    launch(kernels_v1[HS, "dq"], grid, BLOCK, flat_dy, flat, critical, logsumexp, sums.reshape(-1), to, problem)
    launch(choice.sla_transpose_kernel, (-(-N // choice.ROWS), heads, B), choice.THREADS, critical, lists.reshape(-1),
           counts.reshape(-1), N, problem.count)
    totals = add_up(A, a, grid, qkv)
    launch(kernels_v1[HS, "dkv"], grid, BLOCK, flat_dy, flat, lists.reshape(-1), counts.reshape(-1), logsumexp,
           sums.reshape(-1), A.reshape(-1), a.reshape(-1), tuple(x.reshape(-1) for x in totals), to, problem)
    if dweight is not None:
        column_sum(parts.reshape(-1, HS * HS), dweight.reshape(-1))
    if dbias is not None:
        column_sum(bias_parts.reshape(-1, HS), dbias)
    return dqkv
