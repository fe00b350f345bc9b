"""Convolution in float16: every version, pass and addend against float64 over the same float16
operands."""

import itertools

import numpy as np
import pytest

from numdiff.device import download, empty
from numdiff.device.ptx import get_ptx_device
from numdiff.kernels import conv2d as C
from numdiff.kernels.conv2d.hopper import convolution as conv2d_hopper
from numdiff.kernels.conv2d.hopper import weight_gradient_3x3 as conv2d_hopper_gradient_3x3
from numdiff.kernels.conv2d.hopper.boxes import SHARED
from numdiff.kernels.conv2d.hopper.plan import plans
from numdiff.kernels.conv2d.narrow_half import launcher as conv2d_narrow_half
from tests.conftest import large, on, quick, relative_error, where

TOLERANCE = 2e-3


def operands(rng, shape):
    """Float16 x, weight, dy, residual; float32 bias, channel: as float64, with the values that they
    have then."""
    b, h, w, c, n, size, stride = shape
    ho, wo = (h - 1) // stride + 1, (w - 1) // stride + 1
    drawn = {
        "x": (b, h, w, c),
        "weight": (n, size, size, c),
        "dy": (b, ho, wo, n),
        "residual": (b, ho, wo, n),
        "bias": (n,),
        "channel": (b, n),
    }
    made = {name: rng.standard_normal(dims) for name, dims in drawn.items()}
    made["weight"] /= size * c**0.5
    kinds = {name: np.float32 if name in ("bias", "channel") else np.float16 for name in made}
    return {name: a.astype(kinds[name]).astype(np.float64) for name, a in made.items()}, kinds


def repeat(engine, first, run):
    again = run()
    for one, other in (
        zip(first, again, strict=True) if isinstance(first, tuple) else ((first, again),)
    ):
        if one is not None:
            engine.check_equal(one, other)


def check_weight_gradient(engine, rng, shape, add, tolerance=2e-5):
    """add(dy, x, weight, dweight, dbias) adds the gradients to the last two, as NumPy does."""
    a, _ = operands(rng, shape)
    want = [rng.standard_normal(a[name].shape) for name in ("weight", "bias")]
    start = [w.astype(np.float32) for w in want]
    C.conv2d_backward_reference(a["dy"], a["x"], a["weight"], *want, need_dx=False)

    def run():
        gradients = tuple(map(engine, start))
        add(*(engine(a[name], np.float16) for name in ("dy", "x", "weight")), *gradients)
        return gradients

    got = run()
    for gradient, expected in zip(got, want, strict=True):
        engine.check(gradient, expected, tolerance)
    if engine.name == "cuda":
        repeat(engine, got, run)


@pytest.mark.parametrize(
    "blocks, turns, shape",
    [
        (1, 4, (1, 19, 15, 3, 8, 3, 1)),
        (1, 1, (2, 13, 11, 8, 3, 3, 1)),
        (None, 4, (1, 1, 2, 4, 8, 3, 1)),
        *[
            pytest.param(None, 4, s, marks=large)
            for s in (
                (32, 64, 64, 3, 64, 3, 1),
                (32, 64, 64, 64, 3, 3, 1),
                (5, 61, 67, 5, 72, 3, 1),
                (3, 30, 300, 136, 7, 3, 1),
            )
        ],
    ],
    ids=str,
)
@on()
@where(lambda engine, blocks: engine != "launch")  # the reference takes its time
@quick(lambda engine, blocks, turns: engine != "emulator" or blocks and turns == 1)
def test_narrow_weight_gradient(engine, rng, monkeypatch, blocks, turns, shape):
    """Several groups of a warp in a chunk, several chunks of a block, several blocks."""
    if blocks is not None:
        monkeypatch.setattr(engine.backend, "multiprocessors", blocks)
    monkeypatch.setattr(conv2d_narrow_half, "MAX_TURNS", turns)
    check_weight_gradient(
        engine, rng, shape, lambda *given: C.conv2d_backward(*given, need_dx=False, version=3)
    )


