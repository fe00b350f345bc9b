"""The tests that numba-cuda ships for its own compiler, in the emulator: a plugin of pytest.

    python -m pytest -n auto -c /dev/null --rootdir . --noconftest --import-mode importlib \\
        -p tests.emulator.numba_suite --pyargs numba.cuda.tests.cudapy numba.cuda.tests.doc_examples

`numba.cuda.tests.cudapy.test_atomics` is one file of them. numba_suite.txt lists the tests that do
not pass, in groups with the reason: a test that fails and is not listed is an error, and so is a
listed one that passes. Those of the group "Not run" are not started. Numba compiles each kernel
first, since some tests look at what it makes. Without `--noconftest` pytest imports
tests/conftest.py, and so numdiff.device, whose bfloat16 is then one of Numba's types of numbers.

Of numba-cuda 0.30.4's 1,684 tests 1,491 pass, 164 are listed, and numba-cuda skips 29. Needs the
packages that those tests import: `pip install filecheck cffi psutil`.
"""

import contextlib
import fnmatch
import importlib
import os
import pathlib
import signal
import unittest

import pytest

from numdiff import emulator

LIST = pathlib.Path(__file__).with_name("numba_suite.txt")
# its sitecustomize.py enters the emulator in processes that tests start
STARTUP = LIST.parent / "startup"
LIMIT = 240  # seconds of processor time of one test


class Late(BaseException):
    """A test takes longer than LIMIT; no `except Exception` catches this."""


def late(*signal_and_frame):
    raise Late(f"takes more than {LIMIT} s")


def pytest_configure(config):
    if not config.option.noconftest:
        raise pytest.UsageError("numba-cuda's tests need --noconftest (see numba_suite.py).")
    emulator.install(float64=True, compile=True)
    signal.signal(signal.SIGPROF, late)
    # the first failure of a part of a test is the test's
    unittest.TestCase.subTest = lambda *_, **__: contextlib.nullcontext()


def listed():
    """[(reason, pattern)]: after a line "# reason" the tests that do not pass for it."""
    reason, found = "", []
    for line in LIST.read_text().splitlines():
        if line.startswith("# "):
            reason = line[2:]
        elif line.strip():
            found.append((reason, line.strip()))
    return found


class NumbaModule(pytest.Module):
    """A file of tests under the name that numba-cuda gives it, by which kernels are pickled."""

    def _getobj(self):
        return importlib.import_module(f"numba.cuda.tests.{self.path.parts[-2]}.{self.path.stem}")

    def collect(self):
        try:
            _ = self.obj
        except Exception as error:
            return [NotImported.from_parent(self, name="import", error=error)]
        return super().collect()


class NotImported(pytest.Item):
    """Stands for the tests of a file that cannot be imported, so that the list may name it."""

    def __init__(self, error, **named):
        super().__init__(**named)
        self.error = error

    def runtest(self):
        raise self.error


def pytest_pycollect_makemodule(module_path, parent):
    return NumbaModule.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items):
    # here, since the workers of pytest-xdist collect, and must not find STARTUP themselves
    folders = STARTUP, STARTUP.parents[2], os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    patterns = listed()
    for item in items:
        package, module = item.path.parts[-2], item.path.stem
        name = ".".join([package, module, *item.nodeid.split("::")[1:]])
        for reason, pattern in patterns:
            if fnmatch.fnmatchcase(name, pattern):
                run = not reason.startswith("Not run")
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True, run=run))


@pytest.fixture
def initialize_from_pytest_config(request):
    """What numba-cuda's conftest.py, which is not installed, gives its test cases."""
    request.cls._test_dump_llvm = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
