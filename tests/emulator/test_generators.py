"""Threads as generators (generators.py): results and faults are those of greenlets.

`python -m tests.emulator.test_generators` prints how long both take.
"""

import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest
from numba import cuda, float32, int32

from numdiff import emulator
from tests.conftest import THREAD_ORDERS, exhaustive

ROOT = pathlib.Path(__file__).resolve().parents[2]


@cuda.jit(device=True)
def reduce_block(tile, t):
    k = 32
    while k:
        if t < k:
            tile[t] += tile[t + k]
        cuda.syncthreads()
        k //= 2
    return tile[0]


@cuda.jit(device=True)
def reduce_warp(x):
    for k in (16, 8, 4, 2, 1):
        x += cuda.shfl_xor_sync(0xFFFFFFFF, x, k)
    return x


with emulator.device():

    @cuda.jit("float32(float32)", device=True)
    def doubled(x):
        cuda.syncwarp()
        return x + x


@cuda.jit
def sums(x, y, counts):
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    tile[t] = x[cuda.grid(1)]
    cuda.syncthreads()
    total = doubled(reduce_block(tile, t)) + reduce_warp(x[cuda.grid(1)])
    y[cuda.grid(1)] = total + float32(cuda.syncthreads_count(t < 5))
    if t % 2:
        counts[cuda.grid(1)] = cuda.popc(cuda.activemask())
    cuda.atomic.add(counts, 0, 1)


@cuda.jit
def no_barrier(x, y):
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    y[t] = tile[63 - t] + reduce_warp(x[t])


@cuda.jit
def in_a_branch(x, y):
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    if t < 32:
        y[t] = reduce_block(tile, t)
    else:
        y[t] = reduce_block(tile, t)


@cuda.jit
def absent_lane(x, y):
    t = cuda.threadIdx.x
    if t < 40:
        y[t] = cuda.shfl_down_sync(0xFFFFFFFF, x[t], 1)


@cuda.jit
def endless(x, y):
    while x[0] < 2:
        y[cuda.threadIdx.x] = 1


@cuda.jit
def grid_wide(x, y):
    y[cuda.grid(1)] = x[cuda.grid(1)]
    cuda.cg.this_grid().sync()
    y[128 + cuda.grid(1)] = y[(cuda.grid(1) + 64) % 128]


KERNELS = [no_barrier, in_a_branch, absent_lane, endless, grid_wide]


def both(monkeypatch, run):
    """What `run` gives with greenlets, and with generators."""
    results = []
    for generators in (False, True):
        monkeypatch.setattr(emulator.Emulator, "generators", generators)
        results.append(run())
    return results


@THREAD_ORDERS
@pytest.mark.parametrize("checks", [True, False])
def test_results_are_the_same(monkeypatch, rng, order, checks):
    x = rng.standard_normal(128).astype(np.float32)

    def run():
        y, counts = np.zeros(128, np.float32), np.zeros(128, np.int32)
        emulator.Emulator(order=order, checks=checks, float64=True).launch(
            sums, 2, 64, x, y, counts
        )
        assert counts[1] == 16 and counts[0] == 128
        return y.tobytes()

    one, other = both(monkeypatch, run)
    assert one == other


@THREAD_ORDERS
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_faults_are_the_same(monkeypatch, order, kernel):
    def run():
        gpu = emulator.Emulator(order=order, on_fault="collect", patience=0.02)
        gpu.launch(
            kernel,
            2 if kernel is grid_wide else 1,
            64,
            np.ones(128, np.float32),
            np.zeros(256, np.float32),
        )
        return [str(fault) for fault in gpu.faults]

    one, other = both(monkeypatch, run)
    assert one == other and bool(one) == (kernel is not grid_wide)


def test_what_needs_greenlet_says_so(monkeypatch):
    monkeypatch.setattr(emulator.Emulator, "generators", True)

    @cuda.jit
    def listed(x):
        x[0] = sum([reduce_warp(x[i]) for i in range(2)])

    with pytest.raises(
        emulator.Unsupported, match="within a comprehension or a lambda, needs greenlet"
    ):
        emulator.Emulator().launch(listed, 1, 32, np.ones(32, np.float32))
    scope = {"cuda": cuda}
    exec("def no_source(x):\n    cuda.syncthreads()", scope)
    with pytest.raises(emulator.Unsupported, match="a function without source"):
        emulator.Emulator().launch(scope["no_source"], 1, 32, np.ones(32, np.float32))


@exhaustive
@pytest.mark.parametrize(
    "name", ["launch", "warp", "schedule", "faults", "device_functions", "right_code", "reads"]
)
def test_the_emulator_s_own_tests(name):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "0",
            "-p",
            "tests.emulator.generators",
            f"tests/emulator/test_{name}.py",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]


# How long it takes --------------------------------------------------------------------------------


@cuda.jit
def matmul(a, b, c):
    tile_a, tile_b = cuda.shared.array((16, 16), float32), cuda.shared.array((16, 16), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    total = float32(0)
    for k0 in range(0, a.shape[1], 16):
        tile_a[y, x] = a[cuda.blockIdx.y * 16 + y, k0 + x]
        tile_b[y, x] = b[k0 + y, cuda.blockIdx.x * 16 + x]
        cuda.syncthreads()
        for k in range(16):
            total += tile_a[y, k] * tile_b[k, x]
        cuda.syncthreads()
    c[cuda.blockIdx.y * 16 + y, cuda.blockIdx.x * 16 + x] = total


@cuda.jit
def barriers(x):
    for _ in range(int32(100)):
        cuda.syncthreads()
    x[cuda.grid(1)] = 1


@cuda.jit
def shuffles(x):
    value = x[cuda.grid(1)]
    for _ in range(int32(50)):
        value = cuda.shfl_xor_sync(0xFFFFFFFF, value, 1)
    x[cuda.grid(1)] = value


def main():
    a = np.ones((32, 32), np.float32)
    for kernel, grid, block, arguments in (
        (matmul, (2, 2), (16, 16), (a, a, np.zeros_like(a))),
        (barriers, 1, 256, (np.zeros(256, np.float32),)),
        (shuffles, 1, 256, (np.zeros(256, np.float32),)),
    ):
        seconds = {}
        for generators in (False, True):
            emulator.Emulator.generators = generators
            gpu = emulator.Emulator()
            gpu.launch(kernel, grid, block, *arguments)
            seconds[generators] = min(timed(gpu, kernel, grid, block, arguments) for _ in range(3))
        print(
            f"{kernel.__name__}: greenlets {seconds[False]:.3f} s, generators {seconds[True]:.3f} s, "
            f"{seconds[True] / seconds[False]:.2f}×"
        )


def timed(gpu, kernel, grid, block, arguments):
    begun = time.process_time()
    gpu.launch(kernel, grid, block, *arguments)
    return time.process_time() - begun


if __name__ == "__main__":
    main()
