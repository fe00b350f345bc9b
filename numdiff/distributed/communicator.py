"""Data parallel training: several processes, the ranks, train one model, each on its part of every
batch.

    communicator = connect("auto", device)      in every process; alone or as a rank of `mpiexec -n 4 …`
    with communicator.job():                    a failure inside ends all ranks, with one message
        …

No other code of numdiff checks the number of ranks: a single process has an `Alone`, with the same
methods.

THE RULES
    The methods below are collective: every rank calls them, in the same order, never under a
    condition on the rank. Rank 0 alone prints and writes: `first(function)` runs there, and gives
    every rank the result or the error.
    What may fail on one rank only is run by `build(function)` or `everywhere(function)`: an error
    of one becomes the error of all.
    So an expected error is known to all ranks, which end in order, and rank 0 prints it. Any other
    failure ends the job by MPI_Abort; a rank that is killed, stopped or stuck by the launcher or
    the watchdog (watchdog.py).

HOW RANKS WAIT
    MPI waits by spinning, which would take the cores from ranks that still compute where there are
    more ranks than cores. So every wait here yields the core (`exchange.wait`).
"""

import atexit
import collections
import contextlib
import copy
import hashlib
import os
import socket
import sys
import time
import traceback

import numpy as np

from ..data.fingerprint import difference
from ..device import choose_gpu, cores, get_gpu, gpu_count, share_cores
from ..errors import NumdiffError, UsageError, why_no_process
from ..extensions import entries
from ..progress import progress
from .exchange import gpu_transport, make_exchange
from .exchange_base import NoExchange, wait
from .failures import (
    AgreedError,
    exit_code,
    failed_library,
    is_clean,
    raise_first,
    sentence,
    waited_for,
)
from .launcher import import_mpi, launched
from .monitor import monitor
from .same_code import check_code
from .shared_memory import remove_stray_memory
from .together import one_interrupt
from .watchdog import TIMEOUT, Watchdog, end_process, host_addresses, start_guard, start_limit

TYPES = {4: "FLOAT", 8: "DOUBLE"}  # MPI's, by bytes
# seconds for the other ranks to meet the same error, before it counts as this rank's own
GRACE = 5.0

_current = None  # the communicator of this process, once it has connected
_started = []  # the one that `start` has made, where that was interrupted before it could return it


class Alone:
    """The communicator of a single process."""

    rank, size, hosts, transport = 0, 1, 1, "auto"
    local_rank, local_size, host_cores = 0, 1, None

    def first(self, function, *arguments):
        """The result of `function(*arguments)` on rank 0, on every rank; it must be picklable."""
        return function(*arguments)

    def build(self, function, *arguments):
        """This rank's result of `function(*arguments)`, which all run; raises on all where it fails
        on one."""
        return function(*arguments)

    def everywhere(self, function, *arguments):
        """As `build`, but returns the list of all ranks' results, which must be picklable."""
        return self.gather(self.build(function, *arguments))

    def gather(self, value):
        """List of every rank's picklable value."""
        return [value]

    def on_host(self, value):
        """List of the picklable values of the ranks of this host."""
        return [value]

    def largest(self, number):
        """The largest of the ranks' integers."""
        return number

    def broadcast(self, array):
        """Overwrite a NumPy array with that of rank 0."""

    def broadcast_arrays(self, arrays):
        """{name: NumPy array} of rank 0; the others give None."""
        return arrays

    def check_same(self, array, what):
        """Raise where a NumPy array is not bit for bit the same on every rank; `what` names it."""

    def check_options(self, options):
        """Raise a `UsageError` if {name: value} differs between the ranks."""

    def check_data(self, dataset, fingerprint):
        """Raise a `UsageError` if the ranks have opened different datasets, by their fingerprints."""

    def log_to(self, path):
        """The watchdog's last message goes into this file, too."""

    def resumes_by(self, command):
        """From now on the message of a failure says that the work continues by this command."""
        progress.resume = command

    def poll(self, fault):
        """The watchdog asks `fault()` regularly, in its thread: an exception ends the job, None
        does not. Returns a function that ends the asking."""
        return lambda: None

    def barrier(self):
        """Wait for all ranks."""

    def exchange(self, parameters, partition=None):
        """The exchange that sums the gradients of a model's FlatParameters over the ranks
        (exchange.py), and serves their `Partition`."""
        return NoExchange()

    def gather_parts(self, part, bounds, everywhere=True):
        """All of a flat NumPy array, of which rank r has the elements bounds[r] … bounds[r + 1] -
        1.

        everywhere: on every rank; else None on all but rank 0
        """
        return part

    @contextlib.contextmanager
    def job(self):
        """Context of the work: a failure inside ends all ranks."""
        yield self

    def describe(self):
        """A line for the log; None for one process."""

    def remark(self):
        """A sentence about cards that differ; None if all ranks have the same."""


