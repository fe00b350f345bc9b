"""Wrong values for every option of every command: what comes back must be one sentence and an exit
code.

    python -m tests.cli.fuzz_options            all of them, some minutes; test_options.py runs a part

Commands are found by walking the command line's own tree, so that a new option is tried without a
word here. Trainings are dry runs, and what `numdiff bench` and `profile` measure is left out. A
finding is a traceback, an error that is not one sentence, more than `SECONDS`, or memory beyond
`BYTES`.
"""

import contextlib
import importlib
import os
import pathlib
import resource
import signal
import sys
import tempfile
import zlib

import click
import numpy as np
from click.testing import CliRunner
from PIL import Image

from numdiff.errors import NumdiffError
from numdiff_cli.main import main
from tests.command import output_of
from tests.models import small_dit, write

SECONDS, BYTES = 20, 2 << 30
VALUES = (
    *"0 -1 1 7 2147483648 -2147483649 18446744073709551616".split(),
    *"1e308 -1e308 1e-320 1e39 nan inf -inf -0.0 0.9999999999999999".split(),
    *"² ٣ ½ ²,² 1, , none a 0x10 1_000 ../x . /dev/null/x - --".split(),
    *("", " ", "9" * 5000, "a" * 300, "é\u202e", "\udcff", "\x1b[31m"),
)
MEASUREMENTS = (
    "extras.convnext.benchmark.bench_block",
    "benchmark.data.bench_data",
    "benchmark.step.bench_step",
    "benchmark.sample.bench_sample",
    "benchmark.kernels.bench_kernels",
    "benchmark.ladder.bench_ladder",
    "benchmark.profile.profile_step",
    "benchmark.tune.tune",
    "extras.measure.time_to_quality.bench_quality",
    "extras.kernel_check.run.check",
)
WITH = {  # what a command needs besides, to come to an end soon
    "train unet": "--device cpu --dry-run",
    "train dit": "--device cpu --dry-run",
    "train vae": "--device cpu --dry-run",
    "sample": "dit.h5 --device cpu --steps 1 --count 2",
    "schedule": "dit.h5 --device cpu --steps 1 --from-steps 2 --count 2",
    "evaluate": "samples.npz samples.npz --device cpu --subsets 2",
    "convert": "dit.h5 out.h5",
    "data import": "pictures new.h5 --force",
    "data info": "new.h5 --no-sheet",
    "kernels check": "softmax --device cpu",
    "learn": "1",
}


class TookTooLong(BaseException):
    """More than `SECONDS`."""


def commands():
    """(words, click command) of every command that does something."""
    stack = [((name,), main.get_command(None, name)) for name in main.list_commands(None)]
    while stack:
        words, command = stack.pop()
        if isinstance(command, click.Group):
            context = click.Context(command)
            stack += [
                ((*words, name), command.get_command(context, name))
                for name in command.list_commands(context)
            ]
        else:
            yield " ".join(words), command


def cases():
    """[argument, …] for every option and value, in a fixed order."""
    for name, command in sorted(commands()):
        for parameter in command.params:
            if not isinstance(parameter, click.Option) or parameter.is_flag:
                continue
            for value in VALUES:
                yield [*name.split(), *WITH.get(name, "").split(), parameter.opts[0], value]
        for position in range(sum(isinstance(p, click.Argument) for p in command.params)):
            given = WITH.get(name, "").split()
            for value in VALUES:
                if position < len(given) and not value.startswith("-"):
                    yield [*name.split(), *given[:position], value, *given[position + 1 :]]


def prepare(folder):
    """Small files of every kind."""
    pictures = pathlib.Path(folder, "pictures")
    pictures.mkdir()
    rng = np.random.default_rng(0)
    for i in range(3):
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(pictures / f"{i}.png")
    write(pathlib.Path(folder, "dit.h5"), small_dit(num_classes=3))
    np.savez(
        pathlib.Path(folder, "samples.npz"), arr_0=rng.integers(0, 256, (6, 8, 8, 3), np.uint8)
    )
    output_of("data import", pictures, pathlib.Path(folder, "new.h5"))


def stopped(*_, **__):
    raise NumdiffError("this is not measured here.")


@contextlib.contextmanager
def nothing_is_measured():
    """Within the context the functions that measure end at once; the options before them are looked
    at."""
    replaced = []
    for path in MEASUREMENTS:
        module = importlib.import_module("numdiff." + path.rpartition(".")[0])
        name = path.rpartition(".")[2]
        if hasattr(module, name):
            replaced.append((module, name, getattr(module, name)))
            setattr(module, name, stopped)
    try:
        yield
    finally:
        for module, name, value in replaced:
            setattr(module, name, value)


def fault_of(arguments):
    """None, or what is wrong with the answer to a command line."""

    def late(*_):
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        result = CliRunner().invoke(main, arguments)
    except TookTooLong:
        return f"more than {SECONDS} s"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if isinstance(result.exception, TookTooLong):
        return f"more than {SECONDS} s"
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return f"{type(result.exception).__name__}: {result.exception}"
    if "out of memory" in result.output:
        return f"more than {BYTES >> 30} GiB"
    if result.exit_code:
        last = (result.output.strip().splitlines() or [""])[-1]
        if not last.startswith("Error: ") or "Traceback" in result.output:
            return f"no sentence: {last}"
    return None


@contextlib.contextmanager
def prepared():
    """Within the context: a separate folder with the files, no measurements, bounded memory."""
    old, limits = os.getcwd(), resource.getrlimit(resource.RLIMIT_AS)
    with tempfile.TemporaryDirectory() as folder, nothing_is_measured():
        prepare(folder)
        os.chdir(folder)
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
            os.chdir(old)


def share(arguments, count):
    """A number below `count` that depends on the arguments alone."""
    return zlib.crc32(repr(arguments).encode()) % count


if __name__ == "__main__":
    found = total = 0
    with prepared():
        for arguments in cases():
            if len(sys.argv) > 1 and not " ".join(arguments).startswith(sys.argv[1]):
                continue
            total += 1
            fault = fault_of(arguments)
            if fault:
                found += 1
                shown = " ".join(a if len(a) < 40 else a[:20] + "…" for a in arguments)
                print(f"{ascii(shown)}: {ascii(fault)[:200]}", flush=True)
    print(f"{found} findings in {total} command lines")
    sys.exit(found > 0)
