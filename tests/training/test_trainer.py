import copy
import gc
import pickle
import threading
import types
import weakref

import numpy as np
import pytest

from numdiff.benchmark.step import RandomImages
from numdiff.device import get_backend
from numdiff.device.ptx import PtxDevice
from numdiff.device.traffic import Readback
from numdiff.dtypes import bfloat16
from numdiff.errors import UsageError
from numdiff.kernels.optimizer import loss_scale
from numdiff.training import Trainer
from numdiff.training.step import TrainingStep
from numdiff.training.trainer import NonFiniteError, shares_update
from tests.conftest import exhaustively, needs, relative_error, where
from tests.models import small_unet
from tests.training.toy import Toy

OPEN = weakref.WeakSet()  # trainers, which `_closed` closes


def make(images=None, labels=None, device="cpu", seed=3, num_classes=None, model="unet", **options):
    """A trainer of a small model. toy: of a tiny one, for what does not depend on the model."""
    if model == "toy":
        model = Toy(image_size=8, width=8, device=device, seed=seed)
    else:
        sizes = {
            "unet": {"channel_mult": (1, 2), "attention_resolutions": (4,)},
            "small": {},
            "convnext": {"block": "convnext"},
        }[model]
        model = small_unet(**sizes, device=device, seed=seed, num_classes=num_classes)
    dataset = FixedImages(images, labels)
    made = Trainer(
        model,
        dataset,
        **{
            "batch": 8,
            "learning_rate": 1e-3,
            "warmup_steps": 2,
            "ema_halflife": 40,
            "ema_std": (0.05, 0.1),
            "seed": seed,
            "precision": "fp32",
            **options,
        },
    )
    OPEN.add(made)
    return made


@pytest.fixture(autouse=True)
def _closed():
    """The trainers of a test are closed at its end."""
    yield
    for trainer in list(OPEN):
        trainer.close()


class FixedImages(RandomImages):
    """Few images in memory, as the loader reads them."""

    in_memory, window = True, 4

    def __init__(self, images=None, labels=None):
        super().__init__(24, 8, 3, 10)
        if images is not None:
            self.images, self.shape = images, images.shape
        self.labels = labels

    def __len__(self):
        return len(self.images)

    def read(self, rows, out=None):
        if out is None:
            return self.images[rows]
        out[...] = self.images[rows]
        return out


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs("gpu"))])
def device(request):
    return request.param


def losses(trainer, steps):
    return [r.loss for reports in trainer.run(steps, report_every=4) for r in reports]


FLOW = {
    "path": "linear",
    "prediction": "x_0",
    "loss": "flow",
    "time_sampling": "logit-normal",
    "noise_mean": 0.8,
}


@pytest.mark.parametrize(
    "steps, more",
    [
        (5, {"model": "small"}),
        (5, {"diffusion": FLOW, "model": "toy"}),
        (5, {"precision": "bf16", "model": "toy"}),
        (3, {"model": "convnext"}),
    ],
    ids=["discrete", "flow", "bf16", "convnext"],
)
def test_ten_steps_are_five_and_five_resumed_bitwise(device, steps, more):
    whole = make(device=device, **more)
    expected = losses(whole, 2 * steps)
    first = make(device=device, **more)
    start = losses(first, steps)
    state = first.state()
    assert "loss_scale" not in state and all(a.dtype != bfloat16 for a in state.values())
    second = make(device=device, **more)
    second.load_state(state)
    assert start + losses(second, steps) == expected
    for name, value in whole.state().items():
        np.testing.assert_array_equal(value, second.state()[name], err_msg=name)


@needs("gpu")
def test_a_captured_step_has_the_bits_of_the_eager_one():
    captured, eager = make(device="cuda"), make(device="cuda")
    eager.step_function.capture = False
    assert losses(captured, 6) == losses(eager, 6)
    with captured.ema_weights() as model:  # other work between two replays
        model.predict(np.zeros((3, 8, 8, 3)), 10)
    other = make(device="cuda", seed=9)
    losses(other, 3)
    assert losses(captured, 4) == losses(eager, 4)
    for name, value in eager.state().items():
        np.testing.assert_array_equal(value, captured.state()[name], err_msg=name)


