"""e^a for loops that are compiled for the host."""

import numpy as np

from numdiff.kernels.cpu.exp import exponential, sigmoid


def test_exponential():
    a = np.concatenate([np.linspace(-86.9, 87.9, 100001), [0, -0.0, 1e-30, -100, 100]]).astype(
        np.float32
    )
    got = [exponential(number) for number in a]
    np.testing.assert_allclose(got, np.exp(np.clip(a, -87, 88).astype(np.float64)), rtol=2e-7)


def test_sigmoid():
    a = np.linspace(-80, 200, 10001).astype(np.float32)
    np.testing.assert_allclose(
        [sigmoid(number) for number in a], 1 / (1 + np.exp(-a.astype(np.float64))), rtol=3e-7
    )
    assert sigmoid(np.float32(-1e30)) < 1e-37 and sigmoid(np.float32(1e30)) == 1
