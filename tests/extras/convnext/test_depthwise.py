"""Depthwise convolution: every version against float64, and the reference against the definition."""

import numpy as np
import pytest

from numdiff.device import download
from numdiff.extras.convnext import depthwise as D
from numdiff.extras.convnext.depthwise import launcher, mma
from numdiff.kernels.operation.versions import at_most
from tests.conftest import (
    exhaustive,
    numerical_gradient,
    on,
    relative_error,
)


def make(rng, shape, kernel, dtype=np.float64):
    """x, dy and weight, of numbers that dtype has; bias and channel."""
    B, _, _, C = shape
    arrays = [rng.standard_normal(s).astype(dtype) for s in (shape, shape, (kernel, kernel, C))]
    return *arrays, rng.standard_normal(C), rng.standard_normal((B, C))


def exact(*arrays):
    return [a.astype(np.float64) for a in arrays]


@exhaustive
@on("emulator", "cuda")
def test_many_tiles_a_block(engine, rng, monkeypatch):
    """The weight gradient's sums continue from tile to tile; the last chunk has fewer."""
    for module, version, dtype in ((launcher, 2, np.float64), (mma, 3, np.float16)):
        monkeypatch.setattr(module, "GRADIENT_BLOCKS", 2)
        x, dy, weight, _, _ = make(rng, (3, 3, 4, 8), 3, dtype)
        want, got = np.zeros(weight.shape), engine.zeros(weight.shape)
        D.depthwise_weight_gradient_reference(*exact(dy, x), want)
        D.depthwise_weight_gradient(engine(dy), engine(x), got, version=version)
        engine.check(got, want)


def test_all_gradients(engine, rng):
    x, dy, weight, _, _ = make(rng, (2, 3, 4, 8), 3)
    sums = engine.zeros(weight.shape), engine.zeros(8)
    dx, dchannel = D.depthwise_backward(
        engine(dy), engine(x), engine(weight), *sums, need_channel=True
    )
    want = np.zeros(weight.shape)
    D.depthwise_weight_gradient_reference(dy, x, want)
    for got, expected in (
        (dx, D.depthwise_input_gradient_reference(dy, weight)),
        (sums[0], want),
        (sums[1], dy.sum((0, 1, 2))),
        (dchannel, dy.sum((1, 2))),
    ):
        engine.check(got, expected)
    assert D.depthwise_backward(engine(dy), engine(x), engine(weight), None, need_dx=False) is None


def test_reference_against_the_definition(rng):
    x, _, weight, bias, channel = make(rng, (2, 4, 5, 3), 5)
    y = D.depthwise_forward_reference(x, weight, bias, channel)
    for b, i, j, c in np.ndindex(y.shape):
        total = bias[c] + channel[b, c]
        for r, s in np.ndindex(5, 5):
            if 0 <= i + r - 2 < 4 and 0 <= j + s - 2 < 5:
                total += x[b, i + r - 2, j + s - 2, c] * weight[r, s, c]
        assert abs(y[b, i, j, c] - total) < 1e-12


def test_gradient(rng):
    x, dy, weight, _, _ = make(rng, (2, 3, 4, 2), 3)
    dweight = np.zeros(weight.shape)
    D.depthwise_weight_gradient_reference(dy, x, dweight)
    assert (
        relative_error(
            D.depthwise_input_gradient_reference(dy, weight),
            numerical_gradient(lambda a: D.depthwise_forward_reference(a, weight), x, dy),
        )
        < 1e-8
    )
    assert (
        relative_error(
            dweight, numerical_gradient(lambda a: D.depthwise_forward_reference(x, a), weight, dy)
        )
        < 1e-8
    )


@on("emulator", "cuda")
def test_a_gradient_is_added_to_another(engine, rng):
    x, dy, weight, _, _ = make(rng, (1, 2, 17, 8), 3, np.float16)
    want = D.depthwise_input_gradient_reference(*exact(dy, weight)) + exact(x)[0]
    for version in (1, 3, 4):
        got = D.depthwise_input_gradient(
            engine(dy), engine(weight), residual=engine(x), version=version
        )
        engine.check(got, want, 1e-3)


@on("cpu", "emulator")
def test_half_keeps_its_sums_in_single(engine, rng):
    """49 products of about one: their sum rounded to float16 once."""
    x = np.full((1, 7, 7, 8), 1.001, np.float16)
    y = download(D.depthwise_forward(engine(x), engine(np.ones((7, 7, 8), np.float16))))
    assert y[0, 3, 3, 0] == np.float16(49 * np.float32(x[0, 0, 0, 0])) and y[
        0, 0, 0, 0
    ] == np.float16(16 * np.float32(x[0, 0, 0, 0]))


@on("emulator")
def test_the_choice(engine, monkeypatch):
    """…is one entry for each operation, of wide images, within what `at_most` allows; for float32
    it is version 2."""
    half, single = (
        engine(np.ones((1, 4, 17, 8), np.float16)),
        engine(np.ones((1, 4, 17, 8), np.float32)),
    )
    narrow = engine(np.ones((1, 32, 16, 8), np.float16))
    weight = engine(np.ones((3, 3, 8), np.float16))
    for operation in launcher.FASTEST:
        monkeypatch.setitem(launcher.FASTEST, operation, 4)
        assert launcher._choose(half, weight, None, operation) == 4
        assert launcher._choose(narrow, weight, None, operation) == 3
        assert launcher._choose(single, weight, None, operation) == 2
        with at_most({"depthwise": "mma"}):
            assert launcher._choose(half, weight, None, operation) == 3


def test_wrong_arguments_say_so(engine):
    def ones(*shape):
        return engine(np.ones(shape))

    x, weight = ones(1, 4, 4, 6), ones(3, 3, 6)
    eight = ones(1, 4, 4, 8), ones(3, 3, 8)
    later = r"\(%s\) takes float16 and bfloat16, not .* use version=2"
    with pytest.raises(ValueError, match="must be as x"):
        D.depthwise_weight_gradient(ones(1, 4, 3, 6), x, weight)
    for given, version, message in (
        ((x, ones(4, 4, 6)), None, "a depthwise kernel of 4 × 4: it must be square and odd"),
        ((x, ones(3, 3, 5)), None, "channels last and equal"),
        ((x, weight, ones(5)), None, r"bias has shape \(5,\), this convolution needs \(6,\)"),
        ((x, weight), 2, r"version 2 \(tiled\) takes eight .* not 6 channels .* use version=1"),
        (eight, "mma", f"version 3 {later % 'mma'}"),
        (eight, 4, f"version 4 {later % 'hopper'}"),
    ):
        if version is None or engine.has_versions:
            with pytest.raises(ValueError, match=message):
                D.depthwise_forward(*given, version=version)


def test_cost_by_hand():
    """32 × 32 pixels of 128 channels, 32 images, float16: 8 MiB in and 8 MiB out, 49 multiply-adds
    a number."""
    assert D.depthwise_forward_cost(32, 32, 32, 128, 7, 2) == (2 * 2 * 2**22, 2 * 49 * 2**22)
    assert D.depthwise_weight_gradient_cost(1, 2, 3, 8, 3) == (2 * 4 * 48, 2 * 9 * 48)
