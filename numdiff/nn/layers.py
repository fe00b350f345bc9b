"""Layers: the parameters and initial values that go with each operation of `functional.py`.

Initial values are those of the reference implementations: weights and biases uniform in ±1/√fan_in (Kaiming uniform
with a = √5), norms at one and zero, embeddings standard normal, and zero where the architecture asks for zero.
"""
import math

import numpy as np

from . import functional as F
from .module import Module
from .tensor import Parameter


def uniform(fan_in):
    """Uniform in ±1/√fan_in."""
    bound = 1 / math.sqrt(fan_in)
    return lambda generator, shape: generator.uniform(-bound, bound, shape)


def xavier(generator, shape):
    """Uniform with variance 2 / (fan_in + fan_out) (Glorot and Bengio 2010); the the the axes after the first make up
    fan_in."""
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

    inputs: how many, or the axes of the weight that make them up, such as (row, column, channel) of a patch
    initial: what the weight starts from (the bias then starts from zero); the default is `uniform` for both
    """

    def __init__(self, inputs, outputs, zero=False, initial=None):
        inputs = (inputs,) if isinstance(inputs, int) else tuple(inputs)
        start = constant(0) if zero else initial or uniform(math.prod(inputs))
        self.weight = Parameter((outputs, *inputs), start, written=True)
        self.bias = Parameter((outputs,), constant(0) if initial else start)

    def forward(self, x, residual=None):
        return F.linear(x, self.weight, self.bias, residual)


class Conv2d(Module):
    """k×k convolution, zero padding k // 2; weight (out, k, k, in), bias (out,).

    statistics: a `GroupNorm` will read the result, and is faster if it knows its statistics
    """

    def __init__(self, inputs, outputs, kernel=3, stride=1, zero=False, statistics=False):
        start = constant(0) if zero else uniform(inputs * kernel * kernel)
        self.weight = Parameter((outputs, kernel, kernel, inputs), start)
        self.bias = Parameter((outputs,), start)
        self.stride, self.statistics = stride, statistics

    def forward(self, x, channel=None, residual=None):
        return F.conv2d(x, self.weight, self.bias, self.stride, channel, residual, self.statistics)


class GroupNorm(Module):
    """Group normalisation over the last axis's groups, optionally followed by SiLU in the same pass."""

    def __init__(self, channels, groups=32, eps=1e-5, silu=False):
        self.weight = Parameter((channels,), constant(1))
        self.bias = Parameter((channels,), constant(0))
        self.groups, self.eps, self.silu = groups, eps, silu

    def forward(self, x):
        return F.group_norm(x, self.weight, self.bias, self.groups, self.eps, self.silu)


class LayerNorm(Module):
    """Layer normalisation over the last axis, with or without weight and bias."""

    def __init__(self, channels, eps=1e-5, affine=True):
        self.weight = Parameter((channels,), constant(1)) if affine else None
        self.bias = Parameter((channels,), constant(0)) if affine else None
        self.eps = eps

    def forward(self, x):
        return F.layer_norm(x, self.weight, self.bias, self.eps)


class Embedding(Module):
    """A row of weight (count, channels) for each integer label."""

    def __init__(self, count, channels, initial=normal):
        self.weight = Parameter((count, channels), initial)

    def forward(self, labels):
        return F.embedding(labels, self.weight)