@pytest.mark.parametrize(
    "shape",
    [
        (2, 48, 48, 72, 72, 3, 1),
        (7, 16, 16, 192, 192, 3, 1),
        (2, 32, 32, 320, 128, 3, 1),
        (3, 9, 13, 40, 104, 3, 1),
        (2, 12, 20, 64, 136, 5, 1),
        (5, 4, 4, 72, 8, 3, 1),
    ],
    ids=str,
)
@on("cuda")  # elsewhere the problems of the operations' records are enough
def test_whatever_is_chosen(engine, rng, shape):
    """…for shapes of several tiles, against NumPy's float16."""
    a, kinds = operands(rng, shape)
    half = {name: array.astype(kinds[name]) for name, array in a.items()}
    addends = "bias", "channel", "residual"

    def run(engine):
        given = {name: engine(array) for name, array in half.items()}
        dweight, dbias = (engine(np.ones(a[k].shape, np.float32)) for k in ("weight", "bias"))
        y = C.conv2d_forward(given["x"], given["weight"], **{k: given[k] for k in addends})
        dx = C.conv2d_backward(given["dy"], given["x"], given["weight"], dweight, dbias)
        return y, dx, dweight, dbias

    got, want = run(engine), run(np.copy)
    for one, expected, tolerance in zip(got, want, (*[TOLERANCE] * 2, 1e-5, 1e-5), strict=True):
        engine.check(one, expected, tolerance)
    repeat(engine, got, lambda: run(engine))


def test_where_no_statistics_come(engine):
    """No statistics for images that 8 × 8 pixels do not tile, a stride, float32, three channels; a
    request is refused."""

    def made(shape, weight, stride=1, dtype=np.float16, least=0):
        return C.channel_statistics(
            engine(np.zeros(shape), dtype), engine(np.zeros(weight), dtype), stride, least
        )

    assert (
        made((1, 8, 12, 8), (16, 3, 3, 8)) is None and made((1, 8, 8, 8), (16, 3, 3, 8), 2) is None
    )
    assert (
        made((1, 8, 8, 3), (16, 3, 3, 3)) is None
        and made((1, 8, 8, 8), (16, 3, 3, 8), 1, np.float32) is None
    )
    if engine.has_versions:
        assert made((2, 16, 8, 8), (16, 3, 3, 8)).shape == (2, 2, 2, 8)
        small = (2, 16, 8, 8), (16, 3, 3, 8)
        assert made(*small, least=8193) is None and made(*small, least=8192) is not None


@pytest.mark.parametrize(
    "only", [None, (64, 8, None, 8), (32, 4, None, 4), (16, 2, None, 2), (64, 6, None, 6)], ids=str
)
@on("cuda")  # too long elsewhere
def test_weight_gradients_of_odd_sizes_in_clusters(engine, rng, only):
    gradient = conv2d_hopper_gradient_3x3.hopper_weight_gradient_3x3
    check_weight_gradient(
        engine,
        rng,
        (7, 48, 48, 72, 72, 3, 1),
        lambda dy, x, _, *gradients: gradient(dy, x, *gradients, only=only),
        1e-5,
    )


def test_the_plan_fills_shared_memory_and_no_more():
    for b, h, w, c, n in (
        (32, 64, 64, 64, 64),
        (32, 64, 64, 192, 64),
        (32, 32, 32, 320, 128),
        (32, 16, 16, 192, 192),
        (32, 8, 8, 512, 256),
        (7, 48, 48, 72, 72),
        (1, 3, 5, 8, 8),
    ):
        for size in (1, 3, 5):
            for whole_halo in (True, False):
                plan = conv2d_hopper.choose_plan(b, h, w, c, n, size, whole_halo, 132)[1]
                assert plan.shared <= SHARED and plan.b_stages <= conv2d_hopper.MAX_B
                assert plan.pixels in (128, 256) and plan.width % 8 == plan.height % 8 == 0
        for whole_halo in (True, False):
            plan = conv2d_hopper_gradient_3x3.choose_plan(b, h, w, c, n, whole_halo, 132)[1]
            assert plan.parts == plan.blocks * plan.groups <= plan.chunks and plan.blocks <= 8
            assert (
                2 <= plan.stages <= conv2d_hopper_gradient_3x3.MAX_STAGES and plan.shared <= SHARED
            )


