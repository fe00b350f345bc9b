import numpy as np
import pytest

from numdiff.errors import NumdiffError, UsageError
from numdiff.nn import Tensor, UNet
from numdiff.nn.flops import forward_flops, total
from numdiff.sizes import sides
from tests.models import small_dit, with_random_weights
from tests.nn.steps import unet


def test_the_seeds_model_has_exactly_its_parameters():
    model = UNet(device="cpu", seed=None)
    assert model.parameters.count == 20_494_211
    assert 3 * 32 * forward_flops(model) == pytest.approx(1.240e12, rel=1e-3)


def test_parameters_are_aligned_views_of_one_buffer():
    model = unet()
    assert all(entry["offset"] % 64 == 0 for entry in model.parameters.index)
    model.parameters.data.fill(7)
    assert all((a == 7).all() for a in model.arrays().values())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_scale_shift_norm": True},
        {"resblock_updown": True},
        {"conv_resample": True},
        {"learn_sigma": True},
        {"num_classes": 4},
        {"num_head_channels": -1, "num_heads": 4, "num_heads_upsample": 2},
        {"use_new_attention_order": True},
        {"dropout": 0.1},
        {"max_period": 1000.0},
        {"in_channels": 1},
        {"block": "convnext"},
        {"block": "convnext", "resblock_updown": True, "num_classes": 4},
        {"image_size": (8, 12), "attention_resolutions": (6,)},
        {"image_size": (12, 8), "block": "convnext"},
        {"attention_resolutions": ()},
        {"num_res_blocks": 2, "channel_mult": (1, 2, 3)},
    ],
)
def test_every_option_runs_and_keeps_its_shape(rng, options):
    model = with_random_weights(unet(**options), 0.1)
    channels = options.get("in_channels", 3)
    y = np.array([0, 3]) if "num_classes" in options else None
    size = sides(model.image_size)
    out = model.predict(rng.standard_normal((2, *size, channels)), 10, y)
    assert out.shape == (2, *size, 2 * channels if "learn_sigma" in options else channels)
    assert np.isfinite(out).all() and out.std() > 0
    again = UNet(**model.options, device="cpu")
    again.load_arrays(model.arrays())
    x = rng.standard_normal((1, *size, channels))
    one = None if y is None else 1
    np.testing.assert_array_equal(again.predict(x, 5, one), model.predict(x, 5, one))


def test_an_image_does_not_depend_on_its_batch(rng):
    model = with_random_weights(unet(), 0.1)
    x = rng.standard_normal((3, 8, 8, 3)).astype(np.float32)
    together = model.predict(x, [1, 2, 3])
    alone = model.predict(x[1:2], [2])
    np.testing.assert_allclose(together[1:2], alone, rtol=1e-4, atol=1e-5)


def test_initial_weights_depend_on_the_seed_alone():
    a, b, c = unet(seed=1), unet(seed=1), unet(seed=2)
    np.testing.assert_array_equal(a.parameters.data, b.parameters.data)
    assert not np.array_equal(a.parameters.data, c.parameters.data)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"image_size": 18, "channel_mult": (1, 2, 2)}, "cannot be halved"),
        ({"model_channels": 48}, "groups"),
        ({"num_head_channels": 24}, "heads"),
        ({"dropout": 1.0}, "dropout"),
        ({"num_head_channels": -1, "num_heads": 5}, "num_heads"),
    ],
)
def test_options_that_cannot_be_laid_out_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        unet(**options)


def test_wrong_inputs_are_named():
    model = unet()
    with pytest.raises(UsageError, match="has no classes"):
        model.predict(np.zeros((1, 8, 8, 3)), 0, 1)
    with pytest.raises(UsageError, match="has classes"):
        unet(num_classes=2).predict(np.zeros((1, 8, 8, 3)), 0)
    with pytest.raises(UsageError, match="shape"):
        model.predict(np.zeros((1, 9, 8, 3)), 0)
    arrays = model.arrays()
    with pytest.raises(NumdiffError, match="out.2.bias has shape"):
        model.load_arrays({**arrays, "out.2.bias": np.zeros(5)})
    arrays.pop("out.2.bias")
    with pytest.raises(NumdiffError, match="missing out.2.bias"):
        model.load_arrays(arrays)
    assert model(Tensor(np.zeros((1, 8, 8, 3), np.float32)), np.zeros(1, np.int32)).shape == (
        1,
        8,
        8,
        3,
    )


