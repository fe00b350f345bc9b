"""The autoencoder of latent diffusion (Rombach et al. 2022, "High-Resolution Image Synthesis with
Latent Diffusion Models", arXiv:2112.10752): AutoencoderKL, which turns images into latents that are
smaller by 4, 8 or 16 in each direction, and back.

Layout and parameter names are those of the public latent-diffusion code
(`encoder.down.0.block.0.conv1`, …), but for q, k and v of an attention block, which are one layer
`qkv`; `numdiff convert` only changes the layout to channels last. Read top-down: the blocks,
`Encoder`, `Decoder`, then `Autoencoder`.

    encode(images) -> mean, logvar        images (B, H, W, 3) in [-1, 1], latents (B, H/f, W/f, channels)
    decode(latents) -> images
    scale(latents), unscale(latents)      to and from what a diffusion model is trained on: (z - shift) · factor

Shapes are channels-last: x is (B, H, W, C); inside attention the same memory is (B, H·W, C).
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..configuration import configured_by
from ..device import Replayed, copy_into, empty, over_batch, upload, zeros
from ..device.traffic import make_readback
from ..errors import UsageError, shown
from ..sizes import as_size, check_halvings, sides
from . import functional as F
from .flops import LayerProduct, conv_product, linear_product
from .layers import Conv2d, GroupNorm, Linear
from .model import Model
from .module import Module, Numbered
from .tensor import Tensor

EPS = 1e-6  # of every group normalisation
LOGVAR = -30.0, 20.0  # bounds of the latents' log variance, as in the public code


class ResnetBlock(Module):
    """norm, SiLU, conv; norm, SiLU, conv; plus the input, through a 1×1 convolution where the
    channels change."""

    def __init__(self, channels, outputs, groups):
        self.norm1, self.conv1 = (
            GroupNorm(channels, groups, EPS, silu=True),
            Conv2d(channels, outputs, statistics=True),
        )
        self.norm2, self.conv2 = (
            GroupNorm(outputs, groups, EPS, silu=True),
            Conv2d(outputs, outputs, statistics=True),
        )
        if outputs != channels:
            self.nin_shortcut = Conv2d(channels, outputs, kernel=1)

    def forward(self, x):
        h = self.conv1(self.norm1(x))  # (B, H, W, C_out)
        skip = self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x
        return self.conv2(self.norm2(h), residual=skip)

    def products(self, pixels):
        layers = [
            self.conv1,
            self.conv2,
            *([self.nin_shortcut] if hasattr(self, "nin_shortcut") else []),
        ]
        return [conv_product(layer, pixels) for layer in layers], pixels


class AutoencoderAttention(Module):
    """norm, qkv, attention over all pixels with one head, projection; plus the input."""

    def __init__(self, channels, groups):
        self.norm, self.qkv = (
            GroupNorm(channels, groups, EPS),
            Linear(channels, 3 * channels, matrices=3),
        )
        self.proj_out = Linear(channels, channels)

    def forward(self, x):
        B, H, W, C = x.shape
        tokens = F.reshape(x, B, H * W, C)
        h = F.reshape(self.norm(x), B, H * W, C)
        h = F.single_head_attention(h, self.qkv.weight, self.qkv.bias)  # (B, T, C)
        return F.reshape(self.proj_out(h, residual=tokens), B, H, W, C)

    def products(self, pixels):
        channels = self.proj_out.weight.shape[0]
        return [
            linear_product(self.qkv, pixels),
            LayerProduct(self.qkv.weight, 2 * 2 * pixels * pixels * channels, False),
            linear_product(self.proj_out, pixels),
        ], pixels


class AutoencoderDownsample(Module):
    """A 3×3 convolution with stride 2 whose zero padding is at the bottom and at the right alone."""

    part = "downsample"  # the name in `Level`, and in files

    def __init__(self, channels):
        self.conv = Conv2d(channels, channels, stride=2)

    def forward(self, x):
        return F.halved_conv2d(x, self.conv.weight, self.conv.bias, statistics=True)

    def products(self, pixels):
        return [conv_product(self.conv, pixels)], pixels // 4


class AutoencoderUpsample(Module):
    """Nearest neighbour ×2, then a 3×3 convolution."""

    part = "upsample"  # the name in `Level`, and in files

    def __init__(self, channels):
        self.conv = Conv2d(channels, channels)

    def forward(self, x):
        return F.upsampled_conv2d(x, self.conv.weight, self.conv.bias, statistics=True)

    def products(self, pixels):
        return [conv_product(self.conv, 4 * pixels)], 4 * pixels


class Level(Module):
    """The blocks at one resolution, each followed by attention if there is one, then a change of
    the resolution."""

    def __init__(self, channels, outputs, count, attends, groups, resample=None):
        self.block = Numbered(
            {i: ResnetBlock(channels if i == 0 else outputs, outputs, groups) for i in range(count)}
        )
        self.attn = Numbered(
            {i: AutoencoderAttention(outputs, groups) for i in range(count)} if attends else {}
        )
        if resample is not None:
            setattr(self, resample.part, resample(outputs))

    def modules(self):
        """In the order in which they run."""
        for i, block in self.block.modules.items():
            yield block
            if len(self.attn):
                yield self.attn[i]
        yield from (
            getattr(self, name) for name in ("downsample", "upsample") if hasattr(self, name)
        )


class Middle(Module):
    """Two blocks, with attention between them if `attends`."""

    def __init__(self, channels, attends, groups):
        self.block_1 = ResnetBlock(channels, channels, groups)
        if attends:
            self.attn_1 = AutoencoderAttention(channels, groups)
        self.block_2 = ResnetBlock(channels, channels, groups)

    def modules(self):
        return [self.block_1, *([self.attn_1] if hasattr(self, "attn_1") else []), self.block_2]


class Encoder(Module):
    """Images (B, H, W, in) -> (B, H/f, W/f, outputs)."""

    def __init__(self, inputs, outputs, widths, count, attention_levels, mid_attention, groups):
        channels = widths[0]
        self.conv_in, self.down = Conv2d(inputs, channels), Numbered()
        for i, width in enumerate(widths):
            last = i == len(widths) - 1
            self.down.append(
                Level(
                    channels,
                    width,
                    count,
                    i in attention_levels,
                    groups,
                    None if last else AutoencoderDownsample,
                )
            )
            channels = width
        self.mid = Middle(channels, mid_attention, groups)
        self.norm_out, self.conv_out = (
            GroupNorm(channels, groups, EPS, silu=True),
            Conv2d(channels, outputs),
        )

    def modules(self):
        for level in self.down.modules.values():
            yield from level.modules()
        yield from self.mid.modules()

    def forward(self, x):
        return run(self, x)


class Decoder(Module):
    """Latents (B, h, w, latent channels) -> (B, f·h, f·w, out). Its level i is at the encoder's
    resolution i."""

    def __init__(self, inputs, outputs, widths, count, attention_levels, mid_attention, groups):
        channels = widths[-1]
        self.conv_in = Conv2d(inputs, channels)
        self.mid, levels = Middle(channels, mid_attention, groups), {}
        for i, width in reversed(list(enumerate(widths))):
            levels[i] = Level(
                channels,
                width,
                count + 1,
                i in attention_levels,
                groups,
                AutoencoderUpsample if i else None,
            )
            channels = width
        self.up = Numbered(dict(sorted(levels.items())))
        self.norm_out, self.conv_out = (
            GroupNorm(channels, groups, EPS, silu=True),
            Conv2d(channels, outputs),
        )

    def modules(self):
        yield from self.mid.modules()
        for level in reversed(self.up.modules.values()):
            yield from level.modules()

    def forward(self, x):
        return run(self, x)


def run(side, x):
    """An `Encoder` or a `Decoder` on x."""
    h = side.conv_in(x)
    for module in side.modules():
        h = module(h)
    return side.conv_out(side.norm_out(h))


@dataclass(frozen=True, kw_only=True)
class AutoencoderConfig:
    """Options of an `Autoencoder`.

    image_size: side, or (height, width), of the images it is trained on; others work, too
    in_channels: of the images, which are float32 (B, H, W, in_channels) in [-1, 1]
    model_channels, channel_mult: level i has model_channels · channel_mult[i] channels; each but
        the last halves the size
    num_res_blocks: blocks of an encoder's level; a decoder's has one more
    latent_channels: 4 in Stable Diffusion, 16 in its third version, 32 in the autoencoder of
    LightningDiT
    attention_levels: levels with attention after each block; mid_attention: whether there is
    attention in the middle
    quant_convs: whether there are 1×1 convolutions on the side of the latents
    scaling_factor, shift_factor: a diffusion model sees (latent - shift_factor) · scaling_factor
    groups: of every group normalisation
    """

    image_size: int | Sequence[int] = 256
    in_channels: int = 3
    model_channels: int = 128
    channel_mult: Sequence[int] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    latent_channels: int = 4
    attention_levels: Sequence[int] = ()
    mid_attention: bool = True
    quant_convs: bool = True
    scaling_factor: float = 0.18215
    shift_factor: float = 0.0
    groups: int = 32


@configured_by(AutoencoderConfig)
class Autoencoder(Model):
    """AutoencoderKL: an encoder to the mean and the log variance of latents, and a decoder from
    latents.

    device: "auto", "cpu" or "cuda" (or a backend); seed: of the initial weights (None: zeros)
    """

    kind = "vae"
    num_classes = None
    largest: ClassVar = {
        "image_size": 4096,
        "in_channels": 1 << 10,
        "model_channels": 1 << 14,
        "channel_mult": 256,
        "num_res_blocks": 64,
        "latent_channels": 1 << 10,
        "groups": 1 << 14,
    }
    block_kinds = (ResnetBlock, AutoencoderAttention)

    def __init__(
        self,
        config: AutoencoderConfig | None = None,
        *,
        device: Any = "auto",
        seed: int | None = 0,
        **options: Any,
    ) -> None:
        c = self._configure(AutoencoderConfig, config, options)
        check_options(self.options)
        self.image_size = as_size(c.image_size)
        self.in_channels = self.out_channels = c.in_channels
        self.latent_channels, self.factor = c.latent_channels, 2 ** (len(c.channel_mult) - 1)
        self.scaling_factor, self.shift_factor, self.learn_sigma = (
            c.scaling_factor,
            c.shift_factor,
            False,
        )
        shared = (
            [c.model_channels * m for m in c.channel_mult],
            c.num_res_blocks,
            tuple(c.attention_levels),
            c.mid_attention,
            c.groups,
        )
        self.encoder = Encoder(c.in_channels, 2 * c.latent_channels, *shared)
        self.decoder = Decoder(c.latent_channels, c.in_channels, *shared)
        if c.quant_convs:
            self.quant_conv = Conv2d(2 * c.latent_channels, 2 * c.latent_channels, kernel=1)
            self.post_quant_conv = Conv2d(c.latent_channels, c.latent_channels, kernel=1)
        self._recorded = {}
        self._finish(device, seed)

    def moments(self, x: Tensor) -> Tensor:
        """Mean and log variance, side by side: a Tensor float32 (B, H/f, W/f, 2 · latent_channels)
        of images (B, H, W, C), whose sides must be multiples of `factor`."""
        h = self.encoder(F.cast(x, self.dtype))
        return F.cast(self.quant_conv(h) if hasattr(self, "quant_conv") else h, np.float32)

    def reconstruct(self, z: Tensor) -> Tensor:
        """Images, a Tensor float32 (B, f·h, f·w, C), of latents (B, h, w, latent_channels) that are
        not scaled."""
        h = F.cast(z, self.dtype)
        h = self.post_quant_conv(h) if hasattr(self, "post_quant_conv") else h
        return F.cast(self.decoder(h), np.float32)

    def evaluate_both(self) -> None:
        """Encode and decode zeros, for what watches which weights are read."""
        side = 8 * self.factor
        self.moments(Tensor(zeros((2, side, side, self.in_channels), np.float32, self.backend)))
        self.reconstruct(Tensor(zeros((2, 8, 8, self.latent_channels), np.float32, self.backend)))

    def encode(self, images: np.ndarray, tile: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(mean, logvar), float32 (B, H/f, W/f, latent_channels), of images float32 (B, H, W,
        in_channels) in [-1, 1].

        H and W are any numbers: rows and columns at the bottom and the right are repeated up to a
        multiple of `factor`. Latents are not scaled (`scale`). tile: side of overlapping squares,
        in pixels of an image, that are encoded one after the other and blended: for images too
        large for the memory. None: whole images
        """
        images = _checked(images, self.in_channels, "images")
        more = [(0, -n % self.factor) for n in images.shape[1:3]]
        if any(after for _, after in more):
            images = np.pad(images, ((0, 0), *more, (0, 0)), mode="edge")
        moments = self._by_tiles(self.moments, images, tile, self.factor, 1)
        mean, logvar = np.split(moments, 2, axis=3)
        return np.ascontiguousarray(mean), np.clip(logvar, *LOGVAR)

    def decode(
        self, latents: np.ndarray, size: tuple[int, int] | None = None, tile: int | None = None
    ) -> np.ndarray:
        """Images float32 (B, f·h, f·w, in_channels), about in [-1, 1], of latents float32 (B, h, w,
        latent_channels).

        size: (H, W) of the images that were encoded, to which the result is cropped; tile: as of
        `encode`
        """
        images = self._by_tiles(
            self.reconstruct,
            _checked(latents, self.latent_channels, "latents"),
            tile,
            1,
            self.factor,
        )
        return images if size is None else np.ascontiguousarray(images[:, : size[0], : size[1]])

    def scale(self, latents: np.ndarray) -> np.ndarray:
        """What a diffusion model is trained on: (latents - shift_factor) · scaling_factor."""
        return (latents - np.float32(self.shift_factor)) * np.float32(self.scaling_factor)

    def unscale(self, latents: np.ndarray) -> np.ndarray:
        """The inverse of `scale`."""
        return latents / np.float32(self.scaling_factor) + np.float32(self.shift_factor)

    def _by_tiles(self, function, x, tile, down, up):
        """function(x), x (B, H, W, C), whose result is `up` / `down` times as large, in tiles of
        `tile` image pixels.

        Neighbouring tiles overlap by a quarter; there the result is their mean, weighed by the
        distance to the edge.
        """
        if tile is not None and (tile < 8 * self.factor or tile % self.factor):
            raise UsageError(
                f"tile {tile} must be a multiple of {self.factor}, and at least {8 * self.factor}."
            )
        side = None if tile is None else tile // self.factor  # in latents
        rows, columns = (n // down for n in x.shape[1:3])
        if side is None or side >= max(rows, columns):
            return self._evaluate(function, x)
        total = weights = None
        for top in _starts(rows, side):
            for left in _starts(columns, side):
                height, width = min(side, rows), min(side, columns)
                y = self._evaluate(
                    function,
                    np.ascontiguousarray(
                        x[
                            :,
                            down * top : down * (top + height),
                            down * left : down * (left + width),
                        ]
                    ),
                )
                if total is None:
                    total = np.zeros((len(x), up * rows, up * columns, y.shape[3]), np.float32)
                    weights = np.zeros((up * rows, up * columns, 1), np.float32)
                ramp = _ramp(up * height)[:, None, None] * _ramp(up * width)[:, None]
                place = slice(up * top, up * (top + height)), slice(up * left, up * (left + width))
                total[(slice(None), *place)] += ramp * y
                weights[place] += ramp
        return total / weights

    def _evaluate(self, function, x):
        """NumPy in and out. A GPU records the first evaluation of a shape, and replays it from then
        on."""
        with self.arithmetic():
            if not hasattr(self.backend, "capture"):
                return function(Tensor(upload(x, self.backend))).numpy()
            with self.backend.turn:
                key = function.__name__, x.shape, self.place()
                if key not in self._recorded:
                    # the newest shape alone
                    self._recorded = {key: _Recorded(function, x, self.backend)}
                return self._recorded[key](x)

    def __getstate__(self):
        return {**super().__getstate__(), "_recorded": {}}

    def products(self) -> list[LayerProduct]:
        """Of one image of `image_size` through encoder and decoder."""
        pixels = math.prod(sides(self.image_size))
        small = pixels // self.factor**2
        found = [conv_product(self.encoder.conv_in, pixels)]
        for side in (self.encoder, self.decoder):
            if side is self.decoder:
                found.append(conv_product(side.conv_in, pixels))
            for module in side.modules():
                more, pixels = module.products(pixels)
                found += more
            found.append(conv_product(side.conv_out, pixels))
        for name in ("quant_conv", "post_quant_conv"):
            if hasattr(self, name):
                found.append(conv_product(getattr(self, name), small))
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        return [product._replace(weight=names[id(product.weight)]) for product in found]


class _Recorded:
    """A function of one tensor whose launches are recorded, for inputs of one shape. Copies go by
    way of page-locked memory, which a GPU reads and writes faster."""

    def __init__(self, function, x, backend):
        self.function, self.input, self.output = function, empty(x.shape, x.dtype, backend), None
        self.host_input, self.readback = backend.pinned(x.shape, x.dtype), None
        self._replayed = Replayed(self._launch, backend)

    def _launch(self):
        y = self.function(Tensor(self.input)).data
        if self.output is None:
            self.output = empty(y.shape, y.dtype, like=y)
        copy_into(self.output, y)

    def __call__(self, x):
        _copy(x, self.host_input)
        copy_into(self.input, self.host_input)
        self._replayed()
        if self.readback is None:
            self.readback = make_readback([self.output])
        self.readback.begin()
        return self.readback.values()[0]


def _copy(source, target):
    """Copy an array of the host in several threads."""

    def part(rows):
        target[rows] = source[rows]

    over_batch(part, len(source), source.size)


def _starts(count, side):
    """Where tiles of `side` begin that cover `count`, with overlaps of at least a quarter of a
    tile."""
    if side >= count:
        return [0]
    number = 1 + -(-(count - side) // (side - side // 4))
    return [round(i * (count - side) / (number - 1)) for i in range(number)]


def _ramp(count):
    """float32 (count,): weights of a tile's rows, which rise from its edges over a quarter of it."""
    distance = np.minimum(np.arange(count), np.arange(count)[::-1]) + np.float32(0.5)
    return np.minimum(distance / max(1, count // 4), 1).astype(np.float32)


def _checked(x, channels, what):
    """x as a contiguous float32 array (B, H, W, channels); a `UsageError` for anything else."""
    with contextlib.suppress(TypeError, ValueError):
        if not np.iscomplexobj(x):
            x = np.ascontiguousarray(x, np.float32)
            if x.ndim == 4 and x.shape[3] == channels and 0 not in x.shape:
                return x
    raise UsageError(
        f"{what} must be an array of numbers (B, H, W, {channels}), and not {shown(x)}."
    )


def check_options(options):
    """Raise a `UsageError` for options with which no autoencoder can be laid out."""
    for name in (
        "image_size",
        "in_channels",
        "model_channels",
        "num_res_blocks",
        "latent_channels",
        "groups",
    ):
        if min(sides(options[name])) < 1:
            raise UsageError(f"{name} {options[name]} must be at least 1.")
    mult = options["channel_mult"]
    if not mult or min(mult) < 1:
        raise UsageError(
            f"channel_mult {tuple(mult)} must be one or more whole numbers of at least 1."
        )
    check_halvings(options["image_size"], len(mult) - 1)
    width, groups = options["model_channels"], options["groups"]
    for m in mult:
        if width * m % groups:
            raise UsageError(
                f"{width * m} channels (model_channels {width}) do not divide into {groups} groups: use a "
                f"multiple of {groups}."
            )
    if any(not 0 <= level < len(mult) for level in options["attention_levels"]):
        raise UsageError(
            f"attention_levels {tuple(options['attention_levels'])} must be levels from 0 to "
            f"{len(mult) - 1}."
        )
    if options["scaling_factor"] == 0:
        raise UsageError("scaling_factor must not be 0: a diffusion model would see no latents.")
