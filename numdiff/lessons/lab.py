"""What the chapters import: runs a kernel in the emulator, prints what it cost, and draws what it
did.

    costs = run(kernel, grid, block, x, y)      # prints transactions, bank conflicts, bytes, FLOPs; y is written
    faults(kernel, grid, block, x, y)           # prints the faults of a kernel that has some
    words(costs, "x[i]"); banks(costs, "tile")  # pictures of the first request of a line
    timeline(kernel, grid, block, x, y)         # a picture of warps, barriers and copies
    film(kernel, grid, block, x, y)             # a page that shows each step, and the faults
    measured("softmax_forward")                 # stored figures of an H200

On a machine with an NVIDIA GPU `run` also launches the kernel there, compares the results, and
prints the time.
"""

import linecache
import pathlib
import tempfile
import textwrap
import time
from typing import NamedTuple

import numpy as np

from .. import emulator, plots
from ..device import download, get_gpu, launch, synchronize, upload, why_no_gpu
from ..device.tensor_map import tensor_map
from ..emulator.drawing import COLOURS, GRID, INK, PALE, Picture
from ..emulator.memory import GLOBAL, SHARED
from ..emulator.rewrite import SITES
from ..emulator.warp_requests import BANKS, SECTOR, WORD
from ..kernels import figures
from . import advice

CARD = "NVIDIA H200"  # whose stored figures `measured` prints
REPEATS = 20  # launches that are timed together
LINE = 4 * SECTOR  # bytes of a row of `words`
ROWS = 32  # of a picture at most
CELL = 24  # pixels


def _height(rows):
    """Of a row of a picture, in pixels."""
    return CELL if rows <= 8 else 15


class TensorMapArgument(NamedTuple):
    """An argument: a tensor map of an array. box: elements of one copy, innermost dimension first"""

    array: np.ndarray
    box: tuple
    swizzle: int = 128

    def emulated(self):
        """The map, for the emulator."""
        return tensor_map(*self)


class NotebookPicture:
    """A picture that a notebook shows."""

    def __init__(self, svg):
        self.svg = svg

    def _repr_svg_(self):
        return self.svg


class AddressRecorder(emulator.Recorder):
    """A recorder that also keeps the addresses of the first requests of each line."""

    def __init__(self):
        super().__init__()
        self.seen = []  # (source line, memory space, offsets (lanes,), bytes of an access)

    def _take(self, key, lanes):
        site, _, memory, size, _, _ = key
        source = linecache.getline(*SITES.places[site][1:])
        offsets = np.array([lane[0] if len(lane) else -1 for lane in lanes])
        space = getattr(memory, "space", memory)
        address = memory.address if space == SHARED else 0
        self.seen.append((source, space, np.where(offsets < 0, -1, offsets + address), size))
        super()._take(key, lanes)


class Costs:
    """What a run cost. requests, transactions, moved and needed (bytes of global memory),
    conflicts, flops; recorder: with the figures of each line"""

    def __init__(self, name, recorder):
        total = recorder.total()
        self.name, self.recorder = name, recorder
        self.requests, self.transactions = total.requests, total.sectors
        self.moved, self.needed = SECTOR * total.sectors, total.distinct_bytes
        self.shared_requests, self.conflicts = total.shared_requests, total.conflicts
        self.flops = total.total_flops + total.tensor_flops

    def __str__(self):
        each = self.transactions / self.requests if self.requests else 0
        text = (
            f"{self.name}: {self.requests:,} requests, {self.transactions:,} transactions ({each:.3g} each), "
            f"{self.moved:,} bytes, {self.needed:,} needed"
        )
        more = [
            f"shared memory: {self.shared_requests:,} requests, {self.conflicts:,} bank conflicts"
        ] * bool(self.shared_requests) + [f"{self.flops:,} FLOPs"] * bool(self.flops)
        return "\n  ".join([text, *filter(None, ["; ".join(more)])])

    def _ipython_display_(self):
        """A notebook shows nothing more: `run` has printed it."""


def run(kernel, grid, block, *arguments, shared=0):
    """Run a kernel in the emulator, print its `Costs` and return them. On a machine with a GPU, run
    it there, too.

    arguments: NumPy arrays, which the kernel reads and writes, numbers, `TensorMapArgument`; shared: bytes of
    dynamic shared memory Raises `emulator.KernelFault` for a kernel with a fault.
    """
    arrays = [a.array if isinstance(a, TensorMapArgument) else a for a in arguments]
    before = [a.copy() if isinstance(a, np.ndarray) else a for a in arrays]
    watch = AddressRecorder()
    emulator.Emulator(recorder=watch, float64=False).launch(
        kernel, grid, block, *map(_emulated, arguments), shared=shared
    )
    costs = Costs(kernel.py_func.__name__, watch)
    print(costs)
    if not why_no_gpu():
        print(on_card(get_gpu(), kernel, grid, block, arguments, before, arrays, shared))
    return costs


