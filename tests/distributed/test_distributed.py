"""Several ranks: what they compute, what they leave, how they end. The jobs run under mpiexec, on
the CPU engine."""

import functools
import multiprocessing
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import types

import h5py
import numpy as np
import pytest

from numdiff.distributed import buckets, exchange, launcher, mpi_exchange
from numdiff.distributed import communicator as distributed
from numdiff.distributed.together import stop_signals
from numdiff.errors import UsageError
from numdiff.nn import AdamW
from numdiff.training.checkpoint import load_checkpoint, newest_checkpoint
from numdiff.training.report import read_stats
from numdiff.training.trainer import split_batch
from numdiff_cli.main import main
from tests.command import output_of
from tests.conftest import MPIEXEC, exhaustive, exhaustively, needs, relative_error, where
from tests.distributed import ranks
from tests.distributed.hosts import two_hosts
from tests.distributed.watched import watched
from tests.forked import forked
from tests.models import with_random_weights
from tests.nn.steps import dit, unet
from tests.training.test_trainer import losses, make

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    # as a container's tests are
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    # else each of few ranks is bound to one core, on which it compiles its kernels
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}
OPTIONS = {"env": ENVIRONMENT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
COMMAND = (
    "from numdiff import plots; plots.loss_curve = lambda *_: None; plots.import_ahead = lambda: None; "
    "from numdiff_cli.main import main; main()"
)
PYTHON = [sys.executable]  # what a user's ranks begin with; most of these are `forked()`


def main_of(python):
    """The command line in such processes, without the curves that a run ends with, for each of
    which matplotlib is imported."""
    return [*python, "-c", COMMAND]


def job(count, *command):
    return [MPIEXEC, "-n", str(count), *command]


def task(count, name, folder, python=None):
    return job(count, *(python or forked()), "-m", "tests.distributed.ranks", name, str(folder))


def run(command):
    return subprocess.run(command, timeout=300, **OPTIONS)


def check_done(result):
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


# What they compute --------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[(2,), *exhaustively(((1, 2, 4),))], ids=str)
def counts(request):
    """Of how many ranks there is a job."""
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory, counts):
    """What these jobs have left: losses and states, runs and resumed runs."""
    folder = tmp_path_factory.mktemp("ranks")
    for count in counts:
        several = [
            "methods",
            "sharded",
            "sharded_in_16_bits",
            "float8",
            *(["sharded_further"] if count == 4 else []),
        ]
        tasks = [
            "steps",
            *(several if count > 1 else []),
            *(["runs"] if count > 1 and 4 in counts else []),
            *(["over_hosts"] if count == 4 else []),
        ]
        # each with another order of its sets of strings
        own = PYTHON if count == 2 and 4 in counts else None
        text = check_done(run(task(count, ",".join(tasks), folder, own)))
        if count == 2 and 4 in counts:
            assert (
                text.count("resumed after step 5 of 10") == 1
                and "ranks     2 on 1 host; gradients by mpi" in text
            )
    return folder


