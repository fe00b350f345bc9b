"""Processes that a watchdog joins, without MPI; a module of its own, so that they start quickly."""

import time

from numdiff.distributed.watchdog import TIMEOUT, Watchdog
from numdiff.progress import waiting


class Queues:
    """A communicator of processes joined by queues."""

    def __init__(self, rank, queues):
        self.rank, self.size, self.queues = rank, len(queues), queues
        self.early = {}  # values of ranks that are one gather ahead

    def gather(self, value):
        for queue in self.queues:
            queue.put((self.rank, value))
        values, self.early = self.early, {}
        while len(values) < self.size:
            rank, value = self.queues[self.rank].get(timeout=30)
            (self.early if rank in values else values)[rank] = value
        return [values[rank] for rank in range(self.size)]


def watched(rank, queues, farewell, ready, failing=(), timeout=TIMEOUT, waited_for=()):
    """A rank that leaves with a farewell, or waits for its end; a library fails on those of
    `failing`. Those of `waited_for` have failed and wait to say so; the others have not come."""
    watchdog = Watchdog(Queues(rank, queues), ["127.0.0.1"], timeout)
    watchdog.poll(lambda: f"Error: rank {rank} failed." if rank in failing else None)
    ready.put(watchdog.works and watchdog.address == "127.0.0.1")
    if farewell:
        watchdog.stop()
    else:
        if rank in waited_for:
            watchdog.failure = f"Error: rank {rank} failed."
            with waiting():
                time.sleep(60)
        time.sleep(60)
