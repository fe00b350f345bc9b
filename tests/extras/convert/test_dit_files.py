"""DiT models as files: converted, exported, loaded, and what is said where it cannot be done."""

import errno
import itertools
import json
import os

import numpy as np
import pytest

from numdiff import files
from numdiff.diffusion import Diffusion
from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.convert.diffusers import CONFIG, WEIGHTS
from numdiff.extras.convert.dit import fixed_tables, with_positions
from numdiff.extras.convert.files import load_state_dict, read_weights
from numdiff.extras.convert.kinds import dit_weights, weights_of
from numdiff.extras.convert.layout import to_numdiff_layout
from numdiff.extras.convert.models import convert
from numdiff.nn import DiT, dit
from numdiff.nn.dit_shapes import dit_shapes
from numdiff.training.kinds.dit import DIT
from numdiff.training.model_files import load, read_any, write_model_file
from tests.conftest import relative_error
from tests.extras.convert.weights import (
    of_shapes,
    refused,
    same,
    same_models,
    write_npz,
)
from tests.models import small_dit, write
from tests.reference import stored, stored_dit
from tests.test_files import state_of


def stored_state(name):
    reference = stored.load(f"dit_{name}")
    return reference, stored_dit.state_dict(reference["info"]["shapes"], 1)


SMALL = {"patch_size": 2, "hidden_size": 32, "num_heads": 1, "num_classes": 2}
GIVEN = {"image_size": 8, "num_heads": 3}  # what the weights of "latents" do not say


@pytest.fixture
def latents():
    """The weights of "latents", which are in w.npz."""
    _, state = stored_state("latents")
    write_npz("w.npz", state)
    return state


FREE = {
    "latents": {"num_heads": 3},
    "pixels": {"num_heads": 2, "num_classes": 5},
    "plain": {"num_heads": 5},
    "head_72": {"num_heads": 2},
    "rms": {"num_heads": 3},
    "qk_norm": {},
    "rope": {"num_heads": 3, "rope": True},
    "swiglu": {"num_heads": 3},
    "no_shift": {"num_heads": 3},
    "lightning": {"rope": True},
    "sla": {"sla_topk": 0.5, "sla_linear": "rest"},
}


@pytest.mark.parametrize("positions", [True, False], ids=["with_positions", "without"])
@pytest.mark.parametrize("name", list(FREE))
def test_converted_model_gives_the_twins_output(name, positions):
    """npz → h5 → model → the values that PyTorch gave; h5 → safetensors → h5 keeps weights and
    options."""
    reference, state = stored_state(name)
    options = {**dit.PLAIN, **reference["info"]["options"]}
    whole = with_positions(state, options)
    free = FREE[name] if positions else {**FREE[name], "image_size": options["image_size"]}
    write_npz("weights.npz", whole if positions else state)
    result = convert("weights.npz", "model.h5", diffusion={"path": "discrete"}, **free)
    count = sum(array.size for name, array in whole.items() if not name.startswith("feat_rope."))
    assert (result.kind, result.parameters) == ("dit", count)
    if options["num_classes"] is None:
        result.options["class_dropout"] = options["class_dropout"]
    assert result.options == options
    model = load("model.h5", "cpu")
    assert isinstance(model, DiT) and model.diffusion["prediction"] == "eps"
    output = model.predict(reference["x"], reference["t"], reference.get("y"))
    assert relative_error(output, reference["output"]) < 1e-4
    convert("model.h5", "out.safetensors")
    again = convert("out.safetensors", "again.h5")
    assert again.options == result.options == model.options
    convert("again.h5", "out.npz")
    # as the public code's load_state_dict(strict=True) wants it
    assert same(np.load("out.npz"), whole)