@needs("mpi")
def test_ranks_train_as_one(folder, counts):
    """Eight steps on 1, 2 and 4 ranks of the same batch: the same losses, and on all ranks the same
    bits."""
    alone = make(model="small")
    expected = losses(alone, 8)
    alone.close()
    for count in counts:
        left = [dict(np.load(folder / f"{rank}-of-{count}.npz")) for rank in range(count)]
        np.testing.assert_allclose(left[0]["losses"], expected, rtol=1e-5, atol=1e-5)
        for other in left[1:]:
            assert left[0].keys() == other.keys() > {"parameters", "m", "v", "ema"}
            for name in left[0].keys() - {"workers"}:
                np.testing.assert_array_equal(left[0][name], other[name], err_msg=name)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        # the cores are shared, too
        assert all(row["workers"] <= max(1, cores // count) for row in left)


@needs("mpi")
def test_every_method_of_the_communicator(folder, counts):
    assert len(list(folder.glob("methods-*"))) == max(counts)


@needs("mpi")
@where(lambda counts: 4 in counts)
def test_sums_over_hosts_have_the_order_of_the_hosts(folder, counts):
    assert len(list(folder.glob("over-hosts-*"))) == 4


@needs("mpi")
def test_a_shared_update_has_the_bits_of_one_that_each_does(folder, counts):
    """The job has compared them: states, losses, and what follows from each other's state."""
    assert len(list(folder.glob(f"sharded-*-of-{max(counts)}"))) == max(counts)


@needs("mpi")
def test_ranks_share_the_scales_of_float8(folder, counts):
    """The job has compared them with one rank's, the update shared and not, and each continues from
    the other's state."""
    assert len(list(folder.glob(f"float8-*-of-{max(counts)}"))) == max(counts)


@exhaustive
@needs("mpi")
@pytest.mark.usefixtures("no_curves")
def test_checkpoints_of_shared_updates_are_those_of_others(tmp_path):
    """4 ranks, 2, 1: the same files whether the update was shared or not, at each point."""

    def go(how, *counts):
        for done, count in enumerate(counts, 1):
            _, weights = train(
                count,
                "unet",
                tmp_path / how,
                3 * done,
                *(["--resume"] if done > 1 else []),
                *(["--shard-update", how] if count > 1 else []),
                "--ema-std",
                "0.1",
            )
        return weights, load_checkpoint(newest_checkpoint(next((tmp_path / how).iterdir())))[0]

    yes, no = go("yes", 4, 2, 1), go("no", 4, 2, 1)
    np.testing.assert_array_equal(yes[0], no[0])
    assert yes[1].keys() == no[1].keys() > {"momentum", "v", "ema", "ema_std_0.1"}
    for name in no[1]:
        np.testing.assert_array_equal(yes[1][name], no[1][name], err_msg=name)


def test_a_single_process_does_not_shard_the_update():
    with pytest.raises(
        UsageError, match=r"^--shard-update yes shares the update among .* leave it out, or start"
    ):
        make(shard_update="yes")


def test_sums_are_made_in_rank_order(rng):
    x = rng.standard_normal((4, 100)).astype(np.float32)
    for rank in range(4):
        own, others = x[rank].copy(), np.delete(x, rank, 0)
        mpi_exchange.add_in_order(others, own, rank)
        np.testing.assert_array_equal(own, x[0] + x[1] + x[2] + x[3])


@needs("mpi")
@pytest.mark.usefixtures("no_curves")
@where(lambda counts: 4 in counts)  # the command's test resumes on other numbers, too
def test_resume_on_the_same_and_on_other_numbers_of_ranks(folder, counts):
    ranks.runs(folder)

    def final(name):
        return load_checkpoint(newest_checkpoint(folder / name))[0]

    whole = final("whole/00000-unet-tiny")
    for name, array in whole.items():
        np.testing.assert_array_equal(array, final("resumed-2")[name], err_msg=name)
        for other in ["resumed-1", *(["resumed-4"] if 4 in counts else [])]:
            # steps of gradients near 0
            assert relative_error(final(other)[name], array) < 1e-3, (other, name)
    pictures = [
        (folder / name / "samples-00000010.png") for name in ("whole/00000-unet-tiny", "resumed-2")
    ]
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


@exhaustive
@needs("mpi")
def test_a_run_in_float8_goes_on_on_other_numbers_of_ranks(tmp_path):
    """1 rank, 2, 4, 1, by checkpoints: the losses of 1 rank, as near as other shapes of its
    products leave them."""

    def go(name, *parts):
        folder = tmp_path / name
        folder.mkdir()
        for steps, count in parts:
            (folder / "steps").write_text(str(steps))
            check_done(run(task(count, "float8_run", folder)))
        left = next((folder / "runs").iterdir())
        return read_stats(left)[1], load_checkpoint(newest_checkpoint(left))[0]

    (expected, whole), (values, parts) = (
        go("1", (10, 1)),
        go("several", (3, 1), (6, 2), (8, 4), (10, 1)),
    )
    np.testing.assert_allclose(values, expected, rtol=2e-3)
    assert len(values) == 10 and whole.keys() == parts.keys()
    ranks.same_scales(parts, whole)


MODELS = {
    "unet": "--model-channels 32 --channel-mult 1,2 --attention-resolutions 4",
    "dit": "--model DiT-Tiny --depth 2 --hidden-size 64 --heads 2",
}
DRAWN_TIMES = "--path linear --prediction x_0 --loss flow --time-sampling logit-normal".split()


def train(count, model, outdir, steps, *options):
    """`mpiexec -n COUNT numdiff train MODEL`, for one rank without mpiexec; returns (losses of all
    steps so far, final weights)."""
    outdir.mkdir(exist_ok=True)
    command = (
        f"train {model} --device cpu --size 8 {MODELS[model]} --batch 8 --steps {steps} "
        "--log-every 7 --checkpoint-every 0 --sample-every 0 --sample-count 0 "
        f"--lr-schedule constant --warmup-steps 2 --outdir {outdir}"
    )
    if count == 1:
        output = output_of(command, *options)
    else:
        output = check_done(run(job(count, *main_of(forked()), *command.split(), *options)))
    assert len(re.findall("^done ", output, re.M)) == 1  # rank 0 alone prints
    assert output.count(f"ranks     {count} on 1 host; gradients by mpi.") == (count > 1)
    (folder,) = outdir.iterdir()  # and writes
    return read_stats(folder)[1], load_checkpoint(newest_checkpoint(folder))[0]["parameters"]


@needs("mpi")
@pytest.mark.slow
@pytest.mark.usefixtures("no_curves")
@pytest.mark.parametrize(
    "model, others, parts, objective",
    [
        ("dit", (), ((2, 4), (1, 9, "--resume")), DRAWN_TIMES),
        *exhaustively(
            ("unet", (4,), ((2, 4), (4, 7, "--resume"), (1, 9, "--resume")), ()),
            ("dit", (), ((2, 4), (4, 7, "--resume"), (1, 9, "--resume")), ()),
        ),
    ],
)
def test_the_command_trains_the_same_model_on_any_number_of_ranks(
    tmp_path, model, others, parts, objective
):
    """1 rank and others of one batch; and 2, resumed on 4, resumed on 1: the same nine losses
    within 1e-5.

    The DiT starts from given weights, of which some are frozen.
    """
    start = ()
    if model == "dit":
        train(1, model, tmp_path / "first", 2, "--lr", "1e-2")
        start = "--init", str(next((tmp_path / "first").iterdir())), "--freeze", "blocks.0.*"
    expected, weights = train(1, model, tmp_path / "1", 9, *objective, *start)
    results = [
        train(count, model, tmp_path / str(count), 9, *objective, *start) for count in others
    ]
    for count, steps, *resume in parts:
        resumed = train(count, model, tmp_path / "resumed", steps, *objective, *(resume or start))
    for values, found in (*results, resumed):
        assert len(values) == 9
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-5)
        # Muon's steps are as large where the gradient is mostly rounding
        assert relative_error(found, weights) < 1e-3


@needs("mpi")
@needs("gpu")
@pytest.mark.parametrize(
    "transport, count",
    [
        ("peer", 2),
        ("peer", 4),
        ("mpi", 2),
        ("mpi", 4),
        pytest.param("nccl", 2, marks=needs("gpus", "nccl")),
    ],
)
def test_ranks_on_gpus_train_as_one(tmp_path, transport, count):
    """The same of a GPU engine; on a machine with one GPU all ranks share it, but NCCL's."""
    alone = make(device="cuda", model="small")
    expected = losses(alone, 8)
    alone.close()
    check_done(run(task(count, f"{transport}_steps", tmp_path, PYTHON)))
    left = [dict(np.load(tmp_path / f"{rank}-of-{count}.npz")) for rank in range(count)]
    np.testing.assert_allclose(left[0]["losses"], expected, rtol=1e-5, atol=1e-5)
    for other in left:
        assert other["transport"] == transport
        np.testing.assert_array_equal(left[0]["parameters"], other["parameters"])


@needs("mpi")
@needs("gpu")
@pytest.mark.parametrize("transport", ["peer", "mpi"])
def test_ranks_on_gpus_share_the_scales_of_float8(tmp_path, transport):
    check_done(run(task(2, f"{transport}_float8", tmp_path, PYTHON)))
    assert len(list(tmp_path.glob("float8-*-of-2"))) == 2


# How they end -------------------------------------------------------------------------------------


def start(name, folder, count=2, python=None):
    """A job that trains, once it has saved step 2 and all ranks have left their process numbers."""
    process = subprocess.Popen(task(count, name, folder, python), **OPTIONS)
    guard = threading.Timer(200, process.kill)  # mpiexec's death is that of its ranks
    guard.daemon = True
    guard.start()
    names = [""]
    while max(names) < "checkpoint-00000002":  # which itself may be gone when one looks
        names = [path.name for path in folder.glob("runs/*/checkpoint-*.h5")] or [""]
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    return process


def stop(folder, count, victim):
    """A job of which one rank is stopped."""
    process = start("watched", folder, count, PYTHON)
    os.kill(int((folder / f"pid-{victim}").read_text()), signal.SIGSTOP)
    return process


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """(folder, job) whose rank 0 of 2 is stopped: until all have ended, which takes ten seconds,
    other tests run."""
    folder = tmp_path_factory.mktemp("stopped")
    process = stop(folder, 2, 0)
    yield folder, process
    process.kill()
    process.communicate()


@needs("mpi")
@pytest.mark.parametrize(
    "name, victim",
    [
        ("endless", 1),
        *exhaustively(("endless", 0)),
        pytest.param("peer_endless", 1, marks=needs("gpu")),
    ],
)
@pytest.mark.usefixtures("stopped")
def test_a_killed_rank_ends_the_job(tmp_path, name, victim):
    process = start(name, tmp_path, python=PYTHON if name == "peer_endless" else None)
    killed = time.time()
    os.kill(int((tmp_path / f"pid-{victim}").read_text()), signal.SIGKILL)
    out, err = process.communicate(timeout=100)
    assert time.time() - killed < 60 and process.returncode != 0
    assert re.search(r"is gone|[Kk]illed|signal 9", out + err)
    checkpoint = newest_checkpoint(next((tmp_path / "runs").iterdir()))
    assert load_checkpoint(checkpoint)[1]["step"] >= 2


@exhaustive
@needs("mpi")
def test_a_job_that_is_suspended_as_a_whole_goes_on(tmp_path):
    process = start("watched", tmp_path)
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)]
    for number, seconds in ((signal.SIGSTOP, 4), (signal.SIGCONT, 1), (signal.SIGTERM, 0)):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(seconds)
    _, err = process.communicate(timeout=100)
    assert "stopped after step" in err and "waits for" not in err


