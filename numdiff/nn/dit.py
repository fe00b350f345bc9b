"""The diffusion transformer of "Scalable Diffusion Models with Transformers" (Peebles and Xie 2023, arXiv:2212.09748).

The mathematics, the parameter names and the initial values of the public DiT implementation, so that its weights load
as they are. Read top-down: the table of sizes, the parts, then `DiT.__init__` and `DiT.forward`.

Shapes are channels-last: x is (B, H, W, C); inside, an image is T tokens of D channels, (B, T, D).
"""
import math

import numpy as np

from ..device import upload
from ..errors import UsageError
from . import functional as F
from .flops import dit_forward_flops
from .layers import Embedding, Linear, gaussian, xavier
from .model import Model, constructor_options
from .module import Module, Numbered

SIZES = {  # what the letters stand for
    "XL": {"depth": 28, "hidden_size": 1152, "num_heads": 16},
    "L": {"depth": 24, "hidden_size": 1024, "num_heads": 16},
    "B": {"depth": 12, "hidden_size": 768, "num_heads": 12},
    "S": {"depth": 12, "hidden_size": 384, "num_heads": 6},
}
MODELS = {f"DiT-{letter}/{p}": {**size, "patch_size": p} for letter, size in SIZES.items() for p in (2, 4, 8)}
MODELS["DiT-Tiny"] = {"depth": 6, "hidden_size": 192, "num_heads": 6, "patch_size": 4}  # numdiff's own, for laptops
FREQUENCIES = 256  # channels of the timestep's sinusoids, whatever the model's width
EPS = 1e-6  # of every LayerNorm


class PatchEmbed(Module):
    """Squares of pixels to tokens: a convolution whose kernel and stride are the patch; weight (D, p, p, C)."""

    def __init__(self, patch, channels, hidden):
        self.proj = Linear((patch, patch, channels), hidden, initial=xavier)
        self.patch = patch

    def forward(self, x):
        return self.proj(F.patchify(x, self.patch))  # (B, T, D)


class TimestepEmbedder(Module):
    """256 sinusoids, linear, SiLU, linear."""

    def __init__(self, hidden):
        self.mlp = Numbered({0: Linear(FREQUENCIES, hidden, initial=gaussian(0.02)),
                             2: Linear(hidden, hidden, initial=gaussian(0.02))})

    def forward(self, t):
        return self.mlp[2](F.silu(self.mlp[0](F.timestep_embedding(t, FREQUENCIES))))  # (B, D)


class LabelEmbedder(Module):
    """A row for each class, and with class dropout one more, for the null class."""

    def __init__(self, classes, hidden, dropout):
        self.embedding_table = Embedding(classes + (dropout > 0), hidden, gaussian(0.02))
        self.classes, self.dropout = classes, dropout

    def forward(self, labels, randomness=None):
        return self.embedding_table(F.class_dropout(labels, self.dropout, self.classes, randomness))  # (B, D)


class Attention(Module):
    def __init__(self, hidden, heads):
        self.qkv = Linear(hidden, 3 * hidden, initial=xavier)
        self.proj = Linear(hidden, hidden, initial=xavier)
        self.heads = heads

    def forward(self, x):
        return self.proj(F.attention(self.qkv(x), self.heads, "new"))  # (B, T, D)


class Mlp(Module):
    def __init__(self, hidden, inner):
        self.fc1 = Linear(hidden, inner, initial=xavier)
        self.fc2 = Linear(inner, hidden, initial=xavier)

    def forward(self, x):
        return F.mlp(x, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)


class Block(Module):
    """Attention, then an MLP, each normalised, shifted, scaled and gated by the conditioning (adaLN-Zero)."""

    def __init__(self, hidden, heads, mlp_ratio):
        self.attn = Attention(hidden, heads)
        self.mlp = Mlp(hidden, int(hidden * mlp_ratio))
        self.adaLN_modulation = Numbered({1: Linear(hidden, 6 * hidden, zero=True)})  # 0 is the SiLU, done once

    def forward(self, x, y, modulation, following):
        """From tokens x and their norm y to both after this block; following: shift and scale of that last norm. A gate
        and the norm that reads its result are one operation, so the first norm of a block is computed before it.
        """
        _, _, gate, shift, scale, gate_mlp = modulation
        x, y = F.gate_adaln(x, self.attn(y), gate, shift, scale, EPS)
        return F.gate_adaln(x, self.mlp(y), gate_mlp, *following, EPS)


