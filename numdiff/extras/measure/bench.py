"""`numdiff bench`: how fast this machine trains and samples, and how fast each kernel is.

Each command has a file; shared.py and versus.py have what several of them need.
"""

import click

from numdiff_cli.suggest import ExtensibleGroup

from . import data, kernels, ladder, quality, sample, step, transfer, tune


@click.group(cls=ExtensibleGroup, place="bench")
def bench():
    """Measure how long a training step, sampling and their kernels take."""


for command in (
    step.step,
    ladder.ladder,
    sample.sample,
    quality.quality,
    transfer.transfer,
    kernels.kernels,
    data.data,
    tune.tune,
):
    bench.add_command(command)
