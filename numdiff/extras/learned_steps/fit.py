"""Learned steps: few levels and the coefficients between them, fitted to what many steps of DDIM do
with this model.

    long = Trajectory(Sampling(model, 32, 300, "ddim", seed=1 << 20))
    images = sample(model, schedule=long.schedule(steps=6))

Optimal linear subspace search (Duan et al. 2023, OLSS, arXiv:2305.14677). Every state of DDIM is a
sum of the starting noise x_T and of the model's answers so far. With few answers it is not, but
nearly: the states that a long run visits are close to the space of x_T and a few of them. So a
schedule of n levels has, for each of its steps,

    x_(i+1) = w_i · x_T + Σ_(j ≤ i) w_ij · x_0(j)

where the paper has e = (x - x_0) / σ instead of the estimates x_0. Both span the same space, since
x is in it. But the first e are nearly parallel to x_T, which is as long as σ, up to 20,000: float32
has no digits for their difference. The weights come from the least squares of the long run's
x_(i+1), over all seeds and pixels. The levels are chosen by bisection of a bound on the error. From
a level the search continues to the farthest one whose least-squares error from {x now, the
estimates so far} stays below the bound. The smallest bound that needs n levels is taken. For that
only inner products are needed, of each x and each x_0 of the long run: a matrix of about 600 × 600
in float64, for any number of images. Such a bound says nothing of how a step's error grows in the
next ones. So weights are fitted for the levels that other samplers take as well (`spacings` of the
path), and the choice that ends nearest to the long run's images is kept.

The weights are fitted to the estimates of the few steps themselves, one step after the other; the
paper fits to those of the long run. Neighbouring estimates of the long run are nearly parallel, so
their weights would be large and of both signs. A small error of x in one step would then grow many
times in the next. With an exact denoiser of 169 emoji at 16×16 pixels the authors' public code
finds the same levels for 4 and 10 steps, and neighbours of them for 6 and 8. The distance of other
images to those of 100 steps (of 255, for 4, 6, 8 and 10 steps) is 36, 31, 46 and 31 with its
weights, and 29, 19, 2.7 and 1.9 with these (DDIM: 35 to 36).
"""

import copy
import itertools
import math

import numpy as np

from ...device import download, upload
from ...diffusion.samplers import ddim
from ...errors import UsageError
from ...kernels.diffusion.sampler import combine
from .steps import MAX_STEPS, described

ROUNDS = 30  # of the bisection
# of a space's smallest direction relative to its largest: the answers, float32, say no more
CUTOFF = 1e-10
CHUNK = 1 << 15  # numbers of each vector whose products are added at a time, in float64
CHOICES = 4  # of levels: those of the bisection, and of the spacings that a path has


