"""Layers of one input as one product, whose gradients come run by run in the backward pass."""

import numpy as np
import pytest

from numdiff.device import download, upload
from numdiff.device.emulator import EmulatorDevice
from numdiff.distributed.buckets import last_records, touched_by
from numdiff.nn import Linear, Module, Tape, Tensor
from numdiff.nn import functional as F
from numdiff.nn.module import FlatParameters
from tests.conftest import exhaustive, relative_error


class StackedLayers(Module):
    """Each makes the shift and the scale of a norm of 64 channels."""

    def __init__(self, count):
        self.number = count
        for k in range(count):
            setattr(self, f"layer{k}", Linear(64, 128))

    @property
    def parameters_of_each(self):
        layers = [getattr(self, f"layer{k}") for k in range(self.number)]
        return [(layer.weight, layer.bias) for layer in layers]


def gradients(count, runs, backend):
    """Those of all parameters, of c and of x, and after which record of the backward pass each
    layer's are there."""
    rng, like = np.random.default_rng(0), np.float16 if backend else np.float32
    c, x, dy = (
        rng.standard_normal(shape).astype(np.float16).astype(like)
        for shape in ((2, 64), (2, 2, 64), (2, 2, 64))
    )
    model = StackedLayers(count)
    flat = FlatParameters(model, backend, seed=1)
    if backend:
        flat.keep_half()
        c, x, dy = (upload(array, backend) for array in (c, x, dy))
    flat.begin_gradients()
    layers = model.parameters_of_each
    c, x = Tensor(c, requires_grad=True), Tensor(x, requires_grad=True)
    with Tape() as tape:
        y = x
        for parts in F.stack_columns(c, layers, 2, runs):
            for at in range(0, len(parts), 2):
                y = F.adaln(y, *parts[at : at + 2])
    last = last_records(touched_by(tape.records))
    tape.backward(y, dy)
    return [download(array) for array in (flat.grad, c.grad, x.grad)], [
        last[id(weight)] for weight, _ in layers
    ]


def on_emulator(count, runs):
    return gradients(count, runs, EmulatorDevice(checks=False, float64=False))


def test_each_run_has_its_gradients_before_those_before_it():
    got, order = on_emulator(2, [1, 1])
    want, _ = gradients(2, [2], None)
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 2e-3
    assert order == [3, 1]  # norm, its columns, norm, its columns; then what comes of all


@exhaustive
@pytest.mark.parametrize("runs", [[1, 1, 1], [2, 1], [1, 2]])
def test_runs_have_the_bits_of_all_at_once(runs):
    for a, b in zip(on_emulator(3, runs)[0], on_emulator(3, [3])[0], strict=True):
        np.testing.assert_array_equal(a, b)
