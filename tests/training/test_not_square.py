"""Images that are no squares, from a dataset to samples and to other programs' files."""

import h5py
import numpy as np
import pytest
from PIL import Image

from numdiff import load
from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.convert.diffusers import diffusers_config
from numdiff.extras.convert.dit import fixed_tables, guess_dit_options
from numdiff.extras.convert.guided import guided_diffusion_flags
from numdiff.extras.convert.layout import to_torch_layout
from numdiff.extras.convert.models import convert
from numdiff.nn.dit import DiT, position_table
from numdiff.nn.rotary import rotation_table
from numdiff.nn.unet import UNet
from numdiff.sizes import Sides
from numdiff.training.build import build_dataset
from numdiff.training.checkpoint import load_checkpoint
from numdiff.training.model_files import read_model
from numdiff.training.options import load_options, resolve, resolve_resumed
from numdiff.training.run import train
from numdiff.training.sample_files import read_mask, read_picture
from numdiff.training.sampling import sample_command
from tests.conftest import exhaustive
from tests.models import small_dit, small_unet, with_random_weights, write

pytestmark = pytest.mark.usefixtures("no_curves")

SMALL = {"unet": {"model_channels": 32, "channel_mult": (1, 1), "num_res_blocks": 1}}
SMALL["dit"] = {"hidden_size": 32, "depth": 1, "heads": 2, "class_cond": False}
RUN = {"device": "cpu", "batch": 2, "lr_schedule": "constant", "warmup_steps": 0, "flip": True}
RUN |= {"image_size": (12, 16), "sample_count": 3, "sample_steps": 2}


def run(model, folder, data, steps, **more):
    given = {**RUN, **SMALL[model], "model": model, "data": data, "steps": steps, **more}
    return train(resolve({**given, "outdir": str(folder)}), echo=lambda *_: None)


@pytest.fixture
def data(tmp_path, rng):
    """Eight pictures of 12×16."""
    with h5py.File(tmp_path / "wide.h5", "w") as file:
        file["images"] = rng.integers(0, 256, (8, 12, 16, 3), dtype=np.uint8)
    return str(tmp_path / "wide.h5")


@exhaustive
@pytest.mark.parametrize("model", SMALL)
def test_a_run_and_its_pictures(tmp_path, data, model, rng):
    folder = run(model, tmp_path / "runs", data, 2)
    assert load_options(folder).image_size == Sides(12, 16)
    assert load(folder, "cpu").options["image_size"] == [12, 16]
    with Image.open(folder / "samples-00000002.png") as grid:
        zoom = 128 // 12
        assert grid.width % (16 * zoom) < grid.width // 16 and grid.height % (12 * zoom) < 20

    whole = run(model, tmp_path / "whole", data, 4)
    options = resolve_resumed(load_options(folder), {"steps": 4})
    train(options, resume=str(folder), echo=lambda *_: None)
    end = [load_checkpoint(f / "checkpoint-00000004.h5")[0] for f in (whole, folder)]
    assert all(np.array_equal(end[0][name], end[1][name]) for name in end[0])

    picture, mask = tmp_path / "p.png", tmp_path / "m.png"
    pixels = rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(picture)
    given = {"outdir": str(tmp_path), "device": "cpu", "steps": 2, "count": 2}
    Image.fromarray(np.uint8([[0, 0, 255, 255]] * 3)).resize((32, 24), 0).save(mask)
    known = read_picture(picture, (12, 16, 3))
    made = sample_command(
        folder, inpaint=picture, mask=mask, grid=tmp_path / "i.png", echo=lambda _: None, **given
    )
    assert made.shape == (2, 12, 16, 3)
    assert np.abs(made[:, :, :8] - (known[None, :, :8] + 1) * 127.5).max() <= 1
    assert np.abs(made[:, :, 8:] - (known[None, :, 8:] + 1) * 127.5).max() > 20
    same = sample_command(
        folder,
        init_image=picture,
        strength=0.0,
        grid=tmp_path / "j.png",
        echo=lambda _: None,
        **given,
    )
    assert np.abs(same - (known[None] + 1) * 127.5).max() <= 1


