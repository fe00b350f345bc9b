"""The record of the UNet: settings, presets, checks; the model is nn/unet.py."""

import math

from ... import extensions
from ...errors import UsageError
from ...settings import SAME, flag, say, setting
from ...sizes import in_pixels, is_multiple, level_sides, nearest_multiple, scaled_down, sides
from .kind import ModelKind

BLOCKS = extensions.entries("unet_block")  # in place of residual ones
GROUPS = 32  # of every group normalisation: channels must be a multiple


class UNetSettings:
    model_channels: int = setting(
        64,
        "Channels of the first level; a multiple of 32.",
        unit="N",
        low=1,
        high=1 << 14,
        model=SAME,
    )
    channel_mult: tuple[int, ...] = setting(
        (1, 2, 3, 4),
        "Channels of each level, in multiples of --model-channels; each level halves the size.",
        unit="N,N,…",
        low=1,
        high=256,
        model=SAME,
    )
    num_res_blocks: int = setting(
        2, "Residual blocks a level.", unit="N", low=1, high=64, model=SAME
    )
    attention_resolutions: tuple[int, ...] = setting(
        (16, 8),
        "Image sizes at which there is attention; `none` for only the one in the middle.",
        unit="PX,…",
        low=1,
        high=4096,
        model=SAME,
    )
    num_heads: int = setting(
        1,
        "Attention heads, where --num-head-channels is -1.",
        unit="N",
        low=1,
        high=1 << 14,
        model=SAME,
    )
    num_heads_upsample: int = setting(
        -1,
        "Attention heads on the way up, if different; -1: as --num-heads.",
        unit="N",
        low=-1,
        high=1 << 14,
        model=SAME,
    )
    num_head_channels: int = setting(
        32,
        "Channels of an attention head; -1: by --num-heads, which also counts if it alone is given.",
        unit="N",
        low=-1,
        high=1 << 14,
        model=SAME,
    )
    block: str = setting(
        "resnet",
        f"The blocks: {', or '.join(['residual ones', *(each.text for each in BLOCKS.values())])}.",
        choices=("resnet", *BLOCKS),
        model=SAME,
    )
    use_scale_shift_norm: bool = setting(
        False, "The timestep scales and shifts the norm, instead of being added.", model=SAME
    )
    resblock_updown: bool = setting(False, "Residual blocks change the size.", model=SAME)
    conv_resample: bool = setting(
        False,
        "Convolutions change the size, instead of pooling and repetition; with "
        "--resblock-updown neither does.",
        model=SAME,
    )
    dropout: float = setting(
        0.0, "Share of the activations that are dropped.", unit="P", low=0, below=1, model=SAME
    )
    use_new_attention_order: bool = setting(
        False, "The later of guided-diffusion's two orders of qkv.", model=SAME
    )
    max_period: float = setting(
        10000.0,
        "Longest period of the timestep embedding; unet.cu has 1000.",
        unit="STEPS",
        low=1,
        high=1e30,
        model=SAME,
    )


PRESETS = {
    # The smallest UNet that draws emoji: for a laptop without a GPU, 2 to 4 minutes on two cores.
    # In so short a run Muon learns most, and predicting the image itself gives the clearest
    # pictures: JiT's objective, or, where whole timesteps are requested, the plain one under a
    # cosine schedule. One class of emoji is learnt sooner than nine (`SMILEYS` below), many steps
    # of few images teach more than few of many, and the learning rate is high, falls to zero, and
    # the average of the weights soon forgets the beginning (docs/log/presets.md has the runs).
    "tiny": {
        "image_size": 32,
        "model_channels": 32,
        "channel_mult": (1, 2, 4),
        "num_res_blocks": 1,
        "attention_resolutions": (8,),
        "num_head_channels": 32,
        "schedule": "cosine",
        "prediction": "x_0",
        "path": "linear",
        "loss": "flow",
        "time_sampling": "logit-normal",
        "noise_mean": 0.8,
        "noise_std": 0.8,
        "batch": 4,
        "steps": 1500,
        "optimizer": "muon",
        "learning_rate": 2e-3,
        "warmup_steps": 20,
        "lr_schedule": "cosine",
        "beta2": 0.99,
        "ema_halflife": 800.0,
        "sample_every": 750,
        "sample_count": 24,
        "sampler": "dpm++2m",
        "sample_steps": 20,
        "checkpoint_every": 250,
        "log_every": 25,
        "evaluate_count": 16,
    },
    # The UNet that unet.cu trains, 20,494,211 parameters, on 64×64 images: for one GPU with 8 GB or
    # more. The same choices as above; this many steps take an H200 less than a minute.
    "unet64": {
        "image_size": 64,
        "model_channels": 64,
        "channel_mult": (1, 2, 3, 4),
        "num_res_blocks": 2,
        "attention_resolutions": (16, 8),
        "num_head_channels": 32,
        "schedule": "cosine",
        "prediction": "x_0",
        "batch": 32,
        "steps": 8000,
        "optimizer": "muon",
        "learning_rate": 1e-3,
        "warmup_steps": 100,
        "lr_schedule": "cosine",
        "ema_halflife": 4000.0,
        "sample_every": 2000,
        "sample_count": 64,
        "sampler": "dpm++2m",
        "sample_steps": 20,
        "checkpoint_every": 2000,
        "log_every": 200,
    },
}
RATES = {"tiny": {"adamw": 1e-3}, "unet64": {"adamw": 5e-4}}
SMILEYS = {"classes": ("Smileys & Emotion",), "flip": True}


