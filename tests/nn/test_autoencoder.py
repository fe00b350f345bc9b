"""The autoencoder against values from an independent PyTorch implementation (see tests/reference),
and its files."""

import json

import numpy as np
import pytest

from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.convert.autoencoder_names import (
    diffusers_names,
    numdiff_arrays,
    public_arrays,
    public_names,
)
from numdiff.extras.convert.autoencoders import holds_autoencoder, write_autoencoder
from numdiff.extras.convert.files import write_state_dict
from numdiff.nn import Tape, Tensor
from numdiff.nn import functional as F
from numdiff.nn.autoencoder import Autoencoder
from numdiff.training.autoencoders import load_autoencoder, read_autoencoder
from tests.command import output_of, run
from tests.conftest import large, relative_error
from tests.nn.test_unet_reference import check_gradients
from tests.reference import stored
from tests.reference.stored_autoencoder import MODELS

FORWARD, BACKWARD = 1e-5, 1e-4
SMALL = {"image_size": 8, "model_channels": 32, "channel_mult": (1, 2), "num_res_blocks": 1}


@large
@pytest.mark.parametrize("name", list(MODELS))
def test_values_and_gradients(engine, name):
    reference = stored.load(f"autoencoder_{name}")
    info = reference["info"]
    model = Autoencoder(**info["options"], device=engine.device, seed=None)
    model.load_arrays(numdiff_arrays(stored.state_dict(info["shapes"], 1)))
    x = Tensor(engine(reference["x"]), requires_grad=True)
    with Tape() as tape:
        moments = model.moments(x)
        B, H, W, C = moments.shape
        mean, _ = F.chunk(F.reshape(moments, B * H * W, C), 2)
        output = model.reconstruct(F.reshape(mean, B, H, W, C // 2))
    engine.check(moments.data, reference["moments"], FORWARD)
    engine.check(output.data, reference["output"], FORWARD)
    tape.backward(output, engine(reference["g"]))
    engine.check(x.grad, reference["dx"], BACKWARD)
    if engine.computes:
        check_gradients(public_arrays(model.gradients()), reference)


def test_images_of_any_size(rng):
    model = Autoencoder(**SMALL, device="cpu")
    images = rng.standard_normal((2, 7, 9, 3)).astype(np.float32)
    mean, logvar = model.encode(images)
    assert mean.shape == logvar.shape == (2, 4, 5, 4)
    assert model.decode(mean, (7, 9)).shape == (2, 7, 9, 3)
    padded = np.pad(images, ((0, 0), (0, 1), (0, 1), (0, 0)), mode="edge")
    assert (model.encode(padded)[0] == mean).all()


def test_tiles_are_blended(rng, monkeypatch):
    """Without attention they give nearly what the whole image gives: the normalisations see a tile
    alone."""
    model = Autoencoder(**SMALL, mid_attention=False, device="cpu")
    z = rng.standard_normal((1, 8, 40, 4)).astype(np.float32)
    whole, tiled = model.decode(z), model.decode(z, tile=32)
    assert tiled.shape == whole.shape == (1, 16, 80, 3)
    assert relative_error(tiled, whole) < 0.3
    images = rng.standard_normal((1, 16, 80, 3)).astype(np.float32)
    assert model.encode(images, tile=32)[0].shape == (1, 8, 40, 4)
    assert (model.decode(z, tile=160) == whole).all()
    with pytest.raises(UsageError, match="tile 15 must be a multiple of 2, and at least 16"):
        model.decode(z, tile=15)
    # of each pixel alone
    monkeypatch.setattr(model, "_evaluate", lambda function, x: x.repeat(2, 1).repeat(2, 2))
    assert relative_error(model.decode(z, tile=16), z.repeat(2, 1).repeat(2, 2)) < 1e-6


def test_scaling_has_an_inverse(rng):
    model = Autoencoder(**SMALL, scaling_factor=0.3611, shift_factor=0.1159, device="cpu")
    latents = rng.standard_normal((2, 4, 4, 4)).astype(np.float32)
    assert relative_error(model.unscale(model.scale(latents)), latents) < 1e-6
    assert relative_error(model.scale(latents), (latents - 0.1159) * 0.3611) < 1e-6


@pytest.mark.parametrize(
    "values",
    [
        np.zeros((2, 8, 8)),
        np.zeros((2, 8, 8, 4)),
        np.zeros((0, 8, 8, 3)),
        "photos",
        None,
        np.zeros((1, 8, 8, 3), complex),
    ],
)
def test_what_is_no_array_of_images_says_so(values):
    with pytest.raises(UsageError, match=r"images must be an array of numbers \(B, H, W, 3\)"):
        Autoencoder(**SMALL, device="cpu").encode(values)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"model_channels": 48}, "do not divide into 32 groups"),
        ({"channel_mult": ()}, "one or more"),
        ({"image_size": 9}, "cannot be halved 1 times"),
        ({"attention_levels": (2,)}, "levels from 0 to 1"),
        ({"latent_channels": 0}, "at least 1"),
        ({"scaling_factor": 0.0}, "must not be 0"),
        ({"latent_channels": "four"}, "must be a whole number"),
    ],
)
def test_options_without_a_model_say_so(options, message):
    with pytest.raises(UsageError, match=message):
        Autoencoder(**{**SMALL, **options}, device="cpu")


