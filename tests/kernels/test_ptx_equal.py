"""ptx_equal.py on two tiny kernels: what it overlooks (names, places) and what it must not
(anything else)."""

import importlib.util
import pathlib
import re
import shutil
import textwrap

import pytest

from numdiff.device.compiler import type_of_word
from numdiff.device.ptx import compile_to_ptx
from tests.conftest import needs
from tests.kernels import ptx_equal
from tests.kernels.ptx_equal import SourceTree, compare, difference, normalised, paired

WORDS = ("float32[1]", "float32")
BEFORE = '''
    """One file of kernels."""
    from numdiff.device import cuda

    @cuda.jit(device=True)
    def times(a, b):
        return a * b

    @cuda.jit
    def scale(x, by):
        """x · by"""
        held = cuda.shared.array(32, "float32")
        i = cuda.grid(1)
        held[cuda.threadIdx.x] = x[i]
        cuda.syncthreads()
        if i < x.shape[0]:
            x[i] = times(held[31 - cuda.threadIdx.x], by)
'''
AFTER = (
    BEFORE.replace("One file", "Another, with more\n\n    lines of")
    .replace("times", "product")
    .replace("def scale", "def zz_scaled_by")
)


@pytest.fixture(scope="module")
def ptx(tmp_path_factory):
    """ptx(text, name, kernel): PTX of a kernel in a module of this name and text."""

    def compiled(text, name, kernel):
        path = tmp_path_factory.mktemp("modules") / f"{name}.py"
        path.write_text(textwrap.dedent(text))
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return compile_to_ptx(getattr(module, kernel), tuple(map(type_of_word, WORDS)), (8, 0))

    return compiled


def test_names_places_and_lines_do_not_count(ptx):
    before, after = (
        ptx(BEFORE, "scaling", "scale"),
        ptx(AFTER, "deeper.down.elsewhere", "zz_scaled_by"),
    )
    assert before != after and normalised(before) == normalised(after)
    assert "mul.f32" in normalised(before) and ".shared" in normalised(before)
    assert "scal" not in normalised(before) and "times" not in normalised(before)


def test_an_instruction_counts_and_so_does_which_memory(ptx):
    before = normalised(ptx(BEFORE, "scaling", "scale"))
    for old, new in (("a * b", "a + b"), ("array(32,", "array(64,"), ("31 -", "30 -")):
        after = normalised(ptx(BEFORE.replace(old, new), "scaling", "scale"))
        assert "from line" in difference({"sm_80": before}, {"sm_80": after}), old
    assert normalised("add _Za, _Zb;\nadd _Zb, _Za;") != normalised("add _Zq, _Zr;\nadd _Zq, _Zr;")
    assert difference({"sm_80": before}, {"sm_80": before}) == ""
    assert (
        difference({"sm_80": before, "sm_90a": before}, {"sm_80": before}) == "sm_90a before only"
    )
    assert (
        difference({"sm_80": before}, {"": "TypingError: no"})
        == "cannot be compiled: TypingError: no"
    )


def launch(name, *types):
    return "numdiff.kernels." + name.rpartition(".")[0], name.rpartition(".")[2], types


def test_launches_of_a_case_are_paired():
    a, b, c = launch("x.a", "float32[1]"), launch("x.b", "float16[1]"), launch("x.c", "int32")
    moved, renamed = launch("op.v1.a", "float32[1]"), launch("op.v2.c", "int32")
    # as many: by their places
    assert paired([a, b], [moved, launch("op.v2.b", "float16[1]", "int32")])[1][0] == b
    assert paired([a, b, c], [moved, renamed]) == [(a, moved), (b, None), (c, renamed)]
    assert paired([c], [a, c]) == [(None, a), (c, c)] and paired([], [a]) == [(None, a)]
    # arguments that became tuples of the same
    grouped = launch("x.d", "x.Pair(float32[1],x.Inner(int32))", "(int32)")
    assert paired([launch("x.d", "float32[1]", "int32", "int32")], [a, grouped])[1][1] == grouped
    fewer = launch("op.v2.b", "int32", "int32")  # moved, and other arguments
    assert paired([a, b], [c, a, fewer]) == [(None, c), (a, a), (b, fewer)]