def test_predict_refuses_classes_and_timesteps_that_do_not_fit():
    model = unet(num_classes=2)
    x = np.zeros((2, model.image_size, model.image_size, model.in_channels))
    with pytest.raises(UsageError, match="classes 0 to 1"):
        model.predict(x, 0, [0, 2])
    with pytest.raises(UsageError, match=r"t has shape \(3,\)"):
        model.predict(x, [1, 2, 3], 0)


# Timesteps and classes ----------------------------------------------------------------------------


def random_model(kind):
    return with_random_weights((unet if kind == "unet" else small_dit)(num_classes=3), 0.1)


@pytest.mark.parametrize("kind", ["unet", "dit"])
def test_timesteps_and_classes_that_cannot_be_are_errors(kind):
    model, x = random_model(kind), np.zeros((2, 8, 8, 3), np.float32)
    model.diffusion = {"steps": 600}
    with pytest.raises(UsageError, match=r"x_t has shape \(0, 8, 8, 3\)"):
        model.predict(x[:0], 3, 0)
    for t in (
        -1,
        -1e-3,
        600.5,
        601,
        2**40,
        1e300,
        np.nan,
        np.inf,
        -np.inf,
        [3, np.nan],
        np.float16(np.inf),
    ):
        with pytest.raises(
            UsageError, match="is not between 0 and 600, the range of the model's timesteps"
        ):
            model.predict(x, t, 0)
    with pytest.raises(UsageError, match="timesteps must be numbers"):
        model.predict(x, "3", 0)
    for y in (-1, 5, 0.5, [0, -1], "0", np.nan):
        with pytest.raises(UsageError, match="y holds a class that does not exist"):
            model.predict(x, 3, y)
    t, y = np.zeros(2, np.int32), np.zeros(2, np.int32)
    # the same by hand, on the host
    for wrong in ((t - 1, y), (t + np.float32(np.nan), y), (t, y - 1), (t, y + 5)):
        with pytest.raises(UsageError):
            model(Tensor(x), *wrong)
    assert (
        np.isfinite(model.predict(x, 600, 2)).all() and np.isfinite(model.predict(x, 0.0, 2)).all()
    )


def test_a_seed_is_a_whole_number():
    for seed in (-1, 0.5, "0", 2**64):
        with pytest.raises(UsageError, match="must be a whole number from 0"):
            UNet(image_size=8, model_channels=32, channel_mult=(1,), device="cpu", seed=seed)


def test_convnext_blocks_by_hand(rng):
    """FLOPs and parameters of one block, and what it computes, in NumPy."""
    C, size = 16, 8
    model = unet(
        block="convnext", channel_mult=(1, 2), model_channels=C, groups=4, num_head_channels=-1
    )
    block = model.input_blocks[1][0]
    products, after = block.products(size * size)
    assert (total(products), after) == (
        2 * size * size * (49 * C + 8 * C * C) + 2 * 4 * C * C,
        size * size,
    )
    assert (
        sum(
            p.data.size
            for p in (
                block.depthwise.weight,
                block.depthwise.bias,
                block.mlp_in.weight,
                block.mlp_out.weight,
                block.layer_scale.weight,
            )
        )
        == 50 * C + 8 * C * C + C
    )
    block.layer_scale.weight.data[...] = 0.5
    x, e = rng.standard_normal((2, size, size, C)), rng.standard_normal((2, C))
    got = block(Tensor(x.astype(np.float32)), {block: Tensor(e.astype(np.float32))}).data
    padded, h = (
        np.pad(x, ((0, 0), (3, 3), (3, 3), (0, 0))),
        block.depthwise.bias.data + e[:, None, None],
    )
    for r, s in np.ndindex(7, 7):
        h = h + padded[:, r : r + size, s : s + size] * block.depthwise.weight.data[r, s]
    h = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-6)
    u = h @ block.mlp_in.weight.data.T + block.mlp_in.bias.data
    u = 0.5 * u * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)))
    np.testing.assert_allclose(
        got, x + 0.5 * (u @ block.mlp_out.weight.data.T + block.mlp_out.bias.data), atol=2e-5
    )


@pytest.mark.parametrize(
    "options, message",
    [
        ({"block": "vgg"}, "use 'resnet' or 'convnext'"),
        ({"block": "convnext", "use_scale_shift_norm": True}, "leave out use_scale_shift_norm"),
        (
            {"block": "convnext", "model_channels": 12, "groups": 4, "num_head_channels": -1},
            "no multiple of 8",
        ),
    ],
)
def test_blocks_that_do_not_fit_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        unet(**options)