@exhaustive
@needs("mpi")
def test_a_stuck_rank_ends_the_job_and_all_say_where(tmp_path):
    process = start("hung", tmp_path)
    _, err = process.communicate(timeout=100)
    assert process.returncode != 0
    assert re.search(
        r"rank 0 of 2, after step \d+ .*, waits for rank 1, alive but without progress for \d+ s",
        err,
    )
    assert re.search(
        r"rank 1 of 2, after step \d+ \(data/loader.py, line \d+\), has made no progress for \d+ s",
        err,
    )


@exhaustive
@needs("mpi")
def test_a_rank_that_never_starts_mpi_ends_the_job(tmp_path):
    result = run(task(3, "never", tmp_path, PYTHON))  # which finds the others by who started them
    assert result.returncode != 0
    # the first that says so ends the job, and may be the only one
    assert re.search(
        r"rank [02] of 3, at the start of MPI, has waited 3 s for rank 1, which ended",
        result.stderr,
    )


@exhaustive
@needs("mpi")
def test_a_signal_to_one_rank_while_it_draws_stops_all(tmp_path):
    process = start("drawing", tmp_path)
    time.sleep(1)
    asked = time.time()
    os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGTERM)
    _, err = process.communicate(timeout=100)
    # on machines with other work, too
    assert time.time() - asked < 60 and "stopped after step 2 of 100000" in err


