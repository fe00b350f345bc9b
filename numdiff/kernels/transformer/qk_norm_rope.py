"""QK-norm and rotary position embedding of the packed qkv, in one pass over q and k.

MATHEMATICS, for each token and each head of q and k, x (HS,); the norm and the rotation may each be left out
        rstd = 1 / √(Σ x² / HS + eps)        xhat = x · rstd        z = xhat · weight,   one weight for q, one for k
        y = z · cos[t] + rotate_half(z) · sin[t],   rotate_half: neighbours (z0, z1) → (-z1, z0)
    v stays as it is. Backward, with averages over the head:
        dz0 = dy0 · cos0 + dy1 · sin1        dz1 = dy1 · cos1 - dy0 · sin0        dweight += Σ_tokens, heads dz · xhat
        dx = rstd · (h - xhat · average(h · xhat)),   h = dz · weight;   dv = dy's v
SHAPES
    qkv, y, dy, dqkv (B, T, 3 · D) float16 or float32, their channels [q, k, v][head][HS], D = heads · HS, HS even;
    kept (B, T, 2 · D) like them: q and k before; weights (HS,) and rotation (2, T, HS), cosines and sines: float32
VERSIONS
    v1 naive: one thread a head. Backward: rstd first, then a thread a channel of a head for dweight, which goes down
       all tokens, then dx.
    v2 fused: HS / 8 lanes of a warp a head, eight channels each, so that neighbours which turn together are one lane's;
       a warp takes as many heads at once as fit, and asks memory for the next as many before it looks at them. It
       takes one token in several images, whose cosines and sines it keeps in registers. One kernel each way: the
       backward's sums for dweight stay in registers, too. (HS a multiple of 8, at most 128; sm_80)
MEASURED
    NVIDIA H200, 2026-11-23, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    qk_norm_rope_forward, 64×256×2304, 64, heads 12, float16 (training)
        v1       990 µs      153 GB/s    4 % of memory
        v2*     44.3 µs    3,408 GB/s   83 % of memory   22.3 × v1
    qk_norm_rope_forward, 64×256×2304, 64, heads 12, float16
        v1       457 µs      221 GB/s    5 % of memory
        v2*     30.3 µs    3,324 GB/s   81 % of memory   15.1 × v1
    qk_norm_rope_backward, 64×256×2304, 64×256×1536, heads 12, float16
        v1    15,997 µs     9.45 GB/s    0 % of memory
        v2*     47.7 µs    3,168 GB/s   77 % of memory    335 × v1
LAUNCH
    v1 ceil(heads of all tokens / 256) blocks of 256 threads. v2 grid (tokens, chunks of images, parts), 256 threads: a
    block has eight tokens of q, of k or, out of place, of v. `choose_chunk` cuts the images so that all blocks run at
    once. Backward: 8.25 KiB of shared memory, then reduce.py over the blocks.
DETERMINISM
    no atomics; what is added to what depends on the shape and on the GPU's multiprocessors.
IN PLACE
    A linear layer's backward does not need its result, so q and k may change where they lie and v need not move: the
    caller says so (`in_place`). What the backward needs of q and k is then copied on the way, if there is a norm and a
    backward; a rotation alone needs nothing. It is not recovered from y: a weight may be 0.
COST
    in passes over q or k of n elements: forward 4 in place, 6 with q and k kept or out of place. Backward of both 6 in
    place, 8 out of it; of a rotation alone 4 and 6. Roof: memory bandwidth.
SOURCE
    Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4 (RMSNorm); Dehghani et al. 2023, arXiv:2302.05442, section 2 (norm
    of q and k); Su et al. 2021, arXiv:2104.09864, eq. 34 (rotation).
READ NEXT
    swiglu.py
"""
import functools
import math
from typing import NamedTuple

import numpy as np

from ...device import cuda, empty, empty_like, float32, int32, is_device, launch, over_batch, uint32
from ...device.approximate import reciprocal
from ...device.eight import fetch8, load8, numbers8, store8
from ...device.limits import FULL_MASK, MULTIPROCESSORS, WARP, multiprocessors_of
from ...device.requires import requires, supports
from ...device.specialise import Constant, specialise
from ...dtypes import working_type
from ..common import no_numbers
from ..reduce import BLOCK, add_column_sums, column_sum
from ..versions import versions_by_name

# References -----------------------------------------------------------------------------------------------------------

