"""An operation's record: the only place where it is declared, and what everything else reads.

    @operation(reference=softmax_forward_reference, cost=softmax_forward_cost,
               versions=[Version("block-per-row", softmax_forward_kernel_v1),
                         Version("warp-per-row", softmax_forward_kernel_v2),
                         Version("vectorised", softmax_forward_kernel_v3, fits=has_rows_of_four)],
               problems=[Problem(x=single(3, 7)), Problem(x=single(4, 8), scale=0.7),
                         Problem(x=single(49152, 256), scale=0.125, measured=True)])
    def softmax_forward(x, scale=1.0, out=None, version=None):
        \"\"\"softmax(scale · x) over the last axis.\"\"\"
        y = empty_like(x) if out is None else out
        launch(version.kernel, …)
        return y

The decorated function is called with arrays, and with `version` by keyword only. NumPy arrays go to
the reference. Device arrays go to the function, whose `version` is then a `Version`. It is the last
of the list that fits, or the one that the caller has named, by its name (`version="vectorised"`) or
by its number (`version=3`). `softmax_forward.operation` is the record.

An operation with another choice than a list, such as a cost model of tiles, is declared with
`chooses=True`. The function's `version` is then the number of the version that the caller has
named, or None, and the function chooses. An operation without versions, such as one that only calls
others, has no parameter `version`.

WHO READS THE RECORDS
    this module                  the choice of a version, the ceilings of `at_most`, the messages of what does not fit
    numdiff kernels list, show   names, versions, figures
    numdiff kernels check        every version that fits, on each problem that is not `measured`
    numdiff bench kernels        each `measured` problem, and what it costs
    tests/kernels                the same problems, on every engine
    documentation                the tables of kernels and versions

SOURCE
    plain bookkeeping
"""

import functools
import importlib
import inspect
import pkgutil

import numpy as np

from ... import extensions
from ...device import DeviceArray
from ...device.planned import CARDS
from ...device.requires import required, supports
from ...extensions import kernel_packages
from ..operation import versions as names

OPERATIONS: dict[str, "Operation"] = {}  # {name: Operation} of the modules that are imported


class Unfit(ValueError):
    """A version does not take these arguments on this device."""


class Version:
    """A rung of an operation's ladder.

    name: words joined by hyphens, such as "warp-per-row"
    kernel: what the operation's function launches or calls: a kernel, a dict of variants, or a
    function
    fits: a function of some of the operation's arguments, by name. It returns None if the version
        takes them, else what the version needs and they lack, to complete "version 3 (vectorised)
        …"
    of: names of the arguments that `fits` takes, in order; None: those of its parameters
    requires: compute capability, "8.0", or "9.0a" for that architecture alone; None: what `kernel`
    is marked with
    dtypes: names of the dtypes that it takes; None: all
    number: its place in the ladder; None: one above the version before it. Two versions may share a
        number if they share no dtype.
    measured: False until figures/ has its figures
    pays: a function of some of the operation's arguments, by name: whether the operation chooses
        this version, where it fits, if the caller names none; None: it does
    constants: further attributes, such as the number of elements of a thread
    ladder: name of the operation that declares it, whose ceiling holds for all that share it
    """

    ladder = None

    def __init__(
        self,
        name,
        kernel=None,
        *,
        fits=None,
        of=None,
        requires=None,
        dtypes=None,
        number=None,
        measured=True,
        pays=None,
        **constants,
    ):
        self.name, self.kernel, self.fits, self.number, self.measured = (
            name,
            kernel,
            fits,
            number,
            measured,
        )
        self.pays = pays
        self.dtypes = None if dtypes is None else tuple(dtypes)
        self.marked = _marked(requires) if requires else kernel
        self.wanted = () if fits is None else tuple(of or inspect.signature(fits).parameters)
        vars(self).update(constants)
        if not any(supports(card.capability, self.marked) for card in CARDS):
            raise ValueError(
                f"version {name!r} requires compute capability {self.requires}, which no card has"
            )

    def __str__(self):
        return f"{self.number} ({self.name})"

    @property
    def requires(self):
        """The compute capability that it needs: "8.0", "9.0a"; None: any."""
        major, minor, *alone = required(self.marked)
        return f"{major}.{minor}{''.join(alone)}" if major else None

    def takes(self, dtype):
        """Whether it takes arrays of this dtype."""
        return not self.dtypes or dtype.name in self.dtypes

    def lacks(self, array, values):
        """None if it takes these arguments, else a clause with what it needs. array: the first of
        the device's."""
        if not self.takes(array.dtype):
            return f"is for {' and '.join(self.dtypes)}, and these arrays are {array.dtype.name}"
        if not supports(array, self.marked):
            capability = ".".join(map(str, tuple(array.backend.capability)[:2]))
            return f"needs compute capability {self.requires}, and this device has {capability}"
        return self.fits(*(values[name] for name in self.wanted)) if self.fits else None

    def is_worthwhile(self, values):
        """What `pays` returns for these arguments; True without it."""
        return self.pays is None or self.pays(
            *(values[name] for name in inspect.signature(self.pays).parameters)
        )


