import numpy as np
import pytest

from numdiff.kernels import conv2d as C
from numdiff.kernels.concat import Pair
from numdiff.kernels.conv2d.flip import flipped_weight
from numdiff.kernels.conv2d.tiles import cut, tile_width
from numdiff.kernels.cpu import convolution as cpu
from tests.conftest import quick


def operands(rng, shape):
    b, h, w, c, n, kernel, stride = shape
    x, weight = rng.standard_normal((b, h, w, c)), rng.standard_normal((n, kernel, kernel, c))
    dy = rng.standard_normal((b, (h - 1) // stride + 1, (w - 1) // stride + 1, n))
    return x, weight, rng.standard_normal(n), dy, stride


def test_flipped_weight(engine, rng):
    if engine.has_versions:
        weight = rng.standard_normal((37, 3, 3, 70)).astype(np.float32)
        engine.check(flipped_weight(engine(weight)), weight[:, ::-1, ::-1].transpose(3, 1, 2, 0), 0)


@pytest.mark.parametrize("kernel, stride", [(1, 1), (1, 2), (3, 1), (3, 2), (5, 1), (3, 3)])
def test_cpu_engine_is_the_reference(rng, kernel, stride, monkeypatch):
    x, weight, bias, dy, _ = operands(rng, (3, 5, 6, 2, 4, kernel, stride))
    monkeypatch.setattr(cpu, "CACHE", 900)  # bytes: several groups of images
    assert len(cpu.cache_sized(x, kernel, slice(0, 3))) > 1
    want = C.conv2d_forward_reference(x, weight, bias, stride)
    addends = rng.standard_normal((3, 4)), rng.standard_normal(want.shape)
    assert np.allclose(cpu.conv2d_forward_cpu(x, weight, bias, stride), want)
    assert np.allclose(
        cpu.conv2d_forward_cpu(x, weight, None, stride, *addends),
        C.conv2d_forward_reference(x, weight, None, stride, *addends),
    )
    got, wanted = ([np.ones_like(weight), np.ones_like(bias)] for _ in range(2))
    dx = cpu.conv2d_backward_cpu(dy, x, weight, *got, stride)
    assert np.allclose(dx, C.conv2d_backward_reference(dy, x, weight, *wanted, stride))
    assert all(map(np.allclose, got, wanted))
    assert cpu.conv2d_backward_cpu(dy, x, weight, *got, stride, False) is None


def test_float32_stays_float32(rng):
    x, weight, bias, dy, stride = operands(rng, (2, 6, 6, 4, 8, 3, 1))
    x, weight, bias, dy = (a.astype(np.float32) for a in (x, weight, bias, dy))
    assert C.conv2d_forward(x, weight, bias, stride).dtype == np.float32
    assert (
        C.conv2d_backward(dy, x, weight, np.zeros_like(weight), np.zeros_like(bias), stride).dtype
        == np.float32
    )


def test_tiles_and_parts():
    assert [tile_width(n) for n in (3, 64, 128, 192, 256, 320, 384)] == [
        64,
        64,
        128,
        64,
        128,
        64,
        128,
    ]
    for tiles, steps in ((1, 7), (5, 16384), (36, 256), (1024, 72), (32, 288)):
        parts, part_steps = cut(tiles, 128, steps)
        # every part has work, and nothing is left out
        assert (parts - 1) * part_steps < steps <= parts * part_steps


def test_cost_counts_two_flops_a_product():
    moved, flops = C.conv2d_forward_cost(32, 64, 64, 64, 64, 3)
    assert flops == 2 * 32 * 64 * 64 * 64 * 64 * 9
    assert moved == 4 * (2 * 32 * 64 * 64 * 64 + 64 * 64 * 9 + 64)
    assert C.conv2d_backward_cost(32, 64, 64, 64, 64, 3)[1] > 2 * flops


@pytest.mark.parametrize(
    "x, weight, stride, match",
    [
        ((1, 4, 4, 3), (8, 3, 3, 4), 1, "channels last"),
        ((1, 4, 4, 3), (8, 2, 2, 3), 1, "odd"),
        ((1, 4, 4, 3), (8, 3, 1, 3), 1, "square"),
        ((1, 4, 4, 3), (8, 3, 3, 3), 0, "stride"),
        ((4, 4, 3), (8, 3, 3, 3), 1, "four axes"),
    ],
)
def test_operands_that_do_not_fit_say_so(engine, x, weight, stride, match):
    with pytest.raises(ValueError, match=match):
        C.conv2d_forward(engine(np.ones(x)), engine(np.ones(weight)), None, stride)


def test_a_wrong_gradient_shape_says_so(engine):
    x, weight = engine(np.ones((1, 4, 4, 3))), engine(np.ones((8, 3, 3, 3)))
    with pytest.raises(ValueError, match="dweight"):
        C.conv2d_backward(engine(np.ones((1, 4, 4, 8))), x, weight, engine(np.ones((8, 3, 3, 1))))
    with pytest.raises(ValueError, match="dy"):
        C.conv2d_backward(engine(np.ones((1, 4, 4, 7))), x, weight, engine(np.ones((8, 3, 3, 3))))
    with pytest.raises(ValueError, match="like x"):
        dweight, residual = engine(np.ones((8, 3, 3, 3))), engine(np.ones((1, 4, 4, 2)))
        C.conv2d_backward(engine(np.ones((1, 4, 4, 8))), x, weight, dweight, residual=residual)


def test_an_unknown_version_says_so(engine):
    with pytest.raises(ValueError, match="no version 9"):
        C.conv2d_forward(engine(np.ones((1, 2, 2, 4))), engine(np.ones((4, 3, 3, 4))), version=9)


@pytest.mark.parametrize("kernel, stride", [(1, 1), (1, 2), (3, 1)])
@quick(lambda engine, kernel, stride: engine != "emulator" or kernel * stride > 1)
def test_channels_in_two_arrays(engine, rng, kernel, stride):
    """The bits of the convolution of their concatenation, also where a channel's vector keeps it
    from linear.py."""
    a, b = (engine(rng.standard_normal((2, 5, 3, n))) for n in (3, 2))
    weight, channel = (
        engine(rng.standard_normal((4, kernel, kernel, 5))),
        engine(rng.standard_normal((2, 4))),
    )
    results, alone = [], engine.zeros(weight.shape)
    for x in (Pair(a, b), Pair(a, b).joined()):
        y = C.conv2d_forward(x, weight, stride=stride, channel=channel)
        dweight = engine.zeros(weight.shape)
        dx, dchannel = C.conv2d_backward(y, x, weight, dweight, stride=stride, need_channel=True)
        if isinstance(x, Pair):
            assert C.conv2d_backward(y, x, weight, alone, stride=stride, need_dx=False) is None
            engine.check_equal(alone, dweight)
        results.append((y, dx.joined() if isinstance(x, Pair) else dx, dchannel, dweight))
    for of_two, of_one in zip(*results, strict=True):
        engine.check_equal(of_two, of_one)
