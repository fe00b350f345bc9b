"""Statistics passed from a convolution to the GroupNorm that reads its result, in the emulator."""

import functools

import numpy as np
import pytest

from numdiff import kernels as K
from numdiff.device import download, upload
from numdiff.device.emulator import EmulatorDevice
from numdiff.nn import Tape, Tensor
from numdiff.nn import functional as F
from numdiff.nn.parameter import Parameter
from tests.conftest import exhaustive

CHANNELS, GROUPS = 8, 4


def parameter(array, backend):
    """One in both types, with a gradient."""
    made = Parameter(array.shape, None)
    made.half, made.data = (
        upload(array.astype(kind), backend) for kind in (np.float16, np.float32)
    )
    made.grad = upload(np.zeros(array.shape, np.float32), backend)
    return made


class BlockWithStatistics:
    """A convolution, its result made larger, and a norm."""

    name = "block"

    def __init__(self, rng, backend):
        def weight(*shape):
            return parameter(0.3 * rng.standard_normal(shape), backend)

        self.weight, self.scale, self.shift = (
            weight(CHANNELS, 3, 3, CHANNELS),
            weight(CHANNELS),
            weight(CHANNELS),
        )

    def forward(self, x):
        h = F.upsample(F.conv2d(x, self.weight, statistics=True))
        return F.group_norm(h, self.scale, self.shift, GROUPS, silu=True)

    def __call__(self, *arguments):
        return self.forward(*arguments)


def run(backend, repeat=False):
    """[y, and the gradients]"""
    rng = np.random.default_rng(0)
    block = BlockWithStatistics(rng, backend)
    if repeat:
        block.recomputed = True
    x = Tensor(
        upload(rng.standard_normal((1, 8, 8, CHANNELS)).astype(np.float16), backend),
        requires_grad=True,
    )
    with Tape() as tape:
        y = block(x)
    tape.backward(y, upload(rng.standard_normal(y.shape).astype(np.float16), backend))
    return [download(a) for a in (y.data, x.grad, block.weight.grad, block.scale.grad)]


@exhaustive
@pytest.mark.slow
def test_statistics_reach_the_norm(monkeypatch):
    """Through an upsampling; as NumPy computes it without them, but for rounding; recomputed, the
    same bits."""
    monkeypatch.setattr(K, "channel_statistics", functools.partial(K.channel_statistics, least=0))
    backend = EmulatorDevice(checks=False, float64=False)
    known = run(backend)
    assert any("groupnorm_forward_kernel_v4" in name for _, name in backend.launched)
    for a, b in zip(run(None), known, strict=True):
        assert np.linalg.norm(a.astype(np.float64) - b) <= 2e-3 * np.linalg.norm(
            a.astype(np.float64)
        )
    for a, b in zip(known, run(backend, repeat=True), strict=True):
        assert a.tobytes() == b.tobytes()
