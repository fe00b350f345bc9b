"""QK-norm and rotary position embedding, rung 2: a head is a few lanes of a warp, eight
neighbouring channels each.

WHAT IS NEW, AND WHY IT PAYS
    HS / 8 lanes have a head, so a warp's lanes read 16 neighbouring bytes (of float16) each,
    together as many heads as it has room for (three of 72 channels: 27 lanes; the others are idle).
    Pairs that rotate together are in one lane. All lanes of a head need its sum: they add in a tree
    and get the first one's, or, for 64 channels, in a butterfly. A warp takes its token in several
    images, so that its cosines and sines stay in registers, and loads the next STEPS pieces of a
    token before it works on those that have arrived. Loads in flight take registers, so a
    multiprocessor runs fewer warps, but each has 1.5 or 3 KiB (backward) in flight at all times,
    not only while it waits.
    One kernel each way: the backward's sums for dweight stay in registers, too, until a block adds
    up its warps'.
LAUNCH
    grid (T / 4, chunks of images, parts), 128 threads: a block has four tokens of q, of k or, out
    of place, of v. Backward of a norm: 4.25 KiB of shared memory, then reduce/trees.py adds up the
    blocks' sums.
NEEDS
    HS a multiple of 8, at most 128; sm_80
SOURCE
    reference.py; PTX ISA, section 9.7.9 (ld, st, shfl.sync).
READ NEXT
    launcher.py
"""

import math
from typing import NamedTuple

from ...device import cuda, float32, int32, uint32
from ...device.approximate import reciprocal
from ...device.eight import fetch8, load8, numbers8, store8
from ...device.limits import FULL_MASK, WARP
from ...device.requires import requires
from ...device.specialise import Constant, Variants, specialise

# whether q and k are normalised, and whether they are rotated
NORMS, ROTATES = Constant(), Constant()
LEVELS = Constant()  # a head has 2^LEVELS lanes; 0: any number
EIGHT = 3  # LEVELS of heads of 64 channels
STEPS = 3  # pieces of a token, eight channels a lane, that a warp loads at once
LANES = 16  # of a head, at most
THREADS = 128
WARPS = THREADS // WARP
# between planes of the block's sums: four planes in a row begin in different groups of 8 banks
PITCH = THREADS + 8
PLANES = 8 * PITCH


class QkNormWalk(NamedTuple):
    """T tokens of B images, of `heads` heads of HS channels, D together; a warp takes its token in
    `chunk` images.

    pitch: elements from a token of `kept` to the next; keeps: whether it is written; lanes: of a
    head; share: 1 / HS
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

    place: (lane of the warp, its number in the head, lanes of a head)
    """
    if LEVELS:  # a butterfly: every lane ends with the sum
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
    """x · cos + rotate_half(x) · sin of eight channels, four pairs (x0, x1) → (-x1, x0)."""
    return (
        x[0] * cos[0] - x[1] * sin[0],
        x[1] * cos[1] + x[0] * sin[1],
        x[2] * cos[2] - x[3] * sin[2],
        x[3] * cos[3] + x[2] * sin[3],
        x[4] * cos[4] - x[5] * sin[4],
        x[5] * cos[5] + x[4] * sin[5],
        x[6] * cos[6] - x[7] * sin[6],
        x[7] * cos[7] + x[6] * sin[7],
    )


@cuda.jit(device=True, forceinline=True)
def turned_back(g, cos, sin):
    """The gradient of `turned`."""
    return (
        g[0] * cos[0] + g[1] * sin[1],
        g[1] * cos[1] - g[0] * sin[0],
        g[2] * cos[2] + g[3] * sin[3],
        g[3] * cos[3] - g[2] * sin[2],
        g[4] * cos[4] + g[5] * sin[5],
        g[5] * cos[5] - g[4] * sin[4],
        g[6] * cos[6] + g[7] * sin[7],
        g[7] * cos[7] - g[6] * sin[6],
    )


@cuda.jit(device=True, forceinline=True)
def norm_gradients(z, x, factor, k):
    """dx of eight channels, from dz, weight · rstd and k = rstd³ · average(h · x)."""
    return (
        z[0] * factor[0] - x[0] * k,
        z[1] * factor[1] - x[1] * k,
        z[2] * factor[2] - x[2] * k,
        z[3] * factor[3] - x[3] * k,
        z[4] * factor[4] - x[4] * k,
        z[5] * factor[5] - x[5] * k,
        z[6] * factor[6] - x[6] * k,
        z[7] * factor[7] - x[7] * k,
    )


