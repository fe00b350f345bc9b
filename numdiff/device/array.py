"""Arrays on a device, and the handful of functions with which everything above makes, moves and
computes on them.

A `DeviceArray` is an address, a shape and a dtype; always contiguous, row-major. It carries no
arithmetic: kernels do that. Its device is its `backend`, an object with five methods (`allocate`,
`upload`, `download`, `fill`, `launch`). See `gpu.py` (a GPU), `emulator.py` (runs kernels on the
CPU) and `ptx.py` (compiles every launch, runs none). NumPy arrays are the CPU engine: the functions
here take both.
"""

import contextlib
import math

import numpy as np

from ..emulator.values import leaves
from ..errors import UsageError

POISON = 0xFF  # every byte: NaN as float16, float32 and float64, -1 as an integer
_poison = False


class DeviceArray:
    """A contiguous array in device memory. `reshape` and first-axis slices are views that share the
    memory."""

    __slots__ = ("backend", "shape", "dtype", "size", "memory", "offset", "arguments")

    def __init__(self, backend, shape, dtype, memory, offset=0):
        self.backend, self.shape, self.dtype = backend, tuple(shape), np.dtype(dtype)
        self.size = math.prod(self.shape)
        self.memory, self.offset = memory, offset  # the backend's own handle, and bytes into it
        self.arguments = None  # how the backend passes this array to a kernel, made on first use

    def __deepcopy__(self, memo):
        new = empty_like(self)
        self.backend.copy(self, new)
        return new

    def __reduce__(self):
        return upload, (download(self), self.backend)

    @property
    def ndim(self):
        return len(self.shape)

    @property
    def nbytes(self):
        return self.size * self.dtype.itemsize

    def __len__(self):
        return self.shape[0]

    def __repr__(self):
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, on {self.backend.name})"

    def reshape(self, *shape):
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if -1 in shape:
            known = -math.prod(shape)
            shape = tuple(self.size // known if n == -1 else n for n in shape)
        if math.prod(shape) != self.size:
            raise ValueError(f"cannot view an array of shape {self.shape} as {tuple(shape)}")
        return DeviceArray(self.backend, shape, self.dtype, self.memory, self.offset)

    def __getitem__(self, index):
        """A view of rows `start:stop` of the first axis."""
        if not isinstance(index, slice) or index.step not in (None, 1):
            raise TypeError(
                "a DeviceArray can only be sliced along its first axis, in steps of one"
            )
        start, stop, _ = index.indices(self.shape[0])
        row = self.size // max(self.shape[0], 1) * self.dtype.itemsize
        shape = (max(stop - start, 0),) + self.shape[1:]
        return DeviceArray(self.backend, shape, self.dtype, self.memory, self.offset + start * row)


def with_dtype(array, dtype):
    """The same memory read as another type of the same size."""
    dtype = np.dtype(dtype)
    if dtype.itemsize != array.dtype.itemsize:
        raise ValueError(f"{array.dtype} and {dtype} are not of one size")
    if isinstance(array, DeviceArray):
        return DeviceArray(array.backend, array.shape, dtype, array.memory, array.offset)
    return array.view(dtype)


def as_words(array):
    """The same memory as a flat float32 array: a word may hold two float16 numbers."""
    if array.nbytes % 4:
        raise ValueError(
            f"{array.dtype}{tuple(array.shape)} does not consist of whole words of 4 bytes"
        )
    if isinstance(array, DeviceArray):
        return DeviceArray(
            array.backend, (array.nbytes // 4,), np.dtype(np.float32), array.memory, array.offset
        )
    return array.reshape(-1).view(np.float32)


def is_device(array):
    """True for a `DeviceArray`, False for a NumPy array."""
    return isinstance(array, DeviceArray)


def empty(shape, dtype=np.float32, like=None):
    """A new array whose contents are undefined, on the device of `like` (an array or a backend;
    None: NumPy)."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    backend = (
        like.backend
        if isinstance(like, DeviceArray)
        else None
        if isinstance(like, np.ndarray)
        else like
    )
    if backend is None:
        array = np.empty(shape, dtype)
        if _poison:
            array.view(np.uint8).fill(POISON)
        return array
    dtype = np.dtype(dtype)
    array = DeviceArray(backend, shape, dtype, backend.allocate(math.prod(shape) * dtype.itemsize))
    if _poison:
        backend.fill(array, POISON)
    return array


def empty_like(array, dtype=None):
    return empty(array.shape, dtype or array.dtype, like=array)


def zeros(shape, dtype=np.float32, like=None):
    """A new array of zeros on the device of `like` (an array or a backend; None: NumPy)."""
    if like is None or isinstance(like, np.ndarray):
        # whose pages the system makes when they are used: at once, whatever the size
        return np.zeros(shape, dtype)
    return fill_zero(empty(shape, dtype, like))


def fill_zero(array):
    """Set every byte of `array` to zero, in place; returns it."""
    if isinstance(array, DeviceArray):
        array.backend.fill(array, 0)
    else:
        array.fill(0)
    return array


def upload(array, like=None):
    """A copy of a NumPy array on the device of `like`; None or a NumPy `like` gives a contiguous
    NumPy array."""
    array = np.asarray(array, order="C")  # unlike ascontiguousarray, keeps a scalar a scalar
    backend = (
        like.backend
        if isinstance(like, DeviceArray)
        else None
        if isinstance(like, np.ndarray)
        else like
    )
    if backend is None:
        return array.copy()
    result = empty(array.shape, array.dtype, backend)
    backend.upload(array, result)
    return result


def lasting(backend):
    """Context: what is allocated in it may be kept for good. A step that is recorded has a separate
    arena, and its replays write to all that was free there, whatever has been put there since; this
    comes from the first arena."""
    return (
        backend.within(backend.arenas[0])
        if hasattr(backend, "arenas")
        else contextlib.nullcontext()
    )


def download(array):
    """The contents as a NumPy array (waits for the device)."""
    return array.backend.download(array) if isinstance(array, DeviceArray) else np.array(array)


def copy_into(target, source):
    """Copy `source` (NumPy or device array of the same shape and dtype) into `target`, in place."""
    if target.shape != source.shape or target.dtype != source.dtype:
        raise ValueError(
            f"cannot copy {source.dtype}{source.shape} into {target.dtype}{target.shape}"
        )
    if isinstance(target, DeviceArray):
        if isinstance(source, DeviceArray):
            target.backend.copy(source, target)
        else:
            target.backend.upload(np.asarray(source, order="C"), target)
    else:
        np.copyto(target, download(source) if isinstance(source, DeviceArray) else source)


AnyArray = np.ndarray | DeviceArray  # for type hints: of either engine


def launch(kernel, grid, block, *args, shared=0, cluster=1):
    """Launch a `@cuda.jit` kernel over device arrays, in stream order, without waiting.

    args: arrays and numbers, and tuples of them: what belongs together is best a NamedTuple of the
        module's own, which the kernel reads by name.
    grid, block: an int or a tuple of up to three; shared: bytes of dynamic shared memory. Python
    ints travel as int32 (int64 where they do not fit), floats as float32, so that no kernel is
    dragged into 64-bit arithmetic by a scalar.
    cluster: how many blocks, neighbours along x, y and z of the grid, run together and reach each
    other's shared memory (cluster.py): an int or a tuple as for the grid, which it must divide; up
    to 8 in all, from capability 9.0 on
    """
    backend = next((a.backend for a in leaves(args) if isinstance(a, DeviceArray)), None)
    if backend is None:
        raise UsageError(
            "launch runs kernels over device arrays, and none was given: make them with upload(array, "
            'get_backend("emulator")), or "cuda" for a GPU.'
        )
    backend.launch(kernel, grid, block, args, shared, cluster)


def set_poison(on):
    """Fill every new array with NaN (tests do, to see what a kernel forgot to write); returns the
    old setting."""
    global _poison
    old, _poison = _poison, bool(on)
    return old
