"""What the steps of a sampler need from their timesteps, made for many steps at a time.

A model sees a step's timestep and its images' classes through a small network that knows nothing of
the image: the conditioning. For the 32 rows of one step each of its products, one for every block
of the model, takes a few microseconds, in which it only reads its weights. For the rows of fifty
steps together it takes little longer. So a sampler computes the conditioning of many steps ahead,
and each step takes its own. Only the device knows which step that is, because a recorded step is
replayed.

MATHEMATICS
    timesteps ahead   begin = step; t[k · R + r] = table[step + k, 0]        of R rows a step, the K steps to come; past
                      the table's end its last row again
    place             ahead[k, offset + i] = source[k, i]
    take              row = ahead[step - 1 - begin]                          `next_row` has moved on to the next step
SHAPES
    table (steps, width) uint32, whose first column is a timestep, float32 by its bits
    (optimizer/step_state.py); step, begin (1,) uint32; t (K · R,) float32; ahead (K, n), source (K,
    m) and row (n,) of one dtype, float32 or float16
VERSIONS
    v1: timesteps one thread an element; place, take one thread 16 bytes, which rows and places must
    be multiples of.
LAUNCH
    ceil(n / 256) blocks of 256 threads, for n elements, or n vectors.
DETERMINISM
    each number is written by one thread.
COST
    bytes: place 2 K m elements, take 2 n. Roof: memory bandwidth.
SOURCE
    plain copies; that the conditioning depends on timestep and class alone: Peebles and Xie 2023,
    arXiv:2212.09748, section 3.2 (adaLN), and Nichol and Dhariwal 2021, arXiv:2102.09672.
READ NEXT
    sampler.py.
"""

import numpy as np

from ...device import cuda, is_device, launch, load4, store4, uint32, with_dtype
from ...device.array import as_words
from ..operation import (
    Problem,
    filled,
    half,
    integers,
    numbers,
    operation,
    single,
)

BLOCK = 256  # threads


# References ---------------------------------------------------------------------------------------


