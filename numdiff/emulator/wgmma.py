"""Matrix instructions of a warpgroup: `wgmma.mma_async` (PTX ISA, section 9.7.15).

128 threads give one instruction: D (64 × N, float32) += A (64 × 16) · B (16 × N) of float16; of E4M3 it is 32 along k.
D lies in the threads' registers, B in shared memory, A in shared memory or in registers.

MATRICES IN SHARED MEMORY are named by a 64-bit descriptor (section 9.7.15.5.1.2.2), decoded by `Descriptor`:

    bits  0-13  address of the first element / 16
    bits 16-29  leading dimension byte offset (LBO) / 16
    bits 32-45  stride dimension byte offset (SBO) / 16
    bits 49-51  base offset: where the swizzle's pattern begins
    bits 62-63  swizzle: 0 none, 1 128 bytes, 2 64 bytes, 3 32 bytes

A matrix is made of 16-byte chunks, eight float16 along its contiguous dimension, or sixteen E4M3, which must run along
k. With a swizzle of S bytes, rows of S
bytes lie one after another, eight to a group. `chunk_offsets` says where each chunk lies; r is the row, c the chunk in
the row, along the other dimension:

    K-major, swizzled     r % 8 · S + r // 8 · SBO + c · 16          r is m or n, two chunks along k; LBO is not used
    K-major, none         r % 8 · 16 + r // 8 · SBO + c · LBO
    MN-major, swizzled    k % 8 · S + k // 8 · SBO + c % (S / 16) · 16 + c // (S / 16) · LBO     chunks along m or n
    MN-major, none        k % 8 · 16 + k // 8 · LBO + c · SBO

and the swizzle then xors bits of the resulting address, as TMA's does (tensor_map.py).

REGISTERS. `accumulator_place` and `a_fragment_place` say which element of D and A lies in which register of which
thread.

WHEN. A wgmma reads its matrices and writes its accumulators at the first wait that covers its group. From the
instruction on, a thread's accumulators are in use until its own wait, and the matrices until any thread's.

ARITHMETIC. Each instruction's sum over k is exact here and added to D with one rounding to float32. The hardware adds
with fewer bits, truncated instead of rounded (Fasi, Higham, Mikaitis and Pranesh 2021, "Numerical behavior of NVIDIA
tensor cores"), so its results differ in the last bits.
"""
import functools
from collections import deque

import numpy as np

from .arrays import CheckedArray
from .asynchronous import Completion, Pending, Pieces, Watch
from .faults import Unsupported
from .tensor_map import CHUNK, SWIZZLES
from .warp_matrix import e4m3_of_words, float16_of_words

WARPGROUP, M, K = 128, 64, 16
SWIZZLE_OF_MODE = (0, 128, 64, 32)  # bytes, by the descriptor's bits 62-63
REGISTERS = 65536  # of a multiprocessor
MAX_REGISTERS = 255  # of a thread


# Layouts --------------------------------------------------------------------------------------------------------------

