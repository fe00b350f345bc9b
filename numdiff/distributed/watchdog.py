"""The watchdog: a rank that is killed, stopped or stuck ends the whole job, with a message that
says so.

MPI waits for ever for a missing rank. Most launchers end a job when one of its processes dies;
`srun` may not. None notices a process that is stopped or stuck, and none says what to do next. So
every rank keeps a connection to rank 0 and regularly sends its current activity over it
(progress.py). Four things end the job:

    gone      a connection ends without a farewell: that process was killed. At once
    silent    nothing was received from a rank for `timeout` seconds: it is stopped, or its host cannot be reached
    stuck     all wait for a rank that is alive but has neither arrived nor done anything for that long, as on a hung
              file system; while it compiles kernels it has an hour. Or all wait and no message
              arrives: MPI's network is dead
    failed    a library that reduces gradients has met an error after it accepted the work, so that the GPU waits for
              ever; or a rank failed inside a collective of such a library, on which the others block

Rank 0 decides and notifies the others; every rank judges rank 0's silence for itself. Each live
rank then reports on stderr which rank it waits for, and where, and ends with a nonzero exit code.

The watchdog is a thread, since the main thread may be inside MPI, or may wait for a GPU that waits
for another. It makes no MPI call. After a process was itself stopped (a whole job may be suspended
and resumed), the others' time restarts.
"""

import contextlib
import json
import os
import pathlib
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time

from ..children import script_command
from ..errors import NumdiffError
from ..files import check_held
from ..progress import progress
from ..signals import deferred_signals
from .monitor import gone, monitor

TIMEOUT = 120.0  # seconds: --rank-timeout's default
COMPILING = 3600.0  # seconds that a rank may compile at least
CONNECT = 5.0  # seconds that the connections to one address may take
LONGEST_BEAT = 5.0  # seconds between two messages, at most
# of the log: a regular file or nothing
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
LAUNCHERS = ("mpiexec", "mpirun", "mpiexec.hydra", "prterun", "orterun")
NO_PLACE = (
    "distributed/communicator.py",
    "exchange.py",
    "exchange_base.py",
    "nn/partition.py",
    "nn/optimizer.py",
    # how the names of files end that all ranks wait in
    "device/__init__.py",
    "progress.py",
)
PACKAGE = str(pathlib.Path(__file__).resolve().parents[1]) + os.sep


class Peer:
    """Another rank as last heard from; `at` is (waits, waiting, compiling, ticks), `changed` when
    that changed."""

    def __init__(self, connection, now):
        self.connection, self.buffer = connection, b""
        self.at, self.heard, self.changed = (0, False, 0, 0), now, now
        self.failure = None  # what it has to say of a failure that it waits to tell the others

    def hears(self, at, now, failure):
        self.failure = failure
        if tuple(at) != self.at:
            self.at, self.changed = tuple(at), now
        self.heard = now


