"""The forecast of a run: what is measured, what is estimated, and that it adds up."""

import functools
import json
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from numdiff.children import python_command
from numdiff.device import loop_cache
from numdiff.errors import OutOfMemoryError
from numdiff.progress import compiling, progress
from numdiff.training import forecast, price, rehearsal
from numdiff.training.build import count_parameters, model_options
from numdiff.training.forecast import (
    AT_FIRST,
    BYTES_A_SECOND,
    FIRST_CURVE,
    FIRST_SAMPLES,
    PER_EVENT,
    PIXELS_A_SECOND,
    Clock,
    ForecastPlan,
    events,
    key_of,
    read_measured,
    say_duration,
)
from numdiff.training.options import resolve
from tests.command import output_of
from tests.conftest import exhaustive, needs

SIZES = {"image_size": 32, "in_channels": 3}
RECORD = {"step": 0.5, "first": 10.0, "save": 2.0, "draw": 20.0, "evaluate": 30.0}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMDIFF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(forecast, "SHORT_STEP", 1e9)


def options_of(**changes):
    return resolve({"model": "unet", "device": "cpu", "steps": 1000, **changes})


def store(plan, record):
    path = forecast.own_folder(forecast.folder()) / f"{plan.key}.json"
    path.write_text(json.dumps(record))
    return path


@pytest.mark.parametrize(
    "step, steps, every, count",
    [
        (0, 1000, 300, 4),
        (0, 900, 300, 3),
        (300, 900, 300, 2),
        (899, 900, 300, 1),
        (900, 900, 300, 0),
    ],
)
def test_events(step, steps, every, count):
    assert events(step, steps, every) == count
    there = [s for s in range(step + 1, steps + 1) if s == steps or s % every == 0]
    assert len(there) == count


def test_a_measurement_adds_up():
    options = options_of(
        sample_every=300, checkpoint_every=500, evaluate_every=250, batch=8, keep=1
    )
    plan = ForecastPlan(options, SIZES, 1e9, 1000)
    store(plan, {**RECORD, "start": 4.0, "memory": 300 << 20, "checkpoint": 5_000_000})
    line, measured = plan.forecast()
    best = PER_EVENT + 5_000_000 / BYTES_A_SECOND  # which is not measured
    seconds = 4 + 10 + 1000 * 0.5 + 4 * 20 + 2 * 2 + 4 * (30 + best)
    assert measured and line == (
        f"{seconds / 60:.1f} minutes from the command to the last picture, at 500 ms a step "
        "(measured in a run before), 8,000 images seen, 300 MiB of memory, checkpoints of at most 15 MB"
    )
    # 10 + 50 + 20 + 2 + 30 seconds, of a run that has taken 67
    assert plan.forecast(900, 67)[0].startswith(
        "3.0 minutes from the command to the last picture, 1.9 minutes from here, at 500 ms a step"
    )
    without = ForecastPlan(options.changed(sample_count=0), SIZES, 1e9, 1000)
    assert without.key != plan.key


def test_an_estimate_is_called_one(monkeypatch):
    monkeypatch.setattr(forecast, "cpu_flops", lambda: 1e10)
    options = options_of(batch=4, sample_every=0, sample_steps=10, sample_count=12, cfg_scale=None)
    plan = ForecastPlan(options, SIZES, 4e9, 1000)
    line, measured = plan.forecast(elapsed=5)
    # a step takes 1 s; each of 12 images 10 forward passes of 0.23/4 s; a grid, a checkpoint of 16 kB
    seconds = 1000 + 12 * (10 * 0.23 / 4 + 32 * 32 / PIXELS_A_SECOND) + 2 * PER_EVENT
    seconds += FIRST_CURVE + FIRST_SAMPLES
    assert not measured and line.startswith(
        f"{(seconds + 5) / 60:.1f} minutes from the command to the last picture, "
        f"{seconds / 60:.1f} minutes from here, at 1e+03 ms a step (estimated"
    )


def test_what_changes_the_key():
    options = options_of()
    key = key_of(options, SIZES, "cpu")
    for same in (
        {"steps": 5},
        {"seed": 7},
        {"learning_rate": 1e-5},
        {"sample_every": 9},
        {"keep": 9},
    ):
        assert key_of(options.changed(**same), SIZES, "cpu") == key
    for other in ({"batch": 2}, {"eager": True}, {"optimizer": "adamw"}, {"sample_steps": 3}):
        assert key_of(options.changed(**other), SIZES, "cpu") != key
    assert len({key, key_of(options, {}, "cpu"), key_of(options, SIZES, "x")}) == 3
    assert key_of(options, SIZES, "cpu", 2) != key
    # each name is a setting: a renamed one would silently count again
    assert forecast.WITHOUT_EFFECT <= options.to_json().keys()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"step": 0}', '{"step": -1, "first": 0, "save": 0}']
)
def test_a_damaged_measurement_is_none(text):
    plan = ForecastPlan(options_of(), SIZES, 1e9, 1000)
    store(plan, RECORD).write_text(text)
    assert read_measured(plan.key) is None and not plan.forecast()[1]


