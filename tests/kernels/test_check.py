"""`numdiff kernels check`, which is how every kernel version goes through the emulator."""

import dataclasses
import functools
import hashlib
import re

import numpy as np
import pytest
from click.testing import CliRunner

from numdiff.device import get_backend, specialise
from numdiff.device.compiler import kernels_by_name
from numdiff.device.emulator import EmulatorDevice
from numdiff.device.requires import required
from numdiff.emulator import KernelFault
from numdiff.errors import UsageError
from numdiff.extras.kernel_check import run as checking
from numdiff.extras.kernel_check.case import Case, normal
from numdiff.extras.kernel_check.run import run_once
from numdiff.kernels import elementwise
from numdiff_cli.main import main
from tests import kept
from tests.conftest import exhaustive, exhaustively, where
from tests.kernels.compile_logs import covering


class Names(EmulatorDevice):
    """Records the launches and their source lines without running a kernel."""

    sources = None

    def launch(self, kernel, *_):
        code = kernel.py_func.__code__
        self.launched.add((kernel.py_func.__module__, kernel.py_func.__name__))
        self.sources.add((code.co_filename, code.co_firstlineno, code.co_name))


def kernels_of(case, version, sources=None):
    device = Names()
    device.sources = set() if sources is None else sources
    run_once(case, version, device)
    return device.launched


VERSIONS = [(case, version) for case in checking.CASES for version in case.versions]


def repeats(case, version):
    return not case.is_fast(version)


def runs(case, version, order):
    """Whether a test is there for a case in this thread order."""
    return checking.Outcome(case, version).name in names_by_order()[order]


@functools.cache
def names_by_order():
    """{thread order: names of a case and a version}. Shuffled: all that do not repeat others.
    Forward: of these the first of each version, with float16 and without. Reversed: those that
    repeat others, as many as hold each word of their labels; `numdiff kernels check` has all."""
    run = {checking.Outcome(*pair).name: pair for pair in VERSIONS if not pair[0].only_compiled}
    others = [name for name, pair in run.items() if repeats(*pair)]
    shuffled = [name for name in run if name not in set(others)]
    words = {name: words_of(*pair) for name, pair in run.items()}
    reached = set().union(*(words[name] for name in shuffled))
    forward = {
        (run[name][0].name, run[name][1], "float16" in name): name
        for name in reversed(shuffled)
        # float16 has both orders
        if not (run[name][0].once or "bfloat16" in run[name][0].label)
    }
    return {
        "shuffled": set(shuffled),
        "forward": set(forward.values()),
        "reversed": set(covering(others, lambda name: words[name] - reached)),
    }


def words_of(case, version):
    """The words of a case's label."""
    return {(case.name, version, word) for word in case.label.split(", ")}


def bits_of(results):
    return [hashlib.sha256(a.tobytes()).hexdigest() for a in results]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["shuffled", *exhaustively("forward", "reversed")])
@pytest.mark.parametrize(
    "case, version", VERSIONS, ids=[checking.Outcome(*pair).name for pair in VERSIONS]
)
@where(runs)
def test_every_kernel_passes(case, version, order):
    """…within the tolerance of float64, without a fault, and forward with the bits that the threads
    gave shuffled, which the first command has kept."""
    launched = get_backend("emulator").launched
    launched.clear()
    texts = "bits of a case, shuffled", checking.Outcome(case, version).name, kept.whole_package()
    wanted = kept.recall(*texts) if order == "forward" else None
    outcome = checking.check_case(
        case,
        version,
        "emulator",
        ("forward", "shuffled") if order == "forward" and wanted is None else (order,),
    )
    assert outcome.passed, outcome.fault or f"error {outcome.error}, same bits: {outcome.same}"
    assert launched == kernels_of(case, version)
    assert wanted in (None, bits_of(outcome.results)), (
        "the threads forward and shuffled give other bits"
    )
    if order == "shuffled":
        kept.remember(bits_of(outcome.results), *texts)


@exhaustive
def test_no_kernel_is_left_out():
    """…and of those that come from the same lines with other constants, one has a case that does
    not repeat others."""
    sources, first, launched = set(), set(), set()
    for pair in VERSIONS:
        launched |= kernels_of(*pair, sources if repeats(*pair) else first)
    assert checking.all_kernels() - launched == set()
    # its one tile is test_matmul_levels.py's
    assert {name for *_, name in sources - first} == {"matmul_level_kernel_v1"}


NEEDED = {
    "async_copy": (7, 5),
    "ldmatrix": (7, 5),
    "mma_sync": (8, 0),  # tf32; float16 needs 7.5
    "words": (7, 5),
    "bfloat16": (8, 0),
    "cluster": (9, 0),
    "eight": (7, 5),
    "hopper": (9, 0, "a"),
    "mbarrier": (9, 0),
    "tma": (9, 0),
    "wgmma": (9, 0, "a"),
    "float8": (8, 9),
}


