"""How the ranks' gradients become one sum: the transports `mpi`, `peer` and `nccl` behind one interface.

    with exchange.watch():      around the backward pass of the step's last microbatch: complete buckets may leave
        …
    exchange.finish(loss)       afterwards the flat gradient and `loss` (1,) hold the sums over all ranks
    exchange.check()            at a report: raises if the device saw a fault; takes `exchange.status`, where there is
                                one, from a caller that has read it back already
    exchange.close()            at the end

    transport  where the sum is made                    its place in a captured step
    mpi        in MPI, from pinned host memory, bucket   the graph is cut where a bucket is complete and before the
               by bucket while the backward goes on      update; between two parts the host sends on what has arrived
    peer       on the GPUs (kernels/peer_reduce.py)      inside the graph, six launches after the backward
    nccl       in NCCL                                   inside the graph, two calls after the backward

On CPU ranks `mpi` sums the NumPy gradient in place. Every rank ends with the same bits: `peer` by its order, `mpi` and
`nccl` because their libraries compute each sum once, or in an order that gives the same on all sides; this is checked
(`Trainer.check_ranks`), not assumed.
"""
import atexit
import contextlib
import functools
import os
import time

import numpy as np

from ..device import HostTwin, between, copy_into, download, fill_zero, is_device, zeros
from ..errors import NumdiffError, UsageError
from ..kernels.peer_reduce import MAX_RANKS, STRIDE, peer_all_gather, peer_barrier, peer_reduce_scatter, peer_sum
from ..progress import tick, waiting
from .buckets import Plan, Watch, parameters_of

TEST_LIMIT = 60_000  # milliseconds that a rank may be late in the trial of `peer`: it may have to compile kernels
STEP_LIMIT = 600_000  # and in a step
EAGER = 1e-3  # seconds for which a waiting CPU rank only yields its core, before it begins to sleep
NAP = 2e-4  # seconds of such a sleep


class NoExchange:
    """For a single process: the sum over one rank is already there."""

    name, why = "none", ""

    def watch(self):
        return contextlib.nullcontext()

    def finish(self, loss):
        pass

    def check(self, status=None):
        pass

    def close(self):
        pass


# mpi ------------------------------------------------------------------------------------------------------------------

class HostArray:
    """Has the interface of a `HostTwin` for an array that is already on the host."""

    def __init__(self, array):
        self.host = array

    def fetch(self, first, stop):
        pass

    def fetched(self, first):
        return True

    def send(self, first, stop):
        pass

    def join(self):
        pass


class MpiExchange(NoExchange):
    """Bucket after bucket by MPI's Iallreduce, all ranks in the same order, while the backward pass goes on."""

    name = "mpi"

    def __init__(self, communicator, parameters):
        self.comm, self.MPI = communicator.comm.Dup(), communicator.MPI
        self.backend = parameters.grad.backend if is_device(parameters.grad) else None
        self.plan = Plan(parameters)
        self.mail = zeros(1, np.float32, self.backend)  # the loss travels here, as its own array may move
        twin = HostTwin if self.backend else HostArray
        self._gradient, self._mail = twin(parameters.grad), twin(self.mail)
        self._waiting = []  # (twin, first, stop) on their way to the host, in the order of leaving
        self._requests = []  # (request, twin, first, stop) on their way to the other ranks
        self._left = 0  # buckets that have left in this step

    def watch(self):
        return Watch(self)

    def begin(self, records):
        if self.plan.records != len(records):
            self.plan.make([parameters_of(record.backward) for record in reversed(records)])

    def played(self, number):
        for bucket in self.plan.leaving.get(number, ()):
            between(self.backend, functools.partial(self._leave, bucket))
        self._progress()

    def finish(self, loss):
        copy_into(self.mail, loss)
        between(self.backend, self._finish)
        copy_into(loss, self.mail)

    def _leave(self, bucket):
        """Send off a bucket, and those before it in the order, in case an operation was left out."""
        while bucket in self.plan.order[self._left:]:
            self._depart(self._gradient, *self.plan.buckets[self.plan.order[self._left]])
            self._left += 1
        self._progress()

    def _depart(self, twin, first, stop):
        twin.fetch(first, stop)
        self._waiting.append((twin, first, stop))

    def _progress(self):
        """Move every part on by one stage, if it can go. MPI itself makes progress only while it is called."""
        while self._waiting and self._waiting[0][0].fetched(self._waiting[0][1]):
            twin, first, stop = self._waiting.pop(0)
            request = self.comm.Iallreduce(self.MPI.IN_PLACE, twin.host[first:stop], self.MPI.SUM)
            self._requests.append((request, twin, first, stop))
        going = []
        for item in self._requests:
            request, twin, first, stop = item
            if request.Test():
                tick()
                twin.send(first, stop)
            else:
                going.append(item)
        self._requests = going

    def _finish(self):
        if self.plan.order[self._left:]:
            self._leave(self.plan.order[-1])
        self._depart(self._mail, 0, 1)
        wait(self._arrived, patient=self.backend is None)
        self._gradient.join()
        self._mail.join()
        self._left = 0

    def _arrived(self):
        self._progress()
        return not (self._waiting or self._requests)


