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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing

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
        if self._arrays is None and self.half is not None and self.half.dtype == dtype:
            return
        self._hold(np.dtype(dtype), self._reads(dtype) if self._arrays is not None else ())

    def drop_half(self) -> None:
        """Hold the values in float32."""
        if self._arrays is None and self.half is None and self._bound is not None:
            return
        self._hold(None, self.parameters)

    def _hold(self, dtype, single):
        if self._arrays is None:
            raise UsageError(_ALONE)
        total = sum(padded(math.prod(self.parameters[name].shape)) for name in single)
        self._bound = self.half = None
        for parameter in self.parameters.values():  # before the memory is requested again
            parameter.data = parameter.half = None
        self._bound, first = empty(total, np.float32, self.backend), 0
        if dtype is not None:
            self.half = empty(self.total, dtype, self.backend)
        for entry, (name, parameter) in zip(self.index, self.parameters.items(), strict=True):
            count = math.prod(parameter.shape)
            values = np.zeros(padded(count), np.float32)
            values[:count] = np.reshape(self._arrays[name], -1)
            if name in single:
                place = {"offset": first, "shape": entry["shape"]}
                parameter.data = self._view(self._bound, place)
                copy_into(self._bound[first : first + len(values)], values)
                first += len(values)
            if dtype is not None:
                parameter.half, first_half = self._view(self.half, entry), entry["offset"]
                cast_into(
                    upload(values, self.backend), self.half[first_half : first_half + len(values)]
                )

    def round(self):
        """Nothing: the values do not change."""

    def refuse(self, *_):
        raise UsageError(_ALONE)

    def __getstate__(self):
        self.refuse()

    data = grad = property(refuse)
    __deepcopy__ = bind = load_flat = freeze = keep_float8 = arrays = begin_gradients = refuse


_ALONE = (
    "this model was loaded for sampling alone, without float32 weights and gradients: load it with "
    "inference=False to train, copy or save it."
)
