"""Arrays of other processes' GPUs, through CUDA's IPC handles: given away, opened, closed; signals
between them."""

import ctypes

from .array import DeviceArray

IPC_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE of cuda.h


class Mapping:
    """Memory of another process's GPU, seen from this one. users: how many of its arrays are open."""

    __slots__ = ("address", "users")

    def __init__(self, address):
        self.address, self.users = address, 0


class SharedArrays:
    """The part of a `Gpu` that shares arrays with other processes of this host, and signals to them
    and waits."""

    @property
    def uuid(self):
        """The card's own name, the same in every process."""
        return str(self.device.uuid)

    def share(self, array):
        """The handle with which another process of this host opens `array`, as picklable values.

        A handle names a whole allocation of the driver, so the array's offset in it is part of the
        answer. The arena's segments are such allocations, of 64 MiB and more: the driver puts
        nothing else in them.
        """
        base = int(self.check(self._driver.cuMemGetAddressRange(self.pointer(array))))
        handle = self.check(self._driver.cuIpcGetMemHandle(base))
        return (
            ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES),
            self.pointer(array) - base,
            array.shape,
            array.dtype,
        )

    def open_shared(self, shared):
        """The `DeviceArray` that another process gave to `share`, mapped into this one."""
        data, offset, shape, dtype = shared
        # one mapping per allocation, however many of its arrays are shared
        if data not in self._opened:
            handle = self._driver.CUipcMemHandle()
            ctypes.memmove(handle.getPtr(), data, IPC_HANDLE_BYTES)
            lazy = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
            self._opened[data] = Mapping(
                int(self.check(self._driver.cuIpcOpenMemHandle(handle, lazy.value)))
            )
        self._opened[data].users += 1
        return DeviceArray(self, shape, dtype, self._opened[data], offset)

    def close_shared(self, arrays):
        """Unmap arrays that `open_shared` has opened, which no kernel may use any more."""
        self.synchronize()
        for array in arrays:
            array.memory.users -= 1
        for data, mapping in [*self._opened.items()]:
            if not mapping.users:
                del self._opened[data]
                self.check(self._driver.cuIpcCloseMemHandle(mapping.address))

    def signal(self, places):
        """Write 1 into elements [(int32 array, index)] of this or other GPUs' memory, once what was
        launched before is done and can be seen there. (CUDA driver API, "Stream Memory
        Operations".)"""
        self._operate([self._operation("WRITE", array, index, 1) for array, index in places])

    def await_signals(self, array, indices):
        """Later launches wait until all these elements are 1, and find 0 there. The stream waits,
        no multiprocessor."""
        self._operate(
            [
                self._operation(kind, array, index, value)
                for kind, value in (("WAIT", 1), ("WRITE", 0))
                for index in indices
            ]
        )

    def _operation(self, kind, array, index, value):
        driver = self._driver
        made = driver.CUstreamBatchMemOpParams()
        made.operation = getattr(driver.CUstreamBatchMemOpType, f"CU_STREAM_MEM_OP_{kind}_VALUE_32")
        values = made.waitValue if kind == "WAIT" else made.writeValue
        values.operation, values.address = (
            made.operation,
            driver.CUdeviceptr(self.pointer(array) + 4 * index),
        )
        values.value = driver.cuuint32_t(value)
        values.flags = int(
            driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
            if kind == "WAIT"
            else driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
        )
        return made

    def _operate(self, operations):
        with self.turn:
            if operations:
                self.check(
                    self._driver.cuStreamBatchMemOp(self._handle, len(operations), operations, 0)
                )
                self._waits = True