class Watchdog:
    """Watches the other ranks from now on, until `stop`. Collective.

    communicator: an object with rank, size and gather(value) -> the values of all ranks
    addresses: of rank 0's host, as the other ranks may reach it, the likeliest first; the first
    that all reach is taken
    timeout: seconds after which a rank that is silent or stuck ends the job; 0: never, only one
    that is killed does so
    several_hosts: whether the launcher may have to be killed, too, as it would wait for a host that
    it cannot reach
    Attributes: works, whether all are connected; address, where rank 0 was reached; log, a file
    that gets the last sentences, too, as the stderr of a host that cannot be reached does not
    arrive either; failure, what is said if the others do not come to hear that this rank has failed
    """

    log = failure = None
    named = False  # whether the monitor names rank 0, should it be killed

    def __init__(self, communicator, addresses, timeout=TIMEOUT, several_hosts=False):
        self.rank, self.size, self.timeout = communicator.rank, communicator.size, timeout
        self.several_hosts = several_hosts
        self._peers = {}  # rank -> Peer: rank 0 has all the others, they have rank 0
        self._own = Peer(None, time.monotonic())  # this rank, as rank 0 sees itself
        self._stopped = False
        # functions as `poll` takes them; when rank 0 got a failure report
        self._polled, self._reported = [], None
        self.address = self._connect(communicator, addresses)
        self.works = self.address is not None
        if self.works:
            threading.Thread(target=self._watch, name="numdiff watchdog", daemon=True).start()
        else:
            self.stop()

    @property
    def beat(self):
        """Seconds between two messages."""
        return min(LONGEST_BEAT, (self.timeout or TIMEOUT) / 20)

    # connecting -----------------------------------------------------------------------------------

    def _connect(self, communicator, addresses):
        """The first address at which all ranks reach rank 0, or None. It listens at one address at
        a time, and not for long."""
        token = secrets.token_bytes(16).hex()
        for address, token in communicator.gather([(a, token) for a in addresses])[0]:
            server = port = None
            if self.rank == 0:
                with contextlib.suppress(OSError):
                    server = listen(address, self.size)
                    port = server.getsockname()[1]
            port = communicator.gather(port)[0]
            reached = bool(port)
            if reached and self.rank > 0:
                reached = self._call(address, port, token)
            reached = all(communicator.gather(reached))
            if server:
                with server:
                    reached = reached and self._accept(server, token)
            if all(communicator.gather(reached)):
                return address
            for peer in self._peers.values():
                peer.connection.close()
            self._peers.clear()
        return None

    def _call(self, address, port, token):
        with contextlib.suppress(OSError):
            connection = socket.create_connection((address, port), CONNECT)
            connection.sendall(f"{token} {self.rank:8d}".encode())
            self._keep(0, connection)
            return True
        return False

    def _accept(self, server, token):
        server.settimeout(CONNECT)
        with contextlib.suppress(OSError, ValueError):
            while len(self._peers) < self.size - 1:
                connection, _ = server.accept()
                connection.settimeout(CONNECT)
                greeting, length = b"", len(token) + 9
                while len(greeting) < length and (more := connection.recv(length - len(greeting))):
                    greeting += more
                if secrets.compare_digest(greeting[: len(token)], token.encode()):
                    self._keep(int(greeting[len(token) :]), connection)
                else:
                    connection.close()
            return True
        return False

    def _keep(self, rank, connection):
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._peers[rank] = Peer(connection, time.monotonic())

    # watching -------------------------------------------------------------------------------------

    def _watch(self):
        with selectors.DefaultSelector() as selector:
            for rank, peer in self._peers.items():
                selector.register(peer.connection, selectors.EVENT_READ, rank)
            now = due = time.monotonic()
            while selector.get_map():
                ready = selector.select(max(0.0, due - now))
                before, now = now, time.monotonic()
                # it was stopped
                if self.timeout and now - before > max(self.timeout / 2, 2 * self.beat):
                    for peer in (*self._peers.values(), self._own):
                        peer.heard = peer.changed = now
                for key, _ in ready:
                    if self._hear(key.data, now):
                        selector.unregister(key.fileobj)
                        del self._peers[key.data]  # it is done: nothing more is expected from it
                if now >= due and not self._stopped:
                    self._ask(now)
                if now >= due and not self._stopped and self.timeout:
                    at = progress.waits, progress.waiting, progress.compiling, progress.ticks
                    self._own.hears(at, now, self.failure)
                    self._tell({"at": at, "failure": self.failure})
                    self._judge(now)
                if now >= due:
                    due = now + self.beat

    def _hear(self, rank, now):
        """Read what a rank has sent; returns whether it says farewell."""
        peer = self._peers[rank]
        try:
            data = peer.connection.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if self._stopped:
            return not data
        if not data:
            self._end({"why": "gone", "ranks": [rank]}, tell=True)
        *lines, peer.buffer = (peer.buffer + data).split(b"\n")
        for message in map(json.loads, lines):
            if "farewell" in message:
                monitor.tell(**({"done": True} if message["failed"] else {"left": rank}))
                return True
            if "why" in message:
                self._end(message, tell=self.rank == 0 and message["why"] == "failed")
            else:
                peer.hears(message["at"], now, message["failure"])
        return False

    def _judge(self, now):
        silent = {rank: now - peer.heard for rank, peer in self._peers.items()}
        if silent and max(silent.values()) > self.timeout:
            # a cut cable silences several at once, within a beat or two
            late = max(silent.values()) - 2 * self.beat
            self._end(
                {"why": "silent", "ranks": [r for r, age in sorted(silent.items()) if age >= late]},
                tell=True,
            )
        if self.rank == 0 and len(self._peers) == self.size - 1:
            peers = {0: self._own, **self._peers}
            ranks = stuck(peers, now, self.timeout)
            failure = next(
                (peer.failure for _, peer in sorted(peers.items()) if peer.failure), None
            )
            if ranks is not None:
                why = (
                    {"why": "failed", "text": failure}
                    if failure
                    else {"why": "stuck", "ranks": ranks}
                )
                self._end(why, tell=True)

    def poll(self, failure):
        """From now on ask `failure()` at every beat: a text, which is this rank's last message,
        ends the job; None does not. Returns a function that ends the asking."""
        self._polled.append(failure)
        return lambda: self._polled.remove(failure)

    def _ask(self, now):
        """Rank 0 reports a failure, whosever it is, as several ranks may meet one at once; another
        rank reports its own where rank 0 does not answer."""
        text = next(filter(None, (failure() for failure in tuple(self._polled))), None)
        if text:
            message = {"why": "failed", "text": text}
            if self.rank == 0 or self._reported and now - self._reported > self.beat + 1:
                self._end(message, tell=True)
            self._tell(message)
            self._reported = self._reported or now

    def stop(self, failed=False):
        """Say farewell: from now on this process may end. failed: by an error, which it or rank 0
        says"""
        self._stopped = True
        self._tell({"farewell": True, "failed": failed})
        monitor.stop()

    def say_how_to_go_on(self):
        """Update the message for a kill of this rank to its present state."""
        if self.rank == 0:
            monitor.say_how_to_go_on(
                None if self.log is None or is_taken(self.log) else str(self.log)
            )

    def _tell(self, message):
        line = json.dumps(message).encode() + b"\n"
        for peer in list(self._peers.values()):
            with contextlib.suppress(OSError):
                peer.connection.send(line)

    # ending ---------------------------------------------------------------------------------------

    def _end(self, message, tell=False):
        """Tell the others, report what happened, let the others report it, too, and end."""
        if self._stopped:
            return
        if tell:
            self._tell(message)
        if message["why"] == "failed":
            text = message["text"] if tell else None
        else:
            text = sentence(message["why"], message["ranks"], self.rank, self.size, self.timeout)
        if message["why"] == "gone" and (
            self.named if self.rank else monitor.tell(gone=say_ranks(message["ranks"]))
        ):
            text = None  # the monitor says it
        if text:
            say(text, self.log)
        monitor.stop()
        time.sleep(self.beat + 1 if message["why"] != "gone" else 0.2 if tell else 1.0)
        if self.several_hosts:
            end_launcher_soon()
        end_process()


