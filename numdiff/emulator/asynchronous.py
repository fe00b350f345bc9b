"""Operations that continue while threads run: what they still read and write, and when they are
complete.

An asynchronous instruction puts a `Pending` on the memory that it uses. As long as it is there,
touching what it writes, or writing what it reads, is a fault. It completes as late as the rules
allow. A copy with groups completes at the wait for its group, a copy with an mbarrier when no
thread can continue without it, and a wgmma at its wait. So a missing wait is detected every time,
not only when a GPU happens to be slow.

It is not enough that an operation is complete: a thread must know it. A `Completion` lists the
threads that waited for the end of an operation, and when. Only threads that come after one of them
(in the order of races.py) may use its bytes again. So the `Pending` of an operation that is
complete stays, with its `done`, until its bytes are used again.

THE PROXIES. TMA and the tensor cores reach shared memory by another path than loads and stores.
They are only sure to see a thread's store after a `fence.proxy.async` between the store and the
instruction (PTX ISA, sections 8.5, "Proxies", and 9.7.13.4, "membar / fence"). `Asynchronous.fence`
notes such fences, `visible` asks for them.
"""

from bisect import bisect_left

from .memory import GLOBAL, SHARED

STEP = 2  # bytes: the grain at which races.py records writers and readers
# instructions whose faults have a kind of their own; all others are "asynchronous"
_OWN_KINDS = ("wgmma", "cp.async")


class Completion:
    """The end of an asynchronous operation, as threads learn of it by waiting.

    learned: thread number -> its clock when it knew, all of one block; next: a later end, which
    includes this one
    """

    __slots__ = ("learned", "next", "block")

    def __init__(self):
        self.learned, self.next, self.block = {}, None, None

    def learn(self, thread):
        self.learned.setdefault(thread.tid, thread.clock)
        self.block = thread.block

    def known_to(self, thread):
        """Whether all that `thread` does now comes after this end."""
        end = self
        while end is not None:
            if thread.tid in end.learned:
                return True
            end = end.next
        return self.known_after(thread.seen)

    def known_after(self, seen):
        """Whether some thread of the operation's block had learned of this end at the clocks
        `seen`."""
        end = self
        while end is not None:
            for tid, clock in end.learned.items():
                if seen[tid] >= clock:
                    return True
            end = end.next
        return False


class Pieces:
    """Ranges of `length` bytes that begin at `starts` (ascending offsets), for operations on
    several ranges."""

    __slots__ = ("starts", "length")

    def __init__(self, starts, length):
        self.starts, self.length = starts, length

    def meets(self, start, stop):
        """Whether some of the bytes start … stop - 1 are among them."""
        at = bisect_left(self.starts, stop)
        return at > 0 and self.starts[at - 1] + self.length > start


class Pending:
    """A range of bytes in use by an operation that is not complete.

    kind: the instruction, for messages; writes: whether it writes the range or reads it; wait: what
    would end it
    pieces: which bytes of the range, if not all; done: the `Completion`, once the operation is
    complete
    """

    __slots__ = (
        "kind",
        "memory",
        "start",
        "stop",
        "writes",
        "thread",
        "site",
        "wait",
        "pieces",
        "done",
    )

    def __init__(self, kind, memory, start, stop, writes, thread, site, wait, pieces=None):
        self.kind, self.memory, self.start, self.stop, self.writes = (
            kind,
            memory,
            start,
            stop,
            writes,
        )
        self.thread, self.site, self.wait, self.pieces, self.done = thread, site, wait, pieces, None
        memory.busy.append(self)
        memory.calm = None

    def at(self, offset, size):
        """This entry if it is in a range of bytes, else None."""
        if (
            self.start < offset + size
            and offset < self.stop
            and (self.pieces is None or self.pieces.meets(offset, offset + size))
        ):
            return self
        return None

    def end(self):
        self.memory.busy.remove(self)


