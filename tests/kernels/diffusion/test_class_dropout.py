import numpy as np
import pytest

from numdiff.device import download
from numdiff.kernels.diffusion.class_dropout import class_dropout_forward
from numdiff.kernels.random import random_uniform
from tests.conftest import shapes

SHAPES = shapes(minimal=(1,), odd=(37,), large=(5000,))


def counters(engine, count, step=3):
    return engine(np.array([step], np.uint32)), engine(np.arange(count, dtype=np.uint32) + 11)


@SHAPES
def test_the_share_and_the_counting(engine, shape):
    labels = (np.arange(*shape) % 7).astype(np.int32)
    step, samples = counters(engine, len(labels))
    y = class_dropout_forward(engine(labels), 0.25, 7, 5, step, samples)
    u = download(random_uniform((len(labels), 1), 5, 8, step, samples))[:, 0]  # 8 is its purpose
    if engine.computes:
        np.testing.assert_array_equal(download(y), np.where(u < 0.25, 7, labels))
        if len(labels) > 1000:
            assert abs((download(y) == 7).mean() - 0.25) < 0.02
    engine.check_equal(y, class_dropout_forward(engine(labels), 0.25, 7, 5, step, samples))


def test_a_label_does_not_depend_on_its_batch(engine):
    labels = np.zeros(64, np.int32)
    step, samples = counters(engine, 64)
    whole = class_dropout_forward(engine(labels), 0.5, 9, 1, step, samples)
    if engine.computes:
        part = class_dropout_forward(engine(labels[:16]), 0.5, 9, 1, step, samples[48:])
        np.testing.assert_array_equal(download(part), download(whole)[48:])
        other = class_dropout_forward(
            engine(labels), 0.5, 9, 1, counters(engine, 64, step=4)[0], samples
        )
        assert (download(other) != download(whole)).any()


def test_none_and_bad_arguments(engine):
    labels, (step, samples) = engine(np.arange(4, dtype=np.int32)), counters(engine, 4)
    engine.check_equal(
        class_dropout_forward(labels, 0.0, 9, 1, step, samples), np.arange(4, dtype=np.int32)
    )
    with pytest.raises(ValueError, match="probability"):
        class_dropout_forward(labels, 1.0, 9, 1, step, samples)
    with pytest.raises(ValueError, match="int32"):
        class_dropout_forward(engine(np.zeros(4, np.float32)), 0.1, 9, 1, step, samples)