def _q_and_k(array, heads, HS):
    """View of q and k (T, 2, heads, HS) of one image in a NumPy array whose rows start with them."""
    return array.reshape(len(array), -1, heads, HS)[:, :2]


def _turned(x, rotation):
    """x · cos + rotate_half(x) · sin."""
    cos, sin = rotation[:, :, None, None]
    y = x * cos
    y[..., 0::2] -= x[..., 1::2] * sin[..., 0::2]
    y[..., 1::2] += x[..., 0::2] * sin[..., 1::2]
    return y


def _turned_back(dy, rotation):
    """The gradient of x from that of `_turned`."""
    cos, sin = rotation[:, :, None, None]
    dx = dy * cos
    dx[..., 0::2] += dy[..., 1::2] * sin[..., 1::2]
    dx[..., 1::2] -= dy[..., 0::2] * sin[..., 0::2]
    return dx


def _normalised(x, eps):
    """(xhat, rstd (…, 1)) over the last axis."""
    rstd = 1 / np.sqrt(np.einsum("...c,...c->...", x, x)[..., None] / x.shape[-1] + x.dtype.type(eps))
    return x * rstd, rstd


def qk_norm_rope_forward_reference(qkv, y, heads, weights, rotation, eps):
    """Writes q and k of y, which may be qkv; weights: (2, HS) or None."""
    HS = qkv.shape[2] // (3 * heads)

    def image(b):
        x = _q_and_k(qkv[b], heads, HS).astype(working_type(qkv.dtype), copy=False)
        if weights is not None:
            x, _ = _normalised(x, eps)
            x *= weights[:, None]
        _q_and_k(y[b], heads, HS)[...] = x if rotation is None else _turned(x, rotation)

    over_batch(lambda some: [image(b) for b in range(some.start, some.stop)], len(qkv), qkv.size)


def qk_norm_rope_backward_reference(dy, kept, dqkv, heads, weights, rotation, eps):
    """Writes dq and dk of dqkv, which may be dy; returns the gradient of weights, (2, HS), or 0."""
    HS = dy.shape[2] // (3 * heads)

    def image(b):
        g, sums = _q_and_k(dy[b], heads, HS).astype(working_type(dy.dtype), copy=False), 0
        if rotation is not None:
            g = _turned_back(g, rotation)
        if weights is not None:
            xhat, rstd = _normalised(_q_and_k(kept[b], heads, HS).astype(g.dtype, copy=False), eps)
            sums = np.einsum("tphc,tphc->pc", g, xhat)
            g = g * weights[:, None]
            xhat *= np.einsum("...c,...c->...", g, xhat)[..., None] / HS
            g -= xhat
            g *= rstd
        _q_and_k(dqkv[b], heads, HS)[...] = g
        return sums

    return sum(over_batch(lambda some: sum(image(b) for b in range(some.start, some.stop)), len(dy), dy.size))


# v1: one thread a head ------------------------------------------------------------------------------------------------
# A token's heads are numbered: those of q, then of k, then of v.

