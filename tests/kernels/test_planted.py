"""Faults planted in the depthwise kernels, a rung after the other, and in those of sparse-linear
attention that attention/test_sla.py leaves out: the emulator finds each, at the smallest shapes
that come by it.

A copy of the kernel's file has the change; its kernels take the places of the originals. The first
of each file is in the first command, the others are in the exhaustive part.
"""

import numpy as np
import pytest

from numdiff.device import empty_like, launch, upload, zeros
from numdiff.device.emulator import EmulatorDevice
from numdiff.emulator import KernelFault
from numdiff.extras.convnext import depthwise
from numdiff.extras.convnext.depthwise import launcher as depthwise_launcher
from numdiff.extras.convnext.depthwise import mma
from numdiff.extras.sla.kernels import choice, launcher
from tests.conftest import exhaustive
from tests.emulator.planting import copies  # noqa: F401

PASS = "pass  # "
DEPTHWISE, SLA = "numdiff.extras.convnext.depthwise", "numdiff.extras.sla.kernels"


def half(gpu, *shape):
    return upload(np.random.default_rng(0).standard_normal(shape).astype(np.float16), gpu)


def single(gpu, *shape):
    return upload(np.random.default_rng(1).standard_normal(shape).astype(np.float32), gpu)


# The cases: functions of a device -----------------------------------------------------------------


def forward(version, *shape):
    """The depthwise convolution of an image (H, W, C)."""
    return lambda gpu: depthwise.depthwise_forward(
        half(gpu, 1, *shape), half(gpu, 3, 3, shape[2]), version=version
    )


def gradient(version, *shape):
    """Its weight's gradient."""
    return lambda gpu: depthwise.depthwise_weight_gradient(
        half(gpu, 1, *shape),
        half(gpu, 1, *shape),
        zeros((3, 3, shape[2]), np.float32, gpu),
        version=version,
    )


def rest(gpu, N=66):
    """S of N blocks: two stages of keys."""
    H = half(gpu, 1, 1, N, 8, 8)
    left = choice.bits_left(np.tile(np.arange(2), (N, 1)))[None, None]
    launcher.sum_rest(H, upload(left, gpu), empty_like(H))


def before_keys(version, HS, T=66):
    """What comes before a query meets a key: sums, H and z of two blocks, totals, lists."""

    def run(gpu):
        qkv = half(gpu, 1, T, 3 * HS)
        HS_, grid, problem = launcher.problem_of(qkv, 1, "new", 1)
        launcher.choose(qkv, HS_, grid, problem, version)

    return run


