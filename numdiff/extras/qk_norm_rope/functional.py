"""Norm and rotation of q and k as a differentiable operation."""

from ... import kernels as K
from ...device import AnyArray
from ...nn.functional.arguments import checked
from ...nn.functional.gradients import gradient_of
from ...nn.parameter import Parameter
from ...nn.recording import is_recording
from ...nn.tensor import Tensor, record


@checked
def qk_norm_rope(
    qkv: Tensor,
    heads: int,
    q_weight: Parameter | None = None,
    k_weight: Parameter | None = None,
    rotation: AnyArray | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """q and k of each head of packed qkv (B, T, 3 · D), order "new": RMSNorm over the head with the
    weights (HS,), then the rotation, an array (2, T, HS) of cosines and sines, each where it is
    given. For `attention` (B, T, 3 · D).

    A qkv that comes from `linear` is overwritten, and gone afterwards: nothing else may read it.
    """
    if q_weight is None and k_weight is None and rotation is None:
        return qkv
    in_place = qkv.owned
    y, kept = K.qk_norm_rope_forward(
        qkv.data,
        heads,
        q_weight and q_weight.data,
        k_weight and k_weight.data,
        rotation,
        eps,
        in_place=in_place,
        keeps=is_recording(),
    )

    def backward(dy):
        return (
            K.qk_norm_rope_backward(
                dy,
                kept,
                heads,
                q_weight and q_weight.data,
                k_weight and k_weight.data,
                rotation,
                gradient_of(q_weight),
                gradient_of(k_weight),
                eps,
                in_place=slot.owned,
            ),
        )

    result = record("qk_norm_rope", y, (qkv,), backward, parameters=(q_weight, k_weight))
    slot = result.slot
    if in_place:
        qkv.data = None
    return result
