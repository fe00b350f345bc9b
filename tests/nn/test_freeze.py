"""Parameters that are not trained: their bits stay, the others learn as if they were not there."""

import copy
import functools
import pickle

import numpy as np
import pytest

from numdiff import kernels as K
from numdiff.device import copy_into, download, upload, zeros
from numdiff.device.emulator import EmulatorDevice
from numdiff.errors import UsageError
from numdiff.nn import AdamW, Tape, Tensor
from numdiff.nn.flops import forward_flops, step_flops
from numdiff.nn.module import frozen_by
from tests.conftest import exhaustively, where
from tests.models import small_dit, small_unet

PATTERNS = {
    "unet": (
        ("input_blocks.*",),
        ("*.bias",),
        ("*.weight",),
        ("input_blocks.*", "time_embed.*", "label_emb.*"),
        ("*.emb_layers.*",),
        ("*qkv*", "out.*"),
    ),
    "dit": (
        ("blocks.*",),
        ("*.bias",),
        ("*.weight",),
        ("x_embedder.*", "t_embedder.*", "y_embedder.*"),
        ("*.mlp.fc1.*",),
        ("*.fc2.weight", "*adaLN*"),
    ),
}
CASES = [(kind, patterns) for kind in PATTERNS for patterns in PATTERNS[kind]]


def model_of(kind, device="cpu"):
    """A small model none of whose weights is zero."""
    if kind == "unet":
        sizes = {"model_channels": 8, "channel_mult": (1, 2), "attention_resolutions": (4,)}
        sizes |= {"num_head_channels": 8, "groups": 4}
        model = small_unet(**sizes, num_classes=3, device=device)
    else:
        model = small_dit(hidden_size=16, depth=2, num_classes=3, device=device)
    rng = np.random.default_rng(1)
    model.load_arrays(
        {
            name: array + 0.1 * rng.standard_normal(array.shape).astype(np.float32)
            for name, array in model.arrays().items()
        }
    )
    return model


def backward(model, rng, passes=1):
    """Gradients by name after some backward passes of one step; what the buffer held before is of
    no matter."""
    x = rng.standard_normal((2, 8, 8, 3)).astype(np.float32)
    t, y = np.array([3, 40], np.int32), np.array([2, 0], np.int32)
    dy = rng.standard_normal((2, 8, 8, model.out_channels)).astype(np.float32)
    x, t, y, dy = (upload(a, model.backend) for a in (x, t, y, dy))
    model.parameters.begin_gradients()
    for _ in range(passes):
        with Tape() as tape:
            out = model(Tensor(x), t, y)
        tape.backward(out, dy)
    model.parameters.end_gradients()
    return model.gradients()


@functools.cache
def gradients_of(kind):
    """Of two passes of a model of which nothing is frozen."""
    return backward(model_of(kind), np.random.default_rng(2), 2)


@pytest.mark.parametrize("kind, patterns", CASES)
@pytest.mark.parametrize("recomputed", [False, True])
def test_what_is_trained_has_the_gradients_of_the_whole(kind, patterns, recomputed):
    whole = gradients_of(kind)
    model = model_of(kind)
    model.parameters.freeze(patterns)
    if recomputed:
        model.recompute_blocks()
    got = backward(model, np.random.default_rng(2), 2)
    frozen = frozen_by(patterns, {name: value.shape for name, value in whole.items()})
    assert 0 < len(frozen) < len(whole)
    assert model.parameters.trained == sum(
        value.size for name, value in whole.items() if name not in frozen
    )
    for name, value in got.items():
        if name not in frozen:
            np.testing.assert_array_equal(value, whole[name], err_msg=name)
    for array in (got[name] for name in frozen if got[name].ndim > 1 and "emb_layers" not in name):
        assert not array.any()  # the large ones are not computed


def test_what_comes_before_the_first_trained_layer_is_not_recorded():
    model = model_of("dit")
    x, t, y = (
        Tensor(np.zeros((1, 8, 8, 3), np.float32)),
        np.zeros(1, np.int32),
        np.zeros(1, np.int32),
    )
    counts = []
    for patterns in ((), ("x_embedder.*", "t_embedder.*", "y_embedder.*", "blocks.0.*")):
        model.parameters.freeze(patterns)
        with Tape() as tape:
            model(x, t, y)
        counts.append(len(tape.records))
    assert counts[1] < counts[0] / 2 + 3


