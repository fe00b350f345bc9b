"""The host's side of an emulated GPU: what programs do with `numba.cuda` around their kernels."""

import importlib.util
import multiprocessing
import os
import pickle
import subprocess
import sys
import types

import numpy as np
import pytest
from numba import cuda, guvectorize, vectorize
from numba.cuda import device_array as made_on_device
from numba.cuda import to_device
from numba.cuda.cudadrv import driver
from numba.cuda.cudadrv.driver import device_memset

from numdiff import emulator
from numdiff.emulator import EmulatedArray, KernelFault, Unsupported
from numdiff.emulator.tensor_map import tensor_map
from tests.conftest import exhaustive


@cuda.jit
def double(x):
    i = cuda.grid(1)
    if i < x.size:
        x[i] *= 2


@pytest.fixture
def gpu():
    with emulator.device(float64=True) as machine:
        yield machine


def test_functions_imported_by_name_come_to_the_emulator():
    original = to_device
    with emulator.device(float64=True):
        x = to_device(np.ones(3, np.float32))
        assert isinstance(x, EmulatedArray) and isinstance(made_on_device(3), EmulatedArray)
        double[1, 4](x)
        assert x.copy_to_host().tolist() == [2, 2, 2]
    assert to_device is original and cuda.to_device is original


def test_names_in_a_module_of_two_names_are_replaced_in_each_context(monkeypatch):
    module = types.ModuleType("of_two_names")
    module.to_device = original = cuda.to_device
    monkeypatch.setitem(sys.modules, "of_two_names", module)
    monkeypatch.setitem(sys.modules, "of_two_names_again", module)
    for _ in range(3):
        with emulator.device():
            assert module.to_device is cuda.to_device is not original
        assert module.to_device is original


def test_an_emulator_that_is_installed():
    original = cuda.to_device
    gpu = emulator.install(float64=True)
    try:

        @cuda.jit("void(float32[:])")
        def double_all(x):
            x[cuda.threadIdx.x] *= 2

        x = cuda.to_device(np.ones(3, np.float32))
        with emulator.device(order="reversed") as inner:
            assert isinstance(cuda.to_device(x.copy_to_host()), EmulatedArray) and inner is not gpu
        double_all[1, 3](x)
        assert x.copy_to_host().tolist() == [2] * 3
    finally:
        emulator.uninstall()
    assert cuda.to_device is original


def test_a_reduction_before_any_launch(gpu):
    assert cuda.reduce(lambda a, b: a + b)(np.arange(5.0)) == 10

    def common_divisor(a, b):
        while b:
            a, b = b, a % b
        return a

    assert cuda.reduce(common_divisor)(np.array([12, 18, 30])) == 6


def test_forall_of_nothing(gpu):
    double.forall(0)(np.zeros(0, np.float32))
    x = np.ones(5, np.float32)
    double.forall(5)(x)
    assert x.tolist() == [2] * 5


def test_the_context_and_the_devices(gpu):
    context = cuda.current_context()
    free, total = context.get_memory_info()
    context.deallocations.clear()
    assert free == context.get_memory_info().free <= total
    assert cuda.list_devices()[0].compute_capability == (9, 0) == context.device.compute_capability
    assert cuda.detect() and cuda.is_available()
    with cuda.profiling(), cuda.defer_cleanup():
        pass


def test_arrays_of_the_device(gpu):
    x = cuda.to_device(np.zeros((2, 3), np.float32))
    assert x.flags.c_contiguous and x.T.flags.f_contiguous and not x.T.flags.c_contiguous
    interface = x.T.__cuda_array_interface__
    assert (
        interface["shape"] == (3, 2)
        and interface["strides"] == (4, 12)
        and interface["typestr"] == "<f4"
    )
    assert cuda.is_cuda_array(x) and cuda.as_cuda_array(x) is x
    with pytest.raises(TypeError, match="doesn't implement the cuda array interface"):
        cuda.as_cuda_array(np.zeros(3))


class Foreign:
    """An array on the device in another library's class."""

    def __init__(self, array):
        self.__cuda_array_interface__ = array.__cuda_array_interface__


def test_arrays_of_other_libraries_share_the_devices_memory(gpu):
    x = cuda.to_device(np.arange(6.0).reshape(2, 3), stream=cuda.stream())
    foreign = Foreign(x.T)
    add_1[1, 6](foreign)
    assert np.array_equal(x.copy_to_host(), np.arange(1.0, 7).reshape(2, 3))
    again = cuda.as_cuda_array(foreign)
    assert (
        again.strides == (8, 24)
        and again.stream.external
        and again.stream.handle == x.stream.handle
    )
    with pytest.raises(emulator.Unsupported, match="is on a real GPU"):
        cuda.from_cuda_array_interface({**foreign.__cuda_array_interface__, "data": (8, False)})
    with pytest.raises(NotImplementedError, match="negative strides"):
        x[::-1].copy_to_host()


