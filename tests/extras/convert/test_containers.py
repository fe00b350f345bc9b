"""The model's weights in training checkpoints of other programs: averages without names, prefixes,
further tables."""

from collections import OrderedDict

import numpy as np
import pytest

from numdiff.errors import NumdiffError
from numdiff.extras.convert.dit import with_positions
from numdiff.extras.convert.files import load_state_dict, read_weights
from tests.extras.convert.test_state_dicts import model_state
from tests.extras.convert.weights import pickled, same, tensor, write_pt, write_weights
from tests.reference import stored, stored_dit


def write(path, content):
    """torch.save of nested dicts and lists, whose arrays become tensors."""
    storages = {}

    def saved(value):
        if isinstance(value, np.ndarray):
            key = str(len(storages))
            storages[key] = value.astype("<f4").tobytes()
            return tensor("FloatStorage", key, value.size, value.shape)
        if isinstance(value, dict):
            return OrderedDict((k, saved(v)) for k, v in value.items())
        return [saved(v) for v in value] if isinstance(value, list) else value

    return write_pt(path, pickled(saved(content)), storages)


@pytest.fixture(scope="module")
def state():
    return model_state("plain")[0]


@pytest.fixture(scope="module")
def averaged(state):
    return {name: 2 * array for name, array in state.items()}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda raw, shadow: {
            "ema": {"decay": 0.99, "shadow_params": shadow, "collected_params": None},
            "model": raw,
        },
        lambda raw, shadow: {
            "model_state_dict": raw,
            "ema_state_dict": {"shadow_params": shadow},
            "epoch": 3,
        },
        lambda raw, shadow: {
            "shadow_params": shadow,
            "state_dict": {f"module.{k}": v for k, v in raw.items()},
        },
        lambda raw, shadow: {
            "ema": {"shadow_params": shadow},
            "model": {"betas": np.ones(3), **raw},
        },
    ],
    ids=["torch_ema", "ema_state_dict", "separate", "with_buffers"],
)
def test_averages_without_names(state, averaged, wrap):
    """torch-ema's list is in the order of the parameters, whose names are in the separate state
    dict."""
    path = write("w.pt", wrap(state, list(averaged.values())))
    assert same(load_state_dict(path), averaged) and same(load_state_dict(path, "raw"), state)


@pytest.mark.parametrize(
    "left_out",
    [
        (),
        ("feat_rope.freqs_cos", "feat_rope.freqs_sin"),
        ("pos_embed", "feat_rope.freqs_cos", "feat_rope.freqs_sin"),
    ],
)
def test_fixed_tables_missing_in_an_average_come_from_the_state_dict(left_out):
    """A LightningDiT's positions and angles: the average is of the parameters, or of those that are
    trained."""
    info = stored.load("dit_rope")["info"]
    raw = with_positions(stored_dit.state_dict(info["shapes"], 1), info["options"])
    averaged = {name: array if name in left_out else 2 * array for name, array in raw.items()}
    shadow = [array for name, array in averaged.items() if name not in left_out]
    path = write("w.pt", {"ema": {"shadow_params": shadow}, "model": raw})
    assert same(load_state_dict(path), averaged, in_order=False)


def test_averages_that_cannot_be_named(state, averaged):
    shadow = list(averaged.values())
    for content, message in (
        (
            {"ema": {"shadow_params": shadow}},
            "no state dict with them to take names from: save them by",
        ),
        ({"shadow_params": shadow}, "no state dict with them"),
        (
            {"ema": {"shadow_params": shadow[1:]}, "model": state},
            "do not match, one by one, .*--weights raw",
        ),
        ({"ema": {"shadow_params": shadow[::-1]}, "model": state}, "do not match, one by one"),
        ({"ema": {"shadow_params": [1] * len(shadow)}, "model": state}, "do not match, one by one"),
    ):
        with pytest.raises(NumdiffError, match=message):
            load_state_dict(write("w.pt", content))
    assert same(load_state_dict("w.pt", "raw"), state)


def prefixed(prefix, state):
    return {prefix + name: array for name, array in state.items()}


@pytest.mark.parametrize(
    "prefix", ["model.", "module.", "_orig_mod.", "model.diffusion_model.", "net._orig_mod."]
)
@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_prefixes(state, prefix, kind):
    """Lightning's state dict has the whole module's names, those of its loss and its diffusion's
    tables among them."""
    whole = {
        "betas": np.full(7, 0.1, np.float32),
        **prefixed(prefix, state),
        "loss.weight": np.ones(3, np.float32),
        prefix + "alphas_cumprod_prev": np.ones(7, np.float32),
    }
    if kind == "pt":
        path = write(
            "w.ckpt",
            {"epoch": 3, "global_step": 10, "state_dict": whole, "callbacks": {}},
        )
    else:
        path = write_weights("w.safetensors", whole, "safetensors")
    got, settings = read_weights(path)
    assert same(got, state, in_order=False)
    np.testing.assert_array_equal(settings["betas"], whole["betas"])


@pytest.mark.parametrize(
    "raw, ema",
    [
        ("model.", "ema_model."),
        ("", "ema."),
        ("model.", "model_ema.module."),
        ("online_model.model.", "ema_model.model."),
    ],
)
def test_two_models_in_one_state_dict(state, averaged, raw, ema):
    path = write("w.pt", {**prefixed(raw, state), **prefixed(ema, averaged), "step": np.ones(1)})
    assert load_state_dict(path).keys() == state.keys()
    extra = {"step": np.ones(1)} if raw == "" else {}
    assert same(load_state_dict(path, "raw"), {**state, **extra}, in_order=False)
    two = write("w.pt", {**prefixed("a.", state), **prefixed("b.", averaged)})
    with pytest.raises(NumdiffError, match="several models .their names begin with 'a.' and 'b.'"):
        load_state_dict(two)


def test_averages_in_buffers_without_dots(state, averaged):
    """LDM's LitEma: model_ema.diffusion_modeltime_embed0weight."""
    mangled = {
        "model_ema." + f"diffusion_model.{name}".replace(".", ""): a for name, a in averaged.items()
    }
    whole = {**prefixed("model.diffusion_model.", state), "model_ema.decay": np.ones(1), **mangled}
    path = write("w.ckpt", {"state_dict": whole})
    assert same(load_state_dict(path), averaged) and same(load_state_dict(path, "raw"), state)
    del whole[next(iter(mangled))]
    with pytest.raises(
        NumdiffError, match="lack 1 of the model's, first model.diffusion_model.time_embed.0.weight"
    ):
        load_state_dict(write("w.ckpt", {"state_dict": whole}))


def test_a_safetensors_file_whose_first_byte_is_a_pickles(tmp_path):
    """The header's length comes first, and its lowest byte may be that with which a pickle begins."""
    for padding in range(400):
        array = np.ones(3, np.float32)
        write_weights("w.bin", {"a": array}, "safetensors", {"x": "y" * padding})
        if (tmp_path / "w.bin").read_bytes()[0] == 0x80:
            break
    else:
        raise AssertionError("no such length")
    np.testing.assert_array_equal(load_state_dict("w.bin")["a"], np.ones(3))
