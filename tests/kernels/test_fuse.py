"""Chains of operations: forward, backward, on every engine; what is refused; what their kernels are
called."""

import copy
import math

import numpy as np
import pytest

from numdiff.device import cuda, download, float32, upload
from numdiff.device.compiler import is_kept, key_of
from numdiff.device.emulator import EmulatorDevice
from numdiff.device.planned import CARDS, Planned
from numdiff.device.ptx import PtxDevice
from numdiff.kernels.dropout import DROP, drop_operands
from numdiff.kernels.elementwise import silu, silu_gradient
from numdiff.kernels.fuse import (
    EACH,
    NUMBER,
    PER_CHANNEL,
    PER_SAMPLE,
    UNCHANGED,
    Operation,
    Place,
    fuse,
    select,
)
from numdiff.nn import Parameter, Tape, Tensor
from numdiff.nn import functional as F
from tests.conftest import exhaustive, numerical_gradient, relative_error, shapes, versions, where

SCALED = Operation(
    lambda x, scale, shift: x * scale + shift,
    PER_SAMPLE,
    PER_CHANNEL,
    x=lambda dy, scale: dy * scale,
    scale=lambda dy, x: dy * x,
    shift=UNCHANGED,
)
SILU = Operation(silu, x=silu_gradient)
LEAKY = Operation(
    lambda x, slope: select(x > float32(0), x, slope * x),
    NUMBER,
    x=lambda dy, x, slope: select(x > float32(0), dy, slope * dy),
)
JOINED = Operation(lambda x, h: x + h, EACH, x=UNCHANGED, h=UNCHANGED)
CHAIN = fuse(EACH, SCALED, SILU, LEAKY, JOINED, EACH)
SHAPES = shapes(
    minimal=(1, 1), odd=(2, 3, 5), aligned=(2, 3, 2, 8), two_passes=(1, 520, 8), wide=(1, 3, 520)
)


def make(rng, shape):
    """(x, scale, shift, slope, h), dy."""
    B, C = shape[0], shape[-1]
    x, h, dy = rng.standard_normal((3, *shape))
    return (x, rng.standard_normal((B, C)), rng.standard_normal(C), 0.25, h), dy


def reference(x, scale, shift, slope, h):
    z = x * scale.reshape(len(x), *[1] * (x.ndim - 2), -1) + shift
    y = z / (1 + np.exp(-z))
    return np.where(y > 0, y, slope * y) + h


def on(engine, given, dtype=np.float32):
    return [engine(a.astype(dtype)) if isinstance(a, np.ndarray) else a for a in given]


@SHAPES
@versions(1, 2, 3)
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "float16"])
@where(lambda version, shape: version is None or shape[-1] % (1, 4, 8)[version - 1] == 0)
@where(lambda engine, version: engine != "emulator" or version)  # None is one of the others
def test_a_chain(engine, rng, shape, version, dtype):
    given, dy = make(rng, shape)
    tolerance = 2e-6 if dtype == np.float32 else 2e-3
    given = [a.astype(dtype).astype(np.float64) if isinstance(a, np.ndarray) else a for a in given]
    dy = dy.astype(dtype)
    engine.check(
        CHAIN.forward(*on(engine, given, dtype), version=version), reference(*given), tolerance
    )
    runs = [
        CHAIN.backward(engine(dy), *on(engine, given, dtype), version=version)
        for _ in range(engine.repeats)
    ]
    for got, again, want in zip(
        runs[0], runs[-1], CHAIN.backward(dy.astype(np.float64), *given), strict=True
    ):
        engine.check(got, want, tolerance)
        engine.check_equal(got, again)


def test_gradients_are_those_of_differences(rng):
    given, dy = make(rng, (2, 3, 4))
    assert relative_error(CHAIN.forward(*given), reference(*given)) < 1e-14
    assert CHAIN.gradients == ["x", "scale", "shift", "h"]
    for name, found in zip(CHAIN.gradients, CHAIN.backward(dy, *given), strict=True):
        k = list(CHAIN.arguments).index(name)
        wanted = numerical_gradient(
            lambda a, k=k: reference(*given[:k], a, *given[k + 1 :]), given[k], dy
        )
        assert relative_error(found, wanted) < 1e-7, name


