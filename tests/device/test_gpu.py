"""What a GPU's failures look like to a user, with a driver that fails on request; no GPU is needed."""
import types

import pytest

from numdiff.device import get_backend
from numdiff.device.arena import Arena
from numdiff.device.gpu import Gpu
from numdiff.errors import NumdiffError, OutOfMemoryError, UsageError


def gpu_whose_allocation_gives(result):
    """A Gpu over a stand-in for the driver bindings."""
    gpu = Gpu.__new__(Gpu)
    gpu.device_name = "Test GPU"
    gpu._driver = types.SimpleNamespace(
        cuMemAlloc=lambda nbytes: result, cuMemGetInfo=lambda: (0, 3 << 20, 80 << 20),
        CUresult=types.SimpleNamespace(CUDA_ERROR_OUT_OF_MEMORY=2))
    gpu.arenas = [Arena(gpu._take_segment)]
    gpu._arena = gpu.arenas[0]
    return gpu


class Status(int):
    name = "CUDA_ERROR_ILLEGAL_ADDRESS"


def test_out_of_memory_says_how_much_and_what_to_do():
    with pytest.raises(OutOfMemoryError, match=r"Test GPU is out of memory: 64 MiB .* 3 of 80 MiB .* --microbatch"):
        gpu_whose_allocation_gives((Status(2),)).allocate(1000)


def test_other_driver_errors_carry_the_drivers_word():
    with pytest.raises(NumdiffError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        gpu_whose_allocation_gives((Status(700),)).allocate(1000)


def test_an_unknown_device_is_a_usage_error():
    with pytest.raises(UsageError, match="use auto, cpu, cuda or emulator"):
        get_backend("gpu")
