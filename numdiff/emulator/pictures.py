"""Pictures of layouts: fragments of a warp, a swizzled tile, a TMA box, a wgmma's accumulators.

    from numdiff.emulator import pictures
    pictures.mma("m16n8k16", lane=5).save("fragments.svg")

    film = emulator.trace(kernel, grid, block, map_of_x, y)     # a kernel with tensor copies and matrix products
    pictures.swizzled_tile(film.copies[0]).save("tile.png")
    pictures.tma_box(film.copies[0]).save("box.png")
    pictures.mma(film.products[0], lane=5).save("values.svg")   # the same, with the numbers

Each is drawn from the emulator's own data: the layouts of fragments.py and wgmma_layouts.py, the
registers of a product, the bytes that a copy wrote to shared memory, the tensor map of a copy. See
drawing.py for what a `Picture` can do.
"""

import numpy as np

from . import fragments as layouts
from .drawing import COLOURS, FAULT, GRID, INK, PALE, Picture
from .tensor_map import CHUNK, swizzled
from .warp_matrix import bfloat16_of_words, float16_of_words, tf32_of_words
from .warp_requests import BANKS, WORD, count_wavefronts
from .wgmma_layouts import accumulator_place

LINE = BANKS * WORD  # bytes that all banks together hold side by side
MARGIN, TITLE = 24, 64  # pixels: around a picture, and above for its title
SHADES = COLOURS[0], COLOURS[1], COLOURS[2], COLOURS[3]  # of registers

MMA = {  # shape -> ((rows, columns), layout) of A, B and C
    "m16n8k16": (
        ((16, 16), layouts.fragment_a_m16n8k16),
        ((16, 8), layouts.fragment_b_m16n8k16),
        ((16, 8), layouts.fragment_c_m16n8),
    ),
    "m16n8k8": (
        ((16, 8), layouts.fragment_a_m16n8k8),
        ((8, 8), layouts.fragment_b_m16n8k8),
        ((16, 8), layouts.fragment_c_m16n8),
    ),
    "m16n8k8 tf32": (
        ((16, 8), layouts.fragment_a_m16n8k8_tf32),
        ((8, 8), layouts.fragment_b_m16n8k8_tf32),
        ((16, 8), layouts.fragment_c_m16n8),
    ),
}


# Fragments ----------------------------------------------------------------------------------------


def owners(layout, lanes=layouts.LANES):
    """{(row, column): (lane, register, place in the register)} of a layout of fragments.py."""
    found = {}
    for lane in range(lanes):
        for register, elements in enumerate(layout(lane)):
            for place, element in enumerate(elements):
                found[tuple(int(i) for i in element)] = lane, register, place
    return found


def numbers(product):
    """The shape of a `Film.products` entry, and its A, B and D: {(row, column): value}."""
    name, brain = product.name.removesuffix(".bf16"), product.name.endswith(".bf16")
    shape = next(
        s for s in sorted(MMA, key=len, reverse=True) if name.endswith(s.replace(" ", "."))
    )
    a, b, _, d = product.registers
    elements = (
        tf32_of_words
        if shape.endswith("tf32")
        else bfloat16_of_words
        if brain
        else float16_of_words
    )
    return shape, [
        {
            at: float(values[lane, register, place])
            for at, (lane, register, place) in owners(layout).items()
        }
        for values, (_, layout) in zip(
            (elements(a), elements(b), d[..., None]), MMA[shape], strict=True
        )
    ]


