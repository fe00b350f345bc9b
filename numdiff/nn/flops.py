"""FLOPs of a model's forward pass, by walking its modules with shapes only; a multiply-add counts as two.

Convolutions, linear layers and attention are counted; normalisations, activations and additions are not, as is usual.
The backward pass takes twice as many.
"""
import math

from .layers import Conv2d


def conv_flops(conv, size):
    """Of a convolution over a size × size image, for one image."""
    outputs, kernel, _, inputs = conv.weight.shape
    return 2 * (size // conv.stride) ** 2 * outputs * kernel * kernel * inputs


def linear_flops(linear, rows):
    return 2 * rows * math.prod(linear.weight.shape)


def forward_flops(model):
    """FLOPs of one image through a model."""
    return {"unet": _unet_flops, "dit": _dit_flops}[model.kind](model)


def dit_forward_flops(options):
    """FLOPs of one image through a DiT with these options, which need not be built."""
    D, patch = options["hidden_size"], options["patch_size"]
    tokens = (options["image_size"] // patch) ** 2
    pixels = patch * patch * options["in_channels"]
    inner = int(D * options["mlp_ratio"])
    block = tokens * (4 * D * D + 2 * D * inner) + 2 * tokens * tokens * D + 6 * D * D
    outside = tokens * D * pixels * (3 if options["learn_sigma"] else 2) + 256 * D + D * D + 2 * D * D
    return 2 * (options["depth"] * block + outside)


def _dit_flops(model):
    return dit_forward_flops(model.options)


def _unet_flops(model):
    from .unet import AttentionBlock, Downsample, ResBlock, Upsample

    def block_flops(block, size):
        """(FLOPs, size after the block)."""
        if isinstance(block, Conv2d):
            return conv_flops(block, size), size // block.stride
        if isinstance(block, Downsample):
            return (conv_flops(block.op, size) if hasattr(block, "op") else 0), size // 2
        if isinstance(block, Upsample):
            return (conv_flops(block.conv, 2 * size) if hasattr(block, "conv") else 0), 2 * size
        if isinstance(block, AttentionBlock):
            tokens, channels = size * size, block.proj_out.weight.shape[0]
            return (linear_flops(block.qkv, tokens) + linear_flops(block.proj_out, tokens)
                    + 2 * 2 * tokens * tokens * channels), size
        assert isinstance(block, ResBlock)
        after = {None: size, "up": 2 * size, "down": size // 2}[block.direction]
        total = conv_flops(block.in_layers[2], after) + conv_flops(block.out_layers[3], after)
        total += linear_flops(block.emb_layers[1], 1)
        if hasattr(block, "skip_connection"):
            total += conv_flops(block.skip_connection, after)
        return total, after

    total, size = linear_flops(model.time_embed[0], 1) + linear_flops(model.time_embed[2], 1), model.image_size
    stages = [*model.input_blocks.modules.values(), model.middle_block, *model.output_blocks.modules.values()]
    for stage in stages:
        for block in stage.modules.values():
            flops, size = block_flops(block, size)
            total += flops
    return total + conv_flops(model.out[2], size)


unet_forward_flops = forward_flops  # its name when there was only the UNet
