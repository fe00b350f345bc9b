"""Operations that go on while threads run: what they still read and write, and when they are complete.

An asynchronous instruction puts a `Pending` on the memory that it uses. As long as it is there, touching what it writes,
or writing what it reads, is a fault. It completes as late as the rules allow: a copy with groups at the wait for its
group, a copy with an mbarrier when no thread can go on without it, a wgmma at its wait. So a wait that is missing is
seen every time, not only when a GPU happens to be slow.
"""


class Pending:
    """A range of bytes in use by an operation that is not complete.

    kind: the instruction, for messages; writes: whether it writes the range or reads it; wait: what would end it
    """

    __slots__ = ("kind", "memory", "start", "stop", "writes", "thread", "site", "wait")

    def __init__(self, kind, memory, start, stop, writes, thread, site, wait):
        self.kind, self.memory, self.start, self.stop, self.writes = kind, memory, start, stop, writes
        self.thread, self.site, self.wait = thread, site, wait
        memory.busy.append(self)

    def end(self):
        self.memory.busy.remove(self)


class Asynchronous:
    """The asynchronous side of a machine: its copy engine's queue, and the checks of ranges in use."""

    def __init__(self, machine):
        self.machine = machine
        self.queue = []  # functions that complete one operation each, in the order in which they were started

    def deliver(self):
        """Complete the oldest operation that nobody can hurry; False if there is none."""
        if not self.queue:
            return False
        self.queue.pop(0)()
        return True

    def touched(self, memory, offset, size, site, writes):
        """A thread reads or writes bytes of a memory that is in use."""
        for pending in memory.busy:
            if pending.start < offset + size and offset < pending.stop and (writes or pending.writes):
                machine = self.machine
                does, done = "writes" if writes else "reads", "writes" if pending.writes else "reads"
                machine.report(pending.kind if pending.kind in ("wgmma", "cp.async") else "asynchronous",
                               f"{does} {machine.access.say(memory, offset)}, which the {pending.kind} still {done}: "
                               f"{pending.wait} first", site,
                               others=[("started at", machine.place(pending.site, pending.thread))])
                return

    def thread_ends(self, thread):
        """A thread has ended; twins put what must then happen into `thread.state["at_end"]`."""
        for function in thread.state.get("at_end", ()):
            function()

    def block_ends(self, block):
        while self.queue:
            self.deliver()
