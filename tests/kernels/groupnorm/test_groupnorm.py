import numpy as np
import pytest

from numdiff.device import download, upload
from numdiff.device.emulator import EmulatorDevice
from numdiff.kernels import groupnorm as GN
from numdiff.kernels.cpu import groupnorm as cpu
from numdiff.kernels.elementwise import add_forward
from numdiff.kernels.groupnorm import normalise, one_pass_launch
from numdiff.kernels.groupnorm import plan as planning
from numdiff.kernels.groupnorm.one_pass_backward import COUNTERS
from numdiff.kernels.groupnorm.one_pass_launch import one_pass_forward
from numdiff.kernels.reduce.second_pass import add_parts
from tests.conftest import (
    large,
    on,
    quick,
    relative_error,
    versions,
    where,
)

SILU = pytest.mark.parametrize("silu", [False, True], ids=["plain", "silu"])


def make(rng, shape, offset=0.0):
    *shape, groups = shape
    C = shape[-1]
    x, dy = offset + 2 * rng.standard_normal(shape), rng.standard_normal(shape)
    return x, 1 + 0.5 * rng.standard_normal(C), rng.standard_normal(C), dy, groups


@SILU
@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 2e-6), (np.float64, 1e-12)], ids=str)
# the second: a pixel is a span
@pytest.mark.parametrize("shape", [(5, 7, 5, 30, 5), (2, 3, 3, 600, 3)], ids=str)
def test_cpu_engine_is_the_reference(rng, shape, dtype, tolerance, silu):
    *arrays, groups = make(rng, shape, offset=3.0)
    x, weight, bias, dy = (a.astype(dtype) for a in arrays)
    wide = [a.astype(np.float64) for a in (x, weight, bias)]
    want, mean, rstd = GN.groupnorm_forward_reference(*wide, groups, silu=silu)
    for got, expected in zip(
        cpu.groupnorm_forward_cpu(x, weight, bias, groups, silu=silu),
        (want, mean, rstd),
        strict=True,
    ):
        assert got.dtype == dtype and relative_error(got, expected) < tolerance
    for residual in (None, rng.standard_normal(x.shape).astype(dtype)):
        got, wanted = ([np.ones(shape[-2], kind) for _ in range(2)] for kind in (dtype, np.float64))
        dx = cpu.groupnorm_backward_cpu(
            dy,
            x,
            weight,
            bias,
            mean.astype(dtype),
            rstd.astype(dtype),
            *got,
            groups,
            silu,
            residual,
        )
        expected = GN.groupnorm_backward_reference(
            dy.astype(np.float64), *wide, mean, rstd, *wanted, groups, silu, residual
        )
        assert all(
            relative_error(a, b) < tolerance
            for a, b in zip((dx, *got), (expected, *wanted), strict=True)
        )


@versions(1, 2, 3)
def test_eps_counts_where_hardly_anything_varies(engine, rng, version):
    """A variance of a tenth of eps, which stands within the root."""
    x, weight, bias = 1e-3 * rng.standard_normal((2, 3, 3, 8)), *rng.standard_normal((2, 8))
    want = GN.groupnorm_forward_reference(x, weight, bias, 2)
    got = GN.groupnorm_forward(engine(x), engine(weight), engine(bias), 2, version=version)
    for one, expected in zip(got, want, strict=True):
        engine.check(one, expected, 1e-5)


@large
@versions(1, 2, 3)
def test_large_mean_keeps_its_digits(engine, rng, version):
    """Mean 1000, deviation 2, and the first pixel far away: E[x²] - E[x]² would have no digit left
    in float32."""
    x, weight, bias, _, groups = make(rng, (2, 40, 40, 64, 32), offset=1000.0)
    x[:, 0, 0] = 0
    x = x.astype(np.float32)
    want = GN.groupnorm_forward(x.astype(np.float64), weight, bias, groups)
    got = GN.groupnorm_forward(engine(x), engine(weight), engine(bias), groups, version=version)
    for a, b in zip(got, want, strict=True):
        engine.check(a, b, 1e-4)  # the mean itself is known to 1000 · 6e-8 only


# Version 3 ----------------------------------------------------------------------------------------


