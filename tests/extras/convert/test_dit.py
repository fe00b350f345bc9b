"""The public DiT's weights: what the names and shapes say, and what is refused."""

import json

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
    with_padding,
    with_positions,
    without_padding,
)
from numdiff.extras.convert.files import load_state_dict
from numdiff.nn.dit import MODELS, PLAIN, padded_columns
from numdiff.nn.dit_shapes import dit_shapes
from numdiff.sizes import as_size
from tests.extras.convert.weights import (
    ForeignClass,
    damaged_states,
    of_shapes,
    pickled,
    same,
    tensor,
    write_pt,
)
from tests.reference import stored, stored_dit


def refused(message, function, *given):
    with pytest.raises(NumdiffError, match=message):
        function(*given)


def state_of(name, seed=1):
    info = stored.load(f"dit_{name}")["info"]
    return stored_dit.state_dict(info["shapes"], seed), info["options"]


# Files that PyTorch wrote -------------------------------------------------------------------------


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
def test_a_namespace_is_the_only_object(name, word):
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
        refused(word, load_state_dict, path)


def test_hostile_settings_are_refused_and_not_run(tmp_path):
    """What stands where the public checkpoint has its settings may ask for nothing."""
    canary = tmp_path / "canary"
    content = {
        "ema": {"a": tensor("FloatStorage", "0", 2, (2,))},
        "args": ForeignClass("posix system", f"touch {canary}"),
    }
    path = write_pt("w.pt", pickled(content), {"0": bytes(8)})
    refused("posix.system", load_state_dict, path)
    assert not canary.exists()


# Names, shapes, options ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(stored_dit.MODELS))
def test_options_from_shapes(name):
    state, options = state_of(name)
    guessed = guess_dit_options(with_positions(state, options))
    classes = options["num_classes"]
    rows = None if classes is None else classes + (options["class_dropout"] > 0)
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
        latents = {**stored_dit.MODELS["latents"], "image_size": 32, "num_classes": 1000}
        options = {**PLAIN, **latents, **size}
        shapes = of_shapes(dit_shapes(options))
        guessed = guess_dit_options({**shapes, **fixed_tables(options)})
        assert guessed == {**{k: options[k] for k in guessed if k != "rows"}, "rows": 1001}, name
        assert "num_heads" in guessed


def test_positions_are_checked_and_taken_off():
    state, options = state_of("latents")
    whole = with_positions(state, options)
    assert list(whole) == list(dit_shapes(options))
    half = {**whole, "pos_embed": whole["pos_embed"].astype(np.float16)}
    for given in (whole, half, state):
        assert list(check_dit_state_dict(given, options)) == list(state)
    wrong = {**whole, "pos_embed": whole["pos_embed"][:, ::-1]}
    table = "pos_embed is not the table of sines and cosines"
    refused(table, check_dit_state_dict, wrong, options)
    shapes = r"pos_embed has the shape \(1, 16, 48\) in the file and \(1, 64, 48\)"
    refused(shapes, check_dit_state_dict, whole, {**options, "image_size": 16})


def test_what_does_not_fit_is_named():
    state, options = state_of("latents")
    wrong = {**state, "blocks.1.mlp.fc2.weight": np.ones((48, 190))}
    shapes = r"fc2.weight has the shape \(48, 190\) in the file and \(48, 192\) in the"
    refused(shapes, check_dit_state_dict, wrong, options)
    less = {k: v for k, v in state.items() if "fc2" not in k}
    names = r"missing 4 \(blocks.0.mlp.fc2.weight, .* and unexpected 1 \(extra\)"
    refused(names, check_dit_state_dict, {**less, "extra": np.ones(1)}, options)