@pytest.mark.parametrize(
    "file, weights, seed",
    [("dit_state.pt", "ema", 3), ("dit_checkpoint.pt", "ema", 4), ("dit_checkpoint.pt", "raw", 3)],
)
def test_what_torch_save_wrote(file, weights, seed):
    result = convert(stored.FOLDER / file, "m.h5", weights, num_heads=3)
    assert result.options["image_size"] == 8 and result.options["num_classes"] == 5
    written = load_state_dict(stored.FOLDER / file)
    assert next(iter(written)) == "pos_embed"
    names = [name for name in written if name != "pos_embed"]
    state = {name: stored.weight(name, written[name].shape, seed) for name in names}
    assert same(load("m.h5", "cpu").arrays(), to_numdiff_layout(state))


def test_folder_of_diffusers(tmp_path, latents):
    convert("w.npz", "folder", **GIVEN)
    config = json.loads((tmp_path / "folder" / CONFIG).read_text())
    assert config["_class_name"] == "DiTTransformer2DModel" and config["num_layers"] == 2
    weights = load_state_dict(tmp_path / "folder" / WEIGHTS)
    np.testing.assert_array_equal(
        weights["transformer_blocks.0.norm1.linear.weight"],
        latents["blocks.0.adaLN_modulation.1.weight"],
    )
    assert weights["pos_embed.proj.weight"].shape == (48, 4, 2, 2)
    (tmp_path / "file").write_text("not a folder")
    refused("file", "w.npz", "file", NumdiffError, **GIVEN)
    unet = stored.state_dict(stored.load("model_plain")["info"]["shapes"], 1)
    write_npz("u.npz", unet)
    refused("this is a UNet", "u.npz", "other", image_size=8, num_head_channels=32)


def test_one_file_of_a_diffusers_folder_asks_for_the_folder(tmp_path, latents):
    """For any of its files, under any name, and any reader."""
    folder = tmp_path / "pipeline" / "transformer"
    convert("w.npz", folder, **GIVEN)
    index, pipeline = folder / f"{WEIGHTS}.index.json", folder.parent / "model_index.json"
    for path in (index, pipeline):
        path.write_text("{}")
    (folder / "other.safetensors").write_bytes((folder / WEIGHTS).read_bytes())
    message = rf"is one file of a diffusers folder, .* give the folder, {folder}\."
    for path in (folder / WEIGHTS, folder / CONFIG, pipeline, folder / "other.safetensors", index):
        refused(message, path)
        for read in (load, read_any):
            with pytest.raises(UsageError, match=message):
                read(path)
    for name in ("transformer_blocks.0.ff.net.2.weight", "down_blocks.0.resnets.0.conv1.weight"):
        np.savez("alone.npz", **{"conv_in.weight": np.zeros(1), name: np.zeros(1, np.float32)})
        refused("is a file of diffusers, .* not next to it: give the folder that save", "alone.npz")


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_folder_that_cannot_be_filled_is_not_left(tmp_path, latents, monkeypatch):
    monkeypatch.setattr(dit_weights, "write_state_dict", full)
    (tmp_path / "own").mkdir()
    for name in ("new", "own"):
        refused(
            "cannot write the weights .*: the disk is full", "w.npz", name, NumdiffError, **GIVEN
        )
    assert {path.name for path in tmp_path.iterdir()} == {"w.npz", "own"}


def test_two_models_are_never_mixed_in_a_folder(tmp_path, latents, monkeypatch):
    """What stands in a folder whenever a file in it changes, as a process that is killed there
    leaves it: the model that it held, the new one, which has another number of heads and other
    weights, or nothing that can be used."""
    folder, found, models = tmp_path / "folder", [], {}
    for heads, factor in ((3, 1), (6, 2)):
        write_npz("w.npz", {name: factor * array for name, array in latents.items()})
        convert("w.npz", f"{heads}.h5", image_size=8, num_heads=heads)
        models[heads] = read_any(f"{heads}.h5").arrays

    def look():
        try:
            model = read_any(folder)
        except NumdiffError as error:
            assert str(error) == (
                f"cannot use {folder}: it has no config.json: write it again with `numdiff convert`, "
                "or save it with save_pretrained."
            )
            found.append(None)
        else:
            found.append(model.options["num_heads"])
            assert same(model.arrays, models[found[-1]])

    convert("3.h5", folder)
    with monkeypatch.context() as patch:
        for name in ("replace", "unlink"):
            change = getattr(files.os, name)
            patch.setattr(
                files.os,
                name,
                lambda *given, change=change, **more: (look(), change(*given, **more)),
            )
        convert("6.h5", folder)
    look()
    assert [heads for heads, _ in itertools.groupby(found)] == [3, None, 6]
    assert sorted(os.listdir(folder)) == [CONFIG, WEIGHTS]

    # the folder is written by another process between the two files that are read
    def swapped(path, *given):
        read = read_weights(path, *given)
        convert("3.h5", folder)
        return read

    monkeypatch.setattr(dit_weights, "read_weights", swapped)
    with pytest.raises(NumdiffError, match="folder was written while it was read: try again"):
        read_any(folder)


