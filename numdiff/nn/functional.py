"""The differentiable operations: each calls a kernel forward and gives the tape the kernel for its backward.

Inputs and results are `Tensor`s; weights are `Parameter`s, whose gradients the backward adds into. Nothing here asks
which device the arrays are on. The mathematics, shapes and sources stand in numdiff/kernels, in the file of the
operation that a function calls (`K.groupnorm_forward`: kernels/groupnorm).
"""
import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing

from .. import kernels as K
from ..device import DeviceArray, is_device
from ..dtypes import is_half
from ..kernels.attention import HEAD_SIZES, flash_attention_supports
from ..kernels.fuse import PER_CHANNEL, Fused
from ..kernels.versions import capped
from . import float8
from .tensor import TWO, Parameter, Tensor, is_recording, record, record_parts
from .together import joined
from .together import together as grouped

Array = np.ndarray | DeviceArray
# Channels of a token up to which GELU's result is kept: making it again lengthens a step of DiT-S/2 (384) by 2.2 % and
# of B/2 (768) by 1 %, whose memory has room for it, and of XL/2 (1152) by 0.4 % (kernels/NOTES.md).
GELU_KEPT = 768


def trains(*parameters):
    """Whether one of the Parameters (None: absent) is trained, so that an operation must be recorded for it."""
    return any(parameter is not None and not parameter.frozen for parameter in parameters)


def gradient_of(parameter):
    """The gradient to add to; None where it is not to be computed, of a frozen parameter or an absent one."""
    return parameter.grad if trains(parameter) else None


def gradient_to_fill(weight):
    """(the gradient, whether to add to it) of a weight that is `written`; (None, True) where it is frozen."""
    return (None, True) if weight.frozen else weight.grad_to_fill()


def gradients_of(weight, bias, aside=None):
    """What `linear_backward` is told of a linear layer's gradients: where they are, if they are wanted, and whether the
    weight's is added to; or `aside`, where they come together with others (together.py)."""
    if aside is not None:
        return {"dweight": None, "dbias": None, "aside": aside}
    dweight, accumulate = gradient_to_fill(weight)
    return {"dweight": None if dweight is None else dweight.reshape(weight.shape[0], -1), "dbias": gradient_of(bias),
            "accumulate": accumulate}


def together(x: Tensor, *weights: Parameter) -> contextlib.AbstractContextManager:
    """Context in which the gradients of linear layers with these weights are made in one launch, if there is a kernel
    for it on what x (..., K) is like, and that is faster (together.py)."""
    joins = (is_recording() and is_half(x.dtype) and not any(w.frozen or float8.layer_of(w, x.data) for w in weights)
             and K.linear_gradients_supports(x.data, [w.shape for w in weights]))
    return grouped(weights) if joins else contextlib.nullcontext()


def put_aside(weight, bias, layer):
    """For `gradients_of`: the function of a layer that is recorded within `together`, or None; layer: in FP8."""
    return joined(weight, bias) if layer is None and is_recording() else None


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b, both of one shape."""
    return record("add", K.add_forward(a.data, b.data), (a, b), lambda dy: (dy, dy))


def cast(x: Tensor, dtype: np.typing.DTypeLike) -> Tensor:
    """x as float16, bfloat16 or float32; x itself if it has that dtype."""
    before = x.dtype
    if before == dtype:
        return x
    return record("cast", K.cast_forward(x.data, dtype), (x,), lambda dy: (K.cast_forward(dy, before),))


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x)."""
    saved = x.data
    return record("silu", K.silu_forward(saved), (x,), lambda dy: (K.silu_backward(dy, saved),))


def gelu(x: Tensor) -> Tensor:
    """GELU, tanh form."""
    saved = x.data
    return record("gelu", K.gelu_forward(saved), (x,), lambda dy: (K.gelu_backward(dy, saved),))


