"""Matrix instructions of a warpgroup: `wgmma.mma_async` (PTX ISA, section 9.7.15).

128 threads give one instruction: D (64 × N, float32) += A (64 × 16) · B (16 × N) of float16; of
E4M3 it is 32 along k. D is in the threads' registers, B in shared memory, A in shared memory or in
registers: wgmma_layouts.py says where.

WHEN. A wgmma reads its matrices and writes its accumulators at the first wait that covers its
group. From the instruction on, a thread's accumulators are in use until its own wait, and the
matrices until any thread's.

ARITHMETIC. Each instruction's sum over k is exact here and added to D with one rounding to float32.
The hardware adds with fewer bits, truncated instead of rounded (Fasi, Higham, Mikaitis and Pranesh
2021, "Numerical behavior of NVIDIA tensor cores"), so its results differ in the last bits.
"""

import functools
from collections import deque

import numpy as np

from .arrays import CheckedArray
from .asynchronous import ByteWatch, Completion, Pending
from .faults import Unsupported
from .tensor_map import CHUNK
from .warp_matrix import float16_of_words
from .wgmma_layouts import WARPGROUP, M, SharedOperand, a_of_words, inner, to_registers

# A warpgroup's instructions -----------------------------------------------------------------------


class WarpgroupProduct:
    """One wgmma of a warpgroup, which its threads issue one by one."""

    __slots__ = (
        "kind",
        "bits_a",
        "bits_b",
        "scale",
        "a",
        "b",
        "n",
        "count",
        "arrays",
        "fragments",
        "site",
        "thread",
        "done",
        "waiting",
        "pendings",
        "after",
        "checked",
    )

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
            if operation.b.memory is not None and (
                operation.a is None or operation.a.memory is not None
            ):
                a = (
                    a_of_words(operation.fragments, operation.b.elements)
                    if operation.a is None
                    else operation.a.read()
                )
                product = to_registers(a @ operation.b.read().T)
                registers = (product + registers if operation.scale else product).astype(np.float32)
            for pending in operation.pendings:
                pending.done = operation.done
            if operation is last:
                break
        self._store(previous, registers)

    def _load(self, operation):
        machine, count = self.machine, operation.n // 2
        registers = np.empty((WARPGROUP, count), np.float32)
        for k, array in enumerate(operation.arrays):
            if array.__class__ is CheckedArray:
                start = array.offset >> 2
                registers[k] = array.flat[start : start + count]
                if (
                    operation.scale
                    and array.memory.valid is not None
                    and machine.access.initialised
                    and 0 in array.memory.valid[array.offset : array.offset + 4 * count]
                ):
                    machine.report(
                        "uninitialised",
                        f"the wgmma adds to {array.name}, parts of which this thread has "
                        "never written: scale_d = 0 makes D = A·B",
                        operation.site,
                    )
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
                array.flat[start : start + count] = registers[k]
                array.memory.mark_written(array.offset, array.offset + 4 * count)
            else:
                array[:count] = registers[k]


# A thread's ---------------------------------------------------------------------------------------


class Issuer:
    """One thread's side: which operations it has issued, in which groups, and what it must not
    touch meanwhile."""

    __slots__ = ("group", "given", "open", "groups", "fenced", "dirty", "in_use")

    def __init__(self, machine, thread):
        if machine.cc != (9, 0):
            raise Unsupported(
                f"wgmma needs compute capability 9.0, not {machine.cc[0]}.{machine.cc[1]}"
            )
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
            machine.report(
                "wgmma",
                "the thread ends while this wgmma is under way: commit it and wait for it",
                left[0].site,
                thread,
            )


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


def issue(
    machine,
    array,
    n,
    a,
    bits_b,
    scale,
    a_mn_major=False,
    b_mn_major=False,
    elements=float16_of_words,
):
    """`wgmma.mma_async.m64n{n}k16`, or `k32` of E4M3: the current thread's share of it.

    array: float32[n / 2], its accumulators; a: the descriptor of A, or its four registers (a
    tuple); scale: 0 or 1;
    elements: what the words of A and B hold
    """
    thread, issuer = machine.thread, _issuer(machine)
    group = issuer.group
    at = issuer.given - group.first
    if at < len(group.operations):
        operation = group.operations[at]
        if (
            operation.kind != (n, a_mn_major, b_mn_major, elements)
            or operation.bits_b != bits_b
            or operation.scale != bool(scale)
            or a.__class__ is not tuple
            and operation.bits_a != a
        ):
            machine.report(
                "wgmma",
                f"threads {operation.thread.index} and {thread.index} of a warpgroup give this "
                "wgmma with different descriptors or sizes",
                machine.site_here(),
                others=[("the other is", machine.place(operation.site, operation.thread))],
            )
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
    if machine.film is not None:
        machine.film.wgmma_issued(operation)
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
        machine.report(
            "wgmma",
            f"a wgmma needs all {WARPGROUP} threads of a warpgroup; the block's last one has fewer",
            site,
        )
        return None
    operation = WarpgroupProduct()
    operation.kind, operation.n, operation.scale = (
        (n, a_mn_major, b_mn_major, elements),
        n,
        bool(scale),
    )
    operation.bits_a, operation.bits_b, operation.site, operation.thread = (
        a,
        bits_b,
        site,
        machine.thread,
    )
    operation.count, operation.arrays, operation.done = 0, [None] * WARPGROUP, Completion()
    operation.fragments = [None] * WARPGROUP if a.__class__ is tuple else None
    operation.waiting, operation.pendings, operation.after, operation.checked = [], [], [], {}
    operation.a = (
        None if a.__class__ is tuple else SharedOperand(machine, a, M, a_mn_major, elements)
    )
    operation.b = SharedOperand(machine, bits_b, n, b_mn_major, elements)
    for name, operand in (("A", operation.a), ("B", operation.b)):
        if operand is not None:
            _check_operand(machine, operation, operand, name)
    if machine.recorder is not None:
        machine.recorder.tensor(2 * M * n * inner(elements), site)
    if machine.film is not None:
        machine.film.wgmma_starts(operation, f"m64n{n}k{inner(elements)}")
    group.operations.append(operation)
    return operation


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
        machine.scheduler.pause(
            "wgmma", last, machine._frame_here(), lambda result: _completed(machine, covered)
        )
    else:
        _completed(machine, covered)


