"""The puzzles: each solution has three stars, no stub is solved, and a wrong answer gets a sentence
that teaches."""

import ast
import pathlib
import re

import pytest

from numdiff.device import get_backend, ptx
from numdiff.lessons import catalogue, on_device
from numdiff.lessons.judge import judge, load
from tests import command

PUZZLES = catalogue.puzzles()
LONG = ()  # puzzles whose solutions take longer than the first command has for each
NUMBERS = [
    pytest.param(number, marks=pytest.mark.exhaustive if number in LONG else ())
    for number in PUZZLES
]


def judged(number, tmp_path, text):
    puzzle = PUZZLES[number]
    path = tmp_path / f"{puzzle.name}.py"
    path.write_text(text, encoding="utf-8")
    return judge(puzzle, path)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_solution_has_three_stars(number, tmp_path):
    verdict = judged(number, tmp_path, PUZZLES[number].solution)
    assert (verdict.stars, verdict.message) == (
        3,
        "Right, coalesced, and within the puzzle's limits.",
    )


def learner_of(number):
    path = catalogue.FOLDER / "solutions" / f"{PUZZLES[number].name}.py"
    return load(PUZZLES[number].solution, path)


@pytest.mark.parametrize("number", (1, 23, 28))
def test_a_solution_runs_on_a_device(number):
    right, seconds = on_device.run_on(
        get_backend("emulator"), PUZZLES[number].module, learner_of(number)
    )
    assert right and seconds > 0


@pytest.mark.needs("gpu")
@pytest.mark.parametrize("number", PUZZLES)
def test_a_solution_is_right_on_a_gpu(number):
    assert on_device.run_on(get_backend("cuda"), PUZZLES[number].module, learner_of(number))[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", PUZZLES)
def test_numba_compiles_a_solution_without_float64(number, monkeypatch):
    monkeypatch.setattr(ptx, "CAPABILITIES", ((9, 0, "a"),))
    on_device.run_on(get_backend("ptx"), PUZZLES[number].module, learner_of(number))


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
    "a syntax error": (
        MAP + "    out[i] = a[i] * * 2\n",
        r"Line 8 is no valid Python: .*Check brackets, colons",
    ),
    "an import that fails": (
        "import nothing_of_this_name\n" + MAP,
        "Line 1 raises ModuleNotFoundError.*Keep the imp",
    ),
    "an exception at module level": (
        MAP + "    out[i] = a[i] * a[i]\n\n\n1 / 0\n",
        "Line 11 raises ZeroDivisionError",
    ),
    "exit": (MAP + "    out[i] = a[i]\n\n\nexit()\n", r"Line 11 ends the program: remove exit\(\)"),
    "an unknown name": (MAP + "    out[i] = a[j]\n", "Line 8 .*NameError: name 'j' is not defined"),
    "a whole array": (MAP + "    out[:] = a * a\n", "single elements: index each array"),
    "a float as index": (MAP + "    out[i / 1] = a[i] * a[i]\n", "divide with //"),
    "a return value": (
        MAP + "    return a[i] * a[i]\n",
        "Line 8 returns a value, and a kernel returns nothing",
    ),
    "no compiler for a GPU": (
        "import numba\n" + MAP.replace("cuda.jit", "numba.njit"),
        "put @cuda.jit in the line ab",
    ),
    "bytes of zero": ("\0", "is no valid Python: source code string cannot contain null bytes"),
    "no decorator": (
        HEAD + "def kernel(a, out):\n    out[0] = a[0]\n",
        "put @cuda.jit in the line above its def",
    ),
    "other arguments": (
        HEAD + "@cuda.jit\ndef kernel(a):\n    a[0] = 1\n",
        r"calls it with \(a, out\)",
    ),
    "nothing written": (
        MAP,
        "The kernel writes nothing to out; each thread must store its result in out",
    ),
    "the array's name assigned": (
        MAP + "    out = a[i] * a[i]\n",
        r"line 8 gives a variable a new value: an element is out\[index\]",
    ),
    "wrong values": (
        MAP + "    out[i] = a[i]\n",
        r"out\[0\] is \S+, and NumPy gives \S+ \(32 of 32 elements differ\)",
    ),
    "an element left out": (
        MAP + "    if i > 0:\n        out[i] = a[i] * a[i]\n",
        r"No thread writes out\[0\] \(1 of 32 elements",
    ),
    "an index past the end": (
        MAP + "    out[i] = a[i + 1] * a[i]\n",
        r"Line 8 \(thread 31\): reads a\[32\]: .*with a.size",
    ),
    "a negative index": (
        MAP + "    out[i] = a[i - 1] * a[i]\n",
        r"index -1 is negative \(Numba .* guard the access",
    ),
    "all threads write one element": (
        MAP + "    out[0] = a[i] * a[i]\n",
        "Two threads write the same element",
    ),
    "a loop without end": (
        MAP + "    while i < 32:\n        out[i] = a[i] * a[i]\n",
        "Check the loop's condition",
    ),
    "out that is read": (
        MAP + "    out[i] += a[i] * a[i]\n",
        "Only the inputs, and what the kernel itself has written",
    ),
}