def mma(shape="m16n8k16", lane=5):
    """Fragments of A, B and C of an mma, laid out as the product is written: B above C, A to its
    left.

    shape: of the instruction, or one of `Film.products`, whose numbers are then shown (those of D
    in C's place).
    Each element says its lane (T5) and its register (a2; b0.1 is the upper half of register b0), or
    its number. The colour is the register's, and the elements of one lane have a thick edge.
    """
    product, values = None, (None, None, None)
    if not isinstance(shape, str):
        product = shape
        shape, values = numbers(product)
    (a_size, a), (b_size, b), (c_size, c) = MMA[shape]
    wide, high, gap = 62, 30, 46
    a_width, b_height = a_size[1] * wide, b_size[0] * high
    left, top = MARGIN + 26, TITLE + 30
    picture = Picture(
        left + a_width + gap + c_size[1] * wide + MARGIN + 10,
        top + b_height + gap + c_size[0] * high + 66,
    )
    what = "which lane and register holds which element"
    if product is not None:
        what = f"warp {product.warp} of block {product.block} at {product.place}"
    picture.text(MARGIN, 28, f"mma {shape}: {what}", 18, "start", bold=True)
    right, below = left + a_width + gap, top + b_height + gap
    _fragment(
        picture, left, below, a_size, a, "a", wide, high, lane, f"A  {_sizes(a_size)}", values[0]
    )
    _fragment(
        picture, right, top, b_size, b, "b", wide, high, lane, f"B  {_sizes(b_size)}", values[1]
    )
    _fragment(
        picture,
        right,
        below,
        c_size,
        c,
        "c",
        wide,
        high,
        lane,
        f"{'C and D' if product is None else 'D = A · B + C'}  {_sizes(c_size)}",
        values[2],
    )
    x, y = left, top + 4
    notes = [
        f"T{lane} is lane {lane} of the warp, a1 its register number 1 of A.",
        "Two float16 share a register:",
        "a1.0 is its low half, a1.1 its high half.",
        f"Thick edges: all that lane {lane} holds.",
    ]
    if all(place == 0 for _, _, place in owners(a).values()):
        notes = [notes[0], notes[-1]]
    if product is not None:
        notes = [f"T{lane} is lane {lane} of the warp, and holds the adjacent number.", notes[-1]]
    for k, note in enumerate(notes):
        picture.text(x, y + 22 * k, note, 14 if a_width > 500 else 12, "start")
    count = max(register for layout in (a, b, c) for _, register, _ in owners(layout).values()) + 1
    _register_legend(picture, x, picture.height - 30, count)
    return picture


def fragment(layout, size, name="r", title="", lane=None):
    """One fragment alone. layout: as in fragments.py; size: (rows, columns); name: what its
    registers are called"""
    wide, high = 62, 30
    picture = Picture(MARGIN * 2 + 26 + size[1] * wide, TITLE + 30 + size[0] * high + 60)
    picture.text(MARGIN, 28, title or getattr(layout, "__name__", ""), 16, "start", bold=True)
    _fragment(picture, MARGIN + 26, TITLE + 30, size, layout, name, wide, high, lane, "")
    _register_legend(
        picture, MARGIN + 26, picture.height - 30, max(r for _, r, _ in owners(layout).values()) + 1
    )
    return picture


def ldmatrix(count=4, transposed=False, lane=5):
    """`ldmatrix` of 1, 2 or 4 matrices of 8 × 8 float16: which lane's address each row is, and the
    lane of each element.

    The matrices are drawn in their layout in shared memory, each row 16 bytes at the address that
    one lane gives.
    """
    layout = layouts.matrix_8x8_transposed if transposed else layouts.matrix_8x8
    wide, high, rows = 62, 30, 110
    picture = Picture(MARGIN * 2 + rows + 8 * wide, TITLE + 20 + count * (8 * high + 52) + 34)
    name = f"ldmatrix.x{count}{'.trans' if transposed else ''}"
    picture.text(MARGIN, 28, f"{name}: from rows to registers", 18, "start", bold=True)
    picture.text(
        MARGIN,
        52,
        f"T{lane} r0.1: high half of register 0 of lane {lane}. Thick edges: all it gets.",
        12,
        "start",
    )
    for matrix in range(count):
        top = TITLE + 52 + matrix * (8 * high + 52)
        _fragment(
            picture,
            MARGIN + rows,
            top,
            (8, 8),
            layout,
            "r",
            wide,
            high,
            lane,
            f"matrix {matrix}",
            None,
            matrix,
        )
        for row in range(8):
            picture.text(
                MARGIN,
                top + (row + 0.5) * high,
                f"address of T{8 * matrix + row}",
                11,
                "start",
                colour=PALE,
            )
    return picture


