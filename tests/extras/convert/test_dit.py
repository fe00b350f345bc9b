"""The public DiT's weights: what the names and shapes say, and what is refused."""

import json
import zipfile

import numpy as np
import pytest

from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.convert.diffusers import (
    diffusers_config,
    diffusers_state_dict,
    public_state_dict,
    read_config,
)
from numdiff.extras.convert.dit import (
    check_dit_state_dict,
    fixed_tables,
    guess_dit_options,
    is_dit,
    with_padding,
    with_positions,
    without_padding,
)
from numdiff.extras.convert.files import load_state_dict
from numdiff.extras.convert.layout import to_numdiff_layout, to_torch_layout
from numdiff.nn.dit import MODELS, PLAIN, padded_columns
from numdiff.nn.dit_shapes import dit_shapes
from numdiff.sizes import as_size
from tests.extras.convert.weights import (
    ForeignClass,
    damaged_copies,
    pickled,
    tensor,
    write_pt,
)
from tests.reference import stored, stored_dit

BARE, CHECKPOINT = stored.FOLDER / "dit_state.pt", stored.FOLDER / "dit_checkpoint.pt"


class ShapedWeight:
    def __init__(self, shape):
        self.shape = tuple(shape)


def state_of(name, seed=1):
    info = stored.load(f"dit_{name}")["info"]
    return stored_dit.state_dict(info["shapes"], seed), info["options"]


# Files that PyTorch wrote -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path, weights, seed", [(BARE, "ema", 3), (CHECKPOINT, "ema", 4), (CHECKPOINT, "raw", 3)]
)
def test_what_torch_save_wrote(path, weights, seed):
    """A bare state dict, and a training checkpoint with the optimiser's state and an
    argparse.Namespace."""
    got = load_state_dict(path, weights)
    assert next(iter(got)) == "pos_embed" and is_dit(got)
    for name, array in got.items():
        if name != "pos_embed":
            np.testing.assert_array_equal(array, stored.weight(name, array.shape, seed))


@pytest.mark.parametrize(
    "name, word",
    [
        ("argparse Namespace", None),
        ("collections OrderedDict", "in a way that torch.save does not use"),
        ("torch Size", "in a way that torch.save does not use"),
        ("argparse ArgumentParser", "argparse.ArgumentParser.*was not run"),
        ("os system", "os.system.*was not run"),
    ],
)
def test_a_namespace_is_the_only_object(tmp_path, name, word):
    """The training checkpoint's settings become an unused dict; nothing else can be made in that
    way."""
    # NEWOBJ, then BUILD
    made = b"c" + name.replace(" ", "\n").encode() + b"\n)\x81}X\x02\x00\x00\x00lrK\x01sb"
    weights = pickled({"a": tensor("FloatStorage", "0", 2, (2,))})[2:-1]
    data = b"\x80\x02}(X\x03\x00\x00\x00ema" + weights + b"X\x04\x00\x00\x00args" + made + b"u."
    path = write_pt("w.pt", data, {"0": np.ones(2, "<f4").tobytes()})
    if word is None:
        np.testing.assert_array_equal(load_state_dict(path)["a"], [1, 1])
    else:
        with pytest.raises(NumdiffError, match=word):
            load_state_dict(path)


def test_hostile_settings_are_refused_and_not_run(tmp_path):
    """What stands where the public checkpoint has its settings may ask for nothing."""
    canary = tmp_path / "canary"
    content = {
        "ema": {"a": tensor("FloatStorage", "0", 2, (2,))},
        "args": ForeignClass("posix system", f"touch {canary}"),
    }
    path = write_pt("w.pt", pickled(content), {"0": bytes(8)})
    with pytest.raises(NumdiffError, match="posix.system"):
        load_state_dict(path)
    assert not canary.exists()


