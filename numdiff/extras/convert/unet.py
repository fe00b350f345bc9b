"""What the names and shapes of a guided-diffusion UNet's weights reveal about its options, and the
other way round.

Two functions that are each other's inverse: `unet_shapes` lists every parameter of a UNet with
given options, and `guess_unet_options` finds the options from a state dict. What shapes do not
reveal (the image's size, the number of attention heads and their order, the period of the timestep
embedding) the user must give.

Names and shapes here are PyTorch's, as in guided-diffusion's state dicts; blocks of extensions,
which it does not have, are under numdiff's own names.
"""

import re

from ... import extensions
from ...errors import NumdiffError
from ...sizes import level_sides
from .check import check_shapes, check_whole, known_shape

PREFIXES = ("module.", "_orig_mod.")  # left by DataParallel and by torch.compile
# the names of unet.cu's train_unet.py, and guided-diffusion's for the same layers
UNET_CU_NAMES = {
    "gn1": "in_layers.0",
    "cv3_1": "in_layers.2",
    "l_emb": "emb_layers.1",
    "gn2": "out_layers.0",
    "cv3_2": "out_layers.3",
    "gn": "norm",
    "proj": "proj_out",
}
UNET_CU_NAME = re.compile(
    r"^((?:input_blocks|output_blocks)\.\d+\.\d+|middle_block\.\d+)\."
    rf"({'|'.join(UNET_CU_NAMES)})\."
)
# fixed in its code
UNET_CU_OPTIONS = {"num_head_channels": 32, "use_new_attention_order": True, "max_period": 1000.0}


def canonical_names(state_dict):
    """(the state dict under guided-diffusion's names, the options that the names reveal)."""
    renamed, options = {}, {}
    for name, array in state_dict.items():
        while name.startswith(PREFIXES):
            name = name.removeprefix(PREFIXES[0]).removeprefix(PREFIXES[1])
        if not name.isprintable():
            raise NumdiffError(
                "one of its tensors has a name that cannot be printed; copy or save it again"
            )
        match = UNET_CU_NAME.match(name)
        if match:
            name = f"{match.group(1)}.{UNET_CU_NAMES[match.group(2)]}.{name[match.end() :]}"
            options = dict(UNET_CU_OPTIONS)
        if name in renamed:
            raise NumdiffError(
                f"two of its tensors are called {name!r} once prefixes such as 'module.' are taken off; "
                "save the state dict of one model"
            )
        renamed[name] = array
    return renamed, options


def other_blocks():
    """{block: module with the names and shapes of its weights} of extensions."""
    return extensions.available("unet_block_names")


def unet_shapes(options):
    """{name: shape} of every parameter, in module order, for the options of `numdiff.nn.UNet`."""
    base, blocks = options["model_channels"], options["num_res_blocks"]
    emb, other = 4 * base, other_blocks().get(options.get("block"))
    widths = [int(mult * base) for mult in options["channel_mult"]]
    outputs = options["out_channels"] or options["in_channels"] * (
        2 if options["learn_sigma"] else 1
    )
    attended = [
        side in options["attention_resolutions"]
        for side in level_sides(options["image_size"], len(widths))
    ]
    shapes = {}

    def layer(name, *shape):
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[:1]

    def res_block(name, inputs, outputs):
        if other:
            shapes.update(other.shapes(name, inputs, outputs, emb))
            return
        layer(f"{name}.in_layers.0", inputs)
        layer(f"{name}.in_layers.2", outputs, inputs, 3, 3)
        layer(f"{name}.emb_layers.1", outputs * (2 if options["use_scale_shift_norm"] else 1), emb)
        layer(f"{name}.out_layers.0", outputs)
        layer(f"{name}.out_layers.3", outputs, outputs, 3, 3)
        if inputs != outputs:
            layer(f"{name}.skip_connection", outputs, inputs, 1, 1)

    def attention(name, width):
        layer(f"{name}.norm", width)
        layer(f"{name}.qkv", 3 * width, width, 1)
        layer(f"{name}.proj_out", width, width, 1)

    def resample(name, width, convolution):
        if options["resblock_updown"]:
            res_block(name, width, width)
        elif options["conv_resample"]:
            layer(f"{name}.{convolution}", width, width, 3, 3)

    layer("time_embed.0", emb, base)
    layer("time_embed.2", emb, emb)
    if options["num_classes"] is not None:
        shapes["label_emb.weight"] = (
            options["num_classes"] + (options.get("class_dropout", 0) > 0),
            emb,
        )
    width, number = widths[0], 1
    layer("input_blocks.0.0", width, options["in_channels"], 3, 3)
    skips = [width]
    for level, target in enumerate(widths):
        for _ in range(blocks):
            res_block(f"input_blocks.{number}.0", width, target)
            if attended[level]:
                attention(f"input_blocks.{number}.1", target)
            width, number = target, number + 1
            skips.append(width)
        if level < len(widths) - 1:
            resample(f"input_blocks.{number}.0", width, "op")
            number += 1
            skips.append(width)
    res_block("middle_block.0", width, width)
    attention("middle_block.1", width)
    res_block("middle_block.2", width, width)
    number = 0
    for level, target in reversed(list(enumerate(widths))):
        for i in range(blocks + 1):
            res_block(f"output_blocks.{number}.0", width + skips.pop(), target)
            if attended[level]:
                attention(f"output_blocks.{number}.1", target)
            if level > 0 and i == blocks:
                resample(f"output_blocks.{number}.{2 if attended[level] else 1}", target, "conv")
            width, number = target, number + 1
    layer("out.0", width)
    layer("out.2", outputs, width, 3, 3)
    return shapes


