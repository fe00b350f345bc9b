"""`numdiff compile`: fill the kernel cache ahead of time."""
import click

from .output import echo
from .settings import GroupedCommand, Setting, settings
from .suggest import Group


@click.group(cls=Group)
def compile():
    """Compile the kernels of a run ahead of time, also on a machine without a GPU."""


def compile_command(model):
    """Decorator: a subcommand of `compile` with the model's settings, as `train` has them."""
    def decorate(function):
        function = click.option(
            "--ranks", metavar="N", type=click.IntRange(1), default=1, show_default=True, cls=Setting,
            heading="Machine", help="GPUs that are going to train together.")(function)
        function = click.option(
            "--capability", metavar="X.Y", cls=Setting, heading="Machine",
            help="Compute capability of the GPU that the kernels are for.  [default: that of the GPU here]")(function)
        return compile.command(cls=GroupedCommand)(settings(model=model)(function))
    return decorate


@compile_command("unet")
def unet(**given):
    """The kernels of `numdiff train unet` with the same options: training step and pictures.

    They are put where a run looks for them, NUMDIFF_CACHE_DIR or ~/.cache/numdiff: for a container, or for a cluster
    whose nodes share a folder. Neither a GPU nor its driver is needed.

    \b
    numdiff compile unet                        for the GPU of this machine
    numdiff compile unet --capability 9.0       for an H100 or H200
    """
    run_compiling("unet", **given)


@compile_command("dit")
def dit(**given):
    """The kernels of `numdiff train dit` with the same options: training step and pictures.

    \b
    numdiff compile dit --capability 8.0
    numdiff compile dit --model DiT-XL/2 --size 32 --channels 4 --classes 1000 --batch 32 --capability 9.0
    """
    names = given.get("classes")
    if names and len(names) == 1 and names[0].isdecimal() and len(names[0]) < 19:
        given.update(classes=None, num_classes=int(names[0]))
    run_compiling("dit", **given)


def run_compiling(model, capability, ranks, **given):
    from numdiff.training.plan import compile_run

    compile_run({"model": model, **given}, capability, ranks, echo)
