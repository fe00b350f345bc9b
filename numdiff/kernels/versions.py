"""The names of versions: `matmul_forward(a, b, version="hopper")` is `version=6`.

A version is a number to count up a ladder, and a name to say what is new on it. Launchers take either; a name becomes
the number before anything else happens, so that launches, graphs and compiled kernels know numbers only.

SOURCE
    plain bookkeeping; the words are those of the operations' files, under VERSIONS.
"""
import functools
import inspect

import numpy as np

from ..device import is_device

WIDE = {"naive": 1, "vectorised": 2}  # a thread an element (a backward: a column); four, by 16-byte loads and stores
ROW = {"block-per-row": 1, "warp-per-row": 2}
SUM = {"naive": 1, "tree": 2, "vectorised": 3}
SOFTMAX = {**ROW, "vectorised": 3}
CONCAT = {**WIDE, "unrolled": 3}
GROUPNORM = {"block-per-group": 1, "chunked": 2, "one-pass": 3}
MATMUL = {"naive": 1, "tiled": 2, "register-tiled": 3, "vectorised": 4, "mma": 5, "tf32": 5, "hopper": 6}
CONV2D = {"direct": 1, "im2col": 2, "implicit-gemm": 3, "narrow": 3, "mma": 4, "tf32": 4, "hopper-columns": 5,
          "hopper": 6}
# Of names that share a number: the operands' type that each is for.
FOR = {"mma": "float16", "tf32": "float32", "narrow": "float16", "implicit-gemm": "float32"}

# {operation: {name: number}}, a backward only where its versions are not its forward's
NAMES = {
    **dict.fromkeys(("add", "avgpool", "bias_add", "bias_gelu", "cast", "channel_add", "combine", "dropout", "ema",
                     "embedding", "estimate_x_0", "gate", "gelu", "hybrid_loss", "im2col", "images", "model_input",
                     "mse", "patchify", "peer_all_gather", "peer_reduce_scatter", "place", "q_sample", "random_normal",
                     "random_uniform", "scale_shift", "silu", "take", "unpatchify", "upsample", "velocity",
                     "weigh", "weighted_sum"), WIDE),
    **dict.fromkeys(("adaln", "layernorm"), ROW),
    **dict.fromkeys(("column_sum", "sample_sum", "total_sum"), SUM),
    **dict.fromkeys(("linear", "matmul", "matmul_row_sums", "matmul_strided"), MATMUL),
    **dict.fromkeys(("conv2d", "conv2d_input_gradient", "conv2d_weight_gradient"), CONV2D),
    "softmax": SOFTMAX, "concat": CONCAT, "adamw": {**WIDE, "fused": 3}, "global_norm": {"tree": 1, "vectorised": 2},
    "linear_group": {"naive": 1, "tiled": 2}, "gate_adaln": {"unfused": 1, "fused": 2},
    "embedding_backward": {"per-class": 1, "per-sample": 2},
    "groupnorm": {**GROUPNORM, "known-statistics": 4}, "groupnorm_backward": GROUPNORM,
    "matmul_first": {"uncoalesced": 1, "coalesced": 2},
    "matmul_level": {"one-tile": 1, "double-buffered": 2, "warp-specialised": 3, "persistent": 4},
    "conv2d_level": {"shifted-boxes": 1, "halo": 2},
    "flash_attention": {"naive": 1, "register-tiled": 2, "mma": 3, "tf32-bf16": 4, "hopper": 5},
}


def operation_of(name):
    """The key in `NAMES` of a function, or of an operation of `numdiff kernels check`; None if it has one version."""
    if name == "cast_into":
        return "cast"
    short = name.removesuffix("_forward").removesuffix("_update")
    return next((n for n in (short, short.removesuffix("_backward")) if n in NAMES), None)


def numbers_of(name):
    """The versions of an operation, as numbers in order; () if it has one."""
    return tuple(sorted(set(NAMES.get(operation_of(name), {}).values())))


def name_of(name, number, dtype=None):
    """What a version is called in operands of this type, None if it has no name; dtype None: "mma or tf32"."""
    found = [n for n, v in NAMES.get(operation_of(name), {}).items() if v == number]
    if len(found) > 1 and dtype is not None:
        found = [n for n in found if FOR[n] == np.dtype(dtype).name] or found
    return " or ".join(found) or None


def label(name, number, dtype=None):
    """A version as a message says it: "6 (hopper)"."""
    found = name_of(name, number, dtype)
    return f"{number} ({found})" if found else str(number)


def number_of(name, version, dtype=None):
    """The number of a version that is given by its name; a `ValueError` for one that there is not.

    dtype: of the operands; a name that stands for another type's kernel is refused
    """
    operation = operation_of(name)
    known = NAMES[operation]
    if version not in known:
        *names, last = known
        raise ValueError(f"there is no version {version!r} of {operation}: use {', '.join(names)} or {last}, or a "
                         f"number from 1 to {max(known.values())}")
    number = known[version]
    fitting = name_of(operation, number, dtype)
    if dtype is not None and fitting != version:
        raise ValueError(f"version {version!r} of {operation} is for {FOR[version]}, and these operands are {dtype}: "
                         f"use version={fitting!r}, or cast_forward first")
    return number


def _dtype(arguments):
    """The type of the first array of a device; None where there is none."""
    for value in arguments:
        array = getattr(value, "array", getattr(value, "a", value))  # of `Matrices`, of a `Pair`
        if is_device(array):
            return array.dtype
    return None


def versions_by_name(function):
    """A launcher whose argument `version` may be a name, too."""
    place = next(i for i, p in enumerate(inspect.signature(function).parameters.values()) if p.name == "version")
    if operation_of(function.__name__) is None:
        raise ValueError(f"{function.__name__}: give its versions names, in NAMES of {__name__}")

    @functools.wraps(function)
    def launcher(*args, **kwargs):
        if isinstance(kwargs.get("version"), str):
            kwargs["version"] = number_of(function.__name__, kwargs["version"], _dtype((*args, *kwargs.values())))
        elif len(args) > place and isinstance(args[place], str):
            number = number_of(function.__name__, args[place], _dtype((*args, *kwargs.values())))
            args = *args[:place], number, *args[place + 1:]
        return function(*args, **kwargs)
    return launcher