@needs("mpi")
def test_a_fault_of_one_rank_ends_the_job_with_its_message(tmp_path):
    started = time.time()
    result = run(task(2, "fault", tmp_path))
    assert result.returncode != 0 and time.time() - started < 60
    assert "rank 1 of 2 failed: ZeroDivisionError: a fault of one rank" in result.stderr
    assert newest_checkpoint(next((tmp_path / "runs").iterdir())) is not None


@exhaustive
@needs("mpi")
def test_a_signal_to_one_rank_stops_all_and_saves(tmp_path):
    process = start("endless", tmp_path)
    os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGTERM)
    out, err = process.communicate(timeout=100)
    assert process.returncode != 0 and "Traceback" not in err
    step = int(re.search(r"stopped after step (\d+) of 100000; continue with", err).group(1))
    assert f'"error": "stopped after step {step}' in err and err.count("stopped after") == 1
    assert (
        load_checkpoint(newest_checkpoint(next((tmp_path / "runs").iterdir())))[1]["step"] == step
    )


@needs("mpi")
@pytest.mark.parametrize(
    "name, text",
    [
        *exhaustively(
            ("differ", "after step 5 the weights of rank 1 differ from those of rank 0"),
            ("overflow", "is the first non-finite tensor"),
            ("disk", "the disk is full"),
            ("crowded", "which has 1 GPU: start at most one rank a GPU, or use --device cpu"),
            ("absent", "started as one of 2, and mpi4py is not installed: pip install 'numdiff-"),
        )
    ],
)
def test_an_expected_error_is_said_once(tmp_path, name, text):
    result = run(task(2, name, tmp_path))
    assert result.returncode != 0 and result.stderr.count(text) == 1, result.stderr
    assert "Traceback" not in result.stderr and "Abort" not in result.stderr


