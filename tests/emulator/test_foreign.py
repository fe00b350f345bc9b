"""Kernels that know nothing of this project run in the emulator as they are: plain Numba, in the
manner of its documentation. What cannot run is refused by name and line. battery.py has each
construct by itself, and numdiff/lessons/solutions the puzzles.
"""

import functools
import math

import numba
import numpy as np
import pytest
from numba import cuda, float32, int32
from numba.cuda.cg import this_grid
from numba.cuda.random import xoroshiro128p_dtype, xoroshiro128p_uniform_float32

from numdiff import emulator
from numdiff.emulator import EmulatedArray, Unsupported
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


def test_a_grid_stride_loop_over_device_arrays(gpu, rng):
    a, b = rng.random((2, 100))
    d_c = cuda.device_array_like(cuda.to_device(a))
    vector_add[2, 16](cuda.to_device(a), cuda.to_device(b), d_c)
    assert isinstance(d_c, EmulatedArray) and np.array_equal(d_c.copy_to_host(), a + b)
    result = np.zeros(100)
    vector_add.forall(len(a))(a, b, result)
    assert np.array_equal(result, a + b)


@cuda.jit
def increment_2d(x):
    i, j = cuda.grid(2)
    if i < x.shape[0] and j < x.shape[1]:
        x[i, j] += 1


def test_a_numpy_array_is_changed_in_place(gpu):
    x = np.zeros((5, 7), np.int32)
    increment_2d[(2, 2), (4, 4)](x)
    part = np.zeros((6, 6), np.float64)
    increment_2d[(1, 1), (8, 8)](part[::2, 1:4])  # a view with gaps
    assert (x == 1).all() and (part[::2, 1:4] == 1).all() and part.sum() == 9


def test_cuda_reduce(gpu, rng):
    @cuda.reduce
    def largest(a, b):
        return a if a > b else b

    x, result = rng.standard_normal(50).astype(np.float32), cuda.device_array(1, np.float32)
    assert largest(x, init=-9) == x.max() and largest(x, init=-9).dtype == np.float32
    largest(cuda.to_device(x), res=result, init=-9)
    assert result[0] == x.max()


def test_views_of_device_arrays_share_their_memory(gpu, rng):
    a = rng.random((6, 8))
    d = cuda.to_device(a)
    vector_add[1, 8](d[0], d[1], d[2])
    vector_add[1, 8](d[:, 0], d[:, 1], d.T[2])
    a[2] = a[0] + a[1]
    a[:, 2] = a[:, 0] + a[:, 1]
    d[5, 7], d[3, :2] = 9, 5
    a[5, 7], a[3, :2] = 9, 5
    assert np.array_equal(d.copy_to_host(), a) and d[4:].shape == (2, 8)
    out = cuda.device_array((3, 4))
    vector_add[1, 8](d[0, :4], d[1, :4], out[1])
    vector_add[1, 8](cuda.In(a[0, ::2]), a[::-1][5, ::2], cuda.Out(a[3, :4]))
    assert np.array_equal(out[1].copy_to_host(), a[0, :4] + a[1, :4]) and np.array_equal(
        a[3, :4], 2 * a[0, ::2]
    )


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


def test_kernels_with_signatures_are_made_inside_the_context(gpu, rng):
    @cuda.jit("float32(float32, float32, float32)", device=True)
    def multiply_add(a, b, c):
        return a * b + c

    @cuda.jit("void(float32[:], float32[:], float32)")
    def saxpy(x, y, a):
        i = cuda.grid(1)
        if i < x.shape[0]:
            y[i] = multiply_add(a, x[i], y[i])

    @cuda.jit(numba.void(int32[:]), fastmath=True)
    def positions(out):
        i = cuda.threadIdx.x + cuda.blockIdx.x * cuda.blockDim.x
        out[i] = i

    x, y = np.ones(10, np.float32), np.ones(10, np.float32)
    saxpy[1, 32](x, y, np.float32(2))
    out = np.zeros(8, np.int32)
    positions[2, 4](out)
    assert (y == 3).all() and (out == np.arange(8)).all()


def test_a_signature_casts_numbers_and_refuses_other_arrays(gpu):
    @cuda.jit("void(float32[:], float32)")
    def add(x, a):
        i = cuda.grid(1)
        x[i] = x[i] + a

    x = np.ones(4, np.float32)
    add[1, 4](x, 1e-9 + 0.1)
    assert np.array_equal(x, np.full(4, np.float32(1) + np.float32(1e-9 + 0.1)))
    with pytest.raises(
        emulator.LaunchRefused,
        match=r"signature has .array\(float32, 1d, A\), float32.*float64\[:\]",
    ):
        add[1, 4](np.ones(4), 0.1)


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
def two_rows(x, y):
    a = cuda.shared.array((2, 8), float32)
    row, flat = a[1], a.reshape(16)  # views that are older than the next array
    b = cuda.shared.array((64, 8), float32)
    t = cuda.threadIdx.x
    row[t], flat[t], b[t, 7 - t] = x[t], x[t] + float32(1), x[t]
    cuda.syncthreads()
    y[t] = a[1, 7 - t] + a[0, t] + b[7 - t, t]


def test_views_of_shared_arrays(gpu):
    x, y = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
    two_rows[1, 8](x, y)
    assert np.array_equal(y, 2 * x[::-1] + x + 1)


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


@cuda.jit
def extremes_of_tuples(x):
    x[0], x[1] = min((3, 1, 2)), max((1.5, 2.5))


def test_min_and_max_of_a_tuple(gpu):
    x = np.zeros(2)
    extremes_of_tuples[1, 1](x)
    assert x.tolist() == [1, 2.5]


@cuda.jit
def extremes_without_sign(x):
    cuda.atomic.max(x, 0, -3)
    cuda.atomic.min(x, 1, -1)
    cuda.atomic.cas(x, 2, -1, 7)


def test_an_atomic_takes_its_value_in_the_arrays_type(gpu):
    x = np.array([5, 5, 2**32 - 1], np.uint32)
    extremes_without_sign[1, 1](x)
    assert x.tolist() == [2**32 - 3, 5, 7]


def test_closures_and_loops_of_all_kinds(gpu):
    def make(scale, offsets):
        @cuda.jit
        def kernel(x, flags):
            i = cuda.grid(1)
            n = 0
            while True:
                n += 1
                if n > i:
                    break
            for offset in offsets:
                x[i] += scale * offset
            for a, b in zip((1, 2), (3, 4)):  # noqa: B905
                x[i] += a * b
            assert n == i + 1
            flags[i] = x[i] > 2 and not (i % 2 == 0) or i == 0
            if flags[i]:
                x[i] = -x[i]
            else:
                pass

        return kernel

    x, flags = np.zeros(4, np.int64), np.zeros(4, np.bool_)
    make(2, (1, 2, 3))[1, 4](x, flags)
    assert x.tolist() == [-23, -23, 23, -23] and flags.tolist() == [True, True, False, True]


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
