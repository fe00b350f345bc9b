"""Training in FP8: on NumPy, which rounds as the kernels do, in the emulator, and planned for a
Hopper."""

import copy
import functools

import numpy as np
import pytest

from numdiff.device import copy_into, download, upload, zeros
from numdiff.device.emulator import EmulatorDevice
from numdiff.distributed.exchange_base import Mail
from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.fp8 import linear as linear_fp8
from numdiff.extras.fp8.layers import Float8
from numdiff.extras.fp8.quantise import PARTIALS
from numdiff.extras.transports.reduce import peer_sum
from numdiff.nn.tensor import Tape, Tensor
from numdiff.training import Trainer
from numdiff.training.options import resolve
from numdiff.training.precision import set_precision
from tests.conftest import exhaustive, exhaustively, needs, relative_error
from tests.models import small_dit, small_unet, without_zeros
from tests.training import test_dit_training as dit
from tests.training.test_half import one_step
from tests.training.test_trainer import FixedImages, losses

SWIGLU = {
    "norm": "rms",
    "qk_norm": True,
    "rope": True,
    "mlp": "swiglu",
    "mlp_ratio": 3.0,
    "shift": False,
    "learn_sigma": False,
}  # 128 channels in the MLP of 64


def make(device="cpu", **options):
    return dit.make(
        device, **{"model": {"depth": 1}, "precision": "fp8", "learning_rate": 3e-3, **options}
    )


def same_state(a, b):
    a, b = a.state(), b.state()
    assert a.keys() == b.keys()
    for name, array in a.items():
        np.testing.assert_array_equal(array, b[name], err_msg=name)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs("gpu"))])
@pytest.mark.parametrize("model", [{}, *exhaustively(SWIGLU)], ids=["dit", "lightning"])
def test_ten_steps_are_five_and_five_resumed_bitwise(device, model):
    """The scales are of the state; so are pictures in between, and blocks that run again, without
    effect."""
    whole, first, second = (
        make(device, model={"depth": 1, **model}, recompute=k == 2) for k in range(3)
    )
    values = losses(whole, 10)
    assert losses(first, 5) == values[:5]
    images = np.random.default_rng(0).standard_normal((2, 8, 8, 3)).astype(np.float32)
    before = first.state()
    first.model.predict(images, 3, [0, 1])
    with first.ema_weights():
        first.model.predict(images, 3, [0, 1])
    same = first.state()
    assert all(np.array_equal(before[name], same[name]) for name in before)
    second.load_state(before)
    assert losses(second, 5) == values[5:]
    same_state(whole, second)
    assert losses(first, 5) == values[5:]
    scale = whole.state()["fp8_scale"]
    assert (scale != 1).all() and (np.log2(scale) % 1 == 0).all()


def test_it_learns_as_float32_does():
    images = (
        np.random.default_rng(0).integers(0, 256, (24, 1, 1, 3), np.uint8).repeat(8, 1).repeat(8, 2)
    )
    eight, whole = make(images=images), make(images=images, precision="fp32")
    a, b = losses(eight, 30), losses(whole, 30)
    assert np.mean(a[-5:]) < 0.9 * np.mean(a[:5])
    assert a != b and np.abs(np.subtract(a, b)).max() < 0.1
    plain = make(images=images, fp8_promotion=False)
    assert not plain.model.blocks[0].attn.qkv.weight.float8.promoted


def test_the_first_block_and_the_last_stay_in_float16():
    """…and a checkpoint of a numdiff that had them in FP8 is gone on from, with scales of its own."""
    trainer = make(model={"depth": 4})
    eight = [
        name.split(".")[1]
        for name, parameter in trainer.model.named_parameters()
        if parameter.float8 is not None
    ]
    assert eight == ["1"] * 4 + ["2"] * 4
    assert np.isfinite(losses(trainer, 1)).all()
    state = trainer.state()
    state |= {name: np.concatenate([state[name]] * 2) for name in ("fp8_scale", "fp8_history")}
    other = make(model={"depth": 4})
    other.load_state(state)
    # of what goes in
    assert np.isfinite(losses(other, 1)).all() and (other.state()["fp8_scale"][::2] != 1).all()


