"""A dataset in two parts: what a model is trained on, and what is held out to measure it."""

import numpy as np

from .chunks import CHUNK


class Subset:
    """Some rows of a `Dataset`, in their order, as a dataset. rows: int64 (n,), ascending."""

    def __init__(self, dataset, rows):
        self.whole, self.kept = dataset, rows
        self.shape = (len(rows), *dataset.shape[1:])
        self.labels = None if dataset.labels is None else dataset.labels[rows]

    def __getattr__(self, name):
        """All else, such as its path, classes and dtype, is the whole dataset's."""
        if name == "whole":  # not set yet, as in a copy
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __len__(self):
        return len(self.kept)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.whole.close()

    def read(self, rows, out=None):
        """Images of the given rows of the subset, as `Dataset.read`."""
        return self.whole.read(self.kept[rows], out)

    def prefetch(self, index):
        """Begin to read the chunk of the whole in which the first row of the subset's chunk is."""
        first = self.kept[min(index * CHUNK, len(self.kept) - 1)]
        self.whole.prefetch(int(first) // CHUNK)


def split(dataset, share, seed):
    """(the `Subset` to train on, the held-out one): `share` of the images, rounded, and at least one.

    The choice is by the seed alone: Philox's words for all rows, of which the smallest are held out.
    """
    count = len(dataset)
    held = min(max(1, round(share * count)), count - 1)
    bits = np.random.Philox(key=np.array([seed % 2**64, 1 << 63], np.uint64))
    order = np.argsort(bits.random_raw(count), kind="stable")
    return tuple(Subset(dataset, np.sort(rows)) for rows in (order[held:], order[:held]))
