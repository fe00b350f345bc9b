"""Kernels become machine code without a GPU: the code that Numba's own dispatcher makes."""

import subprocess
import sys

import numpy as np
import pytest
from numba.cuda import dispatcher
from numba.cuda.cudadrv import devices

from numdiff.device import compiler, cuda, empty
from numdiff.device.compiler import compile_kernel, is_kept, kernels_by_name, key_of, type_of_word
from numdiff.device.half import find_kernel
from numdiff.device.kernel_cache import Key
from numdiff.device.ptx import get_ptx_device
from numdiff.extras.kernel_check import run as check  # noqa: F401 - loads every kernel
from numdiff.kernels.elementwise import GELU as CHAIN
from tests.conftest import quick
from tests.kernels.ptx_equal import instructions

SILU = Key("numdiff.kernels.elementwise", "silu_forward_kernel_v2", ("float32[1]", "float32[1]"))
ATTENTION = Key(
    "numdiff.extras.levels.attention.simple", "flash_attention_forward_kernel_v1_32", ()
)


def test_same_code_as_numbas_dispatcher(monkeypatch):
    class Context:
        device = type("Device", (), {"compute_capability": (8, 0)})

    monkeypatch.setattr(dispatcher, "get_current_device", lambda: Context.device)
    monkeypatch.setattr(devices, "get_context", lambda: Context)
    kernel = find_kernel(SILU)
    theirs = dispatcher._Kernel(
        kernel.py_func, tuple(map(type_of_word, SILU.types)), **kernel.targetoptions
    )
    ours = compile_kernel(kernel, SILU.types, (8, 0))
    (code,) = instructions(ours.cubin)
    assert [code] == instructions(theirs._codelibrary.get_cubin().code) and len(code) > 256
    assert ours.entry.encode() in ours.cubin and ours.seconds > 0


def test_from_hopper_on_a_kernel_waits_for_the_one_before_it(monkeypatch):
    """Its first instruction, whatever else it does; and nothing else is changed, so the code of
    others is Numba's."""
    begun, wait = [], compiler.wait_for_the_kernel_before

    def watch(function):
        wait(function)
        begun.append(str(function.entry_basic_block.instructions[0]))

    monkeypatch.setattr(compiler, "wait_for_the_kernel_before", watch)
    kernel = find_kernel(SILU)
    for capability in ((8, 9), (9, 0)):
        compile_kernel(kernel, SILU.types, capability)
    assert len(begun) == 1 and "griddepcontrol.wait;" in begun[0] and "~{memory}" in begun[0]


def test_key_of_a_launch():
    x = empty((2, 3), np.float16, get_ptx_device())
    key = key_of(CHAIN["forward", 2], (x, x.reshape(-1), 1, 2**40, 0.5, np.uint32(3), True))
    assert key == (
        SILU.module,
        "gelu_forward_kernel_v2",
        ("float16[2]", "float16[1]", "int32", "int64", "float32", "uint32", "int32"),
    )
    words = [str(type_of_word(word)) for word in (*key.types, "bool", "bool[3]")]
    assert words == [
        "array(float16, 2d, C)",
        "array(float16, 1d, C)",
        "int32",
        "int64",
        "float32",
        "uint32",
        "int32",
        "bool",
        "array(bool, 3d, C)",
    ]


WITH_KERNELS = "numdiff.kernels", "numdiff.extras"


def test_every_kernel_has_a_name_of_its_own():
    """…by which another process finds it: (module, name) says all but the types."""
    values = [
        value
        for name, module in list(sys.modules.items())
        if name.startswith(WITH_KERNELS)
        for value in list(vars(module).values())
    ]
    kernels = [
        kernel
        for value in values
        for kernel in (value.values() if isinstance(value, dict) else [value])
        if hasattr(kernel, "py_func") and not kernel.targetoptions.get("device")
    ]
    by_name = kernels_by_name()
    assert len({id(k) for k in kernels}) == len(by_name) > 300
    assert all(by_name[k.py_func.__module__, k.py_func.__name__] is k for k in kernels)


def test_every_kernel_is_held_where_its_name_leads():
    """…to its own module, or to its package or the launcher there, which come with any module of it."""
    held = {}  # module -> the kernels that it holds
    for name, module in list(sys.modules.items()):
        if name.startswith(WITH_KERNELS):
            for value in list(vars(module).values()):
                held.setdefault(name, set()).update(
                    id(kernel)
                    for kernel in (value.values() if isinstance(value, dict) else [value])
                )
    lost = [
        name
        for (name, _), kernel in kernels_by_name().items()
        if not any(
            id(kernel) in held.get(module, ())
            for package in [name.rpartition(".")[0]]
            for module in (name, package, f"{package}.launcher")
        )
    ]
    assert not lost


@pytest.mark.parametrize("key", [SILU, ATTENTION], ids=lambda key: key.name)
@quick(lambda key: key is ATTENTION)
def test_a_kernel_is_found_by_importing_its_module_alone(key):
    """Also if it is in a dictionary of another module of its package."""
    code = (
        "import sys; from numdiff.device.compiler import Key; from numdiff.device.half import find_kernel; "
        f"print(find_kernel(Key(*{key[:2]!r}, ())).py_func.__name__, 'numdiff.extras.kernel_check' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.split() == [key.name, "False"]


def test_somebodys_own_kernel_is_not_kept():
    """Its code may change without its name: it is compiled in every process that launches it."""

    @cuda.jit
    def mine(x):
        x[0] = 1

    assert is_kept(SILU) and not is_kept(key_of(mine, ()))
