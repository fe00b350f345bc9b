"""Vectors for timesteps and for classes."""

from typing import Any

from ... import kernels as K
from ...device import AnyArray
from ..parameter import Parameter
from ..tensor import Tensor, record


def timestep_embedding(t: AnyArray, dim: int, max_period: float = 10000.0) -> Tensor:
    """Sinusoids of the timesteps t, an array (B,) -> (B, dim); a constant: no gradient flows to t."""
    return Tensor(K.timestep_embedding_forward(t, dim, max_period))


def embedding(labels: AnyArray, weight: Parameter) -> Tensor:
    """Row `labels[b]` of weight (N, C) for each sample; labels is an int32 array (B,)."""

    def backward(dy):
        K.embedding_backward(dy, labels, weight.grad)
        return ()

    return record(
        "embedding",
        K.embedding_forward(labels, weight.data),
        (),
        backward,
        parameters=(weight,),
    )


def class_dropout(
    labels: AnyArray, probability: float, null_class: int | None, randomness: Any
) -> AnyArray:
    """labels, an int32 array (B,), each replaced by `null_class` with `probability`; `randomness`
    as in `dropout`."""
    if probability == 0 or randomness is None:
        return labels
    return K.class_dropout_forward(
        labels, probability, null_class, randomness.seed, randomness.step, randomness.samples
    )