@cuda.jit
def add_1(x):
    i = cuda.threadIdx.x
    if i < x.size:
        x[i // x.shape[1], i % x.shape[1]] += 1


def test_a_kernel_finds_an_array_of_the_device(gpu):
    captured = cuda.to_device(np.zeros(2))

    @cuda.jit
    def count(y):
        captured[cuda.threadIdx.x] += 1
        y[cuda.threadIdx.x] = captured[cuda.threadIdx.x]

    y = np.zeros(2)
    count[1, 2](y)
    count[1, 2](y)
    assert y.tolist() == [2, 2] == captured.copy_to_host().tolist()


def test_numba_compiles_first_where_that_is_asked():
    from numba.core.errors import TypingError as OfNumba
    from numba.cuda.core.errors import TypingError

    with emulator.device(compile=True):

        @cuda.jit("void(float32[:], float32)")
        def scale(x, factor):
            x[cuda.threadIdx.x] *= factor

        x, stream = np.ones(4, np.float32), cuda.stream()
        scale[1, 4, stream](x, 0.5)
        assert x.tolist() == [0.5] * 4
        assert ".visible .entry" in next(iter(scale.inspect_asm().values()))

        @cuda.jit
        def wrong(x):
            x[0] = x.nothing

        with pytest.raises((TypingError, OfNumba), match="nothing"):
            wrong[1, 1](x)


@pytest.mark.parametrize("compile", [False, True])
def test_a_configured_launch_is_pickled(compile):
    x = np.ones(1, np.float32)
    with emulator.device(float64=True, compile=compile):
        for stream in (0, cuda.stream()):
            launch = double[5, 8, stream, 16] if stream else double[1, 1]
            for _ in range(2):
                launch = pickle.loads(pickle.dumps(launch))
            if stream and compile:  # attributes of Numba's launch
                assert launch.griddim == (5, 1, 1) and launch.blockdim == (8, 1, 1)
                assert launch.stream.handle == stream.handle and launch.sharedmem == 16
            elif not stream:
                launch(x)
    assert x[0] == 2


def test_programs_ask_whether_an_array_is_on_the_device():
    from numba.cuda.cudadrv.devicearray import DeviceNDArray, is_cuda_ndarray

    with emulator.device():
        for array in cuda.to_device(np.zeros(3)), cuda.device_array((2, 2), np.int8)[0]:
            assert isinstance(array, DeviceNDArray) and is_cuda_ndarray(array)
            assert isinstance(array, cuda.devicearray.DeviceNDArray)
            assert isinstance(array, emulator.EmulatedArray)
        assert not isinstance(np.zeros(3), DeviceNDArray)


@cuda.jit
def add_one(x):
    if cuda.grid(1) < x.size:
        x[cuda.grid(1)] += 1


def test_what_programs_do_with_memory_and_kernels(gpu):
    x = np.zeros(4, np.float32)
    with cuda.mapped(x) as mapped:
        add_one[1, 4](mapped)
    with cuda.mapped(x, np.ones(2)) as (mapped, _):
        add_one[1, 4](mapped)
    assert x.tolist() == [2] * 4
    d = cuda.to_device(x)
    assert d.bind(cuda.stream()) is d
    device_memset(d[1:], 0, 8)  # imported by name
    assert d.copy_to_host().tolist() == [2, 0, 0, 2]
    driver.device_memset(d, 0, d.nbytes)
    assert not d.copy_to_host().any()
    cuda.require_context(lambda: add_one[1, 4](d))()
    pickle.loads(pickle.dumps(add_one[1, 4]))(d)
    assert d.copy_to_host().tolist() == [2] * 4
    with pytest.raises(Unsupported, match="does not share arrays"):
        d.get_ipc_handle()


def test_what_the_compiler_says_of_a_kernel_needs_the_compiler(gpu):
    compiled_here = cuda.jit("void(float32[:])")(add_one.py_func)
    for kernel in add_one, compiled_here:
        kernel.compile("void(float32[:])")
        for name in "inspect_asm", "inspect_llvm", "get_regs_per_thread":
            with pytest.raises(Unsupported, match=f"{name} .* enter .*device.compile=True."):
                getattr(kernel, name)()
    with pytest.raises(AttributeError, match="add_one has no nothing"):
        compiled_here.nothing  # noqa: B018


class Doubled:
    """An extension that takes what wraps an array."""

    def prepare_args(self, ty, value, stream=0, retr=None):
        return ty, getattr(value, "inner", value)


class Wrapped:
    def __init__(self, inner):
        self.inner = inner


def test_extensions_prepare_arguments(gpu):
    kernel = cuda.jit(extensions=[Doubled()])(double.py_func)
    x = np.ones(3, np.float32)
    kernel[1, 4](Wrapped(x))
    assert x.tolist() == [2, 2, 2]


def test_kernels_with_signatures_are_configured_as_others(gpu):
    kernel = cuda.jit("void(float32[:])")(double.py_func)
    x = np.ones(3, np.float32)
    kernel.configure(1, 4)(x)
    kernel.specialize(x)[1, 4](x)
    kernel.forall(3)(x)
    assert x.tolist() == [8, 8, 8]
    (overload,) = kernel.overloads.values()
    assert overload.max_cooperative_grid_blocks((16, 16)) == 16


def test_vectorize(gpu):
    @vectorize(["float32(float32, float32)", "float64(float64, float64)"], target="cuda")
    def weighted(a, b):
        return a * 2 + b

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    y = weighted(x, x[0])
    assert y.dtype == np.float32 and np.array_equal(y, x * 2 + x[0])
    on_device = weighted(cuda.to_device(x), np.float32(1))
    assert isinstance(on_device, EmulatedArray) and np.array_equal(
        on_device.copy_to_host(), x * 2 + 1
    )
    assert weighted(1.5, 2.0) == 5.0 and weighted.reduce(np.array([1.0, 2, 3])) == 11

    @vectorize(target="cuda")
    def inverse(a):
        return 1 / a

    assert inverse(np.array([2, 4])).tolist() == [0.5, 0.25]


def test_guvectorize(gpu):
    @guvectorize(["void(float64[:], float64, float64[:])"], "(n),()->(n)", target="cuda")
    def shifted(row, by, out):
        for i in range(row.shape[0]):
            out[i] = row[i] + by

    x = np.arange(6.0).reshape(2, 3)
    assert np.array_equal(shifted(x, np.array([10.0, 20])), x + [[10], [20]])


def test_faults_go_from_process_to_process():
    with emulator.device(), pytest.raises(KernelFault) as caught:
        out_of_bounds[1, 4](np.zeros(2, np.float32))
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.faults == caught.value.faults


@cuda.jit
def out_of_bounds(x):
    x[cuda.threadIdx.x] = 1


def _faulty(n):
    with emulator.device():
        out_of_bounds[1, n](np.zeros(2, np.float32))


@exhaustive
def test_a_fault_in_a_pool():
    with (
        multiprocessing.get_context("spawn").Pool(1) as pool,
        pytest.raises(KernelFault, match="writes x.2."),
    ):
        pool.map(_faulty, [4])


PROGRAM = """
import sys
import numpy as np
from numdiff import emulator
BUILT_IN
assert "numba.cuda" not in sys.modules
with emulator.device(float64=True) as gpu:
    from numba import cuda, float32

    @cuda.jit("void(float32[:], float64)")
    def scale(x, by):
        i = cuda.grid(1)
        x[i] *= half(by)

    @cuda.jit("float64(float64)", device=True)
    def half(a):
        return a / 2

    x = cuda.to_device(np.ones(4, np.float32))
    scale[1, 4](x, 3)
    assert x.copy_to_host().tolist() == [1.5] * 4
print("right", "numba_cuda" in (cuda.__file__ or ""))
"""
BUILT_IN = 'sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "NumbaCudaFinder"]'


@pytest.mark.parametrize(
    "before", ["", *([pytest.param(BUILT_IN, marks=exhaustive)])], ids=["numba-cuda", "built-in"]
)
def test_the_context_is_entered_before_numba_is_imported(before, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("BUILT_IN", before))
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["right", str(not before)]


SIMULATED = """
import sys
import numpy as np
from numdiff import emulator
BUILT_IN
if LATE:
    from numba import cuda, float32
gpu = emulator.install(on_fault="collect")
from numba import cuda, float32
from numba.cuda import to_device

@cuda.jit(device=True)
def half(a):
    return a * float32(0.5)

@cuda.jit("void(float32[:], float64)")
def turned(x, by):
    tile, i = cuda.shared.array(4, float32), cuda.grid(1)
    tile[i] = half(x[i] * float32(by))
    cuda.syncthreads()
    x[i] = tile[3 - i]

@cuda.jit
def race(x):
    x[0] = cuda.threadIdx.x

x = to_device(np.arange(4, dtype=np.float32))
turned[1, 4](x, 3)
assert type(x) is emulator.EmulatedArray and x.copy_to_host().tolist() == [4.5, 3, 1.5, 0]
race[1, 4](x)
assert [fault.kind for fault in gpu.faults] == ["race"] and gpu.launches == 2
emulator.uninstall()
print("right")
if LATE:  # the kernels are the simulator's again
    y = np.zeros(4, np.float32)
    race[1, 4](y)
    assert gpu.launches == 2
"""


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=exhaustive)])
@pytest.mark.parametrize(
    "before", ["", *([pytest.param(BUILT_IN, marks=exhaustive)])], ids=["numba-cuda", "built-in"]
)
def test_where_numbas_simulator_is_set(before, late, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SIMULATED.replace("BUILT_IN", before).replace("LATE", str(late)))
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "NUMBA_ENABLE_CUDASIM": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "right"


