"""The Fréchet distance between two normal distributions fitted to features.

    d² = |mu_1 - mu_2|² + tr Σ_1 + tr Σ_2 - 2 tr (Σ_1 Σ_2)^½

Dowson and Landau 1982; Heusel et al. 2017 (arXiv:1706.08500) took it to features of an Inception
network and called that FID. It is comparable with published FIDs only with those same features and
50,000 samples.

The eigenvalue form. (Σ_1 Σ_2)^½ need not be computed: its trace is the sum of the square roots of
the eigenvalues of Σ_1 Σ_2. They are also the eigenvalues of the symmetric Lᵀ Σ_2 L with Σ_1 = L Lᵀ.
These are real and not negative, and are found without the imaginary parts that the matrix square
root of a product has if a covariance is singular.

Two finite sets from one distribution have d² > 0, and the smaller the sets, the larger it is: only
compare figures of equal counts.
"""

import numpy as np

from ..errors import shown

CHUNK = 4096  # rows that are brought to float64 at a time


def checked_features(features, name, least=1):
    """Features as an array (N, D) of at least `least` rows; a `ValueError` for anything else."""
    try:
        features = np.asarray(features)
        if features.ndim != 2 or features.dtype.kind not in "biuf":
            raise TypeError
    except (TypeError, ValueError):  # also of rows of several lengths
        raise ValueError(
            f"{name} must be an array of numbers (N, D), one row for each image, and not "
            f"{getattr(features, 'shape', None) or shown(features)}"
        ) from None
    if len(features) < least:
        raise ValueError(
            f"{name} must have at least {least} row{'s' * (least != 1)}, and not {len(features)}"
        )
    return features


def checked_pair(x, y, names, least):
    """Two sets of features of one kind, float64."""
    x, y = (
        np.asarray(checked_features(a, name, least), np.float64)
        for a, name in zip((x, y), names, strict=True)
    )
    if x.shape[1] != y.shape[1]:
        raise ValueError(
            f"{names[0]} have {x.shape[1]} numbers in each row, and {names[1]} {y.shape[1]}: both must "
            "come from one extractor"
        )
    return x, y


def mean_and_covariance(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(mu, sigma) of features (N, D): float64, the covariance with N - 1 in the denominator, as
    np.cov has it."""
    features = checked_features(features, "the features")
    count = len(features)
    mu = sum(np.sum(part, axis=0, dtype=np.float64) for part in _parts(features)) / count
    sigma = np.zeros((len(mu), len(mu)))
    for part in _parts(features):
        centred = part - mu
        sigma += centred.T @ centred
    return mu, sigma / max(count - 1, 1)


def frechet_distance(
    mu_1: np.ndarray, sigma_1: np.ndarray, mu_2: np.ndarray, sigma_2: np.ndarray
) -> float:
    """The distance d² of the module's docstring, from means (D,) and covariances (D, D)."""
    mu_1, mu_2, sigma_1, sigma_2 = (
        np.asarray(a, np.float64) for a in (mu_1, mu_2, sigma_1, sigma_2)
    )
    if (
        mu_1.ndim != 1
        or mu_2.shape != mu_1.shape
        or not sigma_1.shape == sigma_2.shape == 2 * mu_1.shape
    ):
        raise ValueError(
            "frechet_distance takes two means (D,) with their covariances (D, D), and not the shapes "
            f"{mu_1.shape}, {sigma_1.shape}, {mu_2.shape}, {sigma_2.shape}"
        )
    root = _root((sigma_1 + sigma_1.T) / 2)
    product = root.T @ sigma_2 @ root
    eigenvalues = np.linalg.eigvalsh((product + product.T) / 2)
    difference = mu_1 - mu_2
    trace = np.trace(sigma_1) + np.trace(sigma_2) - 2 * np.sqrt(np.maximum(eigenvalues, 0)).sum()
    return float(max(difference @ difference + trace, 0.0))  # below 0 by rounding alone


def _root(sigma):
    """L with L Lᵀ = sigma: triangular, or where sigma is singular of its eigenvectors, which takes
    8 times as long."""
    try:
        return np.linalg.cholesky(sigma)
    except np.linalg.LinAlgError:
        values, vectors = np.linalg.eigh(sigma)
        return vectors * np.sqrt(np.maximum(values, 0))


def _parts(features):
    return (np.asarray(features[i : i + CHUNK], np.float64) for i in range(0, len(features), CHUNK))
