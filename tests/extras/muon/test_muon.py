"""Training with --optimizer muon: which weights it takes, what AdamW keeps, resuming, skipped
steps."""

import copy
import re

import numpy as np
import pytest

from numdiff.benchmark.step import plan_step
from numdiff.device import download, get_backend, upload, zeros
from numdiff.device.planned import CARDS
from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.muon import update as muon
from numdiff.extras.muon.optimizer import _stacked, describe
from numdiff.nn import AdamW, Muon
from numdiff.nn.optimizer import LossScale
from numdiff.nn.parameter import Parameter
from numdiff.training import Trainer, kinds
from numdiff.training.build import describe_without_training, model_options
from numdiff.training.options import resolve
from tests.command import refusal_of
from tests.conftest import exhaustive
from tests.models import small_unet
from tests.training.test_dit_training import make
from tests.training.test_trainer import FixedImages, device, losses  # noqa: F401
from tests.training.test_trainer import make as make_unet
from tests.training.toy import Toy

BLOCK = {"attn.qkv": 3, "attn.proj": 1, "mlp.fc1": 1, "mlp.fc2": 1}


def test_which_weights_are_matrices():
    model = make(optimizer="muon").model
    assert model.matrices() == {
        f"blocks.{i}.{name}.weight": n for i in range(2) for name, n in BLOCK.items()
    }
    sizes = {"channel_mult": (1, 2), "attention_resolutions": (4,), "num_head_channels": 16}
    one_after_the_other, by_heads = (
        small_unet(use_new_attention_order=order, **sizes).matrices() for order in (True, False)
    )
    assert one_after_the_other["middle_block.1.qkv.weight"] == 3
    assert by_heads["middle_block.1.qkv.weight"] == 1
    # a convolution, as (out, 3 · 3 · in)
    assert by_heads["input_blocks.1.0.in_layers.2.weight"] == 1
    assert not [
        name
        for name in by_heads
        if "emb_layers" in name or name.startswith(("out.", "input_blocks.0."))
    ]


def test_the_stacks_are_the_weights():
    """Each matrix at its place, and all else in ranges for AdamW."""
    optimizer = make(optimizer="muon").optimizer
    flat = np.zeros(optimizer.parameters.total, int)
    for starts, rows, columns, _ in optimizer.stacks:
        for start in starts:
            flat[start : start + rows * columns] += 1
    for start, stop in optimizer.rest.pieces:
        flat[start:stop] += 2
    assert optimizer.rest.elements == np.sum(flat == 2)
    for entry in optimizer.parameters.index:
        part = flat[entry["offset"] : entry["offset"] + np.prod(entry["shape"])]
        assert (part == (1 if entry["name"] in make().model.matrices() else 2)).all(), entry["name"]
    assert {(len(s.starts), s.rows, s.columns) for s in optimizer.stacks} == {
        (8, 64, 64),
        (2, 256, 64),
        (2, 64, 256),
    }


def test_what_is_no_matrix_takes_adamws_step_bit_by_bit():
    given = {"weight_decay": 0.1, "ema_halflife": 40}
    ours, theirs = make(optimizer="muon", **given), make(**given)
    for trainer in (ours, theirs):
        losses(trainer, 3)  # the first has a learning rate, but no gradient but the last layer's
    first = copy.deepcopy(theirs.model.parameters)
    for name in ("m", "v", "ema"):
        getattr(ours.optimizer, name)[:] = getattr(theirs.optimizer, name)
    ours.model.parameters.load_flat(theirs.model.parameters.data)
    assert losses(ours, 1) == losses(theirs, 1)
    matrices = ours.model.matrices()
    for buffer in ("m", "v", "ema", None):
        mine, others = (
            t.model.parameters.arrays(getattr(t.optimizer, buffer) if buffer else None)
            for t in (ours, theirs)
        )
        for name, value in mine.items():
            assert np.array_equal(value, others[name]) == (name not in matrices), (buffer, name)
    for name in matrices:
        before, after = first.arrays()[name], ours.model.arrays()[name]
        step = (after - (1 - 1e-4) * before) / 1e-3
        # below 0.2 where the gradient has a low rank
        assert 0.02 < np.sqrt(np.mean(step**2)) < 0.2 * 1.21, name


@pytest.mark.parametrize(
    "make", [pytest.param(make, id="dit"), pytest.param(make_unet, marks=exhaustive, id="unet")]
)
def test_ten_steps_are_five_and_five_resumed_bitwise(device, make):  # noqa: F811
    whole, first, second = (
        make(device=device, optimizer="muon", ema_halflife=40) for _ in range(3)
    )
    values = losses(whole, 10)
    assert losses(first, 5) == values[:5]
    second.load_state(first.state())
    assert losses(second, 5) == values[5:]
    for name, array in whole.state().items():
        np.testing.assert_array_equal(array, second.state()[name], err_msg=name)
    zero = whole.model.parameters.arrays(whole.optimizer.v)
    assert not any(zero[name].any() for name in whole.model.matrices())


