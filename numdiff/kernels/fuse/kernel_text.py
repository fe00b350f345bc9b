"""A fused kernel as text: it is written line by line as one would by hand, then compiled.

SiLU in version 2 becomes

    def silu_forward_kernel_v2(x, y):
        i = cuda.grid(1) * 4
        if i < y.size:
            x_0, x_1, x_2, x_3 = load4(x, i)
            y_0 = silu(x_0)
            …
            store4(y, i, y_0, y_1, y_2, y_3)

Of an argument x the kernel has the numbers x_0, x_1 … of the neighbours that a thread takes: one,
four or eight. Where gradients are sums, loads, steps and stores are done for each of a chunk's
rows, and what is summed is added up on the
way: `down_columns`, `over_rows`.
SOURCE
    __init__.py.
READ NEXT
    chain.py
"""

import functools
import itertools
import keyword
import math

from ...device import cuda, float32, load4, store4
from ...device.eight import load8, store8
from ..reduce.trees import BLOCK, tree_sum
from .operations import EACH, NUMBER, PER_SAMPLE

SCOPE = {
    "BLOCK": BLOCK,
    "cuda": cuda,
    "float32": float32,
    "load4": load4,
    "load8": load8,
    "min": min,
    "range": range,
    "store4": store4,
    "store8": store8,
    "tree_sum": tree_sum,
}
RESERVED = {
    "C",
    "P",
    "W",
    "at",
    *(f"at{k}" for k in range(1, 9)),
    "channel",
    "chunk",
    "column",
    "columns",
    "dy",
    "i",
    "image",
    "lanes",
    "partial",
    "pixel",
    "row",
    "rows",
    "sample",
    "start",
    "thread",
    "tile",
    "to",
    "y",
    *keyword.kwlist,
}


class FusePlan:
    """One direction of a chain. inputs: {name: place}; steps: [(results, device function's name,
    its arguments)]; outputs: {array: (place, result)}; sums: {argument: (place, result)}, which are
    added up over rows.

    sizes: the lengths that its indices name; by_sample: whether its rows are those of each sample
    """

    def __init__(self, inputs, steps, outputs, sums):
        self.inputs, self.steps, self.outputs, self.sums = inputs, steps, outputs, sums
        places = [*inputs.values(), *(place for place, _ in (*outputs.values(), *sums.values()))]
        self.sizes = [
            size for size in ("sample", "W", "C") if any(size in place.flat for place in places)
        ]
        self.counted, self.by_sample = any(place.loads for place in places), PER_SAMPLE in places
        self.samples = sum(place is PER_SAMPLE for place, _ in sums.values())

    def row(self, shape):
        """How many neighbours of a y of this shape read neighbours of all arrays."""
        if "C" in self.sizes:
            return shape[-1]
        return math.prod(shape[1:] if self.counted else shape)


