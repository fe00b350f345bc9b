"""ptxas's log of every tensor-core kernel, for each architecture that it is for; compile_logs.py says them one by one.

A kernel that the `ptx` engine has met in another test is there as PTX (conftest.py), so that only ptxas runs here.
"""
import pytest

from numdiff.kernels import check
from tests.kernels.compile_logs import compile_log, find_ptxas, tensor_core_kernels, uses_tensor_cores


@pytest.mark.slow
@pytest.mark.parametrize("name", tensor_core_kernels())
def test_no_spills_and_no_advisories(name):
    if find_ptxas() is None:
        pytest.skip("ptxas is not installed")
    logs = compile_log(name)
    assert logs and all(registers for _, registers, _ in logs) and not any(wrong for *_, wrong in logs), logs


def test_no_kernel_is_left_out():
    """Every kernel of a file with tensor cores is launched by some case of the check."""
    found = {(kernel.py_func.__module__, kernel.py_func.__name__) for kernel, _ in tensor_core_kernels().values()}
    assert found == {(module, name) for module, name in check.all_kernels() if uses_tensor_cores(module)}