def test_what_is_kept():
    """The backward reads what a derivative names, and recomputes values in between; h is neither."""
    assert list(CHAIN.kept) == ["x", "scale", "shift", "slope"]
    text = CHAIN.text("backward", "naive")
    assert text.count("= step(") == text.count("= silu(") == 1 and " h" not in text
    assert (
        fuse(EACH, JOINED, EACH).kept == {} and not fuse(EACH, JOINED, EACH).plans["backward"].steps
    )


def test_a_derivative_may_name_the_result(engine, rng):
    sigmoid = Operation(
        lambda x: float32(1) / (float32(1) + math.exp(-x)),
        x=lambda dy, y: dy * y * (float32(1) - y),
    )
    for chain in (fuse(EACH, sigmoid, EACH), fuse(EACH, sigmoid, sigmoid, EACH)):
        x, dy = rng.standard_normal((2, 3, 4))
        (dx,) = chain.backward(engine(dy), engine(x))
        engine.check(dx, numerical_gradient(chain.forward, x, dy), 1e-5)


def test_a_result_is_a_new_array():
    x = np.ones(4, np.float32)
    for function in (lambda x: x, lambda x: float32(1)):
        y = fuse(EACH, Operation(function), EACH).forward(x)
        assert y is not x and not np.may_share_memory(x, y) and (y == x).all()


def test_sums_are_added_and_an_unchanged_gradient_is_dy(rng):
    chain = fuse(
        EACH, Operation(lambda x, bias: x + bias, PER_CHANNEL, x=UNCHANGED, bias=UNCHANGED), EACH
    )
    dy = rng.standard_normal((3, 4)).astype(np.float32)
    for given in (dy, upload(dy, EmulatorDevice())):
        dbias = upload(np.ones(4, np.float32), given)
        dx, found = chain.backward(given, None, None, into={"bias": dbias})
        assert dx is given
        np.testing.assert_allclose(download(dbias), 1 + dy.sum(0), rtol=1e-5, atol=1e-5)


# Names --------------------------------------------------------------------------------------------


def test_the_same_operations_give_the_same_chain_and_others_another_name():
    def chain(slope):
        return fuse(EACH, Operation(lambda x: x * slope, x=lambda dy: dy * slope), EACH)

    assert chain(float32(2)) is chain(float32(2))
    assert chain(float32(2)).name != chain(float32(3)).name and chain(float32(2)).name.startswith(
        "step_"
    )


def test_a_function_may_be_called_as_its_operand():
    def scale(x, scale):
        return x * scale

    chain = fuse(EACH, Operation(scale, PER_CHANNEL), EACH)
    x = upload(np.full((2, 4), 3, np.float32), EmulatorDevice())
    assert (download(chain.forward(x, x[:1].reshape(4))) == 9).all() and copy.deepcopy(
        chain
    ) is chain


def test_somebodys_chain_is_kept_on_disk_but_compiled_when_it_is_launched():
    x = upload(np.ones((2, 8), np.float32), Planned(CARDS[-1]))
    key = key_of(CHAIN["forward", 2], (x,))
    assert is_kept(key) and key.name == f"{CHAIN.name}_forward_kernel_v2"
    fuse(EACH, SILU, EACH).forward(x)
    assert not x.backend.kernels


def test_a_fault_names_the_line_of_the_text():
    """An index of an operation's own that is out of bounds, in the emulator."""
    table = np.ones(3, np.float32)

    @cuda.jit(device=True)
    def beyond(x):
        return x + table[int(x)]

    chain = fuse(EACH, Operation(beyond), EACH)
    with pytest.raises(Exception, match="index 7 is outside"):
        chain.forward(upload(np.full(4, 7, np.float32), EmulatorDevice()), version=1)


# On the tape --------------------------------------------------------------------------------------


def test_through_the_tape(engine, rng):
    """x·scale + shift, SiLU, dropout: with the gradients of three operations after each other."""
    x, dy = rng.standard_normal((2, 3, 3, 8)), rng.standard_normal((2, 3, 3, 8))
    scale, shift = rng.standard_normal((2, 8)), rng.standard_normal(8)
    counters = engine(np.array([3], np.uint32)), engine(np.arange(2, dtype=np.uint32))
    weight = Parameter((8,), None)
    weight.data, weight.grad = engine(shift), engine(np.zeros(8, np.float32))
    leaves = [Tensor(engine(a), requires_grad=True) for a in (x, scale)]
    with Tape() as tape:
        chain = fuse(EACH, SCALED, SILU, DROP, EACH)
        y = F.fused(chain, *leaves, weight, *drop_operands(x.shape, 0.3, 5, 1, *counters))
    tape.backward(y, engine(dy))
    kept = drop_operands(
        x.shape, 0.3, 5, 1, *(download(c) if engine.computes else c for c in counters)
    )

    def value(x, scale, shift):
        return chain.forward(x, scale, shift, *kept)

    if engine.computes:
        engine.check(y.data, value(x, scale, shift), 2e-6)
        engine.check(
            leaves[0].grad, numerical_gradient(lambda a: value(a, scale, shift), x, dy), 1e-5
        )
        engine.check(
            leaves[1].grad, numerical_gradient(lambda a: value(x, a, shift), scale, dy), 1e-5
        )
        engine.check(weight.grad, numerical_gradient(lambda a: value(x, scale, a), shift, dy), 1e-5)


