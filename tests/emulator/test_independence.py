"""The emulator stands alone: it imports nothing else of numdiff, and needs NumPy and greenlet only."""
import ast
import pathlib
import subprocess
import sys

from numdiff import emulator

PACKAGE = pathlib.Path(emulator.__file__).parent
NEEDED = {"numpy", "greenlet"}
OPTIONAL = {"ml_dtypes", "PIL", "pytest"}  # bfloat16, pictures as PNG, the plugin: imported where they are used

PROGRAM = '''
import sys


class Refuse:
    """Refuses what the emulator may not need, as if it were not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED or name.startswith("numdiff.") and not name.startswith("numdiff.emulator"):
            raise ImportError(f"refused: {name}")


sys.meta_path.insert(0, Refuse())
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
print("right")
'''


def test_its_imports():
    foreign = set()
    for file in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level < 2, f"{file.name}:{node.lineno} imports {node.module} of numdiff"
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else (
                [node.module] if isinstance(node, ast.ImportFrom) and not node.level else [])
            foreign |= {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert foreign <= NEEDED | OPTIONAL and foreign >= NEEDED


def test_it_runs_where_all_else_is_refused(tmp_path):
    refused = ["numba", "numba_cuda", "llvmlite", "h5py", "mpi4py", "click", "PIL", "ml_dtypes", "scipy", "matplotlib",
               "cuda", "torch"]
    program = tmp_path / "program.py"
    program.write_text(f"REFUSED = {refused}\n{PROGRAM}")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True,
                          env={"PYTHONPATH": str(PACKAGE.parents[1])})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "right\n"
