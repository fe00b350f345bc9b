"""`numdiff evaluate`: compare samples with a reference."""

import click

from numdiff_cli.output import echo
from numdiff_cli.values import Choice


@click.command(no_args_is_help=True)
@click.argument("samples", metavar="SAMPLES")
@click.argument("reference", metavar="[REFERENCE]", required=False)
@click.option(
    "--features",
    metavar="FILE.h5|MODULE:FUNCTION",
    help="A feature network of numdiff convert, such as inception.h5 for FID; or your own function from "
    "images, uint8 (B, H, W, 3), to features (B, D).  [default: random-conv, a fixed random network]",
)
@click.option(
    "--classes",
    metavar="NAME,…",
    help="Keep only these classes of REFERENCE, or without one of SAMPLES, if it is a dataset.  [default: "
    "all]",
)
@click.option(
    "--nearest",
    metavar="K",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Number of nearest neighbours that define the manifolds of precision and recall.",
)
@click.option(
    "--subsets",
    metavar="N",
    type=click.IntRange(1, 10**5),
    default=100,
    show_default=True,
    help="Random subsets over which KID is averaged.",
)
@click.option(
    "--subset-size",
    metavar="IMAGES",
    type=click.IntRange(2),
    default=1000,
    show_default=True,
    help="Images in such a subset; smaller sets are compared as a whole.",
)
@click.option(
    "--seed",
    metavar="N",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Seed of the subsets.",
)
@click.option(
    "--batch",
    metavar="IMAGES",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Images whose features are computed at a time.",
)
@click.option(
    "--device",
    type=Choice(["auto", "cpu", "cuda", "emulator"]),
    default="auto",
    show_default=True,
    help="Where features are computed; auto: the GPU if there is one.",
)
@click.option(
    "--precision",
    type=Choice(["auto", "fp32", "tf32"]),
    default="auto",
    show_default=True,
    help="Arithmetic of numdiff's features; auto: fp32 everywhere, so that figures from all machines can be "
    "compared. tf32 is faster on a GPU; its figures can only be compared with those of tf32.",
)
@click.option(
    "--save-stats",
    metavar="FILE.npz",
    help="Write the statistics of SAMPLES: mu, sigma (EDM) and mu_s, sigma_s (guided-diffusion).",
)
@click.option(
    "--save-features",
    "save_feature_file",
    metavar="FILE.npz",
    help="Write the features of SAMPLES.",
)
@click.option(
    "--json", "json_file", metavar="FILE.json", help="Write the figures and their settings."
)
def evaluate(samples, reference, classes, **options):
    """Compare SAMPLES with a REFERENCE: Fréchet distance, KID, precision and recall.

    Each is an npz of images (arr_0, as numdiff sample --npz writes it), a folder of pictures, a
    dataset of numdiff data import, features (npz, npy), or statistics (mu, sigma) of
    guided-diffusion or EDM. The figures describe the features that --features computes. Those of
    random-conv compare your own runs; they are not FID.

    Both sides must be of one size: a larger dataset is averaged down, and anything else refused.
    Files of --save-stats and --save-features hold the size; of other programs' files it is not
    known.

    \b
    numdiff sample auto --count 1000 --npz samples.npz
    numdiff evaluate samples.npz data/emoji64.h5 --classes "Smileys & Emotion"
    numdiff evaluate data/emoji64.h5 --save-stats emoji.npz
    numdiff evaluate samples.npz emoji.npz --features inception.h5
    mpiexec -n 4 numdiff evaluate samples.npz emoji.npz     # each rank computes a part of the features
    """
    from .evaluate import evaluate_command

    classes = [name.strip() for name in classes.split(",")] if classes else None
    evaluate_command(samples, reference, classes=classes, progress=True, echo=echo, **options)