def fused(chain: Fused, x: Tensor, *operands: Any) -> Tensor:
    """x through a chain of operations, in one kernel: `numdiff.kernels.fuse` makes it, and says what an operand is.

    operands: Tensors; Parameters (C,) where they are PER_CHANNEL; what needs no gradient as it is, numbers and arrays
    """
    given = dict(zip(chain.arguments, (x, *operands), strict=True))
    data = {a: o.data if isinstance(o, (Tensor, Parameter)) else o for a, o in given.items()}
    tensors = {a: o for a, o in given.items() if isinstance(o, Tensor)}
    trained = {a: o for a, o in given.items() if isinstance(o, Parameter) and trains(o)}
    for a in [*trained, *(a for a, tensor in tensors.items() if tensor.slot is not None)]:
        if is_recording() and a not in chain.gradients:
            raise ValueError(f"{chain.name} has no gradient of {a}: give its Operation a derivative, and later ones.")
        if a in trained and chain.arguments[a] is not PER_CHANNEL:
            raise ValueError(f"{chain.name}: a Parameter is read PER_CHANNEL, and {a} is not: give a Tensor.")
    saved = [data[a] if a in chain.kept else None for a in given]

    def backward(dy):
        found = chain.backward(dy, *saved, into={a: parameter.grad for a, parameter in trained.items()})
        found = dict(zip(chain.gradients, found, strict=True))
        return tuple(found.get(a) for a in names)

    names = list(tensors)  # `backward` must not keep the tensors
    return record("fused", chain.forward(*data.values()), list(tensors.values()), backward,
                  has_parameters=bool(trained))


def linear(x: Tensor, weight: Parameter, bias: Parameter | None = None, residual: Tensor | None = None,
           gate: Tensor | None = None) -> Tensor:
    """x (..., K), weight (N, K), bias (N,) or None -> x·weightᵀ + bias, (..., N); further axes of weight count as K.
    residual: a tensor like the result, added to it, in the same kernel if that supports it
    gate: (B, N), with a residual (B, T, N): what the result is multiplied by before; only where `gates_products`
    """
    if gate is not None:
        b = None if bias is None else bias.data
        return Tensor(K.linear_gate_forward(x.data, weight.like(x.data), b, residual.data, gate.data))
    wants_dx, adds = x.slot is not None, residual is not None

    def backward(dy, before):
        dx = float8.linear_backward(dy, kept, weight, layer, need_dx=wants_dx, residual=before,
                                    **gradients_of(weight, bias, aside))
        return (dx, dy) if adds else (dx,)

    layer = float8.layer_of(weight, x.data)
    aside = put_aside(weight, bias, layer)
    y, kept = float8.linear_forward(x.data, weight, bias, layer, residual and residual.data)
    result = record("linear", y, (x,) if residual is None else (x, residual), backward,
                    has_parameters=trains(weight, bias), adds=True)
    result.owned = True
    return result


def linear_group(x: Tensor, layers: Sequence[tuple[Parameter, Parameter]]) -> list[Tensor]:
    """[x·weightᵀ + bias] for layers [(weight, bias)] of one float32 input x (B, K), in one launch: tensors (B, N_i)."""
    saved = x.data

    def backward(dys):
        # one kernel writes all weights' gradients, or adds to all, those of frozen ones too, which nobody reads
        accumulate = not all(w.stale for w, _ in layers if not w.frozen)
        gradients = [(w.grad if accumulate or w.frozen else w.grad_to_fill()[0], b.grad) for w, b in layers]
        return (K.linear_group_backward(dys, saved, [(w.data, b.data) for w, b in layers], gradients,
                                        accumulate=accumulate),)

    return record_parts("linear_group", K.linear_group_forward(saved, [(w.data, b.data) for w, b in layers]), (x,),
                        backward, has_parameters=trains(*(parameter for layer in layers for parameter in layer)))


def stacks(like: Array, layers: Sequence[tuple[Parameter, Parameter]]) -> bool:
    """Whether `linear_stack` takes these layers [(weight, bias)], and an x of the type and device of `like`: equal ones
    at equal distances, of 16 bits on Hopper, all of them trained or all frozen."""
    parameters = [parameter for layer in layers for parameter in layer]
    return (is_half(like.dtype) and len({parameter.frozen for parameter in parameters}) == 1
            and K.linear_stack_supports(like, [w.like(like) for w, _ in layers], [b.data for _, b in layers]))


def linear_stack(x: Tensor, layers: Sequence[tuple[Parameter, Parameter]]) -> Tensor:
    """x·weightᵀ + bias of layers [(weight, bias)] that `stacks` allows, side by side: (B, G·N) of one input (B, K)."""
    saved, wants_dx, trained = x.data, x.slot is not None, trains(layers[0][0])

    def backward(dy):
        accumulate, gradients = not all(weight.stale for weight, _ in layers), None
        if trained:
            gradients = [(w.grad if accumulate else w.grad_to_fill()[0], b.grad) for w, b in layers]
        weights = [weight.like(saved) for weight, _ in layers]
        return (K.linear_stack_backward(dy, saved, weights, gradients, accumulate, wants_dx),)

    y = K.linear_stack_forward(saved, [(weight.like(saved), bias.data) for weight, bias in layers])
    return record("linear_stack", y, (x,), backward, has_parameters=trained)


