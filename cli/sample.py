"""`numdiff sample`: images from a trained model."""
import click


@click.command(no_args_is_help=True)
@click.argument("run", metavar="RUN")
@click.option("--count",   metavar="IMAGES", type=click.IntRange(1), default=16, show_default=True,
              help="Images to make.")
@click.option("--steps",   metavar="STEPS", type=click.IntRange(1), default=50, show_default=True,
              help="Model evaluations for each image; at most the timesteps that the model was trained with.")
@click.option("--sampler", type=click.Choice(["ddim", "ddpm"]), default="ddim", show_default=True,
              help="DDIM, which does with few steps, or the ancestral sampler of DDPM.")
@click.option("--eta",     metavar="ETA", type=click.FloatRange(0, 1),
              help="Noise that DDIM adds at each step; 0 adds none, 1 is DDPM.  [default: 0]")
@click.option("--seed",    metavar="N", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True,
              help="Seed of the first image; image i has seed N + i, whatever the batch.")
@click.option("--class",   "class_name", metavar="CLASS",
              help="Class of all images, by name or index, for a model with classes.  [default: one after the other]")
@click.option("--grid",    metavar="FILE.png", default="samples.png", show_default=True,
              help="Picture that shows all images.")
@click.option("--batch",   metavar="IMAGES", type=click.IntRange(1), default=16, show_default=True,
              help="Images made at a time: more need more memory, and give the same images.")
@click.option("--weights", type=click.Choice(["ema", "raw"]), default="ema", show_default=True,
              help="Averaged weights, or those of the last step.")
@click.option("--device",  type=click.Choice(["auto", "cpu", "cuda", "emulator"]), default="auto", show_default=True,
              help="Where to compute; auto: the GPU if there is one.")
@click.option("--outdir",  metavar="DIR", default="runs", show_default=True,
              help="Where run numbers are looked up.")
def sample(run, **options):
    """Make images with a trained model.

    RUN is a run folder (its newest checkpoint is used), the number of a run, `auto` for the newest one, a checkpoint,
    or a model file of `numdiff convert`.

    \b
    numdiff sample runs/00000-unet-tiny --count 64 --grid emoji.png
    """
    from numdiff.training.sampling import sample_command

    sample_command(run, progress=True, echo=click.echo, **options)
