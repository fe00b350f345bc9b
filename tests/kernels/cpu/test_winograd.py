"""Winograd's convolutions against the plain one in float64, and the bits of the one for any batch."""

import numpy as np
import pytest

from numdiff.device.batch_invariance import batch_invariant, evaluated
from numdiff.device.cpu import shares
from numdiff.kernels.conv2d import (
    conv2d_backward_reference,
    conv2d_forward_reference,
)
from numdiff.kernels.cpu import winograd, winograd_rows
from numdiff.kernels.cpu.convolution import conv2d_backward_cpu, conv2d_forward_cpu
from numdiff.kernels.cpu.winograd import (
    winograd_forward,
    winograd_supports,
    winograd_weight_gradient,
)
from numdiff.kernels.cpu.winograd_rows import winograd_rows_forward

SHAPES = {
    "a pixel": (5, 1, 1, 16, 16),
    "a tile": (3, 2, 2, 16, 24),
    "odd sides": (3, 7, 5, 17, 19),
    "a slice and a half": (6, 8, 8, 32, 16),
    "rows cut": (2, 40, 34, 16, 16),
    "a wide image": (1, 3, 1100, 16, 16),
}


def operands(B, H, W, C, N, dtype=np.float32):
    rng = np.random.default_rng(B + H + W)
    return [
        rng.standard_normal(shape).astype(np.float32).astype(dtype)
        for shape in ((B, H, W, C), (N, 3, 3, C), (N,), (B, N), (B, H, W, N))
    ]


def close(found, wanted):
    assert np.abs(found - wanted).max() <= 3e-6 * np.abs(wanted).max()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("forward", [winograd_forward, winograd_rows_forward])
def test_winograd_forward(forward, name, monkeypatch):
    # of "rows cut" 7 of 20, so that one comes twice
    monkeypatch.setattr(winograd_rows, "MAX_NUMBERS", 50_000)
    x, weight, bias, channel, residual = operands(*SHAPES[name])
    wide = operands(*SHAPES[name], np.float64)
    for addends in ({}, {"bias": bias}, {"bias": bias, "channel": channel, "residual": residual}):
        given = {k: v.astype(np.float64) for k, v in addends.items()}
        wanted = conv2d_forward_reference(*wide[:2], **given)
        close(forward(x, weight, **addends), wanted)
        with batch_invariant(len(x)):
            close(forward(x, weight, **addends), wanted)


@pytest.mark.parametrize("name", SHAPES)
def test_winograd_gradients(name):
    x, weight, _, _, dy = operands(*SHAPES[name])
    before = np.ones_like(weight)
    found, wanted = before.copy(), before.astype(np.float64)
    winograd_weight_gradient(dy, x, found)
    conv2d_backward_reference(
        *(a.astype(np.float64) for a in (dy, x, weight)), wanted, need_dx=False
    )
    close(found, wanted)


def test_backward_by_winograd():
    x, weight, _, _, dy = operands(4, 17, 16, 32, 16)
    assert winograd_supports(x, weight, 1)
    found, wanted = np.zeros_like(weight), np.zeros(weight.shape)
    dx = conv2d_backward_cpu(dy, x, weight, found)
    close(dx, conv2d_backward_reference(*(a.astype(np.float64) for a in (dy, x, weight)), wanted))
    close(found, wanted)


@pytest.mark.parametrize("name", SHAPES)
def test_batch_invariance_of_winograd(name):
    B, *rest = SHAPES[name]
    x, weight, bias, channel, residual = operands(11, *rest)

    def answer(images):
        with batch_invariant(len(x[images])):
            return conv2d_forward_cpu(x[images], weight, bias, 1, channel[images], residual[images])

    whole = answer(slice(0, 11))
    np.testing.assert_array_equal(answer(slice(2, 3))[0], whole[2])
    np.testing.assert_array_equal(answer(slice(4, 11)), whole[4:])
    shares = evaluated(
        lambda x, *addends: conv2d_forward_cpu(x, weight, bias, 1, *addends), x, channel, residual
    )
    np.testing.assert_array_equal(shares, whole)


@pytest.mark.parametrize("shape", [(4, 8, 8, 32, 128), (1, 5, 7, 16, 48)], ids=str)
def test_cores_that_share_the_channels_compute_what_one_does(shape, monkeypatch):
    """Where there are fewer tiles than channels, and by images elsewhere; sums over the batch are
    rounded otherwise."""
    x, weight, bias, channel, residual = operands(*shape)
    found = []
    for count in (1, 2, 3):
        monkeypatch.setattr(winograd, "workers", lambda count=count: count)
        monkeypatch.setattr(
            winograd,
            "over_batch",
            lambda function, n, elements, count=count: [
                function(share) for share in shares(n, min(count, n))
            ],
        )
        dweight = np.zeros_like(weight)
        winograd_weight_gradient(residual, x, dweight)
        found.append((winograd_forward(x, weight, bias, channel, residual), dweight))
        assert winograd.shares_channels(len(x) * 16, len(weight)) == (
            count > 1 and len(x) * 16 < len(weight)
        )
    for y, dweight in found[1:]:
        close(y, found[0][0])
        close(dweight, found[0][1])


def test_what_winograd_is_for():
    x, weight, *_ = operands(4, 16, 16, 16, 16)
    assert winograd_supports(x, weight, 1)
    assert not winograd_supports(x, weight, 2) and not winograd_supports(x, weight[:3], 1)
    assert not winograd_supports(x, weight[:, 1:2, 1:2], 1)
    assert not winograd_supports(x.astype(np.float64), weight.astype(np.float64), 1)
    # few pixels are for the plain sum, and a batch in which they do not count is of 32
    for images in (1, 4, 40):
        assert winograd_supports(x[:1, :8], weight, 1) is False
        with batch_invariant(images):
            assert winograd_supports(np.resize(x, (images, 8, 8, 16)), weight, 1)