HELP = {
    "train": """Train a UNet.

    Without options: on emoji, with a model and a number of steps that suit this machine. What you leave out, the preset
    fills. The run gets its own folder, with checkpoints, pictures of samples, and the loss.

    \b
    numdiff train unet                                           on emoji
    numdiff train unet --data photos.h5 --class-cond --flip      on images of your own (see numdiff data import)
    numdiff train unet --resume                                  continue where the newest run stopped
    """,
    "compile": """The kernels of `numdiff train unet` with the same options: training step and pictures.

    They are put where a run of the same user looks for them, NUMDIFF_CACHE_DIR or ~/.cache/numdiff: for a container, or
    for a cluster whose nodes share a folder. Neither a GPU nor its driver is needed.

    \b
    numdiff compile unet                        for the GPU of this machine
    numdiff compile unet --capability 9.0       for an H100 or H200
    """,
}


class UNetKind(ModelKind):
    def resolve(self, options, given):
        preset = PRESETS.get(options.preset, {})
        if "channel_mult" not in given:
            _suit_size(options, given, preset)
        # those of the preset with this image size, else those at its levels
        if "attention_resolutions" not in given:
            sizes, wanted = _sizes(options), options.attention_resolutions
            options.attention_resolutions = tuple(r for r in wanted if r in sizes)
            if not options.attention_resolutions and "channel_mult" not in given:
                last = [
                    i for i, size in enumerate(reversed(_preset_sizes(preset))) if size in wanted
                ]
                options.attention_resolutions = tuple(sizes[-1 - i] for i in reversed(last))
        numbers_given = [
            name for name in ("num_heads", "num_heads_upsample") if given.get(name, -1) != -1
        ]
        if numbers_given and given.get("num_head_channels", -1) != -1:
            raise UsageError(
                f"{flag(numbers_given[0])} and --num-head-channels exclude each other: give one of them."
            )
        if numbers_given:  # a given number of heads takes precedence
            options.num_head_channels = -1

    def start_with(self, found, given, sizes):
        levels = level_sides(
            given.get("image_size", sizes["image_size"]), len(sizes["channel_mult"])
        )
        found["attention_resolutions"] = tuple(
            levels[i] for i in self.structure(sizes)["attention_resolutions"]
        )
        heads = ("num_heads", "num_heads_upsample")
        for name in heads if sizes["num_head_channels"] != -1 else ():
            found.pop(name, None)
        if any(name in given for name in heads):  # which is held against the file
            found.pop("num_head_channels", None)

    def structure(self, sizes):
        """With attention by levels rather than by sizes, and heads in the one way that counts."""
        found = super().structure(sizes)
        found.setdefault("block", "resnet")  # of files from before there was a choice
        levels = level_sides(sizes["image_size"], len(sizes["channel_mult"]))
        resolutions = sizes["attention_resolutions"]
        found["attention_resolutions"] = [
            i for i, level in enumerate(levels) if level in resolutions
        ]
        if found["num_head_channels"] != -1:
            del found["num_heads"], found["num_heads_upsample"]
        elif found["num_heads_upsample"] == -1:
            found["num_heads_upsample"] = found["num_heads"]
        return found

    def resized(self, theirs, own):
        return "attention stays at its levels"

    def check_options(self, options):
        _check_sizes(options)
        _check_channels(options)
        if options.block != "resnet":
            kind = extensions.find("unet_block", options.block, f"--block {options.block}")
            for name, why in kind.without.items():
                if getattr(options, name):
                    raise UsageError(f"--block {options.block} {why}: leave out {flag(name)}.")

    def upgrade(self, values):
        if values.get("learn_sigma") is None:  # before these were a UNet's, too
            values.update(learn_sigma=False, class_dropout=0.0)

    def activations(self, sizes):
        pixels = math.prod(sides(sizes["image_size"]))
        return 4 * sizes["num_res_blocks"] * pixels * sizes["model_channels"]

    def blocks(self, sizes):
        return sizes["num_res_blocks"] * len(sizes["channel_mult"])

    def describe(self, options, sizes):
        mult, usual = (
            tuple(options.channel_mult),
            PRESETS.get(options.preset, {}).get("channel_mult", ()),
        )
        more = len(mult) - len(usual)
        added = usual and more > 0 and mult == mult[:1] * more + usual
        levels = (
            f" ({more} more level{'s' * (more > 1)} than the preset, for this image size)"
            if added
            else ""
        )
        block = options.block
        title = (
            ""
            if block == "resnet"
            else extensions.find("unet_block", block, f"--block {block}").title
        )
        blocks = f", {title} blocks" * bool(title)
        return (
            f"{self.label(options)}: {self.count_parameters(sizes)[0]:,} parameters, {options.model_channels} "
            f"channels × {mult}{levels}"
            f"{blocks}, {describe_attention(options)}"
        )


