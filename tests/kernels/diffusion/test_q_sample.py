import numpy as np
import pytest

from numdiff.kernels.diffusion import q_sample as Q


def tables(steps=50):
    alpha_bar = np.linspace(0.999, 0.001, steps)
    return np.sqrt(alpha_bar), np.sqrt(1 - alpha_bar)


def test_weights_against_loops(rng):
    x, weight = rng.standard_normal((3, 5, 7)), rng.standard_normal(50)
    t = rng.integers(0, 50, 3).astype(np.int32)
    assert np.array_equal(
        Q.weigh_forward(x, t, weight), np.stack([weight[t[b]] * x[b] for b in range(3)])
    )


def test_references_keep_float32(rng):
    a, s = (table.astype(np.float32) for table in tables())
    x = rng.standard_normal((2, 3)).astype(np.float32)
    assert Q.q_sample_forward(x, x, np.zeros(2, np.int32), a, s).dtype == np.float32
    assert Q.velocity_forward(x, x, np.zeros(2, np.int32), a, s).dtype == np.float32


def test_bad_input_says_so(engine):
    x, table = engine(np.zeros((2, 5))), engine(np.zeros(4))
    t = engine(np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="differ in shape"):
        Q.q_sample_forward(x, engine(np.zeros((2, 4))), t, table, table)
    with pytest.raises(ValueError, match="t must be one int32"):
        Q.velocity_forward(x, x, engine(np.zeros(2)), table, table)
    with pytest.raises(ValueError, match="tables"):
        Q.velocity_forward(x, x, t, table, engine(np.zeros(3)))
    if engine.has_versions:
        with pytest.raises(ValueError, match="use version=1"):
            Q.q_sample_forward(x, x, t, table, table, version=2)
