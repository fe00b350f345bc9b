"""The script that compares launchers' choices with the best candidates: on a stand-in for a card."""

import contextlib
import json

import numpy as np

from numdiff.benchmark.scripts import choices
from numdiff.benchmark.scripts.choice_draws import drawn_problems, fits
from numdiff.benchmark.scripts.choice_problems import (
    attention_of,
    block_gradients,
    convolution,
    gelu_product,
    product,
    resampled,
    single_product,
    weight_gradient,
)
from numdiff.device.planned import Planned

H200, AS_A100 = (choices.stand_in(f"NVIDIA H200{more}") for more in ("", " as 8.0"))
SMALL = [
    product(256, 128, 512),
    product(128, 136, 4096, "TN", single=True, extra=("sums",)),
    product(256, 256, 64, "NT", 4, single=True),
    gelu_product(256, 512, 128, True),
    single_product(128, 64, 2048, "TN"),
    block_gradients(1024, ((384, 128), (128, 128))),
    convolution(2, 16, 16, 64, 96),
    convolution(2, 16, 16, 64, 96, gradient=True, residual=True),
    weight_gradient(4, 16, 16, 64, 64),
    weight_gradient(16, 32, 32, 64, 64, stride=2),
    resampled(2, 16, 16, 64, 64, True),
    attention_of(2, 256, 2, 64, False),
    attention_of(2, 512, 2, 64, True),
]


class FakeGpu(Planned):
    """A stand-in that also captures, and whose clock is the number of launches."""

    def __init__(self, card):
        super().__init__(card)
        self.launches = 0

    def launch(self, *given):
        super().launch(*given)
        self.launches += 1

    def within(self, arena):
        return contextlib.nullcontext()

    def capture(self, function):
        before = self.launches
        function()
        count = self.launches - before

        def replay():
            self.launches += count

        return replay

    def microseconds(self, functions):
        """As of a `Stopwatch`."""
        found = []
        for function in functions:
            before = self.launches
            function()
            found.append(10.0 * (self.launches - before))
        return found


def test_a_choice_is_among_the_candidates():
    for card in (H200, AS_A100):
        device = Planned(card)
        for problem in SMALL:
            if problem.operation == "conv2d resampled" and card is AS_A100:
                continue
            found, chosen = choices.candidates_of(problem, device)
            assert found[chosen][0] != choices.CHOSEN, (problem.key, card)
            assert len(found) > 1, (problem.key, card)


def test_candidates_are_timed():
    gpu = FakeGpu(H200)
    problem = product(128, 136, 4096, "TN", single=True)
    found, chosen = choices.candidates_of(problem, gpu)
    times = choices.measure(problem, found, gpu, None, lambda shape, dtype: (None, 0), gpu)
    assert times.keys() == found.keys()
    labels = {label: times[s] for s, (label, _) in found.items()}
    assert labels["6 128x128 1"] == 10.0 and labels["6 128x128 2"] == 20.0  # a second pass


def test_draws_are_of_their_seed():
    first, second = ([p.key for p in drawn_problems(seed)] for seed in (7, 7))
    assert first == second != [p.key for p in drawn_problems(8)]
    assert len(set(first)) == len(first) >= 200
    assert all(map(fits, drawn_problems(8)))


def test_the_distribution_counts_choices(tmp_path):
    device, rows = Planned(H200), []
    for problem in drawn_problems(3)[:4]:
        found, chosen = choices.candidates_of(problem, device)
        times = {s: 10.0 if s == chosen else 20.0 for s in found}
        rows.append(choices.row_of(problem, found, chosen, times))
    lines = choices.describe(rows)
    assert any("all drawn" in line and " 1.000" in line for line in lines)
    rows[0]["times"] = {s: (label, 2 * us) for s, (label, us) in rows[0]["times"].items()}
    other = next(s for s in rows[0]["times"] if s != rows[0]["chosen"])
    rows[0]["times"][other] = rows[0]["times"][other][0], 10.0
    assert choices.ratio_of(rows[0]) == 2.0
    choices.save(tmp_path / "choices.json", H200.device_name, 3, rows)
    said = []
    today = choices.evaluate(tmp_path / "choices.json", said.append)
    assert [row["chosen"] for row in today] == [row["chosen"] for row in rows]
    assert json.loads((tmp_path / "choices.json").read_text())["card"] == H200.device_name
    assert np.isclose(max(map(choices.ratio_of, today)), 2.0)