def _fragment(
    picture, left, top, size, layout, name, wide, high, lane, title, values=None, first=0
):
    """Draw a fragment. values: {(row, column): number}, written in place of registers; first:
    number of the first register"""
    rows, columns = size
    found = owners(layout)
    packed = any(place for _, _, place in found.values())
    picture.text(left + columns * wide / 2, top - 30, title, 14, bold=True)
    for column in range(columns):
        picture.text(left + (column + 0.5) * wide, top - 10, column, 11, colour=PALE)
    for row in range(rows):
        picture.text(left - 8, top + (row + 0.5) * high, row, 11, "end", colour=PALE)
        for column in range(columns):
            x, y = left + column * wide, top + row * high
            owner = found.get((row, column))
            if owner is None:
                picture.rectangle(x, y, wide, high, "#ffffff", GRID)
                continue
            who, register, place = owner[0], owner[1] + first, owner[2]
            label = f"{name}{register}.{place}" if packed else f"{name}{register}"
            picture.rectangle(
                x,
                y,
                wide,
                high,
                SHADES[register % 4],
                "#ffffff",
                1,
                tip=f"({row}, {column}) is in lane {who}, {label}",
            )
            picture.text(x + 5, y + high / 2, f"T{who}", 13, "start", bold=who == lane)
            if values is not None:
                label = f"{values[row, column]:.3g}"
            picture.text(x + wide - 4, y + high / 2, label, 10, "end")
    for (row, column), (who, _, _) in found.items():
        if who == lane:
            picture.rectangle(
                left + column * wide + 1, top + row * high + 1, wide - 2, high - 2, None, INK, 2.5
            )
    picture.rectangle(left, top, columns * wide, rows * high, None, INK, 1.5)


def _register_legend(picture, x, y, count):
    picture.text(x, y, "register", 12, "start")
    for register in range(min(count, 4)):
        picture.rectangle(x + 62 + 52 * register, y - 8, 20, 16, SHADES[register], GRID)
        picture.text(x + 87 + 52 * register, y, register, 12, "start")


