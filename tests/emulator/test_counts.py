"""What the emulator counts, against arithmetic by hand and against the cost functions of the project's kernels."""
import importlib
import math
import pkgutil

import numpy as np
import pytest
from numba import cuda

import numdiff.kernels
from numdiff import emulator
from numdiff.device import download, load4, store4, upload
from numdiff.device.emulator import EmulatorDevice
from numdiff.emulator.counts import Recorder, count
from numdiff.emulator.warp_requests import count_sectors, count_wavefronts
from numdiff.float8 import bits_of
from numdiff.kernels import attention as flash_attention
from numdiff.kernels import (
    bias,
    concat,
    conv2d,
    depthwise,
    dropout,
    embedding,
    layernorm,
    linear,
    peer_pieces,
    peer_reduce,
    quantise,
    random,
    reduce,
    resample,
    rmsnorm,
    scale_shift,
)
from numdiff.kernels.attention import sla
from numdiff.kernels.attention import unfused as attention
from numdiff.kernels.concat import Pair
from numdiff.kernels.conv2d import im2col, im2win
from numdiff.kernels.diffusion import ahead, class_dropout, images, mse, q_sample, sampler, vlb
from numdiff.kernels.elementwise import (
    add_forward,
    add_forward_cost,
    gelu_backward,
    gelu_backward_cost,
    gelu_forward,
    gelu_forward_cost,
    silu_backward,
    silu_backward_cost,
    silu_forward,
    silu_forward_cost,
)
from numdiff.kernels.groupnorm import (
    groupnorm_backward,
    groupnorm_backward_cost,
    groupnorm_forward,
    groupnorm_forward_cost,
)
from numdiff.kernels.linear_gradients import linear_gradients_backward, linear_gradients_backward_cost
from numdiff.kernels.linear_stack import (
    linear_stack_backward,
    linear_stack_backward_cost,
    linear_stack_forward,
    linear_stack_forward_cost,
)
from numdiff.kernels.matmul import (
    hopper_fp8,
    matmul_forward,
    matmul_forward_cost,
    matmul_fp8_forward,
    matmul_fp8_forward_cost,
    matmul_pair_forward,
    matmul_pair_gradient,
)
from numdiff.kernels.matmul.pair import matmul_pair_forward_cost, matmul_pair_gradient_cost
from numdiff.kernels.optimizer import ema, grad_norm, power_ema, step_state, telemetry, zero_ranges
from numdiff.kernels.optimizer.adamw import adamw_update, adamw_update_cost
from numdiff.kernels.reduce import column_sum, column_sum_cost
from numdiff.kernels.second_pass import Sum, add_parts, add_parts_cost
from numdiff.kernels.softmax import softmax_backward, softmax_backward_cost, softmax_forward, softmax_forward_cost
from numdiff.kernels.transformer import adaln, bias_gelu, chunk, gate, gate_adaln, patchify, qk_norm_rope, swiglu
from tests.conftest import exhaustive, exhaustively
from tests.emulator import kernels_mma

float16, float32, float64 = np.float16, np.float32, np.float64


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


# Kernels counted by hand ----------------------------------------------------------------------------------------------

