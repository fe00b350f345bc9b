"""A part of fuzz_options.py, another value of each option in turn, and the streams that a caller
may have closed."""

import os
import subprocess
import sys

import click
import pytest

from numdiff_cli.main import main
from tests.cli.fuzz_options import cases, commands, fault_of, prepared, share
from tests.command import run
from tests.conftest import exhaustive

PART = 80  # one of this many command lines is tried here


@exhaustive
def test_wrong_options_end_in_one_sentence():
    tried = [arguments for arguments in cases() if share(arguments, PART) == 0]
    assert len(tried) > 150
    with prepared():
        found = {
            " ".join(arguments)[:99]: fault for arguments in tried if (fault := fault_of(arguments))
        }
    assert not found


def test_the_fuzzer_sees_every_command_and_finds_what_is_wrong(monkeypatch):
    names = {name for name, _ in commands()}
    assert {
        "train unet",
        "train dit",
        "sample",
        "evaluate",
        "convert",
        "data import",
        "bench step unet",
    } <= names
    said = {}

    @click.command()
    @click.argument("what")
    def wrong(what):
        if what == "traceback":
            raise ValueError("a fault")
        if what == "silent":
            sys.exit(3)
        if what == "memory":
            raise MemoryError

    monkeypatch.setattr(type(main), "get_command", lambda *_: wrong)
    for what in ("traceback", "silent", "memory", "nothing"):
        said[what] = fault_of(["wrong", what])
    assert said == {
        "traceback": "ValueError: a fault",
        "silent": "no sentence: ",
        "memory": "more than 2 GiB",
        "nothing": None,
    }


@pytest.mark.parametrize(
    "arguments",
    [
        "sample ²",
        "train unet --resume ²",
        "train dit --classes ² --dry-run",
        "train unet --batch 1048577 --dry-run",
        "train dit --depth 2147483648 --dry-run",
        "train dit --mlp-ratio 1e308 --dry-run",
        "train unet --model-channels 16384 --channel-mult 256 --dry-run",
        "sample dit.h5 --count 2147483648",
        "sample dit.h5 --class " + "9" * 5000,
        "data import pictures new.h5 --force --labels ?",
        "kernels check softmax --device cpu --version " + "9" * 5000,
    ],
)
def test_what_an_independent_test_found(arguments):
    """Each of these ended in a traceback, a hang or gigabytes. (? stands for an empty argument.)"""
    with prepared():
        arguments = [a.replace("?", "") for a in arguments.split()]
        assert fault_of(arguments) is None


def test_a_run_that_memory_cannot_hold_is_refused(monkeypatch):
    """The least that it needs is counted, so that what fits is never refused."""
    monkeypatch.setattr("numdiff.training.build.machine_bytes", lambda: 2**30)
    for arguments in ("unet --batch 100000", "dit --batch 100000", "dit --model DiT-XL/2"):
        result = run(f"train {arguments} --device cpu")
        assert (
            result.exit_code == 2
            and "GiB of memory, and this machine has 1.0: give a smaller" in result.output
        )


@exhaustive
def test_closed_streams(tmp_path):
    """What is written goes into its file, and nothing else does."""
    command = f"{sys.executable} -c 'from numdiff_cli.main import main; main()'"
    with prepared():
        for arguments, code in (
            (f"sample dit.h5 --device cpu --steps 1 --count 2 --npz {tmp_path}/a.npz <&-", 0),
            (f"sample none.h5 --npz {tmp_path}/a.npz", 1),
        ):
            process = subprocess.run(["sh", "-c", f"{command} {arguments} >&- 2>&-"], timeout=60)
            assert process.returncode == code and os.listdir(tmp_path) == ["a.npz"]
    assert (tmp_path / "a.npz").read_bytes()[:2] == b"PK"
