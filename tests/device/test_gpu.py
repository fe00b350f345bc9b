"""What a GPU's failures look like to a user, with a driver that fails on request; no GPU is needed."""

import ctypes
import types

import numpy as np
import pytest

from numdiff.device import DeviceArray, get_backend
from numdiff.device.arena import Arena
from numdiff.device.gpu import Gpu
from numdiff.device.gpu_graphs import EXCHANGE, GRADIENTS, Branch
from numdiff.device.gpu_shared import Mapping
from numdiff.device.host_twin import HostTwin
from numdiff.errors import NumdiffError, OutOfMemoryError, UsageError


def gpu_without_a_driver():
    gpu = Gpu.__new__(Gpu)
    gpu.shared_limit, gpu.capability = 227 << 10, (9, 0)
    return gpu


def gpu_whose_allocation_gives(result):
    """A Gpu over a stand-in for the driver bindings."""
    gpu = gpu_without_a_driver()
    gpu.device_name = "Test GPU"
    gpu._driver = types.SimpleNamespace(
        cuMemAlloc=lambda nbytes: result,
        cuMemGetInfo=lambda: (0, 3 << 20, 80 << 20),
        CUresult=types.SimpleNamespace(CUDA_ERROR_OUT_OF_MEMORY=2),
    )
    gpu.arenas = [Arena(gpu._take_segment)]
    gpu._arena = gpu.arenas[0]
    return gpu


class Status(int):
    name = "CUDA_ERROR_ILLEGAL_ADDRESS"


def test_out_of_memory_says_how_much_and_what_to_do():
    with pytest.raises(
        OutOfMemoryError, match=r"Test GPU is out of memory: 64 MiB .* 3 of 80 MiB .* --microbatch"
    ):
        gpu_whose_allocation_gives((Status(2),)).allocate(1000)


