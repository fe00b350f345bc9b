"""Flash attention in float16, and the tensor-core kernels of both types in every shape that the
launcher can choose."""

import numpy as np
import pytest

from numdiff.kernels import attention as F
from numdiff.kernels.attention import launcher
from tests.conftest import on, shapes
from tests.kernels.attention.test_flash_attention import make

TOLERANCE = 2e-3


def problem(rng, shape, order, dtype=np.float16):
    """(qkv, dy, y, logsumexp, heads) in `dtype`, then (y, logsumexp, dqkv) as they should be."""
    qkv, dy, heads = make(rng, shape)
    qkv, dy = qkv.astype(dtype), dy.astype(dtype)
    want_y, want_logsumexp = F.flash_attention_forward(qkv.astype(np.float64), heads, order)
    given = dy, qkv, want_y.astype(dtype), want_logsumexp.astype(np.float32)
    want = F.flash_attention_backward(*(a.astype(np.float64) for a in given), heads, order)
    return given, heads, (want_y, want_logsumexp, want)


def check_both(engine, given, heads, order, wanted, version, count=None):
    """Forward and backward against the reference, `count` times (or as the engine repeats), with
    the same bits."""
    dy, qkv, y, logsumexp = map(engine, given)
    runs = [
        (
            *F.flash_attention_forward(qkv, heads, order, version=version),
            F.flash_attention_backward(dy, qkv, y, logsumexp, heads, order, version=version),
        )
        for _ in range(count or engine.repeats)
    ]
    assert [r.dtype for r in runs[0]] == [np.float16, np.float32, np.float16]
    engine.check(runs[0][0], wanted[0], TOLERANCE)
    engine.check(runs[0][1], wanted[1], 3e-6)
    if qkv.shape[1] > 1:  # one key alone has no gradient but rounding errors, in q and k
        engine.check(runs[0][2], wanted[2], TOLERANCE)
    for first, again in zip(runs[0], runs[-1], strict=True):
        engine.check_equal(first, again)


@pytest.mark.parametrize("HS", [32, 64, 72])
@pytest.mark.parametrize(
    "T, heads, chunks",
    [
        (1, 3, (1, 1)),
        (100, 2, (1, 1)),
        (256, 150, (1, 1)),
        (257, 1, (1, 2)),
        (300, 2, (2, 1)),
        (700, 3, (2, 2)),
    ],
)
@pytest.mark.parametrize("version", [3, 5])
@on("cuda")  # too long elsewhere; `numdiff kernels check` has small shapes
def test_float16(engine, rng, monkeypatch, version, HS, T, heads, chunks):
    """One tile and several, more heads than multiprocessors, keys in one chunk and in two."""
    if version == 5 and tuple(engine.backend.capability)[:2] != (9, 0):
        pytest.skip("for sm_90a")
    monkeypatch.setattr(launcher, "choose_chunks", lambda *_: chunks)
    given, heads, wanted = problem(rng, (1, T, heads, HS), "legacy")
    check_both(engine, given, heads, "legacy", wanted, version)


@pytest.mark.parametrize("HS", [64, 72])
@pytest.mark.parametrize("T", [3, 200, 1024, 3000])
@on("cuda")  # likewise
def test_float32(engine, rng, HS, T):
    """Version 4; 1e-5 over long sums."""
    given, heads, wanted = problem(rng, (1, T, 1, HS), "new", np.float32)
    dy, qkv, y, logsumexp = map(engine, given)
    results = (
        *F.flash_attention_forward(qkv, heads, "new", version=4),
        F.flash_attention_backward(dy, qkv, y, logsumexp, heads, "new", version=4),
    )
    for got, want in zip(results, wanted, strict=True):
        engine.check(got, want, 1e-5)


@shapes(large=(1, 2048, 1, 32))
@on("cpu", "cuda")
def test_a_mean_that_stays(engine, rng, shape):
    """Long sums of one sign, where tensor cores that cut off instead of rounding lose most."""
    given, heads, _ = problem(rng, shape, "legacy", np.float32)
    shifted = given[1] + np.repeat(np.float32([0, 0, 3]), 32)  # v around 3
    want = F.flash_attention_forward(shifted.astype(np.float64), heads)
    engine.check(F.flash_attention_forward(engine(shifted), heads)[0], want[0], 3e-6)


@on("emulator", "cuda")
def test_only_from_sm_75_on(engine, rng, monkeypatch):
    qkv = engine(make(rng, (1, 4, 1, 32))[0], np.float16)
    monkeypatch.setattr(engine.backend, "capability", (7, 0))
    chosen = F.flash_attention_forward.operation.choose(None, qkv, {"qkv": qkv, "heads": 1})
    assert chosen.name == "naive"
    with pytest.raises(ValueError, match=r"needs compute capability 7.5, .*; use version=1"):
        F.flash_attention_forward(qkv, 1, version=3)
    with pytest.raises(ValueError, match=r"needs compute capability 9.0a, .*; use version=1"):
        F.flash_attention_forward(qkv, 1, version=5)
    with pytest.raises(
        ValueError, match=r"version 2 \(register-tiled\) of flash_attention is for float32"
    ):
        F.flash_attention_forward(qkv, 1, version=2)
