"""Tensor maps: a tensor's place in global memory, the box of it that TMA copies, and the box's
layout in shared memory.

A tensor has one to five dimensions. All sizes run innermost first, as the coordinates of an
instruction do.
(CUDA driver API, `cuTensorMapEncodeTiled`; PTX ISA, section 5.5, "Tensors".)

THE TILE. The box's elements follow one another, innermost dimension first. Elements of a box
outside the tensor are loaded as zeros, and not written by a store. A swizzle of 32, 64 or 128 bytes
exchanges the 16-byte chunks inside each such range of bytes, by address bits of shared memory
(`swizzled`):

    128 bytes: bits 4-6 of the address are xored with bits 7-9        the pattern repeats every 1024 bytes
     64 bytes: bits 4-5 with bits 7-8                                                        512 bytes
     32 bytes: bit 4 with bit 7                                                              256 bytes

so that a column of chunks, the same chunk of eight neighbouring rows, is in eight different groups
of four banks. Rows shorter than the swizzle begin that many bytes apart; the bytes between them are
left alone. (The last is not in the PTX ISA: it was observed on an H100;
tests/emulator/test_hopper.py checks it again on a GPU.)

A `TensorMap` is the host's side; `tensor_map` makes one for arrays of the emulator. Its 128 bytes
begin with a number by which the emulator recognises it, in any memory. The copies are in tma.py.
"""

import functools
import itertools
import weakref
from collections import deque

import numpy as np

from .arrays import CheckedArray, IntegerArray, contiguous_strides
from .asynchronous import Pieces
from .faults import LaunchRefused
from .memory import GLOBAL, Memory

CHUNK = 16  # bytes that a swizzle moves together
SWIZZLES = {0: 0, 32: 1, 64: 3, 128: 7}  # bytes -> mask of the bits that are xored
MAX_BOX, MAX_RANK, MAX_STRIDE = 256, 5, 1 << 40
MAPS = weakref.WeakValueDictionary()  # number -> TensorMap
_RECENT = deque(maxlen=256)  # keeps the last maps alive when only copies of their bytes are left
_NUMBERS = itertools.count(1)
_MAGIC = 0x6E756D64  # the first four bytes of a descriptor that was made here


def swizzled(address, swizzle):
    """The shared address with this swizzle (0, 32, 64, 128) of a tile's byte whose plain address is
    `address`."""
    return address ^ (address >> 7 & SWIZZLES[swizzle]) << 4


