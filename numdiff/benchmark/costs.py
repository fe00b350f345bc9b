"""The bytes and FLOPs that one call of an operation needs, from its arguments.

Bytes are counted from the arrays, whatever their dtype. Each input is read once and each result is
written once; gradients of parameters are accumulated, so they count twice. This is the minimum: a
kernel that reads its input twice shows a lower rate. FLOPs come from the `*_cost` function of the
operation.
"""

import inspect
import math
import re
import sys
import types

import numpy as np

from ..device import DeviceArray
from ..dtypes import is_half
from ..kernels import conv2d
from ..kernels.concat import Pair

# functions that are one pass of a convolution, on some rung -> which
CONVOLUTIONS = re.compile(
    r"(?:hopper|mma|tf32|implicit|narrow|narrow_half)_(forward|input_gradient|weight_gradient)"
    r"(?:_3x3)?$"
)
# on tensor cores
PRODUCTS = re.compile(
    r"conv2d|linear|matmul|newton_schulz|(?:flash_)?attention|sla_|"
    r"(?:hopper|mma|tf32)_(?:forward|input|weight)"
)


def arrays_in(value):
    """The arrays in an argument or result: itself, or what a list or tuple holds."""
    if isinstance(value, (np.ndarray, DeviceArray)):
        return [value]
    if isinstance(value, (list, tuple)):
        return [array for item in value for array in arrays_in(item)]
    return []


def is_operation(name, function):
    """Whether `function`, found under `name` in a module of numdiff.kernels, is an operation whose
    cost is known."""
    return (
        isinstance(function, types.FunctionType)
        and not name.startswith("_")
        and name == function.__name__
        and not name.endswith(("_cost", "_reference"))
        and cost_function(function) is not None
    )


def cost_function(function):
    """The `*_cost` function of an operation, or None."""
    if hasattr(function, "operation"):
        return function.operation.cost
    part = CONVOLUTIONS.match(function.__name__)
    if part and "conv2d" in function.__module__:
        return getattr(conv2d, f"conv2d_{part[1]}_cost")
    module, name = function.__module__, function.__name__
    names = [name, name.replace("_backward", "_forward")]
    for place in (module, module.rpartition(".")[0], f"{module.rpartition('.')[0]}.reference"):
        for candidate in dict.fromkeys(names):
            found = getattr(sys.modules.get(place), f"{candidate}_cost", None)
            if found:
                return found
    return None


def cost_of(function, arguments, results):
    """(bytes, FLOPs) of a call; FLOPs None if the arguments do not determine them.

    arguments: {name: value} as bound to the function's parameters, with defaults; results: what it
    returned
    """
    cost, values = cost_function(function), extents(arguments)
    flops = moved = None
    if cost is not None:
        wanted = inspect.signature(cost).parameters
        if wanted.keys() <= arguments.keys():
            values = arguments
        if all(p in values or spec.default is not spec.empty for p, spec in wanted.items()):
            moved, flops = cost(**{p: values[p] for p in wanted if p in values})
    if moved is not None and getattr(getattr(function, "operation", None), "exact_bytes", False):
        return moved, flops
    return bytes_of(arguments, results), flops


def bytes_of(arguments, results):
    """Bytes of the arrays in the arguments and results, each once; twice those of arrays that are
    added to."""
    given = {id(a): (name, a) for name, value in arguments.items() for a in arrays_in(value)}
    added = {"out"} if arguments.get("accumulate") else set()
    added |= {"dweight", "dbias", "dtable"}
    moved = sum(a.nbytes * (1 + (name in added)) for name, a in given.values())
    return moved + sum(a.nbytes for a in arrays_in(results) if id(a) not in given)


