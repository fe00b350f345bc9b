"""The differentiable operations: each calls a kernel forward and gives the tape the kernel for its backward.

Inputs and results are `Tensor`s; weights are `Parameter`s, whose gradients the backward adds into. Nothing here asks
which device the arrays are on. The mathematics, shapes and sources stand in numdiff/kernels, in the file of the
operation that a function calls (`K.groupnorm_forward`: kernels/groupnorm).
"""
import numpy as np

from .. import kernels as K
from ..device import is_device
from ..kernels.attention import HEAD_SIZES, flash_attention_supports
from .tensor import Tensor, is_recording, record, record_parts


def add(a, b):
    """a + b, both of one shape."""
    return record("add", K.add_forward(a.data, b.data), (a, b), lambda dy: (dy, dy))


def cast(x, dtype):
    """x as float16 or float32; x itself if it has that dtype."""
    before = x.dtype
    if before == dtype:
        return x
    return record("cast", K.cast_forward(x.data, dtype), (x,), lambda dy: (K.cast_forward(dy, before),))


def silu(x):
    """x · sigmoid(x)."""
    saved = x.data
    return record("silu", K.silu_forward(saved), (x,), lambda dy: (K.silu_backward(dy, saved),))


def gelu(x):
    """GELU, tanh form."""
    saved = x.data
    return record("gelu", K.gelu_forward(saved), (x,), lambda dy: (K.gelu_backward(dy, saved),))


def linear(x, weight, bias=None, residual=None):
    """x (..., K), weight (N, K), bias (N,) or None -> x·weightᵀ + bias, (..., N); further axes of weight count as K.
    residual: a tensor like the result, added to it, in the same kernel if that supports it
    """
    saved, wants_dx, rows, adds = x.data, x.slot is not None, weight.shape[0], residual is not None

    def backward(dy, before):
        dweight, accumulate = weight.grad_to_fill()
        dx = K.linear_backward(dy, saved, weight.like(saved).reshape(rows, -1), dweight.reshape(rows, -1),
                               bias and bias.grad, need_dx=wants_dx, residual=before, accumulate=accumulate)
        return (dx, dy) if adds else (dx,)

    y = K.linear_forward(saved, weight.like(saved).reshape(rows, -1), None if bias is None else bias.data,
                         residual=residual and residual.data)
    return record("linear", y, (x,) if residual is None else (x, residual), backward, has_parameters=True, adds=True)


def linear_group(x, layers):
    """[x·weightᵀ + bias] for layers [(weight, bias)] of one float32 input x (B, K), in one launch: tensors (B, N_i)."""
    saved = x.data

    def backward(dys):
        accumulate = not all(w.stale for w, _ in layers)  # one kernel writes all weights' gradients, or adds to all
        gradients = [(w.grad if accumulate else w.grad_to_fill()[0], b.grad) for w, b in layers]
        return (K.linear_group_backward(dys, saved, [(w.data, b.data) for w, b in layers], gradients,
                                        accumulate=accumulate),)

    return record_parts("linear_group", K.linear_group_forward(saved, [(w.data, b.data) for w, b in layers]), (x,),
                        backward)


def conv2d(x, weight, bias=None, stride=1, channel=None, residual=None, statistics=False):
    """x (B, H, W, C_in), weight (C_out, k, k, C_in), zero padding k // 2 -> (B, H/stride, W/stride, C_out).

    channel, residual: tensors (B, C_out) and like the result, added to it, in the same kernel if that supports it
    statistics: keep those of the result for a `group_norm` that will read it, if a kernel computes them
    """
    saved, wants_dx = x.data, x.slot is not None
    wants_channel, adds = channel is not None, residual is not None  # `backward` must not keep the tensors

    def backward(dy):
        given = dy, saved, weight.like(saved), weight.grad, bias and bias.grad, stride, wants_dx
        if wants_channel:
            gradients = [*K.conv2d_backward(*given, need_channel=True)]
        else:
            gradients = [K.conv2d_backward(*given)]
        if adds:
            gradients.append(dy)
        return gradients

    left = K.channel_statistics(saved, weight.like(saved), stride) if statistics else None
    y = K.conv2d_forward(saved, weight.like(saved), None if bias is None else bias.data, stride=stride,
                         channel=channel and channel.data, residual=residual and residual.data, statistics=left)
    inputs = [t for t in (x, channel, residual) if t is not None]
    result = record("conv2d", y, inputs, backward, has_parameters=True)
    result.statistics = left
    return result


