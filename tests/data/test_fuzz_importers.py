"""A few hundred cases of the fuzz, and all its bombs: see fuzz_importers.py, which runs at length by itself."""
from tests.data.fuzz_importers import BOMBS, fuzz


def test_mutated_files():
    faults, cases, done, refused = fuzz(seed=7, count=120)
    assert not faults, faults
    assert cases == 120 and done > 30 and refused > 60


def test_bombs():
    """Each but a long labels file is refused, within seconds and some megabytes; measured in a process of its own."""
    faults, cases, done, refused = fuzz(first=-len(BOMBS), count=len(BOMBS))
    assert not faults, faults
    assert cases == len(BOMBS) and done == 1 and refused >= 60
