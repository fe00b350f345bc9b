"""Averages of any width after the training: against closed forms, and against averages that were
kept on the way."""

import copy
import json
import math
import os

import h5py
import numpy as np
import pytest

import numdiff
from numdiff.device import copy_into, download, upload
from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.post_hoc_ema import combine as P
from numdiff.extras.post_hoc_ema.power_ema import gamma_of
from numdiff.nn import AdamW, Linear, Model
from numdiff.training.build import describe_average, describe_decay
from numdiff.training.checkpoint import (
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from numdiff.training.options import resolve, resolve_resumed
from numdiff.training.report import STATS, read_stats
from numdiff.training.run import train
from tests.command import output_of, refusal_of
from tests.conftest import relative_error
from tests.device.recording import RecordingDevice
from tests.models import UNET

pytestmark = pytest.mark.usefixtures("no_curves")

SMALL = {
    **UNET,
    "device": "cpu",
    "batch": 2,
    "log_every": 8,
    "sample_every": 0,
    "sample_count": 0,
    "seed": 5,
    "checkpoint_every": 0,
    "lr_schedule": "constant",
    "warmup_steps": 2,
    "learning_rate": 3e-3,
}
KEPT = (0.05, 0.1)


def run(outdir, steps, resume=None, **more):
    options = resolve({**SMALL, "outdir": str(outdir), "steps": steps, **more})
    return train(options, resume=resume and str(resume), echo=lambda line: None)


# Profiles -----------------------------------------------------------------------------------------


def profile(t, gamma, until=1.0):
    return np.where(t <= until, (gamma + 1) * t**gamma / until ** (gamma + 1), 0)


def grid(count, stds=KEPT, end=1000.0):
    """(times, γ) of `count` snapshots."""
    return np.repeat(np.arange(1, count + 1) / count * end, len(stds)), np.tile(
        [gamma_of(s) for s in stds], count
    )


def test_the_error_is_that_of_the_profile():
    """By quadrature, and so are the inner products that it is made of."""
    times, gammas = grid(8)
    t = (np.arange(400_000) + 0.5) / 400_000
    for std in (0.02, 0.07, 0.2):
        x, error = P.combination(times, gammas, 1000.0, gamma_of(std))
        assert x.sum() == pytest.approx(1, abs=1e-9)  # weights that stand still are as they are
        wanted = profile(t, gamma_of(std))
        got = sum(
            share * profile(t, gamma, time / 1000)
            for share, gamma, time in zip(x, gammas, times, strict=True)
        )
        assert error == pytest.approx(
            np.linalg.norm(got - wanted) / np.linalg.norm(wanted), rel=1e-3
        )
    assert error > 0.05


@pytest.mark.parametrize("std", [0.02, 0.07, 0.2])
def test_no_other_combination_that_sums_to_one_comes_nearer(std):
    """Neither a fit without the condition that is divided by its sum, as in edm2, nor one moved a
    little."""
    (times, gammas), wanted = grid(8), gamma_of(std)
    a, b = (
        P.inner_product(times[:, None], gammas[:, None], *other)
        for other in ((times, gammas), (1000.0, wanted))
    )
    norm = P.inner_product(1000.0, wanted, 1000.0, wanted)

    def error(x):
        return math.sqrt((x @ a @ x - 2 * x @ b[:, 0] + norm) / norm)

    x, residual = P.combination(times, gammas, 1000.0, wanted)
    divided, moved = np.linalg.solve(a, b[:, 0]), x + 1e-3 * (np.eye(16)[15] - np.eye(16)[3])
    assert error(x) == pytest.approx(residual, rel=1e-6)
    assert error(x) < error(divided / divided.sum()) and error(x) < error(moved)


def test_more_snapshots_reach_more_widths():
    """16 of the paper's two widths, the default, give those from 0.03 to 0.2; one width alone
    reaches little."""
    reached = [P.widths(*grid(count), 1000.0) for count in (8, 16, 32)]
    assert all(len(found) == 1 for found in reached)
    lows, highs = zip(*(found[0] for found in reached), strict=True)
    assert (
        lows[0] > lows[1] > lows[2]
        and highs[0] < highs[1] < highs[2]
        and lows[1] < 0.03
        and highs[1] > 0.2
    )
    ((low, high),) = P.widths(*grid(16, (0.1,)), 1000.0)
    assert 0.07 < low < 0.1 < high < 0.15


@pytest.mark.parametrize(
    "std, tolerance", [(0.05, 1e-9), (0.1, 1e-9), (0.04, 3e-4), (0.08, 1e-4), (0.15, 1e-4)]
)
def test_a_known_trajectory(std, tolerance):
    """θ(t) falls, rises and trembles: averages in float64 by the update, which is the integral of a
    step function, and the wanted one by its definition, over 2,000 updates with 16 snapshots."""
    steps, s = 2000, np.arange(2001.0)
    t = s[1:] / steps
    theta = np.stack([np.exp(-3 * t), t**2, np.sin(5 * t), 1 / (0.1 + t)], 1)
    theta += 0.05 * np.random.default_rng(0).standard_normal(theta.shape)

    def average(std, until):
        shares = np.diff(s[: until + 1] ** (gamma_of(std) + 1)) / until ** (gamma_of(std) + 1)
        return shares @ theta[:until]

    kept = [
        (until, one, average(one, until)) for until in range(125, steps + 1, 125) for one in KEPT
    ]
    x, _ = P.combination([k[0] for k in kept], [gamma_of(k[1]) for k in kept], steps, gamma_of(std))
    got = sum(share * k[2] for share, k in zip(x, kept, strict=True))
    np.testing.assert_allclose(got, average(std, steps), atol=20 * tolerance)
    assert np.abs(got - average(std, steps)).mean() < 10 * tolerance


# On the device ------------------------------------------------------------------------------------


class Tiny(Model):
    kind = "tiny"

    def __init__(self, device):
        self.weight = Linear(4, 4)
        self._finish(device, 0)


def test_recorded_and_launched_updates_have_the_same_bits(rng):
    """β follows from the counter on the device; a step whose gradient is not finite counts for
    nothing."""
    device = RecordingDevice()
    models = [Tiny(device) for _ in range(2)]
    optimizers = [
        AdamW(model.parameters, learning_rate=0.1, ema_std=[0.05, 0.1]) for model in models
    ]
    loss = upload(np.ones(1, np.float32), device)
    replay = None
    shadow = np.zeros((2, models[0].parameters.total))
    for t in range(1, 4):
        gradient = rng.standard_normal(models[0].parameters.total).astype(np.float32)
        for model in models:
            copy_into(model.parameters.grad, gradient)
        optimizers[0].update(loss)
        if t == 2:
            replay = device.capture(lambda: optimizers[1].update(loss))
        replay() if replay else optimizers[1].update(loss)
        weight = download(models[0].parameters.data)
        for k, std in enumerate(KEPT):
            shadow[k] += (1 - (1 - 1 / t) ** (gamma_of(std) + 1)) * (weight - shadow[k])
    states = [optimizer.state() for optimizer in optimizers]
    assert device.replays == 2 and states[0]["updates"] == 3
    for name, value in states[0].items():
        np.testing.assert_array_equal(value, states[1][name], err_msg=name)
    for k, std in enumerate(KEPT):
        assert relative_error(states[0][f"ema_std_{std:g}"], shadow[k]) < 1e-6
    copy_into(models[0].parameters.grad, np.full(models[0].parameters.total, np.nan, np.float32))
    optimizers[0].update(loss)
    np.testing.assert_array_equal(optimizers[0].state()["ema_std_0.05"], states[0]["ema_std_0.05"])


def test_bad_arguments_of_the_optimizer():
    model = Tiny("cpu")
    for given, message in (
        ((0.1, 0.1), "has the width 0.1 twice"),
        ((0.3,), "at most 0.28"),
        (0.1, "must be a list"),
        (("a",), "must be a finite number"),
    ):
        with pytest.raises(UsageError, match=message):
            AdamW(model.parameters, ema_std=given)
    other = copy.deepcopy((model, AdamW(model.parameters, ema_std=(0.1,))))[1]
    assert other.averages().keys() == {"ema_std_0.1"}


# Runs ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of 16 steps with 16 snapshots."""
    return run(tmp_path_factory.mktemp("runs"), 16, ema_std=KEPT, sample_count=1, sample_steps=1)


def steps_of(run_dir):
    """The steps of a run's snapshots."""
    return [step for step, _ in P.list_snapshots(run_dir)]


def same(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], err_msg=name)


