"""Reading and writing files: regular ones alone; nothing is replaced or followed; text from files
is shown visibly."""

import os
import socket

import h5py
import numpy as np
import pytest

from numdiff import plots
from numdiff.data.dataset import open_dataset
from numdiff.emulator.drawing import Picture
from numdiff.errors import NumdiffError, printable, visibly
from numdiff.extras.convert.files import load_state_dict
from numdiff.extras.evaluate.sources import Statistics, open_source, save_statistics
from numdiff.extras.importers.importing import import_dataset
from numdiff.extras.importers.sheet import save_sheet
from numdiff.files import atomic_file, open_regular, open_to_append, read_bytes, write_json
from numdiff.training.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from numdiff.training.options import TrainOptions
from numdiff.training.report import STATS, Reporter, save_png
from numdiff.training.run_folder import lock_run
from numdiff.training.sample_files import samples_file
from tests.command import run

NASTY = "\x1b]0;owned\x07\x1b[31mred\u202e\x9b\n"


def make_irregular(folder):
    """{what: path} of what is no regular file; a device only where one may make it."""
    (folder / "kept").write_bytes(b"kept")
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to(folder / "kept")
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "folder").mkdir()
    paths = ["fifo", "link", "dangling", "folder"]
    try:
        os.mknod(folder / "device", 0o20600, os.makedev(1, 3))
        paths.append("device")
    except PermissionError:
        pass
    return [folder / name for name in paths]


def state_of(folder):
    return [(p.name, p.lstat().st_mode, p.lstat().st_ino) for p in sorted(folder.iterdir())]


def written_by():
    """Everything that writes a file: name -> function(path)."""

    def append(path):
        with open_to_append(path, "the file") as file:
            file.write(b"x")

    def samples(path):
        with samples_file(path, (1, 4, 4, 3), np.uint8) as file:
            file.write(np.zeros((1, 4, 4, 3), np.uint8))
            file.finish(None, {})

    def trace(path):
        Picture(4, 4).png(path)

    return {
        "json": lambda p: write_json(p, {}),
        "checkpoint": lambda p: save_checkpoint(p, {"a": np.zeros(3)}, {}),
        "picture": lambda p: save_png(p, np.zeros((4, 4), np.uint8)),
        "curve": lambda p: plots.loss_curve(p, [1], [1.0]),
        "options": lambda p: TrainOptions().save(p),
        "samples": samples,
        "append": append,
        "trace": trace,
        "statistics": lambda p: save_statistics(f"{p}", Statistics("", np.zeros(2), np.eye(2))),
        "sheet": lambda p: save_sheet(open_dataset(), p),
    }


@pytest.mark.parametrize("what", [*written_by(), "import"])
def test_no_writer_replaces_or_follows(tmp_path, what):
    folder = tmp_path / "f"
    folder.mkdir()
    paths = make_irregular(folder)
    if what in ("statistics", "curve", "import"):  # which insist on the name's end
        ending = {"statistics": ".npz", "curve": ".png", "import": ".h5"}[what]
        paths = [path.rename(path.with_name(path.name + ending)) for path in paths]
    before = state_of(folder)
    if what == "import":
        np.save(tmp_path / "a.npy", np.zeros((3, 4, 4, 3), np.uint8))
    for path in paths:
        with pytest.raises(NumdiffError) as caught:
            if what == "import":
                import_dataset(tmp_path / "a.npy", path, force=True)
            else:
                written_by()[what](path)
        assert str(path) in str(caught.value) and str(caught.value).endswith("."), caught.value
    assert state_of(folder) == before and (folder / "kept").read_bytes() == b"kept"
    if what not in ("statistics", "import", "trace"):
        written_by()[what](folder / "new.png")
        assert (folder / "new.png").is_file()


def test_a_link_out_of_a_run_folder_is_not_followed(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "kept").write_text("kept\n")
    for name, use in (
        (".lock", lambda: lock_run(tmp_path / "run").__enter__()),
        (STATS, lambda: Reporter(tmp_path / "run", 10, 4, bar=False)),
    ):
        (tmp_path / "run" / name).symlink_to(tmp_path / "kept")
        with pytest.raises(
            NumdiffError, match=f"{name}: it is a symbolic link, which numdiff neither replaces nor"
        ):
            use()
        assert (tmp_path / "kept").read_text() == "kept\n"


def test_a_link_put_at_the_temporary_name_is_not_followed(tmp_path):
    (tmp_path / "kept").write_text("kept")
    (tmp_path / f".a.{os.getpid()}.tmp").symlink_to(tmp_path / "kept")
    with atomic_file(tmp_path / "a") as file:
        file.write(b"new")
    assert (tmp_path / "a").read_bytes() == b"new" and (tmp_path / "kept").read_text() == "kept"


def test_a_target_exchanged_while_writing_is_kept(tmp_path):
    with pytest.raises(NumdiffError, match="FIFO"), atomic_file(tmp_path / "a") as file:
        file.write(b"new")
        os.mkfifo(tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"] and not (tmp_path / "a").is_file()


def test_only_regular_files_are_read(tmp_path):
    """Of a FIFO, a device or a socket every reader says so, and waits for nothing."""
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        readers = {
            ".h5": [open_dataset, load_checkpoint, open_source],
            ".npz": [open_source],
            ".npy": [open_source],
            ".pt": [load_state_dict],
            ".json": [TrainOptions.load],
        }
        for suffix, functions in readers.items():
            for kind, target in (
                ("FIFO", tmp_path / "fifo"),
                ("device", "/dev/zero"),
                ("socket", tmp_path / "socket"),
            ):
                path = tmp_path / f"{kind}{suffix}"
                path.symlink_to(target)
                for function in functions:
                    with pytest.raises(NumdiffError, match=f"it is a {kind}"):
                        function(path)
    os.mkfifo(tmp_path / "checkpoint-00000001.h5")
    assert newest_checkpoint(tmp_path, print) is None
    with pytest.raises(OSError, match="it is a folder"):
        open_regular(tmp_path)
    (tmp_path / "large").write_bytes(bytes(11))
    with pytest.raises(NumdiffError, match="has 11 bytes, and such files have at most 10"):
        read_bytes(tmp_path / "large", 10)


def test_what_comes_from_files_is_shown_visibly(tmp_path):
    shown = printable(NASTY)
    assert shown == "\\x1b]0;owned\\x07\\x1b[31mred\\u202e\\x9b\\n" and shown.isprintable()
    for text in ("Smileys & Emotion", "Ünï – 日本語", "👨\u200d👩\u200d👧", "a\xa0b"):
        assert printable(text) == text
    assert printable("\udc80") == "\\udc80" and printable("x" * 9, 4) == "xxxx…"
    assert str(NumdiffError(f"no class {NASTY}")).count("\x1b") == 0
    written = []
    visibly(written.append)(NASTY)
    assert written == [shown]


def test_commands_print_names_from_files_visibly(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with h5py.File("a.h5", "w") as file:
        file["images"], file["labels"] = np.zeros((3, 8, 8, 3), np.uint8), [0, 1, 1]
        file.attrs["classes"] = [NASTY, "b"]
    info = run("data info a.h5")
    assert info.exit_code == 0 and "owned" in info.output
    wrong = run("evaluate a.h5 a.h5 --classes c")
    assert wrong.exit_code == 2 and "owned" in wrong.output
    for output in (info.output, wrong.output):
        assert all(c.isprintable() or c == "\n" for c in output)
