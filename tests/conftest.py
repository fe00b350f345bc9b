"""Every operation's tests run on each engine that is there: NumPy, launchers alone, the emulator,
PTX, and a GPU.

One body serves all. On the CPU engine it holds the reference's float32 against its float64; in the
emulator (on the tiny shapes, its threads taking turns in another order at each launch) and on a GPU
the kernels are held against the float64 reference; on `launch` the launchers run, without their
kernels, on the shapes that the emulator does not take; on `ptx`, which is of the exhaustive part,
they run on all of them, and every kernel is compiled.
An engine or machine that cannot run a test leaves it out: see `where` for what an engine cannot do,
and `needs` for what a machine does not have, which is reported once, at the end of a run. README.md
in this folder says which tests are of the exhaustive part.
"""

import collections
import contextlib
import functools
import gc
import importlib.util
import inspect
import os
import pathlib
import shutil
import signal
import sys

import numpy as np
import pytest
from _pytest.runner import runtestprotocol

import numdiff.device as device_module
from numdiff.device import download, get_backend, ptx, upload, why_no_gpu
from numdiff.device.emulator import EmulatorDevice
from numdiff.device.ptxas import find_ptxas
from numdiff.device.quick_types import quick_types
from numdiff.training import forecast
from tests import advice, kept
from tests.distributed.hosts import can_make_hosts
from tests.emulator.browser import find_chromium

MPIEXEC = shutil.which(
    "mpiexec", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
)
NEEDS = {  # what a test may need: (whether it is there, how to get it)
    "gpu": (lambda: not why_no_gpu(), "an NVIDIA GPU"),
    "gpus": (lambda: device_module.gpu_count() > 1, "two NVIDIA GPUs"),
    "nccl": (lambda: importlib.util.find_spec("nccl"), "nccl4py: pip install -e '.[nccl]'"),
    "torch": (lambda: importlib.util.find_spec("torch"), "PyTorch: pip install torch"),
    "tensorboard": (
        lambda: importlib.util.find_spec("tensorboard"),
        "TensorBoard: pip install -e '.[log]'",
    ),
    "trackio": (lambda: importlib.util.find_spec("trackio"), "Trackio: pip install -e '.[log]'"),
    "mpi": (
        lambda: importlib.util.find_spec("mpi4py") and MPIEXEC,
        "mpi4py and mpiexec: pip install -e '.[mpi]'",
    ),
    "hosts": (
        lambda: has("mpi") and can_make_hosts(MPIEXEC),
        "network namespaces (root, ip and unshare) and MPICH",
    ),
    "ptxas": (find_ptxas, "ptxas: pip install -e '.[test]'"),
    "proc": (pathlib.Path("/proc/self/maps").exists, "/proc"),
    "posix": (lambda: os.name == "posix", "a system with kill -9 and limits"),
    "chromium": (
        find_chromium,
        "a Chromium, such as Debian's package chromium, or its path in CHROMIUM",
    ),
    "full": (pathlib.Path("/dev/full").exists, "/dev/full"),
}
has = functools.cache(lambda name: bool(NEEDS[name][0]()))
missing = collections.Counter()  # {what is needed and not there: tests that this costs}
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as of a shell's job in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests interrupt processes
# with it each process that a test starts would compile all of numdiff
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Neighbouring tests on one worker, as far as it goes, which then compiles a kernel once; who
    is done first takes over what others have not begun."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


# a folder, and bytes that it must have for the tests' files, a quarter of a GiB
IN_MEMORY, ROOM = "/dev/shm", 2 << 30


def pytest_configure(config):
    kept.begin(config)
    if (
        not config.option.basetemp
        and os.access(IN_MEMORY, os.W_OK)
        and shutil.disk_usage(IN_MEMORY).free > ROOM
    ):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", IN_MEMORY)  # no test waits for a disk


