"""Products of E4M3 by mma.sync, on cards without Hopper's: which version runs, and its results in
emulators of such cards."""

import numpy as np
import pytest

from numdiff.device import download, upload
from numdiff.device.emulator import EmulatorDevice
from numdiff.device.planned import CARDS, Planned
from numdiff.errors import NumdiffError
from numdiff.extras.fp8 import matmul as P
from numdiff.extras.fp8 import mma
from numdiff.extras.fp8.quantise import PARTIALS, quantise_forward
from numdiff.kernels.elementwise import gelu_backward, gelu_forward
from tests.conftest import exhaustive, exhaustively, on, relative_error
from tests.extras.fp8.test_fp8 import BATCH, build, one_step
from tests.extras.fp8.test_matmul_fp8 import operands
from tests.models import without_zeros

ADA, BLACKWELL = (8, 9), (12, 0)


@on("cpu")
@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.device_name)
def test_the_version_follows_the_capability(card):
    device = Planned(card)
    given, _ = operands(np.random.default_rng(0), 128, 48, 32)
    given = [upload(x, device) for x in given]
    if card.capability < ADA:
        with pytest.raises(NumdiffError, match="need a GPU of compute capability 8.9 or later"):
            P.matmul_fp8_forward(*given)
        return
    P.matmul_fp8_forward(*given)
    (key,) = device.kernels
    assert ("hopper" in key.name) == (card.capability == (9, 0)) != ("mma" in key.name)


@on("cpu")
def test_every_tile_fits_the_smallest_shared_memory():
    for tile, layout in mma.FP8_TILES.items():
        assert layout.stages * mma.stage_bytes(tile) <= 99 << 10


@on("cpu")
@pytest.mark.parametrize("K", [16, 64, 768, 16384])
def test_the_choice_of_slices(K):
    """Slices are as long as SHORTEST_SLICE at least; a product that is not a sum in float32 has one."""
    for M, N in ((8, 8), (768, 3072), (16384, 768)):
        _, slices = mma.choose_mma_tile(M, N, K, 128, can_split=True)
        assert slices == 1 or K // slices >= mma.SHORTEST_SLICE
        assert mma.choose_mma_tile(M, N, K, 128)[1] == 1
    assert mma.choose_mma_tile(768, 768, 16384, 128, can_split=True)[1] > 1


@pytest.mark.slow
@on("cpu")
@pytest.mark.parametrize("cc", [ADA, pytest.param(BLACKWELL, marks=exhaustive)], ids=str)
@pytest.mark.parametrize("promoted", [True, *exhaustively(False)], ids=["promoted", "plain"])
def test_every_operation(rng, cc, promoted):
    """…against float64, within such a card's limits; two runs in other thread orders have the same
    bits; bytes are those of a pass that rounds afterwards."""
    device, (M, N, K) = EmulatorDevice(cc=cc), (72, 48, 144)
    device.vary_order = True
    (*given, residual), product = operands(rng, M, N, K, (M, N))
    bias, u = 3 * rng.standard_normal(N).astype(np.float32), rng.standard_normal((M, N))
    u = u.astype(np.float16)
    given, b, r, v = (
        [upload(x, device) for x in given],
        *(upload(x, device) for x in (bias, residual, u)),
    )
    scale = upload(np.float32([2.0**-4]), device)

    def run():
        into = [(scale, upload(np.zeros(PARTIALS, np.uint32), device)) for _ in range(2)]
        out = upload(np.full((M, N), np.nan, np.float32), device)
        P.matmul_fp8_gradient(*given, out, accumulate=False)
        results = [
            P.matmul_fp8_forward(*given, b, r, promoted),
            *P.matmul_fp8_gelu_forward(*given, b, promoted=promoted),
            P.matmul_fp8_gelu_backward(*given, v, promoted),
            out,
            P.matmul_fp8_gelu_forward(*given, b, False, promoted, into[0])[1],
            P.matmul_fp8_gelu_backward(*given, v, promoted, into[1]),
            *(largest for _, largest in into),
        ]
        return [download(x) for x in results]

    first, again = run(), run()
    for x, y in zip(first[:7], again[:7], strict=True):
        assert x.tobytes() == y.tobytes()
    sums = product + bias
    wanted = (
        sums + residual,
        sums,
        gelu_forward(sums),
        gelu_backward(product, u.astype(float)),
        product,
    )
    for got, want, tolerance in zip(first, wanted, [5e-4] * 4 + [1e-6], strict=False):
        assert relative_error(got, want) < tolerance
    for i in range(2):
        amax = np.zeros(PARTIALS, np.uint32)
        want = quantise_forward(first[2 + i], np.float32([2.0**-4]), amax)
        np.testing.assert_array_equal(first[5 + i], want)
        assert first[7 + i].max() == amax.max() == again[7 + i].max() > 0
    assert {name for _, name in device.launched if "mma" in name} and not any(
        "hopper" in name for _, name in device.launched
    )


@exhaustive
@on("cpu")
@pytest.mark.usefixtures("few_frequencies")
def test_a_training_step_on_ada():
    """…has the loss and the gradients of NumPy's reference."""
    loss, gradients = one_step(without_zeros(build()), "fp8", BATCH)
    device = EmulatorDevice(cc=ADA, checks=False, float64=False)
    got_loss, got = one_step(without_zeros(build(device)), "fp8", BATCH)
    assert got_loss == pytest.approx(loss, rel=1e-3)
    assert any("e4m3" in name for _, name in device.launched)
    everything = [
        np.concatenate([g[name].ravel() for name in gradients if "blocks" in name])
        for g in (got, gradients)
    ]
    assert relative_error(*everything) < 0.02
