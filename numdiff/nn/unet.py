"""The UNet of "Diffusion Models Beat GANs on Image Synthesis" (Dhariwal and Nichol 2021,
arXiv:2105.05233).

The options of the public guided-diffusion implementation that say what is computed, for images (its
`dims` of 2), and its parameter names: `numdiff convert` only changes the layout to channels last.
Precision and recomputation, options of its model, belong to the training here. Read top-down: the
blocks, then `UNet.__init__`, which lays them out, then `UNet.forward`.

Shapes are channels-last: x is (B, H, W, C); inside attention the same memory is (B, H·W, C).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .. import extensions
from ..configuration import configured_by
from ..device import AnyArray
from ..errors import UsageError, quoted
from ..settings import say
from ..sizes import as_size, check_halvings, level_sides, sides
from . import functional as F
from .flops import LayerProduct, conv_product, linear_product
from .layers import Conv2d, Embedding, GroupNorm, Linear
from .model import Model
from .module import Module, Numbered
from .tensor import Tensor


class Upsample(Module):
    """Nearest neighbour ×2, then a 3×3 convolution if `convolve`."""

    def __init__(self, channels, convolve):
        if convolve:
            self.conv = Conv2d(channels, channels)

    def forward(self, x):
        x = F.upsample(x)  # (B, 2H, 2W, C)
        return self.conv(x) if hasattr(self, "conv") else x

    def products(self, pixels):
        """([Product] of one image of `pixels` pixels, the pixels after the block); so of all blocks."""
        return [conv_product(self.conv, 4 * pixels)] if hasattr(self, "conv") else [], 4 * pixels


class Downsample(Module):
    """A 3×3 convolution with stride 2 if `convolve`, else the mean of 2×2 pixels."""

    def __init__(self, channels, convolve):
        if convolve:
            self.op = Conv2d(channels, channels, stride=2)

    def forward(self, x):
        return self.op(x) if hasattr(self, "op") else F.avgpool(x)  # (B, H/2, W/2, C)

    def products(self, pixels):
        return [conv_product(self.op, pixels)] if hasattr(self, "op") else [], pixels // 4


class EmbeddedBlock(Module):
    """A block that takes the embedding of timestep and class: forward(x, embedded, randomness),
    where embedded is {block: result of its emb_layers[1]}."""

    emb_layers: Numbered


class ResBlock(EmbeddedBlock):
    """norm, SiLU, conv; add (or scale and shift by) the embedding; norm, SiLU, dropout, conv; plus
    the input.

    resample: None, "up" or "down": both paths are resampled before the first convolution (no
    parameters of its own).
    """

    def __init__(
        self,
        channels,
        emb_channels,
        out_channels,
        dropout,
        scale_shift,
        groups,
        layer,
        resample=None,
    ):
        self.in_layers = Numbered(
            {0: GroupNorm(channels, groups, silu=True), 2: Conv2d(channels, out_channels)}
        )
        # 0 is the SiLU; the UNet computes it, and this layer, for all blocks at once
        self.emb_layers = Numbered(
            {1: Linear(emb_channels, out_channels * (2 if scale_shift else 1), matrices=0)}
        )
        self.out_layers = Numbered(
            {
                0: GroupNorm(out_channels, groups, silu=not scale_shift),
                3: Conv2d(out_channels, out_channels, zero=True, statistics=True),
            }
        )
        if out_channels != channels:
            self.skip_connection = Conv2d(channels, out_channels, kernel=1)
        self.direction, self.resample = (
            resample,
            {None: None, "up": F.upsample, "down": F.avgpool}[resample],
        )
        self.dropout, self.scale_shift, self.layer = dropout, scale_shift, layer

    def forward(self, x, embedded, randomness=None):
        """embedded: {block: result of its emb_layers}."""
        h = self.in_layers[0](x)  # (B, H, W, C)
        if self.resample:
            h, x = self.resample(h), self.resample(x)
        e = embedded[self]  # (B, C_out), or (B, 2 C_out)
        if self.scale_shift:
            h = self.in_layers[2](h)  # (B, H', W', C_out)
            h = F.silu(F.scale_shift(self.out_layers[0](h), e))
        else:
            h = self.in_layers[2](h, channel=e)
            h = self.out_layers[0](h)
        h = F.dropout(h, self.dropout, randomness, self.layer)
        if hasattr(self, "skip_connection"):
            x = self.skip_connection(x)
        return self.out_layers[3](h, residual=x)

    def products(self, pixels):
        after = {None: pixels, "up": 4 * pixels, "down": pixels // 4}[self.direction]
        found = [
            conv_product(self.in_layers[2], after),
            linear_product(self.emb_layers[1], 1),
            conv_product(self.out_layers[3], after),
        ]
        if hasattr(self, "skip_connection"):
            found.append(conv_product(self.skip_connection, after))
        return found, after


class AttentionBlock(Module):
    """norm, qkv, attention over all pixels, projection; plus the input."""

    ends_in = "proj_out"

    def __init__(self, channels, heads, order, groups):
        self.norm = GroupNorm(channels, groups)
        # in the order "legacy" the rows are those of one head after the other
        self.qkv = Linear(channels, 3 * channels, matrices=3 if order == "new" or heads == 1 else 1)
        self.proj_out = Linear(channels, channels, zero=True)
        self.heads, self.order = heads, order

    def forward(self, x):
        B, H, W, C = x.shape
        qkv = self.qkv(F.reshape(self.norm(x), B, H * W, C))  # (B, T, 3C)
        h = F.attention(qkv, self.heads, self.order)  # (B, T, C)
        return F.reshape(self.proj_out(h, residual=F.reshape(x, B, H * W, C)), B, H, W, C)

    def products(self, pixels):
        channels = self.proj_out.weight.shape[0]
        return [
            linear_product(self.qkv, pixels),
            LayerProduct(self.qkv.weight, 2 * 2 * pixels * pixels * channels, False),
            linear_product(self.proj_out, pixels),
        ], pixels


class Stage(Numbered):
    """Blocks that run one after the other; those that take the embedding get it."""

    def forward(self, x, embedded, randomness):
        for block in self.modules.values():
            x = block(x, embedded, randomness) if isinstance(block, EmbeddedBlock) else block(x)
        return x

    def products(self, pixels):
        found = []
        for block in self.modules.values():
            more, pixels = (
                ([conv_product(block, pixels)], pixels // block.stride**2)
                if isinstance(block, Conv2d)
                else block.products(pixels)
            )
            found += more
        return found, pixels


@dataclass(frozen=True, kw_only=True)
class UNetConfig:
    """Options of a `UNet`.

    image_size: side of the images in pixels, or (height, width); in_channels: of x, which is float32
        (B, height, width, in_channels) in [-1, 1]
    model_channels, channel_mult: level i has int(model_channels · channel_mult[i]) channels; each
    level halves the size
    out_channels: default in_channels, or twice that with learn_sigma
    num_res_blocks: ResBlocks per level
    attention_resolutions: image sizes, in pixels, at which attention follows each ResBlock; of
        images that are no squares the longer side
    num_head_channels: channels of an attention head; -1: use num_heads heads (num_heads_upsample on
    the way up)
    use_scale_shift_norm: the embedding scales and shifts the second norm, instead of being added
    before it
    resblock_updown: ResBlocks resample; otherwise, with conv_resample, convolutions; else pooling
    and nearest neighbour
    num_classes: adds a class embedding to the timestep's, and the model then takes y
    class_dropout: share of the images that lose their class in training; above 0 there is a null
        class, num_classes, whose row is the embedding's last (guided-diffusion has none, and sees
        one more class)
    use_new_attention_order: qkv channels in the order (qkv, head, channel) instead of (head, qkv,
    channel)
    max_period: of the timestep embedding's slowest sinusoid (10000 in guided-diffusion, 1000 in
    unet.cu)
    groups: of every group normalisation
    block: "resnet", or a block of an extension in the ResBlocks' place, such as "convnext"
    """

    image_size: int | Sequence[int] = 64
    in_channels: int = 3
    model_channels: int = 64
    out_channels: int | None = None
    channel_mult: Sequence[float] = (1, 2, 3, 4)
    num_res_blocks: int = 2
    attention_resolutions: Sequence[int] = (16, 8)
    num_heads: int = 1
    num_head_channels: int = 32
    num_heads_upsample: int = -1
    use_scale_shift_norm: bool = False
    resblock_updown: bool = False
    conv_resample: bool = False
    num_classes: int | None = None
    learn_sigma: bool = False
    dropout: float = 0.0
    use_new_attention_order: bool = False
    max_period: float = 10000.0
    groups: int = 32
    class_dropout: float = 0.0
    block: str = "resnet"


@configured_by(UNetConfig)
class UNet(Model):
    """Predicts noise, velocity or x_0 from x_t and t.

    device: "auto", "cpu" or "cuda" (or a backend); seed: of the initial weights (None: zeros)
    """

    kind = "unet"
    # four H200s: 98.2 % of four times one, 95.5 % after it (distributed/README.md)
    exchange_beside = "kernels"
    largest: ClassVar = {
        "image_size": 4096,
        "in_channels": 1 << 14,
        "model_channels": 1 << 14,
        "out_channels": 1 << 15,
        "channel_mult": 256,
        "num_res_blocks": 256,
        "num_heads": 1 << 14,
        "num_head_channels": 1 << 14,
        "num_heads_upsample": 1 << 14,
        "num_classes": 1 << 24,
        "groups": 1 << 14,
    }
    block_kinds = (EmbeddedBlock, AttentionBlock)
    part_kinds = {"attention": (AttentionBlock,)}

    def __init__(
        self,
        config: UNetConfig | None = None,
        *,
        device: Any = "auto",
        seed: int | None = 0,
        **options: Any,
    ) -> None:
        c = self._configure(UNetConfig, config, options)
        check_options(self.options)
        self.image_size = as_size(c.image_size)
        self.in_channels, self.model_channels = c.in_channels, c.model_channels
        self.num_classes, self.learn_sigma, self.max_period = (
            c.num_classes,
            c.learn_sigma,
            c.max_period,
        )
        self.out_channels = c.out_channels or c.in_channels * (2 if c.learn_sigma else 1)
        self.class_dropout = c.class_dropout
        self.null_class = (
            c.num_classes if c.num_classes is not None and c.class_dropout > 0 else None
        )
        emb_channels = 4 * c.model_channels
        heads_upsample = c.num_heads if c.num_heads_upsample == -1 else c.num_heads_upsample
        order = "new" if c.use_new_attention_order else "legacy"
        layers = iter(range(10**6))  # numbers the ResBlocks, each with its own stream of dropout

        def res(channels, outputs, resample=None):
            if c.block != "resnet":
                return other_block(c.block)(
                    channels, emb_channels, outputs, c.dropout, next(layers), resample
                )
            return ResBlock(
                channels,
                emb_channels,
                outputs,
                c.dropout,
                c.use_scale_shift_norm,
                c.groups,
                next(layers),
                resample,
            )

        def attention(channels, count):
            return AttentionBlock(
                channels,
                count if c.num_head_channels == -1 else channels // c.num_head_channels,
                order,
                c.groups,
            )

        self.time_embed = Numbered(
            {0: Linear(c.model_channels, emb_channels), 2: Linear(emb_channels, emb_channels)}
        )
        if c.num_classes is not None:
            self.label_emb = Embedding(c.num_classes + (c.class_dropout > 0), emb_channels)

        widths = [int(mult * c.model_channels) for mult in c.channel_mult]
        channels = widths[0]
        attends = [
            size in c.attention_resolutions for size in level_sides(c.image_size, len(widths))
        ]
        self.input_blocks = Numbered({0: Stage({0: Conv2d(c.in_channels, channels)})})
        skips = [channels]
        for level, width in enumerate(widths):
            for _ in range(c.num_res_blocks):
                stage = Stage({0: res(channels, width)})
                channels = width
                if attends[level]:
                    stage.append(attention(channels, c.num_heads))
                self.input_blocks.append(stage)
                skips.append(channels)
            if level < len(widths) - 1:
                self.input_blocks.append(
                    Stage(
                        {
                            0: res(channels, channels, "down")
                            if c.resblock_updown
                            else Downsample(channels, c.conv_resample)
                        }
                    )
                )
                skips.append(channels)

        self.middle_block = Stage(
            {
                0: res(channels, channels),
                1: attention(channels, c.num_heads),
                2: res(channels, channels),
            }
        )

        self.output_blocks = Numbered()
        for level, width in reversed(list(enumerate(widths))):
            for i in range(c.num_res_blocks + 1):
                stage = Stage({0: res(channels + skips.pop(), width)})
                channels = width
                if attends[level]:
                    stage.append(attention(channels, heads_upsample))
                if level > 0 and i == c.num_res_blocks:
                    stage.append(
                        res(channels, channels, "up")
                        if c.resblock_updown
                        else Upsample(channels, c.conv_resample)
                    )
                self.output_blocks.append(stage)

        self.out = Numbered(
            {
                0: GroupNorm(channels, c.groups, silu=True),
                2: Conv2d(channels, self.out_channels, zero=True),
            }
        )
        stages = [
            *self.input_blocks.modules.values(),
            self.middle_block,
            *self.output_blocks.modules.values(),
        ]
        self.res_blocks = [
            b for stage in stages for b in stage.modules.values() if isinstance(b, EmbeddedBlock)
        ]
        self._finish(device, seed)

    def conditioning(
        self, t: AnyArray, y: AnyArray | None = None, randomness: Any = None
    ) -> list[Tensor]:
        """What the ResBlocks take from timestep and class, whatever the image: a float32 Tensor (B,
        C_out), or (B, 2 C_out) with use_scale_shift_norm, for each of `res_blocks`."""
        emb = F.timestep_embedding(t, self.model_channels, self.max_period)  # (B, model_channels)
        emb = self.time_embed[2](F.silu(self.time_embed[0](emb)))  # (B, 4 model_channels)
        if y is not None:
            labels = F.class_dropout(y, self.class_dropout, self.null_class, randomness)
            emb = F.add(emb, self.label_emb(labels))
        layers = [block.emb_layers[1] for block in self.res_blocks]
        return F.linear_group(F.silu(emb), [(e.weight, e.bias) for e in layers])

    def conditioning_columns(self) -> tuple[list[int], np.dtype]:
        """(columns of each of the arrays that `conditioning` gives, their dtype)."""
        return [block.emb_layers[1].weight.shape[0] for block in self.res_blocks], np.dtype(
            np.float32
        )

    def forward(
        self,
        x: Tensor,
        t: AnyArray,
        y: AnyArray | None = None,
        randomness: Any = None,
        conditioning: list[Tensor] | None = None,
    ) -> Tensor:
        """x: Tensor float32 (B, H, W, C); t: array int32 or float32 (B,); y: array int32 (B,) if
        the model has classes.

        randomness: counts the dropout of a training step, of classes too; None: no dropout
        conditioning: of these t and y, where it is known (see `conditioning`)
        Returns a Tensor (B, H, W, out_channels).
        """
        self.check_inputs(t, y, x if conditioning is None else None)
        if conditioning is None:
            conditioning = self.conditioning(t, y, randomness)
        embedded = dict(zip(self.res_blocks, conditioning, strict=True))
        skips, h = [], F.cast(x, self.dtype)
        for stage in self.input_blocks.modules.values():
            h = stage(h, embedded, randomness)
            skips.append(h)
        h = self.middle_block(h, embedded, randomness)
        for stage in self.output_blocks.modules.values():
            # otherwise the input is added as it is
            join = F.pair if hasattr(stage[0], "skip_connection") else F.concat
            h = stage(join(h, skips.pop()), embedded, randomness)
        return F.cast(self.out[2](self.out[0](h)), np.float32)

    def products(self) -> list[LayerProduct]:
        found = [linear_product(self.time_embed[k], 1) for k in (0, 2)]
        pixels = math.prod(sides(self.image_size))
        for stage in (
            *self.input_blocks.modules.values(),
            self.middle_block,
            *self.output_blocks.modules.values(),
        ):
            more, pixels = stage.products(pixels)
            found += more
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        return [
            product._replace(weight=names[id(product.weight)])
            for product in (*found, conv_product(self.out[2], pixels))
        ]


def other_block(name):
    """The class of an extension's blocks, an `EmbeddedBlock` whose constructor takes (channels,
    emb_channels, out_channels, dropout, layer, resample).

    Its attributes: title, in texts; multiple: of which channels must be one; without: {option: why
    it excludes it}
    """
    return extensions.find("unet_block", name, f"block {name!r}")


def check_options(options):
    """Raise a `UsageError` for options with which no UNet can be laid out."""
    size, mult = as_size(options["image_size"]), options["channel_mult"]
    base = options["model_channels"]
    halvings = len(mult) - 1
    outputs = options.get("out_channels")
    for name in (
        "image_size",
        "in_channels",
        "model_channels",
        "groups",
        *(["out_channels"] if outputs else []),
    ):
        if min(sides(options[name])) < 1:
            raise UsageError(f"{name} {options[name]} must be at least 1.")
    if outputs == 0 or options["num_res_blocks"] < 0:
        raise UsageError("out_channels must be at least 1, and num_res_blocks at least 0.")
    if not mult or min(mult) <= 0:
        raise UsageError(f"channel_mult {tuple(mult)} must be one or more numbers above zero.")
    check_halvings(size, halvings)
    channels = [int(base * m) for m in mult]
    for c in channels:
        if c % options["groups"] or c == 0:
            raise UsageError(
                f"{c} channels (model_channels {base}) do not divide into {options['groups']} groups: use "
                f"a multiple of {options['groups']}."
            )
        for name in (
            ("num_heads", "num_heads_upsample") if options["num_head_channels"] == -1 else ()
        ):
            heads = options[name]
            if heads != -1 and (heads < 1 or c % heads):
                raise UsageError(f"{c} channels do not divide into {heads} heads: change {name}.")
    attended = {
        c
        for c, side in zip(channels, level_sides(size, len(mult)), strict=True)
        if side in options["attention_resolutions"]
    } | {channels[-1]}
    for c in sorted(attended):
        if (width := options["num_head_channels"]) != -1 and (width < 1 or c % width):
            raise UsageError(
                f"{c} channels do not divide into heads of {options['num_head_channels']}: change "
                "num_head_channels."
            )
    if (block := options.get("block", "resnet")) not in (
        known := ("resnet", *extensions.entries("unet_block"))
    ):
        raise UsageError(
            f"block {quoted(block)} is not known: use {' or '.join(map(repr, known))}."
        )
    if block != "resnet":
        kind = other_block(block)
        for name, why in kind.without.items():
            if options[name]:
                raise UsageError(f"block {block!r} {why}: leave out {name}.")
        for c in channels:
            if c % kind.multiple:
                raise UsageError(
                    f"{c} channels (model_channels {base}) are no multiple of {kind.multiple}, which "
                    f"block {block!r} needs: change model_channels."
                )
    for name in ("dropout", "class_dropout"):
        if not 0 <= options.get(name, 0) < 1:
            raise UsageError(f"{name} {say(options[name])} must be at least 0 and below 1.")
    if options["num_classes"] is not None and options["num_classes"] < 1:
        raise UsageError(
            f"num_classes {options['num_classes']} must be at least 1, or None for a model without "
            "classes."
        )
