"""`numdiff bench transfer`: what copies to and from the device cost."""

import click

from numdiff_cli.output import echo
from numdiff_cli.settings import GroupedCommand, settings

from .shared import measurement


@click.command(cls=GroupedCommand)
@measurement(
    (
        "--batch",
        {
            "metavar": "IMAGES",
            "type": click.IntRange(1, 1 << 12),
            "default": 1,
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
            "type": click.IntRange(1, 1 << 12),
            "default": 64,
            "show_default": True,
            "help": "Channels, in and out.",
        },
    ),
    (
        "--repeats",
        {
            "metavar": "N",
            "type": click.IntRange(1),
            "default": 50,
            "show_default": True,
            "help": "Runs; their median is reported.",
        },
    ),
)
@settings("device", "precision")
def transfer(batch, size, channels, repeats, **given):
    """Measure a 3×3 convolution with its copies to and from the device, and on arrays that stay
    there."""
    from numdiff.benchmark.transfer import bench_transfer
    from numdiff.device import get_backend
    from numdiff.training.options import resolve

    options = resolve(given)
    if options.precision not in ("fp32", "fp16"):
        from numdiff.errors import UsageError

        raise UsageError(f"--precision {options.precision}: copies are measured in fp32 or fp16.")
    found = bench_transfer(
        get_backend(options.device),
        batch,
        size,
        channels,
        half=options.precision == "fp16",
        repeats=repeats,
    )
    total = found["upload"] + found["kernel"] + found["download"]
    echo(
        f"convolution  {batch}×{size}×{size}×{channels}, 3×3, to {channels} channels, {options.precision}; "
        f"{found['flops'] / 1e9:.3g} GFLOP"
    )
    click.echo("\n|                                  |        ms | of the three |  GB/s |")
    echo("| -------------------------------- | --------- | ------------ | ----- |")
    for what, name, nbytes in (
        ("to device", "upload", "up"),
        ("kernel", "kernel", None),
        ("to host", "download", "down"),
        ("together, from call to answer", "together", None),
        ("resident, on arrays that stay", "resident", None),
    ):
        share = (
            f"{100 * found[name] / total:.0f} %" if name in ("upload", "kernel", "download") else ""
        )
        rate = f"{found[nbytes] / found[name] / 1e9:.3g}" if nbytes else ""
        echo(f"| {what:32} | {1e3 * found[name]:9.4f} | {share:>12} | {rate:>5} |")
    click.echo(
        f"\ncopies       the call takes {found['together'] / found['resident']:.1f} times as long as on arrays "
        "that stay"
    )
