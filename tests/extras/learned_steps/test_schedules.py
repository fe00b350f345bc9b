"""`numdiff schedule`, and `numdiff sample --schedule`."""

import json

import numpy as np
import pytest

import numdiff
from numdiff.extras.learned_steps import benchmark as benchmark_learned_steps
from tests.command import output_of, refusal_of, run
from tests.conftest import exhaustive
from tests.training.test_sampling import write_model


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "model.h5")


CPU = "--device cpu"


def learn(model_file, path, more=""):
    given = "--steps 3 --from-steps 12 --count 3 --output"
    return output_of("schedule", model_file, given, path, more, CPU)


def test_learned_and_sampled(model_file, tmp_path):
    path, again, drawn = (tmp_path / name for name in ("three.json", "again.json", "a.npz"))
    output = learn(model_file, path, "--batch 2")
    assert "3 steps of 12 of DDIM, from 3 images" in output
    schedule = json.loads(path.read_text())
    assert len(schedule["sigmas"]) == 3 and schedule["numdiff"] == numdiff.__version__
    output = output_of("sample", model_file, "--schedule", path, "--count 2 --npz", drawn, CPU)
    assert "learned, 3 steps, seeds 0 to 1" in output
    images = numdiff.sample(numdiff.load(model_file, device="cpu"), 2, schedule=schedule)
    np.testing.assert_array_equal(np.load(drawn)["arr_0"], images)
    learn(model_file, again, "--batch 2")
    assert again.read_bytes() == path.read_bytes()


def test_refused(model_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    learn(model_file, "three.json")
    other = write_model(tmp_path / "other.h5", image_size=8)
    for name, text in (("text", "[1, 2"), ("empty", "{}"), ("options", "{}")):
        (tmp_path / f"{name}.json").write_text(text)
    for words, sentence in (
        ("--schedule none.json", "cannot be read (No such file"),
        ("--schedule text.json", "numdiff schedule: it is no"),
        ("--schedule empty.json", "--schedule empty.json is no schedule of"),
        (f"--schedule '{model_file}'", "is no schedule of numdiff schedule"),
        ("--schedule three.json --steps 50", "--steps 50 does not go with --schedule"),
        ("--schedule three.json --sampler ddim", "--sampler ddim does not go with"),
        ("--schedule three.json --slerp 3", "slerp needs whole rows"),
    ):
        assert sentence in refusal_of("sample", model_file, words, CPU)
    for words, sentence in (
        ("--output s.txt", "--output s.txt must end in .json"),
        ("--output options.json", "a file of this name is the run's own"),
        ("--output none/a.json", "the folder does not exist"),
        ("--steps 20 --from-steps 10", "cannot be learned from --from-steps 10"),
        ("--count 4000 --from-steps 1000", "would take"),
        ("--cfg-interval 0.5,5", "--cfg-interval has no effect"),
        ("--cfg-scale 2", "guidance needs a model with a null class"),
    ):
        assert sentence in refusal_of("schedule", model_file, words, CPU)
    assert "no-run" in refusal_of("schedule no-run", CPU)
    sizes = "learned with model_options.image_size 16, and here it is 8"
    assert sizes in refusal_of("sample", other, "--schedule three.json", CPU)
    assert not (tmp_path / "schedule.json").exists()


def test_no_schedule_is_written_that_cannot_be_sampled_with(tmp_path):
    guided, path = write_model(tmp_path / "guided.h5", class_dropout=0.1), tmp_path / "three.json"
    learning = ("--steps 3 --from-steps 12 --count 3 --output", path, CPU)
    sentence = "--cfg-interval 9,100 holds none of the noise levels at which the 3 steps"
    given = "--cfg-scale 2 --cfg-interval 9,100"
    assert sentence in refusal_of("schedule", guided, given, *learning)
    assert not path.exists()
    given = "--cfg-scale 2 --cfg-interval 0.1,5"
    learn(guided, path, given)
    drawn = ("--count 1 --npz", tmp_path / "a.npz", CPU)
    output_of("sample", guided, "--schedule", path, given, *drawn)


@pytest.mark.usefixtures("no_curves")
def test_of_another_run(tmp_path):
    """…of the same model it is refused, and later weights of its own run take it; of converted
    weights, and in a schedule from before, there is nothing to compare."""
    path = tmp_path / "three.json"

    def train(steps, seed, *more):
        output_of(
            "train unet --preset tiny --image-size 8 --model-channels 32 --channel-mult 1",
            "--attention-resolutions none --num-res-blocks 1 --batch 2 --sample-count 0",
            f"--steps {steps} --seed {seed} --outdir",
            tmp_path,
            *more,
            CPU,
        )
        return max(tmp_path.glob("0000*"))

    def sample(model):
        drawn = "--count 1 --npz", tmp_path / "a.npz", CPU
        return run("sample", model, "--schedule", path, *drawn)

    first = train(1, 3)
    learn(first, path)
    assert sample(first).exit_code == 0
    other = train(1, 4)
    result = sample(other)
    assert result.exit_code and "learned with run.seed 3, and here it is 4" in result.output
    train(2, 3, "--resume", first)
    assert sample(first).exit_code == 0
    schedule = json.loads(path.read_text())
    assert schedule["run"]["seed"] == 3 and schedule["run"]["init"] is None
    del schedule["run"]
    path.write_text(json.dumps(schedule))
    assert sample(other).exit_code == 0


@exhaustive
def test_table_compared_with_other_samplers(model_file, capsys):
    given = "--counts 3 --samples 3 --reference-steps 4 --learn 3 --batch 2 --device cpu"
    benchmark_learned_steps.main([str(model_file), *given.split()])
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if line[:3].strip("| ").isdigit()
    ]
    assert [row[:2] for row in rows] == [
        ["4", "ddim"],
        ["3", "learned"],
        ["3", "ddim"],
        ["3", "heun"],
        ["3", "dpm++2m"],
        ["1", "heun, half the steps"],
    ]
    assert (
        float(rows[0][3]) == 0 and float(rows[2][3]) > 0 and all(float(row[2]) > 0 for row in rows)
    )
