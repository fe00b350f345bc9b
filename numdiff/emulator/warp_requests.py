"""Requests of a warp to memory: how many sectors of global memory they move, how many wavefronts of
shared memory.

    global memory       a request moves sectors of 32 bytes: those that its lanes touch, each once. Ideal ones are as
                        many as the bytes would need if they were neighbours
    shared memory       32 banks of 4 bytes. In one wavefront each bank gives one word, to as many lanes as want it: a
                        request takes as many wavefronts as the busiest bank has words. Accesses of 8 bytes are
                        served by half warps, those of 16 bytes by quarter warps. Wavefronts beyond that are bank
                        conflicts

Addresses are arrays (lanes, requests) of bytes, -1 where a lane takes no part.

SOURCE  CUDA C++ programming guide, "Device Memory Accesses" and "Shared Memory" of each compute capability; Nsight
Compute, "Memory Tables".
"""

import numpy as np

from .threads import WARP

# bytes of a sector; banks; bytes that a bank gives in one wavefront
SECTOR, BANKS, WORD = 32, 32, 4


def _distinct(values):
    """How many different values each column has, without -1."""
    ordered = np.sort(values, axis=0)
    return (ordered[1:] != ordered[:-1]).sum(axis=0) + 1 - (ordered[0] == -1)


def count_sectors(addresses, size):
    """(sectors, ideal sectors) of each request for `size` bytes a lane in global memory."""
    first = addresses // SECTOR  # -1 stays -1
    last = np.where(addresses < 0, -1, (addresses + size - 1) // SECTOR)
    sectors = _distinct(first if np.array_equal(first, last) else np.concatenate([first, last]))
    return sectors, np.minimum(sectors, -(-_distinct(addresses) * size // SECTOR))


def count_wavefronts(addresses, size):
    """(wavefronts, wavefronts without conflicts) of each request for `size` bytes a lane in shared
    memory."""
    # lanes that are served in one go
    together = WARP if size <= WORD else WARP * WORD // min(size, 16)
    parts, n = WARP // together, addresses.shape[1]
    words = np.where(addresses < 0, -1, addresses // WORD).reshape(parts, together, n)
    if size > WORD:
        words = np.concatenate(
            [np.where(words < 0, -1, words + k) for k in range(size // WORD)], axis=1
        )
    words = np.sort(words, axis=1)
    new = words >= 0
    new[:, 1:] &= words[:, 1:] != words[:, :-1]
    column = (np.arange(parts)[:, None] * n + np.arange(n))[:, None]
    index = (column * BANKS + words % BANKS)[new].astype(np.intp, copy=False)  # int32 on wasm32
    waves = np.bincount(index, minlength=parts * n * BANKS).reshape(parts, n, BANKS).max(axis=2)
    return waves.sum(axis=0), (waves > 0).sum(axis=0)
