"""The UNet and its training against values from an independent PyTorch implementation (see
tests/reference)."""

import numpy as np
import pytest

from numdiff.device import download, fill_zero
from numdiff.diffusion import Diffusion
from numdiff.extras.convert.layout import to_numdiff_layout, to_torch_layout
from numdiff.nn import AdamW, Tape, Tensor, UNet
from numdiff.nn import functional as F
from tests.conftest import large, relative_error
from tests.reference import stored

pytestmark = large
FORWARD, BACKWARD, TRAJECTORY = 1e-4, 1e-3, 1e-3


def build(options, shapes, engine, seed):
    model = UNet(**options, device=engine.device, seed=0)
    model.load_arrays(to_numdiff_layout(stored.state_dict(shapes, seed)))
    return model


@pytest.mark.parametrize("name", list(stored.MODELS))
def test_forward_and_gradients(engine, name):
    reference = stored.load(f"model_{name}")
    info = reference["info"]
    model = build(info["options"], info["shapes"], engine, seed=1)
    assert [e["name"] for e in model.parameters.index] == list(info["shapes"]), (
        "names or their order differ"
    )
    x = Tensor(engine(reference["x"]), requires_grad=True)
    y = engine(reference["y"]) if "y" in reference else None
    with Tape() as tape:
        output = model(x, engine(reference["t"]), y)
    engine.check(output.data, reference["output"], FORWARD)
    tape.backward(output, engine(reference["g"]))
    engine.check(x.grad, reference["dx"], BACKWARD)
    if engine.computes:
        check_gradients(to_torch_layout(model.gradients()), reference)


def test_dropout_is_off_outside_training():
    reference = stored.load("model_plain")
    model = UNet(**reference["info"]["options"], dropout=0.5, device="cpu")
    model.load_arrays(to_numdiff_layout(stored.state_dict(reference["info"]["shapes"], seed=1)))
    assert (
        relative_error(model.predict(reference["x"], reference["t"]), reference["output"])
        <= FORWARD
    )


def check_gradients(gradients, reference):
    """Drawn elements and the norm of each parameter's gradient. Some are zero in theory (a constant
    added before a normalisation), so errors are held against the parameter's own norm plus a
    millionth of the largest."""
    largest, at = reference["norms"].max(), 0
    for (name, shape), norm in zip(
        reference["info"]["shapes"].items(), reference["norms"], strict=True
    ):
        gradient = gradients[name]
        assert gradient.shape == tuple(shape), name
        places = stored.positions(name, gradient.size)
        want = reference["samples"][at : at + len(places)]
        at += len(places)
        share = (len(places) / gradient.size) ** 0.5  # of the norm that the drawn elements carry
        error = np.linalg.norm(gradient.reshape(-1)[places].astype(np.float64) - want)
        assert error <= (BACKWARD * norm + 1e-6 * largest) * share, (
            f"{name}: gradient off by {error / norm:.1e}"
        )
        assert (
            abs(np.linalg.norm(gradient.astype(np.float64)) - norm)
            <= BACKWARD * norm + 1e-6 * largest
        ), name
    assert at == len(reference["samples"])


def train_as_stored(engine, model, reference, loss_of, losses="loss", norms="gradient_norm"):
    """Train with the stored settings and compare each loss and gradient norm; returns the optimizer.

    loss_of: a function of the step that returns the loss, recorded on a tape
    losses, norms: names of the stored values
    """
    c = reference["info"]
    names = "learning_rate", "beta1", "beta2", "eps", "weight_decay", "clip_norm", "ema_decay"
    optimizer = AdamW(model.parameters, **{name: c[name] for name in names if name in c})
    for step in range(c["steps"]):
        fill_zero(model.parameters.grad)
        with Tape() as tape:
            loss = loss_of(step)
        tape.backward(loss)
        optimizer.update(loss.data)
        if engine.computes:
            for name, got in ((losses, loss.data), (norms, optimizer.gradient_norm)):
                want = reference[name][step]
                assert abs(float(download(got)[0]) / want - 1) <= TRAJECTORY, f"{name}, step {step}"
    return optimizer


def check_where_weights_end(model, optimizer, start, reference):
    """The norms of weights, of their averages and of how far they moved, each within five times the
    tolerance of all."""
    end, ema = model.arrays(), model.parameters.arrays(optimizer.ema)
    for key, values in (
        ("parameter_norms", end),
        ("ema_norms", ema),
        ("moved_norms", {k: end[k] - start[k] for k in end}),
    ):
        got = np.array([np.linalg.norm(values[name].astype(np.float64)) for name in start])
        worst = np.argmax(np.abs(got / reference[key] - 1))
        assert relative_error(got, reference[key]) <= TRAJECTORY, key
        assert abs(got[worst] / reference[key][worst] - 1) <= 5 * TRAJECTORY, (
            f"{key} of {list(start)[worst]}"
        )


def test_ten_training_steps(engine):
    """AdamW, clipping by global norm, EMA, eps prediction: losses, gradient norms and where the
    weights end."""
    reference = stored.load("trajectory")
    c = reference["info"]
    model = build(c["options"], c["shapes"], engine, c["weight_seed"])
    diffusion, start = Diffusion(c["T"], "linear", "eps", model.backend), model.arrays()

    def loss_of(step):
        x_0, eps, t = (engine(reference[name][step]) for name in ("x_0", "eps", "t"))
        return F.mse(model(Tensor(diffusion.q_sample(x_0, eps, t)), t), eps)

    optimizer = train_as_stored(engine, model, reference, loss_of)
    if engine.computes:
        check_where_weights_end(model, optimizer, start, reference)


@pytest.mark.parametrize("name, count", [("seed", 20_494_211), ("seed_conv_resample", 22_080_323)])
def test_parameter_count(name, count):
    """The two counts that the project promises, and every name and shape of these models."""
    model = UNet(**stored.SHAPES[name], device="cpu", seed=None)
    assert model.parameters.count == count
    shapes = {k: v.shape for k, v in to_torch_layout(model.arrays()).items()}
    assert shapes == stored.load_shapes()[name]
