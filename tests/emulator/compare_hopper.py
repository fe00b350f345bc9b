"""Runs the kernels of probes/ on a GPU (sm_90) and in the emulator, and prints for each how far the
results differ.

    python -m tests.emulator.compare_hopper [PART OF A NAME …]

Copies, barriers and products of small integers must agree in every bit. The GEMM need not: the
hardware cuts off bits of sums that the emulator keeps. Exit code 1 if
something differs by more than it may. Without a GPU the emulator with its checks is compared with
the emulator without.
"""

import dataclasses
import sys

import numpy as np

from numdiff.device import cuda, download, get_backend, launch, synchronize, upload, why_no_gpu
from numdiff.device.emulator import EmulatorDevice
from numdiff.device.tensor_map import tensor_map
from numdiff.errors import NumdiffError
from tests.emulator.probes import hopper_gemm, inputs, units

TOLERANCE = 2e-3  # of float16 results, relative to the largest


@dataclasses.dataclass
class ComparedKernel:
    """One launch. maps: [(index of the array, box, swizzle)]; results: indices of the arrays to
    compare, by dtype.

    order: what the kernel takes, "m0" for a map, "a0" for an array, anything else as it is
    """

    name: str
    kernel: object
    arrays: list
    maps: list
    order: list
    results: list
    grid: int = 1
    block: int = 32
    shared: int = 0
    exact: bool = True

    def run(self, backend):
        arrays = [upload(a, backend) for a in self.arrays]
        maps = [tensor_map(arrays[k], box, swizzle) for k, box, swizzle in self.maps]
        arguments = [
            {"m": maps, "a": arrays}[o[0]][int(o[1:])] if isinstance(o, str) else o
            for o in self.order
        ]
        launch(self.kernel, self.grid, self.block, *arguments, shared=self.shared)
        synchronize(backend)
        return [download(arrays[k]).view(dtype) for k, dtype in self.results]


