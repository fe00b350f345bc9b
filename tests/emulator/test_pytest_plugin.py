"""The pytest plugin: marks, the fixture, `--emulate`, reports of faults, and what others' tests
notice of it."""

import pytest
from numba import cuda  # noqa: F401  imported once, for all of pytester's runs

from tests.conftest import exhaustive

pytest_plugins = ["pytester"]
PLUGIN = "numdiff.emulator.pytest_plugin"
SMOOTH = """
import numpy as np
import pytest
from numba import cuda

ONES = np.ones(64, np.float32)

@cuda.jit
def smooth(x, y):
    tile = cuda.shared.array(64, np.float32)
    t = cuda.grid(1)
    tile[t] = x[t]
    y[t] = tile[t] + tile[(t + 1) % 64]

@cuda.jit
def take(x, y):
    y[cuda.grid(1)] = x[cuda.grid(1) * 8]
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run a file's tests with the plugin, in this process."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]\n")

    def call(text, *arguments, head=SMOOTH, how=pytester.runpytest_inprocess):
        pytester.makepyfile(test_it=head + text)
        return how("-p", PLUGIN, "-p", "no:cacheprovider", *arguments)

    return call


def test_a_mark_runs_a_test_in_each_order(run):
    result = run("""
@pytest.mark.emulate(cc=(8, 0), orders=3, seed=5)
def test_take(cuda_emulator, cuda_thread_order, request):
    take[1, 8](ONES, y := np.zeros(8, np.float32))
    assert y.all() and cuda_emulator.cc == (8, 0) and cuda_emulator.seed == 5
    assert cuda_emulator.order == cuda_thread_order and cuda_thread_order in request.node.name

@pytest.mark.emulate
@pytest.mark.parametrize("n", [4, 8])
def test_parameters(n, cuda_emulator):
    cuda_emulator.launch(take, 1, n, ONES, np.zeros(n, np.float32))
""")
    result.assert_outcomes(passed=5)


def test_the_command_line_s_options_are_below_the_mark_s(run):
    run(
        """
def test_fixture(cuda_emulator):
    assert cuda_emulator.cc == (7, 5) and "race" not in cuda_emulator.checks and "bounds" in cuda_emulator.checks

@pytest.mark.emulate(cc="8.6")
def test_mark(cuda_emulator):
    assert cuda_emulator.cc == (8, 6) and "race" not in cuda_emulator.checks
""",
        "--emulate-cc=7.5",
        "--emulate-without=race,float64",
    ).assert_outcomes(passed=2)


def test_a_fault_names_the_launch_and_advises(run):
    result = run("""
def test_smooth(cuda_emulator):
    y = np.zeros(64, np.float32)
    smooth[1, 64](ONES, y)
""")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            ">       smooth[[]1, 64[]](ONES, y)",
            "E *KernelFault: kernel smooth has 3 faults:",
            "test_it.py:20: KernelFault",
            "*- CUDA emulator -*",
            "    at test_it.py:11 in smooth, *, thread (1, 0, 0): tile[[]t[]] = x[[]t[]]",
            "    launched at test_it.py:20 in test_smooth: smooth[[]1, 64[]](ONES, y)",
            "    Put cuda.syncthreads() between the two*",
        ]
    )
    result.stdout.no_fnmatch_line("*launch.py*")


def test_all_tests_are_emulated_from_the_first_import_on(run):
    result = run(
        """
import unittest

@cuda.jit("void(float32[:])")
def double(x):
    x[cuda.threadIdx.x] *= np.float32(2)

@pytest.fixture(scope="module")
def on_device():
    return cuda.to_device(ONES)

def test_signature(on_device):
    double[1, 64](on_device)
    assert on_device.copy_to_host().sum() == 128

class TestCase(unittest.TestCase):
    def test_unittest(self):
        assert cuda.is_available()
        double[1, 64](ONES.copy())
""",
        "--emulate",
        "--emulate-order=reversed",
    )
    result.assert_outcomes(passed=2)
    assert (
        not isinstance(cuda.to_device, type(None)) and "emulator" not in cuda.to_device.__module__
    )


def test_wrong_options_are_one_sentence(run):
    result = run("""
@pytest.mark.emulate(orders=4)
def test_orders():
    pass
""")
    result.stderr.fnmatch_lines(
        ["ERROR: *test_orders: pytest.mark.emulate: orders: 4 orders: there are 1*"]
    )
    result = run("", "--emulate-without=rage")
    result.stderr.fnmatch_lines(["*--emulate-without: there is no check rage: use some of bounds*"])


def test_counts_are_in_the_summary(run):
    result = run("""
@pytest.mark.emulate(counts=True)
def test_take():
    take[1, 8](ONES, np.zeros(8, np.float32))
""")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "not coalesced: 4.5 sectors per request, where 1 would do (requests: 2)",
            "    at test_it.py:16: y[[]cuda.grid(1)[]] = x[[]cuda.grid(1) * 8[]]",
        ]
    )


def test_other_projects_import_nothing_of_it(run, pytester):
    result = run(
        """
import sys

def test_modules():
    assert "numpy" not in sys.modules and sorted(name for name in sys.modules if name.startswith("numdiff.")) == [
        "numdiff.emulator", "numdiff.emulator.options", "numdiff.emulator.pytest_plugin"]
""",
        head="",
        how=pytester.runpytest_subprocess,
    )
    result.assert_outcomes(passed=1)


@exhaustive
def test_workers_report_faults_and_counts(run, pytester):
    result = run(
        """
def test_smooth():
    smooth[1, 64](ONES, np.zeros(64, np.float32))

def test_take():
    take[1, 8](ONES, np.zeros(8, np.float32))
""",
        "-p",
        "xdist",
        "-n",
        "2",
        "--emulate",
        "--emulate-counts",
        "--emulate-orders=2",
        how=pytester.runpytest_subprocess,
    )
    result.assert_outcomes(failed=2, passed=2)
    result.stdout.fnmatch_lines(["    launched at *test_it.py:19 in test_smooth:*"])
    result.stdout.fnmatch_lines(
        ["not coalesced: 4.5 sectors per request, where 1 would do (requests: 4)"]
    )
