"""One text, many kernels: each with its values, on every engine."""

import re
import types
from typing import NamedTuple

import numpy as np
import pytest

from numdiff.device import cuda, float32, get_backend, int32, launch, upload
from numdiff.device.compiler import compile_kernel, kernels_by_name, key_of, type_of_word, word_of
from numdiff.device.kernel_cache import KernelCache
from numdiff.device.planned import CARDS, Planned
from numdiff.device.ptx import compile_to_ptx, get_ptx_device
from numdiff.device.requires import requires, supports
from numdiff.device.specialise import Constant, Field, Variants, specialise

COUNT = Constant()  # numbers that a thread adds up
NEGATIVE = Constant()
LAST = Constant(lambda COUNT: COUNT - 1)
TWICE = 2  # no constant of this kind: a number as any other


class Scale(NamedTuple):
    factor: float
    x: object  # an array, next to a number
    n: int


@cuda.jit(device=True, forceinline=True)
def shared_by_all(x):
    return x + x


@cuda.jit(device=True, forceinline=True)
def signed(x):
    return -x if NEGATIVE else x


@cuda.jit(device=True, forceinline=True)
def total_of(x, first):
    kept = cuda.local.array(COUNT, "float32")
    for k in range(COUNT):
        kept[k] = signed(x[first + k])
    total = float32(0)
    for k in range(COUNT):
        total += shared_by_all(kept[k])
    return total + kept[LAST]


@requires("9.0a")
def add_up(y, scale):
    i = int32(cuda.threadIdx.x)
    if i < scale.n:
        y[i] = scale.factor * total_of(scale.x, i * COUNT)


KERNELS = {
    (count, negative): specialise(add_up, COUNT=count, NEGATIVE=negative)
    for count in (2, 3)
    for negative in (False, True)
}


def run(backend, count, negative, n=5):
    x = np.arange(n * count, dtype=np.float32)
    y = upload(np.zeros(n, np.float32), backend)
    launch(KERNELS[count, negative], 1, 32, y, Scale(0.5, upload(x, backend), n))
    groups = x.reshape(n, count)
    return y, np.float32(0.5) * (-1 if negative else 1) * (2 * groups.sum(1) + groups[:, -1])


@pytest.mark.parametrize(("count", "negative"), KERNELS)
def test_in_the_emulator(count, negative):
    y, expected = run(get_backend("emulator"), count, negative)
    np.testing.assert_array_equal(y.backend.download(y), expected)


def test_to_the_compilers_each_is_a_kernel_of_its_own():
    """…with a separate name in every key, and the machine code of a text in which the values are
    written out."""
    assert {k.py_func.__name__ for k in KERNELS.values()} == {
        "add_up_2_False",
        "add_up_3_False",
        "add_up_2_True",
        "add_up_3_True",
    }
    device = get_ptx_device()
    words = tuple(
        map(
            word_of,
            (
                upload(np.zeros(1, np.float32), device),
                Scale(0.5, upload(np.zeros(1, np.float32), device), 1),
            ),
        )
    )
    kinds = tuple(map(type_of_word, words))
    texts = {key: compile_to_ptx(kernel, kinds, (9, 0, "a")) for key, kernel in KERNELS.items()}
    adds = {
        key: len(re.findall(r"add\.rn\.f32|add\.f32|fma\.rn\.f32", text))
        for key, text in texts.items()
    }
    assert (
        adds[3, False] > adds[2, False]
        and len({re.sub(r"\w*add_up\w*", "", t) for t in texts.values()}) == 4
    )
    # as the size of `kept` is a constant
    assert not any(".local" in text for text in texts.values())

    note, files = Planned(next(card for card in CARDS if card.capability == (9, 0))), set()
    for kernel in KERNELS.values():
        x = upload(np.zeros(6, np.float32), note)
        files.add(KernelCache((9, 0)).file_name(key_of(kernel, (x, Scale(0.5, x, 2)))))
    assert len(files) == 4
    found = kernels_by_name(__name__)
    assert all(found[__name__, k.py_func.__name__] is k for k in KERNELS.values())
    assert len(compile_kernel(KERNELS[2, True], words, (9, 0)).cubin) > 256


