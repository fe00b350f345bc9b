"""Kernels that know nothing of this project run in the emulator as they are: plain Numba, in the
manner of its documentation, and solutions of puzzles like Sasha Rush's GPU-Puzzles. What cannot run
is refused by name and line.
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
TPB_AND_HALO = TPB + 4
WEIGHTS = np.array([0.25, 0.5, 0.25], np.float32)
SHAPE = (TPB, TPB)
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


@cuda.jit
def fast_matmul(A, B, C):
    sA = cuda.shared.array(shape=(TPB, TPB), dtype=float32)
    sB = cuda.shared.array(shape=SHAPE, dtype=numba.float32)
    x, y = cuda.grid(2)
    tx, ty, bpg = cuda.threadIdx.x, cuda.threadIdx.y, cuda.gridDim.x
    tmp = float32(0.0)
    for i in range(bpg):
        sA[ty, tx] = 0
        sB[ty, tx] = 0
        if y < A.shape[0] and (tx + i * TPB) < A.shape[1]:
            sA[ty, tx] = A[y, tx + i * TPB]
        if x < B.shape[1] and (ty + i * TPB) < B.shape[0]:
            sB[ty, tx] = B[ty + i * TPB, x]
        cuda.syncthreads()
        for j in range(TPB):
            tmp += sA[ty, j] * sB[j, tx]
        cuda.syncthreads()
    if y < C.shape[0] and x < C.shape[1]:
        C[y, x] = tmp


def test_matmul_with_shared_tiles(gpu, rng):
    a, b = rng.random((13, 15)).astype(np.float32), rng.random((15, 11)).astype(np.float32)
    c = np.zeros((13, 11), np.float32)
    fast_matmul[(2, 2), (TPB, TPB)](a, b, c)
    assert np.allclose(c, a @ b)


@cuda.jit
def block_sum(data):
    tid, size = cuda.threadIdx.x, len(data)
    if tid < size:
        i = cuda.grid(1)
        shr = cuda.shared.array(64, int32)
        shr[tid] = data[i]
        cuda.syncthreads()
        s = 1
        while s < cuda.blockDim.x:
            if tid % (2 * s) == 0:
                shr[tid] += shr[tid + s]
            s *= 2
            cuda.syncthreads()
        if tid == 0:
            data[tid] = shr[tid]


def test_a_reduction_in_shared_memory(gpu):
    data = cuda.to_device(np.arange(64, dtype=np.int32))
    block_sum[1, 64](data)
    assert data[0] == np.arange(64).sum() and data.copy_to_host()[5] == 5


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
def sequence_of_rows(M):
    col = cuda.grid(1)
    g = cuda.cg.this_grid()
    for row in range(1, M.shape[0]):
        opposite = M.shape[1] - col - 1
        M[row, col] = M[row - 1, opposite] + 1
        g.sync()


def test_rows_that_follow_each_other_through_grid_sync(gpu):
    M = np.zeros((4, 32), np.int32)
    sequence_of_rows[4, 8](M)
    assert (M == np.arange(4)[:, None]).all()


@cuda.jit
def histogram(x, xmin, xmax, out):
    nbins = out.shape[0]
    bin_width = (xmax - xmin) / nbins
    start = cuda.grid(1)
    for i in range(start, x.shape[0], cuda.gridsize(1)):
        bin_number = np.int32((x[i] - np.float32(xmin)) / np.float32(bin_width))
        if 0 <= bin_number < nbins:
            cuda.atomic.add(out, bin_number, 1)


@cuda.jit
def extremes(x, out):
    local = cuda.shared.array(2, numba.float64)
    t = cuda.threadIdx.x
    if t == 0:
        local[0], local[1] = math.inf, -math.inf
    cuda.syncthreads()
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.min(local, 0, x[i])
        cuda.atomic.max(local, 1, x[i])
    cuda.syncthreads()
    if t == 0:
        cuda.atomic.min(out, (0, 0), local[0])
        cuda.atomic.max(out, (0, 1), local[1])


def test_bins_and_extremes_by_atomics(gpu, rng):
    x = rng.standard_normal(60)
    bins = np.zeros(10, np.int32)
    histogram[4, 8](x, np.float32(-4), np.float32(4), bins)
    assert (bins == np.histogram(x, 10, (-4, 4))[0]).all()
    out = np.array([[np.inf, -np.inf]])
    extremes[8, 8](x, out)
    assert tuple(out[0]) == (x.min(), x.max())


@cuda.jit
def sessions(user, time, session):
    """Each session's first event finds itself, marks the events up to the next."""
    i = cuda.grid(1)
    if i >= len(user):
        return
    first = i == 0 or user[i] != user[i - 1] or time[i] - time[i - 1] > 3600
    if first:
        session[i] = i
    grid = cuda.cg.this_grid()
    grid.sync()
    if session[i] == i:
        j = i + 1
        while j < len(user) and session[j] == 0:
            session[j] = i
            j += 1


