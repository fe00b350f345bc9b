"""The second pass of a sum that was cut into parts; in a backward pass, that of several layers in
one launch.

MATHEMATICS
    target[i] = Σ_p parts[p, i]   or   target[i] += Σ_p parts[p, i]        for each of several sums
    A weight's gradient is a long sum with a small result, several blocks each sum a part of it
    (matmul/split_k.py says why). A bias's or a norm's gradient arrives as a few partial sums of
    rows with other results. Reducing the partials takes a kernel of microseconds, most of which
    pass before its first load arrives and after its last store.
    A parameter's gradient is not needed before the backward pass ends, or until a bucket of
    gradients is sent to other ranks. So within `deferred_reductions` a sum that `deferrable` is
    deferred, and the next launch reduces up to eight sums at once. Deferred bytes are bounded
    (`WAITING`): partials that exceed the L2 cache's room are written to memory and read from there.
    A reader of such a gradient calls `flush_for` first (nn.tensor.Parameter does).
SHAPES
    parts (P · n,) and target (n,): float32, n a multiple of 4, on 16-byte boundaries
LAUNCH
    256 threads a block, 4 KiB of shared memory. A block has vectors of four numbers of one sum, of
    which up to 32 threads share the parts, where those are many and the vectors too few to fill the
    GPU.
DETERMINISM
    a thread adds every s-th part, the first thread then the threads' sums, both in order; s follows
    from the shape. So the bits are the same whether a sum waits or not.
COST
    4 · (P + 1) · n bytes, 4 · n more where the target is added to, mostly in the L2 cache.
SOURCE
    plain bookkeeping, no source.
READ NEXT
    linear/layer.py, whose weights' gradients wait.
"""

from contextlib import contextmanager
from typing import NamedTuple

from ...device import DeviceArray, cuda, device_inline, float32, int32, int64, launch, load4, store4
from ...device.common import load4_or_zeros
from ...device.eight import one_of
from ...device.side_stream import backward_pass, on_side_stream, overlaps, rejoin, wait_for_gradient
from ...device.threads import ThreadStack
from ..operation import Problem, operation, single
from .trees import column_sum

THREADS = 256
FLOATS = 4 * THREADS  # of shared memory
WANTED = 132 * 2048  # threads that fill a GPU
# vectors of a thread: to find out which sum a block is for takes as long as to add up one of few
# parts
MOST_TURNS = 4
MOST_SHARES = 32  # threads for a vector: 8 neighbours then still read 128 bytes
SUMS = 8  # of one launch
NEVER = 2**31 - 1  # the first block of a sum that there is not
# bytes of parts that may wait: a sixth of an H100's L2 cache, which everything between goes through
WAITING = 8 << 20


class Sum(NamedTuple):
    """target (n,) = the sum of `count` parts, flat; adds: +=."""

    parts: object
    count: int
    target: object
    adds: bool


class SecondPassCut(NamedTuple):
    """Eight numbers each, one a sum: its first block; vectors of four; parts; log2 of the threads
    that share a vector; vectors that a thread takes one after the other, several only where it
    shares none; whether it is added."""

    first: tuple
    vectors: tuple
    count: tuple
    bits: tuple
    turns: tuple
    adds: tuple


# Reference ----------------------------------------------------------------------------------------


def add_parts_reference(sums, waits=False):
    for parts, count, target, adds in sums:
        total = parts.reshape(count, -1).sum(axis=0)
        target.reshape(-1)[...] = target.reshape(-1) + total if adds else total


# Kernel -------------------------------------------------------------------------------------------


@device_inline
def sum_of(block, first):
    """Number of the sum that a block works on."""
    _, f1, f2, f3, f4, f5, f6, f7 = first
    return (
        (block >= f1)
        + (block >= f2)
        + (block >= f3)
        + (block >= f4)
        + (block >= f5)
        + (block >= f6)
        + (block >= f7)
    )


@device_inline
def of_sum(which, numbers):
    # named one by one: an index that is not constant would need memory
    n0, n1, n2, n3, n4, n5, n6, n7 = numbers
    return int32(
        n0
        if which == 0
        else n1
        if which == 1
        else n2
        if which == 2
        else n3
        if which == 3
        else n4
        if which == 4
        else n5
        if which == 5
        else n6
        if which == 6
        else n7
    )


