"""Operations on each element by itself: sums, casts, activations, chains of them in one kernel,
dropout."""

from typing import Any

import numpy as np
import numpy.typing

from ... import kernels as K
from ...device import AnyArray
from ...kernels.fuse import PER_CHANNEL, Fused
from ..parameter import Parameter, trains
from ..recording import is_recording
from ..tensor import Tensor, record


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b, both of one shape."""
    return record("add", K.add_forward(a.data, b.data), (a, b), lambda dy: (dy, dy))


def add_constant(x: Tensor, constant: AnyArray) -> Tensor:
    """x (B, ...) + an array of one sample's shape, the same for all samples; no gradient flows to
    it."""
    rows = x.data.reshape(x.shape[0], -1)
    y = K.bias_add_forward(rows, constant.reshape(-1)).reshape(x.shape)
    return record("add_constant", y, (x,), lambda dy: (dy,))


def channel_add(x: Tensor, e: Tensor) -> Tensor:
    """x (B, ..., C) + e (B, C), the same for every pixel of a sample."""
    return record(
        "channel_add",
        K.channel_add_forward(x.data, e.data),
        (x, e),
        lambda dy: (dy, K.channel_add_backward(dy)),
    )


def scale_shift(x: Tensor, e: Tensor) -> Tensor:
    """x · (1 + scale) + shift; e (B, 2C) holds scale in its first C channels and shift in the
    others."""
    saved, channels = x.data, x.shape[-1]
    scale, shift = K.concat_backward(e.data, channels)

    def backward(dy):
        dx, dscale, dshift = K.scale_shift_backward(dy, saved, scale)
        return dx, K.concat_forward(dscale, dshift)

    return record("scale_shift", K.scale_shift_forward(saved, scale, shift), (x, e), backward)


def cast(x: Tensor, dtype: np.typing.DTypeLike) -> Tensor:
    """x as float16, bfloat16 or float32; x itself if it has that dtype."""
    before = x.dtype
    if before == dtype:
        return x
    return record(
        "cast", K.cast_forward(x.data, dtype), (x,), lambda dy: (K.cast_forward(dy, before),)
    )


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x)."""
    saved = x.data
    return record("silu", K.silu_forward(saved), (x,), lambda dy: (K.silu_backward(dy, saved),))


def gelu(x: Tensor) -> Tensor:
    """GELU, tanh form."""
    saved = x.data
    return record("gelu", K.gelu_forward(saved), (x,), lambda dy: (K.gelu_backward(dy, saved),))


def swiglu(x: Tensor) -> Tensor:
    """silu(x[..., :H]) · x[..., H:] of x (..., 2 · H)."""
    saved = x.data
    return record(
        "swiglu", K.swiglu_forward(saved), (x,), lambda dy: (K.swiglu_backward(dy, saved),)
    )


def fused(chain: Fused, x: Tensor, *operands: Any) -> Tensor:
    """x through a chain of operations, in one kernel: `numdiff.kernels.fuse` makes it, and says
    what an operand is.

    operands: Tensors; Parameters (C,) where they are PER_CHANNEL; what needs no gradient as it is,
    numbers and arrays
    """
    given = dict(zip(chain.arguments, (x, *operands), strict=True))
    data = {a: o.data if isinstance(o, (Tensor, Parameter)) else o for a, o in given.items()}
    tensors = {a: o for a, o in given.items() if isinstance(o, Tensor)}
    trained = {a: o for a, o in given.items() if isinstance(o, Parameter) and trains(o)}
    for a in [*trained, *(a for a, tensor in tensors.items() if tensor.slot is not None)]:
        if is_recording() and a not in chain.gradients:
            raise ValueError(
                f"{chain.name} has no gradient of {a}: give its Operation a derivative, and later ones."
            )
        if a in trained and chain.arguments[a] is not PER_CHANNEL:
            raise ValueError(
                f"{chain.name}: a Parameter is read PER_CHANNEL, and {a} is not: give a Tensor."
            )
    saved = [data[a] if a in chain.kept else None for a in given]

    def backward(dy):
        found = chain.backward(
            dy, *saved, into={a: parameter.grad for a, parameter in trained.items()}
        )
        found = dict(zip(chain.gradients, found, strict=True))
        return tuple(found.get(a) for a in names)

    names = list(tensors)  # `backward` must not keep the tensors
    return record(
        "fused",
        chain.forward(*data.values()),
        list(tensors.values()),
        backward,
        parameters=[*trained.values()],
    )


def dropout(x: Tensor, probability: float, randomness: Any, layer: int) -> Tensor:
    """Zero each element with `probability`, scale the others; `randomness` counts it
    (training.step.Randomness)."""
    if probability == 0 or randomness is None:
        return x
    where = (probability, randomness.seed, layer, randomness.step, randomness.samples)
    return record(
        "dropout",
        K.dropout_forward(x.data, *where),
        (x,),
        lambda dy: (K.dropout_backward(dy, *where),),
    )


def weigh(x: Tensor, t: AnyArray, weight: AnyArray) -> Tensor:
    """Each sample of x (B, ...) times weight[t[b]]; t int32 (B,), weight float32 (T,): arrays, no
    gradient flows there.
    """
    return record(
        "weigh",
        K.weigh_forward(x.data, t, weight),
        (x,),
        lambda dy: (K.weigh_forward(dy, t, weight),),
    )
