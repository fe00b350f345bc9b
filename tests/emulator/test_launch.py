"""Launches: what a GPU refuses, exceptions and breakpoints in kernels, the context and its options."""

import bdb
import gc
import sys
import weakref

import numpy as np
import pytest

from numdiff import emulator
from numdiff.device import cuda, float32, int32, load4, store4
from numdiff.emulator import Emulator, Float64Warning, KernelFault, LaunchRefused, Unsupported
from tests.conftest import THREAD_ORDERS
from tests.emulator.planting import fault_at, faults_of, marked, run


@cuda.jit
def nothing(x):
    pass


@pytest.mark.parametrize(
    "grid, block, text",
    [
        (1, 1025, "block of 1025 threads is more than the 1024"),
        (1, (32, 33), "1056 threads"),
        (1, (1, 1, 65), "block dimension z is 65, the limit is 64"),
        ((1, 65536), 1, "grid dimension y is 65536"),
        ((1, 1, 65536), 1, "grid dimension z is 65536, the limit is 65535"),
        (2**31, 1, "limit is 2147483647"),
        (0, 1, "at least 1"),
        (1, (4, 0), "at least 1"),
        ((1, 1, 1, 1), 1, "up to three dimensions"),
    ],
)
def test_sizes_that_a_gpu_refuses(grid, block, text):
    with pytest.raises(LaunchRefused, match=text):
        run(nothing, grid, block, np.zeros(1))


def test_launch_bounds_are_held():
    @cuda.jit(launch_bounds=64)
    def bound(x):
        pass

    run(bound, 1, 64, np.zeros(1))
    with pytest.raises(
        LaunchRefused, match="65 threads is more than the kernel's launch_bounds of 64"
    ):
        run(bound, 1, 65, np.zeros(1))


@pytest.mark.parametrize(
    "cc, kibibytes",
    [
        ((7, 5), 64),
        ((8, 0), 163),
        ((8, 6), 99),
        ((8, 9), 99),
        ((9, 0), 227),
        ((10, 0), 227),
        ((12, 0), 99),
    ],
)
def test_shared_memory_by_compute_capability(cc, kibibytes):
    @cuda.jit
    def dynamic(x):
        shared = cuda.shared.array(0, float32)
        shared[x.size - 1] = x[0]

    x = np.zeros(kibibytes * 256, np.float32)
    run(dynamic, 1, 1, x, shared=kibibytes << 10, cc=cc)
    with pytest.raises(
        LaunchRefused, match=f"more than the {kibibytes << 10} .* capability {cc[0]}.{cc[1]}"
    ):
        run(dynamic, 1, 1, x, shared=(kibibytes << 10) + 1, cc=cc)


@pytest.mark.parametrize("checks", [True, False])
def test_static_shared_memory_is_limited(checks):
    @cuda.jit
    def large(x):
        tile = cuda.shared.array((64, 192), float32)
        tile[0, 0] = x[0]

    @cuda.jit
    def too_large(x):
        tile = cuda.shared.array((64, 192), float32)
        more = cuda.shared.array(1, float32)
        tile[0, 0] = more[0] = x[0]

    run(large, 1, 1, np.zeros(1), checks=checks, float64=True)
    with pytest.raises(LaunchRefused, match="49168|49156"):
        run(too_large, 1, 1, np.zeros(1), checks=checks)
    with pytest.raises(LaunchRefused, match="49152 bytes of static and 65536 of dynamic"):
        run(large, 1, 1, np.zeros(1), checks=checks, shared=64 << 10, cc=(8, 6))


@THREAD_ORDERS
def test_indices_and_sizes(order):
    @cuda.jit
    def kernel(out):
        x, y, z = cuda.grid(3)
        i = (z * out.shape[1] + y) * out.shape[2] + x
        t = (
            cuda.threadIdx.z * cuda.blockDim.y + cuda.threadIdx.y
        ) * cuda.blockDim.x + cuda.threadIdx.x
        out[z, y, x] = i
        if (
            t == 0
            and cuda.gridsize(1) == 6
            and cuda.gridsize(3) == (6, 4, 4)
            and cuda.gridsize(2) == (6, 4)
        ):
            out[z, y, x] += cuda.gridDim.x * 100 + cuda.gridDim.y * 10 + cuda.gridDim.z

    out = np.zeros((4, 4, 6), np.int64)
    run(kernel, (2, 1, 2), (3, 4, 2), out, order=order)
    want = np.arange(96).reshape(4, 4, 6)
    want[::2, 0, ::3] += 212
    assert np.array_equal(out, want)


