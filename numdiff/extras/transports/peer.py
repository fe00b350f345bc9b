"""The transport `peer`: which ranks it suits, and how. distributed/exchange.py says what each
function is for."""

from ...distributed.mpi_exchange import MpiExchange
from ...errors import UsageError
from ...kernels.peer_pieces import MAX_RANKS
from . import nccl_exchange, overlap  # noqa: F401 (the script that measures overlaps sets its constants)
from .hosts_exchange import HostsExchange, why_not_hosts
from .peer_exchange import PeerExchange


def check():
    """It needs nothing but a GPU."""


def ways(communicator, parameters, partition, requested):
    if communicator.hosts == 1 and communicator.size <= MAX_RANKS:
        return {"peer": lambda: PeerExchange(communicator, parameters, partition)}
    if communicator.hosts == 1:
        why = f"takes at most {MAX_RANKS} ranks, not {communicator.size}"
    else:
        why = why_not_hosts(communicator, parameters, partition)
    if why and requested:
        raise UsageError(f"--transport peer {why}; use nccl or mpi.")
    if why:
        return {}
    joined = {"peer+mpi": lambda: HostsExchange(communicator, parameters, MpiExchange)}
    if nccl_exchange.is_everywhere(communicator):
        joined = {
            "peer+nccl": lambda: HostsExchange(communicator, parameters, nccl_exchange.NcclExchange)
        } | joined
    return joined


def plan(communicator, parameters, partition):
    ranks = communicator.size // communicator.hosts  # of a host
    possible = communicator.hosts == 1 or not (partition or parameters.float8)
    if possible and 1 < ranks <= MAX_RANKS:
        PeerExchange.planned(parameters, ranks, partition)
