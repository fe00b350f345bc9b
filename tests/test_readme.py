"""The README's own words, run: its Python example, and the options that its commands name."""
import pathlib
import re
import shlex

import click
import pytest

from numdiff_cli.main import main

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()


def commands():
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = [line.split("#")[0] for block in blocks for line in block.splitlines()]
    return [c.strip() for line in lines for c in line.split("&&") if c.strip().startswith("numdiff ")]


def test_the_python_example_runs(tmp_path, monkeypatch, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert example.count("steps=400, report_every=20") == 1
    example = example.replace("steps=400, report_every=20", "steps=4, report_every=2").replace("steps=25", "steps=2")
    monkeypatch.chdir(tmp_path)
    exec(compile(example.replace('"auto"', '"cpu"'), "README.md", "exec"), {})
    assert (tmp_path / "row.png").exists()
    assert "(2, 32, 32, 3) (3, 3, 3, 32)" in capsys.readouterr().out


@pytest.mark.parametrize("command", commands())
def test_every_command_and_option_exists(command):
    words, found = shlex.split(command)[1:], main
    context = click.Context(main)
    while isinstance(found, click.Group) and words and not words[0].startswith("-"):
        found = found.get_command(context, words.pop(0))
        assert found is not None, command
    known = {option for parameter in found.params for option in parameter.opts}
    assert {w for w in words if w.startswith("--")} <= known
    assert len(commands()) >= 10


def test_pictures_and_links_exist():
    folder = pathlib.Path(__file__).parent.parent
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (folder / target).exists(), target
