"""TMA: boxes of a tensor in global memory, to and from tiles in shared memory, as tensor maps
(tensor_map.py) say.

(PTX ISA, section 9.7.9.27, "cp.async.bulk.tensor".)

WHERE A BOX MAY BEGIN. In the innermost dimension at a multiple of 16 bytes; a load may begin before
the tensor's first element, a store may not. Otherwise a GPU ends with an illegal instruction. (This
is not in the PTX ISA: it was observed on an H100; tests/emulator/test_hopper.py checks it
again on a GPU.)

WHEN. A load arrives when no thread can continue without it; its mbarrier then counts its bytes. A
store reads its tile and writes its box when its thread waits for its group, or when its block ends.
Until then these bytes are in use (asynchronous.py). A load whose block ends before it has arrived,
and a store whose thread ends before the tile has been read, are faults.
"""

from collections import deque

import numpy as np

from .asynchronous import STEP, Completion, Pending, Pieces
from .cluster import uses
from .faults import Unsupported
from .mbarrier import find
from .tensor_map import CHUNK, map_from

LOAD, STORE = "TMA load", "TMA store"
ALIGNMENT = 128  # bytes, of a tile in shared memory


# Both ways ----------------------------------------------------------------------------------------


def _begin(machine, descriptor, coordinates, what):
    """(TensorMap, coordinates) of a copy; None after a fault."""
    if machine.cc < (9, 0):
        raise Unsupported(f"TMA needs compute capability 9.0, not {machine.cc[0]}.{machine.cc[1]}")
    tensor = map_from(machine, descriptor)
    if tensor is None:
        return None
    if tensor.rank != len(coordinates):
        machine.report(
            "descriptor",
            f"a {what} with {len(coordinates)} coordinates of a tensor map of {tensor.rank} "
            "dimensions",
            machine.site_here(),
        )
        return None
    at = tuple((int(c) + (1 << 31) & 0xFFFFFFFF) - (1 << 31) for c in coordinates)
    if at[0] * tensor.itemsize % CHUNK:
        machine.report(
            "alignment",
            f"the {what} begins at element {at[0]} of the innermost dimension, byte "
            f"{at[0] * tensor.itemsize} of a row, which is not a multiple of {CHUNK}: a GPU "
            "ends with an illegal instruction",
            machine.site_here(),
        )
        return None
    if what == STORE and min(at) < 0:
        machine.report(
            "bounds",
            f"the {what} begins before the tensor, at {list(at)}: a GPU ends with an illegal "
            "instruction; only a load may",
            machine.site_here(),
        )
        return None
    return tensor, at


def _tile(machine, address, tensor, what, block=None):
    """(memory, offset) of the tile at a shared address of a block (this one); None after a fault."""
    address = int(address) & 0xFFFFFFFF
    found = machine.shared_memory(address, block)
    if found is None or found[1] + tensor.span > found[0].size:
        machine.report(
            "bounds",
            f"the {what} of {tensor.span} bytes at the shared address {address:#x} is not "
            "in the block's shared memory",
            machine.site_here(),
        )
        return None
    if address % ALIGNMENT:
        machine.report(
            "alignment",
            f"the {what}'s tile is at the shared address {address:#x}, which is not a "
            f"multiple of {ALIGNMENT}",
            machine.site_here(),
        )
        return None
    return found


def _known_pieces(machine, tensor, at, inside):
    """(memory, start, stop, `Pieces`) of a box: the map's memory, or that of an argument of the
    launch which contains it."""
    memory = tensor.memory
    first, last, pieces = tensor.pieces(at, inside)
    if id(memory) in machine._memories:
        return memory, first, last, pieces
    for other in machine._memories.values():
        shift = memory.address - other.address
        if 0 <= shift and shift + memory.size <= other.size:
            return (
                other,
                first + shift,
                last + shift,
                Pieces([s + shift for s in pieces.starts], pieces.length),
            )
    if memory.valid is not None or memory.shadowed:
        machine._memories[id(memory)] = memory
    return memory, first, last, pieces


