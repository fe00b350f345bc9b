"""The script that writes measured figures into docstrings, on copies of the files and made-up results."""
import json
import sys

import pytest

from numdiff.benchmark.problems import problems
from tests.kernels import write_figures


def row(problem, version, us, **more):
    return {"problem": problem.name, "operation": problem.call.name, "version": version, "us": us, "tflops": 1e4 / us,
            "gb_s": 1e5 / us, "roof": 10 / us, "bound": "memory", "torch_us": None, "bandwidth": 4e12,
            "precision": "fp16", "peak": 1e15, **more}


@pytest.fixture
def results():
    """Of every version that a problem's files name, of all problems."""
    rows = []
    for problem in problems():
        versions = sorted(problem.versions or {v for some in problem.files.values() for v in some or ()}) or [1, 2]
        rows += [row(problem, f"v{v}" + "*" * (v == versions[-1]), 1000.0 / v) for v in versions]
    return {"card": "NVIDIA H200", "date": "2026-11-22", "torch": None, "rows": rows}


@pytest.fixture
def root(tmp_path):
    for module in {module for problem in problems() for module in problem.files}:
        source = write_figures.file_of(module)
        path = tmp_path / source.relative_to(write_figures.ROOT)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.read_text())
    return tmp_path


def docstring(path):
    return compile(path.read_text(), str(path), "exec").co_consts[0]


def test_every_file_gets_its_rows_and_nothing_else_changes(root, results):
    before = {path: path.read_text() for path in root.rglob("*.py")}
    done = write_figures.write(results, root)
    assert done.keys() == before.keys() and all(done.values())
    for path, text in before.items():
        assert docstring(path).count("\nMEASURED\n    NVIDIA H200, 2026-11-22: numdiff bench kernels") == 1
        old, new = (t.splitlines() for t in (text, path.read_text()))
        if "\nMEASURED\n" not in text:
            assert [line for line in new if line in set(old)] and set(old) <= set(new)
        assert text.partition('"""\n')[2].splitlines()[-1] == new[-1] and max(map(len, new)) <= 120
    softmax = docstring(root / "numdiff" / "kernels" / "softmax.py")
    assert "\n        v2*      500 µs      201 GB/s    5 % of memory   2.00 × v1\n" in softmax
    assert softmax.index("VERSIONS") < softmax.index("MEASURED") < softmax.index("\nLAUNCH")
    tiled = docstring(root / "numdiff" / "kernels" / "matmul" / "tiled.py")
    assert "v2" in tiled and "× v1" in tiled and "        v3" not in tiled and "        v1 " not in tiled


def test_figures_are_replaced(root, results):
    write_figures.write(results, root)
    first = {path: path.read_text() for path in root.rglob("*.py")}
    write_figures.write(results, root)
    assert first == {path: path.read_text() for path in root.rglob("*.py")}
    results["card"], results["rows"] = "NVIDIA B200", results["rows"][:2]
    done = write_figures.write(results, root)
    assert sum(done.values()) == 1
    path = next(path for path, written in done.items() if written)
    assert "B200" in docstring(path) and "H200" not in docstring(path)
    assert all(path.read_text() == text for path, text in first.items() if not done[path])


def test_a_line_says_what_a_rung_bought(results):
    problem = next(p for p in problems() if p.call.name == "matmul_level_forward")
    fast = row(problem, "v4*", 1450.0, tflops=758.3, bound="arithmetic", roof=0.77, torch_us=1464.5)
    line = write_figures.row_line(fast, row(problem, "v3", 1640.0))
    assert line == "        v4*    1,450 µs   758 TFLOP/s   77 % of arithmetic   1.13 × v3   101 % of cuBLAS"
    assert write_figures.number(0.0123) == "0.01" and write_figures.number(12.345) == "12.3"


def test_the_command(tmp_path, monkeypatch, results, capsys):
    path = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["write_figures", str(path)])
    path.write_text(json.dumps({**results, "rows": [{"operation": "add"}]}))
    with pytest.raises(SystemExit, match="give --of files"):
        write_figures.main()
    monkeypatch.setattr(write_figures, "write", lambda results: {write_figures.ROOT / "a.py": False,
                                                                 write_figures.ROOT / "b.py": True})
    path.write_text(json.dumps(results))
    write_figures.main()
    assert capsys.readouterr().out == ("a.py: nothing was measured, left as it is\n"
                                       "1 of 2 files have figures of NVIDIA H200\n")


def test_results_are_joined_and_priced(results):
    """The later file's rows of a problem; rates and shares of today's costs, and no version that it does not have."""
    problem = next(p for p in problems() if p.call.name == "matmul_level_forward")
    again = {**results, "rows": [row(problem, "v4*", 1600.0)]}
    rows = [r for r in write_figures.joined([results, again])["rows"] if r["problem"] == problem.name]
    assert [r["us"] for r in rows] == [1600.0]
    with pytest.raises(ValueError, match="of different cards"):
        write_figures.joined([results, {**results, "card": "NVIDIA B200"}])
    again["rows"].append({**row(problem, "v4*", 1.0), "problem": "an operation of long ago"})
    narrow = next(p for p in problems() if p.versions == (3,))
    again["rows"].append(row(narrow, "v2", 1.0))
    (only,) = write_figures.priced(again)["rows"]
    assert only["tflops"] == 2 * 8192**3 / 1600 / 1e6 and only["bound"] == "arithmetic"
    assert abs(only["roof"] - 2 * 8192**3 / 1e15 / 1600e-6) < 1e-12
