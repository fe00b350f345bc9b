"""Settings: what a preset fills, what is refused and with which sentence."""

import json
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

import numdiff.device
import numdiff.training.options as options_module
from numdiff.errors import NumdiffError, UsageError
from numdiff.settings import flag
from numdiff.training.build import describe_preset
from numdiff.training.kinds import KINDS
from numdiff.training.options import (
    PRESETS,
    TrainOptions,
    check,
    resolve,
    resolve_resumed,
    settings_of,
)
from numdiff.training.precision import precision_on
from tests.reference.stored_objectives import OBJECTIVES


def resolve_cpu(**given):
    return resolve({"device": "cpu", **given})


def expect(options, **values):
    """These settings have these values."""
    assert {name: getattr(options, name) for name in values} == values


def refuse(sentence, **given):
    """A run with these options is refused, in one sentence."""
    with pytest.raises(UsageError, match=sentence) as caught:
        resolve_cpu(**given)
    assert "\n" not in str(caught.value)


def pretend_gpu(monkeypatch, capability):
    monkeypatch.setattr(numdiff.device, "why_no_gpu", lambda: None)
    monkeypatch.setattr(options_module, "gpu_capability", lambda: capability)


def test_default_preset_follows_the_device(monkeypatch):
    monkeypatch.setattr(numdiff.device, "why_no_gpu", lambda: "there is none")
    expect(resolve({}), preset="tiny", device="cpu")
    assert resolve({"preset": "unet64"}).model_channels == 64
    with pytest.raises(
        UsageError, match="--device cuda: no GPU can be used .there is none.; use --device cpu"
    ):
        resolve({"device": "cuda"})
    pretend_gpu(monkeypatch, (9, 0))
    expect(resolve({}), preset="unet64", device="cuda")
    expect(resolve_cpu(), preset="tiny", device="cpu")


def test_the_seeds_model():
    options = resolve_cpu(preset="unet64")
    expect(options, model_channels=64, channel_mult=(1, 2, 3, 4), num_res_blocks=2)
    expect(options, attention_resolutions=(16, 8), num_head_channels=32, conv_resample=False)
    expect(options, batch=32, image_size=64, class_cond=False)


def test_presets_name_settings_and_are_valid():
    for model, presets in PRESETS.items():
        for name, values in presets.items():
            assert not values.keys() - set(settings_of(model))
            check(TrainOptions(**values, model=model, preset=name))


def test_the_presets_class_is_the_emoji_sets_alone():
    assert resolve_cpu().classes == ("Smileys & Emotion",)
    assert resolve_cpu(data="mine.h5").classes is None
    # they may be latents, or letters
    assert resolve_cpu().flip and not resolve_cpu(data="mine.h5").flip
    assert resolve_cpu(classes=["Flags"]).classes == ("Flags",)


def test_a_dit_of_emoji_has_classes_and_other_data_have_their_own():
    tiny = resolve_cpu(model="dit")
    expect(
        tiny,
        preset="tiny",
        architecture="LightningDiT-Tiny/2",
        class_cond=True,
        learn_sigma=False,
        flip=True,
    )
    assert len(tiny.classes) == 3 and tiny.sample_count % 3 == 0  # a whole row of each in the grid
    assert resolve_cpu(model="dit", num_classes=9).classes is None
    mine = resolve_cpu(model="dit", data="mine.h5")
    # latents do not mirror
    expect(mine, classes=None, flip=False, class_cond=True)
    large = resolve_cpu(model="dit", preset="small64")
    expect(large, classes=None, learn_sigma=False, hidden_size=384, patch_size=4)
    expect(large, path="linear", prediction="flow", qk_norm=True, shift=False)


@pytest.mark.parametrize(
    "given",
    [
        {"architecture": "DiT-S/4"},
        {"path": "discrete"},
        {"learn_sigma": True},
        {"schedule": "linear"},
        {"min_snr_gamma": 5.0},
    ],
)
def test_what_only_whole_timesteps_have_leaves_the_path_of_a_preset(given):
    options = resolve_cpu(model="dit", preset="small64", **given)
    expect(options, path="discrete", prediction="v", loss=None)
    assert options.learn_sigma == (given.keys() <= {"architecture", "learn_sigma"})
    assert options.qk_norm == ("architecture" not in given)