def test_sessions_of_a_click_log(gpu):
    user = np.array([1, 1, 1, 2, 2, 3, 3, 3, 3, 3])
    time = np.array([0, 10, 9000, 0, 10, 0, 5000, 5010, 5020, 20000])
    session = cuda.to_device(np.zeros(10, np.int64))
    # its last loop reads what others write
    with emulator.device(checks=("bounds", "uninitialised", "divergence")):
        sessions[2, 5](user, time, session)
    assert session.copy_to_host().tolist() == [0, 0, 2, 3, 3, 0 + 5, 6, 6, 6, 9]


@cuda.jit
def smooth(x, y):
    """With a constant array, a tuple constant, and a local array."""
    weights = cuda.const.array_like(WEIGHTS)
    window = cuda.local.array(3, numba.float32)
    i = cuda.grid(1)
    if 0 < i < x.size - 1:
        for k in range(SHAPE[0] - 5):
            window[k] = x[i + k - 1]
        total = float32(0)
        for k, w in enumerate(weights):
            total += w * window[k]
        y[i] = total


def test_constant_and_local_arrays(gpu, rng):
    x = rng.random(30).astype(np.float32)
    y = np.zeros(30, np.float32)
    smooth[4, 8](x, y)
    assert np.allclose(y[1:-1], np.convolve(x, WEIGHTS, "valid"))


@cuda.jit
def two_parts(x, y):
    """One dynamic shared memory, seen as two arrays."""
    floats = cuda.shared.array(0, dtype=numba.float32)[:8]
    integers = cuda.shared.array(0, dtype=numba.int32)[8:16]
    t = cuda.threadIdx.x
    floats[t], integers[t] = x[t], t
    cuda.syncthreads()
    y[t] = floats[7 - t] * float32(integers[7 - t])


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


def test_dynamic_shared_memory_of_two_types(gpu):
    x, y = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
    two_parts[1, 8, 0, 64](x, y)
    assert (y == (x * x)[::-1]).all()


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
def complex_everywhere(x, y):
    tile, own, t = (
        cuda.shared.array(4, numba.complex64),
        cuda.local.array(1, np.complex128),
        cuda.threadIdx.x,
    )
    tile[t] = x[t]
    own[0] = 2j
    cuda.syncthreads()
    y[t] = (tile[3 - t] * own[0] + numba.complex64(1)) / complex(t + 1, 1)


def test_complex_numbers_in_shared_and_local_arrays(gpu):
    x, y = np.array([1 + 2j, 3 - 1j, 0.1, 4j], np.complex64), np.zeros(4, np.complex128)
    complex_everywhere[1, 4](x, y)
    assert np.allclose(y, (x[::-1] * 2j + 1) / (np.arange(4) + 1 + 1j), rtol=1e-15)


