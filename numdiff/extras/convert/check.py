"""Check a state dict against the names and shapes of a model."""

import numpy as np

from ...errors import NumdiffError, listed


def check_shapes(state_dict, expected, what, optional=()):
    """The state dict in the order of `expected` ({name: shape}); a `NumdiffError` names what
    differs.

    what: the kind of model, for the message; optional: names that may be missing
    """
    missing = [name for name in expected if name not in state_dict and name not in optional]
    unexpected = [name for name in state_dict if name not in expected]
    if missing or unexpected:
        found = [
            listed(word, names)
            for word, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise NumdiffError(
            f"these are not the weights of this {what}: {' and '.join(found)}; check the model options"
        )
    for name, shape in expected.items():
        kind = np.dtype(getattr(state_dict.get(name), "dtype", np.float32))
        if kind.kind != "f":
            raise NumdiffError(
                f"{name} is {kind} in the file, but weights are float16, bfloat16, float32 or float64"
            )
        got = tuple(state_dict[name].shape) if name in state_dict else shape
        if got != shape and got + (1,) != shape:
            raise NumdiffError(
                f"{name} has the shape {got} in the file and {shape} in the model; "
                "check the model options"
            )
    return {name: state_dict[name] for name in expected if name in state_dict}


def check_whole(state_dict, expected, what):
    """Raise a `NumdiffError` that counts the tensors which are missing of those that such a model
    has at least.

    expected: their names; what: the kind of model, for the message
    """
    expected = list(dict.fromkeys(expected))
    missing = [name for name in expected if name not in state_dict]
    if missing:
        instead = (
            f", and it begins with {', '.join(list(state_dict)[:3])}"
            if 2 * len(missing) > len(expected)
            else ""
        )
        raise NumdiffError(
            f"these are not the weights of a whole {what}: {listed('missing', missing)}{instead}; save "
            "the whole model"
        )


def known_shape(state_dict, name, dimensions, what):
    """The shape of a tensor that every model of a kind has; a `NumdiffError` if it is missing or
    has another number of axes."""
    if name not in state_dict:
        some = ", ".join(list(state_dict)[:3])
        raise NumdiffError(
            f"these are not the weights of a {what}: there is no {name} (but {some}, …)"
        )
    shape = tuple(state_dict[name].shape)
    if len(shape) != dimensions or 0 in shape:
        raise NumdiffError(f"{name} has the shape {shape}, which no {what} has")
    return shape
