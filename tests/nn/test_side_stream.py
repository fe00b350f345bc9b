from types import SimpleNamespace

import numpy as np
import pytest

from numdiff.device import copy_into, download, empty, fill_zero, side_stream, upload
from numdiff.device.array import set_poison
from numdiff.extras.muon import optimizer as muon_optimizer
from numdiff.extras.transports import overlap
from numdiff.kernels.operation.versions import at_most
from numdiff.kernels.reduce.second_pass import (
    SUMS,
    Sum,
    add_parts,
    deferred_reductions,
    flush_for,
)
from numdiff.nn import Muon, aliasing
from numdiff.nn import functional as F
from numdiff.nn.layers import Linear
from numdiff.nn.module import FlatParameters, Numbered
from numdiff.nn.parameter import Parameter
from numdiff.nn.tensor import Tape, Tensor
from tests.arenas import ArenaEmulator, LateEmulator
from tests.conftest import exhaustive
from tests.models import small_unet

# quick with small arrays
QUICK = {"matmul": 1, "linear_group": 1, "column_sum": 1, "sample_sum": 1, "conv2d": 1}
FLOATS = 1 << 10  # of an array below


@pytest.fixture(autouse=True)
def poisoned():
    """What is read before it is written, or after it was given to others, is NaN."""
    old = set_poison(True)
    yield
    set_poison(old)


def array(device, value=None):
    made = empty((FLOATS,), np.float32, like=device)
    if value is not None:
        device.fill(made, value)
    return made


def is_zero(made):
    return not download(made).any()


@pytest.fixture
def device():
    return LateEmulator()


# The two streams ----------------------------------------------------------------------------------


def test_a_gradient_that_is_read_is_waited_for(device):
    target, other, result = (array(device) for _ in range(3))
    with deferred_reductions():
        with side_stream.on_side_stream(target, target[:8], None):
            fill_zero(target)
        side_stream.made_on_side_stream(result)
        side_stream.made_on_side_stream(None)
        flush_for(other)
        flush_for(target[8:])
        side_stream.wait_for((other, None))
        assert not is_zero(target)
        flush_for(target[4:])
        assert is_zero(target)
        with side_stream.on_side_stream(target):
            fill_zero(result)
        side_stream.made_on_side_stream(result)
        side_stream.wait_for((other, result))
        assert is_zero(result)


def test_a_group_of_gradients_waits_for_the_second_stream_and_the_first_goes_on(
    device, monkeypatch
):
    """What leaves for other ranks (extras/transports/overlap.py) in a third one, sums of parts among it."""
    target, summed, parts, sent = (
        array(device),
        array(device),
        array(device, 0),
        [array(device) for _ in range(2)],
    )
    watcher = overlap.Overlap(SimpleNamespace(gpu=device), None)
    watcher.current = [SimpleNamespace(ready=1, complete=True)] * 2

    def add(group, blocks):
        watcher.left += 1
        for source, copy in zip((target, summed), sent, strict=True):
            device.copy(source, copy)

    monkeypatch.setattr(watcher, "_add", add)
    with deferred_reductions():
        with side_stream.on_side_stream(target, target):
            fill_zero(target)
        add_parts([Sum(parts, 1, summed, False)], waits=True)
        for number in range(3):
            watcher.played(number)
            assert watcher.left == (number > 0)
        assert not any(is_zero(made) for made in (target, summed, *sent))
        device.join("exchange")
        assert all(is_zero(made) for made in sent)


def test_a_sum_of_parts_that_waited_is_waited_for_wherever_it_is_added_up(device):
    """Within another job, after the first stream has waited for the one in which it was made."""
    parts, targets = array(device, 0), [array(device) for _ in range(SUMS + 1)]

    def make(target):
        with side_stream.on_side_stream(target, target):
            add_parts([Sum(parts, 1, target, False)], waits=True)

    with deferred_reductions():
        for target in targets[:-1]:
            make(target)
        side_stream.rejoin()
        make(targets[-1])  # for which the others make room
        assert not is_zero(targets[0])
        flush_for(targets[0])
        assert is_zero(targets[0])


def test_memory_freed_meanwhile_is_not_reused(device):
    first, target = array(device, 0), array(device)
    address = device.pointer(first)
    with deferred_reductions():
        with side_stream.on_side_stream(first, target):
            device.copy(first, target)
        del first
        assert device.pointer(array(device)) != address
        side_stream.rejoin()
        assert is_zero(target) and device.pointer(array(device)) == address


def test_of_too_much_that_is_held_the_older_half_comes_back(device, monkeypatch):
    """For which the first stream waits for the older work alone."""
    monkeypatch.setattr(side_stream, "HELD", 4 * 4 * FLOATS)
    targets = [array(device) for _ in range(5)]
    with deferred_reductions():
        for target in targets:
            given = array(device, 0)
            with side_stream.on_side_stream(given):
                device.copy(given, target)
            del given
            side_stream.wait_if_full()
        assert [is_zero(target) for target in targets] == [True, True, True, False, False]
        assert device.arena.held_since(0) == 2 * 4 * FLOATS
        del target, targets[0], targets[1:]  # more than half of it since the last one
        side_stream.wait_if_full()
        assert device.arena.held_since(0) == 0


def test_a_step_that_is_not_recorded_runs_in_order_and_holds_the_same_memory():
    device = LateEmulator()
    device.recording = False
    first, target = array(device, 0), array(device)
    address = device.pointer(first)
    with deferred_reductions():
        with side_stream.on_side_stream(first, target):
            device.copy(first, target)
        assert is_zero(target)
        del first
        assert device.pointer(array(device)) != address
    assert device.pointer(array(device)) == address