@cuda.jit(device=True)
def dot_product(a, b):
    total = float32(0)
    for k in range(a.shape[0]):
        total += a[k] * b[k]
    return total


@cuda.jit
def rows_and_columns(a, b, c):
    i, j = cuda.grid(2)
    mine = cuda.shared.array((4, 8), float32)[i, :]
    mine[j] = dot_product(a[i, :], b[:, j])
    c[i, j : j + 1] = mine[j:][0]


def test_slices_of_arrays_of_two_dimensions(gpu, rng):
    a, b = rng.random((4, 5)).astype(np.float32), rng.random((5, 6)).astype(np.float32)
    c = np.zeros((4, 6), np.float32)
    rows_and_columns[1, (4, 6)](a, b, c)
    assert np.allclose(c, a @ b)


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


@cuda.jit
def squares_of_complex(x, y):
    i = cuda.grid(1)
    y[i] = x[i] * x[i].conjugate() + x[i].real


def test_complex_arrays(gpu):
    x, y = np.array([1 + 2j, 3 - 1j], np.complex64), np.zeros(2, np.complex64)
    squares_of_complex[1, 2](x, y)
    assert np.allclose(y, x * x.conj() + x.real)


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


# puzzles ------------------------------------------------------------------------------------------


def puzzle(gpu, kernel, spec, inputs, out_shape, block, grid=1, checked_order=None):
    inputs = [np.asarray(i, np.float32) for i in inputs]
    out = np.zeros(out_shape, np.float32)
    kernel[grid, block](out, *inputs, inputs[0].shape[0])
    assert np.allclose(out, spec(*inputs)), out


@cuda.jit
def map_guard(out, a, size):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < size:
        out[i] = a[i] + 10


@cuda.jit
def zipped(out, a, b, size):
    i = cuda.threadIdx.x
    if i < size:
        out[i] = a[i] + b[i]


@cuda.jit
def map_2d(out, a, size):
    local_i, local_j = cuda.threadIdx.x, cuda.threadIdx.y
    if local_i < size and local_j < size:
        out[local_i, local_j] = a[local_i, local_j] + 10


@cuda.jit
def broadcast(out, a, b, size):
    i, j = cuda.grid(2)
    if i < size and j < size:
        out[i, j] = a[i, 0] + b[0, j]


@cuda.jit
def shared_map(out, a, size):
    shared = cuda.shared.array(4, numba.float32)
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    local_i = cuda.threadIdx.x
    if i < size:
        shared[local_i] = a[i]
    cuda.syncthreads()
    if i < size:
        out[i] = shared[local_i] + 10


@cuda.jit
def pooling(out, a, size):
    shared = cuda.shared.array(TPB, numba.float32)
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    local_i = cuda.threadIdx.x
    if i < size:
        shared[local_i] = a[i]
    cuda.syncthreads()
    if i < size:
        total = float32(0)
        for k in range(max(0, local_i - 2), local_i + 1):
            total += shared[k]
        out[i] = total


@cuda.jit
def dot(out, a, b, size):
    shared = cuda.shared.array(TPB, numba.float32)
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    local_i = cuda.threadIdx.x
    shared[local_i] = a[i] * b[i] if i < size else 0
    cuda.syncthreads()
    if local_i == 0:
        for k in range(TPB):
            out[0] += shared[k]


@cuda.jit
def convolution(out, a, b, size):
    shared_a = cuda.shared.array(TPB_AND_HALO, numba.float32)
    shared_b = cuda.shared.array(4, numba.float32)
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    local_i = cuda.threadIdx.x
    shared_a[local_i] = a[i] if i < size else 0
    if local_i < 4:
        shared_a[TPB + local_i] = a[i + TPB] if i + TPB < size else 0
        shared_b[local_i] = b[local_i]
    cuda.syncthreads()
    if i < size:
        total = float32(0)
        for k in range(4):
            total += shared_a[local_i + k] * shared_b[k]
        out[i] = total


