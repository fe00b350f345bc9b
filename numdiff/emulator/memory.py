"""A GPU's memories over NumPy bytes, and the state of every byte: whether it was written, its
writer, its readers.

`Memory` is a range of bytes: a global array, a block's static or dynamic shared memory, a thread's
local array. A kernel sees it through an array (arrays.py), and each access looks up and updates
what is known (access.py, races.py).
"""

import numpy as np

GLOBAL, SHARED, LOCAL, CONSTANT = "global", "shared", "local", "constant"
POISON = 0xFF  # every byte of memory that was never written: NaN as a float, -1 as an integer
ALIGNMENT = 16  # bytes, of every array's address at least, the widest access of a thread
MANY_READS = 1 << 18  # of one memory that wait to be entered, a hundred bytes each at most
READ_SITE = 40  # bits of an offset, left of which a read has the number of its site
NEIGHBOURS = 256  # bytes that look up asynchronous operations together
_POISONED = bytes([POISON])
ROUND = 16  # sizes are rounded up to this, so that a memory can be seen as any dtype


class Memory:
    """A range of bytes. `address` is its address in its space; `valid[i]` says whether byte i was
    ever written."""

    __slots__ = (
        "space",
        "name",
        "bytes",
        "size",
        "address",
        "valid",
        "writer",
        "reader",
        "views",
        "busy",
        "barriers",
        "layouts",
        "shadowed",
        "met",
        "released",
        "reads",
        "reads_of",
        "written_in",
        "mixed",
        "owner",
        "calm",
        "tried",
        "width",
        "grain",
        "plain",
        "__weakref__",
    )

    def __init__(self, space, size, name="", address=0, data=None, valid=False):
        self.space, self.name, self.size, self.address = space, name, size, address
        if data is None:
            room = -(-size // ROUND) * ROUND
            self.bytes = np.frombuffer(bytearray(_POISONED * room), np.uint8)
        else:
            room, self.bytes = len(data), data
        self.valid = None if valid else bytearray(room)
        self.views = {}
        self.shadowed = space in (SHARED, GLOBAL)  # whether several threads can meet here
        self.met = space is GLOBAL  # whether several blocks can
        # the (thread, clock) whose reads only make a list longer, and the one whose do not: see
        # `Access._calm`
        self.calm = self.tried = None
        self.owner = None  # of a local array: the frame of the function whose call made it
        self.width, self.grain = None, 0  # see `seen_as`
        self.plain = self.shadowed  # accesses are tracked by their first byte: there is no grain
        # asynchronous operations that still read or write here (asynchronous.py)
        self.busy = Busy()
        self.barriers = {}  # offset -> mbarrier
        # offset -> {block: what its threads had seen at their last atomic there}
        self.released = {}
        self.layouts = {}  # offset -> (bytes, swizzle): tiles that TMA wrote
        # What is known of accesses, by offset. writer: ((thread, clock), site, token, atomic) of
        # the last write
        # reader: [token, (thread, clock), site, (thread, clock), site, …] of the reads since
        self.writer, self.reader = {}, {}
        # reads: those not yet in `reader`, as most need not be: (offset, size, step, (thread,
        # clock), site, token), or after ((thread, clock), token) a number for each element, see
        # READ_SITE; where only one block comes they are of one token, `reads_of`.
        # written_in: the token of the last write
        self.reads, self.reads_of, self.written_in = [], None, None
        # the token of reads and writes that take turns: there reads are entered at once
        self.mixed = None

    def forget(self):
        """All that comes from now on is ordered after all that was."""
        self.writer, self.reader, self.reads, self.calm = {}, {}, [], None

    def grow(self, size, room):
        """Make it `size` bytes long, of `room` at most: shared arrays of fixed size are found one
        by one.

        All of the room is taken at once, so that earlier views stay valid.
        """
        if not self.size:
            self.bytes, self.valid, self.views = np.empty(room, np.uint8), bytearray(room), {}
        self.bytes[self.size : size] = POISON
        self.calm = None
        self.size = size

    def view(self, dtype):
        """All of it as a flat array of `dtype`."""
        flat = self.views.get(dtype)
        if flat is None:
            rest = len(self.bytes) % dtype.itemsize
            flat = self.views[dtype] = (self.bytes[:-rest] if rest else self.bytes).view(dtype)
        return flat

    def seen_as(self, size):
        """Note that elements of this size may overlap others. If those have another size, every
        access from now on is checked piece by piece, in steps of the smallest size (`grain`)."""
        if self.width is None:
            self.width = size
        elif size != self.width:
            self.grain, self.plain, self.calm = (
                min(self.grain or size, size, self.width),
                False,
                None,
            )

    def mark_written(self, start=0, stop=None):
        if self.valid is not None:
            stop = len(self.bytes) if stop is None else stop
            self.valid[start:stop] = b"\1" * (stop - start)


class Busy(list):
    """Entries for the asynchronous operations that use a memory; `near` gives those that matter at
    one place."""

    found = None  # {(place / NEIGHBOURS, writes): what `near` gave}

    def append(self, entry):
        self.found = None
        super().append(entry)

    def remove(self, entry):
        self.found = None
        super().remove(entry)

    def near(self, start, stop, writes):
        """The entries that a write (or a read) of bytes start … stop - 1 may meet; a new list."""
        place = start // NEIGHBOURS
        if (stop - 1) // NEIGHBOURS != place:
            return [e for e in self if e.start < stop and start < e.stop and (writes or e.writes)]
        if self.found is None:
            self.found = {}
        found = self.found.get((place, writes))
        if found is None:
            first, last = place * NEIGHBOURS, (place + 1) * NEIGHBOURS
            found = self.found[place, writes] = [
                e for e in self if e.start < last and first < e.stop and (writes or e.writes)
            ]
        return [e for e in found if e.start < stop and start < e.stop]
