"""The gradients' all-reduce over the ranks: the transports `mpi`, `peer` and `nccl` behind one
interface.

    with exchange.watch():      around the backward pass of the step's last microbatch: complete buckets may leave
        …
    exchange.finish(loss)       afterwards the flat gradient and `loss` (1,) hold the sums over all ranks
    exchange.gather_partials(), gather_weights(), gather_mixed(mixed)
                                where ranks share the update (nn/partition.py), `finish` leaves the
                                sums in each rank's own part of the gradient alone; these bring to
                                all ranks the parts of `partition.partials`, of the float32 weights,
                                and of what a step reads of the weights, as `MixedWeights` says
    exchange.weight_parts       [(start, stop)] of this rank's weights, or None: what AdamW may update one after the
                                other, with `send_weights()` after each, and at the end `gather_mixed`
    exchange.largest            of a model in FP8: the largest magnitudes of its tensors, of every rank, after `finish`
    exchange.check()            at a report: raises if the device saw a fault; takes `exchange.status`, where there is
                                one, from a caller that has read it back already
    exchange.close()            at the end

    transport  where the sum is made                    its place in a captured step
    mpi        in MPI, from pinned host memory, bucket   the graph is cut where a bucket is complete and before the
               by bucket while the backward continues    update; between two parts the host sends on what has arrived
    peer       on the GPUs (kernels/peers/reduce.py)     inside the graph, six launches after the backward, or during it
                                                         (overlap.py, copies.py)
    nccl       in NCCL                                   inside the graph, two calls after the backward
    peer+…     by peer within each host, then by one     those of both, one after the other
               of the others between hosts

On CPU ranks `mpi` sums the NumPy gradient in place. `peer` and `mpi` add in rank order, so they
give the same bits, on every rank, whether ranks share the update or not. With `nccl` every rank
ends with the same bits because the library computes each sum once, or in an order that gives the
same on all sides; this is checked (`Trainer.check_ranks`), not assumed.

FILES  exchange_base.py, then mpi_exchange.py, peer_exchange.py (with overlap.py and copies.py), nccl_exchange.py,
hosts_exchange.py; this file chooses one for a run.
"""

import importlib.util
import time

import numpy as np

from ..device import fill_zero, is_device, zeros
from ..errors import NumdiffError, UsageError
from ..kernels.peers.reduce import MAX_RANKS
from .exchange_base import NoExchange, shared_part
from .hosts_exchange import HostsExchange
from .mpi_exchange import MpiExchange
from .nccl_exchange import NcclExchange
from .peer_exchange import PeerExchange

# times a transport is timed, and sums of the gradient each time, one after the other; of mpi one
TIMED, ROW = 3, 4
# times the fastest one's: the first that is no slower is taken, mostly the same in a resumed run
NEARLY = 1.1
# Seconds of six launches, and bytes a second: a sum by `peer` that takes no longer goes over NVLink
# (150 to 310 GB/s between H200s; PCIe gives 40), where no other was faster. Starting NCCL and
# testing MPI then takes eight seconds for nothing.
LAUNCHES, NVLINK = 5e-5, 1e11


