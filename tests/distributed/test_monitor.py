"""The monitor process of rank 0: it reports which rank was killed if the launcher kills the others
at once."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from numdiff.distributed.monitor import Monitor
from tests.conftest import needs

RANK_0 = """
import json, sys
from numdiff.distributed import monitor as module
monitor = module.Monitor()
monitor.start(3)
assert monitor.is_ready()
monitor.tell(ranks={int(sys.argv[1]): 1}, all=True)
monitor.say_how_to_go_on(sys.argv[2])
print(monitor.process.pid, flush=True)
for line in sys.stdin:
    exec(line)
"""


@needs("proc")
@pytest.mark.parametrize(
    "deeds, said",
    [
        ("0", "rank 0 of 3 is gone"),
        ("1 0", "rank 1 of 3 is gone"),
        ("0 1", "rank 0 of 3 is gone"),
        ("monitor.tell(left=1) 1 0", "rank 0 of 3 is gone"),
        ("1 monitor.tell(left=1) 0", "rank 0 of 3 is gone"),
        ("monitor.tell(gone='rank_2') 0", "rank_2 of 3 is gone"),
        ("monitor.stop() 0", None),
        ("1 monitor.tell(done=True) 0", None),
        ("end", None),
    ],
)
def test_the_rank_that_was_killed_first_is_named(tmp_path, deeds, said):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    rank_0 = subprocess.Popen(
        [sys.executable, "-c", RANK_0, str(other.pid), str(tmp_path / "log")],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    folder = pathlib.Path(f"/proc/{int(rank_0.stdout.readline())}/fd")
    # until it watches both
    while sum("pidfd" in os.readlink(handle) for handle in folder.iterdir()) < 2:
        time.sleep(0.01)
    for deed in deeds.split():
        if deed in "01":
            process = (rank_0, other)[int(deed)]
            process.send_signal(signal.SIGKILL)
            process.wait()
        else:
            rank_0.stdin.write(
                "monitor.stop()\n" if deed == "end" else f"{deed}\nprint(flush=True)\n"
            )
            rank_0.stdin.flush()
            if deed != "end":
                rank_0.stdout.readline()
    other.kill()
    other.wait()
    if "1 0" in deeds or "0 1" in deeds:
        assert rank_0.poll() is not None
    _, err = rank_0.communicate(timeout=50)  # ends with the monitor, which has the same stderr
    sentence = f"Error: {said} (killed, out of memory, or its machine failed), so the job ends; start it again.\n"
    assert err == (sentence if said else "")
    assert not said or (tmp_path / "log").read_text() == sentence


@needs("proc")
def test_without_what_it_needs_nothing_is_said(monkeypatch, capfd):
    """…as where a container forbids what it does."""
    monkeypatch.setattr(
        "numdiff.distributed.monitor.script_command", lambda _: [sys.executable, "-c", ""]
    )
    monitor = Monitor()
    monitor.start(2)
    monitor.process.wait()
    assert not monitor.is_ready() and not monitor.is_ready() and not monitor.tell(gone="rank 1")
    monitor.stop()
    assert not Monitor().is_ready() and not Monitor().tell(done=True)
    assert capfd.readouterr().err == ""
