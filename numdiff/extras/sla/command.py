"""Options of `numdiff convert` for weights of sparse-linear attention."""

import click

from numdiff_cli.values import Choice, Number

TOPK = click.option(
    "--sla-topk",
    type=Number(0, 1, min_open=True),
    metavar="SHARE",
    help="Share of the blocks that sparse-linear attention attends to exactly, where IN does not tell.  [default: 0.2]",
)
LINEAR = click.option(
    "--sla-linear",
    type=Choice(["rest", "all"]),
    help="Keys that the linear part of sparse-linear attention takes, where IN does not tell: those of the other "
    "blocks, or all, as its authors' current code has it.  [default: all]",
)
