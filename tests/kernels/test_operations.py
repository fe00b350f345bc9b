"""Every operation that has a record: each version that fits solves each problem, on the CPU and on
a GPU.

The emulator runs the same problems in test_check.py, and test_compile_logs.py compiles the kernels.
A new operation or version needs no line here.
"""

import contextlib
import functools

import numpy as np
import pytest

from numdiff.device import download, empty
from numdiff.device.planned import CARDS, Planned
from numdiff.device.requires import requires
from numdiff.extras.kernel_check.records import H200, cases_of
from numdiff.extras.kernel_check.records import _run as run_problem
from numdiff.extras.kernel_check.run import CaseArrays, relative_error
from numdiff.kernels import bias, concat, elementwise, softmax
from numdiff.kernels.operation import (
    OPERATIONS,
    Operation,
    Problem,
    Version,
    all_operations,
    first_on_device,
    operation,
    single,
    versions,
)
from numdiff.kernels.operation import record as records
from numdiff.kernels.operation.versions import at_most
from tests.conftest import quick, where

CASES = [
    (case, version)
    for record in all_operations()
    for case in cases_of(record)
    for version in (None, *(v for v in case.versions if v is not None))
]


@pytest.mark.parametrize(
    "case, version", CASES, ids=lambda value: getattr(value, "name", value) or "chosen"
)
@where(lambda engine, version: engine == "cuda" or engine == "cpu" and version is None)
# NumPy computes the others in the same way
@quick(lambda engine, case: engine == "cuda" or any(map(case.is_fast, case.versions)))
def test_problem(engine, case, version):
    made = case.inputs(np.random.default_rng(0))
    results = case.run(CaseArrays({name: engine(array) for name, array in made.items()}), version)
    again = case.run(CaseArrays({name: engine(array) for name, array in made.items()}), version)
    wanted = case.run(
        CaseArrays(
            {
                name: array.astype(np.float64)
                if array.dtype.kind == "f" or array.dtype.name == "bfloat16"
                else array.copy()
                for name, array in made.items()
            }
        ),
        None,
    )
    for got, same, want in zip(results, again, wanted, strict=True):
        assert tuple(got.shape) == tuple(want.shape)
        if engine.computes:
            assert relative_error(download(got), want) <= case.tolerance
        engine.check_equal(got, same)


MEASURED = [
    (record, problem)
    for record in all_operations()
    for problem in record.problems
    if problem.measured and problem.run is problem.inputs is None
]


@pytest.mark.parametrize(
    "record, problem", MEASURED, ids=lambda value: getattr(value, "name", None)
)
def test_launchers_at_a_models_size(record, problem):
    """Each version that fits plans and launches; no kernel runs, and no memory is taken."""
    device = Planned(H200)
    made = {name: empty(a.shape, a.dtype, device) for name, a in problem.arrays().items()}
    names = problem.versions
    if names is None and problem.call is None:
        values = record.values((), problem.bound(made))
        names = [version.name for version in record.fitting(first_on_device(made.values()), values)]
    for version in [record.version(name).number for name in names or ()] or [None]:
        device.kernels.clear()
        run_problem(record, problem, CaseArrays(made), version)
        assert device.kernels


@pytest.mark.parametrize("record", all_operations(), ids=lambda record: record.name)
def test_each_version_has_a_problem(record):
    sharing = [
        each
        for each in all_operations()
        if each.versions and record.versions and each.ladder == record.ladder
    ]
    run = {version for each in sharing for case in cases_of(each) for version in case.versions}
    assert {version.number for version in record.versions} <= run
    labels = [problem.label for problem in record.problems if not problem.measured]
    assert len(set(labels)) == len(labels), "two problems have one label"


def test_the_version_of_a_call():
    record = softmax.softmax_forward.operation
    x = empty((5, 7), np.float32, Planned(CARDS[0]))
    values = {"x": x, "scale": 1.0, "out": None}
    assert [v.name for v in record.fitting(x, values)] == ["block-per-row", "warp-per-row"]
    assert record.choose(None, x, values).name == "warp-per-row"
    assert record.choose(record.version(1), x, values).number == 1
    with pytest.raises(
        ValueError,
        match=r"^version 3 \(vectorised\) of softmax moves four elements at a time, and "
        r"rows of 7 are not made of aligned fours; use version=2$",
    ):
        softmax.softmax_forward(x, version="vectorised")
    with pytest.raises(
        ValueError,
        match="there is no version 'hopper' of softmax: use block-per-row, warp-per-row.*, "
        "or a number from 1 to ",
    ):
        softmax.softmax_forward(x, version="hopper")
    assert record.backward is softmax.softmax_backward.operation
    with pytest.raises(TypeError, match="missing a required argument: 'b'"):
        elementwise.add_forward(x)
    with pytest.raises(TypeError, match="too many positional arguments"):
        softmax.softmax_forward(x, 1.0, None, 2)  # a version, which is given by keyword


