import numpy as np
import pytest

from numdiff.kernels.diffusion import sampler as S

SHAPE = (3, 5, 7)


@pytest.mark.parametrize("terms", [1, 2, 3])
def test_combine(rng, terms):
    scalars, arrays = rng.standard_normal(terms), rng.standard_normal((terms, *SHAPE))
    assert np.allclose(
        S.combine(*zip(scalars, arrays, strict=True)), np.tensordot(scalars, arrays, 1), rtol=1e-13
    )


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("channels", [1, 7])
def test_guide(engine, rng, scale, channels):
    c, u = rng.standard_normal(SHAPE), rng.standard_normal(SHAPE)
    wanted = c.copy()
    for k in range(channels):
        wanted[..., k] = scale * c[..., k] + (1 - scale) * u[..., k]
    engine.check(
        S.guide(engine(c), engine(u), scale, channels),
        wanted,
        1e-6,
        (1 + scale) * (np.abs(c) + np.abs(u)),
    )


def test_blend(engine, rng):
    mask, known, x = (
        rng.integers(0, 2, SHAPE).astype(float),
        rng.standard_normal(SHAPE),
        rng.standard_normal(SHAPE),
    )
    x[mask == 1] = np.inf  # what was made where the image is known does not matter, whatever it is
    wanted = np.array(
        [k if m else y for m, k, y in zip(mask.flat, known.flat, x.flat, strict=True)]
    ).reshape(SHAPE)
    engine.check(S.blend(engine(mask), engine(known), engine(x)), wanted.astype(np.float32), 0)


@pytest.mark.parametrize("copies", [1, 2])
def test_model_input(engine, rng, copies):
    x = rng.standard_normal(SHAPE)
    y, t = S.model_input(engine(x), (12.5, 0.25), copies)
    engine.check(y, np.concatenate([0.25 * x] * copies), 1e-6)
    engine.check(t, np.full(copies * SHAPE[0], 12.5), 0)


def test_numbers_may_lie_on_the_engine(engine, rng):
    """A step's numbers in an array, from the place on where its own begin, give the bits of
    Python's floats."""
    x, u = (engine(rng.standard_normal((2, 3, 4))) for _ in range(2))
    row = engine(np.array([9.0, 0.3, -1.7, 4.0]))
    engine.check_equal(S.weighted_sum(row[1:3], x, u), S.combine((0.3, x), (-1.7, u)))
    engine.check_equal(S.estimate_x_0(x, u, row[1:3]), S.estimate_x_0(x, u, (0.3, -1.7)))


def test_references_keep_float32_and_their_inputs(rng):
    x, wide = (
        rng.standard_normal((2, 3)).astype(np.float32),
        rng.standard_normal((2, 6)).astype(np.float32),
    )
    kept = x.copy(), wide.copy()
    results = [
        S.combine((0.5, x)),
        S.combine((0.5, x), (2.0, x), (1.0, x)),
        S.estimate_x_0(x, wide, (1.0, -3.0)),
        S.estimate_x_0(x, wide, (0.0, 1.0)),
        S.guide(wide, wide, 3.0, 2),
        S.blend(x, x, x),
    ]
    assert all(r.dtype == np.float32 for r in results)
    for r in results:
        r.fill(9)
    assert np.array_equal(x, kept[0]) and np.array_equal(wide, kept[1])


def test_bad_input_says_so(engine):
    x, other = engine(np.zeros((2, 5))), engine(np.zeros((2, 4)))
    with pytest.raises(ValueError, match="one to three pairs"):
        S.combine()
    with pytest.raises(ValueError, match="must have"):
        S.combine((1.0, x), (1.0, other))
    with pytest.raises(ValueError, match="at least 1 × 5 channels"):
        S.estimate_x_0(x, other, (1.0, 1.0))
    with pytest.raises(ValueError, match="channels must be 1 to 5"):
        S.guide(x, x, 2.0, 6)
    with pytest.raises(ValueError, match="mask has shape"):
        S.blend(other, x, x)
    if engine.has_versions:
        with pytest.raises(ValueError, match="use version=1"):
            S.weighted_sum([1.0], x, version=2)
