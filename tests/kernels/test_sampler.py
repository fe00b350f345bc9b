import numpy as np
import pytest

from numdiff.kernels import sampler as S
from numdiff.kernels.q_sample import q_sample_forward, velocity_forward
from tests.conftest import shapes, versions

SHAPES = shapes(minimal=(1, 4), odd=(3, 5, 7), not_aligned=(5, 3, 3, 2), large=(7, 32, 32, 3))


def tables(steps=50):
    alpha_bar = np.linspace(0.99, 0.05, steps)
    return np.sqrt(alpha_bar), np.sqrt(1 - alpha_bar)


def usable(version, shape, extra=0):
    if version == 2 and (extra or np.prod(shape[1:]) % 4):
        pytest.skip("version 2 needs equal shapes and samples of a multiple of 4")


@SHAPES
@versions(1, 2)
@pytest.mark.parametrize("kind", S.KINDS)
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("extra", [0, 3], ids=["same_channels", "more_channels"])
def test_x_0_is_found_again(engine, rng, shape, version, kind, clip, extra):
    """Noise x_0, give the true answer as the model's, and get x_0 back."""
    usable(version, shape, extra)
    x_0, eps = rng.standard_normal(shape), rng.standard_normal(shape)
    t = rng.integers(0, 50, shape[0]).astype(np.int32)
    x_t = q_sample_forward(x_0, eps, t, *tables())
    answer = {"eps": eps, "v": velocity_forward(x_0, eps, t, *tables()), "x_0": x_0}[kind]
    answer = np.concatenate([answer, rng.standard_normal((*shape[:-1], extra))], -1)
    wanted = np.minimum(np.maximum(x_0, -1), 1) if clip else x_0
    assert np.allclose(S.predict_x_0(x_t, answer, t, *tables(), kind=kind, clip=clip), wanted, atol=1e-13)
    arguments = [engine(a) for a in (x_t, answer, t, *tables())]
    got = S.predict_x_0(*arguments, kind=kind, clip=clip, version=version)
    engine.check(got, wanted, 2e-6)
    engine.check_equal(got, S.predict_x_0(*arguments, kind=kind, clip=clip, version=version))


@SHAPES
@versions(1, 2)
@pytest.mark.parametrize("noisy", [True, False])
def test_ddim_step(engine, rng, shape, version, noisy):
    usable(version, shape)
    x_t, x_0, noise = (rng.standard_normal(shape) for _ in range(3))
    t = rng.integers(0, 50, shape[0]).astype(np.int32)
    a, b, s = rng.random(50), rng.random(50), rng.random(50)
    wanted = np.stack([a[i] * x + b[i] * y + s[i] * n * noisy
                       for i, x, y, n in zip(t, x_t, x_0, noise, strict=True)])
    arguments = [engine(x) for x in (x_t, x_0, t, a, b, s)]
    noise = engine(noise) if noisy else None
    got = S.ddim_step(*arguments, noise, version=version)
    engine.check(got, wanted, 1e-6)
    engine.check_equal(got, S.ddim_step(*arguments, noise, version=version))


def test_ddim_with_the_true_x_0_follows_q_sample(rng):
    """Without noise, from x_t of (x_0, eps) to x_t' of the same (x_0, eps): the docstring's coefficients."""
    x_0, eps = rng.standard_normal((2, 6)), rng.standard_normal((2, 6))
    t, earlier = np.array([40, 20], np.int32), np.array([30, 3], np.int32)
    a, s = tables()
    coefficient_x_t = np.zeros(50)
    coefficient_x_t[t] = s[earlier] / s[t]
    coefficient_x_0 = np.zeros(50)
    coefficient_x_0[t] = a[earlier] - a[t] * coefficient_x_t[t]
    got = S.ddim_step(q_sample_forward(x_0, eps, t, a, s), x_0, t, coefficient_x_t, coefficient_x_0, np.zeros(50))
    assert np.allclose(got, q_sample_forward(x_0, eps, earlier, a, s))


def test_references_keep_float32(rng):
    x, t = rng.standard_normal((2, 3)).astype(np.float32), np.zeros(2, np.int32)
    a, s = (table.astype(np.float32) for table in tables())
    assert all(S.predict_x_0(x, x, t, a, s, kind=kind).dtype == np.float32 for kind in S.KINDS)
    assert S.ddim_step(x, x, t, a, s, s, x).dtype == np.float32


def test_the_models_answer_is_not_changed():
    answer = np.full((1, 4), 3.0)
    S.predict_x_0(answer, answer, np.zeros(1, np.int32), *tables(), kind="x_0", clip=True)
    assert np.all(answer == 3)


def test_bad_input_says_so(engine):
    x, t, table = engine(np.zeros((2, 5))), engine(np.zeros(2, np.int32)), engine(np.zeros(4))
    with pytest.raises(ValueError, match="a prediction is one of"):
        S.predict_x_0(x, x, t, table, table, kind="sigma")
    with pytest.raises(ValueError, match="more channels"):
        S.predict_x_0(x, engine(np.zeros((2, 4))), t, table, table)
    with pytest.raises(ValueError, match="t must be one int32"):
        S.ddim_step(x, x, engine(np.zeros(2)), table, table, table)
    if engine.has_versions:
        with pytest.raises(ValueError, match="use version=1"):
            S.ddim_step(x, x, t, table, table, table, version=2)


def test_cost():
    assert S.predict_x_0_cost(10) == (120, 30)
    assert S.ddim_step_cost(10) == (160, 50) and S.ddim_step_cost(10, noise=False) == (120, 30)
