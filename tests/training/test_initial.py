"""`--init`: what a run takes from given weights, what is new, and what is refused."""

import json
import os
import pickle
import shutil
import zipfile

import h5py
import numpy as np
import pytest

import numdiff
from numdiff.data.dataset import default_path, open_dataset
from numdiff.diffusion import Diffusion
from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.convert.files import read_weights, write_state_dict
from numdiff.extras.convert.models import convert
from numdiff.nn import UNet
from numdiff.training import Trainer, initial
from numdiff.training.build import describe_without_training, diffusion_options
from numdiff.training.checkpoint import load_checkpoint, newest_checkpoint
from numdiff.training.model_files import ModelFile
from numdiff.training.options import check_given, fill, look_up, resolve
from numdiff.training.run import train
from tests.command import output_of
from tests.command import run as run_command
from tests.conftest import exhaustive, needs, relative_error
from tests.distributed.test_distributed import check_done, job, main_of
from tests.distributed.test_distributed import run as run_job
from tests.forked import forked
from tests.models import small_dit, small_unet, write

pytestmark = pytest.mark.usefixtures("no_curves")

UNET = {
    "model": "unet",
    "image_size": 8,
    "model_channels": 32,
    "channel_mult": (1, 2),
    "attention_resolutions": (4,),
    "class_cond": True,
    "class_dropout": 0.1,
    "classes": ("Food & Drink", "Flags", "Objects"),
}
DIT = {
    "model": "dit",
    "architecture": "DiT-Tiny",
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": 24,
    "depth": 2,
    "heads": 2,
    "classes": ("Food & Drink", "Flags", "Objects"),
    "schedule": "cosine",
    "prediction": "v",
}
RUN = {
    "device": "cpu",
    "batch": 4,
    "sample_every": 0,
    "sample_count": 0,
    "checkpoint_every": 0,
    "log_every": 10,
    "lr_schedule": "constant",
    "warmup_steps": 0,
    "ema_halflife": 8.0,
}


def run(outdir, steps, resume=None, **given):
    lines = []
    options = resolve({**RUN, "outdir": str(outdir), "steps": steps, **given})
    return train(options, resume=resume, echo=lines.append), lines


