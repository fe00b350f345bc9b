"""Records launches for a film: what each thread did, line by line, as one page that a browser
shows.

    film = emulator.trace(kernel, grid, block, x, y)              # or: with emulator.trace() as film: kernel[…](…)
    film.save("film.html")                                        # in a notebook, `film` as the last line shows it

The page has the source with the current line, warps as rows over steps, memory coloured by last
writer, the variables of a thread, barriers, copies and matrix instructions in flight, and each race
as an arrow between its two accesses.

WHAT IS RECORDED. rewrite.py adds calls to a kernel's statements: `__step` at each line, `__let`
after each assignment. The parts of the emulator report accesses, barriers, copies and faults. Each
thread has a log of these in its own order:

    a number                                    a line begins: its site
    ("call", site), ("return",)                 of a device function, also of the kernel itself
    ("loop", site), ("turn",), ("end",)         around a loop; at each of its iterations
    ("read", memory, offset, size, site)        of global and shared memory
    ["write", memory, offset, size, site, bytes]
    ("let", name, value)                        a variable has a new value
    ("signal", token), ("wait", token, text)    the thread arrives; it waits until all signals of a token have come
    ("expect", token, bytes)                    of an mbarrier's phase
    ("start", flight), ("land", flight)         an asynchronous operation begins, is complete
    ("product", name)                           an mma of the warp
    ("fault", number), ("other", number)        the place of a fault, and of the access with which it races

replay.py makes warps and steps of the logs, reel.py a page of these.
"""

from dataclasses import dataclass, field

import numpy as np

from .arrays import CheckedArray
from .memory import CONSTANT, LOCAL
from .reel import page, save, show
from .replay import Replay
from .still import still

WARPS = 32  # that a film shows; further blocks run without being recorded
LINES = 4 << 20  # of all threads together, after which recording stops
SMALL = 1 << 16  # bytes of an array whose contents before the launch are shown
KEPT = 256  # matrix products that are kept for pictures.py
PARTS = 8  # elements of a tuple that are shown as variables
NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)
CALL_ENDS, TURN, LOOP_ENDS = ("return",), ("turn",), ("end",)


@dataclass
class WarpProduct:
    """A matrix product of a warp. name: of the instruction; registers: arrays (32, registers) of A,
    B, C and D"""

    name: str
    block: tuple
    warp: int
    place: str
    registers: tuple


class Token:
    """What threads wait for: it comes true when `needed` signals have come, by threads and by
    flights.

    barrier, phase: of an mbarrier; name: of a barrier of threads, where a film draws one; over:
    whether it came true
    """

    __slots__ = ("needed", "barrier", "phase", "name", "over", "got", "at")

    def __init__(self, barrier=None, phase=0, name=None):
        self.needed, self.barrier, self.phase, self.name, self.over = 0, barrier, phase, name, False
        # of replay.py: signals so far, and the step at which it came true
        self.got, self.at = 0, None


class Flight:
    """An asynchronous operation. kind: "load", "store", "cp.async", "wgmma"; text: in words

    thread, site: where it is issued; reads, writes: [(memory, offset, bytes)] of shared memory;
    data: bytes that have
    come; engine: whether it ends by itself (a TMA load) or where a thread waits for it; token: that
    counts its bytes
    """

    __slots__ = (
        "kind",
        "text",
        "thread",
        "site",
        "reads",
        "writes",
        "data",
        "engine",
        "token",
        "size",
        "detail",
        "start",
        "end",
        "number",
    )

    def __init__(self, kind, text, thread, site, engine=False):
        self.kind, self.text, self.thread, self.site, self.engine = kind, text, thread, site, engine
        self.reads, self.writes, self.data, self.token, self.size = (), (), None, None, 0
        self.detail, self.start, self.end, self.number = {}, None, None, 0


class Nothing:
    """The log of a thread that is not recorded."""

    __slots__ = ()

    def append(self, entry):
        pass


NOTHING = Nothing()