def test_what_is_missing_or_has_another_shape():
    """The answer is an error or a guess, never a crash."""
    state, options = state_of("latents")
    for name, damage, damaged in damaged_states(state):
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
    for name, array, message in (
        ("attn.q_norm.bias", np.ones(36), "by LayerNorm .attn.q_norm.bias., .* is RMSNorm"),
        ("attn.q_norm.weight", np.ones(5), "heads of 5 channels, which do not divide .* 72"),
        ("mlp.w12.weight", np.ones((3, 72)), "has 3 rows, and a SwiGLU has two halves"),
    ):
        refused(message, guess_dit_options, {**state, f"blocks.0.{name}": array})
    whole = with_positions(state, options)
    assert list(check_dit_state_dict(whole, options)) == list(state)
    turned = {**whole, "feat_rope.freqs_sin": -whole["feat_rope.freqs_sin"]}
    table = "feat_rope.freqs_sin is not the table of sines and cosines"
    refused(table, check_dit_state_dict, turned, options)
    more = r"unexpected 2 \(feat_rope.freqs_cos, feat_rope.freqs_sin\)"
    refused(more, check_dit_state_dict, whole, {**options, "rope": False})
    less = {k: v for k, v in state.items() if "norm1" not in k and ".w3." not in k}
    less["blocks.0.norm3.weight"] = np.ones(72)
    names = r"missing 6 \((\S+, ){5}…\) and unexpected 1 \(blocks.0.norm3.weight\)"
    refused(names, check_dit_state_dict, less, options)


def test_a_width_is_filled_up_and_cut_again():
    state, options = state_of("swiglu")
    more = with_padding(state, options)
    wide, narrow, bias = (
        f"blocks.0.mlp.{name}" for name in ("w12.weight", "w3.weight", "w12.bias")
    )
    assert more[wide].shape == (176, 48) and more[narrow].shape == (48, 88)
    np.testing.assert_array_equal(more[bias][88:170], state[bias][82:])
    np.testing.assert_array_equal(more[narrow], padded_columns(state[narrow], 82))
    assert same(without_padding(more, options), state)


# diffusers ----------------------------------------------------------------------------------------


def test_diffusers_names():
    """Against the names that the library's own model of these options has (tried with diffusers
    0.42)."""
    state, options = state_of("latents")
    got = diffusers_state_dict(state, options["depth"])
    layers = (
        "norm1.emb.timestep_embedder.linear_1 norm1.emb.timestep_embedder.linear_2 norm1.linear "
        "attn1.to_q attn1.to_k attn1.to_v attn1.to_out.0 ff.net.0.proj ff.net.2"
    ).split()
    blocks = [f"transformer_blocks.{i}." for i in range(2)]
    want = ["pos_embed.proj", "proj_out_1", "proj_out_2"]
    want += [block + layer for block in blocks for layer in layers]
    names = {f"{name}.{kind}" for name in want for kind in ("weight", "bias")}
    names |= {f"{block}norm1.emb.class_embedder.embedding_table.weight" for block in blocks}
    assert set(got) == names
    np.testing.assert_array_equal(
        got["transformer_blocks.1.attn1.to_k.weight"], state["blocks.1.attn.qkv.weight"][48:96]
    )
    config = diffusers_config(options)
    wanted = {
        "num_attention_heads": 3,
        "attention_head_dim": 16,
        "num_embeds_ada_norm": 5,
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 8,
    }
    assert config.items() >= wanted.items()
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
    assert same(public_state_dict(theirs, options), state, in_order=False)
    positions = with_positions(state, options)["pos_embed"]
    # older versions keep them
    public_state_dict({**theirs, "pos_embed.pos_embed": positions}, options)
    embedder = "transformer_blocks.1.norm1.emb.timestep_embedder.linear_1.weight"
    for name, array, message in (
        ("proj_out_1.bias", None, "missing 1 .proj_out_1.bias."),
        ("more", np.ones(1), "weights that no DiT has: 1 .more"),
        ("pos_embed.pos_embed", positions[:, ::-1], "pos_embed is not the table"),
        (embedder, theirs[embedder] + 1, "block 1 has another timestep_embedder.linear_1.weight"),
    ):
        changed = {k: v for k, v in {**theirs, name: array}.items() if v is not None}
        refused(message, public_state_dict, changed, options)


def test_settings_of_diffusers(tmp_path):
    _, options = state_of("latents")
    found = read_config(write_config(tmp_path))
    assert found == {key: options[key] for key in found}
    defaults = {key: ... for key in diffusers_config(options) if key != "_class_name"}
    older = {"_diffusers_version": "0.9", "_class_name": "Transformer2DModel"}
    found = read_config(write_config(tmp_path, **defaults, **older))
    wanted = {"hidden_size": 1152, "depth": 28, "num_classes": 1000, "learn_sigma": False}
    assert found.items() >= wanted.items()
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
        refused(message, read_config, write_config(tmp_path, **changed))
    for text in ("", "[]", "{", "[" * 10**5, "\ud800"):
        (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        refused("is damaged, or is not a configuration", read_config, tmp_path)


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
