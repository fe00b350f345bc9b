import contextlib
import csv
import io
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import numdiff.device
import numdiff.device.emulator
from numdiff.benchmark import ladder, torch_ladder
from numdiff.benchmark.ladder import (
    COMPONENTS,
    ROWS,
    bench_ladder,
    bytes_for,
    component,
    largest_batch,
    worst,
)
from numdiff.benchmark.rooflines import draw_ladder
from numdiff.benchmark.step import plan_step
from numdiff.benchmark.transfer import bench_transfer
from numdiff.device.planned import CARDS
from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.measure.ladder import ladder_end, ladder_line
from numdiff.kernels.operation.versions import at_most
from numdiff.training.options import resolve
from numdiff_cli.main import main
from tests.conftest import exhaustive

from .fake_gpu import FakeGpu
from .test_profile import TINY_DIT, small_unet

H200 = next(card for card in CARDS if card.device_name == "NVIDIA H200")
WIDE_DIT = {
    "model": "dit",
    "device": "cpu",
    "preset": "tiny",
    "architecture": "DiT-Tiny",
    "optimizer": "adamw",
    "hidden_size": 64,
    "heads": 2,
    "depth": 1,
    "batch": 2,
}
# What each row launches of convolutions and products, and what it no longer does
UNET = {
    1: (
        "conv2d_weight_gradient_kernel_v1 softmax_forward_kernel_v1 silu_forward_kernel_v1 groupnorm_forward_kernel_v1",
        "_v2 _v3 _v4 flash im2col",
    ),
    2: (
        "im2col_forward_kernel_v1 matmul_forward_kernel_v2 sum_rows_kernel_v2",
        "matmul_forward_kernel_v1 _v3 _v4 flash",
    ),
    3: (
        "conv2d_weight_gradient_kernel_v3 matmul_forward_kernel_v4 groupnorm_backward_kernel_v1 adamw_update_kernel_v2",
        "im2col flash groupnorm_forward_kernel_v3",
    ),
    4: (
        "groupnorm_backward_kernel_v3 softmax_forward_kernel_v3 adamw_update_kernel_v3",
        "flash groupnorm_forward_kernel_v1",
    ),
    5: ("flash_attention_backward_kernel_v4", "softmax tf32"),
    6: (
        "conv2d_tf32_forward conv2d_tf32_weight_gradient gemm_tf32",
        "softmax conv2d_forward_kernel_v3_128",
    ),
    7: (
        "gemm_hopper conv2d_forward_kernel_v6 flash_attention_forward_kernel_v3",
        "softmax conv2d_forward_kernel_v3",
    ),
}
DIT = {
    1: (
        "adaln_forward_kernel_v1 gate_forward_kernel_v1 gelu_forward_kernel_v1 matmul_forward_kernel_v1",
        "_v2 _v3 _v4 bias_gelu",
    ),
    3: (
        "matmul_forward_kernel_v4 adaln_forward_kernel_v1 gelu_forward_kernel_v2",
        "bias_gelu gate_adaln flash",
    ),
    4: ("gate_adaln_forward_kernel_v2 bias_gelu_forward_kernel_v2", "flash"),
    5: ("flash_attention_forward_kernel_v4", "softmax"),
}


def launched(number, options):
    row = ROWS[number - 1]
    with at_most(row.ceilings):
        return {key.name for key in plan_step(options.changed(precision=row.precision), H200)}


def check(number, names, wanted, unwanted):
    text = " ".join(sorted(names))
    assert [w for w in wanted.split() if w not in text] == [], (number, text)
    # `pair` is the second half of a sum, of which there is one version
    left = " ".join(sorted(name for name in names if "pair" not in name))
    assert [w for w in unwanted.split() if w in left] == [], (number, left)


@pytest.mark.parametrize("number", UNET)
def test_a_row_launches_what_it_promises(number):
    check(number, launched(number, small_unet(model_channels=64)), *UNET[number])


@pytest.mark.parametrize("number", DIT)
def test_a_row_of_a_dit(number):
    check(number, launched(number, resolve(WIDE_DIT)), *DIT[number])


def test_ladder_in_numpy(monkeypatch):
    monkeypatch.setattr(ladder, "COMPARED", 4)
    monkeypatch.setattr(ladder, "BRIEF_MS", 1e9)
    options = small_unet(image_size=8, channel_mult=(1,), attention_resolutions=(8,), batch=1)
    rows = list(bench_ladder(options, (1, 2, 5, 10), steps=1, warmup=1))
    assert [row["number"] for row in rows] == [1, 2, 5, 10] and "needs a GPU" in rows[1]["left_out"]
    timed = [row for row in rows if "ms" in row]
    assert [n for n, row in enumerate(ROWS, 1) if ladder.left_out(row, None) is None] == [
        1,
        4,
        5,
        10,
    ]
    assert timed[0]["speedup"] == 1 and timed[0]["deviation"] == 0 and timed[0]["mfu"] is None
    most, least, count, bar = worst(timed)["fp32"]
    assert 0 <= most < bar and least == count == 4 and len(set(timed[1]["losses"])) == count
    assert timed[2]["deviation"] is None  # of other images
    for row in timed:
        assert (
            set(row["components"]) == set(COMPONENTS)
            and row["components"]["conv2d"] > 0
            and row["moved"] > 0
        )
    table = list(csv.DictReader(io.StringIO(ladder.as_csv(rows))))
    assert (
        len(table) == len(rows) and float(table[0]["conv2d_ms"]) == rows[0]["components"]["conv2d"]
    )
    assert table[1]["ms"] == "" and table[1]["left_out"]


