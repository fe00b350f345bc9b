"""Measured figures: each version of each problem has a row for some card; entering and showing
them."""

import json
import sys

import pytest
from click.testing import CliRunner

from numdiff.benchmark.kernels import call_with, versions_of
from numdiff.benchmark.problems import problems, without_memory
from numdiff.device.planned import CARDS, Planned
from numdiff.errors import NumdiffError
from numdiff.extras.kernel_check.version import resident
from numdiff.kernels import figures, softmax
from numdiff_cli.main import main

H200 = next(card for card in CARDS if card.device_name == "NVIDIA H200")
PROBLEMS = {problem.name: problem for problem in problems()}

# {problem: versions} that are younger than the last measurement, beyond those that records mark
# (measured=False of a `Version`, measured="not yet" of a `Problem`): to be taken out with the next.
# 0: it has no versions
NOT_YET = {
    f"groupnorm_{direction}, {shape}, silu, float32": {2}
    for direction, shape in (
        ("forward", "32×64×64×64, 64"),
        ("backward", "32×64×64×64, 32×64×64×64"),
    )
} | {
    # its row was the launcher's choice, version 6
    "conv2d_forward, 32×64×64×64, 64×3×3×64, float16": {5},
    # layer by layer instead of by naive kernels of its own
    "linear_group_forward, 32×256, 482560, float32": {1},
    "linear_group_backward, 32×256, 482560, float32": {1},
}


def measurable(problem):
    """The versions of a problem that run on an H200; {0} where the operation has none."""
    known = problem.versions or versions_of(problem.call.function)
    arguments, found = without_memory(problem.call, Planned(H200)), set()
    for version in known:
        try:
            call_with(problem.call.function, arguments, version)
        except (ValueError, NumdiffError):  # not for these operands
            continue
        found.add(version)
    return found if known else {0}


def awaited(problem, versions):
    """Those of these versions whose figures the record says are still to be measured."""
    record = getattr(problem.call.function, "operation", None)
    young = (
        {version.number for version in record.versions if not version.measured} if record else set()
    )
    return versions if problem.awaited else young | NOT_YET.get(problem.name, set())


def lost(found, measured):
    """{problem: versions without figures}, and {problem: versions with figures that are said to be
    awaited}."""
    lacking, stale = {}, {}
    for name, problem in found.items():
        versions, has = measurable(problem), measured.get(name, set())
        lacking[name], stale[name] = (
            versions - has - awaited(problem, versions),
            has & awaited(problem, versions),
        )
    return tuple(
        {name: versions for name, versions in each.items() if versions} for each in (lacking, stale)
    )


def test_each_version_has_its_figures():
    measured = {}
    for card in figures.cards():
        for name, rows in card["problems"].items():
            measured.setdefault(name, set()).update(map(int, rows))
    assert lost(PROBLEMS, measured) == ({}, {})
    assert not measured.keys() - PROBLEMS.keys(), "figures of problems that there are no longer"


def test_figures_may_be_awaited(monkeypatch):
    problem = next(
        problem for problem in PROBLEMS.values() if problem.call.name == "softmax_forward"
    )
    found, has_all = {problem.name: problem}, {problem.name: {1, 2, 3}}
    assert lost(found, {problem.name: {1, 2}}) == ({problem.name: {3}}, {})
    monkeypatch.setattr(softmax.softmax_forward.operation.version(3), "measured", False)
    assert lost(found, {problem.name: {1, 2}}) == ({}, {}) and lost(found, has_all) == (
        {},
        {problem.name: {3}},
    )
    found[problem.name] = problem._replace(awaited=True)
    assert lost(found, {}) == ({}, {}) and lost(found, has_all) == ({}, {problem.name: {1, 2, 3}})


def row(version, us, **more):
    return {
        "problem": "matmul_forward, 8×8, 8×8, float16",
        "operation": "matmul_forward",
        "version": version,
        "us": us,
        "tflops": 758.31,
        "gb_s": 300.2,
        "roof": 0.768,
        "bound": "arithmetic",
        "torch_us": None,
        **more,
    }


def test_figures_are_entered(tmp_path, monkeypatch, capsys):
    results = {
        "card": "NVIDIA B200",
        "date": "2026-11-22",
        "torch": "2.11.0",
        "rows": [
            row("v5", 1640.04),
            row("v6*", 1450.0, torch_us=1464.5),
            {
                **row("v1", 20.0),
                "problem": "add_forward, 8, float32",
                "operation": "add_forward",
                "bound": "memory",
            },
        ],
    }
    path, count = figures.enter(results, tmp_path)
    assert path.name == "nvidia-b200.json" and count == 2
    again = {**results, "date": "2026-11-23", "rows": [row("v5", 1000.0)]}
    figures.enter(again, tmp_path)
    file = json.loads(path.read_text())
    assert (
        file["date"] == "2026-11-23"
        and file["problems"]["add_forward, 8, float32"]["1"]["us"] == 20
    )
    assert list(file["problems"]["matmul_forward, 8×8, 8×8, float16"]) == ["5"]
    number, kept = figures.row_of(results["rows"][1])
    assert figures.line_of(number, kept, ("5", {"us": 1640.0})) == (
        "v6*    1,450 µs   758 TFLOP/s   77 % of arithmetic   1.13 × v5   101 % of cuBLAS"
    )
    results["rows"] = [{"operation": "add"}]
    (tmp_path / "results.json").write_text(json.dumps(results))
    monkeypatch.setattr(sys, "argv", ["figures", str(tmp_path / "results.json")])
    with pytest.raises(SystemExit, match="give --of files"):
        figures.main()


def test_they_are_shown():
    result = CliRunner().invoke(main, ["kernels", "show", "softmax"])
    assert result.exit_code == 0, result.output
    assert (
        "softmax(scale · x) over the last axis" in result.output
        and "3  vectorised" in result.output
    )
    assert "NVIDIA H200, " in result.output and "49152×256, float32" in result.output
    refused = CliRunner().invoke(main, ["kernels", "show", "softmin"])
    assert refused.exit_code == 2 and "did you mean 'softmax'?" in refused.output
    listed = CliRunner().invoke(main, ["kernels", "list"])
    assert (
        "softmax_backward" in listed.output
        and "block-per-row, warp-per-row, vectorised" in listed.output
    )


def test_a_version_is_shown():
    result = CliRunner().invoke(main, ["kernels", "show", "softmax", "warp-per-row"])
    assert result.exit_code == 0, result.output
    assert (
        "softmax, version 2 (warp-per-row)" in result.output
        and "def softmax_forward_kernel_v2" in result.output
    )
    assert "difference to version 1 (block-per-row)" in result.output
    assert "-    shared = cuda.shared.array" in result.output
    assert "registers, " in result.output or "not compiled: " in result.output
    for arguments, message in (
        (["softmax", "9"], "there is no version 9 of softmax: use block-per-row"),
        (["softmax", "--ptx"], "name one after the operation"),
    ):
        refused = CliRunner().invoke(main, ["kernels", "show", *arguments])
        assert refused.exit_code == 2 and message in refused.output, refused.output


def test_blocks_that_fit_on_a_multiprocessor():
    assert resident((9, 0), 32, 128, 0) == (16, 64)  # warps limit
    assert resident((9, 0), 168, 384, 196 << 10) == (1, 64)  # shared memory and registers
    assert resident((8, 0), 255, 256, 0)[0] == 1