def test_one_optimizer_does_not_go_on_from_the_other():
    ours, theirs = make(optimizer="muon"), make()
    with pytest.raises(NumdiffError, match="no 'momentum', so that training cannot continue"):
        ours.load_state(theirs.state())
    with pytest.raises(NumdiffError, match="no 'm', so that training cannot continue"):
        theirs.load_state(ours.state())


class MuonWeights:
    """As much of FlatParameters as Muon needs: a matrix, and a bias."""

    index = [
        {"name": "weight", "shape": [8, 16], "offset": 0},
        {"name": "bias", "shape": [8], "offset": 128},
    ]
    parameters = {name: Parameter((), None) for name in ("weight", "bias")}
    total, trained_ranges = 192, [(0, 192)]

    def __init__(self, backend):
        values = np.linspace(-1, 1, 192).astype(np.float32)
        self.data, self.half = upload(values, backend), upload(values.astype(np.float16), backend)
        self.grad = zeros(192, np.float32, backend)

    def refresh(self):
        """Nothing is made of these weights."""


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_a_step_that_overflows_changes_nothing(device, monkeypatch, rng):  # noqa: F811
    """Neither weights nor moments nor what follows them; the next one continues as if it had not
    been."""
    backend = get_backend(device)
    if device == "emulator":
        monkeypatch.setattr(muon, "newton_schulz", lambda x: x)  # 15 products take it seconds
    gradients = [
        upload(1024 * g.astype(np.float32), backend) for g in rng.standard_normal((2, 192))
    ]
    broken = upload(np.where(np.arange(192) == 5, np.inf, 1).astype(np.float32), backend)

    def arrays():
        kept = weights.data, weights.half, optimizer.m, optimizer.v, optimizer.ema
        return [download(array) for array in kept]

    def same(some, others):
        for one, other in zip(some, others, strict=True):
            np.testing.assert_array_equal(one, other)

    ends = []
    for given in (gradients, [gradients[0], broken, *gradients[1:]]):
        weights = MuonWeights(backend)
        options = {"learning_rate": 1e-2, "clip_norm": 1.0, "ema_decay": 0.9}
        loss_scale = LossScale(weights.data, 1024.0, interval=1000)
        optimizer = Muon(weights, {"weight": 1}, loss_scale=loss_scale, **options)
        for gradient in given:
            weights.grad, before = gradient, arrays()
            optimizer.update(zeros(1, np.float32, backend))
            if gradient is broken:
                same(before, arrays())
                assert download(loss_scale.scale)[0] == 512
                loss_scale.scale = upload(np.float32([1024]), backend)
        assert download(optimizer.updates)[0] == 2
        ends.append(arrays())
        np.testing.assert_array_equal(ends[-1][0].astype(np.float16), ends[-1][1])
    same(*ends)


def test_what_is_frozen_stays():
    """A matrix, and a bias; all others continue, each with its optimizer."""
    trainer = make(optimizer="muon", freeze=("blocks.0.mlp.fc1.*",))
    before = trainer.model.arrays()
    losses(trainer, 4)
    same = {
        name
        for name, value in trainer.model.arrays().items()
        if np.array_equal(value, before[name])
    }
    assert same == {"blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc1.bias"}
    assert (1, 256, 64) in {(len(s.starts), s.rows, s.columns) for s in trainer.optimizer.stacks}
    trainer.model.parameters.freeze(())
    losses(trainer, 2)
    assert not np.array_equal(
        trainer.model.arrays()["blocks.0.mlp.fc1.weight"], before["blocks.0.mlp.fc1.weight"]
    )


def test_a_copy_goes_on_by_itself():
    trainer = make(optimizer="muon")
    model, optimizer = copy.deepcopy((trainer.model, trainer.optimizer))
    losses(trainer, 2)
    assert not download(optimizer.m).any() and optimizer.parameters is model.parameters


