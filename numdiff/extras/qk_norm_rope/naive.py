"""QK-norm and rotary position embedding, rung 1: one thread a head of a token.

A token's heads are numbered: those of q, then of k, then of v. Backward in three kernels: 1 /
√(mean square) of each head, for the other two; then a thread a channel of a head for dweight, which
goes down all tokens; then dx, a thread a head again.
LAUNCH
    256 threads a block, as many as there are heads of all tokens, or channels of a token's heads.
SOURCE
    reference.py.
READ NEXT
    fused.py
"""

import math
from typing import NamedTuple

from ...device import cuda, float32


class Heads(NamedTuple):
    """`tokens`, T an image, of `heads` heads of HS channels; `parts` of q, k and v are dealt with,
    2 or 3.

    pitch: channels from a token of `kept` to the next; keeps, norms, rotates: whether
    """

    tokens: int
    T: int
    heads: int
    HS: int
    parts: int
    pitch: int
    keeps: int
    norms: int
    rotates: int


@cuda.jit(device=True)
def rstd_of(x, i, HS, eps):
    """Of the head that starts at x[i]."""
    total = float32(0)
    for c in range(HS):
        a = float32(x[i + c])
        total += a * a
    return float32(1) / math.sqrt(total / float32(HS) + eps)


@cuda.jit(device=True)
def gradient_of_pair(dy, i, rotation, at, cut):
    """dz of the two neighbours from dy[i] on; their cosines and sines are at rotation[at …]."""
    g0, g1 = float32(dy[i]), float32(dy[i + 1])
    if cut.rotates:
        sines = cut.T * cut.HS
        return (
            g0 * rotation[at] + g1 * rotation[at + sines + 1],
            g1 * rotation[at + 1] - g0 * rotation[at + sines],
        )
    return g0, g1


@cuda.jit
def qk_norm_rope_forward_kernel_v1(x, y, kept, q_weight, k_weight, rotation, cut, eps):
    i = cuda.grid(1)
    row, head = i // (cut.parts * cut.heads), i % (cut.parts * cut.heads)
    if row < cut.tokens:
        first, at = (row * 3 * cut.heads + head) * cut.HS, row % cut.T * cut.HS
        is_value = head >= 2 * cut.heads
        r = float32(1) if is_value or not cut.norms else rstd_of(x, first, cut.HS, eps)
        for c in range(0, cut.HS, 2):
            x0, x1 = float32(x[first + c]), float32(x[first + c + 1])
            if cut.keeps:  # then there is no v here
                kept[row * cut.pitch + head * cut.HS + c] = x0
                kept[row * cut.pitch + head * cut.HS + c + 1] = x1
            if cut.norms and not is_value:
                w0 = q_weight[c] if head < cut.heads else k_weight[c]
                w1 = q_weight[c + 1] if head < cut.heads else k_weight[c + 1]
                x0, x1 = x0 * r * w0, x1 * r * w1
            if cut.rotates and not is_value:
                sines = at + cut.T * cut.HS
                x0, x1 = (
                    x0 * rotation[at + c] - x1 * rotation[sines + c],
                    x1 * rotation[at + c + 1] + x0 * rotation[sines + c + 1],
                )
            y[first + c] = x0
            y[first + c + 1] = x1


@cuda.jit
def qk_rstd_kernel_v1(kept, rstd, cut, eps):
    """rstd (tokens · 2 · heads,) of the heads of q and k."""
    i = cuda.grid(1)
    if i < cut.tokens * 2 * cut.heads:
        rstd[i] = rstd_of(
            kept, i // (2 * cut.heads) * cut.pitch + i % (2 * cut.heads) * cut.HS, cut.HS, eps
        )


@cuda.jit
def qk_weight_kernel_v1(dy, kept, rotation, rstd, sums, cut):
    """sums (2 · heads, HS): of dz · xhat over all tokens."""
    i = cuda.grid(1)
    head, c = i // cut.HS, i % cut.HS
    if head < 2 * cut.heads:
        total = float32(0)
        for row in range(cut.tokens):
            pair = c - c % 2
            z0, z1 = gradient_of_pair(
                dy,
                (row * 3 * cut.heads + head) * cut.HS + pair,
                rotation,
                row % cut.T * cut.HS + pair,
                cut,
            )
            x = float32(kept[row * cut.pitch + head * cut.HS + c])
            total += (z1 if c % 2 else z0) * x * rstd[row * 2 * cut.heads + head]
        sums[i] = total


@cuda.jit
def qk_norm_rope_backward_kernel_v1(dy, kept, q_weight, k_weight, rotation, rstd, dqkv, cut):
    i = cuda.grid(1)
    row, head = i // (cut.parts * cut.heads), i % (cut.parts * cut.heads)
    if row < cut.tokens:
        first, at = (row * 3 * cut.heads + head) * cut.HS, row % cut.T * cut.HS
        before = row * cut.pitch + head * cut.HS
        r = average = float32(0)
        normed = cut.norms and head < 2 * cut.heads
        if normed:
            r = rstd[row * 2 * cut.heads + head]
            for c in range(0, cut.HS, 2):
                z0, z1 = gradient_of_pair(dy, first + c, rotation, at + c, cut)
                w0 = q_weight[c] if head < cut.heads else k_weight[c]
                w1 = q_weight[c + 1] if head < cut.heads else k_weight[c + 1]
                average += (
                    z0 * w0 * float32(kept[before + c]) + z1 * w1 * float32(kept[before + c + 1])
                ) * r
            average /= float32(cut.HS)
        for c in range(0, cut.HS, 2):
            z0, z1 = float32(dy[first + c]), float32(dy[first + c + 1])
            if head < 2 * cut.heads:
                z0, z1 = gradient_of_pair(dy, first + c, rotation, at + c, cut)
            if normed:
                w0 = q_weight[c] if head < cut.heads else k_weight[c]
                w1 = q_weight[c + 1] if head < cut.heads else k_weight[c + 1]
                z0 = r * (z0 * w0 - float32(kept[before + c]) * r * average)
                z1 = r * (z1 * w1 - float32(kept[before + c + 1]) * r * average)
            dqkv[first + c] = z0
            dqkv[first + c + 1] = z1
