"""Precision and recall: how many samples look real, and how much of the real data the samples cover.

Each set's manifold is the union of balls around its points, each as wide as the distance to its k-th nearest neighbour
in the set. Precision is the share of the samples that lie in the reference's manifold, recall the share of the
reference in the samples' manifold. Kynkäänniemi et al. 2019 (arXiv:1904.06991), eq. 1 to 3, with k = 3.

Both depend on the number of points: compare figures of equal counts only.
"""
import numpy as np

CHUNK = 1024  # rows of the distance matrix at a time


def precision_recall(samples: np.ndarray, reference: np.ndarray, nearest: int = 3) -> tuple[float, float]:
    """(precision, recall) of features samples (N, D) against reference (M, D), as float."""
    if min(len(samples), len(reference)) <= nearest:
        raise ValueError(f"precision_recall needs more than {nearest} rows in each set")
    centre = np.mean(reference, axis=0, dtype=np.float64)  # the same distances, with less cancellation
    samples, reference = np.asarray(samples, np.float64) - centre, np.asarray(reference, np.float64) - centre
    return (share_within(samples, reference, radii(reference, nearest)),
            share_within(reference, samples, radii(samples, nearest)))


def radii(points, nearest):
    """Squared distance of each point to its `nearest`-th neighbour among the others."""
    found = []
    for rows, distances in _distances(points, points):
        distances[np.arange(len(distances)), rows] = -1.0  # the point itself, even if another coincides
        found.append(np.partition(distances, nearest, axis=1)[:, nearest])
    return np.concatenate(found)


def share_within(points, centres, squared_radii):
    """Share of the points that lie in at least one of the balls."""
    return float(np.mean(np.concatenate([(distances <= squared_radii).any(axis=1)
                                         for _, distances in _distances(points, centres)])))


def _distances(a, b):
    """Yields (row numbers, squared distances to all of b) for the rows of a, block by block."""
    norms = np.einsum("nd,nd->n", b, b)
    for start in range(0, len(a), CHUNK):
        part = a[start:start + CHUNK]
        squares = np.einsum("nd,nd->n", part, part)[:, None] + norms - 2 * (part @ b.T)
        yield np.arange(start, start + len(part)), np.maximum(squares, 0, out=squares)
