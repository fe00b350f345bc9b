"""From the logs of threads (film.py) to the steps of warps.

The emulator runs one thread after another; a GPU runs the lanes of a warp together. `Replay` takes
the logs, and all warps make one step at a time. A step is one line, executed by the lanes of a warp
that are at the same place. Of lanes at different places, those furthest behind go first, so that
they meet again after a branch. A lane waits where it waited in the emulator: for a barrier, for the
other lanes of a warp operation, for a phase of an mbarrier.

The order of steps is therefore one that the program allows, and the values are those of the
emulator's run. They may disagree only where threads race. A TMA load lands LATENCY steps after its
issue.
"""

import numpy as np

from .memory import LOCAL
from .rewrite import SITES

LATENCY = 8  # steps from the issue of a TMA load until it lands
ENDLESS = 6  # steps that are shown of waits without an end


class ReplayedLane:
    """One thread while its log is replayed.

    stack: (line, iteration) of the calls and loops that it is in; calls: how long the stack was at
    each call
    site, following: of its last line and of its next one
    """

    __slots__ = (
        "log",
        "at",
        "row",
        "bit",
        "stack",
        "calls",
        "functions",
        "site",
        "ordinal",
        "token",
        "text",
        "since",
        "following",
        "done",
    )

    def __init__(self, log, row, bit):
        self.log, self.row, self.bit = log, row, bit
        self.at = self.ordinal = 0
        self.stack, self.calls, self.functions, self.site = [], [], [], None
        self.token = self.text = self.following = None
        self.since, self.done = 0, False

    def place(self):
        """Where it is: of two lanes the one with the lower place is behind."""
        return *self.stack, (SITES.places[self.following][2], -1)


class LaneGroup:
    """What lanes of a warp did at one place of a line: an access, or a new value of a variable.

    step, row; kind: "read", "write" or "let"; about: the memory, or (function, variable); site
    lanes, offsets, values: one for each lane that took part; size: bytes of each access
    """

    __slots__ = ("step", "row", "kind", "about", "site", "size", "lanes", "offsets", "values")

    def __init__(self, step, row, kind, about, site, size):
        self.step, self.row, self.kind, self.about, self.site, self.size = (
            step,
            row,
            kind,
            about,
            site,
            size,
        )
        self.lanes, self.offsets, self.values = [], [], []

    def in_order(self):
        """Sort by lanes."""
        order = sorted(range(len(self.lanes)), key=self.lanes.__getitem__)
        self.lanes, self.offsets, self.values = (
            [part[k] for k in order] if part else part
            for part in (self.lanes, self.offsets, self.values)
        )


