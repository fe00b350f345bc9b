"""When things happen in a launch: barriers, waits, copies and matrix instructions on a timeline.

    tracer = emulator.trace(kernel, grid, block, x, y)            # or: with emulator.trace() as tracer: kernel[…](…)
    print(tracer.timeline())                                      # text
    tracer.save("trace.svg")                                      # a picture; .png also; .json for chrome://tracing

LOGICAL TIME
    Threads run one after another here, so the wall clock says nothing. Each thread has a clock of its own instead: a
    load, a store and an arithmetic operation take one tick; a thread that waits goes on at the time of what it waited
    for (Lamport 1978, "Time, Clocks, and the Ordering of Events in a Distributed System"). A warp's time is that of its
    last lane. Blocks begin at 0. An asynchronous copy arrives as late as the rules allow: where a wait covers it, or
    when nobody can go on without it. So a timeline shows the order that the program enforces, not how long a GPU would
    take.

EVENTS
    The parts of the emulator report `machine.tracer.event(kind, text, thread, site, about)`. `about` is what it happens
        to (an mbarrier, a copy); what is released at one time is acquired no earlier. Kinds with a meaning: "copy
        issued" … "copy completed"     a bar in TMA's row
        "wgmma issued" … "wgmma completed"   a bar in the tensor cores' row
        "wait", "barrier"                    a bar in the row of the warp that waits
        "phase"                              a mark in the row of the mbarriers: a phase of one has ended
    Every other kind is a mark in its warp's row, or in TMA's where `thread` is None.
"""
import contextlib
import json
import os
from collections import defaultdict
from dataclasses import dataclass, replace

import greenlet

from ..files import write_text
from .drawing import COLOURS, GRID, INK, PALE, Picture
from .host import device
from .launch import Emulator
from .rewrite import SITES

TMA, TENSOR, PHASES = "TMA", "tensor cores", "mbarriers"
BARS = {"copy completed": ("copy", "copy issued", TMA), "wgmma completed": ("wgmma", "wgmma issued", TENSOR)}
STARTS = {start: kind for kind, start, _ in BARS.values()}
WAITS = ("barrier", "wait")
KEPT = 256  # matrix products that a tracer keeps


@dataclass
class Product:
    """A matrix product of a warp. name: of the instruction; registers: arrays (32, registers) of A, B, C and D"""

    name: str
    block: tuple
    warp: int
    place: str
    registers: tuple


@dataclass
class Event:
    """Something on the timeline, from `start` to `end` (the same for a mark).

    launch: number of the launch; block: its index; row: "warp 0", "TMA", "tensor cores" or "mbarriers"
    lanes: how many lanes of the warp took part; place: "file:line" or ""
    """

    kind: str
    text: str
    start: int
    end: int
    launch: int
    block: tuple
    row: str
    lanes: int = 0
    place: str = ""

    def __str__(self):
        when = f"{self.start:>7}" if self.start == self.end else f"{self.start:>7} … {self.end}"
        who = f"{self.row}" + (f" ({self.lanes} lane{'s' * (self.lanes > 1)})" if self.lanes else "")
        return f"{when:<17} {who:<27} {self.kind:<16} {self.text:<44} {self.place}".rstrip()


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
        """These threads have met at a barrier, and go on."""
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
        return sorted(events, key=lambda e: (e.launch, e.block[::-1], e.end, _rank(e), e.start, _number(e.row)))

    def of(self, kind=None, row=None, block=None, launch=None):
        """The events of a kind, a row, a block, a launch."""
        return [e for e in self.events if (kind is None or e.kind == kind) and (row is None or e.row == row)
                and (block is None or e.block == tuple(block)) and (launch is None or e.launch == launch)]

    def timeline(self, block=None):
        """The events as text, block by block; block: one block's index, None: all."""
        lines, last = [], None
        for event in _together(self.of(block=block)):
            head = event.launch, event.block
            if head != last:
                kernel, grid, size = self.launches[event.launch]
                lines += [""] * bool(lines) + [f"{kernel}, grid {grid}, block {size}: block {event.block}"]
                last = head
            lines.append(str(event))
        return "\n".join(lines)

    def chrome(self):
        """The events as the text of a JSON file for chrome://tracing or ui.perfetto.dev; one tick is one µs."""
        found, processes = [], {}

        def identify(launch, block):
            key = launch, block
            if key not in processes:
                processes[key] = len(processes) + 1
                found.append({"ph": "M", "name": "process_name", "pid": processes[key], "tid": 0,
                              "args": {"name": f"{self.launches[launch][0]} {launch}, block {block}"}})
            return processes[key]

        rows = {}
        for e in self.events:
            process = identify(e.launch, e.block)
            if (process, e.row) not in rows:
                number = int(e.row.split()[1]) + 1 if e.row.startswith("warp") else 1000 + len(rows)
                rows[process, e.row] = number
                found.append({"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": e.row}})
            common = {"name": f"{e.kind}: {e.text}", "cat": e.kind, "pid": process, "tid": rows[process, e.row],
                      "ts": e.start, "args": {"where": e.place, "lanes": e.lanes}}
            found.append({**common, "ph": "i", "s": "t"} if e.start == e.end else
                         {**common, "ph": "X", "dur": e.end - e.start})
        return json.dumps({"traceEvents": found, "displayTimeUnit": "ns"}, indent=0)

    def save(self, path, **options):
        """Write .json (Chrome trace), .txt, .svg or .png, by the name's suffix; options are those of `picture`."""
        ending = os.path.splitext(str(path))[1]
        if ending in (".json", ".txt"):
            write_text(path, self.chrome() if ending == ".json" else self.timeline() + "\n", "the trace")
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
        return _Drawing(self, launch, shown, len(all_blocks), width).picture