def options_from(kind, init, /, **given):
    """The options of a run that starts from this file."""
    return resolve({"model": kind, "init": str(init), "device": "cpu", **given})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each kind, three steps long: (folder of a UNet's, folder of a DiT's)."""
    folder = tmp_path_factory.mktemp("runs")
    return {settings["model"]: run(folder, 3, **settings)[0] for settings in (UNET, DIT)}


def weights(folder, which="raw"):
    return numdiff.load(folder, "cpu", which).arrays()


def check_same(got, want):
    """Where nothing was learnt: a learning rate of 1e-30 moves what was 0 a little."""
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-25)


# What is taken ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, table", [("unet", "label_emb.weight"), ("dit", "y_embedder.embedding_table.weight")]
)
def test_classes_keep_their_rows_by_name_and_the_model_follows_the_file(
    tmp_path, runs, kind, table
):
    source = weights(runs[kind], "ema")
    model = numdiff.load(runs[kind], "cpu")
    folder, lines = run(
        tmp_path,
        1,
        model=kind,
        init=str(runs[kind]),
        learning_rate=1e-30,
        classes=("Objects", "Symbols", "Food & Drink"),
    )
    text = "\n".join(lines)
    assert f"init      {len(source) - 1} of {len(source)} tensors from {runs[kind]}" in text
    assert "(averaged weights), after step 3" in text
    assert f"new: {table}, rows of 1 class: Symbols; kept: 3 of 4 rows" in text
    result = numdiff.load(folder, "cpu", "raw")
    assert {k: v for k, v in result.options.items() if k != "num_classes"} == {
        k: v for k, v in model.options.items() if k != "num_classes"
    }
    assert result.diffusion == model.diffusion
    started = result.arrays()
    names = ["Food & Drink", "Objects", "Symbols"]  # in the order of the data's file
    assert result.meta["classes"] == names and model.meta["classes"] == [
        "Food & Drink",
        "Objects",
        "Flags",
    ]
    for name, array in source.items():
        if name != table:
            check_same(started[name], array)
    check_same(started[table][[0, 1, 3]], source[table][[0, 1, 3]])
    assert not np.isclose(started[table][2], source[table]).all(1).any()
    assert result.meta["init"]["lines"] and result.meta["init"]["step"] == 3
    assert json.loads((folder / "options.json").read_text())["init"] == str(
        newest_checkpoint(runs[kind])
    )


def test_options_are_filled_without_the_files(tmp_path, runs):
    """`look_up` has read all that `fill` needs: the files may be gone."""
    given = check_given({"model": "unet", "device": "cpu", "init": str(runs["unet"])})
    sources = look_up(given)
    data = tmp_path / "data.h5"
    with h5py.File(data, "w") as file:
        file["images"] = np.zeros((2, 48, 48, 3), np.uint8)
    of_data = check_given({"model": "unet", "device": "cpu", "data": str(data)})
    stored = look_up(of_data)
    expected = resolve(given), resolve(of_data)
    data.unlink()
    initial.forget()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "stat"):
            patch.setattr(os, name, None)
        patch.setattr("builtins.open", None)
        filled = fill(given, sources), fill(of_data, stored)
    assert filled == expected
    assert filled[1].image_size == 24


def test_the_weights_as_trained_are_there_too(tmp_path, runs):
    _, lines = run(
        tmp_path, 1, model="dit", init=str(runs["dit"]), init_weights="raw", learning_rate=1e-30
    )
    assert "(weights as trained)" in "\n".join(lines)
    trained, averaged = weights(runs["dit"]), weights(runs["dit"], "ema")
    started = weights(next(tmp_path.iterdir()))
    name = "blocks.0.attn.qkv.weight"
    np.testing.assert_array_equal(started[name], trained[name])
    assert not np.array_equal(started[name], averaged[name])


def test_another_image_size(tmp_path, runs):
    for kind, size in (("dit", 16), ("unet", 16)):
        folder, lines = run(tmp_path / kind, 1, model=kind, init=str(runs[kind]), image_size=size)
        said = {
            "dit": "positions are recomputed for 4×4 tokens, which were 2×2",
            "unet": "attention stays at its levels",
        }[kind]
        assert f"for images of 16×16, which were 8×8: {said}" in "\n".join(lines)
        model = numdiff.load(folder, "cpu")
        assert model.image_size == 16
        if kind == "unet":  # attention stays at its level
            assert model.options["attention_resolutions"] == [8]


def test_angles_of_another_image_size(tmp_path):
    start = public_dit(tmp_path, rope=True)()
    options = options_from("dit", start, image_size=16)
    said = "positions and the angles of the rotary embedding are recomputed for 4×4 tokens, which were 2×2"
    assert any(said in line for line in describe_without_training(options))


def test_classes_come_and_go(tmp_path, runs):
    _, lines = run(tmp_path, 1, model="unet", init=str(runs["unet"]), class_cond=False)
    assert "left out: label_emb.weight, as this run has no classes" in "\n".join(lines)
    plain = next(tmp_path.iterdir())
    folder, lines = run(
        tmp_path, 1, model="unet", init=str(plain), class_cond=True, classes=("Flags",)
    )
    assert "rows of 1 class: Flags; kept: 0 of 1 rows" in "\n".join(lines)
    assert numdiff.load(folder, "cpu").num_classes == 1
    options = options_from("unet", plain)
    assert options.class_cond is False and options.class_dropout == 0  # as in the file


@pytest.mark.parametrize(
    "old, new, dropouts, rows, fresh",
    [
        (["a", "b"], ["b", "c"], (0, 0), [(0, 1)], ["c"]),
        (["a", "b"], ["b", "c"], (0.1, 0.1), [(0, 1), (2, 2)], ["c"]),
        (["a", "b"], ["a"], (0, 0.1), [(0, 0)], ["the null class"]),
        (["0", "1"], ["0", "1"], (0.1, 0), [(0, 0), (1, 1)], []),
        (None, ["0", "1"], (0.1, 0.1), [(0, 0), (1, 1), (2, 2)], []),
        (None, ["0", "1", "2"], (0.1, 0.1), [(3, 2)], ["0", "1", "2"]),
        (None, ["a", "b"], (0.1, 0.1), [(2, 2)], ["a", "b"]),
        (["a", "b"], ["0", "1"], (0, 0), [], ["0", "1"]),
    ],
)
def test_rows_by_name_or_by_number(old, new, dropouts, rows, fresh):
    start = ModelFile(
        "x", "unet", {"num_classes": 2, "class_dropout": dropouts[0]}, {}, {}, classes=old
    )
    count = len(new) + (dropouts[1] > 0)
    assert initial.match_rows(start, {"num_classes": len(new)}, count, new) == (rows, fresh)


@pytest.mark.parametrize("kind", ["unet", "dit"])
@pytest.mark.parametrize("target", ["model.h5", "model.npz", "nameless.npz"])
def test_a_converted_file_is_a_start_too(tmp_path, runs, kind, target):
    """Sizes, diffusion and class names come from the file; without names, the rows of the classes
    are new."""
    convert(runs[kind], tmp_path / target)
    if target == "nameless.npz":
        state_dict, stored = read_weights(tmp_path / target)
        stored.pop("training")
        with open(tmp_path / target, "wb") as file:
            write_state_dict(
                file, state_dict, "npz", diffusion=stored.pop("diffusion"), options=stored
            )
    options = options_from(kind, tmp_path / target)
    model = numdiff.load(runs[kind], "cpu")
    assert (options.image_size, options.prediction, options.class_dropout) == (
        8,
        model.diffusion["prediction"],
        0.1,
    )
    folder, lines = run(
        tmp_path,
        1,
        model=kind,
        init=str(tmp_path / target),
        classes=UNET["classes"],
        learning_rate=1e-30,
    )
    table = {"unet": "label_emb.weight", "dit": "y_embedder.embedding_table.weight"}[kind]
    kept = 1 if target == "nameless.npz" else 4
    assert kept == 4 or f"new: {table}, rows of 3 classes" in "\n".join(lines)
    source, started = model.arrays(), weights(folder)
    for name, array in source.items():
        check_same(
            started[name][-kept:] if name == table else started[name],
            array[-kept:] if name == table else array,
        )


def test_a_public_dit_without_settings(tmp_path):
    """Names and shapes alone: what they do not show is given, as for `numdiff convert`."""
    write_public = public_dit(
        tmp_path, stated=False, patch_size=2, hidden_size=48, depth=2, num_heads=3
    )
    given = {"model": "dit", "init": write_public(), "device": "cpu"}
    with pytest.raises(
        UsageError, match="how many attention heads the model has.*: give --heads\\."
    ):
        resolve(given)
    options = resolve({**given, "heads": 3})
    assert (
        options.image_size,
        options.patch_size,
        options.hidden_size,
        options.depth,
        options.learn_sigma,
    ) == (8, 2, 48, 2, True)
    assert (options.prediction, options.schedule, options.class_cond) == ("eps", "linear", True)
    assert resolve({**given, "heads": 3, "image_size": 16}).image_size == 16


def test_a_bare_unet_takes_what_it_does_not_tell_from_the_run(tmp_path, runs):
    convert(runs["unet"], tmp_path / "m.npz")
    np.savez(tmp_path / "bare.npz", **np.load(tmp_path / "m.npz"))
    more = {"model": "unet", "image_size": 8, "num_head_channels": 32, "learning_rate": 1e-30}
    more |= {"classes": UNET["classes"], "class_cond": False}
    folder, lines = run(tmp_path, 1, init=str(tmp_path / "bare.npz"), **more)
    assert "left out: label_emb.weight" in "\n".join(lines)
    # of guided-diffusion, where a file is silent
    assert numdiff.load(folder, "cpu").diffusion["prediction"] == "eps"
    started = weights(folder)
    for name, array in weights(runs["unet"], "ema").items():
        if name != "label_emb.weight":
            check_same(started[name], array)


def test_a_silent_file_is_read_on_the_path_of_the_run(tmp_path):
    """SiT's weights have DiT's names, and count time the other way."""
    options = {"depth": 1, "num_classes": None, "learn_sigma": False}
    bare = public_dit(tmp_path, stated=False, **options)()
    convert(bare, tmp_path / "flow.h5", diffusion={"path": "linear"}, num_heads=2)
    more = {"model": "dit", "path": "linear", "heads": 2, "learning_rate": 1e-30}
    folder, lines = run(tmp_path, 1, init=bare, **more)
    assert "recomputed" not in "\n".join(lines)
    started = weights(folder)
    for name, array in weights(tmp_path / "flow.h5").items():
        check_same(started[name], array)
    name = "t_embedder.mlp.0.weight"
    assert not np.array_equal(started[name], weights(tmp_path / "m.h5")[name])


@pytest.mark.parametrize("kind", ["unet", "dit"])
def test_training_goes_on_from_these_weights_bit_by_bit(runs, kind):
    """In Python: a Trainer with `init` is one whose model holds the weights."""
    states = []
    for way in ("init", "load"):
        model = numdiff.load(runs[kind], "cpu", "raw")
        dataset = open_dataset(image_size=8, classes=DIT["classes"])
        if way == "init":
            model = type(model)(**model.options, device="cpu", seed=9)
        trainer = Trainer(
            model,
            dataset,
            batch=4,
            ema_halflife=8,
            diffusion={"prediction": "v"},
            freeze="*.bias",
            **({"init": runs[kind], "init_weights": "raw"} if way == "init" else {}),
        )
        assert (trainer.origin is None) == (way == "load") and trainer.step == 0
        for _ in trainer.run(2):
            pass
        states.append(trainer.state())
        trainer.close()
    for name, array in states[0].items():
        np.testing.assert_array_equal(array, states[1][name], err_msg=name)


PATHS = (
    {"schedule": "cosine", "prediction": "x_0"},
    {"steps": 250, "timestep_scale": 4.0, "min_snr_gamma": 5.0},
    {"path": "linear"},
    {"path": "edm"},
    {"path": "linear", "prediction": "x_0", "timestep_scale": 1000.0},
    {
        "path": "linear",
        "prediction": "v",
        "loss": "flow",
        "time_sampling": "logit-normal",
        "noise_mean": 0.3,
        "time_shift": 2.0,
    },
)


@pytest.mark.parametrize("target", ["m.h5", "m.npz"])
@pytest.mark.parametrize("diffusion", PATHS, ids=lambda d: "-".join(map(str, d.values())))
def test_the_files_path_counts_and_none_of_the_presets(tmp_path, diffusion, target):
    write(tmp_path / "m.h5", small_unet(), Diffusion(**diffusion).options)
    if target == "m.npz":
        convert(tmp_path / "m.h5", tmp_path / "m.npz")
    options = options_from("unet", tmp_path / target)
    assert (
        options.preset == "tiny"
        and Diffusion(**diffusion_options(options)).options == Diffusion(**diffusion).options
    )
    lines = list(describe_without_training(options))
    assert "recomputed" not in "".join(lines) and any("tensors from" in line for line in lines)


# Runs ---------------------------------------------------------------------------------------------


def test_a_resumed_run_needs_the_file_no_more_and_has_the_same_bits(tmp_path, runs):
    shutil.copytree(runs["dit"], tmp_path / "source")
    more = {
        "model": "dit",
        "init": str(tmp_path / "source"),
        "freeze": ("blocks.0.*", "*.bias"),
        "weight_decay": 0.1,
        "classes": ("Flags", "Symbols"),
    }
    whole, _ = run(tmp_path / "whole", 4, **more)
    half, first = run(tmp_path / "half", 2, **more)
    shutil.rmtree(tmp_path / "source")
    saved = numdiff.training.options.TrainOptions.load(half / "options.json")
    lines = []
    train(saved.changed(steps=4), resume=str(half), echo=lines.append)
    assert [line for line in lines if line.startswith("init ")] == [
        line for line in first if line.startswith("init ")
    ]
    states, metas = zip(
        *(load_checkpoint(newest_checkpoint(folder)) for folder in (whole, half)), strict=True
    )
    for name, array in states[0].items():
        np.testing.assert_array_equal(array, states[1][name], err_msg=name)
    assert metas[0]["init"]["lines"] and metas[1]["init"]["lines"] == [
        line[10:] for line in first if "init " in line
    ]
    before, after, average = weights(runs["dit"], "ema"), weights(half), weights(half, "ema")
    for name in before:
        if name.startswith("blocks.0.") or name.endswith(".bias"):
            np.testing.assert_array_equal(after[name], before[name])
            np.testing.assert_array_equal(average[name], before[name])
    assert not np.array_equal(after["blocks.1.attn.qkv.weight"], before["blocks.1.attn.qkv.weight"])


@exhaustive  # distributed/test_distributed.py has a DiT
@needs("mpi")
def test_two_ranks_start_from_the_same_weights(tmp_path, runs):
    options = (
        f"train unet --init {runs['unet']} --steps 2 --batch 4 --sample-count 0 --lr 1e-3 "
        "--freeze input_blocks.* --classes Flags,Symbols --device cpu --warmup-steps 0 --outdir"
    )
    out = check_done(run_job(job(2, *main_of(forked()), *options.split(), str(tmp_path / "two"))))
    assert out.count("tensors from") == 1 and "frozen " in out
    output_of(options, tmp_path / "one")
    one, two = (
        load_checkpoint(newest_checkpoint(tmp_path / name / "00000-unet-tiny"))[0]
        for name in ("one", "two")
    )
    before = weights(runs["unet"], "ema")
    for name in ("parameters", "ema"):
        assert relative_error(two[name], one[name]) < 1e-4  # Muon makes more of what rounding did
    trained = weights(tmp_path / "two" / "00000-unet-tiny")
    for name, array in before.items():
        assert (
            np.array_equal(trained[name], array) == name.startswith("input_blocks.")
            or name == "label_emb.weight"
        )


def test_a_dry_run_says_what_would_be_taken(runs):
    more = "--classes Flags,Symbols --dry-run --device cpu --freeze blocks.*"
    output = output_of("train dit --init", runs["dit"], more)
    assert "init      30 of 31 tensors from" in output and "rows of 1 class: Symbols" in output
    assert "tensors are frozen by blocks.*" in output


def test_dense_weights_start_a_run_with_sparse_attention(tmp_path):
    """…whose new layers are zero; another share of blocks is no contradiction, and back to
    attention to all there is no way."""
    options = {"image_size": 18, "patch_size": 2, "hidden_size": 32, "num_heads": 1}
    full = small_dit(**options, num_classes=None, seed=1)
    sparse = small_dit(**full.options | {"attention": "sla"}, seed=2)
    write(tmp_path / "full.h5", full)
    write(tmp_path / "sparse.h5", sparse)
    result = initial.start_from(sparse, None, tmp_path / "full.h5")
    assert (
        "new: 2 tensors (blocks.0.attn.proj_l.weight, blocks.0.attn.proj_l.bias)" in result["lines"]
    )
    for name, array in sparse.arrays().items():
        assert not array.any() if ".proj_l." in name else np.array_equal(array, full.arrays()[name])
    given = {"model": "dit", "device": "cpu", "class_cond": False}
    found = resolve(
        {**given, "init": str(tmp_path / "full.h5"), "attention": "sla", "sla_topk": 0.5}
    )
    assert (found.attention, found.sla_topk, found.hidden_size) == ("sla", 0.5, 32)
    assert resolve({**given, "init": str(tmp_path / "sparse.h5"), "sla_topk": 0.7}).sla_topk == 0.7
    with pytest.raises(
        UsageError, match="--attention full contradicts --init .* whose model has attention sla"
    ):
        resolve({**given, "init": str(tmp_path / "sparse.h5"), "attention": "full"})


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, given, words",
    [
        ("unet", {"model": "dit"}, "holds a UNet, and this trains a DiT; use `numdiff train unet`"),
        (
            "dit",
            {"architecture": "DiT-S/4"},
            "--model DiT-S/4 contradicts --init .* whose model has hidden-size 24",
        ),
        (
            "dit",
            {"patch_size": 2},
            "--patch-size 2 contradicts --init .* whose model has patch-size 4",
        ),
        ("dit", {"learn_sigma": True}, "--learn-sigma contradicts"),
        ("dit", {"rope": True}, "--rope contradicts"),
        ("dit", {"channels": 4}, "--channels 4 contradicts --init .* whose model takes 3"),
        (
            "unet",
            {"channel_mult": (1, 2, 4)},
            "--channel-mult 1,2,4 contradicts .* whose model has channel-mult 1,2",
        ),
        (
            "unet",
            {"num_heads": 2},
            "--num-heads 2 contradicts .* whose model has num-head-channels 32",
        ),
        ("unet", {"use_new_attention_order": True}, "--use-new-attention-order contradicts"),
        (
            "unet",
            {"init": "nix"},
            "--init: nix does not exist; give .* .or a file of weights that `numdiff convert` reads",
        ),
        ("unet", {"init": None, "init_weights": "raw"}, "--init-weights raw needs --init"),
    ],
)
def test_settings_that_contradict_the_file(runs, kind, given, words):
    with pytest.raises(UsageError, match=words):
        options_from(kind, runs[kind], **given)


@pytest.mark.parametrize(
    "given, words",
    [
        (
            {"path": "linear"},
            "--path linear does not go with --init .*m.h5, whose model learns its variance.*leave --path",
        ),
        ({"min_snr_gamma": 5.0}, "--min-snr-gamma 5 does not go with --init"),
        ({"path": "linear", "learn_sigma": True}, "--learn-sigma does not go with --path linear"),
    ],
)
def test_a_learned_variance_has_its_objective(tmp_path, given, words):
    start = str(write(tmp_path / "m.h5", small_dit(num_classes=None)))
    assert options_from("dit", start).learn_sigma
    with pytest.raises(UsageError, match=words):
        options_from("dit", start, **given)


def test_images_of_other_channels(tmp_path):
    model = small_dit(in_channels=4, num_classes=None, learn_sigma=False)
    start = str(write(tmp_path / "latents.h5", model))
    given = {"model": "dit", "init": start, "device": "cpu", "class_cond": False}
    for begin in (
        lambda: run(tmp_path, 1, **given),
        lambda: list(describe_without_training(resolve(given))),
    ):
        with pytest.raises(
            UsageError, match="have 3 channels, and the model of --init .*latents.h5 takes 4"
        ):
            begin()
    assert not list(tmp_path.glob("0*"))


@pytest.mark.parametrize(
    "change, words",
    [
        (
            lambda arrays: arrays.pop("time_embed.0.weight"),
            r"cannot use .*bad.npz: .* missing 1 \(time_embed.0.weight\); save the whole model",
        ),
        (
            lambda arrays: [arrays.pop(name) for name in list(arrays) if "middle_block" in name],
            r"missing 26 \(middle_block\..*, …\)",
        ),
        (
            lambda arrays: arrays.update({f"extra.{i}": np.zeros(3, np.float32) for i in range(7)}),
            r"unexpected 7 \(extra.0, extra.1, extra.2, extra.3, extra.4, …\)",
        ),
        (
            lambda arrays: arrays.update({"out.2.bias": np.full(3, np.nan, np.float32)}),
            "finite, first in out.2.bias",
        ),
    ],
)
def test_state_dicts_that_are_not_whole(tmp_path, runs, change, words):
    convert(runs["unet"], tmp_path / "m.npz")
    with np.load(tmp_path / "m.npz") as file:
        arrays = dict(file)
    change(arrays)
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(NumdiffError, match=words):
        options_from("unet", tmp_path / "bad.npz", image_size=8, num_head_channels=32)


def public_dit(folder, stated=True, **options):
    """A function that writes a small DiT's public state dict without what `lacks` says of a name.
    stated: with its settings."""
    model = small_dit(**{"depth": 3, "num_classes": 5, **options})
    convert(write(folder / "m.h5", model), folder / "m.npz")
    with np.load(folder / "m.npz") as file:
        arrays = dict(file)
    with zipfile.ZipFile(folder / "m.npz") as archive:
        comment = archive.comment

    def write_public(lacks=lambda name: False):
        kept = {name: array for name, array in arrays.items() if not lacks(name)}
        np.savez(folder / "bad.npz", **kept)
        if stated:
            with zipfile.ZipFile(folder / "bad.npz", "a") as archive:
                archive.comment = comment
        return str(folder / "bad.npz")

    return write_public


@pytest.mark.parametrize(
    "lacks, words",
    [
        (
            "blocks.0.",
            r"missing 10 \(blocks.0.attn.qkv.weight, blocks.0.attn.qkv.bias, blocks.0.attn.proj.weight, "
            r"blocks.0.attn.proj.bias, blocks.0.mlp.fc1.weight, …\); save the whole model",
        ),
        ("blocks.0.mlp", r"missing 4 \(blocks.0.mlp.fc1.weight, .*, blocks.0.mlp.fc2.bias\); save"),
        ("blocks.1.", r"missing 10 \(blocks.1.attn"),
        ("final_layer", r"missing 4 \(final_layer.linear.weight, "),
        ("x_embedder.proj.bias", r"missing 1 \(x_embedder.proj.bias\)"),
        # of whose depth the settings tell
        ("blocks.2.", r"missing 10 \(blocks.2.attn.*, …\); save the whole model"),
    ],
)
def test_dits_that_are_not_whole(tmp_path, lacks, words):
    bad = public_dit(tmp_path)(lambda name: name.startswith(lacks))
    for use in (
        lambda: options_from("dit", bad),
        lambda: convert(bad, tmp_path / "out.h5"),
    ):
        with pytest.raises(NumdiffError, match=rf"cannot use .*bad.npz: .* {words}"):
            use()


def test_a_dit_whose_last_block_is_missing(tmp_path):
    """Without settings it is a shallower model, unless the run's name or depth says otherwise; the
    log reports it."""
    sizes = {"hidden_size": 384, "num_heads": 6}
    write_public = public_dit(tmp_path, stated=False, **sizes, depth=2, image_size=4)
    bad = write_public(lambda name: name.startswith("blocks.1."))
    given = {"model": "dit", "init": bad, "device": "cpu"}
    with pytest.raises(
        UsageError,
        match=r"its size, 1 blocks of 384 channels, is no published one \(a DiT-S has 12 "
        r"blocks\): give --heads\.",
    ):
        resolve(given)
    with pytest.raises(
        UsageError, match=r"--model DiT-S/4 contradicts --init .* whose model has depth 1;"
    ):
        resolve({**given, "architecture": "DiT-S/4"})
    with pytest.raises(
        UsageError, match=r"--depth 2 contradicts --init .* whose model has depth 1;"
    ):
        resolve({**given, "depth": 2, "heads": 6})
    odd = "depth: 1 blocks, where a DiT-S, as wide, has 12: if it should be one, the file lacks the last"
    assert any(
        odd in line
        for line in describe_without_training(resolve({**given, "heads": 6, "image_size": 64}))
    )
    assert [": ".join(note) for note in convert(bad, tmp_path / "out.h5", num_heads=6).notes] == [
        odd
    ]
    whole = public_dit(tmp_path, **sizes, depth=1)()
    assert not convert(whole, tmp_path / "out.h5").notes  # its settings say the same


def test_a_models_name_gives_what_a_file_does_not(tmp_path):
    bare = public_dit(tmp_path, stated=False, hidden_size=192, depth=6, num_heads=6)()
    options = options_from("dit", bare, architecture="DiT-Tiny")
    assert (options.heads, options.depth) == (6, 6)


class HugePickle:
    def __reduce__(self):
        return exec, ("open('exploded', 'w')",)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x89HDF\r\n\x1a\n" + b"\0" * 300,
        pickle.dumps({"model": HugePickle()}),
        b"PK\x03\x04 no zip",
        b"{}",
        b"\x89PNG\r\n\x1a\n" + b"\0" * 300,
    ],
)
def test_damaged_files_and_programs(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.pt").write_bytes(content)
    for kind in ("unet", "dit"):
        with pytest.raises(NumdiffError, match="bad.pt") as refused:
            options_from(kind, tmp_path / "bad.pt")
        assert "\n" not in str(refused.value) and "--init" in str(refused.value)
    assert not (tmp_path / "exploded").exists()


def test_a_dataset_is_no_start():
    with pytest.raises(
        NumdiffError,
        match="^--init: .*emoji64.h5 is an HDF5 file but not a numdiff checkpoint; give",
    ):
        options_from("unet", default_path())


def test_init_and_resume_exclude_each_other(runs):
    done = run_command("train unet --init", runs["unet"], "--resume", runs["unet"])
    assert done.exit_code == 2 and "--init and --resume exclude each other" in done.output


@pytest.mark.parametrize(
    "options, words",
    [
        ({"model_channels": 64}, "its model has model_channels 32, and this one 64"),
        ({"learn_sigma": True}, "its model has learn_sigma no, and this one yes"),
    ],
)
def test_a_trainer_refuses_weights_of_another_model(runs, options, words):
    model = UNet(
        **{**numdiff.load(runs["unet"], "cpu").options, **options}, device="cpu", seed=None
    )
    with pytest.raises(UsageError, match=words):
        Trainer(model, open_dataset(image_size=8, classes=UNET["classes"]), init=str(runs["unet"]))
