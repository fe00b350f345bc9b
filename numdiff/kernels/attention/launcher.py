"""Flash attention on arrays: which kernel runs, and where the heads of a packed qkv are.

THE CHOICES
    version    float16: 5 on sm_90a for more than 64 tokens, 3 from sm_80 on, else 1. float32: 4 from sm_80 on, else 2.
               Each only where a block may have the shared memory; the last resort is 1. unfused.py computes the
               head sizes that have no kernels here
    forward    queries a block, 64 or 128: whichever ends sooner, counting rows of queries a multiprocessor
    backward   chunks of keys: as many as end soonest, counting tiles of keys a multiprocessor; version 3 has tiles of
               64 or 256 keys, 128 for heads of 128, version 5 of 256
LAYOUT
    q of a head starts `head_step` after that of the head before; its k is `part` after q, its v `part` after k.
SOURCE
    the project's own; comments next to the choices give their costs.
READ NEXT
    ../transformer/adaln.py, what stands around attention in a DiT's block.
"""
import itertools
import math

import numpy as np

from ...device import empty, is_device, launch
from ...device.half import in_bfloat16
from ...device.limits import MAX_BLOCKS_YZ, MAX_ELEMENTS, WARP, multiprocessors_of, shared_limit
from ...device.requires import supports
from ...device.specialise import Variants
from ...dtypes import is_half
from ...errors import TooManyElementsError
from ..batch_invariance import nominal_extent
from ..versions import capped, label, versions_by_name
from . import (
    backward,
    backward_half,
    backward_tf32_bf16,
    forward,
    forward_half,
    forward_hopper,
    forward_tf32_bf16,
    simple,
)
from .backward_hopper import kernel as backward_hopper
from .forward import LOG2_E
from .patches import KEYS
from .reference import flash_attention_backward_reference, flash_attention_forward_reference
from .unfused import check

HEAD_SIZES = 32, 64, 72
WIDE_HEADS = 128,  # of version 3 alone
SMALL_BLOCK = 1.2  # time of a row in a block of 64 queries, for 1 in one of 128: it shares its keys with fewer
FEW_TOKENS = 64  # up to which version 3 wastes less: version 5's tiles have 128 rows and more
CHUNK = 0.1  # tiles' worth of work that a chunk costs: its dq is written separately, and read to be added

simple_kernels = {(HS, name): kernel for HS in HEAD_SIZES
                  for name, kernel in zip(("forward", "dq", "dkv"), simple.make_kernels(HS), strict=True)}
forward_kernels_v2 = Variants(itertools.product(HEAD_SIZES, (4, 2)), lambda key: forward.make_forward(*key))
backward_kernels_v2 = Variants(HEAD_SIZES, backward.make_backward)
forward_kernels_v3 = Variants(itertools.product(HEAD_SIZES + WIDE_HEADS, (1, 2)),
                              lambda key: forward_half.make_forward(*key))
HALF_TILES = (1, 4), (2, 4), (1, 8), (2, 8)  # fragments of keys a warp, and warps, of version 3's backward
backward_kernels_v3 = Variants([*((HS, *tile) for HS in HEAD_SIZES for tile in ((1, 4), (2, 4), (2, 8))),
                                (128, 1, 4), (128, 1, 8)],
                               lambda key: backward_half.make_backward(*key))
forward_kernels_v4 = Variants(HEAD_SIZES, forward_tf32_bf16.make_forward)
backward_kernels_v4 = Variants(HEAD_SIZES, backward_tf32_bf16.make_backward)


def layout(qkv, heads, order):
    """(HS, head_step, part) of qkv's channels: see LAYOUT."""
    HS = qkv.shape[2] // (3 * heads)
    return (HS, 3 * HS, HS) if order == "legacy" else (HS, HS, heads * HS)


def idling(warps):
    """How much longer work takes with too few warps to hide each other's waits; registers leave room for eight."""
    return 1 + 4 / min(warps, 8)


