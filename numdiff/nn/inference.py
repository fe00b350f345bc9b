"""The weights of a model that only makes samples: each is held once, in the type that computes with
it.

A training step needs float32 weights, their gradients, and a copy of 16 bits: 10 bytes a parameter,
before any moments. An evaluation in 16 bits reads float32 values of few parameters, such as biases
and embeddings, and of the matrices only the copy. So a model that is built within
`for_inference` has no gradients and, in 16 bits, float32 values of those few alone: about 2 bytes a
parameter, of a DiT-XL/2 1.3 GB instead of 6.4. Its values are rounded by the same kernel, one
parameter at a time, so its samples have the same bits.
"""

import contextlib
import contextvars
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing

from .. import extensions
from ..device import copy_into, empty, upload
from ..errors import UsageError
from ..kernels.elementwise import cast_into
from .module import FlatParameters, Module, padded

_active = contextvars.ContextVar("for_inference", default=False)


@contextlib.contextmanager
def for_inference() -> Iterator[None]:
    """Context: a model that is built here has `InferenceParameters`, which wait for `give`."""
    token = _active.set(True)
    try:
        yield
    finally:
        _active.reset(token)


def parameters_of(module: Module, backend: Any, seed: int | None, fixed: int) -> FlatParameters:
    """The parameters of a model that is built: `FlatParameters`, or within `for_inference` the
    others."""
    if _active.get():
        return InferenceParameters(module, backend, fixed)
    return FlatParameters(module, backend, seed, fixed)


class InferenceParameters(FlatParameters):
    """All parameters of a model, for evaluation alone.

    half: float16 or bfloat16 (total,), or None where the model computes in float32. The float32
    values are views of one buffer, of the parameters that are read so, in the order of the index.
    """

    def __init__(self, module: Module, backend: Any, fixed: int = 0):
        self._lay_out(module, fixed)
        self.backend, self.zeros = backend, []
        self.half = self.float8 = self._bound = self._arrays = self._reads = None
        self._held = None  # the precision: as `_hold` takes it

    def give(self, arrays: Mapping[str, np.ndarray], reads: Callable[[Any], set[str]]) -> None:
        """Take the values {name: float32 array}, which `keep_half` or `drop_half` then moves to the
        device.

        reads: names of the parameters whose float32 values an evaluation reads, by its dtype
        """
        self.check_arrays(arrays)
        self._arrays, self._reads = arrays, reads

    def release(self) -> None:
        """Drop the values on the host: the precision cannot be changed from now on."""
        self._arrays = None

    def keep_half(self, dtype: np.typing.DTypeLike = np.float16) -> None:
        """Hold the values in 16 bits, and in float32 those that are read so."""
        self._hold(np.dtype(dtype))

    def keep_float8(self, names: Iterable[str], promoted: bool = True) -> None:
        """Hold these weights in E4M3, and the others as `keep_half`."""
        self._hold(np.dtype(np.float16), tuple(names), promoted)

    def drop_half(self) -> None:
        """Hold the values in float32."""
        self._hold()

    def _hold(self, dtype=None, eight=(), promoted=True):
        """dtype: of 16 bits, or None; eight: names of the weights in E4M3"""
        if self._held == (dtype, eight, promoted):
            return
        if self._arrays is None:
            raise UsageError(_ALONE)
        self._bound = self.half = self.float8 = None
        for parameter in self.parameters.values():  # before the memory is requested again
            parameter.data = parameter.half = parameter.float8 = None
        single = self.parameters if dtype is None else self._reads(dtype)
        places, total = self._layout(name for name in self.parameters if name in single)
        self._bound = empty(total, np.float32, self.backend)
        if dtype is not None:
            # equal layers of all blocks next to each other, and so at equal distances
            halves = [name for name in self.parameters if name not in eight]
            halves.sort(key=lambda name: re.sub("[0-9]+", "", name))
            halves, total = self._layout(halves if eight else self.parameters)
            self.half = empty(total, dtype, self.backend)
        if eight:
            make = extensions.find("precision", "fp8", "--precision fp8").for_inference
            self.float8 = make({n: self.parameters[n] for n in eight}, self.backend, promoted)
        for name, parameter in self.parameters.items():
            count = math.prod(parameter.shape)
            values = np.zeros(padded(count), np.float32)
            values[:count] = np.reshape(self._arrays[name], -1)
            if name in places:
                parameter.data = self._view(self._bound, places[name])
                copy_into(self._with_gap(self._bound, places[name]), values)
            if name in eight:
                values = upload(values[:count], self.backend)
                self.float8.hold(name, cast_into(values, empty(count, dtype, self.backend)))
            elif dtype is not None:
                parameter.half = self._view(self.half, halves[name])
                values = upload(values, self.backend)
                cast_into(values, self._with_gap(self.half, halves[name]))
        self._held = dtype, eight, promoted

    def _layout(self, names):
        """({name: {"offset", "shape"}}, elements in all) of a buffer of these parameters."""
        places, first = {}, 0
        for name in names:
            places[name] = {"offset": first, "shape": self.parameters[name].shape}
            first += padded(math.prod(self.parameters[name].shape))
        return places, first

    @staticmethod
    def _with_gap(buffer, place):
        first = place["offset"]
        return buffer[first : first + padded(math.prod(place["shape"]))]

    def round(self):
        """Nothing: the values do not change."""

    def refuse(self, *_):
        raise UsageError(_ALONE)

    def __getstate__(self):
        self.refuse()

    data = grad = property(refuse)
    __deepcopy__ = bind = load_flat = freeze = arrays = begin_gradients = refuse


_ALONE = (
    "this model was loaded for sampling alone, without float32 weights and gradients: load it with "
    "inference=False to train, copy or save it."
)