def test_a_run_stores_its_averages(folder):
    assert steps_of(folder) == list(range(1, 17))
    buffers, meta = load_checkpoint(P.list_snapshots(folder)[-1][1])
    whole, _ = load_checkpoint(newest_checkpoint(folder))
    assert buffers.keys() == {"ema_std_0.05", "ema_std_0.1"} < whole.keys()
    assert (meta["ema_std"], meta["updates"], meta["step"]) == ([0.05, 0.1], 16, 16)
    same(buffers, {name: whole[name] for name in buffers})
    own = ("averages-", "checkpoint-", "options", "stats", "loss", "samples-", ".lock")
    assert all(name.startswith(own) for name in os.listdir(folder))


def test_a_snapshot_takes_no_report_of_its_own(folder, tmp_path):
    """Between two reports it is passed without a line; what it interrupts is in the next one, also
    after a resume."""
    part = run(tmp_path, 6, ema_std=KEPT, log_every=4, ema_snapshots=3, checkpoint_every=5)
    run(tmp_path, 11, resume=part, ema_std=KEPT, log_every=4, ema_snapshots=5, checkpoint_every=5)
    records = [json.loads(line) for line in (part / STATS).read_text().splitlines()]
    assert [record["step"] for record in records] == [4, 5, 6, 8, 10, 11]
    steps, losses = read_stats(part)
    assert steps == list(range(1, 12)) and losses[:5] == read_stats(folder)[1][:5]


