"""The diffusion transformer of "Scalable Diffusion Models with Transformers" (Peebles and Xie 2023,
arXiv:2212.09748), with the block of "Reconstruction vs. Generation" (Yao, Yang and Wang 2025,
arXiv:2501.01423: LightningDiT) as options.

The mathematics, the parameter names and the initial values of the public DiT and LightningDiT
implementations, so that their weights load as they are. Read top-down: the tables of sizes, the
parts, then `DiT.__init__` and `DiT.forward`.

    option         DiT                   the other choice
    norm           "layer": LayerNorm    "rms": RMSNorm with a weight (Zhang and Sennrich 2019, arXiv:1910.07467)
    qk_norm        False                 RMSNorm of each head's q and k (Henry et al. 2020, arXiv:2010.04245)
    rope           False                 q and k rotated by row and column (Su et al. 2021, arXiv:2104.09864), rotary.py
    mlp            "gelu"                "swiglu", two thirds as wide (Shazeer 2020, arXiv:2002.05202)
    shift          True                  False: a block's norms are scaled, but not shifted, by the conditioning
    attention      "full"                that of an extension, such as "sla", sparse-linear attention, which reads
                                         sla_topk and sla_linear (extras/sla)

Shapes are channels-last: x is (B, H, W, C); inside, an image is T tokens of D channels, (B, T, D).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .. import extensions
from ..configuration import configured_by
from ..device import AnyArray, upload
from ..dtypes import is_half
from ..errors import UsageError
from ..settings import say
from ..sizes import as_size, is_multiple, nearest_multiple, scaled_down, sides
from . import functional as F
from .flops import LayerProduct, dit_products, mlp_width, token_count
from .layers import Embedding, Linear, constant, gaussian, xavier
from .model import Model
from .module import Module, Numbered
from .parameter import Parameter
from .rotary import rotation_table
from .tensor import Tensor

SIZES = {  # what the letters stand for
    "XL": {"depth": 28, "hidden_size": 1152, "num_heads": 16},
    "L": {"depth": 24, "hidden_size": 1024, "num_heads": 16},
    "B": {"depth": 12, "hidden_size": 768, "num_heads": 12},
    "S": {"depth": 12, "hidden_size": 384, "num_heads": 6},
}
MODELS = {
    f"DiT-{letter}/{p}": {**size, "patch_size": p}
    for letter, size in SIZES.items()
    for p in (2, 4, 8)
}
PLAIN = {
    "norm": "layer",
    "qk_norm": False,
    "rope": False,
    "mlp": "gelu",
    "shift": True,
    "attention": "full",
    "sla_topk": 0.2,
    "sla_linear": "rest",
}  # the block of 2022
# of these, what no published model has
UNPUBLISHED = "attention", *extensions.entries("dit_settings")
LIGHTNING = {**PLAIN, "norm": "rms", "rope": True, "mlp": "swiglu"}  # as it was published
MODELS |= {
    f"LightningDiT-{letter}/{p}": {**size, "patch_size": p, **LIGHTNING}
    for letter, size in SIZES.items()
    for p in (1, 2)
}
# numdiff's own, for laptops
MODELS |= {
    "DiT-Tiny": {"depth": 6, "hidden_size": 192, "num_heads": 6, "patch_size": 4},
    "LightningDiT-Tiny/2": {
        "depth": 6,
        "hidden_size": 128,
        "num_heads": 4,
        "patch_size": 2,
        **LIGHTNING,
        "qk_norm": True,
    },
    "LightningDiT-Small/4": {
        **SIZES["S"],
        "patch_size": 4,
        **LIGHTNING,
        "qk_norm": True,
        "shift": False,
    },
}
FREQUENCIES = 256  # channels of the timestep's sinusoids, whatever the model's width
EPS = 1e-6  # of every norm
NORMS, MLPS = ("layer", "rms"), ("gelu", "swiglu")
# the width of a SwiGLU is rounded up to a multiple of this: kernels read 16 bytes of float16 at a
# time
WIDTH = 8


class PatchEmbed(Module):
    """Squares of pixels to tokens: a convolution whose kernel and stride are the patch; weight (D,
    p, p, C)."""

    def __init__(self, patch, channels, hidden):
        self.proj = Linear((patch, patch, channels), hidden, initial=xavier)
        self.patch = patch

    def forward(self, x):
        return self.proj(F.patchify(x, self.patch))  # (B, T, D)


class TimestepEmbedder(Module):
    """256 sinusoids, linear, SiLU, linear."""

    def __init__(self, hidden):
        self.mlp = Numbered(
            {
                0: Linear(FREQUENCIES, hidden, initial=gaussian(0.02)),
                2: Linear(hidden, hidden, initial=gaussian(0.02)),
            }
        )

    def forward(self, t):
        return self.mlp[2](F.silu(self.mlp[0](F.timestep_embedding(t, FREQUENCIES))))  # (B, D)


class LabelEmbedder(Module):
    """A row for each class, and with class dropout one more, for the null class."""

    def __init__(self, classes, hidden, dropout):
        self.embedding_table = Embedding(classes + (dropout > 0), hidden, gaussian(0.02))
        self.classes, self.dropout = classes, dropout

    def forward(self, labels, randomness=None):
        # (B, D)
        return self.embedding_table(F.class_dropout(labels, self.dropout, self.classes, randomness))


class ModulatedNorm(Module):
    """How tokens are normalised before the conditioning scales and shifts them: one operation with
    that, and in most places with the gate before it, too. norm: "layer", without a weight, or
    "rms", with one (D,)."""

    def __init__(self, hidden, norm):
        self.weight = Parameter((hidden,), constant(1)) if norm == "rms" else None
        self.norm = norm

    def forward(self, x, shift, scale):
        return F.adaln(x, shift, scale, EPS, self.weight, self.norm)

    def after_gate(self, x, h, gate, shift, scale, reader=None, writer=None, keeps_x=False):
        """x + gate · h, and that normalised, scaled and shifted; reader, writer, keeps_x: as
        `F.gate_adaln` takes them."""
        return F.gate_adaln(
            x, h, gate, shift, scale, EPS, self.weight, self.norm, writer, reader, keeps_x
        )


class HeadNorm(Module):
    """The weight of an RMSNorm over the channels of each head, which `F.qk_norm_rope` computes."""

    def __init__(self, head_size):
        self.weight = Parameter((head_size,), constant(1))


class Attention(Module):
    """Attention to all keys. That of an extension is a subclass; see `attention_kind`."""

    ends_in = "proj"

    def __init__(self, hidden, heads, qk_norm=False):
        self.qkv = Linear(hidden, 3 * hidden, initial=xavier, matrices=3)
        if qk_norm:
            self.q_norm, self.k_norm = HeadNorm(hidden // heads), HeadNorm(hidden // heads)
        self.proj = Linear(hidden, hidden, initial=xavier)
        self.heads, self.qk_norm = heads, qk_norm

    def forward(self, x, rotation=None, residual=None, gate=None):
        qkv = self.qkv(x)  # (B, T, 3 D)
        if self.qk_norm or rotation is not None:
            weights = (self.q_norm.weight, self.k_norm.weight) if self.qk_norm else (None, None)
            qkv = F.qk_norm_rope(qkv, self.heads, *weights, rotation, EPS)
        return self.proj(self.attend(qkv), residual, gate)  # (B, T, D)

    def attend(self, qkv):
        """From packed q, k and v (B, T, 3 D) to (B, T, D)."""
        return F.attention(qkv, self.heads, "new")


class Mlp(Module):
    ends_in = "fc2"

    def __init__(self, hidden, inner):
        self.fc1 = Linear(hidden, inner, initial=xavier)
        self.fc2 = Linear(inner, hidden, initial=xavier)

    def forward(self, x, residual=None, gate=None):
        return F.mlp(
            x, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias, residual, gate
        )

    first, last = property(lambda self: self.fc1), property(lambda self: self.fc2)


class SwiGLU(Module):
    """w3 · (silu(w1 · x) ⊙ w2 · x), each with a bias; w12 holds w1 above w2.

    Where 8 does not divide `inner`, both halves of w12 and the columns of w3 are filled up with
    zeros. There the inside is silu(0) · 0, so all gradients are 0, and AdamW, Muon, decay and
    average leave what is zero zero.
    """

    ends_in = "w3"

    def __init__(self, hidden, inner):
        width = padded_width(inner)
        more = width - inner

        self.w12 = Linear(
            hidden,
            2 * width,
            matrices=2,
            initial=lambda g, _: padded_rows(xavier(g, (2 * inner, hidden)), inner),
        )
        self.w3 = Linear(
            width, hidden, initial=lambda g, _: padded_columns(xavier(g, (hidden, inner)), inner)
        )
        for parameter, zeros in (
            (self.w12.weight, 2 * more * hidden),
            (self.w12.bias, 2 * more),
            (self.w3.weight, more * hidden),
        ):
            parameter.padding = zeros

    def forward(self, x, residual=None, gate=None):
        return F.swiglu_mlp(
            x, self.w12.weight, self.w12.bias, self.w3.weight, self.w3.bias, residual, gate
        )

    first, last = property(lambda self: self.w12), property(lambda self: self.w3)


class DiTBlock(Module):
    """Attention, then an MLP, each normalised, shifted, scaled and gated by the conditioning
    (adaLN-Zero)."""

    def __init__(
        self,
        hidden,
        heads,
        mlp_ratio,
        norm="layer",
        qk_norm=False,
        mlp="gelu",
        shift=True,
        attention=Attention,
    ):
        self.norm1, self.norm2 = ModulatedNorm(hidden, norm), ModulatedNorm(hidden, norm)
        self.attn = attention(hidden, heads, qk_norm)
        self.mlp = (SwiGLU if mlp == "swiglu" else Mlp)(hidden, mlp_width(hidden, mlp_ratio, mlp))
        rows = (6 if shift else 4) * hidden
        # 0 is the SiLU, done once; no matrix for Muon: it sees one row an image, and learnt slower
        # with it
        self.adaLN_modulation = Numbered({1: Linear(hidden, rows, zero=True, matrices=0)})
        self.shift = shift

    def modulation(self, columns):
        """Shift, scale and gate of attention, then of the MLP, from the columns of the
        conditioning; of four none is a shift: None."""
        if self.shift:
            return columns
        scale, gate, scale_mlp, gate_mlp = columns
        return None, scale, gate, None, scale_mlp, gate_mlp

    def forward_reference(self, x, modulation, rotation=None):
        """The block as the paper has it (figure 3, adaLN-Zero): tokens x (B, T, D) after it.
        modulation: as the method of that name returns it. `forward` computes the same."""
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = modulation
        x = F.gate(x, self.attn(self.norm1(x, shift, scale), rotation), gate)
        return F.gate(x, self.mlp(self.norm2(x, shift_mlp, scale_mlp)), gate_mlp)

    def forward(self, x, y, modulation, following, rotation=None):
        """`forward_reference` in fewer kernels: from tokens x and their first norm y to the tokens
        after this block and the norm that follows it.

        following: that norm, its shift and scale, and the weight of the layer that reads it, or
        None. A gate and the norm that reads its result are one operation, so the first norm of a
        block is computed before it. Without a tape the product before a gate may take it in, and
        the norm is separate: less to write and read.

        For the backward the tokens between blocks are kept, of which those between the branches are
        made again.
        """
        with F.together(
            y,
            self.attn.qkv.weight,
            self.attn.proj.weight,
            self.mlp.first.weight,
            self.mlp.last.weight,
        ):
            return self._forward(x, y, modulation, following, rotation)

    def _forward(self, x, y, modulation, following, rotation):
        _, _, gate, shift, scale, gate_mlp = modulation
        norm, *theirs, reader = following
        if F.gates_products(x, gate, self.attn.proj.weight, self.mlp.last.weight):
            x = self.attn(y, rotation, x, gate)
            x = self.mlp(self.norm2(x, shift, scale), x, gate_mlp)
            return x, norm(x, *theirs)
        x, y = self.norm2.after_gate(
            x,
            self.attn(y, rotation),
            gate,
            shift,
            scale,
            self.mlp.first.weight,
            self.attn.proj.weight,
            keeps_x=True,
        )
        return norm.after_gate(x, self.mlp(y), gate_mlp, *theirs, reader, self.mlp.last.weight)


class FinalLayer(Module):
    def __init__(self, hidden, outputs, norm="layer"):
        self.norm_final = ModulatedNorm(hidden, norm)
        self.linear = Linear(hidden, outputs, zero=True)
        self.adaLN_modulation = Numbered({1: Linear(hidden, 2 * hidden, zero=True)})

    def forward(self, y):
        return self.linear(y)  # (B, T, patch² · out_channels)


@dataclass(frozen=True, kw_only=True)
class DiTConfig:
    """Options of a `DiT`.

    image_size: side of the images in pixels, or (height, width); in_channels: of x, which is float32
        (B, height, width, in_channels): pixels or latents
    patch_size: side of a token in pixels; hidden_size: channels of a token; depth: blocks;
    num_heads: of attention
    mlp_ratio: width of the MLP relative to hidden_size; num_classes: None builds a model without
    classes
    class_dropout: share of the images that lose their class in training; above 0 there is a null
    class, num_classes
    learn_sigma: the output has twice as many channels; the second half gives the variance (see
        extras/learned_variance/vlb.py)
    norm, qk_norm, rope, mlp, shift, attention, sla_topk, sla_linear: the block, see the head of
    this file
    """

    image_size: int | Sequence[int] = 32
    in_channels: int = 4
    patch_size: int = 2
    hidden_size: int = 1152
    depth: int = 28
    num_heads: int = 16
    mlp_ratio: float = 4.0
    num_classes: int | None = 1000
    class_dropout: float = 0.1
    learn_sigma: bool = True
    norm: str = "layer"
    qk_norm: bool = False
    rope: bool = False
    mlp: str = "gelu"
    shift: bool = True
    attention: str = "full"
    sla_topk: float = 0.2
    sla_linear: str = "rest"


@configured_by(DiTConfig)
class DiT(Model):
    """Predicts noise, velocity or x_0 from x_t, t and a class; with learn_sigma also the variance.

    device: "auto", "cpu" or "cuda" (or a backend); seed: of the initial weights (None: zeros)
    """

    kind = "dit"
    # four H200s, XL/2: 101 % of four times one, 91 % after it (distributed/README.md)
    exchange_beside = "copies"
    largest: ClassVar = {
        "image_size": 4096,
        "patch_size": 4096,
        "in_channels": 1 << 14,
        "hidden_size": 1 << 14,
        "depth": 1024,
        "num_heads": 1 << 14,
        "mlp_ratio": 1024,
        "num_classes": 1 << 24,
    }
    block_kinds = (DiTBlock,)
    part_kinds = {"attention": (Attention,), "mlp": (Mlp, SwiGLU)}
    float8_layers = "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "mlp.w12", "mlp.w3"

    def __init__(
        self,
        config: DiTConfig | None = None,
        *,
        device: Any = "auto",
        seed: int | None = 0,
        **options: Any,
    ) -> None:
        c = self._configure(DiTConfig, config, options)
        check_options(self.options)
        self.image_size, self.in_channels = as_size(c.image_size), c.in_channels
        self.patch_size = c.patch_size
        self.hidden_size, self.num_classes, self.learn_sigma = (
            c.hidden_size,
            c.num_classes,
            c.learn_sigma,
        )
        self.out_channels = c.in_channels * (2 if c.learn_sigma else 1)
        self.null_class = (
            c.num_classes if c.num_classes is not None and c.class_dropout > 0 else None
        )

        self.x_embedder = PatchEmbed(c.patch_size, c.in_channels, c.hidden_size)
        self.t_embedder = TimestepEmbedder(c.hidden_size)
        if c.num_classes is not None:
            self.y_embedder = LabelEmbedder(c.num_classes, c.hidden_size, c.class_dropout)
        kind = Attention if c.attention == "full" else attention_kind(c.attention).of(self.options)
        self.blocks = Numbered(
            {
                i: DiTBlock(
                    c.hidden_size, c.num_heads, c.mlp_ratio, c.norm, c.qk_norm, c.mlp, c.shift, kind
                )
                for i in range(c.depth)
            }
        )
        self.final_layer = FinalLayer(
            c.hidden_size, c.patch_size * c.patch_size * self.out_channels, c.norm
        )
        grid = sides(scaled_down(c.image_size, c.patch_size))
        self._finish(device, seed, fixed=math.prod(grid) * c.hidden_size)
        # (T, D), never trained
        self.pos_embed = upload(position_table(c.hidden_size, grid), self.backend)
        self.rotation = (
            upload(rotation_table(c.hidden_size // c.num_heads, grid), self.backend)
            if c.rope
            else None
        )

    def conditioning(
        self, t: AnyArray, y: AnyArray | None = None, randomness: Any = None
    ) -> Iterator[Tensor]:
        """The blocks' inputs from timestep and class, independent of the image: Tensors (B, 6 D) of
        each block's shift, scale and gate of attention, then of the MLP (without shifts (B, 4 D)),
        and (B, 2 D) of the last layer's shift and scale. Each is computed when it is requested;
        those of `_stacks` come side by side in one Tensor."""
        c = self._conditioned(t, y, randomness)
        for layers in self._stacks():
            yield F.linear_stack(c, parameters_of(layers)) if len(layers) > 1 else layers[0](c)

    def _conditioned(self, t, y, randomness):
        """What every adaLN_modulation's layer takes, (B, D)."""
        c = self.t_embedder(t)
        if y is not None:
            c = F.add(c, self.y_embedder(y, randomness))
        return F.cast(F.silu(c), self.dtype)

    def _stacks(self):
        """The layers of the conditioning, in lists that a launch computes: those of all blocks,
        then the last layer's.
        """
        *layers, last = (
            part.adaLN_modulation[1] for part in (*self.blocks.modules.values(), self.final_layer)
        )
        like = last.weight.half if is_half(self.dtype) else last.weight.data
        return (
            [layers, [last]]
            if F.stacks(like, parameters_of(layers))
            else [[layer] for layer in (*layers, last)]
        )

    def conditioning_columns(self) -> tuple[list[int], np.dtype]:
        """(columns of each of the arrays that `conditioning` gives, their dtype)."""
        return [
            sum(layer.weight.shape[0] for layer in layers) for layers in self._stacks()
        ], np.dtype(self.dtype)

    def _columns(self, conditioning, t, y, randomness):
        """The columns of each block's conditioning, then of the last layer's, when they are
        requested."""
        each = 6 if self.options["shift"] else 4
        if conditioning is None and self.parameters.overlapped:
            given = self._columns_by_runs(each, t, y, randomness)
        else:
            given = self.conditioning(t, y, randomness) if conditioning is None else conditioning
            given = (F.columns(part, part.shape[1] // self.hidden_size) for part in given)
        for parts in given:
            for first in range(0, len(parts), each):
                yield parts[first : first + each]

    def _columns_by_runs(self, each, t, y, randomness):
        """Those of 2, 2, 4, 8, … blocks at a time: their layers' gradients leave for other ranks
        when the block before them has been played back (extras/transports/overlap.py), so that in the end
        those of two blocks are left."""
        c = self._conditioned(t, y, randomness)
        for layers in self._stacks():
            if len(layers) > 1:
                yield from F.stack_columns(c, parameters_of(layers), each, doubling(len(layers)))
            else:
                yield F.columns(layers[0](c), layers[0].weight.shape[0] // self.hidden_size)

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

        randomness: counts the class dropout of a training step; None: none
        conditioning: of these t and y, where it is known (see `conditioning`)
        Returns a Tensor (B, H, W, out_channels).
        """
        self.check_inputs(t, y, x if conditioning is None else None)
        tokens = F.add_constant(self.x_embedder(F.cast(x, self.dtype)), self.pos_embed)  # (B, T, D)
        # each block requests the next block's modulation, so that its gradients become ready
        # together with its own
        columns = self._columns(conditioning, t, y, randomness)
        blocks = [*self.blocks.modules.values()]
        own = blocks[0].modulation(next(columns))
        y = blocks[0].norm1.forward(tokens, *own[:2])
        for block, after in zip(blocks, [*blocks[1:], None], strict=True):
            if after is None:
                theirs, following = None, (self.final_layer.norm_final, *next(columns), None)
            else:
                theirs = after.modulation(next(columns))
                following = after.norm1, *theirs[:2], after.attn.qkv.weight
            tokens, y = block(tokens, y, own, following, self.rotation)
            own = theirs
        tokens = F.cast(self.final_layer(y), np.float32)
        return F.unpatchify(tokens, self.patch_size, *sides(self.image_size))

    def products(self) -> list[LayerProduct]:
        return dit_products(self.options)


def parameters_of(layers):
    return [(layer.weight, layer.bias) for layer in layers]


def doubling(count):
    """2, 2, 4, 8, … and the rest, `count` in all."""
    sizes = []
    while sum(sizes) < count:
        sizes.append(min(max(2, sum(sizes)), count - sum(sizes)))
    return sizes


def padded_width(inner):
    """The channels inside a SwiGLU with those of its padding."""
    return -(-inner // WIDTH) * WIDTH


def padded_rows(array, inner):
    """w12's weight or bias (2 · inner, …) with each half filled up with zeros."""
    more = [(0, padded_width(inner) - inner)] + [(0, 0)] * (array.ndim - 1)
    return np.concatenate([np.pad(half, more) for half in np.split(array, 2)])


def padded_columns(array, inner):
    """w3's weight (D, inner) filled up with zeros."""
    return np.pad(array, [(0, 0), (0, padded_width(inner) - inner)])


def position_table(channels, grid):
    """The fixed position embedding of `grid` = (rows, columns) of tokens, or of as many of both,
    float32 (T, channels): sines and cosines of column, then of row.

    Each coordinate p has channels / 2 numbers: sin(p·ω_k) for all k, then cos(p·ω_k), ω_k =
    10000^(-4k / channels). The column comes first, as in the public implementation. Computed in
    float64.
    """
    omega = 10000.0 ** (-np.arange(channels // 4) / (channels // 4))
    down, across = sides(grid)
    angles = np.arange(max(down, across))[:, None] * omega
    line = np.concatenate((np.sin(angles), np.cos(angles)), axis=1)  # (positions, channels / 2)
    rows, columns = np.divmod(np.arange(down * across), across)
    return np.concatenate((line[columns], line[rows]), axis=1).astype(np.float32)


def attention_kind(name):
    """The class of an extension's attention, a subclass of `Attention`, by its name.

    name, title, part: on the command line, in texts, and what it adds to attention
    free: {its option: whether a value is allowed}, where a file does not store it; foreign:
    {option: value} of other programs' files; mark: within the names of tensors that it alone has
    of(options): a constructor like `Attention`'s, for a model of these options; check(options,
    tokens, head): a `UsageError` for options that cannot work; layers(options): {layer of its own:
    the shape of its weight}; products(options, tokens): [(layer, multiply-adds of one image,
    whether by a weight)]; words(options): for a log
    """
    return extensions.find("dit_attention", name, f"attention {name}")


def check_float8(hidden, inner, mlp):
    """Raise a `UsageError` for widths of which E4M3 has no products."""
    inner = padded_width(inner) if mlp == "swiglu" else inner
    if hidden % 16 or inner % 16:
        raise UsageError(
            f"--precision fp8 moves 16 numbers at a time, and a DiT of {hidden} channels, {inner} in its "
            "MLP, has other widths: change --hidden-size or --mlp-ratio, or use --precision fp16."
        )


def check_options(options):
    """Raise a `UsageError` for options with which no DiT can be laid out."""
    options = {**PLAIN, **options}
    size, patch = as_size(options["image_size"]), options["patch_size"]
    hidden, heads = options["hidden_size"], options["num_heads"]
    if min(*sides(size), patch, hidden, heads, options["depth"], options["in_channels"]) < 1:
        raise UsageError(
            "image_size, in_channels, patch_size, hidden_size, depth and num_heads must be at least 1."
        )
    if not is_multiple(size, patch):
        fits = [p for p in (2, 4, 8) if is_multiple(size, p)]
        advice = f"a patch_size of {' or '.join(map(str, fits))}, or an" if fits else "an"
        raise UsageError(
            f"image_size {size} is not divisible by patch_size {patch}: use {advice} image_size of "
            f"{nearest_multiple(size, patch)}."
        )
    if hidden % heads:
        raise UsageError(
            f"hidden_size {hidden} does not divide into {heads} heads: change num_heads."
        )
    if hidden % 4:
        raise UsageError(
            f"hidden_size {hidden} must be a multiple of 4: sines and cosines of row and column share it."
        )
    for name, choices in (
        ("norm", NORMS),
        ("mlp", MLPS),
        ("attention", ("full", *extensions.entries("dit_attention"))),
    ):
        if options[name] not in choices:
            raise UsageError(
                f"{name} {options[name]!r:.60} does not exist: use {' or '.join(choices)}."
            )
    if options["attention"] != "full":
        attention_kind(options["attention"]).check(options, token_count(options))
    if options["rope"] and hidden // heads % 4:
        raise UsageError(
            f"rope rotates pairs of a head's channels by row and by column, so 4 must divide their number "
            f"{hidden // heads}: change num_heads or hidden_size."
        )
    if mlp_width(hidden, options["mlp_ratio"], options["mlp"]) < 1:
        raise UsageError(
            f"mlp_ratio {say(options['mlp_ratio'])} leaves the MLP without channels: use a larger one."
        )
    if options["num_classes"] is not None and options["num_classes"] < 1:
        raise UsageError(
            f"num_classes {options['num_classes']} must be at least 1, or None for a model without "
            "classes."
        )
    if not 0 <= options["class_dropout"] < 1:
        raise UsageError(
            f"class_dropout {say(options['class_dropout'])} must be at least 0 and below 1."
        )