def _listed(versions):
    """The names of versions: "a, b or c"."""
    *others, last = (version.name for version in versions)
    return f"{', '.join(others)} or {last}" if others else last


def _marked(capability):
    """A stand-in for a kernel that requires this compute capability."""
    from ...device.requires import requires

    def kernel():
        pass

    return requires(capability)(kernel)


class Operation:
    """What is known of an operation: see the module's docstring, and `operation` for the fields.

    function: works on device arrays with a chosen `Version`; call: what the module exports, which
    chooses
    """

    def __init__(
        self,
        function,
        reference,
        cost,
        versions,
        problems,
        writes,
        chooses,
        check=None,
        exact_bytes=False,
    ):
        self.name = function.__name__.removesuffix("_forward")
        self.family = self.name.removesuffix("_backward")
        self.function, self.call, self.reference, self.cost = function, None, reference, cost
        self.writes, self.chooses, self.check, self.exact_bytes = (
            tuple(writes),
            chooses,
            check,
            exact_bytes,
        )
        self.checked = () if check is None else tuple(inspect.signature(check).parameters)
        self.versions, self._problems = tuple(versions), problems
        signature = inspect.signature(function)
        self.parameters = {
            name: each.default for name, each in signature.parameters.items() if name != "version"
        }
        self.required = [
            name for name, value in self.parameters.items() if value is inspect.Parameter.empty
        ]
        self.signature = signature.replace(
            parameters=[each for name, each in signature.parameters.items() if name != "version"]
        )
        if reference is not None and list(inspect.signature(reference).parameters) != list(
            self.parameters
        ):
            raise ValueError(
                f"{self.name}: its reference takes {list(inspect.signature(reference).parameters)}, and "
                f"the operation {list(self.parameters)}"
            )
        if self.name in OPERATIONS:
            raise ValueError(
                f"there is an operation {self.name!r} already, in {OPERATIONS[self.name].module}"
            )
        before = 0
        for version in self.versions:
            version.number = before = version.number or before + 1
            version.ladder = version.ladder or self.name
        if len({version.name for version in self.versions}) < len(self.versions):
            raise ValueError(f"{self.name}: two versions have one name")
        OPERATIONS[self.name] = self
        if self.versions:
            self.ladder = self.versions[0].ladder
            names.declare(
                self.name,
                {version.name: version.number for version in self.versions},
                has_ceiling=self.ladder == self.name,
            )
            names.FOR.update(
                {
                    version.name: " and ".join(version.dtypes)
                    for version in self.versions
                    if version.dtypes
                    and any(v.number == version.number for v in self.versions if v is not version)
                }
            )

    @property
    def module(self):
        """Name of the module that declares it."""
        return self.function.__module__

    @functools.cached_property
    def problems(self):
        """[Problem], those of extensions last."""
        found = list(self._problems() if callable(self._problems) else self._problems)
        if self.name in extensions.entries("problems"):
            found += extensions.find("problems", self.name, f"a problem of {self.name}")()
        return found

    @property
    def backward(self):
        """The record of its derivative; None if there is none."""
        return OPERATIONS.get(f"{self.name}_backward")

    def version(self, wanted, array=None):
        """The `Version` of this name or number; of two that share a number the one for the dtype of
        an array.

        A `ValueError` for a version that there is not, or that is for another dtype than the
        array's.
        """
        found = [v for v in self.versions if wanted in (v.name, v.number)]
        if not found:
            raise ValueError(
                f"there is no version {wanted!r} of {self.name}: use {_listed(self.versions)}, or a "
                f"number from 1 to {self.versions[-1].number}"
            )
        if array is None:
            return found[0]
        fitting = [v for v in self.versions if v.takes(array.dtype)]
        if not any(v in fitting for v in found):
            raise ValueError(
                f"version {found[0]} of {self.name} is for {' and '.join(found[0].dtypes)}, and these "
                f"arrays are {array.dtype}: use {_listed(fitting)}, or cast_forward first"
            )
        return next(v for v in found if v in fitting)

    def fitting(self, array, values):
        """[Version] that take these arguments, in the ladder's order. array: the device's first;
        values: by name."""
        return [version for version in self.versions if version.lacks(array, values) is None]

    def choose(self, version, array, values):
        """The version for a call: this one, or where it is None the last that fits, pays, and that
        `at_most` allows.

        An `Unfit` names what that version lacks, or what each version lacks where none fits.
        """
        if version is not None:
            lack = version.lacks(array, values)
            if lack is None:
                return version
            others = self.fitting(array, values)
            remedy = (
                f"use version={others[-1].number}"
                if others
                else "no other version takes these arguments"
            )
            raise Unfit(f"version {version} of {self.name} {lack}; {remedy}")
        ceiling = names.capped(self.ladder, names.capped(self.family, self.versions[-1].number))
        for version in reversed(self.versions):
            if (
                version.number <= ceiling
                and version.is_worthwhile(values)
                and version.lacks(array, values) is None
            ):
                return version
        lacks = "; ".join(
            f"version {version} {version.lacks(array, values)}" for version in self.versions
        )
        raise Unfit(f"no version of {self.name} takes these arguments: {lacks}")

    def start(self, args, kwargs):
        """({parameter: value} of a call, which `check` has seen; the first array on a device, or
        None)."""
        values = self.values(args, kwargs)
        if self.check is not None:
            self.check(*(values[name] for name in self.checked))
        return values, first_on_device(values.values())

    def values(self, args, kwargs):
        """{parameter: value} of a call, with defaults; a `TypeError` as Python raises it."""
        values = dict(self.parameters)
        values.update(zip(values, args, strict=False))
        values.update(kwargs)
        if (
            len(args) > len(self.parameters)
            or len(values) > len(self.parameters)
            or any(values[name] is inspect.Parameter.empty for name in self.required)
        ):
            self.signature.bind(*args, **kwargs)  # raises
        return values


