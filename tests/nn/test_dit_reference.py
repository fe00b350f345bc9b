"""The DiT, its loss and its training against values from an independent PyTorch implementation
(tests/reference)."""

import numpy as np
import pytest

from numdiff.device import download
from numdiff.diffusion import Diffusion
from numdiff.extras.convert.dit import with_padding, without_padding
from numdiff.extras.convert.layout import to_numdiff_layout, to_torch_layout
from numdiff.nn import DiT, Tape, Tensor
from numdiff.nn.dit import MODELS, position_table
from numdiff.nn.dit_shapes import dit_parameter_counts, dit_shapes
from tests.conftest import large, relative_error
from tests.nn.test_unet_reference import (
    BACKWARD,
    FORWARD,
    check_gradients,
    check_where_weights_end,
    train_as_stored,
)
from tests.reference import stored, stored_dit


def build(info, engine, seed):
    model = DiT(**info["options"], device=engine.device, seed=0)
    model.load_arrays(
        to_numdiff_layout(with_padding(stored_dit.state_dict(info["shapes"], seed), model.options))
    )
    return model


@large
@pytest.mark.parametrize("name", list(stored_dit.MODELS))
def test_forward_and_gradients(engine, name):
    reference = stored.load(f"dit_{name}")
    info = reference["info"]
    model = build(info, engine, seed=1)
    assert ["pos_embed", *(e["name"] for e in model.parameters.index)] == list(info["shapes"])
    np.testing.assert_array_equal(
        download(model.pos_embed) if engine.computes else reference["pos_embed"],
        reference["pos_embed"],
    )
    x = Tensor(engine(reference["x"]), requires_grad=True)
    y = engine(reference["y"]) if "y" in reference else None
    with Tape() as tape:
        output = model(x, engine(reference["t"]), y)
    engine.check(output.data, reference["output"], FORWARD)
    tape.backward(output, engine(reference["g"]))
    engine.check(x.grad, reference["dx"], BACKWARD)
    if engine.computes:
        trained = {k: v for k, v in info["shapes"].items() if k != "pos_embed"}
        gradients = to_torch_layout(model.gradients())
        check_gradients(
            without_padding(gradients, model.options), {**reference, "info": {"shapes": trained}}
        )
        kept = with_padding(without_padding(gradients, model.options), model.options)
        # exact zeros in the padding
        assert all(np.array_equal(kept[name], gradients[name]) for name in gradients)


@pytest.mark.parametrize("kind", ["eps", "v", "x_0"])
def test_hybrid_loss(engine, kind):
    reference = stored.load("dit_loss")
    diffusion = Diffusion(reference["info"]["T"], "linear", kind, engine.backend)
    x_0, eps, t = (engine(reference[name]) for name in ("x_0", "eps", "t"))
    output = Tensor(engine(reference[f"{kind}_output"]), requires_grad=True)
    with Tape() as tape:
        loss = diffusion.loss(output, diffusion.target(x_0, eps, t), x_0, t, learn_sigma=True)
    tape.backward(loss)
    engine.check(loss.data, reference[f"{kind}_loss"], 1e-4)
    engine.check(output.grad, reference[f"{kind}_gradient"], BACKWARD)
    for channels in (slice(0, 3), slice(3, 6)):  # the small gradient of the bound is not lost
        if engine.computes:
            got, want = (
                download(output.grad)[..., channels],
                reference[f"{kind}_gradient"][..., channels],
            )
            assert relative_error(got, want) <= BACKWARD


@large
@pytest.mark.parametrize("file", list(stored_dit.TRAJECTORIES))
def test_ten_training_steps(engine, file):
    """Hybrid loss, classes (the null class among them), AdamW with decay, clipping, EMA."""
    reference = stored.load(f"dit_{file}")
    c = reference["info"]
    model = build(c, engine, c["weight_seed"])
    diffusion, start = Diffusion(c["T"], "linear", "eps", model.backend), model.arrays()

    def loss_of(step):
        x_0, eps, t, y = (engine(reference[name][step]) for name in ("x_0", "eps", "t", "y"))
        output = model(Tensor(diffusion.q_sample(x_0, eps, t)), t, y)
        return diffusion.loss(output, eps, x_0, t, learn_sigma=True)

    optimizer = train_as_stored(engine, model, reference, loss_of)
    if engine.computes:
        check_where_weights_end(model, optimizer, start, reference)
        parameters = model.parameters
        flat = optimizer.ema, optimizer.m, optimizer.v
        for arrays in (model.arrays(), *map(parameters.arrays, flat)):
            arrays = to_torch_layout(arrays)  # what pads a SwiGLU's width is still zero
            kept = with_padding(without_padding(arrays, model.options), model.options)
            assert all(np.array_equal(kept[name], arrays[name]) for name in arrays)


PUBLIC = {"image_size": 32, "in_channels": 4, "num_classes": 1000, "class_dropout": 0.1}
PUBLIC |= {"learn_sigma": True, "mlp_ratio": 4.0}
OF_LATENTS = {**PUBLIC, "image_size": 16, "in_channels": 32, "learn_sigma": False}


@pytest.mark.parametrize(
    "name, count, trained",
    [
        ("DiT-S/2", 32_963_360, 32_865_056),
        ("DiT-B/2", 130_512_416, 130_315_808),
        ("DiT-L/2", 458_102_816, 457_840_672),
        ("DiT-XL/2", 675_129_632, 674_834_720),
        ("LightningDiT-B/1", 130_556_192, 130_359_584),
        ("LightningDiT-L/2", 458_153_056, 458_087_520),
        ("LightningDiT-XL/1", 675_256_736, 674_961_824),
    ],
)
def test_parameter_counts(name, count, trained):
    """The counts that the project promises: those of the public code with its fixed positions, of
    LightningDiT on latents of 16×16×32; what fills up the width of L's SwiGLU does not count."""
    options = {**MODELS[name], **(OF_LATENTS if "Lightning" in name else PUBLIC)}
    assert dit_parameter_counts(options) == (count, trained)
    if name == "DiT-S/2":
        model = DiT(**options, device="cpu", seed=None)
        assert (model.parameters.count, model.parameters.trained) == (count, trained)


@pytest.mark.parametrize("name", list(stored_dit.MODELS))
def test_shapes_are_those_of_the_twin(name):
    shapes = stored.load(f"dit_{name}")["info"]["shapes"]
    assert list(dit_shapes(stored_dit.MODELS[name]).items()) == [
        (k, tuple(v)) for k, v in shapes.items()
    ]


def test_positions():
    """Columns before rows, sines before cosines."""
    table = position_table(8, 3)
    row, column = 2, 1
    want = [
        np.sin(column),
        np.sin(column / 100),
        np.cos(column),
        np.cos(column / 100),
        np.sin(row),
        np.sin(row / 100),
        np.cos(row),
        np.cos(row / 100),
    ]
    np.testing.assert_allclose(table[row * 3 + column], want, rtol=1e-6)
