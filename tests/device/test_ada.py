"""Kernels that round to E4M3 on Ada: their PTX is assembled for sm_89, and so is what a run compiles."""

import re

import pytest

from numdiff.device.ada import for_ada, lacks_halves
from numdiff.device.compiler import compile_kernel, type_of_word
from numdiff.device.ptx import compile_to_ptx
from numdiff.extras.fp8.mma import MMA_KERNELS
from numdiff.kernels.matmul.mma import KERNELS
from numdiff.kernels.transformer.gate_adaln.forward import EIGHT_FORWARD
from tests.conftest import exhaustive, needs
from tests.device.test_float8 import turn_kernel
from tests.kernels.compile_logs import architecture, assemble, kernels

ADA = (8, 9)
# of its 80 registers, as many as leave room for three blocks; on sm_90 it needs no more
SPILLS = {"rms_weighted_gate_adaln_forward_kernel_v2_5_eight": "4 bytes spill stores"}
TYPES = "uint32[1]", "float32[2]", "uint32[1]", "uint32[1]"


def test_which_kernels_are_rewritten():
    eight = next(iter(EIGHT_FORWARD.values()))
    for kernel in (turn_kernel, eight, next(iter(MMA_KERNELS.values()))):
        assert lacks_halves(ADA, kernel)
        assert not any(lacks_halves(newer, kernel) for newer in [(9, 0), (10, 0), (12, 0)])
    assert not lacks_halves(ADA, next(iter(KERNELS.values())))


@needs("ptxas")
def test_a_maximum_of_halves():
    text = compile_to_ptx(turn_kernel, tuple(map(type_of_word, TYPES)), ADA)
    assert "max.u16x2" in text and "max.u16x2" not in for_ada(text)
    assert assemble(text, ADA)[1] and not assemble(for_ada(text), ADA)[1]
    assert len(re.findall(r"max\.u16 ", for_ada(text))) == 2 * text.count("max.u16x2")


def test_what_a_run_compiles():
    for capability in (ADA, (12, 0)):
        assert compile_kernel(turn_kernel, TYPES, capability).cubin


@exhaustive
@needs("ptxas")
@pytest.mark.parametrize(
    "name", [name for name, (kernel, _) in kernels().items() if lacks_halves(ADA, kernel)]
)
@pytest.mark.parametrize("capability", [ADA, (12, 0)], ids=architecture)
def test_every_kernel_of_fp8_is_assembled(name, capability):
    kernel, signature = kernels()[name]
    wrong = assemble(for_ada(compile_to_ptx(kernel, signature, ADA)), capability)[1]
    known = SPILLS.get(name.rsplit(".", 1)[1])
    assert all(known and known in line for line in wrong)