MLIR = """
import sys
import numpy as np
from numba_cuda_mlir import cuda, types
from numba_cuda_mlir.cuda import to_device
from numdiff import emulator
assert "numba" not in sys.modules

@cuda.jit(device=True)
def square(a):
    return a * a

@cuda.jit
def turned(x, y):
    tile = cuda.shared.array(32, types.float32)
    i = cuda.threadIdx.x
    tile[i] = square(x[cuda.grid(1)])
    cuda.syncthreads()
    y[i] = tile[31 - i]
    y[i] += cuda.shfl_down_sync(0xFFFFFFFF, i, 1)
    cuda.syncthreads()
    cuda.atomic.add(y, 1, 0)

@cuda.jit
def without_barrier(x, y):
    tile = cuda.shared.array(32, types.float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    y[i] = tile[31 - i]

with emulator.device(float64=True, on_fault="collect") as gpu:
    x, y = to_device(np.arange(32, dtype=np.float32)), cuda.device_array(32, np.float32)
    turned[1, 32](x, y)
    assert y.copy_to_host().tolist() == [(31 - i) ** 2 + min(i + 1, 31) for i in range(32)] and not gpu.faults

    @cuda.jit("void(float32[:], int32)")
    def store(x, n):
        x[0] = n
        x[1] = whole(2.9)

    @cuda.jit("int32(float32)", device=True)
    def whole(a):
        return a

    store[1, 1](x, 3.7)
    assert (x[0], x[1]) == (3, 2)
    assert cuda.vectorize(["float32(float32)"])(lambda a: 2 * a)(np.ones(2, np.float32)).tolist() == [2, 2]
    assert cuda.current_context().get_memory_info().free
    without_barrier[1, 32](x, y)
    assert "race" in {f.kind for f in gpu.faults}
print("right")
"""


@pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda_mlir") is None, reason="numba-cuda-mlir is not installed"
)
def test_numba_cuda_mlir(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(MLIR)
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
        },
    )
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


def test_a_tensor_map_of_a_device_array(gpu):
    """The descriptor of an array that the host has sent; a view with gaps is refused."""
    x = cuda.to_device(np.zeros((8, 64), np.float16))
    assert tensor_map(x, (64, 8)).shape == (128,)
    with pytest.raises(emulator.LaunchRefused, match="needs a contiguous array"):
        tensor_map(x[:, :32], (32, 8))


def test_options_of_vectorize_that_numba_refuses(gpu):
    kinds = ["float32(float32)"]
    with pytest.raises(KeyError, match="Unrecognized options: other"):
        vectorize(kinds, target="cuda", other=1)
    with pytest.warns(RuntimeWarning, match="redundant"):
        vectorize(kinds, target="cuda", nopython=True)
    kinds = ["void(float32[:], float32[:])"]
    with pytest.raises(TypeError, match="nopython flag must be True"):
        guvectorize(kinds, "(n)->(n)", target="cuda", nopython=False)
    with pytest.raises(TypeError, match="not supported: other"):
        guvectorize(kinds, "(n)->(n)", target="cuda", other=1)
    with pytest.raises(TypeError, match="specifies int32 return type"):
        guvectorize(["int32(int32[:], int32[:])"], "(n)->(n)", target="cuda")


def test_wrong_counts_of_arguments_of_a_general_function(gpu):
    @guvectorize(["void(float32[:], float32[:])"], "(n)->(n)", target="cuda")
    def copied(x, y):
        for k in range(len(x)):
            y[k] = x[k]

    x, y = np.ones(3, np.float32), np.zeros(3, np.float32)
    with pytest.raises(TypeError, match="accepts 1 positional.*Got 3 positional arguments"):
        copied(x, x, y)
    with pytest.raises(ValueError, match="both positional and keyword"):
        copied(x, y, out=y)
    assert (copied(x) == x).all()


def test_the_allocator_of_arrays_in_kernels_may_be_started(gpu):
    runtime = pytest.importorskip("numba.cuda.memory_management.nrt").rtsys
    runtime.memsys_enable_stats()
    assert runtime.memsys_stats_enabled() and runtime.get_allocation_stats().alloc == 0
    runtime.memsys_disable_stats()
    with pytest.raises(RuntimeError, match="disabled"):
        runtime.get_allocation_stats()


def test_the_context_is_left_while_python_ends(monkeypatch):
    context = emulator.device()
    context.__enter__()
    with monkeypatch.context() as ending:
        ending.setattr(sys, "meta_path", None)
        context.__exit__(None, None, None)
