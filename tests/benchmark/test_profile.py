import contextlib
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import numdiff.device.emulator
from numdiff.benchmark import clocks
from numdiff.benchmark.clocks import (
    EMPTY_KERNELS,
    HOLD_NS,
    WINDOW,
    GpuClock,
    match,
    replayed,
    times_of,
)
from numdiff.benchmark.costs import roof_of
from numdiff.benchmark.memory import Holdings, in_short
from numdiff.benchmark.profile import Profile, ShownProgress, profile_step, run_watched
from numdiff.benchmark.step import NumdiffStep
from numdiff.benchmark.watch import BETWEEN, watching_launches, watching_operations
from numdiff.device import cpu, side_stream, zeros
from numdiff.device.arena import Arena
from numdiff.device.emulator import EmulatorDevice
from numdiff.device.roof import Roof, peak_flops
from numdiff.kernels import add_forward, linear_forward
from numdiff.training.options import resolve
from tests.test_progress_bar import Terminal

from .fake_gpu import EVENT_MS, FakeGpu

TINY_DIT = {
    "model": "dit",
    "preset": "tiny",
    "optimizer": "adamw",
    "image_size": 4,
    "batch": 1,
    "patch_size": 4,
    "hidden_size": 8,
    "depth": 1,
    "heads": 1,
    "class_cond": False,
    "mlp_ratio": 1.0,
}


def small_unet(**more):
    return resolve(
        {
            "model": "unet",
            "preset": "tiny",
            "optimizer": "adamw",
            "device": "cpu",
            "image_size": 16,
            "model_channels": 32,
            "channel_mult": (1, 2),
            "batch": 2,
            **more,
        }
    )


@pytest.fixture(scope="module")
def on_cpu():
    return profile_step(small_unet(), repeats=1, steps=2)


def check_profile(found):
    total = found.total_us
    assert total > 0 and found.step_ms > 0
    for rows in (found.by_kernel(), found.by_layer()):
        assert sum(row[1] for row in rows) == len(found.launches)
        assert np.isclose(sum(row[2] for row in rows), total) and np.isclose(
            sum(row[3] for row in rows), 1
        )
        assert rows == sorted(rows, key=lambda row: -row[2])


def test_on_the_cpu(on_cpu):
    check_profile(on_cpu)
    assert not on_cpu.captured and on_cpu.roof.bandwidth is None
    kernels = {row[0]: row for row in on_cpu.by_kernel()}
    assert {"conv2d_forward", "conv2d_backward", "groupnorm_backward", "adamw_update"} <= set(
        kernels
    )
    layers = {row[0] for row in on_cpu.by_layer()}
    assert {
        ("input_blocks.1", "forward"),
        ("input_blocks.1", "backward"),
        (BETWEEN, "step"),
        ("time_embed.2", "backward"),
    } <= layers
    everything = {row[0] for row in on_cpu.by_layer(9)}
    assert ("output_blocks.0.0.in_layers.2", "backward") in everything


def test_what_runs_side_by_side_is_timed_one_after_another(monkeypatch):
    step = NumdiffStep(small_unet(optimizer="muon"))
    monkeypatch.setattr(
        cpu, "_pool", lambda: pytest.fail("Muon's matrices are handed to other threads")
    )
    launches, _ = run_watched(step, None)
    assert sum(launch.kernel == "newton_schulz" for launch in launches) > 1
    # a nested operation takes no longer than what it is part of
    assert all(launch.us >= 0 for launch in launches)


def test_flops_are_those_of_the_model(on_cpu):
    """What the operations count is what nn/flops.py counts, and a few per cent for norms and
    activations."""
    products = sum(
        row[5]
        for row in on_cpu.by_kernel()
        if row[0].startswith(("conv2d", "linear", "matmul", "flash"))
    )
    assert products == pytest.approx(on_cpu.flops_per_step, rel=0.06)


