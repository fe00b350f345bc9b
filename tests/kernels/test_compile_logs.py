"""ptxas's log of the largest tensor-core kernel of each kind; `python -m tests.kernels.compile_logs` reads them all."""
import pytest

from tests.kernels.compile_logs import compile_log, find_ptxas, tensor_core_kernels

LARGEST = ("conv2d_hopper.conv2d_forward_kernel_v6_256x128_1", "conv2d_hopper.conv2d_forward_kernel_v6_128x128_3",
           "conv2d_hopper.conv2d_forward_kernel_v6_256x96_3", "conv2d_hopper.conv2d_input_gradient_kernel_v6_256x96_3",
           "conv2d_hopper_gradient_3x3.conv2d_weight_gradient_3x3_kernel_v6_64_256",
           "conv2d_mma.conv2d_forward_kernel_v4", "conv2d_narrow_half.conv2d_from_narrow_kernel_64",
           "flash_attention.forward_half.flash_attention_forward_kernel_v3_72_128",
           "flash_attention.backward_half.flash_attention_backward_kernel_v3_72_256",
           "flash_attention.backward_split.flash_attention_backward_kernel_v4_72",
           "matmul.hopper.gemm_hopper_256_nn_gelu_gradient", "matmul.hopper.gemm_hopper_256_nt_half",
           "matmul.mma.gemm_mma_128x128_nt_half")


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGEST)
def test_no_spills_and_no_advisories(name):
    if find_ptxas() is None:
        pytest.skip("ptxas is not installed")
    logs = compile_log(name)
    assert logs and not any(wrong for *_, wrong in logs), logs


def test_the_kernels_are_found():
    """Of every rung that has an mma; those that are too old for it, or have none, are not in the way."""
    found = tensor_core_kernels()
    assert set(LARGEST) <= set(found) and len(found) > 100
    assert compile_log("conv2d.conv2d_forward_kernel_v1") == []
