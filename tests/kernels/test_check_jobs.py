"""`numdiff kernels check` in several processes."""

import dataclasses
import functools
import os
import re
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from numdiff.children import map_in_processes, python_command
from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.kernel_check import run as checking
from numdiff_cli.main import main

FORKS = sys.platform == "linux"


def lines_of(*arguments):
    """(what the command prints, without the seconds; its exit code)"""
    done = CliRunner().invoke(main, ["kernels", "check", *map(str, arguments)])
    return re.sub(r"\d+\.\d s$", "", done.output, flags=re.MULTILINE), done.exit_code


@pytest.fixture
def forks(monkeypatch):
    """Processes are forks, although the test's process may have further threads."""
    if not FORKS:
        pytest.skip("forks are safe on Linux alone")
    monkeypatch.setattr(checking, "start_method", lambda: "fork")


def failing(case, version):
    """A case that fails in one version, and takes longer than others in it."""

    def run(arrays, wanted):
        results = case.run(arrays, wanted)
        if wanted == version:
            case.run(arrays, wanted)
            raise ValueError(f"version {wanted} is wrong here.")
        return results

    return dataclasses.replace(case, run=run)


def test_order_and_form_stay(forks, monkeypatch):
    one = lines_of("softmax", "--jobs", 1)
    assert one[1] == 0 and one[0].count("  ok  ") == 10
    monkeypatch.setattr(checking, "check_case", None)  # of this process
    with pytest.raises(TypeError):
        list(checking.check(["softmax"]))
    monkeypatch.undo()
    monkeypatch.setattr(checking, "start_method", lambda: "fork")
    assert lines_of("softmax", "--jobs", 3) == one


def test_a_failing_case_is_reported_in_its_place(forks, monkeypatch):
    cases = [case for case in checking.CASES if case.name == "softmax"]
    monkeypatch.setattr(checking, "CASES", [failing(cases[0], 2), *cases[1:]])
    lines, code = lines_of("softmax", "--jobs", 2)
    assert (lines, code) == lines_of("softmax", "--jobs", 1) and code == 1
    assert [line.split(")")[1].split()[:3:2] for line in lines.splitlines()[:3]] == [
        ["v1", "ok"],
        ["v2", "FAILED"],
        ["v1", "ok"],
    ]
    assert "FAILED  version 2 is wrong here." in lines
    assert "1 of 5 kernel versions did not pass" in lines


def test_a_killed_worker_is_one_sentence(forks, monkeypatch):
    case = next(case for case in checking.CASES if case.name == "softmax")
    kill = lambda arrays, version: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    monkeypatch.setattr(checking, "CASES", [dataclasses.replace(case, run=kill)])
    with pytest.raises(NumdiffError, match=r"killed, or out of memory, in softmax .* --jobs 1"):
        list(checking.check(["softmax"], jobs=2))


def test_other_errors_are_raised_here(forks, monkeypatch):
    case = next(case for case in checking.CASES if case.name == "softmax")
    wrong = functools.partial(int, "not a number of the")  # takes no arrays
    monkeypatch.setattr(checking, "CASES", [dataclasses.replace(case, run=wrong)])
    with pytest.raises(TypeError):
        list(checking.check(["softmax"], jobs=2))


def test_new_processes_import_the_cases(monkeypatch):
    """…as on macOS and Windows, once the first cases have taken some time."""
    monkeypatch.setattr(checking, "start_method", lambda: "spawn")
    monkeypatch.setattr(checking, "SPAWN_PAYS", 0.0)
    found = list(checking.check(["softmax"], jobs=2))
    assert [outcome.name for outcome in found] == [
        outcome.name for outcome in checking.check(["softmax"])
    ]
    assert all(outcome.passed for outcome in found)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no PYTHONSAFEPATH")
def test_new_processes_import_nothing_from_the_current_folder(tmp_path, monkeypatch):
    """…not even where PYTHONPATH names it."""
    for name in ("multiprocessing", "json", "numpy", "sitecustomize", "usercustomize", "numdiff"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('from the current folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":")
    assert list(map_in_processes(checking.relative_error, [(1.0, 1.0)], 1, "spawn")) == [0.0]
    assert os.environ["PYTHONPATH"] == ":" and "PYTHONSAFEPATH" not in os.environ


@pytest.mark.skipif(not FORKS, reason="sends signals to a group of processes")
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_all_processes(number, code):
    command = ["kernels", "check", "groupnorm_backward", "--jobs", "2"]
    with subprocess.Popen(
        python_command("from numdiff_cli.main import main; main()", *command),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert "  ok  " in process.stdout.readline()
        os.killpg(process.pid, number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert said.startswith("Error: ") and said.count("\n") == 1
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_gpu_stays_in_one_process():
    with pytest.raises(UsageError, match="--jobs 2 is of the emulator"):
        list(checking.check(["softmax"], "cpu", jobs=2))
