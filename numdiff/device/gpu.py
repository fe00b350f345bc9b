"""The GPU: the one module that imports Numba's CUDA target and the CUDA driver bindings.

numba-cuda is in maintenance; moving to its successor changes the import below and the intrinsics, nothing else in
numdiff.

Launching bypasses Numba's dispatcher: arguments are laid out once per array and the compiled kernel is looked up by
its argument types, which leaves about 10 µs a launch where `kernel[grid, block](...)` takes 23 µs and more.
"""
import contextlib
import ctypes
import functools
import threading

import numpy as np
from numba import config, cuda

from ..emulator.launch import in_three
from ..errors import NumdiffError, OutOfMemoryError
from ..progress import compiling
from .arena import Arena
from .array import DeviceArray
from .compiler import DEPENDENT_LAUNCH, compile_kernel, is_kept, key_of, scalar
from .cpu import prepare_cpu
from .kernel_cache import KernelCache
from .requires import check_supported
from .threads import PerThread

MINIMUM_CAPABILITY = (7, 5)  # what CUDA 13's compiler still targets
IPC_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE of cuda.h


_CTYPES = {np.dtype(t): c for t, c in ((np.int32, ctypes.c_int32), (np.uint32, ctypes.c_uint32),
                                       (np.int64, ctypes.c_int64), (np.uint64, ctypes.c_uint64),
                                       (np.float32, ctypes.c_float), (np.float64, ctypes.c_double))}


class Mapping:
    """Memory of another process's GPU, seen from this one. users: how many of its arrays are open."""

    __slots__ = ("address", "users")

    def __init__(self, address):
        self.address, self.users = address, 0


class Turn:
    """Context: only this thread talks to the GPU, whose CUDA context is current in it. Re-entrant.

    All threads share one stream, so what one launches while another records a graph would become part of that graph.
    """

    def __init__(self, device=None):
        self._device, self._lock, self._threads = device, threading.RLock(), threading.local()

    def __enter__(self):
        self._lock.acquire()
        if self._device is not None and not hasattr(self._threads, "ready"):
            self._device.set_current()
            self._threads.ready = True

    def __exit__(self, *exception):
        self._lock.release()


