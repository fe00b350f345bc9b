"""Kernels that know nothing of this project run in the emulator as they are: plain Numba, in the
manner of its documentation. What cannot run is refused by name and line. battery.py has the small
kernels, and tests/lessons the solutions of puzzles.
"""

import functools
import math

import numba
import numpy as np
import pytest
from numba import cuda, float32
from numba.cuda.cg import this_grid
from numba.cuda.random import xoroshiro128p_dtype, xoroshiro128p_uniform_float32

from numdiff import emulator
from numdiff.emulator import Unsupported
from tests.conftest import exhaustively
from tests.emulator.planting import marked

TPB = 8
part_of_hypot = functools.partial(math.hypot, 3)


@pytest.fixture(params=["shuffled", "unchecked", *exhaustively("forward", "reversed")])
def gpu(request):
    unchecked = request.param == "unchecked"
    with emulator.device(
        order="forward" if unchecked else request.param, checks=not unchecked
    ) as machine:
        yield machine


@pytest.fixture
def rng():
    return np.random.default_rng(0)


# Numba's documentation ----------------------------------------------------------------------------


@cuda.jit
def vector_add(a, b, c):
    start, stride = cuda.grid(1), cuda.gridsize(1)
    for i in range(start, c.size, stride):
        c[i] = a[i] + b[i]


def test_cuda_reduce(gpu, rng):
    @cuda.reduce
    def largest(a, b):
        return a if a > b else b

    x, result = rng.standard_normal(50).astype(np.float32), cuda.device_array(1, np.float32)
    assert largest(x, init=-9) == x.max() and largest(x, init=-9).dtype == np.float32
    largest(cuda.to_device(x), res=result, init=-9)
    assert result[0] == x.max()


@cuda.jit
def shift(x, y):
    i = cuda.grid(1)
    if i + 1 < x.size:
        y[i] = x[i + 1]  # shift


@pytest.mark.parametrize(
    "arguments", [lambda x: (x, x), lambda x: (x[1:], x[:-1])], ids=["the same", "views"]
)
def test_a_race_between_two_names_of_one_array_is_found(arguments):
    with emulator.device(), pytest.raises(emulator.KernelFault) as caught:
        shift[2, 8](*arguments(np.arange(16.0)))
    assert {(f.kind, f.line) for f in caught.value.faults} == {("race", marked(__file__, "shift"))}


def test_streams_events_and_the_forms_of_memory(gpu):
    stream = cuda.stream()
    start, end = cuda.event(), cuda.event(timing=True)
    host = cuda.pinned_array(50, np.float32)
    host[:] = 1
    start.record(stream)
    with stream.auto_synchronize():
        x = cuda.to_device(host, stream=stream)
        y = cuda.device_array(50, np.float32, stream=stream)
        vector_add[1, 64, stream](x, x, y)
        y.copy_to_host(host, stream=stream)
    end.record(stream)
    end.synchronize()
    cuda.synchronize()
    assert (host == 2).all() and cuda.event_elapsed_time(start, end) >= 0
    mapped, managed = (
        cuda.mapped_array(50, dtype=np.float32),
        cuda.managed_array((5, 10), dtype=np.float32),
    )
    mapped[:], managed[:] = 1, 0
    vector_add[1, 64](mapped, mapped, managed.reshape(-1))
    with cuda.pinned(host):
        pass
    with cuda.defer_cleanup():
        assert (managed == 2).all()
    other = cuda.device_array((50,), np.float32)
    other.copy_to_device(y)
    other[:10] = 0
    assert other.copy_to_host().sum() == 80 and other[10:].shape == (40,)
    assert other.reshape(5, 10).copy_to_host()[0].sum() == 0


@cuda.jit(device=True)
def polar(z):
    return math.hypot(z[0], z[1]), math.atan2(z[1], z[0])


@cuda.jit(device=True, inline=True)
def half_difference(a, b):
    return (b - a) / 2


@cuda.jit
def polar_kernel(points, out):
    i = cuda.grid(1)
    if i < len(points):
        radius, angle = polar(points[i])
        out[i, 0], out[i, 1] = radius, half_difference(0.0, angle)


def test_device_functions(gpu, rng):
    points, out = rng.random((9, 2)), np.zeros((9, 2))
    polar_kernel[3, 4](points, out)
    assert np.allclose(
        out, np.stack([np.hypot(*points.T), np.arctan2(points[:, 1], points[:, 0]) / 2], 1)
    )


