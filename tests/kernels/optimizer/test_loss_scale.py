"""Dynamic loss scaling against a simulation in Python's own numbers."""

import math

import numpy as np
import pytest

from numdiff.device import download, upload
from numdiff.kernels.optimizer.loss_scale import LARGEST, SMALLEST, loss_scale_update


def follow(engine, norms, start, rule, interval):
    """What every step gave: (gradient norm, unscale, next scale, counts)."""
    scale = upload(np.array([start], np.float32), engine.backend)
    unscale = upload(np.zeros(1, np.float32), engine.backend)
    counts = upload(np.zeros(3, np.int32), engine.backend)
    rows = []
    for value in norms:
        norm = upload(np.array([value], np.float32), engine.backend)
        loss_scale_update(norm, scale, unscale, counts, rule, interval)
        if engine.computes:
            rows.append(
                (
                    download(norm)[0],
                    download(unscale)[0],
                    download(scale)[0],
                    tuple(download(counts)),
                )
            )
    return rows


def test_doubling(engine):
    rows = follow(engine, [8, 8, math.inf, math.nan, 4, 4, 4], 16, "doubling", 2)
    if engine.computes:
        assert [r[2] for r in rows] == [16, 32, 16, 8, 8, 16, 16]
        assert [r[1] for r in rows] == [1 / 16, 1 / 16, 1 / 32, 1 / 16, 1 / 8, 1 / 8, 1 / 16]
        np.testing.assert_array_equal(
            [r[0] for r in rows], [0.5, 0.5, np.nan, np.nan, 0.5, 0.5, 0.25]
        )
        assert [r[3] for r in rows] == [
            (1, 0, 0),
            (0, 0, 0),
            (0, 1, 1),
            (0, 2, 2),
            (1, 2, 0),
            (0, 2, 0),
            (1, 2, 0),
        ]


def test_log2(engine):
    rows = follow(engine, [1.0] * 10 + [math.inf] + [1.0], 1024, "log2", 2000)
    if engine.computes:
        assert math.log2(rows[9][2]) == pytest.approx(10.010, abs=1e-5)
        assert math.log2(rows[10][2]) == pytest.approx(9.010, abs=1e-5)
        assert rows[10][3] == (0, 1, 1) and rows[11][3] == (1, 1, 0)


def test_the_scale_stays_between_its_ends(engine):
    up = follow(engine, [1.0], LARGEST, "doubling", 1)
    down = follow(engine, [math.inf], SMALLEST, "doubling", 1)
    if engine.computes:
        assert up[0][2] == LARGEST and down[0][2] == SMALLEST


def test_unknown_rules_are_refused():
    one = np.ones(1, np.float32)
    with pytest.raises(ValueError, match="doubling or log2"):
        loss_scale_update(one, one, one, np.zeros(3, np.int32), rule="tripling")
