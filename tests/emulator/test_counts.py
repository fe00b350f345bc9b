"""What the emulator counts, against arithmetic by hand; test_costs.py holds
costs against it."""

import math

import numpy as np
import pytest
from numba import cuda

from numdiff import emulator
from numdiff.emulator.counts import Recorder, count
from numdiff.emulator.warp_requests import count_sectors, count_wavefronts

float16, float32, float64 = np.float16, np.float32, np.float64


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


# Kernels counted by hand --------------------------------------------------------------------------


@cuda.jit
def saxpy(a, x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = a * x[i] + y[i]


@cuda.jit
def dot(x, y, out):
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t] * y[t]
    half = 32
    while half > 0:
        cuda.syncthreads()
        if t < half:
            tile[t] += tile[t + half]
        half //= 2
    if t == 0:
        out[0] = tile[0]


def test_dot_by_hand():
    recorder = count(dot, 1, 64, ones(64), ones(64), ones(1))
    assert recorder.line("x[t] * y[t]").flops["float32"] == 64
    tree = recorder.line("tile[t] += tile[t + half]")
    assert tree.flops["float32"] == 32 + 16 + 8 + 4 + 2 + 1
    assert tree.reads["shared"] == 2 * 63 and tree.writes["shared"] == 63
    # one warp, six levels, three instructions: all conflict-free, one wavefront each
    assert tree.shared_requests == tree.wavefronts == 6 * 3
    last = recorder.line("out[0] = tile[0]")
    assert (last.reads["shared"], last.writes["global"], last.sectors) == (1, 1, 1)
    assert recorder.total().writes["shared"] == 64 + 63


# Coalescing ---------------------------------------------------------------------------------------


@cuda.jit
def shifted_copy(x, y, shift):
    i = cuda.grid(1)
    y[i] = x[i + shift]


@cuda.jit
def some_lanes_first(x, y, barrier):
    t = cuda.threadIdx.x
    for turn in range(2):
        if turn == 1 or t < 16:
            y[32 * turn + t] = x[32 * turn + t]
        if barrier:
            cuda.syncthreads()


@pytest.mark.parametrize("barrier, sectors", [(1, 2 + 4), (0, 4 + 2)])
def test_lanes_are_grouped_by_occurrence_and_regrouped_after_a_barrier(barrier, sectors):
    """Half the warp has done the line once more than the others when it comes to the second turn."""
    recorder = count(some_lanes_first, 1, 32, ones(64), ones(64), barrier)
    line = recorder.line("y[32 * turn + t] = x[32 * turn + t]")
    assert line.requests == 2 * 2
    assert line.sectors == 2 * sectors
    # without the barrier the first request is wrongly mixed: 16 lanes of turn 0 with 16 lanes of
    # turn 1


# Bank conflicts -----------------------------------------------------------------------------------


def make_transpose(padding):
    row = 32 + padding

    @cuda.jit
    def transpose(x, y):
        tile = cuda.shared.array((32, row), float32)
        t, first = cuda.threadIdx.x, cuda.threadIdx.y
        for r in range(first, 32, 8):
            tile[r, t] = x[r, t]
        cuda.syncthreads()
        for r in range(first, 32, 8):
            y[r, t] = tile[t, r]

    return transpose


@pytest.mark.parametrize("padding, wavefronts", [(0, 32), (1, 1), (2, 2), (4, 4), (16, 16)])
def test_transpose_with_and_without_padding(padding, wavefronts):
    """Down a column the words are 32 + padding apart: gcd(32, 32 + padding) lanes want words of one
    bank."""
    x = np.arange(1024, dtype=np.float32).reshape(32, 32)
    y = np.zeros_like(x)
    recorder = count(make_transpose(padding), 1, (32, 8), x, y)
    assert np.array_equal(y, x.T)
    assert wavefronts == math.gcd(32, 32 + padding)
    written, read = recorder.line("tile[r, t] = x[r, t]"), recorder.line("y[r, t] = tile[t, r]")
    assert (written.shared_requests, written.wavefronts, written.conflicts) == (32, 32, 0)
    assert (read.shared_requests, read.wavefronts) == (32, 32 * wavefronts)
    assert read.conflicts == 32 * (wavefronts - 1)


def addresses(*lanes):
    return np.array([[a] for a in lanes], np.int64)


