"""Labels of samples that are compared with a dataset."""

import numpy as np


def in_proportion(labels, count):
    """`count` labels, each as often as among `labels` (N,), in turn as long as there are any."""
    drawn = np.sort(labels)[(2 * np.arange(count) + 1) * len(labels) // (2 * count)]
    occurrence = np.arange(count) - np.searchsorted(drawn, drawn)
    return drawn[np.lexsort((drawn, occurrence))]
