"""Flash attention on arrays: which kernel runs, and where the heads of a packed qkv are.

THE CHOICES
    version    float16: 5 on sm_90a or 3, whichever choice.py estimates to be faster, else 3. float32, and the first
               rungs of the ladder, are extensions': 4 tf32-bf16 (extras/tf32/attention); 1 naive and 2
               register-tiled, the lecture versions (extras/levels/attention), of which 1 is the last resort.
               Each only where a block may have the shared memory. unfused.py computes what has no kernel here
    tiles      queries of a block forward, tiles and chunks of keys backward: choice.py
LAYOUT
    q of a head starts `head_step` after that of the head before; its k is `part` after q, its v
    `part` after k.
SOURCE
    the project's own; choice.py has the costs.
READ NEXT
    backward_hopper/
"""

import functools
import itertools
import math

import numpy as np

from ... import extensions
from ...device import empty, is_device, launch
from ...device.batch_invariance import nominal_extent
from ...device.half import in_bfloat16
from ...device.limits import MAX_BLOCKS_YZ, MAX_ELEMENTS, WARP, multiprocessors_of, shared_limit
from ...device.specialise import Variants
from ...dtypes import HALVES, is_half
from ...errors import TooManyElementsError
from ..operation import Version, operation
from ..operation.versions import capped
from . import backward_half, forward_half, forward_hopper
from . import heads as parts
from .backward_hopper import kernel as backward_hopper
from .backward_hopper.layout import AttentionBackwardProblem as BackwardProblem
from .choice import (
    BACKWARD,
    choose_chunks,
    choose_queries,
    choose_tile,
    hopper_pays_backward,
    hopper_pays_forward,
    single_tile,
)
from .problems import problems
from .reference import (
    flash_attention_backward_cost,
    flash_attention_backward_reference,
    flash_attention_forward_cost,
    flash_attention_forward_reference,
)
from .unfused import check

HEAD_SIZES = 32, 64, 72
WIDE_HEADS = (128,)  # of version 3 alone
forward_kernels_v3 = Variants(
    itertools.product(HEAD_SIZES + WIDE_HEADS, (1, 2)), lambda key: forward_half.make_forward(*key)
)
# fragments of keys a warp, and warps, of version 3's backward
HALF_TILES = (1, 4), (2, 4), (1, 8), (2, 8)
backward_kernels_v3 = Variants(
    [
        *((HS, *tile) for HS in HEAD_SIZES for tile in ((1, 4), (2, 4), (2, 8))),
        (128, 1, 4),
        (128, 1, 8),
    ],
    lambda key: backward_half.make_backward(*key),
)


def layout(qkv, heads, order):
    """(HS, head_step, part) of qkv's channels: see LAYOUT."""
    HS = qkv.shape[2] // (3 * heads)
    return (HS, 3 * HS, HS) if order == "legacy" else (HS, HS, heads * HS)


def tiles_that_fit(HS, limit):
    """[(fragments of keys a warp, warps)] of version 3's backward that find the shared memory."""
    return [
        shape
        for shape in HALF_TILES
        if (HS, *shape) in backward_kernels_v3 and backward_half.shared_bytes(HS, *shape) <= limit
    ]


# Which version runs -------------------------------------------------------------------------------


def head_size(qkv, heads):
    return qkv.shape[2] // (3 * heads)


def lacks_small_heads(HS):
    return None if HS in HEAD_SIZES else f"has heads of 32, 64 and 72 channels, not {HS}"


def lacks_memory(HS, nbytes, limit):
    if nbytes <= limit:
        return None
    return (
        f"needs more shared memory for heads of {HS} channels than a block may have on this device"
    )


def _mma_lacks(HS, limit):
    return None if tiles_that_fit(HS, limit) else lacks_memory(HS, math.inf, limit)


def _extension(name):
    return extensions.find("flash_attention", name, f"version {name!r} of flash_attention")


def hopper_pays(qkv, heads, backward):
    """Whether version 5 is estimated to take less time than version 3."""
    (B, T, _), HS, multiprocessors = qkv.shape, head_size(qkv, heads), multiprocessors_of(qkv)
    given = nominal_extent(B) * heads, T, HS, multiprocessors
    if backward:
        return hopper_pays_backward(tiles_that_fit(HS, shared_limit(qkv)), *given)
    return hopper_pays_forward(*given)


