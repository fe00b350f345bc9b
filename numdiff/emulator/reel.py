"""The page of a film: what replay.py gives, as numbers in one compressed block; the folder page/
has all around it.

    a JSON text                 names, source lines, arrays, flights, barriers, faults
    a list of integers          steps, accesses and variables, each the difference to the one before where that is small
    a list of float32           values

Integers are written as in protocol buffers: seven bits to a byte, the sign in the lowest bit. All
is deflated, which a browser undoes with its `DecompressionStream`. A page is kept below LIMIT
bytes. If it would be longer, most lanes' variables are left out; then the values in memory; then
the film's end.
"""

import base64
import html
import inspect
import json
import linecache
import os
import pathlib
import re
import struct
import tokenize
import zlib

import numpy as np

from .memory import GLOBAL, SHARED
from .pictures import MMA, owners
from .replay import Replay
from .rewrite import SITES
from .wgmma_layouts import M, accumulator_place
from .writing import WRITERS

LIMIT = 4_000_000  # bytes of a page
SHOWN = 24  # launches that a page has at most
CELLS, CHUNK = 4096, 16  # cells of an array at most; bytes of a cell of a larger one
FOLDER = pathlib.Path(__file__).parent / "page"
SCRIPTS = "data", "drawing", "source", "timeline", "thread", "memory", "engines", "caption", "film"
# arguments of `Reel`, one after the other
THINNED = [
    (1, True, 1.0),
    (4, True, 1.0),
    (16, True, 1.0),
    (32, True, 1.0),
    (32, False, 1.0),
    *((32, False, 1 / 2**k) for k in range(1, 12)),
]
# kinds of values: INTEGER and FLOAT of all lanes
NONE, INTEGERS, INTEGER, FLOATS, FLOAT, TRUTHS, WORDS = range(7)
EXACT = 1 << 52  # larger integers are shown as words of 64 bits


# The page -----------------------------------------------------------------------------------------


def page(shots):
    """The page of some launches, as text."""
    if not shots:
        raise ValueError(
            "there is nothing to show: no kernel was launched while the film was recorded."
        )
    replays = [Replay(shot) for shot in shots[:SHOWN]]
    title = html.escape(", ".join(dict.fromkeys(shot.kernel for shot in shots[:SHOWN])))
    parts = {
        "title": title,
        "style": _part("page.css"),
        "script": "\n".join(_part(f"{name}.js") for name in SCRIPTS),
    }
    room = LIMIT - sum(len(text.encode()) for text in parts.values()) - len(_part("page.html"))
    for thinned in THINNED:
        data = pack([Reel(replay, *thinned) for replay in replays], max(0, len(shots) - SHOWN))
        if len(data) <= room:
            break
    parts["data"] = data
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _part("page.html"))


def save(path, shots):
    if not str(path).endswith(".html"):
        raise ValueError(f"cannot write {path}: a film is saved as .html.")
    WRITERS["text"](path, page(shots), "the film")


def show(shots):
    """HTML for a notebook: the page in a frame."""
    text = html.escape(page(shots), quote=True)
    return f'<iframe srcdoc="{text}" sandbox="allow-scripts" style="width:100%;height:760px;border:0"></iframe>'


def _part(name):
    return (FOLDER / name).read_text(encoding="utf-8")


def pack(reels, left_out=0):
    """The base64 text of the compressed block."""
    integers, floats = [], []
    header = json.dumps(
        {"launches": [reel.header(integers, floats) for reel in reels], "leftOut": left_out},
        separators=(",", ":"),
    ).encode()
    numbers = varints(integers)
    with np.errstate(all="ignore"):
        words = np.array(floats, np.float64).astype("<f4").view(np.uint8).reshape(-1, 4)
    block = (
        struct.pack("<3I", len(header), len(numbers), len(floats))
        + header
        + numbers
        + words.T.tobytes()
    )
    return base64.b64encode(zlib.compress(block, 9)).decode()


def varints(numbers):
    """Integers of up to 53 bits as bytes."""
    values = np.array(numbers, np.int64)
    values = (values << 1 ^ values >> 63).view(np.uint64)
    columns = [(values >> np.uint64(7 * k)).astype(np.uint8) & 0x7F for k in range(8)]
    more = np.stack([values >> np.uint64(7 * (k + 1)) > 0 for k in range(8)], axis=1)
    digits = np.stack(columns, axis=1) | more.astype(np.uint8) << 7
    kept = np.concatenate([np.ones((len(values), 1), bool), more[:, :-1]], axis=1)
    return digits[kept].tobytes()


# One launch ---------------------------------------------------------------------------------------


class Numbers(dict):
    """Things in the order in which they were first asked for -> their numbers."""

    def of(self, thing):
        return self.setdefault(thing, len(self))