def guess_unet_options(state_dict, image_size=64):
    """Options of the UNet that has these weights; a `NumdiffError` if they are not those of a
    guided-diffusion UNet.

    Returned are the options that shapes determine: in_channels, model_channels, out_channels,
    channel_mult, num_res_blocks, attention_resolutions (in pixels, so they need `image_size`),
    use_scale_shift_norm, resblock_updown, conv_resample, num_classes, learn_sigma, block.
    """

    def shape(name, dimensions):
        return known_shape(state_dict, name, dimensions, "guided-diffusion UNet")

    def numbers(section):
        """{block number: names of its parameters without the section and number}."""
        found = {}
        for name in state_dict:
            parts = name.split(".", 2)
            if parts[0] == section and len(parts) == 3 and parts[1].isdigit() and len(parts[1]) < 6:
                found.setdefault(int(parts[1]), []).append(parts[2])
        return found

    down, up = numbers("input_blocks"), numbers("output_blocks")
    check_whole(state_dict, _names(down, up), "guided-diffusion UNet")
    base = shape("time_embed.0.weight", 2)[1]
    first = shape("input_blocks.0.0.weight", 4)
    in_channels, outputs = first[1], shape("out.2.weight", 4)[0]
    layers = "|".join(["in_layers", *(other.FIRST for other in other_blocks().values())])
    res_up = [
        n
        for n, names in sorted(up.items())
        if any(re.match(rf"[12]\.({layers})\.", k) for k in names)
    ]
    conv_up = [
        n for n, names in sorted(up.items()) if any(re.match(r"[12]\.conv\.", k) for k in names)
    ]
    pooled = sorted(set(range(max(down) + 1)) - set(down))
    # every level but the lowest ends in a resampling: the place of the first one gives the blocks
    # of a level
    per_level = (res_up or conv_up or [(pooled[0] if pooled else max(down) + 1) - 1])[0] + 1
    levels = len(up) // per_level
    if levels < 1 or levels * per_level != len(up) or max(down) + 1 != len(up) or per_level < 2:
        raise NumdiffError(
            f"these are not the weights of a guided-diffusion UNet: its {max(down) + 1} input and "
            f"{len(up)} output blocks do not make levels of {per_level}"
        )
    firsts = [f"input_blocks.{level * per_level + 1}" for level in range(levels)]
    block, convolution = next(
        (
            (name, other.FIRST)
            for name, other in other_blocks().items()
            if f"{firsts[0]}.0.{other.FIRST}.weight" in state_dict
        ),
        ("resnet", "in_layers.2"),
    )
    widths = [shape(f"{first}.0.{convolution}.weight", 4)[0] for first in firsts]
    attended = [f"{first}.1.qkv.weight" in state_dict for first in firsts]
    emb_outputs = shape(f"{firsts[0]}.0.emb_layers.1.weight", 2)[0]
    return {
        "image_size": image_size,
        "in_channels": in_channels,
        "model_channels": base,
        "out_channels": None if outputs in (in_channels, 2 * in_channels) else outputs,
        "learn_sigma": outputs == 2 * in_channels,
        "channel_mult": [width // base if width % base == 0 else width / base for width in widths],
        "num_res_blocks": per_level - 1,
        "attention_resolutions": [
            side
            for side, there in zip(level_sides(image_size, levels), attended, strict=True)
            if there
        ],
        "use_scale_shift_norm": emb_outputs == 2 * widths[0],
        "block": block,
        "resblock_updown": bool(res_up),
        "conv_resample": bool(conv_up),
        "num_classes": shape("label_emb.weight", 2)[0]
        if "label_emb.weight" in state_dict
        else None,
    }


def _names(down, up):
    """The names that a UNet with these blocks, {number: names inside}, has at least."""

    def both(*names):
        return [f"{name}.{part}" for name in names for part in ("weight", "bias")]

    inside = "in_layers.0", "in_layers.2", "emb_layers.1", "out_layers.0", "out_layers.3"
    for other in other_blocks().values():
        if any(
            name.startswith(f"0.{other.FIRST}.")
            for names in (*down.values(), *up.values())
            for name in names
        ):
            inside = other.INSIDE
    begins = tuple(f"0.{name}" for name in inside)
    blocks = [
        f"{section}.{number}.0"
        for section, numbers in (("input_blocks", down), ("output_blocks", up))
        for number, names in sorted(numbers.items())
        if any(name.startswith(begins) for name in names)
    ]
    middle = both("middle_block.1.norm", "middle_block.1.qkv", "middle_block.1.proj_out")
    return [
        *both("time_embed.0", "time_embed.2", "input_blocks.0.0"),
        *(
            f"{block}.{name}"
            for block in (*blocks, "middle_block.0", "middle_block.2")
            for name in both(*inside)
        ),
        *middle,
        *both("out.0", "out.2"),
    ]


def check_state_dict(state_dict, options):
    """Check names and shapes against `unet_shapes(options)`; a `NumdiffError` names what differs.

    Returns the state dict in module order. Attention weights may also come without their last axis
    of one.
    """
    return check_shapes(state_dict, unet_shapes(options), "UNet")