def pytest_collection(session):
    """Without the garbage collector, which finds nothing in it.

    In a clean clone pytest compiles each file of tests, which takes seconds: every other worker
    begins at the end, so that each finds what the other has compiled."""
    gc.disable()
    worker = getattr(session.config, "workerinput", {}).get("workerid", "gw0")
    if int(worker.removeprefix("gw")) % 2 and session.config.args == session.config.getini(
        "testpaths"
    ):
        root = session.config.rootpath
        for path in sorted((root / "tests").rglob("test_*.py"), reverse=True):
            with contextlib.suppress(Exception):  # collecting reports the error
                importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc):
    """Of a test's parameters only those that run here, in this part, become items: pytest takes a
    quarter of a millisecond for each, and two thirds would be thrown away. One stays for
    pytest_collection_modifyitems to drop."""
    calls, part = metafunc._calls, metafunc.config.option.markexpr

    def is_here(call):
        marks = [*common, *call.marks]
        return (
            runs(call.params, marks)
            and part != f"{'not ' * is_exhaustive(call.params, marks)}exhaustive"
        )

    if len(calls) > 1:
        common = list(metafunc.definition.iter_markers())
        metafunc._calls = [call for call in calls if is_here(call)] or calls[:1]


@pytest.hookimpl(tryfirst=True)  # before -m
def pytest_collection_modifyitems(items):
    """What cannot run is no test; the slow ones come first, so that all workers end together."""
    kept_items = []
    for item in items:
        given, marks = (
            item.callspec.params if hasattr(item, "callspec") else {},
            list(item.iter_markers()),
        )
        if not runs(given, marks):
            continue
        lacking = [
            name for mark in marks if mark.name == "needs" for name in mark.args if not has(name)
        ]
        missing.update(lacking[:1])
        if not lacking:
            kept_items.append(item)
        if is_exhaustive(given, marks):
            item.add_marker(exhaustive)
    items[:] = sorted(kept_items, key=lambda item: not item.get_closest_marker("slow"))


def runs(given, marks):
    """Whether a test's engine can run it: the emulator takes small shapes alone, `launch` the
    others, the CPU engine has one version, and what else `where` says of it.

    given: its parameters by name; marks: all marks that it has
    """
    engine, is_large = given.get("engine"), any(mark.name == "large" for mark in marks)
    if (
        engine == ("emulator" if is_large else "launch")
        or engine == "cpu"
        and given.get("version") is not None
    ):
        return False
    return holds(given, marks, "where")


def is_exhaustive(given, marks):
    return any(mark.name == "exhaustive" for mark in marks) or not holds(given, marks, "quick")


def holds(given, marks, name):
    """Whether what the marks of this name ask is true of a test's parameters."""
    for mark in marks:
        if mark.name == name:
            names = parameters_of(mark.args[0])
            if given.keys() >= names and not mark.args[0](**{name: given[name] for name in names}):
                return False
    return True


@functools.cache
def parameters_of(function):
    return inspect.signature(function).parameters.keys()


def pytest_collection_finish(session):
    """What is there for good, thousands of tests among it, the garbage collector need not look at
    again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """A worker says of a test that and how its call ended, and of what is around that only what
    failed or took time: five messages for each of ten thousand tests, made, sent and read, take as
    long as most of them do."""
    if not hasattr(item.config, "workerinput"):
        return None
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        if report.when == "call" or not report.passed or report.sections or report.duration > 0.01:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["missing"] = dict(missing)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    for name, count in getattr(node, "workeroutput", {}).get("missing", {}).items():
        missing[name] = count  # every worker has collected all tests


def pytest_terminal_summary(terminalreporter):
    for name, count in missing.items():
        terminalreporter.write_line(f"{count} tests are left out: they need {NEEDS[name][1]}")


@pytest.fixture(autouse=True, scope="session")
def _compile_once():
    """What has been compiled to PTX is there for all tests, on all workers and in the next run."""
    compiled = ptx.PtxDevice.compile

    def compile_once(kernel, signature, capabilities):
        def make():
            with quick_types():
                return list(compiled(kernel, signature, capabilities).values())

        return dict(zip(capabilities, kept.ptx(kernel, signature, capabilities, make), strict=True))

    ptx.PtxDevice.compile = staticmethod(compile_once)
    yield
    ptx.PtxDevice.compile = staticmethod(compiled)


@pytest.fixture(autouse=True, scope="session")
def _listens():
    """Every message of a test is noted (advice.py)."""
    patch = pytest.MonkeyPatch()
    advice.listen(patch)
    yield
    patch.undo()


@pytest.fixture(autouse=True, scope="session")
def _dry_runs_train_nothing():
    """The forecast of a dry run is the estimate, which takes no time; its own tests change that."""
    patch = pytest.MonkeyPatch()
    patch.setattr(forecast, "SHORT_STEP", 0.0)
    yield
    patch.undo()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test fails where what it makes numdiff say advises what does not exist."""
    result = yield
    assert not (faults := advice.faults_heard()), "\n".join(faults)
    return result


