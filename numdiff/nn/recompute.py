"""Recomputation: a block keeps only its inputs, and runs again when its gradient is needed.

The forward pass of a recomputed block runs without a tape, so its intermediate results are freed at
once. Its single record runs the block a second time, under a tape of its own, and plays that back.
This costs one more forward pass, and saves the memory of the inside of all blocks but one.
Recomputation omits the last product of a module that `ends_in` one: its backward needs the
product's input, and no operation needs its output. (In FP8 it is computed again, since its input is
rounded there.)

The bits are the same as without recomputation. The same kernels run on the same numbers (dropout is
counted, not drawn). The tensors of the second run have the slots of the first run's, so gradients
are added in the same order, too.
"""

import contextlib

from . import tensor
from .aliasing import again as again_over_gradients
from .recording import scope, tapes, unwanted_from
from .slots import Slots
from .tensor import Tape, Tensor


def recompute(module, *arguments, **options):
    """`module.forward`, which returns a tensor or a list; its intermediate results are not kept."""
    plain = type(module).forward
    tape = tapes[-1] if tapes else None
    if tape is None or tape.check_finite or not _has_gradients(module, arguments, options):
        # check_finite: name a fault where it arises
        return plain(module, *arguments, **options)
    over_gradients = again_over_gradients()
    tapes.append(None)  # nothing is recorded
    try:
        result = plain(module, *arguments, **options)
    finally:
        tapes.pop()
    results = [result] if isinstance(result, Tensor) else result
    outputs = [
        Tensor(part.data, requires_grad=True, statistics=part.statistics) for part in results
    ]

    def backward(arrived):
        scope.append(module.name)
        try:
            with over_gradients(), without_result(module), Tape() as inside:
                again = plain(module, *_again(arguments), **_again(options))
            again = [again] if isinstance(again, Tensor) else again
            pairs = [
                (part, gradient)
                for part, gradient in zip(again, arrived, strict=True)
                if gradient is not None and part.slot is not None
            ]
            for part, gradient in pairs[1:]:
                part.slot.receive(gradient)
            inside.backward(*pairs[0])
        finally:
            scope.pop()
        return ()

    slots = Slots([part.slot for part in outputs])
    parameters = [parameter for _, parameter in module.named_parameters()]
    record = tensor.Record(f"{module.name} again", slots, (), backward, parameters=parameters)
    tape.records.append(record)
    return outputs[0] if isinstance(result, Tensor) else outputs


def without_result(module):
    """Context in which the product that a module ends in need not be computed."""
    weight = module.ends_in and getattr(module, module.ends_in).weight
    return contextlib.nullcontext() if weight is None else unwanted_from(weight)


def _has_gradients(module, *inputs):
    """Whether anything wants a gradient that passes through the block: a parameter that is not
    frozen, or an input."""
    return any(
        not parameter.frozen for _, parameter in module.named_parameters()
    ) or _wants_gradient(inputs)


def _wants_gradient(value):
    if isinstance(value, Tensor):
        return value.slot is not None
    values = (
        value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    )
    return any(map(_wants_gradient, values))


def _again(value):
    """`value` with its tensors, also within lists, tuples and dicts, replaced by new ones of the
    same arrays and slots."""
    if isinstance(value, Tensor):
        new = Tensor(value.data, statistics=value.statistics)
        new.slot = value.slot
        return new
    if type(value) in (list, tuple):
        return type(value)(map(_again, value))
    if type(value) is dict:
        return {key: _again(item) for key, item in value.items()}
    return value
