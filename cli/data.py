"""`numdiff data`: import images, and describe what a dataset holds."""

import os

import click

from .output import echo
from .suggest import ExtensibleGroup
from .values import Choice

LISTED = 60  # classes printed


@click.group(cls=ExtensibleGroup, place="data")
def data():
    """Import images, and describe datasets."""


@data.command("encode", no_args_is_help=True)
@click.argument("source", type=click.Path(), metavar="PICTURES.h5")
@click.argument("out", type=click.Path(), metavar="LATENTS.h5")
@click.option(
    "--vae",
    type=click.Path(),
    required=True,
    metavar="FILE",
    help="The autoencoder: a file of `numdiff convert` or `numdiff train vae`, or a folder of diffusers.",
)
@click.option(
    "--batch",
    type=click.IntRange(1, 4096),
    metavar="N",
    default=16,
    show_default=True,
    help="Pictures at a time.",
)
@click.option(
    "--draw",
    is_flag=True,
    help="Store a sample of each latent's distribution.  [default: its mean]",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    metavar="N",
    default=0,
    show_default=True,
    help="Of the samples.",
)
@click.option(
    "--flip",
    is_flag=True,
    help="Add the latents of the mirrored pictures, which mirrored latents are not.",
)
@click.option("--float32", is_flag=True, help="Store 32 bits.  [default: float16]")
@click.option(
    "--device",
    type=Choice(["auto", "cpu", "cuda", "emulator"]),
    default="auto",
    show_default=True,
    help="Where the encoder runs.",
)
@click.option(
    "--precision",
    type=Choice(["auto", "fp32", "tf32", "fp16", "bf16"]),
    default="auto",
    show_default=True,
    help="How it computes.",
)
@click.option("--force", is_flag=True, help="Replace LATENTS.h5 if it exists.")
def encode_command(source, out, vae, batch, draw, seed, flip, float32, device, precision, force):
    """Write the latents of the pictures in PICTURES.h5 into the dataset file LATENTS.h5.

    `numdiff train dit --data LATENTS.h5` trains on them. If the command is interrupted, the same
    command continues. Under mpiexec the ranks share the pictures.

    \b
    numdiff data encode photos.h5 latents.h5 --vae vae.h5
    """
    from numdiff.training.encode import encode_dataset

    encode_dataset(
        source,
        out,
        vae,
        batch,
        draw,
        seed,
        flip,
        "float32" if float32 else "float16",
        device,
        precision,
        force,
        echo,
    )


@data.command("info")
@click.argument("file", type=click.Path(), metavar="[FILE]", required=False)
@click.option(
    "--sheet",
    type=click.Path(dir_okay=False),
    metavar="PATH.png",
    help="Where to write the contact sheet.  [default: NAME-sheet.png in the current folder]",
)
@click.option("--no-sheet", is_flag=True, help="Write no contact sheet.")
def info_command(file, sheet, no_sheet):
    """Describe the dataset FILE, and write a contact sheet of it: one row of images for each class.

    Without FILE, the default dataset, emoji64.h5.
    """
    from numdiff.data.dataset import Dataset, default_path
    from numdiff.data.sheet import check_sheet, save_sheet
    from numdiff.errors import UsageError

    if sheet and no_sheet:
        raise UsageError(
            f"--sheet {sheet} and --no-sheet exclude each other: leave one of them out."
        )
    file = file or default_path()
    sheet = sheet or os.path.splitext(os.path.basename(file))[0] + "-sheet.png"
    if not no_sheet:
        check_sheet(sheet, file)
    with Dataset(file) as dataset:
        count, height, width, channels = dataset.shape
        mean, std = dataset.statistics()
        echo(f"file     {dataset.path} ({os.path.getsize(dataset.path) / 1e6:,.1f} MB)")
        pixels = dataset.dtype == "uint8"
        kind, digits, unit = (
            ("images ", 1, "of 0 … 255, each channel") if pixels else ("latents", 4, "each channel")
        )
        echo(
            f"{kind}  {count:,} of {height}×{width}×{channels}: {dataset.stored_dtype} (N, H, W, C) = {dataset.shape}"
            + ("" if pixels else ", taken as they are")
        )
        echo(f"mean     {'  '.join(f'{v:5.{digits}f}' for v in mean)}   {unit}")
        echo(f"std      {'  '.join(f'{v:5.{digits}f}' for v in std)}")
        if dataset.labels is None:
            echo("classes  none (no labels)")
        else:
            echo(f"classes  {len(dataset.classes)}")
            for i, n in list(enumerate(dataset.class_counts()))[:LISTED]:
                echo(f"{i:8d}  {n:8,}  {dataset.classes[i]}")
            if len(dataset.classes) > LISTED:
                echo(f"          and {len(dataset.classes) - LISTED} more")
        if not no_sheet:
            save_sheet(dataset, sheet)
            echo(
                f"sheet    {sheet}"
                + ("" if pixels else " (latents are not decoded: first channels, mean ± 2 std)")
            )