def check_stopped(folder, process, count, victim):
    """Every other rank has said for whom it waits, and none is left."""
    asked = time.time()
    _, err = process.communicate(timeout=100)
    assert time.time() - asked < 60 and process.returncode != 0
    for rank in set(range(count)) - {victim}:
        assert re.search(
            rf"Error: rank {rank} of {count}, after step \d+ \(training/\w+.py, line \d+\), waits for "
            rf"rank {victim}, of which nothing has been heard for 3 s .* checkpoint with: numdiff train "
            "unet --resume ",
            err,
        )
        assert (
            f"Error: rank {rank} of {count}"
            in (next((folder / "runs").iterdir()) / "watchdog.log").read_text()
        )
    for rank in range(count):
        with pytest.raises(ProcessLookupError):
            os.kill(int((folder / f"pid-{rank}").read_text()), 0)
    assert newest_checkpoint(next((folder / "runs").iterdir())) is not None


@exhaustive
@needs("mpi")
def test_a_stopped_rank_ends_the_job_and_the_other_says_for_whom_it_waits(stopped):
    check_stopped(*stopped, 2, 0)


@exhaustive
@needs("mpi")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_ends_the_job_and_every_other_says_for_whom_it_waits(tmp_path, victim):
    check_stopped(tmp_path, stop(tmp_path, 4, victim), 4, victim)


SMALL = (
    "train unet --device cpu --image-size 16 --model-channels 32 --channel-mult 1,2 "
    "--attention-resolutions 8 --steps 2 --outdir"
).split()


@needs("mpi")
@pytest.mark.parametrize(
    "first, second, text",
    [
        (
            "--batch 8",
            "--batch 16",
            "the ranks disagree on --batch: rank 0 has 8, rank 1 has 16",
        ),
        *exhaustively(
            (
                "--batch 9",
                "--batch 9",
                "--batch 9, which 2 ranks cannot share evenly: start "
                "1 or 3 ranks, or use --batch 8 or 10",
            ),
            ("--transport peer", "--transport peer", "--transport peer joins GPUs"),
        ),
    ],
    ids=["options", "batch", "transport"],
)
def test_bad_input_is_one_sentence_on_all_ranks(tmp_path, first, second, text):
    folder = str(tmp_path / "runs")
    ranks_of = [
        ("-n", "1", *main_of(forked()), *SMALL, folder, *more.split()) for more in (first, second)
    ]
    result = run([MPIEXEC, *ranks_of[0], ":", *ranks_of[1]])
    assert result.returncode != 0 and result.stderr.count(text) == 1, result.stderr
    assert "Traceback" not in result.stderr and not os.path.exists(folder)


@exhaustive
@needs("mpi")
@pytest.mark.parametrize(
    "first, second, text",
    [
        (
            "own",
            "fewer",
            "rank 0 has 60 uint8 images of 16×16×3, rank 1 30 uint8 images of 16×16×3; give all",
        ),
        (
            "fewer",
            "own",
            "rank 0 has 30 uint8 images of 16×16×3, rank 1 60 uint8 images of 16×16×3; give all",
        ),
        ("turned", "own", "class 0 of rank 0 is 'b', of rank 1 'a'; give all"),
    ],
)
def test_ranks_with_different_data_are_refused(tmp_path, first, second, text):
    """As where every host has its own file of that name: here each rank its own working folder."""
    images, labels = (
        np.random.default_rng(0).integers(0, 256, (60, 16, 16, 3), np.uint8),
        np.arange(60) % 2,
    )
    content = {
        "own": (images, labels, ["a", "b"]),
        "fewer": (images[:30], labels[:30], ["a", "b"]),
        "turned": (images, 1 - labels, ["b", "a"]),
    }
    for name in (first, second):
        (tmp_path / name).mkdir()
        with h5py.File(tmp_path / name / "data.h5", "w") as file:
            file["images"], file["labels"], file.attrs["classes"] = content[name]
    more = "--data data.h5 --class-cond --batch 4".split()
    command = *main_of(forked()), *SMALL, str(tmp_path / "runs"), *more
    ranks_of = [("-n", "1", "-wdir", str(tmp_path / name), *command) for name in (first, second)]
    result = run([MPIEXEC, *ranks_of[0], ":", *ranks_of[1]])
    assert (
        result.returncode != 0
        and result.stderr.count("the ranks train on different data: " + text) == 1
    ), result
    assert "Traceback" not in result.stderr and not (tmp_path / "runs").exists()


