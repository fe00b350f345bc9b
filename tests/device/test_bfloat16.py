"""bfloat16 in kernels: what an element can do, words, products, and kernels that are one text for
both types."""

import numpy as np
import pytest

from numdiff.device import PtxError, cuda, download, empty, float32, launch, load4, store4, upload
from numdiff.device.bfloat16 import ones_bfloat2, pack_bfloat2, unpack_bfloat2
from numdiff.device.compiler import Key, type_of_word, word_of
from numdiff.device.eight import as_stored, load8, store8
from numdiff.device.emulator import EmulatorDevice
from numdiff.device.half import find_kernel, in_bfloat16
from numdiff.device.ptx import CAPABILITIES, compile_for, get_ptx_device
from numdiff.device.requires import required
from numdiff.device.tensor_core import pack_half2, store_word
from numdiff.device.tensor_map import _TYPES
from numdiff.dtypes import bfloat16
from numdiff.kernels.matmul.hopper import kernel as hopper
from tests.conftest import needs
from tests.emulator.test_tensor_core import mma_arguments, mma_kernel

DEVICES = ["emulator", pytest.param("cuda", marks=needs("gpu"))]


def on(device):
    from numdiff.device import get_backend

    return EmulatorDevice(float64=False) if device == "emulator" else get_backend(device)


@cuda.jit
def rounding_kernel(x, y, kept, back):
    """x as y stores it: element by element, four at a time, eight at a time; and what comes back."""
    shared = cuda.shared.array(32, y.dtype.type)
    i = cuda.threadIdx.x * 8
    n = cuda.blockDim.x * 8
    for k in range(8):
        shared[i + k] = x[i + k]
        y[i + k] = float32(shared[i + k])
        kept[i + k] = as_stored(y, x[i + k])
    for k in range(0, 8, 4):
        store4(y, n + i + k, x[i + k], x[i + k + 1], x[i + k + 2], x[i + k + 3])
    store8(y, 2 * n + i, load8(x, i))
    for k in range(0, 8, 4):
        a, b, c, d = load4(y, i + k)
        back[i + k], back[i + k + 1], back[i + k + 2], back[i + k + 3] = a, b, c, d
    numbers = load8(y, n + i)
    for k in range(8):
        back[n + i + k] = numbers[k]


@cuda.jit
def words_kernel(x, words, back):
    i = cuda.threadIdx.x
    words[i] = pack_bfloat2(x[2 * i], x[2 * i + 1])
    back[2 * i], back[2 * i + 1] = unpack_bfloat2(words[i])
    if i == 0:
        words[cuda.blockDim.x] = ones_bfloat2()


def numbers(rng):
    x = (rng.standard_normal(32) * 10.0 ** rng.integers(-42, 38, 32)).astype(np.float32)
    x[:10] = (
        1 + 2**-8,
        1 + 3 * 2**-8,
        -1 - 2**-8,
        3.4e38,
        -3.4e38,
        np.inf,
        -np.inf,
        np.nan,
        -0.0,
        1e-45,
    )
    return x


@pytest.mark.parametrize("device", DEVICES)
def test_an_element_is_rounded_to_nearest_even(rng, device):
    backend, x = on(device), numbers(rng)
    y, kept, back = (
        empty(96, bfloat16, backend),
        empty(32, np.float32, backend),
        empty(64, np.float32, backend),
    )
    launch(rounding_kernel, 1, 4, upload(x, backend), y, kept, back)
    want = x.astype(bfloat16).astype(np.float32)
    np.testing.assert_array_equal(download(y).astype(np.float32), np.tile(want, 3))
    np.testing.assert_array_equal(download(kept), want)
    np.testing.assert_array_equal(download(back), np.tile(want, 2))


@pytest.mark.parametrize("device", DEVICES)
def test_words_hold_two(rng, device):
    backend, x = on(device), numbers(rng)
    words, back = empty(17, np.uint32, backend), empty(32, np.float32, backend)
    launch(words_kernel, 1, 16, upload(x, backend), words, back)
    want = x.astype(bfloat16)
    got = download(words)
    np.testing.assert_array_equal(
        got[:16].view(bfloat16).astype(np.float32), want.astype(np.float32)
    )
    np.testing.assert_array_equal(download(back), want.astype(np.float32))
    assert (got[16:].view(bfloat16) == 1).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [16, 8])
def test_products(rng, device, shape):
    backend, (_, a, b, c, d, e) = on(device), mma_arguments(rng, shape)
    # no float16 would hold them
    a, b = (1e20 * x.astype(bfloat16).astype(np.float32) for x in (a, 1e-20 * b))
    a, b = (x.astype(bfloat16).astype(np.float32) for x in (a, b))
    given = [upload(x, backend) for x in (a, b, c, d, e)]
    launch(in_bfloat16(mma_kernel, bfloat16), 1, 32, shape, *given)
    want = c + a.astype(np.float64) @ b.astype(np.float64)
    for got in given[3:]:
        np.testing.assert_allclose(download(got), want, rtol=1e-5, atol=1e-5)


@cuda.jit
def sum_kernel(x, y):
    y[0] = x[0] + x[1]
    y[1] = x[1] * float32(3)


@cuda.jit
def half_words_kernel(x, y):
    store_word(y, 0, pack_half2(float32(x[0]), float32(x[1])))


def test_arithmetic_is_float32s():
    backend = on("emulator")
    x, y = upload(np.array([1, 2**-9], bfloat16), backend), empty(2, np.float32, backend)
    launch(sum_kernel, 1, 1, x, y)
    np.testing.assert_array_equal(download(y), np.float32([1 + 2**-9, 3 * 2**-9]))
    types = tuple(type_of_word(word_of(a)) for a in (x, y))
    (text,) = compile_for(sum_kernel, types, CAPABILITIES[-1:]).values()
    assert "add.f32" in text and ".f64" not in text and ".f16" not in text


def test_a_kernel_of_float16_that_is_given_bfloat16_is_an_error():
    x, y = (empty(2, bfloat16, get_ptx_device()) for _ in range(2))
    with pytest.raises(
        PtxError, match="half_words_kernel takes bfloat16 for float16: cvt.rn.f16x2.f32"
    ):
        launch(half_words_kernel, 1, 1, x, y)
    launch(in_bfloat16(half_words_kernel, x.dtype), 1, 1, x, y)


def test_counterparts_have_names_and_are_found_by_them():
    kernel = next(iter(hopper.KERNELS.values()))
    assert in_bfloat16(kernel, np.dtype(np.float16)) is in_bfloat16(kernel, np.float32) is kernel
    made = in_bfloat16(kernel, bfloat16)
    assert made is in_bfloat16(kernel, np.dtype(bfloat16)) is not kernel
    assert made.py_func.__name__ == kernel.py_func.__name__ + "_bf16" and required(
        made
    ) == required(kernel)
    assert made.targetoptions["launch_bounds"] == kernel.targetoptions["launch_bounds"]
    assert find_kernel(Key(made.py_func.__module__, made.py_func.__name__, ())) is made
    assert find_kernel(Key(kernel.py_func.__module__, kernel.py_func.__name__, ())) is kernel
    # which names wgmma
    assert made.py_func.__globals__["consume"] is not kernel.py_func.__globals__["consume"]


def test_tensor_maps_know_it():
    driver = pytest.importorskip("cuda.bindings.driver")
    assert hasattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES['bfloat16']}")
