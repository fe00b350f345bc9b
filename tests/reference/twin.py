"""The independent PyTorch twin of guided-diffusion's UNet: the oracle that stored test values come
from.

Written from the papers (Ho et al. 2020, arXiv:2006.11239, appendix B; Nichol and Dhariwal 2021,
arXiv:2102.09672, sections 3 and 4; Dhariwal and Nichol 2021, arXiv:2105.05233, section 3) and from
the public names and shapes of the released weights. It shares no line with numdiff and keeps
PyTorch's own layout (B, C, H, W). It is slow on purpose: everything in the order of the papers, in
whatever dtype its parameters have, so that float64 gives the oracle itself.

    python tests/reference/twin.py       prints the two parameter counts that the project promises
"""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

# the model that the project started from; every option not named keeps the default of `TwinUNet`
SEED_OPTIONS = {
    "image_size": 64,
    "in_channels": 3,
    "model_channels": 64,
    "channel_mult": (1, 2, 3, 4),
    "num_res_blocks": 2,
    "attention_resolutions": (16, 8),
    "num_head_channels": 32,
    "conv_resample": False,
}
SEED_PARAMETERS = 20_494_211
CONV_RESAMPLE_PARAMETERS = 22_080_323


def timestep_embedding(t, dim, max_period=10000.0):
    """(B,) → (B, dim): the cosines of t·f_i, then the sines, f_i = max_period^(-i/half); an odd dim
    ends in a zero."""
    half = dim // 2
    frequency = torch.exp(
        torch.arange(half, dtype=torch.float64, device=t.device) * (-math.log(max_period) / half)
    )
    angle = t.to(torch.float64)[:, None] * frequency[None, :]
    return F.pad(torch.cat([angle.cos(), angle.sin()], 1), (0, dim % 2))


def attention(qkv, heads, order):
    """(B, 3C, T) → (B, C, T). "legacy": the channels are [head][q, k, v][HS]; "new": [q, k,
    v][head][HS]."""
    batch, width, length = qkv.shape
    size = width // (3 * heads)
    if order == "legacy":
        q, k, v = qkv.view(batch, heads, 3, size, length).unbind(2)
    else:
        q, k, v = qkv.view(batch, 3, heads, size, length).unbind(1)
    weight = torch.softmax(torch.einsum("bhct,bhcs->bhts", q, k) / math.sqrt(size), dim=-1)
    return torch.einsum("bhts,bhcs->bhct", weight, v).reshape(batch, width // 3, length)


def group_norm(channels):
    return nn.GroupNorm(32, channels, eps=1e-5)


class TwinDownsample(nn.Module):
    def __init__(self, channels, convolution):
        super().__init__()
        self.op = (
            nn.Conv2d(channels, channels, 3, stride=2, padding=1)
            if convolution
            else nn.AvgPool2d(2)
        )

    def forward(self, x):
        return self.op(x)


class TwinUpsample(nn.Module):
    def __init__(self, channels, convolution):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1) if convolution else None

    def forward(self, x):
        x = x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
        return x if self.conv is None else self.conv(x)


