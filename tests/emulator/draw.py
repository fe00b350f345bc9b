"""Draws the pictures of numdiff/emulator/README.md, from runs of the probes' kernels: python -m
tests.emulator.draw"""

import math
import pathlib

import numpy as np

from numdiff import emulator
from numdiff.device.tensor_map import tensor_map
from numdiff.emulator import pictures
from tests.emulator.probes import hopper_gemm, units

FOLDER = pathlib.Path(emulator.__file__).parent / "images"


def trace_gemm(n=64, k=192, stages=2):
    """One 128 × 64 tile of C, three tiles of k through two stages."""
    a, b = pictures.numbered((hopper_gemm.BM, k)), pictures.numbered((n, k))
    kernel, shared = hopper_gemm.make_gemm(n, stages)
    maps = [tensor_map(x, (hopper_gemm.BK, len(x))) for x in (a, b)]
    return emulator.trace(
        kernel, 1, hopper_gemm.THREADS, *maps, np.zeros((len(a), n), np.float16), k, shared=shared
    )


def trace_boxes(size=16, channels=64):
    """The boxes of three taps of a 3 × 3 convolution: the first and the middle one for the top half
    of an image, the last one for its bottom half."""
    x, box = pictures.numbered((1, size, size, channels)), (channels, size, 8, 1)
    kernel, nbytes = units.make_copy(4, 2 * math.prod(box)), 2 * math.prod(box)
    with emulator.trace() as film:
        for corner in ((0, -1, -1, 0), (0, 0, 0, 0), (0, 1, 9, 0)):
            at = np.array([*corner, 0, *[0] * 5], np.int32)
            maps = tensor_map(x, box), tensor_map(np.zeros_like(x), box)
            kernel[1, 32, 0, nbytes](*maps, at, np.zeros(nbytes // 4, np.uint32))
    return film.copies[::2]  # without the stores


def small_png(picture, path):
    """A PNG of few colours: a tenth of the bytes."""
    picture.image(scale=1).quantize(32).save(path, optimize=True)


def main():
    FOLDER.mkdir(exist_ok=True)
    gemm = trace_gemm()
    small_png(pictures.swizzled_tile(gemm.copies[-1], rows=10), FOLDER / "tile.png")
    small_png(pictures.tma_box(trace_boxes()), FOLDER / "box.png")
    small_png(pictures.mma("m16n8k16", lane=5), FOLDER / "fragments.png")


if __name__ == "__main__":
    main()
