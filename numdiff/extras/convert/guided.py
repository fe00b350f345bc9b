"""The options of a UNet and its diffusion as flags of guided-diffusion's and improved-diffusion's
scripts."""

import numpy as np

from ...sizes import in_pixels, level_sides, sides

SCRIPT_CLASSES = 1000  # NUM_CLASSES there
SCRIPT_PERIOD, SCRIPT_GROUPS = 10000.0, 32


def guided_diffusion_flags(options, diffusion):
    """(the flags that its scripts need for this model, a list of what they have no flag for).

    options: of the UNet; diffusion: of its Diffusion, all of them
    """
    sizes = level_sides(options["image_size"], len(options["channel_mult"]))
    size, attended = sizes[0], [r for r in options["attention_resolutions"] if r in sizes]
    scale = diffusion.get("timestep_scale", 1.0)
    flags = {
        "image_size": size,
        "num_channels": options["model_channels"],
        "channel_mult": ",".join(f"{m:g}" for m in options["channel_mult"]),
        "num_res_blocks": options["num_res_blocks"],
        # a size that no level has
        "attention_resolutions": ",".join(map(str, attended)) or str(2 * size),
        "num_heads": options["num_heads"],
        "num_heads_upsample": options["num_heads_upsample"],
        "num_head_channels": options["num_head_channels"],
        "dropout": f"{options['dropout']:g}",
        "class_cond": options["num_classes"] is not None,
        "use_scale_shift_norm": options["use_scale_shift_norm"],
        "resblock_updown": options["resblock_updown"],
        "use_new_attention_order": options["use_new_attention_order"],
        "learn_sigma": options["learn_sigma"],
        "diffusion_steps": diffusion.get("steps", 1000),
        "noise_schedule": diffusion.get("schedule", "linear"),
        "predict_xstart": diffusion["prediction"] == "x_0",
        "rescale_timesteps": scale != 1 and scale == 1000 / diffusion.get("steps", 1000),
    }
    return " ".join(f"--{name} {value}" for name, value in flags.items()), _without_flag(
        options, diffusion
    )


def _without_flag(options, diffusion):
    missing = []
    if len({*sides(options["image_size"])}) > 1:
        missing.append(
            f"images of {in_pixels(options['image_size'])}: its scripts load and sample squares, and its "
            "UNetModel takes any size"
        )
    if not options["conv_resample"] and not options["resblock_updown"]:
        missing.append(
            "levels that are joined without convolutions (conv_resample=False): numdiff convert "
            "--conv-resample writes convolutions that do the same"
        )
    channels, classes = options["in_channels"], options["num_classes"]
    outputs = options["out_channels"] or channels * (2 if options["learn_sigma"] else 1)
    if channels != 3 or outputs != (6 if options["learn_sigma"] else 3):
        missing.append(
            f"{channels} channels in and {outputs} out: in_channels and out_channels of UNetModel"
        )
    null = classes is not None and options.get("class_dropout", 0) > 0
    if classes not in (None, SCRIPT_CLASSES - null):
        what = (
            f"{classes} classes and a null class, the last row of label_emb"
            if null
            else f"{classes} classes"
        )
        missing.append(
            f"{what}: set NUM_CLASSES in script_util.py{f' to {classes + 1}' if null else ''}"
        )
    if any(m != int(m) for m in options["channel_mult"]):
        missing.append("a channel_mult that is not a whole number: channel_mult of UNetModel")
    if options["max_period"] != SCRIPT_PERIOD:
        missing.append(f"a max_period of {options['max_period']:g}: timestep_embedding in nn.py")
    if options["groups"] != SCRIPT_GROUPS:
        missing.append(f"{options['groups']} groups of a norm: normalization in nn.py")
    if "path" in diffusion:
        missing.append(f"the path {diffusion['path']}")
    if diffusion["prediction"] not in ("eps", "x_0"):
        missing.append(f"the prediction {diffusion['prediction']}")
    scale = diffusion.get("timestep_scale", 1.0)
    if scale not in (1, 1000 / diffusion.get("steps", 1000)):
        missing.append(f"timesteps times {scale:g}")
    return missing


def with_convolutions(state_dict, options):
    """(state dict, options) of the UNet with conv_resample that computes what this one does
    without.

    Where a level ends in the mean of 2×2 pixels, there is a 3×3 convolution of stride 2 that takes
    it; where it ends in repetition, one that keeps each pixel. Weights in PyTorch's layout.
    """
    if options["conv_resample"] or options["resblock_updown"]:
        return state_dict, options
    from .unet import unet_shapes

    options, result = {**options, "conv_resample": True}, {}
    for name, shape in unet_shapes(options).items():
        if name in state_dict:
            result[name] = state_dict[name]
        elif name.endswith(".bias"):
            result[name] = np.zeros(shape, np.float32)
        else:
            kernel = np.zeros((3, 3), np.float32)
            if name.endswith(".op.weight"):
                kernel[1:, 1:] = 0.25
            else:
                kernel[1, 1] = 1
            result[name] = np.eye(shape[0], dtype=np.float32)[:, :, None, None] * kernel
    return result, options
