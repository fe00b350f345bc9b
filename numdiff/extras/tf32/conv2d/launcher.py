"""Convolution of float32 by tf32: when it runs, in which tiles and parts.

SHAPES
    as in kernels/conv2d/direct.py; all float32, C and N multiples of 4
VERSIONS
    number 4 of kernels/conv2d/launcher.py in float32, which runs where the device's switch `tf32`
    is on.
ACCURACY
    as ../matmul.py: about 3e-4 in the 2-norm; the tests hold it below 5e-4.
DETERMINISM
    a fixed order of k for each output; parts are added in order by a second kernel.
COST
    FLOPs as in kernels/conv2d/direct.py. A step of 16 channels brings 16 KiB for 2 · 128 · 128 · 16
    FLOPs, 32 a byte of the L2 cache, or 20 KiB for as many, 26.
SOURCE
    forward.py, weight_gradient.py.
READ NEXT
    kernels/conv2d/narrow_half/, for layers too narrow for any of this.
"""

import functools
import itertools

import numpy as np

from ....device import empty, launch
from ....device.batch_invariance import nominal_extent
from ....device.limits import multiprocessors_of
from ....device.requires import supports
from ....device.specialise import Variants, specialise
from ....kernels.conv2d.direct import Added, Addends, Geometry
from ....kernels.conv2d.narrow import NARROW
from ....kernels.conv2d.problems import FORWARD as FORWARD_PASS
from ....kernels.conv2d.problems import measured, problem_of
from ....kernels.conv2d.tiles import add_parts
from ....kernels.operation import replaced, single
from ..matmul import BK, NS_PER_BYTE, ROW, SECOND_PASS, STAGES, START, THREADS, switched_on
from .forward import BLOCK, add_parts_and_more_kernel, conv2d_tf32
from .weight_gradient import conv2d_tf32_weight_gradient

LARGEST_KERNEL = 5  # the taps of a window that are inside the image are kept as bits of one number
# a tile -> the tile of each of its four warps, ns of an H100's multiprocessor for a step, and for
# the epilogue
TILES = {
    (128, 128): ((64, 64), 325.0, 1200.0),
    (256, 64): ((64, 64), 340.0, 1200.0),
    (64, 64): ((32, 32), 140.0, 300.0),
}
# channels of dy × columns of col
GRADIENT_TILES = {
    (128, 128): ((64, 64), 325.0, 1200.0),
    (64, 256): ((64, 64), 340.0, 1200.0),
    (64, 128): ((64, 32), 215.0, 600.0),
}
SHORTEST_PART = 8  # steps: below this a part only fills and empties its pipeline


# The kernels --------------------------------------------------------------------------------------


def make_forward(tile, gradient):
    """The kernel for a tile; gradient: of the input."""
    (warp_m, warp_n), *_ = TILES[tile]
    name = f"conv2d_tf32_{'input_gradient' if gradient else 'forward'}_{tile[0]}x{tile[1]}"
    return specialise(
        conv2d_tf32,
        name=name,
        launch_bounds=(THREADS, 2),
        TILE_M=tile[0],
        TILE_N=tile[1],
        WARP_M=warp_m,
        WARP_N=warp_n,
        A_ACROSS=False,
        B_ACROSS=gradient,
        GRADIENT=gradient,
    )


def make_weight_gradient(tile):
    """The kernel for a tile: channels of dy × columns of col."""
    (warp_m, warp_n), *_ = GRADIENT_TILES[tile]
    return specialise(
        conv2d_tf32_weight_gradient,
        name=f"conv2d_tf32_weight_gradient_{tile[0]}x{tile[1]}",
        launch_bounds=(THREADS, 2),
        TILE_M=tile[0],
        TILE_N=tile[1],
        WARP_M=warp_m,
        WARP_N=warp_n,
        A_ACROSS=True,
        B_ACROSS=True,
    )


FORWARD = Variants(itertools.product(TILES, (False, True)), lambda key: make_forward(*key))
WEIGHT_GRADIENT = Variants(GRADIENT_TILES, make_weight_gradient)


# Launchers ----------------------------------------------------------------------------------------


def takes(x, weight):
    """Whether this rung takes these operands: channels in fours, and small kernels."""
    n, size, _, c = weight.shape
    return (
        supports(x, FORWARD)
        and n % 4 == c % 4 == 0
        and size <= LARGEST_KERNEL
        and x.offset % 16 == weight.offset % 16 == 0
    )


def pays(x, weight):
    """Whether it runs where no version is named: the device's switch is on, and no side is narrow."""
    return min(weight.shape[0], weight.shape[3]) > NARROW and switched_on(x.backend)


