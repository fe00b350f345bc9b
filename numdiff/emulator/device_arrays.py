"""Arrays in the emulated GPU's memory, as the host holds them."""

import ctypes
import sys
import weakref

import numpy as np

from .arrays import contiguous_strides
from .faults import Unsupported
from .memory import ALIGNMENT, GLOBAL, POISON, Memory

# memories of arrays, one of which a `__cuda_array_interface__` may name by its address
_LIVE = weakref.WeakSet()
# where Numba has its class of arrays on a device
_DEVICE_ARRAYS = (
    "numba.cuda.cudadrv.devicearray",
    "numba_cuda_mlir.numba_cuda.cudadrv.devicearray",
)


def from_interface(interface):
    """The emulated array that a `__cuda_array_interface__` (version 3) describes; `Unsupported` if
    a GPU has it."""
    if interface.get("mask") is not None:
        raise NotImplementedError("Masked arrays are not supported")
    address, shape, dtype = (
        interface["data"][0],
        tuple(interface["shape"]),
        np.dtype(interface["typestr"]),
    )
    if dtype.kind == "V" and interface.get("descr"):
        dtype = np.dtype(interface["descr"])
    if 0 in shape:
        return EmulatedArray(shape, dtype)
    memory = next((m for m in _LIVE if m.address <= address < m.address + m.size), None)
    if memory is None:
        raise Unsupported(
            f"an array at address {address:#x} is on a real GPU: give the emulator NumPy arrays or its "
            "own"
        )
    made = EmulatedArray.__new__(EmulatedArray)
    made.shape, made.dtype, made.memory, made.offset = (
        shape,
        dtype,
        memory,
        address - memory.address,
    )
    made.strides = tuple(interface.get("strides") or contiguous_strides(shape, dtype.itemsize))
    made.stream = interface.get("stream") or 0
    return made


def on_device(value):
    """An emulated array for one of this GPU in another library's class; anything else as it is."""
    if isinstance(value, (EmulatedArray, np.ndarray)) or hasattr(value, "emulated_memory"):
        return value
    interface = getattr(value, "__cuda_array_interface__", None)
    return value if interface is None else from_interface(interface)


def _aligned_bytes(size):
    """Uninitialised bytes from a multiple of `ALIGNMENT` on."""
    wider = np.full(size + ALIGNMENT, POISON, np.uint8)
    return wider[(start := -wider.ctypes.data % ALIGNMENT) : start + size]


