"""`numdiff train`: parse, resolve, train. The options are made from the table in numdiff/training/options.py."""
import click

from numdiff.training.options import FIELDS

from .settings import GroupedCommand, Setting, settings, text


@click.group()
def train():
    """Train a model on a dataset."""


@train.command(cls=GroupedCommand)
@settings(*(name for name in FIELDS if name != "model"))
@click.option("--resume", metavar="RUN", is_flag=False, flag_value="auto", cls=Setting, heading="Run",
              help="Go on with a run: its folder, its number, or one of its checkpoints; without a value (or `auto`) "
                   "the newest run in --outdir that has a valid checkpoint.")
@click.option("--dry-run", is_flag=True, cls=Setting, heading="Run",
              help="Print the settings, the parameter count and the TFLOP of a step, and exit.")
def unet(resume, dry_run, **given):
    """Train a UNet.

    Without options: on emoji, with a model and a number of steps that suit this machine. What you leave out, the preset
    fills. The run gets its own folder, with checkpoints, pictures of samples, and the loss.

    \b
    numdiff train unet                                           on emoji
    numdiff train unet --data photos.h5 --class-cond --flip      on images of your own (see numdiff data import)
    numdiff train unet --resume                                  go on where the newest run stopped
    """
    from numdiff.training.options import resolve, resolve_resumed
    from numdiff.training.run_folder import find_resume, load_options

    given = {name: value for name, value in given.items() if value is not None}
    if resume:
        run_dir, resume = find_resume(resume, given.pop("outdir", "runs"), lambda text: click.echo(text, err=True))
        options = resolve_resumed(load_options(run_dir), given)
    else:
        options = resolve({"model": "unet", **given})
    if dry_run:
        for name, value in vars(options).items():
            click.echo(f"{name:<24} {'default' if value is None else text(value)}")
    from numdiff.training import train as run  # last: it loads everything, and a wrong option should be told at once
    run(options, resume=resume, dry_run=dry_run, echo=click.echo)
