"""How the files depend on each other: imports point down, no circle between files, Numba's CUDA
target in one place.

Imports within functions count as well; the `numdiff` of users, which hands everything on at first
use, is above all.
"""

import ast
import configparser
import functools
import pathlib
import re
import runpy

import numdiff

ROOT = pathlib.Path(numdiff.__file__).resolve().parent
CLI = ROOT.parent / "cli"
GROUND = (
    "caches",
    "children",
    "dtypes",
    "configs",
    "configuration",
    "errors",
    "extensions",
    "files",
    "float8",
    "hdf5",
    "option_names",
    "outputs",
    "plots",
    "progress",
    "progress_bar",
    "schema",
    "setting",
    "settings",
    "signals",
    "sizes",
)
# From the top down; what stands in one line does not import each other.
FLOORS = (
    ("extras",),
    ("cli",),
    ("numdiff",),
    ("benchmark", "evaluation", "lessons"),
    ("training",),
    ("distributed",),
    ("data", "diffusion"),
    ("nn",),
    ("kernels",),
    ("device",),
    ("emulator",),
    GROUND,
)
# Who names Numba, and what it takes from there: `cuda` comes from numdiff.device, types and
# `intrinsic` make intrinsics: most by `instruction` of device/inline_ptx.py
INTRINSICS = {"numba.cuda.types", "numba.cuda.extending.intrinsic"}
NUMBA = {
    "device/gpu.py": {"numba.cuda"},
    "device/cpu.py": {"numba"},
    "hdf5/lzf.py": {"numba"},
    "device/loop_cache.py": {
        "numba",
        "numba.core.caching.NullCache",
        "numba.core.compiler.CompileResult",
        "numba.core.serialize.dumps",
    },
    "device/inline_ptx.py": INTRINSICS
    | {
        "numba.cuda.core.errors.RequireLiteralValue",
        "numba.cuda.core.errors.TypingError",
    },
    "device/compiler.py": {
        "numba",
        "numba.core.types.void",
        "numba.cuda.compiler",
        "numba.cuda.cudadrv.nvvm",
        "numba.cuda.dispatcher",
    },
    "device/bfloat16.py": {
        "numba.cuda.types",
        "numba.cuda.datamodel.PrimitiveModel",
        "numba.cuda.extending.lower_cast",
        "numba.cuda.extending.register_model",
        "numba.cuda.typeconv.Conversion",
    },
    "device/ptx.py": {"numba.cuda.compiler"},
    "device/quick_types.py": {
        "numba.core.types.functions.BaseFunction",
        "numba.cuda.core.targetconfig.ConfigStack",
    },
    "device/intrinsics.py": INTRINSICS,
    "device/eight.py": {"numba.cuda.types"},
    "device/wgmma.py": {"numba.cuda.types"},
}
# a learner's files import Numba as any program
LEARNERS = "numdiff.lessons.chapters.", "numdiff.lessons.puzzles.", "numdiff.lessons.solutions."

MOST_PARAMETERS = 12
# the parameters of a `def`, and perhaps more
HEAD = re.compile(r"\bdef \w+\((.*?)\)(?: ->[^\n]*)?:\n", re.DOTALL)

# docstrings and the like, where an import imports nothing
TEXT = re.compile(r'"""(?:[^\\]|\\.)*?"""', re.DOTALL)
IMPORT = re.compile(r"^ *((?:from +[\w.]+ +import +(?:\([^)]*\)|.*))|import .*)$", re.MULTILINE)


@functools.cache
def imports():
    """{file: [full name of what it imports]} of the package and the command line: only the lines
    that import are parsed, as all of them take 3 s."""
    found = {}
    for name, path in files().items():
        package = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
        found[name] = []
        for node in ast.parse(
            "\n".join(IMPORT.findall(TEXT.sub("", path.read_text(encoding="utf-8"))))
        ).body:
            if isinstance(node, ast.ImportFrom):
                base = [
                    *(package[: len(package) - node.level + 1] if node.level else ()),
                    *filter(None, [node.module]),
                ]
                found[name] += [".".join([*base, alias.name]) for alias in node.names]
            else:
                found[name] += [alias.name for alias in node.names]
    return found


@functools.cache
def files():
    """{module: path}"""
    named = {}
    for top, folder in (("numdiff", ROOT), ("numdiff_cli", CLI)):
        for path in folder.rglob("*.py"):
            parts = (top, *path.relative_to(folder).with_suffix("").parts)
            named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