def test_a_clock_leaves_out_the_first_steps():
    clock = Clock("a" * 32, began=time.perf_counter() - 100)
    clock.begin_steps()
    assert clock.next_count() == AT_FIRST
    clock.steps(2, 25.0)
    assert clock.measured is None
    clock.store()
    assert read_measured(clock.key) is None and clock.next_count() == AT_FIRST
    clock.steps(2, 0.2)
    assert clock.next_count() == 10  # which take a second
    clock.steps(10, 5.0)
    assert clock.next_count() is None
    clock.steps(20, 11.0)
    with clock.timed("draw"):
        pass
    clock.store()
    found = read_measured(clock.key)
    assert found["step"] == pytest.approx(11 / 20)  # of most steps
    assert found["first"] == 0  # it compiled, and the next run finds that in the cache
    assert 0 <= found["draw"] < 1 and "save" not in found and "evaluate" not in found
    assert found["start"] == pytest.approx(100 - progress.compiled, abs=1)
    clock.store()
    assert read_measured(clock.key)["first"] == pytest.approx(25 - 2 * 11 / 20)
    clock.seconds["draw"], clock.seconds["best"] = [9.0, 1.0, 2.0], [4.0]
    assert clock.measured["draw"] == 1.5 and clock.measured["best"] == 4
    # what the first steps and the first grid took longer
    assert clock.measured["first"] == pytest.approx(25 - 2 * 11 / 20 + 9 - 1.5)


def test_what_an_event_compiles_is_not_its_time():
    clock = Clock()
    with clock.timed("evaluate"):
        progress.compiled += 100.0
    progress.compiled -= 100.0
    assert -100.0 <= clock.seconds["evaluate"][0] < -99.0


def test_a_gpu_is_asked_for_its_memory_and_its_first_steps_count():
    """Its kernels are compiled before them."""
    gpu = type("Gpu", (), {"arenas": (), "process_bytes": 3 << 30})
    clock = Clock()
    clock.measure("b" * 32, gpu)
    for count, seconds in ((2, 4.0), (2, 0.2), (10, 1.0)):
        clock.steps(count, seconds)
    clock.store()
    found = read_measured(clock.key)
    assert found["memory"] == 3 << 30 and found["first"] == pytest.approx(4.0 - 0.2)


def test_compiling_is_no_part_of_the_start():
    before, clock = progress.compiled, Clock(began=time.perf_counter() - 50)
    began = time.perf_counter()
    with compiling(), compiling():
        time.sleep(0.02)
    # once, where two are nested
    assert 0.02 <= progress.compiled - before <= time.perf_counter() - began
    progress.compiled, compiled = 40.0, progress.compiled
    clock.begin_steps()
    progress.compiled = compiled
    assert clock.start == pytest.approx(10, abs=0.5)


def test_all_that_happens_between_steps_counts():
    options = options_of(
        sample_every=500, checkpoint_every=0, evaluate_every=500, ema_std=(0.1,), ema_snapshots=5
    )
    record = {**RECORD, "best": 3.0, "store": 0.5}
    seconds = 10 + 1000 * 0.5 + 2 * 20 + 2 + 2 * (30 + 3) + 5 * 0.5
    assert forecast.seconds_to_the_end(record, options, True) == seconds


def test_first_steps_that_are_done_take_no_more_time():
    options = options_of(sample_every=0, checkpoint_every=0)
    plan = ForecastPlan(options, SIZES, 1e9, 1000, foresee=lambda: (200 << 20, 0))
    line = plan.after_first_steps({**RECORD, "memory": 300 << 20}, 900, 8)
    assert line.startswith("80 seconds from the command") and "72 seconds from here" in line
    assert "300 MiB" in line
    # of a dry run, they are still to come: 10 + 1000 · 0.5 + 20 + 2, after the start
    line = plan.after_first_steps({**RECORD, "start": 8.0, "memory": 0}, 0)
    assert line.startswith("9.0 minutes from the command") and "200 MiB" in line


MEASURED = """
import sys
from numdiff_cli.main import main
from numdiff.training.forecast import peak_memory
main(sys.argv[1:], standalone_mode=False)
print("PEAK", peak_memory() / 2**20)
"""


@needs("proc")
def test_memory_is_that_of_the_program_and_not_of_what_started_it():
    held = np.ones(400 << 20, np.uint8)  # of this process
    program = "from numdiff.training.forecast import peak_memory; print(peak_memory())"
    ended = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True)
    assert 0 < int(ended.stdout) < held.nbytes