def wait(done, patient=True):
    """Call `done()`, which waits for all ranks, until it is true. MPI waits by spinning; here others may use the core
    meanwhile.

    patient: after a short while, sleep between calls, as there may be more ranks than cores.
    """
    start = time.perf_counter()
    with waiting():
        while not done():
            if patient and time.perf_counter() - start > EAGER:
                time.sleep(NAP)
            elif hasattr(os, "sched_yield"):
                os.sched_yield()
            else:
                time.sleep(0)


# peer -----------------------------------------------------------------------------------------------------------------

class PeerExchange(NoExchange):
    """The GPUs of one host read each other's memory: kernels/peer_reduce.py, between barriers on the device.

    Collective; raises `NumdiffError` on every rank where one of them cannot.
    """

    name = "peer"

    def __init__(self, communicator, parameters):
        self.communicator, self.rank = communicator, communicator.rank
        self.gpu, self.gradient = parameters.grad.backend, parameters.grad
        self.mail, self.total = (zeros(1, np.float32, self.gpu) for _ in range(2))
        self.flags = zeros(MAX_RANKS * STRIDE, np.int32, self.gpu)
        self.counter, self.status = (zeros(1, np.int32, self.gpu) for _ in range(2))
        self.limit = TEST_LIMIT
        self.gpu.synchronize()  # the flags are zero before anybody may write to them
        try:
            shared = communicator.everywhere(self._share)
            self.gradients, self.mails, self.all_flags = communicator.build(self._open, shared)
            communicator.build(self._try)
        except NumdiffError:
            self.gpu.close_shared()
            raise
        self.limit = STEP_LIMIT
        atexit.register(self.close)

    @classmethod
    def planned(cls, parameters, size):
        """Launch the kernels of an exchange between `size` ranks on the stand-in for a GPU that holds the
        parameters."""
        self, like = cls.__new__(cls), parameters.grad
        self.rank, self.limit, self.mail, self.total = 0, STEP_LIMIT, *(zeros(1, np.float32, like) for _ in range(2))
        self.counter, self.status = (zeros(1, np.int32, like) for _ in range(2))
        self.gradients, self.mails = [like] * size, [self.mail] * size
        self.all_flags = [zeros(MAX_RANKS * STRIDE, np.int32, like)] * size
        self.finish(zeros(1, np.float32, like))

    def _share(self):
        return [self.gpu.share(array) for array in (self.gradient, self.mail, self.flags)]

    def _open(self, shared):
        """The three arrays of every rank: its own as they are, the others' mapped."""
        ranks = [[self.gpu.open_shared(s) for s in arrays] if rank != self.rank else
                 [self.gradient, self.mail, self.flags] for rank, arrays in enumerate(shared)]
        return [list(column) for column in zip(*ranks, strict=True)]

    def _try(self):
        """Add up numbers whose sum is known, twice, by the same launches as in a step."""
        size, pattern = self.communicator.size, np.arange(self.gradient.size, dtype=np.int32) % 251
        loss = zeros(1, np.float32, self.gpu)
        for round in range(2):
            copy_into(self.gradient, (pattern + (self.rank + round)).astype(np.float32))
            copy_into(loss, np.array([self.rank], np.float32))
            self.finish(loss)
            self.check()
            expected = size * (pattern + round) + size * (size - 1) // 2
            wrong = np.count_nonzero(download(self.gradient) != expected)
            if wrong or download(loss)[0] != size * (size - 1) / 2:
                raise NumdiffError(f"in the trial {wrong} of {expected.size} sums over the peers' memory were wrong.")
        fill_zero(self.gradient)
        self.gpu.synchronize()

    def finish(self, loss):
        copy_into(self.mail, loss)
        self._barrier()  # every rank's gradient and loss are ready
        peer_reduce_scatter(self.gradients, self.rank)
        peer_sum(self.mails, self.total)
        self._barrier()  # every slice is added up
        peer_all_gather(self.gradients, self.rank)
        self._barrier()  # nobody reads this rank's memory any longer
        copy_into(loss, self.total)

    def _barrier(self):
        peer_barrier(self.all_flags, self.counter, self.status, self.rank, self.limit)

    def check(self, status=None):
        late = int((download(self.status) if status is None else status)[0])
        if late:
            raise NumdiffError(f"the GPU of rank {self.rank} waited {self.limit // 1000} s for that of rank {late - 1} "
                               "in vain; if it repeats, use --transport mpi.")

    def close(self):
        atexit.unregister(self.close)
        with contextlib.suppress(NumdiffError):  # a GPU that has failed: the driver cleans up after the process
            self.gpu.close_shared()


