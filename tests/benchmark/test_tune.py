import json
import math

import numpy as np
import pytest

from numdiff.benchmark import tune as tune_module
from numdiff.benchmark.kernels import Array, Recorded
from numdiff.benchmark.tune import (
    ConvolutionTiles,
    MatmulTiles,
    WeightGradientTiles,
    choices_of,
    planned_calls,
    planned_kernels,
    problems,
    tune,
    tune_problems,
    write_table,
)
from numdiff.device import upload
from numdiff.device.compiler import kernels_by_name
from numdiff.device.emulator import EmulatorDevice
from numdiff.device.planned import CARDS, Planned
from numdiff.errors import NumdiffError, UsageError
from numdiff.kernels import matmul_forward, tuning
from numdiff.kernels.conv2d.hopper import convolution as conv2d_hopper
from numdiff.kernels.conv2d.hopper import weight_gradient_3x3 as conv2d_hopper_gradient_3x3
from numdiff.kernels.matmul import choice as matmul_choice
from numdiff.kernels.matmul.hopper import launcher as hopper_launcher
from tests.conftest import exhaustive, exhaustively

from .test_profile import small_unet

HALF = np.dtype(np.float16)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuning.table_of.cache_clear()
    yield tmp_path
    tuning.table_of.cache_clear()


class Measured:
    """Takes as many µs as the third of a matmul's choice says, one being slow."""

    backend = type("Backend", (), {"multiprocessors": 132, "device_name": "NVIDIA Test 1"})

    def arguments(self, call):
        return [{}]

    def job(self, function, sets, version):
        chosen = matmul_choice.choose_half(
            6, matmul_choice.HalfProduct(1, 768, 768, 16384, 4), True, 132
        )
        return chosen[0][1] + 10 * chosen[1]


def products(M, N, K):
    given = {
        "a": Array((K, M), HALF),
        "b": Array((K, N), HALF),
        "transpose_a": True,
        "transpose_b": False,
        "out": Array((M, N), np.dtype(np.float32)),
        "out_dtype": None,
    }
    return Recorded(matmul_forward, given, 0, 0, True)


def test_a_faster_choice_is_found_and_used(folder, monkeypatch):
    monkeypatch.setattr(tune_module, "microseconds_in_turns", lambda jobs, rounds: jobs)
    lines = []
    found = tune_problems(problems([products(768, 768, 16384)] * 2), Measured(), lines.append)
    narrowest = min(tile[1] for tile in matmul_choice.HALF_TILES[6])
    assert found == {"matmul v6": {"768 768 16384 1": [128, narrowest, 1, 0]}} and len(lines) == 1
    write_table(tuning.card_file("NVIDIA Test 1"), "NVIDIA Test 1", found)
    assert tuning.tuned(Measured.backend, "matmul v6", 768, 768, 16384, True) == (
        128,
        narrowest,
        1,
        0,
    )
    assert tuning.tuned(Measured.backend, "matmul v6", 768, 768, 16384, False) is None
    assert tuning.tuned(object(), "matmul v6", 1) is None
    with tuning.ignored():
        assert tuning.tuned(Measured.backend, "matmul v6", 768, 768, 16384, True) is None
    write_table(
        tuning.card_file("NVIDIA Test 1"),
        "NVIDIA Test 1",
        {"matmul v6": {"768 768 16384 1": None}, "conv2d v6": {"1 2 3 4 5 3": [64, 2, 1]}},
    )
    kept = json.loads((folder / "nvidia-test-1.json").read_text())
    assert kept == {"card": "NVIDIA Test 1", "choices": {"conv2d v6": {"1 2 3 4 5 3": [64, 2, 1]}}}


