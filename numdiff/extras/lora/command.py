"""`numdiff lora`: adapters merged into the weights of their model."""

import click

from numdiff_cli.output import echo


@click.command(no_args_is_help=True)
@click.argument("base", metavar="BASE")
@click.argument("adapter", metavar="ADAPTER")
@click.argument("out", metavar="OUT.h5")
def lora(base, adapter, out):
    """Merge adapters of a LoRA run into the weights of their model.

    BASE is the model that they were trained on, ADAPTER is adapter.h5 of the run or one of its
    checkpoints, OUT.h5 is the model file to write. `numdiff convert ADAPTER OUT` does the same, for
    other programs, too, if the base is still where it was.

    \b
    numdiff train dit --init DiT-XL-2-256x256.pt --data photos.h5 --lora 16
    numdiff lora DiT-XL-2-256x256.pt runs/00000-dit-XL/adapter.h5 mine.h5
    """
    from .files import merge_command

    merge_command(base, adapter, out, echo=echo)
