"""Ranks that are killed or stopped at random moments, and what is left of their job.

    python -m tests.distributed.faults --ranks 4 --cases 60 --steps 3000           on GPUs: each rank in turn
    python -m tests.distributed.faults --device cpu --cases 6 --steps 16 --at-once 1

Each case trains a small UNet with a checkpoint each few steps, or draws pictures, kills (SIGKILL) or
stops (SIGSTOP) one rank, and looks at five things: the job ends in time, by a sentence that names the
rank and no traceback; the newest checkpoint can be read; the run resumes on as many ranks, and ends
with the bits of one that nothing disturbed; it resumes on one rank; no temporary file is left.
Prints a line for each case; exits with 1 if one fails. SIGSTOP while sampling takes 120 seconds.
"""

import argparse
import concurrent.futures
import contextlib
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np

from numdiff.training.checkpoint import load_checkpoint, newest_checkpoint
from tests.distributed.test_distributed import ENVIRONMENT, MPIEXEC

COMMAND = "from numdiff_cli.main import main; main()"
TIMEOUT = 8  # seconds, of --rank-timeout
DEFAULT = 120  # the same of numdiff sample
# seconds, of SIGSTOP after the timeout, where five are a beat of the watchdog
ENDS = {signal.SIGKILL: 30, signal.SIGSTOP: 7}
NUMBERS = "PMI_RANK", "OMPI_COMM_WORLD_RANK"


class Jobs:
    """Jobs of this many ranks, with one set of options."""

    def __init__(self, ranks, device, steps, folder):
        self.ranks, self.steps, self.folder = ranks, steps, folder
        self.device = ["--device", device]
        self.train = [
            *("train", "unet", *self.device, "--model-channels", "32", "--batch", "8"),
            *("--steps", steps, "--warmup-steps", 2, "--sample-count", 0, "--log-every", 20),
            *("--rank-timeout", TIMEOUT, "--keep", 2),
        ]

    def command(self, ranks, *words):
        return [MPIEXEC, "-n", str(ranks), sys.executable, "-c", COMMAND, *map(str, words)]

    def run(self, ranks, *words):
        """The end of a job, (exit code, text)."""
        result = subprocess.run(
            self.command(ranks, *words),
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        return result.returncode, result.stdout

    def undisturbed(self):
        """The arrays of a run that nothing disturbs."""
        code, text = self.run(self.ranks, *self.train, "--outdir", self.folder / "undisturbed")
        assert code == 0, text
        return arrays_of(run_of(self.folder / "undisturbed"))


def run_of(folder):
    return next(path for path in folder.iterdir() if path.name[:5].isdigit())


def arrays_of(run):
    return load_checkpoint(newest_checkpoint(run))[0]


def rank_processes(folder):
    """{rank: process number} of the job that names this folder."""
    found = {}
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            named = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if COMMAND.encode() not in words or not any(str(folder).encode() in word for word in words):
            continue
        for name in NUMBERS:
            for entry in named:
                if entry.startswith(f"{name}=".encode()):
                    found[int(entry.split(b"=")[1])] = int(process.name)
    return found


def case(jobs, expected, number, seed):
    """(a line, whether all was well) of one fault."""
    rng = random.Random(seed * 1000 + number)
    what = ("training", "saving", "sampling")[number % 3]
    kind = (signal.SIGKILL, signal.SIGSTOP)[number // 3 % 2]
    victim = number // 6 % jobs.ranks
    folder = jobs.folder / f"case-{number}"
    folder.mkdir()
    label = f"{number:3} {what:8} {kind.name} of rank {victim}"
    if what == "sampling":
        words = [
            *("sample", run_of(jobs.folder / "undisturbed"), *jobs.device, "--count", 10**6),
            *("--batch", 16, "--npz", folder / "samples.npz"),
        ]
    else:
        every = 1 if what == "saving" else max(2, jobs.steps // 8)
        words = [*jobs.train, "--checkpoint-every", every, "--outdir", folder]
    with open(folder / "text", "w+") as text:
        job = subprocess.Popen(
            jobs.command(jobs.ranks, *words),
            env=ENVIRONMENT,
            stdout=text,
            stderr=subprocess.STDOUT,
        )
        deadline = time.time() + 300
        while job.poll() is None and not begun(folder) and time.time() < deadline:
            time.sleep(0.05)
        time.sleep(rng.uniform(0, 1))
        process = rank_processes(folder).get(victim)
        if job.poll() is not None or process is None:
            job.kill()
            return f"{label}: it ended before the fault", True
        started = time.time()
        signal_to(process, kind)
        limit = ENDS[kind]
        if kind == signal.SIGSTOP:
            limit += DEFAULT if what == "sampling" else TIMEOUT
        try:
            code = job.wait(limit + 60)
        except subprocess.TimeoutExpired:
            code = None
        took = time.time() - started
        for left in rank_processes(folder).values():
            signal_to(left, signal.SIGKILL)
        job.kill()
        text.seek(0)
        said = text.read()
    wrong = []
    if code in (None, 0) or took > limit:
        wrong.append(f"ended with {code} after {took:.1f} s of {limit}")
    if not re.search(rf"rank {victim}\b", said) or "Traceback" in said:
        wrong.append(f"said {said[-400:]!r}")
    if what != "sampling":
        wrong += [*resumed(jobs, expected, folder)]
    return (
        f"{label}: ended in {took:.1f} s{''.join(f'; WRONG: {each}' for each in wrong)}",
        not wrong,
    )


def begun(folder):
    """Whether a job has saved a step, or has begun to write pictures."""
    return any(
        not path.name.endswith("00000000.h5")
        for pattern in ("*/checkpoint-*.h5", ".samples.npz.*")
        for path in folder.glob(pattern)
    )


def signal_to(process, kind):
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, kind)


def resumed(jobs, expected, folder):
    """Yields what is wrong with the run after it was resumed."""
    run = run_of(folder)
    alone = folder / "alone"
    shutil.copytree(run, alone)
    for ranks, place in ((jobs.ranks, run), (1, alone)):
        code, text = jobs.run(ranks, "train", "unet", *jobs.device, "--resume", place)
        if code:
            yield f"resuming on {ranks}: {text[-400:]!r}"
        elif ranks > 1 and not equal(arrays_of(place), expected):
            yield f"resumed on {ranks}: other bits"
        if left := [path.name for path in place.glob(".*.tmp")]:
            yield f"left {left}"


def equal(arrays, expected):
    return arrays.keys() == expected.keys() and all(
        np.array_equal(arrays[name], expected[name]) for name in expected
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--at-once", type=int, default=4, help="jobs at a time")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        jobs = Jobs(given.ranks, given.device, given.steps, pathlib.Path(folder))
        expected = jobs.undisturbed()
        with concurrent.futures.ThreadPoolExecutor(given.at_once) as pool:
            numbers = range(given.first, given.first + given.cases)
            fine = []
            for line, well in pool.map(lambda n: case(jobs, expected, n, given.seed), numbers):
                print(line, flush=True)
                fine.append(well)
    print(f"{len(fine)} faults, {fine.count(False)} ended badly")
    raise SystemExit(not all(fine))


if __name__ == "__main__":
    main()
