"""How the ranks' gradients become one sum: the transports `mpi`, `peer` and `nccl` behind one interface.

    with exchange.watch():      around the backward pass of the step's last microbatch: complete buckets may leave
        …
    exchange.finish(loss)       afterwards the flat gradient and `loss` (1,) hold the sums over all ranks
    exchange.gather_partials(), gather_weights(), gather_mixed(mixed)
                                where ranks share the update (nn/partition.py), `finish` leaves the sums in each rank's
                                own part of the gradient alone; these bring to all ranks the parts of
                                `partition.partials`, of the float32 weights, and of what a step reads of the weights,
                                as `MixedWeights` says
    exchange.largest            of a model in FP8: the largest magnitudes of its tensors, of every rank, after `finish`
    exchange.check()            at a report: raises if the device saw a fault; takes `exchange.status`, where there is
                                one, from a caller that has read it back already
    exchange.close()            at the end

    transport  where the sum is made                    its place in a captured step
    mpi        in MPI, from pinned host memory, bucket   the graph is cut where a bucket is complete and before the
               by bucket while the backward goes on      update; between two parts the host sends on what has arrived
    peer       on the GPUs (kernels/peer_reduce.py)      inside the graph, six launches after the backward; beside it
                                                         where overlap.py is switched on
    nccl       in NCCL                                   inside the graph, two calls after the backward
    peer+…     by peer within each host, then by one     those of both, one after the other
               of the others between hosts

On CPU ranks `mpi` sums the NumPy gradient in place. `peer` and `mpi` add in rank order, so they give the same bits, on
every rank, whether ranks share the update or not. With `nccl` every rank ends with the same bits because the library
computes each sum once, or in an order that gives the same on all sides; this is checked (`Trainer.check_ranks`), not
assumed.
"""
import atexit
import contextlib
import functools
import importlib.util
import os
import time

import numpy as np

from ..device import HostTwin, between, copy_into, download, fill_zero, is_device, with_dtype, zeros
from ..device.array import as_words
from ..errors import NumdiffError, UsageError
from ..kernels.peer_reduce import (
    MAX_RANKS,
    STRIDE,
    peer_all_gather,
    peer_barrier,
    peer_reduce_scatter,
    peer_sum,
    slice_of,
)
from ..kernels.quantise import share_largest
from ..kernels.second_pass import settle
from ..progress import tick, waiting
from . import overlap
from .buckets import BUCKET, Plan, Watch, parameters_of

TEST_LIMIT = 60_000  # milliseconds that a rank may be late in the trial of `peer`: it may have to compile kernels
STEP_LIMIT = 600_000  # and in a step
EAGER = 1e-3  # seconds for which a waiting CPU rank only yields its core, before it begins to sleep
NAP = 2e-4  # seconds of such a sleep
TIMED, ROW = 3, 4  # times a transport is timed, and sums of the gradient each time, one after the other; of mpi one
NEARLY = 1.1  # times the fastest one's: the first that is no slower is taken, mostly the same in a resumed run


class NoExchange:
    """For a single process: the sum over one rank is already there."""

    name, why, largest = "none", "", None

    def watch(self):
        return contextlib.nullcontext()

    def finish(self, loss):
        pass

    def check(self, status=None):
        pass

    def gather_partials(self):
        pass

    def gather_weights(self):
        pass

    def gather_mixed(self, mixed):
        mixed.pack()
        self._gather_packed(mixed)
        mixed.unpack()

    def _gather_packed(self, mixed):
        pass

    def close(self):
        pass