def current():
    """The communicator that `connect` gave in this process, else an `Alone`."""
    return _current or Alone()


def connect(transport="auto", device="cpu", timeout=None):
    """The communicator of this process; the same one if it has connected before. Collective.

    transport: how gradients travel, auto, mpi or one of an extension; device: "cpu" or "cuda": each rank of a host
        then gets the GPU with its local number; timeout: seconds after which a rank that is stopped
        or stuck ends the job (120), 0 for never.
    Raises `UsageError` for what cannot work; `SystemExit` on ranks above 0, as rank 0 prints the
    message. mpi4py is imported where a launcher started the process, or where a transport other
    than auto is requested.
    """
    global _current
    progress.trains, progress.resume = timeout is not None, None
    if _current is not None:
        _current.transport = transport
        _current.wait_at_most(timeout)
        return _current
    started = launched()
    if started is None and transport == "auto":
        return Alone()
    try:
        communicator = start(transport, timeout)
    except UsageError as error:  # no MPI, so no way to agree: it fails in the same way on all
        if started and started[0] > 0:
            # a launcher may end all when the first leaves: let that be rank 0, which prints the
            # message
            time.sleep(1)
            raise SystemExit(error.exit_code) from None
        raise
    if communicator.size > 1:
        _current = communicator
    with communicator.job():
        check_code(communicator)
        communicator.build(check_transport, transport, device)
        communicator.take_place(device)
    return current()


def start(transport="auto", timeout=None, interrupted=False):
    """A `Communicator`, once all ranks have arrived; the process ends if one does not, soon where
    it is interrupted."""
    timeout = TIMEOUT if timeout is None else timeout
    with start_guard(start_limit(timeout) if launched() else 0, interrupted):
        if not _started:
            _started.append(Communicator(import_mpi(), transport, timeout))
    return _started.pop()


@contextlib.contextmanager
def job():
    """Context of a command that may run as a rank, before it has connected: ranks above 0 print
    nothing. An error on all ranks, such as a wrong option, is raised on rank 0 alone. Does nothing
    for a process that is alone."""
    started = launched()
    if started is None:
        yield
        return
    with contextlib.ExitStack() as held:
        held.enter_context(one_interrupt())
        if started[0] > 0:
            held.enter_context(
                contextlib.redirect_stdout(held.enter_context(open(os.devnull, "w")))
            )
        try:
            yield
        except BaseException as error:
            if _current is not None or is_clean(error):  # its own job() has dealt with it
                raise
            try:
                communicator = start(interrupted=isinstance(error, KeyboardInterrupt))
            except UsageError:
                raise error from None
            with communicator.job():
                raise


def check_transport(transport, device):
    known = ["auto", "mpi", *entries("transport")]
    if transport not in known:
        raise UsageError(f"--transport {transport} does not exist; use {' or '.join(known)}.")
    if transport in entries("transport"):
        gpu_transport(transport, device != "cpu").check()