class LadderGpu(FakeGpu):
    """…with a room in which some batches fit."""

    room = 0

    def memory_info(self):
        return self.room, self.room


def on_fake_gpu(monkeypatch, room):
    gpu = LadderGpu()
    gpu.room = room
    monkeypatch.setattr(numdiff.device.emulator, "get_emulator", lambda **_: gpu)
    return gpu, resolve({**TINY_DIT, "device": "emulator"})


@exhaustive
@pytest.mark.slow
def test_ladder_on_a_gpu(monkeypatch):
    """Whose kernels do nothing."""
    gpu, options = on_fake_gpu(monkeypatch, 1 << 26)
    monkeypatch.setattr(ladder, "largest_batch", lambda *_: 3)
    rows = list(bench_ladder(options, (1, 10), steps=2, warmup=1))
    assert [row.get("left_out") or row.get("fault") for row in rows] == [None] * 2
    assert [row["batch"] for row in rows] == [1, 3] and [row["precision"] for row in rows] == [
        "fp32",
        "fp16",
    ]
    assert rows[1]["peak"] == 989.4e12 and rows[0]["peak"] == 66.9e12 and gpu.captured >= 2
    assert all(row["peak_mib"] > 0 and row["mfu"] > 0 and row["idle_ms"] >= 0 for row in rows)
    assert rows[0]["components"]["attention"] > 0 and rows[0]["losses"] and not rows[1]["losses"]


@pytest.mark.slow
def test_largest_batch(monkeypatch):
    gpu, options = on_fake_gpu(monkeypatch, 1 << 30)
    one, many = (bytes_for(options, gpu, batch) for batch in (1, 20_000))
    found = largest_batch(options, gpu, many)
    assert many > one and found % 8 == 0 and 0.9 * 20_000 < found
    assert bytes_for(options, gpu, found) <= many
    assert largest_batch(options, gpu, one - 1) == 0


def test_rows_that_there_are_not():
    with pytest.raises(UsageError, match=r"--rows 11: the ladder has rows 1 to 10\.$"):
        next(bench_ladder(small_unet(), (1, 11)))
    for rows, text in (
        ((0,), "--rows 0: the ladder"),
        ((), "--rows none leaves no row to measure: give some of 1"),
        ((1, 2), "--data a.h5 is for row 10, and the other rows take random images: leave it out"),
    ):
        with pytest.raises(UsageError, match=f"^{text}"):
            ladder.check_rows(small_unet(data="a.h5"), rows)
    ladder.check_rows(small_unet(data="a.h5"), None)


def test_picture_and_what_is_printed(tmp_path):
    base = {
        "batch": 4,
        "precision": "fp32",
        "ms": 2.0,
        "images_per_second": 2000.0,
        "tflops": 1.0,
        "speedup": 1.0,
        "mfu": 0.5,
        "peak": 2e12,
        "peak_mib": 3.0,
        "flops": 2e9,
        "moved": 1e8,
        "deviation": 0.0,
        "compared": 1,
        "components": dict.fromkeys(COMPONENTS, 0.25),
        "idle_ms": 0.25,
        "bandwidth": 1e11,
    }
    rows = [
        {**base, "number": 1, "name": "naive"},
        {"number": 2, "name": "tiles", "left_out": "it needs a GPU"},
        {**base, "number": 7, "name": "half", "precision": "fp16", "deviation": 0.5, "mfu": None},
        {"number": 9, "name": "largest", "fault": "no memory"},
    ]
    draw_ladder(tmp_path / "a.svg", rows, "Title")
    text = (tmp_path / "a.svg").read_text()
    assert (
        "1  naive" in text
        and "7  half" in text
        and "FLOPs per byte" in text
        and "tiles" not in text
    )
    with pytest.raises(NumdiffError, match="no row was measured"):
        draw_ladder(tmp_path / "b.svg", rows[1:2], "Title")
    lines = [ladder_line(row) for row in rows]
    assert (
        "2,000.0" in lines[0]
        and "50.0 %" in lines[0]
        and lines[1].endswith("left out: it needs a GPU")
    )
    assert "–" in lines[2] and lines[3].endswith("failed: no memory")
    end = "\n".join(ladder_end(rows, ladder))
    assert (
        "fp16: the first 1 differ from the first row's by at most 5.0e-01 of their value, MORE than expected"
        in end
    )
    assert "elementwise" in end and list(ladder_end(rows[1:2], ladder)) == []