def reached(function, found):
    """{module: …} of the device functions and intrinsics that a kernel's text names, and of those
    that these name."""
    for value in specialise._known(function).values():
        inner = getattr(value, "py_func", None)
        if inner is not None and inner not in found:
            found[inner] = inner.__module__
            reached(inner, found)
        elif inner is None and callable(value):
            found[value] = getattr(value, "__module__", None) or ""
    return found


def test_no_architecture_is_left_out():
    """A kernel requires no more than its instructions do. (That it requires no less, ptxas says.)"""
    checking.all_kernels()  # imports their modules
    kernels = kernels_by_name().values()
    assert {"7.5", "8.0", "8.9", "9.0", "9.0a"} == {
        f"{r[0]}.{r[1]}{''.join(r[2:])}" for r in map(required, kernels) if r != (0, 0)
    }
    for kernel in kernels:
        modules = {
            module.rpartition(".")[2]
            for module in reached(kernel.py_func, {}).values()
            if module.startswith("numdiff.device.")
        }
        if "_e4m3" in kernel.py_func.__name__:  # another product of mma_sync.py, for later cards
            modules.add("float8")
        assert required(kernel) <= max([(0, 0), *(NEEDED[m] for m in modules & NEEDED.keys())]), (
            kernel
        )


def case(run, **shapes):
    return Case("made up", normal(**shapes), run)


def test_a_wrong_result_is_seen():
    outcome = checking.check_case(
        case(
            lambda a, v: (
                elementwise.silu_forward(a.x) if v is None or isinstance(a.x, np.ndarray) else a.x,
            ),
            x=(3, 4),
        ),
        1,
        "emulator",
    )
    assert not outcome.passed and outcome.error > 0.1 and outcome.fault is None


def test_results_that_differ_between_runs_are_seen():
    calls = []

    def run(a, version):
        calls.append(1)
        return (elementwise.add_forward(a.x, a.x) if len(calls) % 2 else a.x,)

    assert not checking.check_case(case(run, x=(3, 4)), 1, "emulator").same


def test_a_fault_is_reported():
    def run(a, version):
        raise KernelFault("some_kernel", [])

    assert "some_kernel" in checking.check_case(case(run, x=(3,)), 1, "emulator").fault


def test_names():
    assert {c.name for c in checking.cases_named(["softmax"])} == {"softmax", "softmax_backward"}
    with pytest.raises(
        UsageError,
        match=r"there is no operation 'softmin' \(did you mean 'softmax'\?\): use some of ",
    ):
        checking.cases_named(["softmin"])


def kernels(*arguments):
    return CliRunner().invoke(main, ["kernels", "check", *map(str, arguments)])


def test_counts_on_request(tmp_path, monkeypatch):
    monkeypatch.setattr(
        checking, "CASES", [case for case in checking.CASES if case.name == "matmul"][:2]
    )
    result = kernels("matmul", "--version", 2, "--counts", "--trace", tmp_path / "film.html")
    assert result.exit_code == 0, result.output
    # one table for the kernel, of its first problem
    assert len(re.findall(r"line +source", result.output)) == 1
    row = next(
        line
        for line in result.output.splitlines()
        if "total += tile_a[y, k] * tile_b[k, x]" in line
    )
    # 20 × 12 · 12 × 24 in 16 × 16 tiles: four blocks of 8 warps, 16 steps, two reads of each; 2
    # FLOPs a thread and step
    assert row.startswith("tiled.py:") and row.split()[-2:] == ["1,024", "32,768"]
    row = next(line for line in result.output.splitlines() if "c[i] = value" in line)
    # requests, transactions per request: 16 columns, or the last 8, in 2 rows
    assert row.split()[-2:] == ["20", "3.0"]
    assert "transactions per request" in result.output and "bank conflicts" in result.output
    assert (
        "film in" in result.output
        and "matmul_forward_kernel_v2" in (tmp_path / "film.html").read_text()
    )


