"""The weights' gradients of a block in one launch; the kernels are among the cases of `numdiff
kernels check`."""

import numpy as np
import pytest

from numdiff import kernels as K
from numdiff.device import get_backend
from numdiff.device.emulator import EmulatorDevice
from numdiff.device.planned import CARDS
from numdiff.distributed.buckets import last_records, touched_by
from numdiff.kernels.linear import gradients as L
from numdiff.nn import Tape, Tensor, deferred_gradients, float8
from numdiff.nn.layers import Linear
from numdiff.nn.module import FlatParameters, Module
from numdiff.training.build import model_options
from numdiff.training.options import resolve
from numdiff.training.price import foreseen_peak
from tests.conftest import exhaustive, needs
from tests.models import without_zeros
from tests.training.test_half import dit_of_latents, one_step

DEVICES = ["emulator", pytest.param("cuda", marks=needs("gpu"))]


class DeferredLayers(Module):
    """Three layers, the second of which need not be used."""

    def __init__(self):
        self.a, self.b, self.c = Linear(3, 4), Linear(4, 4), Linear(4, 2)
        self.parameters = FlatParameters(self)

    def forward(self, x, uses_b=True):
        with deferred_gradients.deferring([self.a.weight, self.b.weight, self.c.weight]):
            h = self.a(x)
            aside = self.b(h)
            return self.c(aside if uses_b else h)


@pytest.fixture
def launched(monkeypatch):
    """[(number of layers, whether they are added to)] of the launches; on NumPy, whose layers
    register, too."""
    counts = []

    def launch(layers, accumulate):
        counts.append((len(layers), accumulate))
        L.linear_gradients_backward(layers, accumulate)

    def backward(dy, x, weight, dweight, dbias, aside=None, plain=K.linear_backward, **options):
        if aside is not None:
            aside(dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]))
        return plain(dy, x, weight, dweight, dbias, **options)

    monkeypatch.setattr(deferred_gradients, "linear_gradients_backward", launch)
    monkeypatch.setattr(K, "linear_backward", backward)
    return counts


def gradients(model, x, dy, times=1, **options):
    model.parameters.begin_gradients()
    for _ in range(times):
        with Tape() as tape:
            y = model(x, **options)
        records = touched_by(tape.records)
        tape.backward(y, dy)
    model.parameters.end_gradients()
    return model.parameters.grad.copy(), records


@pytest.mark.parametrize("uses_b", [True, False])
@pytest.mark.parametrize("times", [1, 2])
def test_layers_come_together(rng, launched, monkeypatch, uses_b, times):
    """…when the last one has been played back, or when the backward pass ends; then they are added
    to."""
    x, dy = (
        Tensor(rng.standard_normal((5, 3)).astype(np.float32)),
        rng.standard_normal((5, 2)).astype(np.float32),
    )
    model = DeferredLayers()
    found, records = gradients(model, x, dy, times, uses_b=uses_b)
    count = 3 if uses_b else 2
    assert launched == [(count, False), (count, True)][:times]
    last = last_records(records)
    assert {last[id(layer.weight)] for layer in (model.a, model.b, model.c)} == {len(records) - 1}
    monkeypatch.setattr("numdiff.nn.functional.gradients.deferral_of", lambda *_: None)
    np.testing.assert_allclose(
        gradients(model, x, dy, times, uses_b=uses_b)[0], found, rtol=1e-5, atol=1e-6
    )
    assert len(launched) == times and not deferred_gradients._pending.items


def test_an_error_leaves_nothing_behind(rng, launched, monkeypatch):
    monkeypatch.setattr(
        float8, "linear_backward", lambda dy, *_, aside, **__: aside(dy, dy) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        gradients(
            DeferredLayers(), Tensor(np.ones((5, 3), np.float32)), np.ones((5, 2), np.float32)
        )
    assert (
        launched == []
        and not deferred_gradients._pending.items
        and not deferred_gradients._open.items
    )


@exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("few_frequencies")
def test_a_dits_gradients(device, monkeypatch):
    """Together and separately: only the order of the sums differs."""

    def build(gain):
        monkeypatch.setattr(L, "GAIN", gain)
        backend = (
            EmulatorDevice(checks=False, float64=False)
            if device == "emulator"
            else get_backend(device)
        )
        model = without_zeros(dit_of_latents(backend))
        return one_step(model, "fp16", 2), getattr(backend, "launched", {"group"})

    (loss, found), kernels = build(10)
    assert any("group" in str(kernel) for kernel in kernels)
    (same, apart), _ = build(0)
    assert loss == same
    for name, gradient in apart.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "how, launches",
    [
        ({}, [4] * 12),
        ({"precision": "fp8"}, [4] * 2),
        ({"recompute": "mlp"}, [2] * 12),
        ({"recompute": "blocks"}, [4] * 12),
        ({"freeze": ("*.fc1.weight",)}, []),
    ],
)
def test_which_of_a_dits_layers_come_together(monkeypatch, how, launches):
    """…and what it takes: of one block at most 11 numbers a token and channel."""
    found = []
    monkeypatch.setattr(
        L.group,
        "launch_group",
        lambda products, plain=L.group.launch_group: found.append(len(products)) or plain(products),
    )
    card = next(card for card in CARDS if card.capability == (9, 0))
    options = resolve(
        {
            "model": "dit",
            "architecture": "DiT-S/2",
            "image_size": 32,
            "channels": 4,
            "batch": 64,
            "precision": "fp16",
            **how,
        },
        (9, 0),
    )
    sizes = model_options(options, 4, 10)
    peak = foreseen_peak(options, sizes, card)
    assert found == launches
    monkeypatch.setattr(L, "GAIN", 0)
    assert peak - foreseen_peak(options, sizes, card) <= 2 * 11 * 384 * 64 * 256