# Files --------------------------------------------------------------------------------------------


@pytest.fixture
def model():
    return Autoencoder(
        **SMALL, attention_levels=(1,), scaling_factor=0.5, shift_factor=0.25, device="cpu"
    )


def same(path, model):
    options, arrays = read_autoencoder(path)
    assert options == model.options
    assert list(arrays) == list(model.arrays())
    assert all((arrays[name] == array).all() for name, array in model.arrays().items())


@pytest.mark.parametrize("name", ["vae.h5", "vae.npz", "vae.safetensors", "vae"])
def test_files_keep_bits_names_and_options(tmp_path, model, name):
    write_autoencoder(tmp_path / name, model.options, model.arrays())
    same(tmp_path / name, model)
    assert holds_autoencoder(tmp_path / name)


def test_the_command_goes_round(tmp_path, model):
    write_autoencoder(tmp_path / "a", model.options, model.arrays())
    path = tmp_path / "a"
    for name in ("b.safetensors", "c.h5", "d"):
        output = output_of("convert", path, tmp_path / name)
        assert "4 channels, each side divided by 2" in output
        path = tmp_path / name
    same(path, model)
    output_of("convert", path, tmp_path / "e.h5", "--scaling-factor 2")
    assert load_autoencoder(tmp_path / "e.h5", "cpu").scaling_factor == 2


def test_a_pipeline_holds_one(tmp_path, model):
    (tmp_path / "model_index.json").write_text("{}")
    write_autoencoder(tmp_path / "vae", model.options, model.arrays())
    same(tmp_path, model)
    assert not holds_autoencoder(tmp_path), "of a pipeline, the diffusion model is converted"


@pytest.mark.parametrize("prefix", ["first_stage_model.", "vae."])
def test_a_checkpoint_of_latent_diffusion(tmp_path, model, prefix):
    """With the weights of other models, and those that only training needs."""
    named = {prefix + name: array for name, array in public_arrays(model.arrays()).items()}
    others = {
        "model.diffusion_model.input_blocks.0.0.weight": np.ones((4, 4, 3, 3), np.float32),
        f"{prefix}loss.logvar": np.ones(1, np.float32),
        "betas": np.ones(10, np.float32),
    }
    with open(tmp_path / "ldm.npz", "wb") as file:
        write_state_dict(file, {**others, **named}, "npz")
    options, arrays = read_autoencoder(tmp_path / "ldm.npz")
    assert options == {
        **model.options,
        "image_size": 256,
        "scaling_factor": 0.18215,
        "shift_factor": 0.0,
    }
    assert all((arrays[name] == array).all() for name, array in model.arrays().items())


