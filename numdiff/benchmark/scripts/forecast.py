"""The forecast of `numdiff train` against the clock and the memory of real runs.

    python -m numdiff.benchmark.scripts.forecast               the kinds of this machine, a first and a second run
    python -m numdiff.benchmark.scripts.forecast --only unet,vae --log runs.log
    python -m numdiff.benchmark.scripts.forecast --dry-run     a dry run as well, before the second run
    python -m numdiff.benchmark.scripts.forecast --evaluations     what --evaluate-every adds to a run

Each run is the command line in a new process, short, with a cache of its own: the first run of a
kind compiles its kernels, the second one finds them, and what the first one measured. The clock is
that of the whole command, to the line after the last picture. Memory on a GPU is what the card has
less of than before; on a CPU it is the process's peak. Phases are the seconds at which lines were
printed.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import h5py
import numpy as np

from numdiff.children import python_command
from numdiff.device import why_no_gpu

CLI = "from numdiff_cli.main import main; main()"
UNITS = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}
# of a kind: the words after `numdiff train`
GPU = {
    "unet": "unet --steps 1500 --sample-every 750",
    "vae": "vae --data {photos} --steps 300",
    "latents": "dit --data {latents} --model LightningDiT-S/2 --steps 800",
    "dit": "dit --steps 1500 --checkpoint-every 500",
    "photos": "unet --data {photos} --steps 250",
    "recompute": "dit --batch 512 --recompute blocks --steps 120",
}
CPU = {
    "unet": "unet --steps 150",
    "dit": "dit --steps 100",
    "vae": "vae --steps 100",
    "photos": "unet --data {photos} --steps 60 --batch 2",
    "latents": "dit --data {latents} --steps 60",
}


def make_data(folder):
    """Files of random smooth pictures of 256×256, and of latents of 32×32×4 with ten classes."""
    generator, files = np.random.default_rng(0), {}
    for name, count, side, channels in (("photos", 256, 256, 3), ("latents", 4096, 32, 4)):
        coarse = generator.standard_normal((count, side // 16, side // 16, channels), np.float32)
        images = coarse.repeat(16, 1).repeat(16, 2)
        files[name] = str(folder / f"{name}.h5")
        with h5py.File(files[name], "w") as file:
            file["images"] = (
                np.clip(127 + 60 * images, 0, 255).astype(np.uint8) if channels == 3 else images
            )
            file["labels"] = generator.integers(0, 10, count).astype(np.int32)
            file.attrs["classes"] = [f"class {k}" for k in range(10)]
    return files


class UsedMemory(threading.Thread):
    """The most bytes that a process takes: of the GPU that has most less than before, or of its own."""

    def __init__(self, process, gpu):
        super().__init__(daemon=True)
        self.process, self.gpu, self.peak = process, gpu, 0
        self.before = self.of_gpus() if gpu else []

    def of_gpus(self):
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        return [int(line) << 20 for line in found.stdout.split()]

    def of_process(self):
        try:
            status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
            return int(status.split("VmHWM:")[1].split()[0]) << 10
        except (OSError, IndexError):
            return 0

    def run(self):
        while self.process.poll() is None:
            if self.gpu:
                now = max(b - a for a, b in zip(self.before, self.of_gpus(), strict=True))
            else:
                now = self.of_process()
            self.peak = max(self.peak, now)
            time.sleep(0.1)


def run(words, cache, gpu, log):
    """{seconds, cpu: its processes' seconds, peak, lines: [(seconds, line)]} of a command."""
    environment = {**os.environ, "NUMDIFF_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1"}
    started, cpu = time.perf_counter(), os.times()
    process = subprocess.Popen(
        python_command(CLI, *words),
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    memory, lines = UsedMemory(process, gpu), []
    memory.start()
    for line in process.stdout:
        lines.append((time.perf_counter() - started, line.rstrip()))
    process.wait()
    seconds, then = time.perf_counter() - started, os.times()
    log.write(f"\n$ numdiff {' '.join(words)}\n")
    log.writelines(f"{at:8.2f} {line}\n" for at, line in lines)
    log.write(f"{seconds:8.2f} exit {process.returncode}\n")
    log.flush()
    spent = then.children_user + then.children_system - cpu.children_user - cpu.children_system
    return {"seconds": seconds, "cpu": spent, "peak": memory.peak, "lines": lines}


def said(lines):
    """[(seconds at which it was printed, seconds that it forecasts, MiB, how)] of a run's lines."""
    found = []
    for at, line in lines:
        match = re.match(r"forecast +([\d.,]+) (seconds|minutes|hours|days)", line)
        if match:
            mib = re.search(r"([\d,]+) MiB", line)
            how = re.search(r"\((\w[^)]*)\)", line)
            found.append(
                (
                    at,
                    float(match[1].replace(",", "")) * UNITS[match[2]],
                    int(mib[1].replace(",", "")) if mib else 0,
                    how[1] if how else "",
                )
            )
    return found


def at_of(lines, start):
    """When the first line that matches was printed; NaN if none was."""
    return next((at for at, line in lines if re.match(start, line)), float("nan"))


def show(name, which, forecasts, found, words=""):
    """A row of the table."""
    lines, mib = found["lines"], found["peak"] / 2**20
    phases = " ".join(
        f"{label} {at_of(lines, start):.1f}"
        for label, start in (
            ("compiled", "compiled"),
            ("forecast", "forecast"),
            ("run", "run "),
            ("step", r"step +\d+/"),
            ("done", "done"),
        )
    )
    took = at_of(lines, "done")
    for at, seconds, memory, how in forecasts:
        print(
            f"{name:10} {which:7} {seconds:7.1f} {took:7.1f} {seconds / took - 1:+7.1%} "
            f"{memory:7,} {mib:7,.0f} {memory / mib - 1 if mib else 0:+7.1%}  {at:5.1f} s: {how}",
            flush=True,
        )
    ms = [m[1] for _, line in lines for m in [re.search(r"([\d.]+) ms", line)] if m]
    print(f"{'':18} {phases}; {found['cpu']:.0f} s of cores; ms {' '.join(ms[-6:])}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="kinds, separated by commas; none without a kind's name")
    parser.add_argument("--dry-run", action="store_true", help="dry runs, too")
    parser.add_argument("--evaluations", action="store_true", help="the cost of --evaluate-every")
    parser.add_argument("--times", type=int, default=2, help="runs of each kind")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after so long")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--log", default=os.devnull, help="a file for what the runs print")
    given = parser.parse_args()
    gpu = given.device != "cpu" and not why_no_gpu()
    kinds, began = GPU if gpu else CPU, time.perf_counter()
    wanted = [name for name in kinds if given.only is None or name in given.only.split(",")]
    print(f"{'kind':10} {'run':7} {'said s':>7} {'took s':>7} {'':7} {'MiB':>7} {'peak':>7}")
    with tempfile.TemporaryDirectory() as folder, open(given.log, "a") as log:
        folder = pathlib.Path(folder)
        files = make_data(folder)
        device = [] if gpu else ["--device", "cpu"]

        def command(name, *more):
            words = kinds[name].format(**files).split()
            return ["train", *words, *device, "--outdir", str(folder / "runs"), *more]

        for name in wanted:
            for k in range(given.times):
                if time.perf_counter() - began > given.seconds:
                    print("no time is left", flush=True)
                    return
                which, cache = ("first", "second", "third")[min(k, 2)], folder / "cache" / name
                forecasts = []
                if given.dry_run and k == 1:  # with compiled kernels, and without measurements
                    shutil.rmtree(cache / "forecasts", ignore_errors=True)
                    dry = run(command(name, "--dry-run"), cache, gpu, log)
                    forecasts = [
                        (at, seconds, mib, f"dry run, {dry['seconds']:.1f} s: {how}")
                        for at, seconds, mib, how in said(dry["lines"])
                    ]
                found = run(command(name), cache, gpu, log)
                show(name, which, forecasts + said(found["lines"]), found)
                for record in (cache / "forecasts").glob("*.json"):
                    log.write(f"{record.read_text()}\n")
        if given.evaluations:
            evaluate = "--evaluate-every", "2000"
            for name, more in (
                ("compile", ("--steps", "200", "--evaluate-every", "200")),
                ("without", ("--steps", "2000")),
                ("with", ("--steps", "2000", *evaluate)),
            ):
                words = ["train", "unet", *device, "--outdir", str(folder / "runs"), *more]
                found = run(words, folder / "cache" / "unet", gpu, log)
                show("evaluate", name, said(found["lines"]), found)
            for record in (folder / "cache" / "unet" / "forecasts").glob("*.json"):
                print(record.read_text())


if __name__ == "__main__":
    sys.exit(main())
