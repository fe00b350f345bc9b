import numpy as np

from numdiff.kernels.optimizer.telemetry import telemetry_read, telemetry_record


def test_ring_keeps_the_last_rows_in_order(engine):
    ring = engine(np.zeros((4, 5), np.float32))
    for step in range(6):
        row = [
            engine(np.array([v], np.float32)) for v in (10 + step, 20 + step, 30 + step, 40 + step)
        ]
        telemetry_record(
            ring,
            engine(np.array([step], np.uint32)),
            *row,
            engine(np.array([0, step, 0], np.int32)),
            scale=0.5,
        )
    rows = telemetry_read(ring, 2, 6)
    if engine.computes:
        np.testing.assert_array_equal(rows[:, 0], [6, 6.5, 7, 7.5])
        np.testing.assert_array_equal(rows[:, 1], [22, 23, 24, 25])
        np.testing.assert_array_equal(
            rows[:, 2:], [[32, 42, 2], [33, 43, 3], [34, 44, 4], [35, 45, 5]]
        )
