"""`numdiff convert`: weights of other programs to numdiff's model files, and back."""

import os

import click

from numdiff.extensions import available
from numdiff_cli.output import echo
from numdiff_cli.values import Choice, Number, Size

PATHS = "source", "target", "outdir"


@click.command("convert", no_args_is_help=True)
@click.argument("source", type=click.Path(), metavar="IN")
@click.argument("target", type=click.Path(), metavar="OUT")
@click.option(
    "--outdir",
    metavar="DIR",
    default="runs",
    show_default=True,
    help="Folder in which run numbers are looked up.",
)
@click.option(
    "--weights",
    type=Choice(["ema", "raw"]),
    help="Which weights to take if IN holds both: averaged, or as trained.  [default: ema]",
)
@click.option(
    "--image-size",
    type=Size(4096),
    metavar="PX|HxW",
    help="Side of the images of the model, or height and width, as in 48x64.",
)
@click.option(
    "--num-head-channels",
    type=click.IntRange(1, 4096),
    metavar="N",
    help="Channels of an attention head.",
)
@click.option(
    "--num-heads",
    type=click.IntRange(1, 4096),
    metavar="N",
    help="Number of attention heads, instead of --num-head-channels; for a DiT only if its size is not a "
    "published one.",
)
@click.option(
    "--num-heads-upsample",
    type=click.IntRange(1, 4096),
    metavar="N",
    help="Number of heads on the way up.  [default: --num-heads]",
)
@click.option(
    "--num-classes",
    type=click.IntRange(1),
    metavar="N",
    help="Classes of the model; its class table may have one more row, for the null class.  [default: for a "
    "DiT one less than the rows, for a UNet the rows]",
)
@click.option(
    "--rope/--no-rope",
    default=None,
    help="Whether a DiT's queries and keys are rotated, where IN does not hold the angles (feat_rope) that "
    "show it.  [default: no]",
)
@click.option(
    "--attention-order",
    type=Choice(["legacy", "new"]),
    help="Order of the qkv channels: guided-diffusion's default, or its use_new_attention_order.  "
    "[default: legacy]",
)
@click.option(
    "--max-period",
    type=Number(0, min_open=True),
    metavar="STEPS",
    help="Longest period of the timestep embedding.  [default: 10000; 1000 if IN is unet.cu's]",
)
@click.option(
    "--diffusion-steps",
    type=click.IntRange(1, 100000),
    metavar="N",
    help="Timesteps the model was trained with.  [default: 1000]",
)
@click.option(
    "--schedule",
    type=Choice(["linear", "cosine"]),
    help="Noise schedule the model was trained with.  [default: linear]",
)
@click.option(
    "--path",
    type=Choice(["discrete", "linear"]),
    help="Path the model was trained on: whole timesteps, or linear (flow matching) as SiT and LightningDiT, "
    "whose time runs the other way round: that is moved into the weights, and back.  [default: linear "
    "for LightningDiT's block, else discrete]",
)
@click.option(
    "--prediction",
    type=Choice(["eps", "v", "x_0", "flow"]),
    help="What the model predicts.  [default: eps; flow with --path linear]",
)
@click.option(
    "--rescale-timesteps/--no-rescale-timesteps",
    default=None,
    help="Whether the model sees timestep t as t · 1000 / --diffusion-steps: rescale_timesteps of "
    "improved-diffusion (its default) and guided-diffusion; with --path linear, t as 1000 · t.  "
    "[required for a UNet with other than 1000 steps]",
)
@click.option(
    "--conv-resample",
    is_flag=True,
    help="Write the pooling and repetition of a UNet as convolutions that do the same; guided-diffusion's "
    "scripts need these.",
)
@click.option(
    "--to",
    type=Choice(["diffusers-pipeline"]),
    help="Write a folder that diffusers' DiTPipeline loads: a DiT of latents, its autoencoder and a scheduler.",
)
@click.option(
    "--vae",
    metavar="FILE",
    type=click.Path(),
    help="With --to: the autoencoder of the DiT's latents.  [default: that of the run]",
)
@click.option(
    "--scaling-factor",
    type=Number(-1e6, 1e6),
    metavar="X",
    help="Of an autoencoder: a diffusion model sees its latents times this.  [default: that of IN, else "
    "0.18215]",
)
@click.option(
    "--shift-factor",
    type=Number(-1e6, 1e6),
    metavar="X",
    help="Of an autoencoder: what is subtracted from its latents before.  [default: that of IN, else 0]",
)
def convert(source, target, outdir, weights, conv_resample, to, vae, **options):
    """Write the weights in IN as OUT.

    IN is a state dict of guided-diffusion's UNet, of the public DiT, of SiT or of LightningDiT (.pt
    of torch.save, bare or a training checkpoint; .npz or .safetensors), unet.cu's .bin, or a
    numdiff checkpoint or run (its folder, number, or `auto`: the newest). A .pt is read without
    PyTorch, and nothing in it is run. OUT ends in .h5 for a numdiff model file (`numdiff sample`
    takes it), or in .npz or .safetensors for the public names and PyTorch's layout; without a
    suffix it is a folder in diffusers' layout (DiT and autoencoder only). A folder of diffusers'
    DiTPipeline is read, too: its DiT here, its autoencoder wherever there is --vae.

    IN may also be an autoencoder (AutoencoderKL): diffusers' folder, or a file with latent
    diffusion's names, which may be a whole checkpoint of it (first_stage_model). Or the weights of
    a feature network for numdiff evaluate --features: pytorch-fid's InceptionV3, or
    DINOv2 ViT-B/14.

    The sizes of the model follow from the weights. Unless IN is unet.cu's or was written by
    numdiff, you must give what weights do not show: the image size and the attention heads; for a
    DiT only the image size, and only if IN has no pos_embed.

    \b
    numdiff convert DiT-XL-2-256x256.pt dit-xl-2.h5
    numdiff convert runs/00000-dit-tiny my-dit
    numdiff convert runs/00000-dit-tiny pipeline --to diffusers-pipeline --vae vae.h5
    numdiff convert SiT-XL-2-256x256.pt sit-xl-2.h5 --path linear
    numdiff convert 64x64_diffusion.pt imagenet64.h5 --image-size 64 --num-head-channels 64 \\
        --attention-order new --schedule cosine
    numdiff convert model_100000.bin unet-cu.h5
    numdiff convert runs/00000-unet-unet64 weights.safetensors
    numdiff convert sd-vae-ft-ema vae.h5
    """
    from numdiff.errors import UsageError
    from numdiff.option_names import as_options
    from numdiff.training.sampling import find_model

    from .autoencoders import convert_autoencoder, holds_autoencoder
    from .models import convert as convert_model
    from .pipelines import convert_pipeline

    diffusion = {
        name: options.pop(option)
        for name, option in (
            ("steps", "diffusion_steps"),
            ("schedule", "schedule"),
            ("path", "path"),
            ("prediction", "prediction"),
            ("rescale_timesteps", "rescale_timesteps"),
        )
    }
    factors = {name: options.pop(name) for name in ("scaling_factor", "shift_factor")}
    with as_options():
        if not os.path.exists(source) and (source == "auto" or source.isdecimal()):
            source = find_model(source, outdir, echo)
        if vae is not None and to is None:
            raise UsageError(
                f"--vae {vae} needs --to diffusers-pipeline: add it, or leave this out."
            )
        others = click.get_current_context().params.items()
        given = [k for k, v in others if v is not None and v is not False and k not in PATHS]
        for converter in available("converter").values():
            if converter.holds(source):
                for line in converter.convert(source, target, given):
                    echo(line)
                return
        if holds_autoencoder(source):
            others = [name for name in given if name not in factors]
            for line in convert_autoencoder(source, target, factors, others):
                echo(line)
            return
        if any(value is not None for value in factors.values()):
            raise UsageError(
                "--scaling-factor and --shift-factor are of an autoencoder, and "
                f"{source} holds none: leave them out."
            )
        if to is not None and conv_resample:
            raise UsageError("--conv-resample is of a UNet, and --to writes a DiT: leave it out.")
        order = options.pop("attention_order")
        free = {**options, "use_new_attention_order": None if order is None else order == "new"}
        result = (
            convert_model(source, target, weights, diffusion, conv_resample, **free)
            if to is None
            else convert_pipeline(source, target, vae, weights, diffusion, **free)
        )
    for line in describe(target, result):
        echo(line)


for option in available("convert").values():
    convert = option(convert)


def describe(target, result):
    """Lines that describe what was converted."""
    from numdiff.training import kinds
    from numdiff.training.build import describe_diffusion

    from .kinds import weights_of

    yield from weights_of(kinds.get(result.kind)).lines(target, result, result.options)
    yield f"diffusion   {describe_diffusion(result.diffusion, result.options.get('learn_sigma'))}"
    for heading, text in result.notes:
        yield f"{heading:<11} {text}"