# Without mpiexec ----------------------------------------------------------------------------------


def test_a_process_that_is_alone_needs_no_mpi(monkeypatch):
    monkeypatch.setattr(distributed, "import_mpi", None)
    for name in sum(launcher.VARIABLES, ()):
        monkeypatch.delenv(name, raising=False)
    communicator = distributed.connect("auto", "cpu")
    assert isinstance(communicator, distributed.Alone) and (
        communicator.rank,
        communicator.size,
    ) == (0, 1)
    assert communicator.first(str, 3) == "3" and communicator.everywhere(str, 3) == ["3"]


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, (3, 4)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, None),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8"}, (5, 8)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # a batch script, not a rank of srun
        ({"PMI_RANK": "one", "PMI_SIZE": "2"}, None),
    ],
)
def test_launchers_are_known_by_their_variables(monkeypatch, variables, expected):
    for name in sum(launcher.VARIABLES, ()):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launcher.launched() == expected


def test_mpi_asked_for_and_not_installed(monkeypatch):
    for name in sum(launcher.VARIABLES, ()):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(
        UsageError, match=r"mpi4py is not installed: pip install 'numdiff-diffusion\[mpi\]'"
    ):
        distributed.connect("mpi", "cpu")
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(UsageError, match="started as one of 4, and mpi4py is not installed"):
        distributed.connect("auto", "cpu")
    monkeypatch.setenv("PMI_RANK", "2")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(SystemExit) as end:  # rank 0 says it
        distributed.connect("auto", "cpu")
    assert end.value.code == 2


def test_the_batch_is_split():
    assert (
        split_batch(32, None, 4) == (8, 8)
        and split_batch(32, 16, 4) == (8, 8)
        and split_batch(32, 2, 4) == (8, 2)
    )
    with pytest.raises(
        UsageError,
        match="each rank's 8 images of --batch 32 are not divisible by --microbatch 3: use 2.$",
    ):
        split_batch(32, 3, 4)
    with pytest.raises(UsageError, match="^--batch 32 is not divisible by --microbatch 3: use 2.$"):
        split_batch(32, 3, 1)


@pytest.mark.parametrize(
    "batch, microbatch, ranks, more, says",
    [
        (
            4,
            None,
            3,
            {"fixed": True},
            "the run has --batch 4, which 3 ranks cannot share evenly: start 1, 2 or 4 ranks.",
        ),
        (
            4,
            None,
            3,
            {},
            "--batch 4, which 3 ranks cannot share evenly: start 1, 2 or 4 ranks, or use --batch 3 or 6.",
        ),
        (
            2,
            None,
            4,
            {},
            "--batch 2, which 4 ranks cannot share evenly: start 1 or 2 ranks, or use --batch 4.",
        ),
        (
            20,
            4,
            3,
            {},
            "--batch 20, which 3 ranks cannot share evenly: start 1 or 5 ranks, or use --batch 12 or 24.",
        ),
        (
            1,
            None,
            2,
            {"fixed": True},
            "the run has --batch 1, which 2 ranks cannot share evenly: start 1 rank.",
        ),
        (
            5,
            None,
            3,
            {"least": 2, "most": 3},
            "--batch 5, which 3 ranks cannot share evenly: use --batch 3 or 6.",
        ),
    ],
)
def test_what_is_advised_for_a_batch_that_is_not_split_evenly(batch, microbatch, ranks, more, says):
    with pytest.raises(UsageError) as error:
        split_batch(batch, microbatch, ranks, **more)
    assert str(error.value) == says
    words = says.partition(": ")[2]
    for count in map(int, re.findall(r"[0-9]+", words.partition("--batch")[0])):
        split_batch(batch, microbatch, count)
    for other in map(int, re.findall(r"[0-9]+", words.partition("--batch")[2])):
        split_batch(other, microbatch, ranks)


def test_a_command_prints_on_rank_0_alone(monkeypatch, capsys):
    for rank, expected in (("0", "text\n"), ("1", "")):
        monkeypatch.setenv("PMI_RANK", rank)
        monkeypatch.setenv("PMI_SIZE", "2")
        with distributed.job():
            print("text")
        assert capsys.readouterr().out == expected


