"""`numdiff sample`: images from a trained model."""

import re

import click

from numdiff.settings import MAX_SAMPLE_STEPS, PRECISIONS, SAMPLERS

from .output import command_line, echo
from .settings import GroupedCommand, ListOf, SettingOption
from .values import Choice, Number


def option(heading, *names, **attributes):
    return click.option(*names, cls=SettingOption, heading=heading, **attributes)


class Steps(click.ParamType):
    """A number of steps, or guided-diffusion's respacing, as text."""

    name = "steps"

    def convert(self, value, param, ctx):
        if isinstance(value, int):
            return value
        if re.fullmatch("[1-9][0-9]{0,5}", value) and int(value) <= MAX_SAMPLE_STEPS:
            return int(value)
        if not re.fullmatch("ddim[1-9][0-9]{0,5}|[0-9]{1,6}(,[0-9]{1,6})+", value):
            self.fail(
                f"{value[:60]!r} is neither a number from 1 to {MAX_SAMPLE_STEPS:,} nor a respacing such as "
                "ddim50 or 10,15,20.",
                param,
                ctx,
            )
        return value


@click.command(no_args_is_help=True, cls=GroupedCommand)
@click.argument("run", metavar="RUN")
@option(
    "What",
    "--count",
    metavar="IMAGES",
    type=click.IntRange(1, 10**7),
    help="Images to make.  [default: 16, or as many as --invert needs]",
)
@option(
    "What",
    "--seed",
    metavar="N",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="Seed of the first image; image i has seed N + i, whatever the batch.",
)
@option(
    "What",
    "--skip",
    metavar="IMAGES",
    type=click.IntRange(0, 10**7),
    default=0,
    show_default=True,
    help="Leave out the first of the --count images, as an interrupted command has made them.",
)
@option(
    "What",
    "--class",
    "class_name",
    metavar="CLASS",
    multiple=True,
    help="Class of the images, for a model with classes: its name (in any case), else its index; given several "
    "times, they take turns.  [default: all in turn]",
)
@option(
    "What",
    "--cfg-scale",
    metavar="SCALE",
    type=float,
    help="Classifier-free guidance, for a model with a null class: 0 ignores the class, 1 is no guidance, more "
    "exaggerates the class.  [default: as the run draws its own pictures, or would, without --schedule and "
    "--guide-with; else 1]",
)
@option(
    "What",
    "--cfg-channels",
    metavar="N",
    type=click.IntRange(1),
    help="Guide only the first N channels; the public DiT guides 3.  [default: all]",
)
@option(
    "What",
    "--cfg-interval",
    metavar="LOW,HIGH",
    type=ListOf(float),
    help="Guide only at noise levels sigma between these two, such as 0.3,5 (for a model of the linear path sigma "
    "is t / (1 - t)); elsewhere the model answers alone, in half the time.  [default: as in the run's own "
    "pictures, with their sampler and steps; else all levels]",
)
@option(
    "What",
    "--guide-with",
    metavar="RUN",
    help="Autoguidance: exaggerate what this model does better than a worse one of the same images: a smaller one, "
    "or an earlier checkpoint.",
)
@option(
    "What",
    "--guide-scale",
    metavar="SCALE",
    type=float,
    help="Autoguidance strength; 1 disables it.  [default: 2]",
)
@option(
    "What",
    "--slerp",
    metavar="IMAGES",
    type=click.IntRange(2),
    help="Interpolate in rows of this many images, each from one seed's image to the next seed's; needs a sampler "
    "without noise.",
)
@option(
    "What",
    "--init-image",
    metavar="PICTURE",
    type=click.Path(),
    help="Start from a picture with noise instead of noise alone (SDEdit): each image is a variation of it.",
)
@option(
    "What",
    "--strength",
    metavar="S",
    type=Number(0, 1),
    help="With --init-image: the part of the steps that is done; 0 returns the picture, 1 keeps nothing of it.  "
    "[default: 0.6]",
)
@option(
    "What",
    "--invert",
    metavar="PICTURE",
    type=click.Path(),
    multiple=True,
    help="Encode a picture to its noise by the sampler's ODE in reverse (DDIM inversion), and make it again; given "
    "several times with --slerp, interpolate from each picture to the next.",
)
@option(
    "What",
    "--inpaint",
    metavar="PICTURE",
    help="Repaint the masked part of a picture (RePaint), once for each image.",
)
@option(
    "What",
    "--mask",
    metavar="MASK",
    help="The part to repaint: a picture that is white there, or left, right, top, bottom or centre.",
)
@option(
    "How",
    "--sampler",
    metavar="NAME",
    type=Choice(SAMPLERS),
    help=f"{', '.join(SAMPLERS)}; numdiff/diffusion/README.md has a table.  [default: that "
    "of the run's own pictures; ddim for a model without a run, or where that does not take --eta, as "
    "the last line says]",
)
@option(
    "How",
    "--steps",
    metavar="STEPS",
    type=Steps(),
    help="Number of steps, each of which evaluates the model once (heun: twice); or guided-diffusion's respacing: "
    "ddim50, or 10,15,20 for that many timesteps in each third.  [default: with the run's own sampler as in "
    "its pictures, else 50, or all timesteps of the model where they are fewer]",
)
@option(
    "How",
    "--schedule",
    metavar="FILE.json",
    type=click.Path(),
    help="Steps that `numdiff schedule` learned from the model, instead of --steps and --sampler.",
)
@option(
    "How",
    "--eta",
    metavar="ETA",
    type=Number(0, 1),
    help="Noise that ddim and euler-ancestral add at each step, 0 to 1.  [default: 0 for ddim, 1 for "
    "euler-ancestral]",
)
@option(
    "How",
    "--variance",
    metavar="KIND",
    type=Choice(["small", "large", "learned"]),
    help="Variance of ddpm's steps: small, large or learned.  [default: learned if the model learned it, else "
    "small]",
)
@option(
    "How",
    "--spacing",
    metavar="NAME",
    type=Choice(["timesteps", "karras", "logsnr", "time"]),
    help="Noise levels: timesteps (evenly spaced), karras (EDM's), logsnr (even in log sigma), or time "
    "(even in t, for a model of the linear path).  [default: karras for dpm++2m and euler-ancestral; "
    "for the others time for such a model, else timesteps for ddpm and ddim, karras for the rest]",
)
@option(
    "How",
    "--time-shift",
    metavar="S",
    type=Number(0.01, 100),
    help="Of a model of the linear path: t becomes S·t / (1 + (S-1)·t), so that above 1 more steps are taken where "
    "there is more noise.  [default: as in its training]",
)
@option(
    "How",
    "--s-churn",
    metavar="NOISE",
    type=Number(0),
    help="Noise that heun and euler add over all steps, as in EDM's stochastic sampler.  [default: 0]",
)
@option(
    "How",
    "--s-tmin",
    metavar="SIGMA",
    type=Number(0),
    help="Lowest noise level at which --s-churn adds noise.  [default: 0]",
)
@option(
    "How",
    "--s-tmax",
    metavar="SIGMA",
    type=Number(0),
    help="Highest noise level at which it does.  [default: any]",
)
@option(
    "How",
    "--s-noise",
    metavar="STD",
    type=Number(0),
    help="Standard deviation of that noise; a little above 1 if details get lost.  [default: 1]",
)
@option(
    "How",
    "--clip/--no-clip",
    default=None,
    help="Keep each estimate of the image within the range of pixels.  [default: clip pixels, not latents]",
)
@option(
    "How",
    "--jump",
    metavar="STEPS",
    type=click.IntRange(1),
    help="How many steps inpainting goes back at a time.  [default: 5]",
)
@option(
    "How",
    "--resamples",
    metavar="TIMES",
    type=click.IntRange(1),
    help="How often inpainting runs each stretch of steps.  [default: 5]",
)
@option(
    "Output",
    "--grid",
    metavar="FILE.png",
    help="Picture of the first 256 images.  [default: samples.png, unless --npz or --animation is given]",
)
@option(
    "Output",
    "--npz",
    metavar="FILE.npz",
    help="All images as uint8 (N, H, W, 3), for numdiff evaluate and other evaluators.",
)
@option(
    "Output",
    "--json",
    "json_file",
    metavar="FILE.json",
    help="How the images were made: classes, sampler, seeds, the model's hash, seconds, the command. PNG files "
    "have it inside, too.",
)
@option(
    "Output",
    "--animation",
    metavar="FILE.gif|.png",
    help="The denoising of the first 64 images, as a GIF or an animated PNG.",
)
@option(
    "Output",
    "--frames",
    metavar="N",
    type=click.IntRange(1, 1000),
    help="Frames of the animation, in addition to the last.  [default: 40]",
)
@option(
    "Output",
    "--columns",
    metavar="N",
    type=click.IntRange(1),
    help="Columns of the grid and the animation.  [default: about square, or one for each class]",
)
@option(
    "Output",
    "--vae",
    metavar="FILE",
    type=click.Path(),
    help="Autoencoder that decodes the latents of a model of latents to pictures.  [default: that of the run]",
)
@option(
    "Run",
    "--batch",
    metavar="IMAGES",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Images made at a time: more need more memory and give the same images.",
)
@option(
    "Run",
    "--weights",
    type=Choice(["ema", "raw"]),
    help="Averaged weights, or those of the last step.  [default: ema, where there are any]",
)
@option(
    "Run",
    "--ema-std",
    metavar="STD",
    type=float,
    help="Averaged weights of this relative width, of a run with --ema-std, as numdiff ema puts them together.",
)
@option(
    "Run",
    "--lora",
    metavar="FILE.h5",
    type=click.Path(),
    help="Adapters of a run with --lora, such as its adapter.h5, which are merged into the weights of RUN. A LoRA "
    "run itself needs none.",
)
@option(
    "Run",
    "--device",
    type=Choice(["auto", "cpu", "cuda", "emulator"]),
    default="auto",
    show_default=True,
    help="Where to compute; auto: the GPU if there is one.",
)
@option(
    "Run",
    "--precision",
    type=Choice([*PRECISIONS, "fp8"]),
    default="auto",
    show_default=True,
    help="Arithmetic: fp32: float32; tf32: matrix products in TF32 on tensor cores; fp16: activations and products "
    "in float16 (GPUs only); bf16: in bfloat16; fp8: of a DiT from 8.9 on, fp16 with the products of the linear "
    "layers of all blocks but the first and the last in E4M3; auto: fp16 on a GPU, else fp32.",
)
@option(
    "Run",
    "--eager/--no-eager",
    default=False,
    show_default=True,
    help="Launch each kernel from Python, instead of replaying a graph of a step on the GPU: same bits, slower.",
)
@option(
    "Run",
    "--outdir",
    metavar="DIR",
    default="runs",
    show_default=True,
    help="Folder in which run numbers are looked up.",
)
def sample(run, **options):
    """Make images with a trained model.

    RUN is a run folder (its newest checkpoint is used), the number of a run, `auto` for the newest
    one, a checkpoint, a model file, or weights that `numdiff convert` reads or writes, where these
    need no options.

    \b
    numdiff sample auto --count 64 --grid emoji.png
    numdiff sample auto --sampler heun --steps 18 --count 10000 --batch 64 --npz samples.npz
    numdiff sample auto --class flags --cfg-scale 3 --animation flags.gif
    numdiff sample 3 --guide-with runs/00003-dit-small64/checkpoint-00001000.h5
    numdiff sample auto --ema-std 0.08
    numdiff sample auto --slerp 8 --count 32
    numdiff sample auto --init-image photo.png --strength 0.6
    numdiff sample auto --invert a.png --invert b.png --slerp 8 --steps 50
    numdiff sample auto --inpaint face.png --mask left
    mpiexec -n 4 numdiff sample auto --count 50000 --batch 256 --npz samples.npz
    """
    from numdiff.training.sampling import sample_command

    sample_command(
        run, progress=True, echo=echo, command=command_line(click.get_current_context()), **options
    )
