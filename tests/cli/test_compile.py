"""`numdiff compile` fills the cache for a GPU that is not here."""

import re

import pytest

from numdiff.device import compile_ahead
from numdiff.device.kernel_cache import KernelCache
from tests import command
from tests.device.test_compile_ahead import STAND_IN

UNET = "unet --preset tiny --channel-mult 1,2 --attention-resolutions 16"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The processes only pretend: what a real one does is tested in
    tests/device/test_compile_ahead.py."""
    monkeypatch.setenv("NUMDIFF_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_ahead, "START", STAND_IN)
    return tmp_path


def run(*words):
    return command.run("compile", *words)


def test_the_kernels_of_a_run_are_compiled(cache):
    result = run(UNET, "--capability 9.0")
    assert result.exit_code == 0, result.output
    first, *_, last = result.output.splitlines()
    count = int(first.split()[1])
    folder = KernelCache((9, 0)).folder
    assert first.startswith(f"compiling {count} kernels in ") and first.endswith(
        "once for this machine"
    )
    assert last == f"{count} kernels for compute capability 9.0 are in {folder}"
    assert len(list(folder.glob("*-*"))) == count > 50
    again = run(UNET, "--capability 9.0")
    assert again.output == f"{last}, all of them already\n"
    more = run(UNET, "--capability 9.0 --ranks 2")
    # those with which GPUs add up each other's gradients
    assert 0 < int(more.output.split()[1]) < 20
    older = run(UNET, "--capability 7.5")
    assert older.exit_code == 0 and " kernels for compute capability 7.5 are in " in older.output


def test_sizes_without_data():
    """As for `train dit --dry-run`: the options alone say what the model is."""
    result = run(
        "dit --model DiT-S/2 --size 32 --channels 4 --classes 1000 --batch 8",
        "--capability 9.0",
    )
    assert result.exit_code == 0 and "kernels for compute capability 9.0 are in" in result.output


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("", "there is no GPU here to compile for (.*): say for which one, as in --capability 9.0"),
        (
            "--capability 9.0 --device cpu",
            "--device cpu runs no compiled kernels: leave it out, to compile",
        ),
        ("--capability 9", "--capability 9 is not a compute capability; give one such as 9.0"),
        ("--capability 6.1", "--capability 6.1: no such card is known; use one of 7.5, 8.0, "),
        (
            "--capability 9.0 --batch 33 --ranks 2",
            "--batch 33, which 2 ranks cannot share evenly: start 1 rank, or use --batch 32 or 34",
        ),
    ],
)
def test_what_cannot_be(arguments, sentence, monkeypatch):
    monkeypatch.setattr("numdiff.training.plan.why_no_gpu", lambda: "no NVIDIA driver was found")
    result = run(f"unet {arguments}")
    assert result.exit_code == 2 and result.output.count("\n") == 1
    assert re.search(sentence, result.output)


def test_a_folder_that_cannot_be_written(cache, monkeypatch):
    (cache / "file").write_text("")
    monkeypatch.setenv("NUMDIFF_CACHE_DIR", str(cache / "file"))
    result = run("dit --preset tiny --capability 9.0")
    assert result.exit_code == 1
    folder = KernelCache((9, 0)).folder
    assert result.output == (
        f"Error: the kernel cache {folder} cannot be used (Not a directory); set "
        "NUMDIFF_CACHE_DIR to a folder of your own.\n"
    )


def test_a_kernel_that_cannot_be_compiled(monkeypatch):
    monkeypatch.setattr(compile_ahead, "START", "import sys; sys.exit(3)")
    result = run("dit --preset tiny --capability 9.0")
    assert result.exit_code == 1
    assert (
        " kernels could not be compiled, " in result.output
        and "ended: 3, 2 times." in result.output
    )