def _emulated(argument):
    return argument.emulated() if isinstance(argument, TensorMapArgument) else argument


def on_card(backend, kernel, grid, block, arguments, before, after, shared=0):
    """One line about a kernel on a device: whether the arrays `before` become those of `after`, and
    the time."""
    name = getattr(backend, "device_name", backend.name)
    try:
        arrays = [upload(b, backend) if isinstance(b, np.ndarray) else b for b in before]
        given = [
            tensor_map(a, *argument[1:]) if isinstance(argument, TensorMapArgument) else a
            for a, argument in zip(arrays, arguments, strict=True)
        ]
        launch(kernel, grid, block, *given, shared=shared)
        right = all(
            np.allclose(
                download(a).astype(np.float32), wanted.astype(np.float32), rtol=1e-2, atol=1e-3
            )
            for a, wanted in zip(arrays, after, strict=True)
            if isinstance(wanted, np.ndarray)
        )
        begun = time.perf_counter()
        for _ in range(REPEATS):
            launch(kernel, grid, block, *given, shared=shared)
        for array in arrays[:1]:
            synchronize(array)
        seconds = (time.perf_counter() - begun) / REPEATS
    except Exception as error:  # whatever Numba and the driver say
        first, *_ = str(error).strip().splitlines() or [""]
        return f"  on {name}: does not run there: {type(error).__name__}: {first}"
    return (
        f"  on {name}: {'the same' if right else 'another'} result, {1e6 * seconds:.1f} µs a launch"
    )


def faults(kernel, grid, block, *arguments, shared=0):
    """Run a kernel in the emulator and print its faults, each with its line and what to change."""
    machine = emulator.Emulator(on_fault="collect", float64=False, patience=0.5)
    machine.launch(kernel, grid, block, *map(_emulated, arguments), shared=shared)
    file = kernel.py_func.__code__.co_filename
    print(
        f"{kernel.py_func.__name__}: {len(machine.faults) or 'no'} fault{'s' * (len(machine.faults) != 1)}"
    )
    for fault in machine.faults:
        line = advice.line_of(fault, file)
        print(
            textwrap.fill(
                f"{fault.kind}. {advice.explain(fault, file)}",
                84,
                initial_indent="  ",
                subsequent_indent="    ",
            )
        )
        if line:
            print(f"    {line} | {linecache.getline(file, line).strip()}")


# Pictures -----------------------------------------------------------------------------------------


def _request(costs, text, space):
    for source, found, offsets, size in costs.recorder.seen:
        if text in source and found == space:
            return source.strip(), offsets, size
    raise LookupError(f"no access of this memory in a line with {text!r} was counted.")