@functools.lru_cache(maxsize=4096)
def choose(rows, columns, steps, size, multiprocessors, gradient):
    """(tile, parts, steps a part) with the lowest estimate, in ns: rows × columns of results,
    `size` of them."""
    best = None
    for tile, (_, step, epilogue) in (GRADIENT_TILES if gradient else TILES).items():
        blocks = -(-rows // tile[0]) * -(-columns // tile[1])
        tried = {1} | {
            max(1, min(turns * multiprocessors // blocks, steps // SHORTEST_PART))
            for turns in (1, 2, 3, 4)
        }
        for parts in sorted(tried):
            part_steps = -(-steps // parts)
            parts = -(-steps // part_steps)
            if not gradient and parts * size >= 2**31:
                continue
            estimate = START + -(-blocks * parts // multiprocessors) * (
                part_steps * step + epilogue
            )
            if parts > 1 or gradient:
                estimate += SECOND_PASS + NS_PER_BYTE * 8 * parts * size
            if best is None or estimate < best[0]:
                best = estimate, tile, parts, part_steps
    return best[1:]


def shared_bytes(tile):
    return STAGES * (tile[0] + tile[1]) * ROW


def forward(x, weight, bias, y, stride, channel=None, residual=None, gradient=False):
    """y = conv2d(x, weight) + …, for arrays that launcher.py has checked.

    gradient: x is dy, y is dx, of a convolution with stride 1
    """
    _, h, w, c = x.shape
    b, ho, wo, n = y.shape
    size, pixels = weight.shape[1], b * ho * wo
    steps = size * size * -(-c // BK)
    tile, parts, part_steps = choose(
        nominal_extent(pixels), n, steps, nominal_extent(y.size), multiprocessors_of(x), False
    )
    flat = x.reshape(-1)
    biases, channels = (
        flat if bias is None else bias,
        flat if channel is None else channel.reshape(-1),
    )
    residuals = flat if residual is None else residual.reshape(-1)
    addends = Addends(biases, channels, residuals)
    added = Added(int(bias is not None), int(channel is not None), int(residual is not None))
    whole = parts == 1
    out = y.reshape(-1) if whole else empty((parts * y.size,), np.float32, like=y)
    launch(
        FORWARD[tile, gradient],
        (-(-pixels // tile[0]), -(-n // tile[1]), parts),
        THREADS,
        flat,
        weight.reshape(-1),
        addends,
        out,
        Geometry(h, w, c, ho, wo, n, size, stride),
        pixels,
        part_steps,
        added if whole else Added(0, 0, 0),
        shared=shared_bytes(tile),
    )
    if not whole:
        launch(
            add_parts_and_more_kernel,
            -(-y.size // (4 * BLOCK)),
            BLOCK,
            out,
            addends,
            y.reshape(-1),
            parts,
            pixels,
            n,
            ho * wo,
            added,
        )
    return y


def input_gradient(dy, weight, dx):
    """dx of a convolution with stride 1."""
    return forward(dy, weight, None, dx, 1, gradient=True)


def weight_gradient(dy, x, dweight, stride, accumulate=True):
    """dweight += …, or = …"""
    _, h, w, c = x.shape
    b, ho, wo, n = dy.shape
    size, pixels = dweight.shape[1], b * ho * wo
    columns = size * size * c
    tile, parts, part_steps = choose(
        n, columns, -(-pixels // BK), dweight.size, multiprocessors_of(x), True
    )
    partial = empty((parts, dweight.size), np.float32, like=dy)
    launch(
        WEIGHT_GRADIENT[tile],
        (-(-columns // tile[1]), -(-n // tile[0]), parts),
        THREADS,
        dy.reshape(-1),
        x.reshape(-1),
        partial.reshape(-1),
        Geometry(h, w, c, ho, wo, n, size, stride),
        pixels,
        part_steps * BK,
        shared=shared_bytes(tile),
    )
    add_parts(partial, dweight, accumulate=accumulate)


# Problems -----------------------------------------------------------------------------------------

TOLERANCE = 5e-4  # operands are rounded to 10 mantissa bits


def problems(of):
    """[Problem] of a pass (kernels/conv2d/problems.py): each tile; a convolution in parts; a
    UNet's."""
    found = []
    for tile, gradient_tile in zip(TILES, GRADIENT_TILES, strict=True):
        small = tile == (64, 64)
        parts, kernel, stride = (
            (2, 3, 2) if small and of == FORWARD_PASS else (1, 3 if small else 1, 1)
        )

        def choice(
            rows,
            columns,
            steps,
            size,
            multiprocessors,
            gradient,
            tile=tile,
            other=gradient_tile,
            parts=parts,
        ):
            return (other if gradient else tile), parts, -(-steps // parts)

        found.append(
            problem_of(
                of,
                f"tf32, tile {tile}{', in parts' * (parts > 1)}",
                (1, 2, 3, 4),
                8,
                kernel,
                "tf32",
                stride=stride,
                addends=of == FORWARD_PASS,
                tolerance=TOLERANCE,
                fast=small if of == FORWARD_PASS else tile == (128, 128),
                within=functools.partial(replaced, __name__, choose=choice),
            )
        )
    # steps that pass from image to image, tiles of pixels and of channels, strides
    for label, x, n, kernel, stride in (
        ("several images", (3, 5, 4, 12), 8, 3, 2),
        ("several tiles", (3, 7, 4, 20), 68, 1, 1),
        ("stride 2", (2, 9, 8, 24), 40, 1, 2),
        ("5×5", (1, 4, 5, 4), 8, 5, 1),
    ):
        if stride == 1 or of != "input_gradient":
            found.append(
                problem_of(
                    of,
                    f"tf32, {label}",
                    x,
                    n,
                    kernel,
                    "tf32",
                    stride=stride,
                    addends=of == FORWARD_PASS,
                    tolerance=TOLERANCE,
                    fast=kernel == 3,
                    within=functools.partial(
                        replaced,
                        __name__,
                        choose=lambda r, c, steps, s, m, gradient: (
                            (64, 128) if gradient else (64, 64),
                            1,
                            steps,
                        ),
                    ),
                )
            )
    if of != "input_gradient":
        found.append(measured(of, (32, 64, 64, 64), 64, "tf32", array=single, precision="tf32"))
    return found