def test_chrome_trace(on_cpu, tmp_path):
    on_cpu.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    runs = [e for e in events if e["ph"] == "X"]
    for row in range(3):  # of a row no two overlap, and all together last as long as the kernels
        line = [e for e in runs if e["tid"] == row]
        assert all(
            a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in zip(line, line[1:], strict=False)
        )
        assert sum(e["dur"] for e in line) == pytest.approx(on_cpu.total_us)


@pytest.mark.slow
def test_on_a_gpu(monkeypatch):
    gpu = FakeGpu()
    monkeypatch.setattr(numdiff.device.emulator, "get_emulator", lambda **_: gpu)
    monkeypatch.setattr(side_stream, "HELD", 1 << 13)
    found = profile_step(resolve({**TINY_DIT, "device": "emulator"}), repeats=1, steps=1, warmup=0)
    check_profile(found)
    assert found.captured and gpu.captured == 2  # the step; kernels that do nothing
    assert all(
        launch.us == pytest.approx(1e3 * EVENT_MS / EMPTY_KERNELS) for launch in found.launches
    )
    assert gpu._driver.alive == 1  # event: the one that the stream is held by
    names = {launch.kernel for launch in found.launches}
    assert "adamw_update_kernel_v3" in names or "adamw_update_kernel_v2" in names
    assert "zero_ranges_kernel_v1" in names
    assert ("blocks.0", "backward") in {row[0] for row in found.by_layer()}
    assert any(row[6] for row in found.by_kernel())  # some share of the roof
    assert "launch" not in vars(gpu) and "fill" not in vars(gpu)
    peak, held = found.memory
    assert sum(nbytes for _, nbytes in held) == peak > 0 and not any(
        "allocate" in vars(a) for a in gpu.arenas
    )
    rows = dict(held)
    assert rows["weights"] == rows["AdamW's m"] == rows["gradients of the weights"]
    assert 0 < rows["backward: freed, but in use by weight gradients on the side stream"] <= 1 << 13
    assert any(name.startswith("blocks.0 ") for name in rows) and "kept between steps" in in_short(
        found.memory
    )


def test_clock_holds_the_stream(monkeypatch):
    gpu = FakeGpu()
    clock, x, held = GpuClock(gpu), zeros(8, np.float32, gpu), []
    # the stand-in's events are as far apart whatever is between them, one kernel or a graph of many
    assert clock.overhead_us == pytest.approx(1e3 * EVENT_MS * (1 - 1 / EMPTY_KERNELS))
    monkeypatch.setattr(clock, "_launch", lambda *args: held.append(args[4][1]))
    for _ in range(WINDOW + 1):
        clock.time(lambda: gpu.fill(x, 0))
    assert held == [HOLD_NS] * 2
    assert not np.isnan(clock.microseconds()).any() and clock.microseconds() == []


def test_a_stream_that_ran_free_is_held_again(monkeypatch):
    """…before the next launch, for longer where the host is slow; not where it waited for the GPU,
    once, and long."""
    gpu, now, held = FakeGpu(), [0.0], []
    clock = GpuClock(gpu)
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(
        clock,
        "_launch",
        lambda *args: (held.append(args[4][1]), setattr(gpu._driver, "idle", False)),
    )

    def pause(seconds, idle):
        now[0] += seconds
        gpu._driver.idle = idle

    clock.time(lambda: None)
    pause(HOLD_NS / 1e9, True)
    clock.time(lambda: None)
    assert held == [HOLD_NS] * 2
    for _ in range(3):
        pause(HOLD_NS / 4e9, False)
        clock.time(lambda: None)
    pause(HOLD_NS / 4e9, True)
    clock.time(lambda: None)
    assert held == [HOLD_NS, HOLD_NS, 2 * HOLD_NS] and not np.isnan(clock.microseconds()).any()