# folders whose tests share a batch among the cores, as users' runs do
ALL_CORES = "device", "distributed", "kernels"


@pytest.fixture(autouse=True, scope="module")
def _one_core(request):
    """With several workers a test computes on one core: two threads that wait for each other take
    longer, and on a machine with many cores each worker would have as many. ALL_CORES show that the
    parts of a batch are its whole."""
    folder = request.path.relative_to(pathlib.Path(__file__).parent).parts[0]
    device_module.share_cores(
        1 if hasattr(request.config, "workerinput") and folder not in ALL_CORES else None
    )


def engines():
    return [
        "cpu",
        "launch",
        "emulator",
        pytest.param("ptx", marks=exhaustive),
        *(["cuda"] if has("gpu") else []),
    ]


class Engine:
    """One engine, as an operation's test uses it."""

    def __init__(self, name, checked=True):
        self.name = name
        self.device = "ptx" if name == "launch" else name
        self.backend = (
            get_backend(self.device) if checked or name != "emulator" else unchecked_emulator()
        )
        if name == "emulator":
            # two runs must give the same bits in whatever order the threads take turns
            self.backend.vary_order = True
        self.computes = name not in ("launch", "ptx")
        self.has_versions = name != "cpu"
        # in the emulator `numdiff kernels check` compares two thread orders
        self.repeats = 2 if self.computes and name != "emulator" else 1

    def __call__(self, array, dtype=None):
        """`array` on this engine (float64 becomes float32 unless a dtype is given)."""
        array = np.asarray(array)
        if dtype is None:
            dtype = np.float32 if array.dtype == np.float64 else array.dtype
        return upload(array.astype(dtype), self.backend)

    def zeros(self, shape, dtype=np.float32):
        return device_module.zeros(shape, dtype, self.backend)

    def check(self, got, want, tolerance=1e-5, scale=None):
        """Hold an array of this engine against a float64 reference: same shape, relative error in
        the 2-norm.

        scale: what the error is measured against, if not `want`: where each element is a sum that
        may come out as nearly nothing, and there are so few that all may do so, the same sums of
        the terms' magnitudes
        """
        assert tuple(got.shape) == tuple(np.shape(want)), (
            f"shape {got.shape}, expected {np.shape(want)}"
        )
        if self.computes:
            error = relative_error(download(got), want, scale)
            assert error <= tolerance, (
                f"relative error {error:.2e} > {tolerance:.0e} on {self.name}"
            )

    def check_equal(self, a, b):
        """Two results with the same bits."""
        if self.computes:
            a, b = download(a).view(np.uint8), download(b).view(np.uint8)
            assert np.array_equal(a, b), "two runs differ in their bits"


@functools.cache
def unchecked_emulator():
    return EmulatorDevice(checks=False, float64=False)