def conv2d(x: Tensor, weight: Parameter, bias: Parameter | None = None, stride: int = 1, channel: Tensor | None = None,
           residual: Tensor | None = None, statistics: bool = False) -> Tensor:
    """x (B, H, W, C_in), weight (C_out, k, k, C_in), zero padding k // 2 -> (B, H/stride, W/stride, C_out).

    channel, residual: tensors (B, C_out) and like the result, added to it, in the same kernel if that supports it
    statistics: keep those of the result for a `group_norm` that will read it, if a kernel computes them
    """
    saved, wants_dx = x.data, x.slot is not None
    wants_channel, adds = channel is not None, residual is not None  # `backward` must not keep the tensors

    def backward(dy, before):
        dweight, accumulate = gradient_to_fill(weight)
        gradients = K.conv2d_backward(dy, saved, weight.like(saved), dweight, gradient_of(bias), stride, wants_dx,
                                      need_channel=wants_channel, residual=before, accumulate=accumulate)
        gradients = [*gradients] if wants_channel else [gradients]
        if adds:
            gradients.append(dy)
        return gradients

    left = K.channel_statistics(saved, weight.like(saved), stride) if statistics else None
    y = K.conv2d_forward(saved, weight.like(saved), None if bias is None else bias.data, stride=stride,
                         channel=channel and channel.data, residual=residual and residual.data, statistics=left)
    inputs = [t for t in (x, channel, residual) if t is not None]
    result = record("conv2d", y, inputs, backward, has_parameters=trains(weight, bias), adds=True)
    result.statistics = left
    return result


def depthwise_conv2d(x: Tensor, weight: Parameter, bias: Parameter | None = None,
                     channel: Tensor | None = None) -> Tensor:
    """x (B, H, W, C), weight (k, k, C), zero padding k // 2 -> (B, H, W, C): each channel by itself.

    channel: a tensor (B, C), added to all pixels of an image in the same kernel
    """
    saved, wants_dx, wants_channel = x.data, x.slot is not None, channel is not None

    def backward(dy, before):
        gradients = K.depthwise_backward(dy, saved, weight.like(saved), gradient_of(weight), gradient_of(bias),
                                         wants_dx, wants_channel, before)
        return gradients if wants_channel else (gradients,)

    y = K.depthwise_forward(saved, weight.like(saved), None if bias is None else bias.data, channel and channel.data)
    return record("depthwise_conv2d", y, (x,) if channel is None else (x, channel), backward,
                  has_parameters=trains(weight, bias), adds=True)


def depthwise_layer_norm(x: Tensor, weight: Parameter, bias: Parameter, channel: Tensor, gain: Parameter,
                         offset: Parameter, eps: float = 1e-6) -> Tensor:
    """`depthwise_conv2d`, then `layer_norm` with gain and offset (C,): one kernel, where that is faster. Backward
    the sums for gain, offset, bias and channel come with the norm's own pass."""
    saved, wants_dx = x.data, x.slot is not None
    h, y, mean, rstd = K.depthwise_layernorm_forward(saved, weight.like(saved), bias.data, channel.data, gain.data,
                                                     offset.data, eps)

    def backward(dy, before):
        gradients = [gradient_of(parameter) for parameter in (weight, bias, gain, offset)]
        return K.depthwise_layernorm_backward(dy, saved, h, weight.like(saved), gain.data, mean, rstd, gradients,
                                              wants_dx, before)

    return record("depthwise_layer_norm", y, (x, channel), backward,
                  has_parameters=trains(weight, bias, gain, offset), adds=True)


def layer_scale(x: Tensor, h: Tensor, scale: Parameter) -> Tensor:
    """x + scale · h for x and h (B, ..., C) and scale (C,): Touvron et al. 2021, arXiv:2103.17239, equation 4."""
    C, saved = x.shape[-1], h.data
    rows, factor = saved.reshape(1, -1, C), scale.data.reshape(1, C)  # one image of all pixels
    y = K.gate_forward(x.data.reshape(1, -1, C), rows, factor).reshape(*x.shape)
    return record("layer_scale", y, (x, h), lambda dy: (dy, layer_scale_gradient(dy, saved, scale)),
                  has_parameters=trains(scale))


