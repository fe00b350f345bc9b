"""`--evaluate-features`: what a run is measured in."""

import json

import pytest

from numdiff.errors import UsageError
from numdiff.training.options import resolve
from tests.command import output_of, refusal_of
from tests.evaluation.test_in_training import records_of, run
from tests.extras.feature_networks import small
from tests.extras.feature_networks.test_files import converted_in


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    small.shrink(monkeypatch)


def test_a_run_is_measured_in_the_features_of_a_network(tmp_path):
    """…of images that random-conv could not take; the best is chosen among the same features."""
    path, _ = converted_in(tmp_path)
    run_dir, _ = run(tmp_path, image_size=8, evaluate_features=str(path))
    last = records_of(run_dir)[-1]
    assert last["frechet_features"] == "inception-2015-12-05 clean" and last["frechet_count"] == 8
    stats = run_dir / "stats.jsonl"  # a distance in other features does not count
    lines = [
        json.dumps({**r, "frechet": 0.0}) if "frechet" in r else json.dumps(r)
        for r in records_of(run_dir)
    ]
    stats.write_text("".join(f"{line}\n" for line in lines))
    checkpoint = str(run_dir / "checkpoint-00000004.h5")
    _, lines = run(tmp_path, checkpoint, image_size=8, evaluate_features=f"{path}:tensorflow")
    said = [line for line in lines if line.startswith("evaluate")]
    assert len(said) == 1 and said[0].endswith("after step 6, the best so far")


def test_what_is_refused(tmp_path):
    """…before the first step."""
    with pytest.raises(UsageError, match="there is no file .*none.h5"):
        run(tmp_path, evaluate_features=str(tmp_path / "none.h5"))
    with pytest.raises(UsageError, match="--evaluate-features a.h5 needs --evaluate-every: add it"):
        resolve({"model": "unet", "evaluate_features": "a.h5"})
    assert "No such option" in refusal_of("train vae --evaluate-features a.h5 --dry-run")
    assert "--evaluate-features FILE" in output_of("train dit --help")