@pytest.mark.parametrize(
    "size, lanes, waves, ideal",
    [
        (4, [0] * 32, 1, 1),  # a broadcast
        (4, [128 * t for t in range(32)], 32, 1),  # one bank
        (4, [4 * t for t in range(32)], 1, 1),  # neighbours
        (4, [4 * (31 - t) for t in range(32)], 1, 1),  # in whatever order
        (4, [8 * t for t in range(32)], 2, 1),  # every second word: two lanes a bank
        (4, [12 * t for t in range(32)], 1, 1),  # an odd stride meets every bank
        (4, [132 * t for t in range(32)], 1, 1),  # down a column of padded rows
        (4, [128 * t for t in range(8)] + [-1] * 24, 8, 1),  # eight lanes alone
        (2, [2 * t for t in range(32)], 1, 1),  # two lanes a word
        (1, [128 * (t // 4) + t % 4 for t in range(32)], 8, 1),
        (8, [8 * t for t in range(32)], 2, 2),  # 256 bytes: a wavefront for each half warp
        # 16 lanes on every second pair of banks: two words a bank
        (8, [16 * t for t in range(32)], 4, 2),
        (16, [16 * t for t in range(32)], 4, 4),  # 512 bytes, eight lanes at a time
        # rows of 128 bytes, unswizzled: eight lanes on the same four banks
        (16, [128 * t for t in range(32)], 32, 4),
        (16, [128 * t + 16 * (t % 8) for t in range(32)], 4, 4),  # and swizzled
        (16, [0] * 8 + [-1] * 24, 1, 1),
    ],
)
def test_wavefronts(size, lanes, waves, ideal):
    found = count_wavefronts(addresses(*lanes), size)
    assert (found[0].tolist(), found[1].tolist()) == ([waves], [ideal])


def test_sectors_of_wide_and_crooked_accesses():
    found = count_sectors(addresses(*[16 * t for t in range(32)]), 16)
    assert (found[0].tolist(), found[1].tolist()) == ([16], [16])
    found = count_sectors(addresses(24, *[-1] * 31), 16)  # across a boundary
    assert (found[0].tolist(), found[1].tolist()) == ([2], [1])


# Operations ---------------------------------------------------------------------------------------


@cuda.jit
def arithmetic(h, f, d, i):
    t = cuda.threadIdx.x
    h[t] = h[t] * h[t]
    f[t] = cuda.fma(f[t], f[t], f[t])
    f[t] = math.sqrt(f[t]) - math.exp(f[t])
    d[t] = d[t] / d[t] + d[t]
    f[t] = max(-f[t], abs(f[t]))
    i[t] = i[t] * 3 + 1
    i[t] ^= 5


def test_operations_by_type():
    recorder = count(
        arithmetic,
        1,
        2,
        ones(2, dtype=float16),
        ones(2),
        ones(2, dtype=float64),
        ones(2, dtype=np.int32),
        float64=True,
    )
    assert recorder.line("h[t] * h[t]").flops == {"float16": 2}
    assert recorder.line("cuda.fma").flops == {"float32": 2 * 2}
    special = recorder.line("math.sqrt")
    assert (special.special, special.flops["float32"]) == (2 * 2, 2)
    assert recorder.line("d[t] / d[t]").flops == {"float64": 2 * 2}
    assert recorder.line("max(-f[t]").total_flops == 0
    whole = recorder.line("i[t] * 3 + 1")
    assert (whole.integer, whole.total_flops) == (2 * 2, 0)
    assert recorder.line("i[t] ^= 5").integer == 2


@cuda.jit
def other_memories(table, x, count):
    mine = cuda.local.array(4, float32)
    t = cuda.threadIdx.x
    for k in range(4):
        mine[k] = x[t]
    x[t] = mine[3]
    cuda.atomic.add(count, 0, 1)


def test_local_memory_and_atomics():
    recorder = count(other_memories, 1, 32, ones(1), ones(32), np.zeros(1, np.int32))
    line = recorder.line("mine[k] = x[t]")
    assert (line.writes["local"], line.write_bytes["local"], line.reads["global"]) == (
        128,
        512,
        128,
    )
    assert line.requests == 4 and line.shared_requests == 0
    atomic = recorder.line("atomic.add")
    assert (atomic.writes["global"], atomic.requests, atomic.sectors) == (32, 1, 1)


def matrix_instruction():
    raise NotImplementedError


@emulator.twin(matrix_instruction)
def _matrix_instruction(machine):
    if machine.thread.lane == 0:
        machine.recorder.tensor(2 * 16 * 8 * 16, machine.site_here())


def test_counting_without_checks_and_with_faults():
    recorder = count(saxpy, 1, 32, float32(2), ones(32), ones(32), checks=False)
    assert recorder.total().total_flops == 64
    recorder = Recorder()
    with pytest.raises(emulator.KernelFault):
        emulator.Emulator(recorder=recorder).launch(shifted_copy, 1, 32, ones(32), ones(32), 1)
    assert recorder.total().reads["global"] == 31  # what was done is still counted


def test_table():
    recorder = count(saxpy, 2, 64, float32(2), ones(100), ones(100))
    table = recorder.table()
    print(table)
    assert "saxpy: 1 launch of grid (2, 1, 1), block (64, 1, 1)" in table
    row = next(line for line in table.splitlines() if "y[i] = a * x[i] + y[i]" in line)
    assert row.startswith("test_counts.py:") and row.split()[-3:] == ["39", "100", "%"]
    assert "shared" not in table and "tensor" not in table  # nothing of that kind
    assert "800 distinct bytes read, 400 written" in table
    assert (
        len(
            {
                len(line)
                for line in table.splitlines()
                if "saxpy" not in line and "memory" not in line
            }
        )
        == 1
    )
    head, titles = table.splitlines()[1:3]
    assert head.index("global memory") <= titles.index("read B") and head.index(
        "operations"
    ) <= titles.index("FLOPs")

    brief = recorder.table(brief=True).splitlines()
    (row,) = [line for line in brief if "y[i] = a * x[i] + y[i]" in line]
    # requests, transactions per request, FLOPs
    assert row.split()[-3:] == ["12", f"{39 / 12:.1f}", "200"]
    # nothing of these to tell
    assert not any("if i < x.size" in line or "cuda.grid" in line for line in brief)
    with pytest.raises(LookupError, match="saxpy"):
        recorder.total("another")
