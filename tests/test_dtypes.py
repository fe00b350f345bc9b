"""bfloat16 and float16 as NumPy has them, and references that compute in float32."""

import numpy as np
import pytest

from numdiff import dtypes
from numdiff.dtypes import bfloat16, half_of, in_single, is_bfloat16, is_half, working_type
from numdiff.errors import NumdiffError


def test_which_types_have_16_bits():
    for dtype, half, brain in (
        (np.float16, True, False),
        (bfloat16, True, True),
        (np.float32, False, False),
        (np.uint16, False, False),
    ):
        for given in (dtype, np.dtype(dtype)):
            assert is_half(given) is half and is_bfloat16(given) is brain
            assert working_type(given) == (np.float32 if half else dtype)
    assert half_of("bf16") == bfloat16 and half_of("fp16") == np.float16 and half_of("fp32") is None


def test_bfloat16_rounds_to_nearest_even(rng):
    x = np.float32([*rng.standard_normal(1000), 1 + 2**-8, 1 + 3 * 2**-8, 3e38, -0.0])
    word = x.view(np.uint32).astype(np.uint64)
    expected = ((word + 0x7FFF + (word >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(x.astype(bfloat16).astype(np.float32), expected)


def test_a_reference_in_single_rounds_once():
    @in_single(1)
    def reference(x, factor):
        assert x.dtype == np.float32
        return x * x * factor, x.sum(), {"other": 1}

    x = np.float32([1.0, 1.0078125, 3.0]).astype(bfloat16)
    product, total, other = reference(x, np.float32(0.1))
    wide = x.astype(np.float32)
    np.testing.assert_array_equal(product, (wide * wide * np.float32(0.1)).astype(bfloat16))
    assert product.dtype == bfloat16 and total.dtype == np.float32 and other == {"other": 1}
    assert reference(x=wide, factor=1)[0].dtype == np.float32


def test_without_ml_dtypes_bf16_says_what_to_install(monkeypatch):
    monkeypatch.setattr(dtypes, "bfloat16", None)
    with pytest.raises(NumdiffError, match="pip install ml_dtypes"):
        half_of("bf16")
    assert half_of("fp16") == np.float16
