"""Recomputation: a block keeps its inputs alone, and computes its inside again when its gradient is wanted.

The forward pass of a recomputed block runs without a tape, so what it computes on the way is free again at once. Its
one record runs the block a second time, under a tape of its own, and plays that back. One more forward pass of a block
is paid for the memory of all but one block's inside.

Same bits as without: the same kernels run on the same numbers (dropout is counted, not drawn), and the tensors of the
second run have the slots of the first run's, so that gradients meet in the same order, too.
"""
from . import tensor
from .tensor import Slots, Tape, Tensor, scope


def recompute(module, *arguments, **options):
    """`module.forward` of tensors among the arguments, which returns one or a list; its inside is not kept."""
    plain = type(module).forward
    tape = tensor._active[-1] if tensor._active else None
    if tape is None or tape.check_finite:  # a fault is to be named where it arises
        return plain(module, *arguments, **options)
    tensor._active.append(None)  # nothing is recorded
    try:
        result = plain(module, *arguments, **options)
    finally:
        tensor._active.pop()
    results = [result] if isinstance(result, Tensor) else result
    outputs = [Tensor(part.data, requires_grad=True, statistics=part.statistics) for part in results]

    def backward(arrived):
        scope.append(module.name)
        try:
            with Tape() as inside:
                again = plain(module, *_again(arguments), **_again(options))
            again = [again] if isinstance(again, Tensor) else again
            pairs = [pair for pair in zip(again, arrived, strict=True) if pair[1] is not None]
            for part, gradient in pairs[1:]:
                part.slot.receive(gradient)
            inside.backward(*pairs[0])
        finally:
            scope.pop()
        return ()

    slots = Slots([part.slot for part in outputs])
    tape.records.append(tensor.Record(f"{module.name} again", slots, (), backward))
    return outputs[0] if isinstance(result, Tensor) else outputs


def _again(value):
    """`value` with new tensors for those in it, in lists, tuples and dicts: of the same arrays, with the same slots."""
    if isinstance(value, Tensor):
        new = Tensor(value.data, statistics=value.statistics)
        new.slot = value.slot
        return new
    if type(value) in (list, tuple):
        return type(value)(map(_again, value))
    if type(value) is dict:
        return {key: _again(item) for key, item in value.items()}
    return value
