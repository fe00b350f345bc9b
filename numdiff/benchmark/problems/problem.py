"""What a problem is, the sizes of the models that all take theirs from, and how one is written
down."""

import inspect
from typing import NamedTuple

import numpy as np

from ...kernels.operation import Array, half, integers, single
from ..kernels import Recorded, for_each

__all__ = ["TimedProblem", "adding_to", "half", "integers", "numbered", "single"]

B, SIDE, C = 32, 64, 64  # the UNet's batch, image and channels
N, T, D, HEADS = 64, 256, 768, 12  # the DiT's batch, tokens, width and heads
HEAD = D // HEADS  # channels of a head
PARAMETERS = 20_494_272  # of the UNet
TIMESTEPS, CLASSES = 1000, 1000
SEED, PURPOSE = 1, 3


class TimedProblem(NamedTuple):
    """One call. versions: None for all; awaited: it has no figures yet."""

    call: Recorded
    versions: tuple | None = None
    precision: str = "fp32"
    note: str = ""
    awaited: bool = False

    @property
    def name(self):
        """Its identifier, also in the file of results."""
        dtype = "tf32" if self.precision == "tf32" else self.call.dtype
        return f"{self.call.name}, {self.call.shape()}, {dtype}" + f" ({self.note})" * bool(
            self.note
        )


def numbered(arguments):
    """The same arguments, each array numbered separately: one that is used twice is made twice."""
    count = iter(range(1 << 20))

    def one(value):
        if isinstance(value, Array):
            return Array(value.shape, value.dtype, value.values, next(count), value.positive)
        return for_each(one, value)

    return {name: one(value) for name, value in arguments.items()}


IMAGE, PIXELS, TOKENS = half(B, SIDE, SIDE, C), single(B, SIDE, SIDE, 3), half(N, T, D)
SAMPLES, STEP = integers(np.arange(B), np.uint32), integers([7], np.uint32)


def adding_to(found):
    """The function that the files call for each of their problems, which adds it to a list."""

    def add(
        function,
        *,
        versions=None,
        precision=None,
        note="",
        moved=0,
        flops=None,
        awaited=False,
        **arguments,
    ):
        """moved: bytes, and flops, where the arrays do not determine them"""
        bound = inspect.signature(function).bind(**arguments)
        bound.apply_defaults()
        given = numbered({k: v for k, v in bound.arguments.items() if k != "version"})
        for k, v in given.items():
            if k in ("v", "rstd", "logsumexp") and isinstance(v, Array):
                given[k] = Array(v.shape, v.dtype, v.values, v.place, True)
        call = Recorded(function, given, moved, flops, True)
        precision = precision or ("fp16" if call.dtype == np.float16 else "fp32")
        found.append(TimedProblem(call, versions, precision, note, awaited))

    return add