class Reel:
    """One launch as a header and numbers. every: keep variables of lanes 0, every, 2 · every …;
    values: in memory, too

    share: of the film's steps, from its beginning
    """

    def __init__(self, replay, every=1, values=True, share=1.0):
        self.replay, self.shot, self.every, self.values = replay, replay.shot, every, values
        self.length = max(1, int(replay.length * share))
        self.lines, self.masks, self.variables = Numbers(), Numbers(), Numbers()
        self.arrays = [Cells(arrays, self.shot) for arrays in _arrays_of(self.shot)]
        self.array_of = {id(cells.memory): k for k, cells in enumerate(self.arrays)}

    def header(self, integers, floats):
        """What goes into the JSON text; the numbers are added to the lists."""
        replay, shot, lines, end = self.replay, self.shot, self.lines, self.length
        self._steps(integers)
        counts = self._groups(integers, floats)
        for cells in self.arrays:
            values(integers, floats, cells.initial(self.shot.contents) if self.values else [])
        blocks = Numbers()
        for block, _ in replay.rows:
            blocks.of(block)
        arrays = [cells.header(blocks) for cells in self.arrays]
        flights = [self._flight(flight) for flight in shot.flights if flight.start is not None]
        waits = [
            [row, since, min(until, end), text, lines.of(site), self.masks.of(mask)]
            for row, since, until, text, site, mask in replay.waits
            if since < end
        ]
        faults = [self._fault(number, fault) for number, fault in enumerate(shot.faults)]
        return {
            "kernel": shot.kernel,
            "grid": shot.grid,
            "block": shot.block,
            "count": shot.count,
            "length": end,
            "cut": bool(shot.cut or end < replay.length),
            "every": self.every,
            "groups": counts,
            "rows": [
                [blocks.of(block), warp, len(block.warp_threads(warp))]
                for block, warp in replay.rows
            ],
            "blocks": [block.index for block in blocks],
            "counts": [sum(step < end for step, _, _ in steps) for steps in replay.steps],
            "arrays": arrays,
            "flights": flights,
            "waits": waits,
            "meets": [meet for meet in replay.meets if meet[0] < end],
            "barriers": [[blocks.of(block), name, count] for block, name, count in shot.barriers],
            "phases": [phase for phase in replay.phases if phase[0] < end],
            "faults": faults,
            "products": self._products(),
            "accumulators": self._accumulators(),
            "masks": list(self.masks),
            "variables": list(self.variables),
            "arguments": [
                f"{a.name}: {a.dtype}[{', '.join(map(str, a.shape))}]" for a in shot.arguments
            ],
            **source_of(lines, SITES),
        }

    def _steps(self, integers):
        for steps in self.replay.steps:
            before = line_before = 0
            for step, site, mask in steps:
                if step >= self.length:
                    break
                line = self.lines.of(site)
                integers += (step - before, line - line_before, self.masks.of(mask))
                before, line_before = step, line

    def _groups(self, integers, floats):
        """Accesses and variables; returns how many."""
        count, before = 0, 0
        landed = sorted(
            (f for f in self.shot.flights if f.end is not None and f.kind == "load"),
            key=lambda f: f.end,
        )
        for group in self.replay.groups:
            while landed and landed[0].end <= group.step:
                flight = landed.pop(0)
                if flight.end < self.length:
                    before, count = self._landing(flight, integers, floats, before), count + 1
            if group.step >= self.length:
                break
            if group.kind == "let":
                lanes = [k for k, lane in enumerate(group.lanes) if lane % self.every == 0]
                if not lanes:
                    continue
                mask = sum(1 << group.lanes[k] for k in lanes)
                integers += (
                    group.step - before,
                    1,
                    group.row,
                    self.variables.of(group.about),
                    self.masks.of(mask),
                )
                values(integers, floats, [group.values[k] for k in lanes])
            else:
                array = self.array_of.get(id(group.about))
                if array is None:
                    continue
                cells = self.arrays[array]
                mask = sum(1 << lane for lane in group.lanes)
                places, per = cells.places(group.offsets, group.size)
                integers += (
                    group.step - before,
                    2 if group.kind == "read" else 3,
                    group.row,
                    array,
                    self.lines.of(group.site),
                    self.masks.of(mask),
                    group.size,
                    per,
                )
                differences(integers, places)
                if group.kind == "write":
                    values(integers, floats, cells.values(group.values) if self.values else [])
            before, count = group.step, count + 1
        for flight in landed:
            if flight.end < self.length:
                before, count = self._landing(flight, integers, floats, before), count + 1
        return count

    def _landing(self, flight, integers, floats, before):
        """The write of a TMA load."""
        ((memory, offset, size),) = flight.writes
        cells = self.arrays[self.array_of[id(memory)]]
        places = cells.range(offset, size)
        integers += (flight.end - before, 4, flight.number, self.array_of[id(memory)], len(places))
        differences(integers, places)
        values(integers, floats, cells.values([flight.data]) if self.values else [])
        return flight.end

    def _flight(self, flight):
        reads, writes = (
            [self._ranges(place) for place in self._joined(places)]
            for places in (flight.reads, flight.writes)
        )
        block, thread = flight.thread.block, flight.thread
        row = self.replay.rows.index((block, thread.warp))
        return [
            flight.number,
            flight.kind,
            flight.text,
            row,
            self.lines.of(flight.site),
            flight.start,
            min(flight.end, self.length),
            reads,
            writes,
            flight.detail,
        ]

    @staticmethod
    def _joined(places):
        """Neighbouring ranges of bytes as one."""
        found = []
        for memory, offset, size in sorted(places, key=lambda place: (id(place[0]), place[1])):
            if found and found[-1][0] is memory and found[-1][1] + found[-1][2] == offset:
                found[-1][2] += size
            else:
                found.append([memory, offset, size])
        return found

    def _ranges(self, place):
        """[array, first cell, cells] of a range of bytes."""
        array = self.array_of.get(id(place[0]), -1)
        if array < 0:
            return [array, 0, 0]
        found = self.arrays[array].range(place[1], place[2])
        return [array, found[0], len(found)] if found else [array, 0, 0]

    def _fault(self, number, fault):
        def line(place):
            return self.lines.of(SITES.number(place.function, place.file, place.line))

        return {
            "kind": fault.kind,
            "message": fault.message,
            "count": fault.count,
            "line": line(fault.place),
            "thread": fault.thread,
            "block": fault.block,
            "at": self.replay.faults.get(number),
            "other": self.replay.others.get(number),
            "others": [[what, line(place), place.thread] for what, place in fault.others],
        }

    def _products(self):
        """Matrix instructions of warps, and the layout of each shape: (lane, register) of A's, B's
        and D's elements."""
        names, found = Numbers(), []
        for step, row, name in self.replay.products:
            if step < self.length:
                found.append([step, row, names.of(name)])
        layouts = []
        for name in names:
            fragments = MMA.get(
                name.removeprefix("mma.").removesuffix(".bf16").replace(".", " "), ()
            )
            layouts.append(
                [
                    name,
                    [
                        [size, [place[:2] for _, place in sorted(owners(layout).items())]]
                        for size, layout in fragments
                    ],
                ]
            )
        return {"at": found, "layouts": layouts}

    def _accumulators(self):
        """(thread, register) of D's first eight columns, row by row, if there is a wgmma."""
        if not any(flight.kind == "wgmma" for flight in self.shot.flights):
            return None
        found = [None] * (8 * M)
        for thread in range(128):
            for register in range(4):
                row, column = accumulator_place(thread, register)
                found[8 * row + column] = thread, register
        return found


