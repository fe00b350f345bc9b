"""Fréchet distance, KID, precision and recall against closed forms and explicit loops."""

import itertools

import numpy as np
import pytest

from numdiff.evaluation import (
    frechet_distance,
    kid,
    kid_subsets,
    mean_and_covariance,
    precision_recall,
)
from numdiff.evaluation.precision_recall import radii


def covariance(rng, size):
    a = rng.standard_normal((size, size))
    return a @ a.T / size


# Fréchet ------------------------------------------------------------------------------------------


def test_frechet_distance_of_normals_with_diagonal_covariances(rng):
    mu, nu, s, t = (
        rng.standard_normal(6),
        rng.standard_normal(6),
        rng.uniform(0, 2, 6),
        rng.uniform(0, 2, 6),
    )
    wanted = ((mu - nu) ** 2).sum() + ((s - t) ** 2).sum()
    assert frechet_distance(mu, np.diag(s**2), nu, np.diag(t**2)) == pytest.approx(
        wanted, rel=1e-10
    )


def test_frechet_distance_of_rotated_normals(rng):
    """Covariances that commute: the diagonal case in another basis."""
    q, _ = np.linalg.qr(rng.standard_normal((8, 8)))
    s, t = rng.uniform(0, 2, 8), rng.uniform(0, 2, 8)
    got = frechet_distance(
        np.zeros(8), q @ np.diag(s**2) @ q.T, np.ones(8), q @ np.diag(t**2) @ q.T
    )
    assert got == pytest.approx(8 + ((s - t) ** 2).sum(), rel=1e-10)


def test_frechet_distance_is_the_sum_over_eigenvalues_of_the_product(rng):
    a, b = covariance(rng, 12), covariance(rng, 12)
    eigenvalues = np.linalg.eigvals(a @ b)
    wanted = np.trace(a) + np.trace(b) - 2 * np.sqrt(eigenvalues.real).sum()
    assert np.abs(eigenvalues.imag).max() < 1e-9
    assert frechet_distance(np.zeros(12), a, np.zeros(12), b) == pytest.approx(wanted, rel=1e-9)
    assert frechet_distance(np.zeros(12), b, np.zeros(12), a) == pytest.approx(wanted, rel=1e-9)


def test_frechet_distance_in_two_dimensions(rng):
    """tr (AB)^½ = √(tr AB + 2 √det AB) for 2×2."""
    a, b = covariance(rng, 2), covariance(rng, 2)
    root = np.sqrt(np.trace(a @ b) + 2 * np.sqrt(np.linalg.det(a @ b)))
    assert frechet_distance(np.zeros(2), a, np.zeros(2), b) == pytest.approx(
        np.trace(a + b) - 2 * root, rel=1e-9
    )


def test_frechet_distance_of_singular_covariances(rng):
    few = rng.standard_normal((5, 40))  # five points in forty dimensions
    mu, sigma = mean_and_covariance(few)
    assert frechet_distance(mu, sigma, mu, sigma) < 1e-6
    assert frechet_distance(mu, sigma, mu + 2, sigma) == pytest.approx(160, rel=1e-6)
    assert frechet_distance(mu, sigma, mu, 0 * sigma) == pytest.approx(np.trace(sigma))


def test_mean_and_covariance(rng):
    # more rows than one chunk, far from 0
    x = (rng.standard_normal((5000, 7)) * 3 + 100).astype(np.float32)
    mu, sigma = mean_and_covariance(x)
    np.testing.assert_allclose(mu, x.astype(np.float64).mean(0), rtol=1e-12)
    np.testing.assert_allclose(sigma, np.cov(x.astype(np.float64), rowvar=False), rtol=1e-9)
    assert mu.dtype == sigma.dtype == np.float64


# KID ----------------------------------------------------------------------------------------------