def test_a_launch_during_which_the_stream_came_free_is_timed_in_another_run():
    gpu, runs = FakeGpu(), []
    clock = GpuClock(gpu)

    def come_free(now):
        gpu._driver.idle = now

    def run():
        gpu._driver.idle = False
        runs.append(clock.hold_ns)
        first = len(runs) <= 2
        return clock._microseconds_of(
            [lambda: None, lambda: come_free(first), lambda: come_free(False)]
        )

    result, times, missing = times_of(run, 1)
    assert (
        result is None and missing == 0 and len(set(times)) == 1 and 0 < times[0] < 1e3 * EVENT_MS
    )
    assert runs == [HOLD_NS, 2 * HOLD_NS, 4 * HOLD_NS]
    assert times_of(lambda: (1, [float("nan"), 3.0]), 2) == (1, [0.0, 3.0], 1)


def test_watching_is_undone():
    import numdiff.kernels as K
    from numdiff.nn.functional import products

    before, seen = K.linear_forward, []

    def around(function, arguments, call):
        seen.append((function.__name__, sorted(arguments)))
        return call()

    x = np.ones((2, 4), np.float32)
    with pytest.raises(ZeroDivisionError), watching_operations(around):
        assert products.K.linear_forward is not before
        products.K.linear_forward(x, x)
        raise ZeroDivisionError
    assert K.linear_forward is before is linear_forward and seen[0][0] == "linear_forward"
    assert seen[0][1] == ["bias", "residual", "version", "weight", "x"]


def test_watching_launches():
    gpu, seen = FakeGpu(), []
    x = zeros((4, 4), np.float32, gpu)
    with watching_launches(gpu, lambda name, grid, block, call: (seen.append(name), call())[1]):
        y = add_forward(x, x)
    add_forward(x, x)
    assert len(seen) == 1 and "add" in seen[0] and y.shape == x.shape


def test_one_who_watches_within_another():
    gpu, seen = FakeGpu(), []
    x = zeros((4, 4), np.float32, gpu)
    with watching_launches(gpu, lambda *launch: (seen.append("outer"), launch[-1]())[1]):
        with watching_launches(gpu, lambda *launch: (seen.append("inner"), launch[-1]())[1]):
            add_forward(x, x)
        add_forward(x, x)
    assert seen == ["inner", "outer", "outer"] and "launch" not in vars(gpu)


@pytest.mark.parametrize("lines", [False, True])
def test_what_is_measured_is_shown(lines, monkeypatch):
    """On the emulator a terminal gets a bar, whose length is known after a step; all else gets a
    line a part."""
    device, said = EmulatorDevice(float64=False), []
    with Terminal() as terminal:
        if lines:
            monkeypatch.setenv("TERM", "dumb")
        with ShownProgress(device, said.append) as show:
            for what, launches in (
                ("the first step", 5),
                ("the step as it trains", 4),
                ("kernel by kernel", 4),
            ):
                show(what)
                for _ in range(launches):
                    zeros(8, np.float32, device)
        frames = terminal.frames()
    assert "fill" not in vars(device)
    if lines:
        assert (
            said == ["the first step", "the step as it trains", "kernel by kernel"] and frames == []
        )
        return
    assert said == [] and any("0 kernels  the first step" in frame for frame in frames)
    assert any("5/15 kernels  the step as it trains" in frame for frame in frames), frames
    assert any("9/13 kernels  kernel by kernel" in frame for frame in frames)


def test_peaks():
    gpu = FakeGpu()
    assert peak_flops(gpu, "fp16") == 989.4e12 and peak_flops(gpu, "tf32") == 494.7e12
    assert peak_flops(gpu, "fp32") == 66.9e12 and peak_flops(None, "fp16") is None
    share, bound = Roof(gpu).share(1.0, 0, 989.4e12 / 2, "fp16")
    assert share == pytest.approx(0.5) and bound == "arithmetic"
    assert Roof(None).share(1.0, 10, 10, "fp32") == (None, None)