SYNC = "    cuda.syncthreads()\n"
CHANGED = {  # (puzzle, changes to its solution, stars, message)
    "no guard": (
        3,
        {"    if i < out.size:\n        out": "    out"},
        0,
        r"thread 50.*Guard .* with a\.size",
    ),
    "a guard that is off by one": (3, {"i < out": "i <= out"}, 0, r"index 50 is outside of 0 … 49"),
    "an integer literal": (3, {"np.float32(2)": "2"}, 1, r"in float64.*Write np\.float32\(2\)"),
    "row and column swapped": (
        4,
        {"row, column = cuda": "column, row = cuda"},
        0,
        "Is x the column, and y the row",
    ),
    "no guard of a matrix": (
        4,
        {"if row < out.shape[0] and": "if"},
        0,
        r"comparison with a\.shape\[0\]",
    ),
    "no number of the block": (
        6,
        {"cuda.blockIdx.x * cuda.blockDim.x + ": ""},
        0,
        "depend on the block",
    ),
    "no barrier": (7, {SYNC: ""}, 0, r"which thread 31 .*Put cuda.syncthreads\(\) between the two"),
    "no exchange": (
        7,
        {SYNC: "", "tile[63 - t]": "a[i - t + 63 - t]"},
        2,
        "does not use syncthreads",
    ),
    "a barrier in a branch": (
        8,
        {SYNC: "", "    if t >= 1:\n": "    if t >= 1:\n        cuda.syncthreads()\n"},
        0,
        "reached by 63 of the block's 64 threads.*move it out of the `if`",
    ),
    "a loop in each thread": (
        1,
        {"i = cuda.threadIdx.x\n": "for i in range(a.size):\n", "    out[i]": "        out[i]"},
        2,
        "96 loads and stores of global memory; three stars need at most 3. No loop is needed",
    ),
    "global memory read thrice": (
        8,
        {"tile[t - 1]": "a[t - 1]", "tile[t - 2]": "a[t - 2]"},
        2,
        "8 loads and stores of global memory; three stars need at most 4",
    ),
    "a tree without barriers": (9, {"        cuda.syncthreads()\n": ""}, 0, "Put cuda.syncthreads"),
    "a tree that is too wide": (
        9,
        {"t < step": "t <= step"},
        0,
        "sums is shorter than that: is the index off by one",
    ),
    "a halo that is off by one": (
        10,
        {"t < 4": "t < 3"},
        0,
        r"tile\[67\], which was never written.*the halo too",
    ),
    "two writes of an element": (
        10,
        {"tile[64 + t]": "tile[63 + t]"},
        0,
        "Two threads write the same element",
    ),
    "a filter that is flipped": (10, {"w[k] *": "w[4 - k] *"}, 0, "and NumPy gives"),
    "chunks instead of strides": (
        12,
        {"range(t, a.shape[1], 64)": "range(t * 3, min(t * 3 + 3, a.shape[1]))"},
        1,
        "not coalesced: in line 13 .*Neighbouring threads",
    ),
    "a shuffle in a branch": (
        15,
        {"while step > 0:": "while step > 0 and lane < 16:"},
        0,
        "which has ended",
    ),
    "columns that are not neighbours": (
        18,
        {"t // 16": "t % 16", "t % 16": "t // 16"},
        1,
        "not coalesced: in line 15",
    ),
    "rows that are written as columns": (
        22,
        {"column + i, row + x] = tile[x, i]": "column + x, row + i] = a[row + i, column + x]"},
        1,
        "takes 18 transactions on average, and 4 would do",
    ),
    "no second barrier": (
        19,
        {"tile_b[k, x]\n        cuda.syncthreads()\n": "tile_b[k, x]\n"},
        0,
        "Put cuda.syncth",
    ),
    "no 16-byte loads": (
        21,
        {"load4(a, i)": "a[i], a[i + 1], a[i + 2], a[i + 3]"},
        1,
        "Use load4 and store4",
    ),
    "no padding": (
        22,
        {"(32, 33)": "(32, 32)"},
        2,
        "but 32-way bank conflicts in line 16; three stars need none",
    ),
    "a column of global memory": (
        22,
        {"column + i, row + x] = tile[x, i]": "column + x, row + i] = tile[i, x]"},
        1,
        "takes 32 transactions, and 4 would do",
    ),
    "float16 sums": (
        24,
        {"np.float32(a[row, column]) * np.float32(b": "(a[row, column]) * (b"},
        0,
        "in float16 that",
    ),
    "no wait for cp.async": (
        27,
        {"        cp_async_wait(1)\n": ""},
        0,
        "the cp.async still writes",
    ),
    "no wait for TMA": (
        28,
        {"    mbarrier_wait(barrier, 0)\n": ""},
        0,
        "Wait for the phase of the mbarrier",
    ),
    "too few bytes": (
        28,
        {"8 * 32 * 4": "8 * 32"},
        0,
        "but it expects 256.*its arrivals and its bytes",
    ),
    "no fence": (29, {"    wgmma_fence()\n": ""}, 0, "wgmma_fence before it"),
    "a wrong parity": (
        30,
        {"parity ^ 1": "parity"},
        0,
        "no thread can continue.*the parity with the phase",
    ),
}