def test_a_lightningdit_has_its_block_and_each_part_of_it_can_be_chosen():
    options = resolve_cpu(model="dit", architecture="LightningDiT-B/1", data="latents.h5")
    # as it was published
    block = {"norm": "rms", "qk_norm": False, "rope": True, "mlp": "swiglu", "shift": True}
    expect(options, **block, learn_sigma=False)
    expect(options, hidden_size=768, depth=12, patch_size=1)
    changed = {"norm": "layer", "qk_norm": True, "rope": False, "mlp": "gelu", "shift": False}
    options = resolve_cpu(
        model="dit", architecture="LightningDiT-B/1", data="latents.h5", **changed
    )
    expect(options, **changed)
    options = resolve_cpu(model="dit", architecture="DiT-Tiny", rope=True)
    expect(options, norm="layer", qk_norm=False, rope=True, mlp="gelu", shift=True)


def test_a_dits_run_from_before_it_had_other_blocks_is_what_it_was():
    options = resolve_cpu(model="dit", architecture="DiT-Tiny")
    older = {
        name: value
        for name, value in options.to_json().items()
        if name not in ("norm", "qk_norm", "rope", "mlp", "shift", "attention", "sla_topk")
    }
    assert TrainOptions.from_json(older) == options


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"architecture": "DiT-Q/2"}, "--model DiT-Q/2 does not exist; use DiT-S/2 or"),
        (
            {"image_size": 33},
            "--image-size 33 is not divisible by the 4 pixels of a patch; use a multiple of 4",
        ),
        (
            {"image_size": 36, "patch_size": 8},
            "--image-size 36 .* 8 pixels of a patch; use .* or patches of 4 or 2",
        ),
        ({"heads": 5}, "--hidden-size 192 must be a multiple of 4 and of --heads 5; use 200"),
        ({"num_classes": 9, "class_cond": False}, "--num-classes needs --class-cond"),
        ({"class_dropout": 1.0}, "--class-dropout 1 must be at least 0 and below 1"),
        ({"mlp_ratio": 1e-3}, "--mlp-ratio 0.001 leaves the MLP no channel"),
        (
            {"rope": True, "hidden_size": 180, "heads": 6},
            "--rope .* 180 over --heads 6 is 30: use --heads 5, or --no-rope",
        ),
        ({"mlp": "relu"}, "--mlp relu does not exist; use gelu or swiglu"),
        (
            {"attention": "sla"},
            "--attention sla chooses among blocks of 64 tokens, and an image has 64, which is one",
        ),
        (
            {"attention": "sla", "image_size": 64, "sla_topk": 0.0},
            "--sla-topk 0 must be above 0 and at most 1",
        ),
        (
            {"attention": "sla", "image_size": 64, "sla_topk": 1.5},
            "--sla-topk 1.5 must be above 0 and at most 1",
        ),
        (
            {"attention": "sla", "image_size": 64, "heads": 3, "hidden_size": 60},
            "kernels for heads of 32, 64, 72 channels, "
            "and these have 20: change --heads, or use --attention full",
        ),
        ({"preset": "unet64"}, "--preset unet64 does not exist; use tiny or small64"),
        (
            {"model_channels": 32},
            "--model-channels belongs to the model unet; leave it out, or train that one",
        ),
    ],
)
def test_a_dit_that_cannot_be_is_refused(given, sentence):
    refuse(sentence, model="dit", **{"architecture": "DiT-Tiny", **given})


def test_the_user_wins_over_the_preset():
    options = resolve_cpu(batch=8, channel_mult=[1, 3], data=None)
    expect(options, batch=8, channel_mult=(1, 3), data=None)


def test_what_follows_from_another_setting():
    assert resolve_cpu(steps=20).warmup_steps <= 2
    assert resolve_cpu(diffusion_steps=10).sample_steps == 10
    assert resolve_cpu(image_size=64, channel_mult=(1, 2, 2, 2)).attention_resolutions == (8,)


