"""Flash attention on arrays: which kernel runs, and where the heads of a packed qkv lie.

THE CHOICES
    version    2; 1 where a block may not have the shared memory
    forward    128 queries a block, or 64: whichever ends sooner, counting rows of queries a multiprocessor
    backward   chunks of keys: as many as end soonest, counting tiles of keys a multiprocessor
LAYOUT
    q of a head starts `head_step` after that of the head before; its k is `part` after q, its v `part` after k.
SOURCE
    the project's own; what the choices weigh is said beside them.
READ NEXT
    ../attention.py, for head sizes that have no kernels here.
"""
import math

import numpy as np

from ...device import empty, is_device, launch
from ..attention import check
from . import backward, forward, simple
from .patches import KEYS, WARP
from .reference import flash_attention_backward_reference, flash_attention_forward_reference

HEAD_SIZES = 32, 64, 72
LARGEST_BATCH = 65535  # blocks in a grid's second and third axis
LARGEST_IMAGE = 2**31  # elements; within an image the kernels count in 32 bits
MULTIPROCESSORS = 132  # where the backend has no number of its own
SMALL_BLOCK = 1.2  # time of a row in a block of 64 queries, for 1 in one of 128: it shares its keys with fewer
CHUNK = 0.1  # tiles' worth of work that a chunk costs: its dq is written apart, and read to be added
SHARED_LIMIT = 227 << 10  # bytes that a block may have, where the backend has no number of its own: an H100's

simple_kernels = {(HS, name): kernel for HS in HEAD_SIZES
                  for name, kernel in zip(("forward", "dq", "dkv"), simple.make_kernels(HS), strict=True)}
forward_kernels_v2 = {(HS, warps): forward.make_forward(HS, warps) for HS in HEAD_SIZES for warps in (4, 2)}
backward_kernels_v2 = {HS: backward.make_backward(HS) for HS in HEAD_SIZES}


def layout(qkv, heads, order):
    """(HS, head_step, part) of qkv's channels: see LAYOUT."""
    HS = qkv.shape[2] // (3 * heads)
    return (HS, 3 * HS, HS) if order == "legacy" else (HS, HS, heads * HS)


def shared_limit(array):
    """Bytes of shared memory that a block may have on the array's device."""
    device = getattr(array.backend, "device", None)
    return device.properties.max_shared_memory_per_block_optin if device else SHARED_LIMIT


def multiprocessors_of(array):
    return getattr(array.backend, "multiprocessors", MULTIPROCESSORS)


def idling(warps):
    """How much longer work takes for want of other warps to run while one waits; registers leave room for eight."""
    return 1 + 4 / min(warps, 8)


