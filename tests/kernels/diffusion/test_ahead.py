import numpy as np
import pytest

from numdiff.kernels.diffusion import ahead as A

SIZES = pytest.mark.parametrize(
    "dtype, columns",
    [
        (np.float32, (8, 4, 12)),
        (np.float16, (8, 16)),
        (np.float16, (704, 1400, 8)),
    ],
)


def counter(engine, value):
    return engine(np.array([value], np.uint32))


@SIZES
def test_rows_are_placed_and_taken(engine, rng, dtype, columns):
    steps, n = 4, sum(columns)
    parts = [rng.standard_normal((steps, m)).astype(dtype) for m in columns]
    joined, offset = engine(np.full((steps, n), np.nan, dtype)), 0
    for part in parts:
        A.place(joined, engine(part), offset)
        offset += part.shape[1]
    wanted = np.concatenate(parts, axis=1)
    engine.check_equal(joined, wanted)
    row = engine(np.full(n, np.nan, dtype))
    for step in range(steps):
        A.take(joined, counter(engine, 11 + step), counter(engine, 10), row)
        engine.check_equal(row, wanted[step])


@pytest.mark.parametrize("step, wanted", [(0, [0, 0, 1, 1, 2, 2]), (3, [3, 3, 4, 4, 4, 4])])
def test_timesteps_of_the_steps_to_come(engine, rng, step, wanted):
    table = rng.standard_normal((5, 3)).astype(np.float32)
    begin, t = counter(engine, 77), engine(np.full(6, np.nan, np.float32))
    A.timesteps_ahead(engine(table.view(np.uint32)), counter(engine, step), begin, t, 2)
    engine.check_equal(t, table[wanted, 0])
    engine.check_equal(begin, np.array([step], np.uint32))


def test_what_does_not_fit_says_so(engine):
    joined = engine(np.zeros((2, 8), np.float32))
    for source, offset in (
        (np.zeros((3, 4), np.float32), 0),
        (np.zeros((2, 4), np.float32), 8),
        (np.zeros((2, 4), np.float16), 0),
        (np.zeros((2, 4), np.float32), 2),  # no multiple of 16 bytes
    ):
        with pytest.raises(ValueError, match="does not go to"):
            A.place(joined, engine(source), offset)
    with pytest.raises(ValueError, match="is none of"):
        A.take(joined, counter(engine, 1), counter(engine, 0), engine(np.zeros(4, np.float32)))
    with pytest.raises(ValueError, match="2 a step"):
        A.timesteps_ahead(
            engine(np.zeros((2, 2), np.uint32)),
            counter(engine, 0),
            counter(engine, 0),
            engine(np.zeros(3, np.float32)),
            2,
        )
    odd = engine(np.zeros((2, 6), np.float32))
    with pytest.raises(ValueError, match="16 bytes"):
        A.take(odd, counter(engine, 1), counter(engine, 0), engine(np.zeros(6, np.float32)))
