from types import SimpleNamespace

import numpy as np
import pytest

from numdiff import kernels as K
from numdiff.device import download, zeros
from numdiff.device.emulator import EmulatorDevice
from numdiff.distributed.mpi_exchange import MpiExchange
from numdiff.kernels.matmul import products
from numdiff.kernels.reduce import second_pass
from numdiff.kernels.reduce.second_pass import (
    Sum,
    add_parts,
    bits_of,
    deferrable,
    deferred_reductions,
    flush_for,
    flush_reductions,
    joined,
)
from numdiff.nn import Tape, Tensor
from numdiff.nn import functional as F
from numdiff.nn.parameter import Parameter
from tests.conftest import exhaustive, on, shapes

SHAPES = shapes(minimal=(1, 4), few_parts=(3, 1100), many_parts=(70, 12), large=(9, 70_000))


@pytest.fixture
def launched(monkeypatch):
    """How many sums each launch has added up."""
    counts = []

    def counting(sums, plain=second_pass._launch):
        counts.append(len(sums))
        plain(sums)

    monkeypatch.setattr(second_pass, "_launch", counting)
    return counts


@SHAPES
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("wanted", [second_pass.WANTED, 80])
def test_add_parts(engine, rng, monkeypatch, shape, adds, wanted):
    """Of a small GPU, a thread has several vectors."""
    monkeypatch.setattr(second_pass, "WANTED", wanted)
    parts, target = 1 + rng.standard_normal(shape), rng.standard_normal(shape[1])
    want, size = (target * adds + parts.sum(axis=0), np.abs(target) + np.abs(parts).sum(axis=0))

    def run():
        into = engine(target)
        add_parts([Sum(engine(parts), shape[0], into, adds)])
        return into

    got = run()
    engine.check(got, want, 1e-6, size)
    engine.check_equal(got, run())


@shapes(minimal=(2, 1, 4), odd=(2, 5, 7), many_rows=(3, 700, 36), one=(1, 9, 8))
@on()  # NumPy has no such function
def test_add_rows(engine, rng, launched, shape):
    """Of columns that four does not divide one sum after the other; what is None is left out."""
    rows, before = rng.standard_normal(shape), rng.standard_normal((shape[0], shape[2]))
    for missing in (None, 0):
        into = [None if k == missing else engine(target) for k, target in enumerate(before)]
        with deferred_reductions():
            second_pass.add_rows(engine(rows), *into)
            assert not launched
        for k, target in enumerate(into):
            if target is not None:
                engine.check(
                    target,
                    before[k] + rows[k].sum(0),
                    1e-6,
                    np.abs(before[k]) + np.abs(rows[k]).sum(0),
                )
        assert launched == (
            [] if shape[2] % 4 or shape[0] == 1 and missing == 0 else [shape[0] - (missing == 0)]
        )
        launched.clear()


@on("emulator", "cuda")
def test_neighbours_are_joined(engine):
    both = engine(np.arange(12.0))
    whole = joined(both[:4], both[4:])
    assert whole.shape == (12,)
    engine.check_equal(whole, both)
    assert joined(both[4:], both[:4]) is None and joined(both[:4], both[8:]) is None
    assert joined(both[:4], engine(np.ones(4))) is None


@on("emulator", "cuda")
def test_sums_that_wait_come_together_with_the_same_bits(engine, rng, launched):
    arrays = [rng.standard_normal((1 + 3 * k, 8 + 4 * k)) for k in range(9)]

    def run():
        targets = [engine(np.ones(a.shape[1])) for a in arrays]
        for a, target in zip(arrays, targets, strict=True):
            with deferrable():
                add_parts([Sum(engine(a), len(a), target, True)])
        return targets

    at_once = run()
    assert launched == [1] * 9
    launched.clear()
    with deferred_reductions():
        waited = run()
    assert launched == [8, 1]
    for one, other in zip(at_once, waited, strict=True):
        engine.check_equal(one, other)


