"""The copies of `cp.async` in flight: what they use, when they arrive (PTX ISA, section
9.7.9.25.3).

Each thread has the copies that it has started and not yet put in a group, and its groups, oldest
first; only its own waits count. A copy arrives at the wait that covers its group, or at the end of
its thread: as late as the rules allow, so that a missing wait is detected every time. Until then
its destination and source are in use (asynchronous.py).
"""

import numpy as np

from .arrays import CheckedArray, IntegerArray
from .memory import GLOBAL

WORD = 4  # bytes; every copy is a multiple of it, and so is its place
EVERYTHING = 1 << 62  # a place behind the last byte of any memory


ASYNC_COPIES = (8, 0)  # the first compute capability with cp.async


class Copy:
    """One copy in flight: `count` bytes of `data` from `first`, then zeros, into `size` bytes of a
    shared memory.

    source: the memory that `data` are the bytes of, None if nothing is checked
    """

    __slots__ = ("memory", "offset", "size", "data", "first", "count", "source", "thread", "site")
    kind = "cp.async"

    def __init__(self, memory, offset, size, data, first, count, source, thread, site):
        self.memory, self.offset, self.size = memory, offset, size
        self.data, self.first, self.count, self.source = data, first, count, source
        self.thread, self.site = thread, site

    @property
    def wait(self):
        """The event that would end it now, for messages."""
        for age, group in enumerate(reversed(self.thread.state["cp.async"].groups)):
            if self in group:
                return f"wait for its group (here that is cp_async_wait({age}))"
        return "commit it to a group and wait for that"

    def arrive(self, machine):
        """The bytes have arrived: for the order of accesses, they are written now."""
        memory, offset, end = self.memory, self.offset, self.offset + self.size
        filled = offset + self.count
        memory.bytes[offset:filled] = self.data[self.first : self.first + self.count]
        if filled < end:
            memory.bytes[filled:end] = 0
        if not machine.checked:
            return
        if machine.film is not None:
            machine.film.access(memory, offset, self.size, self.site, True)
        if machine.access.races:
            written = (self.thread.stamp, self.site, machine.token, False)
            memory.written_in, memory.calm = machine.token, None
            memory.writer.update(dict.fromkeys(range(offset, end, 2), written))
        if "asynchronous" in machine.checks:
            _words_in_use(memory, True).remove(self, offset, self.size)
            if self.count:
                _words_in_use(self.source, False).remove(self, self.first, self.count)


class ThreadCopies:
    """The copies of one thread: `open` are those in no group yet, `groups` the others, oldest
    first."""

    def __init__(self, machine, thread):
        self.thread, self.open, self.groups = thread, [], []
        self.arrived = 0  # groups, so far
        # one lane stands for its warp in a film
        self.filmed = machine.film is not None and thread.lane == 0
        thread.state.setdefault("at_end", []).append(lambda: self.end(machine))

    def arrive(self, machine, count):
        """The `count` oldest groups arrive."""
        for group in self.groups[:count]:
            for copy in group:
                copy.arrive(machine)
            if self.filmed and group:
                machine.film.lands(self.about(0))
            self.arrived += 1
        del self.groups[:count]

    def about(self, place):
        """The group at this place of the list, as a film names it."""
        return "cp.async", self.thread, self.arrived + place

    def end(self, machine):
        """The thread has ended, and waits for what it started."""
        self.groups.append(self.open)
        self.open = []
        self.arrive(machine, len(self.groups))


