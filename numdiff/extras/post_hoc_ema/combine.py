"""Averages of any width, put together after the training from those that a run has stored on the
way.

A run with `--ema-std 0.05,0.10` keeps averages with power-function profiles of these widths
(power_ema.py) and stores them now and then:

    runs/00000-unet-tiny/averages-00000120.h5     of step 120: a checkpoint with the buffers ema_std_0.05, ema_std_0.1

Each is the integral of the weights θ(t) under a known profile, so a linear combination of them is
the integral under the combination of their profiles. The one that comes nearest to the wanted
profile, in the mean square over the training, is found by least squares and applied to the stored
weights, in float64.

MATHEMATICS
    p_i(t) = (γ_i + 1) · t^γ_i / t_i^(γ_i + 1)  for t ≤ t_i, else 0:  the profile of an average of update t_i
    A_ij = ⟨p_i, p_j⟩ = (γ_i + 1)(γ_j + 1) / (γ_i + γ_j + 1) · m^(γ_i + γ_j + 1) / (t_i^(γ_i + 1) · t_j^(γ_j + 1)),
    m = min(t_i, t_j);  b_i = ⟨p_i, p⟩ with the wanted profile p;  A x = b;  θ = Σ x_i · θ_i
    The paper leaves Σ x_i, which must be 1 where weights stand still, to the fit, and its code (edm2) divides the
    result by its sum. Here the sum is a condition of the fit, which comes nearest of all x with Σ x_i = 1:
    x = x_b + x_1 · (1 - Σ x_b) / Σ x_1  with A x_b = b, A x_1 = 1.
    error = ‖p - Σ x_i · p_i‖ / ‖p‖, which follows from A, x and b: what a combination cannot give is refused by it
SOURCE
    Karras et al. 2024, arXiv:2312.02696, section 3.2 and appendix C (algorithm 3).
"""

import logging
import pathlib
import re
from typing import NamedTuple

import numpy as np

from ...errors import NumdiffError, UsageError, printable
from ...nn.module import same_index
from ...training.checkpoint import buffer_names, load_checkpoint, load_meta, why_damaged
from .power_ema import NARROWEST, WIDEST, gamma_of
from .state import PREFIX, buffer_of

NAME = re.compile(r"^averages-(\d+)\.h5$")
# of a profile: with 16 snapshots of 0.05 and 0.10, the paper's widths, from 0.028 to 0.22
TOLERANCE = 0.05
STEP = 0.001  # at which the widths of a message are tried


class StoredAverage(NamedTuple):
    """A stored average: the number of updates that it is of, its γ, the file (None: the checkpoint
    itself), its buffer."""

    time: float
    gamma: float
    path: object
    buffer: str


# Profiles -----------------------------------------------------------------------------------------


def inner_product(t_i, gamma_i, t_j, gamma_j):
    """⟨p_i, p_j⟩ of profiles, float64; the arguments broadcast."""
    m = np.minimum(t_i, t_j)
    scale = (gamma_i + 1) * (gamma_j + 1) / (gamma_i + gamma_j + 1)
    return scale * (m / t_i) ** gamma_i * (m / t_j) ** gamma_j * m / (t_i * t_j)


def combination(times, gammas, time, gamma):
    """(x, error): the coefficients (n,) of profiles that come nearest to the profile `gamma` at
    `time`, and how near.

    gamma: a float, or float64 (m,) of several; then x is (n, m) and error (m,)
    """
    # in units of the training
    t, g = np.asarray(times, np.float64) / time, np.asarray(gammas, np.float64)
    own = np.sqrt(inner_product(t, g, t, g))  # their norms, of which those of early times are large
    a = inner_product(t[:, None], g[:, None], t, g) / own[:, None] / own
    wanted = np.atleast_1d(np.asarray(gamma, np.float64))
    norm = np.sqrt(inner_product(1.0, wanted, 1.0, wanted))
    b = inner_product(t[:, None], g[:, None], 1.0, wanted) / own[:, None] / norm
    x, level = np.split(
        np.linalg.lstsq(a, np.column_stack((b, 1 / own)), rcond=1e-14)[0], [wanted.size], axis=1
    )
    # so that they sum to one
    x = x + level * (1 / norm - (x / own[:, None]).sum(0)) / (level[:, 0] / own).sum()
    error = np.sqrt(np.maximum(1 - 2 * (x * b).sum(0) + (x * (a @ x)).sum(0), 0))
    x = x * norm / own[:, None]
    return (x, error) if np.ndim(gamma) else (x[:, 0], float(error[0]))


