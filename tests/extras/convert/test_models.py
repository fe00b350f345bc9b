"""Models as files: loading, converting in both directions, and what is said where it cannot be
done."""

import zipfile

import h5py
import numpy as np
import pytest

from numdiff.diffusion import Diffusion, alpha_bars
from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.convert.files import write_state_dict
from numdiff.extras.convert.guided import guided_diffusion_flags
from numdiff.extras.convert.layout import to_numdiff_layout, to_torch_layout
from numdiff.extras.convert.models import convert
from numdiff.extras.convert.unet import unet_shapes
from numdiff.nn import DiT, UNet
from numdiff.training.checkpoint import checkpoint_name, load_checkpoint, save_checkpoint
from numdiff.training.model_files import load, read_model_file, write_model_file
from tests.conftest import relative_error
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


def stored_state(name):
    """(reference values, state dict in PyTorch's layout) of a model of the twin."""
    reference = stored.load(f"model_{name}")
    return reference, stored.state_dict(reference["info"]["shapes"], 1)


def write_npz(path, state_dict):
    with open(path, "wb") as file:
        write_state_dict(file, state_dict, "npz")
    return path


@pytest.mark.parametrize("name", list(HEADS))
def test_converted_model_gives_the_twins_output(tmp_path, name):
    """npz → h5 → model → the values that PyTorch gave; h5 → safetensors → h5 keeps weights and
    options."""
    reference, state = stored_state(name)
    size = reference["info"]["options"]["image_size"]
    source = write_npz("weights.npz", state)
    result = convert(
        source,
        "model.h5",
        image_size=size,
        diffusion={"schedule": "cosine"},
        **HEADS[name],
    )
    assert result.parameters == sum(a.size for a in state.values())
    model = load("model.h5", "cpu")
    assert model.diffusion == {"steps": 1000, "schedule": "cosine", "prediction": "eps"}
    output = model.predict(reference["x"], reference["t"], reference.get("y"))
    assert relative_error(output, reference["output"]) < 1e-4
    convert("model.h5", "out.safetensors")
    again = convert("out.safetensors", "again.h5")
    assert again.options == result.options == model.options
    for key, array in load("again.h5", "cpu").arrays().items():
        assert np.array_equal(array, to_numdiff_layout({key: state[key]})[key])
    convert("again.h5", "out.npz")
    with np.load("out.npz") as exported:
        assert exported.files == list(state) and all(
            np.array_equal(exported[k], state[k]) for k in state
        )


def test_index_is_that_of_the_model(tmp_path):
    """A model file's flat buffer has exactly the model's layout."""
    _, state = stored_state("plain")
    convert(write_npz("w.npz", state), "m.h5", image_size=8, num_head_channels=32)
    buffers, meta = load_checkpoint("m.h5")
    model = load("m.h5", "cpu")
    assert meta["index"] == model.parameters.index
    assert np.array_equal(buffers["parameters"], model.parameters.data)


PICTURES = {"sampler": "heun", "steps": 7}


@pytest.fixture
def run(tmp_path):
    """A run folder with two checkpoints, as training leaves them; the parameters are ones, the EMA
    twos."""
    model = UNet(
        image_size=8,
        model_channels=32,
        channel_mult=(1,),
        num_res_blocks=1,
        attention_resolutions=(),
        device="cpu",
    )
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
def test_checkpoints_and_run_folders(tmp_path, run, weights, value):
    model = load(run, "cpu", weights)
    assert model.meta["step"] == 20 and model.diffusion["prediction"] == "v"
    assert all((a == value).all() for a in model.arrays().values())
    result = convert(run / checkpoint_name(10), "m.h5", weights)
    assert result.step == 10
    options, arrays, meta = read_model_file("m.h5")
    assert options == model.options and meta["diffusion"]["steps"] == 50 and meta["step"] == 10
    assert meta["classes"] == ["cat"] and meta["pictures"] == PICTURES
    assert all((a == value).all() for a in arrays.values())


