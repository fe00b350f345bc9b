"""The ConvNeXt block of a UNet, its depthwise convolution and its learned scale."""

import math
from typing import ClassVar

from ...nn import functional as F
from ...nn.flops import LayerProduct, conv_product, linear_product
from ...nn.layers import Conv2d, LayerNorm, Linear, constant, uniform
from ...nn.module import Module, Numbered
from ...nn.parameter import Parameter
from ...nn.tensor import Tensor
from ...nn.unet import EmbeddedBlock
from .functional import depthwise_conv2d, depthwise_layer_norm


class DepthwiseConv2d(Module):
    """k×k convolution of each channel by itself, zero padding k // 2; weight (k, k, channels), bias
    (channels,)."""

    def __init__(self, channels: int, kernel: int = 7) -> None:
        start = uniform(kernel * kernel)
        self.weight = Parameter((kernel, kernel, channels), start)
        self.bias = Parameter((channels,), start)

    def forward(self, x: Tensor, channel: Tensor | None = None) -> Tensor:
        return depthwise_conv2d(x, self.weight, self.bias, channel)


class LayerScale(Module):
    """x + weight · h, weight (channels,), from a small number."""

    def __init__(self, channels: int, initial: float = 1e-6) -> None:
        self.weight = Parameter((channels,), constant(initial))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return F.layer_scale(x, h, self.weight)


class ConvNeXtBlock(EmbeddedBlock):
    """Depthwise 7×7 convolution, plus the embedding; LayerNorm, 1×1 to 4 C, GELU, 1×1 back; times a
    vector, plus the input (Liu et al. 2022, "A ConvNet for the 2020s", arXiv:2201.03545, figure 4;
    eps and layer scale as there, GELU by tanh).

    A 1×1 convolution comes before it where the number of channels changes; resample: as of a
    `ResBlock`.
    """

    title, multiple = "ConvNeXt", 8
    without: ClassVar = {
        "use_scale_shift_norm": "adds the timestep after its depthwise convolution"
    }

    def __init__(self, channels, emb_channels, out_channels, dropout, layer, resample=None):
        if out_channels != channels:
            self.skip_connection = Conv2d(channels, out_channels, kernel=1)
        self.depthwise = DepthwiseConv2d(out_channels)
        # as of a `ResBlock`
        self.emb_layers = Numbered({1: Linear(emb_channels, out_channels, matrices=0)})
        self.norm = LayerNorm(out_channels, eps=1e-6)
        self.mlp_in, self.mlp_out = (
            Linear(out_channels, 4 * out_channels),
            Linear(4 * out_channels, out_channels),
        )
        self.layer_scale = LayerScale(out_channels)
        self.direction, self.resample = (
            resample,
            {None: None, "up": F.upsample, "down": F.avgpool}[resample],
        )
        self.dropout, self.layer = dropout, layer

    def forward(self, x, embedded, randomness=None):
        """embedded: {block: result of its emb_layers}."""
        if hasattr(self, "skip_connection"):
            x = self.skip_connection(x)  # (B, H, W, C)
        if self.resample:
            x = self.resample(x)
        h = depthwise_layer_norm(
            x,
            self.depthwise.weight,
            self.depthwise.bias,
            embedded[self],
            self.norm.weight,
            self.norm.bias,
            self.norm.eps,
        )
        # inside (…, 4 C)
        layers = self.mlp_in.weight, self.mlp_in.bias, self.mlp_out.weight, self.mlp_out.bias
        if self.dropout and randomness is not None:
            return self.layer_scale(
                x, F.dropout(F.mlp(h, *layers), self.dropout, randomness, self.layer)
            )
        return F.mlp(h, *layers, scale=self.layer_scale.weight, residual=x)

    def products(self, pixels):
        after = {None: pixels, "up": 4 * pixels, "down": pixels // 4}[self.direction]
        found = (
            [conv_product(self.skip_connection, pixels)] if hasattr(self, "skip_connection") else []
        )
        return [
            *found,
            depthwise_product(self.depthwise, after),
            linear_product(self.emb_layers[1], 1),
            linear_product(self.mlp_in, after),
            linear_product(self.mlp_out, after),
        ], after


def depthwise_product(conv, pixels):
    """A depthwise convolution over one image of `pixels` pixels."""
    return LayerProduct(conv.weight, 2 * pixels * math.prod(conv.weight.shape))
