"""`numdiff data encode`: the latents of a dataset's pictures, by an autoencoder, as a dataset of
their own.

RESUMING
    Latents are computed in blocks of CHUNK pictures. Each finished block is a file in the folder
    OUT.h5.partial, which also has a description of the call. A second call with the same arguments
    continues there, on any number of ranks. The last step writes OUT.h5 under a temporary name,
    renames it, and removes the folder.
SEVERAL RANKS
    Rank r of R has the blocks r, r + R, …; rank 0 joins them.
WHAT IS STORED
    images    float16 or float32 (N, h, w, latent channels): (latent - shift_factor) · scaling_factor
    labels, classes as in the pictures' file; with `flip` the mirrored pictures follow the others, in the same order
    vae       an attribute, JSON: the factors and the hash of the autoencoder, for which training checks them
A latent is the mean of its distribution, or with `draw` a sample: mean + exp(logvar / 2) · noise.
The noise of picture i is a separate stream, keyed by the seed and i, so that it depends on neither
batch nor ranks.
"""

import functools
import json
import pathlib
import shutil

import numpy as np

from ..data.dataset import Dataset
from ..data.writer import Writer
from ..device import download
from ..distributed.communicator import connect
from ..distributed.failures import AgreedError
from ..distributed.together import stop_signals
from ..errors import NumdiffError, UsageError
from ..files import atomic_file, read_bytes, write_json
from ..outputs import check_apart
from ..progress_bar import progress_bar
from ..settings import counted
from .autoencoders import array_hash, load_autoencoder
from .options import resolve_device

CHUNK = 64  # pictures of a block
DESCRIPTION = "encode.json"
DESCRIPTION_BYTES = 1 << 16
DTYPES = {"float16": np.float16, "float32": np.float32}


