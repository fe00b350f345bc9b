"""Numba's simulator (NUMBA_ENABLE_CUDASIM=1) cannot stand in for its CUDA compiler in numdiff: one
sentence says so. The emulator runs with it (tests/emulator/test_host.py)."""

import os
import subprocess
import sys

SENTENCE = (
    "NUMBA_ENABLE_CUDASIM is set, so Numba's simulator stands in for its CUDA compiler: unset it; "
)


def test_the_simulator_is_refused():
    found = subprocess.run(
        [sys.executable, "-c", "from numdiff_cli.main import main; main(['info'])"],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 2 and found.stderr.splitlines()[-1].startswith("Error: " + SENTENCE)
    assert "Traceback" not in found.stderr