def test_ladder_of_pytorch(monkeypatch):
    """Whose steps are stand-ins: a row that fails does not hide the others, and each keeps what
    those before it had."""
    made = []

    class Step:
        first_s, peak_bytes = 0.0, 1 << 20

        def __init__(self, options, mode, precision):
            if precision == "bf16":
                raise RuntimeError("no such\ntype")
            made.append((options.batch, mode, precision))

        def run(self):
            pass

        wait = close = run

    fused = []
    monkeypatch.setattr(torch_ladder, "TorchStep", Step)
    monkeypatch.setattr(
        torch_ladder, "attention", lambda way: (fused.append(way), contextlib.nullcontext())[1]
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(OutOfMemoryError=MemoryError))
    rows = list(torch_ladder.bench_torch_ladder(small_unet(), None, 1e9, 2, 1))
    assert made == [(2, "eager", "fp32"), (2, "compile", "fp32"), (2, "compile", "fp32")]
    assert (
        fused == [False, False, True, True]
        and rows[0]["speedup"] == 1
        and "needs a GPU" in rows[1]["left_out"]
    )
    assert rows[4]["fault"] == "RuntimeError: no such type" and "ms" not in rows[4]
    assert ladder_line(rows[0]).lstrip().startswith("PyTorch, eager")


def test_transfer():
    gpu = FakeGpu()
    found = bench_transfer(gpu, 1, 2, 4, kernel=1, repeats=1)
    assert gpu.captured == 1
    assert (
        found["up"] == 4 * (2 * 2 * 4 + 4 * 4)
        and found["down"] == 4 * 2 * 2 * 4
        and found["flops"] == 2 * 4 * 16
    )
    assert all(found[name] > 0 for name in ("upload", "kernel", "download", "together", "resident"))
    with pytest.raises(UsageError, match="--device cpu has no copies to measure"):
        bench_transfer(None)


def test_transfer_as_a_table(monkeypatch):
    monkeypatch.setattr(numdiff.device, "get_backend", lambda name: FakeGpu())
    given = "--size", "2", "--channels", "4", "--repeats", "1", "--device", "cpu"
    result = CliRunner().invoke(main, ["bench", "transfer", *given])
    assert result.exit_code == 0, result.output
    rows = [line for line in result.output.splitlines() if line.startswith("|")]
    assert (
        len(rows) == 7
        and {row.count("|") for row in rows} == {5}
        and "the call takes" in result.output
    )


def test_components():
    assert component(["conv2d_forward", "matmul_forward", "matmul_forward_kernel_v2"]) == "conv2d"
    assert component(["attention_backward", "matmul_strided", "x"]) == "attention"
    assert (
        component(["groupnorm_forward", "x"]) == component(["gate_adaln_backward", "x"]) == "norm"
    )
    assert (
        component(["global_norm", "sum_of_squares"]) == component(["adamw_update"]) == "optimizer"
    )
    assert (
        component(["depthwise_layernorm_forward", "x"])
        == component(["im2win_forward", "x"])
        == "conv2d"
    )
    assert component(["sla_forward", "x"]) == component(["sla_rest_kernel_v3"]) == "attention"
    assert component(["memcpy"]) == component(["concat_forward", "x"]) == "copies"
    assert component(["silu_forward", "silu_forward_kernel_v1"]) == "elementwise"


def test_deviation():
    assert ladder.deviation([1.0, 2.2], [1.0, 2.0, 3.0]) == pytest.approx(0.1)
    assert (
        np.isnan(ladder.deviation([1.0, np.nan, 2.0], [1.0, 2.0, 2.0]))
        and ladder.deviation([], [1.0]) is None
    )
    rows = [
        {"deviation": d, "precision": "fp32", "compared": n}
        for d, n in ((0.0, 5), (np.nan, 2), (0.1, 4))
    ]
    assert np.isnan(worst(rows)["fp32"][0]) and worst(rows)["fp32"][1:3] == (2, 4)


def test_losses_beyond_those_of_a_slow_first_row(monkeypatch):
    """…are compared with the next row's of its precision."""
    losses = {1: [1.0, 2.0], 4: [1.0, 2.0, 4.0], 5: [1.0, 2.0, 5.0, 6.0]}
    monkeypatch.setattr(
        ladder,
        "attempt",
        lambda row, options, *_: {
            "ms": 1.0,
            "images_per_second": 1.0,
            "precision": "fp32",
            "losses": losses[ROWS.index(row) + 1],
        },
    )
    rows = list(bench_ladder(small_unet(), (1, 4, 5)))
    assert [row["deviation"] for row in rows] == [0, 0, 0.25] and [
        row["compared"] for row in rows
    ] == [2, 2, 3]


def test_a_folder_of_oblong_pictures(tmp_path):
    """…is brought to the model's size, as in training."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for n in range(4):
        Image.fromarray(np.full((12, 20, 3), 40 * n, np.uint8)).save(folder / f"{n}.png")
    options = small_unet(image_size=8, attention_resolutions=(4,), batch=2, data=str(folder))
    (row,) = bench_ladder(options, (10,), steps=1, warmup=1)
    assert row["ms"] > 0 and row["deviation"] is None
