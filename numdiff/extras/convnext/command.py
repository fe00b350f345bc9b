"""`numdiff bench block`: one ConvNeXt block, forward and backward."""

import click

from numdiff_cli.output import echo
from numdiff_cli.settings import GroupedCommand, settings
from numdiff_cli.values import Choice

from ..measure.shared import measurement
from ..measure.versus import ended_promptly


@click.command(cls=GroupedCommand)
@measurement(
    (
        "--batch",
        {
            "metavar": "IMAGES",
            "type": click.IntRange(1, 1 << 12),
            "default": 32,
            "show_default": True,
            "help": "Images.",
        },
    ),
    (
        "--size",
        {
            "metavar": "PX",
            "type": click.IntRange(1, 1 << 10),
            "default": 32,
            "show_default": True,
            "help": "Side of an image.",
        },
    ),
    (
        "--channels",
        {
            "metavar": "N",
            "type": click.IntRange(8, 1 << 12),
            "default": 128,
            "show_default": True,
            "help": "Channels, a multiple of 8.",
        },
    ),
    (
        "--repeats",
        {
            "metavar": "N",
            "type": click.IntRange(1),
            "default": 20,
            "show_default": True,
            "help": "Runs; their median is reported. On the CPU at most 3.",
        },
    ),
    (
        "--versus",
        {"type": Choice(["torch"]), "help": "Also measure PyTorch's block, eagerly and compiled."},
    ),
)
@settings("device", "precision")
def block(batch, size, channels, repeats, versus, **given):
    """Measure one ConvNeXt block, forward and with its backward pass, on a GPU and on the CPU.

    With --device cuda the CPU is left out.
    """
    from ...benchmark.torch_step import require_torch
    from ...errors import UsageError
    from ...training.options import resolve
    from .benchmark import MODES, bench_block

    if channels % 8:
        raise UsageError(f"--channels {channels}: a ConvNeXt block takes a multiple of 8.")
    if versus:
        require_torch()
    options = resolve(given)
    echo(f"block        {batch}×{size}×{size}×{channels}, 7×7, inside {4 * channels} channels")
    with ended_promptly(versus):
        rows = bench_block(
            options.device,
            options.precision,
            batch,
            size,
            channels,
            MODES if versus else (),
            repeats,
            lambda what: click.echo(f"measuring    {what} …", err=True),
            given.get("device") != "cuda",
        )
        click.echo(f"\n| {'':28s} | forward ms | with backward ms | times numdiff's |")
        echo(f"| {'-' * 28} | {'-' * 10} | {'-' * 16} | {'-' * 15} |")
        for row in rows:
            if "fault" in row:
                echo(f"| {row['where']:28s} | failed: {row['fault']} | | |")
                continue
            against = "{:.2f}, {:.2f}".format(*row["against"]) if "against" in row else ""
            echo(
                f"| {row['where']:28s} | {1e3 * row['forward']:10.4f} | {1e3 * row['both']:16.4f} | {against:>15} |"
            )