@pytest.mark.parametrize(
    "given, decay",
    [
        ({"ema_halflife": 40}, 0.5 ** (8 / 40)),
        ({"ema_decay": 0.75}, 0.75),
        ({"ema_halflife": 0}, 0.0),
        ({"ema_decay": 0.0}, 0.0),
    ],
)
def test_the_averages_decay(given, decay):
    """With batches of 8, of `ema_halflife` images; from the first step on where there is no
    warm-up."""
    for warmup in (True, False):
        trainer = make(model="toy", ema_warmup=warmup, **{"ema_halflife": 0, **given})
        assert trainer.optimizer.config.ema_decay == pytest.approx(decay, rel=1e-12)
        expected = trainer.model.parameters.data.astype(np.float64)
        for n in range(4):
            losses(trainer, 1)
            d = min(decay, (1 + n) / (10 + n)) if warmup else decay
            expected += (1 - d) * (trainer.model.parameters.data - expected)
        if decay:
            assert relative_error(trainer.optimizer.ema, expected) < 1e-6
        else:
            assert trainer.optimizer.ema is None


def test_a_model_that_gives_fewer_channels_is_not_trained():
    with pytest.raises(UsageError, match="takes 3 channels and gives 1"):
        Trainer(small_unet(out_channels=1), FixedImages())


def test_decay_and_half_life_exclude_each_other():
    with pytest.raises(UsageError, match="ema_decay and ema_halflife exclude each other"):
        make(ema_decay=0.9, ema_halflife=40)


def test_a_trainer_that_is_not_closed_leaves_no_thread():
    def threads():
        return {thread for thread in threading.enumerate() if "_produce" in thread.name}

    before, trainer = threads(), make()
    losses(trainer, 2)
    (thread,) = threads() - before
    del trainer
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()


def test_a_trainer_is_not_copied():
    trainer = make()
    for function in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="copy or pickle its model and optimizer together"):
            function(trainer)
    model, optimizer = copy.deepcopy((trainer.model, trainer.optimizer))
    assert optimizer.parameters is model.parameters and optimizer.ema is not trainer.optimizer.ema
    losses(trainer, 2)
    assert not np.array_equal(optimizer.ema, trainer.optimizer.ema) and int(optimizer.step[0]) == 0
    with trainer.ema_weights(), pytest.raises(UsageError, match="outside of ema_weights"):
        pickle.dumps(trainer.optimizer)
    again = pickle.loads(pickle.dumps(trainer.optimizer))
    for name, value in trainer.optimizer.state().items():
        assert np.array_equal(value, again.state()[name]), name


@needs("gpu")
def test_gpu_and_cpu_engine_give_the_same_ten_losses():
    on_cpu, on_gpu = make(device="cpu"), make(device="cuda")
    np.testing.assert_allclose(losses(on_gpu, 10), losses(on_cpu, 10), rtol=1e-3)


def test_each_trainer_computes_in_its_own_precision(monkeypatch):
    """Forward and backward, whichever trainer on the device was made last; the device's switch is
    left as it was."""
    seen, backend = [], get_backend("ptx")
    monkeypatch.setattr(backend, "launch", lambda *_: seen.append(backend.tf32))
    trainers = {
        precision: make(device="ptx", precision=precision) for precision in ("tf32", "fp32")
    }
    assert backend.tf32 is False
    for precision in ("tf32", "fp32", "tf32"):
        seen.clear()
        step = trainers[precision].step_function
        step._forward_backward(slice(0, 8), 1.0, False)
        model = [value for value in seen if value]
        assert len(model) > 200 if precision == "tf32" else not model
    assert backend.tf32 is False


