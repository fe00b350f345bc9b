"""The transport `nccl`: sums in NCCL, launched into the stream of the step.

A sum that NCCL has accepted may still fail, as where the network breaks; the GPU then waits for
ever. So the watchdog asks NCCL for such errors at every beat, and a report does.

`check`, `ways` and `plan` are what distributed/exchange.py asks of a transport.
"""

import importlib.util
import threading

from ...device import copy_into
from ...distributed.exchange_base import Mail, NoExchange, shared_part, try_sums
from ...distributed.failures import LibraryFault
from ...errors import UsageError
from ...kernels.peer_pieces import MAX_RANKS


class NcclView:
    """A device array as NCCL's Python bindings take it (Numba's CUDA array interface, version 3)."""

    def __init__(self, array):
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "strides": None,
            "data": (array.backend.pointer(array), False),
            "version": 3,
            "stream": None,
        }


class NcclFault(LibraryFault):
    library = "NCCL"


class Faults:
    """Polls a communicator of NCCL for its errors, from any thread, until it is closed."""

    FINE = 0, 7  # ncclSuccess, ncclInProgress

    def __init__(self, nccl, communicator):
        self.nccl, self.communicator, self._lock = nccl, communicator, threading.Lock()

    def __call__(self):
        """A `NcclFault`, or None."""
        with self._lock:
            if self.communicator is None:
                return None
            try:
                result = int(self.communicator.get_async_error())
                return None if result in self.FINE else NcclFault(self._words(result))
            # another version of nccl4py: a run must not end for that
            except (AttributeError, TypeError):
                self.communicator = None
                return None
            except Exception as error:  # NCCL refuses to answer
                return NcclFault(str(error))

    def _words(self, result):
        last = self.communicator.get_last_error().strip().splitlines()
        return ": ".join([self.nccl.get_error_string(result), *last[:1]])

    def close(self):
        """From now on the communicator may be destroyed."""
        with self._lock:
            self.communicator = None


class NcclExchange(NoExchange):
    """NCCL's all-reduce, through nccl4py. Collective; raises `NumdiffError` on every rank where one
    cannot.

    A shared update gets the same all-reduce, and so the same bits: a reduce-scatter would move a
    third less, but NCCL does not promise that it adds in the same order.
    """

    name = "nccl"

    def __init__(self, communicator, parameters, partition=None):
        self.nccl = communicator.build(import_nccl)
        self.gpu = parameters.grad.backend
        self.mail = Mail(parameters, communicator.rank, communicator.size, self.gpu)
        self.largest = self.mail.largest()
        self.views = NcclView(parameters.grad), NcclView(self.mail.numbers)
        if partition := shared_part(partition):
            self._partials = parts_of(partition.partials, partition.piece_bounds)
            self._weights = parts_of(parameters.data, partition.bounds)
        unique = communicator.first(lambda: bytes(self.nccl.get_unique_id()))
        self.communicator = communicator.build(
            lambda: self.nccl.Communicator.init(
                communicator.size, communicator.rank, self.nccl.UniqueId.from_bytes(unique)
            )
        )
        # cuda.bindings 13.3 says of every array that it is on GPU 0 (its issue 2928), and nccl4py
        # refuses others then
        self.communicator._validate_buffer_device = lambda *_: None
        self.faults = Faults(self.nccl, self.communicator)
        self._ask_no_more = communicator.poll(self.faults)
        try:
            # NCCL connects
            communicator.build(
                try_sums, self, communicator, parameters.grad, shared_part(partition)
            )
        except Exception:
            self.abandon()
            raise

    def finish(self, loss):
        self.mail.write(loss)
        for view in self.views:
            self.communicator.allreduce(view, view, self.nccl.SUM, stream=self.gpu.stream_handle)
        copy_into(loss, self.mail.numbers[:1])

    def gather_partials(self):
        self._gather(self._partials)

    def gather_weights(self):
        self._gather(self._weights)

    def _gather_packed(self, mixed):
        self._gather(parts_of(mixed.packed, mixed.bounds))

    def _gather(self, views):
        """Every rank's part to all, as one group: parts differ in size, which NCCL's all-gather
        does not take."""
        with self.nccl.group():
            for rank, view in enumerate(views):
                self.communicator.broadcast(view, view, rank, stream=self.gpu.stream_handle)

    def check(self, status=None):
        if fault := self.faults():
            raise fault

    def close(self):
        self.gpu.synchronize()
        self.abandon()
        self.communicator.destroy()

    def abandon(self):
        self._ask_no_more()
        self.faults.close()


def parts_of(array, bounds):
    """The ranks' parts of an array, as NCCL takes them."""
    return [NcclView(array[first:stop]) for first, stop in zip(bounds, bounds[1:], strict=False)]


def import_nccl():
    """nccl4py's module; a `UsageError` says what to install."""
    try:
        import nccl.core

        return nccl.core
    # not installed, or without the library: nccl4py then raises errors of its own
    except Exception as error:
        reason = (
            "is not installed"
            if isinstance(error, ModuleNotFoundError)
            else f"cannot be used ({error})"
        )
        raise UsageError(
            f"--transport nccl: nccl4py {reason}; pip install 'nccl4py[cu13]', or use --transport "
            "auto."
        ) from error


def is_everywhere(communicator):
    """Whether every rank has nccl4py. Collective."""
    return all(communicator.gather(importlib.util.find_spec("nccl") is not None))


def check():
    import_nccl()


def ways(communicator, parameters, partition, requested):
    """Not where a rank lacks NCCL and the GPUs of one host can do without."""
    one_host = communicator.hosts == 1 and communicator.size <= MAX_RANKS
    if not requested and not is_everywhere(communicator) and one_host:
        return {}
    return {"nccl": lambda: NcclExchange(communicator, parameters, partition)}


def plan(communicator, parameters, partition):
    """NCCL has its own kernels."""