def group_norm(x, weight, bias, groups, eps=1e-5, silu=False):
    """x (B, ..., C) normalised over each group of C / groups channels, scaled, shifted; with SiLU in the same pass."""
    saved = x.data
    y, mean, rstd = K.groupnorm_forward(saved, weight.data, bias.data, groups, eps, silu=silu,
                                        statistics=x.statistics)

    def backward(dy, before):
        return (K.groupnorm_backward(dy, saved, weight.data, bias.data, mean, rstd, weight.grad, bias.grad, groups,
                                     silu=silu, residual=before),)

    return record("group_norm", y, (x,), backward, has_parameters=True, adds=True)


def layer_norm(x, weight=None, bias=None, eps=1e-5):
    """x (..., C) normalised over its last axis; weight and bias (C,) or None."""
    saved = x.data
    y, mean, rstd = K.layernorm_forward(saved, weight and weight.data, bias and bias.data, eps)

    def backward(dy):
        return (K.layernorm_backward(dy, saved, weight and weight.data, mean, rstd, weight and weight.grad,
                                     bias and bias.grad),)

    return record("layer_norm", y, (x,), backward, has_parameters=weight is not None)


def attention(qkv, heads, order="legacy"):
    """Self-attention of packed qkv (B, T, 3C) -> (B, T, C); `order`: "legacy" (head, qkv, channel) or "new"."""
    saved = qkv.data
    flash = saved.shape[-1] // (3 * heads) in HEAD_SIZES and flash_attention_supports(saved, heads)
    if saved.dtype == np.float16 and not flash:
        return cast(attention(cast(qkv, np.float32), heads, order), np.float16)
    if flash:
        # keeps one number per token and head; the other way keeps T
        y, logsumexp = K.flash_attention_forward(saved, heads, order)
        return record("flash_attention", y, (qkv,),
                      lambda dy: (K.flash_attention_backward(dy, saved, y, logsumexp, heads, order),))
    y, probabilities = K.attention_forward(saved, heads, order)
    return record("attention", y, (qkv,), lambda dy: (K.attention_backward(dy, saved, probabilities, heads, order),))


def softmax(x, scale=1.0):
    """softmax(scale · x) over the last axis."""
    y = K.softmax_forward(x.data, scale)
    return record("softmax", y, (x,), lambda dy: (K.softmax_backward(dy, y, scale),))


def matmul(a, b, transpose_a=False, transpose_b=False, alpha=1.0):
    """alpha · a·b with equal leading batch dimensions."""
    left, right = a.data, b.data
    y = K.matmul_forward(left, right, transpose_a, transpose_b, alpha=alpha)
    return record("matmul", y, (a, b), lambda dy: K.matmul_backward(dy, left, right, transpose_a, transpose_b, alpha))


def channel_add(x, e):
    """x (B, ..., C) + e (B, C), the same for every pixel of a sample."""
    return record("channel_add", K.channel_add_forward(x.data, e.data), (x, e),
                  lambda dy: (dy, K.channel_add_backward(dy)))


def scale_shift(x, e):
    """x · (1 + scale) + shift; e (B, 2C) holds scale in its first C channels and shift in the others."""
    saved, channels = x.data, x.shape[-1]
    scale, shift = K.concat_backward(e.data, channels)

    def backward(dy):
        dx, dscale, dshift = K.scale_shift_backward(dy, saved, scale)
        return dx, K.concat_forward(dscale, dshift)

    return record("scale_shift", K.scale_shift_forward(saved, scale, shift), (x, e), backward)


