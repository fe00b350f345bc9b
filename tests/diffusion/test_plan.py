"""Plans: a sampler noted beforehand does what the function does, in few kinds of steps."""

import functools

import numpy as np
import pytest

from numdiff.device import download, upload
from numdiff.diffusion import SAMPLERS, alpha_bars
from numdiff.diffusion.plan import SamplerPlan
from numdiff.diffusion.run import SamplerRun
from numdiff.diffusion.samplers import ddim, ddpm, euler_ancestral, repaint
from numdiff.diffusion.schedule import sampling_sigmas
from numdiff.kernels.concat import concat_forward
from numdiff.kernels.diffusion.sampler import combine, weighted_sum
from numdiff.kernels.elementwise import silu_forward
from numdiff.kernels.random import PURPOSE_SAMPLER, random_normal
from tests.conftest import quick, unchecked
from tests.device.recording import RecordingDevice

SIGMAS = [9.0, 3.0, 1.0, 0.3, 0.1, 0.0]
SHAPE = (3, 2, 4)
CASES = {name: (sampler, {}) for name, sampler in SAMPLERS.items()} | {
    "learned": (ddpm, {"variance": "learned"}),
    "large": (ddpm, {"variance": "large"}),
    "ddim with noise": (ddim, {"eta": 0.7}),
    "euler with noise": (euler_ancestral, {"eta": 0.4}),
    "repaint": (repaint, {"jump": 2, "resamples": 2}),
}


class Estimate:
    """Stands for a Denoiser: an estimate that depends on x and the level, and an answer of twice as
    many channels."""

    copies, guide = 1, None

    class model:
        num_classes, backend = None, None

    def numbers(self, sigma):
        return (1 / (1 + sigma), 0.25)

    def estimate(self, x, numbers, labels=None, conditioning=(), guided=True):
        x_0 = weighted_sum(numbers[:1], x)
        return x_0, concat_forward(x_0, silu_forward(x))

    def __call__(self, x, sigma):
        return self.with_prediction(x, sigma)[0]

    def with_prediction(self, x, sigma):
        return self.estimate(x, upload(np.array(self.numbers(sigma), np.float32), x))


def given(name, rng):
    arrays = (
        {"known": rng.uniform(-1, 1, SHAPE), "mask": rng.integers(0, 2, SHAPE)}
        if name == "repaint"
        else {}
    )
    return {key: array.astype(np.float32) for key, array in arrays.items()}


KINDS = "ddpm", "heun", "dpm++2m", "repaint"  # one kind of step and several, random and not


@unchecked
@pytest.mark.parametrize("name", CASES)
@quick(lambda engine, name: engine != "emulator" or name in (*KINDS, "learned"))
def test_a_plan_gives_the_bits_of_the_function(engine, rng, name):
    sampler, settings = CASES[name]
    estimate, more = Estimate(), given(name, rng)
    estimate.model = type(
        "Model", (), {"num_classes": None, "backend": engine.backend, "place": lambda self: None}
    )()
    seeds = np.array([4, 7], np.uint32)
    run = SamplerRun(
        SamplerPlan(sampler, estimate.numbers, SIGMAS, settings, more), estimate, 2, SHAPE, more
    )
    start = run.noise(seeds)
    asked = []
    got = [download(run(start, seeds, after=lambda: asked.append(1))) for _ in range(2)]
    np.testing.assert_array_equal(*got)  # a second time, too
    samples = upload(seeds, engine.backend)

    def noise(i):
        return random_normal(
            (2, *SHAPE),
            0,
            PURPOSE_SAMPLER,
            upload(np.array([i + 1], np.uint32), engine.backend),
            samples,
        )

    arrays = {
        key: upload(np.broadcast_to(array, (2, *SHAPE)), engine.backend)
        for key, array in more.items()
    }
    wanted = sampler(
        estimate, combine((run.plan.start_scale, start)), SIGMAS, noise, **settings, **arrays
    )
    # where floats that are not in a row of float32 have more digits
    if name == "learned" and engine.name == "cpu":
        engine.check(got[0], wanted, 1e-6)
    else:
        engine.check_equal(got[0], download(wanted))
    assert len(asked) == 2 * sum(step.asks for step in run.plan.steps)


