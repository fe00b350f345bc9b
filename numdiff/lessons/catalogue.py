"""The puzzles by number: their texts, their parts, and copies for the learner."""

import ast
import functools
import importlib
import pathlib
import re
from dataclasses import dataclass

from ..errors import UsageError
from ..files import write_text

FOLDER = pathlib.Path(__file__).parent
MARK = "\n\n# For the judge "  # the line below which a puzzle's file is not copied


@dataclass(frozen=True)
class Puzzle:
    """One puzzle. name: that of its file, such as "01_map"."""

    name: str

    @property
    def number(self):
        return int(self.name[:2])

    @functools.cached_property
    def text(self):
        """What the learner gets."""
        return (FOLDER / "puzzles" / f"{self.name}.py").read_text(encoding="utf-8").partition(MARK)[
            0
        ].rstrip() + "\n"

    @functools.cached_property
    def solution(self):
        return (FOLDER / "solutions" / f"{self.name}.py").read_text(encoding="utf-8")

    @functools.cached_property
    def docstring(self):
        return ast.get_docstring(ast.parse(self.text))

    @property
    def title(self):
        """Such as "map: one thread for each element"."""
        return self.docstring.splitlines()[0].partition(", ")[2].rstrip(".")

    @property
    def specification(self):
        """One line of NumPy."""
        return re.search(r"^NumPy: (.*)$", self.docstring, re.MULTILINE)[1]

    @property
    def module(self):
        """The puzzle's own module, with its problems and limits; it imports Numba."""
        return importlib.import_module(f"{__package__}.puzzles.{self.name}")

    def copy_to(self, folder):
        """Write the learner's file into a folder and return its path; a `UsageError` if it exists."""
        path = pathlib.Path(folder) / f"{self.name}.py"
        if path.exists() or path.is_symlink():
            raise UsageError(
                f"{path} exists, and is kept: judge it with --check, or move it away to begin again."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, self.text, "the puzzle")
        return path


@functools.cache
def puzzles():
    """{number: Puzzle}"""
    names = sorted(path.stem for path in (FOLDER / "puzzles").glob("[0-9][0-9]_*.py"))
    return {int(name[:2]): Puzzle(name) for name in names}


def puzzle(number):
    """The puzzle of this number; a `UsageError` if there is none."""
    known = puzzles()
    if number not in known:
        raise UsageError(
            f"there is no puzzle {number}: `numdiff learn` lists them, 1 to {max(known)}."
        )
    return known[number]