def test_a_model_that_was_trained_in_float16_is_trained_in_float32_next(monkeypatch):
    monkeypatch.setattr(PtxDevice, "compile", staticmethod(lambda *_: {}))
    first = make(model="toy", device="ptx", precision="fp16")
    assert first.model.dtype == np.float16 and first.model.parameters.half is not None
    model = first.model
    Trainer(model, FixedImages(), precision="fp32")
    assert model.dtype == np.float32
    assert model.parameters.half is None and all(
        p.half is None for p in model.parameters.parameters.values()
    )


@pytest.mark.parametrize(
    "options, words",
    [
        (
            {"precision": "x"},
            "--precision x does not exist; use auto or fp32 or tf32 or fp16 or bf16 or fp8.",
        ),
        ({"loss_scale_rule": "x"}, "--loss-scale-rule x does not exist"),
        ({"batch": 0}, "--batch 0 must be at least 1"),
        ({"batch": 2.5}, "--batch 2.5 must be a whole number"),
        ({"beta1": 1}, "--beta1 1 must be at least 0 and below 1"),
        ({"learning_rate": float("nan")}, "--learning-rate nan must be a finite number"),
        ({"ema_halflife": -1}, "--ema-halflife -1 must be at least 0"),
        ({"seed": -1}, "seed -1 must be"),
        ({"microbatch": 0}, "--microbatch 0 must be at least 1"),
        ({"flip": 2}, "--flip 2 must be yes or no"),
        (
            {"diffusion": {"stepz": 10}},
            "the diffusion has no option 'stepz' (did you mean 'steps'?): use some of",
        ),
        ({"diffusion": {"steps": 0}}, "diffusion steps 0"),
        ({"diffusion": {"schedule": "x"}}, "x"),
        ({"total_steps": -1}, "total_steps -1"),
        ({"total_steps": 0, "cosine": True}, "cosine"),
    ],
)
def test_wrong_options_are_errors(options, words):
    with pytest.raises(UsageError) as error:
        make(**options)
    assert words in str(error.value) and "\n" not in str(error.value)


@needs("gpu")
def test_tf32_learns_as_float32_does():
    exact, rounded = (
        losses(make(device="cuda"), 10),
        losses(make(device="cuda", precision="tf32"), 10),
    )
    again = losses(make(device="cuda", precision="tf32"), 10)
    assert rounded == again != exact and relative_error(rounded, exact) < 5e-3
    make(device="cuda")  # switches it off again


def test_microbatches_give_the_same_step(device):
    whole, parts = (
        make(device=device, model="small", microbatch=microbatch) for microbatch in (None, 2)
    )
    np.testing.assert_allclose(losses(whole, 3), losses(parts, 3), rtol=2e-5)
    assert relative_error(whole.state()["parameters"], parts.state()["parameters"]) < 1e-4


def test_training_passes_rescaled_timesteps_to_the_model():
    trainer = make(model="toy", diffusion={"steps": 4000, "timestep_scale": 0.25})
    seen, forward = [], trainer.model.forward
    trainer.model.forward = lambda x, t, *more, **keys: (
        seen.append(t) or forward(x, t, *more, **keys)
    )
    losses(trainer, 4)
    seen = np.concatenate(seen)
    assert (
        seen.dtype == np.float32
        and 500 < seen.max() < 1000
        and (seen * 4 % 1 == 0).all()
        and (seen % 1 != 0).any()
    )
    assert trainer.model.diffusion["timestep_scale"] == 0.25


def test_one_batch_is_learnt(device):
    colours = np.random.default_rng(0).integers(0, 256, (8, 1, 1, 3), np.uint8)
    images = np.broadcast_to(colours, (8, 8, 8, 3)).copy()
    trainer = make(images, device=device, model="small", learning_rate=6e-3)
    values = losses(trainer, 30)
    assert np.mean(values[-10:]) < 0.25 * np.mean(values[:4])