def test_another_precision_goes_on_from_it_and_the_other_way_round():
    eight, whole = make(), make(precision="fp32")
    losses(eight, 2)
    losses(whole, 2)
    single, again = make(precision="fp32"), make()
    single.load_state(eight.state())
    again.load_state(whole.state())
    assert np.isfinite(losses(single, 2) + losses(again, 2)).all()
    other = make(model={"depth": 2})
    with pytest.raises(NumdiffError, match="resume with the run's own options"):
        other.load_state(eight.state())


def test_an_overflow_leaves_the_scales_as_they_were():
    trainer = make()
    losses(trainer, 3)
    layer = trainer.model.blocks[0].mlp.fc1.weight.float8
    before = trainer.model.parameters.float8.history.max(axis=1)
    trainer.optimizer.loss_scale.scale[0] = 2.0**60
    with np.errstate(over="ignore", invalid="ignore"):
        (report,) = (r for reports in trainer.run(1) for r in reports)
    assert report.skipped == 1 and np.isnan(report.gradient_norm)
    assert (
        not layer.dy.amax.any()
        and (trainer.model.parameters.float8.history.max(axis=1) >= before).all()
    )
    trainer.optimizer.loss_scale.scale[0] = 1024.0
    assert np.isfinite(losses(trainer, 2)).all()


def test_what_a_copy_and_an_evaluation_compute_in():
    """Float16: without a tape nothing is rounded to 8 bits, and nothing is counted."""
    model, images = (
        make().model,
        np.random.default_rng(0).standard_normal((2, 8, 8, 3)).astype(np.float32),
    )
    without_zeros(model)
    plain = copy.deepcopy(model)
    assert plain.parameters.float8 is None and plain.dtype == np.float16
    t, y = np.array([3, 5], np.int32), np.array([0, 1], np.int32)
    got = model.predict(images, t, y)
    np.testing.assert_array_equal(got, plain.predict(images, t, y))
    with Tape():
        assert not np.array_equal(model(Tensor(images), t, y).numpy(), got)
    assert model.parameters.float8.amax.any()
    model.compute_in_single()
    assert model.parameters.float8 is None and model.blocks[0].attn.qkv.weight.float8 is None


BATCH = 4  # 16 tokens, the fewest that FP8 takes


def build(device="cpu", **more):
    sizes = {"image_size": 4, "patch_size": 2, "hidden_size": 32, "num_heads": 1, "num_classes": 7}
    return small_dit(**{**sizes, **more}, device=device)


@functools.cache
def emulated(**more):
    """(loss, gradients and largest magnitudes) of a step in the emulator."""
    model = without_zeros(build(EmulatorDevice(checks=False, float64=False), **more))
    loss, gradients = one_step(model, "fp8", BATCH)
    model.parameters.float8.update()
    return loss, {**gradients, "history": download(model.parameters.float8.history)}


@exhaustive
@pytest.mark.parametrize("model", [{}, {**SWIGLU, "qk_norm": False}], ids=["dit", "lightning"])
@pytest.mark.usefixtures("few_frequencies")
def test_the_kernels_round_as_numpy_does(model):
    """…but where the sums before differ in their last bits."""
    loss, gradients = one_step(without_zeros(build(**model)), "fp8", BATCH)
    got_loss, got = emulated(**model)
    assert got_loss == pytest.approx(loss, rel=1e-3)
    everything = [
        np.concatenate([g[name].ravel() for name in gradients if "blocks" in name])
        for g in (got, gradients)
    ]
    assert relative_error(*everything) < 0.02


@exhaustive
@pytest.mark.usefixtures("few_frequencies")
def test_rounding_where_numbers_are_made_leaves_the_bits(monkeypatch):
    """…of the loss, of every gradient, and of the largest magnitudes."""
    assert linear_fp8.EPILOGUES and linear_fp8.NORMS
    loss, fused = emulated()
    for name in ("EPILOGUES", "NORMS"):
        monkeypatch.setattr(linear_fp8, name, False)
    apart_loss, apart = emulated.__wrapped__()
    assert loss == apart_loss
    for name, array in fused.items():
        np.testing.assert_array_equal(array, apart[name], err_msg=name)


