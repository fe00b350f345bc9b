"""`numdiff bench`: how fast this machine trains and samples, and how fast each kernel is.

Each command has a file; shared.py and versus.py have what several of them need.
"""
import click

from ..suggest import Group
from . import block, data, kernels, ladder, quality, sample, step, transfer, tune


@click.group(cls=Group)
def bench():
    """Measure how long a training step, sampling and their kernels take."""


for command in (step.step, ladder.ladder, sample.sample, quality.quality, transfer.transfer, block.block,
                kernels.kernels, data.data, tune.tune):
    bench.add_command(command)