@pytest.mark.parametrize(
    "name",
    [
        "flash_attention_forward",
        "flash_attention_backward",
        "attention_forward",
        "conv2d_forward",
        "linear_backward",
        "matmul",
        "hopper_forward",
        "tf32_weight_gradient",
    ],
)
def test_products_are_bounded_by_the_tensor_cores(name):
    """…or a share of the roof is above 100 %: flash attention's was up to 491 % of float32's."""
    assert roof_of(name, np.dtype(np.float16), "fp16") == "fp16"
    assert roof_of(name, np.dtype(np.float32), "tf32") == "tf32"
    assert roof_of(name, np.dtype(np.float32), "fp32") == "fp32"
    assert roof_of("groupnorm_forward", np.dtype(np.float16), "fp16") == "fp32"


def test_an_empty_profile():
    found = Profile([], [], "cpu", 1.0, False, Roof(None), "fp32", 0)
    assert found.by_kernel() == [] and json.loads(found.chrome())["traceEvents"]


def test_what_events_add_is_taken_off():
    gpu = FakeGpu()
    clock, x = GpuClock(gpu), zeros(8, np.float32, gpu)
    clock.overhead_us = 0.75 * 1e3 * EVENT_MS
    clock.time(lambda: gpu.fill(x, 0))
    assert clock.microseconds() == [pytest.approx(0.25 * 1e3 * EVENT_MS)]


def test_times_from_inside_a_graph():
    """Of each launch the median over the replays; nothing where the profiler saw something else."""
    launches = ["memset", "add_kernel", "memcpy"]
    seen = [
        (name, 100 * k + 10 * i, 100 * k + 10 * i + i + k)
        for k in range(3)
        for i, name in enumerate(("memset32", "_ZN7numdiff10add_kernelB2v1", "Memcpy DtoD"))
    ]
    assert match(seen[::-1], launches, 3) == ([1, 2, 3], 23)
    assert match(seen[:-1], launches, 3) is None and match([], [], 3) is None
    assert match(seen, ["add_kernel", "memset", "memcpy"], 3) is None


def test_who_holds_memory():
    arena, other = Arena(lambda nbytes: 0, 1 << 20), Arena(lambda nbytes: 1 << 30, 1 << 20)
    before, who = arena.allocate(1000), ["a"]
    with Holdings([arena, other], lambda: who[0]) as holdings:
        first = arena.allocate(256)
        who[0] = "b"
        second, third = other.allocate(512), arena.allocate(256)
        del second
        who[0] = "c"
        fourth = arena.allocate(256)
        del before, first
        fifth = other.allocate(512)
    assert holdings.peak == 1024 + 256 + 512 + 256
    assert holdings.held == {None: 1024, "a": 256, "b": 768}
    assert arena.used_bytes == 512 and other.used_bytes == 512 and "allocate" not in vars(arena)
    del third, fourth, fifth
    assert arena.used_bytes == other.used_bytes == 0


@pytest.mark.parametrize("fails", [False, True])
def test_the_profiler_is_asked(monkeypatch, fails):
    """A stand-in for PyTorch's profiler, which saw three replays, last first, and something of the
    host."""
    kinds = SimpleNamespace(CUDA="cuda", CPU="cpu")
    events = [
        SimpleNamespace(
            name="add_kernel", device_type="cuda", time_range=SimpleNamespace(start=k, end=k + 0.5)
        )
        for k in (30.0, 20.0, 10.0)
    ] + [SimpleNamespace(name="cuGraphLaunch", device_type="cpu")]

    @contextlib.contextmanager
    def profile(activities):
        yield SimpleNamespace(events=lambda: events)
        if fails:
            raise RuntimeError("no permission")

    torch = SimpleNamespace(autograd=SimpleNamespace(DeviceType=kinds))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(
        sys.modules, "torch.profiler", SimpleNamespace(profile=profile, ProfilerActivity=kinds)
    )
    runs = []
    step = SimpleNamespace(run=lambda: runs.append(1), wait=lambda: None)
    if fails:
        assert replayed(step, ["add_kernel"], 3) == (None, "RuntimeError: no permission")
        return
    assert replayed(step, ["add_kernel"], 3) == (([0.5], 0.5), None) and len(runs) == 3
    assert replayed(step, ["add_kernel"] * 2, 3) == (None, "of 3 × 2 launches the profiler saw 3")