@pytest.mark.parametrize(
    "device, patterns",
    [
        ("cpu", ("*.bias",)),
        ("cpu", ("x_embedder.*", "final_layer.*")),
        ("emulator", ("blocks.*",)),
        *exhaustively(("emulator", ("*.bias",))),
    ],
)
def test_frozen_bits_stay_and_are_not_in_the_norm(device, patterns):
    model = model_of(
        "dit", EmulatorDevice(checks=False, float64=False) if device == "emulator" else device
    )
    parameters = model.parameters
    if device == "emulator":
        parameters.keep_half()
    parameters.freeze(patterns)
    optimizer = AdamW(
        parameters, learning_rate=1e-2, weight_decay=0.1, clip_norm=1.0, ema_decay=0.9
    )
    before, half = model.arrays(), parameters.half and download(parameters.half)
    gradient = np.random.default_rng(0).standard_normal(parameters.total).astype(np.float32)
    frozen = {name for name, p in parameters.parameters.items() if p.frozen}
    views = parameters.arrays(gradient)
    gap = np.ones(parameters.total, bool)
    for entry in parameters.index:
        gap[entry["offset"] : entry["offset"] + int(np.prod(entry["shape"]))] = False
    gradient[gap] = 0
    for _ in range(2):
        copy_into(parameters.grad, gradient)
        optimizer.update(zeros(1, np.float32, parameters.data))
    expected = np.sqrt(
        sum(np.square(v.astype(np.float64)).sum() for n, v in views.items() if n not in frozen)
    )
    assert float(download(optimizer.gradient_norm)[0]) == pytest.approx(expected, rel=1e-5)
    after, ema, m = model.arrays(), parameters.arrays(optimizer.ema), parameters.arrays(optimizer.m)
    for name, value in before.items():
        if name in frozen:
            np.testing.assert_array_equal(after[name], value)
            np.testing.assert_array_equal(ema[name], value)
            assert not m[name].any()
        else:
            assert (after[name] != value).all() and (ema[name] != value).any() and m[name].all(), (
                name
            )
    if half is not None:  # the copy that the model computes with
        np.testing.assert_array_equal(
            download(parameters.half), download(parameters.data).astype(np.float16)
        )


def test_copies_and_pickles_stay_frozen_and_all_can_be_trained_again():
    model = model_of("dit")
    total = model.parameters.trained
    model.parameters.freeze(["blocks.*"])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.parameters.trained_ranges == model.parameters.trained_ranges
        assert [p.frozen for p in other.parameters.parameters.values()] == [
            name.startswith("blocks.") for name in model.parameters.parameters
        ]
        assert other.parameters.trained == model.parameters.trained < total
    model.parameters.freeze(())
    assert (
        model.parameters.trained_ranges == [(0, model.parameters.total)]
        and model.parameters.trained == total
    )
    assert not any(p.frozen for p in model.parameters.parameters.values())


@pytest.mark.parametrize("kind", PATTERNS)
def test_flops_of_a_step(kind):
    """Frozen weights have no gradient; what comes before the first trained layer, attention too,
    has no backward."""
    model = model_of(kind)
    products, names = model.products(), model.parameters.parameters
    whole = forward_flops(model)
    frozen = {name for name in names if "qkv" in name}
    weights = sum(flops for name, flops, of_weight in products if name in frozen and of_weight)
    assert 0 < weights < whole and any(not product.of_weight for product in products)
    assert step_flops(products, names) == 3 * whole
    assert step_flops(products, names, frozen) == 3 * whole - weights
    last = [name for name in names if name.startswith(("out.", "final_layer."))]
    assert step_flops(products, names, names.keys() - last) == whole + 2 * sum(
        flops for name, flops, _ in products if name in last
    )


@pytest.mark.parametrize(
    "patterns, words",
    [
        (
            ["block.*"],
            "--freeze block.* matches none of the model's 31 parameters; did you mean blocks.",
        ),
        (
            ["zzz"],
            "--freeze zzz matches none of the model's 31 parameters; they are called as 'x_embedder.proj.weight'.",
        ),
        (
            ["blocks.*", "*"],
            "--freeze blocks.*,* matches all of the model's 31 parameters, so that none is left to train",
        ),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(patterns, words):
    model = model_of("dit")
    with pytest.raises(UsageError) as refused:
        model.parameters.freeze(patterns)
    assert words in str(refused.value)
    assert model.parameters.trained_ranges == [(0, model.parameters.total)]


@where(lambda engine: engine != "ptx")
def test_layers_without_the_weights_gradient(engine, rng):
    """Linear and convolution: the input's and the bias's gradients, as with it."""
    x, dy = (
        rng.standard_normal((1, 2, 2, 8)).astype(np.float32),
        rng.standard_normal((1, 2, 2, 16)).astype(np.float32),
    )
    for kernel in (1, 3):
        weight = rng.standard_normal((16, kernel, kernel, 8)).astype(np.float32)
        results = []
        for wanted in (True, False):
            dbias = engine(np.zeros(16, np.float32))
            dweight = engine(np.zeros(weight.shape, np.float32)) if wanted else None
            dx = K.conv2d_backward(engine(dy), engine(x), engine(weight), dweight, dbias)
            results.append((download(dx), download(dbias)))
        if engine.computes:
            np.testing.assert_array_equal(results[0][0], results[1][0])
            np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-5, atol=1e-5)
