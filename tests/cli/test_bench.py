import contextlib
import functools
import json
import pathlib
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from numdiff.benchmark.profile import profile_step
from numdiff.benchmark.rooflines import draw_kernels
from numdiff.errors import NumdiffError
from numdiff.extras.measure.profile import memory_table
from numdiff.extras.measure.sample import sample_comparison
from numdiff.extras.measure.step import price
from numdiff.extras.measure.versus import torch_pairs
from numdiff.training import kinds
from numdiff_cli.main import main
from tests.command import last_line, run
from tests.forked import forked

SMALL = "--preset tiny --device cpu --batch 1 --size 8"


@pytest.mark.parametrize(
    "command",
    [
        "bench kernels",
        "bench sample unet",
        "bench sample dit",
        "profile",
        "profile unet",
        "profile dit",
    ],
)
def test_help(command):
    result = run(command, "--help")
    assert result.exit_code == 0 and max(map(len, result.output.splitlines())) <= 120, result.output


@pytest.mark.parametrize("command", ["bench step", "bench sample", "bench ladder", "profile"])
@pytest.mark.parametrize("kind", kinds.KINDS.values(), ids=kinds.names())
def test_what_measures_a_model_has_the_models_options(command, kind):
    """…as `train` has them, so that one's own model can be measured."""

    def options(*path):
        found = functools.reduce(lambda at, name: at.get_command(None, name), path, main)
        assert len({name for p in found.params for name in p.opts}) == sum(
            len(p.opts) for p in found.params
        )
        return {parameter.name: parameter for parameter in found.params}

    train, measured = options("train", kind.name), options(*command.split(), kind.name)
    wanted = {
        name for name, line in kind.table.items() if name in kind.own or "model" in line.readers
    }
    assert wanted <= measured.keys() and {"class_cond", "learn_sigma"} <= measured.keys()
    assert all(measured[name].opts == train[name].opts for name in wanted)


def test_bench_step_of_ones_own_model():
    model = (
        "--size 8 --model-channels 64 --channel-mult 1,1 --num-res-blocks 1 --attention-resolutions none "
        "--num-head-channels 16 --class-cond --device cpu --batch 1"
    )
    counts = [
        re.search(r"([\d,]+)(?= parameters)|(?<=parameters   )[\d,]+", run(command, model).output)[
            0
        ]
        for command in (
            "bench step unet --steps 1 --warmup 0",
            "train unet --dry-run --preset tiny --classes all",
        )
    ]
    assert counts[0] == counts[1]