def make_exchange(communicator, parameters, partition=None):
    """The exchange for a model's `FlatParameters`, by the communicator's transport. Collective.

    partition: the `Partition` of the update, which the exchange then serves
    auto: CPU ranks use mpi. On GPUs each of peer (on one host), nccl (where it is installed) and
    mpi is made. On several hosts with several ranks each, peer within them and nccl or mpi between
    them is made, too; these alone where peer is requested. A transport that fails its trial is
    passed over. The fastest of the others is kept, by the time of a sum of this gradient; of two
    that are nearly as fast the first. Where peer sums at the speed of NVLink, the others are not
    even made. `exchange.why` says what was measured and passed over.
    """
    wanted, kinds = (
        communicator.transport,
        {"mpi": MpiExchange, "peer": PeerExchange, "nccl": NcclExchange},
    )
    if communicator.size == 1:
        return NoExchange()
    over_hosts = wanted == "peer" and communicator.hosts > 1
    if wanted != "auto":
        refuse(communicator, parameters, wanted, partition)
        if not over_hosts:
            return kinds[wanted](communicator, parameters, partition)
    made, times, reasons = [], [], {}
    names = [
        name
        for name in candidates(communicator, parameters, partition)
        if not over_hosts or name.startswith("peer")
    ]
    for name in names:
        try:
            inside, _, across = name.rpartition("+")
            exchange = (
                HostsExchange(communicator, parameters, kinds[across])
                if inside
                else kinds[name](communicator, parameters, partition)
                if name != "mpi"
                else communicator.build(MpiExchange, communicator, parameters, partition)
            )
        except NumdiffError as error:
            reasons[name] = str(error)
            continue
        made.append(exchange)
        if len(names) - len(reasons) > 1:
            times.append(seconds_of(exchange, communicator, parameters, shared_part(partition)))
            if name == "peer" and times[-1] <= LAUNCHES + parameters.grad.nbytes / NVLINK:
                break
    if not made:
        raise NumdiffError([*reasons.values()][-1])
    chosen, notes = made[0], []
    if times:
        chosen = next(e for e, t in zip(made, times, strict=True) if t <= NEARLY * min(times))
        if len(made) > 1 or len(made) + len(reasons) < len(names):
            measured = ", ".join(
                f"{e.name} {1e3 * t:,.3g} ms" for e, t in zip(made, times, strict=True)
            )
            notes.append(f"Measured: {measured}.")
        for exchange in made:
            if exchange is not chosen:
                exchange.close()
    chosen.why = " ".join([*notes, *(f"Not {name}: {why}" for name, why in reasons.items())])
    return chosen


def candidates(communicator, parameters, partition):
    """Names of the transports that may suit these ranks. NCCL is not among them where a rank lacks
    it and there is another way between the GPUs."""
    if not is_device(parameters.grad):
        return ["mpi"]
    everywhere = all(communicator.gather(importlib.util.find_spec("nccl") is not None))
    one_host = communicator.hosts == 1 and communicator.size <= MAX_RANKS
    hosts = why_not_hosts(communicator, parameters, partition) is None
    return [
        *(["peer"] if one_host else []),
        *(["nccl"] if everywhere or not one_host else []),
        *(["peer+nccl"] if hosts and everywhere else []),
        *(["peer+mpi"] if hosts else []),
        "mpi",
    ]


def why_not_hosts(communicator, parameters, partition):
    """Why `HostsExchange` does not suit these ranks, or None. Collective."""
    counts = communicator.gather(communicator.local_size) if communicator.hosts > 1 else [1]
    if not 1 < min(counts) == max(counts) <= MAX_RANKS:
        return f"takes 2 to {MAX_RANKS} ranks on each of several hosts, as many on all"
    if shared_part(partition) or getattr(parameters, "float8", None) is not None:
        return "shares neither the update nor the scales of fp8 over several hosts"
    return None


def seconds_of(exchange, communicator, parameters, shared):
    """What a step waits for: the sum of the gradients, and where the update is shared the gathering
    of norm and weights, which are the same on all ranks before the first step. What a step would
    capture is captured. The shortest of a few times, each of its slowest rank. Collective.
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
    """Raise a `UsageError` if a transport does not suit these ranks."""
    if name in ("peer", "nccl") and not is_device(parameters.grad):
        raise UsageError(
            f"--transport {name} joins GPUs, and these ranks run on the CPU; use --transport mpi."
        )
    if name == "peer" and communicator.hosts > 1:
        if why := why_not_hosts(communicator, parameters, partition):
            raise UsageError(f"--transport peer {why}; use nccl or mpi.")
    elif name == "peer" and communicator.size > MAX_RANKS:
        raise UsageError(
            f"--transport peer takes at most {MAX_RANKS} ranks, not {communicator.size}; use nccl or mpi."
        )