class Replay:
    """One launch as warps and steps.

    rows: [(block, warp of it)]; steps: of each row [(step, site, mask of lanes)]; groups: [Group]
    by step
    waits: [(row, step of arrival, step of release, text, site, mask)]; meets: [(step, name, rows)]
    of barriers
    phases: [(step, mbarrier, phase, "arrive" | "expect" | "land" | "end", number)]
    faults, others: {number of a fault: (step, row, lane)}; products: [(step, row, name)]; length:
    steps
    """

    def __init__(self, shot):
        self.shot, self.rows, self.steps = shot, [], []
        self.groups, self.waits, self.meets, self.phases = [], [], [], []
        self.faults, self.others, self.products = {}, {}, []
        self.locals = {
            id(a.memory): a
            for arrays in shot.arrays.values()
            for a in arrays
            if a.memory.space is LOCAL
        }
        self._open, self._flying, self._lanes = {}, [], []
        numbers = {}
        for thread, log in shot.logs.items():
            place = thread.block, thread.warp
            if place not in numbers:
                numbers[place] = len(self.rows)
                self.rows.append(place)
                self.steps.append([])
                self._lanes.append([])
            self._lanes[numbers[place]].append(ReplayedLane(log, numbers[place], thread.lane))
        for flight in shot.flights:
            flight.start = flight.end = None
        for log in shot.logs.values():
            for entry in log:
                if entry.__class__ is tuple and entry[0] in ("wait", "signal"):
                    entry[1].got, entry[1].at = 0, None if entry[1].needed else -1
        self.length = self._run()
        for flight in shot.flights:
            if flight.start is not None and flight.end is None:
                flight.end = self.length

    def _run(self):
        """Replay all; returns the number of steps."""
        step = idle = 0
        for lane in (lane for lanes in self._lanes for lane in lanes):
            self._advance(lane, 0)
        while idle < 2:
            moved = self._land(step)
            for row, lanes in enumerate(self._lanes):
                moved |= self._step(row, lanes, step)
            self._close()
            if moved:
                idle = 0
            elif self._flying:  # all wait for it
                step = max(step, min(flight.end for flight in self._flying) - 1)
            else:
                idle += 1
            step += 1
        length = step - idle
        stuck = [lane for lanes in self._lanes for lane in lanes if lane.token is not None]
        length += ENDLESS * bool(stuck)
        for lane in stuck:
            self._wait_ends(lane, length)
        self._merge_waits()
        return length

    def _land(self, step):
        """Flights that end by themselves at this step."""
        landed = [flight for flight in self._flying if flight.end <= step]
        if landed:
            self._flying = [flight for flight in self._flying if flight.end > step]
            for flight in landed:
                if flight.token is not None:
                    self._phase(step, flight.token, "land", flight.size)
                    self._signal(flight.token, step)
        return bool(landed)

    def _step(self, row, lanes, step):
        """One step of a warp; whether anything happened."""
        group, moved = [], False
        for lane in lanes:
            if lane.token is not None:
                if lane.token.at is None or lane.token.at >= step:
                    continue
                self._wait_ends(lane, step)
                self._advance(lane, step)
                moved = True
                if lane.token is not None:
                    continue
            if lane.done:
                continue
            if not group:
                group.append(lane)
            elif lane.following == group[0].following and lane.stack == group[0].stack:
                group.append(lane)
            elif lane.place() < group[0].place():
                group = [lane]
        if not group:
            return moved
        site, mask = group[0].following, 0
        for lane in group:
            lane.site, lane.ordinal = site, 0
            mask |= 1 << lane.bit
            lane.at += 1
        self.steps[row].append((step, site, mask))
        for lane in group:
            self._advance(lane, step)
        # operations of the warp to which all its lanes have come: they continue in this step
        while True:
            met = [
                lane
                for lane in group
                if lane.token is not None and lane.text is None and lane.token.at == step
            ]
            if not met:
                return True
            for lane in met:
                lane.token = None
                self._advance(lane, step)

    def _advance(self, lane, step):
        """Take entries of a lane's log up to its next line, or to where it must wait."""
        log = lane.log
        while lane.at < len(log):
            entry = log[lane.at]
            if entry.__class__ is int:
                lane.following = entry
                return
            lane.at += 1
            kind = entry[0]
            if kind == "let":
                name = lane.functions[-1] if lane.functions else "", entry[1]
                self._group(lane, step, "let", name, 0).values.append(entry[2])
            elif kind in ("read", "write"):
                self._access(lane, step, entry)
            elif kind == "wait":
                if entry[1].at is None or entry[1].at >= step:
                    lane.token, lane.text, lane.since = entry[1], entry[2], step
                    return
            elif kind == "signal":
                self._signal(entry[1], step, lane.row)
            elif kind == "expect":
                self._phase(step, entry[1], "expect", entry[2])
            elif kind == "start":
                entry[1].start = step
                if entry[1].engine and entry[1].data is not None:
                    entry[1].end = step + LATENCY
                    self._flying.append(entry[1])
            elif kind == "land":
                entry[1].end = step
            elif kind == "product":
                self.products.append((step, lane.row, entry[1]))
            elif kind == "fault":
                self.faults[entry[1]] = step, lane.row, lane.bit
            elif kind == "other":
                self.others[entry[1]] = step, lane.row, lane.bit
            else:
                self._nest(lane, entry)
        lane.done = True

    @staticmethod
    def _nest(lane, entry):
        """Calls and loops."""
        kind, stack = entry[0], lane.stack
        if kind == "call":
            lane.calls.append(len(stack))
            if lane.site is not None:
                stack.append((SITES.places[lane.site][2], 0))
            lane.functions.append(SITES.places[entry[1]][0])
        elif kind == "return":
            del stack[lane.calls.pop() :]
            lane.functions.pop()
        elif kind == "loop":
            stack.append((SITES.places[entry[1]][2], 0))
        elif kind == "turn":
            stack[-1] = stack[-1][0], stack[-1][1] + 1
        else:
            stack.pop()

    # what happens in a step -----------------------------------------------------------------------

    def _group(self, lane, step, kind, about, size, ordinal=0):
        site = lane.site
        key = lane.row, kind, about if kind == "let" else id(about), site, size, ordinal
        group = self._open.get(key)
        if group is None:
            group = self._open[key] = LaneGroup(step, lane.row, kind, about, site, size)
        # a variable that is assigned twice in one line
        if group.lanes and group.lanes[-1] == lane.bit:
            group.values.pop()
        else:
            group.lanes.append(lane.bit)
        return group

    def _access(self, lane, step, entry):
        kind, memory, offset, size, site, *data = entry
        local = self.locals.get(id(memory))
        if local is not None:  # an element of a local array is a register
            for k in range(0, size, local.itemsize):
                value = memory_value(local, data[0][k : k + local.itemsize])
                name = (
                    lane.functions[-1] if lane.functions else "",
                    f"{local.name}[{(offset + k) // local.itemsize}]",
                )
                self._group(lane, step, "let", name, 0).values.append(value)
            return
        group = self._group(lane, step, kind, memory, size, lane.ordinal)
        lane.ordinal += 1
        group.offsets.append(offset)
        group.values.extend(data)

    def _close(self):
        """The step is over."""
        for group in self._open.values():
            if sorted(group.lanes) != group.lanes:
                group.in_order()
        self.groups.extend(self._open.values())
        self._open = {}

    def _signal(self, token, step, row=None):
        token.got += 1
        if token.barrier is not None and row is not None:
            self._phase(step, token, "arrive", 1)
        if token.got == token.needed and token.over:
            token.at = step
            self._phase(step, token, "end", 0)

    def _phase(self, step, token, kind, number):
        if token.barrier is not None:
            self.phases.append((step, token.barrier, token.phase, kind, number))

    def _wait_ends(self, lane, step):
        if lane.text and step > lane.since:
            self.waits.append(
                (lane.row, lane.since, step, lane.text, lane.site, 1 << lane.bit, lane.token)
            )
        lane.token = None

    def _merge_waits(self):
        """One wait for the lanes of a warp that wait together, and the barriers of threads."""
        merged, meets = {}, {}
        for row, since, until, text, site, mask, token in self.waits:
            key = row, since, until, text, site
            if until > since + 1:  # others arrive later
                merged[key] = merged.get(key, 0) | mask
            if token.name is not None and token.at is not None:
                meets.setdefault(id(token), (until, token.name, set()))[2].add(row)
        self.waits = [(*key, mask) for key, mask in merged.items()]
        self.meets = sorted((step, name, sorted(rows)) for step, name, rows in meets.values())


def memory_value(array, data):
    """The number in the bytes of an element."""
    value = np.frombuffer(data, array.dtype)
    return value[0].item() if len(value) == 1 and array.dtype.kind in "biuf" else 0
