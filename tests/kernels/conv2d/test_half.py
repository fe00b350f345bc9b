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
from numdiff.kernels.groupnorm.normalise import channel_statistics_reference
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


def check_forward(engine, rng, shape, version, addends=("bias", "channel", "residual")):
    a, kinds = operands(rng, shape)
    want = C.conv2d_forward_reference(
        a["x"], a["weight"], stride=shape[6], **{k: a[k] for k in addends}
    )
    given = {k: engine(a[k], kinds[k]) for k in addends}

    def run():
        return C.conv2d_forward(
            engine(a["x"], np.float16),
            engine(a["weight"], np.float16),
            stride=shape[6],
            version=version,
            **given,
        )

    y = run()
    assert y.dtype == np.float16
    engine.check(y, want, TOLERANCE)
    return y, run


def check_backward(engine, rng, shape, version, need_dx=True):
    a, kinds = operands(rng, shape)
    want_weight, want_bias = (
        rng.standard_normal(a["weight"].shape),
        rng.standard_normal(a["bias"].shape),
    )
    start_weight, start_bias = want_weight.astype(np.float32), want_bias.astype(np.float32)
    want = C.conv2d_backward_reference(
        a["dy"], a["x"], a["weight"], want_weight, want_bias, shape[6]
    )

    def run():
        dweight, dbias = engine(start_weight), engine(start_bias)
        dx = C.conv2d_backward(
            engine(a["dy"], np.float16),
            engine(a["x"], np.float16),
            engine(a["weight"], np.float16),
            dweight,
            dbias,
            shape[6],
            need_dx,
            version=version,
        )
        return dx, dweight, dbias

    got = run()
    assert got[1].dtype == got[2].dtype == np.float32
    if need_dx:
        assert got[0].dtype == np.float16
        engine.check(got[0], want, TOLERANCE)
    engine.check(got[1], want_weight, 1e-5)
    engine.check(got[2], want_bias, 1e-5)
    return got, run


def repeat(engine, first, run):
    again = run()
    for one, other in (
        zip(first, again, strict=True) if isinstance(first, tuple) else ((first, again),)
    ):
        if one is not None:
            engine.check_equal(one, other)


# B, H, W, C_in, C_out, kernel, stride
GENERIC = [(1, 2, 3, 3, 5, 3, 1), (1, 3, 3, 8, 8, 3, 2)]
NARROW = [(1, 3, 5, 16, 3, 3, 1), (2, 2, 3, 3, 16, 3, 1)]
MMA = [(1, 3, 2, 8, 16, 3, 1), (1, 5, 3, 40, 8, 1, 2), (1, 5, 2, 8, 8, 3, 2)]
ON_A_GPU = [
    (2, 48, 48, 72, 72, 3, 1),
    (7, 16, 16, 192, 192, 3, 1),
    (3, 8, 8, 512, 256, 3, 1),
    (2, 32, 32, 320, 128, 3, 1),
    (2, 64, 64, 64, 64, 3, 1),
    (3, 9, 13, 40, 104, 3, 1),
    (2, 12, 20, 64, 136, 5, 1),
    (5, 4, 4, 72, 8, 3, 1),
]


def half_shapes(tiny):
    """`shape` over these and, where there is a GPU (the compiler has seen their kernels), ON_A_GPU."""
    return pytest.mark.parametrize(
        "shape", [*tiny, *[pytest.param(s, marks=large) for s in ON_A_GPU]], ids=str
    )


@pytest.mark.parametrize(
    "version, shape",
    [(v, s) for v, shapes in ((1, GENERIC), (3, NARROW), (4, MMA)) for s in shapes],
)
@on()
@quick(lambda engine, shape: engine != "emulator" or shape in (NARROW[1], MMA[1]))
def test_portable_versions(engine, rng, version, shape):
    again = engine.repeats > 1 or version == 1
    y, run = check_forward(
        engine, rng, shape, version, ("bias",) if version == 3 else ("bias", "channel", "residual")
    )
    if again:
        repeat(engine, y, run)
    dx_exists = not (version == 3 and shape[3] == 3)
    got, run = check_backward(engine, rng, shape, version, need_dx=dx_exists)
    if again:
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
    a, _ = operands(rng, shape)
    want, want_bias = rng.standard_normal(a["weight"].shape), rng.standard_normal(a["bias"].shape)
    start, start_bias = want.astype(np.float32), want_bias.astype(np.float32)
    C.conv2d_backward_reference(a["dy"], a["x"], a["weight"], want, want_bias, need_dx=False)

    def run():
        dweight, dbias = engine(start), engine(start_bias)
        C.conv2d_backward(
            *(engine(a[name], np.float16) for name in ("dy", "x", "weight")),
            dweight,
            dbias,
            need_dx=False,
            version=3,
        )
        return dweight, dbias

    got = run()
    engine.check(got[0], want, 2e-5)
    engine.check(got[1], want_bias, 2e-5)
    if engine.name == "cuda":
        repeat(engine, got, run)


