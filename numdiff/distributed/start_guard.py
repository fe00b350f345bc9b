"""Runs next to a rank while it starts MPI: `python start_guard.py PID SECONDS MONITOR IF_SLOW`;
ends with its input.

If that does not happen in time, it says on stderr which rank is missing, as far as this host can
tell, and kills PID. A Ctrl-C reaches it, too: PID, which cannot see one inside of MPI_Init, is
killed if it has not left that in PATIENCE seconds. It imports nothing of numdiff, so that it starts
quickly.
"""

import contextlib
import os
import select
import signal
import sys
import time

NAMES = (
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH's mpiexec
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", None),
)
PATIENCE = 2  # seconds


def numbers(environment):
    """(rank, ranks, local rank, local ranks) as a launcher has put them into an environment, None
    for missing ones; None if there is no launcher."""
    for names in NAMES:
        values = [environment.get(name or "", "") for name in names]
        if values[0].isdigit() and values[1].isdigit():
            return [int(v) if v.isdigit() else None for v in values]
    return None


def parent(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def siblings(pid):
    """{process: `numbers`} of the ranks that the parent of `pid`, the launcher, has; empty where
    the system does not say."""
    found = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        launcher = parent(pid)
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                if name.isdigit() and parent(name) == launcher:
                    with open(f"/proc/{name}/environ", "rb") as file:
                        pairs = (entry.partition(b"=") for entry in file.read().split(b"\0"))
                        found[int(name)] = numbers(
                            {
                                key.decode("ascii", "replace"): value.decode("ascii", "replace")
                                for key, _, value in pairs
                            }
                        )
    return {process: own for process, own in found.items() if own}


def gone(pid, own):
    """Ranks of this host that have ended, by the processes that `pid`'s parent still has; [] if
    none, or unknown."""
    rank, _, local, count = own
    if local is None or count is None:
        return []
    alive = {other[2]: other[0] for other in siblings(pid).values() if other[2] is not None}
    if not alive:
        return []
    # ranks are not assigned host by host: numbers unknown
    if any(r - k != rank - local for k, r in alive.items()):
        return []
    return [rank - local + k for k in range(count) if k not in alive]


def end(pid, monitor):
    """Kill a rank, and before it the process that would say so (monitor.py); 0: there is none."""
    for process in filter(None, (monitor, pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def end_after_interrupts(pid, monitor):
    """From now on an interrupt gives PID its PATIENCE, and rank 0's says the sentence that PID
    could not say."""

    def say_and_end(number, frame):
        if (numbers(os.environ) or [0])[0] == 0:
            os.write(2, b"Error: interrupted.\n")
        end(pid, monitor)

    signal.signal(signal.SIGALRM, say_and_end)
    signal.signal(signal.SIGINT, lambda number, frame: signal.alarm(PATIENCE))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # as which this process was started


def main(pid, seconds, monitor, if_slow):
    end_after_interrupts(pid, monitor)
    if select.select([sys.stdin.buffer], [], [], seconds)[0]:
        return
    own, missing = numbers(os.environ) or [0, 1, None, None], []
    with contextlib.suppress(OSError, ValueError, IndexError):
        missing = gone(pid, own)
    if own[0] in missing:
        missing = []  # a system that does not say
    whom = (
        f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}, which ended before (see above)"
        if missing
        else "another rank, which has ended, hangs, or is on a host that cannot be reached"
    )
    with contextlib.suppress(OSError):
        os.write(
            2,
            f"Error: rank {own[0]} of {own[1]}, at the start of MPI, has waited {seconds:g} s for {whom}, so "
            f"the job ends{if_slow}.\n".encode(),
        )
    time.sleep(1)  # let the others report it, too: launchers end all with the first
    end(pid, monitor)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