def test_convert_replaces_nothing_that_is_kept(tmp_path, run):
    newest, other, folder = run / checkpoint_name(20), tmp_path / "other.h5", tmp_path / "dit"
    other.write_bytes(newest.read_bytes())
    _, state = stored_state("plain")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["images"] = np.zeros((2, 8, 8, 3), np.uint8)
    folder.mkdir()
    write_npz(folder / "diffusion_pytorch_model.safetensors", state)
    (folder / "config.json").write_text("{}")
    before = {path: path.read_bytes() for path in (newest, other, *folder.iterdir())}
    for source, target, message in (
        (run, newest, "it is a checkpoint of a run; give another name"),
        (newest, newest, "which is read"),
        (run, other, "it is a checkpoint of a run"),
        (run, tmp_path / "data.h5", "it is a dataset"),
        (run, tmp_path / "no" / "m.h5", "the folder does not exist"),
        (folder, folder / "diffusion_pytorch_model.safetensors", "which is read"),
        (folder / "diffusion_pytorch_model.safetensors", folder, "which is read"),
    ):
        with pytest.raises(NumdiffError, match=message):
            convert(source, target)
    (run / "options.json").write_text("{}")
    with pytest.raises(NumdiffError, match="a file of this name is the run's own"):
        convert(other, run / checkpoint_name(30))  # which --resume would take for the run's newest
    assert before == {path: path.read_bytes() for path in before}
    convert(run, run / "model.h5")
    convert(run, run / "model.h5")  # may be made again


def test_averaged_weights_that_are_asked_for_must_be_there(tmp_path, run):
    buffers, meta = load_checkpoint(run / checkpoint_name(20))
    del buffers["ema"]
    save_checkpoint("raw.h5", buffers, meta)
    model = load("raw.h5", "cpu")
    assert model.meta["step"] == 20 and all((a == 1).all() for a in model.arrays().values())
    for ask in (
        lambda: load("raw.h5", "cpu", "ema"),
        lambda: convert("raw.h5", "m.h5", "ema"),
    ):
        with pytest.raises(
            UsageError,
            match="raw.h5 holds no averaged weights.* give weights raw, or leave that out",
        ):
            ask()
    convert("raw.h5", "m.h5")
    load("m.h5", "cpu", "ema")  # of one set, which may be of averages


def test_what_is_missing_is_asked_for(tmp_path):
    _, state = stored_state("plain")
    source, out = write_npz("w.npz", state), tmp_path / "m.h5"
    for options, message in (
        ({}, "--image-size"),
        ({"image_size": 8}, "--num-head-channels"),
        ({"image_size": 8, "num_heads": 2, "num_head_channels": 32}, "exclude each other"),
        ({"image_size": 8, "num_head_channels": 48}, "heads of 48"),
        ({"image_size": 7, "num_head_channels": 32}, "cannot be halved"),
        ({"image_size": 0, "num_head_channels": 32}, "--image-size 0 is out of range"),
    ):
        with pytest.raises(UsageError, match=message):
            convert(source, out, **options)
    with pytest.raises(UsageError, match="must end in .h5"):
        convert(source, "m.onnx", image_size=8, num_head_channels=32)
    assert not out.exists()


def test_weights_that_cannot_be_used(tmp_path):
    _, state = stored_state("plain")
    out = tmp_path / "m.h5"

    def refused(message, **changed):
        changed = {k.replace("__", "."): v for k, v in changed.items()}
        kept = {k: v for k, v in {**state, **changed}.items() if v is not None}
        with pytest.raises(NumdiffError, match=message):
            convert(write_npz("w.npz", kept), out, image_size=8, num_head_channels=32)
        assert not out.exists()

    refused("missing 1 .out.0.bias", out__0__bias=None)
    refused("unexpected 1 .more", more=np.ones(3))
    refused("missing 1 .out.2.weight.", out__2__weight=None)
    refused(r"out.0.bias has the shape \(3,\) in the file and \(64,\)", out__0__bias=np.ones(3))
    refused("not finite, first in out.0.bias", out__0__bias=np.full(64, np.nan, np.float32))