@half_shapes([(1, 3, 5, 8, 16, 3, 1)])
@on("cpu", "launch", "cuda")  # elsewhere the versions are forced one by one
@quick(lambda engine, shape: engine != "cpu" or shape[0] == 1)  # NumPy has one way for all shapes
def test_whatever_is_chosen(engine, rng, shape):
    """…by the launcher: on the CPU the reference, else the fastest version."""
    y, run = check_forward(engine, rng, shape, None)
    repeat(engine, y, run)
    got, run = check_backward(engine, rng, shape, None)
    repeat(engine, got, run)


@pytest.mark.parametrize(
    "version, shape", [(6, (1, 3, 9, 8, 16, 3, 1)), (5, (2, 5, 5, 16, 8, 3, 1))]
)
@on()
# test_statistics_with_the_result has the other
@quick(lambda engine, version: engine != "emulator" or version == 5)
def test_hopper_forward(engine, rng, version, shape):
    check_forward(engine, rng, shape, version)


@pytest.mark.parametrize(
    "version, shape", [(6, (2, 7, 5, 16, 8, 3, 1)), (5, (1, 3, 9, 8, 16, 3, 1))]
)
@on()
# test_channel_gradient has the other
@quick(lambda engine, version: engine != "emulator" or version == 5)
def test_hopper_backward(engine, rng, version, shape):
    got, run = check_backward(engine, rng, shape, version)
    if engine.name == "cuda":
        repeat(engine, got, run)