def layer_scale_gradient(dy, h, scale):
    """dh of `layer_scale`, whose gradient of scale is added to it."""
    C = dy.shape[-1]
    dh, dscale = K.gate_backward(dy.reshape(1, -1, C), h.reshape(1, -1, C), scale.data.reshape(1, C))
    if trains(scale):
        K.column_sum(dscale, scale.grad)
    return dh.reshape(*dy.shape)


def group_norm(x: Tensor, weight: Parameter, bias: Parameter, groups: int, eps: float = 1e-5,
               silu: bool = False) -> Tensor:
    """x (B, ..., C) normalised over each group of C / groups channels, scaled, shifted; with SiLU in the same pass."""
    saved = x.data
    y, mean, rstd = K.groupnorm_forward(saved, weight.data, bias.data, groups, eps, silu=silu,
                                        statistics=x.statistics)

    def backward(dy, before, second):
        return (K.groupnorm_backward(dy, saved, weight.data, bias.data, mean, rstd, weight.grad, bias.grad, groups,
                                     silu=silu, residual=before, second=second),)

    return record("group_norm", y, (x,), backward, has_parameters=trains(weight, bias), adds=TWO)


def layer_norm(x: Tensor, weight: Parameter | None = None, bias: Parameter | None = None, eps: float = 1e-5) -> Tensor:
    """x (..., C) normalised over its last axis; weight and bias (C,) or None."""
    saved = x.data
    y, mean, rstd = K.layernorm_forward(saved, weight and weight.data, bias and bias.data, eps)

    def backward(dy):
        return (K.layernorm_backward(dy, saved, weight and weight.data, mean, rstd, gradient_of(weight),
                                     gradient_of(bias)),)

    return record("layer_norm", y, (x,), backward, has_parameters=trains(weight, bias))


def rms_norm(x: Tensor, weight: Parameter | None = None, eps: float = 1e-6) -> Tensor:
    """x (..., C) divided by the root of its mean square over its last axis; weight (C,) or None."""
    saved = x.data
    y, rstd = K.rmsnorm_forward(saved, weight and weight.data, eps)

    def backward(dy):
        return (K.rmsnorm_backward(dy, saved, weight and weight.data, rstd, gradient_of(weight)),)

    return record("rms_norm", y, (x,), backward, has_parameters=trains(weight))


def attention(qkv: Tensor, heads: int, order: str = "legacy") -> Tensor:
    """Self-attention of packed qkv (B, T, 3C) -> (B, T, C); `order`: "legacy" (head, qkv, channel) or "new"."""
    saved = qkv.data
    flash = saved.shape[-1] // (3 * heads) in HEAD_SIZES and flash_attention_supports(saved, heads)
    if is_half(saved.dtype) and not flash:
        return cast(attention(cast(qkv, np.float32), heads, order), saved.dtype)
    if flash:
        # keeps one number per token and head; the other way keeps T
        y, logsumexp = K.flash_attention_forward(saved, heads, order)
        return record("flash_attention", y, (qkv,), owning(qkv, lambda dy: K.flash_attention_backward(
            dy, saved, y, logsumexp, heads, order)))
    y, probabilities = K.attention_forward(saved, heads, order)
    return record("attention", y, (qkv,), owning(qkv, lambda dy: K.attention_backward(dy, saved, probabilities, heads,
                                                                                      order)))


def sparse_linear_attention(qkv: Tensor, heads: int, topk: float, weight: Parameter, bias: Parameter,
                            order: str = "legacy") -> Tensor:
    """Softmax attention to the share `topk` of the blocks of 64 keys, linear attention to the others, projected by
    weight (HS, HS) and bias (HS,): packed qkv (B, T, 3C) -> (B, T, C); `order` as in `attention`."""
    saved = qkv.data
    y, kept = K.sla_forward(saved, weight.like(saved), bias.data, heads, topk, order, keeps=is_recording())

    def gradient(dy):
        return K.sla_backward(dy, saved, y, kept, weight.like(saved), bias.data, gradient_of(weight),
                              gradient_of(bias), heads, order)

    return record("sparse_linear_attention", y, (qkv,), owning(qkv, gradient), has_parameters=trains(weight, bias))


def owning(x, gradient):
    """The backward of an operation on one tensor x, whose `gradient(dy)` is a new array that nobody else holds."""
    slot = x.slot

    def backward(dy):
        if slot is not None:
            slot.owned = True
        return (gradient(dy),)

    return backward