def test_device_arrays_keep_their_order(gpu):
    x = np.arange(6.0).reshape(2, 3, order="F")
    d = cuda.to_device(x)
    assert d.is_f_contiguous() and d.strides == x.strides and np.array_equal(d.copy_to_host(), x)
    like, other = cuda.device_array_like(d), cuda.device_array((2, 3), np.float32, order="F")
    assert like.strides == d.strides and other.strides == (4, 8)
    assert [part.shape for part in cuda.to_device(np.zeros(5)).split(2)] == [(2,), (2,), (1,)]
    for wrong in (np.zeros((3, 2)), np.zeros((2, 3), np.float32)):
        with pytest.raises(ValueError, match="a copy needs the same"):
            d.copy_to_host(wrong)
    with cuda.gpus[0] as gpu_0:
        assert gpu_0.name


@cuda.jit
def grid_group_by_name(a, b):
    group, i = this_grid(), cuda.grid(1)
    a[i] = i
    group.sync()
    b[i] = a[a.size - 1 - i]


def test_the_grid_group_imported_by_name(gpu):
    a, b = np.zeros((2, 8))
    grid_group_by_name[2, 4](a, b)
    assert b.tolist() == list(range(8))[::-1]


@cuda.jit
def heat(buf, timesteps, k):
    i = cuda.grid(1)
    if i >= len(buf[0]):
        return
    grid = cuda.cg.this_grid()
    for step in range(timesteps):
        data, next_data = (buf[0], buf[1]) if step % 2 == 0 else (buf[1], buf[0])
        current = data[i]
        if i == 0:
            next_temp = current + k * (data[i + 1] - 2 * current)
        elif i == len(data) - 1:
            next_temp = current + k * (data[i - 1] - 2 * current)
        else:
            next_temp = current + k * (data[i - 1] - 2 * current + data[i + 1])
        next_data[i] = next_temp
        grid.sync()


def test_heat_with_a_grid_wide_barrier(gpu):
    data = np.zeros(21)
    data[10] = 1000
    buf = (cuda.to_device(data), cuda.to_device(np.zeros(21)))
    heat[6, 4](buf, 8, 0.25)
    want = data.copy()
    for _ in range(8):
        padded = np.pad(want, 1)
        want = want + 0.25 * (padded[:-2] - 2 * want + padded[2:])
    assert np.allclose(buf[0].copy_to_host(), want)


@cuda.jit
def monte_carlo(states, iterations, out):
    thread = cuda.grid(1)
    inside = 0
    for _ in range(iterations):
        x = xoroshiro128p_uniform_float32(states, thread)
        y = numba.cuda.random.xoroshiro128p_uniform_float32(states, thread)
        if x**2 + y**2 <= 1.0:
            inside += 1
    out[thread] = 4.0 * inside / iterations


def test_monte_carlo_pi_with_numbas_generator(gpu, rng):
    # create_xoroshiro128p_states compiles for seconds
    seeds = rng.integers(1, 2**63, (32, 2), np.uint64)
    states = cuda.to_device(seeds.view(xoroshiro128p_dtype)[:, 0])
    out = np.zeros(32, np.float32)
    with emulator.device(float64=True, checks=bool(gpu.checks), order=gpu.order):
        monte_carlo[2, 16](states, 20, out)
    assert abs(out.mean() - math.pi) < 0.3 and len(set(out)) > 5


pixel = np.dtype([("r", np.float32), ("g", np.float32), ("n", np.int32)], align=True)


@cuda.jit
def brighten(image):
    i = cuda.grid(1)
    if i < image.size:
        image[i].r *= float32(2)
        image[i]["g"] = image[i].r + float32(1)
        image[i].n += i


numba_pixel = numba.from_dtype(pixel)


@cuda.jit
def one_record(p, out):
    tile = cuda.shared.array(2, numba_pixel)
    tile[0].r = p.r
    out[0] = tile[0].r + p["g"]
    p.n = 7


def test_a_record_as_an_argument_and_as_a_type(gpu):
    image, out = np.zeros(2, pixel), np.zeros(1, np.float32)
    image["r"], image["g"] = 3, 4
    one_record[1, 1](image[1], out)
    assert out[0] == 7 and image["n"].tolist() == [0, 7]


