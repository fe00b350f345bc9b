"""Layers: the parameters and initial values that go with each operation of `functional/`.

Initial values are those of the reference implementations. Weights and biases are uniform in
±1/√fan_in (Kaiming uniform with a = √5), norms one and zero, embeddings standard normal, and layers
that the architecture initialises to zero are zero.
"""

import math
import numbers
from collections.abc import Callable

import numpy as np

from ..device import AnyArray
from ..kernels.conv2d.narrow import NARROW
from ..kernels.operation.versions import capped
from . import functional as F
from .module import Module
from .parameter import Parameter
from .tensor import Tensor


def uniform(fan_in):
    """Uniform in ±1/√fan_in."""
    bound = 1 / math.sqrt(fan_in)
    return lambda generator, shape: generator.uniform(-bound, bound, shape)


def xavier(generator, shape):
    """Uniform with variance 2 / (fan_in + fan_out) (Glorot and Bengio 2010); the axes after the
    first make up fan_in."""
    bound = math.sqrt(6 / (shape[0] + math.prod(shape[1:])))
    return generator.uniform(-bound, bound, shape)


def gaussian(deviation):
    """Normal with mean 0 and this standard deviation."""
    return lambda generator, shape: deviation * generator.standard_normal(shape)


def constant(value):
    return lambda generator, shape: np.float32(value)


def normal(generator, shape):
    return generator.standard_normal(shape)


class Linear(Module):
    """y = x·weightᵀ + bias over the last axis; weight (out, in), bias (out,).

    inputs: how many, or the axes of the weight that make them up, such as (row, column, channel) of
    a patch
    initial: what the weight starts from (the bias then starts from zero); the default is `uniform`
    for both
    matrices: how many layers this one is, whose outputs stand side by side; Muon takes each by
    itself (0: none)
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        zero: bool = False,
        initial: Callable | None = None,
        matrices: int = 1,
    ) -> None:
        inputs = (inputs,) if isinstance(inputs, numbers.Integral) else tuple(inputs)
        start = constant(0) if zero else initial or uniform(math.prod(inputs))
        self.weight = Parameter((outputs, *inputs), start, written=True)
        self.bias = Parameter((outputs,), constant(0) if initial else start)
        self.matrices = matrices

    def forward(
        self, x: Tensor, residual: Tensor | None = None, gate: Tensor | None = None
    ) -> Tensor:
        return F.linear(x, self.weight, self.bias, residual, gate)


class Conv2d(Module):
    """k×k convolution, zero padding k // 2; weight (out, k, k, in), bias (out,).

    statistics: a `GroupNorm` will read the result, and is faster if it knows its statistics
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 3,
        stride: int = 1,
        zero: bool = False,
        statistics: bool = False,
    ) -> None:
        start = constant(0) if zero else uniform(inputs * kernel * kernel)
        # few channels have separate kernels, which add, and so little to zero that one launch for
        # all is faster
        self.weight = Parameter(
            (outputs, kernel, kernel, inputs), start, written=min(inputs, outputs) > NARROW
        )
        self.bias = Parameter((outputs,), start)
        self.stride, self.statistics = stride, statistics
        self.matrices = 1  # (out, k · k · in), in its stored layout

    def forward(
        self, x: Tensor, channel: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, self.stride, channel, residual, self.statistics)


class GroupNorm(Module):
    """Group normalisation over the last axis's groups, optionally followed by SiLU in the same
    pass."""

    def __init__(
        self, channels: int, groups: int = 32, eps: float = 1e-5, silu: bool = False
    ) -> None:
        self.weight = Parameter((channels,), constant(1))
        self.bias = Parameter((channels,), constant(0))
        self.groups, self.eps, self.silu = groups, eps, silu

    def forward(self, x: Tensor) -> Tensor:
        fused = self.silu and capped("epilogue", 1) == 1
        y = F.group_norm(x, self.weight, self.bias, self.groups, self.eps, fused)
        return F.silu(y) if self.silu and not fused else y


class LayerNorm(Module):
    """Layer normalisation over the last axis, with or without weight and bias."""

    def __init__(self, channels: int, eps: float = 1e-5, affine: bool = True) -> None:
        self.weight = Parameter((channels,), constant(1)) if affine else None
        self.bias = Parameter((channels,), constant(0)) if affine else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(Module):
    """Root mean square normalisation over the last axis, with or without weight."""

    def __init__(self, channels: int, eps: float = 1e-6, affine: bool = True) -> None:
        self.weight = Parameter((channels,), constant(1)) if affine else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight, self.eps)


class Embedding(Module):
    """A row of weight (count, channels) for each integer label."""

    def __init__(self, count: int, channels: int, initial: Callable = normal) -> None:
        self.weight = Parameter((count, channels), initial)

    def forward(self, labels: AnyArray) -> Tensor:
        return F.embedding(labels, self.weight)
