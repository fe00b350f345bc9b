"""What overlapping views, equal writes, negative indices and local arrays that leave their function
lead to."""

import numpy as np
import pytest
from numba import cuda

from numdiff import emulator
from tests.conftest import THREAD_ORDERS
from tests.emulator.planting import fault_at, faults_of, marked, race_between, run


@cuda.jit
def bytes_of_one_word(o):
    words = cuda.shared.array(0, np.float32)
    octets = cuda.shared.array(0, np.uint8)
    i = cuda.threadIdx.x
    if i == 0:
        words[1] = 1.5  # the word
    else:
        octets[4 + i] = 7  # a byte of it
    cuda.syncthreads()
    o[i] = octets[i]


@THREAD_ORDERS
def test_a_word_and_a_byte_of_it_race(order):
    faults = faults_of(bytes_of_one_word, 1, 4, np.zeros(4, np.uint8), shared=8, order=order)
    race_between(faults, __file__, marked(__file__, "the word"), marked(__file__, "a byte of it"))


@cuda.jit
def bytes_apart(o):
    words = cuda.shared.array(0, np.float32)
    octets = cuda.shared.array(0, np.uint8)[32:]
    i = cuda.threadIdx.x
    words[i] = i
    octets[i] = i
    o[i] = words[i] + octets[i]
    cuda.syncthreads()
    o[i] += octets[7 - i]


@THREAD_ORDERS
def test_neighbouring_bytes_do_not_race(order):
    o = np.zeros(8, np.float32)
    run(bytes_apart, 1, 8, o, shared=40, order=order)
    assert np.array_equal(o, 2 * np.arange(8) + 7 - np.arange(8))


@cuda.jit
def partly_written(o):
    octets = cuda.local.array(8, np.uint8)
    for k in range(7):
        octets[k] = 0
    words = octets.view(np.float32)
    o[0] = words[0]
    o[1] = words[1]  # lacks a byte


@cuda.jit
def partly_complex(z, o):
    pair = cuda.local.array(1, np.complex64)
    pair.real[0] = 1
    o[0] = abs(pair[0])  # lacks the imaginary part


def test_a_word_written_in_part_is_uninitialised():
    faults = faults_of(partly_written, 1, 1, np.zeros(2, np.float32))
    fault_at(faults, "uninitialised", __file__, marked(__file__, "lacks a byte"))
    assert len(faults) == 1
    faults = faults_of(partly_complex, 1, 1, np.zeros(1, np.complex64), np.zeros(1, np.float32))
    fault_at(faults, "uninitialised", __file__, marked(__file__, "lacks the imaginary part"))


@cuda.jit
def flag(o):
    o[0] = 1  # all set it


def test_equal_writes_race_where_one_is_strict():
    run(flag, 1, 4, np.zeros(1, np.int32))
    faults = faults_of(flag, 1, 4, np.zeros(1, np.int32), checks="strict")
    race_between(faults, __file__, marked(__file__, "all set it"))


@cuda.jit
def rewritten(x, o):
    i = cuda.threadIdx.x
    o[0] = 5  # all write it
    x[i] = o[0] + 1  # and read it


def test_writes_that_change_nothing_race_with_none_where_one_is_relaxed():
    x, o = np.zeros(4), np.zeros(1)
    race_between(
        faults_of(rewritten, 1, 4, x, o),
        __file__,
        *(marked(__file__, m) for m in ("all write it", "and read it")),
    )
    run(rewritten, 1, 4, x, o, checks="relaxed")
    assert x.tolist() == [6] * 4


@cuda.jit
def last(x, o):
    i = cuda.threadIdx.x
    o[i] = x[i - 1]  # from the end


def test_a_negative_index_counts_from_the_end_where_one_is_relaxed():
    x, o = np.arange(4.0), np.zeros(4)
    fault_at(faults_of(last, 1, 4, x, o), "bounds", __file__, marked(__file__, "from the end"))
    run(last, 1, 4, x, o, checks="relaxed")
    assert o.tolist() == [3, 0, 1, 2]
    with pytest.raises(ValueError, match="unknown checks slack"):
        emulator.Emulator(checks="slack")


@cuda.jit
def three_lines(o):
    i = cuda.threadIdx.x
    if i == 0:
        o[0] = 1  # first
    elif i == 1:
        o[1] = 2  # second
    else:
        o[i - 2] = 3  # third


def test_each_pair_of_lines_is_reported():
    faults = faults_of(three_lines, 1, 4, np.zeros(2))
    third = marked(__file__, "third")
    for line in ("first", "second"):
        race_between(faults, __file__, marked(__file__, line), third)


@cuda.jit(device=True)
def squares(n):
    made = cuda.local.array(2, np.float64)
    made[0] = n * n
    made[1] = n
    return made  # leaves


@cuda.jit(device=True)
def first_square(n):
    made = cuda.local.array(2, np.float64)
    made[0] = n * n
    return made[0]


@cuda.jit
def uses_squares(o):
    o[0] = squares(3.0)[0]


@cuda.jit
def uses_a_square(o):
    o[0] = first_square(3.0)


def test_a_local_array_must_not_leave_its_function():
    fault_at(
        faults_of(uses_squares, 1, 1, np.zeros(1)), "escape", __file__, marked(__file__, "leaves")
    )
    o = np.zeros(1)
    run(uses_a_square, 1, 1, o)
    assert o[0] == 9