LEFT, RIGHT, TOP, ROW, GAP = 190, 24, 64, 26, 30  # pixels: labels, margins, height of a row, space between blocks
FILL = {"busy": "#dbe7f3", "barrier": "#f0b4a8", "wait": "#f6d9a0", "copy": "#a3d9a5", "wgmma": "#cdb4f0"}
EDGE = {"busy": "#9db7d0", "barrier": "#c0392b", "wait": "#c98a1b", "copy": "#3f8f46", "wgmma": "#7d55b5"}


class _Drawing:
    """Draws a timeline."""

    def __init__(self, tracer, launch, blocks, total, width):
        self.tracer = tracer
        events = {b: tracer.of(launch=launch, block=b) for b in blocks}
        ends = {b: tracer.ends[launch, b] for b in blocks}
        self.last = max([1, *(t for b in blocks for t in ends[b].values()),
                         *(e.end for b in blocks for e in events[b])])
        self.scale = (width - LEFT - RIGHT) / self.last
        layout = [(b, self._rows(events[b], ends[b])) for b in blocks]
        height = TOP + sum(sum(lanes for _, lanes in rows) * ROW + GAP for _, rows in layout) + 76
        self.picture = picture = Picture(width, height)
        kernel, grid, size = tracer.launches[launch]
        left_out = f", {len(blocks)} of {total} blocks" if len(blocks) < total else ""
        picture.text(16, 22, f"{kernel}   grid {grid}, block {size}{left_out}", 16, "start", bold=True)
        y = TOP
        self.marks = {}
        for block, rows in layout:
            y = self._block(block, rows, events[block], ends[block], y)
        self._axis(y)
        self._legend(y + 44)

    def x(self, time):
        return LEFT + time * self.scale

    def _rows(self, events, ends):
        """[(row, how many lanes of height it needs)]"""
        rows = [(f"warp {w}", 1) for w in sorted(ends)]
        for name in (PHASES, TMA, TENSOR):
            mine = [e for e in events if e.row == name]
            if mine:
                rows.append((name, max(self._stack(mine).values()) + 1))
        return rows

    @staticmethod
    def _stack(events):
        """{id of an event: line of the row}: bars that overlap are stacked."""
        free, place = [], {}
        for e in sorted(events, key=lambda e: (e.start, e.end)):
            k = next((k for k, until in enumerate(free) if until <= e.start), len(free))
            if k == len(free):
                free.append(0)
            free[k] = max(e.end, e.start + 1)
            place[id(e)] = k
        return place

    def _block(self, block, rows, events, ends, y):
        picture, top = self.picture, y
        picture.text(16, y - 12, f"block {block}", 13, "start", bold=True, colour=PALE)
        middle = {}
        for row, lanes in rows:
            mine = [e for e in events if e.row == row]
            picture.text(LEFT - 12, y + ROW * lanes / 2, row, 13, "end")
            picture.line(LEFT, y + ROW * lanes, self.x(self.last), y + ROW * lanes, GRID)
            middle[row] = y + ROW / 2
            if row.startswith("warp"):
                self._bar("busy", 0, ends[int(row.split()[1])], y, "runs")
                for e in mine:
                    if e.kind in WAITS:
                        self._bar(e.kind, e.start, e.end, y, str(e))
            else:
                place = self._stack(mine)
                for e in mine:
                    if e.start != e.end:
                        self._bar(e.kind, e.start, e.end, y + place[id(e)] * ROW, str(e), label=e.text)
            for e in mine:
                if e.kind not in WAITS and e.start == e.end:
                    self._mark(e, y + ROW / 2)
            y += ROW * lanes
        for time, text, touched in self._barriers(events):
            ys = [middle[row] for row in touched]
            picture.line(self.x(time), min(ys) - ROW / 2 + 2, self.x(time), max(ys) + ROW / 2 - 2, EDGE["barrier"], 2,
                         text)
        picture.line(LEFT, top, LEFT, y, INK)
        return y + GAP

    @staticmethod
    def _barriers(events):
        met = defaultdict(set)
        for e in events:
            if e.kind == "barrier":
                met[e.end, e.text, e.place].add(e.row)
        return [(time, f"{text} at {place}, time {time}", rows) for (time, text, place), rows in met.items()]

    def _bar(self, kind, start, end, y, tip, label=None):
        width = max((end - start) * self.scale, 1.5)
        self.picture.rectangle(self.x(start), y + 4, width, ROW - 8, FILL[kind], EDGE[kind], 1, tip=tip)
        if label:
            letters = int((width - 6) / 6.7)
            if letters >= 4:
                label = label if len(label) <= letters else label[:letters - 1] + "…"
                self.picture.text(self.x(start) + 4, y + ROW / 2, label, 10, "start")

    def _mark(self, event, y):
        colour = self.marks.setdefault(event.kind, _MARKS[len(self.marks) % len(_MARKS)])
        self.picture.circle(self.x(event.start), y, 4, colour, str(event))

    def _axis(self, y):
        picture = self.picture
        picture.line(LEFT, y - 14, self.x(self.last), y - 14, INK)
        step = _round_step(self.last / 10)
        for time in range(0, self.last + 1, step):
            picture.line(self.x(time), y - 14, self.x(time), y - 8, INK)
            picture.text(self.x(time), y + 2, f"{time:,}", 11)
        picture.text(16, y - 12, "logical time", 11, "start", colour=PALE)
        picture.text(16, y + 2, "(instructions)", 11, "start", colour=PALE)

    def _legend(self, y):
        x, picture = LEFT, self.picture
        kinds = {e[0] for e in self.tracer.events_of_threads}
        names = {"busy": "runs", "barrier": "waits at a barrier", "wait": "waits for an mbarrier",
                 "copy": "copy under way", "wgmma": "wgmma under way"}
        for kind, name in names.items():
            if kind == "busy" or kind in kinds:
                picture.rectangle(x, y - 7, 22, 14, FILL[kind], EDGE[kind])
                picture.text(x + 30, y, name, 12, "start")
                x += 52 + 7.2 * len(name)
        for kind, colour in self.marks.items():
            if x + 30 + 7.2 * len(kind) > picture.width - RIGHT:
                x, y = LEFT, y + 22
            picture.circle(x + 6, y, 4.5, colour)
            picture.text(x + 18, y, kind, 12, "start")
            x += 40 + 7.2 * len(kind)


