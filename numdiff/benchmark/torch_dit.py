"""numdiff's DiT in PyTorch: the same architecture, options and parameter names, as one would write
it there.

Sources as in numdiff/nn/dit.py. Images are (B, C, H, W); attention is PyTorch's fused one.
"""

import torch
from torch import nn
from torch.nn import functional as F

from ..errors import UsageError
from ..nn.dit import EPS, FREQUENCIES, DiTConfig, position_table
from ..nn.flops import mlp_width
from ..nn.rotary import rotation_table
from ..sizes import scaled_down, sides
from .torch_unet import embedded


class TorchPatchEmbed(nn.Module):
    def __init__(self, patch, channels, hidden):
        super().__init__()
        self.proj = nn.Conv2d(channels, hidden, patch, stride=patch)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class TorchTimestepEmbedder(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(FREQUENCIES, hidden), nn.SiLU(), nn.Linear(hidden, hidden)
        )

    def forward(self, t):
        return embedded(t, self.mlp, FREQUENCIES)


class TorchLabelEmbedder(nn.Module):
    def __init__(self, classes, hidden, dropout):
        super().__init__()
        self.embedding_table = nn.Embedding(classes + (dropout > 0), hidden)
        self.classes, self.dropout = classes, dropout

    def forward(self, y):
        if self.training and self.dropout > 0:
            y = torch.where(torch.rand(y.shape, device=y.device) < self.dropout, self.classes, y)
        return self.embedding_table(y)


class TorchRMSNorm(nn.RMSNorm):
    """PyTorch's, which is one kernel only where the weight has the type of x; autocast leaves it
    float32."""

    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def rotated(x, rotation):
    """x (B, NH, T, HS) with pairs of neighbouring channels turned by the angles of rotation (2, T,
    HS)."""
    cos, sin = rotation.to(x.dtype)
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + turned * sin


class TorchAttention(nn.Module):
    def __init__(self, hidden, heads, qk_norm):
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.q_norm, self.k_norm = (
            TorchRMSNorm(hidden // heads, EPS) if qk_norm else nn.Identity() for _ in range(2)
        )
        self.proj = nn.Linear(hidden, hidden)
        self.heads = heads

    def forward(self, x, rotation):
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotated(q, rotation), rotated(k, rotation)
        return self.proj(self.attend(q, k, v).transpose(1, 2).reshape(B, T, D))

    def attend(self, q, k, v):
        """(B, NH, T, HS) of each."""
        return F.scaled_dot_product_attention(q, k, v)


class TorchMlp(nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class TorchSwiGLU(nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.w12, self.w3 = nn.Linear(hidden, 2 * inner), nn.Linear(inner, hidden)

    def forward(self, x):
        gate, value = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * value)


def modulated(norm, x, shift, scale):
    y = norm(x) * (1 + scale[:, None])
    return y if shift is None else y + shift[:, None]


def norm_of(kind, hidden):
    return (
        TorchRMSNorm(hidden, EPS)
        if kind == "rms"
        else nn.LayerNorm(hidden, eps=EPS, elementwise_affine=False)
    )


class TorchDiTBlock(nn.Module):
    def __init__(self, hidden, heads, mlp_ratio, norm, qk_norm, mlp, shift):
        super().__init__()
        self.norm1, self.norm2 = norm_of(norm, hidden), norm_of(norm, hidden)
        self.attn = TorchAttention(hidden, heads, qk_norm)
        self.mlp = (TorchSwiGLU if mlp == "swiglu" else TorchMlp)(
            hidden, mlp_width(hidden, mlp_ratio, mlp)
        )
        self.adaLN_modulation = nn.Sequential(
            nn.SiLU(), nn.Linear(hidden, (6 if shift else 4) * hidden)
        )
        self.shift = shift

    def forward(self, x, c, rotation):
        if self.shift:
            shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(
                6, dim=1
            )
        else:
            scale, gate, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(4, dim=1)
            shift = shift_mlp = None
        x = x + gate[:, None] * self.attn(modulated(self.norm1, x, shift, scale), rotation)
        return x + gate_mlp[:, None] * self.mlp(modulated(self.norm2, x, shift_mlp, scale_mlp))


class TorchFinalLayer(nn.Module):
    def __init__(self, hidden, outputs, norm):
        super().__init__()
        self.norm_final = norm_of(norm, hidden)
        self.linear = nn.Linear(hidden, outputs)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 2 * hidden))

    def forward(self, x, c):
        return self.linear(modulated(self.norm_final, x, *self.adaLN_modulation(c).chunk(2, dim=1)))


class TorchDiT(nn.Module):
    """Options as `numdiff.nn.DiT`; forward takes x (B, C, H, W), t (B,) and, with classes, y (B,)."""

    def __init__(self, **options):
        c = DiTConfig(**options)
        if c.attention != "full":
            raise UsageError(
                "--versus torch: PyTorch has no sparse-linear attention to compare with; leave one of "
                "them out."
            )
        super().__init__()
        self.patch, self.grid = c.patch_size, sides(scaled_down(c.image_size, c.patch_size))
        self.outputs = c.in_channels * (2 if c.learn_sigma else 1)
        self.x_embedder = TorchPatchEmbed(c.patch_size, c.in_channels, c.hidden_size)
        self.t_embedder = TorchTimestepEmbedder(c.hidden_size)
        if c.num_classes is not None:
            self.y_embedder = TorchLabelEmbedder(c.num_classes, c.hidden_size, c.class_dropout)
        self.pos_embed = nn.Parameter(
            torch.from_numpy(position_table(c.hidden_size, self.grid))[None], False
        )
        angles = (
            torch.from_numpy(rotation_table(c.hidden_size // c.num_heads, self.grid))
            if c.rope
            else None
        )
        self.register_buffer("rotation", angles, persistent=False)
        self.blocks = nn.ModuleList(
            TorchDiTBlock(
                c.hidden_size, c.num_heads, c.mlp_ratio, c.norm, c.qk_norm, c.mlp, c.shift
            )
            for _ in range(c.depth)
        )
        self.final_layer = TorchFinalLayer(
            c.hidden_size, c.patch_size * c.patch_size * self.outputs, c.norm
        )

    def forward(self, x, t, y=None):
        x = self.x_embedder(x) + self.pos_embed
        c = self.t_embedder(t)
        if y is not None:
            c = c + self.y_embedder(y)
        for block in self.blocks:
            x = block(x, c, self.rotation)
        x = self.final_layer(x, c).view(-1, *self.grid, self.patch, self.patch, self.outputs)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(
            -1, self.outputs, *(n * self.patch for n in self.grid)
        )