def test_record_arrays(gpu):
    image = np.zeros(5, pixel)
    image["r"] = np.arange(5)
    brighten[1, 8](image)
    assert (image["r"] == 2 * np.arange(5)).all() and (image["g"] == 2 * np.arange(5) + 1).all()
    assert (image["n"] == np.arange(5)).all()


@cuda.jit(device=True)
def mandel(x, y, iterations):
    c = complex(x, y)
    z = 0.0j
    for i in range(iterations):
        z = z * z + c
        if (z.real * z.real + z.imag * z.imag) >= 4:
            return i
    return iterations


@cuda.jit
def mandelbrot(image, iterations):
    startX, startY = cuda.grid(2)
    gridX = cuda.gridDim.x * cuda.blockDim.x
    gridY = cuda.gridDim.y * cuda.blockDim.y
    for x in range(startX, image.shape[1], gridX):
        real = -2.0 + x * 3.0 / image.shape[1]
        for y in range(startY, image.shape[0], gridY):
            image[y, x] = mandel(real, -1.0 + y * 2.0 / image.shape[0], iterations)


def test_mandelbrot_in_complex_numbers(gpu):
    image = np.zeros((8, 12), np.uint8)
    with emulator.device(float64=True):
        mandelbrot[(2, 1), (4, 4)](image, 20)
    want = [
        [mandel.py_func(-2.0 + x * 3.0 / 12, -1.0 + y * 2.0 / 8, 20) for x in range(12)]
        for y in range(8)
    ]
    assert (image == want).all()


@cuda.jit
def extremes_of_tuples(x):
    x[0], x[1] = min((3, 1, 2)), max((1.5, 2.5))


def test_min_and_max_of_a_tuple(gpu):
    x = np.zeros(2)
    extremes_of_tuples[1, 1](x)
    assert x.tolist() == [1, 2.5]


def test_a_kernel_from_a_page_of_text(gpu, tmp_path):
    """Its code names a file in which other text stands at its lines, as where examples of a page
    are run."""
    page = tmp_path / "page.md"
    page.write_text("# (A page\n\n" + "words (\n" * 9)
    names = {"cuda": cuda, "float32": float32}
    exec(
        compile("\n\n@cuda.jit\ndef k(x):\n    x[cuda.grid(1)] += float32(1)\n", str(page), "exec"),
        names,
    )
    x = np.zeros(4, np.float32)
    names["k"][1, 4](x)
    assert (x == 1).all()


# what is refused, by name and line ----------------------------------------------------------------


@cuda.jit
def reads_the_clock(x):
    x[0] = cuda.clock64()  # clock


@cuda.jit
def prints(x):
    x[0] = cuda.libdevice.bessel(x[0])  # libdevice


@cuda.jit
def unknown_atomic(x):
    cuda.atomic.mul(x, 0, 2)  # atomic


@pytest.mark.parametrize(
    "kernel, feature, mark",
    [
        (reads_the_clock, "cuda.clock64", "clock"),
        (prints, "libdevice.bessel", "libdevice"),
        (unknown_atomic, "cuda.atomic.mul", "atomic"),
    ],
)
def test_what_is_not_known_is_refused_by_name_and_line(gpu, kernel, feature, mark):
    with pytest.raises(Unsupported, match=feature) as caught:
        kernel[1, 1](np.zeros(1))
    assert f"{__file__}:{marked(__file__, mark)}" in str(caught.value)


@cuda.jit
def shape_of_an_argument(x, n):
    tile = cuda.shared.array(n, float32)  # argument's shape
    tile[0] = x[0]


@cuda.jit
def shape_of_the_block(x):
    tile = cuda.local.array((4, cuda.blockDim.x), float32)  # block's shape
    tile[0, 0] = x[0]


@cuda.jit
def computed_shape(x):
    tile = cuda.shared.array((TPB, TPB + 1), float32)  # computed shape
    tile[0, 0] = x[0]


@cuda.jit
def draws_on_the_host(x):
    x[0] = np.random.rand()  # np.random


@cuda.jit
def takes_a_partial(x):
    x[0] = part_of_hypot(x[0])  # partial


@cuda.jit
def small_atomic(x):
    cuda.atomic.add(x.view(np.uint8), 0, 1)  # uint8


