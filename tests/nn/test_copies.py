"""Copies of models are whole: `copy.deepcopy` and pickle, on every engine that can hold an array."""

import copy
import pickle

import numpy as np
import pytest

from numdiff.device import download, fill_zero, is_device
from numdiff.device.gpu import restore_gpu
from numdiff.nn import AdamW, Tape, Tensor
from tests.conftest import quick
from tests.models import small_dit, small_unet, with_random_weights

X = np.linspace(-1, 1, 2 * 8 * 8 * 3, dtype=np.float32).reshape(2, 8, 8, 3)
COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda value: pickle.loads(pickle.dumps(value))}


def build(kind, device="cpu"):
    if kind == "unet":
        sizes = {"model_channels": 8, "num_head_channels": 8, "groups": 4}
        model = small_unet(**sizes, num_classes=3, device=device)
    else:
        model = small_dit(hidden_size=16, num_classes=3, device=device)
    return with_random_weights(model, 0.1)


def predict(model):
    return model.predict(X, [3, 500], [0, 2])


def shift(model, by=0.05):
    model.load_arrays({name: array + by for name, array in model.arrays().items()})


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_copy_is_trained_and_the_original_is_not(how, recompute):
    model = build("unet")
    if recompute:
        model.recompute_blocks()
    weights, new = model.arrays(), COPIES[how](model)
    optimizer = AdamW(new.parameters, learning_rate=1e-2)
    with Tape() as tape:
        y = new(Tensor(X), np.array([3, 500]), np.array([0, 2], np.int32))
    assert any("again" in record.name for record in tape.records) == recompute
    tape.backward(y, np.ones(y.shape, np.float32))
    before = predict(new)
    optimizer.update(np.ones(1, np.float32))
    assert not np.array_equal(predict(new), before)
    for name, value in model.arrays().items():
        np.testing.assert_array_equal(value, weights[name])
    assert not model.parameters.grad.any() and new.parameters.grad.any()


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_made_while_an_average_is_bound_has_the_average_as_its_weights(how):
    model = build("unet")
    average = model.parameters.data * np.float32(0.5)
    model.parameters.bind(average)
    expected = predict(model)
    new = COPIES[how](model)
    model.parameters.bind(model.parameters.data)
    average[:] = 0
    np.testing.assert_array_equal(predict(new), expected)
    for name, value in model.arrays().items():
        np.testing.assert_array_equal(new.arrays()[name], value * np.float32(0.5))
    shift(new)
    assert not np.array_equal(predict(new), expected)


@pytest.mark.parametrize("how", COPIES)
def test_a_part_of_a_model_and_several_of_them(how):
    model = build("unet")
    part = COPIES[how](model.middle_block)
    np.testing.assert_array_equal(
        part[0].in_layers[2].weight.data, model.middle_block[0].in_layers[2].weight.data
    )
    assert not np.shares_memory(part[0].in_layers[2].weight.data, model.parameters.data)
    one, again, optimizer = COPIES[how]((model, model, AdamW(model.parameters, ema_decay=0.9)))
    assert one is again and optimizer.parameters is one.parameters


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", ["unet", "dit"])
@quick(lambda kind, how: (kind == "dit") == (how == "pickle"))
def test_on_a_device(kind, how):
    """Arrays are copied there, with the float16 copy; a pickle holds NumPy arrays and the device's
    name."""
    model = build(kind, "emulator")
    model.compute_in_half()
    new = COPIES[how](model)
    assert new.backend is model.backend and new.dtype == np.float16
    buffers, old = new.parameters, model.parameters
    for name in ("data", "half", *(["grad"] if how == "deepcopy" else [])):
        assert (
            is_device(getattr(buffers, name))
            and getattr(buffers, name).memory is not getattr(old, name).memory
        )
        for entry, value in zip(
            buffers.index, model.parameters.arrays(getattr(old, name)).values(), strict=True
        ):
            np.testing.assert_array_equal(
                buffers._view(download(getattr(buffers, name)), entry), value
            )
    for parameter in buffers.parameters.values():
        assert (
            parameter.data.memory is buffers.data.memory
            and parameter.half.memory is buffers.half.memory
        )
        assert parameter.grad.memory is buffers.grad.memory
    if kind == "dit":
        assert new.pos_embed.memory is not model.pos_embed.memory
    shift(new)
    assert not np.array_equal(download(buffers.half), download(old.half))
    if how == "pickle":
        assert b"Emulator" not in pickle.dumps(model)


def test_a_gpus_pickle_opens_on_the_cpu_in_float32(monkeypatch):
    model = build("dit", "emulator")
    model.compute_in_half()
    monkeypatch.setattr(type(model.backend), "name", "cuda")
    monkeypatch.setattr(type(model.backend), "__reduce__", lambda self: (restore_gpu, ()))
    monkeypatch.setattr("numdiff.device.gpu.why_no_gpu", lambda: "none")
    data = pickle.dumps(model)
    new = pickle.loads(data)
    assert new.backend is None and new.dtype == np.float32 and new.parameters.half is None
    assert isinstance(new.pos_embed, np.ndarray)
    for name, value in model.arrays().items():
        np.testing.assert_array_equal(new.arrays()[name], value)
    assert np.isfinite(predict(new)).all() and restore_gpu() is None


def test_a_device_array_copies_and_pickles():
    model = build("dit", "emulator")
    view = model.parameters.data[64:128].reshape(8, 8)
    for how in COPIES.values():
        new = how(view)
        np.testing.assert_array_equal(download(new), download(view))
        fill_zero(new)
        assert download(view).any()
