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

import collections
import functools
import json
import pathlib
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ...data.dataset import Dataset
from ...data.writer import Writer
from ...device import Replayed, copy_into, empty
from ...device.traffic import make_feed, make_readback
from ...distributed.communicator import connect
from ...distributed.failures import AgreedError
from ...distributed.together import stop_signals
from ...errors import NumdiffError, UsageError
from ...files import atomic_file, read_bytes, write_json
from ...kernels.diffusion.images import images_forward
from ...nn.autoencoder import LOGVAR
from ...nn.tensor import Tensor
from ...outputs import check_apart
from ...progress_bar import progress_bar
from ...settings import counted
from ...training.autoencoders import array_hash, load_autoencoder
from ...training.inference import in_thread
from ...training.options import resolve_device

CHUNK = 64  # pictures of a block
AHEAD = 4  # blocks that are read before their turn
SLOTS = 2  # batches that are in flight: one computed, one read or written
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
        dataset = communicator.build(functools.partial(Dataset, in_memory=False), source)
        # while the autoencoder is loaded, threads read the first pictures, and hash
        count = len(dataset) * (1 + flip)
        blocks = -(-count // CHUNK)
        read_ahead(dataset, communicator.rank, communicator.size, blocks)
        source_key = in_thread(dataset_key, dataset)
        model = communicator.build(load_autoencoder, vae, device, precision, True)
        communicator.first(_check, dataset, model, source, vae)
        weights = model.weights_hash()
        about = {
            "source": source_key(),
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


def read_ahead(dataset, block, ranks, blocks):
    """Begin to read the pictures of a rank's block and of those that follow."""
    for later in range(block, min(block + AHEAD * ranks, blocks), ranks):
        dataset.prefetch(later * CHUNK % len(dataset) // CHUNK)


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
    ranks, batch, blocks = communicator.size, min(batch, CHUNK, count), -(-count // CHUNK)

    def batches():
        for block in range(communicator.rank, blocks, ranks):
            rows = np.arange(block * CHUNK, min(count, (block + 1) * CHUNK))
            if request.number:
                return
            if _block_path(folder, rows).exists():
                bar.update(len(rows) * ranks)
                continue
            read_ahead(dataset, block + ranks, ranks, blocks)
            yield from (rows[start : start + batch] for start in range(0, len(rows), batch))

    parts, writing = [], collections.deque()

    def finish_writing():
        written, done = writing.popleft()
        done.result()
        bar.update(written * ranks)

    # a thread writes a block, as the disk takes longer for it than a GPU for a batch
    with ThreadPoolExecutor(1, "numdiff-write") as writer:
        for rows, latents in latents_of(dataset, model, batches(), batch, draw, seed):
            parts.append((rows, latents.astype(dtype)))
            if (rows[-1] + 1) % CHUNK and rows[-1] + 1 < count:
                continue
            if writing:
                finish_writing()
            block = tuple(map(np.concatenate, zip(*parts, strict=True)))
            writing.append((len(block[0]), writer.submit(_write_block, folder, *block)))
            parts = []
        while writing:
            finish_writing()
    return communicator.largest(request.number or 0)


def _block_path(folder, rows):
    """The file of the block that has these rows."""
    return folder / f"{rows[0] // CHUNK:08d}.npy"


def _write_block(folder, rows, latents):
    if not np.isfinite(latents).all():
        raise NumdiffError(
            f"the latents of pictures {rows[0]} to {rows[-1]} are not finite: use another "
            "autoencoder, or --precision fp32."
        )
    with atomic_file(_block_path(folder, rows), "a block of latents") as file:
        np.save(file, latents)


class Stream:
    """Moments of batches of pictures of one shape. On a GPU a batch is read, uploaded and downloaded
    while others are computed.

    put(dataset, rows): start a batch; returns a function that waits for its moments, float32 (B, h,
    w, 2 · latent channels), and must be called before the second `put` after it
    """

    def __init__(self, model, shape):
        backend, (B, H, W, _) = model.backend, shape
        result = B, H // model.factor, W // model.factor, 2 * model.latent_channels
        self.model = model
        self.images, self.flip = empty(shape, np.uint8, backend), empty(B, np.int32, backend)
        self.moments = empty(result, np.float32, backend)
        self.feed = make_feed([self.images, self.flip])
        # alternately: what is uploaded, and what is downloaded
        host = getattr(backend, "pinned", np.empty)
        self.pixels = [host(shape, np.uint8) for _ in range(SLOTS)]
        self.slots = [empty(result, np.float32, backend) for _ in range(SLOTS)]
        self.readbacks = [make_readback([slot]) for slot in self.slots]
        self.puts, self._replayed = 0, Replayed(self._launch, backend)

    def _launch(self):
        copy_into(
            self.moments, self.model.moments(Tensor(images_forward(self.images, self.flip))).data
        )

    def put(self, dataset, rows):
        slot, count = self.puts % SLOTS, len(rows)
        pixels, readback = self.pixels[slot], self.readbacks[slot]
        dataset.read(rows % len(dataset), pixels[:count])
        pixels[count:] = pixels[0]
        flip = np.zeros(len(pixels), np.int32)
        flip[:count] = rows >= len(dataset)
        with self.model.arithmetic():
            self.feed.put([pixels, flip])
            self._replayed()
        copy_into(self.slots[slot], self.moments)
        readback.begin()
        self.puts += 1
        return lambda: readback.values()[0][:count]


def latents_of(dataset, model, batches, batch, draw=False, seed=0):
    """Yields (rows, float32 (len(rows), h, w, C)), what a diffusion model sees of these pictures, for
    each array of rows in `batches`, of `batch` rows at most. Rows from len(dataset) on are the
    mirrored ones."""
    streams, waiting = {}, collections.deque()

    def finished():
        rows, moments = waiting.popleft()
        mean, logvar = np.split(moments(), 2, axis=3)
        if draw:
            noise = np.stack(
                [
                    np.random.Generator(np.random.Philox(key=[seed, int(row)])).standard_normal(
                        mean.shape[1:], np.float32
                    )
                    for row in rows
                ]
            )
            mean = mean + np.exp(np.clip(logvar, *LOGVAR) / 2) * noise
        return rows, model.scale(mean)

    for rows in batches:
        # a GPU records batches of one size
        size = batch if hasattr(model.backend, "capture") else len(rows)
        if size not in streams:
            streams = {size: Stream(model, (size, *dataset.shape[1:]))}
        waiting.append((rows, streams[size].put(dataset, rows)))
        if len(waiting) == SLOTS:
            yield finished()
    while waiting:
        yield finished()


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
