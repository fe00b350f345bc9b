"""ptxas's log of the largest tensor-core kernel of each kind, for each architecture that it is for.

`python -m tests.kernels.compile_logs` reads all of them, which takes longer than these tests may. A kernel that the
`ptx` engine has met in another test is there as PTX (conftest.py), so that only ptxas runs here.
"""
import pytest

from numdiff.kernels import check
from tests.kernels.compile_logs import LARGEST_TF32, compile_log, find_ptxas, tensor_core_kernels, uses_tensor_cores

LARGEST = ("conv2d_hopper.conv2d_forward_kernel_v6_256x128_1", "conv2d_hopper.conv2d_forward_kernel_v6_128x128_3",
           "conv2d_hopper.conv2d_forward_kernel_v6_256x96_3", "conv2d_hopper.conv2d_input_gradient_kernel_v6_256x96_3",
           "conv2d_hopper_gradient_3x3.conv2d_weight_gradient_3x3_kernel_v6_64_256",
           "conv2d_mma.conv2d_forward_kernel_v4", "conv2d_narrow_half.conv2d_from_narrow_kernel_64",
           "flash_attention.forward_half.flash_attention_forward_kernel_v3_72_128",
           "flash_attention.backward_half.flash_attention_backward_kernel_v3_72_256",
           "flash_attention.backward_split.flash_attention_backward_kernel_v4_32",
           "flash_attention.backward_split.flash_attention_backward_kernel_v4_72",
           "flash_attention.forward_hopper.flash_attention_forward_kernel_v5_72",
           "flash_attention.backward_hopper.flash_attention_backward_kernel_v5_64",
           "flash_attention.backward_hopper.flash_attention_backward_kernel_v5_72",
           "matmul.hopper.gemm_hopper_256_nn_gelu_gradient", "matmul.hopper.gemm_hopper_256_nt_half",
           "matmul.mma.gemm_mma_128x128_nn_half", "matmul.mma.gemm_mma_128x128_tt_half", *LARGEST_TF32)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGEST)
def test_no_spills_and_no_advisories(name):
    if find_ptxas() is None:
        pytest.skip("ptxas is not installed")
    logs = compile_log(name)
    assert logs and all(registers for _, registers, _ in logs) and not any(wrong for *_, wrong in logs), logs


def test_no_kernel_is_left_out():
    """Every kernel of a file with tensor cores is launched by some case of the check."""
    found = {(kernel.py_func.__module__, kernel.py_func.__name__) for kernel, _ in tensor_core_kernels().values()}
    assert found == {(module, name) for module, name in check.all_kernels() if uses_tensor_cores(module)}