class Trajectory:
    """A long run of DDIM: its states, and the inner products of its states and answers.

    sampling: a `Sampling` of many steps of ddim without noise between steps; progress: called after
    each evaluation Attributes sigmas: its levels (L,); scale: a of each state, x_t = a · x (L +
    1,); states: x_t at each level and the final one, float32 (L + 1, count, elements); products:
    float64 (2 L + 1, 2 L + 1) of these and of x_0 at each level
    """

    def __init__(self, sampling, progress=lambda: None):
        if sampling.sampler != "ddim" or sampling.settings.get("eta") or sampling.slerp:
            raise UsageError(
                "learned steps imitate ddim without noise between steps: give that sampler, and eta 0."
            )
        self.sampling, self.sigmas, self.progress = sampling, sampling.sigmas[:-1], progress
        level, L = sampling.diffusion.path.level, len(self.sigmas)
        self.scale = np.array([*(level(sigma)[0] for sigma in self.sigmas), 1.0])
        self.states = np.empty((L + 1, sampling.count, math.prod(sampling.shape)), np.float32)
        self.products = np.zeros((2 * L + 1, 2 * L + 1))
        for rows in self._batches():
            self._run(rows)

    def _batches(self):
        sampling = self.sampling
        return [
            slice(start, min(start + sampling.batch, sampling.count))
            for start in range(0, sampling.count, sampling.batch)
        ]

    def _denoiser(self, rows):
        """The model with the classes of these images."""
        model = copy.copy(self.sampling.denoiser)
        if self.sampling.labels is not None:
            model.labels = upload(
                model.with_null(self.sampling.labels[rows]), self.sampling.model.backend
            )
        return model

    def _run(self, rows):
        """The states of a batch, and what it adds to the products."""
        sampling, L, model, k = self.sampling, len(self.sigmas), self._denoiser(rows), 0
        run = sampling.new_run(rows.stop - rows.start)
        noise = run.noise((sampling.seed + np.arange(rows.start, rows.stop)).astype(np.uint32))
        answers = np.empty((L, rows.stop - rows.start, self.states.shape[2]), np.float32)

        def denoise(x, sigma):
            nonlocal k
            x_0 = model(x, sigma)
            self.states[k, rows] = self.scale[k] * flat(x)
            answers[k] = flat(x_0)
            k += 1
            self.progress()
            return x_0

        self.states[L, rows] = flat(
            ddim(denoise, combine((run.plan.start_scale, noise)), sampling.sigmas)
        )
        parts = [self.states[:, rows].reshape(L + 1, -1), answers.reshape(L, -1)]
        for start in range(0, parts[0].shape[1], CHUNK):
            chunk = np.concatenate([part[:, start : start + CHUNK] for part in parts]).astype(
                np.float64
            )
            self.products += chunk @ chunk.T

    def levels(self, bound):
        """Indices of the levels that are visited where no step may err by more than `bound`, root
        mean square."""
        L, chosen = len(self.sigmas), [0]
        while True:
            ahead = np.arange(chosen[-1] + 1, L + 1)
            basis = [chosen[-1], *(L + 1 + c for c in chosen)]
            _, left = least_squares(
                self.products[np.ix_(basis, basis)],
                self.products[np.ix_(basis, ahead)],
                np.diag(self.products)[ahead],
            )
            near = np.flatnonzero(left <= bound**2 * self.states[0].size)
            # the next one is a step of DDIM
            following = int(ahead[near[-1]]) if near.size else chosen[-1] + 1
            if following == L:
                return chosen
            chosen.append(following)

    def choose(self, steps):
        """The `steps` levels of the smallest bound."""
        L = len(self.sigmas)
        low, high = 0.0, float(np.sqrt(np.diag(self.products).max() / self.states[0].size))
        best = [0]
        for _ in range(ROUNDS):
            bound = (low + high) / 2
            chosen = self.levels(bound)
            if len(chosen) <= steps:
                best, high = chosen, bound
            else:
                low = bound
        while len(best) < steps:  # no bound gives just as many: halve the widest step
            gaps = [b - a for a, b in itertools.pairwise([*best, L])]
            widest = int(np.argmax(gaps))
            best = sorted({*best, best[widest] + gaps[widest] // 2})
        return best

    def nearest(self, spacing, steps):
        """Indices of `steps` levels, as near to those of this spacing as those of the long run
        come."""
        L, chosen = len(self.sigmas), [0]
        for n, sigma in enumerate(self.sampling.diffusion.path.sigmas(spacing, steps)[1:-1], 1):
            near = int(np.argmin(np.abs(np.log(self.sigmas) - np.log(sigma))))
            chosen.append(min(max(near, chosen[-1] + 1), L - steps + n))
        return chosen

    def schedule(self, steps):
        """The schedule of `steps` levels, a dict for JSON, as `steps.SCHEDULE` says; evaluates the
        model as often for each choice of levels, of which there are up to CHOICES."""
        L, sampling = len(self.sigmas), self.sampling
        if not 1 <= steps <= min(L, MAX_STEPS):
            raise UsageError(f"learned steps are 1 to {min(L, MAX_STEPS)}, and not {steps}.")
        choices = [
            self.choose(steps),
            *(self.nearest(name, steps) for name in sampling.diffusion.path.spacings),
        ]
        found = [self._along(chosen) for chosen in map(list, dict.fromkeys(map(tuple, choices)))]
        chosen, weights, errors = min(found, key=lambda one: one[2][-1])
        return {
            "kind": "learned steps",
            **described(sampling),
            "sigmas": [float(self.sigmas[c]) for c in chosen],
            "weights": weights,
            "errors": errors,
            "steps": L,
            "count": sampling.count,
            "seed": sampling.seed,
        }

    def _along(self, chosen):
        """(levels, weights, root mean square error after each step) of the levels with these
        indices."""
        L, weights, errors = len(self.sigmas), [], []
        parts = [self.states[0] / np.float32(self.scale[0])]
        x = parts[0]
        for now, following in zip(chosen, [*chosen[1:], L], strict=True):
            parts.append(self._estimate(x, self.sigmas[now]))
            row, error = fit(parts, self.states[following] / np.float32(self.scale[following]))
            x = np.tensordot(row.astype(np.float32), np.stack(parts), 1)
            weights.append([float(weight) for weight in row])
            errors.append(float(error * self.scale[following]))
        return chosen, weights, errors

    def _estimate(self, x, sigma):
        """x_0 of all images, float32 (count, elements)."""
        x_0 = np.empty_like(x)
        for rows in self._batches():
            image = upload(x[rows].reshape(-1, *self.sampling.shape), self.sampling.model.backend)
            x_0[rows] = flat(self._denoiser(rows)(image, sigma))
            self.progress()
        return x_0


def flat(x):
    """float32 (B, elements) of images on their engine."""
    return download(x).reshape(len(x), -1)


def fit(parts, target):
    """(weights (n,), root mean square error) of a target in the space of n arrays of its shape."""
    products = np.zeros((len(parts) + 1,) * 2)
    rows = [part.reshape(-1) for part in (*parts, target)]
    for start in range(0, target.size, CHUNK):
        chunk = np.stack([row[start : start + CHUNK] for row in rows]).astype(np.float64)
        products += chunk @ chunk.T
    weights, left = least_squares(products[:-1, :-1], products[:-1, -1:], products[-1:, -1])
    return weights[:, 0], math.sqrt(left[0] / target.size)


def least_squares(products, right, squares):
    """(weights (n, m), squared errors (m,)) of m targets in a space, from the products of its n
    vectors (n, n), those of the vectors and the targets (n, m), and the squares of the targets
    (m,)."""
    length = np.sqrt(np.diag(products))
    length[length == 0] = 1  # an estimate that is black all over
    right = right / length[:, None]
    weights = np.linalg.lstsq(products / np.outer(length, length), right, rcond=CUTOFF)[0]
    return weights / length[:, None], np.maximum(squares - np.sum(weights * right, axis=0), 0)
