"""The chapters: reads their cells, runs them as a notebook does, and writes them as a notebook or a
page.

    chapter = chapters()[1]
    for cell, printed, figures in chapter.run(): …
    chapter.notebook()          # the text of an .ipynb file
"""

import ast
import contextlib
import functools
import importlib
import io
import json
import linecache
import pathlib
import re
import types
from typing import NamedTuple

from ..errors import UsageError
from ..files import write_text

FOLDER = pathlib.Path(__file__).parent / "chapters"
CELL = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)
INSTALL = """# Installs numdiff; on a machine with an NVIDIA GPU with what Numba needs there
import shutil

extra = "[cuda12]" if shutil.which("nvidia-smi") else ""
%pip install -q "numdiff-diffusion{extra} @ git+{source}"
"""


class Cell(NamedTuple):
    """A cell of a chapter. code: whether it is code; text: Markdown or Python; line: where it
    begins in the file"""

    code: bool
    text: str
    line: int


class Ran(NamedTuple):
    """A cell that has run. printed: what it wrote; figures: what a notebook would show, as ("svg"
    or "html", text)"""

    cell: Cell
    printed: str
    figures: list


class Notebook:
    """A file of cells. path: of its file, such as 01_threads_and_memory.py"""

    def __init__(self, path):
        self.path, self.name = path, path.stem

    @functools.cached_property
    def cells(self):
        text = self.path.read_text(encoding="utf-8")
        marks = list(CELL.finditer(text))
        cells = []
        for mark, following in zip(marks, [*marks[1:], None], strict=True):
            body = text[mark.end() : following.start() if following else len(text)].strip("\n")
            # "# !" is a command
            body = re.sub(r"^# ?" if mark[1] else r"^# (?=!)", "", body, flags=re.MULTILINE)
            cells.append(Cell(not mark[1], body, text.count("\n", 0, mark.end()) + 1))
        return cells

    @property
    def prose(self):
        return "\n\n".join(cell.text for cell in self.cells if not cell.code)

    @property
    def title(self):
        """Such as "Threads and memory"."""
        return re.match(r"# (?:\d+\. )?(.*)", self.cells[0].text)[1]

    def notebook(self, source=None):
        """The text of an .ipynb file. source: the URL of a Git repository, for a first cell that
        installs numdiff."""
        cells = [(True, INSTALL.replace("{source}", source).rstrip("\n"))] if source else []
        cells += [(cell.code, cell.text) for cell in self.cells]
        return (
            json.dumps(
                {
                    "cells": [
                        {
                            "cell_type": "code" if code else "markdown",
                            "id": f"cell-{n}",
                            "metadata": {},
                            "source": text.splitlines(True),
                            **({"execution_count": None, "outputs": []} if code else {}),
                        }
                        for n, (code, text) in enumerate(cells)
                    ],
                    "metadata": {
                        "kernelspec": {
                            "display_name": "Python 3",
                            "language": "python",
                            "name": "python3",
                        },
                        "language_info": {"name": "python"},
                    },
                    "nbformat": 4,
                    "nbformat_minor": 5,
                },
                indent=1,
                ensure_ascii=False,
            )
            + "\n"
        )


class Chapter(Notebook):
    """One chapter."""

    @property
    def number(self):
        return int(self.name[:2])

    @property
    def puzzles(self):
        """The numbers of the puzzles that the text names, in its order."""
        return [
            int(n)
            for line in re.findall(r"^Puzzles?: ([\d, ]+)", self.prose, re.MULTILINE)
            for n in re.findall(r"\d+", line)
        ]

    @property
    def file(self):
        """The file of the project that the chapter ends with, from the repository's root."""
        return re.findall(r"`(numdiff/[\w/]+\.py)`", self.prose)[-1]

    def units(self):
        """[(title, lines)], a unit from each heading of the second level to the next."""
        found = []
        for cell in self.cells:
            lines = cell.text.splitlines()
            if not cell.code and (heading := re.match("## (.*)", cell.text)):
                found.append((heading[1], lines))
            elif found:
                found[-1][1].extend(lines)
        return found

    def run(self):
        """Run the cells one after the other, small products on one core; yields a `Ran` for each."""
        importlib.import_module("numpy")  # whose library has no limit before it is loaded
        from threadpoolctl import threadpool_limits  # which a browser has no use for

        with threadpool_limits(1):
            yield from self._run()

    def _run(self):
        module = types.ModuleType("__main__")
        module.__file__ = str(self.path)
        for number, cell in enumerate(self.cells):
            if not cell.code:
                yield Ran(cell, "", [])
                continue
            name = f"chapter {self.number}, cell {number}"
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                figures = run_cell(cell.text, name, module.__dict__)
            yield Ran(cell, printed.getvalue(), figures)

    def copy_to(self, folder):
        """Write the notebook into a folder and return its path; a `UsageError` if it exists."""
        path = pathlib.Path(folder) / f"{self.name}.ipynb"
        if path.exists() or path.is_symlink():
            raise UsageError(
                f"{path} exists, and is kept: open it, or move it away to begin again."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, self.notebook(), "the chapter")
        return path


def run_cell(text, name, names):
    """Run a cell, print the value of its last line as a notebook does, and return the figure that this
    value is: [("svg" or "html", text)], or []. name: of the cell in tracebacks; names: its globals"""
    linecache.cache[name] = len(text), None, (text + "\n").splitlines(True), name
    body = ast.parse(text, name).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), name, "exec"), names)
    value = eval(compile(ast.Expression(last.value), name, "eval"), names) if last else None
    figures = [
        (ending, figure())
        for ending, figure in (
            ("svg", getattr(value, "_repr_svg_", None)),
            ("html", getattr(value, "html", None)),
        )
        if figure
    ]
    if value is not None and not figures and not hasattr(value, "_ipython_display_"):
        print(repr(value))
    return figures


@functools.cache
def chapters():
    """{number: Chapter}"""
    return {
        chapter.number: chapter for chapter in map(Chapter, sorted(FOLDER.glob("[0-9][0-9]_*.py")))
    }


def chapter(number):
    """The chapter of this number; a `UsageError` if there is none."""
    known = chapters()
    if number not in known:
        raise UsageError(
            f"there is no chapter {number}: `numdiff learn` lists them, 1 to {max(known)}."
        )
    return known[number]
