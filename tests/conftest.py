"""Every operation's tests run on each engine that is there: NumPy, PTX compilation, the emulator, and a GPU.

One body serves all. On the CPU engine it holds the reference's float32 against its float64; on `ptx` the launchers run
and every kernel is compiled, but there are no values to check; in the emulator (on the tiny shapes, its threads taking
turns in another order at each launch) and on a GPU the kernels are held against the float64 reference.
"""
import gc
import hashlib
import json

import numpy as np
import pytest

import numdiff.device as device_module
from numdiff.device import download, get_backend, ptx, upload, why_no_gpu
from numdiff.device.quick_types import quick_types


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Neighbouring tests on one worker, as far as it goes: `ptx` then compiles a kernel once, not once a worker."""
    from xdist.scheduler import WorkStealingScheduling
    return WorkStealingScheduling(config, log)


def pytest_collection_modifyitems(items):
    """What an engine cannot run is no test. ptxas's logs come last: many of their kernels are compiled by then, and
    short tests end all workers together."""
    items[:] = sorted(filter(runs, items), key=lambda item: item.path.name == "test_compile_logs.py")


def runs(item):
    """Whether a test's engine can run it: the emulator takes small shapes alone, and the CPU engine has one version."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    if given.get("engine") == "emulator":
        return not item.get_closest_marker("large")
    return given.get("engine") != "cpu" or given.get("version") is None


def pytest_collection_finish(session):
    """What is there for good, ten thousand tests among it, the garbage collector need not look at again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _compile_once(request, tmp_path_factory):
    """What has been compiled to PTX is there for all tests, and on all workers."""
    worker = getattr(request.config, "workerinput", {}).get("workerid")
    base = tmp_path_factory.getbasetemp()
    folder, compiled = (base.parent if worker else base) / "ptx", ptx.PtxDevice.compile
    folder.mkdir(exist_ok=True)

    def compile_once(kernel, signature, capabilities):
        name = repr((kernel.py_func.__module__, kernel.py_func.__name__, signature, capabilities))
        path = folder / hashlib.sha256(name.encode()).hexdigest()
        if path.exists():
            return dict(zip(capabilities, json.loads(path.read_text()), strict=True))
        with quick_types():
            texts = compiled(kernel, signature, capabilities)
        unfinished = path.with_suffix(f".{worker}")
        unfinished.write_text(json.dumps(list(texts.values())))
        unfinished.replace(path)
        return texts

    ptx.PtxDevice.compile = staticmethod(compile_once)
    yield
    ptx.PtxDevice.compile = staticmethod(compiled)


def engines():
    return ["cpu", "ptx", "emulator"] + ([] if why_no_gpu() else ["cuda"])


class Engine:
    """One engine, as an operation's test uses it."""

    def __init__(self, name):
        self.name = name
        self.backend = get_backend(name)
        if name == "emulator":
            self.backend.vary_order = True  # two runs must give the same bits in whatever order the threads take turns
        self.computes = name != "ptx"
        self.has_versions = name != "cpu"
        self.repeats = 1 if name == "emulator" else 2  # there `numdiff kernels check` compares two thread orders

    def __call__(self, array, dtype=None):
        """`array` on this engine (float64 becomes float32 unless a dtype is given)."""
        array = np.asarray(array)
        if dtype is None:
            dtype = np.float32 if array.dtype == np.float64 else array.dtype
        return upload(array.astype(dtype), self.backend)

    def zeros(self, shape, dtype=np.float32):
        return device_module.zeros(shape, dtype, self.backend)

    def check(self, got, want, tolerance=1e-5):
        """Hold an array of this engine against a float64 reference: same shape, relative error in the 2-norm."""
        assert tuple(got.shape) == tuple(np.shape(want)), f"shape {got.shape}, expected {np.shape(want)}"
        if self.computes:
            error = relative_error(download(got), want)
            assert error <= tolerance, f"relative error {error:.2e} > {tolerance:.0e} on {self.name}"

    def check_equal(self, a, b):
        """Two results with the same bits."""
        if self.computes:
            a, b = download(a).view(np.uint8), download(b).view(np.uint8)
            assert np.array_equal(a, b), "two runs differ in their bits"


def relative_error(got, want):
    """‖got - want‖ / ‖want‖; infinite where got is not finite."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if not np.isfinite(got).all():
        return np.inf
    scale = np.linalg.norm(want.ravel())
    return np.linalg.norm((got - want).ravel()) / (scale if scale else 1.0)


def numerical_gradient(function, x, dy, step=1e-5):
    """Gradient of sum(function(x) · dy) by central differences in float64, element by element."""
    x = np.array(x, np.float64)
    gradient = np.empty_like(x)
    for i in np.ndindex(x.shape):
        keep = x[i]
        x[i] = keep + step
        above = np.sum(function(x) * dy)
        x[i] = keep - step
        below = np.sum(function(x) * dy)
        x[i] = keep
        gradient[i] = (above - below) / (2 * step)
    return gradient


@pytest.fixture(params=engines())
def engine(request):
    """The engine under test, with every new array poisoned with NaN."""
    old = device_module.set_poison(True)
    yield Engine(request.param)
    device_module.set_poison(old)


@pytest.fixture
def rng(request):
    """Random numbers, another stream for every test, the same in every run."""
    return np.random.default_rng(list(request.node.nodeid.encode()))


def shapes(**named):
    """Parametrise `shape` over shapes named by purpose; the emulator takes only `minimal` and `odd`."""
    values = [pytest.param(v, id=k, marks=() if k in ("minimal", "odd") else large) for k, v in named.items()]
    return pytest.mark.parametrize("shape", values)


large = pytest.mark.large  # for tests and parameters that are too large for the emulator


def versions(*numbers):
    """Parametrise `version` over kernel versions; None is the launcher's own choice (and all the CPU engine has)."""
    return pytest.mark.parametrize("version", [None, *numbers])

