"""No process that the project starts imports from the current folder."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

from numdiff import children
from numdiff.children import PACKAGE, module_path, python_command, script_command
from tests.conftest import exhaustive

PLANTED = "import os, pathlib; pathlib.Path({!r}).write_text(__name__)\n"
SHOWN = (
    "import json, numdiff.device.kernel_cache\n"
    "print(json.dumps([sys.argv[1:], sys.path, numdiff.__file__]))"
)
IMPORTED = "import {}; print(*sorted({{name.partition('.')[0] for name in sys.modules}} - {{'numdiff', '__main__'}}))"


def plant(folder, names):
    """Modules of these names that write a file when they run; returns that file."""
    trap = folder / "has run"
    for name in names:
        (folder / f"{name}.py").write_text(PLANTED.format(str(trap)))
    return trap


@functools.cache
def imported():
    """The names of all modules that a process which compiles kernels imports."""
    return run(python_command(IMPORTED.format("numdiff.device.kernel_cache")), "/").stdout.split()


def run(command, folder, **environment):
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("how", ["", ":"])
def test_nothing_planted_runs(tmp_path, monkeypatch, how):
    """Modules with the names of all that a process imports, in its folder; PYTHONPATH may even name
    that."""
    names = imported()
    assert {"json", "numpy", "numba"} <= set(names)
    trap = plant(tmp_path, [*names, "sitecustomize", "usercustomize", "numdiff"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", ".", str(tmp_path), *sys.path, "relative"])
    done = run(python_command(SHOWN, "a", 1), tmp_path, PYTHONPATH=how)
    arguments, path, package = json.loads(done.stdout)
    assert arguments == ["a", "1"] and package == str(PACKAGE / "__init__.py")
    assert all(os.path.isabs(folder) for folder in path) and str(tmp_path) not in path
    (tmp_path / "script.py").write_text("import contextlib, os, select, signal, sys, time")
    assert run(script_command(tmp_path / "script.py"), tmp_path, PYTHONPATH=how).returncode == 0
    assert not trap.exists(), trap.read_text()


def test_what_this_process_finds_is_found(tmp_path, monkeypatch):
    """A folder of PYTHONPATH or of the user's packages; also where the current folder no longer
    exists."""
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "something.py").write_text("where = __file__")
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    command = python_command("import something; print(something.where)")
    assert run(command, tmp_path).stdout.strip() == str(tmp_path / "installed" / "something.py")
    monkeypatch.chdir(tmp_path / "installed")
    assert str(tmp_path / "installed") not in module_path()
    # with an empty entry, the current folder, too
    monkeypatch.setenv("PYTHONPATH", f":{tmp_path / 'installed'}")
    assert str(tmp_path / "installed") in module_path()
    monkeypatch.setattr(children.os, "getcwd", lambda: os.stat(tmp_path / "removed"))
    assert str(tmp_path / "installed") in module_path()


def test_a_progress_bar_starts_no_process(tmp_path):
    """…as tqdm's own lock does where processes do not begin as forks: macOS, and Python 3.14."""
    trap = plant(tmp_path, ["signal", "threading", "multiprocessing"])
    code = (
        "import multiprocessing, sys; multiprocessing.set_start_method('spawn')\n"
        "from multiprocessing import resource_tracker\n"
        "from numdiff.progress_bar import progress_bar\n"
        "with progress_bar(2, 'testing', 'one', shown=True) as bar: bar.update()\n"
        "sys.exit(resource_tracker._resource_tracker._fd is not None)"
    )
    done = run(python_command(code), tmp_path)
    assert done.returncode == 0 and "testing" in done.stderr, done.stderr
    assert not trap.exists()


@exhaustive
@pytest.mark.parametrize(
    "arguments",
    [
        ("compile", "dit", "--capability", "7.5", "--preset", "tiny", "--precision", "fp32"),
        ("data", "info", "--no-sheet"),
        (
            "train",
            "dit",
            "--preset",
            "tiny",
            "--steps",
            "2",
            "--sample-count",
            "0",
            "--device",
            "cpu",
        ),
        ("info",),
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_run_nothing_from_their_folder(tmp_path, arguments):
    names = {
        *sys.stdlib_module_names,
        *(
            path.name.split(".")[0]
            for folder in sys.path
            if os.path.isdir(folder)
            for path in pathlib.Path(folder).iterdir()
        ),
    }
    trap = plant(tmp_path, [name for name in names if name.isidentifier()])
    numdiff = pathlib.Path(sys.executable).with_name("numdiff")
    done = run(
        [numdiff, *arguments],
        tmp_path,
        NUMDIFF_CACHE_DIR=str(tmp_path / "cache"),
        PYTHONSAFEPATH="",
    )
    assert "Traceback" not in done.stderr and done.returncode in (0, 1), done.stderr
    assert not trap.exists(), trap.read_text()
