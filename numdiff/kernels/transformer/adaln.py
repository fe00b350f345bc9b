"""Adaptive norms: every token normalised, then scaled and shifted by what its image is conditioned
on, in one pass.

MATHEMATICS, for token t of image b
        mean = Σ_c x / C          var = Σ_c (x - mean)² / C          rstd = 1 / √(var + eps)
        xhat = (x - mean) · rstd          y = xhat · (1 + scale[b, c]) + shift[b, c]
    Backward, with h = dy · (1 + scale) and averages over the row:
        dshift[b, c] = Σ_t dy          dscale[b, c] = Σ_t dy · xhat          (in the reference S)
        dx as in norms/row_norm.py
    DiT's norm has no weight and bias: scale and shift are those, one pair an image. Today's transformers have RMSNorm,
    a weight, or no shift (norms/row_norm.py). With a weight y = xhat · weight[c] · (1 + scale) + shift, so
        dscale[b, c] = weight[c] · S[b, c]          dweight[c] += Σ_b (1 + scale[b, c]) · S[b, c]
SHAPES
    x, y, dx, dy (B, T, C) float32; shift, scale, dshift, dscale (B, C); weight, dweight (C,); mean, rstd (B · T,)
    Kernels count tokens through all images, row = b · T + t, and call a row's mean and rstd `average` and `r`.
VERSIONS
    v1 block-per-row, v2 warp-per-row: the kernels of norms/row_norm.py, for every norm.
    dshift, dscale likewise: v1 a thread a channel of an image; v2 partial sums of chunks of tokens.
LAUNCH
    y, dx as norms/row_norm.py. v2 of the sums: grid (chunks of tokens, channel tiles, B), 256 threads, 8 KiB, then
    reduce/trees.py if there is more than one chunk.
DETERMINISM
    no atomics: trees, shuffles and partial sums have an order that the shape alone decides.
COST
    forward: 8 n bytes, where LayerNorm and then scale_shift would move 16 n. Backward: 12 n for dx, 8 n more for
    dshift and dscale; dweight costs nothing of that order. Roof: memory bandwidth.
SOURCE
    Peebles and Xie 2023, arXiv:2212.09748, section 3.2 and figure 3 (adaLN-Zero).
READ NEXT
    gate.py, the other half of adaLN-Zero.
"""

import numpy as np

from ...device import empty, empty_like, launch, over_batch
from ...dtypes import in_single
from ..norms.row_norm import (
    BACKWARD,
    FORWARD,
    NORMS,
    SUMS,
    Norm,
    check_norm,
    launch_rows,
    row_versions,
)
from ..operation import Problem, half, operation, positive, single
from ..reduce.second_pass import add_rows
from ..reduce.trees import BLOCK, cut, sample_sum

# References ---------------------------------------------------------------------------------------


@in_single(1, 2)
def adaln_forward_reference(x, shift, scale, eps=1e-6, weight=None, norm="layer"):
    """(y, mean, rstd), image by image; mean is None of an RMSNorm."""
    y, rstd = np.empty_like(x), np.empty(x.shape[:2], x.dtype)
    mean = np.empty(x.shape[:2], x.dtype) if norm == "layer" else None

    def images(i):
        if mean is None:
            y[i] = x[i]
        else:
            mean[i] = x[i].mean(2)
            np.subtract(x[i], mean[i, :, None], out=y[i])  # centred first: its squares lose nothing
        rstd[i] = 1 / np.sqrt(np.einsum("btc,btc->bt", y[i], y[i]) / x.shape[2] + eps)
        y[i] *= rstd[i, :, None]
        y[i] *= factors_reference(scale[i], weight)[:, None]
        if shift is not None:
            y[i] += shift[i, None]

    over_batch(images, len(x), x.size)
    return y, None if mean is None else mean.reshape(-1), rstd.reshape(-1)


def factors_reference(scale, weight):
    """What xhat is multiplied by, (B, C)."""
    return 1 + scale if weight is None else weight * (1 + scale)