def cases():
    rng = np.random.default_rng(0)
    for name in inputs.COPIES:
        x, y, box, swizzle, at, raw, _ = inputs.copy_case(name)
        yield ComparedKernel(
            f"copy {name}",
            units.make_copy(x.ndim, x.itemsize * int(np.prod(box))),
            [x, y, at, np.zeros(len(raw) // 4, np.uint32)],
            [(0, box, swizzle), (1, box, swizzle)],
            ["m0", "m1", "a2", "a3"],
            [(1, x.dtype), (3, np.uint32)],
            shared=len(raw),
        )
    ones = np.arange(1, 17, dtype=np.uint32)
    yield ComparedKernel(
        "phases of an mbarrier",
        units.phases,
        [ones, np.full(12, -1, np.int32)],
        [(0, (16,), 0)],
        ["m0", "a1"],
        [(1, np.int32)],
        block=1,
    )
    yield ComparedKernel(
        "named barriers",
        units.relay,
        [np.arange(64, dtype=np.int32), np.zeros(64, np.int32)],
        [],
        ["a0", "a1"],
        [(1, np.int32)],
        block=128,
    )
    rows = rng.standard_normal((7, 32)).astype(np.float32)
    yield ComparedKernel(
        "alternating loads and stores",
        units.double_rows,
        [rows, np.zeros_like(rows)],
        [(0, (32, 1), 0), (1, (32, 1), 0)],
        ["m0", "m1", 7],
        [(1, np.uint32)],
    )
    yield ComparedKernel(
        "through global memory",
        units.through_global,
        [np.zeros(32, np.float32), np.zeros(32, np.float32)],
        [(0, (32,), 0)],
        ["a0", "m0", "a1"],
        [(1, np.uint32)],
    )
    for swizzle in inputs.DESCRIPTOR_MODE:
        for layout in range(8):
            a_mn, b_mn, far = bool(layout & 1), bool(layout & 2), bool(layout & 4)
            yield product(rng, 64, swizzle, a_mn, b_mn, far)
    for swizzle, first_k in ((64, 16), (128, 16), (128, 48)):
        yield product(rng, 32, swizzle, first_k=first_k)
    for n in (8, 24, 176, 256):
        yield product(rng, n, 32)
    for b_mn in (False, True):
        yield product(rng, 48, 32, b_mn=b_mn, registers=True)
    for n, swizzle, first_k in ((8, 0, 0), (64, 32, 0), (128, 128, 0), (256, 128, 96)):
        given, out = (
            inputs.product_case_e4m3(rng, n, swizzle, first_k)[2:],
            np.zeros((128, n // 2), np.float32),
        )
        yield ComparedKernel(
            f"product of {n} columns of E4M3, swizzle {swizzle}, from k = {first_k}",
            units.make_product(n, kind="e4m3"),
            [*given, out],
            [],
            ["a0", "a1", "a2", 1, "a3"],
            [(3, np.float32)],
            block=128,
            shared=given[0].nbytes,
        )
    _, _, image, descriptors, _ = inputs.product_case(rng, 8, 32)
    yield ComparedKernel(
        "two groups",
        units.groups,
        [image, descriptors, np.zeros((128, 8), np.float32)],
        [],
        ["a0", "a1", "a2"],
        [(2, np.uint32)],
        block=128,
        shared=image.nbytes,
    )
    tile = hopper_gemm.BK, hopper_gemm.BM
    for n in (64, 128, 256):
        kernel, shared = hopper_gemm.make_gemm(n, 4)
        yield ComparedKernel(
            f"GEMM of the first experiment, {n} columns",
            jit(kernel),
            inputs.gemm_arrays(256, n, 256),
            [(0, tile, 128), (1, (hopper_gemm.BK, n), 128)],
            ["m0", "m1", "a2", 256],
            [(2, np.float16)],
            2,
            hopper_gemm.THREADS,
            shared,
            exact=False,
        )


def jit(kernel):
    return cuda.jit(launch_bounds=(hopper_gemm.THREADS, 1))(kernel)


def product(rng, n, swizzle, a_mn=False, b_mn=False, far=False, first_k=0, registers=False):
    _, _, image, descriptors, fragments = inputs.product_case(
        rng, n, swizzle, a_mn, b_mn, far, first_k
    )
    name = (
        f"product of {n} columns, swizzle {swizzle}{', A M-major' * a_mn}{', B N-major' * b_mn}{', far' * far}"
        f"{f', from k = {first_k}' if first_k else ''}{', A from registers' * registers}"
    )
    return ComparedKernel(
        name,
        units.make_product(n, a_mn, b_mn, registers),
        [image, descriptors, fragments, np.zeros((128, n // 2), np.float32)],
        [],
        ["a0", "a1", "a2", 1, "a3"],
        [(3, np.float32)],
        block=128,
        shared=image.nbytes,
    )


def main():
    reason = why_no_gpu()
    gpu = EmulatorDevice(checks=False) if reason else get_backend("cuda")
    print(
        f"no GPU ({reason}): the emulator against itself"
        if reason
        else f"{gpu.device_name} against the emulator"
    )
    emulated, bad = EmulatorDevice(float64=False), 0
    for case in cases():
        if len(sys.argv) > 1 and not any(part in case.name for part in sys.argv[1:]):
            continue
        difference, same = 0.0, True
        try:
            pairs = list(zip(case.run(gpu), case.run(emulated), strict=True))
        except NumdiffError as error:
            print(f"REFUSED    {case.name}: {error}", flush=True)
            bad += 1
            continue
        for got, want in pairs:
            same = same and np.array_equal(got.view(np.uint8), want.view(np.uint8))
            scale = np.abs(want.astype(np.float64)).max() or 1.0
            difference = max(
                difference,
                float(np.abs(got.astype(np.float64) - want.astype(np.float64)).max() / scale),
            )
        wrong = not same if case.exact else not difference <= TOLERANCE
        bad += wrong
        print(
            f"{'WRONG' if wrong else 'same bits' if same else 'close':9}  {difference:8.1e}  {case.name}",
            flush=True,
        )
    print(f"{bad} differ by more than they may")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