def qk_norm_rope(qkv: Tensor, heads: int, q_weight: Parameter | None = None, k_weight: Parameter | None = None,
                 rotation: Array | None = None, eps: float = 1e-6) -> Tensor:
    """q and k of each head of packed qkv (B, T, 3 · D), order "new": RMSNorm over the head with the weights (HS,), then
    the rotation, an array (2, T, HS) of cosines and sines, each where it is given. For `attention` (B, T, 3 · D).

    A qkv that comes from `linear` is overwritten, and gone afterwards: nothing else may read it.
    """
    if q_weight is None and k_weight is None and rotation is None:
        return qkv
    in_place = qkv.owned
    y, kept = K.qk_norm_rope_forward(qkv.data, heads, q_weight and q_weight.data, k_weight and k_weight.data, rotation,
                                     eps, in_place=in_place, keeps=is_recording())

    def backward(dy):
        return (K.qk_norm_rope_backward(dy, kept, heads, q_weight and q_weight.data, k_weight and k_weight.data,
                                        rotation, gradient_of(q_weight), gradient_of(k_weight), eps,
                                        in_place=slot.owned),)

    result = record("qk_norm_rope", y, (qkv,), backward, has_parameters=trains(q_weight, k_weight))
    slot = result.slot
    if in_place:
        qkv.data = None
    return result


def softmax(x: Tensor, scale: float = 1.0) -> Tensor:
    """softmax(scale · x) over the last axis."""
    y = K.softmax_forward(x.data, scale)
    return record("softmax", y, (x,), lambda dy: (K.softmax_backward(dy, y, scale),))


def matmul(a: Tensor, b: Tensor, transpose_a: bool = False, transpose_b: bool = False, alpha: float = 1.0) -> Tensor:
    """alpha · a·b with equal leading batch dimensions."""
    left, right = a.data, b.data
    y = K.matmul_forward(left, right, transpose_a, transpose_b, alpha=alpha)
    return record("matmul", y, (a, b), lambda dy: K.matmul_backward(dy, left, right, transpose_a, transpose_b, alpha))


def channel_add(x: Tensor, e: Tensor) -> Tensor:
    """x (B, ..., C) + e (B, C), the same for every pixel of a sample."""
    return record("channel_add", K.channel_add_forward(x.data, e.data), (x, e),
                  lambda dy: (dy, K.channel_add_backward(dy)))


def scale_shift(x: Tensor, e: Tensor) -> Tensor:
    """x · (1 + scale) + shift; e (B, 2C) holds scale in its first C channels and shift in the others."""
    saved, channels = x.data, x.shape[-1]
    scale, shift = K.concat_backward(e.data, channels)

    def backward(dy):
        dx, dscale, dshift = K.scale_shift_backward(dy, saved, scale)
        return dx, K.concat_forward(dscale, dshift)

    return record("scale_shift", K.scale_shift_forward(saved, scale, shift), (x, e), backward)


def adaln(x: Tensor, shift: Tensor | None, scale: Tensor, eps: float = 1e-6, weight: Parameter | None = None,
          norm: str = "layer") -> Tensor:
    """A norm of each token of x (B, T, C), times 1 + scale (B, C), plus shift (B, C).

    norm: "layer", or "rms", which takes away no mean; weight: a Parameter (C,) that xhat is multiplied by, or None
    shift: None leaves it out
    """
    saved, vectors, has_shift = x.data, (shift and shift.data, scale.data), shift is not None
    _, y, mean, rstd = K.gate_adaln_forward(saved, None, None, *vectors, eps, weight and weight.data, norm)

    def backward(dy, before):
        dx, _, _, *others = K.gate_adaln_backward(before, dy, saved, None, None, *vectors, mean, rstd,
                                                  weight and weight.data, gradient_of(weight))
        return dx, *(others if has_shift else others[1:])

    return record("adaln", y, (x, shift, scale) if has_shift else (x, scale), backward,
                  has_parameters=trains(weight), adds=True)