@device_inline
def add_share(source, vector, vectors, share, shares, count):
    """A vector's sum over parts `share`, `share` + `shares`, …, with four loads in flight at a
    time."""
    s0 = s1 = s2 = s3 = float32(0)
    step = int64(shares) * (4 * vectors)
    part, at = share, int64(share) * (4 * vectors) + 4 * vector
    while part < count:
        a0, a1, a2, a3 = load4(source, at)
        b0, b1, b2, b3 = load4_or_zeros(source, at + step, part + shares < count)
        c0, c1, c2, c3 = load4_or_zeros(source, at + 2 * step, part + 2 * shares < count)
        d0, d1, d2, d3 = load4_or_zeros(source, at + 3 * step, part + 3 * shares < count)
        s0, s1 = s0 + a0 + b0 + c0 + d0, s1 + a1 + b1 + c1 + d1
        s2, s3 = s2 + a2 + b2 + c2 + d2, s3 + a3 + b3 + c3 + d3
        part, at = int32(part + 4 * shares), at + 4 * step
    return s0, s1, s2, s3


@cuda.jit
def add_parts_kernel(parts, targets, cut):
    """parts, targets: eight arrays each; cut: a `SecondPassCut`."""
    tile = cuda.shared.array(FLOATS, float32)
    p0, p1, p2, p3, p4, p5, p6, p7 = parts
    t0, t1, t2, t3, t4, t5, t6, t7 = targets
    t, block = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
    k = int32(sum_of(block, cut.first))
    k1, k2, k3, k4 = int32(k - 1), int32(k - 2), int32(k - 3), int32(k - 4)
    k5, k6, k7 = int32(k - 5), int32(k - 6), int32(k - 7)
    source = one_of(
        k1,
        p0,
        one_of(
            k2,
            p1,
            one_of(k3, p2, one_of(k4, p3, one_of(k5, p4, one_of(k6, p5, one_of(k7, p6, p7))))),
        ),
    )
    target = one_of(
        k1,
        t0,
        one_of(
            k2,
            t1,
            one_of(k3, t2, one_of(k4, t3, one_of(k5, t4, one_of(k6, t5, one_of(k7, t6, t7))))),
        ),
    )
    vectors, count, bits = of_sum(k, cut.vectors), of_sum(k, cut.count), of_sum(k, cut.bits)
    lanes, shares = int32(THREADS >> bits), int32(1 << bits)
    lane, share = int32(t & (lanes - 1)), int32(t >> (8 - bits))
    turns, adds = of_sum(k, cut.turns), of_sum(k, cut.adds)
    vector = int32((block - of_sum(k, cut.first)) * (lanes * turns) + lane)
    for _ in range(turns):
        s0 = s1 = s2 = s3 = float32(0)
        if vector < vectors:
            s0, s1, s2, s3 = add_share(source, vector, vectors, share, shares, count)
        store4(tile, 4 * t, s0, s1, s2, s3)
        cuda.syncthreads()
        if share == 0 and vector < vectors:
            for other in range(int32(1), shares):
                a0, a1, a2, a3 = load4(tile, 4 * (other * lanes + lane))
                s0, s1, s2, s3 = s0 + a0, s1 + a1, s2 + a2, s3 + a3
            if adds:
                a0, a1, a2, a3 = load4(target, 4 * vector)
                s0, s1, s2, s3 = a0 + s0, a1 + s1, a2 + s2, a3 + s3
            store4(target, 4 * vector, s0, s1, s2, s3)
        vector = int32(vector + lanes)


# Launchers ----------------------------------------------------------------------------------------


class Waiting:
    """The sums that wait in a thread's backward pass. allowed: whether those that come now may."""

    def __init__(self):
        self.sums, self.allowed = [], False

    def bytes(self):
        return sum(s.parts.nbytes for s in self.sums)


_waiting = ThreadStack()  # at most one a thread


@contextmanager
def deferred_reductions():
    """Context of a backward pass: deferrable sums are reduced at its end at the latest."""
    if _waiting:  # a pass within a pass
        yield
        return
    _waiting.append(Waiting())
    try:
        with backward_pass():
            yield
            flush_reductions()
    finally:
        _waiting.pop()


@contextmanager
def deferrable():
    """Context: `add_parts` receives gradients here that are not read before `deferred_reductions`
    ends."""
    if not _waiting:
        yield
        return
    before, _waiting[-1].allowed = _waiting[-1].allowed, True
    try:
        yield
    finally:
        _waiting[-1].allowed = before


def flush_reductions():
    """Reduce all deferred sums: from now on gradients can be read."""
    rejoin()
    if _waiting and (sums := _waiting[-1].sums):
        _waiting[-1].sums = []
        _launch(sums)


