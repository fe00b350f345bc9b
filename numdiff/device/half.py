"""One kernel text for float16 and for bfloat16.

A kernel that only loads, computes and stores is compiled for the types of its arrays (load4, load8
and their like give float32 of either). One that multiplies on tensor cores, or works on packed
words, names float16's instructions in its text or in that of a device function; the launcher passes
it through

    launch(in_bfloat16(KERNELS[tile], x.dtype), …)

For bfloat16 that is a copy with the same text, in which bfloat16's instructions stand for
float16's, down the calls; for any other type it is the kernel itself. bfloat16.py lists the
corresponding instructions; those of `wgmma` are listed where they are made. A launch on bfloat16
arrays whose PTX has a float16 instruction is an error of the tests' device (ptx.py).
"""

import importlib
from collections.abc import Hashable

from ..dtypes import is_bfloat16
from .bfloat16 import COUNTERPARTS, SUFFIX
from .compiler import kernels_by_name
from .requires import required
from .specialise import with_others

BFLOAT16_FROM = (8, 0)  # the first compute capability with bfloat16
_made = {}  # kernel of float16 -> that of bfloat16


def in_bfloat16(kernel, dtype):
    """The kernel, a `@cuda.jit` one whose text names instructions of float16; for the dtype
    bfloat16 its counterpart.

    The counterpart has the kernel's name with `_bf16` behind it, and needs sm_80 at least.
    """
    if not is_bfloat16(dtype):
        return kernel
    if kernel not in _made:
        made = with_others(kernel, _counterpart, kernel.py_func.__name__ + SUFFIX)
        if required(kernel) < BFLOAT16_FROM:
            made.py_func.requires = BFLOAT16_FROM
        _made[kernel] = made
    return _made[kernel]


def _counterpart(value):
    return COUNTERPARTS[value]() if isinstance(value, Hashable) and value in COUNTERPARTS else None


def find_kernel(key):
    """The kernel that a `Key` names, whose module is imported for it."""
    importlib.import_module(key.module)
    kernels = kernels_by_name(key.module.rsplit(".", 1)[0])
    if (key.module, key.name) not in kernels and key.name.endswith(SUFFIX):
        return in_bfloat16(kernels[key.module, key.name.removesuffix(SUFFIX)], "bfloat16")
    return kernels[key.module, key.name]