@cuda.jit
def prefix_sum(out, a, size):
    cache = cuda.shared.array(TPB, numba.float32)
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    local_i = cuda.threadIdx.x
    cache[local_i] = a[i] if i < size else 0
    cuda.syncthreads()
    width = 2
    while width <= TPB:
        if local_i % width == 0:
            cache[local_i] += cache[local_i + width // 2]
        cuda.syncthreads()
        width *= 2
    if local_i == 0:
        out[cuda.blockIdx.x] = cache[0]


@cuda.jit
def axis_sum(out, a, size):
    cache = cuda.shared.array(TPB, numba.float32)
    i = cuda.threadIdx.x
    batch = cuda.blockIdx.y
    cache[i] = a[batch, i] if i < a.shape[1] else 0.0
    cuda.syncthreads()
    k = TPB // 2
    while k:
        if i < k:
            cache[i] += cache[i + k]
        cuda.syncthreads()
        k >>= 1
    if i == 0:
        out[batch, 0] = cache[0]


@cuda.jit
def puzzle_matmul(out, a, b, size):
    a_shared = cuda.shared.array((3, 3), numba.float32)
    b_shared = cuda.shared.array((3, 3), numba.float32)
    i, j = cuda.grid(2)
    local_i, local_j = cuda.threadIdx.x, cuda.threadIdx.y
    acc = 0.0
    for k in range(0, size, 3):
        a_shared[local_i, local_j] = a[i, k + local_j] if i < size and k + local_j < size else 0
        b_shared[local_i, local_j] = b[k + local_i, j] if k + local_i < size and j < size else 0
        cuda.syncthreads()
        for local_k in range(min(3, size - k)):
            acc += a_shared[local_i, local_k] * b_shared[local_k, local_j]
        cuda.syncthreads()
    if i < size and j < size:
        out[i, j] = acc


PUZZLES = {
    "map, guard, blocks": (map_guard, lambda a: a + 10, [(9,)], (9,), 4, 3),
    "zip": (zipped, lambda a, b: a + b, [(4,), (4,)], (4,), 8, 1),
    "map 2D": (map_2d, lambda a: a + 10, [(2, 2)], (2, 2), (3, 3), 1),
    "broadcast": (broadcast, lambda a, b: a + b, [(5, 1), (1, 5)], (5, 5), (3, 3), (2, 2)),
    "shared": (shared_map, lambda a: a + 10, [(7,)], (7,), 4, 2),
    "pooling": (
        pooling,
        lambda a: [a[max(0, i - 2) : i + 1].sum() for i in range(8)],
        [(8,)],
        (8,),
        8,
        1,
    ),
    "dot product": (dot, lambda a, b: a @ b, [(7,), (7,)], (1,), TPB, 1),
    "convolution": (
        convolution,
        lambda a, b: np.convolve(np.pad(a, (0, 3)), b[::-1], "valid"),
        [(15,), (4,)],
        (15,),
        TPB,
        2,
    ),
    "prefix sum": (prefix_sum, lambda a: [a[:8].sum(), a[8:].sum()], [(13,)], (2,), TPB, 2),
    "axis sum": (axis_sum, lambda a: a.sum(1, keepdims=True), [(4, 6)], (4, 1), TPB, (1, 4)),
    "matmul": (puzzle_matmul, lambda a, b: a @ b, [(8, 8), (8, 8)], (8, 8), (3, 3), (3, 3)),
}


# the puzzles' literals are not typed
@pytest.mark.filterwarnings("ignore::numdiff.emulator.Float64Warning")
@pytest.mark.parametrize("name", PUZZLES)
def test_puzzles(gpu, rng, name):
    kernel, spec, inputs, out_shape, block, grid = PUZZLES[name]
    puzzle(
        gpu, kernel, spec, [rng.integers(0, 9, shape) for shape in inputs], out_shape, block, grid
    )
