"""Ranks that run other sources of numdiff are refused."""

import os
import shutil
import socket
import sys

import pytest

from numdiff.distributed import same_code
from numdiff.distributed.failures import AgreedError
from tests.conftest import MPIEXEC, exhaustive, needs
from tests.distributed.test_distributed import ENVIRONMENT, ROOT, run
from tests.distributed.threads import on_threads


def test_all_sources_are_compared():
    found = same_code.digests()
    assert {
        "distributed/same_code.py",
        "kernels/softmax.py",
        "nn/optimizer.py",
        "settings.py",
    } <= found.keys()


@pytest.mark.parametrize(
    "changed, said",
    [
        ({}, None),
        (
            {1: {"a.py": "1", "b.py": "2"}},
            "rank 1 on HOST runs another numdiff than rank 0 on HOST, in numdiff/b.py: ",
        ),
        (
            {1: {"a.py": "2", "c.py": "1"}, 2: {}},
            "ranks 1, 2 on HOST run another numdiff than rank 0 on HOST, in "
            "numdiff/a.py and 2 other files: install the same on all hosts.",
        ),
    ],
)
def test_ranks_with_other_sources_are_named(monkeypatch, changed, said):
    own = {"a.py": "1", "b.py": "1"}

    def body(communicator, _):
        if said is None:
            same_code.check_code(communicator, lambda: own)
            return None
        with pytest.raises(AgreedError) as error:
            same_code.check_code(communicator, lambda: changed.get(communicator.rank, own))
        return str(error.value)

    for text in on_threads(3, monkeypatch, body):
        assert (
            text is None
            if said is None
            else text.startswith(said.replace("HOST", socket.gethostname()))
        )


@exhaustive
@needs("mpi")
def test_a_rank_with_another_optimiser_does_not_train(tmp_path):
    shutil.copytree(
        ROOT / "numdiff", tmp_path / "numdiff", ignore=shutil.ignore_patterns("__pycache__")
    )
    changed = tmp_path / "numdiff" / "nn" / "optimizer.py"
    changed.write_text(changed.read_text() + "# changed\n")
    (tmp_path / "numdiff_cli").symlink_to(ROOT / "cli")
    script = tmp_path / "start" / "main.py"  # with -c the current folder would come first
    script.parent.mkdir()
    script.write_text("from numdiff_cli.main import main; main()")
    command = (
        sys.executable,
        str(script),
        "train",
        "unet",
        "--device",
        "cpu",
        "--outdir",
        str(tmp_path / "runs"),
    )
    path = os.pathsep.join([str(tmp_path), ENVIRONMENT["PYTHONPATH"]])
    result = run(
        [MPIEXEC, "-n", "1", *command, ":", "-n", "1", "env", f"PYTHONPATH={path}", *command]
    )
    assert result.returncode and "rank 1 on " in result.stderr, result.stderr
    assert result.stderr.count("in numdiff/nn/optimizer.py: install the same on all hosts.") == 1
    assert "Traceback" not in result.stderr and not (tmp_path / "runs").exists()
