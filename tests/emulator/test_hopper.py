"""Hopper's intrinsics: their twins against the PTX ISA, the first experiment's GEMM, faults
planted in them, and PTX. What they give is the same on a GPU, where there is one (sm_90)."""

import inspect
import re
from typing import NamedTuple

import numpy as np
import pytest

from numdiff.device import cuda, download, get_gpu, upload
from numdiff.device import launch as launch_on_device
from numdiff.device.ptx import compile_to_ptx
from numdiff.device.tensor_map import tensor_map
from numdiff.device.wgmma import make_setmaxnreg, make_wgmma
from numdiff.emulator import KernelFault, LaunchRefused, Unsupported
from tests.conftest import THREAD_ORDERS, exhaustive, exhaustively, needs, relative_error
from tests.emulator.planting import changed_copy, fault_at, line_with, run
from tests.emulator.probes import hopper_gemm, inputs, units
from tests.kernels.compile_logs import assemble

GPU = "gpu"
ON_A_GPU = pytest.param(GPU, marks=needs("gpu"))
MODES = pytest.mark.parametrize("mode", ["checked", "unchecked", ON_A_GPU])
MACHINES = pytest.mark.parametrize("mode", ["checked", ON_A_GPU])


class Mapped(NamedTuple):
    """An array whose tensor map a kernel takes: the arguments of `tensor_map`."""

    array: np.ndarray
    box: tuple
    swizzle: int = 128
    dims: tuple = None
    strides: tuple = None


def launch(kernel, block, *arguments, grid=1, shared=0, mode="checked", **options):
    """Launch a kernel in the emulator or on a GPU; NumPy's arrays have the results afterwards."""
    arrays = [a.array if isinstance(a, Mapped) else a for a in arguments]
    there = {id(a): a for a in arrays}
    if mode == GPU:
        there = {k: upload(a, get_gpu()) if np.ndim(a) else a for k, a in there.items()}
    given = [
        tensor_map(there[id(array)], *a[1:]) if isinstance(a, Mapped) else there[id(array)]
        for a, array in zip(arguments, arrays, strict=True)
    ]
    if mode != GPU:
        run(kernel, grid, block, *given, shared=shared, checks=mode == "checked", **options)
        return
    launch_on_device(kernel, grid, block, *given, shared=shared)
    for array in arrays:
        if np.ndim(array):
            array[...] = download(there[id(array)])


