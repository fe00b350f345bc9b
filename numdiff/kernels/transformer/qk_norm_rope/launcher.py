"""QK-norm and rotary position embedding: which kernel runs, and where its results go.

VERSIONS
    v1 naive: one thread a head (naive.py).
    v2 fused: HS / 8 lanes of a warp a head, the next of it on its way; one kernel each way (fused.py). HS a multiple of
       8, at most 128; sm_80.
LAUNCH
    `choose_chunk` cuts the images so that all blocks run at once.
DETERMINISM
    no atomics; what is added to what depends on the shape and on the GPU's multiprocessors.
SOURCE
    reference.py.
READ NEXT
    ../swiglu.py
"""
import functools

import numpy as np

from ....device import empty, empty_like, is_device, launch
from ....device.limits import MULTIPROCESSORS, multiprocessors_of
from ....device.requires import supports
from ...common import no_numbers
from ...reduce import BLOCK
from ...second_pass import add_rows
from ...versions import versions_by_name
from .cpu import qk_norm_rope_backward_cpu, qk_norm_rope_forward_cpu
from .fused import BACKWARD, BACKWARD_BLOCKS, FORWARD, FORWARD_BLOCKS, LANES, THREADS, WARPS, Walk, key_of
from .naive import (
    Heads,
    qk_norm_rope_backward_kernel_v1,
    qk_norm_rope_forward_kernel_v1,
    qk_rstd_kernel_v1,
    qk_weight_kernel_v1,
)

MAX_CHUNKS = 512  # of the images
OVERHEAD = 1  # an image's worth of time that a block takes to begin and to end