@in_single(1, 2)
def adaln_backward_reference(dy, x, scale, mean, rstd, weight=None, dweight=None, need_dshift=True):
    """(dx, dshift or None, dscale), image by image; adds to dweight."""
    rstd, C = rstd.reshape(x.shape[:2]), x.shape[2]
    mean = None if mean is None else mean.reshape(x.shape[:2])
    dx, dscale, dshift = (
        np.empty_like(x),
        np.empty_like(scale),
        np.empty_like(scale) if need_dshift else None,
    )

    def images(i):
        xhat = (x[i] if mean is None else x[i] - mean[i, :, None]) * rstd[i, :, None]
        if need_dshift:
            dy[i].sum(1, out=dshift[i])
        np.einsum("btc,btc->bc", dy[i], xhat, out=dscale[i])
        h = np.multiply(dy[i], factors_reference(scale[i], weight)[:, None], out=dx[i])
        xhat *= (np.einsum("btc,btc->bt", h, xhat) / C)[..., None]
        if mean is not None:
            h -= h.mean(2)[..., None]
        h -= xhat
        h *= rstd[i, :, None]

    over_batch(images, len(x), x.size)
    if dweight is not None:
        dweight += ((1 + scale) * dscale).sum(0)  # dscale is S as yet: without the weight
    if weight is not None:
        dscale *= weight
    return dx, dshift, dscale


# Cost ---------------------------------------------------------------------------------------------


def adaln_forward_cost(B, T, C):
    """(bytes, FLOPs) over B images of T tokens of C channels."""
    return 4 * (2 * B * T * C + 2 * B * C + 2 * B * T), 10 * B * T * C


def adaln_backward_cost(B, T, C):
    """(bytes, FLOPs): dx from dy and x, and the sums for dshift and dscale, which read both again."""
    return 4 * (5 * B * T * C + 3 * B * C + 4 * B * T), 16 * B * T * C


# Operations ---------------------------------------------------------------------------------------


def _check(x, *vectors):
    if x.ndim != 3:
        raise ValueError(
            f"adaln takes tokens (B, T, C), not {tuple(x.shape)}; reshape an image to (B, H·W, C)"
        )
    B, _, C = x.shape
    for vector in vectors:
        if vector is not None and tuple(vector.shape) != (B, C):
            raise ValueError(
                f"adaln: shift and scale must be (B, C) = {(B, C)}, not {tuple(vector.shape)}"
            )


def _check_forward(x, shift, scale, weight, norm):
    _check(x, shift, scale)
    check_norm("adaln", x.shape[2], weight, norm)


def _check_backward(x, scale, weight):
    _check(x, scale)
    check_norm("adaln", x.shape[2], weight)


def _statistics(arrays):
    """mean and rstd of a problem's x; mean None of an RMSNorm."""
    rms = "mean" not in arrays
    _, mean, rstd = adaln_forward_reference(
        arrays["x"], None, arrays["scale"], norm="rms" if rms else "layer"
    )
    return {"rstd": rstd} if rms else {"mean": mean, "rstd": rstd}


def _forward_problem(shape, norm=NORMS[0], array=single, label=None, **more):
    B, _, C = shape
    vector = array(B, C)
    return Problem(
        label,
        x=array(*shape),
        shift=vector if norm.shifted else None,
        scale=vector,
        weight=single(C) if norm.weighted else None,
        norm=norm.kind,
        **more,
    )


def _backward_problem(shape, norm=NORMS[0], array=single, label=None, **more):
    B, T, C = shape
    weight = {"weight": single(C), "dweight": single(C)} if norm.weighted else {}
    return Problem(
        label,
        dy=array(*shape),
        x=array(*shape),
        scale=array(B, C),
        mean=None if norm.rms else single(B * T),
        rstd=positive(B * T),
        need_dshift=norm.shifted,
        derived=_statistics,
        **weight,
        **more,
    )


def _problems(make):
    """The small problems of a direction: one warp a token in v2, of whose 32 lanes 9 have channels,
    then the first has two iterations; other norms; the sums in two passes."""
    lightning = [Norm(True, True, True), Norm(True, True, False)]  # LightningDiT's
    return [
        *(make(shape) for shape in ((2, 3, 36), (1, 2, 132), (2, 2, 7))),
        make((1, 1030, 8), fast=False, once=True),
        *(make((2, 3, 36), norm, label=str(norm)) for norm in NORMS[1:]),
        *(make((1, 2, 12), norm, half, label=f"{norm}, float16") for norm in lightning),
    ]


# of a DiT-B/2, for the benchmark
TOKENS, VECTOR, STATISTIC = half(64, 256, 768), half(64, 768), single(64 * 256)
RMSNORMS = ("RMSNorm", VECTOR), ("RMSNorm, no shift", None)


