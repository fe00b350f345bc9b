"""`numdiff compile`: fill the kernel cache ahead of time."""

import click

from .output import echo
from .settings import KindGroup, SettingOption, classes_given, kind_command

OPTIONS = (
    click.option(
        "--capability",
        metavar="X.Y",
        cls=SettingOption,
        heading="Machine",
        help="Compute capability of the GPU that the kernels are for.  [default: that of this machine's "
        "GPU]",
    ),
    click.option(
        "--ranks",
        metavar="N",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        cls=SettingOption,
        heading="Machine",
        help="GPUs that will train together.",
    ),
)


@click.group(
    cls=KindGroup,
    every=True,
    make=lambda kind: kind_command(kind, "compile", options=OPTIONS, run=run_compiling),
)
def compile():
    """Compile the kernels of a run ahead of time, even on a machine without a GPU."""


def run_compiling(model, capability, ranks, **given):
    from numdiff.training.plan import compile_run

    compile_run({"model": model, **classes_given(model, given)}, capability, ranks, echo)
