"""`numdiff bench tune`: the best tiles of this card."""

import math

import click

from numdiff.training import kinds
from numdiff_cli.settings import GroupedCommand, settings
from numdiff_cli.values import Choice, Number

from .shared import KERNELS, MODEL, echo_model, measurement


@click.command(cls=GroupedCommand)
@measurement(
    (
        "--of",
        {
            "type": Choice(kinds.names()),
            "default": kinds.names()[0],
            "show_default": True,
            "help": "The model whose training step gives the shapes.",
        },
    ),
    (
        "--shapes",
        {
            "metavar": "N",
            "type": click.IntRange(1),
            "help": "How many shapes of each kind to measure, those with most arithmetic first.  [default: "
            "all]",
        },
    ),
    (
        "--timeout",
        {
            "metavar": "SECONDS",
            "type": Number(0),
            "default": math.inf,
            "help": "Time after which no further shape is begun; the largest come first.  [default: none]",
        },
    ),
    (
        "--out",
        {
            "metavar": "FILE.json",
            "type": click.Path(dir_okay=False),
            "help": "The table to write; an existing one keeps its entries for other shapes.  [default: this "
            "card's, in numdiff/kernels/tuning]",
        },
    ),
)
@settings(*KERNELS, *MODEL)
def tune(of, shapes, timeout, out, **given):
    """Measure which tiles are best for the float16 kernels on this card, and write its table.

    Launchers choose tiles by an estimate. The table lists the shapes for which another choice is
    faster. It is written after each shape, so an interruption loses nothing.
    """
    from numdiff.benchmark.tune import tune as measure_tiles
    from numdiff.training.options import resolve

    options = resolve({"model": of, **given})
    echo_model(options)
    path, found = measure_tiles(options, out, click.echo, shapes, timeout)
    better = sum(choice is not None for rows in found.values() for choice in rows.values())
    click.echo(
        f"{better} of {sum(map(len, found.values()))} shapes have a faster choice; written to {path}"
    )
