"""Kernels that Numba compiles before the emulator runs them: `device(compile=True)`.

Numba's own `cuda.jit` and dispatcher stay in place, up to the launch: types, signatures and their
errors, `overloads`, `inspect_llvm()` and `inspect_asm()` are those that a program finds on a
machine with a GPU. Numba's compiler needs none; it writes PTX for the emulated compute capability.
Only what the driver would do is replaced: the device and its context, the loading of a kernel, and
its launch.
"""

import contextlib
import sys

from .faults import Unsupported
from .namespace import Namespace

# Methods of kernels that say what the compiler made of them.
OF_THE_COMPILER = (
    "inspect_llvm",
    "inspect_asm",
    "inspect_sass",
    "inspect_sass_cfg",
    "inspect_lto_ptx",
    "get_regs_per_thread",
    "get_const_mem_size",
    "get_shared_mem_per_block",
    "get_local_mem_per_thread",
)


def refused_without_compiler(name):
    def refuse(kernel, *signature):
        raise Unsupported(
            f"{name} is about what Numba has compiled: enter {__package__}.device(compile=True)."
        )

    return refuse


class Compiled:
    """What a launch runs: a kernel's function, and the types that Numba has compiled it for."""

    def __init__(self, kernel, launch_bounds=None):
        self.py_func, self.__name__ = kernel.py_func, kernel.py_func.__name__
        self.compiled_for = kernel.argument_types
        self.targetoptions = {"launch_bounds": launch_bounds, "debug": kernel.debug}


def patch_compiler(machine, module, patch):
    """Replace what Numba's dispatcher needs a driver for."""
    dispatchers = sys.modules[f"{module.__name__}.dispatcher"]
    kernel = dispatchers._Kernel

    def launch(self, args, griddim, blockdim, stream=0, sharedmem=0):
        types = self.argument_types
        for extension in reversed(self.extensions):
            types, args = zip(
                *(
                    extension.prepare_args(t, a, stream=stream, retr=[])
                    for t, a in zip(types, args, strict=True)
                ),
                strict=True,
            )
        machine.launch(
            Compiled(self, getattr(self, "launch_bounds", None)),
            griddim,
            blockdim,
            *args,
            shared=sharedmem,
        )

    # A kernel's PTX is searched for what to link, and nothing is linked here: NVVM runs when
    # `inspect_asm()` is called.
    libraries = sys.modules[f"{module.__name__}.codegen"].CUDACodeLibrary
    construct, assemble, constructing = kernel.__init__, libraries.get_asm_str, []

    def init(self, *arguments, **options):
        constructing.append(self)
        try:
            construct(self, *arguments, **options)
        finally:
            constructing.pop()

    driver = sys.modules[f"{module.__name__}.cudadrv.driver"]
    if hasattr(driver, "_to_core_stream"):  # in newer versions
        patch(driver, "_to_core_stream", core_stream)
    patch(kernel, "__init__", init)
    patch(
        libraries,
        "get_asm_str",
        lambda self, *cc, **named: "" if constructing else assemble(self, *cc, **named),
    )
    patch(kernel, "launch", launch)
    patch(kernel, "bind", lambda self: None)
    patch(kernel, "max_cooperative_grid_blocks", max_cooperative_blocks)
    patch(
        dispatchers.ForAll,
        "_compute_thread_per_block",
        lambda self, *kernel: self.thread_per_block or 128,
    )


def core_stream(stream):
    """What a launch keeps of its stream. A pickled launch has the handle alone."""
    return stream if hasattr(stream, "handle") else Namespace("a stream", {"handle": stream or 0})


def patch_context(module, context, patch):
    """Numba's modules get the current context and its device from one place."""
    devices = sys.modules.get(f"{module.__name__}.cudadrv.devices")
    runtime = getattr(devices, "_runtime", None)
    if runtime is not None:
        patch(runtime, "get_or_create_context", lambda number=None: context)
        if hasattr(runtime, "ensure_context"):
            patch(runtime, "ensure_context", lambda: contextlib.nullcontext(context))
    allocator = getattr(
        sys.modules.get(f"{module.__name__}.memory_management.nrt"), "_Runtime", None
    )
    if allocator is not None:
        patch_allocator(allocator, patch)


def patch_allocator(allocator, patch):
    """The allocator of arrays that a kernel makes, which numba-cuda compiles and starts on a GPU.

    Programs may start it, and read its statistics: all are 0, as Python allocates what an emulated
    kernel makes.
    """
    enabled, nothing = [False], dict.fromkeys(("alloc", "free", "mi_alloc", "mi_free"), 0)

    def switch(on):
        return lambda self, stream=None: enabled.__setitem__(0, on)

    for name in ("ensure_allocated", "ensure_initialized", "allocate", "initialize"):
        patch(allocator, name, lambda self, stream=None: None)
    patch(allocator, "memsys_enable_stats", switch(True))
    patch(allocator, "memsys_disable_stats", switch(False))
    patch(allocator, "memsys_stats_enabled", lambda self, stream=None: enabled[0])
    patch(allocator, "_copy_memsys_to_host", lambda self, stream: nothing)
    patch(allocator, "_get_single_stat", lambda self, stat, stream=None: nothing[stat])


def max_cooperative_blocks(kernel, blockdim, dynsmemsize=0):
    """How many blocks a cooperative launch may have: 2048 threads on each of two multiprocessors."""
    threads = 1
    for n in blockdim if isinstance(blockdim, tuple) else (blockdim,):
        threads *= n
    return 2 * (2048 // threads)


def overload_of(kernel):
    """What is known of a kernel that Numba would have compiled."""
    return Namespace(
        "a kernel's overload",
        {
            "max_cooperative_grid_blocks": lambda *sizes, **named: max_cooperative_blocks(
                kernel, *sizes, **named
            )
        },
    )