def test_random_damage_raises_nothing_but_numdiff_errors(tmp_path, rng):
    data, refused = CHECKPOINT.read_bytes(), 0
    # most of the file is numbers: damage where the words are
    with zipfile.ZipFile(CHECKPOINT) as archive:
        info = next(i for i in archive.infolist() if i.filename.endswith("data.pkl"))
    start, stop = info.header_offset, info.header_offset + info.file_size
    for copy in damaged_copies(data[start:stop], rng, 150):
        (tmp_path / "w.pt").write_bytes(data[:start] + copy + data[stop:])
        try:
            load_state_dict("w.pt")
        except NumdiffError as error:
            assert "\n" not in str(error) and len(str(error)) < 600
            refused += 1
    assert refused > 50


# Names, shapes, options ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(stored_dit.MODELS))
def test_options_from_shapes(name):
    state, options = state_of(name)
    guessed = guess_dit_options(with_positions(state, options))
    rows = (
        None
        if options["num_classes"] is None
        else options["num_classes"] + (options["class_dropout"] > 0)
    )
    assert guessed.pop("rows") == rows
    options = {**PLAIN, **options, "image_size": as_size(options["image_size"])}
    assert all(guessed[key] == options[key] for key in guessed)
    without = {"num_heads", "num_classes", "class_dropout", "sla_topk", "sla_linear"}
    without |= set() if options["rope"] else {"rope"}
    assert guessed.keys() >= options.keys() - without
    assert "num_heads" in guessed or not (options["rope"] or options["qk_norm"])
    assert "image_size" not in guess_dit_options(state)


def test_published_sizes_tell_their_heads():
    for name, size in MODELS.items():
        options = {
            **PLAIN,
            **stored_dit.MODELS["latents"],
            **size,
            "image_size": 32,
            "num_classes": 1000,
        }
        shapes = {k: ShapedWeight(v) for k, v in dit_shapes(options).items()}
        guessed = guess_dit_options({**shapes, **fixed_tables(options)})
        assert guessed == {**{k: options[k] for k in guessed if k != "rows"}, "rows": 1001}, name
        assert "num_heads" in guessed


def test_positions_are_checked_and_taken_off():
    state, options = state_of("latents")
    whole = with_positions(state, options)
    assert list(whole) == list(dit_shapes(options))
    assert (
        list(check_dit_state_dict(whole, options))
        == list(state)
        == list(check_dit_state_dict(state, options))
    )
    half = {**whole, "pos_embed": whole["pos_embed"].astype(np.float16)}
    check_dit_state_dict(half, options)
    wrong = {**whole, "pos_embed": whole["pos_embed"][:, ::-1]}
    with pytest.raises(NumdiffError, match="pos_embed is not the table of sines and cosines"):
        check_dit_state_dict(wrong, options)
    with pytest.raises(
        NumdiffError, match=r"pos_embed has the shape \(1, 16, 48\) in the file and \(1, 64, 48\)"
    ):
        check_dit_state_dict(whole, {**options, "image_size": 16})


def test_what_does_not_fit_is_named():
    state, options = state_of("latents")
    name = "blocks.1.mlp.fc2.weight"
    with pytest.raises(
        NumdiffError,
        match=r"fc2.weight has the shape \(48, 190\) in the file and \(48, 192\) in the",
    ):
        check_dit_state_dict({**state, name: np.ones((48, 190))}, options)
    less = {k: v for k, v in state.items() if "fc2" not in k}
    with pytest.raises(
        NumdiffError, match=r"missing 4 \(blocks.0.mlp.fc2.weight, .* and unexpected 1 \(extra\)"
    ):
        check_dit_state_dict({**less, "extra": np.ones(1)}, options)
    # whatever is missing or has another shape, the answer is an error or a guess, never a crash
    for name in state:
        for damage in (None, np.ones(5), np.ones((0, 1)), np.ones((2, 2, 2, 2)), np.ones((7, 7))):
            damaged = {
                k: v if k != name else damage
                for k, v in state.items()
                if k != name or damage is not None
            }
            try:
                guessed = {**options, **guess_dit_options(damaged)}
            except NumdiffError:
                continue
            # then it is a model without classes
            if damage is None and name.startswith("y_embedder"):
                continue
            rows = guessed.pop("rows")
            guessed["num_classes"] = None if rows is None else rows - 1
            with pytest.raises(NumdiffError):
                check_dit_state_dict(damaged, guessed)


