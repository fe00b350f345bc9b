"""Signals that come where nothing may be interrupted."""

import signal
import subprocess

import pytest

from numdiff.signals import deferred_signals
from tests.conftest import needs
from tests.forked import forked

INTERRUPTED = """
import os, signal, sys
import numpy as np
from numdiff.data.writer import Writer
from numdiff.files import TemporaryFile
from numdiff.training.checkpoint import save_checkpoint

def interrupted(self, data, write=TemporaryFile.write):
    signal.raise_signal(signal.SIGINT)
    return write(self, data)

TemporaryFile.write = interrupted
try:
    {}
except KeyboardInterrupt:
    sys.exit(f"interrupted, {{os.listdir()}}")
"""


def test_they_do_at_the_end_what_they_do(monkeypatch):
    seen = []
    old = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with deferred_signals():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert not seen
        assert seen == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
        assert len(seen) == 2
    finally:
        signal.signal(signal.SIGINT, old)


@needs("posix")
@pytest.mark.parametrize(
    "writing",
    [
        "save_checkpoint('a.h5', {'parameters': np.zeros(9000, np.float32)}, {})",
        "with Writer('a.h5') as writer:\n        [writer.append(np.zeros((8, 8, 3), np.uint8)) for _ in range(70)]",
    ],
    ids=["checkpoint", "dataset"],
)
def test_hdf5_is_not_interrupted_within_a_write(tmp_path, writing):
    """It crashed the process."""
    done = subprocess.run(
        forked("-c", INTERRUPTED.format(writing)), cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, "interrupted, []\n")
