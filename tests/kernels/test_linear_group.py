"""Many linear layers of one input against each by itself."""

import numpy as np
import pytest

from numdiff.device import copy_into
from numdiff.kernels.linear import group as G
from tests.conftest import large, quick


def make(rng, engine, batch, K, widths):
    """(x, layers, gradients, the same as float64); gaps between the parameters, as in a model."""
    x = rng.standard_normal((batch, K))
    arrays = [(rng.standard_normal((n, K)), rng.standard_normal(n)) for n in widths]
    size = sum(n * K + n + 32 for n in widths)

    def place(values):
        flat, layers, at = engine(np.zeros(size)), [], 16
        for weight, bias in values:
            views = []
            for a in (weight, bias):
                view = flat[at : at + a.size].reshape(*a.shape)
                copy_into(view, a.astype(np.float32))
                views.append(view)
                at += a.size + 16
            layers.append(tuple(views))
        return layers

    start = [(rng.standard_normal(w.shape), rng.standard_normal(b.shape)) for w, b in arrays]
    return x, arrays, start, engine(x), place(arrays), place(start)


@pytest.mark.parametrize(
    "batch, K, widths, version",
    [
        (1, 1, (1,), None),
        (3, 40, (5, 64, 33), 1),
        (2, 70, (3, 1, 100), None),
        (3, 40, (4, 8, *[4] * 7), None),
        *[
            pytest.param(*s, marks=large)
            for s in (
                (3, 40, (4, 36, 8), 2),
                (1, 8, (4,) * 9, None),
                (33, 260, (4, 16), 2),
                (32, 256, (64, 128, 192, 256) * 5, None),
                (48, 768, (100, 340, 4), 2),
            )
        ],
    ],
)
@quick(lambda engine, batch, version: engine != "emulator" or (batch, version) != (3, None))
def test_against_single_layers(engine, rng, batch, K, widths, version):
    version = version if engine.has_versions else None
    x, arrays, start, on_engine, layers, gradients = make(rng, engine, batch, K, widths)
    ys = G.linear_group_forward(on_engine, layers, version=version)
    for y, (weight, bias) in zip(ys, arrays, strict=True):
        engine.check(y, x @ weight.T + bias, scale=np.abs(x) @ np.abs(weight.T) + np.abs(bias))
    dys = [rng.standard_normal((batch, n)) for n in widths]
    if len(widths) > 2:
        dys[1] = None  # nothing arrived there
    given = [None if dy is None else engine(dy) for dy in dys]
    dx = G.linear_group_backward(given, on_engine, layers, gradients, version=version)
    want, size = (
        sum(
            f(dy) @ f(weight) for dy, (weight, _) in zip(dys, arrays, strict=True) if dy is not None
        )
        for f in (np.asarray, np.abs)
    )
    engine.check(dx, want, scale=size)
    for dy, (dweight, dbias), (weight_start, bias_start) in zip(dys, gradients, start, strict=True):
        dy = np.zeros((batch, len(bias_start))) if dy is None else dy
        engine.check(
            dweight, weight_start + dy.T @ x, scale=np.abs(weight_start) + np.abs(dy.T) @ np.abs(x)
        )
        engine.check(dbias, bias_start + dy.sum(0), scale=np.abs(bias_start) + np.abs(dy).sum(0))
    if engine.repeats > 1:
        engine.check_equal(
            dx, G.linear_group_backward(given, on_engine, layers, gradients, version=version)
        )
        engine.check_equal(ys[-1], G.linear_group_forward(on_engine, layers, version=version)[-1])


@pytest.mark.parametrize("version", [1, 2])
def test_written_instead_of_added_to(engine, rng, version):
    x, arrays, start, on_engine, layers, gradients = make(rng, engine, 3, 8, (4, 8, 4))
    for weight, _ in gradients:
        copy_into(weight, np.full(weight.shape, np.nan, np.float32))
    dys = [rng.standard_normal((3, 4)), None, rng.standard_normal((3, 4))]
    G.linear_group_backward(
        [None if dy is None else engine(dy) for dy in dys],
        on_engine,
        layers,
        gradients,
        version=version if engine.has_versions else None,
        accumulate=False,
    )
    for dy, (dweight, dbias), (_, bias) in zip(dys, gradients, start, strict=True):
        engine.check(dweight, np.zeros(dweight.shape) if dy is None else dy.T @ x)
        engine.check(dbias, bias if dy is None else bias + dy.sum(0))


def test_refusals(engine, rng):
    _, _, _, x, layers, _ = make(rng, engine, 2, 4, (3, 3))
    with pytest.raises(ValueError, match="each weight"):
        G.linear_group_forward(engine(np.zeros((2, 5))), layers)
    if engine.has_versions:
        odd = engine(np.zeros(16))
        with pytest.raises(ValueError, match=r"version 2 \(tiled\) of linear_group reads four"):
            G.linear_group_forward(
                engine(np.zeros((2, 5))), [(odd[:10].reshape(2, 5), odd[12:14])], version=2
            )
    if engine.name in ("emulator", "cuda"):
        apart = [(engine(np.zeros((3, 4))), engine(np.zeros(3)))]
        with pytest.raises(ValueError, match="views of one buffer"):
            G.linear_group_forward(x, apart)


def test_costs():
    assert G.linear_group_forward_cost(2, 3, 5) == (4 * (6 + 15 + 5 + 10), 60)