def _named(copy, descriptor):
    """Name a copy's tensor, if its array has no name, as the kernel names its map."""
    if copy.tensor.name == "array":
        copy.tensor.name = getattr(descriptor, "name", "") or "array"


# Loads --------------------------------------------------------------------------------------------


class Load:
    """A copy in flight into shared memory; calling it makes it arrive."""

    __slots__ = (
        "machine",
        "block",
        "tensor",
        "at",
        "memory",
        "offset",
        "barrier",
        "thread",
        "site",
        "seen",
        "clock",
        "phase",
        "pending",
        "source",
    )

    def __call__(self):
        tensor, memory, machine = self.tensor, self.memory, self.machine
        inside = tensor.inside(self.at)
        tile = np.zeros(tensor.box[::-1], f"V{tensor.itemsize}")
        if all(high > low for low, high in inside):
            tile[tuple(slice(low, high) for low, high in reversed(inside))] = tensor.elements(
                self.at, inside
            )
        stop = self.offset + tensor.span
        chunks = tensor.chunks(memory.address + self.offset)
        memory.bytes[self.offset : stop].reshape(-1, CHUNK)[chunks] = (
            tile.reshape(-1).view(np.uint8).reshape(-1, CHUNK)
        )
        machine.stores += 1
        self.block.state["loads"].remove(self)
        if machine.checked:
            if tensor.span == tensor.bytes:
                memory.mark_written(self.offset, stop)
            else:
                for start in (self.offset + CHUNK * chunks).tolist():
                    memory.mark_written(start, start + CHUNK)
            for start in [
                s for s, tile in memory.layouts.items() if s < stop and self.offset < s + tile[0]
            ]:
                del memory.layouts[start]
            memory.layouts[self.offset] = tensor.span, tensor.swizzle, tensor.row_bytes
            self.pending.done = self.barrier.current
            if self.source is not None:
                self.source.end()
        if machine.film is not None:
            machine.film.load_lands(self, self.barrier)
        self.barrier.complete(tensor.bytes, self)


def load(machine, address, descriptor, barrier, coordinates, block=None):
    """`cp.async.bulk.tensor` from global to the shared memory of a block (this one), complete on
    its mbarrier."""
    block = block or machine.block
    begun = _begin(machine, descriptor, coordinates, LOAD)
    barrier = begun and find(machine, barrier, "completes on", block)
    place = barrier and _tile(machine, address, begun[0], LOAD, block)
    if not place:
        return
    copy = Load()
    copy.machine, copy.block, copy.thread, copy.site = (
        machine,
        block,
        machine.thread,
        machine.site_here(),
    )
    copy.tensor, copy.at = begun
    (copy.memory, copy.offset), copy.barrier, copy.phase = place, barrier, barrier.number
    copy.pending = copy.source = None
    if machine.checked:
        _claim_load(machine, copy)
    state = block.state
    if "loads" not in state:
        state["loads"] = []
        state.setdefault("at_end", []).append(lambda: _unarrived(machine, state["loads"]))
    state["loads"].append(copy)
    machine.asynchronous.queue.append(copy)
    if machine.film is not None:
        _named(copy, descriptor)
        machine.film.load_starts(copy, getattr(descriptor, "name", "") or copy.tensor.name)


def load_multicast(machine, address, descriptor, barrier, ranks, coordinates):
    """`cp.async.bulk.tensor` with `.multicast::cluster`: a load into the shared memory of each
    block of `ranks`."""
    blocks, ranks = machine.thread.block.cluster.blocks, int(ranks)
    if not 0 < ranks < 1 << len(blocks):
        machine.report(
            "bounds",
            f"a TMA load for the blocks {ranks:#b} of a cluster of {len(blocks)}",
            machine.site_here(),
        )
        return
    for rank, block in enumerate(blocks):
        if ranks >> rank & 1:
            uses(machine, block, "loads into")
            load(machine, address, descriptor, barrier, coordinates, block)


