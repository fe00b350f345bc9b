"""`numdiff schedule`, and `numdiff sample --schedule`."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

import numdiff
from numdiff.extras.learned_steps import benchmark as benchmark_learned_steps
from numdiff_cli.main import main
from tests.conftest import exhaustive
from tests.training.test_sampling import write_model


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "model.h5")


def run(*arguments):
    result = CliRunner().invoke(main, [*map(str, arguments), "--device", "cpu"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def learn(model_file, path, *more):
    return run(
        "schedule",
        model_file,
        "--steps",
        3,
        "--from-steps",
        12,
        "--count",
        3,
        "--output",
        path,
        *more,
    )


def test_learned_and_sampled(model_file, tmp_path):
    path = tmp_path / "three.json"
    result = learn(model_file, path, "--batch", 2)
    assert result.exit_code == 0 and "3 steps of 12 of DDIM, from 3 images" in result.output, (
        result.output
    )
    schedule = json.loads(path.read_text())
    assert len(schedule["sigmas"]) == 3 and schedule["numdiff"] == numdiff.__version__
    result = run(
        "sample", model_file, "--schedule", path, "--count", 2, "--npz", tmp_path / "a.npz"
    )
    assert result.exit_code == 0 and "learned, 3 steps, seeds 0 to 1" in result.output, (
        result.output
    )
    images = numdiff.sample(numdiff.load(model_file, device="cpu"), 2, schedule=schedule)
    np.testing.assert_array_equal(np.load(tmp_path / "a.npz")["arr_0"], images)
    again = tmp_path / "again.json"
    learn(model_file, again, "--batch", 2)
    assert again.read_bytes() == path.read_bytes()


def test_refused(model_file, tmp_path):
    path = tmp_path / "three.json"
    learn(model_file, path)
    other = write_model(tmp_path / "other.h5", image_size=8)
    (tmp_path / "text.json").write_text("[1, 2")
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "options.json").write_text("{}")
    for arguments, sentence in (
        (
            ("sample", model_file, "--schedule", tmp_path / "none.json"),
            "cannot be read (No such file",
        ),
        (
            ("sample", model_file, "--schedule", tmp_path / "text.json"),
            "numdiff schedule: it is no",
        ),
        (("sample", model_file, "--schedule", tmp_path / "empty.json"), "--schedule /"),
        (
            ("sample", model_file, "--schedule", tmp_path / "empty.json"),
            "empty.json is no schedule of",
        ),
        (("schedule", model_file, "--output", "s.txt"), "--output s.txt must end in .json"),
        (
            ("schedule", model_file, "--output", tmp_path / "options.json"),
            "a file of this name is the run's own",
        ),
        (("sample", model_file, "--schedule", model_file), "is no schedule of numdiff schedule"),
        (
            ("sample", other, "--schedule", path),
            "learned with model_options.image_size 16, and here it is 8",
        ),
        (
            ("sample", model_file, "--schedule", path, "--steps", 50),
            "--steps 50 does not go with --schedule",
        ),
        (
            ("sample", model_file, "--schedule", path, "--sampler", "ddim"),
            "--sampler ddim does not go with",
        ),
        (("sample", model_file, "--schedule", path, "--slerp", 3), "slerp needs whole rows"),
        (
            ("schedule", model_file, "--steps", 20, "--from-steps", 10),
            "cannot be learned from --from-steps 10",
        ),
        (("schedule", model_file, "--count", 4000, "--from-steps", 1000), "would take"),
        (("schedule", model_file, "--cfg-interval", "0.5,5"), "--cfg-interval has no effect"),
        (("schedule", model_file, "--cfg-scale", 2), "guidance needs a model with a null class"),
        (
            ("schedule", model_file, "--output", tmp_path / "none" / "a.json"),
            "the folder does not exist",
        ),
        (("schedule", tmp_path / "no-run"), "no-run"),
    ):
        result = run(*arguments)
        assert result.exit_code and sentence in result.output, (arguments, result.output)
    assert not (tmp_path / "schedule.json").exists()


def test_no_schedule_is_written_that_cannot_be_sampled_with(tmp_path):
    guided, path = write_model(tmp_path / "guided.h5", class_dropout=0.1), tmp_path / "three.json"
    result = learn(guided, path, "--cfg-scale", 2, "--cfg-interval", "9,100")
    assert (
        result.exit_code == 2
        and "--cfg-interval 9,100 holds none of the noise levels at which the 3 steps"
        in (result.output.splitlines()[-1])
    ), result.output
    assert not path.exists()
    assert learn(guided, path, "--cfg-scale", 2, "--cfg-interval", "0.1,5").exit_code == 0
    assert (
        run(
            "sample",
            guided,
            "--schedule",
            path,
            "--cfg-scale",
            2,
            "--cfg-interval",
            "0.1,5",
            "--count",
            1,
            "--npz",
            tmp_path / "a.npz",
        ).exit_code
        == 0
    )


@pytest.mark.usefixtures("no_curves")
def test_of_another_run(tmp_path):
    """…of the same model it is refused, and later weights of its own run take it; of converted
    weights, and in a schedule from before, there is nothing to compare."""

    def train(steps, seed, *more):
        result = run(
            "train",
            "unet",
            "--preset",
            "tiny",
            "--outdir",
            tmp_path,
            "--image-size",
            8,
            "--model-channels",
            32,
            "--channel-mult",
            "1",
            "--attention-resolutions",
            "none",
            "--num-res-blocks",
            1,
            "--batch",
            2,
            "--steps",
            steps,
            "--sample-count",
            1,
            "--sample-steps",
            2,
            "--seed",
            seed,
            *more,
        )
        assert result.exit_code == 0, result.output
        return max(tmp_path.glob("0000*"))

    def sample(model, schedule):
        return run(
            "sample", model, "--schedule", schedule, "--count", 1, "--npz", tmp_path / "a.npz"
        )

    first = train(1, 3)
    path = tmp_path / "three.json"
    assert learn(first, path).exit_code == 0
    assert sample(first, path).exit_code == 0
    other = train(1, 4)
    result = sample(other, path)
    assert result.exit_code and "learned with run.seed 3, and here it is 4" in result.output, (
        result.output
    )
    train(2, 3, "--resume", first)
    assert sample(first, path).exit_code == 0
    schedule = json.loads(path.read_text())
    assert schedule["run"]["seed"] == 3 and schedule["run"]["init"] is None
    del schedule["run"]
    path.write_text(json.dumps(schedule))
    assert sample(other, path).exit_code == 0


@exhaustive
def test_table_compared_with_other_samplers(model_file, capsys):
    benchmark_learned_steps.main(
        [
            str(model_file),
            "--counts",
            "3",
            "--samples",
            "3",
            "--reference-steps",
            "4",
            "--learn",
            "3",
            "--batch",
            "2",
            "--device",
            "cpu",
        ]
    )
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