def extents(arguments):
    """{name of a cost function's parameter: value} from the arguments of an operation."""
    names = ("qkv", "x", "dx", "dy", "a", "prediction", "labels")
    x = next(
        (
            arguments[name]
            for name in names
            if isinstance(arguments.get(name), (np.ndarray, DeviceArray, Pair))
        ),
        None,
    )
    if x is None:
        given = arrays_in(list(arguments.values()))
        if not given:
            return {}
        x = given[0]
    values = {
        k: v
        for k, v in arguments.items()
        if isinstance(v, (bool, int))
        and k in ("heads", "silu", "stride", "need_dx", "in_place", "keeps")
    }
    C = x.shape[-1] if x.shape else 1
    if "qkv" in arguments or "rotation" in arguments:
        C //= 3
    size = math.prod(arguments["shape"]) if isinstance(arguments.get("shape"), tuple) else x.size
    rows, B = x.size // max(x.shape[-1] if x.shape else 1, 1), x.shape[0] if x.shape else 1
    if "exponents" in arguments:
        values["k"] = len(arguments["exponents"])
    values |= {
        "n": size,
        "M": rows,
        "rows": rows,
        "pixels": rows,
        "B": B,
        "batch": B,
        "C": C,
        "N": C,
        "P": rows // max(B, 1),
        "T": rows // max(B, 1),
        "shape": x.shape,
        "parameters": arguments.get("weight") is not None,
        "itemsize": np.dtype(x.dtype).itemsize,
        "norms": arguments.get("q_weight") is not None,
        "rotates": arguments.get("rotation") is not None,
        "ema": getattr(arguments.get("copies"), "ema", None) is not None,
        "half": getattr(arguments.get("copies"), "half", None) is not None,
    }
    # of a flat buffer, as a stack of matrices is
    if hasattr(ranges := arguments.get("ranges"), "elements"):
        values["n"] = ranges.elements
    if (stack := arguments.get("stack")) is not None:
        values |= {
            "n": stack.starts.size * stack.rows * stack.columns,
            "itemsize": np.dtype(arguments.get("dtype") or x.dtype).itemsize,
        }
    if len(x.shape) == 4:
        values |= {"H": x.shape[1], "W": x.shape[2]}
    weight = arguments.get("weight")
    # in a loss it is a number
    weight = arguments.get("dweight") if not arrays_in(weight) else weight
    if weight is not None and len(weight.shape) == 4:
        dy = arguments.get("dy")
        values |= {"C_in": weight.shape[3], "C_out": weight.shape[0], "kernel": weight.shape[1]}
        if "stride" not in values and dy is not None and len(x.shape) == len(dy.shape) == 4:
            values["stride"] = -(-x.shape[1] // dy.shape[1])
    elif weight is not None and len(weight.shape) == 3:  # of a depthwise convolution
        values["kernel"] = weight.shape[0]
    elif weight is not None and len(weight.shape) == 2:
        values |= {"N": weight.shape[0], "K": weight.shape[1]}
    if "transpose_a" in arguments:
        a, b = arguments["a"].shape, arguments["b"].shape
        M, K = a[-2:][::-1] if arguments["transpose_a"] else a[-2:]
        values |= {
            "M": M,
            "K": K,
            "N": b[-2] if arguments["transpose_b"] else b[-1],
            "batch": arguments["a"].size // max(M * K, 1),
        }
    elif (
        "a" in arguments
        and len(arguments["a"].shape) == len(getattr(arguments.get("b"), "shape", ())) == 2
    ):
        (M, K), b = arguments["a"].shape, arguments["b"].shape
        values |= {"M": M, "K": K, "N": b[0] if b[1] == K else b[1]}
    return values


def roof_of(name, dtype, precision):
    """Which peak bounds an operation's arithmetic: "fp8", "fp16", "tf32" or "fp32"."""
    if name.startswith("matmul_fp8"):
        return "fp8"
    if not PRODUCTS.match(name) and not (name.startswith("depthwise") and is_half(dtype)):
        return "fp32"
    if is_half(dtype):
        return "fp16"  # which bfloat16 has, too
    return "tf32" if precision == "tf32" else "fp32"