@exhaustive
def test_scales_of_the_emulator_are_those_of_numpy():
    device = EmulatorDevice(checks=False, float64=False)
    models = [without_zeros(build(device=where)) for where in ("cpu", device)]
    for model in models:
        model.compute_in_float8()
    ours, theirs = (model.parameters.float8 for model in models)
    for name in ("weights", "scale"):
        np.testing.assert_array_equal(download(getattr(theirs, name)), getattr(ours, name))
    np.testing.assert_array_equal(download(theirs.rows), ours.rows)
    np.testing.assert_array_equal(download(theirs.columns), ours.columns)


def test_ranks_on_a_device_scale_by_the_largest_of_all(monkeypatch):
    """Two ranks, one after the other on one device: what they launch in addition to the gradients."""
    monkeypatch.setattr(Float8, "quantise", lambda self: None)
    rng, device = np.random.default_rng(0), EmulatorDevice(checks=False, float64=False)
    mails, found = [], []
    models = [build(device=where).parameters for where in (device, device, "cpu")]
    seen = rng.integers(0x33800000, 0x477FE000, (2, 2, PARTIALS)).astype(np.uint32)  # 6e-8 … 65504
    for rank, (parameters, amax) in enumerate(zip(models, [*seen, seen.max(axis=0)], strict=True)):
        parameters.keep_half(np.float16)
        parameters.keep_float8(["blocks.0.attn.proj.weight"])
        copy_into(parameters.float8.amax, amax)
        if rank < 2:
            mails.append(Mail(parameters, rank, 2, device))
            mails[rank].write(upload(np.float32([rank + 1]), device))
    for parameters, mail in zip(models, [*mails, None], strict=True):
        if mail:
            total = zeros(mail.numbers.size, like=device)
            peer_sum([mail.numbers for mail in mails], total)
            parameters.float8.of_ranks = mail.largest(total)
            assert download(total)[0] == 3
        parameters.float8.update()
        found.append({name: download(array) for name, array in parameters.float8.arrays().items()})
    for name, array in found[2].items():
        assert array.any()
        np.testing.assert_array_equal(found[0][name], array)
        np.testing.assert_array_equal(found[1][name], array)


HOPPER, AMPERE = (9, 0), (8, 0)


@pytest.mark.parametrize(
    "given, capability, text",
    [
        (
            {"model": "dit", "device": "cpu"},
            None,
            "compute capability 8.9 or later; use --precision fp32 on the CPU.",
        ),
        (
            {"model": "dit"},
            AMPERE,
            "compute capability 8.9 or later; use --precision fp16 on other GPUs.",
        ),
        (
            {"model": "unet"},
            HOPPER,
            "for the blocks of a DiT, and not for a unet: use --precision fp16.",
        ),
        (
            {"model": "dit", "hidden_size": 216, "heads": 6},
            HOPPER,
            "a DiT of 216 channels, 864 in its MLP",
        ),
        (
            {"model": "dit", "mlp": "swiglu", "mlp_ratio": 3.9},
            HOPPER,
            r"of 192 channels, \d+ in its MLP",
        ),
    ],
)
def test_where_it_is_refused(given, capability, text):
    with pytest.raises(UsageError, match=text):
        resolve(
            {
                "preset": "tiny",
                "precision": "fp8",
                **({"architecture": "DiT-Tiny"} if given["model"] == "dit" else {}),
                **given,
            },
            capability,
        )


@pytest.mark.parametrize("capability", [(8, 9), HOPPER, (10, 0), (12, 0)], ids=str)
def test_cards_that_take_it(capability):
    options = resolve({"model": "dit", "architecture": "DiT-Tiny", "precision": "fp8"}, capability)
    assert options.precision == "fp8" and options.fp8_promotion


def test_a_model_that_has_no_such_layers_is_refused():
    net = small_unet()
    for model, sentence in (
        (net, "not for a unet"),
        (small_dit(num_classes=None), "blocks.0.attn.qkv.weight is 72 × 24"),
    ):
        with pytest.raises(UsageError, match=sentence):
            Trainer(model, FixedImages(), batch=8, precision="fp8")
    with pytest.raises(UsageError, match="is for training.*inference=True"):
        set_precision(net, "fp8")