def test_what_knows_no_constant_is_not_copied():
    copies = {kernel.py_func.__globals__["total_of"] for kernel in KERNELS.values()}
    assert len(copies) == 4 and total_of not in copies
    assert all(copy.py_func.__globals__["shared_by_all"] is shared_by_all for copy in copies)
    signs = {copy.py_func.__globals__["signed"] for copy in copies}
    assert len(signs) == 2  # one for each sign, whatever COUNT is
    # the text itself stays as it was
    assert isinstance(COUNT, Constant) and add_up.__globals__["COUNT"] is COUNT


def test_each_requires_what_the_text_does():
    assert all(
        supports((9, 0), kernel) and not supports((10, 0), kernel) for kernel in KERNELS.values()
    )


def test_the_same_values_give_the_same_kernel_and_a_name_has_one():
    assert specialise(add_up, COUNT=2, NEGATIVE=True) is KERNELS[2, True]
    made = specialise(add_up, name="again", COUNT=2, NEGATIVE=True)
    reloaded = types.FunctionType(add_up.__code__, add_up.__globals__)  # as after importlib.reload
    assert specialise(reloaded, name="again", COUNT=3, NEGATIVE=True) is not made
    with pytest.raises(ValueError, match="add_up_2_True exists with other constants"):
        specialise(add_up, name="add_up_2_True", COUNT=4, NEGATIVE=True)
    with pytest.raises(TypeError, match="needs a value for NEGATIVE"):
        specialise(add_up, COUNT=2)
    with pytest.raises(TypeError, match="add_up has no constant TWICE"):
        specialise(add_up, COUNT=2, NEGATIVE=True, TWICE=3)


def test_options_and_modules():
    @cuda.jit(launch_bounds=(128, 1))
    def text(x):
        x[0] = COUNT

    made = specialise(text, name="text_with_bounds", COUNT=7)
    assert made.targetoptions["launch_bounds"] == (128, 1) and made.py_func.__module__ == __name__
    other = specialise(text, module=word_of.__module__, launch_bounds=(256, 1), COUNT=7)
    assert (
        other.targetoptions["launch_bounds"] == (256, 1)
        and other.py_func.__module__ == word_of.__module__
    )


def test_variants_are_made_when_they_are_asked_for():
    made = []

    def make(key):
        made.append(key)
        return specialise(add_up, name=f"variant_{key}", COUNT=key, NEGATIVE=False)

    kernels = Variants((2, 3), make)
    assert set(kernels) == {2, 3} and 3 in kernels and made == []
    assert kernels[3] is kernels[3] is kernels.get(3) and made == [3] and kernels.get(4) is None
    with pytest.raises(KeyError):
        kernels[4]
    assert next(iter(kernels.values())) is kernels[2] and dict(kernels.items()) == {
        2: kernels[2],
        3: kernels[3],
    }
    assert made == [3, 2]


# Records of device functions ----------------------------------------------------------------------

FACTOR, WAY = Constant(), Constant()
change, twice = Field("WAY", "change"), Field("WAY", "twice")


@cuda.jit(device=True)
def scaled(x):
    return x * int32(FACTOR)


@cuda.jit(device=True)
def shifted(x):
    return x + int32(FACTOR)


class Way(NamedTuple):
    change: object
    twice: bool = False


def change_all(y):
    for i in range(y.size):
        y[i] = change(y[i])
        if twice:
            y[i] = change(y[i])


def test_a_record_gives_the_text_its_device_functions():
    def change_with(way, name):
        kernel = specialise(change_all, name=name, FACTOR=5, WAY=way)
        y = upload(np.arange(3, dtype=np.int32), get_backend("emulator"))
        launch(kernel, 1, 1, y)
        return y.backend.download(y).tolist()

    assert change_with(Way(scaled), "change_scaled") == [0, 5, 10]
    assert change_with(Way(shifted), "change_shifted") == [5, 6, 7]
    assert change_with(Way(shifted, True), "change_shifted_twice") == [10, 11, 12]
    with pytest.raises(ValueError, match="other constants"):
        specialise(change_all, name="change_scaled", FACTOR=5, WAY=Way(shifted))
    with pytest.raises(TypeError, match="needs a value for WAY"):
        specialise(change_all, name="unset")