@exhaustive
@needs("posix")
@pytest.mark.parametrize(
    "kind, batch", [("unet", 4), ("unet", 16), ("dit", 4), ("dit", 16), ("vae", 4)]
)
def test_memory_is_foreseen_and_then_known(tmp_path, kind, batch):
    """Within 10 % by the planner, and within 5 % once a run that compiles nothing has measured it."""
    words = f"train {kind} --device cpu --steps 6 --log-every 2 --batch {batch} --sample-count 4"
    words += f" --outdir {tmp_path}/runs"

    def said(*more):
        ended = subprocess.run(
            python_command(MEASURED, *words.split(), *more),
            text=True,
            capture_output=True,
            timeout=300,
        )
        assert ended.returncode == 0, ended.stderr
        mib = [
            int(v.replace(",", ""))
            for v in re.findall(r"^forecast.* ([\d,]+) MiB", ended.stdout, re.MULTILINE)
        ]
        return mib, float(re.search(r"^PEAK (.*)$", ended.stdout, re.MULTILINE)[1])

    said()  # compiles, which takes more
    for tolerance in (0.1, 0.05):
        (dry,), _ = said("--dry-run")
        (before,), peak = said()
        assert dry / peak == pytest.approx(1, abs=tolerance), (dry, peak)
        assert before / peak == pytest.approx(1, abs=tolerance), (before, peak)


def test_durations():
    found = [say_duration(s) for s in (4.16, 99, 130, 7200, 200_000)]
    assert found == ["4.2 seconds", "99 seconds", "2.2 minutes", "2.0 hours", "2.3 days"]


WORDS = "train unet --device cpu --image-size 16 --model-channels 32 --channel-mult 1 --batch 2"


def test_a_run_measures_and_the_next_one_knows(tmp_path):
    more = "--steps 8 --log-every 2 --sample-count 2 --sample-steps 1 --sample-every 4 --outdir"

    def said(*extra):
        output = output_of(WORDS, more, tmp_path / "runs", *extra)
        return re.findall(r"^forecast +(.*)$", output, re.MULTILINE)

    (first,) = said()
    assert "(measured in the first steps)" in first and " from here, at " in first
    (again,) = said("--dry-run")
    assert "(measured in a run before)" in again and "16 images seen" in again
    assert "MiB of memory" in again
    found = read_measured(next(forecast.folder().glob("*.json")).stem)
    assert found["draw"] > 0 and found["save"] > 0 and found["start"] > 0
    newest = next((tmp_path / "runs").glob("0*/checkpoint-00000008.h5"))
    assert found["checkpoint"] == pytest.approx(newest.stat().st_size, rel=0.01)
    assert "(measured in a run before)" in said()[0]


def test_a_dry_run_times_the_first_steps(tmp_path, monkeypatch):
    """…where no run has been measured, and the estimate says that they are short."""
    monkeypatch.setattr(forecast, "MEASURING", 0.01)
    monkeypatch.chdir(tmp_path)

    def said(short):
        monkeypatch.setattr(forecast, "SHORT_STEP", short)
        output = output_of(WORDS, "--dry-run")
        return re.search(r"^forecast .*ms a step \((.*?)\)", output, re.MULTILINE)[1]

    assert said(0) == "estimated from its arithmetic"
    assert said(1e9) == "measured in the first steps"
    assert said(0) == "measured in a run before"
    assert {path.name for path in tmp_path.iterdir()} == {"cache"}


def test_a_dry_run_that_does_not_fit_is_estimated(monkeypatch):
    def full(*_):
        raise OutOfMemoryError("no room")

    monkeypatch.setattr(rehearsal, "time_first_steps", full)
    plan = ForecastPlan(options_of(), SIZES, 1.0, 1000)
    assert plan.is_measured_soon() and rehearsal.rehearse(plan.options, plan) is None


def test_what_a_first_run_compiles_takes_memory():
    """…and the copy that a checkpoint is written from; a dry run that has compiled asks again."""
    options = options_of()
    sizes = model_options(options, 3, None)
    foresee = functools.partial(price.foreseen_step, options, sizes, None, 100 << 20)
    first, _ = foresee()
    plan = ForecastPlan(options, sizes, 1.0, 1000, foresee=foresee)
    assert plan.memory == first
    loops = loop_cache.folder()
    loops.mkdir(parents=True)
    (loops / "dot-0123456789ab").touch()
    assert plan.memory == first
    plan.foresee_again()
    assert first - plan.memory == price.COMPILING
    arrays = price.foreseen_peak(options, sizes, price.CARDS[-1])
    copied = price.COPIED * forecast.checkpoint_bytes(
        options, count_parameters(options.model, sizes)[0]
    )
    assert plan.memory == int((100 << 20) + price.BESIDES + copied + arrays)


@needs("proc")
def test_pages_of_llvm_that_have_not_been_read_count():
    there = price.library_bytes("llvmlite")
    assert 1 << 20 < there < 1 << 30 and price.library_bytes("no such library") == 0
    assert price.base_memory() >= forecast.peak_memory() + price.LLVM - there - (1 << 20)