def adaln(x, shift, scale, eps=1e-6):
    """LayerNorm of each token of x (B, T, C), times 1 + scale (B, C), plus shift (B, C)."""
    saved, vectors = x.data, (shift.data, scale.data)
    _, y, mean, rstd = K.gate_adaln_forward(saved, None, None, *vectors, eps)

    def backward(dy, before):
        dx, _, _, *others = K.gate_adaln_backward(before, dy, saved, None, None, *vectors, mean, rstd)
        return dx, *others

    return record("adaln", y, (x, shift, scale), backward, adds=True)


def gate_adaln(x, h, gate, shift, scale, eps=1e-6):
    """`gate`, then `adaln` of its result: returns both, from one kernel if there is one."""
    branch, vectors = h.data, (gate.data, shift.data, scale.data)
    z, y, mean, rstd = K.gate_adaln_forward(x.data, branch, *vectors, eps)
    return record_parts("gate_adaln", [z, y], (x, h, gate, shift, scale),
                        lambda gradients: K.gate_adaln_backward(*gradients, z, branch, *vectors, mean, rstd))


def gate(x, h, gate):
    """x + gate (B, C) · h for x and h (B, T, C)."""
    saved, factor = h.data, gate.data
    return record("gate", K.gate_forward(x.data, saved, factor), (x, h, gate),
                  lambda dy: (dy, *K.gate_backward(dy, saved, factor)))


def bias_gelu(x, bias):
    """GELU (tanh form) of x + bias, for a linear layer that leaves its bias (C,) to this pass."""
    saved = x.data
    return record("bias_gelu", K.bias_gelu_forward(saved, bias.data), (x,),
                  lambda dy: (K.bias_gelu_backward(dy, saved, bias.data, bias.grad),), has_parameters=True)


def mlp(x, weight, bias, weight_2, bias_2):
    """Two linear layers, a GELU (tanh form) between them: x (..., K), weight (N, K), weight_2 (M, N) -> (..., M)."""
    saved, wants_dx = x.data, x.slot is not None
    if not K.linear_gelu_supports(saved, weight) or not K.linear_gelu_supports(saved, weight_2):
        return linear(bias_gelu(linear(x, weight), bias), weight_2, bias_2)
    u, h = K.linear_gelu_forward(saved, weight.like(saved), bias.data, keeps_u=is_recording())

    def backward(dy, before):
        dweight, accumulate = weight_2.grad_to_fill()
        du = K.linear_backward(dy, h, weight_2.like(h), dweight, bias_2.grad, gelu_of=u, accumulate=accumulate)
        dweight, accumulate = weight.grad_to_fill()
        return (K.linear_backward(du, saved, weight.like(saved), dweight, bias.grad, need_dx=wants_dx,
                                  residual=before),)

    return record("mlp", K.linear_forward(h, weight_2.like(h), bias_2.data), (x,), backward, has_parameters=True,
                  adds=True)


def chunk(x, count):
    """The `count` equal parts of x (B, count · C), as a list of tensors (B, C)."""
    return record_parts("chunk", K.chunk_forward(x.data, count), (x,), lambda parts: (K.chunk_backward(parts),))


