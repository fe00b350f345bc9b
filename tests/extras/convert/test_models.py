"""Models as files: loading, converting in both directions, and what is said where it cannot be
done."""

import zipfile

import h5py
import numpy as np
import pytest

from numdiff.diffusion import Diffusion, alpha_bars
from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.convert.guided import guided_diffusion_flags
from numdiff.extras.convert.layout import to_numdiff_layout, to_torch_layout
from numdiff.extras.convert.models import convert
from numdiff.extras.convert.unet import unet_shapes
from numdiff.nn import UNet
from numdiff.training.checkpoint import checkpoint_name, load_checkpoint, save_checkpoint
from numdiff.training.model_files import load, read_model_file, write_model_file
from tests.conftest import relative_error
from tests.extras.convert.weights import (
    refused,
    same,
    same_models,
    write_npz,
    write_weights,
)
from tests.models import small_dit, small_unet, with_random_weights, write
from tests.reference import stored

HEADS = {
    "plain": {"num_head_channels": 32},
    "classes_updown": {"num_head_channels": 16},
    "convolutions": {
        "num_heads": 2,
        "num_heads_upsample": 4,
        "use_new_attention_order": True,
        "max_period": 1000.0,
    },
}


PLAIN = {"image_size": 8, "num_head_channels": 32}  # what the weights of "plain" do not say


def stored_state(name):
    """(reference values, state dict in PyTorch's layout) of a model of the twin."""
    reference = stored.load(f"model_{name}")
    return reference, stored.state_dict(reference["info"]["shapes"], 1)


@pytest.fixture
def plain():
    """The weights of "plain", which are in w.npz."""
    _, state = stored_state("plain")
    write_npz("w.npz", state)
    return state


@pytest.mark.parametrize("name", list(HEADS))
def test_converted_model_gives_the_twins_output(name):
    """npz → h5 → model → the values that PyTorch gave; h5 → safetensors → h5 keeps weights and
    options."""
    reference, state = stored_state(name)
    size = reference["info"]["options"]["image_size"]
    write_npz("weights.npz", state)
    given = {"image_size": size, "diffusion": {"schedule": "cosine"}, **HEADS[name]}
    result = convert("weights.npz", "model.h5", **given)
    assert result.parameters == sum(a.size for a in state.values())
    model = load("model.h5", "cpu")
    assert model.diffusion == {"steps": 1000, "schedule": "cosine", "prediction": "eps"}
    output = model.predict(reference["x"], reference["t"], reference.get("y"))
    assert relative_error(output, reference["output"]) < 1e-4
    convert("model.h5", "out.safetensors")
    again = convert("out.safetensors", "again.h5")
    assert again.options == result.options == model.options
    assert same(load("again.h5", "cpu").arrays(), to_numdiff_layout(state))
    convert("again.h5", "out.npz")
    assert same(np.load("out.npz"), state)


def test_index_is_that_of_the_model(plain):
    """A model file's flat buffer has exactly the model's layout."""
    convert("w.npz", "m.h5", **PLAIN)
    buffers, meta = load_checkpoint("m.h5")
    model = load("m.h5", "cpu")
    assert meta["index"] == model.parameters.index
    assert np.array_equal(buffers["parameters"], model.parameters.data)


PICTURES = {"sampler": "heun", "steps": 7}


@pytest.fixture
def run(tmp_path):
    """A run folder with two checkpoints, as training leaves them; the parameters are ones, the EMA
    twos."""
    model = small_unet()
    folder = tmp_path / "00000-unet"
    folder.mkdir()
    for step in (10, 20):
        ones = np.ones(model.parameters.total, np.float32)
        save_checkpoint(
            folder / checkpoint_name(step),
            {"parameters": ones, "ema": 2 * ones, "m": ones},
            {
                "model": "unet",
                "model_options": model.options,
                "index": model.parameters.index,
                "step": step,
                "classes": ["cat"],
                "diffusion": {"steps": 50, "schedule": "linear", "prediction": "v"},
                "pictures": PICTURES,
            },
        )
    return folder


