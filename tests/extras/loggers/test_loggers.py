"""--log: what TensorBoard and Trackio read of a run, and programs that are missing, fail or hang."""

import json
import os
import subprocess
import threading

import pytest

from numdiff.children import python_command
from numdiff.errors import UsageError
from numdiff.extras.loggers import run as R
from numdiff.training.options import load_options, resolve, resolve_resumed
from numdiff.training.report import STATS
from numdiff.training.run import train
from tests.conftest import MPIEXEC, exhaustive, needs
from tests.models import UNET

pytestmark = pytest.mark.usefixtures("no_curves")

SMALL = {
    **UNET,
    "device": "cpu",
    "batch": 2,
    "log_every": 2,
    "sample_every": 4,
    "sample_count": 2,
    "sample_steps": 1,
    "warmup_steps": 0,
    "lr_schedule": "constant",
}


class KeptCalls:
    """A program that keeps what it is given."""

    rewinds = False
    given: list = []

    def __init__(self, run_dir, settings, identity, step):
        self.given.append(("begin", step, identity))

    def scalars(self, step, values):
        self.given.append(("scalars", step, values))

    def picture(self, step, path):
        self.given.append(("picture", step, os.path.basename(path)))

    def close(self, finished):
        self.given.append(("close", None, finished))


@pytest.fixture
def kept(monkeypatch):
    """--log wandb is `KeptCalls`; gives its list."""
    monkeypatch.setattr(KeptCalls, "given", [])
    monkeypatch.setattr(R.RunLog, "check", lambda self: None)
    monkeypatch.setitem(R.SINKS, "wandb", KeptCalls)
    return KeptCalls.given


def run(outdir, steps=8, resume=None, lines=None, **more):
    if resume:
        options = resolve_resumed(load_options(resume.parent), {"steps": steps, **more})
    else:
        options = resolve({**SMALL, "outdir": str(outdir), "steps": steps, **more})
    echo = (lambda line: None) if lines is None else lines.append
    return train(options, resume=resume and os.fspath(resume), echo=echo)


def newest(run_dir):
    return max(run_dir.glob("checkpoint-*.h5")).read_bytes()


def test_what_a_program_is_given(tmp_path, kept):
    run_dir = run(tmp_path, log=("wandb",))
    records = [json.loads(line) for line in (run_dir / STATS).read_text().splitlines()]
    scalars = [item for item in kept if item[0] == "scalars"]
    assert [step for _, step, _ in scalars] == [2, 4, 6, 8] == [r["step"] for r in records]
    for (_, _, values), record in zip(scalars, records, strict=True):
        names = {"loss", "gradient_norm", "learning_rate", "images_per_second", "ms_per_step"}
        assert names <= values.keys()
        assert values == {name: record[name] for name in values}
    pictures = [item[1:] for item in kept if item[0] == "picture"]
    assert pictures == [(4, "samples-00000004.png"), (8, "samples-00000008.png")]
    assert kept[0][:2] == ("begin", 0) and kept[-1] == ("close", None, True)


def test_curves_continue(tmp_path, kept):
    """A program that cannot take steps back has each step once, under the same name."""
    run_dir = run(tmp_path, log=("wandb",), checkpoint_every=4)
    run(tmp_path, 12, run_dir / "checkpoint-00000004.h5")
    began = [item for item in kept if item[0] == "begin"]
    assert [step for _, step, _ in began] == [0, 4] and began[0][2] == began[1][2]
    for kind, steps in (("scalars", [2, 4, 6, 8, 10, 12]), ("picture", [4, 8, 12])):
        assert [item[1] for item in kept if item[0] == kind] == steps


@pytest.mark.parametrize(
    "method",
    [
        "scalars",
        *(pytest.param(name, marks=exhaustive) for name in ("__init__", "picture", "close")),
    ],
)
def test_a_program_that_fails_ends_its_own_log(tmp_path, kept, monkeypatch, method):
    def fail(*_):
        raise OSError(28, "No space\nleft")

    monkeypatch.setattr(KeptCalls, method, fail)
    lines = []
    bits = newest(run(tmp_path / "with", lines=lines, log=("wandb",)))
    notes = [line for line in lines if "--log" in line]
    assert notes == [
        "note      --log wandb has ended, and the training continues: OSError: [Errno 28] No space left"
    ]
    assert bits == newest(run(tmp_path / "without"))


