"""Names and shapes of a DiT's parameters, and how many they are, from its options alone: nothing is
built."""

import math

from .dit import FREQUENCIES, PLAIN, attention_kind
from .flops import mlp_width, token_count


def dit_shapes(options):
    """{name: shape} of every parameter of a DiT with these options, PyTorch's shapes in PyTorch's
    order."""
    o = {**PLAIN, **options}
    D, patch, channels = o["hidden_size"], o["patch_size"], o["in_channels"]
    inner, tokens = mlp_width(D, o["mlp_ratio"], o["mlp"]), token_count(o)
    shapes = {"pos_embed": (1, tokens, D)}

    def layer(name, *shape):
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[:1]

    def norm(name, exists, size):
        if exists:
            shapes[f"{name}.weight"] = (size,)

    layer("x_embedder.proj", D, channels, patch, patch)
    layer("t_embedder.mlp.0", D, FREQUENCIES)
    layer("t_embedder.mlp.2", D, D)
    if o["num_classes"] is not None:
        shapes["y_embedder.embedding_table.weight"] = (
            o["num_classes"] + (o["class_dropout"] > 0),
            D,
        )
    first, second, both = ("w12", "w3", 2) if o["mlp"] == "swiglu" else ("fc1", "fc2", 1)
    for i in range(o["depth"]):
        for name in ("norm1", "norm2"):
            norm(f"blocks.{i}.{name}", o["norm"] == "rms", D)
        layer(f"blocks.{i}.attn.qkv", 3 * D, D)
        for name in ("q_norm", "k_norm"):
            norm(f"blocks.{i}.attn.{name}", o["qk_norm"], D // o["num_heads"])
        layer(f"blocks.{i}.attn.proj", D, D)
        if o["attention"] != "full":
            for name, shape in attention_kind(o["attention"]).layers(o).items():
                layer(f"blocks.{i}.attn.{name}", *shape)
        layer(f"blocks.{i}.mlp.{first}", both * inner, D)
        layer(f"blocks.{i}.mlp.{second}", D, inner)
        layer(f"blocks.{i}.adaLN_modulation.1", (6 if o["shift"] else 4) * D, D)
    norm("final_layer.norm_final", o["norm"] == "rms", D)
    layer("final_layer.linear", patch * patch * channels * (2 if o["learn_sigma"] else 1), D)
    layer("final_layer.adaLN_modulation.1", 2 * D, D)
    return shapes


def dit_parameter_counts(options):
    """(number of all parameters, fixed positions included; number of those that are trained)."""
    shapes = dit_shapes(options)
    count = sum(map(math.prod, shapes.values()))
    return count, count - math.prod(shapes["pos_embed"])