def gate_adaln(x: Tensor, h: Tensor, gate: Tensor, shift: Tensor | None, scale: Tensor, eps: float = 1e-6,
               weight: Parameter | None = None, norm: str = "layer", writer: Parameter | None = None,
               reader: Parameter | None = None, keeps_x: bool = False) -> list[Tensor]:
    """`gate`, then `adaln` of its result: returns both, from one kernel if there is one.

    writer: the weight of the linear layer whose result h is, and nobody else reads it; reader: of the one that alone
        reads the second result. In FP8 h's gradient, and that result, are then bytes of E4M3 for them
    keeps_x: keep x for the backward, and not the first result, which that makes again: for an x that another operation
        keeps anyway, and a result that no other does
    """
    branch, vectors, has_shift = h.data, (gate.data, shift and shift.data, scale.data), shift is not None
    into, dh_into = float8.bytes_for(reader, x.data, "x"), float8.bytes_for(writer, x.data, "dy")
    z, y, mean, rstd = K.gate_adaln_forward(x.data, branch, *vectors, eps, weight and weight.data, norm, into=into)
    kept, kept_x = (None, x.data) if keeps_x else (z, None)

    def backward(gradients):
        dx, dh, dgate, *others = K.gate_adaln_backward(*gradients, kept, branch, *vectors, mean, rstd,
                                                       weight and weight.data, gradient_of(weight), dh_into=dh_into,
                                                       x=kept_x)
        return dx, dh, dgate, *(others if has_shift else others[1:])

    return record_parts("gate_adaln", [z, y], (x, h, gate, shift, scale) if has_shift else (x, h, gate, scale),
                        backward, has_parameters=trains(weight))


def gate(x: Tensor, h: Tensor, gate: Tensor) -> Tensor:
    """x + gate (B, C) · h for x and h (B, T, C)."""
    saved, factor = h.data, gate.data
    return record("gate", K.gate_forward(x.data, saved, factor), (x, h, gate),
                  lambda dy: (dy, *K.gate_backward(dy, saved, factor)))


def bias_gelu(x: Tensor, bias: Parameter) -> Tensor:
    """GELU (tanh form) of x + bias, for a linear layer that leaves its bias (C,) to this pass."""
    saved = x.data
    return record("bias_gelu", K.bias_gelu_forward(saved, bias.data), (x,),
                  lambda dy: (K.bias_gelu_backward(dy, saved, bias.data, bias.grad),), has_parameters=trains(bias))


def gates_products(x: Tensor, gate: Tensor, *weights: Parameter) -> bool:
    """Whether `linear`, `mlp` and `swiglu_mlp` multiply by `gate` and add a residual, where their last product has one
    of these weights: nothing is recorded, since only `gate_adaln` has a backward, and the product is Hopper's."""
    return (not is_recording() and capped("epilogue", 1) == 1 and not any(float8.layer_of(w, x) for w in weights)
            and K.linear_gate_supports(x.data, gate.data, *weights))


def mlp(x: Tensor, weight: Parameter, bias: Parameter, weight_2: Parameter, bias_2: Parameter,
        residual: Tensor | None = None, gate: Tensor | None = None, scale: Parameter | None = None) -> Tensor:
    """Two linear layers, a GELU (tanh form) between them: x (..., K), weight (N, K), weight_2 (M, N) -> (..., M).
    residual, gate: of the second, as in `linear`; with scale what comes is `layer_scale(residual, mlp(x), scale)`
    In 16 bits on Hopper GELU and its derivative are part of the products beside it. Where x has more than GELU_KEPT
    channels, of the hidden layer only what comes before GELU is kept for the backward: the product with the derivative
    gives GELU again, in its place.
    """
    given, wants_dx = x.data, x.slot is not None
    layer, layer_2 = float8.layer_of(weight, given), float8.layer_of(weight_2, given)
    if layer is None and not (K.linear_gelu_supports(given, weight) and K.linear_gelu_supports(given, weight_2)):
        hidden = bias_gelu(linear(x, weight), bias) if capped("epilogue", 1) else gelu(linear(x, weight, bias))
        if scale is not None:
            return layer_scale(residual, linear(hidden, weight_2, bias_2), scale)
        return linear(hidden, weight_2, bias_2, residual, gate)
    alone = layer_2 if gate is None and scale is None else None
    u, h, kept = float8.linear_gelu_forward(given, weight, bias, layer, is_recording(), alone)
    if gate is not None:
        return linear(Tensor(h), weight_2, bias_2, residual, gate)
    z = kept_2 = None
    if scale is None:
        y, kept_2 = float8.linear_forward(h, weight_2, bias_2, layer_2)
    else:
        z, y = K.linear_layer_scale_forward(h, weight_2.like(h), bias_2.data, scale.data, residual.data,
                                            keeps_z=is_recording())
    if layer_2 is None:
        kept_2 = h if weight.shape[1] <= GELU_KEPT else None
    aside, aside_2 = put_aside(weight, bias, layer), put_aside(weight_2, bias_2, layer_2)

    def backward(dy, before):
        dz = dy if scale is None else layer_scale_gradient(dy, z, scale)
        du = float8.linear_backward(dz, kept_2, weight_2, layer_2, gelu_of=u, following=layer,
                                    **gradients_of(weight_2, bias_2, aside_2))
        dx = float8.linear_backward(du, kept, weight, layer, need_dx=wants_dx, residual=before,
                                    **gradients_of(weight, bias, aside))
        return (dx,) if scale is None else (dx, dy)

    return record("mlp", y, (x,) if scale is None else (x, residual), backward,
                  has_parameters=trains(weight, bias, weight_2, bias_2, scale), adds=True)