def test_numdiff_files_that_cannot_be_used(tmp_path, run):
    def refused(message, path, kind=NumdiffError):
        with pytest.raises(kind, match=message):
            load(path, "cpu")

    refused("does not exist", tmp_path / "nothing.h5")
    refused(
        "is a folder that holds runs, and not itself a run: give one of them, such as .*00000-unet",
        tmp_path,
    )
    (tmp_path / "empty").mkdir()
    refused("holds no checkpoint", tmp_path / "empty")
    newest = run / checkpoint_name(20)
    newest.write_bytes(newest.read_bytes()[:5000])
    refused("truncated or damaged", newest)
    options, arrays, meta = read_model_file(run / checkpoint_name(10))
    write_model_file("m.h5", {**options, "colour": 3}, arrays)
    refused("options that this numdiff does not know", tmp_path / "m.h5")
    write_model_file("m.h5", {**options, "num_res_blocks": 2}, arrays)
    refused("these weights belong to another model", tmp_path / "m.h5")
    save_checkpoint("m.h5", {"parameters": np.ones(3)}, {**meta})
    refused("holds no whole model", tmp_path / "m.h5")
    save_checkpoint("m.h5", {"parameters": np.ones(3)}, {**meta, "model": "gan"})
    refused("of the kind 'gan'", tmp_path / "m.h5")
    with pytest.raises(UsageError, match="has options of its own: leave out --image-size"):
        convert(run / checkpoint_name(10), "x.npz", image_size=8)


# Without `numdiff convert` ------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["w.npz", "w.safetensors", "folder"])
def test_what_convert_writes_is_loaded_as_it_is(tmp_path, target):
    model = DiT(
        image_size=8,
        patch_size=4,
        hidden_size=24,
        depth=1,
        num_heads=2,
        num_classes=2,
        device="cpu",
    )
    model.parameters.load_flat(np.random.default_rng(0).standard_normal(model.parameters.total))
    write_model_file(
        "m.h5",
        model.options,
        model.arrays(),
        {"steps": 50, "prediction": "v"},
        7,
        "dit",
        classes=["cat", "dog"],
        pictures=PICTURES,
    )
    convert("m.h5", target)
    before, there = load("m.h5", "cpu"), load(target, "cpu")
    assert (before.options, before.diffusion) == (there.options, there.diffusion)
    assert all(
        np.array_equal(array, there.arrays()[name]) for name, array in before.arrays().items()
    )
    assert all(
        before.meta[name] == there.meta[name]
        for name in ("model", "step", "classes", "pictures", "diffusion")
    )
    for given, words in (
        ({"ema_std": 0.1}, "ema_std 0.1 is of a run that kept averages"),
        ({"weights": "best"}, "unknown weights 'best'"),
    ):
        with pytest.raises(UsageError, match=words):
            load(target, "cpu", **given)


def test_what_a_file_does_not_tell_is_taken_as_usual_and_said(tmp_path, caplog):
    with open("w.npz", "wb") as file:
        write_state_dict(
            file, stored_state("plain")[1], "npz", {"image_size": 8, "num_head_channels": 32}
        )
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
        ({**HEADS["plain"], "image_size": 8, "betas": 4000}, "--rescale-timesteps where"),
    ],
)
def test_options_of_convert_alone_are_named(tmp_path, stored, options):
    state = dict(stored_state("plain")[1])
    if steps := stored.pop("betas", None):
        state["betas"] = np.linspace(0.1 / steps, 20 / steps, steps)
    with open("w.npz", "wb") as file:
        write_state_dict(file, state, "npz", stored)
    with pytest.raises(
        UsageError, match=f"w.npz does not say .*: run `numdiff convert` with {options}"
    ):
        load("w.npz", "cpu")


def test_safetensors_options_are_checked(tmp_path):
    """The options in a foreign file are words from outside: those of another type are not believed."""
    _, state = stored_state("plain")
    with open("w.safetensors", "wb") as file:
        write_state_dict(
            file,
            state,
            "safetensors",
            {
                "image_size": "8",
                "num_heads": -3,
                "model_channels": 10**9,
                "num_head_channels": [1],
                "max_period": None,
            },
        )
    with pytest.raises(UsageError, match="--image-size"):
        convert("w.safetensors", "m.h5")
    result = convert("w.safetensors", "m.h5", image_size=8, num_head_channels=32)
    assert result.options["model_channels"] == 64


# The diffusion ------------------------------------------------------------------------------------

PLAIN = {"image_size": 8, "num_head_channels": 32}


