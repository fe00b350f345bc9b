import math

import numpy as np
import pytest

from numdiff.device import download, upload
from numdiff.kernels.optimizer import adamw as A
from tests.conftest import relative_error, versions

HYPER = A.Rule(0.9, 0.999, 1e-8, 0.05)


def by_hand(w, g, m, v, t, rate, norm, beta1, beta2, eps, decay, clip):
    """Algorithm 2 of Loshchilov and Hutter, an element at a time, in Python's floats; t counts from
    1."""
    out = [], [], []
    for w_, g_, m_, v_ in zip(w.tolist(), g.tolist(), m.tolist(), v.tolist(), strict=True):
        if clip:
            g_ *= min(1, clip / (norm + 1e-6))
        m_ = beta1 * m_ + (1 - beta1) * g_
        v_ = beta2 * v_ + (1 - beta2) * g_**2
        m_hat, v_hat = m_ / (1 - beta1**t), v_ / (1 - beta2**t)
        w_ -= rate * (m_hat / (math.sqrt(v_hat) + eps) + decay * w_)
        for values, value in zip(out, (w_, m_, v_), strict=True):
            values.append(value)
    return [np.array(values) for values in out]


def start(rng, n):
    return (
        rng.standard_normal(n),
        rng.standard_normal(n),
        0.1 * rng.standard_normal(n),
        rng.random(n) * 0.01,
    )


def state(engine, step, rate, norm, unscale=None):
    return A.State(
        engine(np.array([step], np.uint32)),
        engine(np.array([rate])),
        engine(np.array([norm])),
        unscale if unscale is None else engine(np.array([unscale])),
    )


@pytest.mark.parametrize(
    "step, clip", [(0, 0.0), (3, 1.0), (250_000, 100.0)], ids=["first", "clipped", "late"]
)
def test_reference_by_hand(rng, step, clip):
    w, g, m, v = start(rng, 37)
    wanted = by_hand(w, g, m, v, step + 1, 1e-2, 5.0, *HYPER[:4], clip)
    before = g.copy()
    now = A.State(np.array([step], np.uint32), np.array([1e-2]), np.array([5.0]))
    A.adamw_update(w, g, m, v, now, HYPER._replace(clip_norm=clip))
    for got, want in zip((w, m, v), wanted, strict=True):
        assert relative_error(got, want) < 1e-12
    np.testing.assert_array_equal(g, before)  # the gradient is only read


@versions(1, 2)
@pytest.mark.parametrize("norm", [np.nan, np.inf])
def test_nothing_changes_when_the_norm_is_not_finite(engine, rng, version, norm):
    before = [a.astype(np.float32) for a in start(rng, 8)]
    arrays = [engine(a) for a in before]
    rule = HYPER._replace(clip_norm=1.0)
    A.adamw_update(*arrays, state(engine, 0, 1e-2, norm), rule, version=version)
    for array, old in zip(arrays, before, strict=True):
        engine.check_equal(array, old)


def test_gaps_stay_zero(engine):
    arrays = [engine(np.zeros(8)) for _ in range(4)]
    A.adamw_update(*arrays, state(engine, 0, 1e-2, 1.0), HYPER)
    if engine.computes:
        assert not download(arrays[0]).any()


def test_bad_input_says_so(engine):
    x, y = engine(np.zeros(5)), engine(np.zeros(4))
    now = state(engine, 0, 1e-2, 1.0)
    with pytest.raises(ValueError, match="one length"):
        A.adamw_update(x, y, x, x, now, HYPER)
    with pytest.raises(ValueError, match="eps > 0"):
        A.adamw_update(x, x, x, x, now, A.Rule(0.9, 0.999, 0.0, 0.0))
    if engine.has_versions:
        with pytest.raises(ValueError, match="use version=1"):
            A.adamw_update(x, x, x, x, now, HYPER, version=2)


@pytest.mark.parametrize("ema_warmup", [True, False])
@pytest.mark.parametrize("count", [1, 260])
def test_average_copy_and_unscaling_in_one_pass(engine, rng, count, ema_warmup):
    """Against the three operations one after the other in float64."""
    start = [
        rng.standard_normal(count),
        1024 * rng.standard_normal(count),
        rng.standard_normal(count),
        rng.random(count),
        rng.standard_normal(count),
    ]
    w, g, m, v, ema = (engine(a) for a in start)
    half = upload(np.zeros(count, np.float16), engine.backend)
    rule = HYPER._replace(clip_norm=1.0)
    copies = A.AdamWCopies(ema, 0.9, half, ema_warmup)
    A.adamw_update(w, g, m, v, state(engine, 3, 1e-2, 5.0, 1 / 1024), rule, copies)
    W, G, M, V, E = (a.copy() for a in start)
    now = A.State(np.array([3]), np.array([1e-2]), np.array([5.0]))
    A.adamw_update_reference(W, G / 1024, M, V, now, rule)
    E += (max(0.1, 9 / 13) if ema_warmup else 0.1) * (W - E)
    for got, want in ((w, W), (m, M), (v, V), (ema, E)):
        engine.check(got, want, scale=np.ones(count))  # one number may be nearly 0
    if engine.computes:
        np.testing.assert_array_equal(download(half), download(w).astype(np.float16))
