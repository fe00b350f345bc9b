"""Several hosts: `peer` within each, and another transport between them."""

from ...distributed.buckets import BUCKET
from ...distributed.exchange_base import NoExchange, shared_part, try_sums
from ...errors import NumdiffError
from ...kernels.peer_pieces import MAX_RANKS
from .peer_exchange import PeerExchange
from .reduce import slice_of


class Slice:
    """As much of `FlatParameters` as the sum of a part of the gradient needs."""

    def __init__(self, gradient):
        self.grad, self.total = gradient, gradient.size
        self.index = [{"offset": first} for first in range(0, self.total, BUCKET)]
        self.parameters = dict.fromkeys(range(len(self.index)))


class HostsExchange(NoExchange):
    """`peer` within each host, NCCL or MPI between hosts, of which each has as many ranks.

    The ranks of a host each add up a slice over the host; those of the same number on all hosts add
    up that slice; then each host gathers its slices. So a host's numbers cross the network once,
    and each of its ranks carries a part. The hosts' sums are added up, which gives other bits than
    rank order. Collective; raises `NumdiffError` on every rank where one of them cannot.
    """

    across = None

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
            if self.across:
                self.across.abandon()
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


def why_not_hosts(communicator, parameters, partition):
    """Why `HostsExchange` does not suit these ranks, or None. Collective."""
    counts = communicator.gather(communicator.local_size) if communicator.hosts > 1 else [1]
    if not 1 < min(counts) == max(counts) <= MAX_RANKS:
        return f"takes 2 to {MAX_RANKS} ranks on each of several hosts, as many on all"
    if shared_part(partition) or getattr(parameters, "float8", None) is not None:
        return "shares neither the update nor the scales of fp8 over several hosts"
    return None
