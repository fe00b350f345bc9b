"""Loops compiled for the host are kept on disk; damage, a full disk and other users' files cost a
compilation alone."""

import os
import pathlib
import pickle

import numpy as np
import pytest

from numdiff.device import loop_cache
from numdiff.device.cpu import on_host


def double(x):
    for i in range(x.size):
        x[i] *= 2


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMDIFF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    monkeypatch.setattr(loop_cache, "is_hashed", lambda name: name.startswith(__name__))
    return tmp_path / "cache"


def hits():
    """Whether the function came from the disk; it is called, and right."""
    loop, x = on_host(double), np.arange(3.0)
    loop(x)
    assert x.tolist() == [0, 2, 4]
    return sum(loop.stats.cache_hits.values())


def files(root):
    return [path for path in root.rglob("*") if path.is_file()]


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("planted",)


def test_kept_and_found(root, tmp_path):
    assert [hits(), hits(), hits()] == [0, 1, 1]
    (path,) = files(root)
    assert path.name.startswith("double-") and not (tmp_path / "numba").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[:40],
        lambda data: data + b"\0",
        lambda data: data[:99] + b"!" + data[100:],
        lambda data: os.urandom(len(data)),
        lambda data: pickle.dumps(Bomb()),
        lambda data: data[:32] + pickle.dumps(Bomb()),
    ],
)
def test_damage_is_compiled_again(root, tmp_path, monkeypatch, damage):
    monkeypatch.chdir(tmp_path)
    hits()
    (path,) = files(root)
    path.write_bytes(damage(path.read_bytes()))
    assert [hits(), hits()] == [0, 1] and not pathlib.Path("planted").exists()


@pytest.mark.parametrize("broken", ["other user", "others may write", "file", "full disk", "link"])
def test_a_folder_that_cannot_be_used(root, tmp_path, monkeypatch, broken):
    hits()
    if broken == "other user":
        monkeypatch.setattr(os, "geteuid", lambda: os.stat("/").st_uid + 12345, raising=False)
    elif broken == "others may write":
        root.chmod(0o777)
    elif broken == "link":
        (folder,) = root.iterdir()
        folder.rename(tmp_path / "moved")
        folder.symlink_to(tmp_path / "moved")
    elif broken == "file":
        monkeypatch.setenv("NUMDIFF_CACHE_DIR", str(files(root)[0]))
    else:

        def full(path, data):
            raise OSError(28, "No space left on device")

        monkeypatch.setenv("NUMDIFF_CACHE_DIR", str(tmp_path / "full"))
        monkeypatch.setattr(loop_cache, "write_own", full)
    assert [hits(), hits()] == [0, 0]


def test_functions_of_others_are_not_kept(root, monkeypatch):
    monkeypatch.setattr(loop_cache, "is_hashed", lambda name: name.startswith("numdiff."))
    assert [hits(), hits()] == [0, 0] and files(root) == []