def _versions(*arrays):
    """[Version] of a direction, which have the same needs. arrays: names of its arrays but qkv"""

    def fitting(lacks, bytes_at_once=16):
        def fits(qkv, heads, *others):
            if any(a.offset % bytes_at_once for a in (qkv, *others)):
                return "moves 16 bytes at a time, and an array starts in between"
            return lacks(head_size(qkv, heads), shared_limit(qkv))

        return {"of": ("qkv", "heads", *arrays), "fits": fits, "ladder": "flash_attention"}

    extended = [
        Version(
            name,
            number=of["number"],
            dtypes=of.get("dtypes"),
            requires=of.get("requires"),
            **fitting(
                lambda *given, name=name: _extension(name).lacks(*given),
                of.get("bytes_at_once", 16),
            ),
        )
        for name, (_, of) in extensions.entries("flash_attention").items()
    ]
    halves = tuple(HALVES)
    own = [
        Version("mma", number=3, dtypes=halves, requires="7.5", **fitting(_mma_lacks)),
        Version(
            "hopper",
            number=5,
            dtypes=halves,
            requires="9.0a",
            **fitting(lambda HS, limit: lacks_small_heads(HS)),
            pays=lambda qkv, heads: hopper_pays(qkv, heads, bool(arrays)),
        ),
    ]
    return sorted(extended + own, key=lambda version: version.number)


def flash_attention_supports(qkv, heads):
    """Whether the fast kernels, forward and backward, run on this array (B, T, 3C); NumPy's always
    does."""
    if capped("flash_attention", 1) == 0:
        return False
    if not is_device(qkv):
        return True
    if head_size(qkv, heads) in WIDE_HEADS and capped("flash_attention", 3) != 3:
        return False
    return any(
        version.number > 1 and version.lacks(qkv, {"qkv": qkv, "heads": heads}) is None
        for version in flash_attention_forward.operation.versions
    )


def _check(arrays, heads, order):
    """Raise what is wrong with the operands. arrays: qkv, then what goes with it"""
    qkv = arrays[0]
    check(qkv, heads, order)
    if not is_device(qkv):
        return
    B, T, width = qkv.shape
    HS = width // (3 * heads)
    if (
        not (is_half(qkv.dtype) or qkv.dtype == np.float32)
        or any(a.dtype != qkv.dtype for a in arrays[:3])
        or any(a.dtype != np.float32 for a in arrays[3:])
    ):
        raise ValueError(
            "on a GPU, flash attention takes qkv, dy and y all float32, float16 or bfloat16, and "
            f"logsumexp float32, not {', '.join(str(a.dtype) for a in arrays)}; use cast_forward first"
        )
    if HS not in HEAD_SIZES and not flash_attention_supports(qkv, heads):
        raise ValueError(
            "flash attention has kernels for heads of 32, 64 and 72 channels, and in 16 bits from "
            f"capability 8.0 on of 128, not {HS}; use attention_forward and attention_backward"
        )
    if max(B, heads) > MAX_BLOCKS_YZ or T * width >= MAX_ELEMENTS:
        raise TooManyElementsError(
            f"qkv {qkv.shape} with {heads} heads is more than one launch can count; split the batch"
        )


def _check_forward(qkv, heads, order):
    _check((qkv,), heads, order)


