"""Chains of operations: one kernel, and one for their gradients, made when they are first launched.

SOURCE
    __init__.py.
READ NEXT
    ../bias.py, then ../transformer/bias_gelu.py: chains of one operation and of two.
"""

import functools
import hashlib
import inspect
import linecache
import math

import numpy as np

from ...device import cuda, empty, empty_like, float32, is_device, launch
from ...device.requires import requires, supports
from ...device.specialise import Variants, known_names, with_names
from ...dtypes import HALVES, is_half, working_type
from ..operation import Version, lacks_multiple
from ..reduce.trees import BLOCK, column_sum, cut, sample_sum
from .kernel_text import RESERVED, SCOPE, FusePlan, kernel_text
from .operations import (
    EACH,
    PER_CHANNEL,
    PER_SAMPLE,
    UNCHANGED,
    Operation,
    Place,
    parameters,
    select,
)

VERSIONS = {"naive": 1, "vectorised": 2, "eight": 3}
WIDTHS = 1, 4, 8  # neighbours of a thread, of those versions
MAX_SUMS = 48  # sums that a block has room for: 48 KiB of shared memory, which every GPU has
FLOATS = {np.dtype(np.float32), np.dtype(np.float64), *HALVES.values()}

_chains = {}  # what `fuse` has made


def fuse(read, *operations, name=None, module=None, widths=None):
    """The `Fused` chain of fuse(read, *operations, write): one kernel, and one for its gradients.

    read, write: EACH, or a place of one's own, as in resample.py; name: of the kernels. The same
    operations give the same chain; its kernels have a digest of the operations' code in their name,
    by which they are kept on disk. A `ValueError` for what is no chain.
    module: for numdiff's own, which have that module's name, and the neighbours a thread of each
    version, `widths`
    """
    *operations, write = operations or [None]
    if not isinstance(read, Place) or not isinstance(write, Place):
        raise ValueError(
            "fuse: a chain begins with what it reads and ends with what it writes: fuse(EACH, …, EACH)."
        )
    if not operations or not all(isinstance(o, Operation) for o in operations):
        raise ValueError(
            "fuse: a chain needs one Operation or more between what it reads and what it writes."
        )
    said = name or "_".join(o.name for o in operations)
    code = repr(
        [
            (
                fingerprint(o.function),
                [(n, fingerprint(d)) for n, d in o.derivatives.items()],
                [
                    (
                        p.said,
                        p.flat,
                        p.rows,
                        [fingerprint(f) for f in (*(p.loads or {}).values(), *p.uses.values())],
                    )
                    for p in (read, *o.places, write)
                ],
            )
            for o in operations
        ]
    )
    if module is None:
        module, said, widths = (
            __name__,
            f"{said}_{hashlib.sha256(code.encode()).hexdigest()[:10]}",
            WIDTHS,
        )
    if (module, said) not in _chains or _chains[module, said][0] != code:
        _chains[module, said] = (
            code,
            Fused(said, module, read, operations, write, widths or WIDTHS[:2]),
        )
    return _chains[module, said][1]


def fingerprint(value, within=()):
    """All that a function computes with, as text: its code, and what it knows by name, down the
    calls."""
    function = getattr(value, "py_func", value)
    if isinstance(value, np.ndarray):
        return value.dtype.name + value.tobytes().hex()
    if not inspect.isfunction(function) or function in within:
        return (
            f"{getattr(value, '__module__', '')}.{getattr(value, '__name__', None) or repr(value)}"
        )
    code, known = function.__code__, sorted(known_names(function).items())
    return repr(
        [
            code.co_code,
            code.co_consts,
            code.co_names,
            code.co_varnames,
            *((name, fingerprint(v, (*within, function))) for name, v in known),
        ]
    )


