"""The kernels' runtime: arrays, the memory arena, the GPU and its stand-ins, intrinsics, counted
randomness."""

import contextlib

from ..errors import UsageError, quoted
from .array import (
    AnyArray,
    DeviceArray,
    copy_into,
    download,
    empty,
    empty_like,
    fill_zero,
    is_device,
    lasting,
    launch,
    set_poison,
    upload,
    with_dtype,
    zeros,
)
from .cpu import (
    cores,
    on_host,
    one_after_another,
    over_batch,
    prepare_cpu,
    share_cores,
    side_by_side,
    workers,
)
from .gpu import choose_gpu, cuda, device_inline, get_gpu, gpu_count, why_no_gpu
from .gpu_graphs import EXCHANGE, GRADIENTS
from .host_twin import HostTwin
from .intrinsics import float32, int32, int64, load4, opaque, product, store4, uint32
from .planned import is_planned
from .ptx import PtxError
from .replay import Replayed
from .system_scope import load_acquire, nanoseconds, store_release

__all__ = [
    "AnyArray",
    "DeviceArray",
    "EXCHANGE",
    "GRADIENTS",
    "HostTwin",
    "PtxError",
    "Replayed",
    "opaque",
    "between",
    "choose_gpu",
    "copy_into",
    "cores",
    "cuda",
    "device_inline",
    "download",
    "empty",
    "empty_like",
    "fill_zero",
    "float32",
    "forked",
    "get_backend",
    "get_gpu",
    "gpu_count",
    "int32",
    "int64",
    "is_device",
    "is_planned",
    "join",
    "lasting",
    "launch",
    "load4",
    "load_acquire",
    "nanoseconds",
    "on_host",
    "one_after_another",
    "over_batch",
    "product",
    "set_poison",
    "share_cores",
    "side_by_side",
    "store4",
    "store_release",
    "synchronize",
    "uint32",
    "upload",
    "why_no_gpu",
    "with_dtype",
    "workers",
    "zeros",
]


def get_backend(name, index=None):
    """What `empty(..., like=...)` takes for a device's name: None for "cpu", the GPU for "cuda", by
    "auto" either.

    index: of the GPU; None: the one that `choose_gpu` set, initially 0.
    """
    if name == "auto":
        name = "cpu" if why_no_gpu() else "cuda"
    if name == "cpu":
        prepare_cpu()
        return None
    if name == "cuda":
        return get_gpu(index)
    if name == "emulator":
        from .emulator import get_emulator

        return get_emulator(float64=False)
    if name == "ptx":
        from .ptx import get_ptx_device

        return get_ptx_device()
    raise UsageError(f"unknown device {quoted(name)}: use auto, cpu, cuda or emulator.")


def between(backend, action):
    """Call `action()`, a function of the host, at this place among the launches, and in every
    replay."""
    if hasattr(backend, "between"):
        backend.between(action)
    else:
        action()


def forked(backend, branch=EXCHANGE):
    """Context: work launched inside runs concurrently with work launched after it, until `join`. On
    devices other than a GPU everything runs in order. branch: which of the side streams."""
    return backend.forked(branch) if hasattr(backend, "forked") else contextlib.nullcontext()


def join(backend, branch=EXCHANGE):
    """Later launches wait for the work launched within `forked`."""
    if hasattr(backend, "join"):
        backend.join(branch)


def synchronize(like):
    """Wait for the device of an array or backend; does nothing for NumPy."""
    backend = like.backend if isinstance(like, DeviceArray) else like
    if backend is not None and hasattr(backend, "synchronize"):
        backend.synchronize()