@pytest.mark.parametrize("number, changes, stars, message", CHANGED.values(), ids=CHANGED)
def test_a_typical_mistake_gets_a_sentence(number, changes, stars, message, tmp_path):
    text = PUZZLES[number].solution
    for old in changes:
        assert old in text
    text = re.sub("|".join(map(re.escape, changes)), lambda found: changes[found[0]], text)
    verdict = judged(number, tmp_path, text)
    assert verdict.stars == stars and re.search(message, verdict.message), verdict
    assert "\n" not in verdict.message


def test_sums_by_atomics_have_no_fixed_order(tmp_path):
    add = (
        "    if t == 0:\n        out[0] = np.float32(0)\n"
        + SYNC
        + "    cuda.atomic.add(out, 0, a[t] * b[t])\n"
    )
    verdict = judged(
        9, tmp_path, HEAD + "@cuda.jit\ndef kernel(a, b, out):\n    t = cuda.threadIdx.x\n" + add
    )
    assert verdict.stars == 1 and "depend on the order of the threads" in verdict.message


@pytest.mark.parametrize("text, message", WRONG.values(), ids=WRONG)
def test_a_wrong_answer_gets_a_sentence(text, message, tmp_path):
    verdict = judged(1, tmp_path, text)
    assert verdict.stars == 0
    assert re.search(message, verdict.message), verdict.message
    assert "Traceback" not in verdict.message and "\n" not in verdict.message


def test_an_endless_computation_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("numdiff.lessons.judge.SECONDS", 0.2)
    verdict = judged(1, tmp_path, "while True:\n    pass\n")
    assert verdict.stars == 0 and verdict.message.startswith(
        "Stopped after 0.2 seconds in line 1: a loop"
    )


def test_float64_costs_two_stars(tmp_path):
    verdict = judged(1, tmp_path, MAP + "    out[i] = a[i] * a[i] * 1.0\n")
    assert verdict.stars == 1 and "line 8 computes in float64. A bare number" in verdict.message


def test_a_puzzle_from_the_list_to_its_stars(learn, tmp_path):
    code, text = learn()
    assert code == 0 and f"0 of {3 * len(PUZZLES)} stars. Next: numdiff learn 1" in text
    code, text = learn("1 --check")
    assert (
        code == 1 and "There is no file 01_map.py: open the puzzle with `numdiff learn 1`" in text
    )
    code, text = learn("1")
    assert code == 0 and "01_map.py: puzzle 1, map" in text and "NumPy: out = a * a" in text
    assert "numdiff learn 1 --check" in text
    code, text = learn("1")
    assert code == 2 and "exists, and is kept" in text
    assert learn("1 --solution")[0] == 2
    code, text = learn("1 --hint")
    assert code == 0 and text.startswith("1. ") and "2. " not in text
    for _ in range(3):
        code, text = learn("1 --check")
        assert code == 1 and "not solved" in text and "still says `# fill in`" in text
    code, text = learn("1 --solution")
    assert code == 0
    (tmp_path / "01_map.py").write_text(text, encoding="utf-8")
    code, text = learn("1 --check --counts")
    assert code == 0 and "3 stars" in text and "transactions per request" in text
    assert "***" in learn()[1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("99", "there is no puzzle 99"),
        ("--check", "give the number of a puzzle"),
        ("1 --check --hint", "give one of them"),
        ("1 --counts", "--counts needs --check"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments, message, learn):
    code, text = learn(arguments)
    assert code == 2 and message in text


def test_a_damaged_progress_file_counts_as_none(learn, tmp_path):
    (tmp_path / "cache" / "learn").mkdir(parents=True, mode=0o700)
    (tmp_path / "cache" / "learn" / "progress.json").write_text('{"1": []}', encoding="utf-8")
    code, text = learn()
    assert code == 0 and "Next: numdiff learn 1" in text


def test_a_film_of_the_learners_run(tmp_path):
    path, page = tmp_path / "07_shared.py", tmp_path / "07_shared.html"

    def film(text):
        page.unlink(missing_ok=True)
        path.write_text(text, encoding="utf-8")
        return command.run("learn 7 --film --folder", tmp_path)

    result = film(PUZZLES[7].solution)
    assert result.exit_code == 0 and result.output.startswith("The result is right"), result.output
    assert f"film in {page}: open it in a browser" in result.output and page.exists()
    wrong = re.sub(r".*syncthreads.*\n", "", PUZZLES[7].solution)
    assert "Put cuda.syncthreads() between the two" in film(wrong).output and page.exists()
    result = film("this is no Python")
    assert result.exit_code == 1 and "no valid Python" in result.output and not page.exists()
