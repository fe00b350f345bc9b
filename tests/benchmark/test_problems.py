"""`numdiff bench kernels --of files`: a problem or two for each kernel file."""

import json

import pytest
from click.testing import CliRunner

from numdiff.benchmark import kernels, problems
from numdiff.device.planned import CARDS
from numdiff.errors import UsageError
from numdiff.training import compiling
from numdiff_cli.main import main

from .fake_gpu import FakeGpu

H200 = next(card for card in CARDS if card.device_name == "NVIDIA H200")


def test_problems_are_planned_without_a_gpu():
    """Each is taken by each of its versions, and what it must move and compute is known."""
    found, keys = problems.plan(problems.problems(), H200)
    assert (
        len({problem.name for problem in found}) == len(found) == len(problems.problems())
        and len(keys) > 150
    )
    for problem in found:
        assert problem.call.moved > 0, problem.name
        if any(
            word in problem.call.name
            for word in ("matmul", "conv2d", "attention", "linear_f", "linear_b")
        ):
            assert problem.call.flops > 4e8, problem.name
    on_a100 = {
        p.call.name
        for p in problems.plan(problems.problems(), next(c for c in CARDS if "A100" in c[0]))[0]
    }
    assert "matmul_forward" in on_a100 and "groupnorm_forward" in on_a100
    launched = {key.name for key in keys}
    assert {
        "matmul_level_kernel_v4",
        "conv2d_level_kernel_v2",
        "matmul_first_kernel_v1",
    } <= launched


@pytest.fixture
def gpu(monkeypatch):
    fake = FakeGpu()
    fake.cache, fake.multiprocessors = None, H200.multiprocessors
    monkeypatch.setattr(problems, "card_of", lambda backend: H200)
    monkeypatch.setattr(compiling, "compile_ahead", lambda *_: None)
    monkeypatch.setattr(kernels, "CACHE", 0)
    return fake


def test_rows(gpu):
    rows = list(
        problems.bench_files(gpu, ("mse_backward", "linear_group_forward"), lambda line: None)
    )
    assert {(row["operation"], row["version"], row["name"]) for row in rows} == {
        ("mse_backward", "v1", "naive"),
        ("mse_backward", "v2*", "vectorised"),
        ("linear_group_forward", "v1", "one-by-one"),
        ("linear_group_forward", "v2*", "tiled"),
    }
    assert all(
        row["us"] > 0 and row["problem"].startswith(row["operation"]) and row["card"]
        for row in rows
    )
    with pytest.raises(UsageError, match="no file's problem is of an operation 'conv3d'"):
        problems.problems_named(("conv3d",))


def test_what_one_problem_meets_hides_no_other(gpu, monkeypatch):
    found = problems.problems_named(("class_dropout", "mse_backward"))
    monkeypatch.setattr(problems, "plan", lambda *_: (found, []))
    mse = next(problem for problem in found if problem.call.name == "mse_backward")
    monkeypatch.setitem(mse.call.arguments, "x_0", 3)  # an argument that it does not have
    with pytest.warns(UserWarning, match="mse_backward.* failed: TypeError"):
        rows = list(problems.bench_files(gpu, (), lambda line: None))
    assert {row["operation"] for row in rows} == {"class_dropout_forward"}


def run(*arguments):
    return CliRunner().invoke(main, ["bench", "kernels", *map(str, arguments)])


def test_the_command(tmp_path):
    assert (
        "--of files has problems of its own: leave out --batch."
        in run("--of", "files", "--batch", 3).output
    )
    assert "run it on the card" in run("--of", "files", "--device", "cpu").output
    out = tmp_path / "rows.json"
    result = run("mse_forward", "--device", "cpu", "--batch", 1, "--image-size", 16, "--json", out)
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["card"] is None and [row["operation"] for row in written["rows"]] == [
        "mse_forward"
    ]
    assert "cannot write the rows" in run("--json", tmp_path / "no" / "rows.json").output
