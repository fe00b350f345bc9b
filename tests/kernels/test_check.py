"""`numdiff kernels check`, which is how every kernel version goes through the emulator."""
import numpy as np
import pytest

from numdiff.device import get_backend
from numdiff.emulator import KernelFault
from numdiff.errors import UsageError
from numdiff.kernels import check as checking


@pytest.mark.slow
def test_every_kernel_passes_in_two_thread_orders():
    """…within 1e-5 of float64, with the same bits in both orders, without a fault; and no kernel was left out."""
    outcomes = list(checking.check(orders=("forward", "shuffled")))
    assert [f"{o.name}: {o.fault or o.error}" for o in outcomes if not o.passed] == []
    assert checking.all_kernels() - get_backend("emulator").launched == set()


def case(run, **shapes):
    return checking.Case("made up", checking.normal(**shapes), run)


def test_a_wrong_result_is_seen():
    outcome = checking.check_case(case(lambda a, v: (checking.elementwise.silu_forward(a.x) if v is None or isinstance(
        a.x, np.ndarray) else a.x,), x=(3, 4)), 1, "emulator")
    assert not outcome.passed and outcome.error > 0.1 and outcome.fault is None


def test_results_that_differ_between_runs_are_seen():
    calls = []

    def run(a, version):
        calls.append(1)
        return (checking.elementwise.add_forward(a.x, a.x) if len(calls) % 2 else a.x,)

    assert not checking.check_case(case(run, x=(3, 4)), 1, "emulator").same


def test_a_fault_is_told():
    def run(a, version):
        raise KernelFault("some_kernel", [])
    assert "some_kernel" in checking.check_case(case(run, x=(3,)), 1, "emulator").fault


def test_names():
    assert {c.name for c in checking.cases_named(["softmax"])} == {"softmax", "softmax_backward"}
    with pytest.raises(UsageError, match="there is no operation 'softmin'"):
        checking.cases_named(["softmin"])
