"""E4M3: its 256 numbers, the rounding on the host and in kernels, and the PTX of its products."""

import ml_dtypes
import numpy as np
import pytest

from numdiff.device import cuda, download, empty, launch, upload
from numdiff.device.float8 import larger_halves, pack_e4m3x4, transpose_bytes, unpack_e4m3x4
from numdiff.device.ptx import compile_to_ptx
from numdiff.device.requires import requires
from numdiff.float8 import LARGEST, NUMBERS, bits_of, numbers_of
from tests.conftest import needs
from tests.device.test_bfloat16 import on
from tests.emulator.probes import units

DEVICES = ["emulator", pytest.param("cuda", marks=needs("gpu"))]
BETWEEN = [
    0,
    -0.0,
    1e-45,
    2**-10,
    3 * 2**-10,
    -(2**-9),
    2**-6 - 2**-10,
    17,
    19,
    448,
    464,
    464.1,
    480,
    -1e9,
    np.inf,
    -np.inf,
]


@requires("8.9")
@cuda.jit
def pack_kernel(x, words):
    i = cuda.threadIdx.x
    words[i] = pack_e4m3x4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3])


@requires("8.9")
@cuda.jit
def turn_kernel(words, numbers, turned, halves):
    """Of each word its numbers; of each four the columns; the larger halves of it and the one
    before."""
    i = cuda.threadIdx.x
    found = unpack_e4m3x4(words[i])
    for k in range(4):
        numbers[i, k] = found[k]
    halves[i] = larger_halves(words[i], words[max(i - 1, 0)])
    first = i - i % 4
    columns = transpose_bytes(words[first], words[first + 1], words[first + 2], words[first + 3])
    for k in range(4):
        if i % 4 == k:
            turned[i] = columns[k]


def numbers(rng, count=4096):
    x = (rng.standard_normal(count) * 10.0 ** rng.integers(-5, 4, count)).astype(np.float32)
    x[: len(BETWEEN)] = BETWEEN
    return x


def test_the_numbers_are_those_of_ml_dtypes():
    want = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(NUMBERS, want)
    np.testing.assert_array_equal(np.signbit(NUMBERS), np.signbit(want))
    finite = np.flatnonzero(np.isfinite(NUMBERS))
    np.testing.assert_array_equal(bits_of(numbers_of(finite.astype(np.uint8))), finite)


def test_rounding_is_to_the_nearest_even_and_saturates(rng):
    x = numbers(rng)
    want = np.clip(x, -LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(bits_of(x), want)
    assert (
        bits_of(np.float32("nan")) == 0x7F
        and np.isnan(numbers_of(np.array([0x7F, 0xFF], np.uint8))).all()
    )


@pytest.mark.parametrize("device", DEVICES)
def test_words_hold_four(rng, device):
    backend, x = on(device), numbers(rng, 128)
    x[20] = np.nan
    words = empty(32, np.uint32, backend)
    launch(pack_kernel, 1, 32, upload(x, backend), words)
    np.testing.assert_array_equal(download(words).view(np.uint8), bits_of(x))


@pytest.mark.parametrize("device", DEVICES)
def test_words_are_read_and_turned(device):
    """All 256 numbers, and 4 × 4 matrices of their bytes."""
    backend, bits = on(device), np.random.default_rng(0).permutation(256).astype(np.uint8)
    found, turned, halves = (
        empty(shape, dtype, backend)
        for shape, dtype in (((64, 4), np.float32), (64, np.uint32), (64, np.uint32))
    )
    launch(turn_kernel, 1, 64, upload(bits.view(np.uint32), backend), found, turned, halves)
    pairs = bits.view(np.uint16).reshape(64, 2)
    np.testing.assert_array_equal(
        download(halves).view(np.uint16).reshape(64, 2), np.maximum(pairs, pairs[[0, *range(63)]])
    )
    np.testing.assert_array_equal(download(found).reshape(-1), numbers_of(bits))
    np.testing.assert_array_equal(
        download(turned).view(np.uint8).reshape(16, 4, 4), bits.reshape(16, 4, 4).transpose(0, 2, 1)
    )


def test_ptx_names_the_format():
    kernel = units.make_product(16, kind="e4m3")
    from numba.cuda import types

    one, two = types.Array(types.uint32, 1, "C"), types.Array(types.uint32, 2, "C")
    text = compile_to_ptx(
        kernel,
        (
            one,
            types.Array(types.uint64, 1, "C"),
            two,
            types.int32,
            types.Array(types.float32, 2, "C"),
        ),
        (9, 0, "a"),
    )
    assert "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3" in text