@pytest.mark.parametrize("weights, value", [("ema", 2), ("raw", 1)])
def test_checkpoints_and_run_folders(run, weights, value):
    model = load(run, "cpu", weights)
    assert model.meta["step"] == 20 and model.diffusion["prediction"] == "v"
    assert all((a == value).all() for a in model.arrays().values())
    result = convert(run / checkpoint_name(10), "m.h5", weights)
    assert result.step == 10
    options, arrays, meta = read_model_file("m.h5")
    assert options == model.options and meta["diffusion"]["steps"] == 50 and meta["step"] == 10
    assert meta["classes"] == ["cat"] and meta["pictures"] == PICTURES
    assert all((a == value).all() for a in arrays.values())


def test_convert_replaces_nothing_that_is_kept(tmp_path, run, plain):
    newest, other, folder = run / checkpoint_name(20), tmp_path / "other.h5", tmp_path / "dit"
    other.write_bytes(newest.read_bytes())
    with h5py.File("data.h5", "w") as file:
        file["images"] = np.zeros((2, 8, 8, 3), np.uint8)
    folder.mkdir()
    weights = write_npz(folder / "diffusion_pytorch_model.safetensors", plain)
    (folder / "config.json").write_text("{}")
    before = {path: path.read_bytes() for path in (newest, other, *folder.iterdir())}
    for source, target, message in (
        (run, newest, "it is a checkpoint of a run; give another name"),
        (newest, newest, "which is read"),
        (run, other, "it is a checkpoint of a run"),
        (run, "data.h5", "it is a dataset"),
        (run, "no/m.h5", "the folder does not exist"),
        (folder, weights, "which is read"),
        (weights, folder, "which is read"),
    ):
        refused(message, source, target, NumdiffError)
    (run / "options.json").write_text("{}")
    own = run / checkpoint_name(30)  # which --resume would take for the run's newest
    refused("a file of this name is the run's own", other, own, NumdiffError)
    assert before == {path: path.read_bytes() for path in before}
    convert(run, run / "model.h5")
    convert(run, run / "model.h5")  # may be made again


def test_averaged_weights_that_are_asked_for_must_be_there(run):
    buffers, meta = load_checkpoint(run / checkpoint_name(20))
    del buffers["ema"]
    save_checkpoint("raw.h5", buffers, meta)
    model = load("raw.h5", "cpu")
    assert model.meta["step"] == 20 and all((a == 1).all() for a in model.arrays().values())
    message = "raw.h5 holds no averaged weights.* give weights raw, or leave that out"
    refused(message, "raw.h5", weights="ema")
    with pytest.raises(UsageError, match=message):
        load("raw.h5", "cpu", "ema")
    convert("raw.h5", "m.h5")
    load("m.h5", "cpu", "ema")  # of one set, which may be of averages


def test_what_is_missing_is_asked_for(plain):
    for options, message in (
        ({}, "--image-size"),
        ({"image_size": 8}, "--num-head-channels"),
        ({**PLAIN, "num_heads": 2}, "exclude each other"),
        ({**PLAIN, "num_head_channels": 48}, "heads of 48"),
        ({**PLAIN, "image_size": 7}, "cannot be halved"),
        ({**PLAIN, "image_size": 0}, "--image-size 0 is out of range"),
    ):
        refused(message, "w.npz", **options)
    refused("must end in .h5", "w.npz", "m.onnx", **PLAIN)


@pytest.mark.parametrize(
    "name, array, message",
    [
        ("out.0.bias", None, "missing 1 .out.0.bias"),
        ("more", np.ones(3), "unexpected 1 .more"),
        ("out.2.weight", None, "missing 1 .out.2.weight."),
        ("out.0.bias", np.ones(3), r"out.0.bias has the shape \(3,\) in the file and \(64,\)"),
        ("out.0.bias", np.full(64, np.nan), "not finite, first in out.0.bias"),
    ],
)
def test_weights_that_cannot_be_used(plain, name, array, message):
    changed = {name: kept for name, kept in {**plain, name: array}.items() if kept is not None}
    refused(message, write_npz("w.npz", changed), error=NumdiffError, **PLAIN)