@cuda.jit
def saxpy(a, x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = a * x[i] + y[i]


def test_saxpy_by_hand():
    n, block = 100, 64  # two blocks of two warps; the last warp has 4 of 32 lanes inside
    recorder = count(saxpy, 2, block, float32(2), ones(n), ones(n))
    line = recorder.line("y[i] = a * x[i] + y[i]")
    assert line.reads["global"] == 2 * n and line.writes["global"] == n
    assert line.read_bytes["global"] == 4 * 2 * n and line.write_bytes["global"] == 4 * n
    assert line.flops == {"float32": 2 * n} and line.special == 0
    # x read, y read, y written: each by 4 warps. A whole warp moves 32 · 4 / 32 = 4 sectors, the last one 16 bytes: 1
    assert line.requests == 3 * 4
    assert line.sectors == line.ideal_sectors == 3 * (3 * 4 + 1)
    total = recorder.total()
    assert total.distinct_read_bytes == 2 * 4 * n and total.distinct_write_bytes == 4 * n
    assert total.total_flops == 2 * n and total.tensor_flops == 0


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


@cuda.jit
def matmul(a, b, c):
    column, row = cuda.threadIdx.x, cuda.threadIdx.y
    total = float32(0)
    for k in range(a.shape[1]):
        total += a[row, k] * b[k, column]
    c[row, column] = total


def test_naive_matmul_by_hand():
    n = 8
    recorder = count(matmul, 1, (n, n), ones(n, n), ones(n, n), ones(n, n))
    line = recorder.line("total += a[row, k] * b[k, column]")
    assert line.flops["float32"] == 2 * n**3
    assert line.reads["global"] == 2 * n**3
    # a warp is 4 rows of 8 columns. Of a it reads 4 words in 4 rows of 32 bytes: 4 sectors, though 16 bytes would fit
    # in one. Of b it reads a row of 32 bytes, wanted by 4 lanes each: 1 sector.
    warps, steps = 2, n
    assert line.requests == 2 * warps * steps
    assert line.sectors == warps * steps * (4 + 1)
    assert line.ideal_sectors == warps * steps * (1 + 1)
    assert line.efficiency == 2 / 5
    assert recorder.line("c[row, column] = total").sectors == warps * 4 * n * 4 // 32
    assert recorder.total().distinct_bytes == 3 * 4 * n * n


# Coalescing -----------------------------------------------------------------------------------------------------------

@cuda.jit
def strided_copy(x, y, stride):
    i = cuda.grid(1)
    value = x[i * stride]
    y[i] = value


@pytest.mark.parametrize("stride, sectors", [(1, 4), (2, 8), (4, 16), (8, 32), (32, 32), (0, 1)])
def test_a_strided_copy_reads_more_sectors(stride, sectors):
    """32 lanes of 4 bytes: neighbours fill 4 sectors; at 8 elements apart every lane has a sector of its own."""
    warps = 4
    recorder = count(strided_copy, 2, 64, ones(128 * max(stride, 1)), ones(128), stride)
    read, written = recorder.line("x[i * stride]"), recorder.line("y[i] = value")
    assert (read.requests, read.sectors) == (warps, warps * sectors)
    assert read.ideal_sectors == warps * (1 if stride == 0 else 4)
    assert (written.requests, written.sectors, written.efficiency) == (warps, warps * 4, 1.0)


@cuda.jit
def shifted_copy(x, y, shift):
    i = cuda.grid(1)
    y[i] = x[i + shift]


def test_a_shifted_copy_touches_one_sector_more():
    recorder = count(shifted_copy, 1, 32, ones(64), ones(32), 1)
    assert recorder.total().sectors == 5 + 4 and recorder.total().ideal_sectors == 4 + 4


@cuda.jit
def vector_copy(x, y):
    i = cuda.grid(1) * 4
    a, b, c, d = load4(x, i)
    store4(y, i, a, b, c, d)


def test_vector_instructions_are_one_request():
    recorder = count(vector_copy, 1, 32, ones(128), ones(128))
    line = recorder.line("load4(x, i)")
    assert (line.requests, line.reads["global"], line.read_bytes["global"]) == (1, 128, 512)
    assert line.sectors == line.ideal_sectors == 512 // 32


@cuda.jit
def some_lanes_first(x, y, barrier):
    t = cuda.threadIdx.x
    for turn in range(2):
        if turn == 1 or t < 16:
            y[32 * turn + t] = x[32 * turn + t]
        if barrier:
            cuda.syncthreads()


@pytest.mark.parametrize("barrier, sectors", [(1, 2 + 4), (0, 4 + 2)])
def test_lanes_are_put_together_by_occurrence_and_anew_after_a_barrier(barrier, sectors):
    """Half the warp has done the line once more than the others when it comes to the second turn."""
    recorder = count(some_lanes_first, 1, 32, ones(64), ones(64), barrier)
    line = recorder.line("y[32 * turn + t] = x[32 * turn + t]")
    assert line.requests == 2 * 2
    assert line.sectors == 2 * sectors
    # without the barrier the first request is wrongly mixed: 16 lanes of turn 0 with 16 lanes of turn 1


@pytest.mark.parametrize("order", ["reversed", "shuffled"])
def test_counts_do_not_depend_on_the_order_of_threads(order):
    same = [count(dot, 1, 64, ones(64), ones(64), ones(1), order=o).total() for o in ("forward", order)]
    assert same[0] == same[1]


# Bank conflicts -------------------------------------------------------------------------------------------------------

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
    """Down a column the words are 32 + padding apart: gcd(32, 32 + padding) lanes want words of one bank."""
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


@pytest.mark.parametrize("size, lanes, waves, ideal", [
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
    (8, [16 * t for t in range(32)], 4, 2),  # 16 lanes on every second pair of banks: two words a bank
    (16, [16 * t for t in range(32)], 4, 4),  # 512 bytes, eight lanes at a time
    (16, [128 * t for t in range(32)], 32, 4),  # rows of 128 bytes, unswizzled: eight lanes on the same four banks
    (16, [128 * t + 16 * (t % 8) for t in range(32)], 4, 4),  # and swizzled
    (16, [0] * 8 + [-1] * 24, 1, 1),
])
def test_wavefronts(size, lanes, waves, ideal):
    found = count_wavefronts(addresses(*lanes), size)
    assert (found[0].tolist(), found[1].tolist()) == ([waves], [ideal])


def test_sectors_of_wide_and_crooked_accesses():
    found = count_sectors(addresses(*[16 * t for t in range(32)]), 16)
    assert (found[0].tolist(), found[1].tolist()) == ([16], [16])
    found = count_sectors(addresses(24, *[-1] * 31), 16)  # across a boundary
    assert (found[0].tolist(), found[1].tolist()) == ([2], [1])


# Operations -----------------------------------------------------------------------------------------------------------

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
    recorder = count(arithmetic, 1, 2, ones(2, dtype=float16), ones(2), ones(2, dtype=float64), ones(2, dtype=np.int32),
                     float64=True)
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
    assert (line.writes["local"], line.write_bytes["local"], line.reads["global"]) == (128, 512, 128)
    assert line.requests == 4 and line.shared_requests == 0
    atomic = recorder.line("atomic.add")
    assert (atomic.writes["global"], atomic.requests, atomic.sectors) == (32, 1, 1)


def matrix_instruction():
    raise NotImplementedError


@emulator.twin(matrix_instruction)
def _matrix_instruction(machine):
    if machine.thread.lane == 0:
        machine.recorder.tensor(2 * 16 * 8 * 16, machine.site_here())


@cuda.jit
def uses_tensor_cores(x):
    matrix_instruction()
    x[cuda.threadIdx.x] = float32(0)


def test_tensor_flops_and_copies():
    recorder = count(uses_tensor_cores, 1, 64, ones(64))
    assert recorder.line("matrix_instruction()").tensor_flops == 2 * 4096
    assert recorder.total().total_flops == 0


def test_a_swizzled_tensor_core_matmul_by_hand():
    """64 × 64 × 64: every copy, `ldmatrix` and mma of it, and not one bank conflict."""
    n = kernels_mma.TILE
    a, c = np.ones(n * n, float16), np.zeros(n * n, float32)
    recorder = count(kernels_mma.matmul_mma_kernel, 1, 128, a, a, c, n, n, n, cc=(8, 0), checks=False)
    assert np.all(c == n)
    copies, total = recorder.line("cp_async_16_zfill(tile"), recorder.total()
    # two tiles of 64 rows of 8 chunks, a chunk a lane: 32 requests of 512 bytes. The copies ahead of the last tile fill
    # with zeros, and read nothing
    assert copies.read_bytes["global"] == 2 * n * n * 2
    assert copies.sectors == copies.ideal_sectors == 2 * n * n * 2 // 32
    assert copies.conflicts == 0
    loads = [recorder.line(text) for text in ("a_upper = ldmatrix", "a_lower = ldmatrix", "b = ldmatrix")]
    # 4 warps, 4 steps of 16, two of B in each; x4 reads four matrices, each in one wavefront
    assert [(x.shared_requests, x.wavefronts, x.conflicts) for x in loads] == [(16, 64, 0), (16, 64, 0), (32, 128, 0)]
    assert total.tensor_flops == 2 * n**3 and total.total_flops == 0
    assert total.distinct_read_bytes == 2 * n * n and total.distinct_write_bytes == 4 * n * n


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
    assert len({len(line) for line in table.splitlines() if "saxpy" not in line and "memory" not in line}) == 1
    head, titles = table.splitlines()[1:3]
    assert head.index("global memory") <= titles.index("read B") and head.index("operations") <= titles.index("FLOPs")

    brief = recorder.table(brief=True).splitlines()
    (row,) = [line for line in brief if "y[i] = a * x[i] + y[i]" in line]
    assert row.split()[-3:] == ["12", f"{39 / 12:.1f}", "200"]  # requests, transactions per request, FLOPs
    assert not any("if i < x.size" in line or "cuda.grid" in line for line in brief)  # nothing of these to tell
    with pytest.raises(LookupError, match="saxpy"):
        recorder.total("another")


# The project's kernels against their cost functions -------------------------------------------------------------------
# A cost counts the traffic that perfect caches would leave: every byte once in each launch. That is `distinct_bytes`,
# and is met exactly wherever the operation has no small arrays on the side. FLOPs of a cost count each function (exp,
# tanh) as one; what a kernel does beyond the mathematics (trees of sums, a second pass) is written out below.

RNG = np.random.default_rng(0)


class Counted:
    """Runs an operation on an emulated device and keeps its figures."""

    def __init__(self, operation):
        recorder = Recorder()
        self.device = EmulatorDevice(recorder=recorder, checks=False)
        operation(self)
        self.recorder, self.total = recorder, recorder.total()

    def __call__(self, *shape):
        return upload(RNG.standard_normal(shape).astype(np.float32), self.device)

    def full(self, value, *shape):
        return upload(np.full(shape, value, np.float32), self.device)


@pytest.mark.parametrize("version", [1, 2])
def test_elementwise_costs(version):
    n = 256
    t = Counted(lambda u: add_forward(u(n), u(n), version=version)).total
    assert (t.distinct_bytes, t.total_flops) == add_forward_cost(n)
    assert t.global_bytes == t.distinct_bytes and t.efficiency == 1

    t = Counted(lambda u: silu_forward(u(n), version=version)).total
    negations = n  # of the exponent, which the cost counts
    assert (t.distinct_bytes, t.total_flops + t.special + negations) == silu_forward_cost(n)

    t = Counted(lambda u: silu_backward(u(n), u(n), version=version)).total
    assert (t.distinct_bytes, t.total_flops + t.special) == silu_backward_cost(n)

    t = Counted(lambda u: gelu_forward(u(n), version=version)).total
    assert (t.distinct_bytes, t.total_flops + t.special) == gelu_forward_cost(n)

    t = Counted(lambda u: gelu_backward(u(n), u(n), version=version)).total
    moved, flops = gelu_backward_cost(n)
    assert t.distinct_bytes == moved
    folded = n  # float32(3) · GELU_CUBIC, which the compiler computes beforehand
    assert flops <= t.total_flops + t.special - folded <= 1.06 * flops  # the cost leaves out the tanh


@pytest.mark.parametrize("version", [1, 2])
def test_matmul_cost(version):
    M, N, K = 16, 32, 32
    counted = Counted(lambda u: matmul_forward(u(M, K), u(K, N), version=version))
    t = counted.total
    moved, flops = matmul_forward_cost(1, M, N, K)
    assert t.distinct_bytes == moved
    assert t.total_flops == flops + M * N  # alpha times each sum
    asked = {1: 2 * M * N * K, 2: 2 * M * N * K // 16}[version]  # a tile of 16 × 16 is fetched once for 16 products
    assert t.reads["global"] == asked
    if version == 2:
        inner = counted.recorder.line("total += tile_a[y, k] * tile_b[k, x]")
        assert inner.flops["float32"] == flops and inner.conflicts == 0
        assert inner.reads["shared"] == flops


@exhaustive
def test_costs_of_depthwise_products():
    """16 × 16 pixels of 16 channels: bands of 16 × 8 where a run of 8 outputs has 3 taps; the forward pass writes its
    planes without bank conflicts, the weight gradient takes 15 turns where 11 would do."""
    def half(u, *shape):
        return upload(RNG.standard_normal(shape).astype(float16), u.device)

    shape, taps = (1, 16, 16, 16), (3, 3, 16)
    forward = Counted(lambda u: depthwise.depthwise_forward(half(u, *shape), half(u, *taps), version=3))
    gradient = Counted(lambda u: depthwise.depthwise_weight_gradient(half(u, *shape), half(u, *shape), u(*taps),
                                                                     version=3))
    moved, flops = depthwise.depthwise_forward_cost(*shape, 3, 2)
    assert forward.total.distinct_bytes == moved + 2 * 9 * 16
    assert forward.total.tensor_flops == gradient.total.tensor_flops == flops * 16 // 3
    assert gradient.total.distinct_bytes == moved + 4 * 4 * 9 * 16
    fused = Counted(lambda u: depthwise.depthwise_layernorm_forward(
        half(u, 1, 1, 4, 8), half(u, 7, 7, 8), u(8), u(1, 8), u(8), u(8), version=2)).total
    moved, _ = depthwise.depthwise_layernorm_forward_cost(1, 1, 4, 8, 7)
    assert fused.distinct_bytes == moved + 2 * 4 * 8 + 2 * 49 * 8 + 4 * 4 * 8 + 2 * 4 * 4  # h is read again, too
    for counted, requests, conflicts in ((forward, 56, 0), (gradient, 88, 32)):
        for text in ("low_halves", "high_halves"):
            written = counted.recorder.line(text)
            assert (written.shared_requests, written.conflicts) == (requests, conflicts)


@exhaustive
def test_costs_of_depthwise_products_by_tma():
    """A tile of 16 × 32 pixels, half of them outside: 16 × 8 of a band for 16 × 8 outputs of a row of taps; a lane's
    four channels are half of 16 bytes, so every access to shared memory takes twice its share of the banks."""
    def half(u, *shape):
        return upload(RNG.standard_normal(shape).astype(float16), u.device)

    shape, taps = (1, 16, 16, 16), (3, 3, 16)
    moved, flops = depthwise.depthwise_forward_cost(*shape, 3, 2)
    forward = Counted(lambda u: depthwise.depthwise_forward(half(u, *shape), half(u, *taps), version=4)).total
    assert forward.distinct_bytes == moved + 2 * 9 * 16
    reads, writes = 4 * 6 * (4 + 2), 4 * 4 * 4  # of four warps: 6 of each of 6 rows of a strip, 4 of each of 4
    assert forward.shared_requests == reads + writes and forward.conflicts == 2 * (reads + writes)
    gradient = Counted(lambda u: depthwise.depthwise_weight_gradient(half(u, *shape), half(u, *shape), u(*taps),
                                                                     version=4)).total
    assert forward.tensor_flops == gradient.tensor_flops == 2 * flops * 16 // 3
    assert gradient.distinct_bytes == moved + 4 * 4 * 9 * 16


@exhaustive
def test_costs_of_a_matmul_of_two_arrays():
    rows, N, K = 128, 128, 128

    def half(u, *shape):
        return upload(RNG.standard_normal(shape).astype(float16), u.device)

    def pair(u):
        return Pair(half(u, rows, 64), half(u, rows, K - 64))

    forward = Counted(lambda u: matmul_pair_forward(pair(u), half(u, N // 2, K))).total
    gradient = Counted(lambda u: matmul_pair_gradient(half(u, rows, N), pair(u), u(N, K))).total
    assert forward.tensor_flops == matmul_pair_forward_cost(rows, N // 2, K)[1]
    assert gradient.tensor_flops == matmul_pair_gradient_cost(rows, N, K)[1]


@exhaustive
def test_costs_of_a_stack_of_layers():
    B, N, K, G = 128, 128, 64, 2

    def layers(u, dtype):
        flat = upload(RNG.standard_normal(G * N * K).astype(dtype), u.device)
        vectors = u(G * N)
        return ([flat[at:at + N * K].reshape(N, K) for at in range(0, G * N * K, N * K)],
                [vectors[at:at + N] for at in range(0, G * N, N)])

    def forward(u):
        x = upload(RNG.standard_normal((B, K)).astype(float16), u.device)
        linear_stack_forward(x, [*zip(*layers(u, float16), strict=True)])

    def backward(u):
        x, dy = (upload(RNG.standard_normal(shape).astype(float16), u.device) for shape in ((B, K), (B, G * N)))
        linear_stack_backward(dy, x, layers(u, float16)[0], [*zip(*layers(u, float32), strict=True)], False)

    assert Counted(forward).total.tensor_flops == linear_stack_forward_cost(B, K, G * N)[1]
    assert Counted(backward).total.tensor_flops == linear_stack_backward_cost(B, K, G * N)[1]


@exhaustive
def test_costs_of_gradients_that_come_together():
    R, sizes = 128, ((128, 256), (256, 256))

    def call(u):
        linear_gradients_backward([(*(upload(RNG.standard_normal((R, n)).astype(float16), u.device) for n in size),
                                    u(*size), u(size[0])) for size in sizes], False)

    counted = Counted(call).total
    assert counted.tensor_flops == linear_gradients_backward_cost(R, sizes, False)[1]


@exhaustive
def test_costs_of_e4m3():
    def halves(u, *shape):
        return upload(RNG.standard_normal(shape).astype(float16), u.device)

    def product(u):
        a, b = (upload(bits_of(RNG.standard_normal((rows, 128)).astype(float32)), u.device) for rows in (128, 64))
        matmul_fp8_forward(a, b, u(1), u(1))

    def weights(u):
        flat = halves(u, 64 * 64)
        quantise.quantise_weights(flat, quantise.matrices8([(0, 64, 64)], flat), number(u, 0, np.uint8, 64 * 64),
                                  number(u, 0, np.uint8, 64 * 64), u(1))

    assert Counted(product).total.tensor_flops == matmul_fp8_forward_cost(128, 64, 128)[1]
    n = 8 * 512
    t = Counted(lambda u: quantise.quantise_forward(halves(u, 8, 512), u(1), number(u, 0, np.uint32,
                                                                                    quantise.PARTIALS))).total
    assert t.distinct_bytes == quantise.quantise_forward_cost(n)[0] + 4 + 2 * 4
    assert t.total_flops == 3 * n + 256  # each is also told from an infinity; a thread's quotient
    matrix = 64, 64
    for operation, cost, given in ((quantise.quantise_both, quantise.quantise_both_cost, halves),
                                   (quantise.columns_of, quantise.columns_of_cost, None)):
        t = Counted(lambda u, operation=operation, given=given: operation(
            number(u, 0, np.uint8, n).reshape(*matrix) if given is None else given(u, *matrix), u(1))).total
        moved, flops = cost(n)
        assert t.distinct_bytes == moved + 4 and t.total_flops == (3 * n + 256 if flops else 256)
    # the table, read by all three launches; a tile's largest, written and read, and so the scale
    moved = Counted(weights).total.distinct_bytes
    assert moved == quantise.quantise_weights_cost(n)[0] + 2 * (3 * 8 + 8) + 8 + 8 + 2 * 4 + 2 * 4
    history = quantise.HISTORY
    t = Counted(lambda u: quantise.scale_update(number(u, 0, np.uint32, quantise.PARTIALS).reshape(1, -1),
                                                u(1, history), u(1))).total
    assert t.distinct_bytes - quantise.scale_update_cost(quantise.PARTIALS)[0] == 2 * 4 * history + 4
    t = Counted(lambda u: quantise.share_largest(number(u, 0, np.uint32, quantise.PARTIALS).reshape(1, -1),
                                                 number(u, 0, np.uint32, 4).reshape(1, -1), 1)).total
    assert t.distinct_bytes - quantise.share_largest_cost(quantise.PARTIALS)[0] == 4 * 4


@exhaustive
def test_costs_of_e4m3_with_activations():
    def activations(u):
        a, b = (upload(bits_of(RNG.standard_normal((128, 128)).astype(float32)), u.device) for _ in range(2))
        hopper_fp8.matmul_fp8_gelu_forward(a, b[:64], u(1), u(1), u(64))
        hopper_fp8.matmul_fp8_swiglu_forward(a, b, u(1), u(1))
        hopper_fp8.matmul_fp8_gradient(a, b[:64], u(1), u(1), u(128, 64))

    assert Counted(activations).total.tensor_flops == (hopper_fp8.matmul_fp8_gelu_forward_cost(128, 64, 128)[1]
                                                       + hopper_fp8.matmul_fp8_swiglu_forward_cost(128, 128, 128)[1]
                                                       + hopper_fp8.matmul_fp8_gradient_cost(128, 64, 128)[1])


def test_softmax_costs():
    rows, N, threads = 2, 128, 128
    tree = rows * (threads - 1)  # additions of v1's tree
    moved, flops = softmax_forward_cost(rows, N)
    t = Counted(lambda u: softmax_forward(u(rows, N), version=1)).total
    assert t.distinct_bytes == moved
    again = rows * N * (2 + 1 + 1)  # two more passes: scale twice more, and subtract and exponentiate once more
    assert t.total_flops + t.special == flops + again + tree
    assert t.read_bytes["global"] == 3 * 4 * rows * N  # the docstring's "x three times"

    t = Counted(lambda u: softmax_forward(u(rows, N), version=2)).total
    assert t.distinct_bytes == moved
    assert t.read_bytes["global"] == 2 * 4 * rows * N  # "reads x twice instead of three times"

    moved, flops = softmax_backward_cost(rows, N)
    t = Counted(lambda u: softmax_backward(u(rows, N), u(rows, N), version=1)).total
    assert (t.distinct_bytes, t.total_flops) == (moved, flops + tree)
    t = Counted(lambda u: softmax_backward(u(rows, N), u(rows, N), version=3)).total
    shuffles = rows * 32 * 5  # additions of five steps between all lanes
    assert t.distinct_bytes == moved and t.total_flops == flops + shuffles


@pytest.mark.parametrize("adds", [False, True])
def test_second_pass_costs(adds):
    count, n = 4, 1024
    t = Counted(lambda u: add_parts([Sum(u(count * n), count, u(n), adds)])).total
    assert t.distinct_bytes == add_parts_cost(count, n, adds)[0] == 4 * n * (5 + adds)
    assert t.total_flops >= add_parts_cost(count, n, adds)[1] == n * (3 + adds)  # threads add zeros of parts, too


def test_reduce_costs():
    M, N = 40, 32
    moved, flops = column_sum_cost(M, N)
    t = Counted(lambda u: column_sum(u(M, N), version=1)).total
    assert (t.distinct_bytes, t.total_flops) == (moved, flops)
    for version in (2, 3):
        t = Counted(lambda u, version=version: column_sum(u(M, N), version=version)).total
        assert t.distinct_bytes == moved
        # each thread's partial sums enter a tree once; version 3 adds zeros for up to three rows that are not there
        assert flops <= t.total_flops <= flops + {2: 4, 3: 4 + 3 * 4}[version] * 256
    assert t.conflicts == 0


@pytest.mark.parametrize("silu", [*exhaustively(False), True])
def test_groupnorm_costs(silu):
    """Version 3, whose cost the functions give. Beside x and y it moves weights and statistics: at these 32 pixels up
    to a tenth of it, at the model's 4096 nothing to speak of. Version 2 reads what it reads twice. Of its one pixel
    a thread also finds the mean, and joins it with those of others: 10 operations a channel."""
    B, P, C, groups = 1, 32, 32, 8
    n = B * P * C
    moved, flops = groupnorm_forward_cost(B, P, C, silu)
    t = Counted(lambda u: groupnorm_forward(u(B, P, C), u(C), u(C), groups, silu=silu, version=3)).total
    assert moved <= t.distinct_bytes <= 1.1 * moved
    added = t.total_flops + t.special + (n if silu else 0)
    assert flops <= added <= 2 * flops + 10 * n  # at so few pixels trees are much
    twice = Counted(lambda u: groupnorm_forward(u(B, P, C), u(C), u(C), groups, silu=silu, version=2)).total
    assert moved + 4 * n <= twice.distinct_bytes <= 1.2 * (moved + 4 * n)

    moved, flops = groupnorm_backward_cost(B, P, C, silu)
    t = Counted(lambda u: groupnorm_backward(u(B, P, C), u(B, P, C), u(C), u(C), u(B, groups), u.full(1, B, groups),
                                             u(C), u(C), groups, silu=silu, version=3)).total
    assert moved <= t.distinct_bytes <= 1.15 * moved
    assert flops <= t.total_flops + t.special + (2 * n if silu else 0) <= 2.5 * flops


def test_groupnorm_version_1_wastes_sectors():
    """Its docstring: a group of 4 channels is 16 bytes of each pixel, and the memory delivers whole sectors."""
    t = Counted(lambda u: groupnorm_forward(u(1, 32, 32), u(32), u(32), 8, version=1)).recorder
    line = t.line("C + group * width + e % width]")
    assert line.efficiency == 0.5


@pytest.mark.parametrize("version", [1, 2])
def test_adamw_cost(version):
    n = 256

    def update(u):
        adamw_update(u(n), u(n), u(n), u.full(1, n), u.full(1, 1), u.full(1e-3, 1), u.full(1, 1), 0.9, 0.99, 1e-8, 0.01,
                     1.0, version=version)

    t = Counted(update).total
    moved, flops = adamw_update_cost(n)
    assert 3 * 4 <= t.distinct_bytes - moved <= 4 * 4  # step, learning rate and gradient norm, 1 / the loss's scale
    threads = n // {1: 1, 2: 4}[version]
    own = n * (13 + 1)  # thirteen FLOPs and a root
    shared = t.total_flops + t.special - own  # each thread works out the step's scalars for itself
    assert threads * (10 + 3) <= shared <= threads * (11 + 3)
    assert abs(own - flops) <= 0.1 * flops  # the cost counts 15


# One line for each case: the operation, what is given to it, its cost, and what is read, written and computed beside
# it. `u` makes an array of random float32; side: bytes; more: FLOPs that the kernel does and the cost leaves out.

def case(operation, cost, side=0, more=0, versions=(1, 2)):
    return [pytest.param(operation, v, cost, side, more, id=f"{cost[0].__name__.removesuffix('_cost')}-v{v}")
            for v in versions]


def number(u, value, dtype, count=1):
    return upload(np.full(count, value, dtype), u.device)


def steps(u, count):
    return upload(np.arange(count, dtype=np.int32), u.device)


def predicted(u):
    """What the hybrid loss is given."""
    tables = [u.full(value, 9) for value in (0.5, -3, 1)]
    return u(B, P, 2 * C), u(B, P, C), u(B, P, C), steps(u, B), *tables, 0.001


def samples(u):
    return number(u, 3, np.uint32), upload(np.arange(2, dtype=np.uint32), u.device)


# the common part of others; a few bytes; warps that read their inputs anew for each sample, from the cache
NOT_YET = {  # to be counted, too
    "muon_apply_cost", "muon_momentum_cost", "newton_schulz_cost", "qk_norm_rope_backward_cost"}
NOT_COUNTED = {"elementwise_cost", "levels_forward_cost", "loss_scale_update_cost", "latch_skips_cost",
               "count_update_cost", "linear_group_forward_cost", "linear_group_backward_cost",
               "matmul_first_forward_cost", "matmul_level_forward_cost", "conv2d_level_forward_cost",
               *NOT_YET}
B, P, C = 2, 8, 32  # samples, pixels of each, channels
N = B * P * C
TABLES = 4 * B + 2 * 4 * B  # bytes of B timesteps and what they name in two tables

EXACT = [
    *case(lambda u, v: bias.bias_add_forward(u(B * P, C), u(C), version=v), (bias.bias_add_forward_cost, B * P, C)),
    *case(lambda u, v: bias.channel_add_forward(u(B, P, C), u(B, C), version=v),
          (bias.channel_add_forward_cost, B, P, C)),
    *case(lambda u, v: reduce.sample_sum(u(B, P, C), version=v), (reduce.sample_sum_cost, B, P, C), versions=[1]),
    *case(lambda u, v: bias.channel_add_backward(u(B, P, C)), (bias.channel_add_backward_cost, B, P, C), more=None,
          versions=[None]),
    *case(lambda u, v: scale_shift.scale_shift_forward(u(B, P, C), u(B, C), u(B, C), version=v),
          (scale_shift.scale_shift_forward_cost, B, P, C)),
    *case(lambda u, v: scale_shift.scale_shift_backward(u(B, P, C), u(B, P, C), u(B, C), version=v),
          (scale_shift.scale_shift_backward_cost, B, P, C), versions=[1]),
    # v2: trees of two sums
    *case(lambda u, v: scale_shift.scale_shift_backward(u(B, P, C), u(B, P, C), u(B, C), version=v),
          (scale_shift.scale_shift_backward_cost, B, P, C), more=None, versions=[2]),
    # each thread multiplies two scalars
    *case(lambda u, v: mse.mse_backward(u(B, P, C), u(B, P, C), 0.5, version=v), (mse.mse_backward_cost, N), 4, N,
          versions=[1]),
    *case(lambda u, v: mse.mse_backward(u(B, P, C), u(B, P, C), 0.5, version=v), (mse.mse_backward_cost, N), 4, N // 4,
          versions=[2]),
    *case(lambda u, v: q_sample.q_sample_forward(u(B, P, C), u(B, P, C), steps(u, B), u(9), u(9), version=v),
          (q_sample.q_sample_forward_cost, N), TABLES),
    *case(lambda u, v: q_sample.velocity_forward(u(B, P, C), u(B, P, C), steps(u, B), u(9), u(9), version=v),
          (q_sample.velocity_forward_cost, N), TABLES),
    *case(lambda u, v: q_sample.weigh_forward(u(B, P, C), steps(u, B), u(9), version=v),
          (q_sample.weigh_forward_cost, N), 4 * B + 4 * B),
    *case(lambda u, v: sampler.weighted_sum(u(3), u(B, P, C), u(B, P, C), u(B, P, C), version=v),
          (sampler.combine_cost, N), 3 * 4),
    *case(lambda u, v: sampler.estimate_x_0(u(B, P, C), u(B, P, C), u(2), clip=False, version=v),
          (sampler.estimate_x_0_cost, N), 2 * 4),
    # the timesteps are written, too
    *case(lambda u, v: sampler.model_input(u(B, P, C), u(2), 2, version=v), (sampler.model_input_cost, N, 2),
          2 * 4 + 2 * 4 * B),
    *case(lambda u, v: sampler.guide(u(B, P, C), u(B, P, C), 2.0, C), (sampler.guide_cost, N), versions=[None]),
    # an exponential, which is no FLOP here, and is two of the cost's ten: it is a power of two of a product
    *case(lambda u, v: sampler.learned_step(u(B, P, C), u(B, P, C), u(B, P, 2 * C), u(B, P, C), u(4)),
          (sampler.learned_step_cost, N), 4 * 4, more=N, versions=[None]),
    # where nothing is masked, what is known is not read
    *case(lambda u, v: sampler.blend(u.full(0, B, P, C), u(B, P, C), u(B, P, C)), (sampler.blend_cost, N), -4 * N,
          versions=[None]),
    *case(lambda u, v: resample.avgpool_forward(u(B, 4, 4, C), version=v), (resample.avgpool_forward_cost, B, 4, 4, C)),
    *case(lambda u, v: resample.avgpool_backward(u(B, 2, 2, C), version=v),
          (resample.avgpool_backward_cost, B, 2, 2, C)),
    # the kernel that spreads a gradient serves upsampling, too, with a factor of 1
    *case(lambda u, v: resample.upsample_forward(u(B, 2, 2, C), version=v),
          (resample.upsample_forward_cost, B, 2, 2, C), more=B * 16 * C),
    *case(lambda u, v: resample.upsample_backward(u(B, 4, 4, C), version=v),
          (resample.upsample_backward_cost, B, 4, 4, C)),
    *case(lambda u, v: concat.concat_forward(u(P, C), u(P, 4), version=v), (concat.concat_forward_cost, P, C, 4)),
    *case(lambda u, v: concat.concat_backward(u(P, C), 8, version=v), (concat.concat_backward_cost, P, 8, C - 8)),
    *case(lambda u, v: images.images_forward(upload(np.ones((B, 3, 4, 3), np.uint8), u.device),
                                             number(u, 1, np.int32, B), version=v),
          (images.images_forward_cost, (B, 3, 4, 3)), 4 * B),
    *case(lambda u, v: im2col.im2col_forward(u(1, 4, 5, 4), 3, 1, version=v),
          (im2col.im2col_forward_cost, 1, 4, 5, 4, 3)),
    # 50 of the 180 places of the patches are padding: their gradients are not read
    *case(lambda u, v: im2win.im2win_forward(u(1, 4, 5, 4), 3, 1, version=v),
          (im2win.im2win_forward_cost, 1, 4, 5, 4, 3)),
    *case(lambda u, v: im2col.im2col_backward(u(1, 4, 5, 3, 3, 4), (1, 4, 5, 4), 3, 1, version=v),
          (im2col.im2col_backward_cost, 1, 4, 5, 4, 3), -4 * 50 * 4, -50 * 4),
    # weights; what is added to each sum, here zero
    *case(lambda u, v: depthwise.depthwise_forward(u(1, 8, 8, 16), u(3, 3, 16), version=v),
          (depthwise.depthwise_forward_cost, 1, 8, 8, 16, 3), 4 * 9 * 16, 8 * 8 * 16, versions=[2]),
    *case(lambda u, v: depthwise.depthwise_input_gradient(u(1, 8, 8, 16), u(3, 3, 16), version=v),
          (depthwise.depthwise_input_gradient_cost, 1, 8, 8, 16, 3), 4 * 9 * 16, 8 * 8 * 16, versions=[2]),
    # a chunk's sums and the gradient, each written and read; sums over lanes
    *case(lambda u, v: depthwise.depthwise_weight_gradient(u(1, 8, 8, 16), u(1, 8, 8, 16), u(3, 3, 16), version=v),
          (depthwise.depthwise_weight_gradient_cost, 1, 8, 8, 16, 3), 4 * 4 * 9 * 16, None, versions=[2]),
    *case(lambda u, v: embedding.embedding_forward(steps(u, 4), u(5, C), version=v),
          (embedding.embedding_forward_cost, 4, C), 4 * 4),
    # each row is summed from zero, then added to
    *case(lambda u, v: embedding.embedding_backward(u(4, C), steps(u, 4), u(4, C), version=v),
          (embedding.embedding_backward_cost, 4, C), 4 * 4, 4 * C),
    *case(lambda u, v: random.random_uniform((B, P, C), 7, 1, *samples(u), version=v), (random.random_uniform_cost, N),
          4 + 4 * B),
    *case(lambda u, v: random.random_normal((B, P, C), 7, 1, *samples(u), version=v), (random.random_normal_cost, N),
          4 + 4 * B, versions=[2]),
    # v1 makes a pair for every number
    *case(lambda u, v: random.random_normal((B, P, C), 7, 1, *samples(u), version=v), (random.random_normal_cost, N),
          4 + 4 * B, 25 * N // 2, versions=[1]),
    # each thread works out the rate of the warm-up: an addition and a division
    *case(lambda u, v: ema.ema_update(u(N), u(N), number(u, 3, np.uint32), u(1), 0.99, version=v),
          (ema.ema_update_cost, N), 8, 2 * N, versions=[1]),
    *case(lambda u, v: ema.ema_update(u(N), u(N), number(u, 3, np.uint32), u(1), 0.99, version=v),
          (ema.ema_update_cost, N), 8, 2 * N // 4, versions=[2]),
    # each thread works out the rate of both averages: a product and a change of sign, beside division, log1p, expm1
    *case(lambda u, v: power_ema.power_ema_update(u(2, N), u(N), number(u, 3, np.uint32), u(1), u(2), version=v),
          (power_ema.power_ema_update_cost, 2 * N, 2), 16, 2 * 2 * N, versions=[1]),
    *case(lambda u, v: power_ema.power_ema_update(u(2, N), u(N), number(u, 3, np.uint32), u(1), u(2), version=v),
          (power_ema.power_ema_update_cost, 2 * N, 2), 16, 2 * 2 * N // 4, versions=[2]),
    *case(lambda u, v: step_state.step_advance(number(u, 3, np.uint32)), (step_state.step_advance_cost,),
          versions=[None]),
    *case(lambda u, v: step_state.next_row(number(u, 3, np.uint32, 16 * 4).reshape(4, 16), number(u, 3, np.uint32),
                                           number(u, 0, np.uint32, 16)), (step_state.next_row_cost, 16),
          versions=[None]),
    *case(lambda u, v: ahead.timesteps_ahead(number(u, 3, np.uint32, 16 * 4).reshape(4, 16), number(u, 1, np.uint32),
                                             number(u, 0, np.uint32), u(6), 2), (ahead.timesteps_ahead_cost, 6, 3),
          versions=[None]),
    *case(lambda u, v: ahead.place(u(4, 24), u(4, 8), 8, version=v), (ahead.place_cost, 4, 8)),
    *case(lambda u, v: ahead.take(u(4, 24), number(u, 3, np.uint32), number(u, 1, np.uint32), u(24), version=v),
          (ahead.take_cost, 24)),
    *case(lambda u, v: images.pixels_forward(u(B, 3, 4, 3)), (images.pixels_forward_cost, B * 36), more=None,
          versions=[None]),
    # what is finite is not written down: the step is not read
    *case(lambda u, v: step_state.latch_nonfinite(number(u, -1, np.int32), u(1), u(1), number(u, 3, np.uint32)),
          (step_state.latch_nonfinite_cost,), -4, versions=[None]),
    *case(lambda u, v: zero_ranges.zero_ranges(u(N), upload(zero_ranges.pieces([(0, N - 3)]), u.device)),
          (zero_ranges.zero_ranges_cost, N - 3), 16, versions=[None]),  # the range itself
    *case(lambda u, v: telemetry.telemetry_record(u(4, 5), number(u, 3, np.uint32), u(1), u(1), u(1), u(1),
                                                                number(u, 3, np.int32, 3), 0.5),
          (telemetry.telemetry_record_cost,), versions=[None]),
    # a polynomial for the sine: the cost has 5 for a rate on the cosine
    *case(lambda u, v: step_state.learning_rate_forward(number(u, 3, np.uint32), u(1), 1e-3, 2, 10, True),
          (step_state.learning_rate_forward_cost,), more=None, versions=[None]),
    *case(lambda u, v: embedding.timestep_embedding_forward(steps(u, 4), 8),
          (embedding.timestep_embedding_forward_cost, 4, 8), more=None, versions=[None]),
    # rows by warps: each lane joins in the five steps of two butterflies, and finishes the statistics for itself
    *case(lambda u, v: layernorm.layernorm_forward(u(8, C), u(C), u(C), version=v),
          (layernorm.layernorm_forward_cost, 8, C), 4 * (2 * C + 2 * 8), 8 * 32 * (2 * 5 + 4), versions=[2]),
    # statistics and weights, both gradients read and written; the rest of the FLOPs are trees
    *case(lambda u, v: layernorm.layernorm_backward(u(8, C), u(8, C), u(C), u(8), u(8), u(C), u(C), version=v),
          (layernorm.layernorm_backward_cost, 8, C), 4 * (2 * 2 * 8 + C + 4 * C), None, versions=[1]),
    *case(lambda u, v: rmsnorm.rmsnorm_forward(u(8, C), u(C), version=v), (rmsnorm.rmsnorm_forward_cost, 8, C),
          4 * (C + 8), None, versions=[2, 3]),
    # statistics and weight, a block's sums written and read, and the gradient, too
    *case(lambda u, v: rmsnorm.rmsnorm_backward(u(8, C), u(8, C), u(C), u(8), u(C), version=v),
          (rmsnorm.rmsnorm_backward_cost, 8, C), 4 * (8 + C + 4 * C), None, versions=[3]),
    *case(lambda u, v: grad_norm.global_norm(u(1000), version=v), (grad_norm.global_norm_cost, 1000), 3 * 4, None),
    *case(lambda u, v: grad_norm.squares_of_pieces(u(1000), upload(np.array([(0, 400), (400, 1000)]), u.device), u(2)),
          (grad_norm.squares_of_pieces_cost, 1000, 2), 0, None, versions=[None]),
    *case(lambda u, v: grad_norm.root_of_sum(u(300)), (grad_norm.root_of_sum_cost, 300), 0, None, versions=[None]),
    *case(lambda u, v: mse.mse_forward(u(B, P, C), u(B, P, C), version=v), (mse.mse_forward_cost, N), 3 * 4, None),
    *case(lambda u, v: reduce.total_sum(u(123), version=v), (reduce.total_sum_cost, 123), 2 * 4, None, versions=[1, 2]),
    *case(lambda u, v: reduce.column_sum(u(B * P, C), version=v), (bias.bias_add_backward_cost, B * P, C), 0, 0,
          versions=[1]),
    # a DiT's: trees of sums, and tanh as a quotient, come on top
    *case(lambda u, v: adaln.adaln_forward(u(B, 2, C), u(B, C), u(B, C), version=v),
          (adaln.adaln_forward_cost, B, 2, C), more=None),
    *case(lambda u, v: adaln.adaln_backward(u(B, 2, C), u(B, 2, C), u(B, C), u(B * 2), u(B * 2), version=v),
          (adaln.adaln_backward_cost, B, 2, C), more=None),
    *case(lambda u, v: gate.gate_forward(u(B, P, C), u(B, P, C), u(B, C), version=v),
          (gate.gate_forward_cost, B, P, C)),
    *case(lambda u, v: gate.gate_backward(u(B, P, C), u(B, P, C), u(B, C), version=v),
          (gate.gate_backward_cost, B, P, C), versions=[1]),
    *case(lambda u, v: gate.gate_backward(u(B, P, C), u(B, P, C), u(B, C), version=v),
          (gate.gate_backward_cost, B, P, C), more=None, versions=[2]),
    *case(lambda u, v: gate_adaln.gate_adaln_forward(u(B, P, C), u(B, P, C), u(B, C), u(B, C), u(B, C), version=v),
          (gate_adaln.gate_adaln_forward_cost, B, P, C), more=None, versions=[2]),
    *case(lambda u, v: gate_adaln.gate_adaln_backward(*(u(B, P, C) for _ in range(4)), *(u(B, C) for _ in range(3)),
                                                      u(B * P), u(B * P), version=v),
          (gate_adaln.gate_adaln_backward_cost, B, P, C), more=None, versions=[2]),
    # of x instead of z: as many bytes
    *case(lambda u, v: gate_adaln.gate_adaln_backward(*(u(B, P, C) for _ in range(2)), None, u(B, P, C), *(
        u(B, C) for _ in range(3)), u(B * P), u(B * P), version=v, x=u(B, P, C)),
          (gate_adaln.gate_adaln_backward_cost, B, P, C), more=None, versions=[2]),
    *case(lambda u, v: bias_gelu.bias_gelu_forward(u(P, C), u(C), version=v),
          (bias_gelu.bias_gelu_forward_cost, P, C), more=-P * C),
    # it writes sums, and reads them in a second pass
    *case(lambda u, v: bias_gelu.bias_gelu_backward(u(P, C), u(P, C), u(C), u(C), version=v),
          (bias_gelu.bias_gelu_backward_cost, P, C), 2 * 4 * C, None),
    *case(lambda u, v: swiglu.swiglu_forward(u(P, 2 * C), version=v), (swiglu.swiglu_forward_cost, P, 2 * C),
          more=None),
    *case(lambda u, v: swiglu.swiglu_backward(u(P, C), u(P, 2 * C), version=v), (swiglu.swiglu_backward_cost, P, 2 * C),
          more=None),
    # q and k of one head of 8, in place
    *case(lambda u, v: qk_norm_rope.qk_norm_rope_forward(u(B, P, 24), 1, u(8), u(8), u(2, P, 8), in_place=True,
                                                         version=v),
          (qk_norm_rope.qk_norm_rope_forward_cost, B, P, 8, 1), more=None),
    *case(lambda u, v: chunk.chunk_forward(u(B, 6 * C), 6), (chunk.chunk_forward_cost, B * 6 * C), versions=[None]),
    *case(lambda u, v: patchify.patchify_forward(u(B, 4, 4, C), 2, version=v),
          (patchify.patchify_forward_cost, B * 16 * C)),
    *case(lambda u, v: class_dropout.class_dropout_forward(steps(u, B), 0.3, 5, 7, *samples(u)),
          (class_dropout.class_dropout_forward_cost, B), 4, versions=[None]),
    # timesteps and three tables; the blocks' sums are written and read
    *case(lambda u, v: vlb.hybrid_loss_forward(*predicted(u), version=v), (vlb.hybrid_loss_forward_cost, N),
          4 * B + 3 * 4 * B + 3 * 4, None),
    *case(lambda u, v: vlb.hybrid_loss_backward(*predicted(u), version=v), (vlb.hybrid_loss_backward_cost, N),
          4 * B + 3 * 4 * B + 4, None),
    *case(lambda u, v: flash_attention.flash_attention_forward(u(1, 64, 3 * 32), 1, version=v),
          (flash_attention.flash_attention_forward_cost, 1, 64, 32, 1), more=None),
    # the rows' sums are written and read, and dq is added to where it lies
    *case(lambda u, v: flash_attention.flash_attention_backward(u(1, 64, 32), u(1, 64, 3 * 32), u(1, 64, 32),
                                                                u(1, 1, 64), 1, version=v),
          (flash_attention.flash_attention_backward_cost, 1, 64, 32, 1), 4 * 64 * (2 + 32), None, versions=[2]),
    *case(lambda u, v: step_state.latch_skips(number(u, -1, np.int32), number(u, 0, np.int32, 3), u(1),
                                              number(u, 3, np.uint32), 5),
          (step_state.latch_skips_cost,), -8, versions=[None]),
    *case(lambda u, v: step_state.count_update(number(u, 3, np.uint32), u(1)), (step_state.count_update_cost,),
          versions=[None]),
]


@exhaustive
@pytest.mark.parametrize("operation, version, cost, side, more", EXACT)
def test_costs(operation, version, cost, side, more):
    t = Counted(lambda u: operation(u, version)).total
    moved, flops = cost[0](*cost[1:])
    assert t.distinct_bytes == moved + side
    done = t.total_flops + (t.special if cost[0] in (random.random_normal_cost, vlb.hybrid_loss_backward_cost) else 0)
    if more is None:  # the kernel's own trees and polynomials come on top
        assert done >= flops
    else:
        assert done == flops + more


@pytest.mark.parametrize("version", [1, 2])
def test_dropout_costs(version):
    moved, flops = dropout.dropout_forward_cost(N)
    assert (moved, flops) == dropout.dropout_backward_cost(N)
    t = Counted(lambda u: dropout.dropout_forward(u.full(1, B, P, C), 0.3, 7, 1, *samples(u), version=version)).total
    assert t.total_flops == flops == N
    assert t.distinct_bytes == moved + 4 + 4 * B


@pytest.mark.parametrize("version", [1, 2])
def test_peer_costs(version):
    """Four ranks of one device, one after the other: beside what it reads from its peers, each reads its own slice."""
    n, ranks = 64, 4

    def reduce_all(u):
        buffers = [u(n) for _ in range(ranks)]
        for step in peer_reduce.peer_reduce_scatter, peer_reduce.peer_all_gather:
            for rank in range(ranks):
                step(buffers, rank, version=version)

    t = Counted(reduce_all).total
    read, flops = peer_reduce.peer_all_reduce_cost(n, ranks)
    assert t.read_bytes["global"] == ranks * read + 4 * n
    assert t.total_flops == ranks * flops


@pytest.mark.parametrize("half", [False, True])
def test_copied_pieces_cost(half):
    n = 64
    t = Counted(lambda u: peer_pieces.peer_copy_pieces(
        [u(n), u(n)], u(n), upload(peer_pieces.pieces_of([(1, 0, 0, n)]), u.device),
        u(n) if half else None)).total
    moved, flops = peer_pieces.peer_copy_pieces_cost(n, half)
    assert t.distinct_bytes == moved + 2 * n * half + 32 and flops == t.total_flops == 0  # half of float32; a row


@pytest.mark.parametrize("ranks", [2, 3])
def test_summed_pieces_cost(ranks):
    n = 8 * peer_pieces.BLOCK  # so that no thread adds up zeros
    t = Counted(lambda u: peer_pieces.peer_reduce_pieces(
        [u(n) for _ in range(ranks)], u(n), upload(peer_pieces.pieces_of([(0, 0, 0, n)]), u.device))).total
    moved, flops = peer_pieces.peer_reduce_pieces_cost(n, ranks)
    assert t.distinct_bytes == moved + 24 and t.total_flops == flops  # three numbers of the piece


def test_linear_costs():
    """A 64 × 64 tile is computed whole: at these sizes all of it is wanted."""
    rows, n, k = 64, 64, 16
    t = Counted(lambda u: linear.linear_forward(u(rows, k), u(n, k), u(n))).total
    moved, flops = linear.linear_forward_cost(rows, n, k)
    assert t.distinct_bytes == moved + 4 * n  # bias
    assert t.total_flops == flops + 2 * rows * n  # alpha and bias


@pytest.mark.parametrize("accumulate", [True, False])
def test_linear_backward_cost(accumulate):
    rows, n, k = 5, 8, 12
    t = Counted(lambda u: linear.linear_backward(u(rows, n), u(rows, k), u(n, k), u(n, k), u(n),
                                                 accumulate=accumulate)).total
    moved, flops = linear.linear_backward_cost(rows, n, k, accumulate)
    assert t.distinct_bytes == moved + 4 * (rows * n + 2 * n)  # dbias: dy once more, and added to
    assert t.total_flops >= flops


@pytest.mark.parametrize("order", [*exhaustively("legacy"), "new"])
def test_attention_costs(order):
    """The traffic is met exactly. Of FLOPs a 64 × 64 tile is computed whole, though it is 5 × 5 or 5 × 4 here."""
    T, channels, heads = 5, 4, 1
    whole = 2 * heads * 64 * 64 * 16  # one product of all heads, its K of 4 or 5 filled up to 16
    t = Counted(lambda u: attention.attention_forward(u(1, T, 3 * channels), heads, order)).total
    moved, flops = attention.attention_forward_cost(1, T, channels, heads)
    assert t.distinct_bytes == moved
    assert flops - 4 * T * T * channels == 5 * heads * T * T  # of the cost, what the softmax does
    assert 0 <= t.total_flops - 2 * whole - 5 * heads * T * T <= 16 * heads * T * 64


def test_attention_backward_cost():
    T, channels, heads = 5, 4, 1
    whole = 2 * heads * 64 * 64 * 16
    t = Counted(lambda u: attention.attention_backward(u(1, T, channels), u(1, T, 3 * channels), u(1, heads, T, T),
                                                       heads)).total
    moved, flops = attention.attention_backward_cost(1, T, channels, heads)
    assert t.distinct_bytes == moved
    assert 0 <= t.total_flops - 4 * whole - 5 * heads * T * T <= 16 * heads * T * 64


@pytest.mark.parametrize("size, c, n, stride", [*exhaustively((3, 8, 20, 1), (4, 3, 19, 1)), (5, 4, 8, 2)])
def test_convolution_costs(size, c, n, stride):
    """Version 1 leaves out the products with padding, which the cost counts as everyone does: each is accounted."""
    out = -(-size // stride)
    along = sum(0 <= o * stride + k - 1 < size for o in range(out) for k in range(3))  # taps inside, along one axis
    products = along**2 * c * n
    moved, flops = conv2d.conv2d_forward_cost(1, size, size, c, n, 3, stride)
    t = Counted(lambda u: conv2d.conv2d_forward(u(1, size, size, c), u(n, 3, 3, c), u(n), stride, version=1)).total
    assert t.distinct_bytes == moved
    assert t.total_flops == 2 * products
    assert flops - t.total_flops == 2 * (9 * out**2 - along**2) * c * n

    def backward(u):
        conv2d.conv2d_backward(u(1, out, out, n), u(1, size, size, c), u(n, 3, 3, c), u(n, 3, 3, c), u(n), stride,
                               version=1)

    moved, flops = conv2d.conv2d_backward_cost(1, size, size, c, n, 3, stride)
    parts = [function(1, size, size, c, n, 3, stride) for function in
             (conv2d.conv2d_input_gradient_cost, conv2d.conv2d_weight_gradient_cost)]
    assert (moved, flops) == tuple(map(sum, zip(*parts, strict=True)))
    counted = Counted(backward)
    assert counted.total.distinct_bytes == moved + 4 * out**2 * n  # dbias reads dy for itself
    assert counted.recorder.total("conv2d_input_gradient_kernel_v1").total_flops == 2 * products
    weights = counted.recorder.total("conv2d_weight_gradient_kernel_v1")
    assert weights.total_flops == 2 * products + (out + 1) * 9 * c * n  # sums of rows are put together, and added


@exhaustive
@pytest.mark.parametrize("HS", [32, 72])
def test_sparse_linear_attention_costs(HS):
    """Of full blocks the tensor cores do what is counted, and S and dP of the backward once more; of heads of 72, eight
    rows of zeros for the last eight of H."""
    T, count = 128, 1
    rng, half, results = np.random.default_rng(0), {}, []
    for name, shape in (("qkv", (1, T, 3 * HS)), ("dy", (1, T, HS)), ("weight", (HS, HS))):
        half[name] = rng.standard_normal(shape).astype(float16)

    def given(u):
        return {name: upload(a, u.device) for name, a in half.items()}

    def forward(u):
        a = given(u)
        y, kept = sla.sla_forward(a["qkv"], a["weight"], u.full(0, HS), 1, 0.5, version=2)
        results.extend(download(x) for x in (y, *kept))

    def backward(u):
        a, (y, *kept) = given(u), [upload(x, u.device) for x in results]
        sla.sla_backward(a["dy"], a["qkv"], y, sla.Kept(*kept), a["weight"], u.full(0, HS), u.full(0, HS, HS),
                         u.full(0, HS), 1, version=2)

    zeros = 2 * T * HS * (HS % 16)
    assert Counted(forward).total.tensor_flops == sla.sla_forward_cost(1, T, HS, 1, count)[1] + zeros
    if HS == 72:  # the backward, in half a minute, has nothing else
        return
    again = 2 * 2 * T * 64 * count * HS
    assert Counted(backward).total.tensor_flops == sla.sla_backward_cost(1, T, HS, 1, count)[1] + again


def test_every_cost_function_is_held_against_counts():
    """A cost function that nobody counts is one that may be wrong."""
    with open(__file__, encoding="utf-8") as file:
        text = file.read()
    for info in pkgutil.walk_packages(numdiff.kernels.__path__, "numdiff.kernels."):
        module = importlib.import_module(info.name)
        names = {n for n in vars(module) if n.endswith("_cost") and vars(module)[n].__module__ == module.__name__}
        missing = [n for n in sorted(names - NOT_COUNTED) if n not in text]
        assert missing == [], f"{module.__name__} has {missing}: hold them against counts here."
