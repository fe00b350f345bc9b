"""The hardware's numbers that kernels and launchers use: one name for each."""

from ..emulator.launch import MAX_GRID
from ..errors import TooManyElementsError

WARP = 32  # threads that run in step
WARPGROUP = 128  # threads that issue a wgmma together
FULL_MASK = 0xFFFFFFFF  # all lanes of a warp take part (in a shuffle, a vote, a match)
HOPPER_SHARED = 227 << 10  # bytes of shared memory that a block may have on sm_90
SHARED_RESERVED = 1 << 10  # bytes of shared memory that the system reserves for each block
REGISTERS = 65536  # of a multiprocessor
MAX_BLOCKS_YZ = MAX_GRID[1]  # in a grid's second and third axis
MAX_ELEMENTS = 2**31  # of an array, or a part of one, that a kernel counts in 32 bits
MULTIPROCESSORS = 132  # of an H100: assumed where the backend has no number of its own


def shared_limit(array):
    """Bytes of shared memory that a block may have on the array's device; an H100's where it does
    not say."""
    return getattr(array.backend, "shared_limit", HOPPER_SHARED)


def multiprocessors_of(array):
    return getattr(array.backend, "multiprocessors", MULTIPROCESSORS)


def check_grid(grid):
    """Raise a `TooManyElementsError` for a grid that a GPU refuses: it has more blocks on an axis
    than are counted."""
    axes = grid if isinstance(grid, tuple) else (grid,)
    if any(n > most for n, most in zip(axes, MAX_GRID, strict=False)):
        raise TooManyElementsError(
            f"a grid of {grid} blocks is larger than {MAX_GRID}, a launch's limit: split the batch"
        )
