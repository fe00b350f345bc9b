"""QK-norm and rotary position embedding: which kernel runs, and where its results go.

VERSIONS
    v1 naive: one thread a head (naive.py).
    v2 fused: HS / 8 lanes of a warp a head, the next of it in flight; one kernel each way
       (fused.py). HS a multiple of 8, at most 128; sm_80.
LAUNCH
    `choose_chunk` cuts the images so that all blocks run at once.
DETERMINISM
    no atomics; what is added to what depends on the shape and on the GPU's multiprocessors.
SOURCE
    reference.py.
READ NEXT
    functional.py
"""

import functools

import numpy as np

from ...device import empty, empty_like, launch
from ...device.common import no_numbers
from ...device.limits import MULTIPROCESSORS, multiprocessors_of
from ...kernels.operation import Problem, Version, half, operation, single
from ...kernels.reduce.second_pass import add_rows
from ...kernels.reduce.trees import BLOCK
from .cpu import qk_norm_rope_backward_cpu, qk_norm_rope_forward_cpu
from .fused import (
    BACKWARD,
    BACKWARD_BLOCKS,
    FORWARD,
    FORWARD_BLOCKS,
    LANES,
    THREADS,
    WARPS,
    QkNormWalk,
    key_of,
)
from .naive import (
    Heads,
    qk_norm_rope_backward_kernel_v1,
    qk_norm_rope_forward_kernel_v1,
    qk_rstd_kernel_v1,
    qk_weight_kernel_v1,
)
from .reference import qk_norm_rope_backward_cost, qk_norm_rope_forward_cost

MAX_CHUNKS = 512  # of the images
OVERHEAD = 1  # an image's worth of time that a block takes to begin and to end


