import copy
import gc

import numpy as np
import pytest

from numdiff.nn import UNet, evaluation
from numdiff.nn import functional as F
from numdiff.nn.layers import Linear
from numdiff.nn.model import Model
from tests.conftest import needs
from tests.device.recording import RecordingDevice


class SmallModel(Model):
    """A layer over each pixel, times the timestep."""

    def __init__(self, device, size=4):
        self.image_size, self.in_channels, self.out_channels, self.num_classes = size, 3, 3, None
        self.options = {}
        self.layer, self.times = Linear(3, 3), Linear(4, 3)
        self._finish(device, 0)

    def forward(self, x, t, y=None):
        return F.channel_add(self.layer(x), self.times(F.timestep_embedding(t, 4)))


def test_the_second_prediction_of_a_shape_is_recorded_and_later_ones_replay(rng):
    device = RecordingDevice()
    model, plain = SmallModel(device), SmallModel("cpu")
    inputs = {n: rng.standard_normal((n, 4, 4, 3)).astype(np.float32) for n in (1, 3)}
    for n, t, replays in (
        (3, 5, 0),
        (3, [1, 2, 3], 1),
        (3, 7, 2),
        (1, 7, 2),
        (3, 9, 3),
        (1, 8, 4),
        (3, 0.5, 4),
    ):
        got = model.predict(inputs[n], t)
        np.testing.assert_allclose(got, plain.predict(inputs[n], t), rtol=1e-5, atol=1e-6)
        assert device.replays == replays
    # other weights at the same place
    model.parameters.load_flat(2 * model.parameters.flatten(model.arrays()))
    plain.parameters.load_flat(2 * plain.parameters.flatten(plain.arrays()))
    np.testing.assert_allclose(
        model.predict(inputs[3], 5), plain.predict(inputs[3], 5), rtol=1e-5, atol=1e-6
    )
    assert device.replays == 5
    other = copy.deepcopy(model)  # a copy has graphs of its own
    other.parameters.load_flat(np.zeros_like(other.parameters.flatten(other.arrays())))
    assert not other.predict(inputs[3], 5).any() and model.predict(inputs[3], 5).any()


def test_few_shapes_stay_recorded_and_none_of_a_model_that_is_gone(monkeypatch):
    monkeypatch.setattr(evaluation, "KEPT", 2)
    model = SmallModel(RecordingDevice(), 1)
    for n in range(1, 5):
        model.predict(np.zeros((n, 1, 1, 3), np.float32), 1)
    known = evaluation._recorded[model]
    assert len(known) == 2 and min(key[0][0] for key in known) == 3
    count = len(evaluation._recorded)
    del model, known
    gc.collect()
    assert len(evaluation._recorded) == count - 1


@needs("gpu")
@pytest.mark.parametrize("half", [False, True])
def test_a_gpu_predicts_the_same_bits_again(rng, half):
    model = UNet(
        image_size=16, model_channels=32, channel_mult=(1, 2), num_res_blocks=1, device="cuda"
    )
    model.parameters.load_flat(0.05 * rng.standard_normal(model.parameters.total))
    if half:
        model.compute_in_half()
    x = {n: rng.standard_normal((n, 16, 16, 3)).astype(np.float32) for n in (2, 5)}
    first = {n: model.predict(x[n], 7) for n in x}
    for n in (2, 2, 5, 2, 5):
        np.testing.assert_array_equal(model.predict(x[n], 7), first[n])
