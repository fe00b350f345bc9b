"""Extensions: the core does not import them, and says which option needs one that cannot be
imported."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

import numdiff
import numdiff.data
from numdiff import extensions
from numdiff.children import python_command
from numdiff.errors import UsageError
from numdiff.settings import check_value, with_extensions
from numdiff_cli.main import main
from tests.conftest import exhaustive

ROOT = pathlib.Path(numdiff.__file__).resolve().parent
CORE = [
    path
    for folder in (ROOT, ROOT.parent / "cli")
    for path in folder.rglob("*.py")
    if path.relative_to(folder).parts[0] != "extras"
]
WITHOUT = """
import sys
sys.modules["numdiff.extras." + {module!r}] = None
from numdiff_cli.main import main
main({arguments!r})
"""


def test_no_file_of_the_core_imports_an_extra():
    """…nor names one as text: `extensions.PACKAGES` alone does."""
    named = [
        path.relative_to(ROOT.parent).as_posix()
        for path in CORE
        if re.search(
            r"numdiff\.extras|from \.+extras|import extras", path.read_text(encoding="utf-8")
        )
    ]
    assert named == ["numdiff/extensions.py"]


def test_everything_that_is_registered_exists():
    # for which PyTorch may be missing
    for place in extensions._places.keys() - {"torch_unet_block"}:
        assert extensions.entries(place).keys() == extensions.available(place).keys()
    for entry in extensions.entries("torch_unet_block").values():
        module, _, name = entry.where.partition(":")
        text = (ROOT.parent / module.replace(".", "/")).with_suffix(".py").read_text("utf-8")
        assert f"\nclass {name}(" in text


def test_each_extra_registers_itself_once_and_imports_nothing_else():
    text = (ROOT / "extras" / "__init__.py").read_text(encoding="utf-8")
    packages = {
        path.name for path in (ROOT / "extras").iterdir() if (path / "__init__.py").exists()
    }
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    assert {call.args[0].value for call in calls} == {f"numdiff.extras.{name}" for name in packages}
    assert len(calls) == len(packages)
    assert [
        ast.unparse(node)
        for node in ast.parse(text).body
        if isinstance(node, ast.ImportFrom | ast.Import)
    ] == ["from ..extensions import register"]


def test_a_name_is_registered_once(monkeypatch):
    monkeypatch.setattr(extensions, "_places", {})
    extensions.register("mine", command={"draw": ("draw:draw", "Draw.")})
    assert extensions._places["command"]["draw"] == ("mine.draw:draw", "Draw.")
    with pytest.raises(
        ValueError, match="yours registers the command 'draw', which is mine.draw:draw already"
    ):
        extensions.register("yours", command={"draw": "other:draw"})


def test_what_cannot_be_imported_is_one_sentence(monkeypatch):
    extensions.entries("steps")
    monkeypatch.setitem(
        extensions._places, "steps", {"drawn": extensions.Entry("numdiff_nowhere.steps")}
    )
    assert extensions.available("steps") == {}
    with pytest.raises(
        UsageError,
        match=r"^--schedule needs numdiff_nowhere.steps, which cannot be imported \(No "
        r"module named 'numdiff_nowhere'\): install what it lacks, or do without --schedule.$",
    ):
        extensions.find("steps", "drawn", "--schedule")
    with pytest.raises(UsageError, match="^--schedule needs an extension that adds the steps 'b'"):
        extensions.find("steps", "b", "--schedule")


def test_pictures_say_what_they_lack(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "numdiff.extras.importers.folders", None)
    with pytest.raises(UsageError, match="--data .* needs numdiff.extras.importers.folders, which"):
        numdiff.data.open_dataset(tmp_path)


def test_weights_of_another_program_say_what_they_lack(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "numdiff.extras.convert.reader", None)
    path = tmp_path / "a.pt"
    path.write_bytes(b"PK")
    with pytest.raises(UsageError, match="a.pt needs numdiff.extras.convert.reader, which cannot"):
        numdiff.load(path)


def test_a_command_says_what_it_lacks(monkeypatch):
    monkeypatch.setitem(sys.modules, "numdiff.extras.learned_steps.command", None)
    ended = CliRunner().invoke(main, ["schedule", "auto"])
    assert ended.exit_code == 2 and ended.output.startswith(
        "Error: numdiff schedule needs numdiff.extras.learned_steps.command, which cannot be imported ("
    )
    assert "  schedule  Learn the steps" in CliRunner().invoke(main, ["--help"]).output


def test_a_setting_says_what_it_lacks(monkeypatch):
    monkeypatch.setitem(sys.modules, "numdiff.extras.post_hoc_ema.settings", None)
    line = with_extensions({})["ema_std"]
    check_value(line, None)
    with pytest.raises(
        UsageError, match="^--ema-std needs numdiff.extras.post_hoc_ema.settings, which cannot"
    ):
        check_value(line, "0.1")


@exhaustive
def test_a_run_says_what_it_lacks():
    """…of which the other options work."""
    for option, code in (["--ema-std", "0.1"], 2), ([], 0):
        arguments = ["train", "unet", "--dry-run", *option]
        ended = subprocess.run(
            python_command(WITHOUT.format(module="post_hoc_ema", arguments=arguments)),
            cwd="/",
            text=True,
            capture_output=True,
            timeout=120,
        )
        assert ended.returncode == code and "Traceback" not in ended.stderr
        assert not code or ended.stderr.startswith(
            "Error: --ema-std needs numdiff.extras.post_hoc_ema"
        )
