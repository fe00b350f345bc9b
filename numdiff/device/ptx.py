"""A device that compiles and runs nothing: every launch is compiled to PTX for two compute
capabilities and checked.

It needs no GPU and no driver (the NVVM wheel is enough), so the test suite sends every operation
through it. Launchers are exercised, and every kernel version is compiled for sm_80 and sm_90a. A
float64 instruction in a float32 kernel is an error.
"""

import functools
import re
import threading

import numpy as np

from ..dtypes import is_bfloat16
from ..emulator.values import leaves
from .array import DeviceArray
from .bfloat16 import SUFFIX
from .compiler import stand_in, type_of_word, word_of
from .limits import HOPPER_SHARED
from .requires import supports
from .threads import PerThread

CAPABILITIES = ((8, 0), (9, 0, "a"))


class PtxError(Exception):
    """A kernel whose PTX breaks a rule of this project."""


def compile_for(kernel, signature, capabilities):
    """{capability: PTX text} of a `@cuda.jit` kernel for argument types `signature`.

    All that Numba does before NVVM, which takes most of the time, is the same for all capabilities
    from 7.5 on: done once.
    """
    from numba.cuda import compiler

    options = kernel.targetoptions
    with stand_in(capabilities[0]):
        library, _ = compiler._compile_pyfunc_with_fixup(
            kernel.py_func,
            signature,
            device=False,
            abi="numba",
            cc=capabilities[0],
            fastmath=bool(options.get("fastmath")),
            launch_bounds=options.get("launch_bounds"),
        )
        return {capability: library.get_asm_str(cc=capability) for capability in capabilities}


def capabilities_of(kernel):
    """Those of CAPABILITIES on which a kernel runs (requires.py)."""
    return tuple(capability for capability in CAPABILITIES if supports(capability, kernel))


def compile_to_ptx(kernel, signature, capability):
    """PTX text of a `@cuda.jit` kernel for argument types `signature` and a compute capability such
    as (9, 0, 'a')."""
    return compile_for(kernel, signature, (capability,))[capability]


class PtxDevice:
    name = "ptx"
    tf32 = PerThread(False)  # as in `Gpu`
    capability = (9, 0)
    multiprocessors = 132
    shared_limit = HOPPER_SHARED
    compile = staticmethod(compile_for)

    def __init__(self):
        self.texts = {}  # (module, kernel name, argument types, capability) -> PTX
        self._turn = threading.Lock()
        self.launched = []  # keys of `texts`, in the order of the launches

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return get_ptx_device, ()

    def allocate(self, nbytes):
        return None

    def upload(self, source, target):
        pass

    def download(self, array):
        """Zeros: nothing has run."""
        return np.zeros(array.shape, array.dtype)

    def copy(self, source, target):
        pass

    def fill(self, array, byte):
        pass

    def synchronize(self):
        pass

    def launch(self, kernel, grid, block, args, shared=0, cluster=1):
        signature = tuple(type_of_word(word_of(a)) for a in args)
        module, name = kernel.py_func.__module__, kernel.py_func.__name__
        keys = {
            capability: (module, name, signature, capability)
            for capability in capabilities_of(kernel)
        }
        self.launched.extend(keys.values())
        with self._turn:
            if not all(key in self.texts for key in keys.values()):
                self._compile(kernel, name, signature, keys, args)

    def _compile(self, kernel, name, signature, keys, args):
        for capability, text in self.compile(kernel, signature, tuple(keys)).items():
            self.texts[keys[capability]] = text
            if re.search(r"\.extern .*__half", text):
                raise PtxError(
                    f"{name} computes with float16 numbers, by functions that Numba links and then cannot "
                    "keep in its cache; make them float32 first"
                )
            arrays = [a for a in leaves(args) if isinstance(a, DeviceArray)]
            brain = name.endswith(SUFFIX) or any(is_bfloat16(a.dtype) for a in arrays)
            if brain and (found := re.search(r"^.*\.f16(x2)?[. ].*$", text, re.MULTILINE)):
                raise PtxError(
                    f"{name} takes bfloat16 for float16: {found.group().strip()}; launch what in_bfloat16 "
                    "makes of it"
                )
            if not any(a.dtype == np.float64 for a in arrays):
                found = re.search(r"^.*\.f64.*$", text, re.MULTILINE)
                if found:
                    raise PtxError(
                        f"{name} uses float64: {found.group().strip()}; type its literals as float32"
                    )


@functools.cache
def get_ptx_device():
    return PtxDevice()