class TemporaryTree:
    """A tree whose kernels have these texts."""

    def __init__(self, launches, texts):
        self.launches, self.texts, self.files = launches, texts, {}

    def compile(self, keys):
        self.files = {key: (f"{id(self)} {key}", None) for key in keys}

    def ptx(self, key):
        return {"sm_80": self.texts[key[1]]}


def test_what_is_said(monkeypatch):
    monkeypatch.setattr("numdiff.device.ptxas.find_ptxas", lambda: None)
    before = TemporaryTree(
        {
            "add v1": [launch("x.a"), launch("x.b")],
            "old v1": [launch("x.b")],
            "sub v1": [launch("x.b")],
        },
        {"a": "mul;", "b": "add;"},
    )
    after = TemporaryTree(
        {
            "add v1": [launch("op.x.a"), launch("op.x.b2")],
            "sub v1": [launch("op.x.b2")],
            "new v1": [launch("op.x.a")],
        },
        {"a": "mul;", "b2": "sub;"},
    )
    said = []
    assert compare(before, after, None, said.append) == (2, 2)
    assert said == [
        "differs  numdiff.kernels.x.b -> numdiff.kernels.op.x.b2 (add v1 and 1 more): sm_80 from line 1 of "
        "1, 1 after",
        "gone     numdiff.kernels.x.b (old v1)",
        "new      numdiff.kernels.op.x.a (new v1)",
    ]
    assert compare(before, after, r"x\.a$", said.append) == (1, 0)  # only those


@needs("ptxas")
def test_what_ptxas_makes_of_both(ptx):
    """Two instructions that change places are other PTX, and the same machine code; another
    instruction is not."""
    text = normalised(ptx(BEFORE, "scaling", "scale"))
    lines = text.splitlines()
    first = next(
        i for i, line in enumerate(lines) if "ld.param" in line and "ld.param" in lines[i + 1]
    )
    lines[first : first + 2] = lines[first + 1], lines[first]
    swapped, other = "\n".join(lines), text.replace("mul.f32", "add.f32")
    assert swapped != text and other != text
    texts = [{"sm_80": each} for each in (text, swapped, other)]
    assert difference(texts[0], texts[1]).endswith(f"({ptx_equal.SAME})")
    assert re.search(r"\(\d+ registers\)$", difference(texts[0], texts[2]))


def test_what_a_kernel_imports_decides_what_is_kept(tmp_path):
    def tree(name, files):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        for path, text in files.items():
            path = tmp_path / name / "numdiff" / path
            path.parent.mkdir(parents=True, exist_ok=True)
            (path.parent / "__init__.py").touch()
            path.write_text(text)
        return SourceTree(tmp_path / name / "numdiff")

    files = {
        "device/__init__.py": "from .low import lane\nfrom .host import launch\n",
        "device/low.py": "lane = 1\n",
        "device/host.py": "launch = 1\n",
        "kernels/x.py": '"""X."""\nfrom ..device import lane\nk = lane\n',
    }
    before = tree("before", files)
    moved = {
        **files,
        "kernels/op/x.py": '"""X, moved."""\n# and more\nfrom ...device import lane\nk = lane\n',
    }
    assert tree("moved", moved).digest("numdiff.kernels.op.x") == before.digest("numdiff.kernels.x")
    for path, text, same in (
        ("device/host.py", "launch = 2\n", True),
        ("device/low.py", "lane = 2\n", False),
        ("kernels/x.py", "from ..device import lane\nk = lane + 1\n", False),
    ):
        digest = tree("after", {**files, path: text}).digest("numdiff.kernels.x")
        assert (digest == before.digest("numdiff.kernels.x")) is same, path
    project = SourceTree(pathlib.Path(importlib.util.find_spec("numdiff").origin).parent)
    assert (
        len(
            {
                project.digest(f"numdiff.kernels.{name}")
                for name in ("softmax", "norms.row_norm", "matmul.naive")
            }
        )
        == 3
    )
