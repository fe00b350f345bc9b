"""The Hopper ladder: C = A·Bᵀ in float16 by wgmma, one change a level. Read them in this order, after ../mma.py.

    one_tile.py             level 1  wgmma on one tile, loaded by threads
    double_buffer.py        level 2  TMA loads the tiles, one step ahead
    producer_consumer.py    level 3  warp specialisation: one warpgroup only loads, two only multiply
    persistent.py           level 4  one block for each multiprocessor, which goes from tile to tile
    tma_store.py            level 5  TMA stores the results

Each is a complete kernel for the simplest case: whole tiles, one layout, and an epilogue that only rounds to float16.
Code that a level writes out may be a function of device/ from the next level on: level 1 a step's products, from the
descriptors to the commit (`multiply`, device/wgmma.py), level 3 the ring of stages with its barriers
(device/pipeline.py). So two files side by side show one change: diff persistent.py tma_store.py. The models run
../hopper/, which handles every shape and layout; here its ideas come one at a time.

VERSIONS
    v1 one-tile, v2 double-buffered, v3 warp-specialised, v4 persistent, v5 tma-store: the levels.
    On an H200 v5 reaches 699 TFLOP/s, 97 % of cuBLAS, and ../hopper/ 666, 100 % of cuBLAS: each was measured
    alternating with its own cuBLAS call, which reached 721 in the first run and 666 in the second. The card's clock may
    differ.
COST
    A and B read once and C written once, 2 · M · N · K FLOPs: arithmetic is the roof.
SOURCE
    the idea of a level a file: ThunderKittens' educational kernels; the instructions are the PTX ISA's.
"""
import numpy as np

from ....device import empty, is_device
from ...versions import versions_by_name
from ..reference import matmul_forward_cost
from .double_buffer import launch_double_buffer
from .one_tile import launch_one_tile
from .persistent import launch_persistent
from .producer_consumer import launch_producer_consumer
from .tma_store import launch_tma_store

LEVELS = {1: launch_one_tile, 2: launch_double_buffer, 3: launch_producer_consumer, 4: launch_persistent,
          5: launch_tma_store}
TILE = 128, 256, 64  # what M, N and K must be multiples of


@versions_by_name
def matmul_level_forward(a, b, version=None):
    """A·Bᵀ as a new array (M, N): a (M, K), b (N, K), all float16. version: the level; None: the last."""
    (M, K), N = a.shape, len(b)
    if tuple(b.shape) != (N, K) or a.dtype != b.dtype:
        raise ValueError(f"a {a.shape} of {a.dtype} needs b (N, {K}) of the same type, not {b.shape} of {b.dtype}")
    if not is_device(a):
        return (a.astype(np.float32) @ b.astype(np.float32).T).astype(a.dtype) if a.dtype == np.float16 else a @ b.T
    if a.dtype != np.float16 or any(n % tile for n, tile in zip((M, N, K), TILE, strict=True)):
        raise ValueError(f"the levels take float16 and multiples of {TILE}, not {a.dtype} and {(M, N, K)}; use "
                         "matmul_forward")
    if version not in (None, *LEVELS):
        raise ValueError(f"there is no level {version}: use one of {', '.join(map(str, LEVELS))}")
    c = empty((M, N), np.float16, like=a)
    LEVELS[version or max(LEVELS)](a, b, c)
    return c


def matmul_level_forward_cost(M, N, K):
    """(bytes, FLOPs), in float16."""
    moved, flops = matmul_forward_cost(1, M, N, K)
    return moved // 2, flops
