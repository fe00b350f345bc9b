"""Rung 0 of the matmul, and its two orders of indices."""

import numpy as np
import pytest

from numdiff.extras.kernel_check import run as check
from numdiff.extras.kernel_check.run import counts_of
from numdiff.kernels.matmul import first
from numdiff.kernels.matmul.first import matmul_first_forward


@pytest.mark.parametrize("version, loads, stores", [(1, "7.1", "17.5"), (2, "2.1", "3.2")])
def test_what_coalescing_is(version, loads, stores):
    """Transactions per request, as the docstring says them."""
    case = next(case for case in check.CASES if case.name == "matmul_first")
    table = (
        counts_of(case, version)
        .table(f"matmul_first_kernel_v{version}", 46, brief=True)
        .splitlines()
    )
    load, store = (
        next(line for line in table if text in line).split()
        for text in ("total += A", "C[row, column]")
    )
    assert (load[-2], store[-1]) == (loads, stores)
    assert loads in first.__doc__ and stores in first.__doc__


def test_errors_say_what_to_do(engine):
    if not engine.has_versions:
        return
    with pytest.raises(ValueError, match=r"needs b \(64, N\)"):
        matmul_first_forward(engine(np.ones((4, 64))), engine(np.ones((4, 64))))
    with pytest.raises(ValueError, match="use uncoalesced or coalesced"):
        matmul_first_forward(engine(np.ones((4, 6))), engine(np.ones((6, 4))), version=3)
