"""A few hundred cases of the fuzz, and all its bombs: see fuzz_importers.py, which runs at length
by itself."""

import pytest

from tests.conftest import exhaustive, exhaustively
from tests.extras.importers.fuzz_importers import BOMBS, fuzz


@exhaustive
def test_mutated_files():
    faults, cases, done, refused = fuzz(seed=7, count=120)
    assert not faults, faults
    assert cases == 120 and done > 30 and refused > 60


@pytest.mark.parametrize(
    "first, count, wanted", [(2, 1, (0, 16)), *exhaustively((0, len(BOMBS), (1, 60)))]
)
def test_bombs(first, count, wanted):
    """Each but a long labels file is refused, within seconds and some megabytes; measured in a
    separate process."""
    faults, cases, done, refused = fuzz(first=first - len(BOMBS), count=count)
    assert not faults, faults
    assert cases == count and done == wanted[0] and refused >= wanted[1]