def test_what_numdiff_does_not_have_is_named():
    state, options = state_of("lightning")
    options = {**PLAIN, **options}
    whole = with_positions(state, options)
    assert list(check_dit_state_dict(whole, options)) == list(state)
    with pytest.raises(
        NumdiffError, match="by LayerNorm .attn.q_norm.bias., .* numdiff's QK-norm is RMSNorm"
    ):
        guess_dit_options({**state, "blocks.0.attn.q_norm.bias": np.ones(36)})
    with pytest.raises(
        NumdiffError, match="feat_rope.freqs_sin is not the table of sines and cosines"
    ):
        check_dit_state_dict(
            {**whole, "feat_rope.freqs_sin": -whole["feat_rope.freqs_sin"]}, options
        )
    with pytest.raises(
        NumdiffError, match=r"unexpected 2 \(feat_rope.freqs_cos, feat_rope.freqs_sin\)"
    ):
        check_dit_state_dict(whole, {**options, "rope": False})
    with pytest.raises(
        NumdiffError, match="heads of 5 channels, which do not divide the model's 72"
    ):
        guess_dit_options({**state, "blocks.0.attn.q_norm.weight": np.ones(5)})
    with pytest.raises(NumdiffError, match="w12.weight has 3 rows, and a SwiGLU has two halves"):
        guess_dit_options({**state, "blocks.0.mlp.w12.weight": np.ones((3, 72))})
    less = {
        name: array for name, array in state.items() if "norm1" not in name and ".w3." not in name
    }
    with pytest.raises(
        NumdiffError, match=r"missing 6 \((\S+, ){5}…\) and unexpected 1 \(blocks.0.norm3.weight\)"
    ):
        check_dit_state_dict({**less, "blocks.0.norm3.weight": np.ones(72)}, options)


def test_a_width_is_filled_up_and_cut_again():
    state, options = state_of("swiglu")
    more = with_padding(state, options)
    assert more["blocks.0.mlp.w12.weight"].shape == (176, 48) and more[
        "blocks.0.mlp.w3.weight"
    ].shape == (48, 88)
    np.testing.assert_array_equal(
        more["blocks.0.mlp.w12.bias"][88:170], state["blocks.0.mlp.w12.bias"][82:]
    )
    np.testing.assert_array_equal(
        more["blocks.0.mlp.w3.weight"], padded_columns(state["blocks.0.mlp.w3.weight"], 82)
    )
    back = without_padding(more, options)
    assert list(back) == list(state) and all(
        np.array_equal(back[name], state[name]) for name in state
    )


def test_layout():
    """A patch's weight turns as a convolution's; the DiT's qkv is a matrix in both."""
    state, _ = state_of("latents")
    ours = to_numdiff_layout(state)
    assert ours["x_embedder.proj.weight"].shape == (48, 2, 2, 4)
    assert ours["x_embedder.proj.weight"][5, 1, 0, 3] == state["x_embedder.proj.weight"][5, 3, 1, 0]
    back = to_torch_layout(ours)
    assert all(
        np.array_equal(back[name], array) and back[name].shape == array.shape
        for name, array in state.items()
    )


# diffusers ----------------------------------------------------------------------------------------


def test_diffusers_names():
    """Against the names that the library's own model of these options has (tried with diffusers
    0.42)."""
    state, options = state_of("latents")
    got = diffusers_state_dict(state, options["depth"])
    want = {"pos_embed.proj", "proj_out_1", "proj_out_2"}
    for i in range(2):
        block = f"transformer_blocks.{i}."
        want |= {
            block + name
            for name in (
                "norm1.emb.timestep_embedder.linear_1",
                "norm1.emb.timestep_embedder.linear_2",
                "norm1.linear",
                "attn1.to_q",
                "attn1.to_k",
                "attn1.to_v",
                "attn1.to_out.0",
                "ff.net.0.proj",
                "ff.net.2",
            )
        }
    names = {f"{name}.{kind}" for name in want for kind in ("weight", "bias")}
    names |= {
        f"transformer_blocks.{i}.norm1.emb.class_embedder.embedding_table.weight" for i in range(2)
    }
    assert set(got) == names
    np.testing.assert_array_equal(
        got["transformer_blocks.1.attn1.to_k.weight"], state["blocks.1.attn.qkv.weight"][48:96]
    )
    config = diffusers_config(options)
    assert (
        config["num_attention_heads"],
        config["attention_head_dim"],
        config["num_embeds_ada_norm"],
    ) == (3, 16, 5)
    assert (config["sample_size"], config["in_channels"], config["out_channels"]) == (8, 4, 8)
    json.dumps(config)