class Fused(Variants):
    """A chain, which `fuse` makes: {(direction, version): kernel}, launched by `forward` and
    `backward`.

    arguments: {name: place}, x first; kept: those that `backward` reads: it takes None for the
    others
    gradients: those that it gives a gradient of, in this order; [] where a derivative is missing
    """

    def __init__(self, name, module, read, operations, write, widths):
        self.name, self.module, self.scope = name, module, dict(SCOPE)
        self.arguments, value, calls = {operations[0].takes: read}, operations[0].takes, []
        for k, operation in enumerate(operations, 1):
            local = {operation.takes: value, "y": "y" if k == len(operations) else f"y{k}"}
            for operand, place in zip(operation.operands, operation.places, strict=True):
                local[operand] = next(
                    n
                    for n in (operand, *(f"{operand}{k}" for k in range(2, 99)))
                    if n not in self.arguments
                )
                self.arguments[local[operand]] = place
            calls.append((operation, local))
            value = local["y"]
        self.taken = {
            *RESERVED,
            *(f"{a}_{k}" for a in (*self.arguments, "y", "dy") for k in range(8)),
            *(f"d{a}" for a in self.arguments),
        }
        if wrong := [a for a in self.arguments if a in self.taken or a in self.scope]:
            raise ValueError(
                f"fuse: {wrong[0]} is a word of the kernel itself: call that argument something else."
            )
        steps = [self._call(*call) for call in calls]
        self.plans = {"forward": FusePlan(self.arguments, steps, {"y": (write, "y")}, {})}
        self._reverse(calls)
        places = {*self.arguments.values(), write}
        for place in places:
            self.scope.update(place.uses)
        self.widths = {
            v: width
            for v, width in enumerate(widths, 1)
            if all(width in place.loads for place in places if place.loads)
        }
        self.chosen = {}  # versions, for what they were chosen
        super().__init__(
            [
                (d, v)
                for d, plan in self.plans.items()
                for v in self.widths
                if plan.outputs or plan.sums
            ],
            lambda key: self._compile(*key),
        )

    def __deepcopy__(self, memo):
        return self

    def _named(self, name, function):
        """What the kernel calls a device function."""
        while (
            name in self.taken
            or name in self.arguments
            or self.scope.setdefault(name, function) is not function
        ):
            name += "_"
        return name

    def _call(self, operation, local):
        return (
            [local["y"]],
            self._named(operation.name, operation.function),
            [local[a] for a in (operation.takes, *operation.operands)],
        )

    def _reverse(self, calls):
        """The reversed chain: from the last operation to the first, each derivative takes the
        gradient that arrives."""
        found, steps, again, needed, gradient = {}, [], [], set(), "dy"
        for operation, local in reversed(calls):
            arrives, gradient = gradient, None
            for arguments, derivative in operation.derivatives.items():
                results = [arrives]
                if derivative is not UNCHANGED:
                    results = [f"d{local[a]}" for a in arguments]
                    names = [arrives if p == "dy" else local[p] for p in parameters(derivative)]
                    steps.append(
                        (
                            results,
                            self._named(f"{operation.name}_{'_'.join(results)}", derivative),
                            names,
                        )
                    )
                    needed.update(names)
                found.update(zip([local[a] for a in arguments], results, strict=True))
            gradient = found.get(local[operation.takes])
            if gradient is None:
                found, self.lacks = {}, f"{operation.name} has no derivative of {operation.takes}"
                break
            if local["y"] in needed:  # an operation before needs its result: it is computed again
                again.insert(0, self._call(operation, local))
                needed.update(again[0][2])
        if any(self.arguments[a].summed for a in found if a in self.arguments) and any(
            place.flat and not place.rows for place in self.arguments.values()
        ):
            found, self.lacks = {}, "a place without rows has no part in sums"
        self.gradients = [a for a in self.arguments if a in found]
        self.kept = {a: place for a, place in self.arguments.items() if a in needed}
        sums = {
            a: (place, found[a])
            for place in (PER_SAMPLE, PER_CHANNEL)
            for a in self.gradients
            if self.arguments[a] is place
        }
        self.plans["backward"] = FusePlan(
            {"dy": EACH, **self.kept},
            again + steps,
            {
                f"d{a}": (self.arguments[a], found[a])
                for a in self.gradients
                if a not in sums and found[a] != "dy"
            },
            sums,
        )

    # Its kernels ----------------------------------------------------------------------------------

    def text(self, direction, version):
        """A kernel as text: direction "forward" or "backward"; version: 1 to 3, or its name."""
        version = VERSIONS.get(version, version)
        name = f"{self.name}_{direction}_kernel_v{version}"
        return kernel_text(name, self.plans[direction], self.widths[version], version, self._named)

    def _compile(self, direction, version):
        text, name = self.text(direction, version), f"{self.name}_{direction}_kernel_v{version}"
        file, scope = f"<{name}>", {**self.scope, "__name__": self.module}
        # for tracebacks, and the emulator
        linecache.cache[file] = len(text), None, text.splitlines(True), file
        exec(compile(text, file, "exec"), scope)
        scope[name].made_here = self.module == __name__  # no process but this one can make it
        return (
            requires("7.5")(cuda.jit(scope[name]))
            if self.widths[version] == 8
            else cuda.jit(scope[name])
        )

    def versions(self, direction="forward", of="x", shape_of=None):
        """[Version] of an operation that is this chain in a direction, for its record
        (operation/record.py).

        of: the operation's argument that has as many channels as y, or y's shape; shape_of:
        function of it, y's shape
        """
        plan, found = self.plans[direction], []
        for name, number in VERSIONS.items():
            width = self.widths.get(number)
            if (
                width is None
                or (direction, number) not in self
                or len(plan.sums) * width > MAX_SUMS
                or (number == 3 and plan.sums)
            ):
                continue
            fits = functools.partial(_lacks_neighbours, plan, width, shape_of)
            more = {} if width == 1 else {"fits": fits, "of": (of,)}
            if width == 8:
                more["requires"] = "8.0"
            if number == 3:  # of float32 it is no faster
                more["dtypes"] = tuple(HALVES)
            found.append(Version(name, number=number, **more))
        return found

    # Launching it ---------------------------------------------------------------------------------

    def forward(self, *arguments, version=None, out=None):
        """y, a new array like x, or `out`. arguments: x and the operands, in order; version: 1 to
        3, None: the fastest.
        """
        like, into = (arguments[0], {}) if out is None else (out, {"y": out})
        return self._launch("forward", version, like, self._given(arguments), into)["y"]

    def backward(self, dy, *arguments, version=None, into=None):
        """[gradient of each of `gradients`], new arrays; one that is unchanged is dy itself.
        arguments: as of `forward`

        into: {argument: an array that its gradient is written to, or, a sum PER_CHANNEL, is added
        to}
        """
        if not self.gradients:
            raise ValueError(
                f"{self.name} has no gradient, since {self.lacks}: give that operation one."
            )
        given = {a: value for a, value in self._given(arguments).items() if a in self.kept}
        into = {f"d{a}": array for a, array in (into or {}).items()}
        found = self._launch("backward", version, dy, {"dy": dy, **given}, into)
        return [found.get(f"d{a}", dy) for a in self.gradients]

    def _launch(self, direction, version, like, given, into):
        """{output: array, gradient that is a sum: array}. like: an array of y's shape; into: those
        that there are."""
        plan, shape, n = self.plans[direction], like.shape, like.size
        self._check(given, shape)
        if not is_device(like):
            return self._on_arrays(plan, like, given, into)
        key = direction, version, plan.row(like.shape), like.dtype, like.backend.capability
        if key not in self.chosen:
            self.chosen[key] = self._version(plan, like, version)
        version = self.chosen[key]
        width, found = (
            self.widths[version],
            {
                a: into[a] if a in into else empty(place.shape(shape), like.dtype, like=like)
                for a, (place, _) in plan.outputs.items()
            },
        )
        arrays = [
            a.reshape(-1) if is_device(a) else float32(a) if isinstance(a, (int, float)) else a
            for a in (*given.values(), *found.values())
        ]
        if not plan.sums:
            if found:
                launch(
                    self[direction, version],
                    -(-n // (width * BLOCK)),
                    BLOCK,
                    *arrays,
                    *(
                        {"sample": n // shape[0], "W": shape[-2], "C": shape[-1]}[size]
                        for size in plan.sizes
                    ),
                )
            return found
        B, C = shape[0] if plan.by_sample else 1, shape[-1]
        lanes, tiles, chunk, chunks = cut(B, n // (B * C), C, width)
        grid, chunks, more = (
            ((chunks, tiles, B), chunks, (lanes, chunk))
            if version > 1
            else (-(-B * C // BLOCK), 1, ())
        )
        partial = empty((len(plan.sums) * B, chunks, C), np.float32, like=like)
        launch(
            self[direction, version],
            grid,
            BLOCK,
            *arrays,
            partial.reshape(-1),
            n // (B * C),
            C,
            *more,
        )
        if plan.samples:  # the sums of each sample first, all of them at once
            first = partial[: plan.samples * B]
            totals = first.reshape(-1, C) if chunks == 1 else sample_sum(first)
        for s, a in enumerate(f"d{a}" for a in plan.sums):
            rows = slice(s * B, (s + 1) * B)
            found[a] = totals[rows] if s < plan.samples else column_sum(partial[rows], into.get(a))
        return found

    def _on_arrays(self, plan, like, given, into):
        """`_launch` for NumPy's arrays; of 16 bits it computes in float32."""
        known = {
            a: plan.inputs[a].numpy(
                value.astype(working_type(value.dtype), copy=False)
                if plan.inputs[a].shape
                else value,
                like.shape,
            )
            for a, value in given.items()
        }
        for results, function, arguments in plan.steps:
            values = on_arrays(self.scope[function])(*(known[a] for a in arguments))
            known.update(zip(results, values if len(results) > 1 else [values], strict=True))
        found = {}
        with np.errstate(over="ignore"):  # too large for float16 is infinite, as on a GPU
            for a, (_, result) in plan.outputs.items():
                # no new array of its own
                if (
                    a in into
                    or np.shape(known[result]) != like.shape
                    or any(known[result] is known[name] for name in given)
                ):
                    found[a] = into.get(a, empty_like(like))
                    found[a][...] = known[result]
                else:
                    found[a] = known[result].astype(like.dtype, copy=False)
        for a, (place, result) in plan.sums.items():
            total = place.summed(np.broadcast_to(known[result], like.shape))
            found[f"d{a}"] = np.add(into.get(f"d{a}", 0), total, out=into.get(f"d{a}", total))
        return found

    def check(self, *arguments):
        """A `ValueError` where arguments do not go together. arguments: as of `forward`; None is
        not looked at."""
        self._check(self._given(arguments), arguments[0].shape)

    def _given(self, arguments):
        if len(arguments) != len(self.arguments):
            raise ValueError(
                f"{self.name} takes {', '.join(self.arguments)}, and was given {len(arguments)} of these "
                f"{len(self.arguments)}."
            )
        return dict(zip(self.arguments, arguments, strict=True))

    def _check(self, given, shape):
        for a, value in given.items():
            place = self.arguments.get(a, EACH)
            wanted = place.shape and value is not None and tuple(place.shape(shape))
            if wanted and tuple(value.shape) != wanted:
                raise ValueError(
                    f"{self.name}: {a} must have shape {wanted}, {place.said}, not {tuple(value.shape)}."
                )
            if wanted and value.dtype not in FLOATS:
                raise ValueError(
                    f"{self.name}: {a} is {value.dtype}: cast it to float32, float16 or bfloat16."
                )

    def _version(self, plan, like, version):
        """The version that is requested, or the widest whose neighbours all read neighbours."""
        row = plan.row(like.shape)
        supported = [
            v
            for v, width in self.widths.items()
            if row % width == 0
            and len(plan.sums) * width <= MAX_SUMS
            and supports(like, self["forward", v])
        ]
        if version is None:
            return max(v for v in supported if v < 3 or is_half(like.dtype) and not plan.sums)
        version = VERSIONS.get(version, version)
        if version not in supported:
            width = self.widths.get(version)
            name = next((name for name, number in VERSIONS.items() if number == version), "unknown")
            raise ValueError(
                f"{self.name}, version {version} ({name}), takes {width} elements at a time, and "
                f"{row} is not a multiple of {width}; use version=1"
            )
        return version


def _lacks_neighbours(plan, width, shape_of, like):
    """What a version of `width` neighbours needs and an array, or its shape, lacks; None if it
    takes it."""
    return lacks_multiple(
        width, plan.row(shape_of(like) if shape_of else getattr(like, "shape", like))
    )


@functools.cache
def on_arrays(function):
    """A device function as one of NumPy's arrays: its functions stand for math's, down the calls."""
    if function is select:
        return np.where
    others = {
        name: np
        if value is math
        else getattr(np, value.__name__)
        if getattr(value, "__module__", "") == "math"
        else on_arrays(value)
        for name, value in known_names(function.py_func).items()
        if value is math or getattr(value, "__module__", "") == "math" or hasattr(value, "py_func")
    }
    return with_names(function.py_func, {"min": np.minimum, "max": np.maximum, **others})