@operation(
    reference=adaln_forward_reference,
    cost=adaln_forward_cost,
    check=_check_forward,
    versions=row_versions(FORWARD, "channels"),
    problems=[
        *_problems(_forward_problem),
        Problem(x=TOKENS, shift=VECTOR, scale=VECTOR, measured=True),
        *(
            Problem(
                x=TOKENS,
                shift=shift,
                scale=VECTOR,
                weight=single(768),
                norm="rms",
                note=note,
                measured=True,
            )
            for note, shift in RMSNORMS
        ),
    ],
)
def adaln_forward(x, shift, scale, eps=1e-6, weight=None, norm="layer", version=None):
    """(y, mean (B·T,), rstd (B·T,)): the norm of x (B, T, C) · weight (C,) · (1 + scale (B, C)) +
    shift (B, C).

    shift, weight: None if there is none; norm: "layer", or "rms", which has no mean: None
    """
    B, T, C = x.shape
    which = Norm(norm == "rms", weight is not None, shift is not None)
    y, rstd = empty_like(x), empty((B * T,), np.float32, like=x)
    mean = None if which.rms else empty((B * T,), np.float32, like=x)
    scales = _scales(scale, weight)
    arrays = (
        x.reshape(-1),
        shift.reshape(-1) if which.shifted else scales[0],
        scales,
        y.reshape(-1),
        rstd if which.rms else mean,
        rstd,
    )  # what stands for an absent array is not looked at
    launch_rows(version, which, B * T, T, C, arrays, float(eps))
    return y, mean, rstd


@operation(
    reference=adaln_backward_reference,
    cost=adaln_backward_cost,
    check=_check_backward,
    versions=row_versions(BACKWARD, "channels"),
    problems=[
        *_problems(_backward_problem),
        Problem(
            dy=TOKENS,
            x=TOKENS,
            scale=VECTOR,
            mean=STATISTIC,
            rstd=positive(64 * 256),
            measured=True,
        ),
        *(
            Problem(
                dy=TOKENS,
                x=TOKENS,
                scale=VECTOR,
                mean=None,
                rstd=positive(64 * 256),
                weight=single(768),
                dweight=single(768),
                need_dshift=shift is not None,
                note=note,
                measured=True,
            )
            for note, shift in RMSNORMS
        ),
    ],
    writes=("dweight",),
)
def adaln_backward(
    dy, x, scale, mean, rstd, weight=None, dweight=None, need_dshift=True, version=None
):
    """(dx, dshift (B, C), dscale (B, C)) from dy and what the forward took and gave; mean None: of
    RMSNorm.

    The gradient of the weight is added into `dweight` (None: not wanted). need_dshift: False where
    there is no shift; dshift is None then.
    """
    which = Norm(mean is None, weight is not None, need_dshift)
    statistics = (rstd if which.rms else mean, rstd)
    dx = _dx(version, which, dy, x, scale, weight, statistics)
    return dx, *_sums(version, which, dy, x, scale, weight, dweight, statistics)


def _scales(scale, weight):
    """What kernels call `scales`."""
    return (scale.reshape(-1),) if weight is None else (scale.reshape(-1), weight)


def _dx(version, which, dy, x, scale, weight, statistics):
    B, T, C = x.shape
    dx = empty_like(x)
    arrays = dy.reshape(-1), x.reshape(-1), _scales(scale, weight), *statistics, dx.reshape(-1)
    # dx does not depend on a shift
    launch_rows(version, which._replace(shifted=True), B * T, T, C, arrays)
    return dx


def _sums(version, which, dy, x, scale, weight, dweight, statistics):
    """(dshift or None, dscale), the sums over each image's tokens; adds to dweight what comes of
    them."""
    B, T, C = x.shape
    by_warp = version.name == "warp-per-row"
    lanes, tiles, chunk, chunks = cut(B, T, C, 4) if by_warp else (0, 0, T, 1)
    kinds = 2 if which.shifted else 1
    sums = empty((kinds * B, chunks, C), np.float32, like=x)  # dscale's, then dshift's, if any
    dscales, shares = (sums.reshape(-1),), None
    if weight is not None:
        shares = empty((B * chunks, C), np.float32, like=x)  # each chunk's of dweight
        dscales = *dscales, shares.reshape(-1), scale.reshape(-1), weight
    arrays = dy.reshape(-1), x.reshape(-1), *statistics
    kernel = SUMS[version.number, which]
    if by_warp:
        launch(kernel, (chunks, tiles, B), BLOCK, *arrays, dscales, T, C, lanes, chunk)
    else:
        launch(kernel, -(-B * C // BLOCK), BLOCK, *arrays, sums[-B:].reshape(-1), dscales, T, C)
    if dweight is not None and shares is not None:
        add_rows(shares, dweight)
    sums = sums.reshape(kinds * B, C) if chunks == 1 else sample_sum(sums)
    return (sums[B:], sums[:B]) if which.shifted else (None, sums)
