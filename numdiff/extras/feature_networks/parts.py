"""A network over a batch, a few images at a time."""

from collections import deque

import numpy as np

from ...device import is_device, over_batch

COST = 100  # of a pixel, compared with the elements that `over_batch` counts


def last_of(layers, x, few, many):
    """The last array that `layers(images)` yields as (name, array), of all images.

    few: images at a time on the CPU, whose cores share the batch; many: on a GPU, whose memory it
    limits
    """

    def some(rows):
        count = many if is_device(x) else few
        starts = range(rows.start, rows.stop, count)
        # of the arrays each is dropped as soon as the next is there
        return [deque(layers(x[k : min(k + count, rows.stop)]), 1)[0][1] for k in starts]

    whole = slice(0, len(x))
    parts = [some(whole)] if is_device(x) else over_batch(some, len(x), x.size * COST)
    return np.concatenate([features for part in parts for features in part])
