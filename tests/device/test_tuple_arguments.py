"""What belongs together travels to a kernel as a NamedTuple: on every device, under a name that a
cache can keep."""

from typing import NamedTuple

import numpy as np
import pytest

from numdiff.device import DeviceArray, cuda, download, empty, launch, upload
from numdiff.device.array import leaves
from numdiff.device.compiler import compile_kernel, key_of, type_of_word
from numdiff.device.emulator import get_emulator
from numdiff.device.gpu import Gpu
from numdiff.device.ptx import get_ptx_device
from numdiff.emulator import Emulator, KernelFault
from tests.kernels.ptx_equal import normalised


class Two(NamedTuple):
    first: object
    second: object


class NamedShape(NamedTuple):
    rows: int
    factor: float


@cuda.jit
def add_flat(x, x_2, y, rows, factor):
    i = cuda.grid(1)
    if i < rows:
        y[i] = x[i] + factor * x_2[i]


@cuda.jit(device=True, forceinline=True)
def total(both, shape, i):
    return both.first[i] + shape.factor * both.second[i]


@cuda.jit
def add(both, y, shape):
    i = cuda.grid(1)
    if i < shape.rows:
        y[i] = total(both, shape, i)


@cuda.jit
def add_plain(given, shape):
    (x, x_2), y = given
    rows, factor = shape
    i = cuda.grid(1)
    if i < rows:
        y[i] = x[i] + factor * x_2[i]


def arguments(device, n=8):
    x, x_2 = (upload(np.arange(k, k + n, dtype=np.float32), device) for k in (1, 20))
    return Two(x, x_2), empty(n, np.float32, device), NamedShape(n, 2)


def test_the_emulator_runs_a_kernel_over_tuples():
    emulator = get_emulator()
    both, y, shape = arguments(emulator)
    for kernel, given in (
        (add, (both, y, NamedShape(8, 2.0))),
        (add_plain, ((tuple(both), y), (8, 2.0))),
    ):
        launch(kernel, 1, 32, *given)
        np.testing.assert_array_equal(download(y), 41 + 3 * np.arange(8))
    with pytest.raises(KernelFault, match=r"reads first\[8\]"):  # an element is called by its name
        launch(add, 1, 32, both, empty(9, np.float32, emulator), NamedShape(9, 2.0))


def test_plain_numpy_arrays_too():
    y, x = np.zeros(8, np.float64), np.ones(8, np.float64)
    # float64 is meant: there is an array of it
    Emulator().launch(add, 1, 32, Two(x, x), y, NamedShape(8, 2.0))
    np.testing.assert_array_equal(y, 3)


def test_the_same_code_as_for_arguments_one_by_one():
    device = get_ptx_device()
    both, y, _ = arguments(device)
    texts = []
    for kernel, given in (
        (add_plain, ((tuple(both), y), (8, 2.0))),
        (add_flat, (*both, y, 8, 2.0)),
    ):
        launch(kernel, 1, 32, *given)
        texts.append([normalised(device.texts[key]) for key in device.launched[-2:]])
    assert texts[0] == texts[1] and "fma" in texts[0][0]


def test_a_word_for_a_tuple_names_its_class():
    both, y, _ = arguments(get_ptx_device())
    key = key_of(add, (both, y, NamedShape(8, 2.0)))
    assert key.types == (
        f"{__name__}.Two(float32[1],float32[1])",
        "float32[1]",
        f"{__name__}.NamedShape(int32,float32)",
    )
    assert type_of_word(key.types[2]).instance_class is NamedShape
    nested = key_of(add_plain, ((tuple(both), y), (8, 2.0))).types
    assert nested == ("((float32[1],float32[1]),float32[1])", "(int32,float32)")
    assert (
        str(type_of_word(nested[0]))
        == "Tuple(UniTuple(array(float32, 1d, C) x 2), array(float32, 1d, C))"
    )
    assert len(compile_kernel(add, key.types, (9, 0)).cubin) > 1000


def test_a_gpu_is_given_the_elements_one_by_one():
    gpu = Gpu.__new__(Gpu)
    gpu._lay_out = lambda array: (("float32", 1), (array.offset,))
    x, y = (DeviceArray(gpu, (4,), np.float32, None, offset) for offset in (16, 32))
    taken = {}
    for name, given in (
        ("named", (Two(x, y), NamedShape(4, 2.0))),
        ("plain", ((x, y), (4, 2.0))),
        ("flat", (x, y, 4, 2.0)),
    ):
        signature, flat = [], []
        gpu._take(given, signature, flat)
        taken[name] = tuple(signature)
        assert [getattr(value, "value", value) for value in flat] == [16, 32, 4, 2.0]
    assert len(set(taken.values())) == 3  # separate kernels
    assert list(leaves((Two(x, y), NamedShape(4, 2.0)))) == [x, y, 4, 2.0]