def choose_warps(HS, batch, T, multiprocessors, limit):
    """4 or 2 warps a block of the forward, or None if neither finds the shared memory."""
    def rows(warps):
        queries = forward.WARP_QUERIES * warps
        blocks = -(-batch * -(-T // queries) // multiprocessors)
        return blocks * queries * idling(blocks * warps) * (1 if warps == 4 else SMALL_BLOCK)

    return min((warps for warps in (4, 2) if 4 * forward.shared_floats(HS, warps) <= limit), key=rows, default=None)


def choose_chunks(batch, T, multiprocessors):
    """(chunks of keys, tiles a chunk) of the backward."""
    tiles = -(-T // KEYS)

    def rounds(chunks):
        blocks = -(-batch * chunks // multiprocessors)
        return blocks * idling(blocks * backward.WARPS) * (-(-tiles // chunks) + (CHUNK if chunks > 1 else 0))

    chunks = min(range(1, min(tiles, backward.LARGEST_CHUNKS) + 1), key=rounds)
    chunk_tiles = -(-tiles // chunks)
    return -(-tiles // chunk_tiles), chunk_tiles


def flash_attention_takes(qkv, heads):
    """Whether the fast kernels, forward and backward, run on this array (B, T, 3C); NumPy's always does."""
    if not is_device(qkv):
        return True
    HS = qkv.shape[2] // (3 * heads)
    return HS in HEAD_SIZES and 4 * backward.shared_floats(HS) <= shared_limit(qkv)


def prepare(version, fits, arrays, heads):
    """The version that runs, after the checks that all launches share; arrays: qkv, then what goes with it."""
    B, T, width = arrays[0].shape
    HS = width // (3 * heads)
    if any(a.dtype != np.float32 for a in arrays):
        raise ValueError(f"flash attention is float32 on a GPU, not {', '.join(str(a.dtype) for a in arrays)}; use "
                         "cast_forward first")
    if HS not in HEAD_SIZES:
        raise ValueError(f"flash attention has kernels for heads of 32, 64 and 72 channels, not {HS}; use "
                         "attention_forward and attention_backward")
    if max(B, heads) > LARGEST_BATCH or T * width >= LARGEST_IMAGE:
        raise ValueError(f"qkv {arrays[0].shape} with {heads} heads is more than one launch can count; split the batch")
    if version is None:
        version = 2 if fits else 1
    if version not in (1, 2):
        raise ValueError(f"there is no version {version} of flash attention: use 1 or 2")
    if version == 2 and not fits:
        raise ValueError(f"version 2 needs more shared memory for heads of {HS} channels than a block may have on this "
                         "device; use version=1")
    if version == 2 and any(a.offset % 16 for a in arrays):
        raise ValueError("version 2 moves 16 bytes at a time, and an array starts in between; use version=1")
    return version


def flash_attention_forward(qkv, heads, order="legacy", version=None):
    """(y (B, T, C), logsumexp (B, heads, T)) of qkv (B, T, 3C)."""
    check(qkv, heads, order)
    if not is_device(qkv):
        return flash_attention_forward_reference(qkv, heads, order)
    B, T, width = qkv.shape
    HS, head_step, part = layout(qkv, heads, order)
    warps = choose_warps(HS, B * heads, T, multiprocessors_of(qkv), shared_limit(qkv))
    version = prepare(version, warps is not None, (qkv,), heads)
    y, logsumexp = empty((B, T, width // 3), like=qkv), empty((B, heads, T), like=qkv)
    arguments = (qkv.reshape(-1), y.reshape(-1), logsumexp.reshape(-1), T, width, head_step, part, 1 / math.sqrt(HS))
    if version == 1:
        launch(simple_kernels[HS, "forward"], (-(-T // simple.ROWS), heads, B), simple.ROWS, *arguments)
    else:
        launch(forward_kernels_v2[HS, warps], (-(-T // (forward.WARP_QUERIES * warps)), heads, B), WARP * warps,
               *arguments, shared=4 * forward.shared_floats(HS, warps))
    return y, logsumexp


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
    fits = 4 * backward.shared_floats(HS) <= shared_limit(qkv)
    version = prepare(version, fits, (qkv, dy, y, logsumexp), heads)
    rows, scale = B * T * heads, 1 / math.sqrt(HS)
    D, dqkv = empty((B, heads, T), like=qkv), empty(qkv.shape, like=qkv)
    flat_dy, flat_y, flat_D, flat_dqkv = (a.reshape(-1) for a in (dy, y, D, dqkv))
    arrays = flat_dy, qkv.reshape(-1), logsumexp.reshape(-1), flat_D, flat_dqkv
    if version == 1:
        grid = -(-T // simple.ROWS), heads, B
        launch(simple.row_sums_kernel_v1, -(-rows // simple.ROWS), simple.ROWS, flat_dy, flat_y, flat_D, rows, T, heads,
               HS)
        for name in ("dq", "dkv"):
            launch(simple_kernels[HS, name], grid, simple.ROWS, *arrays, T, width, head_step, part, scale)
        return dqkv
    launch(backward.row_sums_kernel_v2, -(-rows // backward.SUM_ROWS), backward.THREADS, flat_dy, flat_y, flat_D, rows,
           T, heads, HS)
    chunks, chunk_tiles = choose_chunks(B * heads, T, multiprocessors_of(qkv))
    dq, dq_row, dq_head = flat_dqkv, width, head_step
    if chunks > 1:
        dq, dq_row, dq_head = empty((chunks * rows * HS,), like=qkv), heads * HS, HS
    launch(backward_kernels_v2[HS], (chunks, heads, B), backward.THREADS, *arrays, dq, T, width, head_step, part,
           dq_row, dq_head, chunk_tiles, scale, shared=4 * backward.shared_floats(HS))
    if chunks > 1:
        launch(backward.add_chunks_kernel, -(-rows * HS // (4 * backward.THREADS)), backward.THREADS, dq, flat_dqkv,
               rows * HS, chunks, width, head_step, heads, HS)
    return dqkv