# What is refused ----------------------------------------------------------------------------------


def test_what_is_no_chain_is_refused():
    with pytest.raises(ValueError, match="a chain needs one Operation or more"):
        fuse(EACH, EACH)
    with pytest.raises(ValueError, match="begins with what it reads and ends with what it writes"):
        fuse(SILU)
    with pytest.raises(ValueError, match="has 1 operands after x, and 0 places"):
        Operation(lambda x, h: x + h)
    with pytest.raises(ValueError, match="has no argument z: give derivatives of x"):
        Operation(lambda x: x, z=UNCHANGED)
    with pytest.raises(ValueError, match="thread is a word of the kernel itself"):
        fuse(EACH, Operation(lambda x, thread: x + thread, EACH), EACH)


def test_what_does_not_fit_a_chain_is_refused(engine):
    x = engine(np.ones((2, 3, 6), np.float32))
    scale, shift, h = engine(np.ones((2, 6), np.float32)), engine(np.ones(6, np.float32)), x
    with pytest.raises(ValueError, match=r"scale must have shape \(2, 6\), \(B, C\), not \(6,\)"):
        CHAIN.forward(x, shift, shift, 0.1, h)
    with pytest.raises(ValueError, match="h is int32: cast it to float32"):
        CHAIN.forward(x, scale, shift, 0.1, engine(np.ones((2, 3, 6), np.int32)))
    if engine.has_versions:
        with pytest.raises(
            ValueError,
            match=r"version 2 \(vectorised\), takes 4 elements .*6 is not a multiple of 4",
        ):
            CHAIN.forward(x, scale, shift, 0.1, h, version="vectorised")


def test_a_missing_derivative_is_reported():
    rounded = Operation(lambda x: float32(int(x)))
    chain = fuse(EACH, SILU, rounded, SCALED, EACH)
    with pytest.raises(ValueError, match="takes x, scale, shift, and was given 1 of these 3"):
        chain.forward(np.ones((2, 4), np.float32))
    x = Tensor(np.ones((2, 4), np.float32), requires_grad=True)
    with pytest.raises(ValueError, match="has no gradient, since step has no derivative of x"):
        chain.backward(x.data, x.data, x.data, x.data[0])
    with (
        Tape(),
        pytest.raises(ValueError, match="has no gradient of x: give its Operation a derivative"),
    ):
        F.fused(chain, x, x.data, x.data[0])
    scaled = fuse(EACH, SCALED, EACH)
    with Tape(), pytest.raises(ValueError, match="a Parameter is read PER_CHANNEL"):
        F.fused(scaled, x, Parameter((2, 4), None), x.data[0])


@exhaustive
def test_the_text_compiles_for_every_capability():
    """Eight at a time, with the words of two Philox blocks, and bfloat16's numbers."""
    device = PtxDevice()
    chain = fuse(EACH, SILU, DROP, EACH)
    x = upload(np.ones((2, 8), np.float16), device)
    counters = upload(np.zeros(1, np.uint32), device), upload(np.zeros(2, np.uint32), device)
    chain.forward(x, *drop_operands(x.shape, 0.1, 1, 0, *counters))
    assert {key[1] for key in device.launched} == {f"{chain.name}_forward_kernel_v3"}


def test_sums_with_a_place_without_rows_are_refused():
    reversed_place = Place(
        "like x", lambda shape: shape, "y.size - 1 - i", numpy=lambda a, shape: a.reshape(-1)[::-1]
    )
    biased = Operation(lambda x, bias: x + bias, PER_CHANNEL, x=UNCHANGED, bias=UNCHANGED)
    with pytest.raises(ValueError, match="since a place without rows has no part in sums"):
        fuse(reversed_place, biased, EACH).backward(np.ones((2, 4), np.float32), None, None)