def relative_error(got, want, scale=None):
    """‖got - want‖ / ‖want‖, or / ‖scale‖; infinite where got is not finite."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if not np.isfinite(got).all():
        return np.inf
    scale = np.linalg.norm(np.ravel(want if scale is None else scale))
    return np.linalg.norm((got - want).ravel()) / (scale if scale else 1.0)


def apart(rng, shape):
    """Normal numbers; few in a row (up to 7) are apart, as a norm divides by a deviation that may
    else be nearly 0."""
    x, count = rng.standard_normal(shape), shape[-1]
    return (
        x
        if count > 7
        else rng.permuted(np.broadcast_to(np.linspace(-1.5, 1.5, count), shape), axis=-1) + 0.2 * x
    )


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


# for what the README's command leaves to `pytest -m exhaustive`
exhaustive = pytest.mark.exhaustive


def exhaustively(*values):
    """These parameters for parametrize, in the exhaustive part."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=exhaustive)
        for value in values
    ]


THREAD_ORDERS = pytest.mark.parametrize("order", ["shuffled", *exhaustively("forward", "reversed")])
large = pytest.mark.large  # for tests and parameters that are too large for the emulator
# of the first command, for its results alone: the emulator looks for no faults, which takes half of
# its time, as the check's cases show all that this runs
unchecked = pytest.mark.unchecked
# folders whose tests all do so: the check's cases look for faults in every kernel's text
RESULTS = "kernels", "nn"


@pytest.fixture(params=engines())
def engine(request, monkeypatch):
    """The engine under test, with every new array poisoned with NaN."""
    if request.param == "launch":
        monkeypatch.setattr(ptx.PtxDevice, "compile", staticmethod(lambda *_: {}))
    if request.param == "ptx":  # of a text's variants those that test_compile_logs.py compiles
        from tests.kernels.compile_logs import is_left_out

        compiled = ptx.PtxDevice.compile
        monkeypatch.setattr(
            ptx.PtxDevice,
            "compile",
            staticmethod(
                lambda kernel, *others: {} if is_left_out(kernel) else compiled(kernel, *others)
            ),
        )
    old = device_module.set_poison(True)
    marks = {mark.name for mark in request.node.iter_markers()}
    for_results = (
        "unchecked" in marks
        or request.path.relative_to(pathlib.Path(__file__).parent).parts[0] in RESULTS
    )
    yield Engine(request.param, checked="exhaustive" in marks or not for_results)
    device_module.set_poison(old)


@pytest.fixture
def rng(request):
    """Random numbers, another stream for every test, the same in every run."""
    return np.random.default_rng(
        np.frombuffer(request.node.nodeid.encode(), np.uint8).astype(np.uint32)
    )


@pytest.fixture
def no_curves(monkeypatch):
    """Runs within the test draw no loss curve, which takes a tenth of a second; some whole runs do."""
    from numdiff import plots

    monkeypatch.setattr(plots, "loss_curve", lambda *_: None)


@pytest.fixture
def few_frequencies(monkeypatch):
    """A DiT's timestep has 16 sinusoids, not 256, whose layer's float32 products take the emulator
    half a second each.
    """
    from numdiff.nn import dit, dit_shapes

    for module in dit, dit_shapes:
        monkeypatch.setattr(module, "FREQUENCIES", 16)


def shapes(**named):
    """Parametrise `shape` over shapes named by purpose; the emulator takes only `minimal` and
    `odd`."""
    values = [
        pytest.param(v, id=k, marks=() if k in ("minimal", "odd") else large)
        for k, v in named.items()
    ]
    return pytest.mark.parametrize("shape", values)


def where(holds):
    """Collect a test only where `holds` is true of its parameters (if it has them), which it takes
    by name."""
    return pytest.mark.where.with_args(holds)


def quick(holds):
    """Where `holds` is not true of a test's parameters (if it has them) it is of the exhaustive
    part."""
    return pytest.mark.quick.with_args(holds)


def on(*names):
    """Collect a test only on these engines (without a name: on all that launch kernels)."""
    return where(lambda engine: engine in names if names else engine != "cpu")


def needs(*names):
    """Collect a test only on a machine that has these, keys of NEEDS."""
    return pytest.mark.needs(*names)


def versions(*numbers):
    """Parametrise `version` over kernel versions; None is the launcher's own choice (and all the
    CPU engine has)."""
    return pytest.mark.parametrize("version", [None, *numbers])