STARTING = """
import sys, time
from numdiff.distributed.together import one_interrupt
from numdiff.distributed.watchdog import start_guard
try:
    with one_interrupt(), start_guard(60):
        print("begun", flush=True)
        time.sleep(float(sys.argv[1]))  # in place of MPI_Init, which does not notice an interrupt, either
        print("started", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize(
    "seconds, out, err",
    [(1, "started\ninterrupted\n", ""), *exhaustively((60, "", "Error: interrupted.\n"))],
)
def test_an_interrupt_while_mpi_starts_is_said_once(seconds, out, err):
    """It comes twice, as from mpiexec, to the rank and to its monitor process; one that never
    starts is ended."""
    process = subprocess.Popen(
        [sys.executable, "-c", STARTING, str(seconds)], start_new_session=True, **OPTIONS
    )
    assert process.stdout.readline() == "begun\n"
    time.sleep(0.3)
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.1)
    assert process.communicate(timeout=50) == (out, err) and process.returncode == (
        0 if out else -signal.SIGKILL
    )


def test_an_interrupt_is_said_by_rank_0_alone(monkeypatch, capfd):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("numdiff_cli.main.job", interrupt)
    for rank, said in (("0", "Error: interrupted.\n"), ("1", "")):
        monkeypatch.setenv("PMI_RANK", rank)
        monkeypatch.setenv("PMI_SIZE", "2")
        with pytest.raises(SystemExit) as end:
            main(["info"])
        assert end.value.code == 130 and capfd.readouterr().err == said


def test_a_second_ctrl_c_interrupts_what_a_first_one_stops():
    """But not one that is the first, sent again by a launcher."""
    with stop_signals() as request:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        assert request.number == signal.SIGINT
        request.time -= 1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


# The watchdog -------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim, code", [(0, 1), (1, 1), (None, 0)])
def test_the_watchdog_ends_all_when_one_is_killed(victim, code, capfd):
    context = multiprocessing.get_context("spawn")
    queues, ready = [context.Queue() for _ in range(3)], context.Queue()
    processes = [
        context.Process(target=watched, args=(rank, queues, victim is None, ready))
        for rank in range(3)
    ]
    for process in processes:
        process.start()
    assert all(ready.get(timeout=30) for _ in processes)
    if victim is not None:
        processes[victim].kill()
    for rank, process in enumerate(processes):
        process.join(50)
        assert process.exitcode == (-signal.SIGKILL if rank == victim else code)
    said = capfd.readouterr().err
    assert said.count(f"rank {victim} of 3 is gone") == (victim is not None)


# Buckets and exchanges ----------------------------------------------------------------------------


def random_model(kind):
    """A small model without the zeros that it starts with: every gradient is then something."""
    if kind == "unet":
        model = unet(num_classes=3, use_scale_shift_norm=True, resblock_updown=True)
    else:
        model = dit(depth=2)
    return with_random_weights(model, 0.1)


class Sent:
    """Stands for MPI: notes what it is given, and doubles it, as another rank with the same
    gradients would."""

    IN_PLACE, SUM = "in place", "sum"

    def __init__(self):
        self.arrays, self.comm, self.MPI, self.rank, self.size = [], self, self, 0, 2

    def Dup(self):
        return self

    def Iallreduce(self, in_place, array, operation):
        self.arrays.append((array, array.copy()))
        polls = iter([False, False, True])

        def test():
            done = next(polls)
            if done:
                array[...] *= 2
            return done

        return types.SimpleNamespace(Test=test)


class SlowTwin:
    """A HostTwin whose copies take their time: what is sent arrives when it is joined."""

    def __init__(self, array):
        self.array, self.host, self.polls, self.sent = array, np.full_like(array, np.nan), {}, []

    def fetch(self, first, stop):
        self.polls[first] = 3
        self.host[first:stop] = self.array[first:stop]

    def fetched(self, first):
        self.polls[first] -= 1
        return self.polls[first] <= 0

    def send(self, first, stop):
        self.sent.append((first, stop))

    def join(self):
        for first, stop in self.sent:
            self.array[first:stop] = self.host[first:stop]
        self.sent = []


def gradient_step(model, sent, twin, monkeypatch):
    """One step of a model whose gradients go through an MpiExchange over `sent`; returns (exchange,
    gradient, loss)."""
    from numdiff.diffusion import Diffusion
    from numdiff.training.step import TrainingStep

    monkeypatch.setattr(mpi_exchange, "HostArray", twin)
    monkeypatch.setattr(
        mpi_exchange, "BucketPlan", lambda parameters: buckets.BucketPlan(parameters, 1000)
    )
    through = exchange.MpiExchange(sent, model.parameters) if sent else exchange.NoExchange()
    rng = np.random.default_rng(1)
    step = TrainingStep(model, Diffusion(), AdamW(model.parameters), 4, 2, exchange=through, seed=2)
    step.load(rng.integers(0, 256, (4, 8, 8, 3), np.uint8), np.array([0, 1, 2, 0], np.int32))
    loss, scale = step._gradients(exchange=through)
    through.finish(loss)
    return through, model.parameters.grad.copy(), loss[0] * scale


@pytest.mark.parametrize("twin", [mpi_exchange.HostArray, SlowTwin])
@pytest.mark.parametrize("kind", ["unet", "dit"])
def test_buckets_leave_early_and_complete(kind, twin, monkeypatch):
    """What a bucket held when it left is what the whole backward gives, for every layer that there
    is."""
    _, expected, loss = gradient_step(random_model(kind), None, twin, monkeypatch)
    assert np.count_nonzero(expected) > 0.5 * expected.size
    model, sent = random_model(kind), Sent()
    through, gradient, doubled = gradient_step(model, sent, twin, monkeypatch)
    np.testing.assert_array_equal(gradient, 2 * expected)
    assert doubled == 2 * loss
    assert len(sent.arrays) == len(through.plan.buckets) + 1 > 5
    found = sum(len(numbers) for numbers in through.plan.leaving.values())
    assert found == len(through.plan.buckets)  # each parameter was seen in some operation
    early = [number for number in through.plan.leaving if number < 0.75 * through.plan.records]
    assert len(early) > 2  # and the first do not wait for the last


@pytest.mark.parametrize("kind", ["unet", "dit"])
@pytest.mark.parametrize("recompute", ["no", "blocks"])
def test_a_record_names_the_parameters_that_its_backward_adds_to(kind, recompute, monkeypatch):
    model = random_model(kind)
    if recompute != "no":
        model.recompute_blocks(recompute)
    gradient, spans = model.parameters.grad, model.parameters.spans()

    class Watcher:
        def begin(self, records):
            self.named, self.before = buckets.touched_by(records), gradient.copy()

        def played(self, number):
            changed, self.before = gradient != self.before, gradient.copy()
            named = {id(parameter) for parameter in self.named[number]}
            for name, (parameter, first, _, stop) in spans.items():
                assert not changed[first:stop].any() or id(parameter) in named, name

    watcher = Watcher()
    monkeypatch.setattr(exchange.NoExchange, "watch", lambda self: buckets.WatchBackward(watcher))
    gradient_step(model, None, mpi_exchange.HostArray, monkeypatch)
    found = {id(parameter) for parameters in watcher.named for parameter in parameters}
    assert found == {id(parameter) for _, parameter in model.named_parameters()}


def test_cards_that_differ_are_said():
    communicator = distributed.Communicator.__new__(distributed.Communicator)
    for cards, said in (
        (["A", "A"], None),
        ([], None),
        (["A", "A", "B"], "cards differ (rank 0: A, rank 2: B)"),
    ):
        communicator._cards = cards
        assert (communicator.remark() is None) if said is None else (said in communicator.remark())


@exhaustive
@needs("hosts")
def test_two_hosts(request, tmp_path, monkeypatch):
    """Ranks that share nothing but a cable: the bits of ranks on one host, the update shared and
    not.

    All on one core: a rank that has a host for itself would have more of them than others, with
    which some builds of OpenBLAS add up in another order.
    """
    # else MPICH finds the memory that both "hosts" share
    monkeypatch.setitem(ENVIRONMENT, "UCX_TLS", "tcp")
    with two_hosts(MPIEXEC, tmp_path) as on_two:
        check_done(
            run(on_two(4, 2, sys.executable, "-m", "tests.distributed.ranks", "sharded", tmp_path))
        )
        assert len(list(tmp_path.glob("sharded-*-of-4"))) == 4
        weights, cores = [], os.sched_getaffinity(0)
        request.addfinalizer(lambda: os.sched_setaffinity(0, cores))
        os.sched_setaffinity(0, {min(cores)})
        for how, launch in (
            ("here", functools.partial(job, 2)),
            ("there", functools.partial(on_two, 2, 1)),
        ):
            text = check_done(
                run(launch(*main_of(PYTHON), *SMALL, str(tmp_path / how), "--sample-count", "0"))
            )
            assert (
                f"ranks     2 on {2 if how == 'there' else 1} host" in text
                and "gradients by mpi. Each" in text
            )
            weights.append(
                load_checkpoint(newest_checkpoint(next((tmp_path / how).iterdir())))[0][
                    "parameters"
                ]
            )
        np.testing.assert_array_equal(*weights)