def test_a_kept_width_is_itself_and_a_third_is_the_one_that_was_tracked(folder, tmp_path):
    """The same training again, which keeps the third width itself: the difference in units of the
    distance between the two averages that it is made of."""
    whole, meta = load_checkpoint(newest_checkpoint(folder))
    for std in KEPT:
        got, error, kept = P.weights_of(newest_checkpoint(folder), std, whole, meta)
        assert relative_error(got, whole[P.buffer_of(std)]) < 1e-6
        assert error < 1e-6 and len(kept) == 32
    tracked, _ = load_checkpoint(newest_checkpoint(run(tmp_path, 16, ema_std=(0.07, 0.15))))
    # averaging changes no weight
    np.testing.assert_array_equal(tracked["parameters"], whole["parameters"])
    apart = relative_error(whole["ema_std_0.05"], whole["ema_std_0.1"])
    for std in (0.07, 0.15):
        got, error, _ = P.weights_of(newest_checkpoint(folder), std, whole, meta)
        assert relative_error(got, tracked[P.buffer_of(std)]) < 0.003 * apart and error < 0.01


def test_the_command_and_what_takes_its_file(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = output_of("ema", folder, "--std 0.08")
    assert "ema-0.08.h5: weights of" in output
    assert "from 32 stored averages; the profile differs by 0." in output
    averaged = folder / "ema-0.08.h5"
    direct, made = numdiff.load(folder, "cpu", ema_std=0.08), numdiff.load(averaged, "cpu")
    same(direct.arrays(), made.arrays())
    for name in ("averaged", "pictures"):
        assert made.meta[name] == direct.meta[name]
    assert made.meta["step"] == 16 and made.meta["pictures"]["steps"] == 1
    with pytest.raises(UsageError, match="ema-0.08.h5 holds averaged weights alone"):
        numdiff.load(averaged, "cpu", weights="raw")
    drawn = "--count 1 --steps 2 --device cpu --grid a.png"
    assert "ema-0.08 weights" in output_of("sample", averaged, drawn)
    assert "ema-0.1 weights" in output_of("sample", folder, "--ema-std 0.1", drawn)
    # by the same weights, averaged otherwise
    guided = output_of("sample", folder, "--ema-std 0.05 --guide-with", folder, drawn)
    assert "autoguidance 2" in guided


def test_what_the_command_refuses(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with h5py.File("data.h5", "w") as file:
        file["images"] = np.zeros((2, 8, 8, 3), np.uint8)
    checkpoint, snapshot = newest_checkpoint(folder), P.list_snapshots(folder)[0][1]
    for words, message in (
        (["--std 0.3"], "the width 0.3 does not follow from the averages that"),
        (["--std nan"], "the width nan does not follow"),
        (["--std 0.01"], r"(0.05, 0.1, at 16 times), which give widths from 0.02"),
        (["--std 0.08 --output a.npz"], "--output a.npz must end in .h5"),
        (["--std 0.08 --output no/a.h5"], "the folder does not exist"),
        (["--std 0.08 --output", checkpoint], "which is read; give another name"),
        (["--std 0.08 --output", snapshot], "a file of this name is the run's own"),
        (["--std 0.08 --output data.h5"], "it is a dataset; give another name"),
    ):
        assert message in refusal_of("ema", folder, *words)
    assert os.listdir() == ["data.h5"]


def test_what_keeps_no_averages_says_so(folder, tmp_path):
    other = run(tmp_path, 2)
    with pytest.raises(NumdiffError, match="keeps no averages.*train with --ema-std 0.05,0.10"):
        numdiff.load(other, "cpu", ema_std=0.08)
    for given, message in (
        ({"weights": "raw", "ema_std": 0.08}, "leave one of them out"),
        ({"ema_std": "a"}, "a number"),
    ):
        with pytest.raises(UsageError, match=message):
            numdiff.load(folder, "cpu", **given)


def test_weights_of_other_programs_keep_none(tmp_path):
    np.savez(tmp_path / "w.npz", a=np.zeros(3))
    assert (
        "w.npz keeps no averages of which one of another width can be made: give a run "
        "that was trained with --ema-std." in refusal_of("ema", tmp_path / "w.npz", "--std 0.08")
    )


@pytest.mark.parametrize(
    "before, after",
    [
        ("ema", "--std 0.08"),
        ("sample", "--count 1 --device cpu"),
        ("sample", "--ema-std 0.08 --device cpu"),
        ("train unet --init", "--device cpu --dry-run"),
    ],
)
def test_a_snapshot_is_no_model(folder, before, after):
    """Its name comes first where one looks for averages."""
    stored = P.list_snapshots(folder)[0][1]
    assert (
        f"{stored} holds what `numdiff ema` puts together, and no model: give its run, {folder}."
        in refusal_of(before, stored, after)
    )


def test_damaged_and_foreign_snapshots_are_passed_over(folder, tmp_path):
    for path in (*folder.glob("averages-*.h5"), newest_checkpoint(folder)):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    checkpoint = newest_checkpoint(tmp_path)
    whole, meta = load_checkpoint(checkpoint)
    first, _, _ = P.weights_of(checkpoint, 0.08, whole, meta)
    (_, damaged), (_, foreign), *others = P.list_snapshots(tmp_path)
    damaged.write_bytes(damaged.read_bytes()[:-40])
    buffers, about = load_checkpoint(foreign)
    save_checkpoint(foreign, buffers, {**about, "index": about["index"][1:]})
    said = []
    got, _, kept = P.weights_of(checkpoint, 0.08, whole, meta, said.append)
    of_damaged, of_foreign = said
    assert "truncated or damaged" in of_damaged and "another training" in of_foreign
    assert len(kept) == 28 and relative_error(got, first) < 1e-3  # early ones weigh little
    for _, path in others:
        path.unlink()
    message = "at 1 times.*which give widths from 0.0.* choose one of these"
    with pytest.raises(UsageError, match=message):
        P.weights_of(checkpoint, 0.2, whole, meta, said.append)


def test_resumed_is_uninterrupted(folder, tmp_path):
    """Every stored file, bit by bit."""
    part = run(tmp_path, 7, ema_std=KEPT, ema_snapshots=7)
    assert steps_of(part) == list(range(1, 8))
    run(tmp_path, 16, resume=part, ema_std=KEPT, ema_snapshots=16)
    assert steps_of(part) == list(range(1, 17))
    for _, path in P.list_snapshots(part):
        same(load_checkpoint(path)[0], load_checkpoint(folder / path.name)[0])


def test_what_a_resumed_run_may_change():
    options = resolve({**SMALL, "ema_std": KEPT})
    assert resolve_resumed(options, {"ema_snapshots": 3}).ema_snapshots == 3
    for before, given, message in (
        (options, {"ema_std": (0.05,)}, "--ema-std 0.05 does not fit the run, .* with 0.05,0.1"),
        (resolve(SMALL), {"ema_snapshots": 3}, "--ema-snapshots 3 .* without which the run was"),
    ):
        with pytest.raises(UsageError, match=message):
            resolve_resumed(before, given)


def test_snapshots_are_bounded_and_those_of_a_path_left_are_set_aside(tmp_path):
    """A run made twice as long keeps every other of its first snapshots; one that continues from an
    earlier checkpoint leaves the later ones behind."""
    kept = {"ema_std": (0.1,), "keep": 9}
    part = run(tmp_path, 4, ema_snapshots=4, checkpoint_every=2, **kept)
    assert steps_of(part) == [1, 2, 3, 4]
    run(tmp_path, 8, resume=part, ema_snapshots=4, checkpoint_every=2, **kept)
    assert steps_of(part) == [2, 4, 6, 8]
    fourth = next(path for path in list_checkpoints(part) if path.name == "checkpoint-00000004.h5")
    run(tmp_path, 5, resume=fourth, ema_snapshots=1, **kept)
    assert steps_of(part) == [5]
    assert {"averages-00000006.h5.old", "averages-00000008.h5.old"} <= set(os.listdir(part))


@pytest.mark.parametrize(
    "given, message",
    [
        ({"ema_std": (0.3,)}, "--ema-std 0.3 must be at least 0.005 and at most 0.28"),
        ({"ema_std": (0.1, math.nan)}, "must be a finite number"),
        ({"ema_std": (0.1, 0.1)}, "^--ema-std 0.1,0.1 has the width 0.1 twice"),
        ({"ema_snapshots": 0}, "--ema-snapshots 0 must be at least 1"),
    ],
)
def test_settings_that_cannot_be(given, message):
    with pytest.raises(UsageError, match=message):
        resolve({**SMALL, **given})


@pytest.mark.parametrize(
    "steps, stds, said",
    [
        (8, (0.1,), "; also of the width 0.1, stored every step in 4 MB, 0.032 GB in all"),
        (
            3200,
            KEPT,
            "; also of the widths 0.05, 0.1, stored every 200 steps in 8 MB, 0.128 GB in all",
        ),
        (8, None, ""),
    ],
)
def test_what_the_log_says_of_them(steps, stds, said):
    options = resolve({**SMALL, "steps": steps, "ema_std": stds})
    assert describe_average(options, 10**6) == describe_decay(options) + said
