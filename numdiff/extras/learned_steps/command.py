"""`numdiff schedule`: a model's own few steps."""

import click

from numdiff.settings import PRECISIONS
from numdiff_cli.output import echo
from numdiff_cli.settings import ListOf
from numdiff_cli.values import Choice


@click.command("schedule", no_args_is_help=True)
@click.argument("run", metavar="RUN")
@click.option(
    "--steps",
    metavar="STEPS",
    type=click.IntRange(1, 64),
    default=6,
    show_default=True,
    help="Steps of the schedule, each of which evaluates the model once.",
)
@click.option(
    "--output",
    metavar="FILE.json",
    type=click.Path(dir_okay=False),
    default="schedule.json",
    show_default=True,
    help="Where to write it.",
)
@click.option(
    "--from-steps",
    metavar="STEPS",
    type=click.IntRange(2, 1000),
    default=300,
    show_default=True,
    help="Steps of DDIM that are imitated.",
)
@click.option(
    "--count",
    metavar="N",
    type=click.IntRange(1, 4096),
    default=32,
    show_default=True,
    help="Images that are learned from.",
)
@click.option(
    "--seed",
    metavar="N",
    type=click.IntRange(0, 2**32 - 4097),
    default=1 << 20,
    show_default=True,
    help="Seed of the first of them.",
)
@click.option(
    "--cfg-scale",
    metavar="SCALE",
    type=float,
    help="Classifier-free guidance, as the samples are to have.  [default: none]",
)
@click.option(
    "--cfg-channels", metavar="N", type=click.IntRange(1), help="Guide only the first N channels."
)
@click.option(
    "--cfg-interval",
    metavar="LOW,HIGH",
    type=ListOf(float),
    help="Noise levels between which there is guidance, as for `numdiff sample`.  [default: all]",
)
@click.option(
    "--clip/--no-clip",
    default=None,
    help="Keep each estimate of the image within the range of pixels.  [default: clip pixels, not latents]",
)
@click.option(
    "--batch",
    metavar="IMAGES",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Images at a time; the states of all steps of a batch are in memory.",
)
@click.option(
    "--weights",
    type=Choice(["ema", "raw"]),
    help="Averaged weights, or those of the last step.  [default: ema, where there are any]",
)
@click.option(
    "--device",
    type=Choice(["auto", "cpu", "cuda", "emulator"]),
    default="auto",
    show_default=True,
    help="Where to compute; auto: the GPU if there is one.",
)
@click.option(
    "--precision",
    type=Choice(PRECISIONS),
    default="auto",
    show_default=True,
    help="Arithmetic, as for `numdiff sample`.",
)
@click.option(
    "--outdir",
    metavar="DIR",
    default="runs",
    show_default=True,
    help="Folder in which run numbers are looked up.",
)
def schedule(run, **options):
    """Learn the steps of a sampler from a trained model.

    Few levels, and the coefficients between them, by which the model's answers come closest to what
    many steps of DDIM make of the same noise (OLSS, arXiv:2305.14677). `numdiff sample --schedule
    FILE` samples with it: the same model, or later weights of it, with the same guidance.

    \b
    numdiff schedule auto --steps 6
    numdiff sample auto --schedule schedule.json --count 64
    """
    from .write import schedule_command

    schedule_command(run, progress=True, echo=echo, **options)
