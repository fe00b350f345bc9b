"""The monitor process of rank 0, which reports a killed rank (monitor_process.py): its start and
its messages.

It starts with the command, since a rank may also be killed while it imports modules for a second.
So this file imports little.
"""

import contextlib
import json
import os
import pathlib
import select
import subprocess

from ..children import script_command
from ..progress import progress
from .start_guard import siblings

READY = 5.0  # seconds that its start may take


class Monitor:
    """Does nothing until `start`; only rank 0 starts it. Attributes: size, how many ranks there
    are."""

    process, size, _ready = None, 1, False

    def start(self, size):
        """Start the process, if the system has what it needs; it watches this one as rank 0 of
        `size`."""
        self.size = size
        # Linux has both
        if self.process or not (hasattr(os, "pidfd_open") and hasattr(select, "epoll")):
            return
        with contextlib.suppress(OSError):
            self.process = subprocess.Popen(
                script_command(pathlib.Path(__file__).with_name("monitor_process.py")),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            self.say_how_to_go_on()
            ranks = {process: other[0] for process, other in siblings(os.getpid()).items()} | {
                os.getpid(): 0
            }
            self.tell(ranks=ranks, all=len(ranks) == size)

    def is_ready(self):
        """Whether it watches; waits for its start."""
        if self.process and not self.process.stdout.closed:
            if select.select([self.process.stdout], [], [], READY)[0]:
                # empty: it has ended, as where pidfds are forbidden
                self._ready = bool(self.process.stdout.readline())
            self.process.stdout.close()
        return self._ready

    def say_how_to_go_on(self, log=None):
        """Update the message about a killed rank to the command that continues the work now; log: a
        file that gets it, too."""
        self.tell(after=gone(self.size), log=log)

    def tell(self, **message):
        """Whether the process gets a message, as monitor_process.py has them."""
        if self.process:
            with contextlib.suppress(OSError, ValueError):  # it is gone; its input is closed
                self.process.stdin.write(json.dumps(message).encode() + b"\n")
                self.process.stdin.flush()
                return True
        return False

    def stop(self):
        """There is nothing more to say."""
        if self.process and not self.process.stdin.closed:
            self.tell(done=True)
            with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
                self.process.stdin.close()
                self.process.wait(1.0)


def gone(size):
    """The message about a killed rank, after its number."""
    return f" of {size} is gone (killed, out of memory, or its machine failed), {progress.ends()}"


monitor = Monitor()
