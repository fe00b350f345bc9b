"""In what order accesses of different threads stand, and which of them race.

Whether two accesses are ordered is decided by vector clocks: thread t has a clock, and `seen[u]` is
the latest clock of thread u whose accesses t is known to come after. A barrier joins what its
threads have seen and advances their clocks. An access by u at clock c is ordered before t's if
t.seen[u] >= c. (Flanagan and Freund, "FastTrack", PLDI 2009; a barrier of the whole block makes one
list that all its threads share.)

Blocks are ordered by the barriers of the grid and of their cluster, and by atomics. Each atomic
operation of a thread publishes all that the thread had seen at its last threadfence(). It does so
to blocks with a later atomic at the same place (`Memory.released`), or with its result in the
condition of a `while` loop.
"""

from .memory import GLOBAL, MANY_READS, READ_SITE

READ_OFFSET = (1 << READ_SITE) - 1


class Races:
    """The part of an `Access` that records writers and readers, and reports two accesses without an
    order."""

    # order ----------------------------------------------------------------------------------------

    def _ordered(self, stamp):
        """Whether what `stamp` did comes before what the current thread does now."""
        return self.ordered_for(self.machine.thread, stamp)

    @staticmethod
    def ordered_for(thread, stamp):
        """Whether what `stamp` did comes before what a thread does now."""
        other, clock = stamp
        if other.block is thread.block:
            return other is thread or thread.seen[other.tid] >= clock
        acquired = thread.block.state.get("acquired")
        return (
            acquired is not None
            and other.block in acquired
            and acquired[other.block][other.tid] >= clock
        )

    def fence(self, everywhere=True):
        """threadfence() or threadfence_block(): the thread's atomics can publish what it has seen
        until now."""
        thread = self.machine.thread
        seen = list(thread.seen)
        seen[thread.tid] = thread.clock
        thread.state["fence of the block"] = seen
        if everywhere:
            thread.block.fenced = True
            thread.state["fence"] = seen
        thread.tick(thread.seen)

    def acquire(self, released, block=None):
        """All that a block (the current one) does from now on comes after what `released` says of
        other blocks."""
        block = block or self.machine.thread.block
        acquired = block.state.setdefault("acquired", {})
        for other, seen in released.items():
            if other is not block and seen is not None:
                acquired[other] = (
                    list(map(max, acquired[other], seen)) if other in acquired else seen
                )

    # reads ----------------------------------------------------------------------------------------

    def _note_read(self, memory, read):
        """Remember a read by the current thread, an entry of `Memory.reads`."""
        if not memory.met:
            # a barrier has come, after which those before it matter no more
            if memory.reads_of is not read[-1]:
                memory.reads, memory.reads_of = [], read[-1]
            memory.reads.append(read)
        # what is kept of other blocks' reads depends on what is known of them now
        elif not self.machine.lone:
            self._log(memory, read)
        else:
            memory.reads.append(read)
            if len(memory.reads) > MANY_READS:
                self.settle(memory)

    def settle(self, memory):
        """Enter all reads in `reader`, which lists the readers of an offset, before a write there
        is checked."""
        reads, memory.reads, memory.calm = memory.reads, [], None
        if memory.met or memory.reads_of is self.machine.token:
            stamp = token = None
            for read in reads:
                if read.__class__ is int:  # of the last thread named
                    self._enter(memory, read & READ_OFFSET, stamp, read >> READ_SITE, token)
                elif len(read) == 2:
                    stamp, token = read
                else:
                    self._log(memory, read)
        if not memory.met and memory.reads_of is self.machine.token:
            memory.reads_of, memory.mixed = None, memory.reads_of

    def _log(self, memory, read):
        offset, size, step, stamp, site, token = read
        for at in range(offset, offset + size, step):
            self._enter(memory, at, stamp, site, token)

    def _enter(self, memory, offset, stamp, site, token):
        log = memory.reader.get(offset)
        if log is None:
            memory.reader[offset] = [token, stamp, site]
        elif log[0] is not token:
            memory.reader[offset] = [token, *self._earlier(memory, log), stamp, site]
        elif log[-2] is not stamp:
            log += stamp, site

    def _earlier(self, memory, log):
        """What a log of readers keeps at the first read after a barrier: entries that may be of
        another block."""
        if not memory.met:
            return []
        if self.machine.lone:
            return log[1:3]
        thread, ordered_for = self.machine.thread, self.ordered_for
        blocks = thread.block.cluster.blocks
        unordered = [k for k in range(1, len(log), 2) if not ordered_for(thread, log[k])]
        if memory.space is GLOBAL:  # one of the blocks that ran before is enough
            elsewhere = [k for k in unordered if log[k][0].block not in blocks]
            unordered = elsewhere[:1] + [k for k in unordered if log[k][0].block in blocks]
        return [entry for k in unordered for entry in log[k : k + 2]]

    def recent_writers(self, memory, offset, size, step):
        """[(memory, offset, entry of `writer`)] of the elements of a range that were written since
        the last barrier of the block, one for each of their writers."""
        if not (self.races and memory.shadowed) or memory.written_in is not self.machine.token:
            return ()
        found = {}
        for at in range(offset, offset + size, step):
            writer = memory.writer.get(at)
            if writer is not None and writer[2] is self.machine.token:
                found.setdefault(writer[0], (memory, at, writer))
        return list(found.values())

    def _read_race(self, memory, offset, writer, site):
        if self._ordered(writer[0]):
            return
        by = writer[0][0]
        # it waits for this write
        if by.block is not self.machine.thread.block and site in self.machine.spin_sites:
            self.acquire(
                {
                    by.block: by.state.get("fence"),
                    **{block: r[1] for block, r in memory.released.get(offset, {}).items()},
                }
            )
            return
        self.race(memory, offset, writer[0], writer[1], site, "reads", "written", writer[3])

    # writes ---------------------------------------------------------------------------------------

    def check_write(self, memory, offset, size, site, value=None, a=None, atomic=False, same=None):
        """Check a write of the current thread against the last accesses there, and remember it.

        Nothing is reported where several threads write the same value on the same line, such as a
        flag that all set, but with the check "equal"; nor, without the check "unchanged", where a
        write leaves the value as it is.
        same: whether it does, where `value` and `a` do not say it
        """
        stamp, token = self.machine.thread.stamp, self.machine.token
        if memory.reads:
            self.settle(memory)
        writer = log = None
        if not self.unchanged and (same_value(a, offset, value) if same is None else same):
            return
        if memory.met or memory.written_in is token:
            writer = memory.writer.get(offset)
        if memory.met or memory.mixed is token:
            log = memory.reader.get(offset)
        if (
            writer is not None
            and writer[0] is not stamp
            and (writer[2] is token or memory.met)
            and not (atomic and writer[3])
            and not self._ordered(writer[0])
            and (
                self.equal
                or writer[1] != site
                or not (same_value(a, offset, value) if same is None else same)
            )
        ):
            self.race(memory, offset, writer[0], writer[1], site, "writes", "written", writer[3])
        if log is not None:
            if log[0] is token or memory.met:
                for k in range(1, len(log), 2):
                    if log[k] is not stamp and not self._ordered(log[k]):
                        if (
                            log[k + 1] in self.machine.spin_sites
                            and log[k][0].block is not stamp[0].block
                        ):
                            continue
                        self.race(memory, offset, log[k], log[k + 1], site, "writes", "read", False)
                        break
            memory.reader[offset] = None
        if (
            atomic
            and writer is not None
            and not writer[3]
            and writer[0][0] is stamp[0]
            and writer[2] is token
        ):
            # others must still come after this thread's plain store, whatever it does atomically
            return
        memory.written_in, memory.calm = token, None
        entry = (stamp, site, token, atomic)
        memory.writer[offset] = entry
        if size == 4:
            memory.writer[offset + 2] = entry
        elif size > 4:
            for at in range(offset + 2, offset + size, 2):
                memory.writer[at] = entry

    def check_writes(self, memory, offset, size, site, step):
        """`check_write` of the elements of `step` bytes of a range."""
        stamp, token, met, writers = (
            self.machine.thread.stamp,
            self.machine.token,
            memory.met,
            memory.writer,
        )
        places = range(offset, offset + size, step)
        if memory.reads:
            self.settle(memory)
        if met or memory.mixed is token:
            check = any(map(memory.reader.get, places))
        else:
            check = False  # no thread has read here since the barrier
        if not check and (met or memory.written_in is token):
            for writer in map(writers.get, places):
                if writer is not None and writer[0] is not stamp and (met or writer[2] is token):
                    check = True
                    break
        if check:
            for at in places:
                self.check_write(memory, at, step, site)
            return
        memory.written_in, memory.calm = token, None
        writers.update(
            dict.fromkeys(
                places if step <= 2 else range(offset, offset + size, 2),
                (stamp, site, token, False),
            )
        )

    # reports --------------------------------------------------------------------------------------

    def race(self, memory, offset, stamp, other_site, site, doing, done, atomic, thread=None):
        """Report an access of the current thread, or of another, and the earlier one that nothing
        orders before it."""
        machine, by = self.machine, stamp[0]
        thread = thread or machine.thread
        same_block = by.block is thread.block
        between = (
            "with no barrier between"
            if same_block
            else "and nothing orders the blocks"
            if memory.space is GLOBAL
            else "with no cluster_sync() between"
        )
        new = machine.report(
            "race",
            f"{doing} {self.say(memory, offset)}, which thread {by.index} of "
            f"{'the same block' if same_block else f'block {by.block.index}'} has {done} "
            f"{between}",
            site,
            thread,
            pair=other_site,
            others=[(f"{done} at", machine.place(other_site, by))],
        )
        if new and machine.film is not None:
            machine.film.race(memory, offset, by, other_site)


def same_value(a, offset, value):
    """Whether an element already has the value that is written."""
    if a is None:
        return False
    old = a.flat[offset >> a.shift]
    return old == value or old != old and value != value
