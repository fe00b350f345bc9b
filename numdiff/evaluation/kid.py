"""KID: the squared maximum mean discrepancy between two sets of features, with a cubic kernel.

    k(x, y) = (x·y / D + 1)³
    mmd² = mean of k(x_i, x_j), i ≠ j  +  mean of k(y_i, y_j), i ≠ j  -  2 · mean of k(x_i, y_j)

Bińkowski et al. 2018 (arXiv:1801.01401), section 4. Leaving out i = j makes it unbiased: for two
sets of one distribution its expectation is 0 whatever their sizes. So it may be below 0, and sets
of different sizes can be compared.
"""

import numpy as np

from .frechet import checked_features, checked_pair

CHUNK = 2048  # rows of the kernel matrix at a time


def kid(x: np.ndarray, y: np.ndarray) -> float:
    """Unbiased mmd² of features x (N, D) and y (M, D), all pairs; float64."""
    x, y = checked_pair(x, y, ("the features x", "the features y"), 2)
    return _mean_off_diagonal(x) + _mean_off_diagonal(y) - 2 * _kernel_sum(x, y) / (len(x) * len(y))


def kid_subsets(
    x: np.ndarray, y: np.ndarray, size: int = 1000, subsets: int = 100, seed: int = 0
) -> tuple[float, float]:
    """(mean, standard deviation) of mmd² over random subsets of both sets: the published protocol,
    and its spread.

    If a set has no more than `size` rows, all pairs of both sets are used once, and the deviation
    is NaN.
    """
    x, y = (checked_features(a, name) for a, name in ((x, "the features x"), (y, "the features y")))
    if min(len(x), len(y)) <= size:
        return kid(x, y), float("nan")
    rng = np.random.default_rng(seed)
    values = [
        kid(x[rng.choice(len(x), size, replace=False)], y[rng.choice(len(y), size, replace=False)])
        for _ in range(subsets)
    ]
    return float(np.mean(values)), float(np.std(values))


def _kernel(x, y):
    return (x @ y.T / x.shape[1] + 1) ** 3


def _kernel_sum(x, y):
    return float(sum(_kernel(x[i : i + CHUNK], y).sum() for i in range(0, len(x), CHUNK)))


def _mean_off_diagonal(x):
    diagonal = ((np.einsum("nd,nd->n", x, x) / x.shape[1] + 1) ** 3).sum()
    return (_kernel_sum(x, x) - diagonal) / (len(x) * (len(x) - 1))
