"""FLOPs of a pass through a model, from shapes alone; a multiply-add counts as two. Models and
blocks list theirs.

Convolutions, linear layers and attention are counted; normalisations, activations and additions are
not, as is usual. The backward pass takes twice as many, but where parameters are frozen.
"""

import math
from typing import NamedTuple

from .. import extensions
from ..sizes import scaled_down, sides


class LayerProduct(NamedTuple):
    """A product of the forward pass. weight: a Parameter or its name; attention multiplies none,
    and has that of its qkv, with of_weight False; flops: of one image."""

    weight: object
    flops: int
    of_weight: bool = True


def conv_product(conv, pixels):
    """A convolution over one image of `pixels` pixels."""
    outputs, kernel, _, inputs = conv.weight.shape
    return LayerProduct(
        conv.weight, 2 * (pixels // conv.stride**2) * outputs * kernel * kernel * inputs
    )


def linear_product(linear, rows):
    return LayerProduct(linear.weight, 2 * rows * math.prod(linear.weight.shape))


def total(products):
    """FLOPs of these products."""
    return sum(product.flops for product in products)


def step_flops(products, names, frozen=()):
    """FLOPs of one image in a training step: forward, and backward as far as it is computed.

    products: of the model, by name; names: of its parameters, in the order in which they are used;
    frozen: names of those that are not trained: they have no gradient, and layers before the first
    trained one have no backward
    """
    place = {name: number for number, name in enumerate(names)}
    first = min(number for name, number in place.items() if name not in frozen)
    return sum(
        flops * (1 + (2 - of_weight) * (place[name] >= first) + (of_weight and name not in frozen))
        for name, flops, of_weight in products
    )


def mlp_width(hidden, mlp_ratio, mlp):
    """Channels inside a DiT's MLP: hidden · mlp_ratio, of a SwiGLU two thirds of that, each rounded
    down."""
    inner = int(hidden * mlp_ratio)
    return int(2 / 3 * inner) if mlp == "swiglu" else inner


def forward_flops(model):
    """FLOPs of one image through a model."""
    return model.forward_flops()


def token_count(options):
    """Tokens of one image of a DiT with these options."""
    return math.prod(sides(scaled_down(options["image_size"], options["patch_size"])))


def dit_products(options):
    """[Product] of a DiT with these options, which is not built."""
    D, patch, swiglu = options["hidden_size"], options["patch_size"], options["mlp"] == "swiglu"
    tokens, inner = (
        token_count(options),
        mlp_width(D, options["mlp_ratio"], options["mlp"]),
    )
    pixels, attention = (
        patch * patch * options["in_channels"],
        [("qkv", 2 * tokens * tokens * D, False)],
    )
    if (name := options.get("attention", "full")) != "full":
        attention = extensions.find("dit_attention", name, f"attention {name}").products(
            options, tokens
        )
    shift, found = 6 if options["shift"] else 4, []

    def add(name, numbers, of_weight=True):
        found.append(LayerProduct(f"{name}.weight", 2 * numbers, of_weight))

    add("x_embedder.proj", tokens * D * pixels)
    add("t_embedder.mlp.0", 256 * D)
    add("t_embedder.mlp.2", D * D)
    for i in range(options["depth"]):
        block = f"blocks.{i}"
        add(f"{block}.attn.qkv", tokens * 3 * D * D)
        for layer, numbers, of_weight in attention:
            add(f"{block}.attn.{layer}", numbers, of_weight)
        add(f"{block}.attn.proj", tokens * D * D)
        add(f"{block}.mlp.{'w12' if swiglu else 'fc1'}", tokens * (1 + swiglu) * D * inner)
        add(f"{block}.mlp.{'w3' if swiglu else 'fc2'}", tokens * D * inner)
        add(f"{block}.adaLN_modulation.1", shift * D * D)
    add("final_layer.linear", tokens * D * pixels * (2 if options["learn_sigma"] else 1))
    add("final_layer.adaLN_modulation.1", 2 * D * D)
    return found


def dit_forward_flops(options):
    """FLOPs of one image through a DiT with these options, which is not built."""
    return total(dit_products(options))
