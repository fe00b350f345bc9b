"""Loops that Numba compiles for the host's cores."""

from unittest.mock import Mock

import numpy as np

from numdiff.device import cpu, on_host


def test_a_loop_gives_what_numpy_does():
    @on_host
    def add_squares(a, total):
        for i in range(len(a)):
            total[0] += a[i] * a[i]

    a, total = np.arange(5, dtype=np.float32), np.zeros(1, np.float32)
    add_squares(a, total)
    assert total[0] == 30


def test_only_who_says_so_has_sums_reordered(monkeypatch):
    asked = []
    monkeypatch.setattr(
        cpu.numba,
        "njit",
        lambda function, **options: asked.append(options.get("fastmath")) or Mock(),
    )
    on_host(test_a_loop_gives_what_numpy_does)
    on_host(test_a_loop_gives_what_numpy_does, reorders=True)
    assert asked == [None, {"reassoc"}]