@pytest.mark.parametrize(
    "given, levels, attention, batch, steps",
    [
        ({}, (1, 2, 3, 4), (16, 8), 32, 8000),
        ({"image_size": 32}, (1, 2, 3, 4), (16, 8), 32, 8000),
        ({"image_size": 96}, (1, 2, 3, 4), (24, 12), 32, 8000),
        ({"image_size": 128}, (1, 1, 2, 3, 4), (16, 8), 16, 16000),
        ({"image_size": 192}, (1, 1, 2, 3, 4), (24, 12), 16, 16000),
        ({"image_size": 256}, (1, 1, 1, 2, 3, 4), (16, 8), 8, 32000),
        ({"image_size": 128, "steps": 50}, (1, 1, 2, 3, 4), (16, 8), 16, 50),
        ({"image_size": 128, "batch": 24}, (1, 1, 2, 3, 4), (16, 8), 24, 8000),
        ({"image_size": 128, "channel_mult": (1, 2, 3, 4)}, (1, 2, 3, 4), (16,), 32, 8000),
        ({"image_size": 128, "attention_resolutions": (32,)}, (1, 1, 2, 3, 4), (32,), 16, 16000),
    ],
)
def test_the_size_chooses_the_unet(given, levels, attention, batch, steps):
    options = resolve_cpu(preset="unet64", **given)
    expect(options, channel_mult=levels, attention_resolutions=attention)
    expect(options, batch=batch, steps=steps)


@pytest.mark.parametrize(
    "shape, dtype, cpu, cuda",
    [
        ((2, 64, 64, 3), np.uint8, 32, 64),
        ((2, 48, 48, 3), np.uint8, 24, 48),
        ((2, 128, 128, 1), np.uint8, 32, 128),
        ((2, 512, 512, 3), np.uint8, 32, 256),
        ((2, 360, 360, 3), np.uint8, 24, 120),
        ((2, 31, 31, 3), np.uint8, 32, 64),
        ((2, 40, 40, 4), np.float32, 40, 40),
        ((2, 64, 48, 3), np.uint8, (32, 24), (64, 48)),
        ((2, 60, 40, 3), np.uint8, 32, 64),
        ((2, 24, 40, 4), np.float32, (24, 40), (24, 40)),
    ],
)
def test_a_run_takes_the_size_of_its_data(tmp_path, shape, dtype, cpu, cuda):
    """Where it is not given; a file whose size cannot be had leaves the preset's, and is refused
    when it is opened."""
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["images"] = np.zeros(shape, dtype)
    data = str(tmp_path / "d.h5")
    assert resolve_cpu(data=data).image_size == cpu
    assert resolve({"model": "unet", "data": data}, capability=(9, 0)).image_size == cuda
    assert (
        resolve({"model": "unet", "data": data, "image_size": 16}, capability=(9, 0)).image_size
        == 16
    )


def test_grids_are_guided_where_the_model_can_be():
    small = {"model": "dit", "preset": "small64", "device": "cpu"}
    assert resolve(small).cfg_scale == 1.5
    assert resolve({**small, "class_dropout": 0.0}).cfg_scale is None
    assert resolve({**small, "class_cond": False}).cfg_scale is None
    assert resolve({**small, "cfg_scale": 3.0}).cfg_scale == 3


def test_json_round_trip(tmp_path):
    options = resolve_cpu(classes=["Food & Drink", "Objects"], microbatch=4)
    options.save(tmp_path / "options.json")
    assert json.loads((tmp_path / "options.json").read_text())["channel_mult"] == [1, 2, 4]
    assert TrainOptions.load(tmp_path / "options.json") == options


def test_a_run_is_no_folder_of_pictures(tmp_path):
    resolve_cpu(data=str(tmp_path))
    for name in ("options.json", "stats.jsonl"):
        (tmp_path / name).touch()
    refuse(
        "is the folder of a run, whose pictures are samples .* and the run as --init",
        data=str(tmp_path),
    )