def choose_warps(HS, batch, T, multiprocessors, limit):
    """4 or 2 warps a block of the forward, or None if neither finds the shared memory."""
    def rows(warps):
        queries = forward.WARP_QUERIES * warps
        blocks = -(-batch * -(-T // queries) // multiprocessors)
        return blocks * queries * idling(blocks * warps) * (1 if warps == 4 else SMALL_BLOCK)

    return min((warps for warps in (4, 2) if 4 * forward.shared_floats(HS, warps) <= limit), key=rows, default=None)


def choose_chunks(batch, T, multiprocessors, keys=KEYS, warps=backward.WARPS):
    """(chunks of keys, tiles a chunk) of the backward, for blocks of `warps` warps that take `keys` keys at a time."""
    tiles = -(-T // keys)

    def rounds(chunks):
        blocks = -(-batch * chunks // multiprocessors)
        return blocks * idling(blocks * warps) * (-(-tiles // chunks) + (CHUNK if chunks > 1 else 0))

    chunks = min(range(1, min(tiles, backward.LARGEST_CHUNKS) + 1), key=rounds)
    chunk_tiles = -(-tiles // chunks)
    return -(-tiles // chunk_tiles), chunk_tiles


def choose_queries(batch, T, multiprocessors):
    """128 or 64 queries a block of version 3's forward."""
    def rows(queries):
        blocks = -(-batch * -(-T // queries) // multiprocessors)
        return blocks * queries * idling(blocks * 4) * (1 if queries == 128 else SMALL_BLOCK)

    return min((128, 64), key=rows)


def choose_tile(HS, T, limit):
    """(fragments of keys a warp, warps) of a block of version 3's backward; None if neither finds the shared memory."""
    fit = [shape for shape in HALF_TILES if (HS, *shape) in backward_kernels_v3
           and backward_half.shared_bytes(HS, *shape) <= limit]
    return None if not fit else fit[0] if T <= KEYS else fit[-1]


def fitting(version, HS, array):
    """Whether both passes of a version run on the array's device."""
    limit = shared_limit(array)
    if HS in WIDE_HEADS and version != 3:
        return False
    if version == 2:
        return 4 * backward.shared_floats(HS) <= limit
    if version == 5:
        return supports(array, forward_hopper.forward_kernels_v5)
    if not supports(array, forward_kernels_v3, forward_kernels_v4):
        return version == 1
    if version == 3:
        return choose_tile(HS, KEYS, limit) is not None
    return version == 1 or backward_tf32_bf16.shared_bytes(HS) <= limit


def flash_attention_supports(qkv, heads):
    """Whether the fast kernels, forward and backward, run on this array (B, T, 3C); NumPy's always does."""
    if capped("flash_attention", 1) == 0:
        return False
    if not is_device(qkv):
        return True
    HS = qkv.shape[2] // (3 * heads)
    if HS in WIDE_HEADS and capped("flash_attention", 3) != 3:
        return False
    return HS in HEAD_SIZES + WIDE_HEADS and any(
        fitting(v, HS, qkv) for v in ((3,) if is_half(qkv.dtype) else (2, 4)))


def prepare(version, arrays, heads):
    """The version that runs, after the checks that all launches share; arrays: qkv, then what goes with it."""
    qkv = arrays[0]
    B, T, width = qkv.shape
    HS = width // (3 * heads)
    if not (is_half(qkv.dtype) or qkv.dtype == np.float32) or any(a.dtype != qkv.dtype for a in arrays[:3]) \
            or any(a.dtype != np.float32 for a in arrays[3:]):
        raise ValueError("on a GPU, flash attention takes qkv, dy and y all float32, float16 or bfloat16, and "
                         f"logsumexp float32, not {', '.join(str(a.dtype) for a in arrays)}; use cast_forward first")
    if HS not in HEAD_SIZES and not flash_attention_supports(qkv, heads):
        raise ValueError("flash attention has kernels for heads of 32, 64 and 72 channels, and in 16 bits from "
                         f"capability 8.0 on of 128, not {HS}; use attention_forward and attention_backward")
    if max(B, heads) > MAX_BLOCKS_YZ or T * width >= MAX_ELEMENTS:
        raise TooManyElementsError(f"qkv {qkv.shape} with {heads} heads is more than one launch can count; split the "
                                   "batch")
    half = is_half(qkv.dtype)
    if version is None:
        choices = ((5, 3, 1) if T > FEW_TOKENS else (3, 1)) if half else (4, 2, 1)
        version = next(v for v in choices if capped("flash_attention", v) == v and fitting(v, HS, qkv))
    if version not in ((1, 3, 5) if half else (1, 2, 4)):
        raise ValueError(f"there is no version {version} of flash attention in {qkv.dtype}: use "
                         f"{'1, 3 or 5' if half else '1, 2 or 4'}")
    if not fitting(version, HS, qkv):
        if version == 5:
            raise ValueError("version 5 (hopper) needs a device of capability 9.0, and heads of at most 72 channels; "
                             "use version=3")
        raise ValueError(f"version {label('flash_attention', version)} needs more shared memory for heads of {HS} "
                         "channels than a block may have on this device, or a device of capability 8.0; use version=1")
    if version > 1 and any(a.offset % 16 for a in arrays):
        raise ValueError(f"version {label('flash_attention', version)} moves 16 bytes at a time, and an array starts "
                         "in between; use version=1")
    return version


@versions_by_name(asks=True)
def flash_attention_forward(qkv, heads, order="legacy", version=None):
    """(y (B, T, C), logsumexp (B, heads, T)) of qkv (B, T, 3C); y is of qkv's type, logsumexp float32 on a GPU."""
    check(qkv, heads, order)
    if not is_device(qkv):
        return flash_attention_forward_reference(qkv, heads, order)
    B, T, width = qkv.shape
    HS, head_step, part = layout(qkv, heads, order)
    version, multiprocessors = prepare(version, (qkv,), heads), multiprocessors_of(qkv)
    y, logsumexp = empty((B, T, width // 3), qkv.dtype, like=qkv), empty((B, heads, T), np.float32, like=qkv)
    if version == 5:
        forward_hopper.launch_forward(qkv, y, logsumexp, heads, HS, head_step, part, multiprocessors)
        return y, logsumexp
    arguments = (qkv.reshape(-1), y.reshape(-1), logsumexp.reshape(-1), T, width, head_step, part, 1 / math.sqrt(HS))
    if version == 1:
        queries, threads, kernel, nbytes = simple.ROWS, simple.ROWS, simple_kernels[HS, "forward"], 0
    elif version == 2:
        warps = choose_warps(HS, nominal_extent(B) * heads, T, multiprocessors, shared_limit(qkv))
        queries, threads, kernel = forward.WARP_QUERIES * warps, WARP * warps, forward_kernels_v2[HS, warps]
        nbytes = 4 * forward.shared_floats(HS, warps)
    elif version == 3:
        queries = choose_queries(nominal_extent(B) * heads, T, multiprocessors)
        M = queries // 64
        threads, kernel, nbytes = forward_half.THREADS, forward_kernels_v3[HS, M], forward_half.shared_bytes(HS, M)
    else:
        queries, threads, kernel = forward_tf32_bf16.QUERIES, forward_tf32_bf16.THREADS, forward_kernels_v4[HS]
        nbytes = forward_tf32_bf16.shared_bytes(HS)
    launch(in_bfloat16(kernel, qkv.dtype), (-(-T // queries), heads, B), threads, *arguments, shared=nbytes)
    return y, logsumexp


def place_of_dq(dqkv, chunks, apart, heads, HS, head_step):
    """The destination of a kernel's dq, and elements there from a token to the next, and from a head to the next.

    That is dqkv itself, or, for separate partial sums, a float32 array (chunks, B, T, heads, HS).
    """
    B, T, width = dqkv.shape
    if not apart:
        return dqkv.reshape(-1), width, head_step
    return empty((chunks * B * T * heads * HS,), np.float32, like=dqkv), heads * HS, HS


def add_chunks(dq, dqkv, chunks, heads, HS, head_step, kernel=backward.add_chunks_kernel):
    """The chunks' sums, added in their order, become dqkv's dq."""
    B, T, width = dqkv.shape
    size = B * T * heads * HS
    launch(kernel, -(-size // (4 * backward.THREADS)), backward.THREADS, dq, dqkv.reshape(-1), size, chunks, width,
           head_step, heads, HS)


@versions_by_name(asks=True)
def flash_attention_backward(dy, qkv, y, logsumexp, heads, order="legacy", version=None):
    """dqkv (B, T, 3C) from dy (B, T, C) and what the forward took and gave."""
    check(qkv, heads, order)
    B, T, width = qkv.shape
    if tuple(dy.shape) != (B, T, width // 3) or dy.shape != y.shape or tuple(logsumexp.shape) != (B, heads, T):
        raise ValueError(f"dy {dy.shape}, y {y.shape} and logsumexp {logsumexp.shape} do not belong to qkv {qkv.shape} "
                         f"with {heads} heads; pass what flash_attention_forward gave")
    if not is_device(qkv):
        return flash_attention_backward_reference(dy, qkv, y, logsumexp, heads, order)
    HS, head_step, part = layout(qkv, heads, order)
    version = prepare(version, (qkv, dy, y, logsumexp), heads)
    rows, scale = B * T * heads, 1 / math.sqrt(HS)
    dqkv = empty(qkv.shape, qkv.dtype, like=qkv)
    if version == 5:
        chunks, chunk_tiles = choose_chunks(B * heads, T, multiprocessors_of(qkv), backward_hopper.KEYS,
                                            backward_hopper.CONSUMERS // WARP)
        apart = chunks * chunk_tiles > 1
        dq = place_of_dq(dqkv, chunks, apart, heads, HS, head_step)
        backward_hopper.launch_backward(dy, qkv, y, logsumexp, dqkv, *dq, heads, HS, head_step, part, chunks,
                                        chunk_tiles, multiprocessors_of(qkv))
        if apart:
            add_chunks(dq[0], dqkv, chunks, heads, HS, head_step)
        return dqkv
    D = empty((B, heads, T), np.float32, like=qkv)
    flat_dy, flat_y, flat_D, flat_dqkv = (a.reshape(-1) for a in (dy, y, D, dqkv))
    arrays = flat_dy, qkv.reshape(-1), logsumexp.reshape(-1), flat_D, flat_dqkv
    if version == 1:
        grid = -(-T // simple.ROWS), heads, B
        launch(simple.row_sums_kernel_v1, -(-rows // simple.ROWS), simple.ROWS, flat_dy, flat_y, flat_D, rows, T, heads,
               HS)
        for name in ("dq", "dkv"):
            launch(simple_kernels[HS, name], grid, simple.ROWS, *arrays, T, width, head_step, part, scale)
        return dqkv
    if version == 2:
        keys, warps, kernel, nbytes = KEYS, backward.WARPS, backward_kernels_v2[HS], 4 * backward.shared_floats(HS)
    elif version == 3:
        M, warps = choose_tile(HS, T, shared_limit(qkv))
        keys, kernel = 16 * M * warps, backward_kernels_v3[HS, M, warps]
        nbytes = backward_half.shared_bytes(HS, M, warps)
    else:
        keys, warps, kernel = backward_tf32_bf16.KEYS, backward_tf32_bf16.WARPS, backward_kernels_v4[HS]
        nbytes = backward_tf32_bf16.shared_bytes(HS)
    chunks, chunk_tiles = choose_chunks(B * heads, T, multiprocessors_of(qkv), keys, warps)
    own_sums = version == 3 and chunks == 1  # one block has all keys of a head, and makes its D on the way
    if not own_sums:
        launch(backward.row_sums_kernel_v2, -(-rows // backward.SUM_ROWS), backward.THREADS, flat_dy, flat_y, flat_D,
               rows, T, heads, HS)
    apart = chunks > 1 or version == 3 and chunk_tiles > 1  # sums of several blocks, or rounds, are float32
    dq, *dq_steps = place_of_dq(dqkv, chunks, apart, heads, HS, head_step)
    problem = backward.Problem(T, width, head_step, part, *dq_steps, chunk_tiles, scale)
    launch(in_bfloat16(kernel, qkv.dtype), (chunks, heads, B), WARP * warps, *arrays, dq, problem,
           *((flat_y, int(own_sums), int(apart), scale * LOG2_E) if version == 3 else ()), shared=nbytes)
    if apart:
        kernel = backward_half.add_partials_kernel if version == 3 else backward.add_chunks_kernel
        add_chunks(dq, dqkv, chunks, heads, HS, head_step, in_bfloat16(kernel, dqkv.dtype))
    return dqkv