@pytest.mark.parametrize(
    "kernel, more, text, mark",
    [
        (
            shape_of_an_argument,
            (4,),
            "Numba does not compile n as the shape of a shared array",
            "argument's shape",
        ),
        (
            shape_of_the_block,
            (),
            "compile \\(4, cuda.blockDim.x\\) as the shape of a local array",
            "block's shape",
        ),
        (computed_shape, (), "does not compile \\(TPB, TPB \\+ 1\\)", "computed shape"),
        (draws_on_the_host, (), "np.random in a kernel: use numba.cuda.random", "np.random"),
        (takes_a_partial, (), "functools.partial, which part_of_hypot is", "partial"),
        (small_atomic, (), "no cuda.atomic.add of uint8: its types are int32, ", "uint8"),
    ],
)
def test_what_numba_does_not_compile_is_refused_by_name_and_line(gpu, kernel, more, text, mark):
    with pytest.raises(Unsupported, match=text) as caught:
        kernel[1, 1](np.zeros(4, np.float32), *more)
    assert f"{__file__}:{marked(__file__, mark)}" in str(caught.value)


@cuda.jit
def sums_an_array(x):
    x[0] = x.cumsum()[1]  # method


@cuda.jit
def adds_to_an_array(x):
    x[0] = (x + 1)[0]  # whole array


@cuda.jit
def launches_a_kernel(x):
    sums_an_array[1, 1](x)  # launch


@pytest.mark.parametrize(
    "kernel, text, mark",
    [
        (sums_an_array, "does not know .cumsum of arrays", "method"),
        (adds_to_an_array, "does not know arithmetic on whole arrays", "whole array"),
        (launches_a_kernel, "does not know kernels that launch kernels", "launch"),
    ],
)
def test_what_python_would_name_by_the_emulators_classes_is_named_by_the_users(kernel, text, mark):
    with emulator.device(), pytest.raises(emulator.KernelFault, match=text) as caught:
        kernel[1, 1](np.zeros(4, np.float32))
    assert caught.value.faults[0].line == marked(__file__, mark)


@cuda.jit
def two_arguments(x, n):
    x[0] = n


@pytest.mark.parametrize(
    "launch, text",
    [
        (
            lambda: two_arguments[1, 1](np.zeros(1)),
            "two_arguments takes 2 arguments \\(x, n\\), 1 were given",
        ),
        (lambda: two_arguments[1, 1](np.zeros(1), 1, 2), "takes 2 arguments .*, 3 were given"),
        (lambda: two_arguments[1, 1](np.zeros(1), n=1), "give n by place"),
        (lambda: two_arguments[1](np.zeros(1), 1), "two_arguments\\[grid, block\\]"),
        (
            lambda: two_arguments[100 / 64, 64](np.zeros(1), 1),
            "grid 1.5625 must be whole numbers: divide with //",
        ),
        (lambda: two_arguments[1, (8, 2.0)](np.zeros(1), 1), "block .*must be whole numbers"),
        (lambda: two_arguments[1, 1]([0.0], 1), "argument x is of type list"),
        (lambda: two_arguments[1, 1](np.zeros(1), "1"), "argument n is of type str"),
        (lambda: two_arguments[1, 1](np.array([None]), 1), "argument x is an array of type object"),
        (lambda: two_arguments[1, 1](np.zeros(1, ">f4"), 1), "bytes are in another order"),
        (
            lambda: two_arguments[1, 1](np.zeros(1), 1 << 70),
            "argument n is an integer of more than 64 bits",
        ),
        (lambda: polar[1, 1](np.zeros(2)), "polar is a device function"),
        (lambda: cuda.to_device(["a"]), "cuda.to_device takes arrays of numbers or records"),
    ],
)
def test_launches_that_numba_refuses(gpu, launch, text):
    with pytest.raises(emulator.LaunchRefused, match=text):
        launch()


def test_host_functions_that_need_a_gpu_are_refused_by_name(gpu):
    with pytest.raises(Unsupported, match="cuda.open_ipc_array"):
        cuda.open_ipc_array(None, (1,), np.float32)
    with pytest.raises(Unsupported, match="get_current_device().PCI_BUS_ID".replace("()", r"\(\)")):
        cuda.get_current_device().PCI_BUS_ID  # noqa: B018
    assert cuda.get_current_device().compute_capability == (9, 0)


# puzzles ------------------------------------------------------------------------------------------