@pytest.mark.parametrize("model", SMALL)
@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_files_of_other_programs_and_back(tmp_path, model, suffix):
    if model == "unet":
        made = small_unet(image_size=(12, 8), channel_mult=(1, 1))
    else:
        made = small_dit(image_size=(12, 8), in_channels=4)
    write(tmp_path / "a.h5", with_random_weights(made, 1.0))
    result = convert(tmp_path / "a.h5", tmp_path / f"b.{suffix}")
    assert any("square" in text for _, text in result.notes)
    convert(tmp_path / f"b.{suffix}", tmp_path / "c.h5")
    options, arrays, _ = read_model(tmp_path / "c.h5")
    assert options["image_size"] == [12, 8]
    assert all(np.array_equal(array, arrays[name]) for name, array in made.arrays().items())
    if model == "dit":
        with pytest.raises(UsageError, match="diffusers' DiT makes squares, but this model 12×8"):
            convert(tmp_path / "a.h5", tmp_path / "folder")
        assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("size", [(4, 9), (9, 4), (6, 6), (1, 36), (36, 1), (2, 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_positions_in_a_file_tell_height_and_width(size, dtype):
    """4 × 9 tokens are as many as 6 × 6."""
    model = DiT(image_size=size, patch_size=1, hidden_size=32, depth=1, num_heads=2, device="cpu")
    table = fixed_tables(model.options)["pos_embed"].astype(dtype)
    state = {**to_torch_layout(model.arrays()), "pos_embed": table}
    assert guess_dit_options(state)["image_size"] == (6 if size == (6, 6) else size)
    if size == (4, 9):
        with pytest.raises(NumdiffError, match="is not the table of sines and cosines"):
            guess_dit_options({**state, "pos_embed": table[:, :20]})


@pytest.mark.parametrize("grid", [(3, 5), (5, 2), (1, 4)])
def test_position_tables_by_the_public_formulas(grid):
    """diffusers' get_2d_sincos_pos_embed: the coordinates of a mesh, the width's first, each by sines
    then cosines; LightningDiT's VisionRotaryEmbeddingFast: rows before columns, in equal pairs."""
    rows, columns = grid
    mesh = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)))  # (2, rows, columns)
    omega = 1 / 10000 ** (np.arange(4) / 4.0)
    parts = [np.outer(line.reshape(-1), omega) for line in mesh]
    wanted = np.concatenate([f(part) for part in parts for f in (np.sin, np.cos)], axis=1)
    assert np.abs(position_table(16, grid) - wanted).max() < 1e-6

    angle = 1 / 10000 ** (np.arange(0, 4, 2) / 4)
    lines = [np.repeat(np.outer(np.arange(n), angle), 2, axis=1) for n in grid]
    both = [
        np.broadcast_to(lines[0][:, None], (rows, columns, 4)),
        np.broadcast_to(lines[1][None], (rows, columns, 4)),
    ]
    wanted = np.concatenate(both, axis=2).reshape(rows * columns, 8)
    assert np.abs(rotation_table(8, grid) - [np.cos(wanted), np.sin(wanted)]).max() < 1e-6


def test_what_a_public_format_cannot_hold():
    options = {**UNet(image_size=(8, 16), channel_mult=(1,), device="cpu").options}
    flags, missing = guided_diffusion_flags(options, {"prediction": "eps"})
    assert "--image_size 16 " in flags and "images of 8×16" in missing[0]
    assert (
        "images of"
        not in guided_diffusion_flags({**options, "image_size": 8}, {"prediction": "eps"})[1]
    )
    with pytest.raises(UsageError, match="makes squares, but this model 32×64"):
        diffusers_config({**DiT(device="cpu", depth=1, seed=None).options, "image_size": [32, 64]})


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {"model": "unet", "image_size": (50, 64)},
            "50x64 cannot be halved 3 times.*such as 48x64",
        ),
        ({"model": "dit", "image_size": (31, 64)}, "31x64 is not divisible by the 2 .*as 32x64"),
        ({"model": "vae", "image_size": (30, 64)}, "30x64 cannot be halved 2 times.*as 32x64"),
        ({"model": "unet", "image_size": (64, 0)}, "--image-size 64x0 must be at least 1"),
        (
            {"model": "unet", "image_size": (64, 5000)},
            "64x5000 must be at least 1 and at most 4096",
        ),
        ({"model": "unet", "image_size": (64, 32, 3)}, "a whole number, or height and width"),
    ],
)
def test_sizes_that_do_not_fit(given, message):
    with pytest.raises(UsageError, match=message):
        resolve({**given, "device": "cpu"})


def test_data_of_another_shape(tmp_path, data):
    saved = resolve({**RUN, **SMALL["unet"], "model": "unet", "data": data})
    with h5py.File(tmp_path / "tall.h5", "w") as file:
        file["images"] = np.zeros((8, 16, 12, 3), np.uint8)
    options = resolve_resumed(saved, {"data": str(tmp_path / "tall.h5")})
    with pytest.raises(UsageError, match="image size 12x16 does not divide the 16x12 pixels"):
        build_dataset(options)
    with pytest.raises(UsageError, match="--image-size 16x12 does not fit .* started with 12x16"):
        resolve_resumed(saved, {"image_size": (16, 12)})


def test_pictures_of_other_proportions(tmp_path):
    Image.new("RGB", (64, 48)).save(tmp_path / "p.png")
    assert read_picture(tmp_path / "p.png", (12, 16, 3)).shape == (12, 16, 3)
    assert read_picture(tmp_path / "p.png", (13, 17, 3)).shape == (13, 17, 3)  # to whole pixels
    for name in "top", "left", "centre":
        mask = read_mask(name, (12, 16))
        assert mask.shape == (12, 16) and mask.mean() == (0.75 if name == "centre" else 0.5)
    for shape in (16, 12, 3), (12, 12, 3), (12, 32, 3):
        with pytest.raises(UsageError, match="has 48×64 pixels, .* crop it to these proportions"):
            read_picture(tmp_path / "p.png", shape)


def test_what_is_trained_where_no_size_is_given(tmp_path):
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["images"] = np.zeros((2, 96, 128, 3), np.uint8)
    for model, levels in ("unet", (1, 2, 4)), ("dit", None):
        options = resolve({"model": model, "data": str(tmp_path / "d.h5"), "device": "cpu"})
        assert options.image_size == (24, 32) and (levels is None or options.channel_mult == levels)
    options = resolve({"model": "unet", "data": str(tmp_path / "d.h5")}, capability=(9, 0))
    assert options.image_size == (96, 128) and options.attention_resolutions == (16, 8)
    assert options.channel_mult == (1, 1, 2, 3, 4)
