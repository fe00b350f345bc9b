"""Samples in E4M3: near float32's, of the same bits in any batch, from a byte a weight."""

import numpy as np
import pytest

import numdiff
from numdiff.device.arena import Arena
from numdiff.device.planned import CARDS
from numdiff.diffusion.memory import Measuring, measuring_twin
from numdiff.errors import UsageError
from numdiff.nn import DiT
from numdiff.training.inference import calibrate, inference_model
from numdiff.training.precision import set_precision

SMALL = {
    "image_size": 4,
    "hidden_size": 32,
    "depth": 3,
    "num_heads": 2,
    "num_classes": 3,
    "mlp_ratio": 2,
}
HOW = {"count": 3, "steps": 4, "y": [0, 2, 1], "cfg_scale": 2.0}


@pytest.fixture
def arrays(rng):
    return {
        name: 0.2 * rng.standard_normal(array.shape).astype(np.float32)
        for name, array in DiT(**SMALL, device="cpu").arrays().items()
    }


def in_float8(arrays):
    model = inference_model(DiT, SMALL, "cpu", arrays)
    model.compute_in_float8()
    model.parameters.release()
    calibrate(model)
    return model


def test_samples(arrays):
    """NumPy's reference of the layers, with float32 around them where there is no tape."""
    single = inference_model(DiT, SMALL, "cpu", arrays)
    single.compute_in_single()
    wanted, model = numdiff.sample(single, **HOW), in_float8(arrays)
    scales = model.parameters.float8.scale.copy()
    assert (np.log2(scales) % 1 == 0).all() and (scales != 1).all()
    got = numdiff.sample(model, **HOW)
    error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
    assert 1e-4 < error < 0.05
    np.testing.assert_array_equal(numdiff.sample(model, batch=1, **HOW), got)
    np.testing.assert_array_equal(model.parameters.float8.scale, scales)
    np.testing.assert_array_equal(numdiff.sample(in_float8(arrays), **HOW), got)


def test_refusals(arrays):
    with pytest.raises(UsageError, match="load this one with inference=True"):
        set_precision(DiT(**SMALL, device="cpu"), "fp8")
    with pytest.raises(UsageError, match="needs a GPU of compute capability 8.9 or later"):
        set_precision(inference_model(DiT, SMALL, "cpu", arrays), "fp8")
    older = next(card for card in CARDS if card.capability < (8, 9))
    with pytest.raises(UsageError, match="needs a GPU of compute capability 8.9 or later"):
        set_precision(inference_model(DiT, SMALL, Measuring(older), arrays), "fp8")


def test_bytes_on_a_gpu(arrays):
    """The block in the middle has a byte a weight, the others two; its twin computes so, too."""
    device, taken = Measuring(next(c for c in CARDS if c.capability == (9, 0))), []
    device.arena = Arena(lambda nbytes: taken.append(nbytes) or (1 << 40) + sum(taken) - nbytes)
    model = inference_model(DiT, SMALL, device, arrays)
    set_precision(model, "fp8")
    held = model.parameters
    middle = sum(
        array.size
        for name, array in arrays.items()
        if name.startswith("blocks.1.")
        and name.split(".")[2] in ("attn", "mlp")
        and array.ndim == 2
    )
    assert held.float8.rows.size == middle and held.half.size == held.total - middle
    layer = measuring_twin(model).parameters.parameters["blocks.1.attn.qkv.weight"].float8
    assert layer.evaluates and held.parameters["blocks.1.attn.qkv.weight"].half is None