@functools.cache
def choose_chunk(B, T, parts, blocks, multiprocessors=MULTIPROCESSORS):
    """Images that a block of version 2 takes, where a multiprocessor runs `blocks` at once: those
    with which all end soonest, counting turns of a warp."""
    columns = -(-T // WARPS) * parts

    def turns(chunk):
        return -(-columns * -(-B // chunk) // (blocks * multiprocessors)) * (chunk + OVERHEAD)

    return min(range(max(1, -(-B // MAX_CHUNKS)), max(B, 1) + 1), key=turns)


# What NumPy's arrays go to ------------------------------------------------------------------------


def _weights(q_weight, k_weight):
    return None if q_weight is None else np.stack((q_weight, k_weight))


def forward_on_cpu(
    qkv, heads, q_weight=None, k_weight=None, rotation=None, eps=1e-6, in_place=False, keeps=True
):
    norms, D = q_weight is not None, qkv.shape[2] // 3
    y, kept = (
        qkv if in_place else qkv.copy(),
        qkv[..., : 2 * D].copy() if norms and keeps and in_place else qkv,
    )
    qk_norm_rope_forward_cpu(qkv, y, heads, _weights(q_weight, k_weight), rotation, eps)
    return y, kept if norms and keeps else None


def backward_on_cpu(
    dy,
    kept,
    heads,
    q_weight=None,
    k_weight=None,
    rotation=None,
    dq_weight=None,
    dk_weight=None,
    eps=1e-6,
    in_place=False,
):
    dqkv = dy if in_place else dy.copy()
    sums = qk_norm_rope_backward_cpu(
        dy, kept, dqkv, heads, _weights(q_weight, k_weight), rotation, eps
    )
    for part, gradient in enumerate((dq_weight, dk_weight) if q_weight is not None else ()):
        if gradient is not None:
            gradient += sums[part]
    return dqkv


# Operations ---------------------------------------------------------------------------------------


def _check(qkv, heads, q_weight, k_weight, rotation):
    if qkv.ndim != 3 or qkv.shape[2] % (6 * heads):
        raise ValueError(
            f"qk_norm_rope takes qkv (B, T, 3 · heads · HS), HS even, not {tuple(qkv.shape)} of {heads} "
            "heads"
        )
    HS = qkv.shape[2] // (3 * heads)
    if (q_weight is None) != (k_weight is None):
        raise ValueError("qk_norm_rope: give weights for both q and k, or for none")
    if q_weight is None and rotation is None:
        raise ValueError(
            "qk_norm_rope: without weights and without a rotation there is nothing to do"
        )
    for weight in (q_weight, k_weight):
        if weight is not None and tuple(weight.shape) != (HS,):
            raise ValueError(
                f"qk_norm_rope: a weight has the shape of a head, ({HS},), not {tuple(weight.shape)}"
            )
    if rotation is not None and tuple(rotation.shape) != (2, qkv.shape[1], HS):
        raise ValueError(
            f"qk_norm_rope: cosines and sines must be (2, T, HS) = {(2, qkv.shape[1], HS)}, not "
            f"{tuple(rotation.shape)}"
        )


def _check_backward(dy, heads, q_weight, k_weight, rotation):
    _check(dy, heads, q_weight, k_weight, rotation)


def _lacks_eights(qkv, heads):
    """What v2 needs and heads lack; None if they are made of eights and fit into its lanes."""
    HS, largest = qkv.shape[2] // (3 * heads), 8 * LANES
    return (
        f"takes heads of a multiple of 8 channels, at most {largest}, not {HS}"
        if HS % 8 or HS > largest
        else None
    )


def _flat(array, like):
    """What a kernel is given for an array that may be absent."""
    return no_numbers(like.backend) if array is None else array.reshape(-1)


def _grid(qkv, parts, blocks):
    """(version 2's grid, images a block)."""
    B, T, _ = qkv.shape
    chunk = choose_chunk(B, T, parts, blocks, multiprocessors_of(qkv))
    return (-(-T // WARPS), -(-B // chunk), parts), chunk


def _problems(backward):
    """The small problems of a direction: heads that share a warp and heads that fill none; in place
    and not, norm and rotation alone."""
    found = []
    for (B, T, heads, HS), norms, rotates, in_place, array in (
        ((2, 9, 2, 8), True, True, True, single),
        ((1, 3, 3, 6), True, True, False, single),
        ((1, 1, 4, 72), True, True, True, half),
        ((1, 1, 9, 128), True, False, False, single),
        ((1, 1, 5, 64), True, True, True, single),
        ((1, 1, 5, 64), True, False, False, single),
        ((1, 2, 2, 8), False, True, False, half),
    ):
        label = (
            f"{heads} heads of {HS}{', in place' * in_place}{', no norm' * (not norms)}"
            f"{', no rotation' * (not rotates)}{', float16' * (array is half)}"
        )
        D = heads * HS
        given = {"heads": heads, "in_place": in_place, "bfloat16": array is half}
        if norms:
            given |= {"q_weight": single(HS), "k_weight": single(HS)}
        if rotates:
            given["rotation"] = single(2, T, HS)
        if not backward:
            found.append(Problem(label, qkv=array(B, T, 3 * D), **given))
            continue
        if norms:
            given |= {"dq_weight": single(HS), "dk_weight": single(HS)}
        kept = array(B, T, (2 if in_place else 3) * D) if norms else None
        found.append(Problem(label, dy=array(B, T, 3 * D), kept=kept, **given))
    return found


QKV, HEAD = half(64, 256, 3 * 768), single(64)  # of a DiT-B/2, for the benchmark
MEASURED = {
    "heads": 12,
    "q_weight": HEAD,
    "k_weight": HEAD,
    "rotation": single(2, 256, 64),
    "in_place": True,
    "measured": True,
}


@operation(
    reference=forward_on_cpu,
    cost=qk_norm_rope_forward_cost,
    exact_bytes=True,
    check=_check,
    versions=[
        Version("naive", qk_norm_rope_forward_kernel_v1),
        Version("fused", FORWARD, fits=_lacks_eights, requires="7.5"),
    ],
    problems=[
        *_problems(backward=False),
        Problem(qkv=QKV, note="training", **MEASURED),
        Problem(qkv=QKV, keeps=False, **MEASURED),
    ],
)
def qk_norm_rope_forward(
    qkv,
    heads,
    q_weight=None,
    k_weight=None,
    rotation=None,
    eps=1e-6,
    in_place=False,
    keeps=True,
    version=None,
):
    """(y, what the backward needs): y is qkv with q and k of each head normalised (with weights)
    and rotated (with a rotation). in_place: y is qkv itself, overwritten; keeps: False where no
    backward will come.
    """
    (B, T, width), norms, rotates = qkv.shape, q_weight is not None, rotation is not None
    D, HS, copies = width // 3, width // (3 * heads), norms and keeps and in_place
    y, kept = (
        qkv if in_place else empty_like(qkv),
        empty((B, T, 2 * D), qkv.dtype, like=qkv) if copies else qkv,
    )
    arrays = (
        qkv.reshape(-1),
        y.reshape(-1),
        kept.reshape(-1),
        _flat(q_weight, qkv),
        _flat(k_weight, qkv),
        _flat(rotation, qkv),
    )
    parts = 2 if in_place else 3
    if version.name == "naive":
        cut = Heads(B * T, T, heads, HS, parts, 2 * D, int(copies), int(norms), int(rotates))
        launch(version.kernel, -(-B * T * parts * heads // BLOCK), BLOCK, *arrays, cut, float(eps))
    else:
        key = key_of(norms, rotates, HS)
        grid, chunk = _grid(qkv, parts, FORWARD_BLOCKS[key])
        launch(
            version.kernel[key],
            grid,
            THREADS,
            *arrays,
            QkNormWalk(B, T, heads, HS, D, chunk, 2 * D, int(copies), HS // 8, 1 / HS),
            float(eps),
        )
    return y, kept if norms and keeps else None


@operation(
    reference=backward_on_cpu,
    cost=qk_norm_rope_backward_cost,
    exact_bytes=True,
    check=_check_backward,
    versions=[
        Version("naive", qk_norm_rope_backward_kernel_v1),
        Version("fused", BACKWARD, fits=_lacks_eights, of=("dy", "heads"), requires="7.5"),
    ],
    problems=[
        *_problems(backward=True),
        Problem(dy=QKV, kept=half(64, 256, 2 * 768), dq_weight=HEAD, dk_weight=HEAD, **MEASURED),
    ],
    writes=("dq_weight", "dk_weight"),
)
def qk_norm_rope_backward(
    dy,
    kept,
    heads,
    q_weight=None,
    k_weight=None,
    rotation=None,
    dq_weight=None,
    dk_weight=None,
    eps=1e-6,
    in_place=False,
    version=None,
):
    """dqkv from dy and what the forward kept (of a norm); gradients of weights are added into
    dq_weight and dk_weight, each None if it is not wanted.

    in_place: dqkv is dy itself, overwritten
    """
    (B, T, width), norms, rotates = dy.shape, q_weight is not None, rotation is not None
    D, HS, parts, pitch = (
        width // 3,
        width // (3 * heads),
        2 if in_place else 3,
        kept.shape[2] if norms else 0,
    )
    dqkv = dy if in_place else empty_like(dy)
    flat, before, out = dy.reshape(-1), (kept if norms else dy).reshape(-1), dqkv.reshape(-1)
    q_weight, k_weight, rotation = (_flat(a, dy) for a in (q_weight, k_weight, rotation))
    if version.name == "fused":
        key = key_of(norms, rotates, HS)
        grid, chunk = _grid(dy, parts, BACKWARD_BLOCKS[key])
        sums = empty((2, grid[0] * grid[1], HS), like=dy) if norms else no_numbers(dy.backend)
        launch(
            version.kernel[key],
            grid,
            THREADS,
            flat,
            before,
            q_weight,
            k_weight,
            rotation,
            out,
            sums.reshape(-1),
            QkNormWalk(B, T, heads, HS, D, chunk, pitch, 0, HS // 8, 1 / HS),
            float(eps),
        )
    else:
        cut = Heads(B * T, T, heads, HS, parts, pitch, 0, int(norms), int(rotates))
        rstd = sums = no_numbers(dy.backend)
        if norms:
            rstd, sums = empty((B * T * 2 * heads,), like=dy), empty((2, heads, HS), like=dy)
            launch(qk_rstd_kernel_v1, -(-rstd.size // BLOCK), BLOCK, before, rstd, cut, float(eps))
            launch(
                qk_weight_kernel_v1,
                -(-sums.size // BLOCK),
                BLOCK,
                flat,
                before,
                rotation,
                rstd,
                sums.reshape(-1),
                cut,
            )
        launch(
            version.kernel,
            -(-B * T * parts * heads // BLOCK),
            BLOCK,
            flat,
            before,
            q_weight,
            k_weight,
            rotation,
            rstd,
            out,
            cut,
        )
    if norms:
        add_rows(sums, dq_weight, dk_weight)
    return dqkv