def test_in_order_there_is_one_stream(device):
    target = array(device)
    with side_stream.in_order(), deferred_reductions():
        with side_stream.on_side_stream(target, target):
            fill_zero(target)
        assert is_zero(target)
        side_stream.at_once(device, [lambda: array(device)] * 2)
    assert device.jobs == 0


def test_an_error_lets_go_of_what_is_held(device):
    first = array(device, 0)
    address = device.pointer(first)
    with pytest.raises(KeyError), deferred_reductions():
        with side_stream.on_side_stream(first):
            fill_zero(first)
        del first
        raise KeyError
    assert device.pointer(array(device)) == address
    with deferred_reductions():  # a pass within a pass is part of it
        with deferred_reductions(), side_stream.on_side_stream(target := array(device), target):
            fill_zero(target)
        assert not is_zero(target)
    assert is_zero(target)


def test_tasks_at_once_wait_for_what_was_before_and_are_waited_for(device):
    """A task is given what it has freed itself, and nothing that another has."""
    given, first, second, third = array(device, 1), *(array(device) for _ in range(3))
    taken = []

    def task(target):
        for _ in range(2):
            other = array(device)
            taken.append(device.pointer(other))
            device.copy(given, other)
            device.copy(other, target)
            del other

    used = device.arena.used_bytes
    side_stream.at_once(device, [lambda: task(first), lambda: task(second), lambda: task(third)])
    assert device.jobs == 2 and len(taken) == 6 and len(set(taken)) == 3
    for target in (first, second, third):
        np.testing.assert_array_equal(download(target), download(given))
    assert device.arena.used_bytes == used and device.pointer(array(device)) in taken
    with pytest.raises(KeyError):
        side_stream.at_once(device, [lambda: array(device), lambda: {}[0]])
    assert device.pointer(array(device)) in taken  # nothing of it is left


# Whole passes -------------------------------------------------------------------------------------


def parameter(rng, device, *shape):
    made = Parameter(shape, None, written=True)
    made.data = upload(rng.standard_normal(shape).astype(np.float32), device)
    made.grad, made.stale = empty(shape, np.float32, device), True
    return made


def layers(device):
    """{name: gradient} of some layers, of which one is used twice."""
    rng = np.random.default_rng(1)
    x, channel = (
        Tensor(upload(rng.standard_normal(shape).astype(np.float32), device), requires_grad=True)
        for shape in ((2, 2, 2, 4), (2, 4))
    )
    first, second, third = (parameter(rng, device, 4, 3, 3, 4) for _ in range(3))
    product = parameter(rng, device, 4, 4)
    with at_most(QUICK):
        with Tape() as tape:
            h = F.conv2d(x, first, channel=F.linear(F.linear(channel, product), product))
            h = F.silu(F.conv2d(h, second))
            h = F.conv2d(F.conv2d(h, third, residual=x), second)
        tape.backward(h, upload(rng.standard_normal(h.shape).astype(np.float32), device))
    made = {
        "first": first.grad,
        "second": second.grad,
        "third": third.grad,
        "product": product.grad,
        "x": x.grad,
        "channel": channel.grad,
    }
    return {name: download(gradient) for name, gradient in made.items()}


def unet(device):
    """… of a small UNet whose activations alias the gradients."""
    sizes = {"image_size": 4, "model_channels": 4, "groups": 2, "num_head_channels": 4}
    model = small_unet(**sizes, device=device)
    rng = np.random.default_rng(1)
    model.load_arrays(
        {
            name: 0.1 * rng.standard_normal(a.shape).astype(np.float32)
            for name, a in model.arrays().items()
        }
    )
    memory = aliasing.aliasing_of(model)
    x = Tensor(
        upload(rng.standard_normal((2, 4, 4, 3)).astype(np.float32), device), requires_grad=True
    )
    model.parameters.begin_gradients(memory.rest)
    with at_most(QUICK), memory:
        with Tape() as tape, memory.forward():
            y = model(x, upload(np.array([3, 5], np.float32), device))
        tape.backward(y, upload(rng.standard_normal(y.shape).astype(np.float32), device))
    return {
        "x": download(x.grad),
        **{
            name: download(parameter.grad)
            for name, parameter in model.parameters.parameters.items()
        },
    }


def muons_step(device):
    """{name: array} after a step of Muon with stacks of two shapes."""
    rng, module = np.random.default_rng(1), Numbered({0: Linear(4, 4), 1: Linear(8, 4)})
    parameters = FlatParameters(module, device)
    muon = Muon(parameters, {"0.weight": 1, "1.weight": 1}, learning_rate=0.1, warmup_steps=0)
    copy_into(parameters.grad, rng.standard_normal(parameters.grad.shape).astype(np.float32))
    with at_most(QUICK):
        muon.update(upload(np.ones(1, np.float32), device))
    return {
        "weights": download(parameters.data),
        **{name: download(a) for name, a in muon.arrays().items()},
    }


def test_large_stacks_are_updated_one_by_one(device, monkeypatch):
    monkeypatch.setattr(muon_optimizer, "AT_ONCE", 47)  # numbers; there are 16 and 32
    muons_step(device)
    assert device.jobs == 0


@pytest.mark.parametrize(
    "pass_of, jobs",
    [(layers, 6), (muons_step, 2), pytest.param(unet, 18, marks=[exhaustive, pytest.mark.slow])],
)
def test_the_same_bits_however_late_the_second_stream_is(pass_of, jobs, monkeypatch):
    monkeypatch.setattr(aliasing, "SMALLEST", 0)
    want, late = pass_of(ArenaEmulator()), LateEmulator()
    got = pass_of(late)
    assert late.jobs >= jobs
    for name, gradient in want.items():
        assert np.isfinite(gradient).all()
        np.testing.assert_array_equal(got[name], gradient, err_msg=name)