@pytest.mark.parametrize("file", ["the configuration", "the weights"])
def test_a_folder_whose_new_files_do_not_fit_is_as_it_was(tmp_path, latents, monkeypatch, file):
    calls = itertools.count()

    def full_in_time(_):
        if next(calls) == ["the configuration", "the weights"].index(file):
            full()

    convert("w.npz", "folder", **GIVEN)
    before = state_of(tmp_path / "folder")
    monkeypatch.setattr(files.os, "fsync", full_in_time)
    message = f"cannot write {file} .*: the disk is full"
    refused(message, "w.npz", "folder", NumdiffError, image_size=8, num_heads=6)
    assert state_of(tmp_path / "folder") == before


def test_a_folder_of_diffusers_is_read_back(tmp_path, latents):
    """Bit-equal, with the options and the diffusion that no config.json has; from a pipeline's
    folder, too."""
    diffusion = {"steps": 400, "schedule": "cosine", "rescale_timesteps": True}
    convert("w.npz", "m.h5", diffusion=diffusion, **GIVEN)
    folder = tmp_path / "pipeline" / "transformer"
    _, (_, remedy), scheduler = convert("m.h5", folder).notes
    assert "time_proj.downscale_freq_shift = 0; block.norm1.emb.time_proj.scale = 2.5" in remedy
    assert scheduler == (
        "scheduler",
        "DDIMScheduler(num_train_timesteps=400, beta_schedule='squaredcos_cap_v2', "
        "prediction_type='epsilon', clip_sample=False)",
    )
    (folder.parent / "model_index.json").write_text("{}")
    for source in (folder, folder.parent):
        assert convert(source, "again.h5").diffusion["timestep_scale"] == 2.5
        assert same_models("m.h5", "again.h5")

    config = json.loads((folder / CONFIG).read_text())
    for changed, message in (
        ({"num_layers": 1}, "weights that no DiT has"),
        ({"patch_size": 1}, "says patch_size 1"),
        ({"num_embeds_ada_norm": 9}, "says num_classes 9, and the weights have 5"),
        ({"norm_type": "layer_norm"}, "norm_type"),
    ):
        (folder / CONFIG).write_text(json.dumps({**config, **changed}))
        refused(message, folder, "x.h5", NumdiffError)
    six = {**config, "num_attention_heads": 6, "attention_head_dim": 8}
    (folder / CONFIG).write_text(json.dumps(six))
    assert convert(folder, "x.h5").options["num_heads"] == 6
    index = folder / f"{WEIGHTS}.index.json"
    (folder / WEIGHTS).rename(index)
    refused("in several files", folder, "x.h5", NumdiffError)
    index.unlink()
    refused(f"has no {WEIGHTS} next to its", folder, "x.h5", NumdiffError)


