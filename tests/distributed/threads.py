"""Ranks as threads of one process, with arrays that all can read in the place of GPUs."""

import threading

import numpy as np

from numdiff.distributed import exchange, exchange_base
from numdiff.distributed.failures import LibraryFault
from numdiff.errors import NumdiffError
from numdiff.extras.transports import copies, peer, peer_exchange


class Threads:
    """A communicator of threads, for what runs on GPUs with a memory that all can read."""

    def __init__(self, rank, size, board, barrier):
        self.rank, self.size, self.hosts, self.local_size, self.transport = rank, size, 1, 1, "auto"
        self.board, self.wall = board, barrier

    def gather(self, value):
        self.board[self.rank] = value
        self.wall.wait()
        values = list(self.board)
        self.wall.wait()
        return values

    def build(self, function, *arguments):
        value = error = None
        try:
            value = function(*arguments)
        except (NumdiffError, LibraryFault) as met:
            error = str(met)
        for text in filter(None, self.gather(error)):
            raise NumdiffError(text)
        return value

    def everywhere(self, function, *arguments):
        return self.gather(self.build(function, *arguments))

    def first(self, function):
        return self.gather(function() if self.rank == 0 else None)[0]

    def poll(self, fault):
        self.polled = [*getattr(self, "polled", ()), fault]
        return lambda: self.polled.remove(fault)


class GpuWithStreams:
    """Shares NumPy arrays between threads as a GPU shares its memory between processes."""

    def __init__(self, refuse=False):
        self.refuse, self.closed = refuse, 0

    def share(self, array):
        if self.refuse:
            raise NumdiffError("the CUDA driver reported CUDA_ERROR_NOT_SUPPORTED.")
        return array

    def open_shared(self, shared):
        return shared

    def close_shared(self, arrays):
        self.closed += 1

    def synchronize(self):
        pass


class GpuArray(np.ndarray):
    """A NumPy array that says which GPU it is on; so do its slices."""

    def __array_finalize__(self, source):
        self.backend = getattr(source, "backend", None)


MPI_EXCHANGE = exchange.MpiExchange


def no_mpi(*_):
    raise NumdiffError("threads have no MPI.")


def on_threads(count, monkeypatch, body, refuse=()):
    """`body(communicator, gradient)` on `count` threads, each with a fake GPU; returns their
    results."""
    barrier, board, results = threading.Barrier(count, timeout=30), [None] * count, [None] * count
    for module in (copies, exchange, exchange_base, peer_exchange):
        monkeypatch.setattr(module, "zeros", lambda shape, dtype, gpu: np.zeros(shape, dtype))
    monkeypatch.setattr(exchange, "is_device", lambda array: True)
    waiting = threading.Barrier(count, timeout=30)
    monkeypatch.setattr(peer_exchange, "peer_barrier", lambda *arguments: waiting.wait())
    if exchange.MpiExchange is MPI_EXCHANGE:
        for module in (exchange, peer):
            monkeypatch.setattr(module, "MpiExchange", no_mpi)

    def work(rank):
        gradient = np.zeros(1000, np.float32).view(GpuArray)
        gradient.backend = GpuWithStreams(rank in refuse)
        results[rank] = body(Threads(rank, count, board, barrier), gradient)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results
