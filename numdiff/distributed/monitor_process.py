"""Runs next to rank 0, in a separate session, and reports which rank of this host was killed.

Launchers kill all ranks within milliseconds once one is gone, often before another can report which
one it was. This process is not one of theirs. It imports nothing of numdiff, so that it starts
quickly, and ends with rank 0.

Its input: lines of JSON, from rank 0 (monitor.py).
    {"ranks": {process: rank}, "all": whether others would be reported by rank 0} ranks of this
                                    host, to be watched; it answers "ready" to the first
    {"after": text, "log": path}    what follows "Error: rank N", and a file that gets the sentence, too
    {"gone": who}                   rank 0 knows who is gone, such as "rank 3" on another host: to be said now
    {"left": rank}                  this rank has said farewell, and may end
    {"done": true}                  rank 0 has, or all has been said
"""

import contextlib
import json
import os
import select
import time

# seconds within which a launcher kills the others: a rank that ended longer before was not killed
TOGETHER = 1.0
ANSWER = 0.1  # seconds for what rank 0 has said last
INPUT = 0


def main():
    monitor = MonitorProcess()
    while not monitor.done:
        monitor.wait()


class MonitorProcess:
    """The state of the ranks of this host."""

    def __init__(self):
        self.events = select.epoll()  # it reports what happened first, first
        self.events.register(INPUT, select.EPOLLIN)
        # {descriptor of a process: rank}; ranks that may end
        self.ranks, self.left, self.rest = {}, set(), b""
        self.after, self.log, self.all = "", None, False
        # the rank that ended first, and when; when that is said
        self.gone = self.since = self.deadline = None
        self.done = False

    def wait(self):
        """Wait for the next event, or for the time at which the rank that is gone is said."""
        for handle, _ in self.events.poll(
            max(0, self.deadline - time.monotonic()) if self.deadline else -1
        ):
            if handle == INPUT:
                self.hear(os.read(INPUT, 1 << 16))
            else:
                self.events.unregister(handle)
                self.ended(self.ranks[handle])
        if self.deadline and time.monotonic() >= self.deadline and not self.done:
            self.say(
                f"rank {self.gone}"
                if self.gone or self.all
                else "rank 0, or another that was killed before,"
            )

    def say(self, who):
        say(f"Error: {who}{self.after}\n".encode(), self.log)
        self.done = True

    def hear(self, data):
        if not data:  # rank 0 has ended, which is another event
            self.events.unregister(INPUT)
            self.done = self.done or not self.ranks
        *lines, self.rest = (self.rest + data).split(b"\n")
        for message in map(json.loads, lines):
            self.done = self.done or "done" in message
            self.left.add(message.get("left"))
            self.after, self.log = message.get("after", self.after), message.get("log", self.log)
            self.all = message.get("all", self.all)
            if "gone" in message and not self.done:
                self.say(message["gone"])
            for process, rank in message.get("ranks", {}).items():
                if rank not in self.ranks.values():
                    self.watch(int(process), rank)

    def watch(self, process, rank):
        """From now on the end of a process is an event."""
        if not self.ranks:
            os.write(1, b"ready\n")
        try:
            handle = os.pidfd_open(process)
        except ProcessLookupError:
            self.ended(rank)
        else:
            self.ranks[handle] = rank
            self.events.register(handle, select.EPOLLIN)

    def ended(self, rank):
        now = time.monotonic()
        if self.gone in self.left or self.gone is not None and now - self.since > TOGETHER:
            self.gone = None
        if self.gone is None and rank not in self.left:
            self.gone, self.since = rank, now
        if rank == 0:  # while it lives, it says what becomes of others
            self.deadline = now + ANSWER


def say(text, log):
    with contextlib.suppress(OSError):
        os.write(2, text)
    if log:
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            os.write(os.open(log, flags, 0o666), text)


if __name__ == "__main__":
    with contextlib.suppress(OSError, ValueError):
        main()