@functools.cache
def below():
    """{module: the modules that it imports}"""
    return {
        name: {
            m
            for m in (
                target if target in files() else target.rpartition(".")[0] for target in targets
            )
            if m in files() and m != name
        }
        for name, targets in imports().items()
    }


def floor(module):
    top, _, rest = module.partition(".")
    name = "cli" if top == "numdiff_cli" else rest.partition(".")[0] or "numdiff"
    return next(i for i, floor in enumerate(FLOORS) if name in floor), name


def test_imports_point_down():
    up = []
    for name, targets in imports().items():
        for target in targets:
            if target.startswith("numdiff") and target != "numdiff.__version__":
                (here, package), (there, other) = (
                    floor(name),
                    floor(target if target in files() else target.rpartition(".")[0]),
                )
                if there < here or there == here < len(FLOORS) - 1 and package != other:
                    up.append(f"{name} -> {target}")
    assert not up


def test_no_circle_of_files():
    """Files without an import go, then those that import only what has gone; what stays is a
    circle, or above one."""
    left = {name: set(targets) for name, targets in below().items()}
    while gone := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in gone:
            del left[name]
    while gone := [name for name in left if not any(name in targets for targets in left.values())]:
        for name in gone:  # no importer is left: above a cycle
            del left[name]
    assert not left, {name: sorted(targets & left.keys()) for name, targets in left.items()}


def test_numba_is_named_where_it_was():
    """`from numba import cuda` in one module; its successor changes that line and the intrinsics,
    and nothing else."""
    named = {
        files()[name].relative_to(ROOT).as_posix(): {
            t for t in targets if t.split(".")[0] == "numba"
        }
        for name, targets in imports().items()
        if any(t.split(".")[0] == "numba" for t in targets) and not name.startswith(LEARNERS)
    }
    assert {
        name: sorted(found - NUMBA.get(name, set())) for name, found in named.items()
    } == dict.fromkeys(named, [])
    assert [name for name, found in named.items() if "numba.cuda" in found] == ["device/gpu.py"]
    assert NUMBA.keys() == named.keys()  # modules that no longer import it are no longer listed


def test_only_children_starts_python():
    """…where each process is isolated from the current folder; forks import nothing again. `python
    -m numdiff.emulator` runs the program that it is given, whose folder is the first on its path.
    Measurements by hand compile in a pool of processes.
    """
    starts = re.compile(
        r"sys\.executable|\bget_context|multiprocessing\.(Process|Pool)|ProcessPool|os\.(exec|spawn|"
        r"system|popen|posix_spawn)|runpy|set_executable"
    )
    assert [
        name
        for name, path in files().items()
        if not name.startswith("numdiff.benchmark.scripts.")
        and starts.search(path.read_text(encoding="utf-8"))
    ] == ["numdiff.children", "numdiff.emulator.__main__"]


def test_no_function_has_more_than_twelve_parameters():
    """What belongs together is one argument: a NamedTuple or tuple of arrays, a configuration
    object. `*args` and `**kwargs` do not count, and neither do lambdas."""
    found = []
    for name, path in files().items():
        text = path.read_text(encoding="utf-8")
        if all(head.count(",") < MOST_PARAMETERS for head in HEAD.findall(text)):
            continue  # parsing all of them takes 3 s
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                given = node.args
                count = len([*given.posonlyargs, *given.args, *given.kwonlyargs])
                if count > MOST_PARAMETERS:
                    found.append(f"{name}.{node.name}: {count}")
    assert not found


def test_every_folder_is_installed():
    """setup.cfg's packages are the folders: a wheel lacks what is not listed."""
    config = configparser.ConfigParser()
    config.read(ROOT.parent / "setup.cfg")
    folders = {name for name, path in files().items() if path.name == "__init__.py"}
    assert set(config["options"]["packages"].split()) - {"numdiff_data"} == folders


def test_every_dependency_has_a_lower_bound():
    """…which .ci/run installs, as .ci/lowest.py reads it."""
    config = configparser.ConfigParser()
    config.read(ROOT.parent / "setup.cfg")
    lowest = runpy.run_path(str(ROOT.parent / ".ci/lowest.py"))["lowest"](ROOT.parent / "setup.cfg")
    lines = config["options"]["install_requires"].split("\n")
    assert [line for line in lines if line and re.match(r"[\w.-]+", line)[0] not in lowest] == []
    assert all(re.fullmatch(r"\d+(\.\d+)+", version) for version in lowest.values())