def test_classes_are_used(device):
    """Black and white images of two classes: given the class, the model knows x_0 even from pure
    noise."""
    labels = np.arange(24, dtype=np.int32) % 2
    images = np.broadcast_to(255 * labels[:, None, None, None], (24, 8, 8, 3)).astype(np.uint8)
    trainer = make(
        images,
        labels,
        device=device,
        num_classes=2,
        learning_rate=6e-3,
        diffusion={"prediction": "x_0"},
    )
    losses(trainer, 15)
    noise = np.random.default_rng(1).standard_normal((2, 8, 8, 3))
    answer = trainer.model.predict(noise, 999, [0, 1]).mean((1, 2, 3))
    assert answer[0] < -0.5 and answer[1] > 0.5


def test_a_non_finite_loss_stops_with_its_name_and_leaves_the_weights(device):
    trainer = make(device=device, model="small")
    losses(trainer, 2)
    before = trainer.state()["parameters"].copy()
    weights = trainer.model.arrays()
    weights["out.2.bias"][:] = np.nan
    trainer.model.load_arrays(weights)
    poisoned = trainer.state()["parameters"].copy()
    with pytest.raises(
        NonFiniteError, match=r"step 3 gave loss nan.*out\.2 conv2d is the first non-finite"
    ):
        list(trainer.run(20, report_every=10))
    np.testing.assert_array_equal(trainer.state()["parameters"], poisoned)
    assert np.isfinite(before).all()


def test_reports_come_late_and_whole(monkeypatch):
    """As on a GPU, where a list of reports is requested and looked at some steps later."""
    monkeypatch.setattr(Readback, "lag", 4)
    trainer = make(model="toy")
    seen = [
        (trainer.step, [r.step for r in reports]) for reports in trainer.run(13, report_every=5)
    ]
    assert seen == [(9, [0, 1, 2, 3, 4]), (13, [5, 6, 7, 8, 9]), (13, [10, 11, 12])]
    seen = [(trainer.step, [r.step for r in reports]) for reports in trainer.run(9, report_every=3)]
    assert seen == [(18, [13, 14]), (21, [15, 16, 17]), (22, [18, 19, 20]), (22, [21])]
    weights = trainer.model.arrays()
    weights["last.bias"][:] = np.nan
    trainer.model.load_arrays(weights)
    with pytest.raises(
        NonFiniteError, match=r"step 23 gave loss nan.*last conv2d is the first non-finite"
    ):
        list(trainer.run(20, report_every=2))


def test_a_run_that_is_asked_to_stop_reports_all_it_did():
    trainer = make(model="toy")
    assert [len(reports) for reports in trainer.run(20, 4, stop=lambda: trainer.step == 6)] == [
        4,
        2,
    ]
    assert trainer.step == 6


# the CPU records nothing
@where(lambda device, options: device == "cuda" or "eager" not in options)
@pytest.mark.parametrize(
    "options",
    [
        {"recompute": True},
        {"eager": True},
        {"recompute": True, "eager": True},
        {"eager": True, "diffusion": FLOW},
        {"eager": True, "diffusion": {"path": "edm"}},
    ],
)
def test_how_a_step_is_run_changes_no_bit(device, options):
    plain = make(device=device, microbatch=4, diffusion=options.get("diffusion"))
    other = make(device=device, microbatch=4, **options)
    assert other.step_function.capture == (device == "cuda" and "eager" not in options)
    assert losses(plain, 3) == losses(other, 3)
    for name, value in plain.state().items():
        np.testing.assert_array_equal(value, other.state()[name], err_msg=name)


@needs("gpu")
def test_half_precision_gives_the_same_bits_however_it_is_run():
    plain = make(device="cuda", precision="fp16")
    expected = losses(plain, 6)
    for options in ({}, {"eager": True}, {"recompute": True}):
        other = make(device="cuda", precision="fp16", **options)
        assert losses(other, 6) == expected, options
        np.testing.assert_array_equal(plain.state()["parameters"], other.state()["parameters"])


