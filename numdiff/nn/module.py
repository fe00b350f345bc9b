"""Modules: named containers of parameters, and the flat buffers that hold all of a model's
parameters.

Both can be copied (`copy.deepcopy`) and pickled. A copy is independent: it has its own buffers, on
the same device, and its parameters are views of them. A pickle holds weights as NumPy arrays and
devices by name, but no gradients.
"""

import copy
import difflib
import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing

from .. import extensions
from ..device import (
    AnyArray,
    copy_into,
    download,
    empty,
    empty_like,
    fill_zero,
    is_device,
    side_by_side,
    upload,
    zeros,
)
from ..dtypes import HALVES
from ..errors import NumdiffError, UsageError, printable
from ..kernels.elementwise import cast_into
from ..kernels.optimizer.zero_ranges import zero_ranges
from .aliasing import begin_at_zero, passing
from .parameter import Parameter
from .recompute import recompute
from .recording import scope

MAX_TOTAL = 2**31 - 1  # elements of a flat buffer, which kernels count in int32
# elements between parameter starts: 256 bytes, so that every view takes vector loads (and TMA)
ALIGNMENT = 64


class Module:
    """Something with parameters. Attributes that are Parameters or Modules are found by name, in
    the order assigned."""

    name = ""  # full name within the model, set by `FlatParameters`; the tape's records have it
    uncopied = ()  # names of attributes that copies and pickles leave out, such as captured graphs
    # the `Linear` within whose result, a residual added, is all that the module returns
    ends_in: str | None = None
    recomputed = False  # whether the backward pass recomputes what is inside (recompute.py)
    # how many matrices `weight` is, one below the other, that Muon may make orthogonal (muon.py)
    matrices = 0

    def forward(self, *inputs: Any) -> Any:
        raise NotImplementedError

    def __call__(self, *inputs, **options):
        scope.append(self.name)
        try:
            with passing(self):
                return (
                    recompute(self, *inputs, **options)
                    if self.recomputed
                    else self.forward(*inputs, **options)
                )
        finally:
            scope.pop()

    def __deepcopy__(self, memo):
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        state = self.__getstate__()
        # first, so that the parameters found elsewhere become views of the new buffers
        for value in state.values():
            if isinstance(value, FlatParameters):
                copy.deepcopy(value, memo)
        new.__setstate__({name: copy.deepcopy(value, memo) for name, value in state.items()})
        return new

    def __getstate__(self):
        """The attributes that copies and pickles keep."""
        return {name: value for name, value in vars(self).items() if name not in self.uncopied}

    def __setstate__(self, state):
        vars(self).update(state)

    def children(self) -> list[tuple[str, "Parameter | Module"]]:
        """(name, Parameter or Module) in order of assignment; numbered containers use their numbers
        as names."""
        return [(k, v) for k, v in vars(self).items() if isinstance(v, (Parameter, Module))]

    def modules_within(self) -> Iterator["Module"]:
        """This module and all that it consists of, in the order of the parameters."""
        yield self
        for _, child in self.children():
            if isinstance(child, Module):
                yield from child.modules_within()

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """(full name, Parameter) pairs in module order; names every module on the way."""
        prefix = self.name and self.name + "."
        for name, child in self.children():
            if isinstance(child, Parameter):
                yield prefix + name, child
            else:
                child.name = prefix + name
                yield from child.named_parameters()


class Numbered(Module):
    """Modules with numbers as names: `Numbered({0: norm, 2: conv})` has `0.weight`, `2.weight`, …"""

    def __init__(self, modules: Any = ()):
        self.modules = dict(modules)

    def __getitem__(self, number):
        return self.modules[number]

    def __len__(self):
        return len(self.modules)

    def append(self, module: Module) -> None:
        self.modules[len(self.modules)] = module

    def children(self) -> list[tuple[str, Module]]:
        return [(str(k), v) for k, v in self.modules.items()]


