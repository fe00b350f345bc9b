"""The GPU: the one module that imports Numba's CUDA target and the CUDA driver bindings.

numba-cuda is in maintenance; its successor changes the import below and the intrinsics, and nothing else in numdiff.

Launching goes past Numba's dispatcher: arguments are laid out once per array and the compiled kernel is looked up by
its argument types, which leaves about 10 µs a launch where `kernel[grid, block](...)` takes 23 µs and more.
"""
import contextlib
import ctypes
import functools
import hashlib
import os
import pathlib
import warnings

import numpy as np
from numba import config, cuda
from numba import types as numba_types

from ..errors import NumdiffError, OutOfMemoryError
from .arena import Arena
from .array import DeviceArray

MINIMUM_CAPABILITY = (7, 5)  # what CUDA 13's compiler still targets


def cache_directory():
    """Where compiled kernels are kept: a folder whose name changes with any line of the kernels' own code.

    Numba's cache looks at the file of a kernel only; a change in an intrinsic or a device function of another file
    would go unseen, so their contents are part of the folder's name.
    """
    root = os.environ.get("NUMDIFF_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(pathlib.Path.home(), ".cache"), "numdiff")
    package = pathlib.Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for folder in ("device", "kernels"):
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return os.path.join(root, f"kernels-{digest.hexdigest()[:16]}")


def type_of(argument):
    """The Numba type under which `launch` passes an argument."""
    if isinstance(argument, DeviceArray):
        return numba_types.Array(numba_types_of_dtype(argument.dtype), max(argument.ndim, 1), "C")
    return numba_types_of_dtype(scalar(argument).dtype)


@functools.cache
def numba_types_of_dtype(dtype):
    return getattr(numba_types, "boolean" if dtype == np.bool_ else dtype.name)


def scalar(value):
    """A Python or NumPy scalar as the NumPy scalar that travels to the kernel: int32, int64 or float32 by default."""
    if isinstance(value, (np.number, np.bool_)):
        return value
    if isinstance(value, (bool, int)):
        return np.int32(value) if -2**31 <= value < 2**31 else np.int64(value)
    return np.float32(value)


_CTYPES = {np.dtype(t): c for t, c in ((np.int32, ctypes.c_int32), (np.uint32, ctypes.c_uint32),
                                       (np.int64, ctypes.c_int64), (np.uint64, ctypes.c_uint64),
                                       (np.float32, ctypes.c_float), (np.float64, ctypes.c_double))}


class Gpu:
    """One GPU: its arena, its stream, its compiled kernels. Get it with `get_gpu()`."""

    name = "cuda"

    def __init__(self, index=0):
        from cuda.bindings import driver
        from cuda.core import Device, LaunchConfig, launch
        self._driver, self._launch_config, self._core_launch = driver, LaunchConfig, launch
        self.index = index
        self.device = Device(index)
        self.device.set_current()
        cuda.select_device(index)
        self.capability = tuple(self.device.compute_capability)
        self.device_name = self.device.name
        if self.capability < MINIMUM_CAPABILITY:
            raise NumdiffError(f"{self.device_name} has compute capability {self.capability[0]}.{self.capability[1]}, "
                               "numdiff needs 7.5 (Turing) or later; use --device cpu.")
        self.stream = self.device.create_stream()
        self._target = self.stream  # where launches go: the stream, or a graph builder that records them
        self._handle = int(self.stream.handle)
        self.arenas = [Arena(self._take_segment)]  # the first for everything, the others for one captured step each
        self._arena = self.arenas[0]  # the one that answers now
        self._kernels = {}
        self._configs = {}
        config.CACHE_DIR = cache_directory()
        self.multiprocessors = self.device.properties.multiprocessor_count
        self.compiled = 0
        lanes = 64 if self.capability in ((7, 5), (8, 0)) else 128  # float32 units of a multiprocessor
        self.peak_float32_flops = 2 * lanes * self.multiprocessors * self.device.properties.clock_rate * 1e3

    def check(self, result):
        """Unwrap a driver call, or raise with the driver's own word."""
        if int(result[0]) != 0:
            raise NumdiffError(f"the CUDA driver reported {result[0].name}; if it repeats, run with --device cpu.")
        return result[1] if len(result) > 1 else None

    def _take_segment(self, nbytes):
        result = self._driver.cuMemAlloc(nbytes)
        if int(result[0]) == int(self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY):
            free, total = self.memory_info()
            raise OutOfMemoryError(
                f"{self.device_name} is out of memory: {nbytes >> 20} MiB more were asked for, "
                f"{free >> 20} of {total >> 20} MiB are free; use a smaller --microbatch or a smaller model.")
        return int(self.check(result))

    def memory_info(self):
        """(free, total) bytes of the card."""
        result = self._driver.cuMemGetInfo()
        return int(result[1]), int(result[2])

    # the backend's methods -----------------------------------------------------------------------------------------

    def allocate(self, nbytes):
        return self._arena.allocate(nbytes)

    @staticmethod
    def pointer(array):
        return array.memory.address + array.offset

    def upload(self, source, target):
        self.check(self._driver.cuMemcpyHtoDAsync(self.pointer(target), source.ctypes.data, source.nbytes,
                                                  self._handle))
        self.synchronize()  # the source may be pageable and short-lived

    def download(self, array):
        result = np.empty(array.shape, array.dtype)
        if array.size:
            self.check(self._driver.cuMemcpyDtoHAsync(result.ctypes.data, self.pointer(array), array.nbytes,
                                                      self._handle))
        self.synchronize()
        return result

    def copy(self, source, target):
        self.check(self._driver.cuMemcpyDtoDAsync(self.pointer(target), self.pointer(source), source.nbytes,
                                                  self._handle))

    def fill(self, array, byte):
        if array.size:
            self.check(self._driver.cuMemsetD8Async(self.pointer(array), byte, array.nbytes, self._handle))

    def pinned(self, shape, dtype):
        """A page-locked NumPy array, from which uploads run beside the kernels."""
        return cuda.pinned_array(shape, dtype)

    @property
    def peak_bytes(self):
        """The most bytes that arrays have taken, over all arenas."""
        return sum(arena.peak_bytes for arena in self.arenas)

    def new_arena(self):
        """An arena of its own, for work that is captured: nothing else may take memory that a replay writes to."""
        self.arenas.append(Arena(self._take_segment))
        return self.arenas[-1]

    @contextlib.contextmanager
    def within(self, arena):
        """Inside the context new arrays come from `arena`."""
        outer, self._arena = self._arena, arena
        try:
            yield
        finally:
            self._arena = outer

    def capture(self, function):
        """Record what `function()` launches as one CUDA graph, running nothing; returns a function that replays it.

        `function` must launch the same kernels over the same addresses each time, allocate within an arena of its own,
        and neither read back nor wait. (CUDA programming guide, "CUDA Graphs", stream capture.)
        """
        builder = self.stream.create_graph_builder()
        builder.begin_building("relaxed")  # relaxed: loading a kernel's code for the first time is allowed meanwhile
        self._target = builder
        try:
            function()
        finally:
            self._target = self.stream
            builder.end_building()
        graph = builder.complete()
        return lambda: graph.launch(self.stream)

    def synchronize(self):
        """Wait until everything launched so far has run."""
        self.stream.sync()

    def launch(self, kernel, grid, block, args, shared=0):
        signature, flat = [kernel], []
        for argument in args:
            if isinstance(argument, DeviceArray):
                if argument.arguments is None:
                    argument.arguments = self._lay_out(argument)
                signature.append(argument.arguments[0])
                flat.extend(argument.arguments[1])
            else:
                value = scalar(argument)
                signature.append(value.dtype)
                flat.append(_CTYPES[value.dtype](value.item()))
        key = tuple(signature)
        function = self._kernels.get(key) or self._compile(key, kernel, args)
        shape = (grid, block, shared)
        launch_config = self._configs.get(shape)
        if launch_config is None:
            launch_config = self._configs[shape] = self._launch_config(grid=grid, block=block, shmem_size=shared)
        self._core_launch(self._target, launch_config, function, *flat)

    def _lay_out(self, array):
        """Numba's array argument: meminfo, parent, item count, item size, address, shape, strides in bytes."""
        shape = array.shape or (1,)
        strides, step = [], array.dtype.itemsize
        for n in reversed(shape):
            strides.append(step)
            step *= n
        values = (0, 0, array.size, array.dtype.itemsize, self.pointer(array), *shape, *reversed(strides))
        return (array.dtype, len(shape)), values

    def _compile(self, key, kernel, args):
        kernel.enable_caching()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an unwritable cache folder costs time, not correctness
            compiled = kernel.compile(tuple(type_of(a) for a in args))
        function = compiled._codelibrary.get_cufunc().kernel
        limit = self.device.properties.max_shared_memory_per_block_optin
        self.check(self._driver.cuKernelSetAttribute(
            self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            limit - compiled.shared_mem_per_block, function.handle,
            self.check(self._driver.cuCtxGetDevice())))
        self._kernels[key] = function
        self.compiled += 1
        return function


@functools.cache
def get_gpu(index=0):
    """The GPU with this index, set up once; a `NumdiffError` says why where there is none."""
    reason = why_no_gpu()
    if reason:
        raise NumdiffError(f"no GPU can be used: {reason}; use --device cpu.")
    return Gpu(index)


@functools.cache
def why_no_gpu():
    """None where a GPU can be used, else the reason in a few words."""
    if config.ENABLE_CUDASIM:
        return "NUMBA_ENABLE_CUDASIM is set"
    try:
        from cuda.bindings import driver
    except ImportError as error:
        return f"the CUDA bindings cannot be imported ({error}); pip install 'numdiff[cuda13]'"
    try:
        result = driver.cuInit(0)
        count = driver.cuDeviceGetCount()
    except Exception as error:  # the bindings raise RuntimeError where libcuda is missing
        return f"no NVIDIA driver was found ({type(error).__name__})"
    if int(result[0]) != 0 or int(count[0]) != 0:
        return f"the NVIDIA driver reports {result[0].name}"
    if count[1] == 0:
        return "the driver sees no GPU"
    return None