def test_the_products_of_one_shape_are_one_launch(monkeypatch):
    """Of a DiT-B/2 on a Hopper card: 3 shapes with 15 or 17 products and 3 passes, AdamW's, no
    copies of 12 blocks."""
    card = next(card for card in CARDS if card.device_name == "NVIDIA H200")
    launched = []
    monkeypatch.setattr(
        "numdiff.device.planned.Planned.launch",
        lambda self, kernel, *_: launched.append(kernel.py_func.__name__),
    )
    options = {
        "model": "dit",
        "architecture": "DiT-B/2",
        "image_size": 32,
        "channels": 4,
        "batch": 4,
        "device": "cuda",
        "precision": "fp16",
    }
    counts = {}
    for optimizer in ("adamw", "muon"):
        plan_step(resolve({**options, "optimizer": optimizer}, (9, 0)), card)
        counts[optimizer] = len(launched)
        products = [name for name in launched if re.match("gemm_hopper.*(batch|symmetric)$", name)]
        launched[:] = []
    assert counts["muon"] - counts["adamw"] == (15 + 3) + 2 * (17 + 3)
    assert (
        len(products) == 15 + 2 * 17
        and sum(name.endswith("batch") for name in products) == 5 + 2 * 3
    )


def test_stacks_of_several_shapes_have_every_matrix():
    """As a GPU has them in half precision: each at its place, with its own rows and columns."""
    starts = {
        (64, 576): [0, 40_000],
        (128, 1152): [100_000],
        (768, 256): [300_000],
        (64, 64): [600_000],
    }
    stacks = list(_stacked(starts, zeros(1, np.float32, get_backend("emulator")), True))
    found = {}
    for stack in stacks:
        extents = (
            download(stack.extents).reshape(-1, 2)
            if stack.extents is not None
            else [(stack.rows, stack.columns)] * stack.starts.shape[0]
        )
        for start, extent in zip(download(stack.starts).tolist(), extents, strict=True):
            found.setdefault(tuple(map(int, extent)), []).append(start)
            assert extent[0] <= stack.rows and extent[1] <= stack.columns
    assert found == starts and len(stacks) < len(starts)
    assert [
        stack.extents
        for stack in _stacked(starts, zeros(1, np.float32, get_backend("emulator")), False)
    ] == [None] * 4


def test_the_log_and_a_dry_run_say_what_muon_trains():
    options = resolve(
        {
            "model": "dit",
            "architecture": "DiT-Tiny",
            "device": "cpu",
            "optimizer": "muon",
            "channels": 3,
            "num_classes": 3,
        }
    )
    (line,) = [line for line in describe_without_training(options) if line.startswith("optimizer")]
    assert line == (
        "optimizer Muon, momentum 0.95, for 36 matrices, 2,654,208 of 4,178,544 parameters; AdamW for the "
        "others"
    )


def test_what_cannot_be_is_refused():
    sentence = "--optimizer muon has no counterpart in --versus torch"
    command = "bench step dit --preset tiny --device cpu --optimizer muon --versus torch"
    assert sentence in refusal_of(command)
    with pytest.raises(
        UsageError,
        match="--optimizer muon is for weight matrices in a model's blocks, and this toy",
    ):
        Trainer(Toy(8, device="cpu"), FixedImages(), optimizer="muon")
    for given, sentence in (
        ({"optimizer": "sgd"}, "--optimizer sgd does not exist; use adamw or muon"),
        ({"muon_momentum": 1.0}, "--muon-momentum 1 must be at least 0 and below 1"),
    ):
        with pytest.raises(UsageError, match=sentence):
            resolve({"model": "dit", "device": "cpu", **given})
    qkv = "blocks.0.attn.qkv.weight"
    for matrices, more, sentence in (
        ({}, {}, "names none: use AdamW"),
        ({"blocks.7.weight": 1}, {}, "no such parameter: use model.matrices"),
        ({qkv: 5}, {}, "is not 5 matrices one below the other"),
        ({qkv: 3}, {"momentum": 2}, "momentum 2 must be at least 0 and below 1"),
    ):
        with pytest.raises(UsageError, match=sentence):
            Muon(make().model.parameters, matrices, **more)
    assert type(make().optimizer) is AdamW


def test_it_learns():
    trainer = make(
        images=np.full((24, 8, 8, 3), 200, np.uint8),
        optimizer="muon",
        learning_rate=3e-3,
        model={"learn_sigma": False},
        diffusion={"prediction": "x_0"},
    )
    values = losses(trainer, 40)
    assert np.mean(values[-8:]) < 0.1 * np.mean(values[:4])


def test_frozen_matrices_are_not_counted():
    sizes = {
        "model": "dit",
        "architecture": "DiT-Tiny",
        "device": "cpu",
        "optimizer": "muon",
        "hidden_size": 32,
        "depth": 2,
        "heads": 2,
    }
    model = kinds.get("dit").laid_out(model_options(resolve(sizes), 3, 3))
    assert "for 12 matrices" in describe(resolve(sizes), model)
    assert "for 6 matrices" in describe(resolve({**sizes, "freeze": ("blocks.0.*",)}), model)
    assert "for 0 matrices, 0 of" in describe(resolve({**sizes, "freeze": ("blocks.*",)}), model)
