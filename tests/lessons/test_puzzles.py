"""The puzzles: each solution has three stars, no stub is solved, and a wrong answer gets a sentence that teaches."""
import ast
import pathlib
import re

import pytest
from click.testing import CliRunner

from numdiff.lessons import catalogue
from numdiff.lessons.judge import judge
from numdiff_cli.main import main

PUZZLES = catalogue.puzzles()
LONG = ()  # puzzles whose solutions take longer than the first command has for each
NUMBERS = [pytest.param(number, marks=pytest.mark.exhaustive if number in LONG else ()) for number in PUZZLES]


def judged(number, tmp_path, text):
    puzzle = PUZZLES[number]
    path = tmp_path / f"{puzzle.name}.py"
    path.write_text(text, encoding="utf-8")
    return judge(puzzle, path)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_solution_has_three_stars(number, tmp_path):
    verdict = judged(number, tmp_path, PUZZLES[number].solution)
    assert (verdict.stars, verdict.message) == (3, "Right, coalesced, and within the puzzle's limits.")


@pytest.mark.parametrize("number", PUZZLES)
def test_a_stub_is_not_solved(number, tmp_path):
    verdict = judged(number, tmp_path, PUZZLES[number].text)
    assert verdict.stars == 0
    assert "still says `# fill in`" in verdict.message


@pytest.mark.parametrize("number", PUZZLES)
def test_a_puzzle_is_short_and_complete(number):
    puzzle = PUZZLES[number]
    assert number == puzzle.number and puzzle.docstring.startswith(f"Puzzle {number}, ")
    assert puzzle.title and puzzle.specification and puzzle.module.HINTS
    assert "For the judge" not in puzzle.text and "# fill in" in puzzle.text
    for text in (puzzle.text, puzzle.solution):
        ast.parse(text)
        code = re.sub(r'""".*?"""', "", text, flags=re.DOTALL)
        assert sum(bool(line.strip()) for line in code.splitlines()) <= 60
    solution = pathlib.Path(catalogue.FOLDER / "solutions" / f"{puzzle.name}.py")
    assert solution.read_text(encoding="utf-8").startswith(f'"""Puzzle {number}, {puzzle.title}.')


HEAD = "from numba import cuda\nimport numpy as np\n\n\n"
MAP = HEAD + "@cuda.jit\ndef kernel(a, out):\n    i = cuda.threadIdx.x\n"
WRONG = {
    "no file's text": ("", "no function `kernel`: keep the name"),
    "a syntax error": (MAP + "    out[i] = a[i] * * 2\n", r"Line 8 is no valid Python: .*Check brackets, colons"),
    "an import that fails": ("import nothing_of_this_name\n" + MAP, "Line 1 raises ModuleNotFoundError.*Keep the imp"),
    "an exception at module level": (MAP + "    out[i] = a[i] * a[i]\n\n\n1 / 0\n", "Line 11 raises ZeroDivisionError"),
    "exit": (MAP + "    out[i] = a[i]\n\n\nexit()\n", r"raises SystemExit.*Remove exit\(\)"),
    "an unknown name": (MAP + "    out[i] = a[j]\n", "Line 8 .*NameError: name 'j' is not defined"),
    "no decorator": (HEAD + "def kernel(a, out):\n    out[0] = a[0]\n", "put @cuda.jit in the line above its def"),
    "other arguments": (HEAD + "@cuda.jit\ndef kernel(a):\n    a[0] = 1\n", r"calls it with \(a, out\)"),
    "nothing written": (MAP, "The kernel writes nothing to out; each thread must store its result in out"),
    "wrong values": (MAP + "    out[i] = a[i]\n", r"out\[0\] is \S+, and NumPy gives \S+ \(32 of 32 elements differ\)"),
    "an element left out": (MAP + "    if i > 0:\n        out[i] = a[i] * a[i]\n",
                            r"No thread writes out\[0\] \(1 of 32 elements"),
    "an index past the end": (MAP + "    out[i] = a[i + 1] * a[i]\n",
                              r"Line 8 \(thread 31\): reads a\[32\]: .*if i < out.size"),
    "a negative index": (MAP + "    out[i] = a[i - 1] * a[i]\n", "A negative index counts from the end"),
    "all threads write one element": (MAP + "    out[0] = a[i] * a[i]\n", "Two threads write the same element"),
    "a loop without end": (MAP + "    while i < 32:\n        out[i] = a[i] * a[i]\n", "Check the loop's condition"),
    "out that is read": (MAP + "    out[i] += a[i] * a[i]\n",
                         "Only the inputs, and what the kernel itself has written"),
}


@pytest.mark.parametrize("text, message", WRONG.values(), ids=WRONG)
def test_a_wrong_answer_gets_a_sentence(text, message, tmp_path):
    verdict = judged(1, tmp_path, text)
    assert verdict.stars == 0
    assert re.search(message, verdict.message), verdict.message
    assert "Traceback" not in verdict.message and "\n" not in verdict.message


def test_an_endless_computation_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("numdiff.lessons.judge.SECONDS", 0.2)
    verdict = judged(1, tmp_path, "while True:\n    pass\n")
    assert verdict.stars == 0 and verdict.message.startswith("Stopped after 0.2 seconds of computing: a loop")


def test_float64_costs_two_stars(tmp_path):
    verdict = judged(1, tmp_path, MAP + "    out[i] = a[i] * a[i] * 1.0\n")
    assert verdict.stars == 1 and "line 8 computes in float64. A bare number" in verdict.message


@pytest.fixture
def learn(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMDIFF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        result = CliRunner().invoke(main, ["learn", *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        return result.exit_code, result.output
    return run


def test_a_puzzle_from_the_list_to_its_stars(learn, tmp_path):
    code, text = learn()
    assert code == 0 and f"0 of {3 * len(PUZZLES)} stars. Next: numdiff learn 1" in text
    code, text = learn("1", "--check")
    assert code == 1 and "There is no file 01_map.py: open the puzzle with `numdiff learn 1`" in text
    code, text = learn("1")
    assert code == 0 and "01_map.py: puzzle 1, map" in text and "NumPy: out = a * a" in text
    assert "numdiff learn 1 --check" in text
    code, text = learn("1")
    assert code == 2 and "exists, and is kept" in text
    assert learn("1", "--solution")[0] == 2
    code, text = learn("1", "--hint")
    assert code == 0 and text.startswith("1. ") and "2. " not in text
    for _ in range(3):
        code, text = learn("1", "--check")
        assert code == 1 and "not solved" in text and "still says `# fill in`" in text
    code, text = learn("1", "--solution")
    assert code == 0
    (tmp_path / "01_map.py").write_text(text, encoding="utf-8")
    code, text = learn("1", "--check", "--counts")
    assert code == 0 and "3 stars" in text and "transactions per request" in text
    assert "***" in learn()[1]


@pytest.mark.parametrize("arguments, message", [
    (("99",), "there is no puzzle 99"), (("--check",), "give the number of a puzzle"),
    (("1", "--check", "--hint"), "give one of them"), (("1", "--counts"), "--counts needs --check")])
def test_wrong_usage_is_one_sentence(arguments, message, learn):
    code, text = learn(*arguments)
    assert code == 2 and message in text


def test_a_damaged_progress_file_counts_as_none(learn, tmp_path):
    (tmp_path / "cache" / "learn").mkdir(parents=True, mode=0o700)
    (tmp_path / "cache" / "learn" / "progress.json").write_text('{"1": []}', encoding="utf-8")
    code, text = learn()
    assert code == 0 and "Next: numdiff learn 1" in text