@pytest.mark.parametrize(
    "version, shape",
    [
        (3, (1, 4, 4, 3, 64, 3, 1)),
        (4, (1, 5, 4, 8, 16, 3, 2)),
        (6, (2, 9, 8, 8, 16, 3, 1)),
        (5, (1, 3, 9, 8, 16, 5, 1)),
        (1, (1, 3, 3, 8, 8, 3, 1)),
        (None, (1, 4, 4, 8, 16, 1, 1)),
        (None, (32, 64, 64, 64, 64, 3, 1)),
    ],
    ids=str,
)
@on()
@where(lambda engine, shape: engine == "cuda" or shape[0] < 32 and shape[5] < 5)
@quick(lambda engine, version: engine != "emulator" or version == 6)
def test_a_gradient_is_written(engine, rng, version, shape):
    """…whatever was there: with the bits of one that is added to zeros."""
    a, _ = operands(rng, shape)
    got = []
    for accumulate in (True, False):
        dweight = engine(np.full(a["weight"].shape, 0.0 if accumulate else np.nan))
        C.conv2d_backward(
            *(engine(a[name], np.float16) for name in ("dy", "x", "weight")),
            dweight,
            None,
            shape[6],
            need_dx=False,
            version=version,
            accumulate=accumulate,
        )
        got.append(dweight)
    engine.check_equal(*got)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 8, 16, 8, 40),
        (3, 8, 8, 72, 16),
        (32, 64, 64, 64, 64),
        (7, 48, 48, 72, 72),
        (33, 8, 8, 192, 256),
        (4, 16, 16, 128, 200),
    ],
    ids=str,
)
@pytest.mark.parametrize("addends", [False, True], ids=["alone", "with addends"])
@on()
@where(
    lambda engine, shape, addends: (
        engine == "cuda" or np.prod(shape) <= 2 << 18 and addends == (shape[3] == 8)
    )
)
@quick(lambda engine, addends: engine != "emulator" or addends)
def test_statistics_with_the_result(engine, rng, shape, addends):
    """Means and variances of two channels in 8 × 8 pixels, where a GroupNorm will want them; y has
    the same bits."""
    b, h, w, c, n = shape
    a, _ = operands(rng, (*shape, 3, 1))
    x, weight = engine(a["x"], np.float16), engine(a["weight"], np.float16)
    rest, rest_ = (None, None, None), (None, None, None)
    if addends:
        # a mean that is large compared with the deviation
        rest = a["bias"] + 20, a["channel"], a["residual"]
        rest_ = (
            engine(rest[0], np.float32),
            engine(rest[1], np.float32),
            engine(rest[2], np.float16),
        )
    y = C.conv2d_forward_reference(a["x"], a["weight"], rest[0], 1, *rest[1:])
    runs = []
    for _ in range(engine.repeats):
        statistics = C.channel_statistics(x, weight, least=0)
        got = C.conv2d_forward(x, weight, rest_[0], 1, *rest_[1:], statistics)
        runs.append((got, statistics))
    engine.check(runs[0][0], y, TOLERANCE)
    engine.check(
        runs[0][1], channel_statistics_reference(download(runs[0][0]).astype(np.float64)), 1e-5
    )
    for got, again in zip(runs[0], runs[-1], strict=True):
        engine.check_equal(got, again)
    plain = C.conv2d_forward(x, weight, rest_[0], 1, *rest_[1:], version=6)
    engine.check_equal(plain, runs[0][0])


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


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("tile", conv2d_hopper.VARIANTS, ids=str)
@pytest.mark.parametrize("whole_halo", [True, False], ids=["v6", "v5"])
@on()
@where(
    lambda engine, tile, whole_halo, gradient: (
        engine == "cuda" or (tile, whole_halo, gradient) in ONE_OF_EACH
    )
)
@quick(lambda engine, gradient: engine != "emulator" or gradient)
def test_hopper_tiles(engine, rng, tile, whole_halo, gradient):
    """Each kernel, on more blocks of channels, images and tiles than one."""
    b, h, w, c, n = (1, 11, 10, 72, 40) if engine.name == "emulator" else (3, 20, 19, 136, 200)
    a, _ = operands(rng, (b, h, w, c, n, 3, 1))
    weight = engine(a["weight"], np.float16)
    if gradient:
        want = C.conv2d_backward_reference(a["dy"], a["x"], a["weight"], np.zeros_like(a["weight"]))
        out = empty((b, h, w, c), np.float16, engine.backend)
        conv2d_hopper.hopper_convolution(
            engine(a["dy"], np.float16),
            weight,
            None,
            out,
            gradient=True,
            whole_halo=whole_halo,
            only=tile,
        )
    else:
        want = C.conv2d_forward_reference(a["x"], a["weight"], None, 1, a["channel"], a["residual"])
        out = empty((b, h, w, n), np.float16, engine.backend)
        conv2d_hopper.hopper_convolution(
            engine(a["x"], np.float16),
            weight,
            None,
            out,
            engine(a["channel"], np.float32),
            engine(a["residual"], np.float16),
            whole_halo=whole_halo,
            only=tile,
        )
    engine.check(out, want, TOLERANCE)


# what ptxas says of them: tests/kernels/compile_logs.py
ONE_OF_EACH = {((64, 2), True, False), ((96, 1), True, True)}


@pytest.mark.parametrize(
    "version, shape, dtype",
    [
        (None, (2, 3, 9, 8, 16, 3, 1), np.float16),
        (1, (2, 3, 2, 3, 8, 3, 2), np.float16),
        (3, (2, 2, 3, 3, 8, 3, 1), np.float16),
        (4, (2, 2, 3, 8, 8, 1, 1), np.float16),
        (6, (2, 2, 1, 8, 8, 1, 1), np.float16),
        (None, (3, 2, 3, 8, 4, 1, 1), np.float32),
        (None, (2, 3, 2, 8, 12, 3, 1), np.float32),
        *[pytest.param(None, s, np.float16, marks=large) for s in ON_A_GPU],
    ],
    ids=str,
)
@where(lambda engine, version: engine != "cpu" or version is None)
@quick(
    lambda engine, version, shape, dtype: (
        engine != "emulator" or shape[5] == 3 and dtype == np.float32
    )
)
@quick(lambda engine, shape: engine != "cpu" or shape[3] < 16)
def test_channel_gradient(engine, rng, version, shape, dtype):
    """The sums of dy over each image's pixels, and dbias with them."""
    a, _ = operands(rng, shape)
    want_weight, want_bias = np.zeros_like(a["weight"]), rng.standard_normal(a["bias"].shape)
    start = want_bias.astype(np.float32)
    want = C.conv2d_backward_reference(
        a["dy"], a["x"], a["weight"], want_weight, want_bias, shape[6]
    )

    def run():
        dweight, dbias = engine(np.zeros(a["weight"].shape)), engine(start)
        dx, dchannel = C.conv2d_backward(
            *(engine(a[name], dtype) for name in ("dy", "x", "weight")),
            dweight,
            dbias,
            shape[6],
            version != 3,
            need_channel=True,
            version=version,
        )
        return dx, dweight, dbias, dchannel

    got = run()
    assert got[3].dtype == np.float32
    if version != 3:
        engine.check(got[0], want, TOLERANCE)
    for one, other in zip(got[1:], (want_weight, want_bias, a["dy"].sum((1, 2))), strict=True):
        engine.check(one, other, 1e-5)
    if engine.name == "cuda":
        repeat(engine, got, run)