def encode_dataset(
    source,
    out,
    vae,
    batch=16,
    draw=False,
    seed=0,
    flip=False,
    dtype="float16",
    device="auto",
    precision="auto",
    force=False,
    echo=print,
):
    """Write the latents of the dataset `source` to `out`, by the autoencoder in the file or folder
    `vae`.

    batch: pictures at a time; draw: samples of the latents' distribution instead of its mean
    flip: the mirrored pictures, too; dtype: "float16" or "float32"; force: replace `out`
    Under `mpiexec` the ranks share the pictures. Ctrl-C and SIGTERM end after the current block,
    and the same call continues.
    """
    device = resolve_device(device)
    communicator = connect("auto", device)
    with communicator.job():
        communicator.first(
            functools.partial(check_apart, datasets=False), "the latents", out, source, vae
        )
        dataset = communicator.build(Dataset, source)
        model = communicator.build(load_autoencoder, vae, device, precision)
        communicator.first(_check, dataset, model, source, vae)
        weights = array_hash(download(model.parameters.data))
        about = {
            "source": dataset_key(dataset),
            "vae": weights,
            "draw": draw,
            "seed": seed if draw else 0,
            "flip": flip,
            "dtype": dtype,
            "precision": model.precision,
            "factors": [model.scaling_factor, model.shift_factor],
        }
        communicator.check_options(about)
        folder = pathlib.Path(f"{out}.partial")
        done = communicator.first(_begin, folder, about, out, force)
        count = len(dataset) * (1 + flip)
        blocks = -(-count // CHUNK)
        if done:
            echo(f"continuing: {counted(done, 'block')} of {blocks:,} were there")
        with (
            stop_signals() as request,
            progress_bar(
                count, "encoding", "picture", shown=None if communicator.rank == 0 else False
            ) as bar,
        ):
            number = _encode(
                communicator,
                dataset,
                model,
                folder,
                count,
                batch,
                draw,
                seed,
                DTYPES[dtype],
                bar,
                request,
            )
        if number:
            raise AgreedError(
                f"stopped; the blocks that are done are in {folder}, and the same command continues.",
                128 + number,
            )
        communicator.first(_join, folder, out, dataset, model, weights, count, flip, force)
        communicator.barrier()
        shape = (
            count,
            dataset.shape[1] // model.factor,
            dataset.shape[2] // model.factor,
            model.latent_channels,
        )
        echo(
            f"{out}: {count:,} latents of {'×'.join(map(str, shape[1:]))}, {dtype}, by {vae}, {model.precision}"
        )


def dataset_key(dataset):
    """What distinguishes a dataset from another one, as a string."""
    labels = "" if dataset.labels is None else array_hash(dataset.labels)
    first, last = (array_hash(dataset.chunk(index)) for index in (0, (len(dataset) - 1) // CHUNK))
    return f"{dataset.shape} {labels} {first} {last}"


def _check(dataset, model, source, vae):
    if dataset.dtype != np.uint8:
        raise UsageError(f"{source} holds floats, as latents are: give a dataset of pictures.")
    if dataset.channels != model.in_channels:
        remedy = "--rgb" if model.in_channels == 3 else "--grey"
        raise UsageError(
            f"the pictures of {source} have {dataset.channels} channels, and the autoencoder {vae} takes "
            f"{model.in_channels}: import them again with {remedy}."
        )
    if any(side % model.factor for side in dataset.shape[1:3]):
        raise UsageError(
            f"the pictures of {source} are {dataset.shape[1]}×{dataset.shape[2]}, and the autoencoder "
            f"{vae} divides each side by {model.factor}: import them again with a multiple of that as "
            "--size."
        )


def _begin(folder, about, out, force):
    """Make the folder of the blocks; returns how many there are already. Of another call, they are
    an error."""
    Writer(out, force)  # refuses a path that cannot be written, or that exists
    path = folder / DESCRIPTION
    if path.exists():
        before = json.loads(read_bytes(path, DESCRIPTION_BYTES))
        if before != about:
            changed = next((key for key in about if before.get(key) != about[key]), "version")
            raise UsageError(
                f"{folder} holds latents of another call (its {changed} differs): remove that folder, or "
                "give another OUT.h5."
            )
        return len(list(folder.glob("*.npy")))
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise NumdiffError(f"cannot make the folder {folder}: {error.strerror}.") from error
    write_json(path, about, "the description of the latents")
    return 0


def _encode(communicator, dataset, model, folder, count, batch, draw, seed, dtype, bar, request):
    """Write this rank's blocks that are missing; returns the number of a signal that ended it, or
    0."""
    for block in range(communicator.rank, -(-count // CHUNK), communicator.size):
        rows, path = (
            np.arange(block * CHUNK, min(count, (block + 1) * CHUNK)),
            folder / f"{block:08d}.npy",
        )
        if not path.exists():
            latents = latents_of(dataset, model, rows, batch, draw, seed).astype(dtype)
            if not np.isfinite(latents).all():
                raise NumdiffError(
                    f"the latents of pictures {rows[0]} to {rows[-1]} are not finite: use another "
                    "autoencoder, or --precision fp32."
                )
            with atomic_file(path, "a block of latents") as file:
                np.save(file, latents)
        bar.update(len(rows) * (1 if communicator.size == 1 else communicator.size))
        if request.number:
            break
    return communicator.largest(request.number or 0)


def latents_of(dataset, model, rows, batch, draw=False, seed=0):
    """float32 (len(rows), h, w, C): what a diffusion model sees of these pictures. Rows from
    len(dataset) on are the mirrored ones."""
    parts = []
    for start in range(0, len(rows), batch):
        chosen = rows[start : start + batch]
        images = dataset.read(chosen % len(dataset)).astype(np.float32) / np.float32(
            127.5
        ) - np.float32(1)
        mirrored = chosen >= len(dataset)
        images[mirrored] = images[mirrored, :, ::-1]
        # batches of one size are recorded once
        short = batch - len(chosen) if len(rows) > batch else 0
        mean, logvar = model.encode(
            np.concatenate([images, images[:1].repeat(short, axis=0)]) if short else images
        )
        mean, logvar = mean[: len(chosen)], logvar[: len(chosen)]
        if draw:
            noise = np.stack(
                [
                    np.random.Generator(np.random.Philox(key=[seed, int(row)])).standard_normal(
                        mean.shape[1:], np.float32
                    )
                    for row in chosen
                ]
            )
            mean = mean + np.exp(logvar / 2) * noise
        parts.append(model.scale(mean))
    return np.concatenate(parts)


def _join(folder, out, dataset, model, weights, count, flip, force):
    """Write `out` from the blocks, and remove them."""
    labels = None if dataset.labels is None else np.tile(dataset.labels, 1 + flip)
    with Writer(out, force) as writer:
        for block in range(-(-count // CHUNK)):
            path = folder / f"{block:08d}.npy"
            try:
                latents = np.load(path, allow_pickle=False)
            except (OSError, ValueError, EOFError) as error:
                path.unlink(missing_ok=True)
                raise NumdiffError(
                    f"the block {path} cannot be read ({error}): it is removed, and the same command "
                    "makes it again."
                ) from None
            for i, latent in enumerate(latents):
                writer.append(latent, None if labels is None else int(labels[block * CHUNK + i]))
        writer.finish(
            None if labels is None else dataset.classes,
            {
                "vae": json.dumps(
                    {
                        "weights": weights,
                        "scaling_factor": model.scaling_factor,
                        "shift_factor": model.shift_factor,
                        "factor": model.factor,
                        "channels": model.latent_channels,
                    }
                )
            },
        )
    shutil.rmtree(folder, ignore_errors=True)