def timesteps_ahead_reference(table, step, begin, t, rows):
    begin[...] = step
    k = np.minimum(step[0] + np.arange(len(t) // rows), len(table) - 1)
    t[...] = np.repeat(np.ascontiguousarray(table[k, 0]).view(np.float32), rows)


def place_reference(ahead, source, offset):
    ahead[:, offset : offset + source.shape[1]] = source


def take_reference(ahead, step, begin, row):
    row[...] = ahead[step[0] - uint32(1) - begin[0]]


# Kernels ------------------------------------------------------------------------------------------


@cuda.jit
def timesteps_ahead_kernel_v1(table, step, begin, t, rows, width, last):
    i = cuda.grid(1)
    s = step[0]
    if i < t.size:
        t[i] = table[min(s + uint32(i // rows), uint32(last)) * uint32(width)]
    if i == 0:
        begin[0] = s


@cuda.jit
def place_kernel_v1(ahead, source, offset, n, m):
    i = cuda.grid(1) * 4
    if i < source.size:
        x0, x1, x2, x3 = load4(source, i)
        store4(ahead, i // m * n + offset + i % m, x0, x1, x2, x3)


@cuda.jit
def take_kernel_v1(ahead, step, begin, row):
    i = cuda.grid(1) * 4
    if i < row.size:
        x0, x1, x2, x3 = load4(
            ahead, (step[0] - uint32(1) - begin[0]) * uint32(row.size) + uint32(i)
        )
        store4(row, i, x0, x1, x2, x3)


# Cost ---------------------------------------------------------------------------------------------


def timesteps_ahead_cost(count, steps):
    """(bytes, FLOPs) for `count` timesteps of `steps` steps."""
    return 4 * (count + steps) + 8, 0


def place_cost(steps, m, itemsize=4):
    return 2 * steps * m * itemsize, 0


def take_cost(n, itemsize=4):
    return 2 * n * itemsize + 8, 0


# Operations ---------------------------------------------------------------------------------------


def _check_timesteps(table, t, rows):
    if table.dtype != np.uint32 or (is_device(t) and t.dtype != np.float32) or len(t) % rows:
        raise ValueError(
            f"table {table.dtype} must be uint32, and t {t.dtype}{tuple(t.shape)} float32, {rows} a step"
        )


@operation(
    reference=timesteps_ahead_reference,
    cost=lambda t, rows: timesteps_ahead_cost(t.size // rows, rows),
    check=_check_timesteps,
    problems=[
        Problem(
            table=filled(
                (4, 3),
                lambda rng: rng.standard_normal((4, 3)).astype(np.float32).view(np.uint32),
                np.uint32,
            ),
            step=integers([2], np.uint32),
            begin=integers([0], np.uint32),
            t=numbers(np.zeros(15)),
            rows=3,
        )
    ],
    writes=("begin", "t"),
)
def timesteps_ahead(table, step, begin, t, rows):
    """Writes begin = step, and into t the timesteps of the table's rows from `step` on, each `rows`
    times."""
    launch(
        timesteps_ahead_kernel_v1,
        -(-len(t) // BLOCK),
        BLOCK,
        with_dtype(table, np.float32).reshape(-1),
        step,
        begin,
        t,
        rows,
        table.shape[1],
        len(table) - 1,
    )


def are_vectors(*columns, itemsize):
    """Whether rows, or places in them, of these columns are multiples of 16 bytes."""
    return not any(n * itemsize % 16 for n in columns)


def _check_place(ahead, source, offset):
    (steps, n), m = ahead.shape, source.shape[1]
    if (
        len(source) != steps
        or not 0 <= offset <= n - m
        or ahead.dtype != source.dtype
        or steps * n >= 2**31
        or not are_vectors(n, m, offset, itemsize=ahead.dtype.itemsize)
    ):
        raise ValueError(
            f"source {source.dtype}{tuple(source.shape)} does not go to {offset} of {ahead.dtype}"
            f"{tuple(ahead.shape)}, or not by multiples of 16 bytes"
        )


STEPS, WIDTH = 50, 12 * 8 * 6 * 768  # a sampler's, of eight images of a DiT-B, for the benchmark


@operation(
    reference=place_reference,
    cost=lambda source: place_cost(*source.shape, source.dtype.itemsize),
    exact_bytes=True,
    check=_check_place,
    problems=[
        Problem("rows of 16 bytes", ahead=single(5, 20), source=single(5, 8), offset=12),
        Problem("float16", ahead=half(4, 24), source=half(4, 16), offset=8),
        Problem(
            ahead=half(STEPS, WIDTH),
            source=half(STEPS, WIDTH // 12),
            offset=0,
            moved=place_cost(STEPS, WIDTH // 12, 2)[0],
            measured=True,
        ),
    ],
    writes=("ahead",),
)
def place(ahead, source, offset):
    """ahead[:, offset:offset + m] = source (K, m), in place."""
    size, n, m = ahead.dtype.itemsize, ahead.shape[1], source.shape[1]
    ahead, source = as_words(ahead), as_words(source)
    places = (place * size // 4 for place in (offset, n, m))
    launch(place_kernel_v1, -(-source.size // 4 // BLOCK), BLOCK, ahead, source, *places)


def _check_take(ahead, row):
    if (
        ahead.shape[1:] != row.shape
        or ahead.dtype != row.dtype
        or ahead.size >= 2**31
        or not are_vectors(row.size, itemsize=row.dtype.itemsize)
    ):
        raise ValueError(
            f"a row {row.dtype}{tuple(row.shape)} is none of {ahead.dtype}{tuple(ahead.shape)}, or no "
            "multiple of 16 bytes"
        )


AT = {"step": integers([9], np.uint32), "begin": integers([6], np.uint32)}


@operation(
    reference=take_reference,
    cost=lambda row: take_cost(row.size, row.dtype.itemsize),
    exact_bytes=True,
    check=_check_take,
    problems=[
        Problem("rows of 16 bytes", ahead=single(5, 20), **AT, row=single(20)),
        Problem("float16", ahead=half(4, 24), **AT, row=half(24)),
        Problem(
            ahead=half(STEPS, WIDTH),
            step=integers([7], np.uint32),
            begin=integers([0], np.uint32),
            row=half(WIDTH),
            moved=take_cost(WIDTH, 2)[0],
            measured=True,
        ),
    ],
    writes=("row",),
)
def take(ahead, step, begin, row):
    """row = ahead[step - 1 - begin], in place."""
    row = as_words(row)
    launch(take_kernel_v1, -(-row.size // 4 // BLOCK), BLOCK, as_words(ahead), step, begin, row)