@cuda.jit(device=True, forceinline=True)
def products(a, b):
    return (
        a[0] * b[0],
        a[1] * b[1],
        a[2] * b[2],
        a[3] * b[3],
        a[4] * b[4],
        a[5] * b[5],
        a[6] * b[6],
        a[7] * b[7],
    )


@cuda.jit(device=True, forceinline=True)
def times(a, r):
    return a[0] * r, a[1] * r, a[2] * r, a[3] * r, a[4] * r, a[5] * r, a[6] * r, a[7] * r


@cuda.jit(device=True, forceinline=True)
def sum_of(a):
    return ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]))


@cuda.jit(device=True, forceinline=True)
def clear(words, steps):
    """Zeros: lanes without a head compute all the same, and discard the result."""
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
    """(cosines, sines, weights) of a lane's channels c … c + 7; ones, zeros and ones where there
    are none."""
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
    """The two of each pair swapped."""
    return a[1], a[0], a[3], a[2], a[5], a[4], a[7], a[6]


@cuda.jit(device=True, forceinline=True)
def new_head(v, factors, place, walk, eps):
    """Eight channels of q or k, normalised and rotated."""
    cos, sin, weight = factors
    if NORMS:
        squares = head_sum(sum_of(products(v, v)), place)
        v = times(v, reciprocal(math.sqrt(squares * walk.share + eps)))
    return turned(v, cos, sin) if ROTATES else products(v, weight)


# Forward ------------------------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def next_turn(b, c, busy, D):
    """(image, first channel) of a warp's next turn, of STEPS pieces of its token."""
    c = int32(c + STEPS * busy * 8)
    return (int32(b + 1), int32(0)) if c >= D else (b, c)


@cuda.jit(device=True, forceinline=True)
def fetch_turn(x, words, at, first, busy, D):
    """Load a lane's channels of a turn; first: its first channel in the token's q, k or v, which
    begins at x[at]."""
    for s in range(STEPS):
        here = int32(first + s * busy * 8)
        if here < D:
            fetch8(x, at + here, words[s])


@cuda.jit(device=True, forceinline=True)
def keep_turn(words, brought):
    """Move what has arrived, to make room for the next loads."""
    for s in range(STEPS):
        for k in range(8):
            words[s, k] = brought[s, k]


