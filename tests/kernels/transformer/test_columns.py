import numpy as np
import pytest

from numdiff.device import download
from numdiff.kernels.transformer import columns as Co
from numdiff.nn import functional as F
from numdiff.nn.tensor import Tape, Tensor
from tests.conftest import on


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_parts_lie_where_they_lay(engine, rng, dtype):
    x = rng.standard_normal((3, 24)).astype(dtype)
    parts = Co.columns_forward(engine(x, dtype), 3)
    for k, part in enumerate(parts):
        assert tuple(part.shape) == (3, 8) and part.dtype == dtype
        if engine.computes:
            np.testing.assert_array_equal(download(part), x[:, 8 * k : 8 * k + 8])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("blocks", [1, 3])
@on()  # NumPy's gradients are arrays
def test_gradients_meet(engine, rng, dtype, blocks):
    parts = Co.columns_forward(engine(np.zeros((2, 24)), dtype), 3)
    given = rng.standard_normal((2, blocks, 24)).astype(np.float32)
    places = [part.sums.place(part, blocks) for part in (parts[2], parts[0])]
    sums = parts[0].sums
    sums.partial = engine(given)
    want = given.astype(np.float64).sum(1)
    want[:, 8:16] = 0  # the second is unused
    if engine.computes:
        np.testing.assert_allclose(np.asarray(places[0][1]), want[:, 16:], rtol=1e-4, atol=1e-5)
    dx = Co.join_columns([places[1][1], None, places[0][1]], dtype)
    assert dx.dtype == dtype and sums.partial is None and not sums.written
    engine.check(dx, want, 1e-3 if dtype == np.float16 else 1e-6)


@on()
def test_gradients_of_neighbours(engine, rng):
    """…stay for those of all."""
    parts = Co.columns_forward(engine(np.zeros((2, 24)), np.float32), 3)
    given = rng.standard_normal((2, 2, 24)).astype(np.float32)
    places, sums = [part.sums.place(part, 2)[1] for part in parts], parts[0].sums
    sums.partial, want = engine(given), given.astype(np.float64).sum(1)
    engine.check(Co.join_columns(places[1:]), want[:, 8:], 1e-6)
    engine.check(
        Co.join_columns([None, places[1]]),
        np.concatenate((np.zeros((2, 8)), want[:, 8:16]), 1),
        1e-6,
    )
    engine.check(Co.join_columns(places), want, 1e-6)
    assert sums.partial is None


@on()
def test_more_parts_than_a_mask_has_bits(engine, rng):
    parts = Co.columns_forward(engine(np.zeros((2, 280)), np.float32), 70)
    given = rng.standard_normal((2, 1, 280)).astype(np.float32)
    places, sums = [part.sums.place(part, 1)[1] for part in parts], parts[0].sums
    sums.partial = engine(given)
    with pytest.raises(ValueError, match="of 70 parts each must be used"):
        Co.join_columns([*places[:30], None, *places[31:]])
    engine.check(Co.join_columns(places), given[:, 0].astype(np.float64), 1e-6)


def test_on_the_tape_a_part_may_be_left_out(rng):
    x = Tensor(rng.standard_normal((3, 8)), requires_grad=True)
    g = rng.standard_normal((3, 4))
    with Tape() as tape:
        _, second = F.columns(x, 2)
        y = F.add(second, second)
    tape.backward(y, g)
    np.testing.assert_allclose(x.grad, np.concatenate((np.zeros((3, 4)), 2 * g), axis=1))


def test_wrong_arguments_say_so(engine):
    x = engine(np.ones((2, 6), np.float32))
    with pytest.raises(ValueError, match="equal parts"):
        Co.columns_forward(x, 4)
    if engine.name != "cpu":
        with pytest.raises(ValueError, match="use chunk"):
            Co.columns_forward(x, 3)
