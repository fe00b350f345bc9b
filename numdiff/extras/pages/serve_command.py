"""`numdiff serve`: sample from a model on a page."""

import click

from numdiff.settings import PRECISIONS
from numdiff_cli.output import echo
from numdiff_cli.values import Choice


@click.command(no_args_is_help=True)
@click.argument("run", metavar="RUN")
@click.option(
    "--vae",
    metavar="FILE",
    type=click.Path(),
    help="Autoencoder that decodes the latents of a model of latents.  [default: that of the run]",
)
@click.option(
    "--weights",
    type=Choice(["ema", "raw"]),
    help="Averaged weights, or those of the last step.  [default: ema, where there are any]",
)
@click.option(
    "--device",
    type=Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where to compute; auto: the GPU if there is one.",
)
@click.option(
    "--precision",
    type=Choice([*PRECISIONS, "fp8"]),
    default="auto",
    show_default=True,
    help="Arithmetic, as of numdiff sample.",
)
@click.option(
    "--host",
    metavar="ADDRESS",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; another one lets other machines use the page.",
)
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(0, 65535),
    default=8421,
    show_default=True,
    help="Port; 0 takes a free one.",
)
@click.option(
    "--outdir",
    metavar="DIR",
    default="runs",
    show_default=True,
    help="Folder in which run numbers are looked up.",
)
def serve(run, **options):
    """Sample from a model on a page in the browser.

    RUN is what numdiff sample takes: a run folder, its number, `auto`, a checkpoint or a model file.
    The page has the class, seed, guidance, steps and sampler; the picture forms while it is sampled.
    A PNG that it stores has its settings inside, which numdiff info shows.

    \b
    numdiff serve auto
    numdiff serve DiT-XL-2-256x256.pt --vae vae.h5 --port 0
    """
    from .studio import serve_model

    serve_model(run, echo=echo, **options)