@pytest.mark.parametrize(
    "given, message",
    [
        (
            "--device cpu --orders 3",
            "--orders 3 is of the emulator, and not of --device cpu: leave it out.",
        ),
        ("--device cpu --seed 0", "--seed 0 is of the emulator"),
        ("--device ptx --seed 1", "--seed 1 is of the emulator"),
        (
            "--orders 1 --seed 1",
            "--seed 1 is of the shuffled order, which --orders 1 leaves out: leave it out.",
        ),
        (
            "--device cpu --version 1",
            "--version 1 is of kernels, and --device cpu runs the references alone: leave it out",
        ),
        (
            "--device ptx --against emulator",
            "--against emulator compares results, and --device ptx only compiles",
        ),
        ("--against cuda", "--against cuda: no GPU can be used (there is none); leave it out."),
        (
            "--device cuda",
            "--device cuda: no GPU can be used (there is none); use --device emulator.",
        ),
        (
            "--version 99",
            "none of these operations has a version 99: use naive, vectorised or a number.",
        ),
    ],
)
def test_what_the_device_does_not_have_is_refused(monkeypatch, given, message):
    monkeypatch.setattr(checking, "why_no_gpu", lambda: "there is none")
    result = kernels("gelu", "chunk", *given.split())
    assert result.exit_code == 2 and message in result.output, result.output


def test_bad_options_of_the_command():
    assert "--trace a.gif: a film is written as .html." in kernels("add", "--trace", "a.gif").output
    assert (
        "has a version 9: use naive, vectorised or a number."
        in kernels("silu", "--version", 9).output
    )
    assert (
        "has a version hopper: leave out --version."
        in kernels("chunk", "--version", "hopper").output
    )
    for version in (1, "naive"):
        assert (
            f"has a version {version}: leave out --version."
            in kernels("chunk", "--version", version).output
        )
    refused = kernels("gelu", "gate_adaln", "--version", "hoper")
    assert (
        refused.exit_code == 2
        and (
            "none of these operations has a version hoper: use fused, naive, unfused, "
            "vectorised or a number."
        )
        in refused.output
    )


def test_a_version_by_its_name():
    result = kernels("add", "gelu", "gate_adaln", "--version", "vectorised")
    assert result.exit_code == 0 and "4 of 4 passed" in result.output, result.output
    assert "add (4×8, 4×8) v2 vectorised  " in result.output
    wanted = [
        (case, version)
        for case in checking.CASES
        for version in case.versions
        if checking._is_wanted(case, version, "tf32")
    ]
    assert {(case.name, version) for case, version in wanted} >= {("matmul", 5), ("conv2d", 4)}
    assert all("float16" not in case.label for case, _ in wanted)


@pytest.mark.parametrize("name, number", [("tiled", 2), ("hopper", 6)])
def test_a_number_is_the_version_of_that_name_and_no_other_case(name, number):
    """A case that says itself what runs, such as one tile of a Hopper kernel, is of a version that
    its type has."""
    cases = checking.cases_named(["matmul", "linear", "add_parts"])
    cases = [
        case
        for case in cases
        if not case.name.startswith(("matmul_first", "matmul_level", "matmul_mma", "matmul_fp8"))
    ]
    runs = [
        [
            (case.name, case.label, each)
            for case in cases
            for each in case.versions
            if checking._is_wanted(case, each, version)
        ]
        for version in (number, name)
    ]
    assert runs[0] == runs[1] and {None} < {each for _, _, each in runs[0]} | {None} == {
        None,
        number,
    }
    tiles = [
        case
        for case in checking.cases_named(["conv2d"])
        if "tile (" in case.label and "float16" in case.label
    ]
    assert tiles and all(
        checking._is_wanted(case, None, name) == (name == "hopper") for case in tiles
    )


def run_version(*arguments):
    return CliRunner().invoke(main, ["kernels", "run", *map(str, arguments)])


def test_one_version_runs_and_is_filmed(tmp_path):
    path = tmp_path / "film.html"
    result = run_version("softmax", "warp-per-row", "--problem", "5×36", "--trace", path)
    assert result.exit_code == 0, result.output
    launch, verdict, written = result.output.splitlines()
    assert launch == "softmax_forward_kernel_v2, grid (2, 1, 1), block (128, 1, 1)"
    assert verdict.startswith("softmax (5×36) v2 warp-per-row: error ") and written.startswith(
        f"film in {path} ("
    )
    assert "softmax_forward_kernel_v2" in path.read_text(encoding="utf-8")
    assert (
        "use block-per-row, vectorised, warp-per-row or a number"
        in run_version("softmax", "nix").output
    )
    assert (
        "--problem 7: softmax 1 has the problems 3×7; 5×36."
        in run_version("softmax", 1, "--problem", 7).output
    )
    assert (
        "--trace film.svg: a film is written as .html."
        in run_version("softmax", 1, "--trace", "film.svg").output
    )


def test_a_faulty_version_is_filmed(tmp_path, monkeypatch):
    case = next(case for case in checking.CASES if case.name == "softmax")
    monkeypatch.setattr(checking, "CASES", [dataclasses.replace(case, tolerance=0.0)])
    result = run_version("softmax", 1, "--trace", tmp_path / "film.html")
    assert (
        result.exit_code == 1 and "v1 block-per-row: FAILED  the result is wrong" in result.output
    )
    assert (tmp_path / "film.html").exists()
