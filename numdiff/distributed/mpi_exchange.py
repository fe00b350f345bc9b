"""The transport `mpi`: sums in MPI, of CPU ranks' gradients in place, of GPUs' by way of pinned
host memory."""

import functools

import numpy as np

from ..device import HostTwin, between, copy_into, is_device
from ..kernels.reduce.second_pass import flush_reductions
from ..progress import tick
from .buckets import BucketPlan, WatchBackward, touched_by
from .exchange_base import Mail, NoExchange, shared_part, try_sums, wait


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
    """Bucket after bucket by MPI, all ranks in the same order, while the backward pass continues.

    Two ranks that both need the sum let MPI's Iallreduce make it. Otherwise a bucket's owners get
    the other ranks' numbers (Ialltoallv) and add them up in rank order, which MPI does not promise.
    Where ranks have parts of the update, the owner is the rank with the part; else each rank owns a
    slice of every bucket, and sends the sums to all.
    """

    name = "mpi"

    def __init__(self, communicator, parameters, partition=None):
        # two, each with a separate order
        self.comm, self._back = communicator.comm.Dup(), communicator.comm.Dup()
        self.MPI = communicator.MPI
        self.rank, self.size = communicator.rank, communicator.size
        self.backend = parameters.grad.backend if is_device(parameters.grad) else None
        self.plan = BucketPlan(parameters)
        self.mail = Mail(parameters, self.rank, self.size, self.backend)
        self.largest = self.mail.largest()
        twin = HostTwin if self.backend else HostArray
        self._twin, self._gradient, self._mail = (
            twin,
            twin(parameters.grad),
            twin(self.mail.numbers),
        )
        self._parts = None  # the bounds of the ranks' parts, where the update is in parts
        if partition := shared_part(partition):
            self._parts, self._piece_bounds = partition.bounds, partition.piece_bounds
            self._weights, self._partials = twin(parameters.data), twin(partition.partials)
        self._packed = {}  # `MixedWeights` -> the twin of what it packs
        self._inboxes = []  # what is free of the memory for other ranks' numbers
        self._waiting = []  # (twin, first, stop) in flight to the host, in the order of leaving
        self._travels = []  # (request, what follows) of those in flight to the other ranks
        # the same of those in flight back; begun in the order of the travels, as MPI wants it
        self._returns = []
        self._left = 0  # buckets that have left in this step
        if self.backend:
            communicator.build(try_sums, self, communicator, parameters.grad, partition)

    def watch(self):
        return WatchBackward(self)

    def begin(self, records):
        if self.plan.records != len(records):
            self.plan.make(touched_by(records))

    def played(self, number):
        for bucket in self.plan.leaving.get(number, ()):
            flush_reductions()  # its gradients have to be there
            between(self.backend, functools.partial(self._leave, bucket))
        self._progress()

    def finish(self, loss):
        self.mail.write(loss)
        between(self.backend, self._finish)
        copy_into(loss, self.mail.numbers[:1])

    def _leave(self, bucket):
        """Send off a bucket, and those before it in the order, in case an operation was left out."""
        while bucket in self.plan.order[self._left :]:
            self._depart(self._gradient, *self.plan.buckets[self.plan.order[self._left]])
            self._left += 1
        self._progress()

    def _depart(self, twin, first, stop):
        twin.fetch(first, stop)
        self._waiting.append((twin, first, stop))

    def _progress(self):
        """Move every part on by one stage, if it can go. MPI itself makes progress only while it is
        called."""
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
        """(request, what follows) of numbers that are on the host and begin to be added up; what
        follows may give a further pair."""
        if twin is self._mail or (self.size == 2 and not self._parts):
            request = self.comm.Iallreduce(self.MPI.IN_PLACE, twin.host[first:stop], self.MPI.SUM)
            return request, lambda: twin.send(first, stop)
        cuts = [
            min(max(bound, first), stop) - first
            for bound in self._parts or self._slices(first, stop)
        ]
        counts = [b - a for a, b in zip(cuts, cuts[1:], strict=False)]
        others = [0 if rank == self.rank else counts[rank] for rank in range(self.size)]
        own = counts[self.rank]
        inbox = self._inbox(own * (self.size - 1))
        from_others = [0 if rank == self.rank else own for rank in range(self.size)]
        begins = [own * (rank - (rank > self.rank)) for rank in range(self.size)]
        numbers, float32 = twin.host[first:stop], self.MPI.FLOAT
        request = self.comm.Ialltoallv(
            [numbers, others, cuts[:-1], float32], [inbox, from_others, begins, float32]
        )

        def arrived():
            a, b = cuts[self.rank : self.rank + 2]
            if own:
                add_in_order(
                    inbox[: own * (self.size - 1)].reshape(-1, own), numbers[a:b], self.rank
                )
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
        """Memory for `elements` elements; an inbox that has been reduced is used again."""
        fits = [k for k, inbox in enumerate(self._inboxes) if inbox.size >= elements]
        return self._inboxes.pop(fits[0]) if fits else np.empty(elements, np.float32)

    def _finish(self):
        if self.plan.order[self._left :]:
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
        patient, (first, stop) = self.backend is None, bounds[self.rank : self.rank + 2]
        twin.fetch(first, stop)
        wait(lambda: twin.fetched(first), patient)
        kind = {4: self.MPI.FLOAT, 8: self.MPI.DOUBLE}[twin.host.itemsize]
        counts = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
        wait(
            self.comm.Iallgatherv(self.MPI.IN_PLACE, [twin.host, counts, bounds[:-1], kind]).Test,
            patient,
        )
        for a, b in ((0, first), (stop, bounds[-1])):
            if a < b:
                twin.send(a, b)
        twin.join()

    def close(self):
        """Collective."""
        for comm in (self.comm, self._back):
            comm.Free()


def add_in_order(others, own, rank):
    """own (n,) = the sum of all ranks' numbers in rank order; others (ranks - 1, n): those of the
    other ranks, which are overwritten."""
    parts = [*others[:rank], own, *others[rank:]]
    total = parts[0]
    for part in parts[1:-1]:
        total += part
    np.add(total, parts[-1], out=own)
