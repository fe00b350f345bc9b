"""Every kernel file with a section VERSIONS says what was measured of them, and so does every Hopper level.

`python -m tests.kernels.write_figures` writes it, from what `numdiff bench kernels --of files` has measured on a GPU.
"""
import ast
import re

import pytest

from numdiff.benchmark.problems import problems
from tests.kernels.write_figures import file_of

# files whose problem is younger than the last measurement: to be taken out with the next
NOT_YET = set()
PROBLEMS = problems()
WITH = sorted({module for problem in PROBLEMS for module in problem.files})
NAMED = {problem.name for problem in PROBLEMS}
HEAD = re.compile(r"\nMEASURED\n    (NVIDIA [\w ]+), \d{4}-\d\d-\d\d(?:, PyTorch [\d.]+)?: "
                  "numdiff bench kernels --of files")
LINE = re.compile(r"        (?:v\d+\*?|\*) +[\d,.]+ µs +[\d,.e-]+ (?:TFLOP/s|GB/s) +\d+ % of (?:arithmetic|memory)")


@pytest.mark.parametrize("module", WITH, ids=lambda module: module.removeprefix("numdiff.kernels."))
def test_a_file_has_its_figures(module):
    """Card and day; for each problem its shape, and for each version µs, rate and share of the roof."""
    text = ast.get_docstring(ast.parse(file_of(module).read_text(encoding="utf-8")), clean=False)
    if module.removeprefix("numdiff.kernels.") in NOT_YET:
        assert "\nMEASURED\n" not in text, "it has figures: take it from NOT_YET"
        return
    assert HEAD.search(text), f"{module}: run numdiff bench kernels --of files, then tests.kernels.write_figures"
    section = re.split(r"\n(?=[A-Z])", text[text.index("\nMEASURED\n") + 1:])[0].splitlines()[2:]
    named = [line for line in section if not line.startswith("        ")]
    assert named and {line.strip() for line in named} <= NAMED
    assert all(LINE.match(line) for line in section if line not in named), section
    if any(word in text for word in ("matmul_level_forward,", "conv2d_level_forward,")):
        assert "% of cuBLAS" in text or "% of cuDNN" in text


def test_only_what_can_be_measured_is_waited_for():
    assert {f"numdiff.kernels.{module}" for module in NOT_YET} <= set(WITH)
