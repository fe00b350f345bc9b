"""Two threads at once: each has its own tape, its own names, its own arithmetic."""

import copy
import threading

import numpy as np
import pytest

from numdiff.device import get_backend, upload
from numdiff.device.arena import Arena
from numdiff.device.emulator import EmulatorDevice
from numdiff.device.threads import PerThread, ThreadStack, kept
from numdiff.nn import Tape, Tensor
from numdiff.nn import functional as F
from tests.models import with_random_weights
from tests.nn.steps import unet
from tests.training.test_trainer import losses, make


def in_threads(*functions):
    """Their results, from one thread each, begun together."""
    results, errors, start = [None] * len(functions), [], threading.Barrier(len(functions))

    def run(i, function):
        try:
            start.wait()
            results[i] = function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=item) for item in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def backward(model, x, steps, recompute=False):
    def run():
        gradients = []
        for t in range(steps):
            leaf = Tensor(x, requires_grad=True)
            with Tape() as tape:
                y = model(leaf, np.full(len(x), t, np.int32))
            tape.backward(y, np.ones(y.shape, np.float32))
            gradients.append(leaf.grad)
        return gradients, model.parameters.grad.copy()

    return run


@pytest.mark.parametrize("recompute", [False, True])
def test_two_tapes_in_two_threads_give_the_gradients_of_one(rng, recompute):
    one = with_random_weights(unet(), 0.1)
    if recompute:
        one.recompute_blocks()
    models, x = [one, copy.deepcopy(one)], rng.standard_normal((2, 2, 8, 8, 3)).astype(np.float32)
    expected = [backward(copy.deepcopy(one), x[i], 4)() for i in (0, 1)]
    for (gradients, parameters), (want, want_parameters) in zip(
        in_threads(*(backward(models[i], x[i], 4) for i in (0, 1))), expected, strict=True
    ):
        np.testing.assert_array_equal(gradients, want)
        np.testing.assert_array_equal(parameters, want_parameters)


def test_two_threads_may_differentiate_one_model_in_its_input(rng):
    model = with_random_weights(unet(), 0.1)
    x = rng.standard_normal((2, 1, 8, 8, 3)).astype(np.float32)
    expected = [backward(model, part, 4)()[0] for part in x]
    np.testing.assert_array_equal(
        [r[0] for r in in_threads(*(backward(model, part, 4) for part in x))], expected
    )


def test_two_trainers_in_two_threads_train_as_one_does():
    def of(seed):
        trainer = make(seed=seed)
        result = losses(trainer, 4), trainer.state()
        trainer.close()
        return result

    expected = [of(seed) for seed in (1, 2)]
    for (got, state), (want, wanted_state) in zip(
        in_threads(lambda: of(1), lambda: of(2)), expected, strict=True
    ):
        assert got == want
        for name, value in wanted_state.items():
            np.testing.assert_array_equal(state[name], value, err_msg=name)


def test_a_tape_does_not_see_another_threads_operations():
    x = Tensor(np.ones(4, np.float32), requires_grad=True)
    with Tape() as tape:
        in_threads(lambda: F.silu(x))
        assert tape.records == []
        F.silu(x)
    assert len(tape.records) == 1


def test_the_emulator_runs_two_threads_launches_one_after_the_other(rng):
    device = EmulatorDevice(float64=False)
    x = rng.standard_normal((2, 64)).astype(np.float32)

    def silu(values):
        return lambda: [F.silu(Tensor(upload(values, device))).numpy() for _ in range(5)]

    expected = [silu(row)() for row in x]
    np.testing.assert_array_equal(in_threads(*map(silu, x)), expected)


@pytest.mark.parametrize("device", ["ptx", "emulator"])
def test_the_switch_tf32_is_a_threads_own(device):
    backend = get_backend(device)

    def switch():
        backend.tf32 = True
        return backend.tf32

    assert in_threads(switch) == [True] and backend.tf32 is False


def test_an_arena_gives_no_byte_to_two_threads():
    arena = Arena(lambda nbytes, taken=[0]: taken.append(taken[-1] + nbytes) or taken[-2], 1 << 16)
    owner, lock = {}, threading.Lock()

    def work(me):
        generator = np.random.default_rng(me)

        def run():
            held = []
            for _ in range(2000):
                if held and generator.random() < 0.5:
                    block = held.pop(generator.integers(len(held)))
                    with lock:
                        assert owner.pop(block.address) == me
                else:
                    held.append(arena.allocate(256 * int(generator.integers(1, 5))))
                    with lock:
                        assert owner.setdefault(held[-1].address, me) == me
            with lock:
                for block in held:
                    del owner[block.address]

        return run

    in_threads(*map(work, range(4)))
    assert arena.used_bytes == 0
    free = sum(arena._sizes.values())
    assert free == arena.reserved_bytes and sorted(arena._sizes) == arena._addresses


def test_what_threads_share_and_what_they_do_not():
    stack = ThreadStack()
    stack.append(1)
    assert in_threads(lambda: len(stack)) == [0] and list(stack) == [1]

    class Switch:
        on = PerThread(False)

    one, other = Switch(), Switch()
    one.on = True
    assert (one.on, other.on, Switch.on) == (True, False, False) and in_threads(lambda: one.on) == [
        False
    ]
    made = kept(lambda key: [key])
    assert made(1) is made(1) and len({id(r) for r in in_threads(*[lambda: made(2)] * 8)}) == 1