# exceptions and breakpoints -----------------------------------------------------------------------


@cuda.jit(device=True)
def inner(x, i):
    return x[i + 1]  # inner


@cuda.jit(device=True)
def middle(x, i):
    return inner(x, i) + float32(1)


@cuda.jit
def nested(x, y):
    i = cuda.grid(1)
    y[i] = middle(x, i)


@THREAD_ORDERS
def test_a_fault_in_a_device_function_is_reported_there(order):
    faults = faults_of(nested, 2, 4, np.zeros(8, np.float32), np.zeros(8, np.float32), order=order)
    fault = fault_at(faults, "bounds", __file__, marked(__file__, "inner"))
    assert len(faults) == 1 and (fault.block, fault.thread) == ((1, 0, 0), (3, 0, 0))
    assert fault.place.function == "inner" and fault.kernel == "nested" and "x[8]" in fault.message
    assert f"{__file__}:{fault.line} in inner, block (1, 0, 0), thread (3, 0, 0)" in str(fault)


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize(
    "case, kind, text, mark",
    [
        (0, "error", "ValueError: not this one", "raise"),
        (1, "division", "ZeroDivisionError", "divide"),
        (2, "error", "AttributeError", "attribute"),
        (3, "error", "TypeError", "call"),
        (4, "error", "AssertionError", "assert"),
    ],
)
def test_exceptions_keep_their_line(case, kind, text, mark, checks):
    @cuda.jit
    def kernel(x, case):
        t = cuda.threadIdx.x
        if t == 2:
            if case == 0:
                raise ValueError("not this one")  # raise
            elif case == 1:
                x[0] = t // (t - 2)  # divide
            elif case == 2:
                x[0] = x.length  # attribute
            elif case == 3:
                x[0] = inner(x)  # call
            elif case == 4:
                assert t < 2  # assert

    fault = fault_at(
        faults_of(kernel, 1, 4, np.zeros(4, np.int32), case, checks=checks),
        kind,
        __file__,
        marked(__file__, mark),
    )
    assert text in fault.message and fault.thread == (2, 0, 0)


@THREAD_ORDERS
def test_breakpoint_stops_at_one_thread(monkeypatch, order):
    @cuda.jit
    def kernel(x):
        shared = cuda.shared.array(8, int32)
        t = cuda.threadIdx.x
        shared[t] = t * t
        cuda.syncthreads()
        value = shared[7 - t]
        breakpoint()  # noqa: T100  # stop
        x[cuda.grid(1)] = value

    stops = []

    def hook():
        frame = sys._getframe(1)
        stops.append(
            (
                frame.f_code.co_name,
                frame.f_code.co_filename,
                frame.f_lineno,
                frame.f_locals["t"],
                frame.f_locals["value"],
                int(frame.f_locals["shared"][0]),
            )
        )

    monkeypatch.setattr(sys, "breakpointhook", hook)
    with emulator.device(order=order, break_at=((1, 0, 0), (5, 0, 0))) as gpu:
        gpu.launch(kernel, 2, 8, np.zeros(16, np.int32))
    assert stops == [("kernel", __file__, marked(__file__, "stop"), 5, 4, 0)]
    stops.clear()
    run(kernel, 2, 8, np.zeros(16, np.int32), checks=False)
    assert len(stops) == 1  # where nothing is chosen: the first thread that comes


def test_the_debugger_finds_its_lines(monkeypatch):
    """A debugger, such as pdb, steps through the kernel's own lines, in its own file."""
    lines = []

    class Stepper(bdb.Bdb):
        def user_line(self, frame):
            lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(lines) < 2:
                self.set_next(frame)
            else:
                self.set_continue()

    @cuda.jit
    def kernel(x):
        breakpoint()  # noqa: T100  # step 0
        a = x[0] + float32(1)  # step 1
        x[0] = a  # step 2

    trace = sys.gettrace()
    monkeypatch.setattr(sys, "breakpointhook", lambda: Stepper().set_trace(sys._getframe(1)))
    try:
        run(kernel, 1, 1, np.zeros(1, np.float32), checks=False)
    finally:
        sys.settrace(trace)
    assert lines[:2] == [(__file__, marked(__file__, f"step {n}")) for n in (1, 2)]


# what is not known --------------------------------------------------------------------------------