# Arrays -------------------------------------------------------------------------------------------


def _arrays_of(shot):
    """The arrays of each memory that a film shows: shared memory first, then the kernel's
    arguments."""
    found = [arrays for arrays in shot.arrays.values() if arrays[0].memory.space == SHARED]
    return found + [arrays for arrays in shot.arrays.values() if arrays[0].memory.space == GLOBAL]


class Cells:
    """A memory as cells: elements of its arrays, or several together.

    parts: [(name, first cell, cells, columns)] of its arrays that share no bytes
    """

    def __init__(self, arrays, shot):
        self.memory = arrays[0].memory
        inside = [a for a in arrays if a.size and a.dtype.kind in "biufcV"]
        self.dtype = (
            inside[0].dtype
            if inside and all(a.dtype == inside[0].dtype for a in inside)
            else np.dtype(
                f"u{min([a.itemsize for a in inside if a.itemsize in (1, 2, 4, 8)], default=1)}"
            )
        )
        self.size = max(1, self.dtype.itemsize)
        total = max([a.offset + a.nbytes for a in inside], default=self.memory.size)
        self.start = min([a.offset for a in inside], default=0)
        if (total - self.start) // self.size > CELLS:
            self.size = max(self.size, CHUNK)
        while (total - self.start) // self.size > 4 * CELLS:
            self.size *= 2
        self.count = max(1, -(-(total - self.start) // self.size))
        self.single = self.size == self.dtype.itemsize and self.dtype.kind in "biuf"
        self.parts, taken = [], self.start
        for array in sorted(inside, key=lambda a: (a.offset, -a.nbytes)):
            if array.offset >= taken or not self.parts:
                columns = (
                    array.shape[-1] * array.itemsize // self.size
                    if array.ndim > 1
                    else 32
                    if self.single
                    else 64
                )
                while array.ndim == 1 and array.nbytes // self.size > 96 * columns:
                    columns *= 2
                shape = f"{array.dtype}[{', '.join(map(str, array.shape))}]"
                self.parts.append(
                    (
                        array.name,
                        shape,
                        (array.offset - self.start) // self.size,
                        max(1, array.nbytes // self.size),
                        max(1, min(columns, 256)),
                    )
                )
                taken = array.offset + array.nbytes
        self.block = next((b for b in shot.blocks if self.memory in (b.static, b.dynamic)), None)

    def header(self, blocks):
        return {
            "space": self.memory.space,
            "block": -1 if self.block is None else blocks.of(self.block),
            "parts": self.parts,
            "cells": self.count,
            "size": self.size,
            "single": self.single,
            "itemsize": self.dtype.itemsize,
            "dtype": self.dtype.name,
            "address": (self.memory.address + self.start) % 128,
        }

    def initial(self, contents):
        """The numbers before the launch, [] if they are not known."""
        data = contents.get(id(self.memory))
        return self.values([data[self.start : self.start + self.count * self.size]]) if data else []

    def places(self, offsets, size):
        """([first cell of each access], how many cells each takes)"""
        return [(offset - self.start) // self.size for offset in offsets], max(1, size // self.size)

    def range(self, offset, size):
        """The cells of a range of bytes."""
        first = max(0, (offset - self.start) // self.size)
        return range(first, min(self.count, -(-(offset + size - self.start) // self.size)))

    def values(self, written):
        """The numbers in bytes that were written; [] where cells have none."""
        if (
            not self.single
            or not written
            or any(data is None or len(data) % self.size for data in written)
        ):
            return []
        return np.frombuffer(b"".join(written), self.dtype).tolist()


# Numbers ------------------------------------------------------------------------------------------


def differences(integers, numbers):
    before = 0
    for number in numbers:
        integers.append(number - before)
        before = number


def values(integers, floats, numbers):
    """Add the values of a group: their kind, then one for all or each its own."""
    if not len(numbers):
        integers.append(NONE)
    elif all(isinstance(n, (bool, np.bool_)) for n in numbers):
        integers.append(TRUTHS)
        integers.extend(int(n) for n in numbers)
    elif all(isinstance(n, (int, np.integer)) for n in numbers) and any(
        abs(int(n)) >= EXACT for n in numbers
    ):
        integers.append(WORDS)
        for n in numbers:
            integers.extend((int(n) >> 32 & 0xFFFFFFFF, int(n) & 0xFFFFFFFF))
    elif all(isinstance(n, (int, np.integer)) for n in numbers):
        same = len(numbers) > 1 and numbers.count(numbers[0]) == len(numbers)
        integers.append(INTEGER if same else INTEGERS)
        differences(integers, [int(n) for n in (numbers[:1] if same else numbers)])
    else:
        same = len(numbers) > 1 and numbers.count(numbers[0]) == len(numbers)
        integers.append(FLOAT if same else FLOATS)
        floats.extend(float(n) for n in (numbers[:1] if same else numbers))


# Source -------------------------------------------------------------------------------------------


def source_of(lines, sites):
    """The text of the functions that these lines are in.

    sources: [function, file, number of the first line, [text]]; lines: of each site (source, line
    from its first)
    """
    sources, places = {}, []
    for site in lines:
        function, file, number = sites.places[site] if site is not None else ("?", "?", 0)
        key = function, file
        if key not in sources or not sources[key][0] <= number < sources[key][0] + len(
            sources[key][1]
        ):
            sources[key] = _block(function, file, number)
    keys = list(sources)
    for site in lines:
        function, file, number = sites.places[site] if site is not None else ("?", "?", 0)
        places.append((keys.index((function, file)), number - sources[function, file][0]))
    return {
        "sources": [
            [function, os.path.basename(file), *sources[function, file]] for function, file in keys
        ],
        "lines": places,
    }


def _block(function, file, number):
    """(first line, [text]) of the function around a line."""
    text = linecache.getlines(file)
    start = number - 1
    while 0 <= start < len(text) and not re.match(
        rf"\s*(def {re.escape(function)}\b|.*\blambda\b)", text[start]
    ):
        start -= 1
    if not 0 <= start < len(text):
        return max(1, number), [linecache.getline(file, number).rstrip("\n")]
    try:
        found = inspect.getblock(text[start:])
    except (SyntaxError, tokenize.TokenError, IndexError):
        found = text[start:number]
    while start and text[start - 1].lstrip().startswith("@"):
        start -= 1
        found = [text[start], *found]
    indent = min((len(line) - len(line.lstrip()) for line in found if line.strip()), default=0)
    return start + 1, [line.rstrip("\n")[indent:] for line in found]
