"""The kernels themselves, run on the CPU: their tests again, on tiny shapes, in Numba's CUDA simulator.

Numba reads NUMBA_ENABLE_CUDASIM when it is imported, so the tests run in processes of their own: two, as the simulator
is slow. What it cannot run (warp shuffles) its tests skip.
"""
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

from tests.conftest import SIMULATED

ROOT = pathlib.Path(__file__).parents[1]
# Every operation on its smallest shape, the elementwise ones also with a ragged end, and what has no shapes to name.
# The launcher's own choice of version (None) is one of the numbered ones over again.
CHOSEN = ("(minimal or odd and elementwise or philox or timestep or integers or learning_rate or advance or latch or "
          "ring or split_k and 4-shape0) and not None")
WITHOUT = {"test_stored_values.py"}  # its shapes are those of a model
LIMIT = 300  # seconds


@pytest.mark.slow
@pytest.mark.skipif(SIMULATED, reason="these are the tests that run already")
def test_kernels_in_the_simulator(tmp_path):
    files = sorted(p for folder in ("device", "kernels") for p in (ROOT / "tests" / folder).glob("test_*.py"))
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    logs = [tmp_path / "even.txt", tmp_path / "odd.txt"]
    processes = []
    try:
        for k, log in enumerate(logs):
            command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-rp", "-k", CHOSEN,
                       *map(str, files[k::2])]
            with open(log, "w") as output:
                processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output,
                                                  stderr=subprocess.STDOUT))
        end = time.monotonic() + LIMIT
        codes = [process.wait(max(end - time.monotonic(), 0)) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    report = "\n".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)
    assert codes == [0, 0], report
    passed = re.findall(r"^PASSED \S*?(test_\w+\.py)::", report, re.MULTILINE)
    assert len(passed) > 180, report
    with_kernels = {p.name for p in files if "engine" in p.read_text(encoding="utf-8")}
    assert with_kernels - set(passed) <= WITHOUT, "no test of these files ran"