@pytest.mark.parametrize("checks", [True, False])
def test_an_unknown_feature_is_named_with_its_line(checks):
    @cuda.jit
    def kernel(x):
        x[0] = cuda.tensor_memory_of_tomorrow(x)  # tomorrow

    with pytest.raises(Unsupported, match="cuda.tensor_memory_of_tomorrow") as caught:
        run(kernel, 1, 1, np.zeros(1), checks=checks)
    assert f"{__file__}:{marked(__file__, 'tomorrow')}" in str(caught.value)


def test_an_intrinsic_without_a_twin_is_named():
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    @intrinsic
    def mystery(typingctx, x):
        return types.int32(x), None

    @cuda.jit
    def kernel(x):
        x[0] = mystery(x[0])  # mystery

    with pytest.raises(Unsupported, match="does not know mystery") as caught:
        run(kernel, 1, 1, np.zeros(1, np.int32))
    assert f"{__file__}:{marked(__file__, 'mystery')}" in str(caught.value)


# the context --------------------------------------------------------------------------------------


def test_the_context_collects_or_raises_and_leaves_nothing_behind():
    x = np.zeros(4, np.float32)

    @cuda.jit
    def kernel(x):
        x[cuda.grid(1) + 1] = float32(1)  # outside

    before = cuda.to_device, type(kernel).__getitem__
    with emulator.device(on_fault="collect") as gpu:
        kernel[1, 4](x)
        kernel[1, 3](x)
        assert [(f.kind, f.line, f.count) for f in gpu.faults] == [
            ("bounds", marked(__file__, "outside"), 1)
        ]
    with emulator.device() as gpu, pytest.raises(KernelFault, match="kernel kernel has 1 fault"):
        kernel[2, 4](x)
    assert gpu.faults == [] and (x[1:] == 1).all()
    with pytest.raises(RuntimeError), emulator.device():
        raise RuntimeError
    assert (cuda.to_device, type(kernel).__getitem__) == before


def test_a_fault_is_counted_not_repeated():
    @cuda.jit
    def kernel(x):
        x[cuda.grid(1) - 100] = float32(1)

    with pytest.raises(KernelFault) as caught:
        run(kernel, 4, 8, np.zeros(4, np.float32))
    assert len(caught.value.faults) == 1 and caught.value.faults[0].count == 32
    assert "and 31 more of this kind at this line" in str(caught.value)


@cuda.jit
def a_row_too_far(x, order, y):
    row = x[order.size]  # no such row
    y[0] = row[1]
    row[2] = row[3] + y[0]


@cuda.jit
def a_part_too_far(x, order, y):
    part = x[3, 1:]  # no such part
    y[0] = part[part.shape[0] - 1]


@cuda.jit
def a_store_too_far(x, order, y):
    x[order.size][1] = float32(2)  # no such row to store to


@cuda.jit
def a_shared_row_too_far(x, order, y):
    tile = cuda.shared.array((2, 4), float32)
    row = tile[order.size]  # no such shared row
    y[0] = row[0]


@cuda.jit
def a_row_number_too_far(x, order, y):
    row = order[x.shape[1]]  # no such number
    y[0] = x[row, 0] + x[row][1]


@pytest.mark.parametrize(
    "kernel, mark",
    [
        (a_row_too_far, "no such row"),
        (a_part_too_far, "no such part"),
        (a_store_too_far, "no such row to store to"),
        (a_shared_row_too_far, "no such shared row"),
        (a_row_number_too_far, "no such number"),
    ],
)
def test_one_index_is_one_fault(kernel, mark):
    """What is done with a row that does not exist is no mistake of its own."""
    faults = faults_of(
        kernel, 1, 1, np.ones((3, 4), np.float32), np.zeros(3, np.int32), np.zeros(1, np.float32)
    )
    assert [(fault.kind, fault.line) for fault in faults] == [("bounds", marked(__file__, mark))]


def test_a_float_argument_is_no_float64_array():
    @cuda.jit
    def scale(x, a):
        x[0] = x[0] * a

    with pytest.warns(Float64Warning, match="float32 mult float64"):
        run(scale, 1, 1, np.ones(1, np.float32), 0.5)
    run(scale, 1, 1, np.ones(1), 0.5)


def test_float64_arithmetic_warns_or_is_a_fault_or_is_meant():
    @cuda.jit
    def kernel(x):
        x[0] = x[0] * 0.5  # half

    x = np.ones(1, np.float32)
    with pytest.warns(Float64Warning, match=f"test_launch.py:{marked(__file__, 'half')}"):
        run(kernel, 1, 1, x)
    fault_at(
        faults_of(kernel, 1, 1, x, float64=False), "float64", __file__, marked(__file__, "half")
    )
    run(kernel, 1, 1, x, float64=True)
    run(kernel, 1, 1, np.ones(1))  # a float64 array
    assert x[0] == 0.125


