"""Every operation on bfloat16 arrays: those of tensor cores as `numdiff kernels check` has them,
and all others."""

import re
from dataclasses import replace

import numpy as np
import pytest

from numdiff.dtypes import bfloat16
from numdiff.extras.kernel_check import run as check
from numdiff.extras.kernel_check.bfloat16 import in_bfloat16
from numdiff.extras.kernel_check.case import BFLOAT16_TOLERANCE
from tests.conftest import exhaustive
from tests.kernels.test_check import kernels_of

HALF = [
    (case, version)
    for case in map(in_bfloat16, check.CASES)
    if case is not None
    and "bfloat16" in case.label
    and not case.bfloat16
    and not case.name.endswith("_level")
    for version in case.versions
]
CHECKED = [
    (case, version) for case in check.CASES if "bfloat16" in case.label for version in case.versions
]
# cases whose operation has another, but not the second pass or the update that they launch
SECOND = re.compile(
    r"adamw: ranges, .*|flash_attention_backward: .*legacy, HS 32, T 65, 64 keys, chunks \(2, 1\)|"
    r"matmul: .*in (9 )?parts, .*|avgpool_backward: .*2×4×6×8.*|groupnorm: known statistics, .*80 chunks.*"
)
ACTIVATIONS = {
    "x",
    "dy",
    "h",
    "a",
    "b",
    "y",
    "dz",
    "residual",
    "gate",
    "shift",
    "scale",
    "e",
    "modulation",
}
OTHERS = (
    "add",
    "silu",
    "silu_backward",
    "gelu",
    "gelu_backward",
    "bias_add",
    "channel_add",
    "channel_add_backward",
    "scale_shift",
    "scale_shift_backward",
    "layernorm",
    "layernorm_backward",
    "adaln",
    "adaln_backward",
    "gate",
    "gate_backward",
    "bias_gelu",
    "bias_gelu_backward",
    "chunk",
    "concat",
    "patchify",
    "unpatchify",
    "avgpool",
    "avgpool_backward",
    "upsample",
    "upsample_backward",
    "dropout",
    "dropout_backward",
    "column_sum",
    "sample_sum",
    "im2col",
    "im2col_backward",
    "softmax",
    "columns",
    "swiglu",
    "depthwise",
    "depthwise_input_gradient",
    "depthwise_weight_gradient",
    "groupnorm",
    "groupnorm_backward",
)


def with_activations(case):
    """A case of float32 whose activations are bfloat16."""

    def inputs(rng):
        return {
            name: a.astype(bfloat16)
            if name in ACTIVATIONS and a.dtype in (np.float32, np.float64)
            else a
            for name, a in case.inputs(rng).items()
        }

    return replace(
        case, inputs=inputs, tolerance=BFLOAT16_TOLERANCE, label=f"{case.label} bfloat16".strip()
    )


def fits(case, version):
    return not (case.name.startswith("concat") and version == 3)  # whose case has four channels


OTHER_CASES = [
    (with_activations(case), version)
    for case in check.CASES
    if case.name in OTHERS and "float16" not in case.label
    for version in case.versions
    if fits(case, version)
]
FIRSTS = list(
    {
        case.name: (case, version)
        for case, version in reversed(OTHER_CASES)
        # which take long
        if not case.name.startswith(("groupnorm", "adaln", "layernorm"))
    }.values()
)


def first_of_each(pairs, others=()):
    """Of each version of an operation the first case, if there is none among the others."""
    had = {(case.name, version) for case, version in others}
    first = {(case.name, version): (case, version) for case, version in reversed(pairs)}
    return [pair for (name, version), pair in reversed(first.items()) if (name, version) not in had]


OTHER_FIRSTS = first_of_each(OTHER_CASES)
HALF_FIRSTS = first_of_each(HALF, CHECKED) + [
    (case, version) for case, version in HALF if SECOND.fullmatch(f"{case.name}: {case.label}")
]


def name_of(pair):
    return check.Outcome(*pair).name


def passes(case, version, device="emulator"):
    outcome = check.check_case(case, version, device, ("shuffled",))
    assert outcome.passed, outcome.fault or f"error {outcome.error}, same bits: {outcome.same}"


@exhaustive
@pytest.mark.parametrize("case, version", HALF_FIRSTS, ids=map(name_of, HALF_FIRSTS))
def test_every_kernel_of_float16(case, version):
    """…with bfloat16, once: tiles, sizes and epilogues differ in nothing that depends on the type."""
    passes(case, version)


@exhaustive
def test_no_text_is_left_out():
    """Every line that float16's cases launch is run in bfloat16, too."""
    everything, run = set(), set()
    for pair in HALF:
        kernels_of(*pair, everything)
    for pair in CHECKED + HALF_FIRSTS:
        kernels_of(*pair, run)
    assert everything <= run


@pytest.mark.parametrize("case, version", FIRSTS, ids=map(name_of, FIRSTS))
def test_every_other_operation(case, version):
    passes(case, version)


@exhaustive
@pytest.mark.parametrize("case, version", OTHER_FIRSTS, ids=map(name_of, OTHER_FIRSTS))
def test_every_other_version(case, version):
    passes(case, version)


@pytest.mark.parametrize("name", sorted({case.name for case, _ in (*HALF, *OTHER_CASES)}))
def test_numpy_computes_in_float32_and_rounds_once(name):
    """…which is what the CPU engine runs on: within the same tolerance of float64, and results of
    the same types."""
    case = next(case for case, _ in (*HALF, *OTHER_CASES) if case.name == name)
    passes(case, None, "cpu")
