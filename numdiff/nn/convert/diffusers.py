"""The folder layout of Hugging Face's diffusers for a DiT: config.json beside diffusion_pytorch_model.safetensors.

`DiTTransformer2DModel.from_pretrained(folder)` reads it. The names differ from the public DiT's, query, key and value
are three layers there, every block carries its own copy of the timestep's and the class's embedding, and the positions
are left to the library. Only models with a null class have a place there.

One thing the library does otherwise: the frequencies of its timestep embedding fall by 10000^(1/127) a step, where the
public DiT's fall by 10000^(1/128). Up to that, and rounding, both give the same output (tried with diffusers 0.42).
"""

import numpy as np

from ...errors import UsageError

CONFIG, WEIGHTS = "config.json", "diffusion_pytorch_model.safetensors"
OUTSIDE = {  # the names of layers that stand once, here and there
    "x_embedder.proj": "pos_embed.proj",
    "final_layer.adaLN_modulation.1": "proj_out_1",
    "final_layer.linear": "proj_out_2",
}
SHARED = {  # stand once here, and in every block there
    "t_embedder.mlp.0": "timestep_embedder.linear_1",
    "t_embedder.mlp.2": "timestep_embedder.linear_2",
    "y_embedder.embedding_table": "class_embedder.embedding_table",
}
BLOCK = {  # layers of a block
    "attn.proj": "attn1.to_out.0",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
    "adaLN_modulation.1": "norm1.linear",
}


def diffusers_config(options):
    """What config.json says of a DiT with these options; a `UsageError` where the format cannot say it."""
    if options["num_classes"] is None or options["class_dropout"] == 0:
        raise UsageError("diffusers' DiT always has classes and a null class, and this model has not: write "
                         ".safetensors or .npz instead.")
    if options["mlp_ratio"] != 4:
        raise UsageError(f"diffusers' DiT has an MLP ratio of 4, and this model has {options['mlp_ratio']:g}: write "
                         ".safetensors or .npz instead.")
    return {
        "_class_name": "DiTTransformer2DModel", "activation_fn": "gelu-approximate",
        "attention_bias": True, "attention_head_dim": options["hidden_size"] // options["num_heads"], "dropout": 0.0,
        "in_channels": options["in_channels"], "norm_elementwise_affine": False, "norm_eps": 1e-6,
        "norm_num_groups": 32, "norm_type": "ada_norm_zero", "num_attention_heads": options["num_heads"],
        "num_embeds_ada_norm": options["num_classes"], "num_layers": options["depth"],
        "out_channels": options["in_channels"] * (2 if options["learn_sigma"] else 1),
        "patch_size": options["patch_size"], "sample_size": options["image_size"], "upcast_attention": False}


def diffusers_state_dict(state_dict, depth):
    """{diffusers' name: array} of a DiT's weights in PyTorch's layout under the public names."""
    result = {}

    def copy(source, target):
        for kind in ("weight", "bias"):
            if f"{source}.{kind}" in state_dict:
                result[f"{target}.{kind}"] = state_dict[f"{source}.{kind}"]

    for source, target in OUTSIDE.items():
        copy(source, target)
    for i in range(depth):
        here, there = f"blocks.{i}", f"transformer_blocks.{i}"
        for source, target in SHARED.items():
            copy(source, f"{there}.norm1.emb.{target}")
        for source, target in BLOCK.items():
            copy(f"{here}.{source}", f"{there}.{target}")
        for kind in ("weight", "bias"):
            for letter, part in zip("qkv", np.split(state_dict[f"{here}.attn.qkv.{kind}"], 3), strict=True):
                result[f"{there}.attn1.to_{letter}.{kind}"] = part
    return result


