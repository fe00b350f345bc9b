"""The timeline of a launch: barriers, waits, copies and matrix instructions.

    tracer = emulator.trace(kernel, grid, block, x, y)            # or: with emulator.trace() as tracer: kernel[…](…)
    print(tracer.timeline())                                      # text
    tracer.save("trace.svg")                                      # a picture; .png also; .json for chrome://tracing

LOGICAL TIME
    Threads run one after another here, so the wall clock says nothing. Each thread has a separate clock instead: a
    load, a store and an arithmetic operation take one tick; a thread that waits continues at the time of what it waited
    for (Lamport 1978, "Time, Clocks, and the Ordering of Events in a Distributed System"). A warp's time is that of its
    last lane. Blocks begin at 0. An asynchronous copy arrives as late as the rules allow: where a wait covers it, or
    when no thread can continue without it. So a timeline shows the order that the program enforces, not how long a GPU
    would take.

EVENTS
    The parts of the emulator report `machine.tracer.event(kind, text, thread, site, about)`. `about` is what it happens
    to (an mbarrier, a copy); what is released at one time is acquired no earlier. Kinds with a meaning:
        "copy issued" … "copy completed"     a bar in TMA's row
        "wgmma issued" … "wgmma completed"   a bar in the tensor cores' row
        "wait", "barrier"                    a bar in the row of the warp that waits
        "phase"                              a mark in the row of the mbarriers: a phase of one has ended
    Every other kind is a mark in its warp's row, or in TMA's where `thread` is None. timeline.py shows them.
"""
import contextlib
import os
from collections import defaultdict
from dataclasses import dataclass

import greenlet

from .host import device
from .launch import Emulator
from .rewrite import SITES
from .timeline import PHASES, TENSOR, TMA, Drawing, Event, as_chrome, as_text, order
from .writing import WRITERS

BARS = {"copy completed": ("copy", "copy issued", TMA), "wgmma completed": ("wgmma", "wgmma issued", TENSOR)}
STARTS = {start: kind for kind, start, _ in BARS.values()}
KEPT = 256  # matrix products that a tracer keeps


@dataclass
class Product:
    """A matrix product of a warp. name: of the instruction; registers: arrays (32, registers) of A, B, C and D"""

    name: str
    block: tuple
    warp: int
    place: str
    registers: tuple


