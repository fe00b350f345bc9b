"""The arrays for the gradients of an operation's weights, and whether they are needed.

A `Parameter` that is frozen, or absent (None), has no gradient to add to. One that is `written` has
its gradient written by the first backward and added to by later ones (`Parameter.grad_to_fill`).
Those of linear layers that are computed together are deferred (../deferred_gradients.py).
"""

from ..deferred_gradients import deferral_of
from ..parameter import trains
from ..recording import is_recording


def parameters_in(layers):
    """The Parameters of layers [(weight, bias)], as `record` takes them."""
    return [parameter for layer in layers for parameter in layer]


def gradient_of(parameter):
    """The gradient to add to; None if it is not to be computed, of a frozen parameter or an absent
    one."""
    return parameter.grad if trains(parameter) else None


def gradient_to_fill(weight):
    """(the gradient, whether to add to it) of a weight that is `written`; (None, True) where it is
    frozen."""
    return (None, True) if weight.frozen else weight.grad_to_fill()


def gradients_of(weight, bias, aside=None):
    """The arguments of `linear_backward` for a linear layer's gradients: their arrays, None if not
    needed, and whether to add to the weight's; or `aside`, if they are computed together with
    others (../deferred_gradients.py)."""
    if aside is not None:
        return {"dweight": None, "dbias": None, "aside": aside}
    dweight, accumulate = gradient_to_fill(weight)
    return {
        "dweight": None if dweight is None else dweight.reshape(weight.shape[0], -1),
        "dbias": gradient_of(bias),
        "accumulate": accumulate,
    }


def deferral(weight, bias, layer):
    """For `gradients_of`: the `DeferredLayer` of a layer recorded within `together`, or None;
    layer: in FP8."""
    return deferral_of(weight, bias) if layer is None and is_recording() else None