class WordsInUse:
    """The words of a memory that copies in flight write, or read: an entry of `Memory.busy`, found
    by address."""

    __slots__ = ("memory", "writes", "words", "start", "stop")

    def __init__(self, memory, writes):
        self.memory, self.writes, self.words, self.start, self.stop = (
            memory,
            writes,
            {},
            0,
            EVERYTHING,
        )
        memory.busy.append(self)
        memory.calm = None

    def at(self, offset, size):
        """A copy that uses some of these bytes, or None."""
        for word in range(offset // WORD, (offset + size + WORD - 1) // WORD):
            if word in self.words:
                return self.words[word][0]
        return None

    def add(self, copy, offset, size):
        words = self.words
        for word in range(offset // WORD, (offset + size + WORD - 1) // WORD):
            if word in words:
                words[word].append(copy)
            else:
                words[word] = [copy]

    def remove(self, copy, offset, size):
        words = self.words
        for word in range(offset // WORD, (offset + size + WORD - 1) // WORD):
            copies = words[word]
            if len(copies) == 1:
                del words[word]
            else:
                copies.remove(copy)
        if not words:
            self.memory.busy.remove(self)


def _words_in_use(memory, writes):
    for entry in memory.busy:
        if entry.__class__ is WordsInUse and entry.writes is writes:
            return entry
    return WordsInUse(memory, writes)


def shared_range(machine, address, size, frame, doing):
    """(memory, offset) of `size` bytes at an address of the shared state space; None after a fault.

    The address must be a multiple of the size. frame: of the kernel, for messages
    """
    address = int(address) & 0xFFFFFFFF
    found = machine.shared_memory(address)
    if found is None or found[1] + size > found[0].size:
        machine.report(
            "bounds",
            f"{doing} {size} bytes at the shared address {address:#x}, which are not all in a "
            "shared array of the block",
            machine.site_of(frame),
        )
        return None
    if address % size:
        machine.report(
            "alignment",
            f"{doing} {size} bytes at the shared address {address:#x}, which is not a multiple "
            f"of {size}",
            machine.site_of(frame),
        )
        return None
    return found


def _source(machine, array, index, size, count, frame):
    """(bytes, start, memory) of the first byte to copy, after the checks of a read; None after a
    fault."""
    index, itemsize = int(index), array.itemsize
    if array.__class__ is not CheckedArray:
        data = (array.data if array.__class__ is IntegerArray else array).reshape(-1).view(np.uint8)
        start = index * itemsize
        if count and not 0 <= start <= len(data) - count:
            raise IndexError(
                f"cp.async of {count} bytes from element {index} of {len(data) // itemsize}"
            )
        return data, start, None
    memory, site = array.memory, machine.site_of(frame)
    if memory.space is not GLOBAL:
        machine.report("cp.async", f"copies from {array!r}, which is not in global memory", site)
        return None
    start = array.offset + index * itemsize
    if (memory.address + start) % size:
        machine.report(
            "alignment",
            f"copies {size} bytes of {array.name} from element {index}, whose address is not a "
            f"multiple of {size}",
            site,
        )
        return None
    if count:
        elements = -(-count // itemsize)
        if machine.access.range_of(array, index, elements, site, "copies", align=itemsize) is None:
            return None
        machine.access.read_bytes(memory, start, count, site, itemsize)
    return memory.bytes, start, memory


def start_copy(machine, address, array, index, size, count, frame):
    """Start a copy of `count` bytes from element `index` of an array, filled up with zeros to
    `size` bytes.

    Before sm_80 it is a load and a store (device/turing.py), and has arrived when this returns.
    """
    if machine.cc < ASYNC_COPIES and count not in (0, size):
        machine.report(
            "cp.async",
            f"reads {count} of {size} bytes, where a card before sm_80 reads all or none",
            machine.site_of(frame),
        )
        return
    if not 0 <= count <= size:
        machine.report(
            "cp.async", f"reads {count} bytes for a copy of {size}", machine.site_of(frame)
        )
        return
    target = shared_range(machine, address, size, frame, "copies into")
    source = _source(machine, array, index, size, count, frame)
    if target is None or source is None:
        return
    memory, offset = target
    thread, site = machine.thread, machine.site_of(frame)
    copy = Copy(memory, offset, size, source[0], source[1], count, source[2], thread, site)
    if machine.checked:
        if memory.busy:
            machine.asynchronous.touched(memory, offset, size, site, True)
        if machine.access.races:
            machine.access.check_writes(memory, offset, size, site, 2)
        # a read that is too early is reported for the copy, not for this
        memory.mark_written(offset, offset + size)
        if machine.recorder is not None:
            machine.recorder.access(memory, offset, size, site, True, array.itemsize)
        if "asynchronous" in machine.checks:
            _words_in_use(memory, True).add(copy, offset, size)
            if count:
                _words_in_use(copy.source, False).add(copy, copy.first, count)
    _copies(machine).open.append(copy)
    if machine.cc < ASYNC_COPIES:
        commit(machine)
        wait(machine, 0)


def commit(machine):
    """Put the copies that the current thread has started since its last group into one."""
    copies = _copies(machine)
    copies.groups.append(copies.open)
    if copies.filmed and copies.open:
        machine.film.group_starts(copies.about(len(copies.groups) - 1), copies.open)
    copies.open = []


def wait(machine, pending):
    """The groups of the current thread arrive, all but the `pending` youngest."""
    copies = _copies(machine)
    machine.stores += 1
    copies.arrive(machine, max(0, len(copies.groups) - pending))


def _copies(machine):
    """The current thread's copies."""
    state = machine.thread.state
    copies = state.get("cp.async")
    if copies is None:
        copies = state["cp.async"] = ThreadCopies(machine, machine.thread)
    return copies
