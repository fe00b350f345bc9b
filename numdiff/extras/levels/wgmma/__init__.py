"""The Hopper ladder: C = A·Bᵀ in float16 by wgmma, one change a level. Read them in this order,
after kernels/matmul/mma.py.

    one_tile.py             level 1  wgmma on one tile, loaded by threads
    double_buffer.py        level 2  TMA loads the tiles, one step ahead
    producer_consumer.py    level 3  warp specialisation: one warpgroup only loads, two only multiply
    persistent.py           level 4  one block for each multiprocessor, which goes from tile to tile
    tma_store.py            level 5  TMA stores the results

Each is a complete kernel for the simplest case: whole tiles, one layout, and an epilogue that only
rounds to float16. Code that a level writes out may be a function of device/ from the next level on:
level 1 a step's products, from the descriptors to the commit (`multiply`, device/wgmma.py), level 3
the ring of stages with its barriers (device/pipeline.py). So two files side by side show one
change: diff persistent.py tma_store.py. The models run kernels/matmul/hopper/, which handles every shape and
layout; here its ideas come one at a time.

VERSIONS
    v1 one-tile, v2 double-buffered, v3 warp-specialised, v4 persistent, v5 tma-store: the levels.
    On an H200 v5 reaches 699 TFLOP/s, 97 % of cuBLAS, and kernels/matmul/hopper/ 666, 100 % of cuBLAS: each was
    measured alternating with its own cuBLAS call, which reached 721 in the first run and 666 in the
    second. The card's clock may differ.
COST
    A and B read once and C written once, 2 · M · N · K FLOPs: arithmetic is the roof.
SOURCE
    the idea of a level a file: ThunderKittens' educational kernels; the instructions are the PTX
    ISA's.
"""

import numpy as np

from ....device import empty
from ....kernels.matmul.reference import matmul_forward_cost
from ....kernels.operation import Problem, Version, half, operation
from .double_buffer import launch_double_buffer
from .one_tile import launch_one_tile
from .persistent import launch_persistent
from .producer_consumer import launch_producer_consumer
from .tma_store import launch_tma_store

TILE = 128, 256, 64  # what M, N and K must be multiples of


def matmul_level_forward_reference(a, b):
    return (
        (a.astype(np.float32) @ b.astype(np.float32).T).astype(a.dtype)
        if a.dtype == np.float16
        else a @ b.T
    )


def matmul_level_forward_cost(M, N, K):
    """(bytes, FLOPs), in float16."""
    moved, flops = matmul_forward_cost(1, M, N, K)
    return moved // 2, flops


def _check(a, b):
    if tuple(b.shape) != (len(b), a.shape[1]) or a.dtype != b.dtype:
        raise ValueError(
            f"a {a.shape} of {a.dtype} needs b (N, {a.shape[1]}) of the same type, not {b.shape} of "
            f"{b.dtype}"
        )


def _lacks_whole_tiles(a, b):
    """None if the levels take these operands, else what they lack."""
    extents = len(a), len(b), a.shape[1]
    if any(n % tile for n, tile in zip(extents, TILE, strict=True)):
        return f"takes multiples of {TILE} as M, N and K, not {extents}"
    return None


def _level(name, launcher):
    return Version(
        name, requires="9.0a", dtypes=("float16",), fits=_lacks_whole_tiles, launcher=launcher
    )


@operation(
    reference=matmul_level_forward_reference,
    cost=matmul_level_forward_cost,
    check=_check,
    versions=[
        _level("one-tile", launch_one_tile),
        _level("double-buffered", launch_double_buffer),
        _level("warp-specialised", launch_producer_consumer),
        _level("persistent", launch_persistent),
        _level("tma-store", launch_tma_store),
    ],
    # one step; more steps than stages; two blocks with two tiles each, in groups of rows
    problems=[
        Problem("128 × 256 × 64", a=half(128, 64), b=half(256, 64), fast=False),
        Problem(
            "128 × 256 × 384",
            a=half(128, 384),
            b=half(256, 384),
            once=True,
            versions=("double-buffered", "warp-specialised", "persistent", "tma-store"),
        ),
        Problem(
            "256 × 512 × 128",
            a=half(256, 128),
            b=half(512, 128),
            once=True,
            versions=("persistent", "tma-store"),
            fast=("tma-store",),
        ),
        Problem(a=half(8192, 8192), b=half(8192, 8192), measured=True),
    ],
)
def matmul_level_forward(a, b, version=None):
    """A·Bᵀ as a new array (M, N): a (M, K), b (N, K), all float16. version: the level; None: the
    last."""
    c = empty((len(a), len(b)), np.float16, like=a)
    version.launcher(a, b, c)
    return c
