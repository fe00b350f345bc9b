"""Draws the pictures of numdiff/emulator/README.md, from runs of the probes' kernels: python -m
tests.emulator.draw"""

import pathlib

import numpy as np

from numdiff import emulator
from numdiff.device.tensor_map import tensor_map
from numdiff.emulator import pictures
from tests.emulator.probes import hopper_conv, hopper_gemm

FOLDER = pathlib.Path(emulator.__file__).parent / "images"


def trace_gemm(n=64, k=192, stages=2):
    """One 128 × 64 tile of C, three tiles of k through two stages."""
    a, b = pictures.numbered((hopper_gemm.BM, k)), pictures.numbered((n, k))
    kernel, shared = hopper_gemm.make_gemm(n, stages)
    maps = [tensor_map(x, (hopper_gemm.BK, len(x))) for x in (a, b)]
    return emulator.trace(
        kernel, 1, hopper_gemm.THREADS, *maps, np.zeros((len(a), n), np.float16), k, shared=shared
    )


def trace_convolution(size=16, channels=64, stages=4):
    """A 3 × 3 convolution of one 16 × 16 image: the top half of it in one block, the bottom half in
    another."""
    x, weight = (
        pictures.numbered((1, size, size, channels)),
        pictures.numbered((channels, 9 * channels)),
    )
    kernel, shared = hopper_conv.make_conv3x3(channels, stages)
    maps = tensor_map(x, (channels, size, 8, 1)), tensor_map(weight, (channels, channels))
    y = np.zeros((size * size, channels // 2), np.uint32)
    return emulator.trace(
        kernel, (1, 2), hopper_gemm.THREADS, *maps, y, size, size, channels, shared=shared
    )


def small_png(picture, path):
    """A PNG of few colours: a tenth of the bytes."""
    picture.image(scale=1).quantize(32).save(path, optimize=True)


def main():
    FOLDER.mkdir(exist_ok=True)
    gemm = trace_gemm()
    small_png(pictures.swizzled_tile(gemm.copies[-1], rows=10), FOLDER / "tile.png")
    boxes = [c for c in trace_convolution().copies if c.tensor.rank == 4]
    small_png(pictures.tma_box([boxes[0], boxes[4], boxes[-1]]), FOLDER / "box.png")
    small_png(pictures.mma("m16n8k16", lane=5), FOLDER / "fragments.png")


if __name__ == "__main__":
    main()