def _claim_load(machine, copy):
    """The checks of a load that starts, and what it uses until it arrives."""
    thread, site, tensor, barrier = copy.thread, copy.site, copy.tensor, copy.barrier
    engine, start, stop = machine.asynchronous, copy.offset, copy.offset + tensor.span
    if engine.checked and not engine.visible(barrier.made, thread):
        machine.report(
            "proxy",
            f"the TMA load completes on {barrier}, after whose initialisation there is no "
            "fence_barrier_init()",
            site,
            others=[("initialised at", machine.place(barrier.site, barrier.made[0]))],
        )
    engine.claim(copy.memory, start, stop, True, LOAD, site)
    wait = f"wait for phase {barrier.number} of {barrier.name}"
    copy.pending = Pending(LOAD, copy.memory, start, stop, True, thread, site, wait)
    inside = tensor.inside(copy.at)
    if all(high > low for low, high in inside):
        memory, first, last, pieces = _known_pieces(machine, tensor, copy.at, inside)
        if memory.valid is not None and machine.access.initialised:
            valid = np.ndarray(len(memory.valid), np.uint8, memory.valid)
            for s in pieces.starts:
                if not valid[s : s + pieces.length].all():
                    machine.report(
                        "uninitialised",
                        f"the TMA load reads {machine.access.say(memory, s)} and its "
                        "neighbours, some of which were never written",
                        site,
                    )
                    break
            del valid
        engine.claim(memory, first, last, False, LOAD, site, pieces)
        copy.source = Pending(LOAD, memory, first, last, False, thread, site, wait, pieces)
        if machine.recorder is not None:
            machine.recorder.bulk(memory, [(s, pieces.length) for s in pieces.starts], site, False)
    copy.seen, copy.clock = thread.seen, thread.clock
    thread.tick(thread.seen)


def _unarrived(machine, loads):
    """A block has ended: loads that are still in flight were never waited for."""
    if machine.asynchronous.checked and not machine.seen_faults:
        for copy in loads:
            machine.report(
                "asynchronous",
                f"the block ends while this TMA load is in flight: no thread waits for "
                f"{copy.barrier}",
                copy.site,
                copy.thread,
            )


# Stores -------------------------------------------------------------------------------------------


class Store:
    """A copy in flight out of shared memory."""

    __slots__ = (
        "tensor",
        "at",
        "memory",
        "offset",
        "thread",
        "stamp",
        "site",
        "reads",
        "writes",
        "tile",
    )

    def read(self, machine):
        """The tile has been read: its thread, and threads ordered after it, may overwrite it."""
        if self.tile is not None:
            return
        tensor, memory = self.tensor, self.memory
        chunks = tensor.chunks(memory.address + self.offset)
        data = memory.bytes[self.offset : self.offset + tensor.span].reshape(-1, CHUNK)[chunks]
        self.tile = data.reshape(-1).view(f"V{tensor.itemsize}").reshape(tensor.box[::-1])
        if self.reads is not None:
            self.reads.done = Completion()

    def write(self, machine):
        """The box has been written."""
        self.read(machine)
        tensor = self.tensor
        inside = tensor.inside(self.at)
        if all(high > low for low, high in inside):
            part = self.tile[tuple(slice(low, high) for low, high in reversed(inside))]
            tensor.elements(self.at, inside)[...] = part
            if self.writes is not None:
                memory, starts = self.writes.memory, self.writes.pieces.starts
                for s in starts:
                    memory.mark_written(s, s + self.writes.pieces.length)
                self.writes.done = Completion()
        machine.stores += 1
        if machine.film is not None:
            machine.film.lands(self)