def test_numdiff_files_that_cannot_be_used(tmp_path, run):
    def unusable(message, path="m.h5"):
        with pytest.raises(NumdiffError, match=message):
            load(path, "cpu")

    unusable("does not exist", "nothing.h5")
    unusable(
        "is a folder that holds runs, and not itself a run: give one of them, such as .*00000-unet",
        tmp_path,
    )
    (tmp_path / "empty").mkdir()
    unusable("holds no checkpoint", "empty")
    newest = run / checkpoint_name(20)
    newest.write_bytes(newest.read_bytes()[:5000])
    unusable("truncated or damaged", newest)
    options, arrays, meta = read_model_file(run / checkpoint_name(10))
    for changed, message in (
        ({"colour": 3}, "options that this numdiff does not know"),
        ({"num_res_blocks": 2}, "these weights belong to another model"),
    ):
        write_model_file("m.h5", {**options, **changed}, arrays)
        unusable(message)
    for changed, message in (
        ({}, "holds no whole model"),
        ({"model": "gan"}, "of the kind 'gan'"),
    ):
        save_checkpoint("m.h5", {"parameters": np.ones(3)}, {**meta, **changed})
        unusable(message)
    checkpoint = run / checkpoint_name(10)
    refused("has options of its own: leave out --image-size", checkpoint, "x.npz", image_size=8)


# Without `numdiff convert` ------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["w.npz", "w.safetensors", "folder"])
def test_what_convert_writes_is_loaded_as_it_is(target):
    model = with_random_weights(small_dit(num_classes=2))
    diffusion, more = {"steps": 50, "prediction": "v"}, {"pictures": PICTURES}
    write("m.h5", model, diffusion, step=7, classes=["cat", "dog"], **more)
    convert("m.h5", target)
    assert same_models("m.h5", target)
    before, there = load("m.h5", "cpu").meta, load(target, "cpu").meta
    for name in ("model", "step", "classes", "pictures", "diffusion"):
        assert before[name] == there[name]
    for given, words in (
        ({"ema_std": 0.1}, "ema_std 0.1 is of a run that kept averages"),
        ({"weights": "best"}, "unknown weights 'best'"),
    ):
        with pytest.raises(UsageError, match=words):
            load(target, "cpu", **given)


def test_what_a_file_does_not_tell_is_taken_as_usual_and_said(plain, caplog):
    write_weights("w.npz", plain, "npz", PLAIN)
    with caplog.at_level("WARNING", "numdiff"):
        model = load("w.npz", "cpu")
    assert model.diffusion == Diffusion().options
    (said,) = caplog.messages
    assert said.endswith(
        "w.npz: diffusion: the file does not store it, and its model is taken for one that "
        "predicts eps in 1000 steps of the linear schedule; `numdiff convert` has options for others"
    )


@pytest.mark.parametrize(
    "stored, options",
    [
        ({}, "--image-size, for example"),
        ({"image_size": 8}, r"--num-head-channels \(64 for"),
        ({**PLAIN, "betas": 4000}, "--rescale-timesteps where"),
    ],
)
def test_options_of_convert_alone_are_named(plain, stored, options):
    if steps := stored.pop("betas", None):
        plain["betas"] = np.linspace(0.1 / steps, 20 / steps, steps)
    write_weights("w.npz", plain, "npz", stored)
    message = f"w.npz does not say .*: run `numdiff convert` with {options}"
    with pytest.raises(UsageError, match=message):
        load("w.npz", "cpu")


def test_safetensors_options_are_checked(plain):
    """The options in a foreign file are words from outside: those of another type are not believed."""
    odd = {"image_size": "8", "num_heads": -3, "model_channels": 10**9, "max_period": None}
    write_weights("w.safetensors", plain, "safetensors", {**odd, "num_head_channels": [1]})
    refused("--image-size", "w.safetensors")
    assert convert("w.safetensors", "m.h5", **PLAIN).options["model_channels"] == 64


# The diffusion ------------------------------------------------------------------------------------

RESCALED = {"steps": 4000, "schedule": "cosine", "prediction": "v", "rescale_timesteps": True}