def test_choices_can_be_forced():
    shape = 32, 16, 16, 192, 192, 3
    before = conv2d_hopper.choose_plan
    for choice in ConvolutionTiles.candidates(shape, 132):
        with ConvolutionTiles.forced(choice):
            try:
                plan = conv2d_hopper.choose_plan(*shape, True, 132, None, None)[1]
            except ValueError:
                continue
            assert [plan.bn, plan.pixels // 128] == choice[:2]
    assert conv2d_hopper.choose_plan is before
    estimated = ConvolutionTiles.estimated(shape, 132)
    assert estimated in ConvolutionTiles.candidates(shape, 132)
    with MatmulTiles.forced([128, 64, 3, 1]):
        assert matmul_choice.choose_half(6, matmul_choice.HalfProduct(1, 8, 8, 8, 4), True, 132)[
            :2
        ] == ((128, 64), 3)
        assert matmul_choice.PAIRS
    assert MatmulTiles.estimated((8192, 1152, 384, False), 132) in MatmulTiles.candidates(
        (8192, 1152, 384, False), 132
    )


def test_choices_of_the_weight_gradient_can_be_forced():
    shape, choose = (32, 16, 16, 192, 192), conv2d_hopper_gradient_3x3.choose_plan
    choices = choices_of(WeightGradientTiles, shape, 132)
    assert len(choices) == len(set(map(tuple, choices))) > 9
    for choice in choices:
        with WeightGradientTiles.forced(choice):
            plan = conv2d_hopper_gradient_3x3.choose_plan(*shape, True, 132, ())[1]
        assert [
            plan.channels,
            plan.parts,
            plan.width * plan.height * plan.images,
            plan.blocks,
        ] == choice
    assert conv2d_hopper_gradient_3x3.choose_plan is choose


def test_shapes_of_convolutions():
    x, y, weight = (
        Array(shape, HALF) for shape in ((2, 16, 16, 64), (2, 16, 16, 96), (96, 3, 3, 64))
    )
    forward = Recorded(
        conv2d_hopper.hopper_forward, {"x": x, "weight": weight, "y": y}, 0, 0, False
    )
    backward = Recorded(
        conv2d_hopper.hopper_input_gradient, {"dy": y, "weight": weight, "dx": x}, 0, 0, False
    )
    weights = Recorded(
        conv2d_hopper_gradient_3x3.hopper_weight_gradient_3x3, {"dy": y, "x": x}, 0, 0, False
    )
    shapes = [
        [table.shape(call) for table in tune_module.TABLES] for call in (forward, backward, weights)
    ]
    assert shapes == [
        [None, (2, 16, 16, 64, 96, 3), None, None],
        [None, None, (2, 16, 16, 96, 64, 3), None],
        [None, None, None, (2, 16, 16, 64, 96)],
    ]


H100 = next(card for card in CARDS if card.device_name == "NVIDIA H100 80GB HBM3")


@exhaustive
def test_kernels_are_planned_without_running():
    """…those of every candidate of every shape, each once, and all of them can be found by a
    separate process."""
    options = small_unet(image_size=32, channel_mult=(1, 2, 4))
    options.precision = "fp16"
    with tuning.ignored():
        found = problems(planned_calls(options, H100))
        planned = planned_kernels(found, H100)
    assert {table.kind for table, _, _ in found} == {table.kind for table in tune_module.TABLES}
    assert len(found) == len({(table, shape) for table, _, shape in found})
    assert sum(len(choices_of(table, shape, 132)) for table, _, shape in found) > 10 * len(planned)
    names = {key.name for key in planned}
    assert {
        f"conv2d_forward_kernel_v6_{128 * sub}x{bn}_1" for bn, sub in conv2d_hopper.VARIANTS
    } <= names
    assert {f"gemm_hopper_{tile[1]}_tn_float" for tile in matmul_choice.HALF_TILES[6]} <= names
    assert any(name.endswith("_half_pair") for name in names)
    assert any(name.startswith("conv2d_weight_gradient_3x3_kernel_v6") for name in names)
    assert {key[:2] for key in planned} <= set(kernels_by_name())
    # the shape with most arithmetic
    by_name = {call.name: shape for _, call, shape in reversed(found)}
    assert by_name["matmul_pair_forward"] == (512, 64, 192, False)
    assert by_name["matmul_pair_backward"] == (2048, 96, 32, False)
    assert by_name["matmul_pair_gradient"] == (32, 96, 2048, True)
    most = problems([call for _, call, _ in found], 2)
    assert {table.kind: 2 for table, _, _ in most} == {
        table.kind: 2 for table, _, _ in found
    } and len(most) == 8


def test_a_planned_device_has_the_gpus_properties():
    planned = Planned(H100)
    assert (planned.capability, planned.multiprocessors) == ((9, 0), 132)
    a, b = (upload(np.zeros(shape, np.float16), planned) for shape in ((64, 128), (64, 128)))
    matmul_forward(a, b, transpose_b=True)
    matmul_forward(a, b, transpose_b=True)
    assert len(planned.kernels) == 1 and planned.texts == {}


def test_what_was_found_is_kept(folder, monkeypatch):
    """An interruption loses the shape that is being measured, and never leaves half a file."""
    monkeypatch.setattr(tune_module, "microseconds_in_turns", lambda jobs, rounds: jobs)
    path, measured = tuning.card_file("NVIDIA Test 1"), Measured()

    def job(function, sets, version):
        if path.exists():
            raise KeyboardInterrupt
        return Measured.job(measured, function, sets, version)

    measured.job = job
    found = problems([products(768, 768, 16384), products(768, 1536, 16384)])
    with pytest.raises(KeyboardInterrupt):
        tune_problems(
            found, measured, print, lambda choices: write_table(path, "NVIDIA Test 1", choices)
        )
    assert len(json.loads(path.read_text())["choices"]["matmul v6"]) == 1
    before = path.read_text()
    monkeypatch.setattr("os.replace", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_table(path, "NVIDIA Test 1", {"matmul v6": {"1 2 3 1": [128, 64, 1]}})
    assert path.read_text() == before


def test_no_shape_is_begun_when_the_time_is_over():
    lines = []
    assert (
        tune_problems(problems([products(768, 768, 1024)]), Measured(), lines.append, end=0) == {}
    )
    assert lines == ["out of time: 1 shapes are left"]


def test_a_table_that_cannot_be_written_is_told_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(tune_module, "get_backend", lambda name: H100)
    monkeypatch.setattr(tune_module, "planned_calls", lambda *_: 1 / 0)
    options = small_unet()
    options.device, options.precision = "cuda", "fp16"
    with pytest.raises(
        NumdiffError, match="cannot write the table .*No such file or directory; give another --out"
    ):
        tune(options, tmp_path / "nowhere" / "table.json")


def test_a_table_continues_the_file_that_is_written(folder):
    """…and a new one that of the card."""
    conv, here, other = (
        {"conv2d v6": {"1 2 3 4 5 3": [64, 2, 1]}},
        folder / "mine.json",
        "NVIDIA Test 1",
    )
    write_table(here, other, conv)
    write_table(tuning.card_file(other), other, {"matmul v6": {"1 2 3 1": [128, 64, 1]}})
    write_table(str(here), other, {"matmul v6": {"4 5 6 1": [128, 128, 2]}})
    assert json.loads(here.read_text())["choices"] == {
        **conv,
        "matmul v6": {"4 5 6 1": [128, 128, 2]},
    }
    write_table(folder / "new.json", other, conv)
    assert json.loads((folder / "new.json").read_text())["choices"] == {
        **conv,
        "matmul v6": {"1 2 3 1": [128, 64, 1]},
    }
    before = here.read_text()
    with pytest.raises(
        NumdiffError,
        match="is the table of another card, NVIDIA Test 1, not of NVIDIA Test 2; give",
    ):
        write_table(here, "NVIDIA Test 2", conv)
    assert here.read_text() == before


@pytest.mark.parametrize(
    "text, fault",
    [
        ("", "is not JSON"),
        ('{"choices": {', "is not JSON"),
        (b"\xff", "is not JSON"),
        ("[]", 'has no "choices"'),
        ('{"card": "NVIDIA Test 1"}', 'has no "choices"'),
        ('{"choices": []}', 'has no "choices"'),
        ('{"choices": {"matmul v6": []}}', 'has no "choices"'),
    ],
)
def test_a_file_that_is_no_table(folder, text, fault):
    """Every reader reports it, and none overwrites it."""
    path = tuning.card_file("NVIDIA Test 1")
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    for read in (
        lambda: tuning.tuned(Measured.backend, "matmul v6", 1, 2, 3, True),
        lambda: write_table(path, "NVIDIA Test 1", {}),
    ):
        with pytest.raises(
            NumdiffError, match=f"nvidia-test-1.json {fault}.*; correct it, or remove it"
        ) as caught:
            read()
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == (text if isinstance(text, bytes) else text.encode())


def test_no_number_of_seconds():
    with pytest.raises(UsageError, match="--timeout nan must be a number of seconds"):
        tune(small_unet(), seconds=math.nan)


def test_only_on_a_gpu():
    with pytest.raises(NumdiffError, match="--device is not cuda"):
        tune(small_unet())


def launches(monkeypatch, gpu):
    """(kernel, blocks, whole numbers it is given) of every launch of the three launchers that have
    a table."""
    launched = []

    def record(kernel, grid, block, *given, **_):
        launched.append((kernel.py_func.__name__, grid, [n for n in given if type(n) is int]))

    for module in (hopper_launcher, conv2d_hopper, conv2d_hopper_gradient_3x3):
        monkeypatch.setattr(module, "launch", record)
    a, b, x, y, weight = (
        upload(np.zeros(shape, np.float16), gpu)
        for shape in ((200, 24), (200, 16), (1, 8, 8, 8), (1, 8, 8, 16), (16, 3, 3, 8))
    )
    pointwise, dweight = (
        upload(np.zeros((16, 1, 1, 8), np.float16), gpu),
        upload(np.zeros((16, 3, 3, 8)), gpu),
    )
    matmul_forward(
        a, b, True, False, out=upload(np.zeros((24, 16), np.float32), gpu), accumulate=True
    )
    matmul_forward(a, b, True, False)
    conv2d_hopper.hopper_forward(x, weight, None, y)
    conv2d_hopper.hopper_forward(x, pointwise, None, y)
    conv2d_hopper.hopper_input_gradient(y, weight, x)
    conv2d_hopper_gradient_3x3.hopper_weight_gradient_3x3(y, x, dweight)
    return launched


MATMUL = (
    [128, 192],
    [128, 192, 2, 1],
    [128, 80, 1],
    [64, 128, 1],
    [128, 0, 1],
    [128, 64, 0],
    [128, 64, -1],
)
CONV = [64, 1], [64, 1, 1, 1], [80, 1, 1], [0, 1, 1], [64, 3, 1], [64, 1, 2], [128, 2, 3]
GRADIENT = (
    [64, 1, 64],
    [64, 1, 64, 1, 1],
    [48, 1, 64, 1],
    [0, 1, 64, 1],
    [64, 2, 64, 2],
    [64, 1, 192, 1],
    [64, 1, 0, 1],
    [64, 1, -64, 1],
    [64, 0, 64, 1],
    [64, 1, 64, 0],
    [64, 9, 64, 9],
)
ANY = (
    [],
    None,
    64,
    "64 1 1",
    {},
    [None, None, None],
    ["64", "1", "1"],
    [64.0, 1.0, 1.0],
    [[64, 1], 1, 1],
)


def card_with(kind, shape, choice):
    """A card whose table has this one choice."""
    gpu = EmulatorDevice(checks=False)
    gpu.device_name = "NVIDIA Test 2"
    tuning.card_file(gpu.device_name).write_text(json.dumps({"choices": {kind: {shape: choice}}}))
    return gpu


@pytest.mark.parametrize(
    "kind, shape, choice",
    [
        *(("matmul v6", "24 16 200 1", c) for c in (*MATMUL, *ANY)),
        ("matmul v6", "24 16 200 1", [128, 64, 5]),
        ("matmul v6", "24 16 200 0", [128, 64, 2]),
        ("conv2d v6", "1 8 8 8 16 1", [64, 1, 3]),
        *(("conv2d v6", "1 8 8 8 16 3", c) for c in CONV),
        *(("conv2d_input_gradient v6", "1 8 8 16 8 3", c) for c in CONV),
        *(("conv2d_weight_gradient_3x3 v6", "1 8 8 8 16", c) for c in GRADIENT),
        *exhaustively(
            *(("conv2d v6", "1 8 8 8 16 3", c) for c in ANY),
            *(("conv2d_weight_gradient_3x3 v6", "1 8 8 8 16", c) for c in ANY),
        ),
    ],
)
def test_a_choice_that_does_not_fit_is_passed_over(folder, monkeypatch, kind, shape, choice):
    """A table can be older than the kernels, or edited by hand: the launcher estimates then."""
    gpu = card_with(kind, shape, choice)
    found = launches(monkeypatch, gpu)
    with tuning.ignored():
        assert found == launches(monkeypatch, gpu)


@pytest.mark.parametrize(
    "kind, shape, choice",
    [
        ("matmul v6", "24 16 200 1", [128, 192, 2]),
        ("matmul v6", "24 16 200 0", [128, 256, 1]),
        ("conv2d v6", "1 8 8 8 16 3", [128, 2, 1]),
        ("conv2d v6", "1 8 8 8 16 1", [128, 2, 1]),
        ("conv2d_input_gradient v6", "1 8 8 16 8 3", [128, 2, 1]),
        ("conv2d_weight_gradient_3x3 v6", "1 8 8 8 16", [64, 1, 256, 1]),
    ],
)
def test_a_choice_that_fits_is_taken(folder, monkeypatch, kind, shape, choice):
    gpu = card_with(kind, shape, choice)
    found = launches(monkeypatch, gpu)
    with tuning.ignored():
        assert found != launches(monkeypatch, gpu)
