"""`numdiff bench`: how fast this machine trains and samples, and how fast each kernel is.

Each command has a file; shared.py and versus.py have what several of them need.
"""

import click

from numdiff.extensions import entries, find
from numdiff_cli.suggest import SuggestingGroup

from . import data, kernels, ladder, quality, sample, step, transfer, tune


class Bench(SuggestingGroup):
    """The commands below, and those of extensions, which are imported when they are asked for."""

    def list_commands(self, ctx):
        return sorted([*super().list_commands(ctx), *entries("bench")])

    def get_command(self, ctx, name):
        if name in entries("bench"):
            return find("bench", name, f"numdiff bench {name}")
        return super().get_command(ctx, name)


@click.group(cls=Bench)
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
