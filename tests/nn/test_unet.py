import numpy as np
import pytest

from numdiff.errors import NumdiffError, UsageError
from numdiff.nn import Tensor, UNet
from numdiff.nn.flops import unet_forward_flops
from tests.nn.test_tape import tiny


def test_the_seeds_model_has_exactly_its_parameters():
    model = UNet(device="cpu")
    assert model.parameters.count == 20_494_211
    assert 3 * 32 * unet_forward_flops(model) == pytest.approx(1.240e12, rel=1e-3)
    assert UNet(device="cpu", conv_resample=True).parameters.count == 22_080_323


def test_parameters_are_aligned_views_of_one_buffer():
    model = tiny()
    assert all(entry["offset"] % 64 == 0 for entry in model.parameters.index)
    model.parameters.data.fill(7)
    assert all((a == 7).all() for a in model.arrays().values())


@pytest.mark.parametrize("options", [
    {}, {"use_scale_shift_norm": True}, {"resblock_updown": True}, {"conv_resample": True}, {"learn_sigma": True},
    {"num_classes": 4}, {"num_head_channels": -1, "num_heads": 4, "num_heads_upsample": 2},
    {"use_new_attention_order": True}, {"dropout": 0.1}, {"max_period": 1000.0}, {"in_channels": 1},
    {"attention_resolutions": ()}, {"num_res_blocks": 2, "channel_mult": (1, 2, 3)}])
def test_every_option_runs_and_keeps_its_shape(rng, options):
    model = tiny(**options)
    model.parameters.load_flat(0.1 * rng.standard_normal(model.parameters.total))
    channels = options.get("in_channels", 3)
    y = np.array([0, 3]) if "num_classes" in options else None
    out = model.predict(rng.standard_normal((2, 8, 8, channels)), 10, y)
    assert out.shape == (2, 8, 8, 2 * channels if "learn_sigma" in options else channels)
    assert np.isfinite(out).all() and out.std() > 0
    again = UNet(**model.options, device="cpu")
    again.load_arrays(model.arrays())
    x = rng.standard_normal((1, 8, 8, channels))
    one = None if y is None else 1
    np.testing.assert_array_equal(again.predict(x, 5, one), model.predict(x, 5, one))


def test_an_image_does_not_depend_on_its_batch(rng):
    model = tiny()
    model.parameters.load_flat(0.1 * rng.standard_normal(model.parameters.total))
    x = rng.standard_normal((3, 8, 8, 3)).astype(np.float32)
    together = model.predict(x, [1, 2, 3])
    alone = model.predict(x[1:2], [2])
    np.testing.assert_allclose(together[1:2], alone, rtol=1e-4, atol=1e-5)


def test_initial_weights_depend_on_the_seed_alone():
    a, b, c = tiny(seed=1), tiny(seed=1), tiny(seed=2)
    np.testing.assert_array_equal(a.parameters.data, b.parameters.data)
    assert not np.array_equal(a.parameters.data, c.parameters.data)


@pytest.mark.parametrize("options, message", [
    ({"image_size": 18, "channel_mult": (1, 2, 2)}, "cannot be halved"), ({"model_channels": 48}, "groups"),
    ({"num_head_channels": 24}, "heads"), ({"dropout": 1.0}, "dropout"),
    ({"num_head_channels": -1, "num_heads": 5}, "num_heads")])
def test_options_that_cannot_be_laid_out_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        tiny(**options)


def test_wrong_inputs_are_named():
    model = tiny()
    with pytest.raises(UsageError, match="has no classes"):
        model.predict(np.zeros((1, 8, 8, 3)), 0, 1)
    with pytest.raises(UsageError, match="has classes"):
        tiny(num_classes=2).predict(np.zeros((1, 8, 8, 3)), 0)
    with pytest.raises(UsageError, match="shape"):
        model.predict(np.zeros((1, 9, 8, 3)), 0)
    arrays = model.arrays()
    with pytest.raises(NumdiffError, match="out.2.bias has shape"):
        model.load_arrays({**arrays, "out.2.bias": np.zeros(5)})
    arrays.pop("out.2.bias")
    with pytest.raises(NumdiffError, match="missing out.2.bias"):
        model.load_arrays(arrays)
    assert model(Tensor(np.zeros((1, 8, 8, 3), np.float32)), np.zeros(1, np.int32)).shape == (1, 8, 8, 3)


def test_predict_refuses_classes_and_timesteps_that_do_not_fit():
    model = tiny(num_classes=2)
    x = np.zeros((2, model.image_size, model.image_size, model.in_channels))
    with pytest.raises(UsageError, match="classes 0 to 1"):
        model.predict(x, 0, [0, 2])
    with pytest.raises(UsageError, match=r"t has shape \(3,\)"):
        model.predict(x, [1, 2, 3], 0)
