"""Numbers that change places: parts of a tensor, two as one, patches, other resolutions."""

import numpy as np

from ... import kernels as K
from ...device import is_device
from ...dtypes import is_half
from ..tensor import Tensor, record
from .elementwise import cast


def reshape(x: Tensor, *shape: int) -> Tensor:
    """The same elements in another shape; no kernel runs."""
    before = x.shape
    return record("reshape", x.data.reshape(*shape), (x,), lambda dy: (dy.reshape(*before),))


def chunk(x: Tensor, count: int) -> list[Tensor]:
    """The `count` equal parts of x (B, count · C), as a list of tensors (B, C)."""
    return record(
        "chunk", K.chunk_forward(x.data, count), (x,), lambda parts: (K.chunk_backward(parts),)
    )


def columns(x: Tensor, count: int) -> list[Tensor]:
    """As `chunk`, without copies: parts of x for `adaln` and `gate_adaln`, each to be used once. If
    their fast kernels do not run, float32 copies.
    """
    if is_device(x.data):
        if not K.gate_adaln_supports(x.data, x.shape[1] // count):
            return chunk(cast(x, np.float32), count)
    elif is_half(x.dtype):
        x = cast(x, np.float32)
    dtype = x.dtype
    return record(
        "columns",
        K.columns_forward(x.data, count),
        (x,),
        lambda parts: (K.join_columns(parts, dtype),),
    )


def concat(a: Tensor, b: Tensor) -> Tensor:
    """Join along the channels."""
    channels = a.shape[-1]
    return record(
        "concat",
        K.concat_forward(a.data, b.data),
        (a, b),
        lambda dy: K.concat_backward(dy, channels),
    )


def pair(a: Tensor, b: Tensor) -> Tensor:
    """As `concat`, only for `group_norm`, `linear` and `conv2d`: no copy if they can read two
    arrays."""
    both = K.Pair(a.data, b.data)
    if not K.pair_supports(both):
        return concat(a, b)
    result = record("pair", both, (a, b), lambda dy: dy)
    if a.statistics is not None and b.statistics is not None:
        result.statistics = a.statistics, b.statistics
    return result


def patchify(x: Tensor, patch: int) -> Tensor:
    """x (B, H, W, C) as tokens (B, H/patch · W/patch, patch² · C)."""
    _, height, width, _ = x.shape
    return record(
        "patchify",
        K.patchify_forward(x.data, patch),
        (x,),
        lambda dy: (K.patchify_backward(dy, patch, height, width),),
    )


def unpatchify(tokens: Tensor, patch: int, height: int, width: int) -> Tensor:
    """Tokens (B, T, patch² · C) as images (B, height, width, C)."""
    return record(
        "unpatchify",
        K.unpatchify_forward(tokens.data, patch, height, width),
        (tokens,),
        lambda dy: (K.unpatchify_backward(dy, patch),),
    )


def avgpool(x: Tensor) -> Tensor:
    """Mean over 2×2 pixels."""
    return record(
        "avgpool",
        K.avgpool_forward(x.data),
        (x,),
        lambda dy, before: (K.avgpool_backward(dy, residual=before),),
        adds=True,
    )


def window(x: Tensor, row: int, column: int, height: int, width: int) -> Tensor:
    """The pixels of x (B, H, W, C) from (row, column) on, (B, height, width, C); 0 outside of x: it
    pads and crops."""
    _, H, W, _ = x.shape
    return record(
        "window",
        K.window_forward(x.data, row, column, height, width),
        (x,),
        lambda dy: (K.window_forward(dy, -row, -column, H, W),),
    )


def upsample(x: Tensor) -> Tensor:
    """Every pixel twice in each direction."""
    result = record(
        "upsample", K.upsample_forward(x.data), (x,), lambda dy: (K.upsample_backward(dy),)
    )
    result.statistics = x.statistics  # each number occurs four times: the same averages
    return result
