"""Versions have names: one table for launchers, `numdiff kernels check`, the benchmarks, docstrings
and messages."""

import ast
import functools
import importlib
import inspect
import pathlib
import re

import numpy as np
import pytest

import numdiff.kernels
from numdiff.device import download, upload
from numdiff.device.emulator import EmulatorDevice
from numdiff.extras.kernel_check import run as checking
from numdiff.extras.kernel_check.run import dtype_of, run_once
from numdiff.kernels import conv2d, elementwise, matmul
from numdiff.kernels.diffusion import sampler
from numdiff.kernels.operation import kernel_modules
from numdiff.kernels.operation.versions import (
    FOR,
    NAMES,
    at_most,
    capped,
    label,
    name_of,
    numbers_of,
    operation_of,
)
from tests.kernels.test_reading_order import statements, tree_of

MODULES = [module for module in kernel_modules() if module is not numdiff.kernels]
LAUNCHERS = [
    f
    for module in MODULES
    for name, f in vars(module).items()
    if inspect.isfunction(f)
    and f.__module__ == module.__name__
    and not name.startswith("_")
    and f.__name__ == name
    and getattr(inspect.signature(f).parameters.get("version"), "default", inspect.Parameter.empty)
    is None
]
SAID = re.compile(r"\bv(\d) +([a-z][\w-]*)(?=[:,])")  # "v2 vectorised: …" in a docstring
# "version 2 (vectorised) needs …" in a message
IN_MESSAGE = re.compile(r"\bversion (\d) \(([a-z][\w-]*)\)")


class NotedLaunches(EmulatorDevice):
    """Runs no kernel: keeps what would be launched."""

    def launch(self, kernel, grid, block, *_):
        self.kept.append((kernel.py_func.__module__, kernel.py_func.__name__, grid, block))


def launches(run):
    device = NotedLaunches()
    device.kept = []
    run(device)
    return device.kept


def test_every_launcher_takes_names():
    assert len(LAUNCHERS) > 70
    assert not [
        f.__name__
        for f in LAUNCHERS
        if not hasattr(f, "__wrapped__") or operation_of(f.__name__) is None
    ]