@requires("7.5")
def qk_norm_rope_forward_v2(x, y, kept, q_weight, k_weight, rotation, walk, eps):
    """y (B, T, 3 · D) from x, and with walk.keeps q and k of x to `kept`; q, k and v by the grid's
    third axis."""
    words, brought = cuda.local.array((STEPS, 8), "uint32"), cuda.local.array((STEPS, 8), "uint32")
    values = cuda.local.array(8, "float32")
    clear(brought, STEPS)
    lane, part, lanes = int32(cuda.threadIdx.x % WARP), int32(cuda.blockIdx.z), int32(walk.lanes)
    t = int32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // WARP)
    own, busy, D = int32(lane % lanes), int32(WARP // lanes * lanes), int32(walk.D)
    mine = int32(lane * 8 if lane < busy else D)  # its first channel of q
    b, end = (
        int32(cuda.blockIdx.y * walk.chunk),
        int32(min((cuda.blockIdx.y + 1) * walk.chunk, walk.B)),
    )
    if t < walk.T:  # the same for all lanes of a warp
        cos, sin, weight = factors(rotation, q_weight, k_weight, part, t, own * 8, walk)
        cos, sin = products(cos, weight), products(sin, neighbours(weight))
        c = int32(0)
        fetch_turn(x, brought, ((b * walk.T + t) * 3 + part) * D, mine, busy, D)
        while b < end:
            row = b * walk.T + t
            at, to = (row * 3 + part) * D, row * walk.pitch + part * D
            b_next, c_next = next_turn(b, c, busy, D)
            keep_turn(words, brought)
            if b_next < end:
                fetch_turn(
                    x,
                    brought,
                    ((b_next * walk.T + t) * 3 + part) * D,
                    int32(c_next + mine),
                    busy,
                    D,
                )
            for s in range(STEPS):
                here = int32(c + s * busy * 8)
                if here < D:  # the same for all lanes
                    v = eight(x, words[s], values)
                    z = (
                        new_head(v, (cos, sin, weight), (lane, own, lanes), walk, eps)
                        if part < 2
                        else v
                    )
                    if walk.keeps and here + mine < D:
                        store8(kept, to + (here + mine), v)
                    if here + mine < D:
                        store8(y, at + (here + mine), z)
            b, c = b_next, c_next


# Backward -----------------------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def add_to(sums, p, r):
    for c in range(8):
        sums[c] += p[c] * r


@cuda.jit(device=True, forceinline=True)
def write_sums(partial, sums, part, at_once, lanes, HS):
    """partial (2, blocks, HS): the block's sums for dweight, from eight a thread. All threads call
    it."""
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
    """Eight channels of dq or dk, from z, those of dy, and x, those of q or k; adds to sums if
    there is a head."""
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


@requires("7.5")
def qk_norm_rope_backward_v2(dy, kept, q_weight, k_weight, rotation, dqkv, partial, walk, eps):
    """dqkv (B, T, 3 · D): dq, dk and dv by the grid's third axis; for q and k each block's sums for
    dweight, too."""
    g_words, x_words = (
        cuda.local.array((STEPS, 8), "uint32"),
        cuda.local.array((STEPS, 8), "uint32"),
    )
    g_brought, x_brought = (
        cuda.local.array((STEPS, 8), "uint32"),
        cuda.local.array((STEPS, 8), "uint32"),
    )
    values, sums = cuda.local.array(8, "float32"), cuda.local.array(8, "float32")
    clear(g_brought, STEPS)
    clear(x_brought, STEPS)
    for c in range(8):
        sums[c] = float32(0)
    lane, part, lanes = int32(cuda.threadIdx.x % WARP), int32(cuda.blockIdx.z), int32(walk.lanes)
    t = int32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // WARP)
    own, busy, D = int32(lane % lanes), int32(WARP // lanes * lanes), int32(walk.D)
    mine = int32(lane * 8 if lane < busy else D)
    b, end = (
        int32(cuda.blockIdx.y * walk.chunk),
        int32(min((cuda.blockIdx.y + 1) * walk.chunk, walk.B)),
    )
    if t < walk.T:
        cos, sin, weight = factors(rotation, q_weight, k_weight, part, t, own * 8, walk)
        c = int32(0)
        fetch_turn(dy, g_brought, ((b * walk.T + t) * 3 + part) * D, mine, busy, D)
        if NORMS and part < 2:
            fetch_turn(kept, x_brought, (b * walk.T + t) * walk.pitch + part * D, mine, busy, D)
        while b < end:
            at = ((b * walk.T + t) * 3 + part) * D
            b_next, c_next = next_turn(b, c, busy, D)
            keep_turn(g_words, g_brought)
            keep_turn(x_words, x_brought)
            if b_next < end:
                row, first = b_next * walk.T + t, int32(c_next + mine)
                fetch_turn(dy, g_brought, (row * 3 + part) * D, first, busy, D)
                if NORMS and part < 2:
                    fetch_turn(kept, x_brought, row * walk.pitch + part * D, first, busy, D)
            for s in range(STEPS):
                here = int32(c + s * busy * 8)
                if here < D:
                    z = eight(dy, g_words[s], values)
                    if part < 2:
                        x = eight(kept, x_words[s], values)
                        z = head_gradient(
                            z,
                            x,
                            sums,
                            here + mine < D,
                            (cos, sin, weight),
                            (lane, own, lanes),
                            walk,
                            eps,
                        )
                    if here + mine < D:
                        store8(dqkv, at + (here + mine), z)
            b, c = b_next, c_next
    if NORMS:
        write_sums(partial, sums, part, int32(busy // lanes), lanes, int32(walk.HS))


# The kernels --------------------------------------------------------------------------------------

KEYS = [
    (True, True, 0),
    (True, True, EIGHT),
    (True, False, 0),
    (True, False, EIGHT),
    (False, True, 0),
]
# blocks of a multiprocessor, by registers
FORWARD_BLOCKS, BACKWARD_BLOCKS = (
    dict(zip(KEYS, each, strict=True)) for each in ((5, 6, 5, 6, 5), (3, 4, 3, 3, 5))
)


def key_of(norms, rotates, HS):
    """The key of the kernels for heads of HS channels."""
    return norms, rotates, EIGHT if norms and HS == 8 << EIGHT else 0


def kernel_of(text, name, blocks, norms, rotates, levels):
    return specialise(
        text,
        name=f"qk_{'norm_' * norms}{'rope_' * rotates}{name}_kernel_v2{'_64' if levels else ''}",
        launch_bounds=(THREADS, blocks),
        NORMS=norms,
        ROTATES=rotates,
        LEVELS=levels,
    )


FORWARD = Variants(
    KEYS, lambda key: kernel_of(qk_norm_rope_forward_v2, "forward", FORWARD_BLOCKS[key], *key)
)
BACKWARD = Variants(
    KEYS, lambda key: kernel_of(qk_norm_rope_backward_v2, "backward", BACKWARD_BLOCKS[key], *key)
)