_MARKS = ("#1f6fb2", "#d1495b", "#2e8b57", "#8e5ea2", "#b8860b", "#1b1f24", "#008b8b", "#a0522d", *COLOURS)


def _together(events):
    """Events, with those that several warps have in common merged: "warps 0-3, 5"."""
    groups = {}
    for e in events:
        key = (e.launch, e.block, e.kind, e.text, e.start, e.end, e.place, e.lanes if e.lanes else e.row)
        groups.setdefault(key, []).append(e)
    for same in groups.values():
        if len(same) > 1 and same[0].lanes:
            row = f"warps {_ranges([int(e.row.split()[1]) for e in same])}"
            yield replace(same[0], row=row, lanes=sum(e.lanes for e in same))
        else:
            yield from same


def _ranges(numbers):
    """"0-3, 5" of [0, 1, 2, 3, 5]."""
    runs = []
    for n in sorted(numbers):
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _rank(event):
    """The order of events at one time: arrivals, issues and signals, phases, then those who go on after them."""
    return 0 if event.row in (TMA, TENSOR) else 2 if event.row == PHASES else 3 if event.kind in WAITS else 1


def _number(row):
    """A sort key of rows: warps by number."""
    return (0, int(row.split()[1])) if row.startswith("warp") else (1, row)


def _round_step(step):
    """1, 2 or 5 times a power of ten, at least `step`."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= step:
                return factor * power
        power *= 10


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