@on("emulator", "cuda")
def test_gradients_that_are_neighbours_take_one_sum(engine, rng, monkeypatch):
    """…as those of a model's parameters are, with the bits of two."""
    x, weight, bias, dy, groups = make(rng, (3, 2, 4, 32, 8))
    mean, rstd = GN.groupnorm_forward_reference(x, weight, bias, groups)[1:]
    counts = []
    monkeypatch.setattr(
        one_pass_launch,
        "add_parts",
        lambda sums, waits, plain=add_parts: counts.append(len(sums)) or plain(sums, waits),
    )

    def run(dweight, dbias):
        dx = GN.groupnorm_backward(
            engine(dy, np.float16),
            engine(x, np.float16),
            engine(weight),
            engine(bias),
            engine(mean),
            engine(rstd),
            dweight,
            dbias,
            groups,
            silu=True,
            version=3,
        )
        return dx, dweight, dbias

    both = engine.zeros(64)
    for got, want in zip(
        run(both[:32], both[32:]), run(engine.zeros(32), engine.zeros(32)), strict=True
    ):
        engine.check_equal(got, want)
    assert counts == [1, 2]


@pytest.mark.parametrize("outlier", [0.0, 60.0, 4000.0])
@on()
def test_the_first_pixel_may_be_far_off(engine, rng, outlier):
    """The squares are about it: a variance is off by 2⁻²⁴ times the number of pixels at most."""
    x = (1 + rng.standard_normal((1, 256, 32))).astype(np.float16)
    x[0, 0] += np.float16(outlier)
    weight, bias = np.ones(32), np.zeros(32)
    want = GN.groupnorm_forward_reference(x.astype(np.float64), weight, bias, 8)
    plan = planning.make_plan_half(1, 256, 32, 4, False, 32, 4, 1 << 17, 132)
    got = one_pass_forward(engine(x), engine(weight), engine(bias), 8, 1e-5, False, plan)
    for result, expected, tolerance in zip(got, want, (1e-3, 1e-5, 2e-5), strict=True):
        engine.check(result, expected, tolerance)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((1, 3, 7, 16, 16), id="odd_pixels"),
        pytest.param((1, 96, 16, 2), id="near"),
        pytest.param((1, 2, 3, 8, 2), id="narrow"),
    ],
)
@quick(lambda engine, shape, dtype: engine != "emulator" or shape[1] == 3 and dtype == np.float16)
def test_two_residuals_are_as_their_sum(engine, rng, shape, dtype):
    """The same bits: their sum is rounded, whichever kernel adds them."""
    x, weight, bias, dy, groups = make(rng, shape)
    x, dy, *residuals = (a.astype(dtype) for a in (x, dy, *rng.standard_normal((2, *x.shape))))
    _, mean, rstd = GN.groupnorm_forward_reference(
        x.astype(np.float64), weight, bias, groups, silu=True
    )

    def run(residual):
        dweight, dbias = engine(weight), engine(bias)
        dx = GN.groupnorm_backward(
            engine(dy),
            engine(x),
            engine(weight),
            engine(bias),
            engine(mean),
            engine(rstd),
            dweight,
            dbias,
            groups,
            silu=True,
            residual=residual,
        )
        return dx, dweight, dbias

    a, b = map(engine, residuals)
    for got, want in zip(run((a, b)), run(add_forward(a, b)), strict=True):
        engine.check_equal(got, want)
    with pytest.raises(ValueError, match="like x"):
        run((a, engine(residuals[1][..., :4])))


UNET = [
    (size, C)
    for size, channels in (
        (64, (64, 128, 192)),
        (32, (64, 128, 192, 256, 320)),
        (16, (128, 192, 320, 384, 448)),
        (8, (192, 256, 448, 512)),
    )
    for C in channels
]


def with_statistics(engine, rng, shape, offset=0.0):
    """(float64 array of float16 numbers, it on the device, its statistics there)."""
    x = (offset + rng.standard_normal(shape)).astype(np.float16).astype(np.float64)
    return x, engine(x, np.float16), engine(normalise.channel_statistics_reference(x), np.float32)