def test_every_version_has_a_name():
    """…and a number has two only where they are for different types."""
    for case in checking.CASES:
        for version in case.versions:
            assert version is None or name_of(case.name, version), (case.name, version)
    for operation, names in NAMES.items():
        assert all(re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", name) for name in names)
        # an operation on another's ladder has the numbers of its rungs there
        assert numbers_of(operation) == tuple(range(min(names.values()), max(names.values()) + 1))
        for number in names.values():
            shared = [name for name, other in names.items() if other == number]
            assert len({FOR.get(name) for name in shared}) == len(shared)


FIRST = list(
    {
        (
            case.name,
            version,
            dtype_of(case) if "mma or" in str(name_of(case.name, version)) else None,
        ): (case, version)
        for case in reversed(checking.CASES)
        for version in case.versions
        if version
    }.values()
)


def test_a_name_launches_what_its_number_does():
    for case, version in FIRST:
        name = name_of(case.name, version, dtype_of(case))
        wanted, got = (
            launches(functools.partial(run_once, case, each)) for each in (version, name)
        )
        assert wanted and got == wanted, (case.name, version)


def test_names_and_numbers():
    """…also after a list of arrays, and on the CPU, where versions are the reference."""
    x = np.ones((4, 8), np.float32)
    device = EmulatorDevice()
    assert (
        elementwise.silu_forward(x, version="naive") == elementwise.silu_forward(x, version=1)
    ).all()
    image, weight = (
        upload(x.reshape(1, 2, 2, 8), device),
        upload(np.ones((8, 1, 1, 8), np.float32), device),
    )
    by_number, by_name = (
        conv2d.conv2d_forward(image, weight, version=version) for version in (2, "im2col")
    )
    assert (download(by_number) == download(by_name)).all()
    with pytest.raises(ValueError, match=r"version 3 \(narrow\) of conv2d is for float16"):
        conv2d.conv2d_forward(image, weight, version="narrow")
    x = upload(x, device)
    assert (download(sampler.weighted_sum([0.5, 0.5], x, x, version="vectorised")) == 1).all()


def test_ceilings():
    """None above is chosen, lower ones are; what a call names runs; afterwards all is as before."""

    def names(**version):
        def run(device):
            x = upload(np.ones((8, 8), np.float32), device)
            matmul.matmul_forward(x, x, **version)
            elementwise.silu_forward(x)

        return [name for _, name, *_ in launches(run)]

    free = names()
    with at_most({"matmul": "tiled", "silu": "naive"}):
        assert names() == ["matmul_forward_kernel_v2", "silu_forward_kernel_v1"]
        assert names(version=3) == ["matmul_forward_kernel_v3", "silu_forward_kernel_v1"]
        assert capped("matmul", 1) == 1 and capped("softmax", 3) == 3
        with at_most({"matmul": 3}):
            assert names()[0] == "matmul_forward_kernel_v3" and names()[1] == free[1]
        assert names()[0] == "matmul_forward_kernel_v2"
    assert names() == free and "v4" in free[0]


@pytest.mark.parametrize(
    "wanted", [{"matmul": "hoper"}, {"matmul": 7}, {"linear": 1}, {"flash": 1}, {"matmul": 0}]
)
def test_ceilings_that_there_are_not(wanted):
    with pytest.raises(ValueError, match="to stop at: use one of"), at_most(wanted):
        pass
    assert capped("matmul", 6) == 6


def test_what_there_is_not():
    x = np.ones((4, 8), np.float32)
    with pytest.raises(
        ValueError,
        match=r"^there is no version 'hoper' of matmul: use naive, tiled, register-tiled, "
        r"vectorised, mma, tf32 or hopper, or a number from 1 to 6$",
    ):
        matmul.matmul_forward(x, x, transpose_b=True, version="hoper")
    half = upload(x.astype(np.float16), EmulatorDevice())
    with pytest.raises(
        ValueError,
        match=r"^version 5 \(tf32\) of matmul is for float32, and these arrays are float16: "
        r"use tiled, mma or hopper, or cast_forward first$",
    ):
        matmul.matmul_forward(half, half, transpose_b=True, version="tf32")
    assert (
        label("matmul_backward", 6) == "6 (hopper)" and label("matmul", 5, np.float16) == "5 (mma)"
    )
    assert (
        label("matmul", 9) == "9"
        and name_of("matmul", 5) == "mma or tf32"
        and name_of("chunk", 1) is None
    )


def sections(module):
    """The VERSIONS sections of a module's docstring, or its folder's; without their figures."""
    package = importlib.import_module(module.__package__)
    for each in (module, package) if package is not numdiff.kernels else (module,):
        yield re.sub(r"(?ms)^MEASURED$.*?(?=^[A-Z])", "", each.__doc__ or "")


def names_of_files(module):
    """{(name, number)} of the operations of a module's folder in kernels/; of a file outside the
    folders, its own."""
    place = ".".join(module.__name__.split(".")[:3])
    operations = {operation_of(f.__name__) for f in LAUNCHERS if f.__module__.startswith(place)}
    return {pair for operation in operations for pair in NAMES[operation].items()}


def test_docstrings_tell_the_names():
    """Of a launcher each version, in its file or its folder's; and no file says another name."""
    for f in LAUNCHERS:
        operation = operation_of(f.__name__)
        if hasattr(f, "operation") and f.operation.ladder != operation:
            continue  # column_sum's, or those of the operation that it shares them with
        listed = {
            (name, int(number))
            for text in sections(inspect.getmodule(f))
            for number, name in SAID.findall(text)
        }
        assert set(NAMES[operation].items()) <= listed, f.__name__
    every = {pair for names in NAMES.values() for pair in names.items()}
    for module in MODULES:
        listed = {(name, int(number)) for number, name in SAID.findall(next(sections(module)))}
        # of a text that several operations share, such as row_norm.py, names of any of them
        assert listed <= (names_of_files(module) or every), module.__name__


@pytest.mark.parametrize(
    "folder",
    sorted({module.__name__.split(".")[2] for module in MODULES} - {"operation", "figures"}),
)  # theirs have a `Version`, whose text has both
def test_messages_tell_the_names(folder):
    """A message that names a version by its number says its name, too, and rightly."""
    for module in (module for module in MODULES if module.__name__.split(".")[2] == folder):
        path, names = pathlib.Path(module.__file__), names_of_files(module)
        if not re.search(r"raise.*version", path.read_text(encoding="utf-8"), re.DOTALL):
            continue
        for raised in (node for node in statements(tree_of(path)) if isinstance(node, ast.Raise)):
            text = ast.unparse(
                raised.exc.args[0]
                if isinstance(raised.exc, ast.Call) and raised.exc.args
                else raised.exc
            )
            assert not re.search(r"(?<!no )\bversion (\d|\{version\}|\{VERSION\})(?! \()", text), (
                text
            )
            assert {(name, int(number)) for number, name in IN_MESSAGE.findall(text)} <= names, text
