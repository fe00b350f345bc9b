"""numdiff/emulator/README.md: its example runs and is reported as it says, its table is what the
command prints."""

import pathlib
import re
import runpy

import pytest
from click.testing import CliRunner

from numdiff import emulator
from numdiff.extras.kernel_check import run as check
from numdiff_cli.main import main

FOLDER = pathlib.Path(emulator.__file__).parent
README = (FOLDER / "README.md").read_text(encoding="utf-8")


def blocks(language):
    found = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def test_the_example_is_reported_as_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("smooth.py").write_text(blocks("python")[0])
    with pytest.raises(emulator.KernelFault) as caught:
        runpy.run_path("smooth.py")
    assert str(caught.value).strip() in README


def test_the_table_is_what_the_command_prints(monkeypatch):
    monkeypatch.setattr(
        check, "CASES", check.CASES[: 1 + [c.name for c in check.CASES].index("matmul")]
    )
    result = CliRunner().invoke(main, ["kernels", "check", "matmul", "--version", "2", "--counts"])
    (table,) = [b for b in blocks("") if b.startswith("matmul_forward_kernel_v2")]
    assert unnumbered(table.strip()) in unnumbered(result.output)


def unnumbered(text):
    """Without the numbers of lines, which move with every line above them."""
    return re.sub(r"^(\w+\.py):\d+ +", r"\1 ", text, flags=re.MULTILINE)


def test_pictures_exist_and_are_small():
    found = re.findall(r"!\[[^]]*\]\(([^)]+)\)", README)
    assert len(found) == 4
    for path in found:
        assert 0 < (FOLDER / path).stat().st_size < 60_000, path
