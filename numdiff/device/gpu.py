"""The GPU: the one module that imports Numba's CUDA target and, with gpu_graphs.py, the CUDA driver
bindings.

numba-cuda is in maintenance; moving to its successor changes the import below and the intrinsics,
nothing else in numdiff. Launching is in gpu_launch.py, graphs are in gpu_graphs.py, arrays of other
processes in gpu_shared.py.
"""

import contextlib
import functools
import threading

import numpy as np
from numba import cuda

from ..emulator.host import is_simulator
from ..errors import NumdiffError, OutOfMemoryError, UsageError
from .arena import Arena
from .capability import MINIMUM_CAPABILITY, acting_capability, dotted, shared_of
from .compiler import DEPENDENT_LAUNCH
from .cpu import prepare_cpu
from .gpu_graphs import Graphs
from .gpu_launch import Launching
from .gpu_shared import SharedArrays
from .kernel_cache import KernelCache
from .threads import PerThread
from .turing import needs_rewriting

if is_simulator(cuda):  # at once: what follows cannot even be imported with it
    raise UsageError(
        "NUMBA_ENABLE_CUDASIM is set, so Numba's simulator stands in for its CUDA compiler: unset it; "
        "numdiff's emulator, which runs kernels without a GPU, needs no such variable."
    )


# the decorator of a kernel's device functions that are always inlined into their caller
device_inline = cuda.jit(device=True, forceinline=True)