def test_one_kernel_on_two_machines():
    """Kernels are rewritten once, and then run with checks and without, in any number of emulators."""

    @cuda.jit
    def kernel(x, n):
        if cuda.grid(1) <= n:
            x[cuda.grid(1)] += float32(1)  # twice

    x = np.zeros(8, np.float32)
    machines = (
        Emulator(),
        Emulator(checks=False),
        Emulator(checks="race"),
        Emulator(order="shuffled"),
    )
    for machine in machines:
        machine.launch(kernel, 1, 8, x, 8)
    for machine in machines:
        machine.launch(kernel, 1, 8, x, 8)
    assert (x == 8).all()
    fault_at(faults_of(kernel, 1, 9, x, 8), "bounds", __file__, marked(__file__, "twice"))


@pytest.mark.parametrize(
    "option, text",
    [
        ({"cc": 90}, "cc 90 must be a compute capability, such as .9, 0."),
        ({"cc": "9.0"}, "cc '9.0' must"),
        ({"patience": -1}, "patience -1 must be seconds, above 0"),
        ({"patience": "5"}, "patience '5' must"),
        ({"float64": "yes"}, "float64 'yes' must be True, False or None"),
        ({"break_at": 3}, "break_at 3 must be"),
        ({"break_at": ((0, 0, 0), 5)}, "such as ..0, 0, 0., .5, 0, 0.."),
        ({"trace": 1}, "trace 1 must be True or"),
        ({"recorder": 1}, "must be an emulator.Recorder"),
    ],
)
def test_options_of_a_device_that_are_refused(option, text):
    with pytest.raises(ValueError, match=text), emulator.device(**option):
        pass


@pytest.mark.parametrize("given", ["NumPy's", "the emulator's"])
def test_an_array_begins_at_a_multiple_of_sixteen_bytes(given, monkeypatch):
    """As on a GPU, whatever its address on the host is."""

    @cuda.jit
    def copy(x, y):
        a, b, c, d = load4(x, 0)
        store4(y, 0, a, b, c, d)

    data = np.empty(24, np.float32)
    start = (4 - data.ctypes.data % 16) // 4 % 4  # elements, to an address of 4 more
    host = np.frombuffer(data.data, np.float32, 4, 4 * start)
    assert host.ctypes.data % 16 == 4 and host.base is not data
    host[:] = 1, 2, 3, 4
    if given == "NumPy's":
        x, y = host, np.zeros(4, np.float32)
    else:  # at the addresses of a 32-bit process
        real = np.frombuffer

        def shifted(buffer, dtype):
            found = np.array(real(bytes(buffer) + bytes(32), dtype))
            start = (4 - found.ctypes.data % 16) % 16
            return found[start : start + len(buffer)]

        with monkeypatch.context() as patched:
            patched.setattr("numdiff.emulator.memory.np.frombuffer", shifted)
            x = emulator.EmulatedArray(4, np.float32, host)
            y = emulator.EmulatedArray(4, np.float32, np.zeros(4, np.float32))
    run(copy, 1, 1, x, y)
    assert (y if given == "NumPy's" else y.copy_to_host()).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("checks", [True, False])
def test_what_a_launch_has_used_is_freed(checks):
    """A test suite's kernels, and the arrays in their closures, do not fill the memory."""

    def launch():
        constant, captured = np.ones(4, np.float32), cuda.to_device(np.ones(4, np.float32))

        @cuda.jit(device=True)
        def helper(x, i):
            return x[i] + constant[i]

        @cuda.jit
        def kernel(x, y):
            i = cuda.grid(1)
            y[i] = helper(x, i) + captured[i]

        x, y = np.ones(4, np.float32), cuda.to_device(np.ones(4, np.float32))
        for _ in range(2):
            kernel[1, 4](x, y)
        assert y.copy_to_host().tolist() == [3] * 4
        return list(map(weakref.ref, (constant, captured, x, y, helper.py_func, kernel.py_func)))

    with emulator.device(checks=checks) as gpu:
        used = launch()
        gc.collect()
        assert [reference() for reference in used] == [None] * 6
        assert not gpu._functions.values() and not gpu._captured.values()