def test_other_driver_errors_carry_the_drivers_word():
    with pytest.raises(NumdiffError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        gpu_whose_allocation_gives((Status(700),)).allocate(1000)


def test_an_unknown_device_is_a_usage_error():
    with pytest.raises(UsageError, match="use auto, cpu, cuda or emulator"):
        get_backend("gpu")


def test_a_grid_counts_blocks_also_where_they_form_clusters():
    gpu = gpu_without_a_driver()
    gpu._launch_config, gpu._early = dict, {}  # cuda.core counts clusters
    assert gpu._configure((6, 2, 8), 64, 100, (1, 1, 4)) == {
        "grid": (6, 2, 2),
        "cluster": (1, 1, 4),
        "block": 64,
        "shmem_size": 100,
    }
    assert gpu._configure(6, 64, 0, 2) == {
        "grid": (3, 1, 1),
        "cluster": (2, 1, 1),
        "block": 64,
        "shmem_size": 0,
    }
    assert gpu._configure(6, 64, 0, 1) == {"grid": 6, "block": 64, "shmem_size": 0}
    with pytest.raises(ValueError, match="cannot be cut into clusters"):
        gpu._configure((6, 2, 8), 64, 0, (1, 1, 3))


# A captured step that is cut in parts -------------------------------------------------------------


class Builder:
    """Stands for cuda.core's GraphBuilder: a graph is the list of what was launched into it."""

    def __init__(self, run):
        self.launched, self.run, self.state = [], run, "new"

    def begin_building(self, mode):
        assert self.state == "new"
        self.state = "building"

    def end_building(self):
        assert self.state == "building"
        self.state = "ended"

    def complete(self, options=None):
        assert self.state == "ended"
        return types.SimpleNamespace(launch=lambda stream: self.run.extend(self.launched))


def capturing_gpu(run):
    gpu = gpu_without_a_driver()
    gpu._parts, gpu._branches = None, {}
    gpu.stream = types.SimpleNamespace(
        create_graph_builder=lambda: Builder(run), launched=run, sync=lambda: None
    )
    gpu._target = gpu.stream
    return gpu


def test_a_capture_is_cut_where_the_host_has_a_word():
    run = []
    gpu = capturing_gpu(run)

    def step():
        gpu._target.launched.append("forward")
        gpu.between(lambda: run.append("host 1"))
        gpu._target.launched.append("backward")
        gpu.between(lambda: run.append("host 2"))
        gpu._target.launched.append("update")

    whole = ["forward", "host 1", "backward", "host 2", "update"]
    step()
    assert run == whole  # eager: in place
    run.clear()
    replay = gpu.capture(step)
    assert run == [] and gpu._target is gpu.stream  # capturing runs nothing
    replay()
    replay()
    assert run == 2 * whole


def test_a_capture_that_fails_leaves_the_stream_free():
    gpu = capturing_gpu([])
    with pytest.raises(ZeroDivisionError):
        gpu.capture(lambda: 1 / 0)
    assert gpu._target is gpu.stream and gpu._parts is None


def forking_gpu(said, run):
    """One that says what is launched where, and what waits for what."""
    gpu = capturing_gpu(run)
    gpu._handle, events = 1, iter(("mark 0", "mark 1"))
    streams = {
        EXCHANGE: types.SimpleNamespace(handle=2, launched=run),
        GRADIENTS: types.SimpleNamespace(handle=3, launched=run),
    }
    for (name, stream), more in zip(streams.items(), ("", " 3"), strict=True):
        gpu._branches[name] = branch = Branch.__new__(Branch)
        branch.stream, branch.handle, branch.joined, branch.marks, branch.marked = (
            stream,
            stream.handle,
            True,
            [],
            0,
        )
        branch.fork, branch.join = f"fork{more}", f"join{more}"
    gpu.new_event = lambda: next(events)
    gpu._driver = types.SimpleNamespace(
        cuEventRecord=lambda event, stream: said.append(f"{event} after {stream}") or (0,),
        cuStreamWaitEvent=lambda stream, event, flags: (
            said.append(f"{stream} waits for {event}") or (0,)
        ),
    )
    gpu._kernels, gpu._early = {("kernel",): "kernel"}, {"early": True}
    gpu._configs, gpu._launch_config = {}, lambda grid, block, shmem_size, early=False: early
    names = {2: "second", 3: "third"}
    gpu._core_launch = lambda target, early, kernel: said.append(
        f"{names.get(getattr(target, 'handle', 1), 'first')}{', early' * early}"
    )
    return gpu


def test_a_second_stream_waits_for_the_first_and_is_waited_for():
    """The first kernel that follows another stream's does not take its place early; a graph ends
    joined."""
    said, run = [], []
    gpu = forking_gpu(said, run)

    def step():
        gpu.launch("kernel", 1, 32, ())
        for _ in range(2):
            with gpu.forked():
                gpu.launch("kernel", 1, 32, ())
                gpu.launch("kernel", 1, 32, ())
            gpu.launch("kernel", 1, 32, ())
        gpu.join()
        gpu.join()  # of nothing more
        gpu.launch("kernel", 1, 32, ())

    fork = ["fork after 1", "2 waits for fork", "second", "second, early", "first, early"]
    join = ["join after 2", "1 waits for join"]
    step()
    assert (
        said == ["first, early", *fork, *fork, *join, "first"]
        and gpu._target is gpu.stream
        and gpu._handle == 1
    )
    said.clear()

    def unjoined():
        with gpu.forked():
            gpu.launch("kernel", 1, 32, ())

    gpu.capture(unjoined)
    assert said == [*fork[:3], *join]


def test_each_branch_is_waited_for_by_itself_and_up_to_a_mark():
    said, run = [], []
    gpu = forking_gpu(said, run)
    marks = []
    for _ in range(2):
        with gpu.forked(GRADIENTS):
            pass
        marks.append(gpu.mark(GRADIENTS))
    gpu.join()  # the other one, to which nothing was launched
    assert gpu.recording is False
    said.clear()
    gpu.wait_for(marks[0])
    gpu.launch("kernel", 1, 32, ())
    assert said == ["1 waits for mark 0", "first"]
    gpu.join(GRADIENTS)
    said.clear()
    with gpu.forked(GRADIENTS):
        pass
    assert gpu.mark(GRADIENTS) == marks[0]  # after a join marks are used again
    assert said[-1] == "mark 0 after 3"


# Memory shared with other processes ---------------------------------------------------------------


def test_arrays_of_one_allocation_are_opened_once_and_keep_their_places():
    driver = pytest.importorskip("cuda.bindings.driver")
    opened, closed = [], []

    def handle_of(base):
        handle = driver.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), base.to_bytes(8, "little") + bytes(range(56)), 64)
        return 0, handle

    def open_handle(handle, flags):
        data = ctypes.string_at(handle.getPtr(), 64)
        assert data[8:] == bytes(range(56)) and flags == 1
        opened.append(int.from_bytes(data[:8], "little"))
        return 0, opened[-1] + (1 << 40)  # the peer sees it elsewhere

    gpu = gpu_without_a_driver()
    gpu._opened, gpu.synchronize = {}, lambda: None
    gpu._driver = types.SimpleNamespace(
        CUipcMemHandle=driver.CUipcMemHandle,
        CUipcMem_flags=driver.CUipcMem_flags,
        cuMemGetAddressRange=lambda pointer: (0, pointer >> 26 << 26, 1 << 26),
        cuIpcGetMemHandle=handle_of,
        cuIpcOpenMemHandle=open_handle,
        cuIpcCloseMemHandle=lambda address: closed.append(address) or (0,),
    )
    first = DeviceArray(gpu, (100,), np.float32, Mapping(5 << 26), 4096)
    second = DeviceArray(gpu, (7,), np.int32, Mapping(5 << 26), 8192)
    there = [gpu.open_shared(gpu.share(array)) for array in (first, second)]
    assert opened == [5 << 26]
    assert [gpu.pointer(a) - (1 << 40) for a in there] == [(5 << 26) + 4096, (5 << 26) + 8192]
    assert [(a.shape, a.dtype) for a in there] == [((100,), np.float32), ((7,), np.int32)]
    gpu.close_shared(there[:1])
    assert not closed  # another one of the allocation is in use
    gpu.close_shared(there[1:])
    assert closed == [(5 << 26) + (1 << 40)] and not gpu._opened


