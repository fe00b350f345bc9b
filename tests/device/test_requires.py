"""What a kernel requires, and who asks."""

import numpy as np
import pytest

from numdiff.device import cuda, get_backend, launch, upload
from numdiff.device.compiler import compile_kernel
from numdiff.device.emulator import EmulatorDevice
from numdiff.device.planned import CARDS, Planned
from numdiff.device.ptx import CAPABILITIES, PtxDevice, capabilities_of
from numdiff.device.requires import check_supported, required, requires, supports
from numdiff.errors import NumdiffError


@cuda.jit
def anywhere_kernel(x):
    x[0] = x[1]


@requires("8.0")
@cuda.jit
def later_kernel(x):
    x[0] = x[1]


@requires("9.0a")
@cuda.jit
def hopper_kernel(x):
    x[0] = x[1]


A100, H100 = (
    next(card for card in CARDS if card.capability == capability) for capability in ((8, 0), (9, 0))
)


def test_which_devices_run_a_kernel():
    runs = {
        capability: [
            supports(capability, kernel)
            for kernel in (anywhere_kernel, later_kernel, hopper_kernel)
        ]
        for capability in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0))
    }
    assert runs == {
        (7, 5): [True, False, False],
        (8, 0): [True, True, False],
        (8, 9): [True, True, False],
        (9, 0): [True, True, True],
        (10, 0): [True, True, False],
    }
    assert required(hopper_kernel) == (9, 0, "a") and required({1: later_kernel}) == (8, 0)
    assert supports((8, 0), anywhere_kernel, {1: later_kernel}) and not supports(
        (8, 0), anywhere_kernel, hopper_kernel
    )
    assert supports(upload(np.zeros(2, np.float32), Planned(A100)), later_kernel)


def test_ptx_is_made_for_those_that_run_it():
    assert (
        capabilities_of(later_kernel) == CAPABILITIES
        and capabilities_of(hopper_kernel) == CAPABILITIES[1:]
    )
    device = PtxDevice()
    launch(hopper_kernel, 1, 1, upload(np.zeros(2, np.float32), device))
    assert [key[3] for key in device.launched] == [(9, 0, "a")]


@pytest.mark.parametrize("device", ["planned", "emulator", "compiler"])
def test_no_other_launches_it(device):
    said = "hopper_kernel needs compute capability 9.0a, and .* has 8.[06]: leave the version out"
    with pytest.raises(NumdiffError, match=said):
        if device == "compiler":
            compile_kernel(hopper_kernel, ("float32[1]",), (8, 0))
        else:
            backend = Planned(A100) if device == "planned" else EmulatorDevice(cc=(8, 6))
            launch(hopper_kernel, 1, 1, upload(np.zeros(2, np.float32), backend))
    launch(hopper_kernel, 1, 1, upload(np.zeros(2, np.float32), Planned(H100)))
    check_supported(get_backend("emulator"), hopper_kernel)
