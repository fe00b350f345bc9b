"""The same bits for an image in whatever batch.

A sum's bits depend on how it is cut into partial sums, and launchers cut by the extents of the whole problem: a batch
of one image fills a GPU only if long sums are split, one of 32 without. Within `any_batch(rows)` they choose versions,
tiles and splits as though the batch always had `ASSUMED` rows, so that what comes out for an image is the same alone as
among others. Sampling computes so. Training, whose batch is what it is, does not.

SOURCE
    plain bookkeeping; that a sum's bits depend on its order: Goldberg 1991, "What every computer scientist should know
    about floating-point arithmetic".
"""
import contextlib
import threading

import numpy as np

from ..device import is_device, over_batch

ASSUMED = 32
WHOLE_MODEL = 1 << 30  # elements that a function touches which is many operations: more than what is worth sharing


class _Known(threading.local):
    """rows: of the batch that this thread computes; None: launchers choose for the extents as they are."""

    rows = None


_known = _Known()


@contextlib.contextmanager
def any_batch(rows):
    """Within the context an image's results do not depend on the others of its batch, nor on their number, `rows`."""
    outer, _known.rows = _known.rows, rows
    try:
        yield
    finally:
        _known.rows = outer


def evaluated(function, x, *others, whole=False):
    """function(x, *others), an array with a row for each sample, with the same bits for a sample in any batch.

    x, others: arrays with a row for each sample, or None. On the CPU engine each core takes some of the samples through
    the whole function: a model has hundreds of operations, and cores that share each of them wait hundreds of times.
    whole: call the function once, from this thread
    """
    def rows(share):
        given = [None if a is None else a[share] for a in (x, *others)]
        with any_batch(len(given[0])):
            return function(*given)

    if whole or is_device(x):
        with any_batch(len(x)):
            return function(x, *others)
    parts = over_batch(rows, len(x), WHOLE_MODEL)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def blocks(rows, least):
    """How many samples the CPU engine takes through a product at a time, if `rows` rows belong to each; None: as many
    as it likes. A short last block is to be filled up.

    BLAS picks its inner loops by the extents, so products of other extents differ in their last bits; within one
    product a row's bits do not depend on its place, if the rows come in sixteens. least: rows of a product, a power of
    two, below which it would be slow; samples whose rows do not divide it are taken one by one.
    """
    if _known.rows is None:
        return None
    return max(1, least // rows) if least % rows == 0 else 1


def rows_of_a_sample(count):
    """Rows that belong to each sample of the batch, of `count` in all."""
    return max(1, count // (_known.rows or count))


def filled(rows, count):
    """An array with zeros appended along its first axis, to `count`; itself where it has as many."""
    if len(rows) == count:
        return rows
    return np.concatenate([rows, np.zeros((count - len(rows), *rows.shape[1:]), rows.dtype)])


def assumed(extent):
    """An extent that grows with the batch, such as B or B·T, as launchers are to see it when they choose."""
    return extent if _known.rows is None else extent * ASSUMED // _known.rows
