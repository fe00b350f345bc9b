"""The layouts of a wgmma's matrices: in shared memory, named by descriptors, and in the registers
of 128 threads.

IN SHARED MEMORY a matrix is named by a 64-bit descriptor (PTX ISA, section 9.7.15.5.1.2.2), decoded
by `Descriptor`:

    bits  0-13  address of the first element / 16
    bits 16-29  leading dimension byte offset (LBO) / 16
    bits 32-45  stride dimension byte offset (SBO) / 16
    bits 49-51  base offset: where the swizzle's pattern begins
    bits 62-63  swizzle: 0 none, 1 128 bytes, 2 64 bytes, 3 32 bytes

A matrix is made of 16-byte chunks, eight float16 along its contiguous dimension, or sixteen E4M3,
which must run along k. With a swizzle of S bytes, rows of S bytes follow one another, eight to a
group. `chunk_offsets` gives the offset of each chunk; r is the row, c the chunk in the row, along
the other dimension:

    K-major, swizzled     r % 8 · S + r // 8 · SBO + c · 16          r is m or n, two chunks along k; LBO is not used
    K-major, none         r % 8 · 16 + r // 8 · SBO + c · LBO
    MN-major, swizzled    k % 8 · S + k // 8 · SBO + c % (S / 16) · 16 + c // (S / 16) · LBO     chunks along m or n
    MN-major, none        k % 8 · 16 + k // 8 · LBO + c · SBO

and the swizzle then xors bits of the resulting address, as TMA's does (tensor_map.py).

IN REGISTERS. `accumulator_place` and `a_fragment_place` give the element of D and A in each
register of each thread.
"""

import functools

import numpy as np

from .asynchronous import Pieces
from .tensor_map import CHUNK, SWIZZLES
from .warp_matrix import e4m3_of_words

WARPGROUP, M, K = 128, 64, 16  # threads; rows of A and D; float16 along k
SWIZZLE_OF_MODE = (0, 128, 64, 32)  # bytes, by the descriptor's bits 62-63


def inner(elements):
    """How many of these an instruction adds up along k: 32 bytes of a row of A, or of a column of
    B."""
    return 2 * K if elements is e4m3_of_words else K


# Registers ----------------------------------------------------------------------------------------


def accumulator_place(thread, register):
    """(row, column) of D in accumulator `register` (0 … N / 2 - 1) of a thread (0 … 127) of the
    warpgroup."""
    warp, lane = thread // 32, thread % 32
    return (
        16 * warp + lane // 4 + 8 * (register // 2 % 2),
        8 * (register // 4) + lane % 4 * 2 + register % 2,
    )


def a_fragment_place(thread, element):
    """(row, column) of A in float16 `element` (0 … 7; two to a register) of a thread (0 … 127), A
    from registers."""
    warp, lane = thread // 32, thread % 32
    return 16 * warp + lane // 4 + 8 * (element // 2 % 2), 8 * (
        element // 4
    ) + lane % 4 * 2 + element % 2


def to_registers(d):
    """D (64 × N) as the 128 threads hold it: (128, N / 2). The axes are warp, half, row, group,
    quad, pair."""
    n = d.shape[1]
    return d.reshape(4, 2, 8, n // 8, 4, 2).transpose(0, 2, 4, 3, 1, 5).reshape(WARPGROUP, n // 2)


def a_of_words(words, elements):
    """A (64 × 16, float64) from the four words of each of the 128 threads."""
    # The axes are warp, row, quad, right, below, pair.
    halves = elements(np.array(words, np.uint32)).reshape(4, 8, 4, 2, 2, 2)
    return halves.transpose(0, 4, 1, 3, 2, 5).reshape(M, K).astype(np.float64)


# Shared memory ------------------------------------------------------------------------------------


class Descriptor:
    """A matrix descriptor, decoded: all sizes in bytes. swizzle: 0, 32, 64 or 128."""

    __slots__ = ("address", "leading", "stride", "base_offset", "swizzle")

    def __init__(self, bits):
        bits = int(bits)
        self.address, self.leading, self.stride = ((bits >> at & 0x3FFF) << 4 for at in (0, 16, 32))
        self.base_offset, self.swizzle = bits >> 49 & 7, SWIZZLE_OF_MODE[bits >> 62 & 3]


@functools.lru_cache(1024)
def chunk_offsets(address, rows, leading, stride, base_offset, swizzle, mn_major):
    """Byte offsets from the matrix's start of its 16-byte chunks, an int64 array.

    address: of the start, modulo 1024; rows: of the matrix along m or n. Shape (rows, 2) for a
    K-major matrix: chunk c of row r is k = 8c … 8c + 7. Shape (16, rows / 8) for an MN-major one:
    chunk c of row k is m or n = 8c … 8c + 7.
    """
    if mn_major:
        k, c = np.arange(K)[:, None], np.arange(rows // 8)[None, :]
        if swizzle:
            span = swizzle // CHUNK
            offsets = k % 8 * swizzle + k // 8 * stride + c % span * CHUNK + c // span * leading
        else:
            offsets = k % 8 * CHUNK + k // 8 * leading + c * stride
    else:
        r, c = np.arange(rows)[:, None], np.arange(2)[None, :]
        if swizzle:
            offsets = r % 8 * swizzle + r // 8 * stride + c * CHUNK
        else:
            offsets = r % 8 * CHUNK + r // 8 * stride + c * leading
    places = address + offsets
    pattern = places - (base_offset << 7)
    return (places ^ (pattern >> 7 & SWIZZLES[swizzle]) << 4) - address


@functools.lru_cache(1024)
def _chunk_starts(*layout):
    return np.unique(chunk_offsets(*layout)).tolist()


class SharedOperand:
    """A matrix in shared memory: where its chunks are."""

    __slots__ = (
        "memory",
        "start",
        "layout",
        "mn_major",
        "rows",
        "descriptor",
        "pieces",
        "elements",
    )

    def __init__(self, machine, bits, rows, mn_major, elements):
        self.descriptor, self.elements = Descriptor(bits), elements
        d = self.descriptor
        self.rows, self.mn_major, self.memory, self.pieces = rows, mn_major, None, None
        self.layout = (
            d.address % 1024,
            rows,
            d.leading,
            d.stride,
            d.base_offset,
            d.swizzle,
            mn_major,
        )
        found = machine.shared_memory(d.address)
        if found is None:
            return
        memory, self.start = found
        starts = _chunk_starts(*self.layout)
        if self.start + starts[0] >= 0 and self.start + starts[-1] + CHUNK <= memory.size:
            self.memory = memory

    def find_pieces(self):
        self.pieces = Pieces([self.start + s for s in _chunk_starts(*self.layout)], CHUNK)
        return self.pieces

    def read(self):
        """The matrix as float64, (rows, 16), or (rows, 32) of E4M3."""
        chunks = (self.start + chunk_offsets(*self.layout)) // CHUNK
        data = self.memory.bytes.reshape(-1, CHUNK)[chunks].reshape(chunks.shape[0], -1)
        data = self.elements(data.view(np.uint32)).reshape(chunks.shape[0], -1)
        return (data.T if self.mn_major else data).astype(np.float64)