class Mail:
    """What ranks add up beside their gradients: the loss, whose own array may move, and of a model in FP8 the largest
    magnitudes of its tensors in this step (kernels/quantise/rounding.py). Those have a column for each rank, so that a
    sum, in whatever order, brings every rank's to all.

    Attributes numbers: float32 (1 + tensors · ranks,)
    """

    def __init__(self, parameters, rank, ranks, like=None):
        self.float8, self.rank, self.ranks = getattr(parameters, "float8", None), rank, ranks
        tensors = len(self.float8.scale) if self.float8 else 0
        self.numbers = zeros(1 + tensors * ranks, np.float32, like)

    def write(self, loss):
        copy_into(self.numbers[:1], loss)
        if self.float8:
            share_largest(self.float8.amax, self.largest(), self.rank)

    def largest(self, numbers=None):
        """uint32 (tensors, ranks): the magnitudes' bits in this mail, or in such a sum; None of a model not in FP8."""
        numbers = self.numbers if numbers is None else numbers
        return with_dtype(numbers[1:], np.uint32).reshape(-1, self.ranks) if self.float8 else None


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
    """Bucket after bucket by MPI, all ranks in the same order, while the backward pass goes on.

    Two ranks that both need the sum let MPI's Iallreduce make it. Otherwise a bucket's owners get the other ranks'
    numbers (Ialltoallv) and add them up in rank order, which MPI does not promise. Where ranks have parts of the
    update, the owner is who has the part; else each rank owns a slice of every bucket, and sends the sums to all.
    """

    name = "mpi"

    def __init__(self, communicator, parameters, partition=None):
        self.comm, self._back = communicator.comm.Dup(), communicator.comm.Dup()  # two, each with an order of its own
        self.MPI = communicator.MPI
        self.rank, self.size = communicator.rank, communicator.size
        self.backend = parameters.grad.backend if is_device(parameters.grad) else None
        self.plan = Plan(parameters)
        self.mail = Mail(parameters, self.rank, self.size, self.backend)
        self.largest = self.mail.largest()
        twin = HostTwin if self.backend else HostArray
        self._twin, self._gradient, self._mail = twin, twin(parameters.grad), twin(self.mail.numbers)
        self._parts = None  # the bounds of the ranks' parts, where the update is in parts
        if partition := shared_part(partition):
            self._parts, self._piece_bounds = partition.bounds, partition.piece_bounds
            self._weights, self._partials = twin(parameters.data), twin(partition.partials)
        self._packed = {}  # `MixedWeights` -> the twin of what it packs
        self._inboxes = []  # what is free of the memory for other ranks' numbers
        self._waiting = []  # (twin, first, stop) on their way to the host, in the order of leaving
        self._travels = []  # (request, what follows) of those on their way to the other ranks
        self._returns = []  # the same of those on their way back; begun in the order of the travels, as MPI wants it
        self._left = 0  # buckets that have left in this step
        if self.backend:
            communicator.build(try_sums, self, communicator, parameters.grad, partition)

    def watch(self):
        return Watch(self)

    def begin(self, records):
        if self.plan.records != len(records):
            self.plan.make([parameters_of(record.backward) for record in reversed(records)])

    def played(self, number):
        for bucket in self.plan.leaving.get(number, ()):
            settle()  # its gradients have to be there
            between(self.backend, functools.partial(self._leave, bucket))
        self._progress()

    def finish(self, loss):
        self.mail.write(loss)
        between(self.backend, self._finish)
        copy_into(loss, self.mail.numbers[:1])

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
            self._travels.append(self._travel(*self._waiting.pop(0)))
        while self._travels and self._travels[0][0].Test():
            _, arrived = self._travels.pop(0)
            tick()
            if back := arrived():
                self._returns.append(back)
        going = []
        for request, arrived in self._returns:
            if request.Test():
                tick()
                arrived()
            else:
                going.append((request, arrived))
        self._returns = going
        for request, _ in self._travels[1:]:
            request.Test()

    def _travel(self, twin, first, stop):
        """(request, what follows) of numbers that are on the host and begin to be added up; what follows may give a
        further pair."""
        if twin is self._mail or (self.size == 2 and not self._parts):
            request = self.comm.Iallreduce(self.MPI.IN_PLACE, twin.host[first:stop], self.MPI.SUM)
            return request, lambda: twin.send(first, stop)
        cuts = [min(max(bound, first), stop) - first for bound in self._parts or self._slices(first, stop)]
        counts = [b - a for a, b in zip(cuts, cuts[1:], strict=False)]
        others = [0 if rank == self.rank else counts[rank] for rank in range(self.size)]
        own = counts[self.rank]
        inbox = self._inbox(own * (self.size - 1))
        from_others = [0 if rank == self.rank else own for rank in range(self.size)]
        begins = [own * (rank - (rank > self.rank)) for rank in range(self.size)]
        numbers, float32 = twin.host[first:stop], self.MPI.FLOAT
        request = self.comm.Ialltoallv([numbers, others, cuts[:-1], float32], [inbox, from_others, begins, float32])

        def arrived():
            a, b = cuts[self.rank:self.rank + 2]
            if own:
                add_in_order(inbox[:own * (self.size - 1)].reshape(-1, own), numbers[a:b], self.rank)
            self._inboxes.append(inbox)
            if self._parts:
                if own:
                    twin.send(first + a, first + b)
                return None
            whole = self._back.Iallgatherv(self.MPI.IN_PLACE, [numbers, counts, cuts[:-1], float32])
            return whole, lambda: twin.send(first, stop)
        return request, arrived

    def _slices(self, first, stop):
        """The bounds of the slices of a bucket that each rank adds up."""
        return [first + (stop - first) * rank // self.size for rank in range(self.size + 1)]

    def _inbox(self, elements):
        """Memory for so many numbers; what has arrived and been added up is used again."""
        fits = [k for k, inbox in enumerate(self._inboxes) if inbox.size >= elements]
        return self._inboxes.pop(fits[0]) if fits else np.empty(elements, np.float32)

    def _finish(self):
        if self.plan.order[self._left:]:
            self._leave(self.plan.order[-1])
        self._depart(self._mail, 0, self.mail.numbers.size)
        wait(self._arrived, patient=self.backend is None)
        self._gradient.join()
        self._mail.join()
        self._left = 0

    def _arrived(self):
        self._progress()
        return not (self._waiting or self._travels or self._returns)

    def gather_partials(self):
        between(self.backend, lambda: self._gather(self._partials, self._piece_bounds))

    def gather_weights(self):
        between(self.backend, lambda: self._gather(self._weights, self._parts))

    def _gather_packed(self, mixed):
        if mixed not in self._packed:
            self._packed[mixed] = self._twin(mixed.packed)
        between(self.backend, lambda: self._gather(self._packed[mixed], mixed.bounds))

    def _gather(self, twin, bounds):
        """Bring the ranks' parts of an array to all of them."""
        patient, (first, stop) = self.backend is None, bounds[self.rank:self.rank + 2]
        twin.fetch(first, stop)
        wait(lambda: twin.fetched(first), patient)
        kind = {4: self.MPI.FLOAT, 8: self.MPI.DOUBLE}[twin.host.itemsize]
        counts = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
        wait(self.comm.Iallgatherv(self.MPI.IN_PLACE, [twin.host, counts, bounds[:-1], kind]).Test, patient)
        for a, b in ((0, first), (stop, bounds[-1])):
            if a < b:
                twin.send(a, b)
        twin.join()

    def close(self):
        """Collective."""
        for comm in (self.comm, self._back):
            comm.Free()


def add_in_order(others, own, rank):
    """own (n,) = the sum of all ranks' numbers in rank order; others (ranks - 1, n): those of the other ranks, which
    are overwritten."""
    parts = [*others[:rank], own, *others[rank:]]
    total = parts[0]
    for part in parts[1:-1]:
        total += part
    np.add(total, parts[-1], out=own)


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

    def __init__(self, communicator, parameters, partition=None):
        self.communicator, self.rank = communicator, communicator.rank
        self.numbers = range(communicator.size)  # of these ranks among all
        self.gpu, self.gradient = parameters.grad.backend, parameters.grad
        self.partition, self.overlap = shared_part(partition), None
        self._make_mail(parameters, communicator.size)
        self.flags = zeros(MAX_RANKS * STRIDE, np.int32, self.gpu)
        self.counter, self.status = (zeros(1, np.int32, self.gpu) for _ in range(2))
        self.limit, self.mapped = TEST_LIMIT, []  # the arrays of other ranks
        self.gpu.synchronize()  # the flags are zero before anybody may write to them
        try:
            arrays = [self.gradient, self.mail.numbers, self.flags]
            if self.partition:
                arrays += [parameters.data, partition.partials]
                arrays += [] if parameters.half is None else [as_words(parameters.half)]
            shared = communicator.everywhere(lambda: [self.gpu.share(array) for array in arrays])
            self.gradients, self.mails, self.all_flags, *more = communicator.build(self._open, shared, arrays)
            if self.partition:
                self.weights, self.partials, *self.halves = more
            self.overlap = communicator.build(overlap.made_for, self, parameters)
            communicator.build(try_sums, self, communicator, self.gradient, self.partition)
        except NumdiffError:
            self.gpu.close_shared(self.mapped)
            raise
        self.limit = STEP_LIMIT
        atexit.register(self.close)

    @classmethod
    def planned(cls, parameters, size, partition=None):
        """Launch the kernels of an exchange between `size` ranks on the stand-in for a GPU that holds the parameters;
        partition: of a shared update."""
        self, like = cls.__new__(cls), parameters.grad
        self.rank, self.gpu, self.limit = 0, like.backend, STEP_LIMIT
        self._make_mail(parameters, size)
        self.counter, self.status = (zeros(1, np.int32, like) for _ in range(2))
        self.gradients, self.mails, self.partition = [like] * size, [self.mail.numbers] * size, partition
        self.all_flags = [zeros(MAX_RANKS * STRIDE, np.int32, like)] * size
        self.add(zeros(1, np.float32, like))
        self.gather(partition and partition.bounds)
        if overlap.wanted(parameters, partition):
            overlap.plan(like, size)
        if partition:
            self.weights, self.partials = [parameters.data] * size, [partition.partials] * size
            self.gather_partials()
            self.gather_weights()

    def _make_mail(self, parameters, size):
        self.mail = Mail(parameters, self.rank, size, self.gpu)
        self.total = zeros(self.mail.numbers.size, np.float32, self.gpu)
        self.largest = self.mail.largest(self.total)

    def _open(self, shared, own):
        """The arrays of every rank: its own as they are, the others' mapped."""
        ranks = [[self._map(s) for s in arrays] if rank != self.rank else own for rank, arrays in enumerate(shared)]
        return [list(column) for column in zip(*ranks, strict=True)]

    def _map(self, shared):
        self.mapped.append(self.gpu.open_shared(shared))
        return self.mapped[-1]

    def watch(self):
        return Watch(self.overlap) if self.overlap else super().watch()

    def finish(self, loss):
        if self.overlap and self.overlap.current is not None:
            self._finish_overlapped(loss)
            return
        self.add(loss)
        if not self.partition:
            self.gather()

    def _finish_overlapped(self, loss):
        """Where groups of gradients have left before (overlap.py)."""
        self.mail.write(loss)
        self.overlap.finish()  # with a barrier, so that every rank's mail is ready
        peer_sum(self.mails, self.total)
        copy_into(loss, self.total[:1])
        if not self.partition:
            self.barrier()  # nobody reads this rank's memory any longer

    def add(self, loss):
        """Add up the own slice, and the mail."""
        self.mail.write(loss)
        self.barrier()  # every rank's gradient and mail are ready
        peer_reduce_scatter(self.gradients, self.rank, bounds=self.partition and self.partition.bounds)
        peer_sum(self.mails, self.total)
        copy_into(loss, self.total[:1])

    def gather(self, bounds=None):
        """Bring every rank's slice of the gradient here."""
        self.barrier()  # every slice is there
        peer_all_gather(self.gradients, self.rank, bounds=bounds)
        self.barrier()  # nobody reads this rank's memory any longer

    def gather_partials(self):
        """Without a barrier after it: the one before the weights' is enough, as no partial is written until then."""
        self.barrier()
        peer_all_gather(self.partials, self.rank, bounds=self.partition.piece_bounds)

    def gather_weights(self):
        """Nor is there one here: before a rank writes a weight again it meets the others in the next step's first
        barriers. Whoever reads the weights in between may; they change nothing."""
        self.barrier()
        peer_all_gather(self.weights, self.rank, bounds=self.partition.bounds)

    def gather_mixed(self, mixed):
        """Nor here."""
        self.barrier()
        mixed.take(self.weights, *self.halves)

    def barrier(self):
        peer_barrier(self.all_flags, self.counter, self.status, self.rank, self.limit)

    def check(self, status=None):
        late = int((download(self.status) if status is None else status)[0])
        if late:
            raise NumdiffError(f"the GPU of rank {self.numbers[self.rank]} waited {self.limit // 1000} s for that of "
                               f"rank {self.numbers[late - 1]} in vain; if it repeats, use --transport mpi.")

    def close(self):
        atexit.unregister(self.close)
        with contextlib.suppress(NumdiffError):  # a GPU that has failed: the driver cleans up after the process
            mapped, self.mapped = self.mapped, []
            self.gpu.close_shared(mapped)


# nccl -----------------------------------------------------------------------------------------------------------------

class NcclView:
    """A device array as NCCL's Python bindings take it (Numba's CUDA array interface, version 3)."""

    def __init__(self, array):
        self.__cuda_array_interface__ = {"shape": array.shape, "typestr": array.dtype.str, "strides": None,
                                         "data": (array.backend.pointer(array), False), "version": 3, "stream": None}


class NcclExchange(NoExchange):
    """NCCL's all-reduce, through nccl4py. Collective; raises `NumdiffError` on every rank where one cannot.

    A shared update gets the same all-reduce, and so the same bits: a reduce-scatter would move a third less, but NCCL
    does not promise that it adds in the same order.
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
        self.communicator = communicator.build(lambda: self.nccl.Communicator.init(
            communicator.size, communicator.rank, self.nccl.UniqueId.from_bytes(unique)))
        communicator.build(try_sums, self, communicator, parameters.grad, shared_part(partition))  # and NCCL connects

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
        """Every rank's part to all, as one group: parts differ in size, which NCCL's all-gather does not take."""
        with self.nccl.group():
            for rank, view in enumerate(views):
                self.communicator.broadcast(view, view, rank, stream=self.gpu.stream_handle)

    def close(self):
        self.gpu.synchronize()
        self.communicator.destroy()


def parts_of(array, bounds):
    """The ranks' parts of an array, as NCCL takes them."""
    return [NcclView(array[first:stop]) for first, stop in zip(bounds, bounds[1:], strict=False)]


def import_nccl():
    """nccl4py's module; a `UsageError` says what to install."""
    try:
        import nccl.core
        return nccl.core
    except Exception as error:  # not installed, or without the library: nccl4py then raises errors of its own
        reason = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be used ({error})"
        raise UsageError(f"--transport nccl: nccl4py {reason}; pip install 'nccl4py[cu13]', or use --transport "
                         "auto.") from error


# peer within hosts, another between them ------------------------------------------------------------------------------

class Slice:
    """As much of `FlatParameters` as the sum of a part of the gradient needs."""

    def __init__(self, gradient):
        self.grad, self.total = gradient, gradient.size
        self.index = [{"offset": first} for first in range(0, self.total, BUCKET)]
        self.parameters = dict.fromkeys(range(len(self.index)))


class HostsExchange(NoExchange):
    """`peer` within each host, NCCL or MPI between hosts, of which each has as many ranks.

    The ranks of a host each add up a slice over the host; those of the same number on all hosts add up that slice; then
    each host gathers its slices. So a host's numbers cross the network once, and each of its ranks carries a part. The
    hosts' sums are added up, which gives other bits than rank order. Collective; raises `NumdiffError` on every rank
    where one of them cannot.
    """

    def __init__(self, communicator, parameters, between_hosts):
        inside, across = communicator.split()
        self.inside = communicator.build(PeerExchange, inside, parameters)
        self.inside.numbers = inside.gather(communicator.rank)
        try:
            own = parameters.grad[slice(*slice_of(parameters.grad.size, inside.rank, inside.size))]
            self.across = communicator.build(between_hosts, across, Slice(own))
            self.name = f"peer+{self.across.name}"
            communicator.build(try_sums, self, communicator, parameters.grad, None)
        except NumdiffError:
            self.inside.close()
            raise

    @property
    def status(self):
        return self.inside.status

    @property
    def mail(self):
        return self.inside.mail

    def finish(self, loss):
        self.inside.add(loss)
        self.across.finish(loss)
        self.inside.gather()

    def check(self, status=None):
        self.inside.check(status)
        self.across.check()

    def close(self):
        self.inside.close()
        self.across.close()


# The choice -----------------------------------------------------------------------------------------------------------

def make_exchange(communicator, parameters, partition=None):
    """The exchange for a model's `FlatParameters`, by the communicator's transport. Collective.

    partition: the `Partition` of the update, which the exchange then serves
    auto: CPU ranks use mpi. On GPUs each of peer (on one host), nccl (where it is installed) and mpi is made; on
    several hosts with several ranks each, peer within them and nccl or mpi between them, too; these alone where peer is
    asked for. What fails its trial is passed over, and the fastest of the others is kept, by the time of a sum of this
    very gradient; of two that are nearly as fast the first. `exchange.why` says what was measured and passed over.
    """
    wanted, kinds = communicator.transport, {"mpi": MpiExchange, "peer": PeerExchange, "nccl": NcclExchange}
    if communicator.size == 1:
        return NoExchange()
    over_hosts = wanted == "peer" and communicator.hosts > 1
    if wanted != "auto":
        refuse(communicator, parameters, wanted, partition)
        if not over_hosts:
            return kinds[wanted](communicator, parameters, partition)
    made, reasons = [], {}
    for name in candidates(communicator, parameters, partition):
        if over_hosts and not name.startswith("peer"):
            continue
        try:
            inside, _, across = name.rpartition("+")
            exchange = (HostsExchange(communicator, parameters, kinds[across]) if inside else
                        kinds[name](communicator, parameters, partition) if name != "mpi" else
                        communicator.build(MpiExchange, communicator, parameters, partition))
            made.append(exchange)
        except NumdiffError as error:
            reasons[name] = str(error)
    if not made:
        raise NumdiffError([*reasons.values()][-1])
    chosen, told = made[0], []
    if len(made) > 1:
        times = [seconds_of(exchange, communicator, parameters, shared_part(partition)) for exchange in made]
        chosen = next(e for e, t in zip(made, times, strict=True) if t <= NEARLY * min(times))
        told.append(f"Measured: {', '.join(f'{e.name} {1e3 * t:,.3g} ms' for e, t in zip(made, times, strict=True))}.")
        for exchange in made:
            if exchange is not chosen:
                exchange.close()
    chosen.why = " ".join([*told, *(f"Not {name}: {why}" for name, why in reasons.items())])
    return chosen


def shared_part(partition):
    """The `Partition` where the update is shared, else None."""
    return partition if partition and partition.sharded else None


def try_sums(exchange, communicator, gradient, partition):
    """Add up numbers whose sum is known, by the same launches as in a step (twice by `peer`, whose barriers count), and
    gather known partials, and largest magnitudes; a `NumdiffError` where something else arrives. partition: where the
    update is shared."""
    size, rank = communicator.size, communicator.rank
    pattern = np.resize(np.arange(251, dtype=np.float32), gradient.size)  # whose sums are exact
    own = slice(*partition.bounds[rank:rank + 2]) if partition else slice(None)
    loss = zeros(1, np.float32, gradient.backend)
    for round in range(2 if exchange.name == "peer" else 1):
        copy_into(gradient, pattern + np.float32(rank + round))
        copy_into(loss, np.array([rank], np.float32))
        if float8 := exchange.mail.float8:
            copy_into(float8.amax, np.full(float8.amax.shape, 1 + rank + round, np.uint32) << np.uint32(23))
        exchange.finish(loss)
        expected = pattern[own] * np.float32(size) + np.float32(size * round + size * (size - 1) // 2)
        wrong = np.count_nonzero(download(gradient)[own] != expected)
        if float8:
            found = download(exchange.largest) >> np.uint32(23)
            wrong += np.count_nonzero(found != np.arange(1 + round, 1 + round + size, dtype=np.uint32))
        if partition:
            low, high = partition.piece_bounds[rank:rank + 2]
            copy_into(partition.partials[low:high], np.arange(low + round, high + round).astype(np.float32))
            exchange.gather_partials()
            exchange.gather_weights()  # which all ranks have
            arrived = download(partition.partials)
            wrong += np.count_nonzero(arrived != np.arange(round, arrived.size + round))
        exchange.check()
        if wrong or download(loss)[0] != size * (size - 1) / 2:
            raise NumdiffError(f"in the trial {wrong} of {expected.size} sums by {exchange.name} were wrong.")
    fill_zero(gradient)
    gradient.backend.synchronize()


def candidates(communicator, parameters, partition):
    """Names of the transports that may suit these ranks. NCCL is not among them where a rank lacks it and there is
    another way between the GPUs."""
    if not is_device(parameters.grad):
        return ["mpi"]
    everywhere = all(communicator.gather(importlib.util.find_spec("nccl") is not None))
    one_host = communicator.hosts == 1 and communicator.size <= MAX_RANKS
    hosts = why_not_hosts(communicator, parameters, partition) is None
    return [*(["peer"] if one_host else []), *(["nccl"] if everywhere or not one_host else []),
            *(["peer+nccl"] if hosts and everywhere else []), *(["peer+mpi"] if hosts else []), "mpi"]


def why_not_hosts(communicator, parameters, partition):
    """Why `HostsExchange` does not suit these ranks, or None. Collective."""
    counts = communicator.gather(communicator.local_size) if communicator.hosts > 1 else [1]
    if not 1 < min(counts) == max(counts) <= MAX_RANKS:
        return f"takes 2 to {MAX_RANKS} ranks on each of several hosts, as many on all"
    if shared_part(partition) or getattr(parameters, "float8", None) is not None:
        return "shares neither the update nor the scales of fp8 over several hosts"
    return None


def seconds_of(exchange, communicator, parameters, shared):
    """What a step waits for: the sum of the gradients, and where the update is shared the gathering of norm and
    weights, which are the same on all ranks before the first step. What a step would capture is captured. The shortest
    of a few times, each of its slowest rank. Collective.
    """
    gpu, loss, times = parameters.grad.backend, zeros(1, np.float32, parameters.grad.backend), []

    def once():
        exchange.finish(loss)
        if shared:
            exchange.gather_partials()
            exchange.gather_weights()

    fill_zero(parameters.grad)
    once()  # makes connections, and loads kernels
    run, row = once, 1
    if exchange.name != "mpi":
        row = ROW
        if hasattr(gpu, "capture"):
            with gpu.within(gpu.new_arena()):
                run = gpu.capture(once)
    for _ in range(TIMED):
        gpu.synchronize()
        communicator.gather(None)
        start = time.perf_counter()
        for _ in range(row):
            run()
        gpu.synchronize()
        times.append((time.perf_counter() - start) / row)
    exchange.check()
    return min(map(max, zip(*communicator.gather(times), strict=True)))


def refuse(communicator, parameters, name, partition):
    """Raise a `UsageError` where a transport does not suit these ranks."""
    if name in ("peer", "nccl") and not is_device(parameters.grad):
        raise UsageError(f"--transport {name} joins GPUs, and these ranks run on the CPU; use --transport mpi.")
    if name == "peer" and communicator.hosts > 1:
        if why := why_not_hosts(communicator, parameters, partition):
            raise UsageError(f"--transport peer {why}; use nccl or mpi.")
    elif name == "peer" and communicator.size > MAX_RANKS:
        raise UsageError(f"--transport peer takes at most {MAX_RANKS} ranks, not {communicator.size}; use nccl or mpi.")
