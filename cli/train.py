"""`numdiff train`: parse, resolve, train. The options are made from the table in numdiff/training/options.py."""
import click

from .output import echo
from .settings import GroupedCommand, Setting, settings, text
from .suggest import Group


@click.group(cls=Group)
def train():
    """Train a model on a dataset."""


def train_command(model):
    """Decorator: a subcommand of `train` with the model's settings, and the options that are not settings."""
    def decorate(function):
        function = click.option(
            "--dry-run", is_flag=True, cls=Setting, heading="Run",
            help="Print the settings, the parameter count and the TFLOP of a step, and exit.")(function)
        function = click.option(
            "--new-data", is_flag=True, cls=Setting, heading="Run",
            help="With --resume: go on although the data is not what the run was trained on; its classes must be the "
                 "same, in the same order.")(function)
        function = click.option(
            "--resume", metavar="RUN", is_flag=False, flag_value="auto", cls=Setting, heading="Run",
            help="Go on with a run: its folder, its number, or one of its checkpoints; without a value (or `auto`) the "
                 "newest run in --outdir that has a valid checkpoint.")(function)
        return train.command(cls=GroupedCommand)(settings(model=model)(function))
    return decorate


@train_command("unet")
def unet(**given):
    """Train a UNet.

    Without options: on emoji, with a model and a number of steps that suit this machine. What you leave out, the preset
    fills. The run gets its own folder, with checkpoints, pictures of samples, and the loss.

    \b
    numdiff train unet                                           on emoji
    numdiff train unet --data photos.h5 --class-cond --flip      on images of your own (see numdiff data import)
    numdiff train unet --resume                                  go on where the newest run stopped
    """
    run_training("unet", **given)


@train_command("dit")
def dit(**given):
    """Train a DiT, a diffusion transformer.

    Without options: on emoji and their classes, with a model and a number of steps that suit this machine. What you
    leave out, the preset fills. --classes takes names of classes, or one number: how many classes the model has. A
    dataset whose images are floats is taken as it is, as latents are.

    \b
    numdiff train dit                                            on emoji
    numdiff train dit --data photos.h5 --model DiT-S/4 --flip    on images of your own and their classes
    numdiff train dit --data latents.h5 --model DiT-B/2          on latents: float images (N, H, W, C)
    numdiff train dit --model DiT-XL/2 --size 32 --channels 4 --classes 1000 --dry-run
    """
    names = given.get("classes")
    if names and len(names) == 1 and names[0].isdecimal() and len(names[0]) < 19:
        given.update(classes=None, num_classes=int(names[0]))
    run_training("dit", **given)


def run_training(model, resume, dry_run, new_data, **given):
    """Resolve what was given, and train; imports last what takes a second to load, so that errors come at once."""
    from numdiff.errors import UsageError
    from numdiff.training.options import resolve, resolve_resumed
    from numdiff.training.run_folder import check_outdir, find_resume, load_options

    if new_data and not resume:
        raise UsageError("--new-data belongs to --resume: leave it out.")
    given = {name: value for name, value in given.items() if value is not None}
    if resume:
        asked, outdir = resume, given.pop("outdir", None)
        run_dir, resume = find_resume(resume, outdir or "runs", lambda text: echo(text, err=True))
        if outdir is not None:
            check_outdir(asked, run_dir, outdir)
        options = resolve_resumed(load_options(run_dir), {"model": model, **given})
    else:
        options = resolve({"model": model, **given})
    if dry_run:
        from numdiff.training.options import settings_of
        for name in ("model", *settings_of(model)):
            value = getattr(options, name)
            echo(f"{name:<24} {'default' if value is None else text(value)}")
        from numdiff.training.build import describe_without_training
        for line in describe_without_training(options):
            echo(line)
        return
    from numdiff.training import train as run
    run(options, resume=resume, new_data=new_data, echo=echo)
