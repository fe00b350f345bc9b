"""A transport that fails in the middle of a run: one sentence, and the last checkpoint stays."""

import multiprocessing
import re
import time
import types

import pytest

from numdiff.distributed import communicator, failures, watchdog
from numdiff.errors import NumdiffError
from numdiff.extras.transports import nccl_exchange
from numdiff.progress import progress
from numdiff.training.checkpoint import load_checkpoint, newest_checkpoint
from tests.conftest import exhaustively, needs
from tests.distributed.test_distributed import run, task
from tests.distributed.watched import watched

GO_ON = "so the job ends; start it again."
RESUME = "so the job ends; continue from its last checkpoint, on GPUs with another --transport if this repeats, with: "


@pytest.fixture(autouse=True)
def nothing_to_resume(monkeypatch):
    """Whatever was trained in this process before: messages name its command."""
    monkeypatch.setattr(progress, "resume", None)


@needs("mpi")
@pytest.mark.parametrize(
    "name, who",
    [
        ("unreachable", "Error: rank 1 of 2 failed: "),
        *exhaustively(("unreachable_all", '{"error": "')),
    ],
)
def test_sums_that_mpi_refuses_end_the_job_with_a_sentence(tmp_path, name, who):
    started = time.time()
    result = run(task(2, name, tmp_path))
    assert result.returncode != 0 and time.time() - started < 60
    said = [line.strip('"}') for line in result.stderr.splitlines() if "MPI failed (" in line]
    assert (
        len(said) == 1 and said[0].startswith(f"{who}MPI failed (") and f"), {RESUME}" in said[0]
    ), said
    assert "ommunicator" in said[0] and len(said[0].partition(RESUME)[0]) < 150  # what was wrong
    assert "Traceback" not in result.stderr
    assert load_checkpoint(newest_checkpoint(next((tmp_path / "runs").iterdir())))[1]["step"] >= 2


def test_errors_of_nccl_are_said_like_those_of_mpi():
    error = type("NcclError", (Exception,), {"__module__": "nccl.core.errors"})(
        "unhandled system\nerror"
    )
    assert failures.sentence(error) == f"NCCL failed (unhandled system error), {GO_ON}"
    assert failures.failed_library(ValueError("nccl")) is None


def test_the_watchdog_words_a_fault_as_the_job_does(monkeypatch):
    """A communicator of some of the ranks names the rank in the job."""
    some = communicator.Communicator.__new__(communicator.Communicator)
    some.rank, some.size, some._watchdog = 0, 2, None
    assert some.poll(lambda: None)() is None
    polled = []
    some._watchdog = types.SimpleNamespace(rank=3, size=4, poll=polled.append)
    some.poll(lambda: None)
    some.poll(lambda: nccl_exchange.NcclFault("unhandled system error"))
    assert [failure() for failure in polled] == [
        None,
        f"Error: rank 3 of 4 failed: NCCL failed (unhandled system error), {GO_ON}",
    ]


@pytest.mark.parametrize(
    "failing, waited_for",
    [([1], []), ([], [2]), *exhaustively(([0], []), ([0, 1, 2], []), ([], [0]), ([], [1, 2]))],
)
def test_a_fault_of_a_library_ends_all_with_one_sentence(failing, waited_for, capfd):
    context = multiprocessing.get_context("spawn")
    queues, ready = [context.Queue() for _ in range(3)], context.Queue()
    processes = [
        context.Process(target=watched, args=(rank, queues, False, ready, failing, 2.0, waited_for))
        for rank in range(3)
    ]
    for process in processes:
        process.start()
    assert all(ready.get(timeout=30) for _ in processes)
    for process in processes:
        process.join(20)
        assert process.exitcode == 1
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and re.fullmatch(r"Error: rank \d failed\.", said[0]), said
    assert int(said[0][12]) in failing + waited_for


def test_of_a_stack_of_calls_the_reason_is_said():
    error = type("Exception", (RuntimeError,), {"__module__": "mpi4py.MPI"})(
        "Other MPI error, error stack:\ninternal_Barrier(84): MPI_Barrier(comm=0x84) failed\n"
        "MPIDI_recv(12): Connection reset\n"
    )
    assert failures.failed_library(error) == "MPI failed (Other MPI error: Connection reset)"


def test_a_rank_that_was_stopped_says_so_of_itself():
    said = [watchdog.sentence("silent", [1], rank, 2, 20) for rank in range(2)]
    assert "waits for rank 1, of which nothing has been heard for 20 s" in said[0]
    assert (
        "rank 1 of 2" in said[1] and "was not heard for 20 s (it was stopped, or cut off" in said[1]
    )
    assert "waits for" not in said[1]


def test_who_fails_in_what_others_wait_for_leaves_word_with_the_watchdog():
    some = communicator.Communicator.__new__(communicator.Communicator)
    some._watchdog, left = types.SimpleNamespace(rank=3, size=4, failure=None), []
    some.gather = lambda error: left.append(some._watchdog.failure) or [error]
    assert some.build(lambda: 5) == 5
    with pytest.raises(NumdiffError, match="^the buffer is elsewhere[.]$"):
        some.build(lambda: raise_(NumdiffError("the buffer is elsewhere.")))
    assert left == [
        None,
        f"Error: rank 3 of 4 failed while others wait for it: the buffer is elsewhere, {GO_ON}",
    ]
    assert some._watchdog.failure is None


def raise_(error):
    raise error
