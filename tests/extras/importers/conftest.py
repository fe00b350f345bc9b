"""The importers' tests: what they write, and sources in each form."""

import os
import shutil

import pytest

from tests.extras.importers.sources import fill, zipped


@pytest.fixture
def out(tmp_path_factory):
    """The file to write; no test may leave another file in its folder."""
    folder = tmp_path_factory.mktemp("out")
    yield folder / "out.h5"
    assert [name for name in os.listdir(folder) if name != "out.h5"] == []


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
