import contextlib
import importlib.util
import threading

import numpy as np
import pytest

from numdiff.benchmark import step as step_module
from numdiff.benchmark.sample import bench_sample
from numdiff.benchmark.step import NumdiffStep, RandomImages, bench_step, seconds_in_turns
from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.convert.layout import to_torch_layout
from numdiff.nn import DiT, UNet
from numdiff.training.options import resolve
from tests.conftest import needs

from .test_profile import TINY_DIT, small_unet

SMALL_UNET = {
    "image_size": 16,
    "model_channels": 32,
    "channel_mult": (1, 2),
    "num_res_blocks": 1,
    "attention_resolutions": (8,),
}
MORE = {
    "use_scale_shift_norm": True,
    "resblock_updown": True,
    "use_new_attention_order": True,
    "num_classes": 3,
    "learn_sigma": True,
}
SEED_PARAMETERS = 20_494_211  # of unet.cu's model, which the preset unet64 describes


def test_a_step_is_measured():
    result = bench_step(small_unet(), steps=3, warmup=1)
    assert result["ms_fastest"] <= result["ms"] <= result["ms_slowest"] and result["versus"] == []
    assert result["mfu"] is None and result["peak_mib"] > 0 and result["peak_of"] == "process"
    with pytest.raises(UsageError, match="--steps"):
        bench_step(small_unet(), steps=0)


def test_latents_and_classes():
    step = NumdiffStep(
        resolve({**TINY_DIT, "device": "cpu", "channels": 4, "class_cond": True, "num_classes": 7})
    )
    assert step.step.images.dtype == np.float32 and step.step.images.shape == (1, 4, 4, 4)
    assert step.trainer.model.num_classes == 7
    assert RandomImages(2, 4, 3).dtype == np.uint8 and RandomImages(2, 4, 3, 5).labels.max() < 5


def test_steps_take_turns():
    order = []

    class Named:
        def __init__(self, name):
            self.name = name

        def run(self):
            order.append(self.name)

        def wait(self):
            order.append(self.name.upper())

    times = seconds_in_turns([Named("a"), Named("b")], 2, 1)
    assert order == [*"aAbB", *"aAbBaAbB"] and [len(t) for t in times] == [2, 2]


@pytest.mark.parametrize("bench", [bench_step, bench_sample])
def test_versus_without_torch(monkeypatch, bench):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find(name)
    )
    with pytest.raises(
        NumdiffError, match="needs PyTorch, which is not installed here; pip install torch"
    ):
        bench(small_unet(), 1, 0, [("eager", "fp32")])


def test_what_pytorch_cannot_do_is_said(monkeypatch):
    """One mode that fails does not hide the other, nor numdiff's own time."""
    import numdiff.benchmark.torch_step as torch_step

    class Step:
        first_s, parameters, peak_bytes = 0.0, 5, 1 << 20

        def __init__(self, options, mode, precision):
            if mode == "compile":
                raise RuntimeError("no compiler\nwas found")
            self.closed = False

        def run(self):
            pass

        wait = close = run

    monkeypatch.setattr(torch_step, "TorchStep", Step)
    monkeypatch.setattr(torch_step, "require_torch", lambda: None)
    said = []
    result = bench_step(small_unet(), 2, 0, [("compile", "fp32"), ("eager", "fp32")], said.append)
    failed, done = result["versus"]
    assert failed["fault"] == "RuntimeError: no compiler was found" and "ms" not in failed
    assert done["ratio"] == pytest.approx(done["ms"] / result["ms"]) and done["peak_mib"] == 1
    assert said == [
        "PyTorch compile, fp32, which compiles first, for up to 2 minutes",
        "PyTorch eager, fp32",
    ]


def test_a_bar_shows_that_pytorch_compiles(monkeypatch):
    from numdiff.benchmark import torch_step

    bars, updated = [], threading.Event()

    class Bar(contextlib.nullcontext):
        def update(self):
            updated.set()

    monkeypatch.setattr(torch_step, "progress_bar", lambda *given: bars.append(given) or Bar(Bar()))
    monkeypatch.setattr(torch_step, "TICK_S", 0.01)
    with torch_step.compile_bar("eager"):
        assert not bars
    with torch_step.compile_bar("compile"):
        assert bars == [(120, "PyTorch compiles", "second")] and updated.wait(30)
    assert not any(thread.name == "compile bar" for thread in threading.enumerate())


def test_compared_precisions_exist():
    from numdiff.benchmark.torch_step import PRECISIONS

    assert {p for compared in step_module.COMPARED.values() for p in compared} <= set(PRECISIONS)


# With PyTorch -------------------------------------------------------------------------------------


def twins():
    from numdiff.benchmark.torch_dit import TorchDiT
    from numdiff.benchmark.torch_unet import TorchUNet

    dit = {
        "image_size": 8,
        "patch_size": 2,
        "hidden_size": 48,
        "depth": 2,
        "num_heads": 4,
        "num_classes": 5,
    }
    yield UNet, TorchUNet, SMALL_UNET, None
    yield UNet, TorchUNet, {**SMALL_UNET, **MORE}, [0, 2]
    yield UNet, TorchUNet, {**SMALL_UNET, "conv_resample": True}, None
    yield DiT, TorchDiT, dit, [1, 5]
    yield (
        DiT,
        TorchDiT,
        {**dit, "qk_norm": True, "norm": "rms", "mlp": "swiglu", "rope": True},
        [1, 5],
    )
    yield DiT, TorchDiT, {**dit, "shift": False, "patch_size": 1}, [1, 5]
    yield (
        UNet,
        TorchUNet,
        {**SMALL_UNET, "block": "convnext", "resblock_updown": True, "num_classes": 3},
        [0, 2],
    )
    yield UNet, TorchUNet, {**SMALL_UNET, "block": "convnext"}, None


@pytest.mark.parametrize("number", range(8))
@needs("torch")
def test_twins_compute_the_same(number):
    import torch

    ours, theirs, options, y = list(twins())[number]
    model, twin = ours(**options, device="cpu"), theirs(**options).eval()
    generator = np.random.default_rng(number)
    arrays = {
        k: (v + 0.05 * generator.standard_normal(v.shape)).astype(np.float32)
        for k, v in model.arrays().items()
    }
    model.load_arrays(arrays)
    state = {
        k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in to_torch_layout(arrays).items()
    }
    if hasattr(twin, "pos_embed"):
        state["pos_embed"] = twin.pos_embed.data
    twin.load_state_dict(state)
    x = generator.standard_normal(
        (2, model.image_size, model.image_size, model.in_channels)
    ).astype(np.float32)
    t = np.array([3, 700])
    want = model.predict(x, t, y)
    with torch.no_grad():
        got = twin(
            torch.from_numpy(x.transpose(0, 3, 1, 2)), torch.from_numpy(t), y and torch.tensor(y)
        ).numpy()
    error = np.linalg.norm(got.transpose(0, 2, 3, 1) - want) / np.linalg.norm(want)
    assert error < 1e-5


@needs("torch")
def test_seed_model_has_its_parameters():
    import torch

    from numdiff.benchmark.torch_step import build_twin

    with torch.device("meta"):
        twin = build_twin(resolve({"model": "unet", "preset": "unet64", "device": "cpu"}))
    assert sum(p.numel() for p in twin.parameters()) == SEED_PARAMETERS


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@needs("torch")
def test_a_step_of_pytorch(precision):
    result = bench_step(resolve({**TINY_DIT, "device": "cpu"}), 1, 0, [("eager", precision)])
    row = result["versus"][0]
    assert row["ms"] > 0 and row["parameters"] == result["parameters"]
