"""How fast images come from a dataset file: read, unpacked, shuffled, and on a GPU uploaded,
mirrored and normalised.

    for row in bench_data("photos.h5"): …     # a dict each: where, cold, images_per_second, mb_per_second, cpu_us, …

The batches are those of a run (data/loader.py), one epoch of a file that was just opened, so that
each chunk is read and unpacked once. `file` reads as training reads a set of two gigabytes and
more, which stays on disk. `memory` is the way of a smaller one: it is read as a whole, which takes
`open_s`, and then batches are gathered from memory.

The file is cold when the system's page cache holds none of its pages. The system is requested to
drop them; a sample of pages, read without waiting for the disk, shows whether it did. A warm file
is read once before.
"""

import contextlib
import errno
import os
import statistics
import time

import numpy as np

from ..data.dataset import IN_MEMORY_BYTES, Dataset
from ..data.loader import Loader
from ..device import empty, get_backend, synchronize, upload
from ..device.traffic import make_feed
from ..files import open_regular
from ..kernels.diffusion.images import images_forward

DEMANDS = {(64, 64, 3, "uint8"): 5200, (32, 32, 4, "float32"): 8400, (256, 256, 3, "uint8"): 3000}
# images a second that the fastest step of such images takes on one card: what the loader has to
# keep ahead of
# times the demand that is enough: a run shares its cores with Python, and disks have bad seconds
AHEAD = 2
LOOKS = 32  # pages at which it is seen whether a file is in the system's cache
APART = 4 << 20  # bytes between two of them at least: a look makes the system read on behind it
BLOCK = 1 << 20


def demand_of(dataset):
    """Images a second of the fastest step for such images; None if none is known."""
    return DEMANDS.get((*dataset.shape[1:], dataset.dtype.name))


def bench_data(path, image_size=None, batch=64, device="cpu", repeats=3, images=None):
    """Yields a row for each way to read the dataset file.

    Rows are dicts: where ("file" or "memory"), cold (bool), images_per_second and cpu_us (of all
    threads, an image), medians of the repeats; mb_per_second, of images as the step gets them;
    open_s, seconds to open the file; or where,
    cold and missing: why there is no figure. images: of an epoch that are read at most (default:
    all).
    """
    backend = get_backend(device)
    with Dataset(path, image_size, in_memory=False) as dataset:
        image_bytes, count = dataset.dtype.itemsize * int(np.prod(dataset.shape[1:])), len(dataset)
    ways = [("file", True), ("file", False)]
    if count * image_bytes < IN_MEMORY_BYTES:
        ways += [("memory", True), ("memory", False)]
    for where, cold in ways:
        row, runs = {"where": where, "cold": cold}, []
        for _ in range(repeats):
            if missing := drop_pages(path) if cold else read_pages(path):
                row["missing"] = missing
                break
            runs.append(measure(path, image_size, batch, backend, where == "memory", images))
        else:
            row.update({name: statistics.median(run[name] for run in runs) for name in runs[0]})
            row["mb_per_second"] = row["images_per_second"] * image_bytes / 1e6
        yield row


def measure(path, image_size, batch, backend, in_memory, images=None):
    """One epoch, or `images` of it, of a file that is opened for it: {images_per_second, cpu_us,
    open_s}.

    Of a set in memory the time of opening is counted separately: a run pays it once. On a GPU the
    loader's buffers are page-locked beforehand, and the time ends when the last image is
    normalised.
    """
    before = time.perf_counter()
    with Dataset(path, image_size, in_memory=in_memory) as dataset:
        open_s = time.perf_counter() - before
        batch = min(batch, len(dataset))
        steps = max(1, min(len(dataset), images or len(dataset)) // batch)
        put = _device_side(dataset, batch, backend)
        cpu, start = time.process_time(), time.perf_counter()
        with Loader(dataset, batch, seed=0, backend=backend) as loader:
            for _ in range(steps):
                put(*next(loader))
            synchronize(backend)
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {
        "images_per_second": steps * batch / seconds,
        "cpu_us": 1e6 * cpu / (steps * batch),
        "open_s": open_s,
    }


def _device_side(dataset, batch, backend):
    """A function that brings a batch to the device and normalises and mirrors it there, as a step
    does; on the CPU the step computes with the loader's own arrays."""
    if backend is None:
        return lambda images, labels: None
    target = empty((batch, *dataset.shape[1:]), dataset.dtype, backend)
    flip, feed = upload(np.arange(batch, dtype=np.int32) % 2, backend), make_feed([target])

    def put(images, labels):
        feed.put([images])
        if dataset.dtype == np.uint8:
            images_forward(target, flip)

    put(np.zeros(target.shape, dataset.dtype), None)  # loads the kernel
    synchronize(backend)
    return put


# Cold and warm ------------------------------------------------------------------------------------


def drop_pages(path):
    """Request the system to drop a file's pages from its cache; returns why it did not, or None."""
    if not hasattr(os, "posix_fadvise"):
        return "this system does not drop a file's pages"
    with open_regular(path) as file:
        with contextlib.suppress(OSError):
            os.fsync(file.fileno())  # pages that are not yet on the disk stay
        try:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            return f"its pages cannot be dropped ({error.strerror})"
        held = cached_share(file)
    return None if held < 0.1 else f"the system kept {100 * held:.0f} % of its pages"


def cached_share(file):
    """The fraction of a file's pages in the system's cache, from a sample of them; 0 if it is
    unknown."""
    size, held = os.fstat(file.fileno()).st_size, 0
    looks = max(1, min(LOOKS, size // APART))
    for offset in np.linspace(0, max(0, size - 1), looks).astype(np.int64).tolist():
        try:
            held += os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT) > 0
        except (AttributeError, OSError) as error:
            if getattr(error, "errno", None) != errno.EAGAIN:
                return 0  # the system cannot report it
    return held / looks


def read_pages(path):
    """Bring a file into the system's cache."""
    block = bytearray(BLOCK)
    with open_regular(path) as file:
        while file.readinto(block):
            pass


# Words --------------------------------------------------------------------------------------------

HEADING = f"{'':24} images/s     MB/s  CPU µs an image  opening s  of the demand"


def line(row, demand=None):
    """A row of the table under HEADING."""
    name = f"{'cold' if row['cold'] else 'warm'}, {'from the file' if row['where'] == 'file' else 'in memory'}"
    if "missing" in row:
        return f"{name:24} not measured: {row['missing']}"
    share = f"{row['images_per_second'] / demand:11.1f} ×" if demand else f"{'–':>11}"
    return (
        f"{name:24} {row['images_per_second']:8,.0f} {row['mb_per_second']:8,.0f} {row['cpu_us']:16.1f} "
        f"{row['open_s']:10.2f}  {share}"
    ).rstrip()


def verdict(rows, demand):
    """A sentence: whether the loader keeps ahead from a warm file; None if no demand is known."""
    row = next(
        (
            row
            for row in rows
            if row["where"] == "file" and not row["cold"] and "missing" not in row
        ),
        None,
    )
    if not demand or row is None:
        return None
    ahead = row["images_per_second"] / demand
    return (
        f"the step's demand is {demand:,.0f} images/s; from the warm file the loader gives {ahead:.1f} × that, "
        f"{'enough' if ahead >= AHEAD else 'too little'} ({AHEAD} × is enough)"
    )
