"""What a page of the site runs in the browser: the judge, the film of a learner's kernel, and the
cells of a chapter, each with an answer as JSON.

docs/assets/browser-worker.js imports this module under Pyodide, after it has unpacked numdiff.zip.
"""

import contextlib
import io
import json
import pathlib
import tempfile
import types

# In a browser a thread is a generator, as there is no greenlet. Numba's names are the emulator's.
from numdiff import emulator

emulator.install()

from numdiff.lessons import catalogue, chapter, judge  # noqa: E402

FOLDER = pathlib.Path(tempfile.mkdtemp())  # of the learner's files
PRINTED = 4000  # characters of what a learner's kernel prints, at most
NOTEBOOK = types.ModuleType("__main__")  # what the cells of a page have defined


def file_of(number, text):
    """(puzzle, path of the learner's file)"""
    puzzle = catalogue.puzzle(number)
    path = FOLDER / f"{puzzle.name}.py"
    path.write_text(text, encoding="utf-8")
    return puzzle, path


def check(number, text):
    """{"stars", "message", "seconds", "printed"} of a learner's text."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        verdict = judge.judge(*file_of(number, text))
    return json.dumps(
        {
            "stars": verdict.stars,
            "message": verdict.message,
            "seconds": verdict.seconds,
            "printed": printed.getvalue()[:PRINTED],
        }
    )


def film(number, text):
    """{"page", "message"}: the film of a learner's text as a page, or None if it does not run."""
    found, message = judge.film_of(*file_of(number, text))
    return json.dumps({"page": found and found.html(), "message": message})


def cell(number, text):
    """{"printed", "figures", "error"} of one cell, which finds what the cells before have defined."""
    name, figures, error = f"cell {number}", [], None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            figures = chapter.run_cell(text, name, NOTEBOOK.__dict__)
        except (Exception, SystemExit) as raised:
            line = raised.lineno if isinstance(raised, SyntaxError) else None
            line = line or judge.line_in(raised, name)
            where = f"Line {line}: " if line else ""
            error = f"{where}{type(raised).__name__}: {raised}".rstrip(": ")
    return json.dumps({"printed": printed.getvalue(), "figures": figures, "error": error})