def test_rescaled_timesteps_are_an_option_kept_and_reported(plain):
    """A UNet of other than 1000 steps may have been trained either way, and nothing in its weights
    says which."""
    message = "--rescale-timesteps where it was trained .* else --no-rescale-timesteps"
    for steps in (4000, 100):
        refused(message, "w.npz", diffusion={"steps": steps}, **PLAIN)
    given = {"steps": 4000, "rescale_timesteps": False}
    result = convert("w.npz", "m.h5", diffusion=given, **PLAIN)
    assert result.diffusion == {"steps": 4000, "schedule": "linear", "prediction": "eps"}
    result = convert("w.npz", "m.h5", diffusion=RESCALED, **PLAIN)
    wanted = {"steps": 4000, "schedule": "cosine", "prediction": "v", "timestep_scale": 0.25}
    assert result.diffusion == load("m.h5", "cpu").diffusion == wanted
    # an export keeps it, and says it in the other program's words
    notes = convert("m.h5", "w.safetensors").notes
    assert "--diffusion_steps 4000 --noise_schedule cosine" in notes[0][1]
    assert notes[0][1].endswith("--rescale_timesteps True")
    assert ("no flag there", "the prediction v") in notes
    assert convert("w.safetensors", "n.h5").diffusion == wanted
    plainly = {"rescale_timesteps": False}
    assert "timestep_scale" not in convert("w.safetensors", "n.h5", diffusion=plainly).diffusion
    refused("leave out --rescale-timesteps", "m.h5", "n.h5", diffusion=plainly)


def test_an_npz_stores_its_model_and_diffusion_where_np_load_does_not_look(plain):
    """In the zip's comment; what another program wrote there, or what is damaged, is passed over."""
    convert("w.npz", "m.h5", diffusion=RESCALED, **PLAIN)
    first = convert("m.h5", "e.npz")
    again = convert("e.npz", "n.h5")
    assert (again.options, again.diffusion) == (first.options, first.diffusion)
    assert first.diffusion["steps"] == 4000
    assert set(np.load("e.npz")) == set(np.load("w.npz"))
    for comment in (
        b"made by hand",
        b"[1]",
        b"\xff\x00",
        b'{"numdiff_options": 3, "numdiff_diffusion": [1]}',
        b"9" * 65535,
    ):
        with zipfile.ZipFile("e.npz", "a") as archive:
            archive.comment = comment
        assert convert("e.npz", "n.h5", **PLAIN).diffusion["steps"] == 1000


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"steps": "9"}, "steps"),
        ({"steps": 10**9}, "steps"),
        ({"backend": "x"}, "backend"),
        ({"timestep_scale": 0}, "timestep_scale"),
        ({"schedule": "wavy"}, "unknown schedule"),
        ({"prediction": ["eps"]}, "prediction"),
        ({"colour": 3}, "colour"),
    ],
)
def test_the_diffusion_in_an_export_is_checked(plain, wrong, message):
    """Words from outside: what is no diffusion is refused, not left out, as that would be another
    model."""
    write_weights("w.safetensors", plain, "safetensors", PLAIN, wrong)
    refused(message, "w.safetensors", error=NumdiffError)


def test_tables_in_a_file_say_the_schedule(plain):
    """Buffers of a diffusion that is a module: betas or ᾱ decide steps and schedule, and other ones
    are refused."""
    bars = alpha_bars("cosine", 1000)
    betas = 1 - bars / np.append(1.0, bars[:-1])
    wrapped = {f"model.{name}": array for name, array in plain.items()}
    wrapped["sqrt_alphas_cumprod"] = betas
    for name, table in (("betas", betas), ("diffusion.alphas_cumprod", bars)):
        write_npz("w.npz", {**wrapped, name: table.astype(np.float32)})
        assert convert("w.npz", "m.h5", **PLAIN).diffusion["schedule"] == "cosine"
    linear = {"schedule": "linear"}
    refused("--schedule linear: the betas of .* say cosine", "w.npz", diffusion=linear, **PLAIN)
    for wrong, message in (
        (betas**2, "neither those of linear nor those of cosine"),
        (betas[None], "has the shape"),
        (np.full(1, 1e-3), "neither"),
    ):
        write_npz("w.npz", {**plain, "betas": wrong})
        refused(message, "w.npz", error=NumdiffError, **PLAIN)