def chosen(gpu, N=9, HS=40):
    """The lists of nine blocks of queries, from means of 40 channels, which come in two pieces."""
    _, _, problem = launcher.problem_of(half(gpu, 1, 64 * N, 3 * HS), 1, "new", 2)
    launch(
        choice.sla_choose_kernel,
        (-(-N // choice.ROWS), 1, 1),
        choice.THREADS,
        single(gpu, N * HS),
        single(gpu, 2 * N * HS),
        single(gpu, 2 * HS),
        zeros((2 * N,), np.int32, gpu),
        zeros((N,), np.int32, gpu),
        problem,
        HS,
        shared=4 * choice.ROWS * N,
    )


def lists(gpu, N=9):
    """The lists of nine blocks of queries, of which two are critical, turned round."""
    critical = upload(np.tile(np.array([2, 5], np.int32), (N, 1)), gpu)
    launch(
        choice.sla_transpose_kernel,
        (-(-N // choice.ROWS), 1, 1),
        choice.THREADS,
        critical.reshape(-1),
        zeros((N * N,), np.int32, gpu),
        zeros((N,), np.int32, gpu),
        N,
        2,
    )


PLANTED = [  # (file, what is changed, into what, the case, the kind of fault)
    ("naive", "if out < y.size:", "if out <= y.size:", forward(1, 2, 3, 3), "bounds"),
    (
        "naive",
        "if h >= 0 and h < H and w >= 0 and w < W:\n                    tap",
        "if w >= 0 and w < W:\n                    tap",
        forward(1, 2, 3, 3),
        "bounds",
    ),
    ("naive", "if out < dweight.size:", "if out <= dweight.size:", gradient(1, 2, 3, 3), "bounds"),
    (
        "tiled",
        "cp_async_wait_all()\n    cuda.syncthreads()\n\n    strip",
        "cp_async_wait_all()\n\n    strip",
        forward(2, 2, 9, 8),
        "race",
    ),
    (
        "tiled",
        "cp_async_wait_all()\n    cuda.syncthreads()\n\n    strip",
        "cuda.syncthreads()\n\n    strip",
        forward(2, 2, 9, 8),
        "cp.async",
    ),
    (
        "tiled",
        "h < image.H and w >= 0 and w < image.W",
        "h <= image.H and w >= 0 and w < image.W",
        forward(2, 2, 9, 8),
        "bounds",
    ),
    (
        "tiled",
        "cuda.syncthreads()  # the tile before is no longer read",
        PASS,
        gradient(2, 17, 3, 8),
        "race",
    ),
    (
        "mma",
        "corner, image)\n    cuda.syncthreads()\n",
        "corner, image)\n",
        forward(3, 2, 9, 8),
        "race",
    ),
    (
        "mma",
        "inside = int32(i < rows) & int32(uint32(h) < uint32(image.H))",
        "inside = int32(i < rows)",
        forward(3, 2, 9, 8),
        "bounds",
    ),
    (
        "mma",
        "cuda.syncthreads()  # the tile before is no longer read",
        PASS,
        gradient(3, 17, 3, 8),
        "race",
    ),
    (
        "mma",
        "word_of(acc[first + 4 * r + k]),\n            )\n    cuda.syncwarp()",
        "word_of(acc[first + 4 * r + k]),\n            )",
        gradient(3, 17, 3, 8),
        "race",
    ),
    (
        "mma",
        "    cuda.syncthreads()\n    for k in range(2):\n        c =",
        "    for k in range(2):\n        c =",
        gradient(3, 17, 3, 8),
        "race",
    ),
    (
        "hopper",
        "fence_proxy_async()\n        mbarrier_arrive",
        "mbarrier_arrive",
        forward(4, 1, 3, 8),
        "proxy",
    ),
    (
        "hopper",
        "mbarrier_wait(barrier_at(full, stage), parity)\n",
        PASS + "\n",
        forward(4, 1, 3, 8),
        "race",
    ),
    (
        "hopper",
        "bar_sync(uint32(1), uint32(CONSUMERS))  # all have read the pixels",
        PASS,
        forward(4, 1, 3, 32),
        "race",
    ),
    (
        "hopper",
        "mbarrier_wait(barrier_at(written, stage), parity)",
        PASS,
        forward(4, 1, 3, 8),
        "uninitialised",
    ),
    (
        "hopper",
        "tma_store_wait_read_0()\n        request_tile",
        "request_tile",
        forward(4, 1, 162, 8),
        "asynchronous",
    ),
    (
        "hopper",
        "stage, parity = int32(1 - stage), uint32(parity ^ uint32(stage))\n\n\n# Multiplying",
        "stage = int32(1 - stage)\n\n\n# Multiplying",
        forward(4, 1, 162, 8),
        "asynchronous",
    ),
    (
        "hopper_weight_gradient",
        "consumer_wait(x_ring, stage, parity)",
        PASS,
        gradient(4, 1, 3, 8),
        "asynchronous",
    ),
    (
        "hopper_weight_gradient",
        "consumer_wait(dy_ring, dy_stage, dy_parity)",
        PASS,
        gradient(4, 1, 3, 8),
        "race",
    ),
    (
        "hopper_weight_gradient",
        "bar_sync(uint32(1), uint32(CONSUMERS))  # all have read",
        PASS,
        gradient(4, 1, 3, 32),
        "race",
    ),
    (
        "hopper_weight_gradient",
        "        read_gradient(gradients, memory, int32(2 * STAGE), where)\n"
        "        consumer_release(dy_ring, dy_stage)\n",
        "        consumer_release(dy_ring, dy_stage)\n"
        "        read_gradient(gradients, memory, int32(2 * STAGE), where)\n",
        gradient(4, 1, 162, 8),
        "race",
    ),
    ("rest_half", "cuda.syncthreads()  # the tile is there", PASS, rest, "race"),
    ("rest_half", "cp_async_wait(0)\n", PASS + "\n", rest, "cp.async"),
    ("rest_half", "cuda.syncthreads()  # the stages are no longer read", PASS, rest, "race"),
    ("rest_half", "if first + i * apart < exist and w < given else int32(0)", "", rest, "bounds"),
    ("choice", "cuda.syncthreads()  # q and the mean are there", PASS, chosen, "race"),
    (
        "choice",
        "fetch_keys(tile, k_sums, first, channel, problem, HS)\n            cuda.syncthreads()",
        "fetch_keys(tile, k_sums, first, channel, problem, HS)",
        before_keys(1, 8),
        "race",
    ),
    ("choice", "min(first + warp, N - 1)", "(first + warp)", before_keys(1, 8), "bounds"),
    (
        "choice",
        "    while half > 0:\n        cuda.syncthreads()",
        "    while half > 0:",
        before_keys(1, 8),
        "race",
    ),
    (
        "choice",
        "store_products(keys, tile, q, k_sums, k_mean, problem, HS)\n    cuda.syncthreads()",
        "store_products(keys, tile, q, k_sums, k_mean, problem, HS)",
        before_keys(1, 8),
        "race",
    ),
    (
        "choice",
        "lists[start + found + cuda.popc(uint32(mask & before))]",
        "lists[start + found]",
        lists,
        "race",
    ),
    ("prepare_half", "cuda.syncthreads()  # k is no longer read", PASS, before_keys(2, 32), "race"),
    ("prepare_half", "cp_async_wait(0)", PASS, before_keys(2, 32), "cp.async"),
    (
        "prepare_half",
        "cuda.syncthreads()\n    sum_runs(partial, 2",
        "sum_runs(partial, 2",
        before_keys(2, 32),
        "race",
    ),
    ("prepare_half", "cuda.syncwarp()\n        copy_out", "copy_out", before_keys(2, 32), "race"),
]
FIRST = {name: n for n, (name, *_) in reversed(list(enumerate(PLANTED)))}


@pytest.fixture
def gpu(monkeypatch):
    """An emulator of a Hopper with one multiprocessor, so that a block has many tiles."""
    monkeypatch.setattr(depthwise_launcher, "GRADIENT_BLOCKS", 1)
    monkeypatch.setattr(mma, "GRADIENT_BLOCKS", 1)
    device = EmulatorDevice(order="shuffled", seed=1, float64=False, on_fault="raise", cc=(9, 0))
    monkeypatch.setattr(device, "multiprocessors", 1)
    return device


def file_of(name):
    return f"{SLA if name in ('rest_half', 'choice', 'prepare_half') else DEPTHWISE}.{name}"


@pytest.mark.parametrize(
    "name, before, after, case, kind",
    [
        pytest.param(*row, id=f"{row[0]}-{n}", marks=() if FIRST[row[0]] == n else exhaustive)
        for n, row in enumerate(PLANTED)
    ],
)
def test_a_planted_fault_is_found(gpu, monkeypatch, copies, name, before, after, case, kind):  # noqa: F811
    copies.plant(file_of(name), before, after)
    # kernels that functions of these files make for the launcher
    if name == "rest_half":
        monkeypatch.setattr(launcher, "rest_kernel_v3", copies.copy.make_rest())
    if name == "prepare_half":
        monkeypatch.setitem(launcher.prepare_kernels_v2, 32, copies.copy.make_prepare(32))
    with pytest.raises(KernelFault) as caught:
        case(gpu)
    assert kind in {fault.kind for fault in caught.value.faults}, caught.value


def by_what_they_are(cases):
    return {
        (case.__code__, *(cell.cell_contents for cell in case.__closure__ or ())): case
        for case in cases
    }


# those that `numdiff kernels check` has, too, with the same shape
CHECKED = by_what_they_are(
    [forward(2, 2, 9, 8), forward(3, 2, 9, 8), before_keys(1, 8), before_keys(2, 32)]
)


@exhaustive
@pytest.mark.parametrize(
    "case",
    [
        case
        for key, case in by_what_they_are(case for *_, case, _ in PLANTED).items()
        if key not in CHECKED
    ],
)
def test_without_them_there_is_none(gpu, case):
    case(gpu)