class ThreadStores:
    """The stores of one thread: `open` are those in no group yet; `groups` and `unread`, oldest
    first, the others."""

    def __init__(self, machine, thread):
        self.machine, self.thread, self.open, self.unread, self.groups = (
            machine,
            thread,
            [],
            deque(),
            deque(),
        )
        self.written = []
        thread.state.setdefault("at_end", []).append(self.end)
        thread.block.state.setdefault("at_end", []).append(self.block_ends)

    def wait(self, pending, read_only):
        """Wait until at most `pending` groups are in flight, or (read_only) have not been read."""
        while len(self.unread) > pending:
            for store in self.unread.popleft():
                store.read(self.machine)
                if store.reads is not None:
                    store.reads.done.learn(self.thread)
        while not read_only and len(self.groups) > pending:
            for store in self.groups.popleft():
                self._write(store)
                if store.writes is not None:
                    store.writes.done.learn(self.thread)

    def _write(self, store):
        store.write(self.machine)
        if store.writes is not None:
            self.written.append(store)

    def end(self):
        """The thread has ended."""
        left = list(self.open) + [s for group in self.unread for s in group]
        if left and self.machine.asynchronous.checked:
            self.machine.report(
                "asynchronous",
                "the thread ends while this TMA store still reads shared memory: "
                "tma_store_commit() and tma_store_wait_read_0() first",
                left[0].site,
                self.thread,
            )

    def block_ends(self):
        """All that is still in flight arrives; the writers of global memory are recorded in its
        shadow."""
        for group in [*self.groups, self.open]:
            for store in group:
                self._write(store)
        for store in self.written:
            pending, entry = store.writes, (store.stamp, store.site, self.thread.block.token, False)
            pending.end()
            for start in pending.pieces.starts:
                pending.memory.writer.update(
                    dict.fromkeys(range(start, start + pending.pieces.length, STEP), entry)
                )


def store(machine, address, descriptor, coordinates):
    """`cp.async.bulk.tensor` from shared to global memory, complete in a group of its thread."""
    begun = _begin(machine, descriptor, coordinates, STORE)
    place = begun and _tile(machine, address, begun[0], STORE)
    if not place:
        return
    copy, thread = Store(), machine.thread
    copy.tensor, copy.at = begun
    (copy.memory, copy.offset), copy.thread, copy.site = place, thread, machine.site_here()
    copy.stamp = thread.stamp
    copy.reads = copy.writes = copy.tile = None
    if machine.checked:
        _claim_store(machine, copy)
    _stores(machine).open.append(copy)
    if machine.film is not None:
        _named(copy, descriptor)
        machine.film.store_starts(copy, getattr(descriptor, "name", "") or copy.tensor.name)


def _claim_store(machine, copy):
    """The checks of a store that starts, and what it uses until it is complete."""
    thread, site, tensor, shared = copy.thread, copy.site, copy.tensor, copy.memory
    engine, start, stop = machine.asynchronous, copy.offset, copy.offset + tensor.span
    if machine.access.initialised and shared.valid is not None:
        chunks = tensor.chunks(shared.address + start)
        valid = np.frombuffer(bytes(shared.valid[start:stop]), np.uint8).reshape(-1, CHUNK)
        for chunk in np.sort(chunks[~valid[chunks].all(axis=1)])[:1].tolist():
            first = start + CHUNK * chunk + int(np.argmin(valid[chunk]))
            machine.report(
                "uninitialised",
                f"the TMA store reads {machine.access.say(shared, first)}, which was never written",
                site,
            )
    engine.claim(shared, start, stop, False, STORE, site)
    copy.reads = Pending(
        STORE, shared, start, stop, False, thread, site, "wait for it with tma_store_wait_read_0()"
    )
    inside = tensor.inside(copy.at)
    if all(high > low for low, high in inside):
        memory, first, last, pieces = _known_pieces(machine, tensor, copy.at, inside)
        engine.claim(memory, first, last, True, STORE, site, pieces)
        copy.writes = Pending(
            STORE,
            memory,
            first,
            last,
            True,
            thread,
            site,
            "wait for it with tma_store_wait_0()",
            pieces,
        )
        if machine.recorder is not None:
            machine.recorder.bulk(memory, [(s, pieces.length) for s in pieces.starts], site, True)
    thread.tick(thread.seen)


def commit(machine):
    """`cp.async.bulk.commit_group`"""
    stores = _stores(machine)
    group, stores.open = stores.open, []
    stores.groups.append(group)
    stores.unread.append(group)


def wait(machine, pending, read_only):
    """`cp.async.bulk.wait_group`, with `.read` if read_only."""
    _stores(machine).wait(pending, read_only)


def _stores(machine):
    state = machine.thread.state
    stores = state.get("TMA stores")
    if stores is None:
        stores = state["TMA stores"] = ThreadStores(machine, machine.thread)
    return stores
