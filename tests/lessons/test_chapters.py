"""The chapters: each runs, prints the stored numbers, keeps to its form, and compiles for a GPU.

`python -m tests.lessons.test_chapters` stores again what the chapters print.
"""

import ast
import json
import pathlib
import re

import click
import numpy as np
import pytest
from PIL import Image

from numdiff.device import get_backend, ptx
from numdiff.lessons import catalogue, lab
from numdiff.lessons.chapter import Notebook, chapters
from numdiff_cli.main import main
from tests.command import output_of

CHAPTERS = chapters()
ROOT = pathlib.Path(__file__).resolve().parents[2]
PRINTED = pathlib.Path(__file__).parent / "printed"
LONG = 4, 5, 6  # chapters that take more than 3 s
NUMBERS = [pytest.param(n, marks=pytest.mark.exhaustive if n in LONG else ()) for n in CHAPTERS]
# a line of `measured`, which a measurement may change
STORED = re.compile(r"^  .* µs .*\n", re.MULTILINE)
ON_CARD = re.compile(r"^  on .*\n", re.MULTILINE)  # a line that only a machine with a GPU prints


def printed(number):
    """(what a chapter prints, each unit under its title; its figures)"""
    text, figures = "", []
    for each in CHAPTERS[number].run():
        if heading := re.match("## .*", each.cell.text):
            text += f"{heading[0]}\n"
        text, figures = text + each.printed, figures + each.figures
    return STORED.sub("", ON_CARD.sub("", text)), figures


@pytest.mark.parametrize("number", NUMBERS)
def test_a_chapter_prints_its_numbers(number):
    text, figures = printed(number)
    assert text == (PRINTED / f"{number}.txt").read_text(encoding="utf-8")
    starts = {"svg": ("<svg", "<?xml"), "html": "<!doctype html>"}
    assert len(figures) >= 3 and all(
        text.lstrip().startswith(starts[ending]) for ending, text in figures
    )


@pytest.mark.parametrize("number", CHAPTERS)
def test_a_unit_has_at_most_60_lines(number):
    units = CHAPTERS[number].units()
    assert len(units) >= 5
    assert {title: len(lines) for title, lines in units if len(lines) > 60} == {}


def test_the_tape_has_at_most_100_lines():
    units = dict(CHAPTERS[6].units())
    assert (
        sum(len(units[name]) for name in ("A tape", "Three operations, each with its gradient"))
        <= 100
    )


@pytest.mark.parametrize("number", CHAPTERS)
def test_a_chapter_ends_with_a_file_of_the_project(number):
    chapter = CHAPTERS[number]
    assert (ROOT / chapter.file).is_file()
    assert chapter.file in chapter.cells[-1].text
    for name in re.findall(r"`(numdiff/[\w/.]*)`", chapter.prose):
        assert (ROOT / name).exists(), name


def test_each_puzzle_belongs_to_one_chapter():
    named = [n for chapter in CHAPTERS.values() for n in chapter.puzzles]
    assert sorted(named) == sorted(catalogue.puzzles())


def test_commands_in_the_text_exist():
    for chapter in CHAPTERS.values():
        for line in re.findall(r"`(numdiff [^`\n]+)`", chapter.prose):
            command, words = main, line.split()[1:]
            while hasattr(command, "get_command"):
                command = command.get_command(click.Context(command), words.pop(0))
                assert command is not None, line
            known = {option for parameter in command.params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= known, line


@pytest.mark.parametrize("number", CHAPTERS)
def test_a_notebook_has_the_cells_and_installs_numdiff(number):
    chapter = CHAPTERS[number]
    cells = json.loads(chapter.notebook("https://example.org/numdiff@main"))["cells"]
    assert "git+https://example.org/numdiff@main" in "".join(cells[0]["source"])
    assert ["".join(cell["source"]) for cell in cells[1:]] == [cell.text for cell in chapter.cells]
    for cell in chapter.cells:
        if cell.code:
            ast.parse(cell.text)
    assert len(json.loads(chapter.notebook())["cells"]) == len(chapter.cells)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", CHAPTERS)
def test_numba_compiles_the_kernels_of_a_chapter(number, monkeypatch):
    """…and `run` says the same of a device as of a GPU."""
    monkeypatch.setattr(ptx, "CAPABILITIES", ((9, 0, "a"),))
    monkeypatch.setattr(lab, "why_no_gpu", lambda: "")
    monkeypatch.setattr(lab, "get_gpu", lambda: get_backend("ptx"))
    text = "".join(each.printed for each in CHAPTERS[number].run())
    assert "does not run there" not in text


def test_a_kernel_runs_on_a_device_too():
    x = np.arange(32, dtype=np.float32)
    from numba import cuda

    @cuda.jit
    def twice(x, y):
        i = cuda.threadIdx.x
        y[i] = x[i] + x[i]

    for wanted, message in ((x + x, "the same result"), (x, "another result")):
        line = lab.on_card(
            get_backend("emulator"), twice, 1, 32, (x, x), [x, np.zeros_like(x)], [x, wanted]
        )
        assert message in line and line.startswith("  on ")


@pytest.mark.exhaustive
# open images
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_the_notebook_that_trains_runs_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for cell in Notebook(ROOT / "docs" / "notebooks" / "train_on_a_t4.py").cells:
        if cell.code and cell.text.startswith("!numdiff "):
            output_of(cell.text.format(**names).removeprefix("!numdiff "))
        elif cell.code:
            exec(cell.text, names)
            names["STEPS"] = 2
    names["run"].joinpath("stats.jsonl").read_text(encoding="utf-8")
    with Image.open("emoji.png") as grid:
        assert grid.size[0] >= 6 * 32


def test_learn_lists_and_writes_chapters(learn, tmp_path):
    code, text = learn()
    assert code == 0 and all(
        f"chapter {n}  {chapter.title}" in text for n, chapter in CHAPTERS.items()
    )
    code, text = learn("--chapter 1")
    assert code == 0 and "01_threads_and_memory.ipynb: chapter 1, Threads and memory" in text
    assert (
        json.loads((tmp_path / "01_threads_and_memory.ipynb").read_text(encoding="utf-8"))[
            "nbformat"
        ]
        == 4
    )
    code, text = learn("--chapter 1")
    assert code == 2 and "exists, and is kept" in text


def test_learn_runs_a_chapter(learn, tmp_path):
    code, text = learn("--chapter 1 --run --folder figures")
    assert code == 0 and "square: 3 requests" in text and "## Bank conflicts" in text
    assert (tmp_path / "figures" / "01_threads_and_memory-1.svg").is_file()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--chapter 99", "there is no chapter 99"),
        ("--run", "--run needs --chapter"),
        ("1 --chapter 1", "a puzzle is another command"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments, message, learn):
    code, text = learn(arguments)
    assert code == 2 and message in text


if __name__ == "__main__":
    for number in CHAPTERS:
        (PRINTED / f"{number}.txt").write_text(printed(number)[0], encoding="utf-8")
