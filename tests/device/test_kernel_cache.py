"""Compiled kernels on disk: what is written is read, what is damaged is not, and nothing is taken
for another."""

import multiprocessing
import os
import time

import pytest

from numdiff.device import kernel_cache
from numdiff.device.kernel_cache import (
    KernelCache,
    Key,
    MachineCode,
    architecture,
    remove_unfinished,
    unpack,
)

KEY, OTHER = (
    Key("numdiff.kernels.reduce", name, ("float32[2]", "int32")) for name in ("sum", "largest")
)
CODE = MachineCode("entry", bytes(range(256)) * 8 + b"\n", 1.5)


@pytest.fixture
def cache(tmp_path):
    return KernelCache((9, 0), tmp_path / "kernels")


def test_round_trip(cache):
    assert not cache.has(KEY) and cache.read(KEY) is None
    cache.write(KEY, CODE)
    assert cache.has(KEY) and cache.read(KEY) == CODE
    assert not cache.has(OTHER)
    # and nothing unfinished
    assert [path.name for path in cache.folder.iterdir()] == [cache.file_name(KEY)]


def test_another_kernel_card_or_compiler_has_another_file(cache, monkeypatch):
    names = {
        cache.file_name(key)
        for key in (KEY, OTHER, KEY._replace(module="a"), KEY._replace(types=("int32",)))
    }
    names.add(KernelCache((8, 0)).file_name(KEY))
    monkeypatch.setattr(kernel_cache, "toolchain", lambda: "another Numba")
    names.add(cache.file_name(KEY))
    assert len(names) == 6


def test_the_compilers_are_known():
    words = kernel_cache.toolchain()
    assert "numba-cuda " in words and "llvmlite " in words and "nvidia-nvvm " in words
    assert [architecture(c) for c in ((7, 5), (8, 9), (9, 0), (12, 0))] == [
        "sm_75",
        "sm_89",
        "sm_90a",
        "sm_120a",
    ]


def test_other_code_has_another_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMDIFF_CACHE_DIR", str(tmp_path))
    before = kernel_cache.cache_directory()
    monkeypatch.setattr(kernel_cache, "code_digest", lambda: "0123")
    assert before.startswith(str(tmp_path)) and before != str(tmp_path / "kernels-0123")
    assert kernel_cache.cache_directory() == str(tmp_path / "kernels-0123")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:100] + b"!" + data[101:],
        lambda data: data.replace(b"kernel 1", b"kernel 0"),
        lambda data: os.urandom(len(data)),
        lambda data: data[:30],
    ],
)
def test_a_damaged_file_counts_as_missing(cache, damage):
    cache.write(KEY, CODE)
    path = cache.folder / cache.file_name(KEY)
    path.write_bytes(damage(path.read_bytes()))
    assert cache.read(KEY) is None and not cache.has(KEY)
    with pytest.raises(ValueError, match="damaged"):
        unpack(path.read_bytes())
    cache.write(KEY, CODE)
    assert cache.read(KEY) == CODE


def write_often(folder, start):
    cache = KernelCache((9, 0), folder)
    start.wait()
    for _ in range(50):
        cache.write(KEY, CODE)


def test_processes_write_the_same_kernel_at_the_same_time(cache):
    """A reader meanwhile finds it complete."""
    context = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
    start = context.Barrier(3)
    processes = [context.Process(target=write_often, args=(cache.folder, start)) for _ in range(3)]
    cache.write(KEY, CODE)
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        assert cache.read(KEY) == CODE
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(list(cache.folder.iterdir())) == 1


@pytest.fixture
def unwritable(tmp_path, request):
    """A folder that cannot be: under a file. (What permissions forbid, root may.)"""
    kernel_cache.temporary_folder.cache_clear()
    (tmp_path / "file").write_text("")
    yield tmp_path / "file" / "kernels"
    kernel_cache.temporary_folder.cache_clear()


def test_a_folder_that_cannot_be_written(unwritable):
    """Kernels go elsewhere, from where they are read; it is said once."""
    lines = []
    for _ in range(2):
        cache = KernelCache((9, 0), unwritable)
        folder = cache.writable(lines.append)
        cache.write(KEY, CODE)
        assert cache.has(KEY) and cache.read(KEY) == CODE and folder.is_dir()
        assert cache.writable(lines.append) == folder
    (line,) = lines
    assert line == (
        f"the kernel cache {unwritable} cannot be used (Not a directory): kernels are compiled again in "
        "every run; set NUMDIFF_CACHE_DIR to a folder of your own."
    )


def test_a_folder_that_can_only_be_read_is_read(cache, unwritable):
    cache.write(KEY, CODE)
    cache.more.append(unwritable.parent.parent / "more")
    cache.write(OTHER, CODE)
    assert cache.read(KEY) == cache.read(OTHER) == CODE
    assert not (cache.folder / cache.file_name(OTHER)).exists()


def test_what_a_killed_process_left_is_removed(cache):
    cache.write(KEY, CODE)
    left = [cache.folder / name for name in (".sum.123", ".sum.124")]
    for path in left:
        path.write_text("half")
    remove_unfinished(cache.folder, 123)
    assert [path.exists() for path in left] == [False, True]
    cache.writable()
    assert left[1].exists()  # it may be in use
    os.utime(left[1], 2 * (int(time.time()) - 2 * kernel_cache.STALE,))
    cache.writable()
    assert not left[1].exists() and cache.has(KEY)