@functools.cache
def choose_chunk(B, T, parts, blocks, multiprocessors=MULTIPROCESSORS):
    """Images that a block of version 2 takes, where a multiprocessor runs `blocks` at once: those with which all end
    soonest, counting turns of a warp."""
    columns = -(-T // WARPS) * parts

    def turns(chunk):
        return -(-columns * -(-B // chunk) // (blocks * multiprocessors)) * (chunk + OVERHEAD)

    return min(range(max(1, -(-B // MAX_CHUNKS)), max(B, 1) + 1), key=turns)


def _check(qkv, heads, q_weight, k_weight, rotation, version):
    """(HS, version) of a qkv (B, T, 3 · D); what does not fit is named."""
    if qkv.ndim != 3 or qkv.shape[2] % (6 * heads):
        raise ValueError(f"qk_norm_rope takes qkv (B, T, 3 · heads · HS), HS even, not {tuple(qkv.shape)} of {heads} "
                         "heads")
    HS = qkv.shape[2] // (3 * heads)
    if (q_weight is None) != (k_weight is None):
        raise ValueError("qk_norm_rope: give weights for both q and k, or for none")
    if q_weight is None and rotation is None:
        raise ValueError("qk_norm_rope: without weights and without a rotation there is nothing to do")
    for weight in (q_weight, k_weight):
        if weight is not None and tuple(weight.shape) != (HS,):
            raise ValueError(f"qk_norm_rope: a weight has the shape of a head, ({HS},), not {tuple(weight.shape)}")
    if rotation is not None and tuple(rotation.shape) != (2, qkv.shape[1], HS):
        raise ValueError(f"qk_norm_rope: cosines and sines must be (2, T, HS) = {(2, qkv.shape[1], HS)}, not "
                         f"{tuple(rotation.shape)}")
    supported = HS % 8 == 0 and HS <= 8 * LANES and (not is_device(qkv) or supports(qkv, FORWARD, BACKWARD))
    if version == 2 and not supported:
        raise ValueError(f"version 2 (fused) takes heads of a multiple of 8 channels, at most {8 * LANES}, on a device "
                         f"of capability 8.0, not heads of {HS} here; use version=1")
    return HS, version or (2 if supported else 1)


def _weights(q_weight, k_weight):
    return None if q_weight is None else np.stack((q_weight, k_weight))


def _flat(array, like):
    """What a kernel is given for an array that may be absent."""
    return no_numbers(like.backend) if array is None else array.reshape(-1)


def _grid(qkv, parts, blocks):
    """(version 2's grid, images a block)."""
    B, T, _ = qkv.shape
    chunk = choose_chunk(B, T, parts, blocks, multiprocessors_of(qkv))
    return (-(-T // WARPS), -(-B // chunk), parts), chunk


@versions_by_name
def qk_norm_rope_forward(qkv, heads, q_weight=None, k_weight=None, rotation=None, eps=1e-6, in_place=False, keeps=True,
                         version=None):
    """(y, what the backward needs): y is qkv with q and k of each head normalised (with weights) and rotated (with a
    rotation). in_place: y is qkv itself, overwritten; keeps: False where no backward will come.
    """
    HS, version = _check(qkv, heads, q_weight, k_weight, rotation, version)
    (B, T, _), D = qkv.shape, heads * HS
    norms, rotates = q_weight is not None, rotation is not None
    copies = norms and keeps and in_place
    if not is_device(qkv):
        y, kept = qkv if in_place else qkv.copy(), qkv[..., :2 * D].copy() if copies else qkv
        qk_norm_rope_forward_cpu(qkv, y, heads, _weights(q_weight, k_weight), rotation, eps)
        return y, kept if norms and keeps else None
    y, kept = qkv if in_place else empty_like(qkv), empty((B, T, 2 * D), qkv.dtype, like=qkv) if copies else qkv
    arrays = (qkv.reshape(-1), y.reshape(-1), kept.reshape(-1), _flat(q_weight, qkv), _flat(k_weight, qkv),
              _flat(rotation, qkv))
    parts = 2 if in_place else 3
    if version == 1:
        cut = Heads(B * T, T, heads, HS, parts, 2 * D, int(copies), int(norms), int(rotates))
        launch(qk_norm_rope_forward_kernel_v1, -(-B * T * parts * heads // BLOCK), BLOCK, *arrays, cut, float(eps))
    else:
        key = key_of(norms, rotates, HS)
        grid, chunk = _grid(qkv, parts, FORWARD_BLOCKS[key])
        launch(FORWARD[key], grid, THREADS, *arrays,
               Walk(B, T, heads, HS, D, chunk, 2 * D, int(copies), HS // 8, 1 / HS), float(eps))
    return y, kept if norms and keeps else None


@versions_by_name
def qk_norm_rope_backward(dy, kept, heads, q_weight=None, k_weight=None, rotation=None, dq_weight=None, dk_weight=None,
                          eps=1e-6, in_place=False, version=None):
    """dqkv from dy and what the forward kept (of a norm); gradients of weights are added into dq_weight and dk_weight,
    each None where it is not wanted.

    in_place: dqkv is dy itself, overwritten
    """
    HS, version = _check(dy, heads, q_weight, k_weight, rotation, version)
    (B, T, _), D = dy.shape, heads * HS
    norms, rotates = q_weight is not None, rotation is not None
    if not is_device(dy):
        dqkv = dy if in_place else dy.copy()
        sums = qk_norm_rope_backward_cpu(dy, kept, dqkv, heads, _weights(q_weight, k_weight), rotation, eps)
        for part, gradient in enumerate((dq_weight, dk_weight) if norms else ()):
            if gradient is not None:
                gradient += sums[part]
        return dqkv
    dqkv, parts, pitch = dy if in_place else empty_like(dy), 2 if in_place else 3, kept.shape[2] if norms else 0
    flat, before, out = dy.reshape(-1), (kept if norms else dy).reshape(-1), dqkv.reshape(-1)
    q_weight, k_weight, rotation = (_flat(a, dy) for a in (q_weight, k_weight, rotation))
    if version == 2:
        key = key_of(norms, rotates, HS)
        grid, chunk = _grid(dy, parts, BACKWARD_BLOCKS[key])
        sums = empty((2, grid[0] * grid[1], HS), like=dy) if norms else no_numbers(dy.backend)
        launch(BACKWARD[key], grid, THREADS, flat, before, q_weight, k_weight, rotation, out,
               sums.reshape(-1), Walk(B, T, heads, HS, D, chunk, pitch, 0, HS // 8, 1 / HS), float(eps))
    else:
        cut = Heads(B * T, T, heads, HS, parts, pitch, 0, int(norms), int(rotates))
        rstd = sums = no_numbers(dy.backend)
        if norms:
            rstd, sums = empty((B * T * 2 * heads,), like=dy), empty((2, heads, HS), like=dy)
            launch(qk_rstd_kernel_v1, -(-rstd.size // BLOCK), BLOCK, before, rstd, cut, float(eps))
            launch(qk_weight_kernel_v1, -(-sums.size // BLOCK), BLOCK, flat, before, rotation, rstd, sums.reshape(-1),
                   cut)
        launch(qk_norm_rope_backward_kernel_v1, -(-B * T * parts * heads // BLOCK), BLOCK, flat, before, q_weight,
               k_weight, rotation, rstd, out, cut)
    if norms:
        add_rows(sums, dq_weight, dk_weight)
    return dqkv