def widths(times, gammas, time):
    """[(low, high)] of the widths that these profiles can be combined to."""
    tried = np.arange(NARROWEST, WIDEST + STEP / 2, STEP)
    _, error = combination(times, gammas, time, np.array([gamma_of(std) for std in tried]))
    found = []
    for std, good in zip(tried, error <= TOLERANCE, strict=True):
        if good and found and std - found[-1][1] < 1.5 * STEP:
            found[-1][1] = std
        elif good:
            found.append([std, std])
    return [(float(low), float(high)) for low, high in found]


# Files --------------------------------------------------------------------------------------------


def list_snapshots(run_dir):
    """[(step, path)] of the stored averages of a run folder, in order."""
    run_dir = pathlib.Path(run_dir)
    found = (
        ((NAME.match(path.name), path) for path in run_dir.iterdir()) if run_dir.is_dir() else ()
    )
    return sorted((int(match[1]), path) for match, path in found if match and path.is_file())


# Putting together ---------------------------------------------------------------------------------


def updates_in(buffers):
    """How many updates went into the averages of a checkpoint."""
    counted = buffers.get("updates")
    return 0 if counted is None or counted.shape != (1,) else int(counted[0])


def refuse(path, buffers):
    """Raise a `UsageError` for a file of stored averages, which is no model: its run is what is
    meant."""
    if buffers and all(name.startswith(PREFIX) for name in buffers):
        raise UsageError(
            f"{path} holds what `numdiff ema` puts together, and no model: give its run, "
            f"{pathlib.Path(path).parent}."
        )


def find_kept(path, buffers, meta, warn):
    """[Kept] of a checkpoint and of the snapshots before it in its folder.

    A damaged snapshot is reported to `warn(text)` and left out: whether the others suffice is
    decided later.
    """
    stds = meta.get("ema_std") or []
    time = updates_in(buffers)
    own = [
        StoredAverage(time, gamma_of(std), None, buffer_of(std))
        for std in stds
        if buffer_of(std) in buffers and time
    ]
    if not own:
        raise NumdiffError(
            f"{path} keeps no averages of which one of another width can be made: train with --ema-std "
            "0.05,0.10, or take its own."
        )
    found = []
    for step, snapshot in list_snapshots(pathlib.Path(path).parent):
        if step >= meta.get("step", 0):
            continue
        if reason := why_damaged(snapshot):
            warn(printable(f"passed over: {reason}"))
            continue
        about, names = load_meta(snapshot), buffer_names(snapshot)
        when = about.get("updates", 0)
        if not same_index(about.get("index", []), meta["index"]) or not 0 < when < time:
            warn(printable(f"passed over: {snapshot} holds averages of another training."))
            continue
        found += [
            StoredAverage(when, gamma_of(std), snapshot, buffer_of(std))
            for std in about.get("ema_std", [])
            if buffer_of(std) in names
        ]
    return found + own


def weights_of(path, std, buffers, meta, warn=None):
    """(flat float32 weights, error of their profile, [Kept]): the average of the relative width
    `std` at a checkpoint.

    path: of the checkpoint; buffers, meta: what is in it. Raises a `UsageError` with the range for
    a width that what was kept does not give.
    """
    warn = warn or logging.getLogger("numdiff").warning
    kept = find_kept(path, buffers, meta, warn)
    times, gammas, time = [k.time for k in kept], [k.gamma for k in kept], kept[-1].time
    known = NARROWEST <= std <= WIDEST
    x, error = combination(times, gammas, time, gamma_of(std)) if known else (None, np.inf)
    if not error <= TOLERANCE:
        given = " or ".join(
            f"from {low:.3g} to {high:.3g}" for low, high in widths(times, gammas, time)
        )
        raise UsageError(
            f"the width {std:g} does not follow from the averages that {path} and its folder keep "
            f"({', '.join(f'{s:g}' for s in meta['ema_std'])}, at {len(set(times))} times), which give "
            f"widths {given}: choose one of these."
        )
    total = np.zeros(len(buffers[kept[-1].buffer]), np.float64)
    loaded = None, buffers
    for share, one in zip(x, kept, strict=True):
        if loaded[0] != one.path:
            loaded = one.path, buffers if one.path is None else load_checkpoint(one.path)[0]
        flat = loaded[1][one.buffer]
        if flat.shape != total.shape or flat.dtype != np.float32:
            raise NumdiffError(
                f"{one.path or path} is damaged (its {one.buffer!r} is {flat.dtype} {flat.shape}): "
                "remove it, or restore it from a copy."
            )
        total += share * flat
    return total.astype(np.float32), error, kept
