"""Products of matrices: linear layers, alone and several at once, and a product of two tensors."""

import contextlib
from collections.abc import Iterator, Sequence

from ... import kernels as K
from ...device import AnyArray
from ...dtypes import is_half
from .. import float8
from ..deferred_gradients import deferring
from ..parameter import Parameter, trains
from ..recording import is_recording
from ..tensor import Tensor, record
from .gradients import deferral, gradients_of, parameters_in
from .movement import columns


def linear(
    x: Tensor,
    weight: Parameter,
    bias: Parameter | None = None,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """x (..., K), weight (N, K), bias (N,) or None -> x·weightᵀ + bias, (..., N); further axes of
    weight count as K. residual: a tensor like the result, added to it, in the same kernel if that
    supports it
    gate: (B, N), with a residual (B, T, N): what the result is multiplied by before; only where
    `gates_products`
    """
    if gate is not None:
        b = None if bias is None else bias.data
        return Tensor(
            K.linear_gate_forward(x.data, weight.like(x.data), b, residual.data, gate.data)
        )
    wants_dx, adds = x.slot is not None, residual is not None

    def backward(dy, before):
        dx = float8.linear_backward(
            dy,
            kept,
            weight,
            layer,
            need_dx=wants_dx,
            residual=before,
            **gradients_of(weight, bias, aside),
        )
        return (dx, dy) if adds else (dx,)

    layer = float8.layer_of(weight, x.data)
    aside = deferral(weight, bias, layer)
    y, kept = float8.linear_forward(x.data, weight, bias, layer, residual and residual.data)
    result = record(
        "linear",
        y,
        (x,) if residual is None else (x, residual),
        backward,
        parameters=(weight, bias),
        adds=True,
        deferred=(aside,),
    )
    result.owned = True
    return result


def together(x: Tensor, *weights: Parameter) -> contextlib.AbstractContextManager:
    """Context: the gradients of linear layers with these weights are computed in one launch, if a
    kernel supports it for arrays like x (..., K), and it is faster (../deferred_gradients.py)."""
    joins = (
        is_recording()
        and is_half(x.dtype)
        and not any(w.frozen or float8.layer_of(w, x.data) for w in weights)
        and K.linear_gradients_supports(x.data, [w.shape for w in weights])
    )
    return deferring(weights) if joins else contextlib.nullcontext()


def linear_group(x: Tensor, layers: Sequence[tuple[Parameter, Parameter]]) -> list[Tensor]:
    """[x·weightᵀ + bias] for layers [(weight, bias)] of one float32 input x (B, K), in one launch:
    tensors (B, N_i)."""
    saved = x.data

    def backward(dys):
        # one kernel writes all weights' gradients, or adds to all, including those of frozen
        # weights, which are not used
        accumulate = not all(w.stale for w, _ in layers if not w.frozen)
        gradients = [
            (w.grad if accumulate or w.frozen else w.grad_to_fill()[0], b.grad) for w, b in layers
        ]
        return (
            K.linear_group_backward(
                dys, saved, [(w.data, b.data) for w, b in layers], gradients, accumulate=accumulate
            ),
        )

    return record(
        "linear_group",
        K.linear_group_forward(saved, [(w.data, b.data) for w, b in layers]),
        (x,),
        backward,
        parameters=parameters_in(layers),
    )


def stacks(like: AnyArray, layers: Sequence[tuple[Parameter, Parameter]]) -> bool:
    """Whether `linear_stack` takes these layers [(weight, bias)], and an x of the type and device
    of `like`: equal ones at equal distances, of 16 bits on Hopper, all of them trained or all
    frozen."""
    parameters = [parameter for layer in layers for parameter in layer]
    return (
        is_half(like.dtype)
        and len({parameter.frozen for parameter in parameters}) == 1
        and K.linear_stack_supports(
            like, [w.like(like) for w, _ in layers], [b.data for _, b in layers]
        )
    )


def linear_stack(x: Tensor, layers: Sequence[tuple[Parameter, Parameter]]) -> Tensor:
    """x·weightᵀ + bias of layers [(weight, bias)] that `stacks` allows, side by side: (B, G·N) of
    one input (B, K)."""
    saved, wants_dx, trained = x.data, x.slot is not None, trains(layers[0][0])

    def backward(dy):
        if trained:
            stack_gradients(dy, saved, layers)
        return (
            K.linear_stack_backward(dy, saved, [w.like(saved) for w, _ in layers])
            if wants_dx
            else None,
        )

    return record(
        "linear_stack",
        stack_forward(saved, layers),
        (x,),
        backward,
        parameters=parameters_in(layers),
    )


def stack_forward(x, layers):
    return K.linear_stack_forward(x, [(weight.like(x), bias.data) for weight, bias in layers])


def stack_gradients(dy, x, layers):
    """The gradients of the parameters of a `linear_stack`, or of neighbours in it and their part of
    dy."""
    accumulate = not all(weight.stale for weight, _ in layers)
    gradients = [
        (weight.grad if accumulate else weight.grad_to_fill()[0], bias.grad)
        for weight, bias in layers
    ]
    K.linear_stack_backward(
        dy, x, [weight.like(x) for weight, _ in layers], gradients, accumulate, need_dx=False
    )


def stack_columns(
    x: Tensor, layers: Sequence[tuple[Parameter, Parameter]], count: int, runs: Sequence[int]
) -> Iterator[list[Tensor]]:
    """`columns` of the `linear_stack` of trained layers, `count` of each layer: the columns of a
    run of neighbouring layers at each step of the iterator.

    runs: how many layers each has. In the backward pass the gradients of a run's parameters are
    computed as soon as those of its columns are complete, before the passes of earlier runs'
    columns. They may then be sent to other ranks (extras/transports/overlap.py). The bits are those of
    all at once. Frozen layers, and columns that `gate_adaln` does not take, come all at once.
    """
    if len(runs) == 1 or not (
        trains(layers[0][0]) and K.gate_adaln_supports(x.data, len(layers[0][1].data) // count)
    ):
        yield columns(linear_stack(x, layers), count * len(layers))
        return
    # `backward` must not keep the parameters
    saved, weights = x.data, [weight.like(x.data) for weight, _ in layers]
    y = record(
        "linear_stack",
        stack_forward(saved, layers),
        (x,),
        lambda dy: (K.linear_stack_backward(dy, saved, weights),),
    )
    parts, given, dtype, first = K.columns_forward(y.data, count * len(layers)), [], y.dtype, 0

    def backward_of(own, at):
        def backward(gradients):
            stack_gradients(K.join_columns(gradients, dtype), saved, own)
            given[:0] = gradients
            return (None if at else K.join_columns(given, dtype),)

        return backward

    for size in runs:
        yield record(
            "columns",
            parts[count * first : count * (first + size)],
            (y,),
            backward_of(layers[first : first + size], first),
            parameters=parameters_in(layers[first : first + size]),
        )
        first += size


def matmul(
    a: Tensor, b: Tensor, transpose_a: bool = False, transpose_b: bool = False, alpha: float = 1.0
) -> Tensor:
    """alpha · a·b with equal leading batch dimensions."""
    left, right = a.data, b.data
    y = K.matmul_forward(left, right, transpose_a, transpose_b, alpha=alpha)
    return record(
        "matmul",
        y,
        (a, b),
        lambda dy: K.matmul_backward(dy, left, right, transpose_a, transpose_b, alpha),
    )
