"""The ladder of `mma.sync`: C = A·Bᵀ in float16 on the tensor cores of sm_80 and later, one change
a level.

    fragments.py            level 1  mma.sync alone: every lane loads its words of the fragments
    swizzle.py              level 2  ldmatrix loads the fragments, from tiles that are swizzled
    stages.py               level 3  cp.async copies the next tiles while one is multiplied

Each is a complete kernel for the simplest case: whole tiles, one layout, and an epilogue that only
rounds to float16. Two files side by side show one change: diff fragments.py swizzle.py. The models
run kernels/matmul/mma.py, which loads fragments one step ahead, goes from tile to tile and handles every shape
and layout. On Hopper ../wgmma/ continues.

VERSIONS
    v1 fragments, v2 swizzle, v3 stages: the levels. On one H200 they reach 142, 223 and 394 TFLOP/s
    at 8192³, kernels/matmul/mma.py 413 in the same run, alternating with cuBLAS at the card's power limit, and
    500 alone.
COST
    A and B read once and C written once, 2 · M · N · K FLOPs: arithmetic is the roof.
SOURCE
    the idea of a level a file: ThunderKittens' educational kernels; the instructions: PTX ISA,
    section 9.7.14.5.
"""

import numpy as np

from ....device import empty
from ....kernels.matmul.reference import matmul_forward_cost
from ....kernels.operation import Problem, Version, half, operation
from .fragments import launch_fragments, matmul_mma_level_kernel_v1
from .stages import launch_stages, matmul_mma_level_kernel_v3
from .swizzle import launch_swizzle, matmul_mma_level_kernel_v2

TILE = 128, 128, 32  # what M, N and K must be multiples of


def matmul_mma_level_forward_reference(a, b):
    return (
        (a.astype(np.float32) @ b.astype(np.float32).T).astype(a.dtype)
        if a.dtype == np.float16
        else a @ b.T
    )


def matmul_mma_level_forward_cost(M, N, K):
    """(bytes, FLOPs), in float16."""
    moved, flops = matmul_forward_cost(1, M, N, K)
    return moved // 2, flops


def has_whole_tiles(a, b):
    """None if the levels take these operands, else what they lack."""
    sizes = *a.shape[:1], len(b), *a.shape[1:]
    return (
        f"takes multiples of {TILE}, not {sizes}"
        if any(n % tile for n, tile in zip(sizes, TILE, strict=True))
        else None
    )


def _check(a, b):
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or a.dtype != b.dtype:
        raise ValueError(
            f"a {a.shape} of {a.dtype} needs b (N, {a.shape[-1]}) of the same type, not {b.shape} of "
            f"{b.dtype}"
        )


@operation(
    reference=matmul_mma_level_forward_reference,
    cost=matmul_mma_level_forward_cost,
    check=_check,
    versions=[
        Version(
            "fragments",
            matmul_mma_level_kernel_v1,
            fits=has_whole_tiles,
            dtypes=("float16",),
            launcher=launch_fragments,
        ),
        Version(
            "swizzle",
            matmul_mma_level_kernel_v2,
            fits=has_whole_tiles,
            dtypes=("float16",),
            launcher=launch_swizzle,
        ),
        Version(
            "stages",
            matmul_mma_level_kernel_v3,
            fits=has_whole_tiles,
            dtypes=("float16",),
            launcher=launch_stages,
        ),
    ],
    problems=[
        Problem(a=half(128, 32), b=half(128, 32)),
        Problem("more steps than stages", a=half(128, 160), b=half(128, 160), fast=False),
        Problem(a=half(8192, 8192), b=half(8192, 8192), measured=True),
    ],
)
def matmul_mma_level_forward(a, b, version=None):
    """A·Bᵀ as a new array (M, N): a (M, K), b (N, K), all float16. version: the level; None: the
    last."""
    c = empty((len(a), len(b)), np.float16, like=a)
    version.launcher(a, b, c)
    return c