STUCK = """
import signal, subprocess, sys, time
from numdiff.extras.measure import versus
from numdiff_cli.main import ended_in_order
versus.GRACE_S = 0.1
with ended_in_order(), versus.ended_promptly():
    child = subprocess.Popen(["sleep", "60"])
    left = [child.pid]
    while True:
        try:
            while left:
                print(left.pop(), flush=True)
            time.sleep(60)
        except BaseException:
            pass
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_measurement_whose_compiler_swallows_it(number):
    """…and the processes that the compiler has started."""
    # one of both begins as a user's process does
    python = [sys.executable] if number == signal.SIGTERM else forked()
    command = [*python, "-c", STUCK]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number and said == f"\nError: ended by {number.name}.\n"
    with contextlib.suppress(OSError):  # it has ended, or has not been waited for yet
        while pathlib.Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
            time.sleep(0.01)


def test_bench_kernels_and_their_roof(tmp_path):
    kernels = "bench kernels linear groupnorm --device cpu --batch 1 --size 16 --shapes 1"
    result = run(kernels, "--png", tmp_path / "roof.png")
    assert result.exit_code == 0 and f"roofline     {tmp_path}/roof.png, " in result.output, (
        result.output
    )
    for name in ("linear_forward", "groupnorm_forward", "groupnorm_backward", "silu"):
        assert name in result.output
    assert (tmp_path / "roof.png").read_bytes().startswith(b"\x89PNG")
    for path, why in (
        ("roof.jpg", "must end in .png"),
        ("none/roof.png", "the folder does not exist"),
    ):
        result = run(kernels, "--png", tmp_path / path)
        assert (
            result.exit_code and why in result.output and "groupnorm_forward" not in result.output
        ), result.output


def test_the_roof_of_a_card(tmp_path, monkeypatch):
    """Rows that compute nothing have no place; each precision that a row computes in has its line."""
    monkeypatch.setattr("numdiff.benchmark.plots.roofline", lambda *given: drawn.append(given))
    drawn, row = (
        [],
        {
            "operation": "matmul",
            "version": "v5*",
            "gb_s": 2e3,
            "tflops": 600.0,
            "bandwidth": 4e12,
            "precision": "fp16",
            "peak": 989e12,
        },
    )
    rows = [
        row,
        {**row, "operation": "bias", "tflops": None},
        {**row, "precision": "fp32", "peak": 67e12},
    ]
    assert draw_kernels("a.png", rows, "Kernels") == 2
    assert drawn == [
        (
            "a.png",
            {"matmul": 2 * [(300.0, 600e12, "v5")]},
            4e12,
            {"fp16": 989e12, "fp32": 67e12},
            "Kernels",
        )
    ]
    with pytest.raises(NumdiffError, match="nothing that was measured computes anything"):
        draw_kernels("a.png", rows[1:2], "Kernels")


def test_profile(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "numdiff.benchmark.profile.profile_step",
        functools.partial(profile_step, repeats=1, steps=1, warmup=1),
    )
    result = run(
        "profile unet",
        SMALL,
        "--rows 5 --out",
        tmp_path / "trace.json",
        "--png",
        tmp_path / "a.png",
    )
    assert result.exit_code == 0, result.output
    assert (
        f"roofline     {tmp_path}/a.png, 5 operations" in result.output
        and (tmp_path / "a.png").exists()
    )
    assert "conv2d" in result.output and " more " in result.output
    assert [line for line in result.stderr.splitlines() if line.startswith("measuring")] == [
        f"measuring    {what} …"
        for what in ("the first step", "the step as it trains", "kernel by kernel")
    ]
    assert "measuring" not in result.stdout
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_bench_sample():
    result = run(
        "bench sample dit --preset tiny --device cpu --size 8 --batch 3 --batches 2",
        "--sample-steps 3 --sampler heun --cfg-scale 4",
    )
    assert result.exit_code == 0, result.output
    lines = dict(line.split(maxsplit=1) for line in result.output.splitlines())
    assert lines["sampler"].startswith(
        "heun, 3 steps: 5 evaluations of 6 images (guidance 4) a batch, each "
    )
    assert (
        "median of 2 " in lines["batch"]
        and lines["evaluation"].endswith(" ms")
        and "images/s" in lines["speed"]
    )
    assert {"device", "parameters", "first", "peak"} <= set(lines)


def test_table_of_samples():
    row = {
        "mode": "graphs",
        "precision": "bf16",
        "ms": 208.0,
        "ms_per_evaluation": 4.16,
        "images_per_second": 153.8,
        "first_s": 40.0,
        "peak_mib": 1300.0,
        "ratio": 2.0,
    }
    result = {
        **row,
        "ms": 104.0,
        "ms_per_evaluation": 2.08,
        "first_batch_s": 1.5,
        "versus": [
            row,
            {"mode": "eager", "precision": "bf16", "fault": "OutOfMemoryError: too large"},
        ],
    }
    del result["ratio"]
    header, ours, theirs, failed = sample_comparison(result, "fp16")
    assert ours.split()[2:] == ["153.8", "104.0", "2.080", "1.5", "1,300"]
    assert theirs.endswith("1,300  0.50 of its time") and len(ours) < len(theirs) <= 120
    assert failed.endswith("failed: OutOfMemoryError: too large")
    assert header.index("peak MiB") + len("peak MiB") == len(ours)


@pytest.mark.parametrize(
    "arguments, exit_code, message",
    [
        ("bench step unet --modes eager", 2, "--modes needs --versus torch"),
        (
            "bench step unet --versus torch --modes fast",
            2,
            "--modes fast does not exist; use some of eager, compile",
        ),
        (
            "bench step unet --versus torch --torch-precision fp8",
            2,
            "--torch-precision fp8 does not exist",
        ),
        ("bench sample unet --modes eager", 2, "--modes needs --versus torch"),
        (
            "bench sample unet --cfg-scale 4",
            2,
            "(it was trained without classes): leave --cfg-scale out.",
        ),
        ("bench sample unet --class-cond --cfg-scale 4", 2, "it was trained without class dropout"),
        (
            "bench sample unet --preset unet64 --sample-steps 2000",
            2,
            "sampling steps must be between 1 and the 1000 steps",
        ),
        ("bench sample dit --precision fp16", 2, "--precision fp16"),
        ("bench sample dit --batches 4294967296", 2, "4294967296 is not in the range 1<=x<=100000"),
        ("bench kernels conv3d", 2, "no operation 'conv3d'"),
        ("bench kernels --of unet --model DiT-S/2", 2, "belongs to the model dit"),
        ("bench tune", 1, "tile sizes are measured on a GPU, and --device is not cuda"),
        ("bench tune --timeout nan", 2, "--timeout nan must be a number of seconds"),
        ("profile unet --out {tmp}/nowhere/trace.json", 1, "cannot write the trace"),
        ("profile unet --out {tmp}/trace.txt", 2, "trace.txt must end in .json."),
        ("bench kernels --json {tmp}/rows", 2, "rows must end in .json."),
        ("bench ladder unet --csv {tmp}/rows.json", 2, "rows.json must end in .csv."),
        ("bench quality unet --json {tmp}/a.png", 2, "a.png must end in .json."),
    ],
)
def test_bad_input(tmp_path, arguments, exit_code, message):
    result = run(arguments.format(tmp=tmp_path), "--device cpu --batch 1 --size 16")
    assert result.exit_code == exit_code and "Traceback" not in result.output, result.output
    last = last_line(result)
    assert last.startswith("Error: ") and message in last


@pytest.mark.parametrize(
    "precision, modes, torch_precision, pairs",
    [
        ("fp16", None, None, [("eager", "bf16"), ("graphs", "bf16")]),
        ("fp32", None, None, [("eager", "fp32"), ("graphs", "fp32")]),
        ("fp16", ("all",), ("fp16",), [(m, "fp16") for m in ("eager", "compile", "graphs")]),
        ("fp32", ("graphs",), ("all",), [("graphs", p) for p in ("fp32", "tf32", "bf16", "fp16")]),
    ],
)
def test_what_is_compared(monkeypatch, precision, modes, torch_precision, pairs):
    monkeypatch.setattr("numdiff.benchmark.torch_step.require_torch", lambda: None)
    options = SimpleNamespace(optimizer="adamw", model="unet", device="cuda", precision=precision)
    assert torch_pairs(options, "torch", modes, torch_precision) == pairs


@pytest.mark.parametrize("measured", ["step", "sample"])
@pytest.mark.parametrize(
    "model, preset", [("unet", "tiny"), ("unet", "unet64"), ("dit", "tiny"), ("dit", "small64")]
)
def test_presets_of_muon_are_compared_with_pytorch(monkeypatch, measured, model, preset):
    seen = []
    monkeypatch.setattr("numdiff.benchmark.torch_step.require_torch", lambda: None)
    monkeypatch.setattr(
        f"numdiff.benchmark.{measured}.bench_{measured}",
        lambda *given, **_: seen.append(given[3]) or sys.exit(0),
    )
    result = run(
        "bench",
        measured,
        model,
        "--preset",
        preset,
        "--device cpu --precision fp32 --versus torch",
    )
    assert result.exit_code == 0 and seen == [[("eager", "fp32"), ("compile", "fp32")]], (
        result.output
    )


def test_profile_needs_a_gpu_for_times_from_a_graph():
    result = run("profile unet", SMALL, "--clock graph")
    assert result.exit_code == 1 and "use --clock events" in last_line(result)


def test_memory_table():
    lines = list(
        memory_table(
            4 << 20,
            [
                ("weights", 2 << 20),
                ("middle_block.1 forward: conv2d_forward", 1 << 20),
                ("batch", 1 << 19),
                ("next batch", 1 << 19),
            ],
            2,
        )
    )
    assert [line.split()[-2:] for line in lines[1:4]] == [
        ["50.0", "%"],
        ["25.0", "%"],
        ["25.0", "%"],
    ]
    assert lines[3].startswith("2 more") and lines[4].split() == ["together", "4.0"]


def test_bench_step_recomputed():
    result = run("bench step unet", SMALL, "--recompute --steps 1 --warmup 0")
    assert result.exit_code == 0 and "peak memory" in result.output and "fp32" in result.output, (
        result.output
    )
    first, second = (line for line in result.output.splitlines() if line.startswith("recompute"))
    assert re.search(r"blocks: [\d.e-]+ TFLOP more in each step, 3\d %$", first), first
    assert re.search(r"without it [\d.,]+ ms: it costs -?[\d.]+ ms, -?\d+ %$", second), second


def test_what_recomputing_costs_and_saves():
    result, found = (
        {"ms": 12.0, "memory": (3 << 30, [])},
        {"foreseen": "mlp: more", "ms": 10.0, "mib": 4096.0},
    )
    assert [*price(result, found)] == [
        "mlp: more",
        "without it 10.00 ms, 4,096 MiB: it costs 2.00 ms, 20 %, and saves 1,024 MiB",
    ]
    assert [*price(result, {"foreseen": "mlp: more", "fault": "out of memory"})][
        1
    ] == "without it: out of memory"
