"""The independent PyTorch twin of latent diffusion's autoencoder: where its stored test values come
from.

Written from the paper (Rombach et al. 2022, arXiv:2112.10752, section 3.1 and appendix E) and from
the public names and shapes of the released weights. It shares no line with numdiff and keeps
PyTorch's own layout (B, C, H, W).
"""

import torch
from torch import nn
from torch.nn import functional as F


def norm(width):
    return nn.GroupNorm(32, width, eps=1e-6)


class Residual(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.norm1, self.conv1 = norm(before), nn.Conv2d(before, after, 3, padding=1)
        self.norm2, self.conv2 = norm(after), nn.Conv2d(after, after, 3, padding=1)
        if before != after:
            self.nin_shortcut = nn.Conv2d(before, after, 1)

    def forward(self, x):
        inner = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        return inner + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class OneHead(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = norm(width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (layer(h).flatten(2) for layer in (self.q, self.k, self.v))  # (B, C, T)
        # a row for each query
        weights = torch.softmax(q.transpose(1, 2) @ k / q.shape[1] ** 0.5, dim=2)
        return x + self.proj_out((v @ weights.transpose(1, 2)).reshape(x.shape))


class Halve(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x):
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Double(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return self.conv(x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3))


class TwinLevel(nn.Module):
    def __init__(self, before, after, count, attends, change=None):
        super().__init__()
        self.block = nn.ModuleList(
            Residual(before if i == 0 else after, after) for i in range(count)
        )
        self.attn = nn.ModuleList(OneHead(after) for _ in range(count if attends else 0))
        if change is not None:
            self.add_module("downsample" if change is Halve else "upsample", change(after))

    def forward(self, x):
        for i, block in enumerate(self.block):
            x = block(x)
            if len(self.attn):
                x = self.attn[i](x)
        for name in ("downsample", "upsample"):
            if hasattr(self, name):
                x = getattr(self, name)(x)
        return x


class Half(nn.Module):
    """The encoder with `down`, or the decoder with `up`."""

    def __init__(self, side, inputs, outputs, widths, count, attention, middle):
        super().__init__()
        inner, top = widths[-1], len(widths) - 1
        self.conv_in = nn.Conv2d(inputs, widths[0] if side == "down" else inner, 3, padding=1)
        if side == "down":
            before = [widths[0], *widths[:-1]]
            self.down = nn.ModuleList(
                TwinLevel(before[i], widths[i], count, i in attention, Halve if i < top else None)
                for i in range(len(widths))
            )
        self.mid = nn.Module()
        self.mid.block_1 = Residual(inner, inner)
        if middle:
            self.mid.attn_1 = OneHead(inner)
        self.mid.block_2 = Residual(inner, inner)
        if side == "up":
            before = [*widths[1:], inner]
            self.up = nn.ModuleList(
                TwinLevel(before[i], widths[i], count + 1, i in attention, Double if i else None)
                for i in range(len(widths))
            )
        last = inner if side == "down" else widths[0]
        self.norm_out, self.conv_out = norm(last), nn.Conv2d(last, outputs, 3, padding=1)

    def forward(self, x):
        x = self.conv_in(x)
        for stage in getattr(self, "down", ()):
            x = stage(x)
        x = self.mid.block_1(x)
        x = self.mid.block_2(self.mid.attn_1(x) if hasattr(self.mid, "attn_1") else x)
        for stage in reversed(getattr(self, "up", ())):
            x = stage(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class TwinAutoencoder(nn.Module):
    def __init__(
        self,
        in_channels,
        model_channels,
        channel_mult,
        num_res_blocks,
        latent_channels,
        attention_levels,
        mid_attention,
        quant_convs,
        **_,
    ):
        super().__init__()
        shared = (
            [model_channels * m for m in channel_mult],
            num_res_blocks,
            attention_levels,
            mid_attention,
        )
        self.encoder = Half("down", in_channels, 2 * latent_channels, *shared)
        self.decoder = Half("up", latent_channels, in_channels, *shared)
        if quant_convs:
            self.quant_conv = nn.Conv2d(2 * latent_channels, 2 * latent_channels, 1)
            self.post_quant_conv = nn.Conv2d(latent_channels, latent_channels, 1)

    def moments(self, x):
        h = self.encoder(x)
        return self.quant_conv(h) if hasattr(self, "quant_conv") else h

    def decode(self, z):
        return self.decoder(self.post_quant_conv(z) if hasattr(self, "post_quant_conv") else z)
