"""README.md and the pages next to the code, checked: commands, options, examples, links, paths.

Every `numdiff …` of a page is parsed with its values, those that are dry runs are run; every other
command line names what exists. Python examples run, but for the fragments of
numdiff/emulator/README.md (tests/emulator/test_readme.py).
"""

import configparser
import contextlib
import importlib.util
import pathlib
import re
import runpy
import shlex
import textwrap

import click
import pytest

from numdiff import emulator
from numdiff.emulator.options import OPTIONS
from numdiff.kernels.operation import record as operation
from numdiff.kernels.operation import versions
from numdiff_cli.main import main
from tests.advice import parse
from tests.command import output_of

ROOT = pathlib.Path(__file__).resolve().parent.parent
PATHS = [
    *ROOT.glob("*.md"),
    ROOT / "data" / "README.md",
    *sorted((ROOT / "numdiff").rglob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PATHS}
README = PAGES["README.md"]
# say what was, too
LOGS = "CHANGELOG.md", "docs/log/changelog-0.1.0.md", "docs/log/kernels.md", "docs/log/presets.md"
TOY = "leaky_relu"  # what CONTRIBUTING.md adds
# options of every command, pytest's and mpiexec's
OTHERS = {"--help", "--durations", "--exhaustive", "--bind-to", "--logdir", "--project"}


def blocks(page, language):
    """The code of this language on a page, also within a list."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", PAGES[page], re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(text) for _, text in found]


def prose(page):
    return re.sub(r"^ *```.*?^ *```", "", PAGES[page], flags=re.DOTALL | re.MULTILINE)


def commands():
    """[(page, command)] of the command lines, without `mpiexec -n N` and variables of the
    environment."""
    found = []
    for page in PAGES:
        for block in blocks(page, "sh"):
            lines = [
                re.sub(r"(^|\s)#.*", "", line) for line in block.replace("\\\n", " ").splitlines()
            ]
            found += [
                (page, re.sub(r"^(mpiexec -n \d+|[A-Z_]+=\S+) ", "", c.strip()))
                for line in lines
                for c in line.split("&&")
                if c.strip()
            ]
    return list(dict.fromkeys(found))


def mentions():
    """[(page, command)] of the `numdiff …` in the prose that are no abbreviations; their arguments
    may be left out."""
    found = [
        (page, text) for page in PAGES for text in re.findall(r"`(numdiff [^`\n]+)`", prose(page))
    ]
    return [pair for pair in dict.fromkeys(found) if not re.search("…|--help", pair[1])]


def ids(pairs):
    return [f"{page}: {text}" for page, text in pairs]


def all_options(command=main):
    """Every option of the command and its subcommands."""
    context = click.Context(command)
    names = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
    subcommands = command.list_commands(context) if isinstance(command, click.Group) else ()
    return names.union(*(all_options(command.get_command(context, name)) for name in subcommands))


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 250


def test_the_kernel_example_has_the_reported_fault(tmp_path, monkeypatch):
    (example,) = [e for e in blocks("README.md", "python") if "emulator.device" in e]
    monkeypatch.chdir(tmp_path)
    pathlib.Path("example.py").write_text(example)
    with pytest.raises(emulator.KernelFault) as caught:
        runpy.run_path("example.py")
    (fault,) = caught.value.faults
    assert f"`{fault.kind}: {fault.message}`" in README
    assert example.splitlines()[fault.line - 1].endswith("100 elements")


def test_the_python_example_runs(tmp_path, monkeypatch, capsys):
    example = next(e for e in blocks("README.md", "python") if "Trainer" in e)
    assert example.count("steps=400, report_every=20") == 1
    example = example.replace("steps=400, report_every=20", "steps=2, report_every=1").replace(
        "steps=25", "steps=1"
    )
    example = example.replace("batch=16", "batch=4").replace("count=16", "count=8")
    monkeypatch.chdir(tmp_path)
    exec(compile(example.replace('"auto"', '"cpu"'), "README.md", "exec"), {})
    assert (tmp_path / "row.png").exists()
    assert [line[:2] for line in capsys.readouterr().out.splitlines()] == ["0 ", "1 "]


EXAMPLES = [
    (page, example)
    for page in PAGES
    for example in (
        ["\n".join(blocks(page, "python"))] if page.startswith("docs/") else blocks(page, "python")
    )
    if example and page not in ("README.md", "numdiff/emulator/README.md")
]


@pytest.mark.parametrize(
    "page, example", EXAMPLES, ids=[f"{page} {i}" for i, (page, _) in enumerate(EXAMPLES)]
)
def test_the_pages_examples_run(tmp_path, monkeypatch, page, example):
    monkeypatch.chdir(tmp_path)
    for module, table in (versions, "NAMES"), (versions, "CEILED"), (operation, "OPERATIONS"):
        # CONTRIBUTING.md declares an operation
        monkeypatch.setattr(module, table, dict(getattr(module, table)))
    exec(compile(example, page, "exec"), {"__name__": "example"})


EMULATORS = {
    "--emulate",
    "--emulate-",
    *(f"{prefix}{name}" for prefix in ("--", "--emulate-") for name in OPTIONS),
}
OURS = [(page, command) for page, command in commands() if command.startswith("numdiff ")]
THEIRS = [pair for pair in commands() if pair not in OURS]


@pytest.mark.parametrize("page, command", OURS, ids=ids(OURS))
def test_every_command_and_option_exists(page, command):
    parse(command)
    if "--dry-run" in command and "--data" not in command:
        output_of(command.removeprefix("numdiff "), "--device cpu")


@pytest.mark.parametrize("page, command", mentions(), ids=ids(mentions()))
def test_commands_in_the_prose_exist(page, command):
    with contextlib.suppress(click.MissingParameter):
        parse(command)


@pytest.mark.parametrize("page, command", THEIRS, ids=ids(THEIRS))
def test_what_other_commands_name_exists(page, command):
    program, *words = shlex.split(command)
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    if program == "pip":
        wanted = [w for w in words if not w.startswith("-")][1:]
        # test_independence.py
        wanted = [w for w in wanted if w not in ("numdiff-emulator", "./numdiff/emulator")]
        assert all(w.startswith(".") for w in wanted)
        assert {e for w in wanted for e in re.findall(r"[\w-]+", w)} <= set(
            setup["options.extras_require"]
        )
    elif program == "python":
        module = words[1].replace("numdiff_emulator", "numdiff.emulator")
        assert words[0] == "-m" and importlib.util.find_spec(module), command
    else:
        assert program in ("pytest", "ruff", "git", "tensorboard", "trackio"), command
        if program == "pytest":
            for path, _, name in (w.partition("::") for w in words if w.startswith("tests")):
                assert (
                    (ROOT / path).exists() and f"def {name}" in (ROOT / path).read_text()
                    if name
                    else path
                ), command


def test_enough_was_found():
    assert len(OURS) >= 60 and len(THEIRS) >= 8 and len(EXAMPLES) >= 1


# mkdocs checks the site's
@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("docs/")])
def test_pictures_and_links_exist(page):
    """Files, and headings within them as GitHub makes anchors of them."""
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(#[^)\s]+)?\)", prose(page)):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor[1:] in {
                re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings
            }, anchor


@pytest.mark.parametrize("page", [page for page in PAGES if page not in LOGS])
def test_options_and_paths_in_the_prose_exist(page):
    code = re.findall(r"`([^`\n]+)`", prose(page))
    for text in code:
        options = {*re.findall(r"(?<![\w-])--[a-z][\w-]*", text)}
        if module := re.match(r"python -m ((?:numdiff|tests)\.[\w.]+)", text):
            found = importlib.util.find_spec(module[1])
            assert found, text
            if not found.submodule_search_locations:  # a package's command is in __main__.py
                source = pathlib.Path(found.origin).read_text(encoding="utf-8")
                options -= {*re.findall(r"--[a-z][\w-]*", source)}
        assert options <= all_options() | OTHERS | EMULATORS, text
        if re.fullmatch(r"(numdiff|cli|tests|data)(/[\w.-]+)*/?", text) and TOY not in text:
            assert (ROOT / text).exists(), text


def test_pages_agree_on_the_time_of_the_tests():
    """…which tests/README.md gives in full."""
    said = [
        re.findall(
            r"(\S+ minutes?) on two(?: idle)? cores", (ROOT / page).read_text(encoding="utf-8")
        )
        for page in ("README.md", "CONTRIBUTING.md", "tests/README.md")
    ]
    assert [{*times} for times in said] == [{"5 minutes"}] * 3, said