# TMA ----------------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("name", inputs.COPIES)
def test_boxes_are_copied_as_the_isa_says(name, mode):
    x, y, box, swizzle, at, raw, want = inputs.copy_case(name)
    got = np.zeros(len(raw) // 4, np.uint32)
    launch(
        units.make_copy(x.ndim, x.itemsize * int(np.prod(box))),
        32,
        Mapped(x, box, swizzle),
        Mapped(y, box, swizzle),
        at,
        got,
        shared=len(raw),
        mode=mode,
    )
    assert np.array_equal(got.view(np.uint8), raw)
    assert np.array_equal(y, want)


def test_a_view_with_its_own_dimensions_and_strides():
    x = np.arange(6 * 64, dtype=np.float32).reshape(6, 64)
    y = np.zeros((3, 16), np.float32)
    got, at = np.zeros(48, np.uint32), np.zeros(10, np.int32)
    launch(
        units.make_copy(2, 192),
        32,
        Mapped(x, (16, 3), 0, dims=(16, 3), strides=(2 * 256,)),
        Mapped(y, (16, 3), 0),
        at,
        got,
        shared=192,
    )
    assert np.array_equal(got.view(np.float32).reshape(3, 16), x[::2, :16])
    assert np.array_equal(y, x[::2, :16])


REFUSED = {  # what of a tensor map, and why the driver refuses it
    "row of 8 bytes": (
        ((4, 64), np.float16, (4, 4), 0),
        "a row of the box is 8 bytes, it must be a multiple of 16",
    ),
    "row beyond the swizzle": (((4, 128), np.float16, (128, 4), 128), "can be no more than that"),
    "box of 257": (((512, 16), np.float16, (16, 257), 0), "must be 1 … 256"),
    "stride of 20 bytes": (
        ((4, 10), np.float16, (8, 4), 0),
        "is 20 bytes, it must be a multiple of 16",
    ),
    "six dimensions": (
        ((1, 1, 1, 1, 1, 16), np.float16, (16, 1, 1, 1, 1, 1), 0),
        "it must have 1 to 5",
    ),
    "box of the wrong rank": (((4, 16), np.float16, (16,), 0), "need a box of 2 sizes"),
    "swizzle of 48": (((4, 16), np.float16, (16, 4), 48), "must be 0, 32, 64 or 128"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tensor_maps_that_the_driver_refuses(name):
    (shape, dtype, box, swizzle), why = REFUSED[name]
    with pytest.raises(LaunchRefused, match=re.escape(why)):
        tensor_map(np.zeros(shape, dtype), box, swizzle)


def test_a_tensor_map_beyond_its_array_or_misaligned_is_refused():
    x = np.zeros(64, np.float32)
    with pytest.raises(LaunchRefused, match="is 256 bytes behind the array"):
        tensor_map(x, (16,), 0, dims=(128,))
    aligned = np.zeros(64, np.uint8)
    with pytest.raises(LaunchRefused, match="not a multiple of 16 bytes"):
        tensor_map(aligned[(8 - aligned.ctypes.data) % 16 :][:32], (16,), 0)


@MODES
@THREAD_ORDERS
def test_a_pipeline_of_loads_and_stores(rng, mode, order):
    x, y = rng.standard_normal((7, 32)).astype(np.float32), np.zeros((7, 32), np.float32)
    launch(
        units.double_rows,
        32,
        Mapped(x, (32, 1), 0),
        Mapped(y, (32, 1), 0),
        7,
        mode=mode,
        order=order,
    )
    assert np.array_equal(y, 2 * x)


@MODES
def test_what_threads_store_in_global_memory_is_loaded(mode):
    x, y = np.zeros(32, np.float32), np.zeros(32, np.float32)
    launch(units.through_global, 32, x, Mapped(x, (32,), 0), y, mode=mode)
    assert np.array_equal(y, np.arange(32)[::-1])


# Barriers -----------------------------------------------------------------------------------------


@MODES
def test_phases_of_an_mbarrier(mode):
    x, log = np.arange(1, 17, dtype=np.uint32), np.full(12, -1, np.int32)
    launch(units.phases, 1, Mapped(x, (16,), 0), log, mode=mode)
    assert tuple(log) == inputs.PHASES


@MODES
@THREAD_ORDERS
def test_named_barriers(mode, order):
    x, y = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    launch(units.relay, 128, x, y, mode=mode, order=order)
    assert np.array_equal(y, 2 * x[::-1])


# wgmma --------------------------------------------------------------------------------------------


def product(
    rng,
    n,
    swizzle,
    a_mn=False,
    b_mn=False,
    far=False,
    first_k=0,
    registers=False,
    mode="checked",
    twice=0,
):
    a, b, *arguments = inputs.product_case(rng, n, swizzle, a_mn, b_mn, far, first_k)
    out = np.full((128, n // 2), np.nan, np.float32)
    launch(
        units.make_product(n, a_mn, b_mn, registers),
        128,
        *arguments,
        twice,
        out,
        shared=arguments[0].nbytes,
        mode=mode,
    )
    assert np.array_equal(
        out, (1 + twice) * inputs.in_registers(a.astype(float) @ b.astype(float).T)
    )


@MACHINES
@pytest.mark.parametrize("far", [False, True], ids=["dense", "far"])
@pytest.mark.parametrize("a_mn, b_mn", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_descriptors_of_every_layout(rng, swizzle, a_mn, b_mn, far, mode):
    if mode != GPU and (a_mn or not far):
        mode = "unchecked"  # which is quicker
    product(rng, 64, swizzle, a_mn, b_mn, far, mode=mode)


@MACHINES
@pytest.mark.parametrize("swizzle, first_k", [(64, 16), (128, 16), (128, 32), (128, 48)])
def test_a_matrix_that_begins_inside_a_swizzled_row(rng, swizzle, first_k, mode):
    product(rng, 32, swizzle, first_k=first_k, mode=mode)


@MACHINES
@pytest.mark.parametrize("swizzle, first_k", [(0, 0), (32, 0), (64, 32), (128, 0), (128, 96)])
@pytest.mark.parametrize("n", [8, 64])
def test_products_of_e4m3(rng, n, swizzle, first_k, mode):
    a, b, *arguments = inputs.product_case_e4m3(rng, n, swizzle, first_k)
    out = np.full((128, n // 2), np.nan, np.float32)
    kernel, shared = units.make_product(n, kind="e4m3"), arguments[0].nbytes
    launch(kernel, 128, *arguments, 1, out, shared=shared, mode=mode)
    assert np.array_equal(out, 2 * inputs.in_registers(a @ b.T))
    with pytest.raises(ValueError, match="reads both matrices along k"):
        make_wgmma(n, transpose_b=True, kind="e4m3")


@MACHINES
def test_numbers_of_columns(rng, mode):
    for n in (8, 16, 24, 40, 64, 104, 176, 256):
        product(rng, n, 32, mode=mode if mode == GPU or n in (8, 40) else "unchecked")
    for n in (0, 4, 12, 264):
        with pytest.raises(ValueError, match="columns"):
            make_wgmma(n)


@MODES
@pytest.mark.parametrize("b_mn", [False, True])
def test_a_from_registers(rng, b_mn, mode):
    product(rng, 48, 32, False, b_mn, registers=True, mode=mode, twice=1)


@MODES
def test_products_are_added_where_scale_d_says_so(rng, mode):
    product(rng, 24, 128, mode=mode, twice=1)


@MODES
def test_groups_end_one_after_another(rng, mode):
    a, b, image, descriptors, _ = inputs.product_case(rng, 8, 32)
    out = np.zeros((128, 8), np.float32)
    launch(units.groups, 128, image, descriptors, out, shared=image.nbytes, mode=mode)
    want = inputs.in_registers(a.astype(float) @ b.astype(float).T)
    assert np.array_equal(out, np.hstack([want, 2 * want]))


def test_hopper_only():
    groups = np.zeros(256, np.uint32), np.zeros(2, np.uint64), np.zeros((128, 8), np.float32)
    phases = np.zeros(128, np.uint8), np.zeros(12, np.int32)
    for kernel, arguments in ((units.groups, groups), (units.phases, phases)):
        with pytest.raises(
            Unsupported,
            match=r"needs compute capability (8|9)\.0, not 7\.5; used at .*units\.py:\d+",
        ):
            launch(kernel, 128 if kernel is units.groups else 1, *arguments, shared=1024, cc=(7, 5))
    with pytest.raises(ValueError, match="24, 32, … 256"):
        make_setmaxnreg(20, False)


# The first experiment's GEMM ----------------------------------------------------------------------


def run_gemm(make, m, n, k, bn, stages, **options):
    a, b, c = inputs.gemm_arrays(m, n, k)
    kernel, shared = make(bn, stages)
    kernel = cuda.jit(launch_bounds=(hopper_gemm.THREADS, 1))(kernel)
    launch(
        kernel,
        hopper_gemm.THREADS,
        Mapped(a, (hopper_gemm.BK, hopper_gemm.BM)),
        Mapped(b, (hopper_gemm.BK, bn)),
        c,
        k,
        grid=m // hopper_gemm.BM * (n // bn),
        shared=shared,
        **options,
    )
    return c, a.astype(float) @ b.astype(float).T


def test_the_gemm_gives_the_same_right_bits_in_each_order():
    (first, want), *others = [
        run_gemm(hopper_gemm.make_gemm, 256, 256, 256, 256, 4, order=order, mode=mode)
        for order, mode in (("reversed", "unchecked"), ("shuffled", "checked"))
    ]
    assert relative_error(first, want) < 2e-3
    for other, _ in others:
        assert np.array_equal(other, first)


@needs("gpu")
@pytest.mark.parametrize("n", [64, 128, 256])
def test_the_gemm_on_a_gpu(n):
    """The hardware cuts off bits of sums that the emulator keeps."""
    got, want = run_gemm(hopper_gemm.make_gemm, 256, n, 256, n, 4, mode=GPU)
    assert relative_error(got, want) < 2e-3


# Faults -------------------------------------------------------------------------------------------


LOOP = (
    "            for kt in range(1, k_tiles):\n"
    "                mbarrier_wait(full0 + u32(8) * u32(stage), u32(parity))"
)
LOOP_FENCE = "                wgmma_fence()\n                wgmma(acc, da, db, i32(1))"
# name: (changes of the GEMM, tiles of k, kind, mark of the line, what the message says)
GEMM_FAULTS = {
    "consumer waits for the phase before": (
        [(LOOP, LOOP.replace("u32(parity)", "u32(parity ^ 1)"))],
        4,
        "asynchronous",
        "wgmma(acc, da, db, i32(1))  # loop",
        "the wgmma reads tiles.*, which the TMA load still writes: wait for phase 0 of barriers",
    ),
    "consumer never turns its parity": (
        [
            (
                "                stage += 1\n                if stage == STAGES:\n                    stage, parity = "
                "0, parity ^ 1\n            wgmma_wait_all",
                "                stage += 1\n                if stage == STAGES:\n"
                "                    stage = 0\n            wgmma_wait_all",
            )
        ],
        4,
        "wgmma",
        "tma_load_2d(a, map_a",
        "the TMA load writes tiles.*, which the wgmma reads, and this thread does not know that it has ended",
    ),
    "producer begins with the wrong parity": (
        [("                stage, parity = 0, 1", "                stage, parity = 0, 0")],
        2,
        "deadlock",
        "mbarrier_wait(empty0",
        r"no thread can continue: mbarrier barriers\[2\] .*waited for with parity 0: phase 0 of it lacks 2 of 2 arriv",
    ),
    "no expect_tx": (
        [("mbarrier_expect_tx(full, u32(STAGE))", "mbarrier_arrive(full)")],
        1,
        "mbarrier",
        "tma_load_2d(a, map_a",
        r"the copy brings 16384 bytes to mbarrier barriers\[0\].*an expect_tx is missing or too small",
    ),
    "expect_tx left out": (
        [("mbarrier_expect_tx(full, u32(STAGE))", "pass")],
        1,
        "deadlock",
        "mbarrier_wait(full0, u32(0))",
        r"waited for with parity 0: phase 0 of it lacks 1 of 1 arrivals",
    ),
    "expect_tx too small": (
        [("mbarrier_expect_tx(full, u32(STAGE))", "mbarrier_expect_tx(full, u32(A_BYTES))")],
        1,
        "mbarrier",
        "tma_load_2d(a + u32(A_BYTES), map_b",
        "brings 1024 bytes to mbarrier .*an expect_tx is missing or too small",
    ),
    "expect_tx too large": (
        [("mbarrier_expect_tx(full, u32(STAGE))", "mbarrier_expect_tx(full, u32(STAGE + 16))")],
        1,
        "deadlock",
        "mbarrier_wait(full0, u32(0))",
        r"mbarrier barriers\[0\] .*waited for with parity 0: phase 0 of it lacks 16 "
        r"bytes",
    ),
    "second load left out": (
        [
            (
                "                    tma_load_2d(a + u32(A_BYTES), map_b, full, u32(kt * BK), u32(n0))\n",
                "",
            )
        ],
        1,
        "deadlock",
        "mbarrier_wait(full0, u32(0))",
        "phase 0 of it lacks 1024 bytes",
    ),
    "accumulators read before the wait": (
        [("            wgmma_wait_all(acc)\n", "")],
        2,
        "wgmma",
        "= types.float16(acc[4 * j])",
        r"reads acc\[0\], which the wgmma still writes: commit its group and wait for it with wgmma_wait first|"
        "reads local address",
    ),
    "wgmma without a fence": (
        [
            (
                "            wgmma_fence()\n            wgmma(acc, da, db, i32(0))",
                "            wgmma(acc, da, db, i32(0))",
            )
        ],
        1,
        "wgmma",
        "wgmma(acc, da, db, i32(0))",
        r"a wgmma without wgmma_fence\(\): it is the first",
    ),
    "accumulators touched, and no fence": (
        [
            (
                LOOP_FENCE,
                "                wgmma_wait_all(acc)\n                acc[0] = acc[0] + types.float32(1)\n"
                "                wgmma(acc, da, db, i32(1))",
            )
        ],
        2,
        "wgmma",
        "wgmma(acc, da, db, i32(1))  # loop",
        r"a wgmma without wgmma_fence\(\): the accumulators were touched after the last fence",
    ),
    "group not committed": (
        [
            (
                "            wgmma_commit()\n            stage, parity = 1, 0",
                "            stage, parity = 1, 0",
            )
        ],
        1,
        "wgmma",
        "= types.float16(acc[4 * j])",
        "which the wgmma still writes: commit its group",
    ),
    "descriptor without the swizzle": (
        [(" | (u64(1) << u64(62))", "")],
        1,
        "descriptor",
        "wgmma(acc, da, db, i32(0))",
        "the descriptor of matrix A says no swizzle, but TMA wrote the tile at tiles.* with a swizzle of "
        "128",
    ),
    "descriptor that begins outside of the pattern": (
        [
            ("STAGE = A_BYTES + B_BYTES", "STAGE = A_BYTES + B_BYTES + 128"),
            (
                "mbarrier_expect_tx(full, u32(STAGE))",
                "mbarrier_expect_tx(full, u32(A_BYTES + B_BYTES))",
            ),
        ],
        2,
        "alignment",
        "wgmma(acc, da, db, i32(1))  # loop",
        "with a swizzle of 128 bytes it must be a multiple of 1024",
    ),
    "tile at a misaligned address": (
        [
            (
                "                    a = base + u32(stage) * u32(STAGE)",
                "                    a = base + u32(16)",
            )
        ],
        1,
        "alignment",
        "tma_load_2d(a, map_a",
        "the TMA load's tile is at the shared address .*, which is not a multiple of 128",
    ),
    "tile outside of shared memory": (
        [("return gemm, STAGES * STAGE", "return gemm, STAGES * STAGE - 128")],
        2,
        "bounds",
        "tma_load_2d(a + u32(A_BYTES), map_b",
        "the TMA load of 1024 bytes at the shared address .* is not in",
    ),
    "mbarrier at a misaligned address": (
        [
            (
                "base, full0 = smem_u32(tiles), smem_u32(barriers)",
                "base, full0 = smem_u32(tiles), smem_u32(barriers) + u32(4)",
            )
        ],
        1,
        "alignment",
        "mbarrier_init(full0",
        "which is not a multiple of 8",
    ),
    "consumer does not wait for the stage": (
        [(LOOP, LOOP.splitlines()[0])],
        2,
        "asynchronous",
        "wgmma(acc, da, db, i32(1))  # loop",
        "the wgmma reads tiles.*, which the TMA load",
    ),
    "producer does not wait for the empty stage": (
        [("                    mbarrier_wait(empty0 + u32(8) * u32(stage), u32(parity))\n", "")],
        4,
        "mbarrier",
        "mbarrier_expect_tx(full, u32(STAGE))",
        r"arrives at mbarrier barriers\[0\] .* more often than the 1 times of "
        r"its count",
    ),
    "stage handed back too early": (
        [
            (
                "                wgmma_wait_1()  # the previous stage has been read: hand it back\n",
                "",
            )
        ],
        4,
        "wgmma",
        "tma_load_2d(a, map_a",
        "the TMA load writes tiles.*, which the wgmma still reads: commit its group and wait",
    ),
    "wrong stage handed back": (
        [("previous = stage - 1 if stage > 0 else STAGES - 1", "previous = stage")],
        4,
        "deadlock",
        "mbarrier_wait(empty0",
        r"mbarrier barriers\[2\] .*waited for with parity 0: phase 0 of it lacks 2 of 2 arrivals",
    ),
    "more arrivals than the count": (
        [
            (
                "mbarrier_arrive(empty0 + u32(8) * u32(previous))",
                "mbarrier_arrive_count(empty0 + u32(8) * u32(previous), u32(3))",
            ),
            ("    mbarrier_arrive,\n", "    mbarrier_arrive,\n    mbarrier_arrive_count,\n"),
        ],
        2,
        "mbarrier",
        "mbarrier_arrive_count(empty0",
        r"more often than the 2 times of its count",
    ),
    "no fence after the initialisation": (
        [("            fence_barrier_init()\n", "")],
        1,
        "proxy",
        "tma_load_2d(a, map_a",
        r"the TMA load completes on mbarrier barriers\[0\] .*there is no fence_barrier_init\(\)",
    ),
    "no barrier after the initialisation": (
        [("        cuda.syncthreads()\n", "")],
        1,
        "mbarrier",
        "mbarrier_wait(full0, u32(0))",
        r"waits at mbarrier .*which thread \(0, 0, 0\) initialises with no barrier between",
    ),
    "initialised twice": (
        [
            (
                "mbarrier_init(empty0 + u32(8 * s), u32(2))",
                "mbarrier_init(full0 + u32(8 * s), u32(2))",
            )
        ],
        1,
        "mbarrier",
        "mbarrier_init(full0 + u32(8 * s), u32(2))",
        r"initialises mbarrier .* again, with no mbarrier_inval "
        r"between",
    ),
    "never initialised": (
        [("                mbarrier_init(empty0 + u32(8 * s), u32(2))\n", "")],
        1,
        "mbarrier",
        "mbarrier_wait(empty0",
        r"waits at the mbarrier barriers\[2\], which is not initialised",
    ),
    "wgmma by three warps": (
        [
            (
                "            wgmma(acc, da + u64(6), db + u64(6), i32(1))\n            wgmma_commit()\n"
                "            stage",
                "            if tid % 128 < 96:\n                wgmma(acc, da + u64(6), db + u64(6), i32(1))  # "
                "three warps\n            wgmma_commit()\n            stage",
            )
        ],
        1,
        "deadlock",
        "wgmma_wait_all(acc)",
        "a wgmma that 96 of its 128 threads have given",
    ),
    "warps that disagree": (
        [
            (
                "            da, db = smem_descriptor(base + row_bytes), smem_descriptor(base + u32(A_BYTES))",
                "            da, db = smem_descriptor(base + u32(tid // 32 * 2048)), smem_descriptor(base + "
                "u32(A_BYTES))",
            )
        ],
        1,
        "wgmma",
        "wgmma(acc, da, db, i32(0))",
        "of a warpgroup give this wgmma with different descriptors or sizes",
    ),
    "two warpgroups write one tile": (
        [
            (
                "            row = m0 + (warpgroup - 1) * 64 + warp * 16 + lane // 4",
                "            row = m0 + warp * 16 + lane // 4",
            )
        ],
        1,
        "race",
        "] = types.float16(acc[4 * j])",
        r"writes c\[\d+, \d+\], which thread .* has written with no "
        r"barrier between",
    ),
    "too many registers": (
        [
            ("setmaxnreg_inc_232()", "setmaxnreg_inc_240()"),
            ("    setmaxnreg_inc_232,\n", "    setmaxnreg_inc_240,\n"),
        ],
        1,
        "error",
        "setmaxnreg_inc_240()",
        "the warpgroups of the block want .* registers together",
    ),
    "registers given up to take more": (
        [
            ("setmaxnreg_inc_232()", "setmaxnreg_dec_232()"),
            ("    setmaxnreg_inc_232,\n", "    make_setmaxnreg,\n"),
            (
                "BM, BK, THREADS = ",
                "setmaxnreg_dec_232 = make_setmaxnreg(232, False)\nBM, BK, THREADS = ",
            ),
        ],
        1,
        "error",
        "            setmaxnreg_dec_232()",
        "setmaxnreg.dec to 232 registers in a warpgroup that has 168",
    ),
    "setmaxnreg by one thread": (
        [
            (
                "            setmaxnreg_dec_40()\n            if tid == 0:\n",
                "            if tid == 0:\n                setmaxnreg_dec_40()\n",
            )
        ],
        1,
        "divergence",
        "    setmaxnreg_dec_40()",
        "setmaxnreg is executed by 1 of the 128 threads of a warpgroup",
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        *list(GEMM_FAULTS)[::5],
        *exhaustively(*(name for k, name in enumerate(GEMM_FAULTS) if k % 5)),
    ],
)
def test_a_fault_planted_in_the_gemm_is_found(tmp_path, name):
    changes, tiles, kind, mark, message = GEMM_FAULTS[name]
    changes = list(changes)
    if mark.endswith("# loop"):
        assert (
            inspect.getsource(hopper_gemm).count("                wgmma(acc, da, db, i32(1))\n")
            == 1
        )
        touched = [k for k, (before, _) in enumerate(changes) if before == LOOP_FENCE]
        if touched:
            changes[touched[0]] = (LOOP_FENCE, changes[touched[0]][1] + "  # loop")
        else:
            changes.append((LOOP_FENCE, LOOP_FENCE + "  # loop"))
    copy, path = changed_copy(tmp_path, hopper_gemm, changes)
    with pytest.raises(KernelFault) as caught:
        run_gemm(copy.make_gemm, 128, 8, 64 * tiles, 8, 2)
    fault = fault_at(caught.value.faults, kind, path, line_with(path, mark))
    assert re.search(message, fault.message), fault
    assert "\n" not in fault.message and not fault.message.endswith(".")


def run_double_rows(module):
    x, y = np.ones((5, 32), np.float32), np.zeros((5, 32), np.float32)
    launch(module.double_rows, 32, tensor_map(x, (32, 1), 0), tensor_map(y, (32, 1), 0), 5)


def run_through_global(module):
    x, y = np.zeros(64, np.float32)[:32], np.zeros(32, np.float32)
    launch(module.through_global, 32, x, tensor_map(x, (32,), 0), y)


def run_relay(module):
    launch(module.relay, 128, np.arange(64, dtype=np.int32), np.zeros(64, np.int32))


def run_phases(module):
    launch(module.phases, 1, tensor_map(np.ones(16, np.uint32), (16,), 0), np.zeros(12, np.int32))


def run_product(module):
    a, b, *arguments = inputs.product_case(np.random.default_rng(0), 8, 32)
    launch(
        module.make_product(8),
        128,
        *arguments,
        0,
        np.zeros((128, 4), np.float32),
        shared=arguments[0].nbytes,
    )


def run_groups(module):
    a, b, image, descriptors, _ = inputs.product_case(np.random.default_rng(0), 8, 32)
    launch(
        module.groups, 128, image, descriptors, np.zeros((128, 8), np.float32), shared=image.nbytes
    )


def run_copy(module, swizzle=0):
    x = np.ones((8, 64), np.float16)
    kernel, at = module.make_copy(2, 1024), np.zeros(10, np.int32)
    launch(
        kernel,
        32,
        tensor_map(x, (64, 8), 128),
        tensor_map(x.copy(), (64, 8), 128),
        at,
        np.zeros(256, np.uint32),
        shared=1024,
    )


LINE_FENCE = "        fence_proxy_async()\n        cuda.syncthreads()\n        start"
# name: (how it is run, changes of units.py, kind, mark of the line, what the message says)
UNIT_FAULTS = {
    "tile loaded again while it is stored": (
        run_double_rows,
        [("            tma_store_wait_read_1()  #", "            pass  #")],
        "asynchronous",
        "tma_load_2d(base + u32(128 * tile)",
        r"the TMA load writes tiles\[0, 0\], which the TMA store still reads: wait for it with "
        r"tma_store_wait_read_0\(\) first",
    ),
    "tile written again while it is stored": (
        run_double_rows,
        [
            (
                "            tma_store_commit()\n    if t == 0:",
                "            tma_store_commit()\n        "
                "tiles[tile, t] "
                "= types.float32(0)  # early\n    if t == 0:",
            )
        ],
        "asynchronous",
        "# early",
        r"writes tiles\[0, \d+\], which the TMA store still reads: wait for it with tma_store_wait_read_0\(\) first",
    ),
    "stores not committed": (
        run_double_rows,
        [("            tma_store_commit()\n    if t == 0:", "    if t == 0:")],
        "asynchronous",
        "tma_load_2d(base + u32(128 * tile)",
        "the TMA load writes .*, which the TMA store still reads",
    ),
    "last store not waited for": (
        run_double_rows,
        [("    if t == 0:\n        tma_store_wait_read_0()\n", "")],
        "asynchronous",
        "tma_store_2d(base +",
        "the thread ends while this TMA store still reads shared memory",
    ),
    "stored with no fence": (
        run_double_rows,
        [("        fence_proxy_async()\n        cuda.syncwarp()\n", "        cuda.syncwarp()\n")],
        "proxy",
        "tma_store_2d(base +",
        r"which thread \(\d+, 0, 0\) has stored with no fence_proxy_async\(\) after it",
    ),
    "stored before all lanes are ready": (
        run_double_rows,
        [
            (
                "        fence_proxy_async()\n        cuda.syncwarp()\n",
                "        fence_proxy_async()\n",
            )
        ],
        "asynchronous",
        "tiles[tile, t] = tiles",
        r"writes tiles\[0, 1\], which the TMA store still reads",
    ),
    "phase that ended before": (
        run_double_rows,
        [("mbarrier_wait(full, u32(row % 2))", "mbarrier_wait(full, u32(1 - row % 2))")],
        "asynchronous",
        "tiles[tile, t] = tiles",
        r"reads tiles\[0, 0\], which the TMA load still writes: wait for phase 0 of barrier\[0\] first",
    ),
    "parity that is no parity": (
        run_double_rows,
        [("mbarrier_wait(full, u32(row % 2))", "mbarrier_wait(full, u32(row))")],
        "mbarrier",
        "mbarrier_wait(full, u32(row))",
        "for the parity 2: it must be 0 or 1",
    ),
    "global memory loaded with no fence": (
        run_through_global,
        [("    fence_proxy_async_global()\n    cuda", "    cuda")],
        "proxy",
        "tma_load_1d(smem_u32(tile), map_x, full",
        r"reads x\[0\], which thread \(0, 0, 0\) has stored with no fence_proxy_async_global\(\) after it",
    ),
    "tile loaded again while it is read": (
        run_through_global,
        [
            (
                "    if t == 0:\n        mbarrier_expect_tx",
                "    tile[t] = types.float32(0)\n"
                "    fence_proxy_async()\n    cuda.syncthreads()\n    y[t] = tile[31 - t]\n"
                "    if t == 31:\n        mbarrier_expect_tx",
            )
        ],
        "race",
        "tma_load_1d(smem_u32(tile), map_x, full",
        r"writes by the TMA load tile\[\d+\], which thread .* has read with no barrier between",
    ),
    "global memory loaded with no barrier": (
        run_through_global,
        [
            (
                "    fence_proxy_async_global()\n    cuda.syncthreads()",
                "    fence_proxy_async_global()",
            )
        ],
        "asynchronous",
        "x[t] = types.float32(t)",
        r"writes x\[1\], which the TMA load still reads",
    ),
    "map in the wrong number of dimensions": (
        run_through_global,
        [
            (
                "tma_load_1d(smem_u32(tile), map_x, full, 0)",
                "tma_load_2d(smem_u32(tile), map_x, full, 0, 0)",
            )
        ],
        "descriptor",
        "tma_load_2d(smem_u32(tile), map_x, full",
        "with 2 coordinates of a tensor map of 1 dimension",
    ),
    "no tensor map": (
        run_through_global,
        [
            (
                "tma_load_1d(smem_u32(tile), map_x, full, 0)",
                "tma_load_1d(smem_u32(tile), x, full, 0)",
            )
        ],
        "descriptor",
        "tma_load_1d(smem_u32(tile), x, full",
        "is not the 128 bytes of a tensor map",
    ),
    "no wait for a load": (
        run_through_global,
        [("    mbarrier_wait(full, u32(0))\n    y[t] = tile[31 - t]", "")],
        "asynchronous",
        "tma_load_1d(smem_u32(tile), map_x, full",
        "the block ends while this TMA load is in flight: no thread waits for",
    ),
    "barrier that others do not come to": (
        run_relay,
        [("        bar_sync(u32(2), u32(128))  #", "        bar_sync(u32(4), u32(128))  #")],
        "deadlock",
        "bar_sync(u32(4), u32(128))",
        "barrier 4, to which 64 of 128 threads have come",
    ),
    "barrier for too many": (
        run_relay,
        [("bar_sync(u32(3), u32(64))", "bar_sync(u32(3), u32(96))")],
        "deadlock",
        "bar_sync(u32(2), u32(128))",
        "barrier 2, to which 64 of 128 threads have come",
    ),
    "barrier for part of a warp": (
        run_relay,
        [("bar_sync(u32(3), u32(64))", "bar_sync(u32(3), u32(65))")],
        "error",
        "bar_sync(u32(3), u32(65))",
        "barrier 3 for 65 threads: it must be a multiple of 32",
    ),
    "no barrier before the answer": (
        run_relay,
        [("        bar_sync(u32(3), u32(64))  #", "        pass  #")],
        "race",
        "tile[t - 64] = i32(2) * value",
        r"writes tile\[\d+\], which thread .* has read with no barrier between",
    ),
    "read before it was handed over": (
        run_relay,
        [("        bar_sync(u32(1), u32(128))\n", "")],
        "race",
        "value = tile[127 - t]",
        r"reads "
        r"tile\[\d+\], "
        r"which",
    ),
    "initialised again without inval": (
        run_phases,
        [("    mbarrier_inval(b)\n    mb", "    mb")],
        "mbarrier",
        "mbarrier_init(b, u32(1))  # as fresh",
        "again, with no mbarrier_inval between",
    ),
    "used after inval": (
        run_phases,
        [
            (
                "    mbarrier_inval(b)\n    mbarrier_init(b, u32(1))",
                "    mbarrier_inval(b)\n    pass",
            )
        ],
        "mbarrier",
        "log[10] =",
        r"waits at the mbarrier barrier\[0\], which is not initialised",
    ),
    "matrix stored with no fence": (
        run_product,
        [(LINE_FENCE, LINE_FENCE.replace("fence_proxy_async()", "pass"))],
        "proxy",
        "            wgmma(acc, da, db, i32(0))",
        r"the wgmma reads tile\[\d+\], which thread .* with no "
        r"fence_proxy_async\(\)",
    ),
    "matrix stored with no barrier": (
        run_product,
        [(LINE_FENCE, LINE_FENCE.replace("cuda.syncthreads()", "pass"))],
        "race",
        "            wgmma(acc, da, db, i32(0))",
        r"reads by the wgmma tile\[\d+\], which thread .* has written",
    ),
    "matrix outside of shared memory": (
        run_product,
        [
            (
                "da, db = descriptors[0] + start, descriptors[1] + start\n        acc",
                "da, db = descriptors[0] + start, descriptors[1] + start + u64(128)\n        acc",
            )
        ],
        "bounds",
        "            wgmma(acc, da, db, i32(0))",
        "matrix B of the wgmma, from the shared address 0x[0-9a-f]+ on, is not in the block's shared memory",
    ),
    "accumulators of the younger group read": (
        run_groups,
        [("        out[t, i] = first[i]", "        out[t, i] = second[i]")],
        "wgmma",
        "out[t, i] = second[i]",
        r"which the wgmma still writes: commit its group and wait for it with wgmma_wait first",
    ),
    "too few waited for": (
        run_groups,
        [("    wait_0_of_8(second)", "    wait_1_of_8(second)")],
        "wgmma",
        "out[t, 4 + i] = second[i]",
        "which the wgmma still writes",
    ),
    "accumulators written while in use": (
        run_groups,
        [("    wait_1_of_8(first)", "    second[0] = types.float32(0)\n    wait_1_of_8(first)")],
        "wgmma",
        "second[0] = types.float32(0)",
        "writes .*, which the wgmma still writes",
    ),
    "accumulators never written": (
        run_groups,
        [("    wgmma_8(first, da, db, i32(0))", "    wgmma_8(first, da, db, i32(1))")],
        "uninitialised",
        "wgmma_8(first, da, db, i32(1))",
        "the wgmma adds to array, parts of which this thread has never written",
    ),
    "load from the middle of 16 bytes": (
        run_copy,
        [("map_in, full, at[0], at[1])", "map_in, full, 4, 0)")],
        "alignment",
        "tma_load_2d(base, map_in",
        "the TMA load begins at element 4 of the innermost dimension, byte 8 of a row",
    ),
    "store to the middle of 16 bytes": (
        run_copy,
        [("map_out, at[5], at[6])", "map_out, 1, 0)")],
        "alignment",
        "tma_store_2d(base, map_out",
        "the TMA store begins at element 1 of the innermost dimension, byte 2 of a row",
    ),
    "store that begins before the tensor": (
        run_copy,
        [("map_out, at[5], at[6])", "map_out, 0, -1)")],
        "bounds",
        "tma_store_2d(base, map_out",
        r"the TMA store begins before the tensor, at \[0, -1\]",
    ),
    "store of an unwritten tile": (
        run_copy,
        [
            (
                "                tma_load_2d(base, map_in, full, at[0], at[1])",
                "                mbarrier_arrive(full)",
            ),
            ("            mbarrier_expect_tx(full, u32(nbytes))\n", ""),
            ("            tile[i] = u32(0)  #", "            pass  #"),
            ("            raw[i] = tile[i]", "            raw[i] = u32(0)"),
        ],
        "uninitialised",
        "tma_store_2d(base, map_out",
        r"the TMA store reads tile\[0\], which was never written",
    ),
}


@pytest.mark.parametrize("name", UNIT_FAULTS)
def test_a_fault_planted_in_a_small_kernel_is_found(tmp_path, name):
    run, changes, kind, mark, message = UNIT_FAULTS[name]
    copy, path = changed_copy(tmp_path, units, changes)
    with pytest.raises(KernelFault) as caught:
        run(copy)
    fault = fault_at(caught.value.faults, kind, path, line_with(path, mark))
    assert re.search(message, fault.message), fault


# Compiled -----------------------------------------------------------------------------------------

HOPPER = 9, 0, "a"


@exhaustive
@pytest.mark.parametrize("columns", [64, 128, 256])
@needs("ptxas")
def test_the_gemm_compiles_without_advice_from_ptxas(columns):
    kernel = cuda.jit(launch_bounds=(hopper_gemm.THREADS, 1))(hopper_gemm.make_gemm(columns, 4)[0])
    text = compile_to_ptx(kernel, hopper_gemm.SIGNATURE, HOPPER)
    assert (
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16" in text and ".f64" not in text
    )
    assert ".minnctapersm 1" in text  # without it ptxas ignores setmaxnreg
    assert assemble(text, HOPPER) == (168, [])


def unit_kernels():
    from numba import types

    maps, ints, words, floats = (
        types.uint8[::1],
        types.int32[::1],
        types.uint32[::1],
        types.float32[:, ::1],
    )
    product = (words, types.uint64[::1], types.uint32[:, ::1], types.int32, floats)
    return {
        **{
            f"copy {rank}d": (units.make_copy(rank, 128), (maps, maps, ints, words))
            for rank in (1, 5)
        },
        "product": (units.make_product(64, True, True), product),
        "product from registers": (units.make_product(64, False, True, True), product),
        "groups": (units.groups, (words, types.uint64[::1], floats)),
        "phases": (units.phases, (maps, ints)),
        "relay": (units.relay, (ints, ints)),
        "double_rows": (units.double_rows, (maps, maps, types.int32)),
        "through_global": (units.through_global, (types.float32[::1], maps, types.float32[::1])),
    }


@exhaustive
@needs("ptxas")
def test_every_intrinsic_assembles():
    for name, (kernel, signature) in unit_kernels().items():
        _, wrong = assemble(compile_to_ptx(kernel, signature, HOPPER), HOPPER)
        if name == "groups":  # where ptxas waits for both groups at once
            assert len(wrong) == 1 and "(C7517)" in wrong[0], wrong
        else:
            assert wrong == [], (name, wrong)
