"""3 × 3 convolutions by mma.sync from tiles with a halo: every tile, several tiles and chunks of
channels a block."""

import numpy as np
import pytest

from numdiff.device import empty
from numdiff.kernels import conv2d as C
from numdiff.kernels.conv2d import mma_halo, mma_halo_gradient
from tests.conftest import large, on, quick, where

from .test_half import TOLERANCE, check_weight_gradient, operands, repeat

ADDENDS = "bias", "channel", "residual"
# B, H, W, C_in, C_out: two tiles a block and two chunks of channels; segments of two images, and
# one that is missing
SMALL = [((16, 2), (1, 17, 3, 40, 8)), ((8, 2), (3, 3, 5, 8, 16))]
LARGE = [
    (only, shape)
    for only in ((16, 4), (16, 2), (8, 4), (8, 2))
    for shape in (
        (40, 16, 24, 40, 72),
        (150, 8, 8, 128, 136),
        (2, 64, 64, 64, 64),
        (3, 13, 9, 64, 64),
    )
]


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize(
    "only, shape", [*SMALL, *[pytest.param(*case, marks=large) for case in LARGE]], ids=str
)
@on("emulator", "cuda")
# a kernel for either order of the taps, which differ in that alone
@where(lambda engine, only, flipped: engine == "cuda" or flipped == (only == (8, 2)))
@quick(lambda engine, only: engine != "emulator" or only == (8, 2))
def test_tiles(engine, rng, monkeypatch, only, shape, flipped):
    if engine.name == "emulator":
        monkeypatch.setattr(engine.backend, "multiprocessors", 1)
    a, kinds = operands(rng, (*shape, 3, 1))
    want = C.conv2d_forward_reference(a["x"], a["weight"], **{k: a[k] for k in ADDENDS})
    weight = (
        np.ascontiguousarray(a["weight"][:, ::-1, ::-1].transpose(3, 1, 2, 0))
        if flipped
        else a["weight"]
    )

    def run():
        x = engine(a["x"], np.float16)
        y = empty(want.shape, np.float16, like=x)
        bias, channel, residual = (engine(a[k], kinds[k]) for k in ADDENDS)
        return mma_halo.halo_forward(
            x, engine(weight, np.float16), bias, y, channel, residual, flipped, only
        )

    y = run()
    engine.check(y, want, TOLERANCE)
    if engine.name == "cuda":
        repeat(engine, y, run)


@pytest.mark.parametrize(
    "only, shape",
    [
        ((16, 3), (1, 3, 2, 8, 8)),
        ((8, 2), (3, 9, 5, 8, 8)),
        *[
            pytest.param((seg, stages), case[1], marks=large)
            for case in LARGE[:4]
            for seg in (16, 8)
            for stages in (3, 2)
        ],
    ],
    ids=str,
)
@on("emulator", "cuda")
@quick(lambda engine: engine != "emulator")  # `kernels check` has one tile
def test_weight_gradient(engine, rng, monkeypatch, only, shape):
    if engine.name == "emulator":
        monkeypatch.setattr(engine.backend, "multiprocessors", 1)
    gradient = mma_halo_gradient.halo_weight_gradient
    check_weight_gradient(
        engine,
        rng,
        (*shape, 3, 1),
        lambda dy, x, _, dweight, dbias: gradient(dy, x, dweight, dbias=dbias, only=only),
    )