@pytest.mark.parametrize(
    "diffusion, scheduler, scale, elsewhere",
    [
        (
            {"path": "linear", "prediction": "flow", "time_shift": 2.0},
            "FlowMatchEulerDiscreteScheduler(shift=2)",
            "0.001",
            "SiT's code, create_transport(path_type='Linear', prediction='velocity')",
        ),
        (
            {"path": "linear", "prediction": "x_0", "loss": "flow", "timestep_scale": 1000.0},
            "DPMSolverMultistepScheduler(use_flow_sigmas=True, flow_shift=1, prediction_type='sample')",
            None,
            "while this one predicts x_0 and sees t times 1000;",
        ),
        (
            {"path": "linear", "prediction": "v"},
            "none of diffusers' fits a model that predicts v on the path linear",
            "0.001",
            "while this one predicts v;",
        ),
        (
            {"prediction": "flow"},
            "none of diffusers' fits a model that predicts flow on the path discrete",
            None,
            "has another diffusion by default",
        ),
        (
            {"path": "edm", "prediction": "edm"},
            "EDMEulerScheduler(sigma_data=0.5)",
            None,
            "nor SiT's has the path edm",
        ),
        (
            {"prediction": "eps"},
            "DDIMScheduler(num_train_timesteps=1000, beta_start=0.0001, beta_end=0.02, "
            "prediction_type='epsilon', clip_sample=False)",
            None,
            None,
        ),
    ],
)
def test_a_folder_of_any_objective_is_read_back(diffusion, scheduler, scale, elsewhere):
    """diffusers counts time as numdiff does, so both conversions keep time's direction. The sampler
    is stored."""
    diffusion = Diffusion(**diffusion).options
    options = {**SMALL, "image_size": 4, "in_channels": 4, "learn_sigma": False}
    write("m.h5", small_dit(**options, class_dropout=0.1), diffusion)
    (_, _), (_, remedy), found = convert("m.h5", "folder").notes
    assert found == ("scheduler", scheduler)
    assert remedy.endswith(f"time_proj.scale = {scale}" if scale else "downscale_freq_shift = 0")
    assert convert("folder", "again.h5").diffusion == diffusion
    assert same_models("m.h5", "again.h5")
    notes = convert("m.h5", "w.npz").notes
    assert [elsewhere in text for _, text in notes] == [True] if elsewhere else not notes


def test_what_other_programs_get_of_sparse_attention():
    """Its own names in a state dict, with a word about it; diffusers' layout only while its layers
    are zero."""
    model = small_dit(**SMALL, image_size=18, attention="sla", sla_topk=0.7)
    write("zero.h5", model)
    arrays = model.arrays()
    arrays["blocks.0.attn.proj_l.bias"][:] = 1
    write_model_file("learned.h5", model.options, arrays, model="dit")
    result = convert("learned.h5", "out.safetensors")
    assert "the public DiT's code has no sparse-linear attention" in result.notes[0][1]
    again = convert("out.safetensors", "again.h5")
    assert (again.options["attention"], again.options["sla_topk"]) == ("sla", 0.7)
    learned = "whose linear part this model has learned: write .safetensors or .npz"
    refused(learned, "learned.h5", "folder")
    assert "attention to all tokens" in convert("zero.h5", "folder").notes[0][1]
    np.savez("foreign.npz", **load_state_dict("out.safetensors"))
    foreign = convert("foreign.npz", "foreign.h5")
    assert again.options["sla_linear"] == "rest" and foreign.options["sla_linear"] == "all"
    refused("--sla-topk: .* has no tensors of sparse-linear attention", "folder", sla_topk=0.5)


def test_heads_stored_in_a_file_are_used_for_a_published_size():
    """A DiT of a published width and depth may have other heads than the published one: its own
    export says so."""
    options = {
        **dit.MODELS["DiT-S/4"],
        "image_size": 16,
        "in_channels": 3,
        "num_classes": 5,
        "class_dropout": 0.1,
        "learn_sigma": True,
        "mlp_ratio": 4.0,
    }
    shapes = {**of_shapes(dit_shapes(options)), **fixed_tables(options)}
    for settings, heads in (({}, 6), ({"num_heads": 12}, 12), ({"num_heads": "12"}, 6)):
        assert weights_of(DIT).complete("w.safetensors", shapes, settings, {})["num_heads"] == heads