def test_options_files_that_cannot_be_used(tmp_path):
    path = tmp_path / "options.json"
    with pytest.raises(NumdiffError, match="does not exist"):
        TrainOptions.load(path)
    for text in ("", "{", "[1]", "3", '{"batch": 3'):
        path.write_text(text)
        with pytest.raises(
            NumdiffError, match=f"is damaged .*; put a copy of it back, .* with --init {tmp_path}"
        ):
            TrainOptions.load(path)
    path.write_text('{"colour": 3}')
    with pytest.raises(NumdiffError, match="does not know .colour"):
        TrainOptions.load(path)


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"image_size": 30}, "--image-size 30 cannot be halved 2 times.*use a multiple of 4"),
        ({"classes": []}, "--classes none leaves no image to train on"),
        (
            {"batch": 10, "microbatch": 4},
            "--batch 10 is not divisible by --microbatch 4; use a --microbatch of 2, or.* 12",
        ),
        (
            {"batch": 4, "microbatch": 8},
            "--batch 4 is not divisible by --microbatch 8; use a --microbatch of 4, or.* 8",
        ),
        ({"model_channels": 40}, "--model-channels 40 must be a multiple of 32.*use 32"),
        ({"model_channels": 10}, "--model-channels 10 must be a multiple of 32.*use 32"),
        (
            {"attention_resolutions": [5]},
            "--attention-resolutions 5: the model never has size 5; use some of 32,16,8",
        ),
        (
            {"num_head_channels": 48},
            "--num-head-channels 48 does not divide the 128 channels at size 8",
        ),
        ({"num_head_channels": 0}, "--num-head-channels 0 does not divide"),
        (
            {"num_head_channels": -1, "num_heads": 5},
            "--num-heads 5 does not divide the 128 channels at size 8",
        ),
        (
            {"attention_resolutions": [32], "model_channels": 96, "num_head_channels": 64},
            "the 96 channels at size 32",
        ),
        ({"channel_mult": []}, "--channel-mult must have at least one entry"),
        ({"channel_mult": [1, 0]}, "--channel-mult 1,0 must be at least 1"),
        ({"channel_mult": [1, 0.5]}, "--channel-mult 0.5 must be a whole number"),
        ({"channel_mult": 2}, "--channel-mult 2 must be a list"),
        ({"precision": "fp16"}, "--precision fp16 needs a GPU; use --precision fp32 on the CPU"),
        (
            {"precision": "tf32"},
            "--precision tf32 needs a GPU of compute capability 8.0 or later; use --precision fp32",
        ),
        ({"schedule": "sigmoid"}, "--schedule sigmoid does not exist; use linear or cosine"),
        ({"preset": "huge"}, "--preset huge does not exist; use tiny or unet64"),
        (
            {"prediction": "x0"},
            "--prediction x0 does not exist; use eps or v or x_0 or flow or edm",
        ),
        ({"steps": 0}, "--steps 0 must be at least 1"),
        ({"steps": 2.0}, "--steps 2.0 must be a whole number"),
        ({"steps": True}, "--steps True must be a whole number"),
        ({"steps": 5, "warmup_steps": 6}, "--warmup-steps 6 is more than --steps 5"),
        ({"path": "curved"}, "--path curved does not exist; use discrete or linear or edm"),
        (
            {"path": "linear", "schedule": "cosine"},
            "--schedule cosine does not go with --path linear, which has no whole",
        ),
        (
            {"path": "edm", "diffusion_steps": 100},
            "--diffusion-steps 100 does not go with --path edm",
        ),
        ({"path": "linear", "learn_sigma": True}, "--learn-sigma does not go with --path linear"),
        (
            {"min_snr_gamma": 5.0, "learn_sigma": True},
            "--learn-sigma does not go with --min-snr-gamma 5",
        ),
        (
            {"prediction": "edm"},
            "--prediction edm is of the preconditioning of --path edm, and not of --path linear",
        ),
        (
            {"path": "discrete", "loss": "edm"},
            "--loss edm is of the preconditioning of --path edm, and not of --path disc",
        ),
        (
            {"path": "linear", "loss": "edm"},
            "--loss edm is of the preconditioning of --path edm, and not of --path linear",
        ),
        (
            {"path": "discrete", "noise_mean": 1.0},
            "--noise-mean 1 does not go with --path discrete: leave it out, or gi",
        ),
        (
            {"schedule": "linear", "noise_mean": 1.0},
            "--noise-mean 1 does not go with --path discrete: leave it out",
        ),
        (
            {"path": "edm", "time_sampling": "uniform"},
            "--time-sampling uniform does not go with --path edm: leave it out, "
            "or give --path linear",
        ),
        (
            {"path": "linear", "sigma_data": 0.5},
            "--sigma-data 0.5 does not go with --path linear: leave it out, or give",
        ),
        (
            {"sigma_data": 0.3},
            "--sigma-data 0.3 does not go with --path linear: leave it out, or give --path edm",
        ),
        (
            {"path": "linear", "noise_std": 1.0},
            "--noise-std 1 does not go with --time-sampling uniform",
        ),
        (
            {"path": "linear", "time_sampling": "logit-normal", "noise_mean": float("nan")},
            "--noise-mean nan must be a fin",
        ),
        (
            {"path": "linear", "time_sampling": "logit-normal", "noise_std": 0.0},
            "--noise-std 0 must be at least 0.001",
        ),
        (
            {"path": "edm", "rescale_timesteps": True},
            "--rescale-timesteps does not go with --path edm",
        ),
        ({"path": "edm", "time_shift": 3.0}, "--time-shift 3 does not go with --path edm"),
        ({"loss": "v", "min_snr_gamma": 5.0}, "--loss v and --min-snr-gamma 5 exclude each other"),
        (
            {"path": "discrete", "sample_steps": 2000},
            "--sample-steps 2000 is more than --diffusion-steps 1000",
        ),
        (
            {"cfg_interval": (0.3, 5.0)},
            "--cfg-interval 0.3,5 limits the guidance of the grids, and there is none",
        ),
        ({"cfg_interval": (5.0, 0.3)}, "--cfg-interval 5,0.3 must be two noise levels sigma"),
        ({"cfg_interval": (5.0,)}, "--cfg-interval 5 must be two noise levels sigma"),
        (
            {"cfg_scale": 2.0},
            "--cfg-scale 2 guides by classes, and the model has none: give --class-cond",
        ),
        (
            {"cfg_scale": 2.0, "class_cond": True},
            "never sees an image without its class: give a --class-dropout",
        ),
        ({"learning_rate": 0}, "--learning-rate 0 must be above 0"),
        ({"learning_rate": float("nan")}, "--learning-rate nan must be a finite number"),
        ({"learning_rate": "fast"}, "--learning-rate fast must be a finite number"),
        ({"dropout": 1.0}, "--dropout 1 must be at least 0 and below 1"),
        ({"beta2": 1}, "--beta2 1 must be"),
        ({"seed": -1}, "--seed -1 must be at least 0 and at most 4294967295"),
        ({"keep": 0}, "--keep 0 must be at least 1"),
        ({"flip": 1}, "--flip 1 must be yes or no"),
        ({"classes": "Objects"}, "--classes Objects must be a list"),
        ({"bach": 3}, r"there is no setting 'bach' \(did you mean 'batch'\?\): correct it"),
    ],
)
def test_refused(given, sentence):
    refuse(sentence, **given)


