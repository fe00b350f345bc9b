"""Loops that Numba compiles for the host's cores."""
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


def test_where_nothing_can_be_kept_on_disk(monkeypatch):
    asked = []

    def njit(function, **options):
        asked.append(options)
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return function

    monkeypatch.setattr(cpu.numba, "njit", njit)
    options = {"nogil": True, "error_model": "numpy"}
    assert on_host(len) is len and asked == [{"cache": True, **options}, options]


def test_only_who_says_so_has_sums_reordered(monkeypatch):
    asked = []
    monkeypatch.setattr(cpu.numba, "njit", lambda function, **options: asked.append(options.get("fastmath")))
    on_host(len)
    on_host(len, reorders=True)
    assert asked == [None, {"reassoc"}]
