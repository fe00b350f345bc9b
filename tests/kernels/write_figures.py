"""Writes what was measured into the docstrings of the kernel files: their section MEASURED.

    numdiff bench kernels --of files --json results.json        on a GPU, with PyTorch for the share of cuBLAS and cuDNN
    python -m tests.kernels.write_figures results.json …        anywhere; of several files on one card later ones win

Which rows a file gets says numdiff/benchmark/problems/. A section that is there is replaced, else it is put behind
VERSIONS, or before LAUNCH or whatever comes next. A file whose problems are not in the results stays as it is. Only the
microseconds are taken as measured: rates and shares are what they make of the costs of today.
"""
import json
import pathlib
import re
import sys

import numdiff
from numdiff.benchmark.costs import roof_of
from numdiff.benchmark.problems import plan, problems
from numdiff.device.planned import CARDS

ROOT = pathlib.Path(numdiff.__file__).resolve().parents[1]
HEADING = "MEASURED"
BEFORE = "LAUNCH", "NEEDS", "DETERMINISM", "COST", "SOURCE", "READ NEXT"  # where it stands in a file without VERSIONS
LIBRARIES = {"matmul": "cuBLAS", "linear": "cuBLAS", "conv2d": "cuDNN"}  # what PyTorch calls for operations so named
DOCSTRING = re.compile(r'\A(?:r|)"""(.*?)"""', re.DOTALL)


def file_of(module, root=ROOT):
    path = root.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def number(x):
    """Three digits, without an exponent."""
    return f"{x:,.0f}" if x >= 99.95 else f"{x:.1f}" if x >= 9.995 else f"{x:.2f}" if x >= 0.1 else f"{x:.1g}"


def version_of(row):
    """1 for "v1" and "v1*"; 0 where an operation has none."""
    return int(row["version"].strip("v*") or 0)


def row_line(row, before):
    """A version's line: µs, rate, share of the roof that it meets first, what it bought, speed beside PyTorch's.

    before: the row of the version before it, or None
    """
    by_arithmetic = row["bound"] == "arithmetic" and row["tflops"]
    rate = f"{number(row['tflops'])} TFLOP/s" if by_arithmetic else f"{number(row['gb_s'])} GB/s"
    said = f"        {row['version']:4}{number(row['us']):>8} µs {rate:>13}"
    if row["roof"] is not None:
        said += f" {100 * row['roof']:4.0f} % of {'arithmetic' if by_arithmetic else 'memory'}"
    if before:
        said += f"  {number(before['us'] / row['us']):>5} × v{version_of(before)}"
    if row["torch_us"]:
        library = next((of for part, of in LIBRARIES.items() if row["operation"].startswith(part)), "PyTorch")
        said += f"  {100 * row['torch_us'] / row['us']:4.0f} % of {library}"
    return said.rstrip()


def section(results, wanted):
    """The lines of MEASURED. wanted: [(problem's name, versions or None)]; None where nothing of it was measured."""
    lines = []
    for name, versions in wanted:
        rows = sorted((row for row in results["rows"] if row.get("problem") == name), key=version_of)
        shown = [row_line(row, before) for before, row in zip([None, *rows], rows, strict=False)
                 if versions is None or version_of(row) in versions]
        lines += [f"    {name}", *shown] if shown else []
    if not lines:
        return None
    beside = f", PyTorch {results['torch']}" if results["torch"] else ""
    return [HEADING, f"    {results['card']}, {results['date']}{beside}: numdiff bench kernels --of files"
            + ("; * is the launcher's choice" if any("*" in line for line in lines) else ""), *lines]


def with_section(text, lines):
    """The text of a Python file whose docstring has these lines as its section MEASURED."""
    found = DOCSTRING.match(text)
    if not found:
        raise ValueError("no docstring to write into")
    old = found[1].split("\n")
    headings = [i for i, line in enumerate(old) if i and re.match(r"[A-Z]", line)]
    ends = {old[i].split("  ")[0].strip(): next((j for j in headings if j > i), len(old) - 1) for i in headings}
    starts = {old[i].split("  ")[0].strip(): i for i in headings}
    if HEADING in starts:
        first, last = starts[HEADING], ends[HEADING]
    elif "VERSIONS" in starts:
        first = last = ends["VERSIONS"]
    else:
        first = last = next((starts[name] for name in BEFORE if name in starts), len(old) - 1)
    new = old[:first] + lines + old[last:]
    return text[:found.start(1)] + "\n".join(new) + text[found.end(1):]


def priced(results):
    """The rows of the problems and versions that there are today, with rates and shares of today's costs."""
    card = next((card for card in CARDS if card.device_name == results["card"]), CARDS[0])
    known = {problem.name: problem for problem in plan(problems(), card)[0]}
    peaks = {row["precision"]: row["peak"] for row in results["rows"]}
    rows = []
    for row in results["rows"]:
        problem = known.get(row.get("problem"))
        if problem is None or problem.versions and version_of(row) not in problem.versions:
            continue
        call, us = problem.call, row["us"]
        peak = peaks.get(roof_of(call.name, call.dtype, problem.precision))
        by_memory = call.moved / row["bandwidth"] if row["bandwidth"] else 0.0
        by_arithmetic = (call.flops or 0) / peak if peak else 0.0
        rows.append({**row, "gb_s": call.moved / us / 1e3, "tflops": (call.flops or 0) / us / 1e6 or None,
                     "roof": max(by_memory, by_arithmetic) * 1e6 / us or None,
                     "bound": "memory" if by_memory >= by_arithmetic else "arithmetic"})
    return {**results, "rows": rows}


def joined(parts):
    """One of several results: each problem's rows from the last that has it. A `ValueError` for two cards."""
    if len({(part["card"], part["torch"]) for part in parts}) > 1:
        raise ValueError("the files are of different cards or versions of PyTorch: write figures of one")
    rows = {}
    for part in parts:
        found = {}
        for row in part["rows"]:
            found.setdefault(row.get("problem"), []).append(row)
        rows.update(found)
    return {**parts[-1], "rows": [row for group in rows.values() for row in group]}


def write(results, root=ROOT):
    """Rewrite the files; returns {path: whether something was measured for it}."""
    wanted, results = {}, priced(results)
    for problem in problems():
        for module, versions in problem.files.items():
            wanted.setdefault(module, []).append((problem.name, versions))
    done = {}
    for module, rows in wanted.items():
        path, lines = file_of(module, root), section(results, rows)
        done[path] = lines is not None
        if lines is not None:
            path.write_text(with_section(path.read_text(encoding="utf-8"), lines), encoding="utf-8")
    return done


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    parts = [json.loads(pathlib.Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]
    for name, part in zip(sys.argv[1:], parts, strict=True):
        if not any("problem" in row for row in part["rows"]):
            sys.exit(f"{name} has no rows of `numdiff bench kernels --of files`: give --of files.")
    results = joined(parts)
    done = write(results)
    for path, written in done.items():
        if not written:
            print(f"{path.relative_to(ROOT)}: nothing was measured, left as it is")
    print(f"{sum(done.values())} of {len(done)} files have figures of {results['card']}")


if __name__ == "__main__":
    main()