@pytest.mark.parametrize(
    "shape, groups",
    [
        ((2, 8, 16, 32), 4),
        ((1, 16, 8, 24), 12),
        ((3, 8, 8, 448), 32),
        ((2, 64, 64, 64), 32),
        ((32, 32, 32, 320), 32),
        ((5, 48, 48, 72), 36),
    ],
    ids=str,
)
@pytest.mark.parametrize("offset", [0.0, 40.0])
@SILU
@on()
@where(lambda engine, shape: engine == "cuda" or np.prod(shape) <= 10_000)
@quick(lambda engine, offset, silu: engine != "emulator" or silu == (offset > 0))
def test_known_statistics(engine, rng, shape, groups, offset, silu):
    """Version 4; a mean forty times the deviation costs no digits."""
    x, x_, known = with_statistics(engine, rng, shape, offset)
    _, weight, bias, _, _ = make(rng, (1, shape[-1], groups))
    want = GN.groupnorm_forward_reference(x, weight, bias, groups, silu=silu)
    asked = (None if offset else 4,) if engine.name == "emulator" else (4, None)
    runs = [
        GN.groupnorm_forward(
            x_, engine(weight), engine(bias), groups, silu=silu, statistics=known, version=version
        )
        for version in asked
    ]
    tolerances = 1e-3, 1e-5, 1e-4 if offset else 1e-5
    for got, again, expected, tolerance in zip(runs[0], runs[-1], want, tolerances, strict=True):
        engine.check(got, expected, tolerance)
        engine.check_equal(got, again)


def test_where_statistics_are_of_no_use(engine, rng):
    """Groups of an odd number of channels, float32 and the CPU engine read x as ever; version 4
    says why it cannot."""
    x, x_, known = with_statistics(engine, rng, (1, 8, 8, 24))
    weight, bias = engine(np.ones(24)), engine(np.zeros(24))
    want = GN.groupnorm_forward_reference(x, np.ones(24), np.zeros(24), 8)
    engine.check(GN.groupnorm_forward(x_, weight, bias, 8, statistics=known)[0], want[0], 1e-3)
    if engine.has_versions:
        with pytest.raises(ValueError, match="an even number of channels"):
            GN.groupnorm_forward(x_, weight, bias, 8, version=4, statistics=known)
        with pytest.raises(ValueError, match="needs the statistics"):
            GN.groupnorm_forward(x_, weight, bias, 4, version=4)


def test_blocks_of_known_statistics():
    """Whole warps, rows that share a pair of channels, and blocks enough for an H100 where there
    are pixels enough."""
    for C in range(8, 2049, 8):
        rows, _ = normalise.block_shape(32, 4096, C, 132) or (None, None)
        if rows is None:
            assert C > 512 or C % 64
        else:
            assert rows * C // 8 % 32 == 0 and rows % 4 == 0 and rows * C // 8 <= 512
    assert normalise.block_shape(32, 4096, 64, 132) == (64, 8) and normalise.block_shape(
        32, 64, 256, 132
    ) == (8, 4)


def test_statistics_of_large_images_are_joined(rng):
    """To 16 chunks; those of up to 64 × 64 pixels stay as they are."""
    device = EmulatorDevice(checks=False, float64=False)
    y = rng.standard_normal((2, 48, 128, 4)) + 5  # 96 chunks
    known = upload(normalise.channel_statistics_reference(y).astype(np.float32), device)
    joined = download(normalise.join_chunks(known))
    pixels = y.reshape(2, 6, 8, 16, 8, 2, 2).transpose(0, 3, 5, 1, 2, 4, 6).reshape(2, 16, 2, -1)
    assert relative_error(joined[:, :, 0], pixels.mean(-1)) < 1e-6
    assert relative_error(joined[:, :, 1], pixels.var(-1)) < 1e-5
    few = upload(normalise.channel_statistics_reference(y[:, :, :64]).astype(np.float32), device)
    assert normalise.join_chunks(few) is few


