"""Several hosts: `peer` within each, and another transport between them."""

from ..errors import NumdiffError
from ..kernels.peers.reduce import slice_of
from .buckets import BUCKET
from .exchange_base import NoExchange, try_sums
from .peer_exchange import PeerExchange


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
