"""Cases in bfloat16: those of float16, with other numbers; the kernels are the same text
(device/bfloat16.py)."""

from dataclasses import replace

import numpy as np

from ...dtypes import bfloat16
from .case import BFLOAT16_TOLERANCE, HALF_TOLERANCE


def in_bfloat16(case):
    """A case of float16 arrays with bfloat16 ones in their place; None for one that has none."""

    def inputs(rng):
        return {
            name: a.astype(np.float32).astype(bfloat16) if a.dtype == np.float16 else a
            for name, a in case.inputs(rng).items()
        }

    if (
        "fp8" in case.name
        or "quantise" in case.name
        or "e4m3" in case.label.lower()
        or "columns_of" in case.name
    ):
        return None  # E4M3 is made of float16
    if bfloat16 is None or not any(
        a.dtype == np.float16 for a in case.inputs(np.random.default_rng(0)).values()
    ):
        return None
    label = case.label.replace("float16", "bfloat16")
    return replace(
        case,
        inputs=inputs,
        label=label if label != case.label else f"{label}, bfloat16".lstrip(", "),
        fast=False if case.bfloat16 == "exhaustive" else case.fast,
        tolerance=BFLOAT16_TOLERANCE if case.tolerance == HALF_TOLERANCE else case.tolerance,
    )


def bfloat16_cases(cases):
    """The cases in bfloat16 of problems that ask for them (`Problem.bfloat16`)."""
    found = [in_bfloat16(case) for case in cases if case.bfloat16]
    return [case for case in found if case is not None]
