"""`python -m numdiff.emulator program.py`: its findings, its status, its options; and how faults
are put together."""

import subprocess
import sys
import textwrap

import pytest
from numba import cuda  # noqa: F401  imported once, for all programs

from numdiff.emulator import CHECKS, ORDERS, Fault, Place, findings, options
from numdiff.emulator.__main__ import main
from numdiff.emulator.launch import STRICT
from tests.conftest import exhaustive

HEAD = """
import sys
import numpy as np
from numba import cuda

@cuda.jit
def shift(x, y):
    i = cuda.grid(1)
    y[i] = x[i + 1]

@cuda.jit
def flag(x, found):
    if x[cuda.grid(1)] > 0:
        found[0] = 1

@cuda.jit
def last(x, y):
    i = cuda.grid(1)
    y[i] = x[i - 1]
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """(status, output) of a program, run in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])

    def call(text, *arguments, given=()):
        (tmp_path / "program.py").write_text(HEAD + textwrap.dedent(text))
        status = main([*arguments, "program.py", *given])
        return status, capsys.readouterr()

    return call


def test_findings_are_printed_once(run):
    status, said = run(
        """
        x = np.ones(8, np.float32)
        for _ in range(3):
            shift[1, 8](x, np.zeros(8, np.float32))
        print(x.sum(), sys.argv[1:])
    """,
        given=["--cc", "7"],
    )
    assert status == 1 and said.out.startswith("8.0 ['--cc', '7']\n")
    assert said.out.endswith("""
bounds: reads x[8]: index 8 is outside of 0 … 7
    at program.py:9 in shift, block (0, 0, 0), thread (7, 0, 0): y[i] = x[i + 1]
    launched at program.py:23 in <module>: shift[1, 8](x, np.zeros(8, np.float32))
    3 times
    There are more threads than elements, or the index is computed wrongly: a thread without an element must not \
access the array. Guard the access by a comparison with x.size.

1 finding in 3 launches.
""")


def test_a_right_program_has_its_own_status(run):
    text = "shift[1, 7](np.ones(8, np.float32), np.zeros(8, np.float32))\n"
    status, said = run(text)
    assert status == 0 and said.out == "\n0 findings in 1 launch.\n"
    assert run(text + "sys.exit(3)")[0] == 3
    status, said = run(text + "1 / 0")
    assert status == 1 and "ZeroDivisionError" in said.err and "__main__.py" not in said.err


def test_a_launch_that_a_gpu_refuses(run):
    status, said = run("shift[1, 2000](np.ones(8, np.float32), np.zeros(8, np.float32))")
    assert status == 1
    assert said.err == (
        "LaunchRefused: shift: a block of 2000 threads is more than the 1024 that a GPU takes.\n    "
        "at program.py:20 in <module>: shift[1, 2000](np.ones(8, np.float32), np.zeros(8, np.float32))"
        "\n"
    )


@pytest.mark.parametrize(
    "given, status", [((), 1), (("--without", "negative"), 0), (("--without", "bounds"), 1)]
)
def test_a_negative_index_is_an_option(run, given, status):
    assert run("last[1, 8](np.ones(8, np.float32), np.zeros(8, np.float32))", *given)[0] == status


@pytest.mark.parametrize(
    "given, status", [((), 0), (("--strict",), 1), (("--strict", "--without", "race"), 0)]
)
def test_equal_writes_are_an_option(run, given, status):
    got, said = run("flag[1, 8](np.ones(8, np.float32), np.zeros(1, np.int32))", *given)
    assert got == status and said.out.count("race: writes found[0]") == status


def test_counts_and_float64_are_hints(run):
    status, said = run(
        """
        @cuda.jit
        def half(x, y):
            y[cuda.grid(1)] = x[cuda.grid(1) * 8] / 2
        half[1, 8](np.ones(64, np.float32), np.zeros(8, np.float32))
    """,
        "--counts",
    )
    assert status == 0 and said.out.endswith("\n0 findings, 2 hints in 1 launch.\n")
    place = said.out.index("float64:")
    assert place < said.out.index(
        "not coalesced: 4.5 sectors per request, where 1 would do (requests: 2)"
    )


def test_wrong_options_are_one_sentence(run, capsys):
    for given, words in (
        (["--orders", "4"], "'4' orders: there are 1"),
        (["--cc", "nine"], "no compute capability"),
        (["--order", "random"], "there is no order 'random'"),
        (["--seed", "x"], "no whole number"),
        (["--patience", "0"], "must be seconds"),
        (["missing.py"], "there is no file missing.py"),
        ([], "name a program"),
    ):
        with pytest.raises(SystemExit):
            main(given)
        assert words in capsys.readouterr().err.splitlines()[-1]


def test_options_are_those_of_the_emulator():
    assert (
        set(options.NAMES) == set(CHECKS)
        and (options.EQUAL,) == STRICT
        and options.THREAD_ORDERS == ORDERS
    )
    assert (
        options.capability("9.0a")
        == (9, 0)
        == options.capability((9, 0))
        == options.capability(9.0)
    )
    with pytest.raises(ValueError, match="there is no option 'speed': use some of cc, orders"):
        options.read({"speed": 2})


def test_one_finding_for_each_pair_of_lines():
    def race(line, other, count=1):
        return Fault(
            "race",
            "writes",
            Place("f", "a.py", line),
            [("read at", Place("f", "a.py", other))],
            count,
        )

    merged = findings.merge(
        {"forward": [race(1, 2), race(2, 1, 3), race(1, 3)], "reversed": [race(3, 1)]}
    )
    assert [(f.count, f.orders) for f in merged] == [(4, ["forward"]), (2, [])]


@exhaustive
def test_the_orders_run_one_after_the_other(tmp_path):
    (tmp_path / "program.py").write_text(
        HEAD
        + """
@cuda.jit
def first(y):
    if cuda.atomic.add(y, 0, 1) == 0 and cuda.threadIdx.x > 0:
        y[2] = 1
first[1, 8](np.zeros(2, np.int32))
print("said once")
"""
    )
    done = subprocess.run(
        [sys.executable, "-m", "numdiff.emulator", "--orders", "3", "--cc", "8.0", "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("said once") == 1 and "with the threads reversed" in done.stdout
    assert done.stdout.endswith("\n1 finding in 1 launch, in 3 thread orders.\n")
