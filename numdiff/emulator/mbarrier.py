"""mbarriers: barriers in shared memory that count arrivals and bytes (PTX ISA, section 9.7.13.15,
"mbarrier").

A barrier has an expected count of arrivals. A phase is over when that many have arrived and its
transaction count is
zero: the bytes announced (`expect_tx`) that have not yet arrived (`complete_tx`, done by TMA). The
next phase begins at once. A waiting thread names the parity of a phase. The wait for parity p ends
as soon as the current phase has the other parity; it ends at once if the last completed phase had
parity p. A barrier begins in phase 0, so a wait for parity 1 gets through a fresh one: this is how
a producer finds all its stages empty at the start.

ORDER. An arrival releases and a successful wait acquires. A thread that waited for a phase comes
after all earlier work of the threads that arrived in it (vector clocks, see races.py), and after
the copies whose bytes it counted (`Completion`). Threads of another block of the cluster may
arrive, too. Their earlier work then precedes all later work of the waiting thread's whole block,
since blocks are ordered only as a whole.

FAULTS, of the kind "mbarrier" unless noted: a barrier that is not initialised, or initialised
without an order before the thread; more arrivals than the count; unannounced bytes, at the line of
their copy; a phase that ends before a thread has observed the previous one; a parity that is not 0
or 1. A wait that never ends is a "deadlock", which names the barrier, its phase and what is
missing.

Named barriers (`bar.sync`, `bar.arrive`: section 9.7.13.1, "barrier") are here too.
"""

from .asynchronous import Completion
from .faults import Unsupported

MAX_COUNT = (1 << 20) - 1  # of arrivals, and of bytes either way
NAMED_BARRIERS = 16  # of a block
WARP = 32