@pytest.mark.parametrize("c, n", [(192, 256), (256, 256), (512, 256)])
def test_small_images_weight_gradients_take_one_launch(monkeypatch, c, n):
    launched, backend = [], get_ptx_device()
    monkeypatch.setattr(
        conv2d_hopper_gradient_3x3,
        "launch",
        lambda kernel, grid, *_, shared, cluster: launched.append((grid, cluster)),
    )
    monkeypatch.setattr(conv2d_hopper_gradient_3x3, "tensor_map", lambda *_, **__: None)
    arrays = (empty(shape, np.float16, backend) for shape in ((32, 8, 8, n), (32, 8, 8, c)))
    conv2d_hopper_gradient_3x3.hopper_weight_gradient_3x3(
        *arrays,
        empty((n, 3, 3, c), np.float32, backend),
        empty((n,), np.float32, backend),
        dchannel=empty((32, n), np.float32, backend),
    )
    ((grid, cluster),) = launched
    assert cluster == (1, 1, grid[2]) and 96 <= grid[0] * grid[1] * grid[2] <= 132


def test_the_unet_of_the_seeds_runs_on_tensor_cores():
    """At batch 32 and 64 × 64 pixels every 3 × 3 layer fills at least two thirds of an H100's
    multiprocessors."""
    for size, c, n in (
        (64, 64, 64),
        (64, 192, 64),
        (64, 128, 64),
        (32, 64, 128),
        (32, 128, 128),
        (32, 256, 128),
        (16, 192, 192),
        (16, 128, 192),
        (16, 384, 192),
        (8, 256, 256),
        (8, 512, 256),
    ):
        plan = conv2d_hopper.choose_plan(32, size, size, c, n, 3, True, 132)[1]
        turns = -(-plan.tiles // 132)
        assert plan.tiles / (132 * turns) > 0.66


def test_numpy_float16_is_the_reference_rounded_once(rng):
    a, kinds = operands(rng, (2, 4, 5, 8, 6, 3, 1))
    half = {name: array.astype(kinds[name]) for name, array in a.items()}
    y = C.conv2d_forward(
        half["x"], half["weight"], half["bias"], channel=half["channel"], residual=half["residual"]
    )
    want = C.conv2d_forward_reference(
        a["x"], a["weight"], a["bias"], 1, a["channel"], a["residual"]
    )
    assert y.dtype == np.float16 and relative_error(y, want) < 4e-4
    dweight, dbias = np.zeros(a["weight"].shape, np.float32), np.zeros(6, np.float32)
    dx = C.conv2d_backward(half["dy"], half["x"], half["weight"], dweight, dbias)
    want_weight = np.zeros_like(a["weight"])
    want_dx = C.conv2d_backward_reference(a["dy"], a["x"], a["weight"], want_weight)
    assert (
        dx.dtype == np.float16
        and relative_error(dx, want_dx) < 4e-4
        and relative_error(dweight, want_weight) < 1e-5
    )


@on()  # NumPy takes them
def test_half_operands_that_do_not_fit_say_so(engine):
    x, weight = (
        engine(np.ones((1, 4, 4, 12)), np.float16),
        engine(np.ones((20, 3, 3, 12)), np.float16),
    )
    with pytest.raises(ValueError, match=r"version 6 \(hopper\) of conv2d does not take"):
        C.conv2d_forward(x, weight, version=6)
    with pytest.raises(ValueError, match=r"version 2 \(im2col\) of conv2d is for float32"):
        C.conv2d_forward(x, weight, version=2)
    with pytest.raises(ValueError, match="both to float16"):
        C.conv2d_forward(x, engine(np.ones((20, 3, 3, 12))))
    with pytest.raises(ValueError, match="channel has shape"):
        C.conv2d_forward(x, weight, channel=engine(np.ones((1, 12))))


def test_overflow_is_infinite(engine):
    """A sum beyond 65504 must reach the finite check of the loss scale as an infinity."""
    if engine.has_versions and engine.computes:
        x, weight = (
            engine(np.full((1, 2, 2, 8), 200.0), np.float16),
            engine(np.full((8, 3, 3, 8), 200.0), np.float16),
        )
        assert np.isinf(download(C.conv2d_forward(x, weight, version=1))).all()


@pytest.mark.parametrize("size", [1, 3, 5])
def test_a_pipeline_has_two_stages_where_a_tile_takes_two_boxes(size):
    """A stage of x is released only once the next one has landed: one stage would deadlock."""
    for channels, tile, taps, whole in itertools.product(
        (64, 128), conv2d_hopper.VARIANTS, (1, 3), (True, False)
    ):
        for plan in plans(2, 16, 16, channels, 96, size, whole, *tile, taps, True):
            assert plan.a_stages > 1 or channels == 64 and (whole or size == 1)