class Gpu:
    """One GPU: its arena, its stream, its compiled kernels. Get it with `get_gpu()`. Any thread may use it.

    tf32: a switch of each thread, initially off. Where it is on, matrix products and convolutions of float32 arrays run
        on tensor cores (sm_80 and later, extents in fours) with operands rounded to tf32 (10 mantissa bits);
        accumulators and all else stay float32. It is read at each launch, so a captured graph keeps the setting it was
        captured with.
    """

    name = "cuda"
    tf32 = PerThread(False)
    turn = Turn()
    _arena = PerThread(None)  # the current one; None: the first
    _branch = None  # of `forked`: a second stream, events of fork and join, and with which options a graph is made then
    _joined = True  # whether nothing is launched there that the first has not waited for
    _waits = False  # whether the next kernel follows others than the one that was launched before it

    def __init__(self, index=0):
        from cuda.bindings import driver
        from cuda.core import Device, LaunchConfig, ObjectCode, launch
        self._driver, self._launch_config, self._core_launch = driver, LaunchConfig, launch
        self._object_code = ObjectCode
        self.index = index
        self.device = Device(index)
        self.device.set_current()
        self.turn = Turn(self.device)
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
        self._parts = None  # while capturing: what a replay will call, one after the other
        self._beside = None  # a stream for uploads meanwhile
        self._early = ({"programmatic_stream_serialization": True}  # which old versions of cuda.core do not know
                       if self.capability >= DEPENDENT_LAUNCH
                       and hasattr(LaunchConfig, "programmatic_stream_serialization") else {})
        self._opened = {}  # handle of another process's allocation -> where it is mapped here
        self._kernels = {}
        self._configs = {}
        self.cache = KernelCache(self.capability)
        self.multiprocessors = self.device.properties.multiprocessor_count
        self.compiled = 0
        lanes = 64 if self.capability in ((7, 5), (8, 0)) else 128  # float32 units of a multiprocessor
        self.peak_float32_flops = 2 * lanes * self.multiprocessors * self.device.properties.clock_rate * 1e3

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return restore_gpu, ()

    def check(self, result):
        """Unwrap a driver call, or raise with the driver's own error name."""
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

    @property
    def arena(self):
        """The arena that new arrays of this thread come from."""
        return self._arena or self.arenas[0]

    def allocate(self, nbytes):
        with self.turn:  # before the arena's own, which may ask for a segment: always in this order
            return self.arena.allocate(nbytes)

    @staticmethod
    def pointer(array):
        return array.memory.address + array.offset

    def upload(self, source, target):
        with self.turn:
            self._upload(source, target)

    def _upload(self, source, target):
        if self._parts is not None:  # while a step is captured: upload now, not in every replay
            if self._beside is None:
                self._beside = self.check(self._driver.cuStreamCreate(
                    self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value))
            self.check(self._driver.cuMemcpyHtoDAsync(self.pointer(target), source.ctypes.data, source.nbytes,
                                                      self._beside))
            self.check(self._driver.cuStreamSynchronize(self._beside))
            return
        self.check(self._driver.cuMemcpyHtoDAsync(self.pointer(target), source.ctypes.data, source.nbytes,
                                                  self._handle))
        self.synchronize()  # the source may be pageable and short-lived

    def download(self, array):
        result = np.empty(array.shape, array.dtype)
        with self.turn:
            if array.size:
                self.check(self._driver.cuMemcpyDtoHAsync(result.ctypes.data, self.pointer(array), array.nbytes,
                                                          self._handle))
            self.synchronize()
        return result

    def copy(self, source, target):
        with self.turn:
            self.check(self._driver.cuMemcpyDtoDAsync(self.pointer(target), self.pointer(source), source.nbytes,
                                                      self._handle))

    def fill(self, array, byte):
        if array.size:
            with self.turn:
                self.check(self._driver.cuMemsetD8Async(self.pointer(array), byte, array.nbytes, self._handle))

    def pinned(self, shape, dtype):
        """A page-locked NumPy array, from which uploads run beside the kernels."""
        return cuda.pinned_array(shape, dtype)

    @property
    def peak_bytes(self):
        """The most bytes that arrays have taken, over all arenas."""
        return sum(arena.peak_bytes for arena in self.arenas)

    def new_arena(self):
        """An arena of its own, for work that is captured: no other may use memory that a replay writes to."""
        self.arenas.append(Arena(self._take_segment))
        return self.arenas[-1]

    def trim(self, arena, keep=()):
        """Give the driver back what an arena has taken from it and does not use: see `Arena.trim`."""
        self.synchronize()
        arena.trim(lambda address: self.check(self._driver.cuMemFree(address)), keep)

    @functools.cached_property
    def inference_arena(self):
        """The arena of all that is computed without gradients: sampling, and predictions."""
        return self.new_arena()

    @contextlib.contextmanager
    def within(self, arena):
        """Inside the context new arrays of this thread come from `arena`."""
        outer, self._arena = self._arena, arena
        try:
            yield
        finally:
            self._arena = outer

    def capture(self, function):
        """Record what `function()` launches as a CUDA graph, running nothing; returns a function that replays it.

        `function` must launch the same kernels over the same addresses each time, allocate within an arena of its own,
        and neither read back nor wait. Where it calls `between(action)` the graph is cut in two, and a replay calls
        `action()` there. (CUDA programming guide, "CUDA Graphs", stream capture.)
        """
        with self.turn:
            self.synchronize()  # uploads during the capture bypass the stream: nothing may be under way there
            self._parts = []
            self._begin_part()
            try:
                function()
            finally:
                self._end_part()
                parts, self._parts = self._parts, None

        def replay():
            for part in parts:
                part()
        return parts[0] if len(parts) == 1 else replay

    def between(self, action):
        """Call `action()`, a function of the host, once everything before it is launched; while capturing, in every
        replay."""
        with self.turn:  # if it is captured, then by this thread
            if self._parts is not None:
                self._end_part()
                self._parts.append(action)
                self._begin_part()
                return
        action()

    @contextlib.contextmanager
    def forked(self):
        """What is launched inside the context goes to a second stream: it waits for all that was launched before, and
        runs beside what follows, until `join`. Its blocks are placed before those that wait in the first stream.

        Captured, it becomes a branch of the graph. No array that it reads or writes may be freed before the join.
        """
        with self.turn:
            self._branch = self._branch or self._open_branch()
            stream, fork, *_ = self._branch
            self.check(self._driver.cuEventRecord(fork, self._handle))
            self.check(self._driver.cuStreamWaitEvent(int(stream.handle), fork, 0))
            outer = self._target, self._handle
            self._target, self._handle, self._joined, self._waits = stream, int(stream.handle), False, True
            try:
                yield
            finally:
                self._target, self._handle = outer

    def _open_branch(self):
        from cuda.core import StreamOptions
        from cuda.core.graph import GraphCompleteOptions
        flag = self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
        return (self.device.create_stream(options=StreamOptions(nonblocking=True, priority=-1)),
                *(self.check(self._driver.cuEventCreate(flag)) for _ in range(2)),
                GraphCompleteOptions(use_node_priority=True))

    def join(self):
        """What is launched from now on waits for what was launched within `forked`."""
        with self.turn:
            if not self._joined:
                stream, _, join, _ = self._branch
                self.check(self._driver.cuEventRecord(join, int(stream.handle)))
                self.check(self._driver.cuStreamWaitEvent(self._handle, join, 0))
                self._joined = self._waits = True

    def signal(self, places):
        """Write 1 into elements [(int32 array, index)] of this or other GPUs' memory, once what was launched before is
        done and can be seen there. (CUDA driver API, "Stream Memory Operations".)"""
        self._operate([self._operation("WRITE", array, index, 1) for array, index in places])

    def await_signals(self, array, indices):
        """What is launched from now on waits until all these elements are 1, and finds 0 there. The stream waits, no
        multiprocessor."""
        self._operate([self._operation(kind, array, index, value)
                       for kind, value in (("WAIT", 1), ("WRITE", 0)) for index in indices])

    def _operation(self, kind, array, index, value):
        driver = self._driver
        made = driver.CUstreamBatchMemOpParams()
        made.operation = getattr(driver.CUstreamBatchMemOpType, f"CU_STREAM_MEM_OP_{kind}_VALUE_32")
        values = made.waitValue if kind == "WAIT" else made.writeValue
        values.operation, values.address = made.operation, driver.CUdeviceptr(self.pointer(array) + 4 * index)
        values.value = driver.cuuint32_t(value)
        values.flags = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ if kind == "WAIT" else
                           driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)
        return made

    def _operate(self, operations):
        with self.turn:
            if operations:
                self.check(self._driver.cuStreamBatchMemOp(self._handle, len(operations), operations, 0))
                self._waits = True

    def _begin_part(self):
        self._target = self.stream.create_graph_builder()
        self._target.begin_building("relaxed")  # relaxed: loading a kernel for the first time is allowed meanwhile

    def _end_part(self):
        self.join()  # a graph cannot end before its branches
        builder, self._target = self._target, self.stream
        builder.end_building()
        graph = builder.complete(*(self._branch or ())[3:])

        def launch():
            with self.turn:
                graph.launch(self.stream)
        self._parts.append(launch)

    # memory of other processes' GPUs -------------------------------------------------------------------------------

    @property
    def stream_handle(self):
        """The driver's handle of the stream, for other libraries that launch into it."""
        return self._handle

    @property
    def uuid(self):
        """The card's own name, the same in every process."""
        return str(self.device.uuid)

    def share(self, array):
        """What another process of this host needs to open `array`, as picklable values.

        A handle names a whole allocation of the driver, so the array's offset in it is part of the answer. The arena's
        segments are such allocations, of 64 MiB and more: the driver puts nothing else in them.
        """
        base = int(self.check(self._driver.cuMemGetAddressRange(self.pointer(array))))
        handle = self.check(self._driver.cuIpcGetMemHandle(base))
        return ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES), self.pointer(array) - base, array.shape, array.dtype

    def open_shared(self, shared):
        """The `DeviceArray` that another process gave to `share`, mapped into this one."""
        data, offset, shape, dtype = shared
        if data not in self._opened:  # one mapping per allocation, however many of its arrays are shared
            handle = self._driver.CUipcMemHandle()
            ctypes.memmove(handle.getPtr(), data, IPC_HANDLE_BYTES)
            lazy = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
            self._opened[data] = Mapping(int(self.check(self._driver.cuIpcOpenMemHandle(handle, lazy.value))))
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

    def synchronize(self):
        """Wait until everything launched so far has run."""
        with self.turn:
            self.stream.sync()

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
        """Add the types of some arguments to `signature`, and what the driver is given for them to `flat`."""
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
        """early: its blocks may take their places before the kernel launched before it has ended."""
        early = self._early if early else {}
        if cluster == 1:
            return self._launch_config(grid=grid, block=block, shmem_size=shared, **early)
        grid, cluster = in_three(grid), in_three(cluster)  # cuda.core counts a grid's clusters, not its blocks
        if any(n % k for n, k in zip(grid, cluster, strict=True)):
            raise ValueError(f"a grid of {grid} blocks cannot be cut into clusters of {cluster}; give a multiple")
        return self._launch_config(grid=tuple(n // k for n, k in zip(grid, cluster, strict=True)), cluster=cluster,
                                   block=block, shmem_size=shared, **early)

    def _lay_out(self, array):
        """Numba's array argument: meminfo, parent, item count, item size, address, shape, strides in bytes."""
        shape = array.shape or (1,)
        strides, step = [], array.dtype.itemsize
        for n in reversed(shape):
            strides.append(step)
            step *= n
        values = (0, 0, array.size, array.dtype.itemsize, self.pointer(array), *shape, *reversed(strides))
        return (array.dtype, len(shape)), values

    def _load(self, launched, kernel, args):
        """The kernel for these arguments on the card: from the cache, or compiled here and now."""
        check_supported(self, kernel, self.device_name)
        key, function = key_of(kernel, args), None
        code = self.cache.read(key) if is_kept(key) else None
        if code:
            with contextlib.suppress(Exception):  # such as one by a ptxas newer than the driver: compile again
                function = self._loaded(code)
        if function is None:
            with compiling():
                code = compile_kernel(kernel, key.types, self.capability)
            if is_kept(key):
                with contextlib.suppress(OSError):
                    self.cache.writable()
                    self.cache.write(key, code)
            function = self._loaded(code)
            self.compiled += 1
        self._kernels[launched] = function
        return function

    def _loaded(self, code):
        """Machine code as a function that can be launched, with all the dynamic shared memory that it may have."""
        function = self._object_code.from_cubin(code.cubin).get_kernel(code.entry)
        device, attributes = self.check(self._driver.cuCtxGetDevice()), self._driver.CUfunction_attribute
        taken = self.check(self._driver.cuKernelGetAttribute(attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
                                                             function.handle, device))
        self.check(self._driver.cuKernelSetAttribute(
            attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            self.device.properties.max_shared_memory_per_block_optin - int(taken), function.handle, device))
        return function


class HostTwin:
    """A page-locked copy of a flat device array on the host, and copies of its parts that run beside the kernels.

    host: the NumPy array. Copies to the host start when what was launched before them is done, and `join` makes later
        launches wait for the copies to the device. Each direction has its own stream, as the card has a copy engine for
        each.
    """

    def __init__(self, array):
        self.array, self.gpu = array, array.backend
        self.host = self.gpu.pinned(array.shape, array.dtype)
        driver, check = self.gpu._driver, self.gpu.check
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        self._down, self._up = (check(driver.cuStreamCreate(flags)) for _ in range(2))
        self._events = {}

    def _record(self, name, stream):
        """The event of that name, recorded in a stream: it happens when all before it in the stream is done."""
        driver, check = self.gpu._driver, self.gpu.check
        if name not in self._events:
            self._events[name] = check(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value))
        check(driver.cuEventRecord(self._events[name], stream))
        return self._events[name]

    def _copy(self, copy, first, stop, stream):
        size = self.array.dtype.itemsize
        device, host = self.gpu.pointer(self.array) + first * size, self.host.ctypes.data + first * size
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
        """What is launched from now on waits for what was sent."""
        with self.gpu.turn:
            self.gpu.check(self.gpu._driver.cuStreamWaitEvent(self.gpu._handle, self._record("sent", self._up), 0))


def restore_gpu():
    """The device of a pickled array: the GPU; where there is none, the CPU."""
    if not why_no_gpu():
        return get_gpu()
    prepare_cpu()
    return None


_opening = threading.Lock()  # two threads must not set one GPU up twice
_chosen = 0  # index of the GPU that `get_gpu()` gives


def choose_gpu(index):
    """Make `get_gpu()` give the GPU with this index: each rank of a job has its own."""
    global _chosen
    _chosen = index


def get_gpu(index=None):
    """The GPU with this index (default: the chosen one), set up once; a `NumdiffError` says why where there is none."""
    with _opening:
        return _open_gpu(_chosen if index is None else index)


@functools.cache
def _open_gpu(index):
    reason = why_no_gpu()
    if reason:
        raise NumdiffError(f"no GPU can be used: {reason}; use --device cpu.")
    return Gpu(index)


def is_open():
    """Whether this process has set up a GPU."""
    return _open_gpu.cache_info().currsize > 0


def gpu_count():
    """How many GPUs this process sees."""
    if why_no_gpu():
        return 0
    from cuda.bindings import driver
    return int(driver.cuDeviceGetCount()[1])


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
