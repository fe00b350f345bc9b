"""`numdiff data import` and `numdiff data info`."""

import os

import click

from numdiff_cli.output import echo
from numdiff_cli.values import Choice, Size

LISTED = 60  # classes printed


@click.command("import", no_args_is_help=True)
@click.argument("source", type=click.Path(), metavar="SOURCE")
@click.argument("out", type=click.Path(), metavar="OUT.h5")
@click.option(
    "--size",
    type=Size(1024),
    metavar="PX|HxW",
    help="Side of the images in pixels, or height and width, as in 256x384.  [default: their own, if all are "
    "of one size]",
)
@click.option(
    "--fit",
    type=Choice(["crop", "pad", "stretch"]),
    help="With --size: how to bring images to that shape: crop to the centre, pad with the background, or "
    "stretch.  [default: crop]",
)
@click.option(
    "--crop",
    type=Choice(["lanczos", "adm"]),
    help="With --size: how the centre is brought to that size: by one Lanczos filter, or with the bits of "
    "guided-diffusion's crop, which published models were trained on: halved by a box filter, then "
    "bicubic.  [default: lanczos]",
)
@click.option("--rgb", is_flag=True, help="Three channels.  [default: those of the first image]")
@click.option("--grey", is_flag=True, help="One channel.")
@click.option(
    "--background",
    metavar="COLOUR",
    help="Colour behind transparent images: a name or #rrggbb.  [default: white]",
)
@click.option(
    "--labels",
    metavar="auto|folders|prefix|none|FILE",
    default="auto",
    show_default=True,
    help="Where classes come from: sub-folders, the file names up to the first _ (cat_001.png), a .csv, "
    ".json or .jsonl file, or none. auto: a labels.csv, labels.json, dataset.json or Hugging Face's "
    "metadata.csv or metadata.jsonl among the images, else sub-folders.",
)
@click.option(
    "--class-order",
    type=Choice(["numbers", "words"]),
    default="numbers",
    show_default=True,
    help="Order of classes whose names are numbers: 0, 1, 2, 10, or 0, 1, 10, 2, as torchvision's "
    "ImageFolder and guided-diffusion number them.",
)
@click.option(
    "--latents",
    is_flag=True,
    help="Floats of an array or dataset are latents, used as they are.  [default: judged by their values and "
    "channels, and reported]",
)
@click.option("--pixels", is_flag=True, help="They are pixels.")
@click.option("--float16", is_flag=True, help="Store latents as float16, in half the bytes.")
@click.option(
    "--gzip",
    is_flag=True,
    help="Pack the images. Drawings shrink to a quarter, photos hardly; reading "
    "takes several times as long.",
)
@click.option("--force", is_flag=True, help="Replace OUT.h5 if it exists.")
def import_command(source, out, rgb, grey, class_order, latents, pixels, **options):
    """Write the images of SOURCE into the dataset file OUT.h5.

    SOURCE is a folder of images, a zip or tar of one, a folder of WebDataset shards (.tar),
    cifar-10-python.tar.gz, MNIST's train-images-idx3-ubyte.gz (the labels are found in the same folder),
    an .npz or .npy, unet.cu's .bin, or another dataset file. The format is recognised by the
    contents. Images that cannot be read are named and left out. Floats of an .npz, .npy or dataset
    may be latents, which are neither scaled nor resized.

    \b
    numdiff data import photos/ photos.h5 --size 64
    numdiff data import photos/ photos.h5 --size 256 --crop adm
    numdiff data import cifar-10-python.tar.gz cifar10.h5
    numdiff data import train-images-idx3-ubyte.gz mnist.h5 --size 32 --rgb
    numdiff data import latents.npz latents.h5
    """
    from numdiff.progress_bar import tracked
    from numdiff_cli.settings import either

    from .importing import import_dataset

    coloured = either("--rgb", rgb, "--grey", grey)
    channels = None if coloured is None else 3 if coloured else 1
    report = import_dataset(
        source,
        out,
        channels=channels,
        order=class_order,
        latents=either("--latents", latents, "--pixels", pixels),
        progress=lambda items, total: tracked(items, total, "importing", "image"),
        **options,
    )
    for sentence in report.sentences():
        echo(sentence)


@click.command("info")
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
    from numdiff.errors import UsageError

    from .sheet import check_sheet, save_sheet

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