def test_rescaled_timesteps_are_an_option_kept_and_reported(tmp_path):
    """A UNet of other than 1000 steps may have been trained either way, and nothing in its weights
    says which."""
    _, state = stored_state("plain")
    source, model = write_npz("w.npz", state), tmp_path / "m.h5"
    for steps in (4000, 100):
        with pytest.raises(
            UsageError,
            match="--rescale-timesteps where it was trained .* else --no-rescale-timesteps",
        ):
            convert(source, model, diffusion={"steps": steps}, **PLAIN)
    result = convert(source, model, diffusion={"steps": 4000, "rescale_timesteps": False}, **PLAIN)
    assert result.diffusion == {"steps": 4000, "schedule": "linear", "prediction": "eps"}
    given = {"steps": 4000, "schedule": "cosine", "prediction": "v", "rescale_timesteps": True}
    result = convert(source, model, diffusion=given, **PLAIN)
    wanted = {"steps": 4000, "schedule": "cosine", "prediction": "v", "timestep_scale": 0.25}
    assert result.diffusion == load(model, "cpu").diffusion == wanted
    # an export keeps it, and says it in the other program's words
    result = convert(model, "w.safetensors")
    assert "--diffusion_steps 4000 --noise_schedule cosine" in result.notes[0][1]
    assert result.notes[0][1].endswith("--rescale_timesteps True")
    assert ("no flag there", "the prediction v") in result.notes
    assert convert("w.safetensors", "n.h5").diffusion == wanted
    again = convert("w.safetensors", "n.h5", diffusion={"rescale_timesteps": False})
    assert "timestep_scale" not in again.diffusion
    with pytest.raises(UsageError, match="leave out --rescale-timesteps"):
        convert(model, "n.h5", diffusion={"rescale_timesteps": False})


def test_an_npz_stores_its_model_and_diffusion_where_np_load_does_not_look(tmp_path):
    """In the zip's comment; what another program wrote there, or what is damaged, is passed over."""
    _, state = stored_state("plain")
    given = {"steps": 4000, "schedule": "cosine", "prediction": "v", "rescale_timesteps": True}
    convert(write_npz("w.npz", state), "m.h5", diffusion=given, **PLAIN)
    first = convert("m.h5", "e.npz")
    again = convert("e.npz", "n.h5")
    assert (again.options, again.diffusion) == (first.options, first.diffusion) and first.diffusion[
        "steps"
    ] == 4000
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


def test_the_diffusion_in_an_export_is_checked(tmp_path):
    """Words from outside: what is no diffusion is refused, not left out, as that would be another
    model."""
    _, state = stored_state("plain")
    for wrong in (
        {"steps": "9"},
        {"steps": 10**9},
        {"backend": "x"},
        {"timestep_scale": 0},
        {"schedule": "wavy"},
        {"prediction": ["eps"]},
        {"colour": 3},
    ):
        with open("w.safetensors", "wb") as file:
            write_state_dict(file, state, "safetensors", PLAIN, wrong)
        with pytest.raises(
            NumdiffError, match=next(iter(wrong)) if "schedule" not in wrong else "unknown schedule"
        ):
            convert("w.safetensors", "m.h5")
    assert not (tmp_path / "m.h5").exists()


def test_tables_in_a_file_say_the_schedule(tmp_path):
    """Buffers of a diffusion that is a module: betas or ᾱ decide steps and schedule, and other ones
    are refused."""
    _, state = stored_state("plain")
    bars = alpha_bars("cosine", 1000)
    betas = 1 - bars / np.append(1.0, bars[:-1])
    for tables in (
        {"betas": betas.astype(np.float32)},
        {"diffusion.alphas_cumprod": bars.astype(np.float32)},
    ):
        wrapped = {
            **{f"model.{name}": array for name, array in state.items()},
            **tables,
            "sqrt_alphas_cumprod": betas,
        }
        result = convert(write_npz("w.npz", wrapped), "m.h5", **PLAIN)
        assert result.diffusion["schedule"] == "cosine"
    with pytest.raises(UsageError, match="--schedule linear: the betas of .* say cosine"):
        convert("w.npz", "m.h5", diffusion={"schedule": "linear"}, **PLAIN)
    for wrong, message in (
        (betas**2, "neither those of linear nor those of cosine"),
        (betas[None], "has the shape"),
    ):
        write_npz("w.npz", {**state, "betas": wrong})
        with pytest.raises(NumdiffError, match=message):
            convert("w.npz", "m.h5", **PLAIN)
    write_npz("w.npz", {**state, "betas": np.full(4000, 1e-3)[:1]})
    with pytest.raises(NumdiffError, match="neither"):
        convert("w.npz", "m.h5", **PLAIN)