@pytest.mark.parametrize(
    "only",
    [
        (64, 1, None),
        (32, 2, 64, 1),
        (16, 2, 64, 2),
        (16, 3, 128, 3),
        (64, 2, 256, 1),
        (32, 4, 256, 4),
        (16, 1, 128),
        (64, 8, 64, 8),
        (32, 8, 128, 2),
        (32, 4, 64, 2),
        (64, 15, 64, 5),
        (16, 7, 64, 7),
    ],
    ids=str,
)
@on()
@where(
    lambda engine, only: (
        engine != "emulator" or only[1] <= 4 and only[2] != 256 and only[1:] != (3, 128, 3)
    )
)
@quick(lambda engine, only: engine != "emulator" or only == (32, 2, 64, 1))
def test_three_taps_in_one_product(engine, rng, only):
    """Each width of tile, alone, in clusters and in parts, on more tiles, chunks and images than
    one.

    v5's boxes for one of them.
    """
    shape = (3, 3, 9, 8, 16) if engine.name == "emulator" else (5, 20, 19, 72, 136)
    a, _ = operands(rng, (*shape, 3, 1))
    want, want_bias = rng.standard_normal(a["weight"].shape), rng.standard_normal(a["bias"].shape)
    start, start_bias = want.astype(np.float32), want_bias.astype(np.float32)
    C.conv2d_backward_reference(a["dy"], a["x"], a["weight"], want, want_bias, need_dx=False)

    def run():
        dweight, dbias = engine(start), engine(start_bias)
        dchannel = (
            empty((shape[0], shape[4]), np.float32, engine.backend) if only[0] != 32 else None
        )
        conv2d_hopper_gradient_3x3.hopper_weight_gradient_3x3(
            engine(a["dy"], np.float16),
            engine(a["x"], np.float16),
            dweight,
            dbias,
            only[:2] != (32, 2),
            only,
            dchannel,
        )
        return dweight, dbias, dchannel

    got = run()
    engine.check(got[0], want, 1e-5)
    engine.check(got[1], want_bias, 1e-5)
    if got[2] is not None:
        engine.check(got[2], a["dy"].sum((1, 2)), 1e-5)
    if engine.name == "cuda":
        repeat(engine, got, run)


@pytest.mark.parametrize(
    "only", [None, (64, 8, None, 8), (32, 4, None, 4), (16, 2, None, 2), (64, 6, None, 6)], ids=str
)
@on("cuda")  # too long elsewhere
def test_weight_gradients_of_odd_sizes_in_clusters(engine, rng, only):
    a, _ = operands(rng, (7, 48, 48, 72, 72, 3, 1))
    want = rng.standard_normal(a["weight"].shape)
    start, dy, x = want.astype(np.float32), engine(a["dy"], np.float16), engine(a["x"], np.float16)
    C.conv2d_backward_reference(a["dy"], a["x"], a["weight"], want, None, need_dx=False)

    def run():
        dweight = engine(start)
        conv2d_hopper_gradient_3x3.hopper_weight_gradient_3x3(dy, x, dweight, only=only)
        return (dweight,)

    got = run()
    engine.check(got[0], want, 1e-5)
    repeat(engine, got, run)


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


def test_addends_in_float32(engine, rng):
    a, _ = operands(rng, (1, 3, 4, 4, 12, 3, 1))
    for version in (None, 1) if engine.has_versions else (None,):
        y = C.conv2d_forward(
            engine(a["x"]),
            engine(a["weight"]),
            engine(a["bias"]),
            version=version,
            channel=engine(a["channel"]),
            residual=engine(a["residual"]),
        )
        engine.check(
            y,
            C.conv2d_forward_reference(
                a["x"], a["weight"], a["bias"], 1, a["channel"], a["residual"]
            ),
            1e-5,
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