class Barrier:
    """One mbarrier.

    count: arrivals of a phase; missing: those still to come; tx: bytes still to come; number: of
    the phase under way
    """

    __slots__ = (
        "machine",
        "block",
        "memory",
        "offset",
        "name",
        "count",
        "missing",
        "tx",
        "number",
        "seen",
        "clocks",
        "released",
        "current",
        "last",
        "waiting",
        "woken",
        "made",
        "site",
        "joined",
        "others",
        "acquired",
    )

    def __init__(self, machine, memory, offset, count, site):
        self.machine, self.block, self.memory, self.offset = (
            machine,
            machine.thread.block,
            memory,
            offset,
        )
        self.count = self.missing = count
        self.tx = self.number = 0
        self.name = (machine.checked and machine.element_name(memory, offset)) or "an mbarrier"
        # views of the threads that arrived in this phase: id -> list; (thread, clock)
        self.seen, self.clocks = {}, []
        # what comes before the end of the last phase; joins with it
        self.released, self.joined = None, {}
        # … of other blocks: block -> clocks, in this phase and in the last
        self.others, self.acquired = {}, {}
        self.current, self.last = Completion(), None
        self.waiting = []  # (thread, parity, site)
        # threads that the end of the last phase has woken, and that have not run yet -> site
        self.woken = {}
        self.made, self.site = machine.thread.stamp, site

    def __str__(self):
        return f"mbarrier {self.name} (shared address {self.memory.address + self.offset:#x})"

    def state(self):
        """The phase under way, in words."""
        missing = [f"{self.missing} of {self.count} arrivals"] if self.missing else []
        missing += [f"{self.tx} bytes"] if self.tx else []
        return f"phase {self.number} of it lacks {' and '.join(missing) or 'nothing'}"

    # arriving -------------------------------------------------------------------------------------

    def expect(self, count, site):
        """`expect_tx`: `count` more bytes will come in this phase."""
        self.tx += count
        if self.machine.film is not None:
            self.machine.film.expect(self, count)
        if self.tx > MAX_COUNT:
            self.machine.report(
                "mbarrier", f"expects {self.tx} bytes at {self}, the limit is {MAX_COUNT}", site
            )

    def arrive(self, count, site):
        """`count` arrivals by the current thread."""
        machine, thread = self.machine, self.machine.thread
        if count > self.missing:
            machine.report(
                "mbarrier",
                f"arrives at {self} more often than the {self.count} times of its count: "
                f"{self.state()}",
                site,
            )
            return
        self.missing -= count
        if machine.checked:
            self.note(thread, thread.seen, thread.clock)
            thread.tick(thread.seen)
        machine.scheduler.progress += 1
        if machine.film is not None:
            machine.film.arrive(self, count)
        self.end_if_complete(site, thread)

    def note(self, thread, seen, clock):
        """Order a thread's view, and its own clock, before the end of this phase."""
        if thread.block is self.block:
            self.seen[id(seen)] = seen
            self.clocks.append((thread.tid, clock))
            return
        before = self.others.get(thread.block)
        before = list(map(max, before, seen)) if before else list(seen)
        before[thread.tid] = max(before[thread.tid], clock)
        self.others[thread.block] = before

    def complete(self, count, copy):
        """`complete_tx`: the bytes of a copy have come."""
        machine = self.machine
        if machine.checked:
            self.note(copy.thread, copy.seen, copy.clock)
        why = None
        if copy.phase != self.number:
            why = f"phase {copy.phase} of it, in which the copy was started, has ended without them"
        elif self.tx < count:
            why = f"it expects {self.tx}"
        if why is None:
            self.tx -= count
        else:
            machine.report(
                "mbarrier",
                f"the copy brings {count} bytes to {self}, but {why}: an expect_tx is missing "
                "or too small",
                copy.site,
                copy.thread,
            )
            self.tx = max(self.tx - count, 0)
        machine.scheduler.progress += 1
        self.end_if_complete(copy.site, None)

    def end_if_complete(self, site, thread):
        """End the phase if all of it has come: begin the next one, wake the waiting threads.
        thread: the last to arrive."""
        if self.missing or self.tx:
            return
        machine = self.machine
        for slow, where in self.woken.items():
            machine.report(
                "mbarrier",
                f"phase {self.number} of {self} ends before this thread has seen the end of "
                "phase "
                f"{self.number - 1}, which it waits for: a GPU may miss it and wait for ever",
                where,
                slow,
                [("ended by", machine.place(site, machine.thread))],
            )
        self.woken = {}
        if machine.checked:
            lists = list(self.seen.values()) + ([self.released] if self.released else [])
            released = (
                list(map(max, zip(*lists, strict=True)))
                if len(lists) > 1
                else list(lists[0])
                if lists
                else [0] * len(self.block.threads)
            )
            for tid, clock in self.clocks:
                released[tid] = max(released[tid], clock)
            self.released, self.joined, self.seen, self.clocks = released, {}, {}, []
            for block, clocks in self.others.items():
                before = self.acquired.get(block)
                self.acquired[block] = list(map(max, before, clocks)) if before else clocks
            self.others = {}
        self.number += 1
        self.missing = self.count
        self.last, self.current = self.current, Completion()
        self.last.next = self.current
        if machine.film is not None:
            machine.film.phase_ends(self)
        if self.waiting:
            waiting, self.waiting = self.waiting, []
            for entry in waiting:
                if self.number & 1 != entry[1]:
                    self.acquire(entry[0])
                    entry[0].result = True
                    self.woken[entry[0]] = entry[2]
                else:
                    self.waiting.append(entry)
            spinning = machine.scheduler.spinning
            for thread in self.woken:
                if thread in spinning:  # it was in try_wait
                    spinning.remove(thread)
            machine.scheduler.wake(list(self.woken))

    # waiting --------------------------------------------------------------------------------------

    def acquire(self, thread):
        """`thread` knows that the last phase has ended."""
        if not self.machine.checked or self.released is None:
            return
        known = self.joined.get(id(thread.seen))
        if known is None:
            known = self.joined[id(thread.seen)] = (
                thread.seen,
                list(map(max, thread.seen, self.released)),
            )
        thread.seen = known[1]
        if self.acquired:
            self.machine.access.acquire(self.acquired, thread.block)
        self.last.learn(thread)


class Wait:
    """The event that a thread waits for, in words when they are needed."""

    __slots__ = ("barrier", "parity")

    def __init__(self, barrier, parity):
        self.barrier, self.parity = barrier, parity

    def __str__(self):
        return f"{self.barrier}, waited for with parity {self.parity}: {self.barrier.state()}"


# What the twins call ------------------------------------------------------------------------------