def columns(x, count):
    """As `chunk`, without copies: parts of x for `adaln` and `gate_adaln`, each to be used once. If their fast kernels
    do not run, float32 copies.
    """
    if is_device(x.data):
        if not K.gate_adaln_supports(x.data, x.shape[1] // count):
            return chunk(cast(x, np.float32), count)
    elif x.dtype == np.float16:
        x = cast(x, np.float32)
    dtype = x.dtype
    return record_parts("columns", K.columns_forward(x.data, count), (x,),
                        lambda parts: (K.columns_backward(parts, dtype),))


def patchify(x, patch):
    """x (B, H, W, C) as tokens (B, H/patch · W/patch, patch² · C)."""
    _, height, width, _ = x.shape
    return record("patchify", K.patchify_forward(x.data, patch), (x,),
                  lambda dy: (K.patchify_backward(dy, patch, height, width),))


def unpatchify(tokens, patch, height, width):
    """Tokens (B, T, patch² · C) as images (B, height, width, C)."""
    return record("unpatchify", K.unpatchify_forward(tokens.data, patch, height, width), (tokens,),
                  lambda dy: (K.unpatchify_backward(dy, patch),))


def add_constant(x, constant):
    """x (B, ...) + an array of one sample's shape, the same for all samples; no gradient flows to it."""
    rows = x.data.reshape(x.shape[0], -1)
    y = K.bias_add_forward(rows, constant.reshape(-1)).reshape(x.shape)
    return record("add_constant", y, (x,), lambda dy: (dy,))


def concat(a, b):
    """Join along the channels."""
    channels = a.shape[-1]
    return record("concat", K.concat_forward(a.data, b.data), (a, b), lambda dy: K.concat_backward(dy, channels))


def pair(a, b):
    """As `concat`, only for `group_norm`, `linear` and `conv2d`: no copy if they can read two arrays."""
    both = K.Pair(a.data, b.data)
    if not K.pair_supports(both):
        return concat(a, b)
    result = record("pair", both, (a, b), lambda dy: dy)
    if a.statistics is not None and b.statistics is not None:
        result.statistics = a.statistics, b.statistics
    return result


def avgpool(x):
    """Mean over 2×2 pixels."""
    return record("avgpool", K.avgpool_forward(x.data), (x,), lambda dy: (K.avgpool_backward(dy),))


def upsample(x):
    """Every pixel twice in each direction."""
    result = record("upsample", K.upsample_forward(x.data), (x,), lambda dy: (K.upsample_backward(dy),))
    result.statistics = x.statistics  # each number occurs four times: the same averages
    return result


def timestep_embedding(t, dim, max_period=10000.0):
    """Sinusoids of the timesteps t, an array (B,) -> (B, dim); a constant: no gradient flows to t."""
    return Tensor(K.timestep_embedding_forward(t, dim, max_period))


def embedding(labels, weight):
    """Row `labels[b]` of weight (N, C) for each sample; labels is an int32 array (B,)."""

    def backward(dy):
        K.embedding_backward(dy, labels, weight.grad)
        return ()

    return record("embedding", K.embedding_forward(labels, weight.data), (), backward, has_parameters=True)


def class_dropout(labels, probability, null_class, randomness):
    """labels, an int32 array (B,), each replaced by `null_class` with `probability`; `randomness` as in `dropout`."""
    if probability == 0 or randomness is None:
        return labels
    return K.class_dropout_forward(labels, probability, null_class, randomness.seed, randomness.step,
                                   randomness.samples)


def dropout(x, probability, randomness, layer):
    """Zero each element with `probability`, scale the others; `randomness` counts it (training.step.Randomness)."""
    if probability == 0 or randomness is None:
        return x
    where = (probability, randomness.seed, layer, randomness.step, randomness.samples)
    return record("dropout", K.dropout_forward(x.data, *where), (x,), lambda dy: (K.dropout_backward(dy, *where),))


def weigh(x, t, weight):
    """Each sample of x (B, ...) times weight[t[b]]; t int32 (B,), weight float32 (T,): arrays, no gradient flows there.
    """
    return record("weigh", K.weigh_forward(x.data, t, weight), (x,), lambda dy: (K.weigh_forward(dy, t, weight),))


def mse(prediction, target, scale=1.0):
    """Mean of (prediction - target)² over the target's channels, as a tensor of one value.

    scale multiplies the gradient only, not the value: a step of several microbatches passes 1 / their number.
    """
    saved = prediction.data

    def backward(dy):
        return (K.mse_backward(saved, target, scale, dy),)

    return record("mse", K.mse_forward(saved, target), (prediction,), backward)


def hybrid_loss(prediction, target, x_0, t, tables, weight, scale=1.0):
    """Squared error of the first half of the channels, plus weight · the variational bound of the learned variance.

    tables: k, low, width of the diffusion (see kernels/diffusion/vlb.py); scale as in `mse`.
    """
    saved = prediction.data

    def backward(dy):
        return (K.hybrid_loss_backward(saved, target, x_0, t, *tables, weight, scale, dy),)

    return record("hybrid_loss", K.hybrid_loss_forward(saved, target, x_0, t, *tables, weight), (prediction,), backward)


def reshape(x, *shape):
    """The same elements in another shape; no kernel runs."""
    before = x.shape
    return record("reshape", x.data.reshape(*shape), (x,), lambda dy: (dy.reshape(*before),))