def test_plans():
    """Every UNet shape has one; none needs more than a block may have; whole warps, whole groups,
    every pixel."""
    for size, C in UNET:
        for itemsize in (2, 4):
            for backward in (False, True):
                P, width = size * size, C // 32
                plan = planning.choose_plan(32, P, C, width, itemsize, backward)
                P //= plan.blocks
                threads = plan.tile // 8 * plan.rows
                assert not plan.part or (
                    itemsize == 2
                    and plan.tile % plan.part == plan.rows % (256 // plan.part) == 0
                    and (plan.near == 0 or backward and P % plan.rows == 0)
                )
                assert (
                    C % plan.tile == plan.tile % width == plan.tile % 8 == 0
                    and plan.shared <= 227 << 10
                )
                assert threads % 32 == 0 and threads <= planning.MAX_THREADS and plan.rows % 4 == 0
                assert plan.held == P or plan.held % plan.rows == 0
                assert plan.share % plan.rows == 0
                assert plan.part or planning.PARTS * plan.share >= plan.held
                assert plan.rows % (4 << plan.team_bits) == 0 and C // plan.tile <= COUNTERS
                assert plan.team_bits == 0 or 2 * plan.tile << plan.team_bits <= threads
                assert plan.ring * itemsize % 16 == 0
    wide = planning.choose_plan(32, 64 * 64, 192, 6, 2, True)
    assert (wide.tile, wide.blocks) == (96, 8) and planning.choose_plan(
        8, 128 * 128, 64, 2, 2, True
    ).blocks == 8
    assert planning.choose_plan(32, 64 * 64, 192, 6, 2, True, clusters=False).blocks == 1
    # 31 threads a row: whole warps need 992
    assert planning.choose_plan(1, 9, 31 * 8, 31 * 8, 4, False) is None


def test_version_2_follows_its_measurements():
    """µs on an H100, batch 32, with SiLU: what version 3's forecast is held against."""
    half = (
        (64, 64, 31.4, 57.7),
        (64, 192, 89.8, 143.9),
        (32, 128, 22.3, 37.3),
        (32, 320, 41.9, 75.8),
        (16, 448, 23.4, 36.2),
        (8, 256, 13.3, 18.7),
    )
    single = (
        (64, 64, 49.3, 79.4),
        (64, 192, 127.5, 199.5),
        (32, 320, 62.9, 97.3),
        (8, 256, 12.6, 17.6),
    )
    for itemsize, rows in ((2, half), (4, single)):
        for size, C, forward, backward in rows:
            for measured, back in ((forward, False), (backward, True)):
                estimate = planning.version_2_estimate(32, size * size, C, itemsize, back) / 1e3
                assert abs(estimate / measured - 1) < 0.25, (size, C, back, estimate, measured)


def test_float32_takes_tiles_of_two_sectors():
    """…and version 2 for large images, where they find no room: as measured on an H100."""
    for size, C, backward, best in (
        (64, 64, True, 2),
        (64, 128, False, 2),
        (64, 192, True, 2),
        (32, 64, False, 16),
        (32, 128, True, 32),
        (32, 256, True, 32),
        (16, 128, False, 32),
    ):
        plan = planning.choose_plan(32, size * size, C, C // 32, 4, backward)
        slower = plan.ns > planning.version_2_estimate(32, size * size, C, 4, backward)
        assert (2 if slower else plan.tile) == best


def test_sectors_of_a_pixel():
    assert planning.pixel_sectors(16, 2) == 1 and planning.pixel_sectors(8, 2) == 1
    assert planning.pixel_sectors(24, 2) == 2 and planning.pixel_sectors(12, 2) == 1.5


def test_few_blocks_take_version_2():
    assert planning.choose_plan(1, 256 * 256, 64, 2, 2, False).ns > planning.version_2_estimate(
        1, 256 * 256, 64, 2, False
    )


@large
def test_silu_does_not_overflow(engine):
    x = np.linspace(-1, 1, 8).reshape(1, 2, 4)
    weight, bias = np.full(4, 1.0), np.full(4, -200.0)
    y, mean, rstd = GN.groupnorm_forward(engine(x), engine(weight), engine(bias), 1, silu=True)
    engine.check(y, np.zeros(x.shape), 1e-30)
    dx = GN.groupnorm_backward(
        engine(x),
        engine(x),
        engine(weight),
        engine(bias),
        mean,
        rstd,
        engine.zeros(4),
        engine.zeros(4),
        1,
        silu=True,
    )
    engine.check(dx, np.zeros(x.shape), 1e-30)


def test_wrong_arguments_say_so(engine):
    x, w = engine(np.ones((2, 3, 6), np.float32)), engine(np.ones(6, np.float32))
    with pytest.raises(ValueError, match="cannot be cut into 4 groups"):
        GN.groupnorm_forward(x, w, w, 4)
    with pytest.raises(ValueError, match="must have shape"):
        GN.groupnorm_forward(x, engine(np.ones(3, np.float32)), w, 3)
    if engine.has_versions:
        with pytest.raises(ValueError, match="multiple of 4"):
            GN.groupnorm_forward(x, w, w, 3, version=2)
        x, w = engine(np.ones((1, 2, 124), np.float32)), engine(np.ones(124, np.float32))
        with pytest.raises(ValueError, match="no tile for groups of 124 channels"):
            GN.groupnorm_forward(x, w, w, 1, version=3)
