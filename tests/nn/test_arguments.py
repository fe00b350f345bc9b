"""What the operations of functional/ say of arrays where Tensors or Parameters should be, and the
other way round."""

import inspect
import sys
import typing
from collections.abc import Sequence

import numpy as np
import pytest

from numdiff.nn import Tape, Tensor
from numdiff.nn import functional as F
from numdiff.nn.functional.arguments import checked
from numdiff.nn.parameter import Parameter

ARRAY, TENSOR, PARAMETER = (
    np.zeros((2, 4), np.float32),
    Tensor(np.zeros((2, 4), np.float32)),
    Parameter((2, 4), None),
)


def taken(annotation):
    """(what an argument with this annotation may be, what it may not be); (1, None) where all may
    be."""
    text = str(annotation)
    if typing.get_origin(annotation) is Sequence and "Parameter" in text:
        return [(PARAMETER, PARAMETER)], [(PARAMETER, ARRAY)]
    kinds = {"Tensor": (TENSOR, ARRAY), "Parameter": (PARAMETER, ARRAY), "ndarray": (ARRAY, TENSOR)}
    return next((kinds[name] for name in kinds if name in text), (1, None))


@pytest.mark.parametrize("name", F.__all__)
def test_an_array_is_no_tensor(name):
    """Each argument in turn is of the wrong kind, the others of the right one."""
    signature = inspect.signature(getattr(F, name))
    kinds = {
        key: (parameter.kind is parameter.VAR_POSITIONAL, *taken(parameter.annotation))
        for key, parameter in signature.parameters.items()
    }
    right = {key: (value,) if many else value for key, (many, value, _) in kinds.items()}
    tried = 0
    for key, (many, _, wrong) in kinds.items():
        if wrong is not None:
            call = inspect.BoundArguments(signature, {**right, key: (wrong,) if many else wrong})
            with pytest.raises(
                TypeError, match=f"^{name}: {key} must be an? (Tensor|Parameter|array), and not "
            ):
                getattr(F, name)(*call.args, **call.kwargs)
            tried += 1
    assert tried


@pytest.mark.parametrize("name", F.__all__)
def test_a_checked_operation_shows_itself_as_it_was_written(name):
    """Its signature with annotations, its docstring and its place, for `help` and completion."""
    shown = getattr(F, name)
    written = vars(sys.modules[shown.__module__])[name]
    assert shown is not written and shown.__wrapped__ is written
    assert shown.__doc__ and shown.__doc__ == written.__doc__
    assert inspect.signature(shown) == inspect.signature(written)


def test_what_is_said_of_an_array():
    with pytest.raises(
        TypeError,
        match=r"^silu: x must be a Tensor, and not the ndarray array.*: give Tensor\(x\)\.$",
    ):
        F.silu(ARRAY)
    with pytest.raises(
        TypeError, match=r"^mse: target must be an array, and not a Tensor: give target\.data\.$"
    ):
        F.mse(TENSOR, TENSOR)
    with pytest.raises(
        TypeError, match="^linear: bias must be a Parameter, and not the ndarray .*: give one of a"
    ):
        F.linear(TENSOR, PARAMETER, bias=ARRAY)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'b'"):
        F.add(ARRAY)


def test_types_are_looked_at_once(monkeypatch):
    """An earlier call of these types passed; one of others is looked at, and so are layers that are
    not Parameters."""
    looked = []
    monkeypatch.setattr(
        "numdiff.nn.functional.arguments._check", lambda name, *_: looked.append(name)
    )

    def operation(x: Tensor, residual: Tensor | None = None):
        return x

    def listed(x: Tensor, layers: Sequence[tuple[Parameter, Parameter]]):
        return x

    for function, calls in (
        (checked(operation), [(TENSOR,), (TENSOR,), (TENSOR, None), (TENSOR, TENSOR)]),
        (
            checked(listed),
            [
                (TENSOR, [(PARAMETER, PARAMETER)]),
                (TENSOR, [(PARAMETER,) * 2] * 3),
                (TENSOR, [(PARAMETER, ARRAY)]),
            ],
        ),
    ):
        for given in calls:
            assert function(*given) is TENSOR
    assert looked == ["operation"] * 3 + ["listed"] * 2


def test_none_is_an_argument_only_where_one_may_be_absent():
    with Tape():
        assert F.layer_norm(TENSOR, None, bias=None).shape == TENSOR.shape
    with pytest.raises(TypeError, match="^add: b must be a Tensor, and not the NoneType None"):
        F.add(TENSOR, None)
