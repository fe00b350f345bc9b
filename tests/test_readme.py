"""The README's own words, run: its Python example, and the options that its commands name."""
import pathlib
import re
import runpy
import shlex

import click
import pytest

from numdiff import emulator
from numdiff_cli.main import main

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()


def commands():
    """The `numdiff …` of every command line, also under mpiexec."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = [line.split("#")[0] for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    commands = [re.sub(r"^mpiexec -n \d+ ", "", c.strip()) for line in lines for c in line.split("&&")]
    return [c for c in commands if c.startswith("numdiff ")]


def examples():
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_kernel_example_has_the_fault_that_is_told(tmp_path, monkeypatch):
    (example,) = [e for e in examples() if "emulator.device" in e]
    monkeypatch.chdir(tmp_path)
    pathlib.Path("example.py").write_text(example)
    with pytest.raises(emulator.KernelFault) as caught:
        runpy.run_path("example.py")
    (fault,) = caught.value.faults
    assert f"`{fault.kind}: {fault.message}`" in README
    assert example.splitlines()[fault.line - 1].endswith("100 elements")


def test_the_python_example_runs(tmp_path, monkeypatch, capsys):
    example = next(e for e in examples() if "Trainer" in e)
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
    known = {option: parameter for parameter in found.params for option in parameter.opts}
    for option, value in zip(words, [*words[1:], None], strict=False):
        if option.startswith("--"):
            choices = getattr(known[option].type, "choices", None)
            assert choices is None or value in choices, command
    assert len(commands()) >= 30


def test_pictures_and_links_exist():
    folder = pathlib.Path(__file__).parent.parent
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#:]+)\)", prose):
        assert (folder / target).exists(), target