@on("emulator", "cuda")
def test_what_waits_is_bounded_and_settled_for_who_reads_it(engine, rng, launched, monkeypatch):
    def ask(target, allowed=True, rows=2):
        with deferrable() if allowed else deferred_reductions():
            add_parts([Sum(engine(np.ones((rows, 4))), rows, target, True)])

    a, b, both = engine.zeros(4), engine.zeros(4), engine.zeros(8)
    with deferred_reductions():
        with deferred_reductions():
            ask(a)
        assert launched == []  # a pass within a pass ends nothing
        flush_for(b)
        flush_for(np.zeros(4, np.float32))
        assert launched == []
        flush_for(a)
        assert launched == [1] and download(a).tolist() == [2] * 4
        ask(a)
        ask(a)  # the same target: one after the other
        assert launched == [1, 1] and download(a).tolist() == [4] * 4
        ask(b, allowed=False)  # those that wait come with it
        assert launched == [1, 1, 2] and download(a).tolist() == [6] * 4
        ask(both[:4])
        flush_for(both[4:])
        assert launched == [1, 1, 2]
        flush_for(both)
        assert launched == [1, 1, 2, 1]
        monkeypatch.setattr(second_pass, "WAITING", 3 * 32)
        for _ in range(4):
            ask(engine.zeros(4))
        assert launched[4:] == [4]
        ask(b)
        ask(a, rows=7)  # too large to wait
        assert launched[5:] == [2]
        flush_reductions()
        assert launched[6:] == []
    with pytest.raises(KeyError), deferred_reductions():
        ask(a)
        raise KeyError
    with deferred_reductions():
        pass
    assert launched[6:] == []  # what a pass has left that failed is forgotten


def test_shares_fill_the_gpu():
    assert bits_of(1, 1) == 0 and bits_of(7, 10) == 2 and bits_of(500, 10) == 5
    assert bits_of(500, second_pass.WANTED) == 0


@exhaustive
@on("emulator", "cuda")
def test_a_tape_collects_what_its_layers_leave(engine, rng, launched, monkeypatch):
    """Two linear layers in float16, one of them used twice: as if each gradient had been complete
    at once."""
    if engine.name == "emulator":
        # other tests look at these kernels for faults
        engine.backend = EmulatorDevice(checks=False, float64=False)
    monkeypatch.setattr(
        products,
        "half_tile",
        lambda backend, version, product, can_split: (
            (128, 64),
            2 if can_split else 1,
            False,
        ),
    )

    def parameter(*shape):
        made = Parameter(shape, None, written=True)
        made.data = engine(rng.standard_normal(shape).astype(np.float32))
        made.half = engine(download(made.data).astype(np.float16), np.float16)
        made.grad = zeros(shape, np.float32, made.data)
        made.stale = True
        return made

    w1, b1, w2, b2 = parameter(24, 8), parameter(24), parameter(8, 24), parameter(8)
    # rows of two slices
    x, dy = (engine(rng.standard_normal((72, columns)), np.float16) for columns in (8, 24))

    def run():
        for p in (w1, b1, w2, b2):
            p.stale = True
        leaf = Tensor(x, requires_grad=True)
        with Tape() as tape:
            h1 = F.linear(leaf, w1, b1)
            h2 = F.linear(h1, w2, b2)
            y = F.linear(h2, w1, b1)
        tape.backward(y, dy)
        return (
            [download(p.grad).copy() for p in (w1, b1, w2, b2)] + [download(leaf.grad)],
            h1.data,
            h2.data,
        )

    got, h1, h2 = run()
    assert launched == [4, 2]  # the second use of w1 asks for its gradient
    grads = [engine.zeros(p.shape) for p in (w1, b1, w2, b2)]
    dh = K.linear_backward(dy, h2, w1.half, *grads[:2], accumulate=False)
    dh = K.linear_backward(dh, h1, w2.half, *grads[2:], accumulate=False)
    dh = K.linear_backward(dh, x, w1.half, *grads[:2])
    assert launched[2:] == [2] * 3
    for one, other in zip(got, (*grads, dh), strict=True):
        np.testing.assert_array_equal(one, download(other))


@on("emulator", "cuda")
def test_a_bucket_leaves_with_its_gradients(engine, launched):
    class Exchange(MpiExchange):
        def __init__(self):
            self.plan, self.backend, self.left = SimpleNamespace(leaving={1: [0]}), None, []

        def _leave(self, bucket):
            self.left.append((bucket, *launched))

        def _progress(self):
            pass

    exchange = Exchange()
    with deferred_reductions():
        with deferrable():
            add_parts([Sum(engine(np.ones((2, 4))), 2, engine.zeros(4), True)])
        exchange.played(0)
        assert launched == []
        exchange.played(1)
    assert exchange.left == [(0, 1)]