class TwinResBlock(nn.Module):
    """x → skip(x) + conv(SiLU(norm(conv(SiLU(norm(x))) joined with the embedding))).

    `resample` acts on x, and between the first SiLU and the first convolution.
    """

    def __init__(self, channels_in, channels_out, embedding, dropout, scale_shift, resample=None):
        super().__init__()
        self.scale_shift, self.resample = scale_shift, resample or nn.Identity()
        self.in_layers = nn.Sequential(
            group_norm(channels_in), nn.SiLU(), nn.Conv2d(channels_in, channels_out, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(
            nn.SiLU(), nn.Linear(embedding, channels_out * (2 if scale_shift else 1))
        )
        self.out_layers = nn.Sequential(
            group_norm(channels_out),
            nn.SiLU(),
            nn.Dropout(dropout),
            nn.Conv2d(channels_out, channels_out, 3, padding=1),
        )
        self.skip_connection = (
            nn.Identity()
            if channels_in == channels_out
            else nn.Conv2d(channels_in, channels_out, 1)
        )

    def forward(self, x, embedding):
        norm_in, silu, conv_in = self.in_layers
        norm_out, _, dropout, conv_out = self.out_layers
        h = conv_in(self.resample(silu(norm_in(x))))
        e = self.emb_layers(embedding)[:, :, None, None]
        if self.scale_shift:
            scale, shift = e.chunk(2, dim=1)
            h = norm_out(h) * (1 + scale) + shift
        else:
            h = norm_out(h + e)
        return self.skip_connection(self.resample(x)) + conv_out(dropout(silu(h)))


class TwinAttentionBlock(nn.Module):
    def __init__(self, channels, heads, order):
        super().__init__()
        self.heads, self.order = heads, order
        self.norm = group_norm(channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        flat = x.flatten(2)
        return (
            flat + self.proj_out(attention(self.qkv(self.norm(flat)), self.heads, self.order))
        ).view_as(x)


class TwinStage(nn.Sequential):
    """Layers in a row, of which the ResBlocks also take the embedding."""

    def forward(self, x, embedding):
        for layer in self:
            x = layer(x, embedding) if isinstance(layer, TwinResBlock) else layer(x)
        return x


class TwinUNet(nn.Module):
    """guided-diffusion's UNet; the options are those of `numdiff.nn.UNet`, `attention_resolutions`
    in pixels."""

    def __init__(
        self,
        image_size=64,
        in_channels=3,
        model_channels=64,
        out_channels=None,
        channel_mult=(1, 2, 3, 4),
        num_res_blocks=2,
        attention_resolutions=(16, 8),
        num_heads=1,
        num_head_channels=32,
        num_heads_upsample=-1,
        use_scale_shift_norm=False,
        resblock_updown=False,
        conv_resample=False,
        num_classes=None,
        learn_sigma=False,
        dropout=0.0,
        use_new_attention_order=False,
        max_period=10000.0,
    ):
        super().__init__()
        self.model_channels, self.max_period = model_channels, max_period
        out_channels = out_channels or in_channels * (2 if learn_sigma else 1)
        embedding = 4 * model_channels
        widths = [int(mult * model_channels) for mult in channel_mult]
        order = "new" if use_new_attention_order else "legacy"

        def res_block(channels_in, channels_out, resample=None):
            return TwinResBlock(
                channels_in, channels_out, embedding, dropout, use_scale_shift_norm, resample
            )

        def attention_block(channels, heads):
            return TwinAttentionBlock(
                channels, heads if num_head_channels == -1 else channels // num_head_channels, order
            )

        def resample(channels, kind):
            if resblock_updown:
                return res_block(channels, channels, kind(channels, False))
            return kind(channels, conv_resample)

        self.time_embed = nn.Sequential(
            nn.Linear(model_channels, embedding), nn.SiLU(), nn.Linear(embedding, embedding)
        )
        if num_classes is not None:
            self.label_emb = nn.Embedding(num_classes, embedding)

        # of images that are no squares the longer side counts
        width, pixels = widths[0], max([image_size] if isinstance(image_size, int) else image_size)
        self.input_blocks = nn.ModuleList([TwinStage(nn.Conv2d(in_channels, width, 3, padding=1))])
        skips = [width]
        for level, target in enumerate(widths):
            for _ in range(num_res_blocks):
                stage = [res_block(width, target)]
                width = target
                if pixels in attention_resolutions:
                    stage.append(attention_block(width, num_heads))
                self.input_blocks.append(TwinStage(*stage))
                skips.append(width)
            if level < len(widths) - 1:
                self.input_blocks.append(TwinStage(resample(width, TwinDownsample)))
                skips.append(width)
                pixels //= 2

        self.middle_block = TwinStage(
            res_block(width, width), attention_block(width, num_heads), res_block(width, width)
        )

        self.output_blocks = nn.ModuleList()
        heads_up = num_heads if num_heads_upsample == -1 else num_heads_upsample
        for level in reversed(range(len(widths))):
            for i in range(num_res_blocks + 1):
                stage = [res_block(width + skips.pop(), widths[level])]
                width = widths[level]
                if pixels in attention_resolutions:
                    stage.append(attention_block(width, heads_up))
                if level > 0 and i == num_res_blocks:
                    stage.append(resample(width, TwinUpsample))
                    pixels *= 2
                self.output_blocks.append(TwinStage(*stage))

        self.out = nn.Sequential(
            group_norm(width), nn.SiLU(), nn.Conv2d(width, out_channels, 3, padding=1)
        )

    def forward(self, x, t, y=None):
        embedding = self.time_embed(
            timestep_embedding(t, self.model_channels, self.max_period).to(x.dtype)
        )
        if y is not None:
            embedding = embedding + self.label_emb(y)
        skips = []
        for stage in self.input_blocks:
            x = stage(x, embedding)
            skips.append(x)
        x = self.middle_block(x, embedding)
        for stage in self.output_blocks:
            x = stage(torch.cat([x, skips.pop()], dim=1), embedding)
        return self.out(x)


def count_parameters(**options):
    with torch.device("meta"):
        return sum(p.numel() for p in TwinUNet(**options).parameters())


def draw(model, seed):
    """Fill every parameter with the numbers that `stored.weight` gives for its name, and return the
    model."""
    from stored import weight

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                torch.from_numpy(weight(name, tuple(parameter.shape), seed).astype(np.float64))
            )
    return model


if __name__ == "__main__":
    assert count_parameters(**SEED_OPTIONS) == SEED_PARAMETERS
    assert count_parameters(**{**SEED_OPTIONS, "conv_resample": True}) == CONV_RESAMPLE_PARAMETERS
    print(
        f"{SEED_PARAMETERS:,} and, with conv_resample, {CONV_RESAMPLE_PARAMETERS:,} parameters, as promised"
    )
