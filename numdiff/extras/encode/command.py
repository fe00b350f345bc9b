"""`numdiff data encode`."""

import click

from numdiff_cli.output import echo
from numdiff_cli.values import Choice


@click.command("encode", no_args_is_help=True)
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
    from .latents import encode_dataset

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