def kernel_text(name, plan, width, version, named):
    """A kernel as text, which takes `width` neighbours a thread, of the version that has these.

    named: function(name, device function), which says what the kernel calls it
    """
    once, lines = [], []  # before the loop over rows, if there is one; for each element
    known = {}  # {index as text: the name that a line has given it}

    def index(place):
        """An index of a place's arrays; what may serve several of them is computed in a line of its
        own."""
        text = (place.rows if plan.sums else place.flat).format(width=width)
        if text.isidentifier():
            return text
        if text not in known:
            short = functools.reduce(
                lambda line, other: line.replace(other, known[other]), known, text
            )
            known[text] = f"at{len(known) or ''}"
            (once if "channel" in text else lines).append(f"{known[text]} = {short}")
        return known[text]

    for a, place in plan.inputs.items():  # loads
        names = ", ".join(f"{a}_{k}" for k in range(width))
        if place.loads:
            lines.append(f"{names} = {named(f'load_{a}', place.loads[width])}({a}, i)")
        elif place.flat:
            load = (
                f"float32({a}[{index(place)}])"
                if width == 1
                else f"load{width}({a}, {index(place)})"
            )
            (once if plan.sums and "channel" in place.rows else lines).append(f"{names} = {load}")
    for results, function, arguments in plan.steps:  # each step for each neighbour
        lines += [
            ", ".join(f"{r}_{k}" for r in results)
            + f" = {function}("
            + ", ".join(a if plan.inputs.get(a) is NUMBER else f"{a}_{k}" for a in arguments)
            + ")"
            for k in range(width)
        ]
    lines += [
        store(a, index(place), [f"{result}_{k}" for k in range(width)])
        for a, (place, result) in plan.outputs.items()
    ]
    names = [*plan.inputs, *plan.outputs]
    if plan.sums:
        lines += [
            f"sum{s}_{k} += {value}_{k}"
            for s, (_, value) in enumerate(plan.sums.values())
            for k in range(width)
        ]
        names, body = (
            [*names, "partial", "P", "C"],
            (over_rows if version > 1 else down_columns)(
                once, lines, [[f"sum{s}_{k}" for k in range(width)] for s in range(len(plan.sums))]
            ),
        )
        names += ["lanes", "chunk"] if version > 1 else []
    else:
        names += plan.sizes
        places = {a: place for a, (place, _) in plan.outputs.items()} | plan.inputs
        body = [
            "i = cuda.grid(1)" + f" * {width}" * (width > 1),
            f"if i < {next(a for a in places if places[a] is EACH)}.size:",
            *indented(lines),
        ]
    head = f"def {name}({', '.join(names)}):"
    return "\n    ".join([head, *body]) + "\n"


def store(array, index, values):
    """A line that stores neighbours."""
    if len(values) == 1:
        return f"{array}[{index}] = {values[0]}"
    values = ", ".join(values)
    return (
        f"store8({array}, {index}, ({values}))"
        if values.count(",") == 7
        else f"store4({array}, {index}, {values})"
    )


def down_columns(once, lines, sums):
    """Version 1 of a kernel with sums: a thread a column of a sample. once: loads that are the same
    in all its rows."""
    return [
        f"column, columns = cuda.grid(1), partial.size // {len(sums)}",
        "if column < columns:",
        *indented(
            [
                "image, channel = column // C, column % C",
                *once,
                *(f"{value} = float32(0)" for (value,) in sums),
                "for pixel in range(P):",
                *indented(["i = (image * P + pixel) * C + channel", *lines]),
                *(f"partial[column + {s} * columns] = {value}" for s, (value,) in enumerate(sums)),
            ]
        ),
    ]


def over_rows(once, lines, sums):
    """Versions 2 and 3: a block a chunk of rows, as sum_rows_kernel_v3 of reduce/trees.py, with all else
    done on the way."""
    width, names = len(sums[0]), [name for some in sums for name in some]
    tiles = [
        [f"tile[{s * width + k} * BLOCK + thread]" for k in range(width)] for s in range(len(sums))
    ]
    return [
        f"tile = cuda.shared.array({len(names) * BLOCK}, float32)",
        "thread, rows = cuda.threadIdx.x, BLOCK // lanes",
        "row, image, start = thread // lanes, cuda.blockIdx.z, cuda.blockIdx.x * chunk",
        f"channel = (cuda.blockIdx.y * lanes + thread % lanes) * {width}",
        f"{' = '.join(names)} = float32(0)",
        "if row < rows and channel < C:",
        *indented(
            [
                *once,
                "for pixel in range(start + row, min(start + chunk, P), rows):",
                *indented(["i = (image * P + pixel) * C + channel", *lines]),
            ]
        ),
        f"{', '.join(itertools.chain(*tiles))} = {', '.join(names)}",
        f"tree_sum(tile, {len(names)}, thread, lanes, rows)",
        "if row == 0 and channel < C:",
        *indented(
            [
                "to = (image * cuda.gridDim.x + cuda.blockIdx.x) * C + channel",
                *itertools.chain(
                    *(
                        [
                            *(["to += cuda.gridDim.z * cuda.gridDim.x * C"] if s else []),
                            store("partial", "to", some),
                        ]
                        for s, some in enumerate(tiles)
                    )
                ),
            ]
        ),
    ]


def indented(lines):
    return [f"    {line}" for line in lines]
