"""Tensor maps: what TMA must know about an array, made on the host (see tma.py,
emulator/tensor_map.py).

    map_x = tensor_map(x, box=(64, 128))            # x (rows, 64·n): boxes of 128 rows by 64 columns

A map is an array of 128 bytes on the device of its array, and names that array's address: keep the
array alive as long as the map. (CUDA driver API, `cuTensorMapEncodeTiled`.)

On a GPU a map is made once for each address and view, and kept. A training step, whose arrays have
the same addresses as in the step before, makes none. So a step captured in a graph uploads none
either, once it has run with the same arena. A map does not depend on the contents at its address,
so a kept map is never wrong.
"""

import ctypes

import numpy as np

from ..emulator import tensor_map as emulated
from .array import DeviceArray, lasting, upload

_TYPES = {
    "float16": "FLOAT16",
    "bfloat16": "BFLOAT16",
    "float32": "FLOAT32",
    "float64": "FLOAT64",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "int32": "INT32",
    "uint64": "UINT64",
    "int64": "INT64",
}
_kept = {}  # (backend, address, view) -> its map


def tensor_map(array, box, swizzle=128, dims=None, strides=None):
    """The descriptor that `tma_load_…` and `tma_store_…` take: uint8[128], on the device of
    `array`.

    array: a `DeviceArray`, or (for kernels in the emulator) a NumPy or emulated array; contiguous
    box: elements that one copy moves, innermost dimension first; at most 256 each, a row a multiple
    of 16 bytes
    swizzle: 0, 32, 64 or 128 bytes; a row of the box must not be longer
    dims, strides: innermost first, for a view that is not the array's own shape: elements; bytes
        from one to the next in dimensions 1 …, multiples of 16
    Raises `LaunchRefused` for what the hardware cannot copy.
    """
    if not isinstance(array, DeviceArray):
        return emulated.tensor_map(array, box, swizzle, dims, strides)
    backend = array.backend
    if backend.name != "emulator":  # whose maps name the memory itself, not its address
        address = backend.pointer(array) if hasattr(backend, "pointer") else 0
        key = (
            backend,
            address,
            array.shape,
            array.dtype,
            tuple(box),
            swizzle,
            dims and tuple(dims),
            strides and tuple(strides),
        )
        kept = _kept.get(key)
        if kept is None:
            made = emulated.map_of(
                None, 0, array.shape, array.dtype, box, swizzle, dims, strides, address
            )
            with lasting(backend):
                kept = upload(
                    _encode(made, array.dtype, backend) if address else made.descriptor(), backend
                )
            # of two threads that made one, both use the first, which stays
            kept = _kept.setdefault(key, kept)
        return kept
    made = emulated.map_of(
        array.memory, array.offset, array.shape, array.dtype, box, swizzle, dims, strides
    )
    return upload(made.descriptor(), backend)


def _encode(made, dtype, backend):
    """The hardware's 128 bytes for a checked `TensorMap`."""
    from cuda.bindings import driver

    kinds, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    encoded = backend.check(
        driver.cuTensorMapEncodeTiled(
            getattr(kinds, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[dtype.name]}"),
            made.rank,
            made.address,
            [driver.cuuint64_t(n) for n in made.dims],
            # the driver refuses an empty list, a null pointer
            [driver.cuuint64_t(n) for n in made.strides or (0,)],
            [driver.cuuint32_t(n) for n in made.box],
            [driver.cuuint32_t(1)] * made.rank,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(
                swizzles, f"CU_TENSOR_MAP_SWIZZLE_{f'{made.swizzle}B' if made.swizzle else 'NONE'}"
            ),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return np.frombuffer(ctypes.string_at(encoded.getPtr(), 128), np.uint8).copy()
