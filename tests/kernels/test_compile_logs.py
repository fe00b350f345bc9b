"""What the compilers say of the kernels, without a GPU; compile_logs.py says it one by one.

Numba and NVVM take every kernel; ptxas spills none that uses tensor cores or keeps rows in
registers. A kernel that another test has compiled, or the last run, is there as PTX
(tests/kept.py).
"""

import re

import pytest

from numdiff.device.bfloat16 import SUFFIX
from numdiff.device.ptx import CAPABILITIES, PtxDevice, capabilities_of
from numdiff.extras.kernel_check import run as check
from tests.conftest import exhaustive, needs
from tests.kernels.compile_logs import (
    LATER,
    compile_log,
    kernels,
    names_of_tests,
    tensor_core_kernels,
    uses_tensor_cores,
)


def check_text(text):
    assert ".entry" in text and not re.search(r"\.f64|\.extern .*__half", text)


@pytest.mark.parametrize("name", names_of_tests()["one of each folder"])
def test_a_kernel_of_each_folder_compiles(name):
    """…for an H100, without float64; of LONG, and all others, the exhaustive part."""
    kernel, signature = kernels()[name]
    (text,) = PtxDevice.compile(kernel, signature, CAPABILITIES[-1:]).values()
    check_text(text)


@exhaustive
@pytest.mark.parametrize("name", names_of_tests()["variants"])
def test_variants_compile(name):
    """The widest variant of each text without tensor cores, for an H100; those with tensor cores
    are assembled below. `numdiff kernels check --device ptx` has all."""
    kernel, signature = kernels()[name]
    (text,) = PtxDevice.compile(kernel, signature, capabilities_of(kernel)[-1:]).values()
    check_text(text)


@needs("ptxas")
@exhaustive
@pytest.mark.parametrize("name", names_of_tests()["logs"])
def test_no_spills_and_no_advisories(name):
    logs = compile_log(name, LATER if name in names_of_tests()["later"] else ())
    assert (
        logs and all(registers for _, registers, _ in logs) and not any(wrong for *_, wrong in logs)
    ), logs


def test_no_kernel_is_left_out():
    """Every kernel of a file with tensor cores is launched by some case of the check."""
    found = {
        (kernel.py_func.__module__, kernel.py_func.__name__.removesuffix(SUFFIX))
        for kernel, _ in tensor_core_kernels().values()
    }
    assert found == {
        (module, name) for module, name in check.all_kernels() if uses_tensor_cores(module)
    }