@functools.lru_cache(256)
def tile_chunks(address, rows, row_bytes, swizzle):
    """For each 16-byte chunk of a tile at a shared address (modulo 1024), the number of the chunk
    that holds it."""
    starts = address + max(row_bytes, swizzle) * np.arange(rows)[:, None]
    chunks = starts + CHUNK * np.arange(row_bytes // CHUNK)
    return ((swizzled(chunks, swizzle) - address) // CHUNK).reshape(-1)


class TensorMap:
    """A tensor in global memory and the box that is copied of it; refuses what
    `cuTensorMapEncodeTiled` refuses.

    memory, offset: its place; itemsize: bytes of an element; dims, box: elements, innermost first
    strides: bytes from one element to the next in dimensions 1 …; swizzle: 0, 32, 64 or 128 bytes
    """

    def __init__(
        self, memory, offset, address, itemsize, dims, strides, box, swizzle=128, name="tensor"
    ):
        self.memory, self.offset, self.address, self.itemsize, self.name = (
            memory,
            offset,
            address,
            itemsize,
            name,
        )
        self.dims, self.strides, self.box = (tuple(int(n) for n in v) for v in (dims, strides, box))
        self.swizzle = swizzle
        self._check()
        self.rank, self.row_bytes = len(self.dims), self.box[0] * itemsize
        self.bytes = itemsize * int(np.prod(self.box))
        self.rows = self.bytes // self.row_bytes
        # bytes of shared memory from the tile's first to its last
        self.span = self.rows * max(self.row_bytes, swizzle)
        self.number = next(_NUMBERS)
        MAPS[self.number] = self
        _RECENT.append(self)

    def _check(self):
        def refuse(why):
            raise LaunchRefused(f"tensor map of {self.name}: {why}.")

        rank = len(self.dims)
        if self.swizzle not in SWIZZLES:
            refuse(f"the swizzle is {self.swizzle!r}, it must be 0, 32, 64 or 128 bytes")
        if not 1 <= rank <= MAX_RANK:
            refuse(f"it has {rank} dimensions, it must have 1 to {MAX_RANK}")
        if len(self.box) != rank or len(self.strides) != rank - 1:
            refuse(
                f"{rank} dimensions need a box of {rank} sizes and {rank - 1} strides, not {len(self.box)} and "
                f"{len(self.strides)}"
            )
        if self.address % CHUNK:
            refuse(f"its address {self.address:#x} is not a multiple of 16 bytes")
        for axis, n in enumerate(self.dims):
            if not 1 <= n <= 1 << 32:
                refuse(f"dimension {axis} is {n}, it must be 1 … 2^32")
        for axis, stride in enumerate(self.strides):
            if stride % CHUNK or not 0 <= stride < MAX_STRIDE:
                refuse(
                    f"the stride of dimension {axis + 1} is {stride} bytes, it must be a multiple of 16"
                )
        for axis, n in enumerate(self.box):
            if not 1 <= n <= MAX_BOX:
                refuse(f"the box is {n} in dimension {axis}, it must be 1 … {MAX_BOX}")
        row = self.box[0] * self.itemsize
        if row % CHUNK:
            refuse(f"a row of the box is {row} bytes, it must be a multiple of 16")
        if self.swizzle and row > self.swizzle:
            refuse(
                f"a row of the box is {row} bytes, with the swizzle of {self.swizzle} bytes it can be no more than "
                "that"
            )

    def descriptor(self):
        """The 128 bytes that a kernel gets: uint8[128]."""
        words = np.zeros(16, np.uint64)
        words[0], words[1] = _MAGIC, self.number
        return words.view(np.uint8)

    def chunks(self, address):
        """The number of the 16-byte chunk that holds each chunk of a tile at this shared address."""
        return tile_chunks(address % 1024, self.rows, self.row_bytes, self.swizzle)

    # boxes ----------------------------------------------------------------------------------------

    def inside(self, at):
        """The part of the box at coordinates `at` that is in the tensor: [(first, last)] of box
        coordinates, innermost first."""
        return [
            (max(0, -c), max(0, -c, min(n, d - c)))
            for c, n, d in zip(at, self.box, self.dims, strict=True)
        ]

    def elements(self, at, inside):
        """The part `inside` of the box at `at` as a NumPy view of global memory, outermost
        dimension first."""
        strides = (self.itemsize, *self.strides)
        start = self.offset + sum(
            (c + low) * s for c, (low, _), s in zip(at, inside, strides, strict=True)
        )
        shape = tuple(high - low for low, high in reversed(inside))
        return np.ndarray(shape, f"V{self.itemsize}", self.memory.bytes, start, strides[::-1])

    def pieces(self, at, inside):
        """(start, stop, `Pieces`) in memory of the rows of the part `inside`."""
        starts = np.array([self.offset + (at[0] + inside[0][0]) * self.itemsize])
        for c, (low, high), stride in zip(at[1:], inside[1:], self.strides, strict=True):
            starts = (starts[:, None] + np.arange(c + low, c + high) * stride).ravel()
        length = (inside[0][1] - inside[0][0]) * self.itemsize
        starts = np.unique(starts).tolist()
        return starts[0], starts[-1] + length, Pieces(starts, length)


def tensor_map(array, box, swizzle=128, dims=None, strides=None):
    """The descriptor (uint8[128]) of a NumPy, emulated or checked array for a kernel in the
    emulator.

    box: elements, innermost dimension first; swizzle: 0, 32, 64 or 128 bytes
    dims, strides: innermost first, where they are not the array's: elements, and bytes of
    dimensions 1 …
    """
    if hasattr(array, "emulated_memory"):
        memory, offset, shape, dtype, *steps = array.emulated_memory()
        if steps and tuple(steps[0]) != contiguous_strides(shape, dtype.itemsize):
            raise LaunchRefused("a tensor map needs a contiguous array.")
    elif array.__class__ is CheckedArray:
        memory, offset, shape, dtype = array.memory, array.offset, array.shape, array.dtype
    else:
        array = array.data if array.__class__ is IntegerArray else array
        if not array.flags.c_contiguous:
            raise LaunchRefused("a tensor map needs a contiguous array.")
        shape, dtype, offset = array.shape, array.dtype, 0
        memory = Memory(
            GLOBAL,
            array.nbytes,
            "array",
            array.ctypes.data,
            array.reshape(-1).view(np.uint8),
            valid=True,
        )
    return map_of(memory, offset, shape, dtype, box, swizzle, dims, strides).descriptor()


def map_of(memory, offset, shape, dtype, box, swizzle=128, dims=None, strides=None, address=None):
    """The `TensorMap` of a contiguous array of this shape at `offset` of a memory; see
    `tensor_map`."""
    dims = tuple(reversed(shape)) if dims is None else dims
    if strides is None:
        strides = tuple(
            itertools.accumulate(dims[:-1], lambda a, n: a * n, initial=dtype.itemsize)
        )[1:]
    address = memory.address + offset if address is None else address
    made = TensorMap(
        memory,
        offset,
        address,
        dtype.itemsize,
        dims,
        strides,
        box,
        swizzle,
        getattr(memory, "name", "") or f"{dtype}{tuple(shape)}",
    )
    size = made.dims[0] * made.itemsize + sum(
        (n - 1) * s for n, s in zip(made.dims[1:], made.strides, strict=True)
    )
    whole = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if size > whole:
        raise LaunchRefused(
            f"tensor map of {made.name}: its last element is {size - whole} bytes behind the array."
        )
    return made


def map_from(machine, descriptor):
    """The `TensorMap` whose bytes a kernel names; None after a fault."""
    if descriptor.__class__ is CheckedArray:
        data = descriptor.memory.bytes[descriptor.offset : descriptor.offset + 128]
    else:
        data = np.asarray(getattr(descriptor, "data", descriptor)).reshape(-1).view(np.uint8)[:128]
    words = data[:16].copy().view(np.uint64) if len(data) >= 16 else (0, 0)
    found = MAPS.get(int(words[1])) if int(words[0]) == _MAGIC else None
    if found is None:
        machine.report(
            "descriptor",
            "the copy's descriptor is not the 128 bytes of a tensor map that is still alive: "
            "make it with tensor_map, and keep it",
            machine.site_here(),
        )
        return None
    return found
