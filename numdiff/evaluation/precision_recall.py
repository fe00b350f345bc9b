"""Precision and recall: how many samples look real, and how much of the real data the samples
cover.

Each set's manifold is the union of balls around its points, each as wide as the distance to its
k-th nearest neighbour in the set. Precision is the share of the samples that are in the reference's
manifold, recall the share of the reference in the samples' manifold. Kynkäänniemi et al. 2019
(arXiv:1904.06991), eq. 1 to 3, with k = 3.

Both depend on the number of points: compare figures of equal counts only.
"""

import math
import numbers

import numpy as np

from .frechet import checked_pair

CHUNK = 1024  # rows of the distance matrix at a time


def precision_recall(
    samples: np.ndarray, reference: np.ndarray, nearest: int = 3
) -> tuple[float, float]:
    """(precision, recall) of features samples (N, D) against reference (M, D), as float; NaN if one
    of them is."""
    if not isinstance(nearest, numbers.Integral) or nearest < 1:
        raise ValueError(f"nearest must be a whole number of at least 1, and not {nearest!r}")
    samples, reference = checked_pair(
        samples, reference, ("the samples' features", "the reference's"), nearest + 1
    )
    if not (np.isfinite(samples).all() and np.isfinite(reference).all()):
        return math.nan, math.nan
    centre = np.mean(reference, axis=0)  # the same distances, with less cancellation
    samples, reference = samples - centre, reference - centre
    return (
        share_within(samples, reference, radii(reference, nearest)),
        share_within(reference, samples, radii(samples, nearest)),
    )


def radii(points, nearest):
    """Squared distance of each point to its `nearest`-th neighbour among the others."""
    found = []
    for rows, distances in _distances(points, points):
        # the point itself, even if another coincides
        distances[np.arange(len(distances)), rows] = -1.0
        found.append(np.partition(distances, nearest, axis=1)[:, nearest])
    return np.concatenate(found)


def share_within(points, centres, squared_radii):
    """Share of the points that are in at least one of the balls."""
    return float(
        np.mean(
            np.concatenate(
                [
                    (distances <= squared_radii).any(axis=1)
                    for _, distances in _distances(points, centres)
                ]
            )
        )
    )


def _distances(a, b):
    """Yields (row numbers, squared distances to all of b) for the rows of a, block by block."""
    norms = np.einsum("nd,nd->n", b, b)
    for start in range(0, len(a), CHUNK):
        part = a[start : start + CHUNK]
        squares = np.einsum("nd,nd->n", part, part)[:, None] + norms - 2 * (part @ b.T)
        yield np.arange(start, start + len(part)), np.maximum(squares, 0, out=squares)
