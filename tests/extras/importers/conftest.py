"""The importers' tests: what they write, what they refuse, and sources in each form."""

import os
import shutil
from types import SimpleNamespace

import pytest

from numdiff.errors import UsageError
from numdiff.extras.importers.importing import import_dataset
from tests.extras.importers.sources import contents, fill, zipped


@pytest.fixture
def out(tmp_path_factory):
    """The file to write; no test may leave another file in its folder."""
    folder = tmp_path_factory.mktemp("out")
    yield folder / "out.h5"
    assert [name for name in os.listdir(folder) if name != "out.h5"] == []


def path_of(source, tmp_path):
    """A path as it is; of files by name a folder, in place of the one before."""
    if not isinstance(source, dict):
        return source
    shutil.rmtree(tmp_path / "folder", ignore_errors=True)
    return fill(tmp_path / "folder", source)


@pytest.fixture
def imported(tmp_path, out):
    """imported(source, **options): imports a path, or a folder of named files, in place of what was
    imported before. Gives the report, what is in the file, and the name of each image's class."""

    def run(source, **options):
        report = import_dataset(path_of(source, tmp_path), out, force=True, **options)
        images, labels, classes = contents(out)
        names = None if labels is None else [classes[i] for i in labels]
        return SimpleNamespace(
            report=report, images=images, labels=labels, classes=classes, names=names
        )

    return run


@pytest.fixture
def refused(tmp_path, out):
    """refused(source, message, error, **options): the import ends with this error, and what was
    there stays as it was. source: as of `imported`."""

    def run(source, message, error=UsageError, **options):
        before = out.read_bytes() if out.exists() else None
        with pytest.raises(error, match=message):
            import_dataset(path_of(source, tmp_path), out, force=True, **options)
        assert before == (out.read_bytes() if out.exists() else None)

    return run


@pytest.fixture(params=["folder", "zip", "zip with one folder around all"])
def packed(request, tmp_path):
    """Makes a source of named files, as a folder or a zip."""

    def pack(files):
        if request.param == "folder":
            shutil.rmtree(tmp_path / "source", ignore_errors=True)
            return fill(tmp_path / "source", files)
        around = "all/" if "around" in request.param else ""
        return zipped(
            tmp_path / "source.zip", {around + name: data for name, data in files.items()}
        )

    return pack
