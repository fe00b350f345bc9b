"""Every version of a kernel file has figures: what it takes of each of the file's problems, under MEASURED.

`python -m tests.kernels.write_figures` writes them, from what `numdiff bench kernels --of files` has measured on a GPU.
"""
import functools
import importlib
import re

import pytest

from numdiff.benchmark.kernels import call_with, versions_of
from numdiff.benchmark.problems import problems, without_memory
from numdiff.device.planned import CARDS, Planned
from numdiff.errors import NumdiffError

H200 = next(card for card in CARDS if card.device_name == "NVIDIA H200")
PROBLEMS = problems()
WITH = sorted({module for problem in PROBLEMS for module in problem.files})
NAMED = {problem.name for problem in PROBLEMS}
HEAD = re.compile(r"\nMEASURED\n    (NVIDIA [\w ]+), \d{4}-\d\d-\d\d(?:, PyTorch [\d.]+)?: "
                  "numdiff bench kernels --of files")
LINE = re.compile(r"        (?:v\d+\*?|\*) +[\d,.]+ µs +[\d,.e-]+ (?:TFLOP/s|GB/s) +\d+ % of (?:arithmetic|memory)")

# {why: {problem: versions}} without a measurement: to be taken out with the next. 0: it has no versions
NOT_YET = {"its row was the launcher's choice, version 6": {"conv2d_forward, 32×64×64×64, 64×3×3×64, float16": {5}}}


@functools.cache
def docstring(module):
    return importlib.import_module(module).__doc__


def lines_under(heading, text):
    """The lines of a docstring's section, without its heading."""
    found = re.search(rf"\n{heading}\n(.*?)(?=\n[A-Z]|\Z)", text, re.DOTALL)
    return found[1].splitlines() if found else []


def rows_of(module):
    """{problem: versions} that have a row under MEASURED; 0 stands for the launcher's own choice alone."""
    rows, name = {}, None
    for line in lines_under("MEASURED", docstring(module))[1:]:
        if line.startswith("        "):
            rows[name].add(int(re.match(r" +v?(\d*)", line)[1] or 0))
        else:
            rows[name := line.strip()] = set()
    return rows


@functools.cache
def measurable(number):
    """The versions of a problem that run on an H200; {0} where the operation has none."""
    problem = PROBLEMS[number]
    known = problem.versions or versions_of(problem.call.function)
    arguments, found = without_memory(problem.call, Planned(H200)), set()
    for version in known:
        try:
            call_with(problem.call.function, arguments, version)
        except (ValueError, NumdiffError):  # not for these operands
            continue
        found.add(version)
    return found if known else {0}


def not_yet(problem):
    return set().union(*(group.get(problem, set()) for group in NOT_YET.values()))


@pytest.mark.parametrize("module", WITH, ids=lambda module: module.removeprefix("numdiff.kernels."))
def test_a_file_has_its_figures(module):
    """Card and day; for each problem its shape, and for each version µs, rate and share of the roof."""
    text = docstring(module)
    if not rows_of(module) and all(not_yet(problem.name) for problem in PROBLEMS if module in problem.files):
        return  # the next test asks for each of its versions
    assert HEAD.search(text), f"{module}: run numdiff bench kernels --of files, then tests.kernels.write_figures"
    section = lines_under("MEASURED", text)[1:]
    named = [line for line in section if not line.startswith("        ")]
    assert named and {line.strip() for line in named} <= NAMED
    assert all(LINE.match(line) for line in section if line not in named), section
    if any(word in text for word in ("matmul_level_forward,", "conv2d_level_forward,")):
        assert "% of cuBLAS" in text or "% of cuDNN" in text
    assert "ot measured on a GPU yet" not in text or any(not_yet(line.strip()) for line in named)
    for rows in "\n".join(line if line in named else line.split()[0] for line in section).split("\n    "):
        assert rows.count("*") <= 1, f"{rows}: the launcher chooses one version"


@pytest.mark.parametrize("module", WITH, ids=lambda module: module.removeprefix("numdiff.kernels."))
def test_each_version_has_its_figures(module):
    rows = rows_of(module)
    for number, problem in enumerate(PROBLEMS):
        if module in problem.files:
            wanted = measurable(number) & set(problem.files[module] or measurable(number))
            waits, there = wanted & not_yet(problem.name), rows.get(problem.name, set())
            assert wanted - there <= waits, f"{problem.name}: versions {wanted - there} have no figures"
            assert not waits & there, f"{problem.name}: versions {waits & there} have figures: take them from NOT_YET"
    said = {int(number) for number in re.findall(r"\bv(\d+) [a-z][\w ,/-]*:", "\n".join(
        lines_under("VERSIONS", docstring(module))))}
    known = set().union(*rows.values(), *(not_yet(problem.name) for problem in PROBLEMS if module in problem.files))
    assert said <= known | ({1} if 0 in known else set()), "a version under VERSIONS that no problem measures"


def test_only_what_can_be_measured_is_waited_for():
    for group in NOT_YET.values():
        for name, versions in group.items():
            assert name in NAMED, name
            assert versions <= measurable([problem.name for problem in PROBLEMS].index(name)), name
