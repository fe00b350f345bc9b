"""Batch invariance: an image gets the same bits in any batch.

A sum's bits depend on its split into partial sums, and launchers split by the size of the whole
problem. A batch of one image fills a GPU only with split sums; a batch of 32 fills it without.
Within `batch_invariant(rows)` launchers choose versions, tiles and splits as if the batch always
had `NOMINAL_BATCH` rows, so that an image's result is the same alone as among others. Sampling does
this; training, whose batch size is fixed, does not need to.

SOURCE
    plain bookkeeping; that a sum's bits depend on its order: Goldberg 1991, "What every computer
    scientist should know about floating-point arithmetic".
"""

import contextlib
import functools
import threading
import time
import weakref

import numpy as np

from ..device import is_device, over_batch
from .cpu import shares, workers
from .forks import Forks, can_fork

NOMINAL_BATCH = 32
# elements touched by a function of many operations: enough to be worth sharing among cores
WHOLE_MODEL = 1 << 30
# seconds of one evaluation from which processes, which take as long to make, are worth it
SLOW = 0.05


class _Known(threading.local):
    """rows: of the batch that this thread computes; None: launchers choose for the actual extents.
    forks: {function: its `Forks`} within `many_evaluations`; made: {(function, id of an array): (a
    reference to it, result)}."""

    rows = forks = made = None


_known = _Known()


@contextlib.contextmanager
def batch_invariant(rows):
    """Within the context an image's results depend neither on the rest of its batch nor on its
    size, `rows`."""
    outer, _known.rows = _known.rows, rows
    try:
        yield
    finally:
        _known.rows = outer


@contextlib.contextmanager
def many_evaluations():
    """Within the context no weight may change. Functions called by `evaluated` get processes if one
    evaluation takes long, and each process keeps what it has computed from the weights (`kept`): on
    the CPU engine."""
    outer, _known.forks, _known.made = (_known.forks, _known.made), {}, {}
    try:
        yield
    finally:
        for forks in _known.forks.values():
            forks.close()
        _known.made.clear()
        _known.forks, _known.made = outer


def kept(function, weight):
    """function(weight), which within `many_evaluations` is called once for as long as this array is
    there."""
    made = _known.made
    if made is None:
        return function(weight)
    key = function, id(weight)
    if key not in made:
        made[key] = weakref.ref(weight, lambda _: made.pop(key)), function(weight)
    return made[key][1]


def evaluated(function, x, *others, whole=False):
    """function(x, *others), an array with a row for each sample, with the same bits for a sample in
    any batch.

    x, others: arrays with a row for each sample, or None. On the CPU engine each core takes some of
    the samples through the whole function. A model has hundreds of operations: cores that shared
    each of them would wait for each other hundreds of times. Within `many_evaluations` they are
    processes, where a first sample alone shows that this pays.
    whole: call the function once, from this thread
    """

    def of_rows(*given):
        with batch_invariant(len(given[0])):
            return function(*given)

    def rows(share):
        return [None if a is None else a[share] for a in (x, *others)]

    if whole or is_device(x):
        return of_rows(x, *others)
    parts, known = [], _known.forks
    if known is not None and function not in known and len(x) > 1:
        begun = time.perf_counter()
        parts = [of_rows(*rows(slice(0, 1)))]  # its time predicts that of the others
        seconds = time.perf_counter() - begun
        x, *others = rows(slice(1, None))
        count = min(workers(), len(x))
        pays = count > 1 and seconds * len(x) > count * SLOW and can_fork()
        known[function] = Forks(of_rows, count - 1 if pays else 0)
    if known and known.get(function):
        forks = known[function]
        parts += forks.results(
            [rows(share) for share in shares(len(x), min(len(forks) + 1, len(x)))]
        )
    else:
        parts += over_batch(lambda share: of_rows(*rows(share)), len(x), WHOLE_MODEL)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def is_batch_invariant():
    return _known.rows is not None


def blocks(rows, least):
    """How many samples the CPU engine multiplies at a time, if each has `rows` rows; None: any
    number. The caller pads a short last block with zeros (`filled`).

    BLAS picks its inner loops by the extents, so products of different extents differ in their last
    bits. Within one product a row's bits do not depend on its place if the number of rows is a
    multiple of 16 and `rows_are_alike`.
    least: a power of two, the rows below which a product would be slow; samples whose rows do not
    divide it are taken one by one.
    """
    if _known.rows is None:
        return None
    return max(1, least // rows) if least % rows == 0 and rows_are_alike() else 1


@functools.cache
def rows_are_alike():
    """Whether this machine's BLAS gives equal rows of a product equal bits at every place.
    OpenBLAS's kernels for AVX-512 do. Those for AVX2 take twelve rows at a time, and add up the
    last six of them in another order."""
    rng = np.random.default_rng(0)
    row, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 192), (96, 192)))
    product = np.matmul(row.repeat(64, axis=0), weight.T)
    return bool((product == product[0]).all())


def rows_of_a_sample(count):
    """Rows of each sample of the batch, where all of them have `count`."""
    return max(1, count // (_known.rows or count))


def filled(rows, count):
    """An array padded with zeros along its first axis to `count` rows; the array itself if it has
    as many."""
    if len(rows) == count:
        return rows
    return np.concatenate([rows, np.zeros((count - len(rows), *rows.shape[1:]), rows.dtype)])


def nominal_extent(extent):
    """The extent by which launchers choose, for one that grows with the batch, such as B or B·T."""
    return extent if _known.rows is None else extent * NOMINAL_BATCH // _known.rows
