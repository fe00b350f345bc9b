"""What runs a kernel: arrays, the memory arena, the GPU and its stand-ins, intrinsics, counted randomness."""
from ..errors import UsageError
from .array import (
    DeviceArray,
    copy_into,
    download,
    empty,
    empty_like,
    fill_zero,
    is_device,
    launch,
    set_poison,
    upload,
    zeros,
)
from .cpu import over_batch, prepare_cpu
from .gpu import cuda, get_gpu, why_no_gpu
from .intrinsics import float32, int32, int64, load4, store4, uint32
from .ptx import PtxError

__all__ = ["DeviceArray", "PtxError", "copy_into", "cuda", "download", "empty", "empty_like", "fill_zero", "float32", "get_backend",
           "get_gpu", "int32", "int64", "is_device", "launch", "load4", "over_batch", "set_poison", "store4",
           "synchronize", "uint32", "upload", "why_no_gpu", "zeros"]


def get_backend(name, index=0):
    """What `empty(..., like=...)` takes for a device's name: None for "cpu", the GPU for "cuda", by "auto" either."""
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
    raise UsageError(f"unknown device {name!r}: use auto, cpu, cuda or emulator.")


def synchronize(like):
    """Wait for the device of an array or backend; does nothing for NumPy."""
    backend = like.backend if isinstance(like, DeviceArray) else like
    if backend is not None and hasattr(backend, "synchronize"):
        backend.synchronize()