class FlatParameters:
    """All parameters of a model as views of one float32 buffer, and their gradients as views of
    another.

    data, grad: float32 (total,) on the engine; half: float16 or bfloat16 copy of the weights in
    use, or
        None
    index: [{"name", "shape", "offset"}], offsets in elements, multiples of 64. The gaps between
    parameters hold zeros and stay zero. trained: number of parameters, without gaps, padding and
    frozen ones; count: with the `fixed` ones that the model holds elsewhere; zeros: names of those
    that start from zero; trained_ranges: [(start, stop)] of the buffers that training changes, all
    of them unless some are frozen (`freeze`); multiples of 64, too.
    """

    exchange_beside: str | None = None  # of the model
    overlapped = False  # whether the gradients' all-reduce overlaps this process's backward passes

    def __init__(self, module: Module, backend: Any = None, seed: int | None = 0, fixed: int = 0):
        self._lay_out(module, fixed)
        self.data, self.zeros = zeros(self.total, np.float32, backend), []
        if seed is not None:  # otherwise other values are about to be loaded
            self._initialise(seed)
        self.grad = zeros(self.total, np.float32, backend)
        self._attach(None)

    def _lay_out(self, module, fixed):
        """Name the module's parameters, and give each its place in the flat buffers."""
        self.parameters = dict(module.named_parameters())
        self.index, offset = [], 0
        for name, parameter in self.parameters.items():
            self.index.append({"name": name, "shape": list(parameter.shape), "offset": offset})
            offset += padded(math.prod(parameter.shape))
        self.trained = sum(math.prod(p.shape) - p.padding for p in self.parameters.values())
        self.count = self.trained + fixed
        if offset > MAX_TOTAL:
            raise UsageError(
                f"the model would have {offset:,} parameters, and kernels count up to {MAX_TOTAL:,}: give "
                "it fewer channels, blocks or classes."
            )
        self.total, self.trained_ranges = offset, [(0, offset)]

    def __deepcopy__(self, memo):
        """A copy of the weights in use: those of an EMA while one is bound."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        vars(new).update(vars(self), index=copy.deepcopy(self.index, memo))
        new.data, new.grad = copied(self._bound), copied(self.grad)
        new.parameters = {}
        for name, parameter in self.parameters.items():
            memo[id(parameter)] = new.parameters[name] = Parameter(
                parameter.shape, parameter.initial, parameter.written, parameter.padding
            )
            new.parameters[name].frozen = parameter.frozen
        new._attach(getattr(self.half, "dtype", None))
        return new

    def __getstate__(self):
        """Without the values, which the parameters hold."""
        return {
            "parameters": self.parameters,
            "index": self.index,
            "trained": self.trained,
            "count": self.count,
            "total": self.total,
            "trained_ranges": self.trained_ranges,
            "half": None if self.half is None else self.half.dtype.name,
            "backend": self.data.backend if is_device(self.data) else None,
        }

    def __setstate__(self, state):
        half, backend = state.pop("half"), state.pop("backend")
        vars(self).update({"trained_ranges": [(0, state["total"])], **state})
        flat = np.zeros(self.total, np.float32)
        for entry, parameter in self._entries():
            self._view(flat, entry)[...] = parameter.data
        self.data, self.grad = upload(flat, backend), zeros(self.total, np.float32, backend)
        # the CPU does not compute in float16
        kept = half == "bfloat16" or half and backend is not None
        self._attach(HALVES[half] if kept else None)

    def _attach(self, half):
        """Make the parameters views of `data` and `grad`, and of a copy in the dtype `half`, or
        None."""
        self.half = self.float8 = None
        self.bind(self.data)
        for entry, parameter in self._entries():
            parameter.grad = self._view(self.grad, entry)
        self._zeroed = upload(begin_at_zero(self.spans().values()), self.grad)
        if half:
            self.keep_half(half)

    def freeze(self, patterns: Sequence[str]) -> None:
        """Train none of the parameters whose names match one of the patterns (`frozen_by`); ():
        train all again.

        Frozen ones are in no gradient norm, and keep their bits: `trained_ranges` leaves them out.
        """
        frozen = frozen_by(
            patterns, {name: parameter.shape for name, parameter in self.parameters.items()}
        )
        self.trained += sum(
            (math.prod(p.shape) - p.padding) * (p.frozen - (name in frozen))
            for name, p in self.parameters.items()
        )
        self.trained_ranges = []
        for name, (parameter, first, stop, end) in self.spans().items():
            parameter.frozen = name in frozen
            parameter.stale = parameter.stale and not parameter.frozen
            if parameter.frozen:
                fill_zero(self.grad[first:stop])
            elif self.trained_ranges and self.trained_ranges[-1][1] == first:
                self.trained_ranges[-1] = (self.trained_ranges[-1][0], end)
            else:
                self.trained_ranges.append((first, end))

    def begin_gradients(self, ranges: Any = None) -> None:
        """Before the backward passes of a step: gradients are zero, or marked for the first
        operation to write.

        ranges: those to zero now, where others follow (aliasing.py)
        """
        zero_ranges(self.grad, self._zeroed if ranges is None else ranges)
        for parameter in self.parameters.values():
            parameter.stale, parameter.loan = parameter.written and not parameter.frozen, None
            parameter.read = False

    def end_gradients(self) -> None:
        """After them: zero the gradients of parameters that no operation has used."""
        for parameter in self.parameters.values():
            if parameter.stale:
                parameter.stale = False
                fill_zero(parameter.grad)

    def _entries(self):
        return zip(self.index, self.parameters.values(), strict=True)

    def spans(self) -> dict[str, tuple[Parameter, int, int, int]]:
        """{name: (Parameter, first element, the one after its last, first of the next parameter)}."""
        ends = [entry["offset"] for entry in self.index[1:]] + [self.total]
        return {
            entry["name"]: (
                parameter,
                first := entry["offset"],
                first + math.prod(entry["shape"]),
                end,
            )
            for (entry, parameter), end in zip(self._entries(), ends, strict=True)
        }

    @staticmethod
    def _view(buffer, entry):
        return buffer[entry["offset"] : entry["offset"] + math.prod(entry["shape"])].reshape(
            *entry["shape"]
        )

    def _initialise(self, seed):
        for entry, values in self.initial_values(seed):
            if values is None:
                self.zeros.append(entry["name"])
            else:
                copy_into(self._view(self.data, entry), np.broadcast_to(values, entry["shape"]))

    def initial_values(self, seed: int) -> Iterator[tuple[dict, np.ndarray | None]]:
        """Yields (entry of the index, its initial values, which broadcast to its shape, or None for
        zeros). Each parameter has its own counted stream, so they do not depend on the device."""

        def draw(numbered):
            number, parameter = numbered
            generator = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, number]))
            values = parameter.initial(generator, parameter.shape)
            return np.asarray(values, np.float32) if np.ndim(values) or values else None

        drawn = side_by_side(draw, enumerate(self.parameters.values()))
        yield from zip(self.index, drawn, strict=True)

    def bind(self, buffer: AnyArray) -> None:
        """Let every parameter read its values from `buffer` (the weights themselves, or an EMA of
        them)."""
        for entry, parameter in self._entries():
            parameter.data = self._view(buffer, entry)
        self._bound = buffer
        self.round()

    @property
    def in_use(self) -> AnyArray:
        """The buffer that every parameter reads its values from."""
        return self._bound

    def place(self) -> tuple:
        """The address of the weights in use on a device: a recorded graph is valid as long as this
        stays the same."""
        return tuple(
            buffer.backend.pointer(buffer)
            for buffer in (self._bound, self.half)
            if buffer is not None
        )

    def keep_half(self, dtype: np.typing.DTypeLike = np.float16) -> None:
        """From now on keep a copy of the weights in float16 or bfloat16, with which the model
        computes."""
        self.drop_half()
        self.half = empty(self.total, dtype, like=self.data)
        for entry, parameter in self._entries():
            parameter.half = self._view(self.half, entry)
        self.round()

    def keep_float8(self, names: Iterable[str], promoted: bool = True) -> None:
        """From now on keep a float16 copy of the weights, and of these one in E4M3, too, by an
        extension (extras/fp8/layers.py)."""
        self.keep_half()
        self.float8 = extensions.find("precision", "fp8", "--precision fp8")(self, names, promoted)

    def drop_half(self) -> None:
        """Drop that copy, and what is made of it."""
        self.half = self.float8 = None
        for parameter in self.parameters.values():
            parameter.half = parameter.float8 = None

    def refresh(self) -> None:
        """After an update of the weights: what is made of them for the next step."""
        if self.float8 is not None:
            self.float8.update()

    def describe(self) -> dict[str, Any]:
        """{key: value for JSON} of a checkpoint's description."""
        return {"index": self.index}

    def fits(self, meta: dict[str, Any]) -> bool:
        """Whether a checkpoint with this description is of the same parameters."""
        return same_index(meta.get("index", []), self.index)

    def round(self) -> None:
        """Refresh the copy of 16 bits, if there is one, and that of 8, from the weights in use."""
        if self.half is not None:
            cast_into(self._bound, self.half)
        if self.float8 is not None:
            self.float8.quantise()

    def arrays(self, buffer: AnyArray | None = None) -> dict[str, np.ndarray]:
        """{name: NumPy array} of a flat buffer (default: the weights)."""
        flat = download(self.data if buffer is None else buffer)
        return {entry["name"]: self._view(flat, entry).copy() for entry in self.index}

    def flatten(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """{name: array} -> one flat NumPy buffer; a `NumdiffError` names what is missing or has
        another shape."""
        self.check_arrays(arrays)
        flat = np.zeros(self.total, np.float32)
        for entry in self.index:
            self._view(flat, entry)[...] = arrays[entry["name"]]
        return flat

    def check_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Raise a `NumdiffError` that names what is missing in {name: array}, or has another shape."""
        missing = [e["name"] for e in self.index if e["name"] not in arrays]
        unexpected = [name for name in arrays if name not in self.parameters]
        if missing or unexpected:
            lists = (("missing", missing), ("unexpected", unexpected))
            raise NumdiffError(
                "these weights belong to another model: "
                + "; ".join(
                    f"{what} {', '.join(names[:5])}{' …' if len(names) > 5 else ''}"
                    for what, names in lists
                    if names
                )
                + ". Check the model options."
            )
        for entry in self.index:
            shape = np.shape(arrays[entry["name"]])
            if list(shape) != entry["shape"]:
                raise NumdiffError(
                    f"{entry['name']} has shape {tuple(shape)} in the file and "
                    f"{tuple(entry['shape'])} in the model; check the model options."
                )

    def load_flat(self, flat: np.ndarray) -> None:
        """Overwrite the weights with a flat NumPy buffer of the same index."""
        copy_into(self.data, np.ascontiguousarray(flat, np.float32))
        self.round()


def padded(count):
    """The elements of a flat buffer that a parameter of `count` elements takes."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def frozen_by(patterns, shapes):
    """Names of the parameters that patterns such as "blocks.0.*" match, a set; a `UsageError` for a
    pattern that matches none, and for patterns that match all. shapes: {name: shape} of the model's
    parameters"""
    frozen = set()
    for pattern in patterns:
        found = [name for name in shapes if fnmatch.fnmatchcase(name, pattern)]
        if not found:
            near = difflib.get_close_matches(pattern, known_patterns(shapes), 3, 0.4)
            hint = (
                f"did you mean {' or '.join(near)}?"
                if near
                else f"they are called as {next(iter(shapes), '')!r}."
            )
            raise UsageError(
                f"--freeze {printable(pattern, 100)} matches none of the model's {len(shapes)} "
                f"parameters; {hint}"
            )
        frozen.update(found)
    if patterns and len(frozen) == len(shapes):
        raise UsageError(
            f"--freeze {printable(','.join(patterns), 100)} matches all of the model's {len(shapes)} "
            "parameters, so that none is left to train: give fewer."
        )
    return frozen


def known_patterns(names):
    """What one may have meant: the names, and each module's with `.*`, such as "blocks.0.attn.*"."""
    found = dict.fromkeys(names)
    for name in names:
        parts = name.split(".")
        found.update(dict.fromkeys(".".join(parts[:k]) + ".*" for k in range(1, len(parts))))
    return list(found)


def copied(array):
    """A new array with the same contents, on the same device."""
    new = empty_like(array)
    copy_into(new, array)
    return new


def same_index(a, b):
    """Whether two parameter indices describe the same layout."""

    def key(index):
        return [(e["name"], tuple(e["shape"]), e["offset"]) for e in index]

    return key(a) == key(b)