class Turn:
    """Context: only this thread talks to the GPU, whose CUDA context is current in it. Re-entrant.

    All threads share one stream, so what one launches while another records a graph would become
    part of that graph.
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


# bytes of the card that a context takes by itself, as measured on an H200
CONTEXT = 526 << 20


class Gpu(Graphs, Launching, SharedArrays):
    """One GPU: its arena, its stream, its compiled kernels. Get it with `get_gpu()`. Any thread may
    use it.

    capability: (major, minor) by which launchers choose, the card's own unless NUMDIFF_CAPABILITY
    names a lower one
    shared_limit: bytes of shared memory that a block may have with that capability
    tf32: a switch of each thread, initially off. Where it is on, matrix products and convolutions
        of float32 arrays run on tensor cores (sm_80 and later, extents in fours) with operands
        rounded to tf32 (10 mantissa bits); accumulators and all else stay float32. It is read at
        each launch, so a captured graph keeps the setting it was captured with.
    """

    name = "cuda"
    tf32 = PerThread(False)
    turn = Turn()
    _arena = PerThread(None)  # the current one; None: the first

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
        own = tuple(self.device.compute_capability)
        self.device_name = self.device.name
        if own < MINIMUM_CAPABILITY:
            raise NumdiffError(
                f"{self.device_name} has compute capability {dotted(own)}, numdiff needs 7.5 (Turing) "
                "or later; use --device cpu."
            )
        self.capability = acting_capability(own)
        self.shared_limit = self.device.properties.max_shared_memory_per_block_optin
        if self.capability != own:
            self.device_name += f" as {dotted(self.capability)}"
            self.shared_limit = min(self.shared_limit, shared_of(self.capability))
        self.stream = self.device.create_stream()
        # where launches go: the stream, or a graph builder that records them
        self._target = self.stream
        self._handle = int(self.stream.handle)
        # the first for everything, the others for one captured step each
        self.arenas = [Arena(self._take_segment)]
        self._parts = None  # while capturing: what a replay will call, one after the other
        self._beside = None  # a stream for uploads meanwhile
        self._branches = {}  # name -> `Branch`
        # which old versions of cuda.core do not know
        self._early = (
            {"programmatic_stream_serialization": True}
            if self.capability >= DEPENDENT_LAUNCH
            and hasattr(LaunchConfig, "programmatic_stream_serialization")
            else {}
        )
        free, total = self.memory_info()
        self._taken = total - free  # by this context and other processes
        self._opened = {}  # handle of another process's allocation -> where it is mapped here
        self._kernels = {}
        self._configs = {}
        acts = (
            self.capability if self.capability != own and needs_rewriting(self.capability) else ()
        )
        self.cache = KernelCache((*own, *acts))
        self.multiprocessors = self.device.properties.multiprocessor_count
        self.compiled = 0
        lanes = 64 if own in ((7, 5), (8, 0)) else 128  # float32 units of a multiprocessor
        self.peak_float32_flops = (
            2 * lanes * self.multiprocessors * self.device.properties.clock_rate * 1e3
        )

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return restore_gpu, ()

    def check(self, result):
        """Unwrap a driver call, or raise with the driver's own error name."""
        if int(result[0]) != 0:
            raise NumdiffError(
                f"the CUDA driver reported {result[0].name}; if it repeats, run with --device cpu."
            )
        return result[1] if len(result) > 1 else None

    def _take_segment(self, nbytes):
        result = self._driver.cuMemAlloc(nbytes)
        if int(result[0]) == int(self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY):
            free, total = self.memory_info()
            raise OutOfMemoryError(
                f"{self.device_name} is out of memory: {nbytes >> 20} MiB more were requested, "
                f"{free >> 20} of {total >> 20} MiB are free; use a smaller --microbatch or a smaller model."
            )
        return int(self.check(result))

    def memory_info(self):
        """(free, total) bytes of the card."""
        result = self._driver.cuMemGetInfo()
        return int(result[1]), int(result[2])

    # the backend's methods ------------------------------------------------------------------------

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
                self._beside = self.check(
                    self._driver.cuStreamCreate(
                        self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
                    )
                )
            self.check(
                self._driver.cuMemcpyHtoDAsync(
                    self.pointer(target), source.ctypes.data, source.nbytes, self._beside
                )
            )
            self.check(self._driver.cuStreamSynchronize(self._beside))
            return
        self.check(
            self._driver.cuMemcpyHtoDAsync(
                self.pointer(target), source.ctypes.data, source.nbytes, self._handle
            )
        )
        self.synchronize()  # the source may be pageable and short-lived

    def download(self, array):
        result = np.empty(array.shape, array.dtype)
        with self.turn:
            if array.size:
                self.check(
                    self._driver.cuMemcpyDtoHAsync(
                        result.ctypes.data, self.pointer(array), array.nbytes, self._handle
                    )
                )
            self.synchronize()
        return result

    def copy(self, source, target):
        with self.turn:
            self.check(
                self._driver.cuMemcpyDtoDAsync(
                    self.pointer(target), self.pointer(source), source.nbytes, self._handle
                )
            )

    def fill(self, array, byte):
        if array.size:
            with self.turn:
                self.check(
                    self._driver.cuMemsetD8Async(
                        self.pointer(array), byte, array.nbytes, self._handle
                    )
                )

    def pinned(self, shape, dtype):
        """A page-locked NumPy array; uploads from it overlap the kernels."""
        return cuda.pinned_array(shape, dtype)

    @property
    def process_bytes(self):
        """Bytes of the card that this process takes: its context, what the card has less of since,
        and at least the arenas' segments. Arenas keep their segments, so it is the peak so far."""
        free, total = self.memory_info()
        arrays = sum(arena.reserved_bytes for arena in self.arenas)
        return CONTEXT + max(total - free - self._taken, arrays)

    @property
    def peak_bytes(self):
        """The most bytes that arrays have taken, over all arenas."""
        return sum(arena.peak_bytes for arena in self.arenas)

    def new_arena(self):
        """An arena of its own, for work that is captured: no other may use memory that a replay
        writes to."""
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

    @property
    def stream_handle(self):
        """The driver's handle of the stream, for other libraries that launch into it."""
        return self._handle

    def synchronize(self):
        """Wait until everything launched so far has run."""
        with self.turn:
            self.stream.sync()


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
    """The GPU with this index (default: the chosen one), set up once; a `NumdiffError` says why
    where there is none."""
    with _opening:
        return _open_gpu(_chosen if index is None else index)


@functools.cache
def _open_gpu(index):
    reason = why_no_gpu()
    if reason:
        raise NumdiffError(f"no GPU can be used: {reason}; use the CPU or the emulator.")
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
    """None if a GPU can be used, else the reason in a few words."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        return f"the CUDA bindings cannot be imported ({error}); pip install 'numdiff-diffusion[cuda13]'"
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
