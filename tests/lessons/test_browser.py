"""The puzzles in a browser (docs/hooks/browser.py): its files suffice where there is no Numba, no
greenlet, no timer.

`python docs/hooks/browser.py site --check` judges all ten in headless Chromium.
"""

import pathlib
import runpy
import subprocess
import sys

import pytest

from tests.conftest import exhaustively

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = """
import signal
import sys
from importlib.machinery import PathFinder

found = PathFinder.find_spec
PathFinder.find_spec = lambda name, path=None, target=None: (
    None if name.partition(".")[0] in ("numba", "numba_cuda", "greenlet") else found(name, path, target))
del signal.setitimer
sys.path.insert(0, sys.argv[1])
import pathlib
from numdiff import emulator
with emulator.device():
    from numdiff.lessons import catalogue, judge
    number = int(sys.argv[2])
    verdict = judge.judge(catalogue.puzzles()[number], pathlib.Path(sys.argv[3]))
assert emulator.Emulator.generators and emulator.__file__.startswith(sys.argv[1])
print(verdict.stars, verdict.message)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    for path, text in runpy.run_path(str(ROOT / "docs" / "hooks" / "browser.py"))[
        "sources"
    ]().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    (folder / "program.py").write_text(PROGRAM)
    return folder


def judged(site, number, file):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "program.py", str(site), str(number), str(file)],
        capture_output=True,
        text=True,
        cwd=site,
    )
    return done.stdout or done.stderr


@pytest.mark.parametrize("number", [9, *exhaustively(*range(1, 9), 10)])
def test_a_solution_has_three_stars(site, number):
    (file,) = (ROOT / "numdiff" / "lessons" / "solutions").glob(f"{number:02}_*.py")
    assert judged(site, number, file).startswith("3 Right")


def test_a_missing_barrier_is_named(site, tmp_path):
    (file,) = (ROOT / "numdiff" / "lessons" / "solutions").glob("07_*.py")
    wrong = tmp_path / file.name
    wrong.write_text(file.read_text().replace("cuda.syncthreads()", "pass", 1))
    assert "Put cuda.syncthreads() between the two" in judged(site, 7, wrong)
