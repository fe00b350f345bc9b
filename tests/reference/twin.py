"""The PyTorch models that stored test values come from: the benchmark's, with drawn weights.

numdiff/benchmark/torch_unet.py and torch_dit.py are written in PyTorch's operations and have
PyTorch's layout (B, C, H, W); of numdiff they use the options alone, and its tables of positions
and rotations. These tables are written here a second time, from the papers and in float64. Models
have float64 weights, unless a type is given, and are in evaluation mode.
"""

import math

import torch
from torch import nn

from numdiff.benchmark.torch_dit import TorchAttention, TorchDiT
from numdiff.benchmark.torch_unet import TorchUNet
from tests.reference.stored import weight


def draw(model, seed):
    """Fill every trained parameter with the numbers that `stored.weight` gives for its name, and
    return the model."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.from_numpy(weight(name, tuple(parameter.shape), seed)))
    return model


def unet(options, seed, dtype=torch.float64):
    return draw(TorchUNet(**options).to(dtype).eval(), seed)


def dit(options, seed, dtype=torch.float64):
    """As `TorchDiT`, and with sparse-linear attention, which that does not have."""
    model = TorchDiT(**{k: v for k, v in options.items() if k not in ("attention", "sla_topk")})
    width, heads = options["hidden_size"], options["num_heads"]
    if options.get("attention") == "sla":
        for block in model.blocks:
            block.attn = SparseLinearAttention(width, heads, options["sla_topk"])
    model.to(dtype).eval()
    with torch.no_grad():
        model.pos_embed.copy_(positions(width, model.grid))
        if model.rotation is not None:
            model.rotation.copy_(rotations(width // heads, model.grid))
    return draw(model, seed)


def positions(width, grid):
    """(1, T, width): for each token of a grid (rows, columns), row by row, first its column's
    numbers, then its row's."""
    table = torch.zeros(*grid, width, dtype=torch.float64)
    quarter = width // 4
    for row in range(grid[0]):
        for column in range(grid[1]):
            for half, place in enumerate((column, row)):
                for k in range(quarter):
                    angle = place / 10000 ** (k / quarter)
                    table[row, column, half * 2 * quarter + k] = math.sin(angle)
                    table[row, column, half * 2 * quarter + quarter + k] = math.cos(angle)
    return table.reshape(1, -1, width)


def rotations(width, grid):
    """(2, T, width): cosines and sines of the angle that turns each channel of a head. The pairs of
    neighbours of the first half turn with the token's row, those of the second with its column."""
    pairs = width // 4  # of a half
    angle = torch.zeros(grid[0] * grid[1], width, dtype=torch.float64)
    for token in range(len(angle)):
        for half, place in enumerate(divmod(token, grid[1])):
            for i in range(pairs):
                channel = 2 * (half * pairs + i)
                angle[token, channel : channel + 2] = place * 10000 ** (-i / pairs)
    return torch.stack((angle.cos(), angle.sin()))


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


def sparse_linear(q, k, v, topk, project):
    """Zhang et al. 2025, arXiv:2509.24006, with all T × T numbers: q k v (batch, heads, T,
    channels)."""
    T, block = q.shape[2], 64
    starts = range(0, T, block)

    def means(x):
        return torch.stack([x[:, :, s : s + block].mean(2) for s in starts], 2)

    with torch.no_grad():
        scores = means(q) @ means(k - k.mean(2, keepdim=True)).transpose(-1, -2)
        count = max(1, int(topk * len(starts)))
        chosen = torch.zeros_like(scores).scatter_(-1, scores.topk(count, -1).indices, 1).bool()
        critical = chosen.repeat_interleave(block, 2).repeat_interleave(block, 3)[:, :, :T, :T]
    dots = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~critical, -math.inf)
    share = torch.softmax(q, -1) @ torch.softmax(k, -1).transpose(-1, -2)
    share = share.masked_fill(critical, 0)
    return torch.softmax(dots, -1) @ v + project(share / share.sum(-1, keepdim=True) @ v)


class SparseLinearAttention(TorchAttention):
    def __init__(self, hidden, heads, topk):
        super().__init__(hidden, heads, qk_norm=False)
        self.topk, self.proj_l = topk, nn.Linear(hidden // heads, hidden // heads)

    def attend(self, q, k, v):
        return sparse_linear(q, k, v, self.topk, self.proj_l)