def _suit_size(options, given, preset):
    """Levels, batch and steps of a preset for images larger than its own.

    Each doubling adds a first level of the same width, as guided-diffusion's table of sizes does
    (Dhariwal and Nichol 2021, table 4: 1, 2, 3, 4 at 64 pixels and 1, 1, 2, 3, 4 at 128), so that
    the last levels, where attention is, have the preset's sizes. It halves the batch and doubles
    the steps: the run sees as many images.
    """
    side = max(sides(options.image_size))
    doublings = max(0, int(math.log2(max(1, side / preset.get("image_size", side)))))
    options.channel_mult = (options.channel_mult[0],) * doublings + tuple(options.channel_mult)
    halved = 1
    while halved < 2**doublings and options.batch // (2 * halved) >= 4:
        halved *= 2
    if "batch" not in given and "microbatch" not in given:
        options.batch //= halved
        for name in ("steps", "sample_every", "checkpoint_every"):
            if name not in given and "steps" not in given:
                setattr(options, name, getattr(options, name) * halved)


def _sizes(o):
    """The image sizes of the model's levels, which `attention_resolutions` names; of images that are
    no squares the longer sides."""
    return level_sides(o.image_size, len(o.channel_mult))


def _preset_sizes(preset):
    """The image sizes of the levels of a preset's model."""
    return level_sides(preset["image_size"], len(preset["channel_mult"])) if preset else []


def describe_attention(o):
    """The sizes at which a run's model has attention, in words, and the preset's sizes that never
    occur."""

    def at(longer):
        factors = [max(sides(o.image_size)) // side for side in longer]
        return "at " + " and ".join(in_pixels(scaled_down(o.image_size, n)) for n in factors)

    sizes, middle = [size for size in _sizes(o) if size in o.attention_resolutions], _sizes(o)[-1:]
    text = f"attention {at(sizes)}" if sizes else f"attention in the middle alone, {at(middle)}"
    if sizes and middle[0] not in sizes:
        text += f", in the middle {at(middle)}"
    absent = [
        r for r in PRESETS.get(o.preset, {}).get("attention_resolutions", ()) if r not in _sizes(o)
    ]
    return text + (f" (the preset's {at(absent)} does not occur)" if absent else "")


def _check_sizes(o):
    levels = len(o.channel_mult)
    if not levels:
        raise UsageError("--channel-mult must have at least one entry.")
    factor = 2 ** (levels - 1)
    if not is_multiple(o.image_size, factor):
        raise UsageError(
            f"--image-size {o.image_size} cannot be halved {levels - 1} times, as the {levels} levels of "
            f"--channel-mult {say(o.channel_mult)} need; use a multiple of {factor}, such as "
            f"{nearest_multiple(o.image_size, factor)}, or fewer levels."
        )
    for r in o.attention_resolutions:
        if r not in _sizes(o):
            raise UsageError(
                f"--attention-resolutions {say(o.attention_resolutions)}: the model never has size {r}; "
                f"use some of {say(tuple(_sizes(o)))}, or none."
            )


def _check_channels(o):
    channels = [o.model_channels * m for m in o.channel_mult]
    if any(c % GROUPS for c in channels) or o.model_channels % GROUPS:
        raise UsageError(
            f"--model-channels {o.model_channels} must be a multiple of {GROUPS}, the groups of the group "
            f"normalisation; use {max(GROUPS, round(o.model_channels / GROUPS) * GROUPS)}."
        )
    for c, size in zip(channels, _sizes(o), strict=True):
        # the middle always has attention
        if size not in o.attention_resolutions and size != _sizes(o)[-1]:
            continue
        if o.num_head_channels == -1:
            for name in ("num_heads", "num_heads_upsample"):
                heads = getattr(o, name)
                if heads == 0 or heads > 0 and c % heads:
                    raise UsageError(
                        f"{flag(name)} {heads} does not divide the {c} channels at size {size}; use a "
                        f"divisor of {c}."
                    )
        elif o.num_head_channels < 1 or c % o.num_head_channels:
            raise UsageError(
                f"--num-head-channels {o.num_head_channels} does not divide the {c} channels at size "
                f"{size}; use a divisor of {c}, or -1 and --num-heads."
            )


UNET = UNetKind(
    "unet",
    "UNet",
    "numdiff.nn.unet:UNet",
    settings=UNetSettings,
    presets=PRESETS,
    default_preset={"cpu": "tiny", "cuda": "unet64"},
    rates=RATES,
    emoji={"tiny": SMILEYS, "unet64": SMILEYS},
    check="numdiff.nn.unet:check_options",
    twin="numdiff.benchmark.torch_unet:TorchUNet",
    twin_channels_last=True,
    class_dropout=0.0,
    parts=("attention",),
    class_table="label_emb.weight",
    implying=("num_heads", "num_heads_upsample"),
    help=HELP,
)
