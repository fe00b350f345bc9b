"""Convolutions of another resolution: their references against compositions, the fold of a weight's
taps, and what chooses them."""

import numpy as np
import pytest

from numdiff import kernels as K
from numdiff.device import download, upload
from numdiff.device.emulator import EmulatorDevice
from numdiff.kernels.conv2d.hopper.resampled import fold, folded_reference
from numdiff.nn import Tape, Tensor
from numdiff.nn import functional as F
from tests.conftest import relative_error
from tests.nn.test_statistics import parameter


@pytest.fixture(scope="module")
def emulator():
    return EmulatorDevice(checks=False, float64=False)


def test_references_are_compositions(rng):
    x, weight, bias = (rng.standard_normal(s) for s in ((2, 4, 6, 3), (5, 3, 3, 3), 5))
    big = np.pad(x.repeat(2, 1).repeat(2, 2), ((0, 0), (1, 1), (1, 1), (0, 0)))
    low = np.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0)))

    def taps(padded, step):
        H, W = (n - 2 for n in padded.shape[1:3])
        return bias + sum(
            padded[:, r : r + H : step, s : s + W : step] @ weight[:, r, s].T
            for r in range(3)
            for s in range(3)
        )

    assert relative_error(K.upsampled_conv2d_forward(x, weight, bias), taps(big, 1)) < 1e-12
    low = np.pad(low, ((0, 0), (0, 1), (0, 1), (0, 0)))[:, :6, :8]
    assert relative_error(K.halved_conv2d_forward(x, weight, bias), taps(low, 2)) < 1e-12


def test_taps_are_folded(rng, emulator):
    """Each phase is a convolution of the small image with 2 × 2 taps."""
    x, weight = rng.standard_normal((1, 3, 4, 8)), rng.standard_normal((8, 3, 3, 8))
    y, folded = K.upsampled_conv2d_forward(x, weight), folded_reference(weight)
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    for phase, (a, b) in enumerate(np.ndindex(2, 2)):
        taps = folded[8 * phase : 8 * (phase + 1)]
        want = sum(
            padded[:, a + r : a + r + 3, b + s : b + s + 4] @ taps[:, r, s].T
            for r in range(2)
            for s in range(2)
        )
        assert relative_error(y[:, a::2, b::2], want) < 1e-12
    half = weight.astype(np.float16)
    found = download(fold(upload(half, emulator)))
    assert (found == folded_reference(half.astype(np.float32)).astype(np.float16)).all()


def test_inference_alone_uses_them(rng, emulator):
    """A tape records the composition, whose backward there is; results differ by rounding."""
    for function, shape in (F.upsampled_conv2d, (1, 2, 2, 8)), (F.halved_conv2d, (1, 2, 4, 64)):
        x = upload(rng.standard_normal(shape).astype(np.float16), emulator)
        weight = parameter(0.1 * rng.standard_normal((8, 3, 3, shape[3])), emulator)
        bias = parameter(rng.standard_normal(8), emulator)
        emulator.launched.clear()
        alone = function(Tensor(x), weight, bias)
        upsampled = function is F.upsampled_conv2d
        assert {name for _, name in emulator.launched} == (
            {"fold_kernel", "conv2d_upsampled_kernel_v6_128x64_1"}
            if upsampled
            else {"conv2d_halved_kernel_v6_128x64_1"}
        )
        with Tape():
            recorded = function(Tensor(x, requires_grad=True), weight, bias)
        assert alone.slot is None and recorded.slot is not None
        error = relative_error(download(alone.data), download(recorded.data).astype(np.float64))
        assert error < 2e-3


def test_operands_that_no_kernel_takes_say_so(emulator):
    x, weight = (upload(np.zeros(s, np.float16), emulator) for s in ((1, 3, 4, 8), (8, 3, 3, 8)))
    with pytest.raises(ValueError, match=r"even sides and channels in 64s: use window_forward"):
        K.halved_conv2d_forward(x, weight)
    odd = upload(np.zeros((8, 3, 3, 4), np.float16), emulator)
    with pytest.raises(ValueError, match=r"channels in eights: use upsample_forward"):
        K.upsampled_conv2d_forward(upload(np.zeros((1, 2, 2, 4), np.float16), emulator), odd)