def stuck(peers, now, timeout):
    """The ranks in {rank: Peer} for which all wait in vain; [] where all wait only for MPI; None:
    all is well."""
    waits = max((p.at[0] for p in peers.values() if p.at[1]), default=None)
    if waits is None or not any(
        p.at[:2] == (waits, True) and now - p.changed > timeout for p in peers.values()
    ):
        return None
    absent = {rank: p for rank, p in peers.items() if p.at[:2] != (waits, True)}
    if any(
        now - p.changed <= (max(COMPILING, timeout) if p.at[2] else timeout)
        for p in absent.values()
    ):
        return None  # it is working, or has come in the meantime
    if not absent and any(now - p.changed <= timeout for p in peers.values()):
        return None
    return sorted(absent)


def sentence(why, ranks, rank, size, timeout):
    """This rank's last message; None if others report it."""
    who = say_ranks(ranks)
    go_on, slow = progress.ends(), progress.if_slow
    if why == "gone":  # all notice it: one message is enough
        return f"Error: {who}{gone(size)}" if rank == 0 or ranks == [0] and rank == 1 else None
    me = f"Error: rank {rank} of {size}, {progress.doing}{place()},"
    if why == "silent" and rank in ranks:
        return f"{me} was not heard for {timeout:g} s (it was stopped, or cut off from the others), {go_on}"
    if why == "silent":
        return (
            f"{me} waits for {who}, of which nothing has been heard for {timeout:g} s (stopped, or on a host that "
            f"cannot be reached), {go_on}"
        )
    if not ranks:
        return (
            f"{me} has waited {timeout:g} s for a message that every rank has sent (the network of MPI has "
            f"failed{slow}), {go_on}"
        )
    if rank in ranks:
        return (
            f"{me} has made no progress for {timeout:g} s while others wait for it (stuck, as on a hung file "
            f"system{slow}), {go_on}"
        )
    return (
        f"{me} waits for {who}, alive but without progress for {timeout:g} s (stuck, as on a hung file system"
        f"{slow}), {go_on}"
    )


def say_ranks(ranks):
    return (
        ""
        if not ranks
        else f"rank {ranks[0]}"
        if len(ranks) == 1
        else f"ranks {', '.join(map(str, ranks))}"
    )


