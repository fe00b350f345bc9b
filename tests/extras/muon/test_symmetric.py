"""Products whose results are symmetric; its problems run in tests/kernels/test_operations.py."""

import numpy as np
import pytest

from numdiff.extras.muon import symmetric_epilogue as E
from numdiff.extras.muon.symmetric import matmul_symmetric
from numdiff.kernels.matmul.hopper.layout import BM


@pytest.mark.parametrize("width", E.SYMMETRIC_WIDTHS)
@pytest.mark.parametrize("rows", [1, 2, 3, 6])
def test_the_tiles_of_a_symmetric_result(rows, width):
    """Each that has a number on or below the diagonal, once."""
    n = rows * BM
    count = E.tiles_of(n, width)
    places = {E.symmetric_place.py_func(tile, width) for tile in range(count)}
    assert len(places) == count
    assert places == {
        (i, j) for i in range(rows) for j in range(-(-n // width)) if j * width < (i + 1) * BM
    }


def test_what_is_not_symmetric_is_refused(engine):
    x = engine(np.zeros((2, 8, 16)))
    with pytest.raises(
        ValueError, match="whose products are symmetric; check transpose_a and transpose_b"
    ):
        matmul_symmetric(x, x)
    with pytest.raises(
        ValueError, match=r"residual has shape \(2, 8, 16\), the product has \(2, 8, 8\)"
    ):
        matmul_symmetric(x, x, transpose_b=True, residual=x)