def test_a_path_brings_what_it_predicts_and_learns_no_variance():
    """In place of what the preset has; what is given counts."""
    assert (
        resolve_cpu(path="discrete").prediction == "x_0"
        and resolve_cpu(preset="unet64").path == "discrete"
    )
    for path, prediction in (("linear", "flow"), ("edm", "edm")):
        options = resolve_cpu(model="dit", architecture="DiT-S/8", path=path, image_size=64)
        assert options.prediction == prediction and options.learn_sigma is False
    assert resolve_cpu(path="linear", prediction="x_0", loss="flow").prediction == "x_0"
    assert resolve_cpu(model="dit", architecture="DiT-S/8", image_size=64).learn_sigma is True
    assert (
        resolve_cpu(
            model="dit", architecture="DiT-S/8", image_size=64, min_snr_gamma=5.0
        ).learn_sigma
        is False
    )
    assert resolve_cpu(path="linear", sample_steps=2000).sample_steps == 2000


JIT = OBJECTIVES["jit"]
PLAIN = {
    "path": "discrete",
    "prediction": "x_0",
    "loss": None,
    "time_sampling": "uniform",
    "noise_mean": None,
    "noise_std": None,
    "schedule": "cosine",
}


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, JIT),
        ({"learn_sigma": False}, JIT),
        ({"noise_mean": 0.0}, {**JIT, "noise_mean": 0.0}),
        ({"rescale_timesteps": True, "time_shift": 3.0}, JIT),
        (JIT, JIT),
        ({"prediction": "v"}, {**JIT, "prediction": "v", "loss": None}),
        ({"prediction": "v", "loss": "flow"}, {**JIT, "prediction": "v"}),
        ({"loss": "x_0"}, {**JIT, "loss": "x_0"}),
        (
            {"time_sampling": "uniform"},
            {**JIT, "time_sampling": "uniform", "noise_mean": None, "noise_std": None},
        ),
        ({"path": "discrete"}, PLAIN),
        ({"schedule": "linear"}, {**PLAIN, "schedule": "linear"}),
        ({"diffusion_steps": 500}, PLAIN),
        ({"min_snr_gamma": 5.0}, PLAIN),
        ({"learn_sigma": True}, PLAIN),
        ({"prediction": "eps", "learn_sigma": True}, {**PLAIN, "prediction": "eps"}),
        ({"path": "linear"}, {**PLAIN, "path": "linear", "prediction": "flow"}),
        (
            {"path": "linear", "min_snr_gamma": 5.0},
            {**PLAIN, "path": "linear", "prediction": "flow"},
        ),
        ({"path": "edm"}, {**PLAIN, "path": "edm", "prediction": "edm"}),
    ],
)
@pytest.mark.parametrize("model", ["unet", "dit"])
def test_a_presets_path_is_one_choice(model, given, expected):
    """None of it is left where other settings ask for another path; a loss goes with its
    prediction."""
    options = resolve_cpu(model=model, **given)
    expect(options, **expected)
    expect(options, **given)