def test_numpy_arrays():
    """The reference gets them, once the arguments are checked and the version exists."""
    x = np.ones((4, 8), np.float32)
    assert (
        elementwise.silu_forward(x, version="naive") == elementwise.silu_forward_reference(x)
    ).all()
    with pytest.raises(
        ValueError, match="there is no version 'hopper' of silu: use naive or vectorised"
    ):
        elementwise.silu_forward(x, version="hopper")
    with pytest.raises(ValueError, match=r"bias must have shape \(8,\)"):
        bias.bias_add_forward(x, x[0, :3])


def test_arrays_within_an_argument():
    """…of a problem: in lists and NamedTuples; and those that are derived from others."""
    pair = concat.Pair(single(2, 3), single(2, 5))
    problem = Problem(
        parts=[single(4), None], x=pair, count=3, derived=lambda made: {"mean": made["x.0"].mean(1)}
    )
    made = problem.make(np.random.default_rng(0))
    assert {name: a.shape for name, a in made.items()} == {
        "parts.0": (4,),
        "x.0": (2, 3),
        "x.1": (2, 5),
        "mean": (2,),
    }
    given = problem.bound(made)
    assert (
        given.keys() == {"parts", "x", "count", "mean"}
        and given["parts"][1] is None
        and given["count"] == 3
    )
    assert (
        isinstance(given["x"], concat.Pair)
        and given["x"].b is made["x.1"]
        and given["parts"][0] is made["parts.0"]
    )


def test_a_call_in_place_of_the_operation():
    """…of a problem, such as one whose arguments are views of an array. Its context holds for what
    runs."""
    seen = []

    @contextlib.contextmanager
    def within():
        seen.append("before")
        yield
        seen.append("after")

    @operation(
        reference=lambda x: [2 * x],
        problems=[
            Problem(
                "views",
                x=single(4),
                count=3,
                within=within,
                call=lambda x, count: made_up_forward(x[:count]),
            ),
            Problem(
                "run", x=single(4), within=within, run=lambda arrays, version: (seen.append("run"),)
            ),
        ],
    )
    def made_up_forward(x):
        return [2 * x]

    try:
        views, run = cases_of(made_up_forward.operation)
        (result,) = views.run(CaseArrays({"x": np.arange(4)}), None)
        assert (result == [0, 2, 4]).all() and seen == ["before", "after"]
        run.run(CaseArrays({"x": np.arange(4)}), None)
        assert seen[2:] == ["before", "run", "after"]
    finally:
        del OPERATIONS["made_up"]


def test_what_no_version_takes():
    @operation(
        reference=lambda x: x,
        versions=[
            Version("naive", dtypes=["float16"]),
            Version("fast", requires("9.0a")(lambda: None)),
            Version("wide", fits=lambda x: "needs a million columns"),
        ],
        problems=[Problem(x=single(3))],
    )
    def made_up_forward(x, version=None):
        return x

    try:
        with pytest.raises(
            ValueError,
            match=r"^no version of made_up takes these arguments: version 1 \(naive\) is "
            r"for float16, and these arrays are float32; version 2 \(fast\) needs compute capability "
            r"9.0a, and this device has 7.5; version 3 \(wide\) needs a million columns$",
        ):
            made_up_forward(empty((3,), np.float32, Planned(CARDS[0])))
        with pytest.raises(
            ValueError, match="there is an operation 'made_up' already, in tests.kernels"
        ):
            operation(reference=lambda x: x)(functools.partial(made_up_forward).func)
    finally:
        del OPERATIONS["made_up"]


def test_operations_that_share_a_ladder(monkeypatch):
    """…have one ceiling; and a version is for some types alone."""
    for module, table in (
        (versions, "NAMES"),
        (versions, "CEILED"),
        (versions, "FOR"),
        (records, "OPERATIONS"),
    ):
        monkeypatch.setattr(module, table, dict(getattr(module, table)))

    @operation(
        reference=lambda x: x,
        chooses=True,
        versions=[
            Version("half", dtypes=["float16"]),
            Version("single", dtypes=["float32"], number=1),
            Version("wide"),
        ],
    )
    def made_up_forward(x, version=None):
        return version

    @operation(reference=lambda x: x, chooses=True, versions=made_up_forward.operation.versions)
    def above_forward(x, version=None):
        return made_up_forward(x, version=version)

    x = empty((3,), np.float32, Planned(CARDS[0]))
    assert [above_forward(x, version=wanted) for wanted in (None, "single", 1, "wide")] == [
        None,
        1,
        1,
        2,
    ]
    with pytest.raises(
        ValueError,
        match=r"^version 1 \(half\) of above is for float16, and these arrays are float32: "
        r"use single or wide, or cast_forward first$",
    ):
        above_forward(x, version="half")
    with (
        at_most({"made_up": "wide"}),
        pytest.raises(ValueError, match="to stop at"),
        at_most({"above": 1}),
    ):
        pass


def test_records_that_are_wrong():
    with pytest.raises(
        ValueError, match="version 'future' requires compute capability 99.0, which no card has"
    ):
        Version("future", requires="99.0")
    with pytest.raises(ValueError, match=r"its reference takes \['y'\], and the operation \['x'\]"):
        Operation(lambda x: x, lambda y: y, None, [], [], (), False)
    with pytest.raises(ValueError, match="two versions have one name"):
        Operation(
            lambda x, version=None: x, None, None, [Version("a"), Version("a")], [], (), False
        )
