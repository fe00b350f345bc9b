"""The watchdog: a rank that is killed takes the whole job with it, and someone says so.

MPI waits for ever for a rank that is gone. Most launchers end a job when a process of it dies; `srun` need not, and
none says what to do next. So every rank holds a connection to rank 0. A connection that ends without a farewell is a
process that was killed: rank 0 says which, tells the others, and all end with an exit code. Where a whole machine
disappears, the system's own keep-alive messages find out within `PATIENCE` seconds.

A thread watches, as the main thread may stand in MPI or wait for a GPU that waits for another; it makes no MPI call.
"""
import contextlib
import os
import secrets
import selectors
import socket
import sys
import threading

FAREWELL, END = b"f", b"e"  # a rank is done or says itself what failed; the job ends here
PATIENCE = 20  # seconds without an answer from a machine's network after which it counts as gone
CONNECT = 10  # seconds that the connections may take at the start


class Watchdog:
    """Watches the other ranks from now on, until `stop`. Collective.

    communicator: an object with rank, size and gather(value) -> the values of all ranks
    address: of this host, as the other ranks reach it
    """

    def __init__(self, communicator, address):
        self.rank, self.size = communicator.rank, communicator.size
        self._connections = {}  # rank -> socket: rank 0 has all the others', they have rank 0's
        self._stopped = False
        server, token = None, secrets.token_bytes(16)
        if self.rank == 0:
            with contextlib.suppress(OSError):
                server = socket.create_server(("", 0))
                server.settimeout(CONNECT)
        port, token = communicator.gather((server and server.getsockname()[1], token))[0]
        connected = True
        try:
            if self.rank == 0:
                self._accept(server, token)
            elif port:
                connection = socket.create_connection((address, port), CONNECT)
                connection.sendall(token + self.rank.to_bytes(4, "big"))
                self._keep(0, connection)
        except (OSError, AttributeError):  # a firewall: the launcher alone watches then
            connected = False
        finally:
            if server:
                server.close()
        self.works = all(communicator.gather(connected and bool(port)))
        if self.works:
            threading.Thread(target=self._watch, name="numdiff watchdog", daemon=True).start()
        else:
            self.stop()

    def _accept(self, server, token):
        while len(self._connections) < self.size - 1:
            connection, _ = server.accept()
            connection.settimeout(CONNECT)
            greeting = b""
            while len(greeting) < len(token) + 4 and (more := connection.recv(len(token) + 4 - len(greeting))):
                greeting += more
            if secrets.compare_digest(greeting[:len(token)], token):
                self._keep(int.from_bytes(greeting[len(token):], "big"), connection)
            else:
                connection.close()

    def _keep(self, rank, connection):
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", PATIENCE // 4), ("TCP_KEEPINTVL", PATIENCE // 4), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):  # Linux has all three
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connections[rank] = connection

    def _watch(self):
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    try:
                        word = key.fileobj.recv(1)
                    except OSError:
                        word = b""
                    if self._stopped:
                        return
                    if word == FAREWELL:
                        selector.unregister(key.fileobj)
                    elif word == END:
                        end_process()
                    else:
                        self._lost(key.data)

    def _lost(self, rank):
        """Rank `rank` is gone without a word: say so, tell the others, end."""
        if self.rank < 2:  # all miss rank 0: one is enough to say it
            print(f"Error: rank {rank} of {self.size} is gone (killed, out of memory, or its machine failed), so the "
                  "job ends; go on from its last checkpoint with --resume.", file=sys.stderr, flush=True)
        self._tell(END)
        end_process()

    def stop(self):
        """Say farewell: what happens to this process from now on is no accident."""
        self._stopped = True
        self._tell(FAREWELL)

    def _tell(self, word):
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(word)


def end_process():
    """End at once, with an exit code that the launcher sees: the main thread may never come back."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)