def test_a_state_dict_of_lightningdits_code():
    """Its buffers tell of the rotation and of the heads; what it is called there is said when it is
    written."""
    _, state = stored_state("lightning")
    options = {**dit.PLAIN, **stored_dit.MODELS["lightning"]}
    whole = with_positions(state, options)
    names = list(whole)
    assert names[:3] == ["pos_embed", "x_embedder.proj.weight", "x_embedder.proj.bias"]
    block = names.index("blocks.0.norm1.weight")
    assert names[block - 2 : block] == ["feat_rope.freqs_cos", "feat_rope.freqs_sin"]
    write_npz("w.npz", {f"module.{name}": array for name, array in whole.items()})
    assert convert("w.npz", "m.h5").options == {**options, "class_dropout": 0.1}
    notes = convert("m.h5", "w.safetensors").notes
    assert notes == [
        (
            "elsewhere",
            "in LightningDiT's code: LightningDiT(use_qknorm=True, use_swiglu=True, "
            "use_rope=True, use_rmsnorm=True, wo_shift=True)",
        )
    ]
    refused("--no-rope: .* holds the angles of a rotary embedding", "w.npz", "x.h5", rope=False)
    unknown = "diffusers' DiT has no norm rms, as this model has: write .safetensors"
    refused(unknown, "m.h5", "folder")
    _, state = stored_state("qk_norm")
    convert(write_npz("q.npz", state), "q.h5", image_size=8)
    assert "no such block" in convert("q.h5", "q.safetensors").notes[0][1]


def test_the_mlp_ratio_stored_in_a_file_is_used_if_it_fits():
    """Widths are whole, so several ratios lay out one model: an own export keeps its own."""
    options = {**stored_dit.MODELS["lightning"], "mlp_ratio": 2.6}
    write("m.h5", small_dit(**options))
    convert("m.h5", "w.safetensors")
    convert("w.safetensors", "again.h5")
    assert same_models("m.h5", "again.h5")
    state = load_state_dict("w.safetensors")
    for ratio, found in ((2.6, 2.6), (4.0, 2.5833333333333335), ("2.6", 2.5833333333333335)):
        assert (
            weights_of(DIT).complete("w.npz", state, {"mlp_ratio": ratio}, {})["mlp_ratio"] == found
        )


def test_what_is_missing_or_wrong_is_asked_for(latents):
    for options, message in (
        ({"num_heads": 3}, "has no pos_embed: give --image-size"),
        ({"image_size": 8}, "give --num-heads"),
        ({**GIVEN, "num_heads": 5}, "does not divide into 5 heads"),
        ({**GIVEN, "image_size": 7}, "not divisible by patch_size"),
        ({**GIVEN, "num_classes": 9}, "has 6 rows, so the model has 5 classes and a null"),
        ({**GIVEN, "max_period": 1000.0}, "--max-period means nothing for a DiT"),
        ({**GIVEN, "use_new_attention_order": True}, "--attention-order means nothing"),
    ):
        refused(message, "w.npz", **options)
    _, plain = stored_state("plain")
    classes = {"image_size": 6, "num_heads": 5, "num_classes": 3}
    refused("has no classes; leave it out", write_npz("p.npz", plain), **classes)
    write_npz("w.npz", with_positions(latents, stored_dit.MODELS["latents"]))
    shapes = r"pos_embed has the shape \(1, 16, 48\) in the file and \(1, 64, 48\)"
    refused(shapes, "w.npz", error=NumdiffError, image_size=16, num_heads=3)
    write_npz("w.npz", {**latents, "final_layer.linear.bias": np.full(32, np.inf)})
    refused("not finite, first in final_layer.linear.bias", "w.npz", error=NumdiffError, **GIVEN)


def test_numdiff_files_of_another_kind(latents):
    arrays, options = to_numdiff_layout(latents), stored_dit.MODELS["latents"]
    for changed, model, message in (
        ({"depth": 3}, "dit", "these weights belong to another model"),
        ({}, "unet", "options that this numdiff does not know"),
    ):
        write_model_file("m.h5", {**options, **changed}, arrays, model=model)
        with pytest.raises(NumdiffError, match=message):
            load("m.h5", "cpu")