def kid_by_loops(x, y):
    def k(a, b):
        return (sum(p * q for p, q in zip(a, b, strict=True)) / len(a) + 1) ** 3

    n, m = len(x), len(y)
    within_x = sum(k(x[i], x[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    within_y = sum(k(y[i], y[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    between = sum(k(a, b) for a, b in itertools.product(x, y)) / (n * m)
    return within_x + within_y - 2 * between


def test_kid_against_a_double_loop(rng):
    for n, m, size in ((2, 2, 1), (7, 5, 3), (20, 30, 4)):
        x, y = rng.standard_normal((n, size)), rng.standard_normal((m, size)) + 0.5
        assert kid(x, y) == pytest.approx(kid_by_loops(x, y), rel=1e-10)
        assert kid_subsets(x, y)[0] == kid(x, y) and np.isnan(kid_subsets(x, y)[1])


def test_kid_over_several_chunks(rng, monkeypatch):
    monkeypatch.setitem(kid.__globals__, "CHUNK", 200)
    x, y = (
        rng.standard_normal((500, 3)).astype(np.float32),
        rng.standard_normal((410, 3)).astype(np.float32),
    )
    gram = [(a.astype(float) @ b.astype(float).T / 3 + 1) ** 3 for a, b in ((x, x), (y, y), (x, y))]
    wanted = (
        (gram[0].sum() - np.trace(gram[0])) / (500 * 499)
        + (gram[1].sum() - np.trace(gram[1])) / (410 * 409)
        - 2 * gram[2].mean()
    )
    assert kid(x, y) == pytest.approx(wanted, rel=1e-9)


def test_kid_is_unbiased(rng):
    """Over many small pairs of sets of one distribution the mean is 0, within its standard error."""
    values = [kid(rng.standard_normal((6, 3)), rng.standard_normal((9, 3))) for _ in range(4000)]
    assert abs(np.mean(values)) < 4 * np.std(values) / np.sqrt(len(values))
    assert min(values) < 0


def test_kid_subsets(rng):
    x, y = rng.standard_normal((300, 4)), rng.standard_normal((250, 4)) + 0.3
    mean, deviation = kid_subsets(x, y, size=100, subsets=200, seed=1)
    assert abs(mean - kid(x, y)) < 5 * deviation / np.sqrt(200) and deviation > 0
    assert (
        kid_subsets(x, y, 100, 5, seed=1)
        == kid_subsets(x, y, 100, 5, seed=1)
        != kid_subsets(x, y, 100, 5, seed=2)
    )
    with pytest.raises(ValueError, match="at least 2 rows"):
        kid(x[:1], y)


# Precision and recall -----------------------------------------------------------------------------


def precision_recall_by_loops(samples, reference, nearest):
    def distance(a, b):
        return np.sqrt(((a - b) ** 2).sum())

    def share(points, centres):
        radius = [
            sorted(distance(c, d) for j, d in enumerate(centres) if j != i)[nearest - 1]
            for i, c in enumerate(centres)
        ]
        return np.mean(
            [any(distance(p, c) <= r for c, r in zip(centres, radius, strict=True)) for p in points]
        )

    return share(samples, reference), share(reference, samples)


@pytest.mark.parametrize("nearest", [1, 3])
def test_precision_recall_against_loops(rng, nearest):
    samples, reference = rng.standard_normal((30, 2)), rng.standard_normal((40, 2)) + 0.7
    got = precision_recall(samples, reference, nearest)
    assert got == pytest.approx(precision_recall_by_loops(samples, reference, nearest))
    assert 0 < got[0] < 1 and 0 < got[1] < 1


def test_precision_recall_on_constructed_sets(rng):
    grid = np.array(list(itertools.product(range(10), range(10))), np.float64)
    assert precision_recall(grid, grid) == (1, 1)
    assert precision_recall(grid + 1000, grid) == (0, 0)
    # every sample is good; they reach their half and, being 1 apart, the next row
    left = grid[grid[:, 0] < 5]
    assert precision_recall(left, grid, 1) == (1.0, 0.6)
    # a half of the samples is bad, and nothing is missed
    mixed = np.concatenate([grid, grid + 1000])
    assert precision_recall(mixed, grid) == (0.5, 1.0)


def test_radii_with_equal_points():
    points = np.array([[0.0], [0.0], [0.0], [3.0], [4.0]])
    np.testing.assert_allclose(radii(points, 1), [0, 0, 0, 1, 1])
    np.testing.assert_allclose(radii(points, 3), [9, 9, 9, 9, 16])
    with pytest.raises(ValueError, match="at least 4 rows, and not 3"):
        precision_recall(points[:3], points)


def test_precision_recall_over_several_chunks(rng):
    samples, reference = rng.standard_normal((1500, 2)), rng.standard_normal((1300, 2))
    precision, recall = precision_recall(samples, reference)
    few = precision_recall(samples[:1100], reference)
    assert 0.8 < precision < 1 and 0.8 < recall < 1 and abs(few[0] - precision) < 0.05


@pytest.mark.parametrize(
    "call, text",
    [
        (
            lambda x: mean_and_covariance(x[0]),
            "numbers .N, D., one row for each image, and not .3,.",
        ),
        (lambda x: mean_and_covariance(x[:0]), "at least 1 row, and not 0"),
        (lambda x: mean_and_covariance(row for row in x), "one row for each image"),
        (lambda x: kid(x, x[:, :2]), "features x have 3 numbers in each row, and the features y 2"),
        (lambda x: precision_recall("x", x), "samples' features must be an array of numbers"),
        (
            lambda x: precision_recall(x, x, nearest=0),
            "nearest must be a whole number of at least 1, and not 0",
        ),
        (
            lambda x: frechet_distance(*mean_and_covariance(x), *mean_and_covariance(x[:, :2])),
            "not the shapes .3,.",
        ),
    ],
)
def test_arrays_that_are_no_features_are_refused_in_one_sentence(call, text):
    with pytest.raises(ValueError, match=text):
        call(np.eye(3).repeat(2, 0))


def test_figures_of_features_that_are_not_numbers_are_not_numbers():
    x = np.random.default_rng(0).standard_normal((8, 3))
    broken = np.where(x > 1, np.nan, x)
    assert np.isnan(kid(x, broken)) and np.isnan(precision_recall(broken, x)).all()