def words(costs, text):
    """The first request of a warp to global memory in the line that contains `text`: which words it
    fetches.

    A cell is a word of 4 bytes, with the lane that uses it; eight cells are a transaction, four
    transactions a row.
    """
    source, offsets, size = _request(costs, text, GLOBAL)
    lanes = {}  # word -> lane
    for lane, offset in enumerate(offsets):
        for word in range(offset // WORD, (offset + size - 1) // WORD + 1) if offset >= 0 else ():
            lanes.setdefault(word, lane)
    per_row = LINE // WORD
    rows = sorted({word // per_row for word in lanes})
    sectors = {WORD * word // SECTOR for word in lanes}
    shown = rows[:ROWS]
    high = _height(len(shown))
    left, top = 96, 74
    picture = Picture(left + per_row * CELL + 40, top + len(shown) * high + 34)
    picture.text(16, 22, source, 14, "start", bold=True)
    used = WORD * len(lanes)
    picture.text(
        16,
        46,
        f"one request of a warp: {len(sectors)} transactions fetch {SECTOR * len(sectors):,} bytes, "
        f"of which {used:,} are used",
        13,
        "start",
    )
    for y, row in enumerate(shown):
        picture.text(
            left - 10, top + (y + 0.5) * high, f"byte {row * LINE:,}", 11, "end", colour=PALE
        )
        for x in range(per_row):
            word = row * per_row + x
            lane, fetched = lanes.get(word), WORD * word // SECTOR in sectors
            picture.rectangle(
                left + x * CELL,
                top + y * high,
                CELL - 1,
                high - 1,
                COLOURS[0] if lane is not None else COLOURS[3] if fetched else None,
                GRID,
            )
            if lane is not None:
                picture.text(left + (x + 0.5) * CELL, top + (y + 0.5) * high, lane, 10)
    for x in range(0, per_row + 1, SECTOR // WORD):
        picture.line(
            left + x * CELL - 1, top - 4, left + x * CELL - 1, top + len(shown) * high + 2, INK, 1.5
        )
    _legend(
        picture,
        left,
        top + len(shown) * high + 18,
        [
            (COLOURS[0], "used, by the lane of this number"),
            (COLOURS[3], "fetched and not used"),
            (None, "not fetched"),
        ],
    )
    return NotebookPicture(picture.svg())


def banks(costs, text):
    """The first request of a warp to shared memory in the line that contains `text`: which bank
    serves which lane.

    A column is a bank, a row a step in which each bank serves one word.
    """
    source, offsets, size = _request(costs, text, SHARED)
    served = [{} for _ in range(BANKS)]  # of each bank: word -> first lane
    for lane, offset in enumerate(offsets):
        for word in range(offset // WORD, (offset + size - 1) // WORD + 1) if offset >= 0 else ():
            served[word % BANKS].setdefault(word, lane)
    steps = max(len(words) for words in served)
    left, top, shown = 76, 90, min(steps, ROWS)
    high = _height(shown)
    picture = Picture(left + BANKS * CELL + 40, top + shown * high + 34)
    picture.text(16, 22, source, 14, "start", bold=True)
    picture.text(
        16, 46, f"one request of a warp takes {steps} step{'s' * (steps != 1)}", 13, "start"
    )
    picture.text(left - 10, top - 14, "bank", 11, "end", colour=PALE)
    for bank, each in enumerate(served):
        picture.text(left + (bank + 0.5) * CELL, top - 14, bank, 10, colour=PALE)
        for y in range(shown):
            lane = list(each.values())[y] if y < len(each) else None
            picture.rectangle(
                left + bank * CELL,
                top + y * high,
                CELL - 1,
                high - 1,
                None if lane is None else COLOURS[0] if y == 0 else COLOURS[3],
                GRID,
            )
            if lane is not None:
                picture.text(left + (bank + 0.5) * CELL, top + (y + 0.5) * high, lane, 10)
    for y in range(shown):
        picture.text(left - 10, top + (y + 0.5) * high, f"step {y + 1}", 11, "end", colour=PALE)
    _legend(
        picture,
        left,
        top + shown * high + 18,
        [(COLOURS[0], "lane served at once"), (COLOURS[3], "lane that waits")],
    )
    return NotebookPicture(picture.svg())


def _legend(picture, x, y, entries):
    for colour, text in entries:
        picture.rectangle(x, y - 7, 14, 14, colour, GRID)
        picture.text(x + 20, y, text, 11, "start")
        x += 44 + 7 * len(text)


def timeline(kernel, grid, block, *arguments, shared=0, blocks=1):
    """A picture of a run: a row for each warp, with its barriers and waits, and rows for copies and
    matrix products."""
    film = emulator.trace(kernel, grid, block, *map(_emulated, arguments), shared=shared)
    return NotebookPicture(film.svg(blocks=blocks, width=1000))


def film(kernel, grid, block, *arguments, shared=0):
    """A run as a page with a slider: source, warps, memory by last writer, a thread's variables,
    faults as arrows."""
    return emulator.trace(
        kernel, grid, block, *map(_emulated, arguments), shared=shared, on_fault="collect"
    )


def steps(kernel, grid, block, *arguments, shared=0):
    """The steps that a run takes: lines that warps execute one after the other, with their waits
    for each other."""
    return emulator.trace(kernel, grid, block, *map(_emulated, arguments), shared=shared).steps()


def show(picture):
    """A picture of numdiff.emulator.pictures in a notebook."""
    return NotebookPicture(picture.svg())


def drawing(title, x, y, draw, height=4.0):
    """A plot in the project's style: `draw(axes)` gets matplotlib's axes; x, y: their names with
    units."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "plot.svg"
        with plots.Plot(path, title, x, y, height=height) as axes:
            draw(axes)
        return NotebookPicture(path.read_text(encoding="utf-8"))


def bars(title, values, unit):
    """A bar for each name. values: {name: number}"""

    def draw(axes):
        plots.draw_bars(axes, values)
        if max(values.values()) >= 1000:
            plots.whole_numbers(axes.xaxis)

    return drawing(title, unit, "", draw, 1.3 + 0.34 * max(len(values), 3))


# Stored figures -----------------------------------------------------------------------------------


def stored(function, problem=""):
    """[(problem, version, row)] of an operation on `CARD`. problem: a text that the problem's name
    contains"""
    card = next(card for card in figures.cards() if card["card"] == CARD)
    return [
        (name.partition(", ")[2], number, row)
        for name, rows in card["problems"].items()
        if name.partition(",")[0] == function and problem in name
        for number, row in rows.items()
    ]


def measured(function, problem=""):
    """Print what the versions of one of the project's operations take on `CARD`, from
    numdiff/kernels/figures/."""
    before = None
    for name, number, row in stored(function, problem):
        if name != before:
            print(f"{CARD}, {function}, {name}:")
        print(f"  {figures.line_of(number, row)}".rstrip())
        before = name
