"""A memory arena whose addresses repeat from step to step.

A training step allocates the same arrays in the same order every time, and frees them in the same
order. So the arena answers the same sequence of requests with the same addresses. After the first
step it takes nothing more from the driver, and a captured step can be replayed over the same
memory. Blocks return to the arena when the last array that uses them is dropped (Python's reference
counts decide, so the moment is exact), and are reused in stream order.

Allocation is best fit over a free list sorted by address; neighbouring free blocks are joined
again. Threads take
turns: any of them may drop the last reference to a block.
"""

import threading
from bisect import bisect_left, bisect_right
from collections import deque

ALIGNMENT = 256  # bytes; what cudaMalloc itself guarantees, and enough for 16-byte vectors and TMA
# bytes taken from the driver at a time, so that small arrays share one driver allocation
SEGMENT = 64 << 20


class MemoryBlock:
    """A range of bytes on loan from an arena; goes back to it when the last reference is dropped."""

    __slots__ = ("arena", "address", "nbytes")

    def __init__(self, arena, address, nbytes):
        self.arena, self.address, self.nbytes = arena, address, nbytes

    def __del__(self):
        self.arena._release(self.address, self.nbytes)


class Arena:
    """Hands out byte ranges of large segments; `take_segment(nbytes)` gets one and returns its
    address."""

    def __init__(self, take_segment, segment_bytes=SEGMENT):
        self._take_segment = take_segment
        self._segment_bytes = segment_bytes
        self._addresses = []  # of the free blocks, ascending
        self._sizes = {}  # free block address -> bytes
        self._turn = threading.Lock()
        # (address, bytes) of freed blocks that are not in the free list yet
        self._returned = deque()
        self._taken_back = 0  # how many of these there have been
        self._until = None  # how many may come back before `let_go`; None: all
        # address -> bytes; blocks of two segments are never joined, though they may touch
        self._segment_starts = {}
        self.reserved_bytes = 0
        self.used_bytes = 0
        self.peak_bytes = 0

    def allocate(self, nbytes):
        """A `MemoryBlock` of at least `nbytes` bytes, aligned to 256."""
        with self._turn:
            self._take_back()
            return self._allocate(max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT))

    def _allocate(self, nbytes):
        best = min(
            (a for a in self._addresses if self._sizes[a] >= nbytes),
            key=lambda a: (self._sizes[a], a),
            default=None,
        )
        if best is None:
            best = self._grow(nbytes)
        if best is None:
            return None
        size = self._sizes.pop(best)
        at = bisect_left(self._addresses, best)
        if size > nbytes:
            self._addresses[at] = best + nbytes
            self._sizes[best + nbytes] = size - nbytes
        else:
            del self._addresses[at]
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return MemoryBlock(self, best, nbytes)

    def _grow(self, nbytes):
        size = -(-nbytes // self._segment_bytes) * self._segment_bytes
        address = self._take_segment(size)
        self.reserved_bytes += size
        self._segment_starts[address] = size
        self._addresses.insert(bisect_left(self._addresses, address), address)
        self._sizes[address] = size
        return address

    def twin(self, take_segment):
        """An arena with the same free blocks, which takes its segments elsewhere."""
        with self._turn:
            self._take_back()
            other = Arena(take_segment, self._segment_bytes)
            other._addresses, other._sizes = [*self._addresses], {**self._sizes}
            other._segment_starts = {**self._segment_starts}
            return other

    def segments(self):
        """The addresses of what was taken so far."""
        return set(self._segment_starts)

    def trim(self, give_back, keep=()):
        """Free the segments that hold no array, by `give_back(address)` each, except those that
        begin at an address in `keep`. No graph that was captured in a freed segment may be kept."""
        with self._turn:
            self._take_back()
            for address, size in [*self._segment_starts.items()]:
                if self._sizes.get(address) == size and address not in keep:
                    self._addresses.remove(address)
                    del self._sizes[address], self._segment_starts[address]
                    self.reserved_bytes -= size
                    give_back(address)

    def hold(self):
        """From now on do not reuse freed memory, until `let_go`: another stream may still read it."""
        self._until = self.position

    def let_go(self, until=None):
        """Take back what was freed before the arena had this `position`; None: all, and no longer
        hold."""
        with self._turn:
            self._until = until
            self._take_back()

    @property
    def position(self):
        """How many blocks have been freed."""
        return self._taken_back + len(self._returned)

    def held_since(self, position):
        """Bytes of the blocks that were freed from a position on and are held."""
        first = max(position, self._until or 0) - self._taken_back
        return sum(nbytes for _, nbytes in [*self._returned][max(0, first) :])

    def _release(self, address, nbytes):
        """A block comes back: now, or before the next allocation if the arena is busy (Python may
        drop the last reference at any instruction, in `allocate` too)."""
        self._returned.append((address, nbytes))
        if self._turn.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._turn.release()

    def _take_back(self):
        while self._returned and (self._until is None or self._taken_back < self._until):
            address, nbytes = self._returned.popleft()
            self._taken_back += 1
            self.used_bytes -= nbytes
            self._join(address, nbytes)

    def _join(self, address, nbytes):
        at = bisect_left(self._addresses, address)
        after = address + nbytes
        if (
            at < len(self._addresses)
            and self._addresses[at] == after
            and after not in self._segment_starts
        ):
            nbytes += self._sizes.pop(after)
            del self._addresses[at]
        if at > 0 and address not in self._segment_starts:
            before = self._addresses[at - 1]
            if before + self._sizes[before] == address:
                self._sizes[before] += nbytes
                return
        self._addresses.insert(at, address)
        self._sizes[address] = nbytes


class AliasedArena(Arena):
    """An arena over ranges that are available for a while; what does not fit there comes from
    `outer`.

    It begins empty: `alias` adds a range, and `reclaim` takes back one that holds no array any
    more.
    """

    def __init__(self, outer):
        super().__init__(None)
        self.outer = outer

    def allocate(self, nbytes):
        return super().allocate(nbytes) or self.outer.allocate(nbytes)

    def _grow(self, nbytes):
        return None

    def alias(self, address, nbytes):
        """From now on arrays may be in these bytes. Both are multiples of 256."""
        with self._turn:
            self._take_back()
            self._join(address, nbytes)

    def reclaim(self, address, nbytes):
        """No array may be in these bytes any more; returns False, and leaves the range, if one
        still is."""
        with self._turn:
            self._take_back()
            first = (
                self._addresses[bisect_right(self._addresses, address) - 1]
                if self._addresses
                else address + 1
            )
            stop = first + self._sizes.get(first, 0)
            if not first <= address or stop < address + nbytes:
                return False
            at = bisect_left(self._addresses, first)
            del self._addresses[at], self._sizes[first]
            if first < address:
                self._join(first, address - first)
            if address + nbytes < stop:
                self._join(address + nbytes, stop - address - nbytes)
            return True


class StreamArena(Arena):
    """An arena for a separate stream: over blocks of another arena, which has them back once this
    one is closed. What is freed here is given to later work of the same stream alone."""

    def __init__(self, outer):
        super().__init__(self._take_block, ALIGNMENT)
        self.outer, self._blocks = outer, []

    def _take_block(self, nbytes):
        self._blocks.append(self.outer.allocate(nbytes))
        return self._blocks[-1].address

    def close(self):
        """Give all back; nothing may be here any more."""
        self._blocks.clear()