def _completed(machine, covered):
    """The products that the current thread has waited for are complete, and their operands free."""
    thread, issuer, last = machine.thread, _issuer(machine), covered[-1]
    if issuer.group.first < issuer.given and last in issuer.group.operations:
        issuer.group.run_through(last)
    if machine.film is not None:
        arrays = {
            id(o.arrays[thread.tid % WARPGROUP]): (o.arrays[thread.tid % WARPGROUP], o.n // 2)
            for o in covered
        }
        machine.film.wgmma_waited(covered, arrays.values())
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
            ByteWatch(
                memory, used[0].start, used[0].stop, functools.partial(issuer.dirty.add, id(memory))
            )


# Checks -------------------------------------------------------------------------------------------


def _check_operand(machine, operation, operand, name):
    """Check a matrix's place and its writers, and mark it as in use."""
    site, d = operation.site, operand.descriptor
    if operand.memory is None:
        machine.report(
            "bounds",
            f"matrix {name} of the wgmma, from the shared address {d.address:#x} on, is not "
            "in the block's shared memory",
            site,
        )
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
            if 0 in memory.valid[s : s + CHUNK] and not any(
                p.writes and p.at(s, CHUNK) for p in memory.busy
            ):
                machine.report(
                    "uninitialised",
                    f"the wgmma reads {machine.access.say(memory, s)} and its neighbours "
                    f"for matrix {name}, some of which were never written",
                    site,
                )
                break
    operation.pendings.append(
        Pending(
            "wgmma",
            memory,
            start,
            stop,
            False,
            operation.thread,
            site,
            "commit its group and wait for it with wgmma_wait",
            pieces,
        )
    )


def _check_layout(machine, operand, name, site):
    """Check a descriptor against the tile that TMA wrote there, if no thread has stored into it
    since."""
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
            machine.report(
                "descriptor",
                f"the descriptor of matrix {name} says {_say(d.swizzle)}, but TMA "
                "wrote "
                f"the tile at {machine.access.say(memory, start)} with {_say(swizzle)}",
                site,
            )
        elif not swizzle and row != CHUNK:
            machine.report(
                "descriptor",
                f"the descriptor of matrix {name}, with {_say(d.swizzle)}, reads rows of "
                f"{d.swizzle or CHUNK} bytes, but TMA wrote rows of {row} bytes "
                f"to the tile at {machine.access.say(memory, start)}",
                site,
            )
        elif period and ((memory.address + start) % period >> 7) != d.base_offset:
            machine.report(
                "alignment",
                f"the tile of matrix {name} begins at the shared address "
                f"{memory.address + start:#x}: "
                f"with {_say(d.swizzle)} it must be a multiple of {period}, or the "
                "descriptor's base "
                "offset must say where the pattern begins",
                site,
            )
        else:
            continue
        return


def _say(swizzle):
    return f"a swizzle of {swizzle} bytes" if swizzle else "no swizzle"


def _claim_registers(machine, thread, issuer, array, n, operation):
    """The accumulators are in use until the thread's wait."""
    if array.__class__ is not CheckedArray or array.itemsize != 4 or array.size < n // 2:
        machine.report(
            "wgmma",
            f"the accumulators of a wgmma of {n} columns must be a cuda.local.array of {n // 2} "
            "float32",
            machine.site_here(),
        )
        return
    memory = array.memory
    key = id(memory)
    if machine.asynchronous.checked and (not issuer.fenced or key in issuer.dirty):
        why = (
            "the accumulators were touched after the last"
            if issuer.fenced
            else "it is the first, and there was no"
        )
        machine.report("wgmma", f"a wgmma without wgmma_fence(): {why} fence", machine.site_here())
        issuer.fenced = True
        issuer.dirty.clear()
    used = issuer.in_use.get(key)
    if used is not None:
        used[1] += 1
        return
    for entry in memory.busy[:]:
        if entry.__class__ is ByteWatch:
            memory.busy.remove(entry)
    issuer.in_use[key] = [
        Pending(
            "wgmma",
            memory,
            array.offset,
            array.offset + 2 * n,
            True,
            thread,
            operation.site,
            "commit its group and wait for it with wgmma_wait",
        ),
        1,
    ]


def _comes_after(machine, thread, operation):
    """Check that another thread of the warpgroup comes after the writes of the matrices' bytes."""
    key = id(thread.seen)
    for memory, after, writers in operation.after:
        for pending in after:
            if not machine.asynchronous._over(pending, thread):
                machine.asynchronous._report(
                    pending,
                    pending.writes,
                    f"the wgmma reads {machine.access.say(memory, pending.start)}",
                    operation.site,
                )
                return
        if writers and key not in operation.checked:
            for stamp, site, past, at in writers:
                if (
                    past is machine.token
                    and machine.access.races
                    and not machine.access._ordered(stamp)
                ):
                    machine.access.race(
                        memory,
                        at,
                        stamp,
                        site,
                        operation.site,
                        "reads by the wgmma",
                        "written",
                        False,
                    )
                    return
    operation.checked[key] = thread.seen