def _check_backward(dy, qkv, y, logsumexp, heads, order):
    check(qkv, heads, order)
    B, T, width = qkv.shape
    if (
        tuple(dy.shape) != (B, T, width // 3)
        or dy.shape != y.shape
        or tuple(logsumexp.shape) != (B, heads, T)
    ):
        raise ValueError(
            f"dy {dy.shape}, y {y.shape} and logsumexp {logsumexp.shape} do not belong to qkv {qkv.shape} "
            f"with {heads} heads; pass what flash_attention_forward gave"
        )
    _check((qkv, dy, y, logsumexp), heads, order)


# Operations ---------------------------------------------------------------------------------------


@operation(
    reference=flash_attention_forward_reference,
    check=_check_forward,
    versions=_versions(),
    cost=lambda qkv, heads: flash_attention_forward_cost(*qkv.shape[:2], qkv.shape[2] // 3, heads),
    problems=functools.partial(problems, False),
)
def flash_attention_forward(qkv, heads, order="legacy", version=None):
    """(y (B, T, C), logsumexp (B, heads, T)) of qkv (B, T, 3C); y is of qkv's type, logsumexp
    float32 on a GPU."""
    B, T, width = qkv.shape
    HS, head_step, part = layout(qkv, heads, order)
    multiprocessors = multiprocessors_of(qkv)
    y, logsumexp = (
        empty((B, T, width // 3), qkv.dtype, like=qkv),
        empty((B, heads, T), np.float32, like=qkv),
    )
    if version.name == "hopper":
        forward_hopper.launch_forward(
            qkv, y, logsumexp, heads, HS, head_step, part, multiprocessors
        )
        return y, logsumexp
    arguments = (
        qkv.reshape(-1),
        y.reshape(-1),
        logsumexp.reshape(-1),
        T,
        width,
        head_step,
        part,
        1 / math.sqrt(HS),
    )
    if version.name == "mma":
        queries = choose_queries(nominal_extent(B) * heads, T, HS, multiprocessors)
        M = queries // 64
        threads, kernel, nbytes = (
            forward_half.THREADS,
            forward_kernels_v3[HS, M],
            forward_half.shared_bytes(HS, M),
        )
    else:
        queries, threads, kernel, nbytes = _extension(version.name).forward_of(qkv, heads)
    launch(
        in_bfloat16(kernel, qkv.dtype),
        (-(-T // queries), heads, B),
        threads,
        *arguments,
        shared=nbytes,
    )
    return y, logsumexp


def place_of_dq(dqkv, chunks, apart, heads, HS, head_step):
    """The destination of a kernel's dq, and elements there from a token to the next, and from a
    head to the next.

    That is dqkv itself, or, for separate partial sums, a float32 array (chunks, B, T, heads, HS).
    """
    B, T, width = dqkv.shape
    if not apart:
        return dqkv.reshape(-1), width, head_step
    return empty((chunks * B * T * heads * HS,), np.float32, like=dqkv), heads * HS, HS


def add_chunks(dq, dqkv, chunks, heads, HS, head_step, kernel=parts.add_chunks_kernel):
    """The chunks' sums, added in their order, become dqkv's dq."""
    B, T, width = dqkv.shape
    size = B * T * heads * HS
    launch(
        kernel,
        -(-size // (4 * parts.THREADS)),
        parts.THREADS,
        dq,
        dqkv.reshape(-1),
        size,
        chunks,
        width,
        head_step,
        heads,
        HS,
    )


@operation(
    reference=flash_attention_backward_reference,
    check=_check_backward,
    versions=_versions("dy", "y", "logsumexp"),
    problems=functools.partial(problems, True),
    cost=lambda qkv, heads: flash_attention_backward_cost(*qkv.shape[:2], qkv.shape[2] // 3, heads),
)
def flash_attention_backward(dy, qkv, y, logsumexp, heads, order="legacy", version=None):
    """dqkv (B, T, 3C) from dy (B, T, C) and what the forward took and gave."""
    B, T, width = qkv.shape
    HS, head_step, part = layout(qkv, heads, order)
    mma = version.name == "mma"
    rows, scale = B * T * heads, 1 / math.sqrt(HS)
    dqkv = empty(qkv.shape, qkv.dtype, like=qkv)
    if version.name == "hopper":
        chunks, chunk_tiles = choose_chunks(
            B * heads, T, HS, multiprocessors_of(qkv), BACKWARD["hopper"]
        )[:2]
        apart = chunks * chunk_tiles > 1
        dq = place_of_dq(dqkv, chunks, apart, heads, HS, head_step)
        units = B * heads * chunks
        problem = BackwardProblem(
            B, T, heads, head_step, part, *dq[1:], chunks, chunk_tiles, units, scale
        )
        backward_hopper.launch_backward(
            dy, qkv, y, logsumexp, dqkv, dq[0], HS, problem, multiprocessors_of(qkv)
        )
        if apart:
            add_chunks(dq[0], dqkv, chunks, heads, HS, head_step)
        return dqkv
    D = empty((B, heads, T), np.float32, like=qkv)
    flat_dy, flat_y, flat_D, flat_dqkv = (a.reshape(-1) for a in (dy, y, D, dqkv))
    arrays = flat_dy, qkv.reshape(-1), logsumexp.reshape(-1), flat_D, flat_dqkv
    extension = None if mma else _extension(version.name)
    if hasattr(extension, "launch_backward"):
        extension.launch_backward(arrays, flat_y, qkv, heads, (head_step, part, scale))
        return dqkv
    if mma:
        fit = tiles_that_fit(HS, shared_limit(qkv))
        M, warps = choose_tile(fit, B * heads, T, HS, multiprocessors_of(qkv))
        keys, kernel = 16 * M * warps, backward_kernels_v3[HS, M, warps]
        nbytes = backward_half.shared_bytes(HS, M, warps)
    else:
        keys, warps, kernel, nbytes = extension.backward_of(qkv, heads)
    tile = BACKWARD[M, warps] if mma else single_tile(keys, warps)
    chunks, chunk_tiles = choose_chunks(B * heads, T, HS, multiprocessors_of(qkv), tile)[:2]
    own_sums = mma and chunks == 1  # one block has all keys of a head, and makes its D on the way
    if not own_sums:
        launch(
            parts.row_sums_kernel_v2,
            -(-rows // parts.SUM_ROWS),
            parts.THREADS,
            flat_dy,
            flat_y,
            flat_D,
            rows,
            T,
            heads,
            HS,
        )
    apart = chunks > 1 or mma and chunk_tiles > 1  # sums of several blocks, or rounds, are float32
    dq, *dq_steps = place_of_dq(dqkv, chunks, apart, heads, HS, head_step)
    problem = parts.AttentionProblem(T, width, head_step, part, *dq_steps, chunk_tiles, scale)
    launch(
        in_bfloat16(kernel, qkv.dtype),
        (chunks, heads, B),
        WARP * warps,
        *arrays,
        dq,
        problem,
        *((flat_y, int(own_sums), int(apart), scale * parts.LOG2_E) if mma else ()),
        shared=nbytes,
    )
    if apart:
        kernel = backward_half.add_partials_kernel if mma else parts.add_chunks_kernel
        add_chunks(dq, dqkv, chunks, heads, HS, head_step, in_bfloat16(kernel, dqkv.dtype))
    return dqkv