def test_the_names_of_diffusers(model):
    names = diffusers_names(public_arrays(model.arrays()))
    for name in (
        "encoder.down_blocks.0.resnets.0.norm1.weight",
        "encoder.down_blocks.0.downsamplers.0.conv.bias",
        "encoder.down_blocks.1.attentions.0.to_q.weight",
        "encoder.mid_block.attentions.0.group_norm.weight",
        "encoder.mid_block.attentions.0.to_out.0.bias",
        "encoder.conv_norm_out.weight",
        "quant_conv.weight",
        "decoder.up_blocks.0.attentions.1.to_v.bias",
        "decoder.up_blocks.0.upsamplers.0.conv.weight",
        "decoder.up_blocks.1.resnets.0.conv_shortcut.weight",
    ):
        assert name in names, name
    assert names["decoder.mid_block.attentions.0.to_k.weight"].shape == (64, 64)
    back = public_names(names)
    assert set(back) == set(public_arrays(model.arrays()))
    older = {
        name.replace("0.to_q.", "0.query.").replace("0.to_out.0.", "0.proj_attn."): array
        for name, array in names.items()
    }
    assert set(public_names(older)) == set(back)


def spoil(folder, what):
    config = json.loads((folder / "config.json").read_text())
    weights = folder / "diffusion_pytorch_model.safetensors"
    if what in ("norm_num_groups", "act_fn", "scaling_factor", "_class_name"):
        (folder / "config.json").write_text(json.dumps({**config, what: "tanh"}))
    elif what == "no weights":
        weights.unlink()
    elif what == "half":
        weights.write_bytes(weights.read_bytes()[:5000])
    else:
        (folder / "config.json").write_text("[")


@pytest.mark.parametrize(
    "what, message",
    [
        ("norm_num_groups", "says norm_num_groups 'tanh'"),
        ("act_fn", "says act_fn 'tanh'"),
        ("scaling_factor", "says scaling_factor 'tanh', which is no number"),
        ("_class_name", "holds no autoencoder"),
        ("no weights", "save_pretrained"),
        ("half", "its header announces"),
        ("no json", "damaged, or is not a configuration"),
    ],
)
def test_a_folder_that_cannot_be_used_says_why(tmp_path, model, what, message):
    write_autoencoder(tmp_path / "vae", model.options, model.arrays())
    spoil(tmp_path / "vae", what)
    with pytest.raises(NumdiffError, match=message):
        read_autoencoder(tmp_path / "vae")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda d: {k: v for k, v in d.items() if "encoder" not in k}, "no encoder.conv_in.weight"),
        (
            lambda d: {k: v for k, v in d.items() if k != "decoder.up.0.block.1.conv2.bias"},
            "lacks decoder.up.0.block.1",
        ),
        (
            lambda d: {**d, "decoder.norm_out.weight": np.ones(7, np.float32)},
            "decoder.norm_out.weight has the shape",
        ),
        (
            lambda d: {**d, "decoder.norm_out.weight": np.full(32, np.nan, np.float32)},
            "not finite, first in decoder.norm",
        ),
        (
            lambda d: {**d, "encoder.conv_out.weight": np.ones((4, 64, 3, 3), np.float32)},
            "mean and a log variance",
        ),
    ],
)
def test_weights_that_do_not_fit_say_so(tmp_path, model, change, message):
    with open(tmp_path / "x.safetensors", "wb") as file:
        write_state_dict(file, change(public_arrays(model.arrays())), "safetensors")
    with pytest.raises(NumdiffError, match=message):
        read_autoencoder(tmp_path / "x.safetensors")


def test_options_of_other_models_are_refused(tmp_path, model):
    write_autoencoder(tmp_path / "a.h5", model.options, model.arrays())
    done = run("convert", tmp_path / "a.h5", tmp_path / "b.h5", "--num-heads 4")
    assert (
        done.exit_code != 0
        and "--num-heads means nothing for an autoencoder: leave it out." in done.output
    )