def accumulator_place(thread, register):
    """(row, column) of D in accumulator `register` (0 … N / 2 - 1) of a thread (0 … 127) of the warpgroup."""
    warp, lane = thread // 32, thread % 32
    return (16 * warp + lane // 4 + 8 * (register // 2 % 2), 8 * (register // 4) + lane % 4 * 2 + register % 2)


def a_fragment_place(thread, element):
    """(row, column) of A in float16 `element` (0 … 7; two to a register) of a thread (0 … 127), A from registers."""
    warp, lane = thread // 32, thread % 32
    return 16 * warp + lane // 4 + 8 * (element // 2 % 2), 8 * (element // 4) + lane % 4 * 2 + element % 2


def to_registers(d):
    """D (64 × N) as the 128 threads hold it: (128, N / 2). The axes are warp, half, row, group, quad, pair."""
    n = d.shape[1]
    return d.reshape(4, 2, 8, n // 8, 4, 2).transpose(0, 2, 4, 3, 1, 5).reshape(WARPGROUP, n // 2)


def from_registers(registers):
    """The matrix (64 × N) that 128 threads hold in (128, N / 2) registers."""
    n = 2 * registers.shape[1]
    return registers.reshape(4, 8, 4, n // 8, 2, 2).transpose(0, 4, 1, 3, 2, 5).reshape(M, n)


def inner(elements):
    """How many of these an instruction adds up along k: 32 bytes of a row of A, or of a column of B."""
    return 2 * K if elements is e4m3_of_words else K


class Descriptor:
    """A matrix descriptor, decoded: all sizes in bytes. swizzle: 0, 32, 64 or 128."""

    __slots__ = ("address", "leading", "stride", "base_offset", "swizzle")

    def __init__(self, bits):
        bits = int(bits)
        self.address, self.leading, self.stride = ((bits >> at & 0x3FFF) << 4 for at in (0, 16, 32))
        self.base_offset, self.swizzle = bits >> 49 & 7, SWIZZLE_OF_MODE[bits >> 62 & 3]


@functools.lru_cache(1024)
def chunk_offsets(address, rows, leading, stride, base_offset, swizzle, mn_major):
    """Byte offsets from the matrix's start of its 16-byte chunks, an int64 array.

    address: of the start, modulo 1024; rows: of the matrix along m or n. Shape (rows, 2) for a K-major matrix: chunk c
    of row r is k = 8c … 8c + 7. Shape (16, rows / 8) for an MN-major one: chunk c of row k is m or n = 8c … 8c + 7.
    """
    if mn_major:
        k, c = np.arange(K)[:, None], np.arange(rows // 8)[None, :]
        if swizzle:
            span = swizzle // CHUNK
            offsets = k % 8 * swizzle + k // 8 * stride + c % span * CHUNK + c // span * leading
        else:
            offsets = k % 8 * CHUNK + k // 8 * leading + c * stride
    else:
        r, c = np.arange(rows)[:, None], np.arange(2)[None, :]
        if swizzle:
            offsets = r % 8 * swizzle + r // 8 * stride + c * CHUNK
        else:
            offsets = r % 8 * CHUNK + r // 8 * stride + c * leading
    places = address + offsets
    pattern = places - (base_offset << 7)
    return (places ^ (pattern >> 7 & SWIZZLES[swizzle]) << 4) - address


@functools.lru_cache(1024)
def _chunk_starts(*layout):
    return np.unique(chunk_offsets(*layout)).tolist()


class Operand:
    """A matrix in shared memory: where its chunks lie."""

    __slots__ = ("memory", "start", "layout", "mn_major", "rows", "descriptor", "pieces", "elements")

    def __init__(self, machine, bits, rows, mn_major, elements):
        self.descriptor, self.elements = Descriptor(bits), elements
        d = self.descriptor
        self.rows, self.mn_major, self.memory, self.pieces = rows, mn_major, None, None
        self.layout = d.address % 1024, rows, d.leading, d.stride, d.base_offset, d.swizzle, mn_major
        found = machine.shared_memory(d.address)
        if found is None:
            return
        memory, self.start = found
        starts = _chunk_starts(*self.layout)
        if self.start + starts[0] >= 0 and self.start + starts[-1] + CHUNK <= memory.size:
            self.memory = memory

    def find_pieces(self):
        self.pieces = Pieces([self.start + s for s in _chunk_starts(*self.layout)], CHUNK)
        return self.pieces

    def read(self):
        """The matrix as float64, (rows, 16), or (rows, 32) of E4M3."""
        chunks = (self.start + chunk_offsets(*self.layout)) // CHUNK
        data = self.memory.bytes.reshape(-1, CHUNK)[chunks].reshape(chunks.shape[0], -1)
        data = self.elements(data.view(np.uint32)).reshape(chunks.shape[0], -1)
        return (data.T if self.mn_major else data).astype(np.float64)


# Instructions ---------------------------------------------------------------------------------------------------------

class Operation:
    """One wgmma of a warpgroup, which its threads issue one by one."""

    __slots__ = ("kind", "bits_a", "bits_b", "scale", "a", "b", "n", "count", "arrays", "fragments", "site", "thread",
                 "done", "waiting", "pendings", "after", "checked")

    def __str__(self):
        return f"a wgmma that {self.count} of its {WARPGROUP} threads have given"


class Warpgroup:
    """The instructions of 128 threads: `operations[0]` is number `first` of them."""

    def __init__(self, machine, thread):
        self.machine, self.number = machine, thread.tid // WARPGROUP
        self.operations, self.first = deque(), 0
        self.complete = len(thread.block.threads) >= (self.number + 1) * WARPGROUP

    def run_through(self, last):
        """Run all operations up to `last`."""
        registers = previous = None
        while self.operations:
            operation = self.operations.popleft()
            self.first += 1
            arrays = operation.arrays
            if previous is None or any(a is not b for a, b in zip(arrays, previous, strict=True)):
                self._store(previous, registers)
                registers, previous = self._load(operation), arrays
            if operation.b.memory is not None and (operation.a is None or operation.a.memory is not None):
                a = _fragments(operation.fragments, operation.b.elements) if operation.a is None else operation.a.read()
                product = to_registers(a @ operation.b.read().T)
                registers = (product + registers if operation.scale else product).astype(np.float32)
            for pending in operation.pendings:
                pending.done = operation.done
            if self.machine.tracer is not None:
                self.machine.tracer.event("wgmma completed", "", self.machine.thread, operation.site, operation)
            if operation is last:
                break
        self._store(previous, registers)

    def _load(self, operation):
        machine, count = self.machine, operation.n // 2
        registers = np.empty((WARPGROUP, count), np.float32)
        for k, array in enumerate(operation.arrays):
            if array.__class__ is CheckedArray:
                start = array.offset >> 2
                registers[k] = array.flat[start:start + count]
                if operation.scale and array.memory.valid is not None and machine.access.initialised and \
                        0 in array.memory.valid[array.offset:array.offset + 4 * count]:
                    machine.report("uninitialised", f"the wgmma adds to {array.name}, parts of which this thread has "
                                                    "never written: scale_d = 0 makes D = A·B", operation.site)
            else:
                registers[k] = array[:count]
        return registers

    @staticmethod
    def _store(arrays, registers):
        if arrays is None:
            return
        count = registers.shape[1]
        for k, array in enumerate(arrays):
            if array.__class__ is CheckedArray:
                start = array.offset >> 2
                array.flat[start:start + count] = registers[k]
                array.memory.mark_written(array.offset, array.offset + 4 * count)
            else:
                array[:count] = registers[k]


def _fragments(words, elements):
    """A (64 × 16, float64) from the four words of each of the 128 threads."""
    # The axes are warp, row, quad, right, below, pair.
    halves = elements(np.array(words, np.uint32)).reshape(4, 8, 4, 2, 2, 2)
    return halves.transpose(0, 4, 1, 3, 2, 5).reshape(M, K).astype(np.float64)


class Issuer:
    """One thread's side: which operations it has issued, in which groups, and what it must not touch meanwhile."""

    __slots__ = ("group", "given", "open", "groups", "fenced", "dirty", "in_use")

    def __init__(self, machine, thread):
        if machine.cc != (9, 0):
            raise Unsupported(f"wgmma needs compute capability 9.0, not {machine.cc[0]}.{machine.cc[1]}")
        groups = thread.block.state.setdefault("warpgroups", {})
        number = thread.tid // WARPGROUP
        if number not in groups:
            groups[number] = Warpgroup(machine, thread)
        self.group, self.given, self.open, self.groups = groups[number], 0, [], deque()
        self.fenced, self.dirty = False, set()
        self.in_use = {}  # id of a local memory -> [Pending, operations that use it]
        thread.state.setdefault("at_end", []).append(lambda: self.end(machine, thread))

    def end(self, machine, thread):
        """The thread has ended."""
        left = [o for group in self.groups for o in group] + self.open
        if left and machine.asynchronous.checked:
            machine.report("wgmma", "the thread ends while this wgmma is under way: commit it and wait for "
                                    "it", left[0].site,
                           thread)


def _issuer(machine):
    thread = machine.thread
    issuer = thread.state.get("wgmma")
    if issuer is None:
        issuer = thread.state["wgmma"] = Issuer(machine, thread)
    return issuer


def fence(machine):
    """`wgmma.fence`"""
    issuer = _issuer(machine)
    issuer.fenced = True
    issuer.dirty.clear()


def issue(machine, array, n, a, bits_b, scale, a_mn_major=False, b_mn_major=False,
          elements=float16_of_words):
    """`wgmma.mma_async.m64n{n}k16`, or `k32` of E4M3: the current thread's share of it.

    array: float32[n / 2], its accumulators; a: the descriptor of A, or its four registers (a tuple); scale: 0 or 1;
    elements: what the words of A and B hold
    """
    thread, issuer = machine.thread, _issuer(machine)
    group = issuer.group
    at = issuer.given - group.first
    if at < len(group.operations):
        operation = group.operations[at]
        if (operation.kind != (n, a_mn_major, b_mn_major, elements) or operation.bits_b != bits_b or
                operation.scale != bool(scale) or a.__class__ is not tuple and operation.bits_a != a):
            machine.report("wgmma", f"threads {operation.thread.index} and {thread.index} of a warpgroup give this "
                                    "wgmma with different descriptors or sizes", machine.site_here(),
                           others=[("the other is", machine.place(operation.site, operation.thread))])
    else:
        operation = _first(machine, group, n, a, bits_b, scale, a_mn_major, b_mn_major, elements)
        if operation is None:
            return
    k = thread.tid % WARPGROUP
    operation.arrays[k] = array
    if a.__class__ is tuple:
        operation.fragments[k] = a
    if machine.checked:
        _claim_registers(machine, thread, issuer, array, n, operation)
        if operation.thread is not thread:
            _comes_after(machine, thread, operation)
    issuer.given += 1
    issuer.open.append(operation)
    operation.count += 1
    if operation.count == WARPGROUP and operation.waiting:
        waiting, operation.waiting = operation.waiting, []
        machine.scheduler.wake(waiting)


def _first(machine, group, n, a, bits_b, scale, a_mn_major, b_mn_major, elements):
    """The operation that the first of its threads issues; None after a fault."""
    site = machine.site_here()
    if not group.complete:
        machine.report("wgmma", f"a wgmma needs all {WARPGROUP} threads of a warpgroup; the block's last one has "
                                "fewer", site)
        return None
    operation = Operation()
    operation.kind, operation.n, operation.scale = (n, a_mn_major, b_mn_major, elements), n, bool(scale)
    operation.bits_a, operation.bits_b, operation.site, operation.thread = a, bits_b, site, machine.thread
    operation.count, operation.arrays, operation.done = 0, [None] * WARPGROUP, Completion()
    operation.fragments = [None] * WARPGROUP if a.__class__ is tuple else None
    operation.waiting, operation.pendings, operation.after, operation.checked = [], [], [], {}
    operation.a = None if a.__class__ is tuple else Operand(machine, a, M, a_mn_major, elements)
    operation.b = Operand(machine, bits_b, n, b_mn_major, elements)
    for name, operand in (("A", operation.a), ("B", operation.b)):
        if operand is not None:
            _check_operand(machine, operation, operand, name)
    if machine.recorder is not None:
        machine.recorder.tensor(2 * M * n * inner(elements), site)
    if machine.tracer is not None:
        machine.tracer.event("wgmma issued", f"m64n{n}k{inner(elements)}", machine.thread, site, operation)
    group.operations.append(operation)
    return operation


def _check_operand(machine, operation, operand, name):
    """Check where a matrix lies and who wrote it, and mark it as in use."""
    site, d = operation.site, operand.descriptor
    if operand.memory is None:
        machine.report("bounds", f"matrix {name} of the wgmma, from the shared address {d.address:#x} on, does not lie "
                                 "in the block's shared memory", site)
        return
    if not machine.checked:
        return
    memory, pieces = operand.memory, operand.find_pieces()
    start, stop = pieces.starts[0], pieces.starts[-1] + CHUNK
    _check_layout(machine, operand, name, site)
    after, writers = machine.asynchronous.claim(memory, start, stop, False, "wgmma", site, pieces)
    operation.after.append((memory, after, writers))
    if memory.valid is not None and machine.access.initialised:
        for s in pieces.starts:
            if 0 in memory.valid[s:s + CHUNK] and not any(p.writes and p.at(s, CHUNK) for p in memory.busy):
                machine.report("uninitialised", f"the wgmma reads {machine.access.say(memory, s)} and its neighbours "
                                                f"for matrix {name}, some of which nobody has written", site)
                break
    operation.pendings.append(Pending("wgmma", memory, start, stop, False, operation.thread, site,
                                      "commit its group and wait for it with wgmma_wait", pieces))


def _check_layout(machine, operand, name, site):
    """Check a descriptor against the tile that TMA wrote there, if nobody has stored into it since."""
    memory, d, pieces = operand.memory, operand.descriptor, operand.pieces
    if not machine.asynchronous.checked:
        return
    for start, (size, swizzle, row) in memory.layouts.items():
        if not pieces.meets(start, start + size):
            continue
        if memory.writer and not memory.writer.keys().isdisjoint(range(start, start + size, 2)):
            continue
        period = d.swizzle * 8
        if swizzle != d.swizzle:
            machine.report("descriptor", f"the descriptor of matrix {name} says {_say(d.swizzle)}, but TMA "
                                         "wrote "
                                         f"the tile at {machine.access.say(memory, start)} with {_say(swizzle)}", site)
        elif not swizzle and row != CHUNK:
            machine.report("descriptor", f"the descriptor of matrix {name}, with {_say(d.swizzle)}, reads rows of "
                                         f"{d.swizzle or CHUNK} bytes, but TMA wrote rows of {row} bytes "
                                         f"to the tile at {machine.access.say(memory, start)}", site)
        elif period and ((memory.address + start) % period >> 7) != d.base_offset:
            machine.report("alignment", f"the tile of matrix {name} begins at the shared address "
                                        f"{memory.address + start:#x}: "
                                        f"with {_say(d.swizzle)} it must be a multiple of {period}, or the "
                                        "descriptor's base "
                                        "offset must say where the pattern begins", site)
        else:
            continue
        return


def _say(swizzle):
    return f"a swizzle of {swizzle} bytes" if swizzle else "no swizzle"


def _claim_registers(machine, thread, issuer, array, n, operation):
    """The accumulators are in use until the thread's wait."""
    if array.__class__ is not CheckedArray or array.itemsize != 4 or array.size < n // 2:
        machine.report("wgmma", f"the accumulators of a wgmma of {n} columns must be a cuda.local.array of {n // 2} "
                                "float32",
                       machine.site_here())
        return
    memory = array.memory
    key = id(memory)
    if machine.asynchronous.checked and (not issuer.fenced or key in issuer.dirty):
        why = "the accumulators were touched after the last" if issuer.fenced else "it is the first, and there was no"
        machine.report("wgmma", f"a wgmma without wgmma_fence(): {why} fence", machine.site_here())
        issuer.fenced = True
        issuer.dirty.clear()
    used = issuer.in_use.get(key)
    if used is not None:
        used[1] += 1
        return
    for entry in memory.busy[:]:
        if entry.__class__ is Watch:
            memory.busy.remove(entry)
    issuer.in_use[key] = [Pending("wgmma", memory, array.offset, array.offset + 2 * n, True, thread, operation.site,
                                  "commit its group and wait for it with wgmma_wait"), 1]


def _comes_after(machine, thread, operation):
    """Check that another thread of the warpgroup comes after the writes of the matrices' bytes."""
    key = id(thread.seen)
    for memory, after, writers in operation.after:
        for pending in after:
            if not machine.asynchronous._over(pending, thread):
                machine.asynchronous._report(pending, pending.writes, "the wgmma reads "
                                             f"{machine.access.say(memory, pending.start)}", operation.site)
                return
        if writers and key not in operation.checked:
            for stamp, site, past, at in writers:
                if past is machine.token and machine.access.races and not machine.access._ordered(stamp):
                    machine.access._race(memory, at, stamp, site, operation.site, "reads by the wgmma", "written",
                                         False)
                    return
    operation.checked[key] = thread.seen


def commit(machine):
    """`wgmma.commit_group`"""
    issuer = _issuer(machine)
    issuer.groups.append(issuer.open)
    issuer.open = []


def wait(machine, pending):
    """`wgmma.wait_group`: until at most `pending` groups of the current thread are under way."""
    thread, issuer = machine.thread, _issuer(machine)
    covered = []
    while len(issuer.groups) > pending:
        covered.extend(issuer.groups.popleft())
    if not covered:
        return
    last = covered[-1]
    if last.count < WARPGROUP:
        last.waiting.append(thread)
        machine.scheduler.pause("wgmma", last, machine._frame_here())
    if issuer.group.first < issuer.given and last in issuer.group.operations:
        issuer.group.run_through(last)
    if not machine.checked:
        return
    for operation in covered:
        operation.done.learn(thread)
        memory = operation.arrays[thread.tid % WARPGROUP].memory
        used = issuer.in_use.get(id(memory))
        if used is None:
            continue
        used[1] -= 1
        if not used[1]:
            del issuer.in_use[id(memory)]
            used[0].end()
            Watch(memory, used[0].start, used[0].stop, functools.partial(issuer.dirty.add, id(memory)))


# Registers ------------------------------------------------------------------------------------------------------------

def set_registers(machine, count, more):
    """`setmaxnreg.inc` (more) or `.dec`: the registers of each thread of the warpgroup (PTX ISA, section 9.7.19.5)."""
    if machine.cc != (9, 0):
        raise Unsupported(f"setmaxnreg needs compute capability 9.0, not {machine.cc[0]}.{machine.cc[1]}")
    thread, site = machine.thread, machine.site_here()
    block = thread.block
    state = block.state.get("registers")
    if state is None:
        start = min(REGISTERS // len(block.threads) // 8 * 8, MAX_REGISTERS // 8 * 8)
        state = block.state["registers"] = {"start": start, "now": {}, "sites": {}}
        block.state.setdefault("at_end", []).append(lambda: _check_registers(machine, block, state))
    group = thread.tid // WARPGROUP
    calls = state["sites"].setdefault((group, site), [0, thread, count])
    calls[0] += 1
    if calls[0] % min(WARPGROUP, len(block.threads) - group * WARPGROUP) != 1:
        return
    now = state["now"].get(group, state["start"])
    if count < now if more else count > now:
        machine.report("error", f"setmaxnreg.{'inc' if more else 'dec'} to {count} registers in a warpgroup that has "
                                f"{now} a thread", site)
    state["now"][group] = count


def _check_registers(machine, block, state):
    """At the end of a block: check that whole warpgroups took part, and that all of them had enough registers."""
    for (group, site), (calls, thread, _) in state["sites"].items():
        size = min(WARPGROUP, len(block.threads) - group * WARPGROUP)
        if calls % size:
            machine.report("divergence", f"setmaxnreg is executed by {calls % size} of the {size} threads of a "
                                         "warpgroup", site,
                           thread)
        elif size < WARPGROUP:
            machine.report("divergence", f"setmaxnreg in a warpgroup of {size} threads: it needs "
                                         f"{WARPGROUP}", site, thread)
    groups = -(-len(block.threads) // WARPGROUP)
    pool = state["start"] * groups
    total = sum(state["now"].get(g, state["start"]) for g in range(groups))
    if total > pool:
        (_, site), (_, thread, count) = max(state["sites"].items(), key=lambda item: item[1][2])
        machine.report("error", f"setmaxnreg: the warpgroups of the block want {total * WARPGROUP} registers together, "
                                f"it was started with {pool * WARPGROUP}: this one waits for ever", site, thread)
