"""What `train unet` shares with a DiT: a null class, a learned variance; and heads of another
number on the way up."""

import numpy as np
import pytest

import numdiff
from numdiff.errors import UsageError
from numdiff.extras.convert.models import convert
from numdiff.extras.convert.unet import guess_unet_options, unet_shapes
from numdiff.training.build import describe_model, model_options
from numdiff.training.options import resolve
from numdiff.training.step import Randomness
from tests.command import run
from tests.models import small_unet


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of two steps, resumed after one."""
    outdir = tmp_path_factory.mktemp("runs")
    first = run(
        "train unet --device cpu --outdir",
        outdir,
        "--preset tiny --size 16 --model-channels 32 --channel-mult 1,2 --batch 4",
        "--steps 1 --sample-count 0 --classes Flags,Symbols --class-cond",
        "--class-dropout 0.5 --learn-sigma --num-heads 2 --num-heads-upsample 4",
        "--vlb-weight 1 --ema-decay 0.5 --no-ema-warmup --lr 1e-3",
    )
    assert first.exit_code == 0, first.output
    again = run("train unet --resume --outdir", outdir, "--steps 2")
    assert again.exit_code == 0, again.output
    wrong = run("train unet --resume --outdir", outdir, "--steps 3 --class-dropout 0.1")
    assert "--class-dropout 0.1 does not fit the run, which was started with 0.5" in wrong.output
    return next(outdir.iterdir())


def test_such_a_unet_is_trained_resumed_and_sampled_with_guidance(folder):
    model = numdiff.load(folder, device="cpu")
    assert (model.null_class, model.num_classes, model.learn_sigma, model.out_channels) == (
        2,
        2,
        True,
        6,
    )
    assert model.arrays()["label_emb.weight"].shape[0] == 3 and model.diffusion["vlb_weight"] == 1
    assert {
        block.heads
        for stage in model.output_blocks.modules.values()
        for block in stage.modules.values()
        if hasattr(block, "heads")
    } <= {4} and model.middle_block[1].heads == 2
    x = np.ones((2, 16, 16, 3), np.float32)
    assert model.predict(x, 5, [0, 2]).shape == (2, 16, 16, 6)
    plain, guided = (
        numdiff.sample(model, 2, 2, y=1, cfg_scale=scale, sampler="ddpm") for scale in (None, 3.0)
    )
    assert plain.shape == guided.shape and not np.array_equal(plain, guided)


def test_some_images_lose_their_class_in_training():
    """As many as the option says, those whose counter says so; none without randomness."""
    model = small_unet(num_classes=3, class_dropout=0.5)
    seen = []
    plain = model.label_emb.forward
    model.label_emb.forward = lambda labels: seen.append(labels) or plain(labels)
    y, x, t = (
        np.arange(64, dtype=np.int32) % 3,
        np.zeros((64, 8, 8, 3), np.float32),
        np.zeros(64, np.int32),
    )
    from numdiff.nn import Tensor

    for randomness in (None, Randomness(0, np.zeros(1, np.uint32), np.arange(64, dtype=np.uint32))):
        model(Tensor(x), t, y, randomness=randomness)
    assert np.array_equal(seen[0], y)
    dropped = seen[1] == 3
    assert 20 < dropped.sum() < 44 and np.array_equal(seen[1][~dropped], y[~dropped])


@pytest.mark.parametrize("ending", ["npz", "safetensors"])
def test_there_and_back(folder, tmp_path, ending):
    """The null class is the last row of label_emb; our own files say so."""
    result = run("convert", folder, tmp_path / f"a.{ending}")
    assert "2 and a null class, the last row of label_emb: elsewhere, 3 classes" in result.output
    back = convert(tmp_path / f"a.{ending}", tmp_path / "b.h5")
    first, second = (
        numdiff.load(folder, device="cpu"),
        numdiff.load(tmp_path / "b.h5", device="cpu"),
    )
    assert (second.num_classes, second.null_class) == (2, 2)
    assert back.options["class_dropout"] == 0.5
    for name, array in first.arrays().items():
        np.testing.assert_array_equal(array, second.arrays()[name])


def test_a_class_table_of_another_program(tmp_path):
    rng, options = (
        np.random.default_rng(0),
        small_unet(num_classes=4).options,
    )
    state = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in unet_shapes(options).items()
    }
    np.savez(tmp_path / "w.npz", **state)
    shapes = {"image_size": 8, "num_head_channels": 32}
    assert guess_unet_options(state, 8)["num_classes"] == 4
    for given, classes, dropped in ((None, 4, False), (4, 4, False), (3, 3, True)):
        result = convert(tmp_path / "w.npz", tmp_path / "o.h5", num_classes=given, **shapes)
        assert (
            result.options["num_classes"] == classes
            and (result.options["class_dropout"] > 0) == dropped
        )
        model = numdiff.load(tmp_path / "o.h5", device="cpu")
        assert model.null_class == (3 if dropped else None)
    with pytest.raises(UsageError, match="--num-classes 7: the class table of .* has 4 rows"):
        convert(tmp_path / "w.npz", tmp_path / "o.h5", num_classes=7, **shapes)


def test_convnext_blocks_and_scale_shift_exclude_each_other():
    dry = "train unet --preset tiny --block convnext --dry-run --device cpu"
    assert (
        "1,331,331 parameters, 32 channels × (1, 2, 4), ConvNeXt blocks, attention at 8×8\n"
        in run(dry).output
    )
    refused = run(dry, "--use-scale-shift-norm")
    assert refused.exit_code == 2 and "leave out --use-scale-shift-norm." in " ".join(
        refused.output.split()
    )


@pytest.mark.parametrize(
    "more, text",
    [
        ({}, "attention at 8×8"),
        (
            {"image_size": 64},
            "(1 more level than the preset, for this image size), attention at 8×8",
        ),
        (
            {"image_size": 64, "channel_mult": (1, 2, 4)},
            "32 channels × (1, 2, 4), attention in the middle alone, at 16×16 (the preset's at 8×8 does not occur)",
        ),
        (
            {"image_size": 64, "channel_mult": (1, 2, 4), "attention_resolutions": (32,)},
            "attention at 32×32, in the middle at 16×16 (the preset's at 8×8 does not occur)",
        ),
        ({"preset": "unet64"}, "attention at 16×16 and 8×8"),
        (
            {"preset": "unet64", "image_size": 32},
            "attention at 16×16 and 8×8, in the middle at 4×4",
        ),
        (
            {"preset": "unet64", "image_size": 512},
            "(3 more levels than the preset, for this image size), attention at 16×16 and 8×8",
        ),
    ],
)
def test_the_log_says_where_attention_is(more, text):
    """A preset's sizes may not occur where the images are of another size."""
    options = resolve({"model": "unet", "preset": "tiny", "device": "cpu", **more})
    assert describe_model(options, model_options(options)).endswith(f" {text}")
