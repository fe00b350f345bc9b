"""`numdiff ema`: averaged weights of another width, after the training."""

import click

from numdiff_cli.output import echo


@click.command(no_args_is_help=True)
@click.argument("run", metavar="RUN")
@click.option(
    "--std",
    metavar="STD",
    type=float,
    required=True,
    help="Relative width of the average: the standard deviation of its profile, as a share of the training.",
)
@click.option(
    "--output",
    metavar="FILE.h5",
    help="The model file to write.  [default: ema-STD.h5 in the run folder]",
)
@click.option(
    "--outdir",
    metavar="DIR",
    default="runs",
    show_default=True,
    help="Folder in which run numbers are looked up.",
)
def ema(run, **options):
    """Average a run's weights again, with another width (post-hoc EMA).

    RUN was trained with --ema-std, such as 0.05,0.10: a run folder (its newest checkpoint is used),
    the number of a run, `auto` for the newest one, or a checkpoint. The averages that it has stored
    are combined, by least squares.

    \b
    numdiff train unet --ema-std 0.05,0.10
    numdiff ema auto --std 0.08
    numdiff sample runs/00000-unet-tiny/ema-0.08.h5
    numdiff sample auto --ema-std 0.15                  without a file
    """
    from .write import ema_command

    ema_command(run, echo=echo, **options)
