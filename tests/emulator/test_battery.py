"""The battery of small kernels: each gives NumPy's numbers in the emulator, and Numba compiles each
to PTX."""

import numpy as np
import pytest
from numba import cuda

from numdiff import emulator
from tests.conftest import exhaustive
from tests.emulator import battery
from tests.emulator.battery import FAMILIES, LIMITS, rows


def differs(row, launcher):
    """How a row's result differs from what is wanted; None if it does not."""
    try:
        got = battery.launch(row, launcher)
    except Exception as error:
        return f"{row.name}: {type(error).__name__}: {str(error)[:300]}"
    want = battery.wanted(row)
    same = (
        np.array_equal(got, want, equal_nan=got.dtype.kind in "fc")
        if not row.close
        else np.allclose(got, want, rtol=row.close, atol=row.close, equal_nan=True)
    )
    return None if same else f"{row.name}: {got.tolist()} instead of {want.tolist()}"


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_gives_numpys_numbers(family, checks):
    with emulator.device(checks=checks, float64=True) as gpu:
        found = {row.name: differs(row, gpu.launch) for row in rows(family)}
    wrong = [text for name, text in found.items() if text and name not in LIMITS]
    assert not wrong, "\n".join(wrong)
    assert not [name for name in LIMITS if name in found and not found[name]], (
        "a limit that is none any more"
    )


def test_there_are_enough():
    names = [row.name for family in FAMILIES for row in rows(family)]
    assert len(names) == len(set(names)) >= 300


@exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_numba_compiles_each(family):
    refused = []
    with emulator.device(compile=True):
        for row in rows(family):
            try:
                cuda.compile_ptx(battery.kernel_of(row), battery.types_of(row), cc=(9, 0))
            except Exception as error:
                refused.append(f"{row.name}: {type(error).__name__}: {str(error)[:300]}")
    assert not refused, "\n".join(refused)
