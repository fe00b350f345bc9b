"""Measured figures: what each version of each operation takes on a card, one JSON file a card.

    numdiff bench kernels --of files --json RESULTS     measures them on the GPU of this machine
    python -m numdiff.kernels.figures RESULTS           enters them into the card's file
    numdiff kernels show softmax                        prints them

A problem is named by its operation, shapes and dtype. A row has `us` (microseconds), `gb_s` or
`tflops`, `roof` (percent of what the memory or the arithmetic of the card allows, as `bound` says),
`library` (percent of the speed of cuBLAS, cuDNN or PyTorch in the same run) and `chosen` (it is
what the operation chooses by itself).
"""

import functools
import json
import pathlib
import re
import sys

FOLDER = pathlib.Path(__file__).parent
# what PyTorch calls for operations so named
LIBRARIES = {"matmul": "cuBLAS", "linear": "cuBLAS", "conv2d": "cuDNN"}


@functools.cache
def cards():
    """[{"card", "date", "torch", "problems": {problem: {number of a version: row}}}], one for each
    file."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))]


def three_digits(x):
    """A number with three digits, without an exponent."""
    return (
        f"{x:,.0f}"
        if x >= 99.95
        else f"{x:.1f}"
        if x >= 9.995
        else f"{x:.2f}"
        if x >= 0.1
        else f"{x:.1g}"
    )


def line_of(number, row, before=None):
    """A version's line. before: (number, row) of the version below it in the ladder."""
    label = f"v{number}" * bool(int(number)) + "*" * row.get("chosen", False)
    rate = (
        f"{three_digits(row['tflops'])} TFLOP/s"
        if "tflops" in row
        else f"{three_digits(row['gb_s'])} GB/s"
    )
    line = f"{label:4}{three_digits(row['us']):>8} µs {rate:>13}"
    if "roof" in row:
        line += f" {row['roof']:4.0f} % of {row['bound']}"
    if before:
        line += f"  {three_digits(before[1]['us'] / row['us']):>5} × v{before[0]}"
    if "library" in row:
        line += f"  {row['library'][0]:4.0f} % of {row['library'][1]}"
    return line


def lines_of(function):
    """The figures of an operation on all cards, as lines. function: its name, such as
    "softmax_forward"."""
    lines = []
    for card in cards():
        found = {
            name: rows
            for name, rows in card["problems"].items()
            if name.partition(",")[0] == function
        }
        if found:
            torch = f", PyTorch {card['torch']}" if card["torch"] else ""
            lines.append(f"{card['card']}, {card['date']}{torch}; * is what the operation chooses")
        for name, rows in found.items():
            lines.append(f"    {name.partition(', ')[2]}")
            items = list(rows.items())
            lines += [
                f"        {line_of(*item, before)}"
                for before, item in zip([None, *items], items, strict=False)
            ]
    return lines


def row_of(row):
    """(number of the version, row) from one of the rows of `numdiff bench kernels`."""
    kept = {"us": _rounded(row["us"])}
    by_arithmetic = row["bound"] == "arithmetic" and row["tflops"]
    kept["tflops" if by_arithmetic else "gb_s"] = _rounded(
        row["tflops"] if by_arithmetic else row["gb_s"]
    )
    if row["roof"] is not None:
        kept |= {
            "roof": round(100 * row["roof"]),
            "bound": "arithmetic" if by_arithmetic else "memory",
        }
    if row["torch_us"]:
        library = next(
            (name for part, name in LIBRARIES.items() if row["operation"].startswith(part)),
            "PyTorch",
        )
        kept["library"] = [round(100 * row["torch_us"] / row["us"]), library]
    if "*" in row["version"]:
        kept["chosen"] = True
    return row["version"].strip("v*") or "0", kept


def _rounded(x):
    return float(f"{x:.4g}")


def enter(results, folder=FOLDER):
    """Enter the rows of `numdiff bench kernels --of files` into the file of their card: (path,
    problems entered).

    A problem that was measured replaces its rows; all others stay, under the date of the newest
    measurement.
    """
    path = folder / f"{re.sub('[^a-z0-9]+', '-', results['card'].lower())}.json"
    file = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"problems": {}}
    measured = {}
    for row in results["rows"]:
        if "problem" in row:
            number, kept = row_of(row)
            measured.setdefault(row["problem"], {})[number] = kept
    problems = file["problems"] | measured
    text = ",\n".join(
        f" {json.dumps(name, ensure_ascii=False)}: {{\n"
        + ",\n".join(
            f"  {json.dumps(number)}: {json.dumps(rows[number])}"
            for number in sorted(rows, key=int)
        )
        + "}"
        for name, rows in sorted(problems.items())
    )
    head = {name: results[name] for name in ("card", "date", "torch")}
    path.write_text(f'{json.dumps(head)[:-1]}, "problems": {{\n{text}\n}}}}\n', encoding="utf-8")
    return path, len(measured)


def main():
    if len(sys.argv) < 2:
        sys.exit("usage: python -m numdiff.kernels.figures results.json [...]")
    for name in sys.argv[1:]:
        results = json.loads(pathlib.Path(name).read_text(encoding="utf-8"))
        if not any("problem" in row for row in results["rows"]):
            sys.exit(f"{name} has no rows of `numdiff bench kernels --of files`: give --of files.")
        path, count = enter(results)
        print(f"{path}: {count} problems of {results['card']}")
