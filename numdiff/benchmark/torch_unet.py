"""numdiff's UNet in PyTorch: the same architecture, options and parameter names, as one would write
it there.

Sources as in numdiff/nn/unet.py. Images are (B, C, H, W), stored channels-last; attention is
PyTorch's fused one.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from .. import extensions
from ..nn.unet import UNetConfig
from ..sizes import level_sides


def timestep_embedding(t, dim, max_period=10000.0, dtype=torch.float32):
    """(B,) -> (B, dim): cosines of t · max_period^(-i / half), then sines; an odd dim ends in a
    zero. It is computed in `dtype`."""
    half = dim // 2
    frequency = torch.exp(
        torch.arange(half, dtype=dtype, device=t.device) * (-math.log(max_period) / half)
    )
    angle = t[:, None].to(dtype) * frequency
    return F.pad(torch.cat((angle.cos(), angle.sin()), dim=1), (0, dim % 2))


def embedded(t, mlp, dim, max_period=10000.0):
    """mlp(timestep_embedding(t)), whose angles have the type of the weights, but float32 at
    least."""
    dtype = mlp[0].weight.dtype
    angles = timestep_embedding(t, dim, max_period, torch.promote_types(dtype, torch.float32))
    return mlp(angles.to(dtype))


class TorchDownsample(nn.Module):
    def __init__(self, channels, convolve):
        super().__init__()
        self.op = (
            nn.Conv2d(channels, channels, 3, stride=2, padding=1) if convolve else nn.AvgPool2d(2)
        )

    def forward(self, x):
        return self.op(x)


class TorchUpsample(nn.Module):
    def __init__(self, channels, convolve):
        super().__init__()
        if convolve:
            self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.convolve = convolve

    def forward(self, x):
        x = F.interpolate(x, scale_factor=2, mode="nearest")
        return self.conv(x) if self.convolve else x


class TorchEmbeddedBlock(nn.Module):
    """A block that takes the embedding, too."""


class TorchResBlock(TorchEmbeddedBlock):
    def __init__(
        self, channels, emb_channels, out_channels, dropout, scale_shift, groups, resample=None
    ):
        super().__init__()
        self.in_layers = nn.Sequential(
            nn.GroupNorm(groups, channels),
            nn.SiLU(),
            nn.Conv2d(channels, out_channels, 3, padding=1),
        )
        self.emb_layers = nn.Sequential(
            nn.SiLU(), nn.Linear(emb_channels, out_channels * (2 if scale_shift else 1))
        )
        self.out_layers = nn.Sequential(
            nn.GroupNorm(groups, out_channels),
            nn.SiLU(),
            nn.Dropout(dropout),
            nn.Conv2d(out_channels, out_channels, 3, padding=1),
        )
        self.skip_connection = (
            nn.Identity() if out_channels == channels else nn.Conv2d(channels, out_channels, 1)
        )
        self.resample = {
            None: nn.Identity(),
            "up": TorchUpsample(channels, False),
            "down": TorchDownsample(channels, False),
        }[resample]
        self.scale_shift = scale_shift

    def forward(self, x, emb):
        h = self.resample(self.in_layers[:2](x))
        h = self.in_layers[2](h)
        e = self.emb_layers(emb)[:, :, None, None]
        if self.scale_shift:
            scale, shift = e.chunk(2, dim=1)
            h = self.out_layers[1:](self.out_layers[0](h) * (1 + scale) + shift)
        else:
            h = self.out_layers(h + e)
        return self.skip_connection(self.resample(x)) + h


class TorchAttentionBlock(nn.Module):
    def __init__(self, channels, heads, order, groups):
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels)
        self.qkv, self.proj_out = (
            nn.Conv1d(channels, 3 * channels, 1),
            nn.Conv1d(channels, channels, 1),
        )
        self.heads, self.order = heads, order

    def forward(self, x):
        B, C, H, W = x.shape
        # a 1 × 1 convolution over tokens is a linear layer, and as such keeps the channels last
        tokens = self.norm(x).permute(0, 2, 3, 1).reshape(B, H * W, C)
        qkv = F.linear(tokens, self.qkv.weight[:, :, 0], self.qkv.bias)
        if self.order == "legacy":  # head, then q, k, v
            q, k, v = qkv.view(B, H * W, self.heads, 3, -1).permute(3, 0, 2, 1, 4)
        else:
            q, k, v = qkv.view(B, H * W, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, H * W, C)
        h = F.linear(h, self.proj_out.weight[:, :, 0], self.proj_out.bias)
        return x + h.view(B, H, W, C).permute(0, 3, 1, 2)


class TorchStage(nn.Sequential):
    def forward(self, x, emb):
        for block in self:
            x = block(x, emb) if isinstance(block, TorchEmbeddedBlock) else block(x)
        return x


class TorchUNet(nn.Module):
    """Options as `numdiff.nn.UNet`; forward takes x (B, C, H, W), t (B,) and, with classes, y (B,)."""

    def __init__(self, **options):
        super().__init__()
        c = UNetConfig(**options)
        self.model_channels, self.max_period = c.model_channels, c.max_period
        self.num_classes, self.class_dropout = c.num_classes, c.class_dropout
        outputs = c.out_channels or c.in_channels * (2 if c.learn_sigma else 1)
        emb_channels, order = 4 * c.model_channels, "new" if c.use_new_attention_order else "legacy"
        heads_upsample = c.num_heads if c.num_heads_upsample == -1 else c.num_heads_upsample

        def res(channels, width, resample=None):
            if c.block != "resnet":
                kind = extensions.find("torch_unet_block", c.block, f"block {c.block!r}")
                return kind(channels, emb_channels, width, c.dropout, resample)
            return TorchResBlock(
                channels, emb_channels, width, c.dropout, c.use_scale_shift_norm, c.groups, resample
            )

        def attention(channels, count):
            return TorchAttentionBlock(
                channels,
                count if c.num_head_channels == -1 else channels // c.num_head_channels,
                order,
                c.groups,
            )

        self.time_embed = nn.Sequential(
            nn.Linear(c.model_channels, emb_channels),
            nn.SiLU(),
            nn.Linear(emb_channels, emb_channels),
        )
        if c.num_classes is not None:
            self.label_emb = nn.Embedding(c.num_classes + (c.class_dropout > 0), emb_channels)
        widths = [int(mult * c.model_channels) for mult in c.channel_mult]
        channels = widths[0]
        attends = [
            side in c.attention_resolutions for side in level_sides(c.image_size, len(widths))
        ]
        self.input_blocks = nn.ModuleList(
            [TorchStage(nn.Conv2d(c.in_channels, channels, 3, padding=1))]
        )
        skips = [channels]
        for level, width in enumerate(widths):
            for _ in range(c.num_res_blocks):
                blocks = [res(channels, width)]
                channels = width
                if attends[level]:
                    blocks.append(attention(channels, c.num_heads))
                self.input_blocks.append(TorchStage(*blocks))
                skips.append(channels)
            if level < len(widths) - 1:
                self.input_blocks.append(
                    TorchStage(
                        res(channels, channels, "down")
                        if c.resblock_updown
                        else TorchDownsample(channels, c.conv_resample)
                    )
                )
                skips.append(channels)
        self.middle_block = TorchStage(
            res(channels, channels), attention(channels, c.num_heads), res(channels, channels)
        )
        self.output_blocks = nn.ModuleList()
        for level, width in reversed(list(enumerate(widths))):
            for i in range(c.num_res_blocks + 1):
                blocks = [res(channels + skips.pop(), width)]
                channels = width
                if attends[level]:
                    blocks.append(attention(channels, heads_upsample))
                if level > 0 and i == c.num_res_blocks:
                    blocks.append(
                        res(channels, channels, "up")
                        if c.resblock_updown
                        else TorchUpsample(channels, c.conv_resample)
                    )
                self.output_blocks.append(TorchStage(*blocks))
        self.out = nn.Sequential(
            nn.GroupNorm(c.groups, channels), nn.SiLU(), nn.Conv2d(channels, outputs, 3, padding=1)
        )

    def forward(self, x, t, y=None):
        emb = embedded(t, self.time_embed, self.model_channels, self.max_period)
        if y is not None:
            if self.training and self.class_dropout > 0:
                y = torch.where(
                    torch.rand(y.shape, device=y.device) < self.class_dropout, self.num_classes, y
                )
            emb = emb + self.label_emb(y)
        skips = []
        for stage in self.input_blocks:
            x = stage(x, emb)
            skips.append(x)
        x = self.middle_block(x, emb)
        for stage in self.output_blocks:
            x = stage(torch.cat((x, skips.pop()), dim=1), emb)
        return self.out(x)