class FinalLayer(Module):
    def __init__(self, hidden, outputs):
        self.linear = Linear(hidden, outputs, zero=True)
        self.adaLN_modulation = Numbered({1: Linear(hidden, 2 * hidden, zero=True)})

    def forward(self, y):
        return self.linear(y)  # (B, T, patch² · out_channels)


class DiT(Model):
    """Predicts noise, velocity or x_0 from x_t, t and a class; with learn_sigma also the variance.

    image_size, in_channels: of x, which is float32 (B, image_size, image_size, in_channels): pixels or latents
    patch_size: side of a token in pixels; hidden_size: channels of a token; depth: blocks; num_heads: of attention
    mlp_ratio: width of the MLP relative to hidden_size; num_classes: None builds a model without classes
    class_dropout: share of the images that lose their class in training; above 0 there is a null class, num_classes
    learn_sigma: the output has twice as many channels; the second half gives the variance (see
        kernels/diffusion/vlb.py)
    device: "auto", "cpu" or "cuda" (or a backend); seed: of the initial weights (None: zeros)
    """

    kind = "dit"
    block_kinds = (Block,)

    def __init__(self, image_size: int = 32, in_channels: int = 4, patch_size: int = 2, hidden_size: int = 1152,
                 depth: int = 28, num_heads: int = 16, mlp_ratio: float = 4.0, num_classes: int | None = 1000,
                 class_dropout: float = 0.1, learn_sigma: bool = True, device="auto", seed: int | None = 0):
        self.options = constructor_options(locals())
        check_options(self.options)
        self.image_size, self.in_channels, self.patch_size = image_size, in_channels, patch_size
        self.hidden_size, self.num_classes, self.learn_sigma = hidden_size, num_classes, learn_sigma
        self.out_channels = in_channels * (2 if learn_sigma else 1)
        self.null_class = num_classes if num_classes is not None and class_dropout > 0 else None

        self.x_embedder = PatchEmbed(patch_size, in_channels, hidden_size)
        self.t_embedder = TimestepEmbedder(hidden_size)
        if num_classes is not None:
            self.y_embedder = LabelEmbedder(num_classes, hidden_size, class_dropout)
        self.blocks = Numbered({i: Block(hidden_size, num_heads, mlp_ratio) for i in range(depth)})
        self.final_layer = FinalLayer(hidden_size, patch_size * patch_size * self.out_channels)
        self._finish(device, seed, fixed=(image_size // patch_size) ** 2 * hidden_size)
        positions = position_table(hidden_size, image_size // patch_size)
        self.pos_embed = upload(positions, self.backend)  # (T, D), never trained

    def conditioning(self, t, y=None, randomness=None):
        """What the blocks take from timestep and class, whatever the image: Tensors (B, 6 D) of each block's shift,
        scale and gate of attention, then of the MLP, and (B, 2 D) of the last layer's shift and scale."""
        c = self.t_embedder(t)  # (B, D)
        if y is not None:
            c = F.add(c, self.y_embedder(y, randomness))
        c = F.cast(F.silu(c), self.dtype)  # the first step of every adaLN_modulation
        return [layer.adaLN_modulation[1](c) for layer in (*self.blocks.modules.values(), self.final_layer)]

    def conditioning_columns(self):
        """(columns of each of the arrays that `conditioning` gives, their dtype)."""
        layers = (*self.blocks.modules.values(), self.final_layer)
        return [layer.adaLN_modulation[1].weight.shape[0] for layer in layers], np.dtype(self.dtype)

    def forward(self, x, t, y=None, randomness=None, conditioning=None):
        """x: Tensor float32 (B, H, W, C); t: array int32 or float32 (B,); y: array int32 (B,) if the model has classes.

        randomness: counts the class dropout of a training step; None: none
        conditioning: of these t and y, where it is known (see `conditioning`)
        Returns a Tensor (B, H, W, out_channels).
        """
        self.check_inputs(t, y)
        tokens = F.add_constant(self.x_embedder(F.cast(x, self.dtype)), self.pos_embed)  # (B, T, D)
        blocks = self.blocks.modules.values()
        if conditioning is None:
            conditioning = self.conditioning(t, y, randomness)
        modulations = [F.columns(c, 6) for c in conditioning[:-1]] + [F.columns(conditioning[-1], 2)]
        y = F.adaln(tokens, *modulations[0][:2], EPS)
        for block, own, following in zip(blocks, modulations, modulations[1:], strict=False):
            tokens, y = block(tokens, y, own, following[:2])
        tokens = F.cast(self.final_layer(y), np.float32)
        return F.unpatchify(tokens, self.patch_size, self.image_size, self.image_size)

    def forward_flops(self):
        """FLOPs of one image: a multiply-add counts as two."""
        return dit_forward_flops(self.options)


def position_table(channels, grid):
    """The fixed position embedding of grid × grid tokens, float32 (T, channels): sines and cosines of column, then of
    row.

    Each coordinate p has channels / 2 numbers: sin(p·ω_k) for all k, then cos(p·ω_k), ω_k = 10000^(-4k / channels).
    The column comes first, as in the public implementation. Computed in float64.
    """
    omega = 10000.0 ** (-np.arange(channels // 4) / (channels // 4))
    angles = np.arange(grid)[:, None] * omega
    line = np.concatenate((np.sin(angles), np.cos(angles)), axis=1)  # (grid, channels / 2)
    rows, columns = np.divmod(np.arange(grid * grid), grid)
    return np.concatenate((line[columns], line[rows]), axis=1).astype(np.float32)


def dit_shapes(options):
    """{name: shape} of every parameter of a DiT with these options, PyTorch's shapes in PyTorch's order."""
    D, patch, channels = options["hidden_size"], options["patch_size"], options["in_channels"]
    inner, tokens = int(D * options["mlp_ratio"]), (options["image_size"] // patch) ** 2
    shapes = {"pos_embed": (1, tokens, D)}

    def layer(name, *shape):
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[:1]

    layer("x_embedder.proj", D, channels, patch, patch)
    layer("t_embedder.mlp.0", D, FREQUENCIES)
    layer("t_embedder.mlp.2", D, D)
    if options["num_classes"] is not None:
        shapes["y_embedder.embedding_table.weight"] = (options["num_classes"] + (options["class_dropout"] > 0), D)
    for i in range(options["depth"]):
        layer(f"blocks.{i}.attn.qkv", 3 * D, D)
        layer(f"blocks.{i}.attn.proj", D, D)
        layer(f"blocks.{i}.mlp.fc1", inner, D)
        layer(f"blocks.{i}.mlp.fc2", D, inner)
        layer(f"blocks.{i}.adaLN_modulation.1", 6 * D, D)
    layer("final_layer.linear", patch * patch * channels * (2 if options["learn_sigma"] else 1), D)
    layer("final_layer.adaLN_modulation.1", 2 * D, D)
    return shapes


def dit_parameter_counts(options):
    """(number of all parameters, fixed positions included; number of those that are trained)."""
    shapes = dit_shapes(options)
    count = sum(map(math.prod, shapes.values()))
    return count, count - math.prod(shapes["pos_embed"])


def check_options(options):
    """Raise a `UsageError` for options with which no DiT can be laid out."""
    size, patch = options["image_size"], options["patch_size"]
    hidden, heads = options["hidden_size"], options["num_heads"]
    if min(size, patch, hidden, heads, options["depth"], options["in_channels"]) < 1:
        raise UsageError("image_size, in_channels, patch_size, hidden_size, depth and num_heads must be at least 1.")
    if size % patch:
        fits = [p for p in (2, 4, 8) if size % p == 0]
        advice = f"a patch_size of {' or '.join(map(str, fits))}, or an" if fits else "an"
        raise UsageError(f"image_size {size} is not divisible by patch_size {patch}: use {advice} image_size of "
                         f"{max(patch, round(size / patch) * patch)}.")
    if hidden % heads:
        raise UsageError(f"hidden_size {hidden} does not divide into {heads} heads: change num_heads.")
    if hidden % 4:
        raise UsageError(f"hidden_size {hidden} must be a multiple of 4: sines and cosines of row and column share it.")
    if int(hidden * options["mlp_ratio"]) < 1:
        raise UsageError(f"mlp_ratio {options['mlp_ratio']} leaves the MLP without channels: use a larger one.")
    if options["num_classes"] is not None and options["num_classes"] < 1:
        raise UsageError(f"num_classes {options['num_classes']} must be at least 1, or None for a model without "
                         "classes.")
    if not 0 <= options["class_dropout"] < 1:
        raise UsageError(f"class_dropout {options['class_dropout']} must be at least 0 and below 1.")