def place():
    """The main thread's place in numdiff, as " (training/step.py, line 80)", leaving out the
    functions that wait."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE) and not path.endswith(NO_PLACE):
            return f" ({path[len(PACKAGE) :]}, line {frame.f_lineno})"
        frame = frame.f_back
    return ""


def say(text, log=None):
    """Write a line to stderr and to the file `log`, bypassing Python's buffers, whose locks a stuck
    main thread may hold; gives up on each after two seconds."""

    def note():
        with contextlib.suppress(OSError):
            handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_LINK, 0o666)
            os.write(handle, (text + "\n").encode())
            os.close(handle)

    def write():
        # AttributeError: there is no stderr
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.write(sys.stderr.fileno(), (text + "\n").encode())

    within(2.0, write)
    if log and not is_taken(log):
        within(2.0, note)


def is_taken(log):
    """Whether the folder of a file is another one than when the run began."""
    try:
        check_held(os.path.dirname(log))
    except NumdiffError:
        return True
    return False


def within(seconds, function):
    """Run a function that may hang, for at most `seconds`."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)


def end_process():
    """End at once, with an exit code that the launcher sees: the main thread may never come back."""

    def flush():
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()

    within(1.0, flush)
    os._exit(1)


# The system ---------------------------------------------------------------------------------------


def listen(address, size):
    """A socket that listens at one address alone."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=size)


def host_addresses():
    """Addresses of this host as others may reach it, the likeliest first: the one that the launcher
    was given, then the host name's, then those of the network interfaces."""
    found = []
    for name in (
        os.environ.get("PMI_HOSTNAME"),
        os.environ.get("SLURMD_NODENAME"),
        socket.gethostname(),
    ):
        with contextlib.suppress(OSError, UnicodeError):
            found += [
                row[4][0] for row in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM) if name
            ]
    found += interface_addresses()
    return [a for a in dict.fromkeys(found) if not a.startswith(("127.", "::1", "fe80:", "0."))][:8]


def interface_addresses():
    """IPv4 addresses of the network interfaces, where the system lists them."""
    found = []
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ask:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # an interface without an address
                    # SIOCGIFADDR
                    answer = fcntl.ioctl(ask.fileno(), 0x8915, name.encode()[:15].ljust(256, b"\0"))
                    found.append(socket.inet_ntoa(answer[20:24]))
    return found


def end_launcher_soon():
    """Kill the mpiexec that this process descends from, unless it ends by itself within seconds:
    MPICH's waits for ever for processes on a host that it cannot reach."""
    pid = os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        for _ in range(8):
            stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
            name, fields = (
                stat[stat.index("(") + 1 : stat.rindex(")")],
                stat[stat.rindex(")") + 2 :].split(),
            )
            if name in LAUNCHERS and os.stat(f"/proc/{pid}").st_uid == os.getuid():
                still = f'[ "$(cat /proc/{pid}/comm)" = {name} ] &&'
                subprocess.Popen(
                    [
                        "/bin/sh",
                        "-c",
                        f"sleep 5; {still} kill -TERM {pid}; sleep 5; {still} kill -KILL {pid}",
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
                return
            pid = int(fields[1])


# The start ----------------------------------------------------------------------------------------


def start_limit(timeout):
    """Seconds that the ranks may take to meet in MPI_Init; 0: for ever."""
    return timeout and max(30.0, timeout / 4)


@contextlib.contextmanager
def start_guard(limit, interrupted=False):
    """Context of the start of MPI: if it takes longer than `limit` seconds, because a rank never
    came, a separate process says so and kills this one. MPI_Init holds Python's lock, so no thread
    could.

    A Ctrl-C interrupts after the start, as half of it cannot be made up for, or seconds later the
    other process kills this one. interrupted: one came before, so no rank that does not come at
    once is waited for
    """
    if not limit:
        yield
        return
    with deferred_signals(), contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, AttributeError):  # AttributeError: on Windows
            # inherited: until it is ready for one
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                guard = subprocess.Popen(
                    script_command(
                        pathlib.Path(__file__).with_name("start_guard.py"),
                        os.getpid(),
                        limit,
                        monitor.process.pid if monitor.process else 0,
                        progress.if_slow,
                    ),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            held.callback(guard.wait)
            held.callback(guard.stdin.close)
            if interrupted:
                guard.send_signal(signal.SIGINT)
        yield