class EmulatedArray:
    """An array in the emulated GPU's memory, with the methods of Numba's device arrays;
    uninitialised without `contents`."""

    stream = 0  # on which it was made
    __cuda_ndarray__ = True

    @property
    def __class__(self):
        """Numba's class of an array on a device, for which programs ask with `isinstance`."""
        modules = (sys.modules.get(name) for name in _DEVICE_ARRAYS)
        return next((m.DeviceNDArray for m in modules if m is not None), EmulatedArray)

    def __init__(self, shape, dtype=np.float64, contents=None, order="C", stream=0):
        if stream:
            self.stream = stream
        self.shape = (
            (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(n) for n in shape)
        )
        self.dtype = np.dtype(dtype)
        self.memory = Memory(GLOBAL, self.nbytes)
        if (
            self.memory.bytes.ctypes.data % ALIGNMENT
        ):  # possible in a 32-bit process, as WebAssembly
            self.memory.bytes = _aligned_bytes(len(self.memory.bytes))
        self.memory.address = self.memory.bytes.ctypes.data
        _LIVE.add(self.memory)
        strides = contiguous_strides(
            self.shape[::-1] if order == "F" else self.shape, self.dtype.itemsize
        )
        self.offset, self.strides = 0, strides[::-1] if order == "F" else strides
        if contents is not None:
            self.on_host()[...] = contents
            self.mark_written()

    @property
    def size(self):
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self):
        return self.size * self.dtype.itemsize

    @property
    def ndim(self):
        return len(self.shape)

    def on_host(self):
        """The contents as a NumPy array that shares the memory."""
        return np.ndarray(self.shape, self.dtype, self.memory.bytes, self.offset, self.strides)

    def emulated_memory(self):
        return self.memory, self.offset, self.shape, self.dtype, self.strides

    def _view(self, data):
        """An array of the same memory: `data` is a view of `on_host()`."""
        view = EmulatedArray.__new__(EmulatedArray)
        view.shape, view.dtype, view.strides, view.memory = (
            data.shape,
            data.dtype,
            data.strides,
            self.memory,
        )
        view.offset = data.ctypes.data - self.memory.address
        view.stream = self.stream
        return view

    def mark_written(self):
        if self.on_host().flags.c_contiguous:
            self.memory.mark_written(self.offset, self.offset + self.nbytes)
        else:
            np.ndarray(
                self.shape + (self.dtype.itemsize,),
                np.uint8,
                self.memory.valid,
                self.offset,
                self.strides + (1,),
            )[...] = 1

    @property
    def flags(self):
        """Those of an array on the host with these strides."""
        return self.on_host().flags

    @property
    def __cuda_array_interface__(self):
        return {
            "shape": self.shape,
            "strides": None if self.is_c_contiguous() else self.strides,
            "version": 3,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "stream": getattr(self.stream, "handle", None),
            "data": (self.memory.address + self.offset if self.size else 0, False),
        }

    @property
    def device_ctypes_pointer(self):
        return ctypes.c_void_p(self.memory.address + self.offset)

    @property
    def _numba_type_(self):
        """Numba's type of the array, for its dispatcher."""
        from .signatures import type_of

        return type_of(self)

    @property
    def T(self):
        return self._view(self.on_host().T)

    def transpose(self, axes=None):
        return self._view(self.on_host().transpose(axes))

    def view(self, dtype):
        return self._view(self.on_host().view(dtype))

    def is_c_contiguous(self):
        return self.on_host().flags.c_contiguous

    def is_f_contiguous(self):
        return self.on_host().flags.f_contiguous

    @property
    def alloc_size(self):
        return self.nbytes

    def squeeze(self, axis=None, stream=0):
        return self._view(self.on_host().squeeze(axis))

    def split(self, section, stream=0):
        """Views of `section` elements each."""
        return (self[start : start + section] for start in range(0, self.size, section))

    def bind(self, stream=0):
        return self

    def get_ipc_handle(self):
        raise Unsupported("the emulator does not share arrays with other processes")

    def __len__(self):
        return self.shape[0]

    def copy_to_host(self, ary=None, stream=0):
        """The contents as a NumPy array, or into `ary`."""
        if any(stride < 0 for stride in self.strides):
            raise NotImplementedError(
                f"D->H copy not implemented for negative strides: {self.strides}"
            )
        if ary is None:
            return self.on_host().copy(order="A")
        self._refuse_other(ary)
        ary[...] = self.on_host()
        return ary

    def copy_to_device(self, ary, stream=0):
        self._refuse_other(ary)
        self.on_host()[...] = ary.copy_to_host() if isinstance(ary, EmulatedArray) else ary
        self.mark_written()

    def _refuse_other(self, ary):
        """Raise where an array to copy from or to has another shape or type, as Numba does."""
        if np.ndim(ary) and (ary.shape, ary.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"the array on the device has the shape {self.shape} and the type {self.dtype}, the other "
                f"{ary.shape} and {ary.dtype}: a copy needs the same"
            )

    def __getitem__(self, index):
        """A number, or a view of the device's memory."""
        part = self.on_host()[index]
        return self._view(part) if isinstance(part, np.ndarray) else part

    def __setitem__(self, index, value):
        part = self.on_host()[index]
        if isinstance(part, np.ndarray):
            self._view(part).copy_to_device(value)
        else:
            self.on_host()[index] = value
            at = index if isinstance(index, tuple) else (index,)
            start = self.offset + sum(
                int(i) % n * s for i, n, s in zip(at, self.shape, self.strides, strict=True)
            )
            self.memory.mark_written(start, start + self.dtype.itemsize)

    def __array__(self, dtype=None, copy=None):
        return self.on_host().astype(dtype or self.dtype)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def reshape(self, *shape, order="C"):
        shape = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        data = self.on_host().reshape(shape, order=order)
        if not np.shares_memory(data, self.on_host()):
            raise ValueError("only contiguous arrays can be reshaped on a device")
        return self._view(data)

    def ravel(self, order="C"):
        return self.reshape(self.size, order=order)

    def __repr__(self):
        return f"EmulatedArray(shape={self.shape}, dtype={self.dtype})"


def device_memset(dst, val, size, stream=0):
    """Set the first `size` bytes of an array on the device."""
    first = dst.offset
    dst.memory.bytes[first : first + size] = val
    dst.memory.mark_written(first, first + size)
