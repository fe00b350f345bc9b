"""Kernels that Numba compiles before the emulator runs them: `device(compile=True)`.

Numba's own `cuda.jit` and dispatcher stay in place, up to the launch: types, signatures and their
errors, `overloads`, `inspect_llvm()` and `inspect_asm()` are those that a program finds on a
machine with a GPU. Numba's compiler needs none; it writes PTX for the emulated compute capability.
Only what the driver would do is replaced: the device and its context, the loading of a kernel, and
its launch.
"""

import sys


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


def patch_context(module, context, patch):
    """Numba's modules get the current context and its device from one place."""
    devices = sys.modules.get(f"{module.__name__}.cudadrv.devices")
    runtime = getattr(devices, "_runtime", None)
    if runtime is not None:
        patch(runtime, "get_or_create_context", lambda number=None: context)


def max_cooperative_blocks(kernel, blockdim, dynsmemsize=0):
    """How many blocks a cooperative launch may have: 2048 threads on each of two multiprocessors."""
    threads = 1
    for n in blockdim if isinstance(blockdim, tuple) else (blockdim,):
        threads *= n
    return 2 * (2048 // threads)
