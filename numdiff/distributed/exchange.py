"""The gradients' all-reduce over the ranks: the transport `mpi`, and those between GPUs that
extensions add, behind one interface.

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
    others     on the GPUs                               inside the graph, launched after the backward, or during it

On CPU ranks `mpi` sums the NumPy gradient in place. It adds in rank order, so it gives the same
bits, on every rank, whether ranks share the update or not. That all ranks end with the same bits is
checked (`Trainer.check_ranks`), not assumed.

A transport of an extension (extensions.py, `transport`) is a module with these functions.
    check()     raises a `UsageError` where this process lacks what the transport needs
    ways(communicator, parameters, partition, requested)
                {name: a function that makes the exchange}: the ways in which the transport can sum these ranks'
                gradients; a name with "+" joins two transports. requested: it was named, so that a `UsageError` says
                why there is none. Collective
    plan(communicator, parameters, partition)
                launches its kernels on the stand-in for a GPU that holds the parameters, for compiling ahead;
                partition: None where the update is not shared

FILES  exchange_base.py, then mpi_exchange.py; this file chooses one for a run.
"""

import time

import numpy as np

from ..device import fill_zero, is_device, zeros
from ..errors import NumdiffError, UsageError
from ..extensions import available, find
from .exchange_base import NoExchange, shared_part
from .mpi_exchange import MpiExchange

# times a transport is timed, and sums of the gradient each time, one after the other; of mpi one
TIMED, ROW = 3, 4
# times the fastest one's: the first that is no slower is taken, mostly the same in a resumed run
NEARLY = 1.1


def make_exchange(communicator, parameters, partition=None):
    """The exchange for a model's `FlatParameters`, by the communicator's transport. Collective.

    partition: the `Partition` of the update, which the exchange then serves
    Each of the `ways_to_sum` is made, if there are several. One that fails its trial is passed
    over. The fastest of the others is kept, by the time of a sum of this gradient; of those that
    are nearly as fast the first. Where one is so fast that it `suffices`, the later ones are not
    even made. `exchange.why` says what was measured and passed over.
    """
    if communicator.size == 1:
        return NoExchange()
    ways = ways_to_sum(communicator, parameters, partition)
    if len(ways) == 1:
        return [*ways.values()][0]()
    made, times, reasons = [], [], {}
    for name, make in ways.items():
        try:
            exchange = make()
        except NumdiffError as error:
            reasons[name] = str(error)
            continue
        made.append(exchange)
        if len(ways) - len(reasons) > 1:
            times.append(seconds_of(exchange, communicator, parameters, shared_part(partition)))
            if exchange.suffices(times[-1]):
                break
    if not made:
        raise NumdiffError([*reasons.values()][-1])
    chosen, notes = made[0], []
    if times:
        chosen = next(e for e, t in zip(made, times, strict=True) if t <= NEARLY * min(times))
        if len(made) > 1 or len(made) + len(reasons) < len(ways):
            measured = ", ".join(
                f"{e.name} {1e3 * t:,.3g} ms" for e, t in zip(made, times, strict=True)
            )
            notes.append(f"Measured: {measured}.")
        for exchange in made:
            if exchange is not chosen:
                exchange.close()
    chosen.why = " ".join([*notes, *(f"Not {name}: {why}" for name, why in reasons.items())])
    return chosen


def ways_to_sum(communicator, parameters, partition):
    """{name: a function that makes the exchange}, those to prefer first. Collective.

    auto: CPU ranks use mpi alone. On GPUs these are the ways of each transport that may suit these
    ranks: those of a single transport, then those that join two, then mpi.
    """
    wanted, on_gpus = communicator.transport, is_device(parameters.grad)
    by_mpi = {"mpi": lambda: communicator.build(MpiExchange, communicator, parameters, partition)}
    if wanted == "mpi" or (wanted == "auto" and not on_gpus):
        return by_mpi
    if wanted != "auto":
        return gpu_transport(wanted, on_gpus).ways(communicator, parameters, partition, True)
    ways = {}
    for transport in available("transport").values():
        ways |= transport.ways(communicator, parameters, partition, False)
    return {name: ways[name] for name in sorted(ways, key=lambda name: "+" in name)} | by_mpi


def gpu_transport(name, on_gpus):
    """The module of an extension's transport; a `UsageError` where the ranks are not on GPUs."""
    if not on_gpus:
        raise UsageError(
            f"--transport {name} joins GPUs, and these ranks run on the CPU; use --transport mpi."
        )
    return find("transport", name, f"--transport {name}")


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
