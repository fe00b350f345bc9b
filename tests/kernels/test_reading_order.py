"""The docstrings lead from file to file: every name of a file is one's, and READ NEXT names those
that come later.

The order is that of numdiff/kernels/README.md's tables, and within a folder that of its
__init__.py.
"""

import ast
import functools
import gc
import pathlib
import re

import numdiff.kernels

KERNELS = pathlib.Path(numdiff.kernels.__file__).resolve().parent
# where a file's name may begin, besides the folder that it stands in
PLACES = KERNELS, *KERNELS.parents[:2]
NAME = re.compile(r"(?<![\w*.…/])(?:[\w.-]+/)*(?:\w[\w-]*\.(?:py|md|json)\b|\w+/(?=[\s,.;:)`]|$))")


def tree_of(path):
    """A file's syntax tree; to look for garbage among its nodes meanwhile would take longer than to
    make them."""
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        gc.enable()


def statements(node):
    """A node and the statements within it."""
    yield node
    for part in ("body", "orelse", "handlers", "finalbody"):
        for below in getattr(node, part, ()):
            yield from statements(below)


@functools.cache
def docstrings(path):
    return [
        ast.get_docstring(node) or ""
        for node in statements(tree_of(path))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
    ]


def find(name, path):
    """The file that a docstring of the file at `path` names; None if there is none."""
    return next((place / name for place in (path.parent, *PLACES) if (place / name).exists()), None)


def within(folder):
    """The files of a folder in the order of its __init__.py's list."""
    listed = re.findall(r"^    (\w+\.py) ", docstrings(folder / "__init__.py")[0], re.MULTILINE)
    return [folder / name for name in listed]


def reading_order():
    """The README's files in its order; a folder's others come where its own list has them."""
    rows = re.findall(
        r"^\|[\d ]*\|([^|]*)\|", (KERNELS / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    named = [
        KERNELS / name
        for row in rows
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", row)
        if not name.endswith("__init__.py")
    ]
    order = []
    for path in named:
        assert path.exists(), f"README.md: {path}"
        if path.is_dir():
            order += [each for each in within(path) if each not in named]
            continue
        listed = (
            within(path.parent) if path.parent != KERNELS and path.parent not in named else [path]
        )
        at = listed.index(path)
        # those before the first
        order += [each for each in listed[:at] if not {*order, *named} & {*listed[:at]}]
        order.append(path)
        for each in listed[at + 1 :]:
            if each in named:
                break
            order.append(each)
    return order


def read_next(path):
    """The files of numdiff/kernels that a file says to read next; of a folder, its first."""
    text = docstrings(path)[0].partition("READ NEXT")[2]
    found = [find(name, path).resolve() for name in NAME.findall(text)]
    return [within(each)[0] if each.is_dir() else each for each in found if KERNELS in each.parents]


def test_every_file_has_one_place():
    order = reading_order()
    assert len(order) == len(set(order))
    assert set(order) == {
        path
        for path in KERNELS.rglob("*.py")
        if path.name != "__init__.py"
        and path.relative_to(KERNELS).parts[0] not in ("check", "figures", "tuning")
    }


def test_names_of_files_resolve():
    lost = [
        f"{path.relative_to(KERNELS)}: {name}"
        for path in sorted(KERNELS.rglob("*.py"))
        for text in docstrings(path)
        for name in NAME.findall(text)
        if find(name, path) is None
    ]
    assert not lost


def test_read_next_leads_on():
    """To files later in the order: so no reader is led in a circle."""
    order = reading_order()
    back = [
        f"{path.relative_to(KERNELS)} -> {other.relative_to(KERNELS)}"
        for path in order
        for other in read_next(path)
        if order.index(other) <= order.index(path)
    ]
    assert not back and sum(map(len, map(read_next, order))) > len(order) / 2
