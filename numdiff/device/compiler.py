"""From a kernel to machine code, by Numba, NVVM and nvJitLink: needs neither a GPU nor its driver.

The steps are those of Numba's own dispatcher, so the code has the same bits. They are type
inference and lowering to NVVM's intermediate representation (two thirds of the time, in Python),
and its optimisation at link time followed by ptxas (one third). Numba also makes PTX of each
kernel, to look for functions that numdiff's kernels do not use: this is left out. Where nvJitLink
is not installed, PTX is made, and the driver's linker takes it.
"""

import contextlib
import functools
import importlib
import sys
import threading
import time
import types

import numpy as np

from ..extensions import kernel_packages
from .ada import for_ada, lacks_halves
from .array import DeviceArray
from .bfloat16 import bfloat16
from .kernel_cache import Key, MachineCode, is_hashed
from .quick_types import quick_types
from .requires import check_supported
from .turing import for_turing, needs_rewriting

# the first capability whose kernels can wait for the one before them, instead of the driver
DEPENDENT_LAUNCH = (9, 0)


def scalar(value):
    """A Python or NumPy scalar as the NumPy scalar that travels to the kernel: int32, int64 or
    float32 by default."""
    if isinstance(value, (np.number, np.bool_)):
        return value
    if isinstance(value, (bool, int)):
        return np.int32(value) if -(2**31) <= value < 2**31 else np.int64(value)
    return np.float32(value)


def word_of(argument):
    """The type under which `launch` passes an argument, as a word: "float32[2]" for an array with
    two axes, "(int32,float32[1])" for a tuple, with its class before it if that is a NamedTuple's.
    """
    if isinstance(argument, DeviceArray):
        return word(argument.dtype, max(len(argument.shape), 1))
    if isinstance(argument, tuple):
        kind = type(argument)
        name = "" if kind is tuple else f"{kind.__module__}.{kind.__qualname__}"
        return f"{name}({','.join(map(word_of, argument))})"
    return word(scalar(argument).dtype)


@functools.cache  # NumPy is slow to make a name
def word(dtype, axes=0):
    return f"{dtype.name}[{axes}]" if axes else dtype.name


def type_of_word(word):
    """The Numba type that a word names."""
    import numba

    name, parenthesis, rest = word.partition("(")
    if parenthesis:
        module, _, kind = name.rpartition(".")
        return numba.types.BaseTuple.from_types(
            tuple(map(type_of_word, words_within(rest[:-1]))),
            getattr(importlib.import_module(module), kind) if kind else None,
        )
    return _plain_type(word)


@functools.cache  # Numba is slow to make a type
def _plain_type(word):
    """The plain type of an array or a number."""
    import numba

    name, _, rest = word.partition("[")
    kind = (
        bfloat16
        if name == "bfloat16"
        else getattr(numba.types, "boolean" if name == "bool" else name)
    )
    return numba.types.Array(kind, int(rest[:-1]), "C") if rest else kind


def words_within(text):
    """The words between a tuple's parentheses, which may be tuples themselves."""
    words, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            words.append("")
        else:
            words[-1] += letter
    return words


def key_of(kernel, arguments):
    """The `Key` of a `@cuda.jit` kernel with these arguments."""
    function = kernel.py_func
    return Key(function.__module__, function.__name__, tuple(map(word_of, arguments)))


def is_kept(key):
    """Whether a kernel may be found by its name: a user's own kernel may change while its name does
    not."""
    return is_hashed(key.module)


def compile_kernel(kernel, words, capability):
    """The `MachineCode` of a `@cuda.jit` kernel for arguments of the types that these words name,
    and cards of this capability; one that it acts as follows it: (9, 0, 7, 5)."""
    from numba.core.types import void
    from numba.cuda import compiler
    from numba.cuda.cudadrv import nvvm

    check_supported(capability, kernel)
    started, options = time.perf_counter(), kernel.targetoptions
    major, minor = capability[:2]
    rewrite = None  # of its PTX: not at link time
    if needs_rewriting(capability[-2:]):
        rewrite = for_turing
    elif lacks_halves(capability, kernel):
        rewrite = for_ada
    fast = bool(options.get("fastmath"))
    with stand_in((major, minor)), quick_types():
        compiled = compiler.compile_cuda(
            kernel.py_func,
            void,
            tuple(map(type_of_word, words)),
            fastmath=fast,
            cc=(major, minor),
            nvvm_options={"fastmath": fast, "opt": 3 if options.get("opt", True) else 0},
            max_registers=options.get("max_registers"),
            lto=options.get("lto", False) and rewrite is None,
        )
    library, entry = compiled.library, compiled.fndesc.llvm_func_name
    function = library.get_function(entry)
    compiler.kernel_fixup(function, False)
    if (major, minor) >= DEPENDENT_LAUNCH:
        wait_for_the_kernel_before(function)
    nvvm.set_launch_bounds(function, options.get("launch_bounds"))
    target = major, minor, "a" if (major, minor) >= (9, 0) else ""
    if rewrite is not None:
        # Numba keeps the PTX that it links in this table
        library._ptx_cache[target] = [*map(rewrite, library.get_asm_strs(cc=target))]
    cubin = library.get_cubin(cc=target).code
    return MachineCode(entry, bytes(cubin), time.perf_counter() - started)


def wait_for_the_kernel_before(function):
    """Have a kernel, given as LLVM's function, begin by waiting for the one before it: programmatic
    dependent launch.

    The driver may then launch it while that one's last writes are under way, which saves about a
    microsecond a kernel. The wait ends when they are visible, so the results are those of kernels
    that run one after the other (PTX ISA, "griddepcontrol"). It could be launched earlier still, if
    the kernel before it called `launch_dependents` at its start. But then its blocks occupy
    multiprocessors too early, and a training step becomes 1 to 2 % slower.
    """
    from llvmlite import ir

    builder = ir.IRBuilder()
    builder.position_at_start(function.entry_basic_block)
    builder.asm(
        ir.FunctionType(ir.VoidType(), []),
        "griddepcontrol.wait;",
        "~{memory}",
        [],
        side_effect=True,
    )


_turn = threading.RLock()  # what follows swaps a function of Numba's, for all threads


@contextlib.contextmanager
def stand_in(capability):
    """Within the context Numba takes a card of this capability for the current one, which it asks
    for its capability, and nothing else, where a kernel calls a device function. One thread at a
    time."""
    from numba.cuda import dispatcher

    with _turn:
        current = dispatcher.get_current_device
        dispatcher.get_current_device = lambda: types.SimpleNamespace(compute_capability=capability)
        try:
            yield
        finally:
            dispatcher.get_current_device = current


def kernels_by_name(package=None):
    """{(module, name): kernel} of all kernels that the loaded modules of a package hold; None: of
    all that have some.
    """
    modules = [
        m for name, m in list(sys.modules.items()) if name.startswith(package or kernel_packages())
    ]
    kernels = [
        kernel
        for module in modules
        for value in list(vars(module).values())
        for kernel in (value.values() if isinstance(value, dict) else [value])
        if hasattr(kernel, "py_func") and not kernel.targetoptions.get("device")
    ]
    return {(kernel.py_func.__module__, kernel.py_func.__name__): kernel for kernel in kernels}
