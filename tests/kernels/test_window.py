"""A window pads and crops; its backward is the window the other way round."""

import numpy as np
import pytest

from numdiff.kernels.window import window_forward


def test_closed_form():
    x = np.arange(1.0, 7).reshape(1, 2, 3, 1)
    assert window_forward(x, -1, 1, 3, 3)[0, :, :, 0].tolist() == [[0, 0, 0], [2, 3, 0], [5, 6, 0]]
    assert window_forward(x, 1, 0, 1, 2)[0, :, :, 0].tolist() == [[4, 5]]
    assert not window_forward(x, 5, 0, 2, 2).any()


@pytest.mark.parametrize(
    "row, column, height, width", [(-1, -2, 6, 9), (1, 2, 2, 2), (2, -1, 7, 3), (9, 9, 1, 1)]
)
def test_the_backward_is_the_adjoint(rng, row, column, height, width):
    x, dy = rng.standard_normal((2, 4, 5, 3)), rng.standard_normal((2, height, width, 3))
    dx = window_forward(dy, -row, -column, 4, 5)
    assert np.isclose((window_forward(x, row, column, height, width) * dy).sum(), (x * dx).sum())


def test_an_empty_window_says_so(engine):
    with pytest.raises(ValueError, match="both must be at least 1"):
        window_forward(engine(np.ones((1, 2, 2, 4))), 0, 0, 0, 2)