def flush_on_side_stream():
    """`flush_reductions` on the side stream, while the main stream does not read the gradients;
    other streams `follow`."""
    if _waiting and _waiting[-1].sums:
        targets = [s.target for s in _waiting[-1].sums]
        with on_side_stream(targets[0], *targets):
            flush_reductions()


def flush_for(array):
    """`flush_reductions`, if a deferred sum is for this array's memory."""
    wait_for_gradient(array)
    if _waiting and any(overlaps(array, s.target) for s in _waiting[-1].sums):
        flush_reductions()


def joined(a, b):
    """Two device arrays that are adjacent in memory as one array, or None."""
    if a.memory is b.memory and a.dtype == b.dtype and a.offset + a.nbytes == b.offset:
        return DeviceArray(a.backend, (a.size + b.size,), a.dtype, a.memory, a.offset)
    return None


def add_rows(rows, *targets):
    """Each target (n,), a parameter's gradient or None, += the sum of its rows (P, n) of rows
    (targets, P, n), float32.

    On a device; the sums may wait where there are vectors of four.
    """
    each = rows.size // len(targets)
    count, rows = each // rows.shape[-1], rows.reshape(-1)
    wanted = [
        (rows[k * each : (k + 1) * each], target)
        for k, target in enumerate(targets)
        if target is not None
    ]
    if any(target.size % 4 or target.offset % 16 for _, target in wanted):
        for part, target in wanted:
            column_sum(part.reshape(count, -1), target)
    elif wanted:
        add_parts([Sum(part, count, target, True) for part, target in wanted], waits=True)


def bits_of(count, vectors):
    """Log2 of the threads that share a vector."""
    shares = 1
    while shares < MOST_SHARES and 2 * shares <= count and 2 * shares * vectors <= WANTED:
        shares *= 2
    return shares.bit_length() - 1


def _launch(sums):
    for first in range(0, len(sums), SUMS):
        some = sums[first : first + SUMS]
        vectors = [s.target.size // 4 for s in some]
        bits = [bits_of(s.count, n) for s, n in zip(some, vectors, strict=True)]
        turns = [
            1 if b else min(max(1, 2 * n // WANTED), MOST_TURNS)
            for n, b in zip(vectors, bits, strict=True)
        ]
        starts = [0]
        for n, b, several in zip(vectors, bits, turns, strict=True):
            starts.append(starts[-1] + -(-n // ((THREADS >> b) * several)))
        blocks, missing = starts.pop(), SUMS - len(some)
        cut = SecondPassCut(
            *(
                (*numbers, *[filler] * missing)
                for numbers, filler in (
                    (starts, NEVER),
                    (vectors, 0),
                    ([s.count for s in some], 0),
                    (bits, 0),
                    (turns, 1),
                    ([int(s.adds) for s in some], 0),
                )
            )
        )
        launch(
            add_parts_kernel,
            blocks,
            THREADS,
            tuple([s.parts for s in some] + [some[0].parts] * missing),
            tuple([s.target for s in some] + [some[0].target] * missing),
            cut,
        )


# Cost ---------------------------------------------------------------------------------------------


def add_parts_cost(count, n, adds=False):
    """(bytes, FLOPs) of one sum of `count` parts of n numbers."""
    return 4 * (count + 1 + adds) * n, (count - 1 + adds) * n


# Operation ----------------------------------------------------------------------------------------

# the ninth has its own launch
SIZES = (1, 8), (70, 12), (3, 1100), (2, 4), (33, 4), (9, 260), (4, 16), (5, 8), (6, 12)


@operation(
    reference=add_parts_reference,
    cost=add_parts_cost,
    problems=[
        Problem(
            "nine sums",
            sums=[
                Sum(single(count, n), count, single(n), k % 2 == 0)
                for k, (count, n) in enumerate(SIZES)
            ],
        )
    ],
    writes=("sums",),
)
def add_parts(sums, waits=False):
    """Each `Sum`: target = or += the sum of its parts; on a device at once, or together with later
    ones.

    waits: the sums are deferrable, as within `deferrable`
    """
    sums = [s._replace(parts=s.parts.reshape(-1), target=s.target.reshape(-1)) for s in sums]
    if not _waiting:
        _launch(sums)
        return
    waiting = _waiting[-1]
    waits = (waits or waiting.allowed) and sum(s.parts.nbytes for s in sums) <= WAITING
    for s in sums:
        flush_for(s.target)  # one after the other
    if len(waiting.sums) + len(sums) > SUMS:
        if not waits:
            _launch(sums)
            return
        flush_on_side_stream()
    waiting.sums = waiting.sums + sums
    if not waits:
        flush_reductions()
    elif waiting.bytes() > WAITING:
        flush_on_side_stream()
