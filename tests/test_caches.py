"""The cache on disk: what another user could have put there is not used, and nothing is written
through a link."""

import os

import pytest

from numdiff.caches import (
    NotOwn,
    cache_root,
    check_own,
    check_own_file,
    own_folder,
    read_own,
    write_own,
)
from numdiff.data.dataset import open_dataset
from numdiff.device.kernel_cache import KernelCache, Key, MachineCode
from numdiff.errors import NumdiffError
from numdiff.files import IrregularFile
from tests.conftest import needs

pytestmark = needs("posix")
KEY, CODE = Key("numdiff.kernels.reduce", "sum", ("float32[2]",)), MachineCode("entry", b"cubin")


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMDIFF_CACHE_DIR", str(tmp_path / "new" / "root"))
    return tmp_path / "new" / "root"


@pytest.fixture
def other_user(monkeypatch):
    """From now on this process is another user's."""
    return lambda: monkeypatch.setattr(os, "geteuid", lambda: os.stat("/").st_uid + 12345)


def test_new_folders_are_this_users_alone(root):
    before = os.umask(0)
    try:
        folder = own_folder(root / "kernels")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (root, folder)] == [0o700, 0o700]
    write_own(folder / "a", b"1")
    write_own(folder / "a", b"2")
    assert read_own(folder / "a") == b"2" and (folder / "a").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in folder.iterdir()] == ["a"] and str(root) == cache_root()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
@pytest.mark.parametrize("which", [".", "kernels"])
def test_others_may_write(root, mode, which):
    own_folder(root / "kernels")
    (root / which).chmod(mode)
    for check in (own_folder, check_own):
        with pytest.raises(NotOwn, match="other users may write to it: run chmod go-w"):
            check(root / "kernels")


def test_another_users(root, other_user):
    write_own(own_folder(root / "kernels") / "a", b"1")
    other_user()
    for check, path in (
        (own_folder, root / "kernels"),
        (check_own, root / "kernels"),
        (read_own, root / "kernels" / "a"),
        (check_own_file, root / "kernels" / "a"),
    ):
        with pytest.raises(NotOwn, match="it belongs to another user"):
            check(path)


def test_links(root, tmp_path):
    """The whole cache may be a link of this user's, what is in it may not."""
    (tmp_path / "elsewhere").mkdir(0o700)
    root.parent.mkdir()
    root.symlink_to(tmp_path / "elsewhere")
    folder = own_folder(root / "kernels")
    (root / "linked").symlink_to(folder)
    with pytest.raises(NotOwn, match="it is a symbolic link"):
        own_folder(root / "linked")
    (tmp_path / "target").write_bytes(b"precious")
    for name in ("a", f".a.{os.getpid()}"):
        (folder / name).symlink_to(tmp_path / "target")
    with pytest.raises(OSError):
        read_own(folder / "a")
    write_own(folder / "a", b"1")
    assert (tmp_path / "target").read_bytes() == b"precious" and not (folder / "a").is_symlink()
    assert read_own(folder / "a") == b"1"
    os.mkfifo(folder / "fifo")
    with pytest.raises(IrregularFile, match="it is a FIFO"):
        read_own(folder / "fifo")
    with pytest.raises(NotADirectoryError):
        own_folder(folder / "a")
    (folder / "folder").mkdir()
    with pytest.raises(IrregularFile, match="it is a folder"):
        read_own(folder / "folder")
    os.truncate(folder / "a", 1 << 40)
    with pytest.raises(OSError, match="too large"):
        read_own(folder / "a")


def test_kernels_of_another_user_are_not_loaded(root, other_user):
    cache, said = KernelCache((9, 0)), []
    cache.write(KEY, CODE)
    assert KernelCache((9, 0)).read(KEY) == CODE
    root.chmod(0o777)
    assert KernelCache((9, 0)).read(KEY) is None
    root.chmod(0o700)
    other_user()
    other = KernelCache((9, 0))
    assert other.read(KEY) is None
    with pytest.raises(NotOwn):
        other.write(KEY, CODE)
    other.writable(said.append)
    assert said == [
        f"the kernel cache {cache.folder} cannot be used (it belongs to another user): kernels are "
        "compiled again in every run; set NUMDIFF_CACHE_DIR to a folder of your own."
    ]


def test_pictures_of_another_user_are_not_read(root, tmp_path, other_user):
    from PIL import Image

    (tmp_path / "photos").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "a.png")
    open_dataset(tmp_path / "photos", 8).close()
    other_user()
    with pytest.raises(
        NumdiffError, match=r"cannot be kept in .* \(it belongs to another user\): set NUMDIFF"
    ):
        open_dataset(tmp_path / "photos", 8)


def test_what_is_no_file_in_the_place_of_pictures(root, tmp_path):
    """A link and a FIFO are replaced, their targets kept; a folder is named."""
    from PIL import Image

    (tmp_path / "photos").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "a.png")
    (tmp_path / "target").write_bytes(b"precious")
    open_dataset(tmp_path / "photos", 8).close()
    (kept,) = (root / "data").glob("*.h5")
    for plant in (
        os.mkfifo,
        lambda path: path.symlink_to(tmp_path / "target"),
        lambda path: path.symlink_to(path),
    ):
        kept.unlink()
        plant(kept)
        open_dataset(tmp_path / "photos", 8).close()
        assert kept.is_file() and not kept.is_symlink()
    assert (tmp_path / "target").read_bytes() == b"precious"
    kept.unlink()
    kept.mkdir()
    with pytest.raises(
        NumdiffError, match="where the pictures of a folder are kept, is a folder: remove it"
    ):
        open_dataset(tmp_path / "photos", 8)


def test_a_user_without_a_home(monkeypatch, tmp_path):
    def home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("NUMDIFF_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pathlib.Path.home", home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert own_folder(os.path.join(cache_root(), "a")) == tmp_path / f"numdiff-{os.getuid()}" / "a"