def test_a_dit_that_learns_a_variance_by_default_has_whole_timesteps():
    given = {"model": "dit", "architecture": "DiT-S/4"}
    expect(resolve_cpu(**given), path="discrete", learn_sigma=True)
    assert resolve_cpu(**given, learn_sigma=False).path == "linear"
    assert resolve_cpu(model="dit", architecture="LightningDiT-S/2").path == "linear"


def test_a_presets_learning_rate_is_of_its_optimizer():
    for model, muon, adamw in (("unet", 2e-3, 1e-3), ("dit", 4e-3, 2e-3)):
        expect(resolve_cpu(model=model), optimizer="muon", learning_rate=muon)
        assert resolve_cpu(model=model, optimizer="adamw").learning_rate == adamw
        assert resolve_cpu(model=model, optimizer="muon").learning_rate == muon
        assert resolve_cpu(model=model, optimizer="adamw", learning_rate=3e-4).learning_rate == 3e-4
    assert resolve_cpu(preset="unet64", optimizer="adamw").learning_rate == 5e-4


def test_the_log_reports_preset_settings_that_a_run_drops():
    assert describe_preset(resolve_cpu()) == describe_preset(resolve_cpu(prediction="flow")) == ""
    assert describe_preset(resolve_cpu(schedule="linear", optimizer="adamw")) == (
        "tiny, but without its path linear, loss flow, time sampling logit-normal, optimizer muon"
    )
    assert (
        describe_preset(resolve_cpu(path="linear"))
        == "tiny, but without its time sampling logit-normal"
    )
    assert describe_preset(resolve_cpu(preset="unet64", path="edm")) == ""
    assert describe_preset(resolve_cpu(model="dit", architecture="DiT-S/2")).endswith(
        "(--no-learn-sigma keeps the path)"
    )


def test_wrong_values_are_told_before_the_gpu_is_looked_for(monkeypatch):
    def look():
        raise AssertionError

    monkeypatch.setattr(numdiff.device, "why_no_gpu", look)
    with pytest.raises(UsageError, match="--batch 0"):
        resolve({"batch": 0})


def test_resume_changes_what_it_may():
    saved = resolve_cpu(steps=10, lr_schedule="constant")
    longer = resolve_resumed(saved, {"steps": 20, "keep": 5, "batch": saved.batch, "data": None})
    expect(longer, steps=20, keep=5, batch=saved.batch, warmup_steps=saved.warmup_steps)
    assert saved.steps == 10
    for given in (
        {"batch": 3},
        {"beta1": 0.5},
        {"channel_mult": [1, 2]},
        {"seed": 3},
        {"preset": "unet64"},
    ):
        with pytest.raises(UsageError, match="does not fit the run, which was started with"):
            resolve_resumed(saved, given)
    with pytest.raises(
        UsageError, match="^--no-flip does not fit the run, which was started with --flip; leave"
    ):
        resolve_resumed(resolve_cpu(flip=True), {"flip": False})
    with pytest.raises(UsageError, match="--log-every 0"):
        resolve_resumed(saved, {"log_every": 0})
    with pytest.raises(
        UsageError,
        match="^the run is a UNet's, and this trains a DiT: continue with: numdiff train "
        "unet --resume 'a b'$",
    ):
        resolve_resumed(saved, {"model": "dit", "batch": 3}, "a b")


