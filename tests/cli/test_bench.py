import json

import pytest
from click.testing import CliRunner

from numdiff_cli.main import main

SMALL = "--preset tiny --device cpu --batch 1 --size 16".split()


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.mark.parametrize("command", ["bench kernels", "profile", "profile unet", "profile dit"])
def test_help(command):
    result = run(*command.split(), "--help")
    assert result.exit_code == 0 and max(map(len, result.output.splitlines())) <= 120, result.output


def test_bench_kernels():
    result = run("bench", "kernels", "groupnorm", "--device", "cpu", "--batch", 1, "--size", 16, "--shapes", 1)
    assert result.exit_code == 0, result.output
    assert "groupnorm_forward" in result.output and "groupnorm_backward" in result.output and "silu" in result.output


def test_profile(tmp_path):
    result = run("profile", "unet", *SMALL, "--rows", 5, "--out", tmp_path / "trace.json")
    assert result.exit_code == 0, result.output
    assert "conv2d_backward" in result.output and " more " in result.output
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize("arguments, exit_code, message", [
    ("bench step unet --modes eager", 2, "--modes needs --versus torch"),
    ("bench step unet --versus torch --modes fast", 2, "--modes fast does not exist; use some of eager, compile"),
    ("bench step unet --versus torch --torch-precision fp8", 2, "--torch-precision fp8 does not exist"),
    ("bench kernels conv3d", 2, "no operation 'conv3d'"),
    ("bench kernels --of unet --model DiT-S/2", 2, "belongs to the model dit"),
    ("profile unet --out {tmp}/nowhere/trace.json", 1, "cannot write the trace"),
])
def test_bad_input(tmp_path, arguments, exit_code, message):
    result = run(*arguments.format(tmp=tmp_path).split(), "--device", "cpu", "--batch", 1, "--size", 16)
    assert result.exit_code == exit_code and "Traceback" not in result.output, result.output
    last = result.output.splitlines()[-1]
    assert last.startswith("Error: ") and message in last
