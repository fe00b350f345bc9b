"""The timeline of a trace (trace.py): its events in their order, as text, as a Chrome trace and as a picture."""
import json
from collections import defaultdict
from dataclasses import dataclass, replace

from .drawing import COLOURS, GRID, INK, PALE, Picture

TMA, TENSOR, PHASES = "TMA", "tensor cores", "mbarriers"
WAITS = ("barrier", "wait")


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


def order(event):
    """A sort key of events: by launch, block and time."""
    return event.launch, event.block[::-1], event.end, _rank(event), event.start, _number(event.row)


def _rank(event):
    """The order of events at one time: arrivals, issues and signals, phases, then threads that continue after them."""
    return 0 if event.row in (TMA, TENSOR) else 2 if event.row == PHASES else 3 if event.kind in WAITS else 1


def _number(row):
    """A sort key of rows: warps by number."""
    return (0, int(row.split()[1])) if row.startswith("warp") else (1, row)


# Text -----------------------------------------------------------------------------------------------------------------

def as_text(events, launches):
    """Events as text, block by block; launches: (kernel, grid, block) of each."""
    lines, last = [], None
    for event in _together(events):
        head = event.launch, event.block
        if head != last:
            kernel, grid, size = launches[event.launch]
            lines += [""] * bool(lines) + [f"{kernel}, grid {grid}, block {size}: block {event.block}"]
            last = head
        lines.append(str(event))
    return "\n".join(lines)


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


# Chrome trace ---------------------------------------------------------------------------------------------------------

def as_chrome(events, launches):
    """Events as the text of a JSON file for chrome://tracing or ui.perfetto.dev; one tick is one µs."""
    found, processes = [], {}

    def identify(launch, block):
        key = launch, block
        if key not in processes:
            processes[key] = len(processes) + 1
            found.append({"ph": "M", "name": "process_name", "pid": processes[key], "tid": 0,
                          "args": {"name": f"{launches[launch][0]} {launch}, block {block}"}})
        return processes[key]

    rows = {}
    for e in events:
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


# Picture --------------------------------------------------------------------------------------------------------------

LEFT, RIGHT, TOP, ROW, GAP = 190, 24, 64, 26, 30  # pixels: labels, margins, height of a row, space between blocks
FILL = {"busy": "#dbe7f3", "barrier": "#f0b4a8", "wait": "#f6d9a0", "copy": "#a3d9a5", "wgmma": "#cdb4f0"}
EDGE = {"busy": "#9db7d0", "barrier": "#c0392b", "wait": "#c98a1b", "copy": "#3f8f46", "wgmma": "#7d55b5"}
_MARKS = ("#1f6fb2", "#d1495b", "#2e8b57", "#8e5ea2", "#b8860b", "#1b1f24", "#008b8b", "#a0522d", *COLOURS)


class Drawing:
    """Draws the timeline of some blocks of a launch; `picture` is what comes out."""

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


def _round_step(step):
    """1, 2 or 5 times a power of ten, at least `step`."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= step:
                return factor * power
        power *= 10