# A gradient's twin on the host --------------------------------------------------------------------


def test_copies_overlap_the_kernels_and_are_waited_for():
    """The order of the driver's calls: a copy down waits for the kernels before it, the kernels
    after for copies up."""
    calls, ready = [], {"word": 600}

    def note(name, result=(0,)):
        return lambda *arguments: calls.append((name, *arguments)) or result

    streams, events = iter(["down", "up"]), iter(["computed", "first", "sent"])
    driver = types.SimpleNamespace(
        CUstream_flags=types.SimpleNamespace(CU_STREAM_NON_BLOCKING=types.SimpleNamespace(value=1)),
        CUevent_flags=types.SimpleNamespace(CU_EVENT_DISABLE_TIMING=types.SimpleNamespace(value=2)),
        CUresult=types.SimpleNamespace(CUDA_ERROR_NOT_READY=600),
        cuStreamCreate=lambda flags: (0, next(streams)),
        cuEventCreate=lambda flags: (0, next(events)),
        cuEventRecord=note("record"),
        cuStreamWaitEvent=note("wait"),
        cuMemcpyDtoHAsync=note("down"),
        cuMemcpyHtoDAsync=note("up"),
        cuEventQuery=lambda event: (ready["word"],),
    )
    gpu = gpu_without_a_driver()
    gpu._driver, gpu._handle, gpu.pinned = driver, "main", np.zeros
    twin = HostTwin(DeviceArray(gpu, (100,), np.float32, Mapping(4096), 0))
    host = twin.host.ctypes.data
    twin.fetch(10, 30)
    assert calls == [
        ("record", "computed", "main"),
        ("wait", "down", "computed", 0),
        ("down", host + 40, 4096 + 40, 80, "down"),
        ("record", "first", "down"),
    ]
    assert not twin.fetched(10)
    ready["word"] = 0
    assert twin.fetched(10)
    calls.clear()
    twin.send(10, 30)
    twin.join()
    assert calls == [
        ("up", 4096 + 40, host + 40, 80, "up"),
        ("record", "sent", "up"),
        ("wait", "main", "sent", 0),
    ]
