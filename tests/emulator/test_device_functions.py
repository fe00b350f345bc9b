"""Device functions, as Numba compiles one for each list of the types that it is called with."""

import numpy as np
import pytest
from numba import cuda, float32, float64, int8, int32, int64, types
from numba.cuda.extending import overload

from numdiff import emulator
from numdiff.emulator import Emulator, Unsupported
from numdiff.emulator.counts import count

SIZE, SHAPE = 8, (2, 4)


@cuda.jit(device=True)
def swapped(x, n):
    tile = cuda.shared.array(n, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    cuda.syncthreads()
    return tile[n - 1 - t]


@cuda.jit(device=True)
def through(x, n=8):
    return swapped(x, n)


@cuda.jit(device=True)
def in_rows(x, shape):
    tile = cuda.shared.array(shape=shape, dtype=float32)
    t = cuda.threadIdx.x
    tile[t % 2, t // 2] = x[t]
    cuda.syncthreads()
    return tile[1 - t % 2, t // 2]


@cuda.jit(device=True)
def two_rows(x, n):
    tile = cuda.local.array((2, n), float32)
    tile[0, 0], tile[1, n - 1] = x[0], x[1]
    return tile[0, 0] + tile[1, n - 1]


def of_a_literal(x, y):
    y[cuda.threadIdx.x] = swapped(x, 8)


def by_name(x, y):
    y[cuda.threadIdx.x] = swapped(x, n=8)


def of_a_global(x, y):
    y[cuda.threadIdx.x] = swapped(x, SIZE)


def of_a_variable(x, y):
    n = 4 + 4
    y[cuda.threadIdx.x] = swapped(x, n)


def through_another(x, y):
    y[cuda.threadIdx.x] = through(x, 8)


def by_default(x, y):
    y[cuda.threadIdx.x] = through(x)


LITERALS = [of_a_literal, by_name, of_a_global, of_a_variable, through_another, by_default]


@pytest.mark.parametrize("kernel", LITERALS, ids=lambda k: k.__name__)
@pytest.mark.parametrize("checks", [True, False])
def test_the_size_of_a_shared_array_is_an_argument(kernel, checks):
    x, y = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
    Emulator(checks=checks).launch(cuda.jit(kernel), 1, 8, x, y)
    assert y.tolist() == x[::-1].tolist()


def test_the_shape_of_an_array_is_an_argument():
    def kernel(x, y, z):
        value = in_rows(x, (2, 4))
        cuda.syncthreads()
        y[cuda.threadIdx.x] = value + in_rows(x, SHAPE)
        z[cuda.threadIdx.x] = two_rows(x, 3)

    x, y, z = np.arange(8, dtype=np.float32), np.zeros(8, np.float32), np.zeros(8, np.float32)
    for launch in (Emulator().launch, count):
        launch(cuda.jit(kernel), 1, 8, x, y, z)
        assert y.tolist() == (2 * x.reshape(4, 2)[:, ::-1].reshape(-1)).tolist() and z[0] == 1


@cuda.jit(device=True)
def of_type(kind, x):
    tile = cuda.shared.array(1, kind)
    tile[0] = x
    return tile[0]


def test_a_type_is_an_argument():
    def kernel(y):
        y[0], y[1] = of_type(float32, 0.1), of_type(np.int32, 2.9)

    y = np.zeros(2)
    Emulator(float64=True).launch(cuda.jit(kernel), 1, 1, y)
    assert y.tolist() == [np.float32(0.1), 2]


def computed(x, y):
    y[0] = swapped(x, SIZE * 2)


def cast(x, y):
    y[0] = swapped(x, int32(8))


def in_a_loop(x, y):
    for n in range(8, 9):
        y[0] = swapped(x, n)


def length(x, y):
    y[0] = through(x, len(x))


def a_variable(x, y):
    n = 8
    m = n * 2
    tile = cuda.shared.array(m, float32)
    tile[0] = x[0]


@pytest.mark.parametrize(
    "kernel", [computed, cast, in_a_loop, length, a_variable], ids=lambda k: k.__name__
)
def test_a_size_that_numba_does_not_know(kernel):
    with pytest.raises(
        Unsupported, match="Numba does not compile n as the shape of a shared array|m as the shape"
    ):
        Emulator().launch(cuda.jit(kernel), 1, 1, np.ones(8, np.float32), np.ones(8, np.float32))


@cuda.jit(device=True)
def kept(x, n):
    """The first element of a shared array, into which the first thread writes once."""
    tile = cuda.shared.array(2, x.dtype)
    if cuda.threadIdx.x == 0:
        tile[0] = x[0] + n
    cuda.syncthreads()
    return tile


def test_one_shared_array_for_each_list_of_types():
    """Two literals are two types, a number that is computed is a third: PTX of Numba 0.61 to 0.68
    shows it."""

    def kernel(f, i, n, y):
        a, b, c = kept(f, 1), kept(f, 2), kept(f, n[0])
        d, e = kept(i, 1), kept(f, n[1])
        y[0], y[1], y[2], y[3], y[4] = a[0], b[0], c[0], d[0], e[0]

    y = np.zeros(5)
    f, i, n = np.array([1.5], np.float32), np.array([1 << 40]), np.array([3, 4], np.int32)
    Emulator(float64=True).launch(cuda.jit(kernel), 1, 1, f, i, n, y)
    assert y.tolist() == [2.5, 3.5, 5.5, (1 << 40) + 1, 5.5]


# Signatures: what follows was read off what Numba compiles (its PTX, and its device functions' over


def test_of_several_signatures_the_best_one():
    with emulator.device() as gpu:

        @cuda.jit(
            ["void(float32[:], float32)", "void(float64[:], float64)", "void(int32[:], int64)"]
        )
        def halves(x, a):
            x[0] = a / 2

        @cuda.jit(
            ["void(float32, float64[:])", "void(float64, float64[:])", "void(int8, float64[:])"]
        )
        def kept(a, x):
            x[0] = a

        @cuda.jit(["void(float32, float64, float64[:])", "void(float64, float32, float64[:])"])
        def ambiguous(a, b, x):
            x[0] = a

        gpu.float64 = True
        x = np.zeros(1)
        halves[1, 1](x, 0.1)
        assert x[0] == 0.05
        kept[1, 1](0.1, x)
        assert x[0] == 0.1
        kept[1, 1](np.float32(0.1), x)
        assert x[0] == np.float32(0.1)
        with pytest.raises(emulator.LaunchRefused, match="fit .float16, .* equally well"):
            kept[1, 1](np.float16(0.1), x)
        kept[1, 1](np.int8(7), x)
        assert x[0] == 7
        kept[1, 1](1 << 40, x)  # a float64: no int8
        assert x[0] == 1 << 40
        with pytest.raises(emulator.LaunchRefused, match="fit .float64, float64.* equally well"):
            ambiguous[1, 1](0.1, 0.1, x)


def test_integers_with_and_without_signs_under_one_signature():
    """Numba hands the bits to the kernel that it has compiled."""
    with emulator.device():

        @cuda.jit("void(int32[:])")
        def halve(x):
            x[0] >>= 1

        x = np.array([0xFFFFFFFE], np.uint32)
        halve[1, 1](x)
        assert x[0] == 0xFFFFFFFF
        with pytest.raises(emulator.LaunchRefused, match="its signature has"):
            halve[1, 1](np.zeros(1, np.int64))


def test_device_functions_keep_to_their_signatures():
    with emulator.device() as gpu:

        @cuda.jit("float32(float32, int32)", device=True)
        def scaled(x, n=2):
            return x * n

        @cuda.jit([(int8,), (float64,)], device=True)
        def third(x):
            return x / 3

        @cuda.jit("UniTuple(int8, 2)(int64, uint8)", device=True)
        def pair(a, b):
            return a, b

        @cuda.jit("int64(float32[:])", device=True)
        def first(x):
            return x[0]

        @cuda.jit
        def kernel(x, y):
            y[0] = scaled(0.1, 3.7)
            y[1] = scaled(n=int64(1 << 33) + 5, x=x[0])
            y[2] = scaled(0.1)
            y[3] = third(x[0]) * 3
            y[4] = third(int8(3))
            y[5], y[6] = pair(200, 300)
            y[7] = first(x)

        gpu.float64 = True
        x, y = np.array([2.75], np.float32), np.zeros(8)
        kernel[1, 1](x, y)
        assert y.tolist() == [
            np.float32(0.1) * 3,
            2.75 * 5,
            np.float32(0.1) * 2,
            2.75,
            1,
            -56,
            44,
            2,
        ]

        @cuda.jit
        def wrong(x):
            x[0] = first(x[0])

        with pytest.raises(
            Unsupported,
            match=r"first has the signature \(array\(float32, 1d, A\)\), and Numba does "
            r"not compile a call with \(float32\)",
        ):
            wrong[1, 1](x)


@pytest.mark.parametrize("checks", [True, False])
def test_hints_say_what_is_copied(checks):
    @cuda.jit
    def kernel(a, b, c):
        a[0] += 1
        b[0] = a[0]
        c[0] += 1

    a, b, c = np.ones(2), np.ones(2), np.ones(2)
    with emulator.device(checks=checks):
        kernel[1, 1](cuda.In(a), cuda.Out(b), cuda.InOut(c))
    assert a.tolist() == [1, 1] and b[0] == 2 and c.tolist() == [2, 1]


def stub(x, factor=2):
    """What Python sees; a kernel gets one of the overloads."""


@overload(stub, target="cuda")
def floats_only(x, factor=2):
    if isinstance(x, types.Float):

        def scaled(x, factor=2):
            return x * factor

        return scaled


@overload(stub, target="cuda")
def integers_only(x, factor=2):
    if isinstance(x, types.Integer):
        return lambda x, factor=2: -x


def test_overloads_by_type():
    def kernel(x, n, y):
        y[0], y[1], y[2] = stub(x[0]), stub(n[0]), stub(x[0], factor=5)

    y = np.zeros(3)
    Emulator(float64=True).launch(cuda.jit(kernel), 1, 1, np.array([1.5]), np.array([7]), y)
    assert y.tolist() == [3, -7, 7.5]

    def wrong(x):
        x[0] = stub(x)

    with pytest.raises(Unsupported, match=r"no overload of stub takes \(array\(float64, 1d, C\)\)"):
        Emulator().launch(cuda.jit(wrong), 1, 1, y)