def wgmma_accumulator(n=16, thread=37, place=accumulator_place):
    """D (64 × n) of a wgmma: which of the 128 threads holds which element in which accumulator.

    thread: the one whose elements have a thick edge; place(thread, register) -> (row, column)
    """
    wide, high = 60, 17
    left, top = MARGIN + 110, TITLE + 32
    picture = Picture(left + n * wide + MARGIN, top + 64 * high + 56)
    picture.text(
        MARGIN, 28, f"wgmma m64n{n}k16: the accumulators of a warpgroup", 18, "start", bold=True
    )
    picture.text(
        MARGIN,
        52,
        f"T{thread} d2 is accumulator number 2 of thread {thread}. Thick edges: all that "
        f"thread {thread} holds.",
        12,
        "start",
    )
    for column in range(n):
        picture.text(left + (column + 0.5) * wide, top - 10, column, 11, colour=PALE)
    for row in range(64):
        picture.text(left - 8, top + (row + 0.5) * high, row, 10, "end", colour=PALE)
    outlined = []
    for who in range(128):
        for register in range(n // 2):
            row, column = (int(i) for i in place(who, register))
            x, y = left + column * wide, top + row * high
            picture.rectangle(
                x,
                y,
                wide,
                high,
                SHADES[who // 32],
                "#ffffff",
                1,
                tip=f"({row}, {column}) is d{register} of thread {who}",
            )
            picture.text(x + 5, y + high / 2, f"T{who}", 10, "start", bold=who == thread)
            picture.text(x + wide - 5, y + high / 2, f"d{register}", 10, "end")
            if who == thread:
                outlined.append((x, y))
    for x, y in outlined:
        picture.rectangle(x + 1, y + 1, wide - 2, high - 2, None, INK, 2)
    for warp in range(4):
        y = top + 16 * warp * high
        picture.rectangle(left, y, n * wide, 16 * high, None, INK, 1.5)
        picture.text(MARGIN, y + 8 * high - 8, f"warp {warp}", 13, "start", bold=True)
        picture.text(
            MARGIN, y + 8 * high + 10, f"T{32 * warp} … T{32 * warp + 31}", 11, "start", colour=PALE
        )
    picture.text(
        left,
        picture.height - 26,
        "The pattern repeats every 8 columns, with the next four accumulators.",
        12,
        "start",
    )
    return picture


# A tile in shared memory --------------------------------------------------------------------------


def numbered(shape, dtype=np.float16):
    """An array whose 16-bit elements are the bit patterns 1, 2, 3 …: each element's place can then
    be seen."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize // 2
    return (np.arange(1, count + 1) & 0xFFFF).astype(np.uint16).view(dtype).reshape(shape)


def chunks_found(copy):
    """The places of a TMA load's chunks: an int array (rows, chunks a row) of byte offsets in the
    tile, -1 for chunks outside of the tensor. It is read off the bytes in shared memory, which must
    all be different (see `numbered`), if they have not been overwritten since.
    """
    tensor, memory = copy.tensor, copy.memory
    box = np.zeros(tensor.box[::-1], f"V{tensor.itemsize}")
    inside = tensor.inside(copy.at)
    if all(high > low for low, high in inside):
        box[tuple(slice(low, high) for low, high in reversed(inside))] = tensor.elements(
            copy.at, inside
        )
    wanted = box.reshape(-1).view(np.uint8).reshape(-1, tensor.row_bytes // CHUNK, CHUNK)
    found_at = {}
    for offset in range(0, tensor.span, CHUNK):
        data = memory.bytes[copy.offset + offset : copy.offset + offset + CHUNK].tobytes()
        if any(data):
            if data in found_at:
                raise ValueError(
                    "two chunks of the tile are equal: load an array made by pictures.numbered."
                )
            found_at[data] = offset
    places = np.full(wanted.shape[:2], -1)
    for at in np.ndindex(places.shape):
        data = wanted[at].tobytes()
        if any(data):
            if data not in found_at:
                raise ValueError(
                    f"chunk {at[1]} of row {at[0]} of the box is nowhere in the tile: it has not arrived, "
                    "or was overwritten since."
                )
            places[at] = found_at[data]
    return places


def swizzled_tile(copy=None, rows=16, row_bytes=128, swizzle=128, address=0, chunk=2):
    """A tile in shared memory: on the left as the program sees it, on the right as stored; colours
    are banks.

    copy: a load of `Film.copies`, whose bytes are looked at in shared memory; without one the tile
    is worked out from rows, row_bytes and swizzle (0, 32, 64, 128 bytes) at a shared address. At
    most `rows` rows are drawn.
    chunk: the column of 16-byte chunks that is outlined: rows 0 … 7 of it are read together by
    `ldmatrix`
    """
    if copy is not None:
        tensor = copy.tensor
        row_bytes, swizzle, address = (
            tensor.row_bytes,
            tensor.swizzle,
            copy.memory.address + copy.offset,
        )
        places = chunks_found(copy)[:rows]
        source = f"load of {tensor.name} at {list(copy.at)}, read from shared memory"
    else:
        offsets = (
            np.arange(rows)[:, None] * max(row_bytes, swizzle)
            + np.arange(row_bytes // CHUNK)[None, :] * CHUNK
        )
        places, source = swizzled(address + offsets, swizzle) - address, "where a copy would put it"
    rows, columns = places.shape
    chunk = min(chunk, columns - 1)
    lines = -(-(int(places.max()) + CHUNK) // LINE)
    wide, high, left, top = 64, 30, MARGIN + 64, TITLE + 76
    second = left + columns * wide + 110
    height = top + max(rows, lines) * high + 112
    picture = Picture(max(second + LINE // CHUNK * wide + MARGIN, 920), height)
    named = f"swizzle of {swizzle} bytes" if swizzle else "no swizzle"
    picture.text(MARGIN, 28, f"A tile of {row_bytes}-byte rows, {named}", 18, "start", bold=True)
    picture.text(MARGIN, 52, f"{source}; cells are chunks of 16 bytes", 12, "start", colour=PALE)
    picture.text(left, top - 42, "as the program means it", 14, "start", bold=True)
    picture.text(second, top - 42, "as stored in shared memory", 14, "start", bold=True)
    for c in range(columns):
        picture.text(left + (c + 0.5) * wide, top - 12, f"chunk {c}", 11, colour=PALE)
    for k in range(LINE // CHUNK):
        picture.text(second + (k + 0.5) * wide, top - 12, f"{4 * k}–{4 * k + 3}", 11, colour=PALE)
    picture.text(second - 8, top - 12, "banks", 11, "end", colour=PALE)
    for line in range(lines):
        picture.text(
            second - 8,
            top + (line + 0.5) * high,
            f"{address + LINE * line:#x}",
            11,
            "end",
            colour=PALE,
        )
        for k in range(LINE // CHUNK):
            picture.rectangle(second + k * wide, top + line * high, wide, high, "#ffffff", GRID)
    outlines = []
    for row in range(rows):
        picture.text(left - 8, top + (row + 0.5) * high, f"row {row}", 11, "end", colour=PALE)
        for c in range(columns):
            place = int(places[row, c])
            x, y = left + c * wide, top + row * high
            if place < 0:
                picture.rectangle(
                    x,
                    y,
                    wide,
                    high,
                    "#ffffff",
                    GRID,
                    hatch=FAULT,
                    tip="outside of the tensor: zeros",
                )
                continue
            line, bank = divmod((address % LINE + place) // CHUNK, LINE // CHUNK)
            tip = f"row {row}, chunk {c}: address {address + place:#x}, banks {4 * bank} to {4 * bank + 3}"
            colour = COLOURS[bank]
            x2, y2 = second + bank * wide, top + line * high
            for x0, y0, label in ((x, y, f"{address + place:#x}"), (x2, y2, f"r{row} c{c}")):
                picture.rectangle(x0, y0, wide, high, colour, "#ffffff", 1.5, tip=tip)
                picture.text(x0 + wide / 2, y0 + high / 2, label, 12)
            if row < 8 and c == chunk:
                outlines += [(x, y), (x2, y2)]
    for x, y in outlines:
        picture.rectangle(x + 1.5, y + 1.5, wide - 3, high - 3, None, INK, 3)
    column = places[:8, chunk]
    column = column[column >= 0]
    if len(column):
        lanes = np.concatenate([address + column, np.full(32 - len(column), -1)])[:, None]
        waves = int(count_wavefronts(lanes, CHUNK)[0][0])
        which = (
            f"Outlined: chunk {chunk} of rows 0 … {len(column) - 1}, which ldmatrix reads at once: "
        )
        what = (
            "no two on the same banks, one wavefront."
            if waves == 1
            else (f"{waves} on the same banks, {waves} wavefronts.")
        )
        picture.text(
            left,
            height - 84,
            which + what,
            13,
            "start",
            bold=True,
            colour=INK if waves == 1 else FAULT,
        )
    picture.text(left, height - 52, "colour: the four banks of a chunk", 12, "start")
    for k in range(LINE // CHUNK):
        picture.rectangle(left + 92 * k, height - 36, 18, 14, COLOURS[k], GRID)
        picture.text(left + 24 + 92 * k, height - 29, f"{4 * k}–{4 * k + 3}", 12, "start")
    return picture


# Boxes of TMA -------------------------------------------------------------------------------------


def tma_box(copy, x_axis=None, y_axis=None):
    """The box of a tensor copy over its image; chunks outside are hatched, and are zeros.

    copy: of `Film.copies`, or several, drawn side by side. x_axis, y_axis: dimensions of the
    tensor, innermost 0; by default 0 and 1, or 1 and 2 where there are three or more (a row and a
    column of pixels, whose channels are 0).
    """
    copies = list(copy) if isinstance(copy, (list, tuple)) else [copy]
    if not copies:
        raise ValueError("there is no tensor copy to draw: the traced launch made none by TMA.")
    panels = [_Panel(c, x_axis, y_axis) for c in copies]
    low = [min(p.low[k] for p in panels) for k in (0, 1)]
    high = [max(p.high[k] for p in panels) for k in (0, 1)]
    for panel in panels:  # all on one scale, from one corner
        panel.fit(low, high)
    across = min(3, len(panels))
    width, height = max(p.width for p in panels), max(p.height for p in panels)
    down = -(-len(panels) // across)
    picture = Picture(
        max(across * (width + MARGIN) + MARGIN, 460), TITLE + down * (height + MARGIN) + 46
    )
    tensor = copies[0].tensor
    picture.text(MARGIN, 28, f"Tensor copies of {tensor.name}", 18, "start", bold=True)
    picture.text(
        MARGIN,
        52,
        f"tensor {_sizes(tensor.dims)}, box {_sizes(tensor.box)}, innermost dimension first",
        12,
        "start",
        colour=PALE,
    )
    for k, panel in enumerate(panels):
        panel.draw(
            picture,
            MARGIN + k % across * (width + MARGIN),
            TITLE + 8 + k // across * (height + MARGIN),
        )
    y = picture.height - 26
    for x, fill, hatch, label in (
        (MARGIN, "#eef2f6", None, "tensor"),
        (MARGIN + 96, COLOURS[2], None, "box"),
        (MARGIN + 168, "#ffffff", FAULT, "box outside of the tensor: zeros"),
    ):
        picture.rectangle(x, y - 8, 22, 16, fill, GRID, hatch=hatch)
        picture.text(x + 30, y, label, 12, "start")
    return picture


def _sizes(sizes):
    return " × ".join(str(n) for n in sizes)


class _Panel:
    """One box over its image."""

    def __init__(self, copy, x_axis, y_axis):
        tensor = copy.tensor
        several = tensor.rank >= 3
        self.x_axis = (1 if several else 0) if x_axis is None else x_axis
        self.y_axis = min(tensor.rank - 1, 2 if several else 1) if y_axis is None else y_axis
        self.copy = copy
        axes = self.x_axis, self.y_axis
        at, box, dims = ([v[a] for a in axes] for v in (copy.at, tensor.box, tensor.dims))
        self.at, self.box, self.dims = at, box, dims
        self.inside = [tensor.inside(copy.at)[a] for a in axes]
        self.low = [min(0, c) for c in at]
        self.high = [max(d, c + b) for d, c, b in zip(dims, at, box, strict=True)]

    def fit(self, low, high):
        """Show the elements from `low` to `high`, two corners (x, y)."""
        self.low, self.high = low, high
        cells = [h - low for h, low in zip(high, low, strict=True)]
        self.cell = max(1.0, min(26.0, 620 / cells[0], 620 / cells[1]))
        self.width, self.height = max(cells[0] * self.cell + 34, 290), cells[1] * self.cell + 76

    def draw(self, picture, left, top):
        tensor, copy, cell = self.copy.tensor, self.copy, self.cell
        others = [
            f"{copy.at[a]} in dimension {a}"
            for a in range(tensor.rank)
            if a not in (self.x_axis, self.y_axis)
        ]
        picture.text(
            left, top + 10, f"box at x = {self.at[0]}, y = {self.at[1]}", 14, "start", bold=True
        )
        picture.text(left + self.width, top + 10, ", ".join(others), 11, "end", colour=PALE)
        x0, y0 = left + 30 - self.low[0] * cell, top + 48 - self.low[1] * cell  # of element (0, 0)
        width, height = self.dims[0] * cell, self.dims[1] * cell
        picture.rectangle(x0, y0, width, height, "#eef2f6", INK, 1.5)
        bx, by = x0 + self.at[0] * cell, y0 + self.at[1] * cell
        picture.rectangle(
            bx, by, self.box[0] * cell, self.box[1] * cell, "#ffffff", None, hatch=FAULT
        )
        (x_low, x_high), (y_low, y_high) = self.inside
        if x_high > x_low and y_high > y_low:
            picture.rectangle(
                bx + x_low * cell,
                by + y_low * cell,
                (x_high - x_low) * cell,
                (y_high - y_low) * cell,
                COLOURS[2],
                None,
            )
        if cell >= 6:
            for k in range(self.dims[0] + 1):
                picture.line(x0 + k * cell, y0, x0 + k * cell, y0 + height, GRID)
            for k in range(self.dims[1] + 1):
                picture.line(x0, y0 + k * cell, x0 + width, y0 + k * cell, GRID)
        picture.rectangle(x0, y0, width, height, None, INK, 1.5)
        picture.rectangle(bx, by, self.box[0] * cell, self.box[1] * cell, None, "#2e7d32", 3)
        step = 1
        while step * cell < 24:
            step *= 2
        for k in range(0, self.dims[0], step):
            picture.text(x0 + (k + 0.5) * cell, top + 36, k, 10, colour=PALE)
        for k in range(0, self.dims[1], step):
            picture.text(left + 18, y0 + (k + 0.5) * cell, k, 10, "end", colour=PALE)
        outside = self.box[0] * self.box[1] - max(0, x_high - x_low) * max(0, y_high - y_low)
        picture.text(
            left + 30,
            top + self.height - 10,
            f"{outside} of the box's {self.box[0] * self.box[1]} places are outside",
            12,
            "start",
        )