def test_one_of_decay_and_half_life_follows_from_the_other():
    options = resolve_cpu(ema_decay=0.9999, batch=32)
    assert options.ema_decay == 0.9999 and 0.5 ** (32 / options.ema_halflife) == pytest.approx(
        0.9999, rel=1e-12
    )
    expect(resolve_cpu(), ema_decay=None, ema_halflife=800.0, ema_warmup=True)
    assert resolve_cpu(ema_decay=0.0).ema_halflife == 0
    refuse("--ema-decay and --ema-halflife exclude each other", ema_decay=0.9, ema_halflife=800.0)
    for name in ("ema_decay", "ema_halflife"):
        refuse(
            f"^--no-ema-warmup is of the averaged .* and {flag(name)} 0 keeps none",
            **{name: 0.0},
            ema_warmup=False,
        )


def test_what_a_unet_has_of_a_dit():
    options = resolve_cpu()
    expect(options, learn_sigma=False, class_dropout=0.0, num_heads_upsample=-1)
    options = resolve_cpu(class_cond=True, class_dropout=0.2, learn_sigma=True, vlb_weight=1.0)
    expect(options, learn_sigma=True, class_dropout=0.2, vlb_weight=1.0)
    for model in ("unet", "dit"):
        refuse(
            "--class-dropout 0.2 needs --class-cond",
            model=model,
            class_dropout=0.2,
            class_cond=False,
        )
    refuse(
        "--vlb-weight 1 weighs the loss of a learned variance: give --learn-sigma", vlb_weight=1.0
    )
    assert resolve_cpu(model="dit").class_dropout == 0.1


def test_a_number_of_heads_counts_where_it_is_given():
    assert resolve_cpu().num_head_channels == 32
    options = resolve_cpu(num_heads=4, num_heads_upsample=2)
    expect(options, num_heads=4, num_heads_upsample=2, num_head_channels=-1)
    for name in ("num_heads", "num_heads_upsample"):
        refuse("and --num-head-channels exclude each other", **{name: 4}, num_head_channels=32)
    refuse("--num-heads-upsample 3 does not divide the 128 channels", num_heads_upsample=3)


def test_a_unets_run_of_before_goes_on():
    """Its options.json holds the DiT's defaults of what a UNet had not."""
    old = {**resolve_cpu().to_json(), "class_dropout": 0.1, "learn_sigma": None}
    for name in ("ema_decay", "ema_warmup", "vlb_weight", "num_heads_upsample"):
        del old[name]
    assert TrainOptions.from_json(old) == resolve_cpu()
    new = resolve_cpu(class_cond=True, class_dropout=0.1, learn_sigma=True)
    assert TrainOptions.from_json(new.to_json()) == new


@pytest.mark.parametrize(
    "capability, expected",
    [((7, 5), "fp16"), ((8, 0), "fp16"), ((8, 9), "fp16"), ((9, 0), "fp16"), ((12, 0), "fp16")],
)
def test_automatic_precision_follows_the_card(monkeypatch, capability, expected):
    pretend_gpu(monkeypatch, capability)
    assert resolve({}).precision == resolve({"precision": "auto"}).precision == expected
    assert resolve({"precision": "fp32"}).precision == "fp32"
    for chosen in ("tf32", "bf16"):
        if capability >= (8, 0):
            assert resolve({"precision": chosen}).precision == chosen
        else:
            with pytest.raises(
                UsageError, match=f"--precision {chosen} needs a GPU of compute capability 8.0 or"
            ):
                resolve({"precision": chosen})
    assert resolve({"device": "cpu", "precision": "bf16"}).precision == "bf16"
    assert (
        resolve({"device": "cpu"}).precision == resolve({"device": "emulator"}).precision == "fp32"
    )
    assert precision_on("auto", SimpleNamespace(name="cuda", capability=capability)) == expected
    assert precision_on("auto", SimpleNamespace(name="emulator", capability=capability)) == "fp32"
    assert precision_on("auto", None) == "fp32" and precision_on("fp16", None) == "fp16"


