import functools
import re
from types import SimpleNamespace

import numpy as np
import pytest

from numdiff.device.emulator import get_emulator
from numdiff.device.planned import CARDS
from numdiff.errors import TooManyElementsError
from numdiff.extras.im2win import benchmark as benchmark_im2win
from numdiff.extras.im2win import windows as M
from numdiff.kernels import conv2d as C
from numdiff.kernels.conv2d.im2col import im2col_forward_cost, im2col_forward_reference
from tests.conftest import (
    exhaustive,
    numerical_gradient,
    on,
    relative_error,
    shapes,
    versions,
    where,
)

KINDS = [(1, 1), (1, 2), (3, 1), (3, 2), (5, 1), (5, 2), (5, 3), (3, 4)]  # kernel, stride


def operands(rng, shape):
    b, h, w, c, n, kernel, stride = shape
    x, weight = rng.standard_normal((b, h, w, c)), rng.standard_normal((n, kernel, kernel, c))
    dy = rng.standard_normal((b, (h - 1) // stride + 1, (w - 1) // stride + 1, n))
    return x, weight, rng.standard_normal(n), dy, stride


def loops(x, kernel, stride):
    """The definition of win, written as loops."""
    b, h, w, c = x.shape
    ho, columns = (h - 1) // stride + 1, (w - 1) // stride * stride + kernel
    win = np.zeros((b, ho, columns, kernel, c))
    for i, k, u in np.ndindex(ho, columns, kernel):
        row, column = i * stride + u - kernel // 2, k - kernel // 2
        if 0 <= row < h and 0 <= column < w:
            win[:, i, k, u] = x[:, row, column]
    return win


@pytest.mark.parametrize("kernel, stride", KINDS)
def test_reference_is_the_definition(rng, kernel, stride):
    """…and its windows are the rows of im2col, in the other order of taps, of which most are in
    memory twice."""
    x = rng.standard_normal((2, 6, 7, 3))
    win = M.im2win_forward_reference(x, kernel, stride)
    assert np.array_equal(win, loops(x, kernel, stride))
    windows, col = M.windows_reference(win, stride), im2col_forward_reference(x, kernel, stride)
    assert np.shares_memory(windows, win)
    assert np.array_equal(windows, col.swapaxes(3, 4).reshape(windows.shape))


@pytest.mark.parametrize("kernel, stride", KINDS)
def test_products_of_windows_are_the_convolution(rng, kernel, stride):
    x, weight, _, dy, _ = operands(rng, (2, 5, 6, 2, 3, kernel, stride))
    windows = M.windows_reference(M.im2win_forward_reference(x, kernel, stride), stride)
    y = windows @ M.filters_reference(weight).T
    assert np.allclose(y, C.conv2d_forward_reference(x, weight, None, stride))
    # the same text makes the filters: each is an image that is one window
    assert np.array_equal(
        M.im2win_forward_reference(weight, kernel, pad=0).reshape(len(weight), -1),
        M.filters_reference(weight),
    )

    dweight = (
        np.einsum("bijn,bijq->nq", dy, windows)
        .reshape(len(weight), kernel, kernel, -1)
        .swapaxes(1, 2)
    )
    flipped = weight[:, ::-1, ::-1].transpose(3, 1, 2, 0)
    spread = M.spread_reference(dy, x.shape[:3], stride)
    dx = (
        M.windows_reference(M.im2win_forward_reference(spread, kernel), 1)
        @ M.filters_reference(flipped).T
    )

    def forward(x, weight):
        return C.conv2d_forward_reference(x, weight, None, stride)

    assert relative_error(dx, numerical_gradient(lambda v: forward(v, weight), x, dy)) < 1e-7
    assert relative_error(dweight, numerical_gradient(lambda v: forward(x, v), weight, dy)) < 1e-7


@shapes(
    minimal=(1, 1, 1, 4, 3, 1),
    odd=(2, 3, 5, 3, 3, 1),
    strided=(2, 5, 4, 8, 3, 2),
    pointwise=(2, 4, 4, 4, 1, 2),
    wide=(1, 7, 6, 5, 5, 3),
    large=(4, 32, 32, 64, 3, 1),
)
@versions(1, 2)
@where(lambda version, shape: version != 2 or shape[3] % 4 == 0)
def test_transform(engine, rng, shape, version):
    *size, kernel, stride = shape
    x = rng.standard_normal(size).astype(np.float32)
    engine.check(
        M.im2win_forward(engine(x), kernel, stride, version=version),
        M.im2win_forward_reference(x, kernel, stride),
        0,
    )


@on("launch")
def test_it_runs_only_where_it_is_asked_for(engine, rng, monkeypatch):
    def fail(*_):
        raise AssertionError("launched")

    for name in ("forward", "input_gradient", "weight_gradient"):
        monkeypatch.setattr(M, name, fail)
    x, weight, bias, dy, stride = operands(rng, (1, 3, 3, 8, 12, 3, 2))
    x, weight, bias, dy = map(engine, (x, weight, bias, dy))
    for run in (
        functools.partial(C.conv2d_forward, x, weight, bias, stride),
        functools.partial(C.conv2d_backward, dy, x, weight, weight, bias, stride),
    ):
        run()
        with pytest.raises(AssertionError, match="launched"):
            run(version=7)


def test_what_does_not_fit_says_so(engine):
    if engine.has_versions:
        with pytest.raises(ValueError, match="multiple of 4"):
            M.im2win_forward(engine(np.ones((1, 2, 2, 3))), 3, version=2)
        half = engine(np.ones((1, 2, 2, 8)), np.float16)
        with pytest.raises(ValueError, match="is for|no version 7"):
            C.conv2d_forward(half, engine(np.ones((8, 3, 3, 8)), np.float16), version=7)
        monster = engine(np.ones((1, 2, 2, 4))).backend
        x = type(engine(np.ones(1)))(monster, (64, 1024, 1024, 16), np.dtype(np.float32), None)
        with pytest.raises(TooManyElementsError, match="split the batch"):
            M.im2win_forward(x, 3)


@pytest.mark.parametrize("kernel, stride", KINDS)
def test_bytes_are_those_of_the_transform(kernel, stride):
    """Between x's own and im2col's: kernel / stride times x, but for the borders."""
    b, h, w, c = 2, 24, 24, 3
    win = M.im2win_forward_reference(np.zeros((b, h, w, c), np.float32), kernel, stride)
    assert M.im2win_bytes(b, h, w, c, kernel, stride) == win.nbytes
    assert M.im2win_forward_cost(b, h, w, c, kernel, stride) == (4 * b * h * w * c + win.nbytes, 0)
    col = im2col_forward_cost(b, h, w, c, kernel, stride)[0] - 4 * b * h * w * c
    assert (
        win.nbytes == col if kernel == 1 and stride == 1 else kernel <= stride or win.nbytes < col
    )


def test_table_of_bytes(capsys):
    """The twelve layers of the paper, without a GPU: sizes alone."""
    benchmark_im2win.main(["--batch", "128"])
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[1]: line for line in lines if re.match(r"\| conv\d", line)}
    assert list(rows) == [f"conv{k}" for k in range(1, 13)]
    # conv9: 128 images of 56 × 56 × 64: col is 9 times x, win 3 · 58/56 times
    x = 4 * 128 * 56 * 56 * 64 / 1e6
    assert f"{9 * x:,.0f}" in rows["conv9"] and f"{3 * x * 58 / 56:,.0f}" in rows["conv9"]


@exhaustive
def test_the_benchmark_on_a_gpu(monkeypatch):
    """Which kernels it will launch, and its rows, of a GPU that computes in the emulator."""
    monkeypatch.setitem(benchmark_im2win.LAYERS, "conv9", (3, 4, 4, 3, 1))
    h200 = next(card for card in CARDS if card.device_name == "NVIDIA H200")
    monkeypatch.setattr(benchmark_im2win, "card_of", lambda gpu: h200)
    options = SimpleNamespace(batch=1, only=["conv9"], passes=benchmark_im2win.PASSES)
    names = {key.name for key in benchmark_im2win.plan(None, options)}
    assert {"im2win_forward_kernel_v2", "im2col_forward_kernel_v2"} <= names, names
    monkeypatch.setattr(benchmark_im2win.timing, "replay", lambda gpu, arena, once: once)
    monkeypatch.setattr(
        benchmark_im2win.timing, "measured", lambda jobs: [float(run().size) for run, _ in jobs]
    )
    gpu = get_emulator(cc=(9, 0), checks=False)
    given = benchmark_im2win.arrays_of(1, "conv9")
    sizes = {"forward": 36.0, "dgrad": 36.0, "wgrad": 144.0}
    for check, passes in ((False, ["forward"]), (True, benchmark_im2win.PASSES)):
        rows = dict(benchmark_im2win.measure(gpu, None, None, given, 1, passes, check))
        assert rows == {
            name: dict.fromkeys(benchmark_im2win.VERSIONS, sizes[name]) for name in passes
        }
