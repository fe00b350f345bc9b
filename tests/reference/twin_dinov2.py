"""DINOv2 ViT-B/14 in PyTorch, from the paper and the names of the public file; needs PyTorch alone.

The positions are interpolated by PyTorch's own bicubic filter. The distance from numdiff's code is
on purpose: separate projections of q, k and v, scores by matmul, nothing folded.
"""

import torch
from torch.nn import functional as F

HEADS, SIDE, STORED_SIDE = 12, 16, 37


def layers(state, pixels, depth):
    """Yields the tokens (B, 257, C), and those after each of `depth` blocks.

    state: {name: tensor} of the public file; pixels: (B, 3, 224, 224), values 0 … 255
    """
    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    deviation = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    x = (pixels / 255 - mean) / deviation
    weight, bias = state["patch_embed.proj.weight"], state["patch_embed.proj.bias"]
    x = F.conv2d(x, weight, bias, stride=14).flatten(2).transpose(1, 2)
    C = x.shape[2]
    x = torch.cat([state["cls_token"].expand(len(x), 1, C), x], 1)
    grid = state["pos_embed"][:, 1:].reshape(1, STORED_SIDE, STORED_SIDE, C).permute(0, 3, 1, 2)
    scale = (SIDE + 0.1) / STORED_SIDE
    grid = F.interpolate(grid, scale_factor=(scale, scale), mode="bicubic")
    assert grid.shape[2:] == (SIDE, SIDE)
    x = x + torch.cat([state["pos_embed"][:, :1], grid.flatten(2).transpose(1, 2)], 1)
    yield x
    for k in range(depth):
        block = {n.removeprefix(f"blocks.{k}."): t for n, t in state.items()}
        x = x + block["ls1.gamma"] * attention(block, norm(block, "norm1", x))
        hidden = F.gelu(linear(block, "mlp.fc1", norm(block, "norm2", x)))
        x = x + block["ls2.gamma"] * linear(block, "mlp.fc2", hidden)
        yield x


def class_token(state, x):
    return norm(state, "norm", x)[:, 0]


def attention(block, x):
    B, T, C = x.shape
    parts = zip(block["attn.qkv.weight"].chunk(3), block["attn.qkv.bias"].chunk(3), strict=True)
    q, k, v = (
        F.linear(x, weight, bias).reshape(B, T, HEADS, C // HEADS).transpose(1, 2)
        for weight, bias in parts
    )
    scores = (q @ k.transpose(2, 3) / (C // HEADS) ** 0.5).softmax(-1)
    return linear(block, "attn.proj", (scores @ v).transpose(1, 2).reshape(B, T, C))


def linear(state, name, x):
    return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])


def norm(state, name, x):
    return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)