# Loss scaling, over gradients that overflow as float16's do ---------------------------------------


@pytest.fixture
def rounded(monkeypatch):
    """Trainers for float16 compute in float32 on the CPU, and their gradients are then rounded to
    float16."""

    def gradients(step, *args, **kwargs):
        result = plain(step, *args, **kwargs)
        flat = step.model.parameters.grad
        with np.errstate(over="ignore"):
            flat[:] = flat.astype(np.float16)
        return result

    plain = TrainingStep._gradients
    monkeypatch.setattr(TrainingStep, "_gradients", gradients)
    monkeypatch.setattr(Toy, "compute_in_half", lambda model, dtype: None)
    return lambda **options: make(model="toy", precision="fp16", **options)


def reports_of(trainer, steps):
    return [r for reports in trainer.run(steps, report_every=4) for r in reports]


@pytest.mark.parametrize(
    "rule", [*exhaustively({"loss_scale_interval": 3}), {"loss_scale_rule": "log2"}]
)
def test_the_scale_grows_by_its_rule_and_goes_on_from_a_checkpoint(rounded, rule):
    whole = rounded(loss_scale=64.0, **rule)
    reports = reports_of(whole, 8)
    grown = [
        64.0 * 2 ** (k // 3) if "loss_scale_interval" in rule else 64 * 2 ** (0.001 * k)
        for k in range(1, 9)
    ]
    assert [r.loss_scale for r in reports] == pytest.approx(grown, rel=1e-5)
    first = rounded(loss_scale=64.0, **rule)
    reports_of(first, 5)
    second = rounded(**rule)
    second.load_state(first.state())
    assert [(r.loss, r.loss_scale) for r in reports_of(second, 3)] == [
        (r.loss, r.loss_scale) for r in reports[5:]
    ]
    for name, value in whole.state().items():
        np.testing.assert_array_equal(value, second.state()[name], err_msg=name)


@pytest.mark.parametrize("lag", [4, *exhaustively(0)])
def test_fifty_skips_in_a_row_stop_with_one_sentence(rounded, monkeypatch, lag):
    monkeypatch.setattr(Readback, "lag", lag)
    trainer = rounded(loss_scale=2.0**40)
    before = trainer.state()["parameters"]
    monkeypatch.setattr(loss_scale, "SMALLEST", 2.0**35)  # so that every step overflows
    with pytest.raises(
        NonFiniteError, match="50 steps in a row overflowed in float16.*continue from a"
    ) as caught:
        reports_of(trainer, 80)
    assert "\n" not in str(caught.value) and trainer.step < 60 + lag
    np.testing.assert_array_equal(trainer.state()["parameters"], before)


def test_a_dataset_that_does_not_fit_the_model_is_refused():
    with pytest.raises(UsageError, match="images are 4×4×3, and the model takes 8×8×3"):
        make(images=np.zeros((9, 4, 4, 3), np.uint8))
    with pytest.raises(UsageError, match="no labels"):
        make(num_classes=2)


@pytest.mark.parametrize(
    "size, hosts, backend, optimizer, auto",
    [
        (1, 1, None, "adamw", False),
        (2, 1, None, "muon", True),
        (2, 2, None, "adamw", True),
        (2, 1, "a GPU", "adamw", True),
        (2, 1, "a GPU", "muon", False),
        (2, 2, "a GPU", "adamw", False),
    ],
)
def test_who_shares_the_update(size, hosts, backend, optimizer, auto):
    ranks = types.SimpleNamespace(size=size, hosts=hosts)
    assert shares_update("auto", ranks, backend, optimizer) == auto
    assert not shares_update("no", ranks, backend, optimizer)
    if size > 1:
        assert shares_update("yes", ranks, backend, optimizer)
    else:
        with pytest.raises(UsageError, match="this process is alone"):
            shares_update("yes", ranks, backend, optimizer)
