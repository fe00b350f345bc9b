"""A device array's copy on the host; transfers of its parts overlap the kernels."""


class HostTwin:
    """A page-locked copy of a flat device array on the host; transfers of its parts overlap the
    kernels.

    host: the NumPy array. Copies to the host start when what was launched before them is done, and
        `join` makes later launches wait for the copies to the device. Each direction has its own
        stream, as the card has a copy engine for each.
    """

    def __init__(self, array):
        self.array, self.gpu = array, array.backend
        self.host = self.gpu.pinned(array.shape, array.dtype)
        driver, check = self.gpu._driver, self.gpu.check
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        self._down, self._up = (check(driver.cuStreamCreate(flags)) for _ in range(2))
        self._events = {}

    def _record(self, name, stream):
        """The event of that name, recorded in a stream: it happens when all before it in the stream
        is done."""
        driver, check = self.gpu._driver, self.gpu.check
        if name not in self._events:
            self._events[name] = check(
                driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value)
            )
        check(driver.cuEventRecord(self._events[name], stream))
        return self._events[name]

    def _copy(self, copy, first, stop, stream):
        size = self.array.dtype.itemsize
        device, host = (
            self.gpu.pointer(self.array) + first * size,
            self.host.ctypes.data + first * size,
        )
        ends = (host, device) if copy is self.gpu._driver.cuMemcpyDtoHAsync else (device, host)
        self.gpu.check(copy(*ends, (stop - first) * size, stream))

    def fetch(self, first, stop):
        """Begin to copy elements first … stop-1 to the host."""
        with self.gpu.turn:
            computed = self._record("computed", self.gpu._handle)
        self.gpu.check(self.gpu._driver.cuStreamWaitEvent(self._down, computed, 0))
        self._copy(self.gpu._driver.cuMemcpyDtoHAsync, first, stop, self._down)
        self._record(first, self._down)

    def fetched(self, first):
        """Whether the copy that began at element `first` has arrived."""
        result = self.gpu._driver.cuEventQuery(self._events[first])
        if int(result[0]) == int(self.gpu._driver.CUresult.CUDA_ERROR_NOT_READY):
            return False
        self.gpu.check(result)
        return True

    def send(self, first, stop):
        """Begin to copy elements first … stop-1 back to the device."""
        self._copy(self.gpu._driver.cuMemcpyHtoDAsync, first, stop, self._up)

    def join(self):
        """Later launches wait for what was sent."""
        with self.gpu.turn:
            self.gpu.check(
                self.gpu._driver.cuStreamWaitEvent(
                    self.gpu._handle, self._record("sent", self._up), 0
                )
            )
