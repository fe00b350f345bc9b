"""The emulator stands alone: it imports nothing else of numdiff, and needs NumPy and greenlet only."""

import ast
import configparser
import pathlib
import re
import runpy
import subprocess
import sys

import numdiff
from numdiff import emulator

PACKAGE = pathlib.Path(emulator.__file__).parent
NEEDED = {"numpy", "greenlet"}
# bfloat16, pictures as PNG, the plugin: imported where they are used
OPTIONAL = {"ml_dtypes", "PIL", "pytest"}

PROGRAM = '''
from importlib.machinery import PathFinder

found = PathFinder.find_spec


def find_spec(name, path=None, target=None):
    """Finds nothing of what the emulator may not need, as if it were not installed."""
    if name.partition(".")[0] in REFUSED or name.startswith("numdiff.") and not name.startswith("numdiff.emulator"):
        return None
    return found(name, path, target)


PathFinder.find_spec = find_spec
import numpy as np
from numdiff import emulator
from numdiff.emulator import pictures


def total(x, y):
    for i in range(x.size):
        y[0] += x[i] * x[i]


def outside(x):
    x[4] = 1


x, y = np.arange(4, dtype=np.float32), np.zeros(1, np.float32)
emulator.Emulator().launch(total, 1, 1, x, y)
assert y[0] == 14
try:
    emulator.Emulator().launch(outside, 1, 1, x)
except emulator.KernelFault as fault:
    assert "writes x[4]: index 4 is outside" in str(fault)
assert "<svg" in pictures.mma().svg()

with emulator.device(order="reversed"):
    from numba import cuda, float32

    @cuda.jit
    def neighbours(x, y):
        tile = cuda.shared.array(32, float32)
        t = cuda.threadIdx.x
        tile[t] = x[t]
        cuda.syncthreads()
        y[t] = tile[31 - t] + float32(1)

    x, y = cuda.to_device(np.arange(32, dtype=np.float32)), cuda.device_array(32, np.float32)
    neighbours[1, 32](x, y)
    assert (y.copy_to_host() == np.arange(32, 0, -1)).all()
    try:
        cuda.jit("void(float32[:])")
    except emulator.Unsupported as error:
        assert "leave it out, or pip install numba" in str(error)
try:
    neighbours[1, 32]
except emulator.Unsupported as error:
    assert "outside of `with numdiff.emulator.device():`" in str(error)
print("right")
'''


def test_its_imports():
    foreign = set()
    for file in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level < 2, f"{file.name}:{node.lineno} imports {node.module} of numdiff"
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else ([node.module] if isinstance(node, ast.ImportFrom) and not node.level else [])
            )
            foreign |= {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert foreign <= NEEDED | OPTIONAL and foreign >= NEEDED


def test_it_runs_where_nothing_else_is_installed(tmp_path):
    refused = [
        "numba",
        "numba_cuda",
        "llvmlite",
        "h5py",
        "mpi4py",
        "click",
        "PIL",
        "ml_dtypes",
        "scipy",
        "matplotlib",
        "cuda",
        "torch",
    ]
    program = tmp_path / "program.py"
    program.write_text(f"REFUSED = {refused}\n{PROGRAM}")
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(PACKAGE.parents[1])},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "right\n"


def test_its_own_distribution():
    """numdiff/emulator/pyproject.toml, from which the wheel of the emulator alone is made."""
    text, setup = (PACKAGE / "pyproject.toml").read_text(), configparser.ConfigParser()
    setup.read(PACKAGE.parents[1] / "setup.cfg")
    given, options = setup["options"], re.search(r"^dependencies = \[(.*)\]", text, re.MULTILINE)[1]
    assert {re.match(r"\w+", each.strip(' "'))[0] for each in options.split(", ")} == NEEDED
    assert "greenlet>=3.0" in options and "greenlet >=3.0" in given["install_requires"]
    assert f'requires-python = "{given["python_requires"]}"' in text
    assert emulator.__version__ == numdiff.__version__ == setup["metadata"]["version"]
    # one name in both, so that pytest takes one of them
    assert (
        "cuda_emulator = numdiff.emulator.pytest_plugin"
        in setup["options.entry_points"]["pytest11"]
    )
    assert 'cuda_emulator = "numdiff_emulator.pytest_plugin"' in text
    assert (PACKAGE / "LICENSE").read_text() == (PACKAGE.parents[1] / "LICENSE").read_text()


def test_the_distribution_s_example(tmp_path, capsys):
    text = re.search(
        r"^```py\n(.*?)^```", (PACKAGE / "DISTRIBUTION.md").read_text(), re.DOTALL | re.MULTILINE
    )[1]
    (tmp_path / "example.py").write_text(text.replace("numdiff_emulator", "numdiff.emulator"))
    runpy.run_path(str(tmp_path / "example.py"))
    assert capsys.readouterr().out == "[0 2 4 6 8]\n"
