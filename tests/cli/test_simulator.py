"""Numba's simulator (NUMBA_ENABLE_CUDASIM=1) cannot stand in for its CUDA compiler: one sentence
says so."""

import os
import subprocess
import sys

import pytest

SENTENCE = (
    "NUMBA_ENABLE_CUDASIM is set, so Numba's simulator stands in for its CUDA compiler: unset it; "
)
INFO = "from numdiff_cli.main import main; main(['info'])"
EMULATED = "from numba import cuda; import numdiff.emulator; numdiff.emulator.device().__enter__()"


@pytest.mark.parametrize(
    "code, status, begins",
    [(INFO, 2, "Error: "), (EMULATED, 1, "numdiff.emulator.faults.Unsupported: ")],
    ids=["a command", "the emulator"],
)
def test_the_simulator_is_refused(code, status, begins):
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == status and found.stderr.splitlines()[-1].startswith(
        begins + SENTENCE
    ), found.stderr
    assert "Traceback" not in found.stderr or code == EMULATED
