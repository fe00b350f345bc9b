"""`numdiff bench data`: how fast images come from a dataset."""

import os

import click

from numdiff_cli.output import echo
from numdiff_cli.settings import GroupedCommand, SettingOption, settings
from numdiff_cli.values import Number

from .shared import measurement


@click.command(cls=GroupedCommand)
@click.argument("file", metavar="[FILE]", type=click.Path(), required=False)
@measurement(
    (
        "--demand",
        {
            "metavar": "IMAGES/S",
            "type": Number(0, min_open=True),
            "help": "What the step takes, for "
            "comparison.  [default: that of the fastest step for 64×64 or 256×256 pixels and 32×32×4 latents]",
        },
    ),
    (
        "--repeats",
        {
            "metavar": "N",
            "type": click.IntRange(1),
            "default": 3,
            "show_default": True,
            "help": "Epochs to measure for each row, with the file opened again; their median is reported.",
        },
    ),
    (
        "--images",
        {
            "metavar": "N",
            "type": click.IntRange(1, 10**9),
            "help": "Images of an epoch to read at most.  [default: all]",
        },
    ),
)
@click.option(
    "--batch",
    cls=SettingOption,
    heading="Measurement",
    metavar="IMAGES",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Images at a time.",
)
@settings("device", "image_size")
def data(file, batch, demand, repeats, images, device, image_size):
    """Measure how fast images come from the dataset FILE or a folder of pictures (default: the
    emoji), cold and warm.

    They pass the same stages as in training: reading, unpacking, the shuffled order; on a GPU also
    the upload, and the kernel that mirrors and normalises. "From the file" is how a dataset of two
    gigabytes and more is read; a smaller one is held in memory. Cold: the system has dropped the
    file's pages from its cache.
    """
    from numdiff.benchmark.data import HEADING, bench_data, demand_of, line, verdict
    from numdiff.data.dataset import Dataset, default_path
    from numdiff.training.options import resolve

    from ..importers.folders import decoded

    device = resolve({"device": device}).device
    file = decoded(file, image_size) if file and os.path.isdir(file) else file or default_path()
    with Dataset(file, image_size, in_memory=False) as dataset:
        count, height, width, channels = dataset.shape
        demand, path = demand or demand_of(dataset), dataset.path
        echo(
            f"file         {path}: {count:,} images of {height}×{width}×{channels} {dataset.dtype}, {dataset.stored}"
        )
    where = "the CPU, without upload" if device == "cpu" else device
    echo(f"measured     batches of {batch}, to {where}; median of {repeats}")
    echo("")
    echo(HEADING)
    rows = []
    for row in bench_data(path, image_size, batch, device, repeats, images):
        rows.append(row)
        echo(line(row, demand))
    if text := verdict(rows, demand):
        echo("")
        echo(f"verdict      {text}")