class Tracer:
    """Collects the events of the launches of one emulator.

    copies: TMA's tensor copies as the emulator keeps them (tma.py), for pictures.py
    products: the first `KEPT` matrix products of warps (mma), with their registers, for pictures.py
    """

    def __init__(self):
        self.machine = None
        self.launches = []  # (kernel, grid, block)
        self.events_of_threads, self.ends, self.copies, self.products = [], {}, [], []
        self.clock = defaultdict(int)  # thread -> its time
        self._released = defaultdict(int)  # thing -> when it was last released; block -> its engines' last event
        self._phases = {}  # mbarrier -> time when its last phase ended
        self._open = defaultdict(list)  # (kind, about) -> [(start, text, block, warp, site)] of what is under way
        self._waiting = {}  # thread -> (start, kind, detail, site)
        self._blocks = []

    # hooks of the emulator --------------------------------------------------------------------------------------------

    def launch(self, machine, grid, block):
        self.machine = machine
        self.launches.append((machine.kernel, grid, block))
        self._blocks = []

    def timed(self, machine, function):
        """`function`, which takes one tick of the current thread's time."""
        clock = self.clock

        def call(*arguments):
            clock[machine.thread] += 1
            return function(*arguments)
        return call

    def barrier(self, block, name, threads):
        """These threads have met at a barrier, and continue."""
        clock = self.clock
        now = max(clock[t] for t in threads) + 1
        for thread in threads:
            site = self.machine.site_of(thread.wait[2]) if thread.wait else None
            self._note("barrier", name, clock[thread], now, thread, site)
            clock[thread] = now

    def waits(self, thread, kind, detail, frame):
        """A thread begins to wait for a condition."""
        self._waiting[thread] = self.clock[thread], str(detail), self.machine.site_of(frame)

    def waited(self, thread, about=None):
        """A thread's condition has come true."""
        start, text, site = self._waiting.pop(thread)
        end = max(start, self._phases.get(about, 0) if about is not None else self._released[thread.block])
        self.clock[thread] = end
        self._note("wait", text, start, end, thread, site)

    def event(self, kind, text, thread=None, site=None, about=None):
        """Something has happened: to a thread, or in TMA (None)."""
        clock, block = self.clock, self._block_of(thread, about)
        if kind == "phase":  # ended by the last arrival, or by the copy that has just come
            now = max(self._released[about], 0 if thread else self._released[block])
            self._phases[about] = now
            self._add(kind, text, now, now, block, PHASES, None, site)
            return
        if thread is not None:
            clock[thread] += 1
            now = clock[thread]
        elif greenlet.getcurrent() is self.machine.scheduler.hub:  # as late as possible: all wait
            now = max([self._released[block], *(clock[t] for t in block.threads if not t.done)])
        else:
            now = clock[self.machine.thread]
        if kind in BARS:
            name, start, row = BARS[kind]
            begun = self._open.get((start, text if about is None else about))
            began, text, site = begun.pop(0) if begun else (now, text, site)
            now = max(now, began + 1)
            self._add(name, text, began, now, block, row, None, site)
        if thread is None:
            self._released[block] = max(self._released[block], now)
        if about is not None:
            self._released[about] = max(self._released[about], now)
        if kind in STARTS:
            if hasattr(about, "tensor"):
                self.copies.append(about)
            self._open[kind, text if about is None else about].append((now, text, site))
            self._note(kind, text, now, now, thread, site, block)
        elif kind not in BARS:
            self._note(kind, text, now, now, thread, site, block)

    def product(self, name, registers, frame):
        """A warp has done an mma. registers: of A, B, C and D, arrays (32, registers)"""
        if len(self.products) < KEPT:
            thread = self.machine.thread
            self.products.append(Product(name, thread.block.index, thread.warp, self._say(self.machine.site_of(frame)),
                                         registers))

    @staticmethod
    def _say(site):
        """ "file:line" of a site, "" without one."""
        return "" if site is None else f"{os.path.basename(SITES.places[site][1])}:{SITES.places[site][2]}"

    def _block_of(self, thread, about):
        if thread is None:
            thread = getattr(about, "thread", None)
        return self.machine.block if thread is None else thread.block

    def block_ends(self, block):
        """A block has ended: when its warps did."""
        key = len(self.launches) - 1, block.index
        self._seen(block)
        for thread in block.threads:
            warps = self.ends[key]
            warps[thread.warp] = max(warps.get(thread.warp, 0), self.clock.pop(thread, 0))

    def launch_ends(self):
        """A launch has ended, or was abandoned."""
        for block in self._blocks:
            if any(t in self.clock for t in block.threads):
                self.block_ends(block)
        for thread, (start, text, site) in self._waiting.items():
            self._note("wait", f"{text}, for ever", start, start, thread, site)
        for (kind, _), begun in self._open.items():
            for began, text, site in begun:
                name, row = next((n, r) for n, s, r in BARS.values() if s == kind)
                self._add(name, f"{text}, never completed", began, began, self._blocks[-1] if self._blocks else None,
                          row, None, site)
        self._waiting, self._blocks = {}, []
        self._open.clear()
        self._released.clear()
        self._phases.clear()
        self.clock.clear()

    def _seen(self, block):
        key = len(self.launches) - 1, block.index
        if key not in self.ends:
            self.ends[key] = {}
            self._blocks.append(block)

    def _note(self, kind, text, start, end, thread, site, block=None):
        if thread is None:
            self._add(kind, text, start, end, block, TMA, None, site)
        else:
            self._add(kind, text, start, end, thread.block, thread.warp, thread.lane, site)

    def _add(self, kind, text, start, end, block, row, lane, site):
        self._seen(block)
        self.events_of_threads.append((kind, text, start, end, len(self.launches) - 1, block.index, row, lane, site))

    # results ----------------------------------------------------------------------------------------------------------

    @property
    def events(self):
        """`Event`s by time; what the lanes of a warp did together is one event."""
        counts, groups = defaultdict(int), {}
        for kind, text, start, end, launch, block, row, lane, site in self.events_of_threads:
            key = kind, text, launch, block, row, site
            mine = (*key, lane)
            if lane is None:  # an engine does one thing at a time, but lanes start theirs together
                key = (*key, start, end)
                mine = key
            counts[mine] += 1
            groups.setdefault((*key, counts[mine] if lane is not None else 0), []).append((start, end))
        events = []
        for (kind, text, launch, block, row, site, *_), times in groups.items():
            name = f"warp {row}" if isinstance(row, int) else row
            if name in (TMA, TENSOR, PHASES) and len(times) > 1:
                text = f"{len(times)} × {text}"
            events.append(Event(kind, text, max(t[0] for t in times), max(t[1] for t in times), launch, block, name,
                                len(times) if isinstance(row, int) else 0, self._say(site)))
        return sorted(events, key=order)

    def of(self, kind=None, row=None, block=None, launch=None):
        """The events of a kind, a row, a block, a launch."""
        return [e for e in self.events if (kind is None or e.kind == kind) and (row is None or e.row == row)
                and (block is None or e.block == tuple(block)) and (launch is None or e.launch == launch)]

    def timeline(self, block=None):
        """The events as text, block by block; block: one block's index, None: all."""
        return as_text(self.of(block=block), self.launches)

    def chrome(self):
        """The events as the text of a JSON file for chrome://tracing or ui.perfetto.dev; one tick is one µs."""
        return as_chrome(self.events, self.launches)

    def save(self, path, **options):
        """Write .json (Chrome trace), .txt, .svg or .png, by the name's suffix; options are those of `picture`."""
        ending = os.path.splitext(str(path))[1]
        if ending in (".json", ".txt"):
            WRITERS["text"](path, self.chrome() if ending == ".json" else self.timeline() + "\n", "the trace")
        else:
            self.picture(**options).save(path)

    def svg(self, **options):
        """The timeline as the text of an SVG file; options are those of `picture`."""
        return self.picture(**options).svg()

    def picture(self, launch=-1, blocks=2, width=1280):
        """A `Picture`: one row a warp, one for TMA, one for the tensor cores.

        launch: which launch; blocks: how many blocks of it, or a list of block indices; width: pixels
        """
        launch %= len(self.launches)
        all_blocks = sorted((b for n, b in self.ends if n == launch), key=lambda b: b[::-1])
        shown = all_blocks[:blocks] if isinstance(blocks, int) else [tuple(b) for b in blocks]
        return Drawing(self, launch, shown, len(all_blocks), width).picture


def trace(kernel=None, grid=None, block=None, *args, shared=0, cluster=1, **options):
    """The `Tracer` of one run of a kernel; without a kernel a context that gives the tracer of all launches inside.

    options: those of `emulator.device`; shared: bytes of dynamic shared memory
    """
    if kernel is None:
        return _tracing(options)
    tracer = Tracer()
    Emulator(tracer=tracer, **options).launch(kernel, grid, block, *args, shared=shared, cluster=cluster)
    return tracer


@contextlib.contextmanager
def _tracing(options):
    tracer = Tracer()
    with device(tracer=tracer, **options) as machine:
        tracer.machine = machine
        yield tracer