def test_a_resumed_run_keeps_its_precision(monkeypatch, tmp_path):
    pretend_gpu(monkeypatch, (9, 0))
    half, single = resolve({}), resolve({"precision": "fp32"})
    assert half.to_json()["precision"] == "fp16"
    for given in ({}, {"precision": "auto"}):
        assert (
            resolve_resumed(half, given).precision == "fp16"
            and resolve_resumed(single, given).precision == "fp32"
        )
    assert resolve_resumed(half, {"precision": "fp32"}).precision == "fp32"
    with pytest.raises(
        UsageError, match="--precision fp16 needs a GPU; use --precision fp32 on the CPU"
    ):
        resolve_resumed(half, {"device": "cpu"})
    old = {
        name: value
        for name, value in half.to_json().items()
        if name not in ("precision", "eager", "recompute")
    }
    assert TrainOptions.from_json(old).precision == "fp32"  # of a version that had no choice


def test_what_is_recomputed_was_yes_or_no_before():
    """In options.json, on the command line and in Python."""
    for given, meant in ((True, "blocks"), ("yes", "blocks"), (False, "no"), ("mlp", "mlp")):
        options = resolve_cpu(model="dit", recompute=given)
        assert options.recompute == meant
        assert TrainOptions.from_json({**options.to_json(), "recompute": given}).recompute == meant
        assert resolve_resumed(resolve_cpu(model="dit"), {"recompute": given}).recompute == meant
    assert resolve_cpu(recompute="attention").recompute == "attention"
    refuse(
        "--recompute mlp names no part of the blocks of a unet: use no or blocks or attention",
        recompute="mlp",
    )
    refuse(
        "--recompute half does not exist; use no or blocks or attention or mlp", recompute="half"
    )


def test_the_parts_that_a_model_may_recompute_are_known_before_it_is_loaded():
    for kind in KINDS.values():
        assert kind.parts == tuple(kind.model_class.part_kinds)


def test_what_belongs_to_another_setting_needs_it():
    assert resolve_cpu(optimizer="muon", muon_momentum=0.9).muon_momentum == 0.9
    assert resolve_cpu(ema_std=(0.1,), ema_snapshots=4).ema_snapshots == 4
    assert resolve_cpu(muon_momentum=0.9).optimizer == "muon"  # the preset's
    refuse("--muon-momentum 0.9 needs --optimizer muon", muon_momentum=0.9, optimizer="adamw")
    refuse("--ema-snapshots 4 needs --ema-std", ema_snapshots=4)
    refuse("--sla-topk 0.5 needs --attention sla", model="dit", sla_topk=0.5)
    refuse("--sla-linear all needs --attention sla", model="dit", sla_linear="all")
    for given, text in (
        ({"loss_scale": 100.0}, "--loss-scale 100 is of --precision fp16 and fp8"),
        ({"loss_scale_rule": "log2"}, "--loss-scale-rule log2 is of --precision fp16 and fp8"),
        ({"fp8_promotion": False}, "--no-fp8-promotion is of --precision fp8"),
    ):
        refuse(f"{text}, and this run computes in fp32: leave it out", **given)


def test_data_without_labels_have_no_classes(tmp_path):
    """…unless they are wanted, which is refused where the data are opened."""
    path = str(tmp_path / "plain.h5")
    with h5py.File(path, "w") as file:
        file["images"] = np.zeros((4, 32, 32, 3), np.uint8)
    given = {"model": "dit", "device": "cpu", "data": path}
    options = resolve(given)
    assert not options.class_cond and options.cfg_scale is None
    assert resolve({**given, "class_cond": True}).class_cond
    with pytest.raises(UsageError, match="--cfg-scale 2"):
        resolve({**given, "cfg_scale": 2})
    with h5py.File(path, "a") as file:
        file["labels"] = np.zeros(4, np.int32)
    assert resolve(given).class_cond