def operation(
    *,
    reference=None,
    cost=None,
    versions=(),
    problems=(),
    writes=(),
    chooses=False,
    check=None,
    exact_bytes=False,
):
    """Decorator: declare an operation, whose function works on device arrays.

    reference: the function for NumPy arrays, with the operation's parameters but `version`: the
        specification. None: the function takes NumPy arrays, too, since it only calls other
        operations
    cost: a function of some of the arguments, or of extents (benchmark/costs.py says which), by
        name, that returns (bytes, FLOPs)
    versions: [Version], the simplest first; the function's `version` is the chosen one. Or some of
        another operation's, which this one calls, as a linear layer calls matmul: `at_most` then
        knows that operation alone
    problems: [Problem], or a function that returns them
    writes: names of arguments that the operation changes, which are results, too
    chooses: the function chooses its version, within the ceilings of `at_most` (versions.capped)
    check: a function of some of the arguments, by name, called before the reference and before
        every version. It raises a `ValueError` where the arguments do not go together
    exact_bytes: the benchmark takes the bytes of `cost`, since arrays are read and written;
        otherwise it counts each array of a call once

    The function gains the attribute `operation`, an `Operation`.
    """

    def declare(function):
        record = Operation(
            function, reference, cost, versions, problems, writes, chooses, check, exact_bytes
        )

        @functools.wraps(function)
        def call(*args, version=None, **kwargs):
            values, array = record.start(args, kwargs)
            wanted = None if version is None else record.version(version, array)
            if array is None and reference is not None:
                return reference(**values)
            if chooses:
                return function(**values, version=wanted and wanted.number)
            return function(**values, version=record.choose(wanted, array, values))

        @functools.wraps(function)
        def call_without_version(*args, **kwargs):
            values, array = record.start(args, kwargs)
            return (
                function(**values)
                if array is not None or reference is None
                else reference(**values)
            )

        record.call = call if record.versions else call_without_version
        record.call.operation = record
        return record.call

    return declare


def naive_and_vectorised(naive=None, vectorised=None, fits=None):
    """[Version] of an operation whose threads have an element each, or four; `version.width` says
    which.

    fits: of the second; None: it takes four elements at a time of the argument x
    """
    return [
        Version("naive", naive, width=1),
        Version(
            "vectorised", vectorised, width=4, fits=fits or (lambda x: lacks_multiple(4, x.size))
        ),
    ]


def lacks_multiple(width, count, what="elements"):
    """For `Version.fits`: None if a count is a multiple of what a thread takes at a time."""
    return (
        f"takes {width} {what} at a time, and {count} is not a multiple of {width}"
        if count % width
        else None
    )


def all_operations():
    """[Operation] of all modules with kernels, which are imported; by name, the same order in every
    process."""
    kernel_modules()
    return [OPERATIONS[name] for name in sorted(OPERATIONS)]


def kernel_modules():
    """[module] with kernels: of numdiff.kernels and of extensions; these are left out where they
    cannot be imported."""
    found = []
    for name in kernel_packages():
        try:
            found += _modules_of(name)
        except ImportError:
            if name == "numdiff.kernels":
                raise
    return found


def _modules_of(name):
    package = importlib.import_module(name)
    return [
        package,
        *(
            importlib.import_module(info.name)
            for info in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{name}.")
            if not info.name.startswith(f"{name}.figures")
        ),
    ]


def first_on_device(values):
    """The first device array among arguments, or within a list or tuple of them; None if there is
    none."""
    for value in values:
        if isinstance(value, DeviceArray):
            return value
        if isinstance(value, np.ndarray):
            return None
        if isinstance(value, (list, tuple)):
            found = first_on_device(value)
            if found is not None:
                return found
    return None
