"""Processes that compute shares of a batch, and what becomes of them."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from numdiff.device import over_batch
from numdiff.device.forks import Forks, can_fork
from tests.conftest import needs

pytestmark = needs("posix")
SHARES = [(np.full(3, k), None) for k in range(3)]


def where(x, other):
    assert other is None
    return np.append(x, os.getpid())


@pytest.fixture
def forks():
    made = Forks(where, 2)
    yield made
    made.close()


def test_each_share_has_a_process(forks):
    for _ in range(2):
        found = forks.results(SHARES)
        assert [x[0] for x in found] == [0, 1, 2]
        assert [x[-1] for x in found] == [os.getpid(), *(process for _, process in forks.processes)]
    assert len(forks.results(SHARES[:2])) == 2  # fewer shares than processes


def test_each_share_stays_on_one_core(monkeypatch):
    """…the one that is computed here, too: threads that shared it would take the core of another."""
    monkeypatch.setattr("numdiff.device.cpu.workers", lambda: 2)

    def parts(count):
        return len(over_batch(lambda share: share, count, 1 << 30))

    made = Forks(parts, 1)
    assert made.results([(4,), (4,)]) == [1, 1] and parts(4) == 2
    made.close()


def test_a_killed_process_costs_nothing_but_time(forks):
    os.kill(forks.processes[0][1], signal.SIGKILL)
    found = forks.results(SHARES)
    assert [x[0] for x in found] == [0, 1, 2] and found[1][-1] == os.getpid()


@needs("proc")
@pytest.mark.parametrize("elements", [3, 1 << 20])  # the second does not fit into a socket's buffer
def test_a_stopped_process_costs_nothing_but_time(monkeypatch, elements):
    monkeypatch.setattr("numdiff.device.forks.STOPPED", 0.3)
    monkeypatch.setattr("numdiff.device.forks.TRANSFER", 1)
    forks, shares = Forks(where, 2), [(np.full(elements, k), None) for k in range(3)]
    os.kill(forks.processes[0][1], signal.SIGSTOP)
    for _ in range(2):
        found = forks.results(shares)
        assert [x[0] for x in found] == [0, 1, 2] and found[1][-1] == os.getpid() != found[2][-1]
    os.kill(forks.processes[1][1], signal.SIGSTOP)
    forks.close()


def test_a_stuck_process_costs_nothing_but_time(monkeypatch):
    monkeypatch.setattr("numdiff.device.forks.PATIENCE", 0.3)
    own = os.getpid()

    def stays(x):
        if os.getpid() != own:
            time.sleep(600)
        return x

    forks = Forks(stays, 1)
    assert forks.results([(1,), (2,)]) == [1, 2]
    forks.close()


def test_an_error_is_raised_here():
    def fails(x):
        raise ValueError(f"no {x}")

    made = Forks(fails, 1)
    with pytest.raises(ValueError, match="no 1"):
        made.results([(1,), (2,)])
    made.close()


def test_signals_of_a_terminal_leave_them(forks):
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(forks.processes[0][1], number)
    assert forks.results(SHARES)[1][-1] == forks.processes[0][1]


@needs("proc")
def test_they_end_with_the_forks_and_with_their_process():
    made = Forks(where, 2)
    ids = [process for _, process in made.processes]
    made.close()
    for process in ids:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    text = (
        "import os, signal, sys; from numdiff.device.forks import Forks; made = Forks(print, 2)\n"
        "print(*(process for _, process in made.processes), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL and len(done.stdout.split()) == 2, done.stderr
    for process in map(int, done.stdout.split()):
        while is_running(process):
            time.sleep(0.01)


def is_running(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            # a zombie waits for its new parent
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_they_end_while_later_ones_live(forks):
    """…which have all that was open when they were forked."""
    later = Forks(where, 1)
    process = forks.processes[0][1]
    closing = threading.Thread(target=forks.close, daemon=True)
    closing.start()
    closing.join(20)
    ended = not closing.is_alive()
    later.close()
    assert ended
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_no_fork_with_mpi_or_a_thread(monkeypatch):
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    before, end = can_fork(), threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    assert not can_fork()
    end.set()
    thread.join()
    assert can_fork() is before
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", sys)
    assert not can_fork()
