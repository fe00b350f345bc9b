"""FLOPs of a forward pass, from shapes alone; a multiply-add counts as two. Models and blocks add theirs up.

Convolutions, linear layers and attention are counted; normalisations, activations and additions are not, as is usual.
The backward pass takes twice as many.
"""
import math

from ..kernels.attention.sla import BLOCK, blocks_of, count_of


def conv_flops(conv, size):
    """FLOPs of a convolution over one size × size image."""
    outputs, kernel, _, inputs = conv.weight.shape
    return 2 * (size // conv.stride) ** 2 * outputs * kernel * kernel * inputs


def depthwise_flops(conv, size):
    """FLOPs of a depthwise convolution over one size × size image."""
    return 2 * size * size * math.prod(conv.weight.shape)


def linear_flops(linear, rows):
    return 2 * rows * math.prod(linear.weight.shape)


def mlp_width(hidden, mlp_ratio, mlp):
    """Channels inside a DiT's MLP: hidden · mlp_ratio, of a SwiGLU two thirds of that, each rounded down."""
    inner = int(hidden * mlp_ratio)
    return int(2 / 3 * inner) if mlp == "swiglu" else inner


def forward_flops(model):
    """FLOPs of one image through a model."""
    return model.forward_flops()


def critical_keys(topk, tokens):
    """Keys to which a token of sparse-linear attention pays softmax attention."""
    return min(tokens, BLOCK * count_of(topk, blocks_of(tokens)))


def dit_forward_flops(options):
    """FLOPs of one image through a DiT with these options, which is not built."""
    D, patch = options["hidden_size"], options["patch_size"]
    tokens = (options["image_size"] // patch) ** 2
    pixels = patch * patch * options["in_channels"]
    products = (3 if options["mlp"] == "swiglu" else 2) * D * mlp_width(D, options["mlp_ratio"], options["mlp"])
    modulation = (6 if options["shift"] else 4) * D * D
    if options.get("attention") == "sla":  # H, φ(q) S and W of the linear part
        keys, head = critical_keys(options["sla_topk"], tokens), D // options["num_heads"]
        attention = 2 * tokens * keys * D + 3 * tokens * D * head
    else:
        attention = 2 * tokens * tokens * D
    block = tokens * (4 * D * D + products) + attention + modulation
    outside = tokens * D * pixels * (3 if options["learn_sigma"] else 2) + 256 * D + D * D + 2 * D * D
    return 2 * (options["depth"] * block + outside)
