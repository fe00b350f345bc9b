"""Launching on a GPU bypasses Numba's dispatcher.

Arguments are laid out once per array and the compiled kernel is looked up by its argument types,
which leaves about 10 µs a launch where `kernel[grid, block](...)` takes 23 µs and more.
"""

import contextlib
import ctypes

import numpy as np

from ..emulator.launch import in_three
from ..progress import compiling
from .array import DeviceArray
from .capability import dotted
from .compiler import compile_kernel, is_kept, key_of, scalar
from .emulator import LaunchRefused
from .requires import check_supported

_CTYPES = {
    np.dtype(t): c
    for t, c in (
        (np.int32, ctypes.c_int32),
        (np.uint32, ctypes.c_uint32),
        (np.int64, ctypes.c_int64),
        (np.uint64, ctypes.c_uint64),
        (np.float32, ctypes.c_float),
        (np.float64, ctypes.c_double),
    )
}


class Launching:
    """The part of a `Gpu` that launches kernels: it finds, compiles and loads them."""

    def launch(self, kernel, grid, block, args, shared=0, cluster=1):
        signature, flat = [kernel], []
        self._take(args, signature, flat)
        key = tuple(signature)
        with self.turn:
            function = self._kernels.get(key) or self._load(key, kernel, args)
            shape = (grid, block, shared, cluster, not self._waits)
            self._waits = False
            launch_config = self._configs.get(shape)
            if launch_config is None:
                launch_config = self._configs[shape] = self._configure(*shape)
            self._core_launch(self._target, launch_config, function, *flat)

    def _take(self, arguments, signature, flat):
        """Add the types of some arguments to `signature`, and what the driver is given for them to
        `flat`."""
        for argument in arguments:
            if isinstance(argument, DeviceArray):
                if argument.arguments is None:
                    argument.arguments = self._lay_out(argument)
                signature.append(argument.arguments[0])
                flat.extend(argument.arguments[1])
            elif isinstance(argument, tuple):  # Numba passes its elements one by one
                signature.append((type(argument), len(argument)))
                self._take(argument, signature, flat)
            else:
                value = scalar(argument)
                signature.append(value.dtype)
                flat.append(_CTYPES[value.dtype](value.item()))

    def _configure(self, grid, block, shared, cluster, early=True):
        """early: its blocks may take their places before the kernel launched before it has ended.

        Raises a `LaunchRefused` for more shared memory than the card has, or acts as having.
        """
        if shared > self.shared_limit:
            raise LaunchRefused(
                f"{shared} bytes of dynamic shared memory are more than the {self.shared_limit} that a "
                f"block has on compute capability {dotted(self.capability)}."
            )
        early = self._early if early else {}
        if cluster == 1:
            return self._launch_config(grid=grid, block=block, shmem_size=shared, **early)
        # cuda.core counts a grid's clusters, not its blocks
        grid, cluster = in_three(grid), in_three(cluster)
        if any(n % k for n, k in zip(grid, cluster, strict=True)):
            raise ValueError(
                f"a grid of {grid} blocks cannot be cut into clusters of {cluster}; give a multiple"
            )
        return self._launch_config(
            grid=tuple(n // k for n, k in zip(grid, cluster, strict=True)),
            cluster=cluster,
            block=block,
            shmem_size=shared,
            **early,
        )

    def _lay_out(self, array):
        """Numba's array argument: meminfo, parent, item count, item size, address, shape, strides
        in bytes."""
        shape = array.shape or (1,)
        strides, step = [], array.dtype.itemsize
        for n in reversed(shape):
            strides.append(step)
            step *= n
        values = (
            0,
            0,
            array.size,
            array.dtype.itemsize,
            self.pointer(array),
            *shape,
            *reversed(strides),
        )
        return (array.dtype, len(shape)), values

    def _load(self, launched, kernel, args):
        """The kernel for these arguments on the card: from the cache, or compiled here and now."""
        check_supported(self, kernel, self.device_name)
        key, function = key_of(kernel, args), None
        code = self.cache.read(key) if is_kept(key) else None
        if code:
            # such as one by a ptxas newer than the driver: compile again
            with contextlib.suppress(Exception):
                function = self._loaded(code)
        if function is None:
            with compiling():
                code = compile_kernel(kernel, key.types, self.cache.capability)
            if is_kept(key):
                with contextlib.suppress(OSError):
                    self.cache.writable()
                    self.cache.write(key, code)
            function = self._loaded(code)
            self.compiled += 1
        self._kernels[launched] = function
        return function

    def _loaded(self, code):
        """Machine code as a function that can be launched, with all the dynamic shared memory that
        it may have."""
        function = self._object_code.from_cubin(code.cubin).get_kernel(code.entry)
        device, attributes = (
            self.check(self._driver.cuCtxGetDevice()),
            self._driver.CUfunction_attribute,
        )
        taken = self.check(
            self._driver.cuKernelGetAttribute(
                attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function.handle, device
            )
        )
        self.check(
            self._driver.cuKernelSetAttribute(
                attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                self.shared_limit - int(taken),
                function.handle,
                device,
            )
        )
        return function