def write_config(folder, **changed):
    _, options = state_of("latents")
    config = {**diffusers_config(options), **changed}
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v is not ...})
    )
    return folder


def test_names_of_diffusers_and_back():
    state, options = state_of("latents")
    theirs = diffusers_state_dict(state, options["depth"])
    back = public_state_dict(theirs, options)
    assert set(back) == set(state) and all(
        np.array_equal(back[name], state[name]) for name in state
    )
    positions = with_positions(state, options)["pos_embed"]
    # older versions keep them
    public_state_dict({**theirs, "pos_embed.pos_embed": positions}, options)

    def refused(message, **changed):
        changed = {name.replace("__", "."): value for name, value in changed.items()}
        with pytest.raises(NumdiffError, match=message):
            public_state_dict(
                {k: v for k, v in {**theirs, **changed}.items() if v is not None}, options
            )

    refused("missing 1 .proj_out_1.bias.", proj_out_1__bias=None)
    refused("weights that no DiT has: 1 .more", more=np.ones(1))
    refused("pos_embed is not the table", pos_embed__pos_embed=positions[:, ::-1])
    name = "transformer_blocks.1.norm1.emb.timestep_embedder.linear_1.weight"
    refused(
        "block 1 has another timestep_embedder.linear_1.weight than block 0",
        **{name.replace(".", "__"): theirs[name] + 1},
    )


def test_settings_of_diffusers(tmp_path):
    _, options = state_of("latents")
    found = read_config(write_config(tmp_path))
    assert found == {key: options[key] for key in found}
    defaults = {key: ... for key in diffusers_config(options) if key != "_class_name"}
    found = read_config(
        write_config(
            tmp_path, **defaults, _diffusers_version="0.9", _class_name="Transformer2DModel"
        )
    )
    assert (found["hidden_size"], found["depth"], found["num_classes"], found["learn_sigma"]) == (
        1152,
        28,
        1000,
        False,
    )
    for changed, message in (
        ({"qk_norm": "rms"}, "sets 'qk_norm', which numdiff does not know"),
        (
            {"norm_type": "ada_norm"},
            "sets norm_type to 'ada_norm', but numdiff's DiT has only 'ada_norm_zero'",
        ),
        ({"activation_fn": "geglu"}, "activation_fn"),
        ({"attention_bias": False}, "attention_bias"),
        ({"norm_eps": 1e-3}, "norm_eps"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"num_layers": 0}, "num_layers to '0', which must be"),
        ({"patch_size": True}, "patch_size"),
        ({"sample_size": [8, 8]}, "sample_size"),
        ({"out_channels": 5}, "out_channels to 5"),
        ({"_class_name": "SD3Transformer2DModel"}, "is of a 'SD3Transformer2DModel'"),
        ({"_class_name": ...}, "is of a 'None'"),
    ):
        with pytest.raises(NumdiffError, match=message):
            read_config(write_config(tmp_path, **changed))
    for text in ("", "[]", "{", "[" * 10**5, "\ud800"):
        (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(NumdiffError, match="is damaged, or is not a configuration"):
            read_config(tmp_path)


def test_models_that_diffusers_cannot_hold():
    _, options = state_of("latents")
    for changed in (
        {"num_classes": None},
        {"class_dropout": 0.0},
        {"mlp_ratio": 2.0},
        {"rope": True},
    ):
        with pytest.raises(UsageError, match=r"write \.safetensors or \.npz instead"):
            diffusers_config({**options, **changed})
