"""The table of what a kernel costs (counts.py): a row for each line of source, a column for each
figure."""

import linecache
import os
from collections import Counter

from .memory import CONSTANT, GLOBAL, LOCAL, SHARED


def _say(value):
    return (
        ""
        if value == 0
        else f"{value:,}"
        if isinstance(value, int)
        else (f"{value:.1f}" if isinstance(value, float) else value)
    )


def _percent(figures):
    return f"{100 * figures.efficiency:.0f} %" if figures.sectors else 0


_OPERATIONS, _GLOBAL, _SHARED = "operations", "global memory", "shared memory"
_COLUMNS = [  # (group, title, value): a column that is zero in all is left out
    (_OPERATIONS, "FLOPs", lambda f: f.total_flops),
    (_OPERATIONS, "special", lambda f: f.special),
    (_OPERATIONS, "tensor FLOPs", lambda f: f.tensor_flops),
    (_OPERATIONS, "integer", lambda f: f.integer),
    (_GLOBAL, "read B", lambda f: f.read_bytes[GLOBAL]),
    (_GLOBAL, "written B", lambda f: f.write_bytes[GLOBAL]),
    (_GLOBAL, "requests", lambda f: f.requests),
    (_GLOBAL, "sectors", lambda f: f.sectors),
    (_GLOBAL, "ideal", lambda f: f.ideal_sectors),
    (_GLOBAL, "efficiency", _percent),
    (_SHARED, "read B", lambda f: f.read_bytes[SHARED]),
    (_SHARED, "written B", lambda f: f.write_bytes[SHARED]),
    (_SHARED, "requests", lambda f: f.shared_requests),
    (_SHARED, "wavefronts", lambda f: f.wavefronts),
    (_SHARED, "conflicts", lambda f: f.conflicts),
    ("local memory", "read B", lambda f: f.read_bytes[LOCAL]),
    ("local memory", "written B", lambda f: f.write_bytes[LOCAL]),
    ("constants", "read B", lambda f: f.read_bytes[CONSTANT]),
]
_BRIEF = [
    (_GLOBAL, "requests", lambda f: f.requests),
    (_GLOBAL, "transactions per request", lambda f: f.per_request),
    (_SHARED, "requests", lambda f: f.shared_requests),
    (_SHARED, "bank conflicts", lambda f: f.conflicts),
    (_OPERATIONS, "FLOPs", lambda f: f.total_flops),
    (_OPERATIONS, "special", lambda f: f.special),
    (_OPERATIONS, "tensor FLOPs", lambda f: f.tensor_flops),
]


def as_table(kernel, launches, lines, total, width, brief):
    """The table of a kernel, as `Recorder.table` says; lines: {(file, line): Figures}; total: their
    sum."""
    columns = [column for column in (_BRIEF if brief else _COLUMNS) if column[2](total)]
    rows = [["", ""], ["line", "source"]]
    for group, title, _ in columns:
        rows[0].append("" if group in rows[0] else group)  # above its first column
        rows[1].append(title)
    for (file, line), figures in lines.items():
        said = [_say(value(figures)) for _, _, value in columns]
        if any(said):
            source = linecache.getline(file, line).strip() or "?"
            source = source if len(source) <= width else source[: width - 1] + "…"
            rows.append([f"{os.path.basename(file)}:{line}", source, *said])
    rows.append(["total", "", *(_say(value(total)) for _, _, value in columns)])
    widths = [max(len(row[k]) for row in rows[1:]) for k in range(len(rows[0]))]
    for k in range(2, len(widths)):  # a group's name may reach over all of its columns
        if rows[0][k]:
            last = k
            while last + 1 < len(widths) and not rows[0][last + 1]:
                last += 1
            widths[last] += max(0, len(rows[0][k]) - sum(widths[k : last + 1]) - 2 * (last - k))
    text = [
        "  ".join(
            cell.ljust(w) if k < 2 else cell.rjust(w)
            for k, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows[1:]
    ]
    head, at = "", 0
    for k, w in enumerate(widths):
        if rows[0][k]:
            indent = (
                max(0, widths[k] - len(rows[0][k]))
                if k + 1 == len(widths) or rows[0][k + 1]
                else (w - len(rows[1][k]))
            )
            head = head.ljust(at + indent) + rows[0][k]
        at += w + 2
    rule = "-" * max(map(len, text))
    shapes = Counter((launch.grid, launch.block) for launch in launches)
    heads = [
        f"{kernel}: {n} launch{'es' * (n > 1)} of grid {grid}, block {block}"
        for (grid, block), n in shapes.items()
    ]
    last = (
        f"global memory: {total.distinct_read_bytes:,} distinct bytes read, "
        f"{total.distinct_write_bytes:,} written"
    )
    if total.sectors:
        last += f"; {total.sectors:,} sectors, {100 * total.efficiency:.0f} % of them needed"
    return "\n".join([*heads, head, text[0], rule, *text[1:-1], rule, text[-1], last])
