"""Where the emulator leaves an operation to Python: nothing comes out otherwise than where it makes
each explicit."""

import ast

import numpy as np
from numba import cuda, int32, int64, uint32

from numdiff.emulator import Emulator
from numdiff.emulator.counts import count
from numdiff.emulator.integers import INDEX, UNKNOWN, Integers
from numdiff.emulator.source import source_tree

FACTOR = 3
HUGE = (1 << 62) + 1


@cuda.jit(device=True)
def row_of(i, width):
    return i * width + FACTOR


@cuda.jit
def at_the_edges(a, b, out):
    """Sums, products, quotients and shifts of numbers of all sizes and types, written as indices
    are."""
    t = cuda.threadIdx.x
    n, width = out.shape
    x, y, word = a[t], int32(b[t]), uint32(b[t])
    out[t, 0] = row_of(t, width)
    out[t, 1] = row_of(y, y) * (n - t) // 7
    out[t, 2] = row_of(x, x)  # an int64, whose product wraps
    out[t, 3] = word * word + word
    out[t, 4] = int64(x) * FACTOR * HUGE
    out[t, 5] = (y - t) * y % (t + 1) + (y << 40) - (y >> 3)
    out[t, 6] = (int64(x) << 3) // FACTOR
    total, product = int32(0), int64(1)
    for k in range(-5, 60, 13):
        total += k * y
        product *= k - y
    out[t, 7] = total
    out[t, 8] = product
    half = t + 1
    while half > 1:
        half = half + 1 >> 1
        out[t, 9] += half * -FACTOR
    out[t, 10] = max(t, y) * min(t, y) ^ ~y
    out[t, 11] = row_of(word, word) + row_of(t, word)
    out[t, 12] = word - t if t % 2 else y - t


NUMBERS = [
    0,
    1,
    -1,
    7,
    1 << 31,
    -(1 << 31),
    (1 << 31) - 1,
    1 << 40,
    1 << 62,
    (1 << 63) - 1,
    -(1 << 63),
    12345678901,
]


def test_the_same_comes_out_as_where_each_operation_is_explicit():
    a = np.array(NUMBERS)
    b = np.array([n + (1 << 31) & (1 << 32) - 1 for n in NUMBERS]) - (1 << 31)
    got, want = np.zeros((2, len(a), 13), np.int64)
    Emulator().launch(at_the_edges, 1, len(a), a, b, got)
    count(at_the_edges, 1, len(a), a, b, want)
    assert np.array_equal(got, want)
    assert want[1:].any(axis=0).all()


def natives(function, given=()):
    """{an operation's text: whether Python does it} of a function."""
    tree = source_tree(function)
    integers = Integers(function, tree, given)
    integers.mark()
    return {
        ast.unparse(n): n.native
        for n in ast.walk(tree)
        if isinstance(n, (ast.BinOp, ast.AugAssign))
    }


def known(x, n, f):
    i = cuda.grid(1)
    j = i * 4 + n
    k = n
    k += 8
    f = f + 1
    s = i * i * i
    for r in range(n, x.size, 2):
        j = j + r % 3
        x[r * 4] = x[i] + k * 2
    for q in range(8):
        x[q + i] = i * q + f * 2
    return s


def test_what_is_known():
    nothing, number = natives(known), natives(known, (UNKNOWN, INDEX, UNKNOWN))
    for operation in ("i * 4", "r % 3", "q + i", "i * q"):
        assert number[operation], operation
    for operation in ("i * 4 + n", "k += 8", "r * 4", "k * 2", "j + r % 3"):
        assert number[operation] and not nothing[operation], operation
    for operation in ("f + 1", "f * 2", "x[i] + k * 2", "i * q + f * 2", "i * i * i"):
        assert not number[operation], operation
    assert number["i * i"]  # but not the product with the third


def shaded(x):
    x = float(x)
    y = x + 1
    first = [x + 1 for x in (1, 2)]
    last = lambda y: y + 2  # noqa: E731
    return first, last(y)


def test_names_of_other_scopes_are_not_taken_for_integers():
    assert not any(natives(shaded, (INDEX,)).values())


def other_constants(dtype, step):
    def kernel(out):
        i = cuda.threadIdx.x
        out[i] = dtype(1) - dtype(2) + i * step

    return cuda.jit(kernel)


def test_the_same_text_with_other_constants():
    """What is taken for granted of one is checked for the next: a type, an integer, may be
    something else there."""
    # which Numba makes
    for dtype, step, want in (
        (np.int32, 2, [-1, 1]),
        (np.uint32, np.float64(0), [2.0**64] * 2),
        # of uint32
        (np.float64, 2, [-1, 1]),
        (np.int32, np.float64(0.5), [-1, -0.5]),
    ):
        out = np.zeros(2)
        Emulator(float64=True).launch(other_constants(dtype, step), 1, 2, out)
        assert out.tolist() == want


@cuda.jit(device=True)
def shared_tile(n):
    tile = cuda.shared.array(4, np.float32)
    tile[cuda.threadIdx.x] = n + 1
    cuda.syncthreads()
    return tile


@cuda.jit
def tile_twice(x, n):
    a, b = shared_tile(int32(3)), shared_tile(n[0])
    x[cuda.threadIdx.x] = a[0] + b[3]


def test_a_shared_array_is_one_whatever_it_is_called_with():
    x = np.zeros(4, np.float32)
    Emulator().launch(tile_twice, 1, 4, x, np.array([1], np.int32))
    assert x.tolist() == [4] * 4  # the second call has overwritten the first one's