def swiglu(x: Tensor) -> Tensor:
    """silu(x[..., :H]) · x[..., H:] of x (..., 2 · H)."""
    saved = x.data
    return record("swiglu", K.swiglu_forward(saved), (x,), lambda dy: (K.swiglu_backward(dy, saved),))


def swiglu_mlp(x: Tensor, w12: Parameter, b12: Parameter | None, w3: Parameter, b3: Parameter | None,
               residual: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
    """A linear layer, SwiGLU, a linear layer: x (..., K), w12 (2 · H, K), w3 (M, H) -> (..., M); biases may be None.
    x, the hidden layer before and after its gate are kept for the backward. In 16 bits on Hopper SwiGLU and its
    backward are part of the products beside it. residual, gate: of the second layer, as in `linear`
    """
    given, wants_dx = x.data, x.slot is not None
    layer, layer_3 = float8.layer_of(w12, given), float8.layer_of(w3, given)
    if layer is None and not K.linear_swiglu_supports(given, w12, w3):
        return linear(swiglu(linear(x, w12, b12)), w3, b3, residual, gate)
    u, h, kept = float8.linear_swiglu_forward(given, w12, b12, layer, is_recording())
    if gate is not None:
        return linear(Tensor(h), w3, b3, residual, gate)
    y, kept_3 = float8.linear_forward(h, w3, b3, layer_3)
    aside, aside_3 = put_aside(w12, b12, layer), put_aside(w3, b3, layer_3)

    def backward(dy, before):
        du = float8.linear_backward(dy, kept_3, w3, layer_3, swiglu_of=u, **gradients_of(w3, b3, aside_3))
        return (float8.linear_backward(du, kept, w12, layer, need_dx=wants_dx, residual=before,
                                       **gradients_of(w12, b12, aside)),)

    return record("swiglu_mlp", y, (x,), backward, has_parameters=trains(w12, b12, w3, b3), adds=True)


def chunk(x: Tensor, count: int) -> list[Tensor]:
    """The `count` equal parts of x (B, count · C), as a list of tensors (B, C)."""
    return record_parts("chunk", K.chunk_forward(x.data, count), (x,), lambda parts: (K.chunk_backward(parts),))


def columns(x: Tensor, count: int) -> list[Tensor]:
    """As `chunk`, without copies: parts of x for `adaln` and `gate_adaln`, each to be used once. If their fast kernels
    do not run, float32 copies.
    """
    if is_device(x.data):
        if not K.gate_adaln_supports(x.data, x.shape[1] // count):
            return chunk(cast(x, np.float32), count)
    elif is_half(x.dtype):
        x = cast(x, np.float32)
    dtype = x.dtype
    return record_parts("columns", K.columns_forward(x.data, count), (x,),
                        lambda parts: (K.columns_backward(parts, dtype),))


def patchify(x: Tensor, patch: int) -> Tensor:
    """x (B, H, W, C) as tokens (B, H/patch · W/patch, patch² · C)."""
    _, height, width, _ = x.shape
    return record("patchify", K.patchify_forward(x.data, patch), (x,),
                  lambda dy: (K.patchify_backward(dy, patch, height, width),))


def unpatchify(tokens: Tensor, patch: int, height: int, width: int) -> Tensor:
    """Tokens (B, T, patch² · C) as images (B, height, width, C)."""
    return record("unpatchify", K.unpatchify_forward(tokens.data, patch, height, width), (tokens,),
                  lambda dy: (K.unpatchify_backward(dy, patch),))


def add_constant(x: Tensor, constant: Array) -> Tensor:
    """x (B, ...) + an array of one sample's shape, the same for all samples; no gradient flows to it."""
    rows = x.data.reshape(x.shape[0], -1)
    y = K.bias_add_forward(rows, constant.reshape(-1)).reshape(x.shape)
    return record("add_constant", y, (x,), lambda dy: (dy,))


def concat(a: Tensor, b: Tensor) -> Tensor:
    """Join along the channels."""
    channels = a.shape[-1]
    return record("concat", K.concat_forward(a.data, b.data), (a, b), lambda dy: K.concat_backward(dy, channels))


def pair(a: Tensor, b: Tensor) -> Tensor:
    """As `concat`, only for `group_norm`, `linear` and `conv2d`: no copy if they can read two arrays."""
    both = K.Pair(a.data, b.data)
    if not K.pair_supports(both):
        return concat(a, b)
    result = record("pair", both, (a, b), lambda dy: dy)
    if a.statistics is not None and b.statistics is not None:
        result.statistics = a.statistics, b.statistics
    return result


def avgpool(x: Tensor) -> Tensor:
    """Mean over 2×2 pixels."""
    return record("avgpool", K.avgpool_forward(x.data), (x,),
                  lambda dy, before: (K.avgpool_backward(dy, residual=before),), adds=True)


def upsample(x: Tensor) -> Tensor:
    """Every pixel twice in each direction."""
    result = record("upsample", K.upsample_forward(x.data), (x,), lambda dy: (K.upsample_backward(dy),))
    result.statistics = x.statistics  # each number occurs four times: the same averages
    return result


def timestep_embedding(t: Array, dim: int, max_period: float = 10000.0) -> Tensor:
    """Sinusoids of the timesteps t, an array (B,) -> (B, dim); a constant: no gradient flows to t."""
    return Tensor(K.timestep_embedding_forward(t, dim, max_period))


def embedding(labels: Array, weight: Parameter) -> Tensor:
    """Row `labels[b]` of weight (N, C) for each sample; labels is an int32 array (B,)."""

    def backward(dy):
        K.embedding_backward(dy, labels, weight.grad)
        return ()

    return record("embedding", K.embedding_forward(labels, weight.data), (), backward, has_parameters=trains(weight))


def class_dropout(labels: Array, probability: float, null_class: int, randomness: Any) -> Array:
    """labels, an int32 array (B,), each replaced by `null_class` with `probability`; `randomness` as in `dropout`."""
    if probability == 0 or randomness is None:
        return labels
    return K.class_dropout_forward(labels, probability, null_class, randomness.seed, randomness.step,
                                   randomness.samples)


def dropout(x: Tensor, probability: float, randomness: Any, layer: int) -> Tensor:
    """Zero each element with `probability`, scale the others; `randomness` counts it (training.step.Randomness)."""
    if probability == 0 or randomness is None:
        return x
    where = (probability, randomness.seed, layer, randomness.step, randomness.samples)
    return record("dropout", K.dropout_forward(x.data, *where), (x,), lambda dy: (K.dropout_backward(dy, *where),))


def weigh(x: Tensor, t: Array, weight: Array) -> Tensor:
    """Each sample of x (B, ...) times weight[t[b]]; t int32 (B,), weight float32 (T,): arrays, no gradient flows there.
    """
    return record("weigh", K.weigh_forward(x.data, t, weight), (x,), lambda dy: (K.weigh_forward(dy, t, weight),))


def mse(prediction: Tensor, target: Array, scale: float = 1.0) -> Tensor:
    """Mean of (prediction - target)² over the target's channels, as a tensor of one value.

    scale multiplies the gradient only, not the value: a step of several microbatches passes 1 / their number.
    """
    saved = prediction.data

    def backward(dy):
        return (K.mse_backward(saved, target, scale, dy),)

    return record("mse", K.mse_forward(saved, target), (prediction,), backward)


def hybrid_loss(prediction: Tensor, target: Array, x_0: Array, t: Array, tables: Sequence[Array], weight: float,
                scale: float = 1.0) -> Tensor:
    """Squared error of the first half of the channels, plus weight · the variational bound of the learned variance.

    tables: k, low, width of the diffusion (see kernels/diffusion/vlb.py); scale as in `mse`.
    """
    saved = prediction.data

    def backward(dy):
        return (K.hybrid_loss_backward(saved, target, x_0, t, *tables, weight, scale, dy),)

    return record("hybrid_loss", K.hybrid_loss_forward(saved, target, x_0, t, *tables, weight), (prediction,), backward)


def reshape(x: Tensor, *shape: int) -> Tensor:
    """The same elements in another shape; no kernel runs."""
    before = x.shape
    return record("reshape", x.data.reshape(*shape), (x,), lambda dy: (dy.reshape(*before),))