def locate(machine, address, doing):
    """(memory, offset) of an mbarrier's address; None after a fault."""
    address = int(address) & 0xFFFFFFFF
    found = machine.shared_memory(address)
    if found is None or found[1] + 8 > found[0].size:
        machine.report(
            "bounds",
            f"{doing} an mbarrier at the shared address {address:#x}, which is outside of the "
            "block's shared memory",
            machine.site_here(),
        )
        return None
    if address % 8:
        machine.report(
            "alignment",
            f"{doing} an mbarrier at the shared address {address:#x}, which is not a multiple of 8",
            machine.site_here(),
        )
        return None
    return found


def find(machine, address, doing, block=None):
    """The mbarrier at an address of the shared memory of a block (the current one); None after a
    fault."""
    found = machine.shared_memory(int(address) & 0xFFFFFFFF, block)
    barrier = found and found[0].barriers.get(found[1])
    if barrier is None:
        if locate(machine, address, doing) is not None:
            machine.report(
                "mbarrier",
                f"{doing} the mbarrier {_name(machine, found)}, which is not initialised",
                machine.site_here(),
            )
        return None
    if machine.checked:
        by, clock = barrier.made
        thread = machine.thread
        if by is not thread and not machine.access._ordered((by, clock)):
            machine.report(
                "mbarrier",
                f"{doing} {barrier}, which thread {by.index} initialises with no barrier between",
                machine.site_here(),
                others=[("initialised at", machine.place(barrier.site, by))],
            )
    return barrier


def _name(machine, found):
    memory, offset = found
    return (
        machine.access.say(memory, offset)
        if machine.checked
        else f"at shared address {memory.address + offset:#x}"
    )


def initialise(machine, address, count):
    """`mbarrier.init`"""
    if machine.cc < (8, 0):
        raise Unsupported(
            f"an mbarrier needs compute capability 8.0, not {machine.cc[0]}.{machine.cc[1]}"
        )
    found, count = locate(machine, address, "initialises"), int(count)
    if found is None:
        return
    memory, offset = found
    site = machine.site_here()
    if not 1 <= count <= MAX_COUNT:
        machine.report(
            "mbarrier",
            f"initialises an mbarrier with the count {count}: it must be 1 … {MAX_COUNT}",
            site,
        )
        return
    old = memory.barriers.get(offset)
    if old is not None:
        machine.report(
            "mbarrier",
            f"initialises {old} again, with no mbarrier_inval between",
            site,
            others=[("first at", machine.place(old.site, old.made[0]))],
        )
        return
    if machine.checked:
        if memory.busy:
            machine.asynchronous.touched(memory, offset, 8, site, True)
        if machine.access.races:
            machine.access.check_writes(memory, offset, 8, site, 2)
        memory.mark_written(offset, offset + 8)
    barrier = memory.barriers[offset] = Barrier(machine, memory, offset, count, site)
    if machine.film is not None:
        machine.film.mbarrier(barrier)


def invalidate(machine, address):
    """`mbarrier.inval`: its bytes may be used for something else."""
    barrier = find(machine, address, "invalidates")
    if barrier is not None:
        if barrier.waiting:
            machine.report(
                "mbarrier", f"invalidates {barrier}, on which threads wait", machine.site_here()
            )
        del barrier.memory.barriers[barrier.offset]


def expect_tx(machine, address, count):
    """`mbarrier.expect_tx`"""
    barrier = find(machine, address, "expects bytes at")
    if barrier is not None:
        barrier.expect(int(count), machine.site_here())


def arrive(machine, address, count=1, expected=0, block=None):
    """`mbarrier.arrive` of `count`, after an `expect_tx` of `expected` bytes; in the memory of a
    block (this one)."""
    barrier = find(machine, address, "arrives at", block)
    if barrier is not None:
        site, count, expected = machine.site_here(), int(count), int(expected)
        if not 1 <= count <= MAX_COUNT:
            machine.report(
                "mbarrier",
                f"arrives at {barrier} with the count {count}: it must be 1 … {MAX_COUNT}",
                site,
            )
            return
        if expected:
            barrier.expect(expected, site)
        barrier.arrive(count, site)


def _ready(machine, barrier, parity):
    """Whether a wait for `parity` is over; the current thread then knows what the phase brought."""
    if parity not in (0, 1):
        machine.report(
            "mbarrier",
            f"waits at {barrier} for the parity {parity}: it must be 0 or 1",
            machine.site_here(),
        )
    if barrier.number & 1 == parity & 1:
        return False
    barrier.acquire(machine.thread)
    if machine.film is not None:
        machine.film.mbarrier_wait(barrier, parity)
    return True