class ByteWatch:
    """An entry of `Memory.busy` that calls a function when a thread touches any of its bytes, once,
    and is gone."""

    __slots__ = ("memory", "start", "stop", "function")
    writes = True

    def __init__(self, memory, start, stop, function):
        self.memory, self.start, self.stop, self.function = memory, start, stop, function
        memory.busy.append(self)
        memory.calm = None

    def at(self, offset, size):
        if self.start < offset + size and offset < self.stop:
            self.memory.busy.remove(self)
            self.function()
        return None


class Asynchronous:
    """The asynchronous side of a machine: its queue of copies, and the checks of ranges in use."""

    def __init__(self, machine):
        self.machine = machine
        self.checked = "asynchronous" in machine.checks
        # functions that complete one operation each, in the order in which they were started
        self.queue = []

    def deliver(self):
        """Complete the oldest queued operation; False if there is none."""
        if not self.queue:
            return False
        self.queue.pop(0)()
        return True

    # what is in use -------------------------------------------------------------------------------

    def touched(self, memory, offset, size, site, writes):
        """A thread reads or writes bytes of a memory that is in use."""
        thread = self.machine.thread
        for pending in memory.busy.near(offset, offset + size, writes):
            found = pending.at(offset, size)
            if found is not None and not self._over(found, thread):
                does = "writes" if writes else "reads"
                self._report(
                    found, pending.writes, f"{does} {self.machine.access.say(memory, offset)}", site
                )
                return

    @staticmethod
    def _over(pending, thread):
        """Whether what `thread` does now comes after the end of an operation."""
        done = getattr(pending, "done", None)
        if done is None:
            return False
        # of the threads that know its end
        block = done.block or done.next and done.next.block or pending.thread.block
        if block is not thread.block:
            seen = thread.block.state.get("acquired", {}).get(block)
            return (
                thread.block.fenced
                or pending.thread.block.fenced
                or seen is not None
                and done.known_after(seen)
            )
        return done.known_to(thread)

    def _report(self, pending, writes, what, site):
        machine = self.machine
        if not self.checked:
            return
        done, does = getattr(pending, "done", None), "writes" if writes else "reads"
        remedy = (
            f"still {does}: {pending.wait} first"
            if done is None
            else (
                f"{does}, and this thread does not know that it has ended: a thread that waited for it must arrive at "
                "a barrier that this thread waits for"
            )
        )
        machine.report(
            pending.kind if pending.kind in _OWN_KINDS else "asynchronous",
            f"{what}, which the {pending.kind} {remedy}",
            site,
            others=[("started at", machine.place(pending.site, pending.thread))],
        )

    def claim(self, memory, start, stop, writes, what, site, pieces=None):
        """The current thread starts an operation on bytes start … stop - 1: check it against all
        that came before.

        Returns what it comes after: [Pending of complete operations], [writes by threads, as
        (stamp, site, offset)].
        what: the instruction, for messages; pieces: which bytes of the range, if not all
        """
        machine, thread, after, writers = self.machine, self.machine.thread, [], {}
        for pending in memory.busy.near(start, stop, writes):
            found = self._meeting(pending, start, stop, pieces)
            if found is None:
                continue
            if not self._over(found, thread):
                where = self.machine.access.say(
                    memory, max(start, found.start) if found is pending else start
                )
                self._report(
                    found,
                    pending.writes,
                    f"the {what} {'writes' if writes else 'reads'} {where}",
                    site,
                )
            elif (
                writes
                and pieces is None
                and found is pending
                and start <= found.start
                and found.stop <= stop
            ):
                # threads ordered after this operation are ordered after that one, too
                memory.busy.remove(pending)
            else:
                after.append(found)
        if writes and memory.reads:
            machine.access.settle(memory)
        if memory.shadowed and (memory.writer or writes and memory.reader):
            writers = self._threads_before(memory, start, stop, writes, what, site, pieces)
        return after, writers

    @staticmethod
    def _meeting(pending, start, stop, pieces):
        if pieces is None:
            return pending.at(start, stop - start)
        if pending.at(start, stop - start) is None:
            return None
        for first in pieces.starts:
            found = pending.at(first, pieces.length)
            if found is not None:
                return found
        return None

    def _threads_before(self, memory, start, stop, writes, what, site, pieces):
        """Check an operation's order against the loads and stores of threads there; returns the
        distinct writes."""
        machine, access = self.machine, self.machine.access
        token, everywhere = machine.token, memory.met
        ranges = (
            [(start, stop)] if pieces is None else [(s, s + pieces.length) for s in pieces.starts]
        )
        writers, readers = {}, {}
        for first, last in ranges:
            places = range(first, last, STEP)
            entries = list(map(memory.writer.get, places))
            if any(entries):
                for at, entry in zip(places, entries, strict=True):
                    if entry is not None and id(entry) not in writers:
                        writers[id(entry)] = (entry, at)
            if not writes:
                continue
            for at, log in zip(places, map(memory.reader.get, places), strict=True):
                if log is not None and (log[0] is token or everywhere):
                    for k in range(1, len(log), 2):
                        readers.setdefault(id(log[k]), (log[k], log[k + 1], at))
        if access.races:
            verb = "writes by the " + what if writes else "reads by the " + what
            for (stamp, other, past, atomic), at in writers.values():
                if (past is token or everywhere) and not access._ordered(stamp):
                    access.race(memory, at, stamp, other, site, verb, "written", atomic)
                    break
            else:
                for stamp, other, at in readers.values():
                    if not access._ordered(stamp):
                        access.race(memory, at, stamp, other, site, verb, "read", False)
                        break
        if not writes:
            for (stamp, other, _, _), at in writers.values():
                if not self.visible(stamp, machine.thread, memory.space):
                    self._proxy(memory, at, stamp, other, what, site)
                    break
        elif memory.space is SHARED:  # from here on these bytes are the operation's
            for first, last in ranges:
                for at in range(first, last):
                    memory.writer.pop(at, None)
                    memory.reader.pop(at, None)
        return [(stamp, other, past, at) for (stamp, other, past, _), at in writers.values()]

    def _proxy(self, memory, offset, stamp, other, what, site):
        machine = self.machine
        if self.checked:
            machine.report(
                "proxy",
                f"the {what} reads {machine.access.say(memory, offset)}, which thread "
                f"{stamp[0].index} has stored with no fence_proxy_async"
                f"{'_global' if memory.space is GLOBAL else ''}() after it",
                site,
                others=[("stored at", machine.place(other, stamp[0]))],
            )

    # fences ---------------------------------------------------------------------------------------

    def fence(self, thread, space=SHARED):
        """`fence.proxy.async`: the stores that `thread` comes after are visible to the asynchronous
        proxy."""
        if self.machine.checked:
            thread.state.setdefault(("fences", space), []).append((thread.clock, thread.seen))
            thread.fenced = thread.clock
            thread.tick(thread.seen)

    @staticmethod
    def visible(stamp, thread, space=SHARED):
        """Whether a store with this stamp is seen by an asynchronous operation that `thread` starts
        now."""
        writer, clock = stamp
        if writer.block is not thread.block:
            return True  # blocks are ordered in ways that are not followed here
        own = writer.state.get(("fences", space))
        if own is not None:
            at = bisect_left(own, clock, key=lambda fence: fence[0])
            if at < len(own) and (writer is thread or thread.seen[writer.tid] >= own[at][0]):
                return True
        for other in thread.block.threads:  # a fence of another thread that came after the store
            if other is not writer:
                for when, seen in other.state.get(("fences", space), ()):
                    if seen[writer.tid] >= clock and (
                        other is thread or thread.seen[other.tid] >= when
                    ):
                        return True
        return False

    # ends -----------------------------------------------------------------------------------------

    def thread_ends(self, thread):
        """A thread has ended; twins put what must then happen into `thread.state["at_end"]`."""
        for function in thread.state.get("at_end", ()):
            function()

    def block_ends(self, block):
        """A block has ended; twins put what must then happen into `block.state["at_end"]`."""
        for function in block.state.get("at_end", ()):
            function()
        mine = [f for f in self.queue if getattr(f, "block", block) is block]
        self.queue = [f for f in self.queue if getattr(f, "block", block) is not block]
        for function in mine:
            function()