@dataclass
class Shot:
    """One launch. arrays: {id of its memory: [CheckedArray]}; barriers: [(block, name, count)] of
    mbarriers"""

    kernel: str
    grid: tuple
    block: tuple
    entry: object = None
    logs: dict = field(default_factory=dict)  # thread -> its log, of block after block
    blocks: list = field(default_factory=list)
    arrays: dict = field(default_factory=dict)
    arguments: list = field(default_factory=list)
    contents: dict = field(default_factory=dict)  # id of a memory -> its bytes before the launch
    barriers: list = field(default_factory=list)
    faults: list = field(default_factory=list)
    flights: list = field(default_factory=list)
    count: int = 0  # blocks of the launch
    cut: bool = False  # whether recording stopped before the end


class Film:
    """Records the launches of an emulator; `save` writes the page, and a notebook shows it.

    warps: how many are recorded: whole blocks, in the order in which they start, at least one block
    launches: a `Shot` of each launch; copies, products: TMA's copies and the first products of
    warps, for pictures.py
    """

    def __init__(self, warps=WARPS):
        self.warps, self.launches, self.copies, self.products = warps, [], [], []
        self.machine, self._shot, self._unread, self._left = None, None, None, LINES
        self._tokens, self._flights, self._numbers, self._last = {}, {}, {}, {}

    # results --------------------------------------------------------------------------------------

    @property
    def faults(self):
        """The faults of all launches."""
        return [fault for shot in self.launches for fault in shot.faults]

    def html(self):
        """The page as text."""
        return page(self.launches)

    def save(self, path):
        """Write the page; its name must end in .html."""
        save(path, self.launches)

    def _repr_html_(self):
        return show(self.launches)

    def steps(self, launch=-1):
        """How many steps a launch takes: lines of its warps, which step together and wait for each
        other."""
        return Replay(self.launches[launch]).length

    def svg(self, launch=-1, blocks=1, width=1000):
        """The warps over the steps as the text of an SVG file. blocks: how many of the launch;
        width: pixels"""
        return still(Replay(self.launches[launch]), blocks, width).svg()

    # a launch -------------------------------------------------------------------------------------

    def launch(self, machine, grid, block):
        self.machine = machine
        self._shot = Shot(
            machine.kernel, grid, block, machine.entry, count=grid[0] * grid[1] * grid[2]
        )
        self._shot.arguments = list(machine._arguments)
        for array in machine._arguments:
            self.array(array)
            memory = array.memory
            if memory.size <= SMALL and (memory.valid is None or all(memory.valid[: memory.size])):
                self._shot.contents[id(memory)] = memory.bytes.tobytes()
        self.launches.append(self._shot)
        self._tokens, self._flights, self._numbers, self._last, self._left = {}, {}, {}, {}, LINES

    def block_starts(self, block):
        shot = self._shot
        size = sum(-(-len(b.threads) // 32) for b in block.cluster.blocks) or 1
        here = sum(-(-len(b.threads) // 32) for b in shot.blocks if b.cluster is not block.cluster)
        filmed = (
            not shot.blocks
            or here + size <= self.warps
            or any(b.cluster is block.cluster for b in shot.blocks)
        )
        if filmed and not shot.cut:
            shot.blocks.append(block)
        for thread in block.threads:
            thread.log = [] if filmed and not shot.cut else NOTHING
            if thread.log is not NOTHING:
                shot.logs[thread] = thread.log

    def abandons(self, blocks):
        """The threads of these blocks that have not ended never will: what they wait for does not
        come."""
        never = Token()
        never.needed = 1
        for thread in (thread for block in blocks for thread in block.threads if not thread.done):
            if thread.wait is not None:
                thread.log.append(("wait", never, _waits_for(thread.wait)))
            thread.log = NOTHING

    def launch_ends(self):
        self._flush()
        self._shot = None

    def _stop(self):
        self._shot.cut = True
        for block in self.machine.scheduler.blocks:
            for thread in block.threads:
                thread.log = NOTHING

    # lines and variables --------------------------------------------------------------------------

    def helpers(self, machine):
        """The names that filmed code calls."""

        def step(site):
            machine.thread.log.append(site)
            self._left -= 1
            if self._left < 0 and not self._shot.cut:
                self._stop()
            return True

        def iterate(site):
            machine.thread.log.append(TURN)
            return step(site)

        def let(name, value):
            if isinstance(value, NUMBERS):
                machine.thread.log.append(("let", name, value))
            elif isinstance(value, tuple):
                for k, part in enumerate(value[:PARTS]):
                    if isinstance(part, NUMBERS):
                        machine.thread.log.append(("let", f"{name}[{k}]", part))

        return {
            "__step": step,
            "__iterate": iterate,
            "__let": let,
            "__call": lambda site: machine.thread.log.append(("call", site)),
            "__return": lambda: machine.thread.log.append(CALL_ENDS),
            "__loop": lambda site: machine.thread.log.append(("loop", site)),
            "__unloop": lambda: machine.thread.log.append(LOOP_ENDS),
        }

    # memory ---------------------------------------------------------------------------------------

    def array(self, array):
        """An array that the kernel sees."""
        if array.__class__ is CheckedArray and (
            array.memory.space is not LOCAL or self.machine.thread.log is not NOTHING
        ):
            self._shot.arrays.setdefault(id(array.memory), []).append(array)

    def access(self, memory, offset, size, site, writes, step=0):
        """The current thread reads or writes bytes; those that it writes are looked up at the next
        call."""
        self._flush()
        log = self.machine.thread.log
        if log is NOTHING or memory.space is CONSTANT:
            return
        if writes:
            self._unread = entry = ["write", memory, int(offset), size, site, None]
            log.append(entry)
        elif memory.space is not LOCAL:
            log.append(("read", memory, int(offset), size, site))

    def _flush(self):
        entry = self._unread
        if entry is not None:
            self._unread = None
            entry[5] = entry[1].bytes[entry[2] : entry[2] + entry[3]].tobytes()

    # meeting --------------------------------------------------------------------------------------

    def meets(self, threads, name=None):
        """These threads continue together. name: of a barrier; None: an operation of a warp"""
        token = Token(name=name)
        token.over = True
        for thread in threads:
            self._signal(thread, token)
            thread.log.append(("wait", token, name))

    def _signal(self, thread, token):
        if thread.log is not NOTHING:
            token.needed += 1
            thread.log.append(("signal", token))

    def named_arrival(self, barrier, thread):
        """A thread comes to a numbered barrier of its block."""
        token = self._tokens.get(barrier)
        if token is None:
            token = self._tokens[barrier] = Token(name=f"barrier {barrier.number}")
        self._signal(thread, token)

    def named_release(self, barrier, threads):
        token = self._tokens.pop(barrier)
        token.over = True
        for thread in threads:
            thread.log.append(("wait", token, token.name))

    # mbarriers ------------------------------------------------------------------------------------

    def mbarrier(self, barrier):
        """An mbarrier is initialised."""
        block = barrier.block
        if block in self._shot.blocks:
            self._numbers[barrier] = len(self._shot.barriers)
            self._shot.barriers.append((block, barrier.name, barrier.count))
        self._tokens[barrier] = Token(self._numbers.get(barrier), 0)

    def expect(self, barrier, count):
        self.machine.thread.log.append(("expect", self._tokens[barrier], count))

    def arrive(self, barrier, count):
        token = self._tokens[barrier]
        for _ in range(count):
            self._signal(self.machine.thread, token)

    def phase_ends(self, barrier):
        token = self._last[barrier] = self._tokens[barrier]
        token.over = True
        self._tokens[barrier] = Token(token.barrier, token.phase + 1)

    def mbarrier_wait(self, barrier, parity):
        """The current thread has got through a wait for a phase."""
        token = self._last.get(barrier)
        if token is not None:
            self.machine.thread.log.append(("wait", token, f"{barrier.name}, parity {parity}"))

    # asynchronous operations ----------------------------------------------------------------------

    def starts(self, copy, flight):
        """An operation begins. copy: what the emulator calls it, by which `lands` finds it"""
        if flight.thread.log is NOTHING:
            return
        flight.number = len(self._shot.flights)
        self._shot.flights.append(flight)
        self._flights[copy] = flight
        flight.thread.log.append(("start", flight))

    def load_starts(self, copy, name):
        """A TMA load, an instance of tma.Load, of a tensor that the kernel knows by this name."""
        self._copy_starts(copy, Flight("load", name, copy.thread, copy.site, True)).writes = [
            (copy.memory, copy.offset, copy.tensor.span)
        ]

    def group_starts(self, about, copies):
        """A thread commits a group of cp.async."""
        self._flush()
        flight = Flight(
            "cp.async", f"{len(copies)} copies of each lane", copies[0].thread, copies[0].site
        )
        flight.writes = [(copy.memory, copy.offset, copy.size) for copy in copies]
        self.starts(about, flight)

    def store_starts(self, copy, name):
        self._copy_starts(copy, Flight("store", name, copy.thread, copy.site)).reads = [
            (copy.memory, copy.offset, copy.tensor.span)
        ]

    def _copy_starts(self, copy, flight):
        tensor = copy.tensor
        self.copies.append(copy)
        flight.detail = {
            "tensor": flight.text,
            "dims": tensor.dims,
            "box": tensor.box,
            "at": copy.at,
            "swizzle": tensor.swizzle,
        }
        flight.text += str(list(copy.at))
        self.starts(copy, flight)
        return flight

    def load_lands(self, copy, barrier):
        """A TMA load has come; the phase of its mbarrier counts its bytes."""
        self._flush()
        flight = self._flights.pop(copy, None)
        if flight is not None:
            ((memory, offset, size),) = flight.writes
            flight.data = memory.bytes[offset : offset + size].tobytes()
            flight.token, flight.size = self._tokens[barrier], copy.tensor.bytes
            flight.token.needed += 1

    def lands(self, copy):
        """An operation ends because the current thread waits for it, or ends."""
        flight = self._flights.pop(copy, None)
        if flight is not None:
            self.machine.thread.log.append(("land", flight))

    def wgmma_starts(self, operation, text):
        """The first thread of a warpgroup issues a wgmma."""
        flight = Flight("wgmma", text, operation.thread, operation.site)
        operands = [o for o in (operation.a, operation.b) if o is not None and o.pieces is not None]
        flight.reads = [(o.memory, s, o.pieces.length) for o in operands for s in o.pieces.starts]
        flight.detail = {"n": operation.n, "group": operation.thread.tid // 128}
        self.starts(operation, flight)
        token = self._tokens[operation] = Token()
        token.over = True

    def wgmma_issued(self, operation):
        """The current thread has issued its part."""
        self._signal(self.machine.thread, self._tokens[operation])

    def wgmma_waited(self, operations, places):
        """The current thread has waited for these. places: [(array, accumulators)] that now have
        their results"""
        log = self.machine.thread.log
        for operation in operations:
            log.append(("wait", self._tokens[operation], None))
            self.lands(operation)
        if log is NOTHING:
            return
        for array, count in places:
            start = array.offset >> 2
            for k, value in enumerate(array.flat[start : start + count].tolist()):
                log.append(("let", f"{array.name}[{k}]", value))

    def product(self, name, registers, frame):
        """A warp has done an mma. registers: of A, B, C and D, arrays (32, registers)"""
        thread = self.machine.thread
        thread.log.append(("product", name))
        if len(self.products) < KEPT:
            place = self.machine.place(self.machine.site_of(frame))
            self.products.append(
                WarpProduct(
                    name, thread.block.index, thread.warp, f"{place.file}:{place.line}", registers
                )
            )

    # faults ---------------------------------------------------------------------------------------

    def fault(self, fault, thread):
        """A fault is reported for the first time, of a thread or of the current one."""
        if self._shot is not None:
            self._shot.faults.append(fault)
            if thread is not None:
                thread.log.append(("fault", len(self._shot.faults) - 1))

    def race(self, memory, offset, thread, site):
        """The fault that was reported last is a race with this access of another thread."""
        log = thread.log
        for k in range(len(log) - 1, -1, -1) if log is not NOTHING else ():
            entry = log[k]
            if (
                entry.__class__ is not int
                and entry[0] in ("read", "write")
                and entry[1] is memory
                and (entry[4] == site)
                and entry[2] <= offset < entry[2] + entry[3]
            ):
                log.insert(k + 1, ("other", len(self._shot.faults) - 1))
                break


def _waits_for(wait):
    """What a thread waits for that never continues, in words."""
    kind, detail, _ = wait
    if kind == "warp operation":
        return detail[0]
    return f"{detail}" if detail else "a loop"