# guided-diffusion ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(HEADS))
def test_pooling_as_convolutions_gives_the_same(tmp_path, name):
    """What guided-diffusion's scripts cannot load (conv_resample=False) is reported, and converted
    to what they can load."""
    reference, state = stored_state(name)
    options = reference["info"]["options"]
    source = write_npz("w.npz", state)
    convert(source, "m.h5", image_size=options["image_size"], **HEADS[name])
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
    model = UNet(
        image_size=64,
        channel_mult=(1, 2),
        attention_resolutions=(32, 7),
        num_classes=9,
        device="ptx",
    )
    options = model.options
    flags, missing = guided_diffusion_flags(
        options, {"steps": 1000, "schedule": "cosine", "prediction": "x_0"}
    )
    words = flags.split()
    flags = dict(zip(words[::2], words[1::2], strict=True))
    assert (flags["--channel_mult"], flags["--attention_resolutions"], flags["--num_channels"]) == (
        "1,2",
        "32",
        "64",
    )
    assert (flags["--class_cond"], flags["--predict_xstart"], flags["--rescale_timesteps"]) == (
        "True",
        "True",
        "False",
    )
    assert (
        len(missing) == 2
        and "conv_resample=False" in missing[0]
        and "9 classes: set NUM_CLASSES" in missing[1]
    )
    odd = {
        **options,
        "channel_mult": [0.5, 1.5],
        "max_period": 1000.0,
        "in_channels": 4,
        "groups": 16,
        "attention_resolutions": [],
        "conv_resample": True,
    }
    flags, missing = guided_diffusion_flags(
        odd, {"steps": 50, "schedule": "linear", "prediction": "v", "timestep_scale": 3.0}
    )
    assert (
        "--attention_resolutions 128" in flags
        and "--rescale_timesteps False" in flags
        and len(missing) == 7
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"resblock_updown": True, "num_classes": 3, "class_dropout": 0.1},
        {"conv_resample": True, "learn_sigma": True, "num_res_blocks": 2},
    ],
    ids=["pooled", "updown", "convolutions"],
)
def test_convnext_blocks_there_and_back(tmp_path, rng, options):
    """…in each format, under their own names; the options follow from the shapes."""
    model = UNet(
        **{
            "image_size": 8,
            "model_channels": 32,
            "channel_mult": (1, 2),
            "num_res_blocks": 1,
            "attention_resolutions": (4,),
            "block": "convnext",
            "device": "cpu",
            "seed": 1,
            **options,
        }
    )
    shapes = {name: array.shape for name, array in to_torch_layout(model.arrays()).items()}
    assert list(unet_shapes(model.options).items()) == list(shapes.items())
    write_model_file("m.h5", model.options, model.arrays(), {}, 0, "unet")
    x, y = rng.standard_normal((1, 8, 8, 3)), None if model.num_classes is None else [1]
    want = model.predict(x, 5, y)
    for target in ("w.npz", "w.safetensors", "again.h5"):
        result = convert("m.h5", target)
        assert [heading for heading, _ in result.notes] == ["elsewhere"] * (target != "again.h5")
        again = convert(target, f"{target}.h5")
        assert {name: again.options[name] for name in model.options} == model.options
        np.testing.assert_array_equal(load(f"{target}.h5", device="cpu").predict(x, 5, y), want)


def test_convnext_blocks_with_convolutions(tmp_path, rng):
    model = UNet(
        image_size=8,
        model_channels=32,
        channel_mult=(1, 2),
        num_res_blocks=1,
        attention_resolutions=(4,),
        block="convnext",
        device="cpu",
        seed=1,
    )
    write_model_file("m.h5", model.options, model.arrays(), {}, 0, "unet")
    assert convert("m.h5", "c.h5", conv_resample=True).options["conv_resample"]
    x = rng.standard_normal((1, 8, 8, 3))
    assert relative_error(load("c.h5", device="cpu").predict(x, 5), model.predict(x, 5)) < 1e-5