# guided-diffusion ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(HEADS))
def test_pooling_as_convolutions_gives_the_same(name):
    """What guided-diffusion's scripts cannot load (conv_resample=False) is reported, and converted
    to what they can load."""
    reference, state = stored_state(name)
    options = reference["info"]["options"]
    write_npz("w.npz", state)
    convert("w.npz", "m.h5", image_size=options["image_size"], **HEADS[name])
    notes = dict(convert("m.h5", "x.npz").notes)
    pooled = not options.get("conv_resample") and not options.get("resblock_updown")
    assert ("--conv-resample" in notes.get("no flag there", "")) == pooled
    result = convert("m.h5", "c.safetensors", conv_resample=True)
    assert not any("conv_resample" in text for _, text in result.notes)
    assert result.options["conv_resample"] or options.get("resblock_updown")
    convert("c.safetensors", "c.h5")
    output = load("c.h5", "cpu").predict(reference["x"], reference["t"], reference.get("y"))
    assert relative_error(output, reference["output"]) < 1e-4


def test_flags_of_guided_diffusion():
    """Every option that its scripts know, in their words; and what they have no word for."""
    sizes = {"image_size": 64, "channel_mult": (1, 2), "attention_resolutions": (32, 7)}
    options = UNet(**sizes, num_classes=9, device="ptx").options
    diffusion = {"steps": 1000, "schedule": "cosine", "prediction": "x_0"}
    flags, missing = guided_diffusion_flags(options, diffusion)
    for flag in (
        *("--channel_mult 1,2", "--attention_resolutions 32", "--num_channels 64"),
        *("--class_cond True", "--predict_xstart True", "--rescale_timesteps False"),
    ):
        assert f"{flag} " in f"{flags} "
    joined, classes = missing
    assert "conv_resample=False" in joined and "9 classes: set NUM_CLASSES" in classes
    odd = {
        **options,
        "channel_mult": [0.5, 1.5],
        "max_period": 1000.0,
        "in_channels": 4,
        "groups": 16,
        "attention_resolutions": [],
        "conv_resample": True,
    }
    diffusion = {"steps": 50, "schedule": "linear", "prediction": "v", "timestep_scale": 3.0}
    flags, missing = guided_diffusion_flags(odd, diffusion)
    assert "--attention_resolutions 128" in flags and "--rescale_timesteps False" in flags
    assert len(missing) == 7


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"resblock_updown": True, "num_classes": 3, "class_dropout": 0.1},
        {"conv_resample": True, "learn_sigma": True, "num_res_blocks": 2},
    ],
    ids=["pooled", "updown", "convolutions"],
)
def test_convnext_blocks_there_and_back(rng, options):
    """…in each format, under their own names; the options follow from the shapes. Convolutions in
    place of pooling give the same."""
    sizes = {"channel_mult": (1, 2), "attention_resolutions": (4,)}
    model = small_unet(**{**sizes, "block": "convnext", "seed": 1, **options})
    shapes = {name: array.shape for name, array in to_torch_layout(model.arrays()).items()}
    assert list(unet_shapes(model.options).items()) == list(shapes.items())
    write("m.h5", model, {})
    x, y = rng.standard_normal((1, 8, 8, 3)), None if model.num_classes is None else [1]
    want = model.predict(x, 5, y)
    for target in ("w.npz", "w.safetensors", "again.h5"):
        result = convert("m.h5", target)
        assert [heading for heading, _ in result.notes] == ["elsewhere"] * (target != "again.h5")
        again = convert(target, f"{target}.h5")
        assert {name: again.options[name] for name in model.options} == model.options
        np.testing.assert_array_equal(load(f"{target}.h5", "cpu").predict(x, 5, y), want)
    if not options:
        result = convert("m.h5", "c.h5", conv_resample=True)
        assert result.options["conv_resample"]
        assert relative_error(load("c.h5", "cpu").predict(x, 5, y), want) < 1e-5