def test_a_program_that_hangs_is_left(tmp_path, kept, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(KeptCalls, "scalars", lambda *_: released.wait(20))
    monkeypatch.setattr(R, "PATIENCE", 0.05)
    monkeypatch.setattr(R, "WAITING", 2)
    lines = []
    run_dir = run(tmp_path, lines=lines, log=("wandb",))
    released.set()
    assert "note      --log wandb has not ended within 0.05 s, and is left." in lines
    assert (run_dir / "checkpoint-00000008.h5").exists()


def test_one_that_is_not_installed_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(R.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UsageError,
        match=r"^--log wandb needs the package wandb, which is not installed: pip install wandb\.$",
    ):
        run(tmp_path, log=("wandb",))
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="^--log paper does not exist; use tensorboard or trackio"):
        run(tmp_path, log=("paper",))


def test_a_damaged_record_of_what_was_logged_begins_again(tmp_path):
    for text in ("", "{", "[]", '{"identity": 3}', '{"identity": "a", "scalars": 1e9}'):
        (tmp_path / "log.json").write_text(text)
        written = R.read_written(tmp_path / "log.json")
        assert written["scalars"] == written["picture"] == -1 and len(written["identity"]) == 8


@exhaustive
@needs("tensorboard")
def test_tensorboard_reads_a_run(tmp_path):
    """…that was killed after step 8, and continues from step 4 with other settings."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    run_dir = run(tmp_path, log=("tensorboard",), checkpoint_every=4, seed=3)
    run(tmp_path, 12, run_dir / "checkpoint-00000004.h5")
    assert len(list(run_dir.glob("events.out.tfevents.*"))) == 2
    read = EventAccumulator(str(run_dir), size_guidance={"scalars": 0, "images": 0})
    read.Reload()
    records = [json.loads(line) for line in (run_dir / STATS).read_text().splitlines()]
    for name in ("loss", "gradient_norm", "learning_rate", "images_per_second"):
        assert [(e.step, pytest.approx(e.value, rel=1e-6)) for e in read.Scalars(name)] == [
            (record["step"], record[name]) for record in records
        ]
    grids = {e.step: e.encoded_image_string for e in read.Images("samples")}
    assert list(grids) == [4, 8, 12]
    assert all(
        png == (run_dir / f"samples-{step:08d}.png").read_bytes() for step, png in grids.items()
    )
    content = read.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    found = HParamsPluginData.FromString(content).session_start_info.hparams
    assert found["seed"].number_value == 3 and found["model"].string_value == "unet"


TRACKIO = """
import sys, trackio
from numdiff_cli.main import main
from trackio.sqlite_storage import SQLiteStorage
run_dir, small = sys.argv[1], sys.argv[2:]
main(["train", "unet", *small, "--steps", "8", "--log", "trackio"], standalone_mode=False)
main(["train", "unet", "--resume", run_dir, "--steps", "12"], standalone_mode=False)
(run,) = trackio.Api().runs("numdiff")
print("SEED", run.config["seed"])
for row in SQLiteStorage.get_logs("numdiff", run.name, run_id=run.id):
    print("ROW", row["step"], row.get("loss"), row.get("samples", {}).get("file_path"))
"""


@exhaustive
@needs("trackio")
def test_trackio_reads_a_run(tmp_path):
    small = {**SMALL, "outdir": str(tmp_path), "seed": 3, "lr": 1e-3}
    given = [
        word
        for name, value in small.items()
        for word in (
            f"--{name.replace('_', '-')}",
            (",".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value),
        )
    ]
    run_dir = tmp_path / "00000-unet-tiny"
    ended = subprocess.run(
        python_command(TRACKIO, str(run_dir), *given),
        env={**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"},
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    rows = [line.split()[1:] for line in ended.stdout.splitlines() if line.startswith("ROW")]
    records = [json.loads(line) for line in (run_dir / STATS).read_text().splitlines()]
    assert [(int(step), float(loss)) for step, loss, _ in rows if loss != "None"] == [
        (record["step"], record["loss"]) for record in records
    ]
    pictures = {int(step): path for step, _, path in rows if path != "None"}
    assert list(pictures) == [4, 8, 12] and "SEED 3\n" in ended.stdout
    for step, path in pictures.items():
        stored = (tmp_path / "trackio" / "media" / path).read_bytes()
        assert stored[:8] == (run_dir / f"samples-{step:08d}.png").read_bytes()[:8]


@exhaustive
@needs("mpi", "tensorboard")
def test_only_rank_0_logs(tmp_path):
    ended = subprocess.run(
        [MPIEXEC, "-n", "2", "numdiff", "train", "unet", "--device", "cpu", "--steps", "2"]
        + ["--sample-count", "0", "--log", "tensorboard", "--outdir", str(tmp_path)],
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert len(list(tmp_path.glob("*/events.out.tfevents.*"))) == 1