def wait(machine, address, parity):
    """A loop of `mbarrier.try_wait.parity` until the phase of this parity is over."""
    barrier, parity = find(machine, address, "waits at"), int(parity)
    if barrier is None or _ready(machine, barrier, parity):
        return None
    thread, frame = machine.thread, machine._frame_here()
    barrier.waiting.append((thread, parity & 1, machine.site_of(frame)))

    def continues(result):
        barrier.woken.pop(thread, None)
        if machine.film is not None:
            machine.film.mbarrier_wait(barrier, parity)

    return machine.scheduler.pause("mbarrier", Wait(barrier, parity), frame, continues)


def try_wait(machine, address, parity):
    """`mbarrier.try_wait.parity` and `test_wait`: whether the phase of this parity is over.

    A thread gets "no" only after all others have run.
    """
    barrier, parity = find(machine, address, "waits at"), int(parity)
    if barrier is None or _ready(machine, barrier, parity):
        return True
    thread, scheduler = machine.thread, machine.scheduler
    entry = (thread, parity & 1, machine.site_here())
    barrier.waiting.append(entry)
    thread.result = False
    scheduler.spinning.append(thread)

    def continues(result):
        barrier.woken.pop(thread, None)
        if entry in barrier.waiting:
            barrier.waiting.remove(entry)
        if result and machine.film is not None:
            machine.film.mbarrier_wait(barrier, parity)
        return result

    return scheduler.pause("mbarrier", Wait(barrier, parity), machine._frame_here(), continues)


# Named barriers -----------------------------------------------------------------------------------


class Named:
    """One of the block's numbered barriers: its waiting threads, and those that arrived without
    waiting."""

    def __init__(self, number):
        self.number, self.count, self.waiting, self.passing, self.site = number, 0, [], [], None

    def __str__(self):
        come = len(self.waiting) + len(self.passing)
        return f"barrier {self.number}, to which {come} of {self.count} threads have come"


def named(machine, number, count, waits):
    """`bar.sync` (waits) or `bar.arrive` of the current thread at barrier `number`, for `count`
    threads."""
    number, count, site = int(number), int(count), machine.site_here()
    thread = machine.thread
    if not 0 <= number < NAMED_BARRIERS:
        machine.report(
            "error", f"barrier {number}: a block has the barriers 0 … {NAMED_BARRIERS - 1}", site
        )
        return
    if count % WARP or not WARP <= count <= -(-len(thread.block.threads) // WARP) * WARP:
        machine.report(
            "error",
            f"barrier {number} for {count} threads: it must be a multiple of {WARP}, and no more "
            "than the block has",
            site,
        )
        return
    barriers = thread.block.state.setdefault("named barriers", {})
    barrier = barriers.get(number)
    if barrier is None:
        barrier = barriers[number] = Named(number)
    if not barrier.waiting and not barrier.passing:
        barrier.count, barrier.site = count, site
    elif barrier.count != count:
        machine.report(
            "divergence",
            f"comes to {barrier}, but for {count} threads",
            site,
            others=[("named first at", machine.place(barrier.site))],
        )
    (barrier.waiting if waits else barrier.passing).append((thread, thread.clock, thread.seen))
    if not waits and machine.checked:
        thread.tick(thread.seen)
    if machine.film is not None:
        machine.film.named_arrival(barrier, thread)
    complete = len(barrier.waiting) + len(barrier.passing) >= barrier.count
    if complete:
        _release(machine, barrier)
    if waits:
        machine.scheduler.pause("barrier", barrier, machine._frame_here())


def _release(machine, barrier):
    """All have arrived: the waiting threads have seen all earlier work of each of them."""
    waiting, passing, barrier.waiting, barrier.passing = barrier.waiting, barrier.passing, [], []
    threads = [t for t, *_ in waiting]
    if machine.checked and threads:
        lists = {id(seen): seen for _, _, seen in waiting + passing}
        seen = (
            list(map(max, zip(*lists.values(), strict=True)))
            if len(lists) > 1
            else list(waiting[0][2])
        )
        for thread, clock, _ in waiting + passing:
            seen[thread.tid] = max(seen[thread.tid], clock)
        for thread in threads:
            thread.tick(seen)
    if machine.film is not None:
        machine.film.named_release(barrier, threads)
    machine.scheduler.wake(threads)