# nccl -----------------------------------------------------------------------------------------------------------------

class NcclView:
    """A device array as NCCL's Python bindings take it (Numba's CUDA array interface, version 3)."""

    def __init__(self, array):
        self.__cuda_array_interface__ = {"shape": array.shape, "typestr": array.dtype.str, "strides": None,
                                         "data": (array.backend.pointer(array), False), "version": 3, "stream": None}


class NcclExchange(NoExchange):
    """NCCL's all-reduce, through nccl4py. Collective; raises `NumdiffError` on every rank where one cannot."""

    name = "nccl"

    def __init__(self, communicator, parameters):
        self.nccl = communicator.build(import_nccl)
        self.gpu = parameters.grad.backend
        self.mail = zeros(1, np.float32, self.gpu)
        self.views = NcclView(parameters.grad), NcclView(self.mail)
        unique = communicator.first(lambda: bytes(self.nccl.get_unique_id()))
        self.communicator = communicator.build(lambda: self.nccl.Communicator.init(
            communicator.size, communicator.rank, self.nccl.UniqueId.from_bytes(unique)))
        communicator.build(self._try)

    def _try(self):
        """A first sum, outside any captured step, in which NCCL makes its connections."""
        loss = zeros(1, np.float32, self.gpu)
        self.finish(loss)
        self.gpu.synchronize()

    def finish(self, loss):
        copy_into(self.mail, loss)
        for view in self.views:
            self.communicator.allreduce(view, view, self.nccl.SUM, stream=self.gpu.stream_handle)
        copy_into(loss, self.mail)

    def close(self):
        self.gpu.synchronize()
        self.communicator.destroy()


def import_nccl():
    """nccl4py's module; a `UsageError` says what to install."""
    try:
        import nccl.core
        return nccl.core
    except Exception as error:  # not installed, or without the library: nccl4py then raises errors of its own
        reason = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be used ({error})"
        raise UsageError(f"--transport nccl: nccl4py {reason}; pip install 'nccl4py[cu13]', or use --transport "
                         "auto.") from error


# The choice -----------------------------------------------------------------------------------------------------------

def make_exchange(communicator, parameters):
    """The exchange for a model's `FlatParameters`, by the communicator's transport. Collective.

    auto: CPU ranks use mpi, GPUs of one host peer; otherwise, or where peer fails, nccl if it is installed, or else
    mpi. `exchange.why` says what was passed over.
    """
    wanted, kinds = communicator.transport, {"mpi": MpiExchange, "peer": PeerExchange, "nccl": NcclExchange}
    if communicator.size == 1:
        return NoExchange()
    if wanted != "auto":
        refuse(communicator, parameters, wanted)
        return kinds[wanted](communicator, parameters)
    reasons = []
    for name in ("peer", "nccl", "mpi") if is_device(parameters.grad) else ("mpi",):
        try:
            refuse(communicator, parameters, name)
            exchange = kinds[name](communicator, parameters)
            exchange.why = " ".join(reasons)
            return exchange
        except NumdiffError as error:
            reasons.append(f"Not {name}: {error}")
            if name == "mpi":
                raise


def refuse(communicator, parameters, name):
    """Raise a `UsageError` where a transport does not suit these ranks."""
    if name in ("peer", "nccl") and not is_device(parameters.grad):
        raise UsageError(f"--transport {name} joins GPUs, and these ranks run on the CPU; use --transport mpi.")
    if name == "peer" and communicator.hosts > 1:
        raise UsageError(f"--transport peer needs all ranks on one host, not {communicator.hosts}; use nccl or mpi.")
    if name == "peer" and communicator.size > MAX_RANKS:
        raise UsageError(f"--transport peer takes at most {MAX_RANKS} ranks, not {communicator.size}; use nccl or mpi.")