class Communicator(Alone):
    """The ranks of an MPI job. Attributes: rank, size, hosts (how many machines), local_rank,
    local_size, host_cores (numbers of the cores that the ranks of this host may use together),
    transport."""

    def __init__(self, MPI, transport="auto", timeout=TIMEOUT):
        world = MPI.COMM_WORLD
        self.MPI, self.transport = MPI, transport
        # two: a failing rank must not disturb the others
        self.comm, self._alarm = world.Dup(), world.Dup()
        self.rank, self.size = world.rank, world.size
        local = world.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = local.rank, local.size
        self._local = local
        if self.local_rank == 0:
            remove_stray_memory()
        self.hosts = sum(self.gather(local.rank == 0))
        self._job = 0  # depth of nested job() contexts
        self._cards = []  # names of all ranks' GPUs
        self._ending = False  # this rank is ending, and the others know
        self._watchdog = None
        if self.size > 1:
            addresses = ["127.0.0.1"] if self.hosts == 1 else host_addresses()
            self._watchdog = Watchdog(self, addresses, timeout, self.hosts > 1)
            atexit.register(self._watchdog.stop)
            self._start_monitor()
            sys.excepthook = self._excepthook

    def _start_monitor(self):
        """Start the monitor process of rank 0, which reports a killed rank of its host. Collective."""
        processes = dict(self.on_host((os.getpid(), self.rank)))
        if self.rank == 0 and self._watchdog.works:
            monitor.start(self.size)
            if monitor.is_ready():
                monitor.tell(ranks=processes, all=True)
        self._watchdog.named = self.gather(monitor.is_ready())[0] and 0 in processes.values()

    def log_to(self, path):
        if self._watchdog:
            self._watchdog.log = path
            self._watchdog.say_how_to_go_on()

    def resumes_by(self, command):
        super().resumes_by(command)
        if self._watchdog:
            self._watchdog.say_how_to_go_on()

    def poll(self, fault):
        watchdog = self._watchdog
        if not watchdog:
            return super().poll(fault)
        # in the job: this may be one of `split`
        who = f"Error: rank {watchdog.rank} of {watchdog.size} failed: "
        return watchdog.poll(lambda: (error := fault()) and who + sentence(error))

    def wait_at_most(self, timeout):
        """Change the seconds after which the watchdog ends the job; None changes nothing."""
        if self._watchdog and timeout is not None:
            self._watchdog.timeout = timeout

    def take_place(self, device):
        """Assign this rank its share of its host: its GPU, or its part of the cores. Collective."""
        masks = self.on_host(cores())
        self.host_cores = sorted(set().union(*masks))
        sharers = collections.Counter(core for mask in masks for core in mask)
        share_cores(max(1, int(sum(1 / sharers[core] for core in cores()) + 1e-6)))
        if device == "cuda":
            count = gpu_count()
            choose_gpu(self.local_rank if count > self.local_rank else 0)
            cards = self.on_host(self.build(lambda: get_gpu().uuid))
            crowded = len(set(cards)) < len(cards)
            text = (
                f"{self.local_size} ranks were started on {socket.gethostname()}, which has {len(set(cards))} "
                f"GPU{'s' if len(set(cards)) > 1 else ''}: start at most one rank a GPU, or use --device cpu."
            )
            raise_first(self.gather((text, UsageError.exit_code) if crowded else None))
            self._cards = self.gather(get_gpu().device_name)

    def split(self):
        """(communicator of this host's ranks, that of the ranks with this local number on every
        host). Collective."""
        return [
            self._of(comm) for comm in (self._local, self.comm.Split(self.local_rank, self.rank))
        ]

    def _of(self, comm):
        some = copy.copy(self)
        some.comm, some.rank, some.size = comm, comm.rank, comm.size
        return some

    # agreeing -------------------------------------------------------------------------------------

    def gather(self, value):
        self.barrier()
        return self.comm.allgather(value)

    def on_host(self, value):
        self._wait(self._local.Ibarrier())
        return self._local.allgather(value)

    def barrier(self):
        self._wait(self.comm.Ibarrier())

    def largest(self, number):
        result = np.array([number], np.int64)
        self._wait(self.comm.Iallreduce(self.MPI.IN_PLACE, result, self.MPI.MAX))
        return int(result[0])

    @staticmethod
    def _wait(request):
        wait(request.Test)

    def first(self, function, *arguments):
        outcome = self._attempt(function, arguments) if self.rank == 0 else None
        self.barrier()
        value, error = self.comm.bcast(outcome)
        raise_first([error])
        return value

    def build(self, function, *arguments):
        value, error = self._attempt(function, arguments)
        watchdog = self._watchdog
        if watchdog and error:
            watchdog.failure = waited_for(error[0], watchdog.rank, watchdog.size)
        errors = self.gather(error)
        if watchdog:
            watchdog.failure = None
        raise_first(errors)
        return value

    def _attempt(self, function, arguments):
        """(result, None), or (None, (message, exit code)) for an error."""
        try:
            return function(*arguments), None
        except Exception as error:
            library = failed_library(error)
            if not (
                library
                or isinstance(error, (NumdiffError, OSError, MemoryError))
                or why_no_process(error)
            ):
                traceback.print_exc()  # a bug: the traceback shows where
            return None, (
                f"{library}." if library else sentence(error),
                getattr(error, "exit_code", 1),
            )

    def check_options(self, options):
        rows = self.gather(options)
        for rank, row in enumerate(rows):
            for name in rows[0].keys() | row.keys():
                if rows[0].get(name) != row.get(name):
                    raise AgreedError(
                        f"the ranks disagree on {name}: rank 0 has {rows[0].get(name)}, rank {rank} has "
                        f"{row.get(name)}; start all with the same options.",
                        UsageError.exit_code,
                    )

    def check_data(self, dataset, fingerprint):
        rows = self.gather((getattr(dataset, "path", "?"), fingerprint))
        for rank, (path, other) in enumerate(rows):
            if why := difference(rows[0][1], other, "rank 0", f"rank {rank}"):
                files = (
                    ""
                    if path == rows[0][0]
                    else f" (rank 0 opened {rows[0][0]}, rank {rank} {path})"
                )
                raise AgreedError(
                    f"the ranks train on different data: {why}{files}; give all of them the same file as "
                    "--data.",
                    UsageError.exit_code,
                )

    def check_same(self, array, what):
        digests = self.gather(
            hashlib.blake2b(np.ascontiguousarray(array).view(np.uint8), digest_size=16).digest()
        )
        other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if other:
            raise AgreedError(
                f"{what} of rank {other[0]} differ from those of rank 0: a machine or a transport is "
                "faulty; resume from the last checkpoint, with --transport mpi if it repeats.",
                1,
            )

    # arrays ---------------------------------------------------------------------------------------

    def broadcast(self, array):
        self.barrier()
        self.comm.Bcast(array)

    def broadcast_arrays(self, arrays):
        shapes = self.first(lambda: [(name, a.shape, a.dtype.str) for name, a in arrays.items()])
        result = (
            arrays
            if self.rank == 0
            else {name: np.empty(shape, dtype) for name, shape, dtype in shapes}
        )
        for name, _, _ in shapes:
            self.comm.Bcast(np.ascontiguousarray(result[name]) if self.rank == 0 else result[name])
        return result

    def exchange(self, parameters, partition=None):
        return make_exchange(self, parameters, partition)

    def gather_parts(self, part, bounds, everywhere=True):
        whole = np.empty(bounds[-1], part.dtype) if everywhere or self.rank == 0 else None
        counts, kind = (
            [b - a for a, b in zip(bounds, bounds[1:], strict=False)],
            TYPES[part.dtype.itemsize],
        )
        into = [whole, counts, bounds[:-1], getattr(self.MPI, kind)]
        part = [part, getattr(self.MPI, kind)]
        self._wait(
            self.comm.Iallgatherv(part, into)
            if everywhere
            else self.comm.Igatherv(part, into if self.rank == 0 else None)
        )
        return whole

    def describe(self):
        alone = (
            ""
            if self._watchdog and self._watchdog.works
            else (
                " (without a watchdog, as they cannot connect to rank 0: a rank that is stopped will not be noticed)"
            )
        )
        return f"{self.size} on {self.hosts} host{'s' if self.hosts > 1 else ''}{alone}"

    def remark(self):
        other = next(
            (rank for rank, card in enumerate(self._cards) if card != self._cards[0]), None
        )
        if other is not None:
            return (
                f"The ranks' cards differ (rank 0: {self._cards[0]}, rank {other}: {self._cards[other]}): the "
                "slowest sets the pace, and with --shard-update yes each weight is updated on one of them alone, "
                "so that ranks cannot come to differ."
            )
        return None

    # failing --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def job(self):
        """Context of the work. An error that all ranks meet is raised on rank 0, and the others
        exit silently; one that a single rank meets ends the job at once, with its message."""
        self._job += 1
        try:
            yield self
        except BaseException as error:
            if self._job > 1 or is_clean(error):
                raise
            if not isinstance(error, AgreedError) and not self._all_fail():
                self._abort(error)
            self._leave()
            if self.rank > 0:
                raise SystemExit(exit_code(error)) from None
            if failed_library(error):
                raise NumdiffError(sentence(error)) from error
            raise
        finally:
            self._job -= 1

    def _all_fail(self):
        """Whether every rank gets here within GRACE seconds: then all have met the same error."""
        deadline = time.perf_counter() + GRACE
        try:
            request = self._alarm.Ibarrier()
            while not request.Test():
                if time.perf_counter() > deadline:
                    return False
                time.sleep(0.01)
        except self.MPI.Exception:  # nothing arrives any longer
            return False
        return True

    def _leave(self):
        self._ending = True
        if self._watchdog:
            self._watchdog.stop(failed=True)

    def _excepthook(self, kind, error, trace):
        """An uncaught error ends all ranks, unless they have agreed on it and end by themselves."""
        if self._ending:
            sys.__excepthook__(kind, error, trace)
        else:
            self._abort(error)

    def _abort(self, error):
        """Say what failed on this rank, and end all ranks."""
        expected = isinstance(error, (OSError, MemoryError, KeyboardInterrupt, SystemExit))
        if not (
            expected
            or hasattr(error, "exit_code")
            or failed_library(error)
            or why_no_process(error)
        ):
            traceback.print_exception(error)
        print(
            f"Error: rank {self.rank} of {self.size} failed: {sentence(error)}",
            file=sys.stderr,
            flush=True,
        )
        sys.stdout.flush()
        self._leave()
        # MPICH's launcher kills all at once, and may lose what it has not passed on yet
        time.sleep(0.5)
        self.MPI.COMM_WORLD.Abort(exit_code(error))
        end_process()