class Heads(NamedTuple):
    """`tokens`, T an image, of `heads` heads of HS channels; `parts` of q, k and v are dealt with, 2 or 3.

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
        return (g0 * rotation[at] + g1 * rotation[at + sines + 1], g1 * rotation[at + 1] - g0 * rotation[at + sines])
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
                x0, x1 = (x0 * rotation[at + c] - x1 * rotation[sines + c],
                          x1 * rotation[at + c + 1] + x0 * rotation[sines + c + 1])
            y[first + c] = x0
            y[first + c + 1] = x1


@cuda.jit
def qk_rstd_kernel_v1(kept, rstd, cut, eps):
    """rstd (tokens · 2 · heads,) of the heads of q and k."""
    i = cuda.grid(1)
    if i < cut.tokens * 2 * cut.heads:
        rstd[i] = rstd_of(kept, i // (2 * cut.heads) * cut.pitch + i % (2 * cut.heads) * cut.HS, cut.HS, eps)


@cuda.jit
def qk_weight_kernel_v1(dy, kept, rotation, rstd, sums, cut):
    """sums (2 · heads, HS): of dz · xhat over all tokens."""
    i = cuda.grid(1)
    head, c = i // cut.HS, i % cut.HS
    if head < 2 * cut.heads:
        total = float32(0)
        for row in range(cut.tokens):
            pair = c - c % 2
            z0, z1 = gradient_of_pair(dy, (row * 3 * cut.heads + head) * cut.HS + pair, rotation,
                                      row % cut.T * cut.HS + pair, cut)
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
                average += (z0 * w0 * float32(kept[before + c]) + z1 * w1 * float32(kept[before + c + 1])) * r
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


# v2: HS / 8 lanes a head ----------------------------------------------------------------------------------------------
# A warp's lanes read 16 neighbouring bytes each, which together are as many heads as it has room for (three of 72
# channels: 27 lanes; the others look on). All lanes of a head need its sum: they add in a tree and ask the first.

NORMS, ROTATES = Constant(), Constant()  # whether
LEVELS = Constant()  # a head has 2^LEVELS lanes; 0: any number
EIGHT = 3  # LEVELS of heads of 64 channels
STEPS = 3  # of a warp that it brings from memory at once
LANES = 16  # of a head, at most
WARPS = BLOCK // WARP
FORWARD_BLOCKS, BACKWARD_BLOCKS = 3, {True: 2, False: 3}  # of a multiprocessor, by registers; without a norm
PITCH = BLOCK + 8  # between planes of the block's sums: eight planes begin in eight groups of banks
PLANES = 8 * PITCH
MAX_CHUNKS = 512  # of the images
OVERHEAD = 1  # an image's worth of time that a block takes to begin and to end


class Walk(NamedTuple):
    """T tokens of B images, of `heads` heads of HS channels, D together; a warp takes its token in `chunk` images.

    pitch: channels from a token of `kept` to the next; keeps: whether; lanes: of a head; share: 1 / HS
    """

    B: int
    T: int
    heads: int
    HS: int
    D: int
    chunk: int
    pitch: int
    keeps: int
    lanes: int
    share: float


@cuda.jit(device=True, forceinline=True)
def head_sum(value, place):
    """The sum over a head's lanes, in each of them. All lanes of the warp call it.

    place: (lane, which of its head's, lanes of a head)
    """
    if LEVELS:  # each lane adds what its partner has: no lane needs to be asked
        for i in range(LEVELS):
            value += cuda.shfl_xor_sync(FULL_MASK, value, int32(1 << i))
        return value
    lane, own, lanes = place
    left = lanes
    while left > 1:
        half = int32((left + 1) >> 1)
        other = cuda.shfl_down_sync(FULL_MASK, value, half)
        if own + half < left:
            value += other
        left = half
    return cuda.shfl_sync(FULL_MASK, value, int32(lane - own))


@cuda.jit(device=True, forceinline=True)
def turned(x, cos, sin):
    """x · cos + rotate_half(x) · sin of eight channels."""
    return (x[0] * cos[0] - x[1] * sin[0], x[1] * cos[1] + x[0] * sin[1],
            x[2] * cos[2] - x[3] * sin[2], x[3] * cos[3] + x[2] * sin[3],
            x[4] * cos[4] - x[5] * sin[4], x[5] * cos[5] + x[4] * sin[5],
            x[6] * cos[6] - x[7] * sin[6], x[7] * cos[7] + x[6] * sin[7])


@cuda.jit(device=True, forceinline=True)
def turned_back(g, cos, sin):
    """The gradient of `turned`."""
    return (g[0] * cos[0] + g[1] * sin[1], g[1] * cos[1] - g[0] * sin[0],
            g[2] * cos[2] + g[3] * sin[3], g[3] * cos[3] - g[2] * sin[2],
            g[4] * cos[4] + g[5] * sin[5], g[5] * cos[5] - g[4] * sin[4],
            g[6] * cos[6] + g[7] * sin[7], g[7] * cos[7] - g[6] * sin[6])


@cuda.jit(device=True, forceinline=True)
def norm_gradients(z, x, factor, k):
    """dx of eight channels, from dz, weight · rstd and k = rstd³ · average(h · x)."""
    return (z[0] * factor[0] - x[0] * k, z[1] * factor[1] - x[1] * k, z[2] * factor[2] - x[2] * k,
            z[3] * factor[3] - x[3] * k, z[4] * factor[4] - x[4] * k, z[5] * factor[5] - x[5] * k,
            z[6] * factor[6] - x[6] * k, z[7] * factor[7] - x[7] * k)


@cuda.jit(device=True, forceinline=True)
def products(a, b):
    return (a[0] * b[0], a[1] * b[1], a[2] * b[2], a[3] * b[3], a[4] * b[4], a[5] * b[5], a[6] * b[6], a[7] * b[7])


@cuda.jit(device=True, forceinline=True)
def times(a, r):
    return a[0] * r, a[1] * r, a[2] * r, a[3] * r, a[4] * r, a[5] * r, a[6] * r, a[7] * r


@cuda.jit(device=True, forceinline=True)
def sum_of(a):
    return ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]))


@cuda.jit(device=True, forceinline=True)
def clear(words, steps):
    """Lanes without a head compute all the same, and throw it away."""
    for s in range(steps):
        for k in range(8):
            words[s, k] = uint32(0)


@cuda.jit(device=True, forceinline=True)
def eight(array, words, values):
    """What `fetch8` has brought, as a tuple."""
    numbers8(array, words, values)
    return values[0], values[1], values[2], values[3], values[4], values[5], values[6], values[7]


@cuda.jit(device=True, forceinline=True)
def factors(rotation, q_weight, k_weight, part, t, c, walk):
    """(cosines, sines, weights) of a lane's channels, c, c + 1, …; ones, zeros and ones where there are none."""
    zero, one = float32(0), float32(1)
    weight = cos = (one, one, one, one, one, one, one, one)
    sin = (zero, zero, zero, zero, zero, zero, zero, zero)
    if ROTATES:
        cos, sin = load8(rotation, t * walk.HS + c), load8(rotation, (walk.T + t) * walk.HS + c)
    if NORMS:
        weight = load8(q_weight, c) if part == 0 else load8(k_weight, c)
    return cos, sin, weight


@cuda.jit(device=True, forceinline=True)
def neighbours(a):
    """Of each pair the other first."""
    return a[1], a[0], a[3], a[2], a[5], a[4], a[7], a[6]


@cuda.jit(device=True, forceinline=True)
def new_head(v, factors, place, walk, eps):
    """Eight channels of q or k, normalised and turned."""
    cos, sin, weight = factors
    if NORMS:
        squares = head_sum(sum_of(products(v, v)), place)
        v = times(v, reciprocal(math.sqrt(squares * walk.share + eps)))
    return turned(v, cos, sin) if ROTATES else products(v, weight)


@requires("8.0")
def qk_norm_rope_forward_v2(x, y, kept, q_weight, k_weight, rotation, walk, eps):
    """q, k and v, one for each of the grid's third axis, of y and of `kept`."""
    words, values = cuda.local.array((STEPS, 8), "uint32"), cuda.local.array(8, "float32")
    clear(words, STEPS)
    lane, part, lanes = int32(cuda.threadIdx.x % WARP), int32(cuda.blockIdx.z), int32(walk.lanes)
    t = int32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // WARP)
    own, busy, D = int32(lane % lanes), int32(WARP // lanes * lanes), int32(walk.D)
    mine = int32(lane * 8 if lane < busy else D)  # its first channel of q
    if t < walk.T:  # the same for all lanes of a warp
        cos, sin, weight = factors(rotation, q_weight, k_weight, part, t, own * 8, walk)
        cos, sin = products(cos, weight), products(sin, neighbours(weight))
        for b in range(cuda.blockIdx.y * walk.chunk, min((cuda.blockIdx.y + 1) * walk.chunk, walk.B)):
            row = b * walk.T + t
            at, to = (row * 3 + part) * D, row * walk.pitch + part * D
            c = int32(0)
            while c < D:
                for s in range(STEPS):
                    if c + s * busy * 8 + mine < D:
                        fetch8(x, at + (c + s * busy * 8 + mine), words[s])
                for s in range(STEPS):
                    here = int32(c + s * busy * 8)
                    if here < D:  # the same for all lanes
                        v = eight(x, words[s], values)
                        z = new_head(v, (cos, sin, weight), (lane, own, lanes), walk, eps) if part < 2 else v
                        if walk.keeps and here + mine < D:
                            store8(kept, to + (here + mine), v)
                        if here + mine < D:
                            store8(y, at + (here + mine), z)
                c = int32(c + STEPS * busy * 8)


@cuda.jit(device=True, forceinline=True)
def add_to(sums, p, r):
    for c in range(8):
        sums[c] += p[c] * r


@cuda.jit(device=True, forceinline=True)
def write_sums(partial, sums, part, at_once, lanes, HS):
    """partial (2, blocks, HS): the block's sums, of which each lane has eight. All threads call it."""
    tile = cuda.shared.array(PLANES, "float32")
    thread = int32(cuda.threadIdx.x)
    for c in range(8):
        tile[c * PITCH + thread] = sums[c]
    cuda.syncthreads()
    if thread < HS and part < 2:
        total = float32(0)
        place = int32(thread % 8 * PITCH + thread // 8)
        for warp in range(WARPS):
            for head in range(at_once):
                total += tile[place + warp * WARP + head * lanes]
        block = cuda.blockIdx.y * cuda.gridDim.x + cuda.blockIdx.x
        partial[(part * cuda.gridDim.y * cuda.gridDim.x + block) * HS + thread] = total


@cuda.jit(device=True, forceinline=True)
def head_gradient(z, x, sums, is_there, factors, place, walk, eps):
    """Eight channels of dq or dk, from those of dy and of q or k; adds to the sums for dweight, if there is a head."""
    cos, sin, weight = factors
    if ROTATES:
        z = turned_back(z, cos, sin)
    if NORMS:
        p = products(z, x)
        squares = head_sum(sum_of(products(x, x)), place)
        average = head_sum(sum_of(products(p, weight)), place) * walk.share
        r = reciprocal(math.sqrt(squares * walk.share + eps))
        if is_there:
            add_to(sums, p, r)
        z = norm_gradients(z, x, times(weight, r), r * r * r * average)
    return z


@requires("8.0")
def qk_norm_rope_backward_v2(dy, kept, q_weight, k_weight, rotation, dqkv, partial, walk, eps):
    """dq, dk and dv, one for each of the grid's third axis, and of dq and dk a block's sums for dweight."""
    g_words, x_words = cuda.local.array((STEPS, 8), "uint32"), cuda.local.array((STEPS, 8), "uint32")
    values, sums = cuda.local.array(8, "float32"), cuda.local.array(8, "float32")
    clear(g_words, STEPS)
    clear(x_words, STEPS)
    for c in range(8):
        sums[c] = float32(0)
    lane, part, lanes = int32(cuda.threadIdx.x % WARP), int32(cuda.blockIdx.z), int32(walk.lanes)
    t = int32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // WARP)
    own, busy, D = int32(lane % lanes), int32(WARP // lanes * lanes), int32(walk.D)
    mine = int32(lane * 8 if lane < busy else D)
    if t < walk.T:
        cos, sin, weight = factors(rotation, q_weight, k_weight, part, t, own * 8, walk)
        for b in range(cuda.blockIdx.y * walk.chunk, min((cuda.blockIdx.y + 1) * walk.chunk, walk.B)):
            row = b * walk.T + t
            at, before = (row * 3 + part) * D, row * walk.pitch + part * D
            c = int32(0)
            while c < D:
                for s in range(STEPS):
                    here = int32(c + s * busy * 8 + mine)
                    if here < D:
                        fetch8(dy, at + here, g_words[s])
                        if NORMS and part < 2:
                            fetch8(kept, before + here, x_words[s])
                for s in range(STEPS):
                    here = int32(c + s * busy * 8)
                    if here < D:
                        z = eight(dy, g_words[s], values)
                        if part < 2:
                            x = eight(kept, x_words[s], values)
                            z = head_gradient(z, x, sums, here + mine < D, (cos, sin, weight), (lane, own, lanes), walk,
                                              eps)
                        if here + mine < D:
                            store8(dqkv, at + (here + mine), z)
                c = int32(c + STEPS * busy * 8)
    if NORMS:
        write_sums(partial, sums, part, int32(busy // lanes), lanes, int32(walk.HS))


KEYS = [(True, True, 0), (True, True, EIGHT), (True, False, 0), (True, False, EIGHT), (False, True, 0)]


def key_of(norms, rotates, HS):
    """The key of the kernels for heads of HS channels."""
    return norms, rotates, EIGHT if norms and HS == 8 << EIGHT else 0


def kernel_of(text, name, blocks, norms, rotates, levels):
    return specialise(text, name=f"qk_{'norm_' * norms}{'rope_' * rotates}{name}_kernel_v2{'_64' if levels else ''}",
                      launch_bounds=(BLOCK, blocks), NORMS=norms, ROTATES=rotates, LEVELS=levels)


FORWARD = {key: kernel_of(qk_norm_rope_forward_v2, "forward", FORWARD_BLOCKS, *key) for key in KEYS}
BACKWARD = {key: kernel_of(qk_norm_rope_backward_v2, "backward", BACKWARD_BLOCKS[key[0]], *key) for key in KEYS}


# Launchers ------------------------------------------------------------------------------------------------------------

@functools.cache
def choose_chunk(B, T, parts, blocks, multiprocessors=MULTIPROCESSORS):
    """Images that a block of version 2 takes, where a multiprocessor runs `blocks` at once: those with which all end
    soonest, counting turns of a warp."""
    columns = -(-T // WARPS) * parts

    def turns(chunk):
        return -(-columns * -(-B // chunk) // (blocks * multiprocessors)) * (chunk + OVERHEAD)

    return min(range(max(1, -(-B // MAX_CHUNKS)), max(B, 1) + 1), key=turns)


def _check(qkv, heads, q_weight, k_weight, rotation, version):
    """(HS, version) of a qkv (B, T, 3 · D); what does not fit is named."""
    if qkv.ndim != 3 or qkv.shape[2] % (6 * heads):
        raise ValueError(f"qk_norm_rope takes qkv (B, T, 3 · heads · HS), HS even, not {tuple(qkv.shape)} of {heads} "
                         "heads")
    HS = qkv.shape[2] // (3 * heads)
    if (q_weight is None) != (k_weight is None):
        raise ValueError("qk_norm_rope: give weights for both q and k, or for none")
    if q_weight is None and rotation is None:
        raise ValueError("qk_norm_rope: without weights and without a rotation there is nothing to do")
    for weight in (q_weight, k_weight):
        if weight is not None and tuple(weight.shape) != (HS,):
            raise ValueError(f"qk_norm_rope: a weight has the shape of a head, ({HS},), not {tuple(weight.shape)}")
    if rotation is not None and tuple(rotation.shape) != (2, qkv.shape[1], HS):
        raise ValueError(f"qk_norm_rope: cosines and sines must be (2, T, HS) = {(2, qkv.shape[1], HS)}, not "
                         f"{tuple(rotation.shape)}")
    fits = HS % 8 == 0 and HS <= 8 * LANES and (not is_device(qkv) or supports(qkv, FORWARD, BACKWARD))
    if version == 2 and not fits:
        raise ValueError(f"version 2 (fused) takes heads of a multiple of 8 channels, at most {8 * LANES}, on a device "
                         f"of capability 8.0, not heads of {HS} here; use version=1")
    return HS, version or (2 if fits else 1)


def _weights(q_weight, k_weight):
    return None if q_weight is None else np.stack((q_weight, k_weight))


def _flat(array, like):
    """What a kernel is given for an array that may be absent."""
    return no_numbers(like.backend) if array is None else array.reshape(-1)


def _grid(qkv, parts, blocks):
    """(version 2's grid, images a block)."""
    B, T, _ = qkv.shape
    chunk = choose_chunk(B, T, parts, blocks, multiprocessors_of(qkv))
    return (-(-T // WARPS), -(-B // chunk), parts), chunk


def _add_sums(sums, dq_weight, dk_weight):
    """Adds sums (2, blocks, HS), over the blocks, to the gradients that are wanted."""
    if dq_weight is not None and dk_weight is not None:
        add_column_sums(sums, dq_weight, dk_weight)
    elif dq_weight is not None:
        column_sum(sums[:1], dq_weight)
    elif dk_weight is not None:
        column_sum(sums[1:], dk_weight)


@versions_by_name
def qk_norm_rope_forward(qkv, heads, q_weight=None, k_weight=None, rotation=None, eps=1e-6, in_place=False, keeps=True,
                         version=None):
    """(y, what the backward needs): y is qkv with q and k of each head normalised (with weights) and rotated (with a
    rotation). in_place: y is qkv itself, overwritten; keeps: False where no backward will come.
    """
    HS, version = _check(qkv, heads, q_weight, k_weight, rotation, version)
    (B, T, _), D = qkv.shape, heads * HS
    norms, rotates = q_weight is not None, rotation is not None
    copies = norms and keeps and in_place
    if not is_device(qkv):
        y, kept = qkv if in_place else qkv.copy(), qkv[..., :2 * D].copy() if copies else qkv
        qk_norm_rope_forward_reference(qkv, y, heads, _weights(q_weight, k_weight), rotation, eps)
        return y, kept if norms and keeps else None
    y, kept = qkv if in_place else empty_like(qkv), empty((B, T, 2 * D), qkv.dtype, like=qkv) if copies else qkv
    arrays = (qkv.reshape(-1), y.reshape(-1), kept.reshape(-1), _flat(q_weight, qkv), _flat(k_weight, qkv),
              _flat(rotation, qkv))
    parts = 2 if in_place else 3
    if version == 1:
        cut = Heads(B * T, T, heads, HS, parts, 2 * D, int(copies), int(norms), int(rotates))
        launch(qk_norm_rope_forward_kernel_v1, -(-B * T * parts * heads // BLOCK), BLOCK, *arrays, cut, float(eps))
    else:
        grid, chunk = _grid(qkv, parts, FORWARD_BLOCKS)
        launch(FORWARD[key_of(norms, rotates, HS)], grid, BLOCK, *arrays,
               Walk(B, T, heads, HS, D, chunk, 2 * D, int(copies), HS // 8, 1 / HS), float(eps))
    return y, kept if norms and keeps else None


@versions_by_name
def qk_norm_rope_backward(dy, kept, heads, q_weight=None, k_weight=None, rotation=None, dq_weight=None, dk_weight=None,
                          eps=1e-6, in_place=False, version=None):
    """dqkv from dy and what the forward kept (of a norm); gradients of weights are added into dq_weight and dk_weight,
    each None where it is not wanted.

    in_place: dqkv is dy itself, overwritten
    """
    HS, version = _check(dy, heads, q_weight, k_weight, rotation, version)
    (B, T, _), D = dy.shape, heads * HS
    norms, rotates = q_weight is not None, rotation is not None
    if not is_device(dy):
        dqkv = dy if in_place else dy.copy()
        sums = qk_norm_rope_backward_reference(dy, kept, dqkv, heads, _weights(q_weight, k_weight), rotation, eps)
        for part, gradient in enumerate((dq_weight, dk_weight) if norms else ()):
            if gradient is not None:
                gradient += sums[part]
        return dqkv
    dqkv, parts, pitch = dy if in_place else empty_like(dy), 2 if in_place else 3, kept.shape[2] if norms else 0
    flat, before, out = dy.reshape(-1), (kept if norms else dy).reshape(-1), dqkv.reshape(-1)
    q_weight, k_weight, rotation = (_flat(a, dy) for a in (q_weight, k_weight, rotation))
    if version == 2:
        grid, chunk = _grid(dy, parts, BACKWARD_BLOCKS[norms])
        sums = empty((2, grid[0] * grid[1], HS), like=dy) if norms else no_numbers(dy.backend)
        launch(BACKWARD[key_of(norms, rotates, HS)], grid, BLOCK, flat, before, q_weight, k_weight, rotation, out,
               sums.reshape(-1), Walk(B, T, heads, HS, D, chunk, pitch, 0, HS // 8, 1 / HS), float(eps))
    else:
        cut = Heads(B * T, T, heads, HS, parts, pitch, 0, int(norms), int(rotates))
        rstd = sums = no_numbers(dy.backend)
        if norms:
            rstd, sums = empty((B * T * 2 * heads,), like=dy), empty((2, heads, HS), like=dy)
            launch(qk_rstd_kernel_v1, -(-rstd.size // BLOCK), BLOCK, before, rstd, cut, float(eps))
            launch(qk_weight_kernel_v1, -(-sums.size // BLOCK), BLOCK, flat, before, rotation, rstd, sums.reshape(-1),
                   cut)
        launch(qk_norm_rope_backward_kernel_v1, -(-B * T * parts * heads // BLOCK), BLOCK, flat, before, q_weight,
               k_weight, rotation, rstd, out, cut)
    if norms:
        _add_sums(sums, dq_weight, dk_weight)
    return dqkv


# Cost -----------------------------------------------------------------------------------------------------------------

def qk_norm_rope_forward_cost(B, T, C, heads, itemsize=4, norms=True, rotates=True, in_place=True, keeps=True):
    """(bytes, FLOPs) of B images of T tokens, their q of C channels."""
    n, table = B * T * C, 8 * C // heads * (T * rotates + norms)
    return itemsize * n * (4 + 2 * (keeps and norms) if in_place else 6) + table, 2 * n * (4 * norms + 3 * rotates)


def qk_norm_rope_backward_cost(B, T, C, heads, itemsize=4, norms=True, rotates=True, in_place=True):
    n, table = B * T * C, 8 * C // heads * (T * rotates + 3 * norms)
    return itemsize * n * ((4 if in_place else 6) + 2 * norms) + table, 2 * n * (11 * norms + 3 * rotates)