@pytest.mark.parametrize("name", CASES)
@quick(lambda name: name in KINDS)
def test_replayed_and_launched_one_by_one_give_the_same_bits(rng, name):
    """Each kind of step, and each run of five of a kind, is launched at first, recorded at its
    second time and replayed from then on; other seeds, and weights at another place, which are
    recorded again."""
    in_fives = name not in ("heun", "repaint")
    sampler, settings = CASES[name]
    device, estimate, more = RecordingDevice(), Estimate(), given(name, rng)
    place = ["here"]
    estimate.model = type(
        "Model", (), {"num_classes": None, "backend": device, "place": lambda self: place[0]}
    )()
    plan = SamplerPlan(
        sampler,
        estimate.numbers,
        [*np.geomspace(9, 0.1, 8 if in_fives else 4).tolist(), 0.0],
        settings,
        more,
    )
    replayed, launched = (
        SamplerRun(plan, estimate, 2, SHAPE, more, eager=eager) for eager in (False, True)
    )
    wanted = {}
    for turn, seeds in enumerate(([4, 7], [1, 2], [4, 7])):
        place[0] = "there" if turn == 2 else "here"
        first, seeds, before = seeds[0], np.array(seeds, np.uint32), device.replays
        if first not in wanted:
            wanted[first] = download(launched(launched.noise(seeds), seeds))
        np.testing.assert_array_equal(
            download(replayed(replayed.noise(seeds), seeds)), wanted[first]
        )
        parts = list(replayed.parts())
        kinds = len({(step, count) for _, step, count in parts})
        assert device.replays - before == (len(parts) if turn == 1 else len(parts) - kinds)
        assert [step for _, step, count in parts for _ in range(count)] == list(plan.steps)
    assert max(count for _, _, count in parts) == (5 if in_fives else 1)


def test_what_is_computed_ahead_comes_before_its_first_step():
    """Steps that are replayed together do not reach across the step that the next of them are
    computed before."""
    run = SamplerRun.__new__(SamplerRun)
    run.eager, run.backend, run.plan = (
        False,
        RecordingDevice(),
        type("Plan", (), {"steps": ["step"] * 17}),
    )
    run.ahead = type("Ahead", (), {"steps": 8})
    assert [(number, count) for number, _, count in run.parts()] == [
        (0, 5),
        (5, 1),
        (6, 1),
        (7, 1),
        (8, 5),
        (13, 1),
        (14, 1),
        (15, 1),
        (16, 1),
    ]


@pytest.mark.parametrize(
    "name, kinds",
    [
        ("ddpm", 2),
        ("ddim", 1),
        ("euler", 1),
        ("euler-ancestral", 2),
        ("heun", 3),
        ("dpm++2m", 4),
        ("repaint", 3),
    ],
)
def test_there_are_few_kinds_of_steps(name, kinds):
    sampler, settings = CASES[name]
    plan = SamplerPlan(
        sampler,
        Estimate().numbers,
        sampling_sigmas(alpha_bars("linear", 1000), "timesteps", 50),
        settings,
        ["known", "mask"] if name == "repaint" else [],
    )
    assert len(set(plan.steps)) == kinds
    assert plan.table.dtype == np.uint32 and len(plan.table) == len(plan.steps)
    assert all(step.asks for step in plan.steps) and plan.places == {"heun": 3, "dpm++2m": 2}.get(
        name, 1
    )


def test_what_a_step_leaves_may_change_places(engine, rng):
    """x and y change places in each step, before a first step that asks nothing of the model."""

    def swapping(denoise, x, sigmas, noise):
        from numdiff.diffusion.plan import combine

        y = combine((2.0, x), (1.0, noise(0)))
        for sigma in sigmas[:-1]:
            x, y = y, combine((1.0, x), (0.5, denoise(y, sigma)))
            x, y = y, x
        return combine((1.0, x), (-1.0, y))

    estimate = Estimate()
    estimate.model = type(
        "Model", (), {"num_classes": None, "backend": engine.backend, "place": lambda self: None}
    )()
    plan = SamplerPlan(swapping, estimate.numbers, SIGMAS, {})
    assert not plan.steps[0].asks and plan.steps[1].asks and plan.places == 2
    seeds = np.array([1, 2], np.uint32)
    run = SamplerRun(plan, estimate, 2, SHAPE)
    got = run(run.noise(seeds), seeds)
    if engine.computes:
        x, scale = download(run.noise(seeds)), np.float32(plan.start_scale)
        noise = random_normal((2, *SHAPE), 0, PURPOSE_SAMPLER, np.array([1], np.uint32), seeds)
        x = scale * x
        y = 2 * x + noise
        for sigma in SIGMAS[:-1]:
            x = x + np.float32(0.5) * (y * np.float32(estimate.numbers(sigma)[0]))
        engine.check(got, x - y, 1e-5)


def test_a_sampler_may_ask_at_a_level_between():
    """What is done before the model is asked belongs to the step before: noise added first, as
    EDM's s_churn does."""

    def churned(denoise, x, sigmas, noise):
        from numdiff.diffusion.plan import combine

        for i, (now, then) in enumerate(zip(sigmas, sigmas[1:], strict=False)):
            x = combine((1.0, x), (0.1, noise(i)))
            x = combine((then / now, x), (1 - then / now, denoise(x, 1.1 * now)))
        return x

    plan = SamplerPlan(functools.partial(churned), Estimate().numbers, SIGMAS, {})
    assert [step.asks for step in plan.steps] == [False] + [True] * 5 and len(set(plan.steps)) == 3
