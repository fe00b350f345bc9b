"""Problems of the products with what follows them in the same kernel, and of symmetric ones: small ones for each tile.

The choice of a tile depends on the extents, and small ones get few of the tiles. So each problem is solved with a tile
that is given.

SHAPES
    as in activations.py, symmetric.py and ../linear.py
SOURCE
    plain bookkeeping; ../problem.py says what a problem is.
READ NEXT
    activations.py, whose records have them.
"""
import contextlib
import functools
import sys

import numpy as np

from ..problem import Problem, filled, half, single
from ..versions import at_most
from . import choice, mma
from .hopper import kernel
from .hopper.layout import BM


@contextlib.contextmanager
def with_tile(tile, rung, parts=1, pairs=False):
    """Context: rung 5 or 6 has this tile, the sum over K in `parts` parts, and blocks alone or in pairs."""
    before = choice.choose_half, choice.PAIRS
    choice.choose_half = lambda wanted, *given: (before[0](wanted, *given) if wanted != rung else
                                                 (tile if rung == 5 else (BM, tile), parts, 0.0))
    choice.PAIRS = pairs
    try:
        yield
    finally:
        choice.choose_half, choice.PAIRS = before


@contextlib.contextmanager
def _with_epilogue(tile, rung, pairs):
    with at_most({"matmul": rung}), with_tile(tile, rung, 1, pairs):
        yield


def _every_epilogue():
    """Yields (epilogue, tile, rung, whether blocks are in pairs) of each kernel."""
    for rung, pairs, keys in ((6, False, kernel.ACTIVATION_KERNELS), (6, True, kernel.PAIR_ACTIVATION_KERNELS),
                              (5, False, mma.ACTIVATION_KERNELS)):
        for tile, epilogue in keys:
            if epilogue != "gate":
                yield epilogue, tile, rung, pairs


# {epilogue: tiles} that the quick tests run: of each one of 64 columns or of several times 64, and of rung 5 one
QUICK = {"gelu": (128, (128, 128)), "gelu_gradient": (128, (128, 128)), "gelu_again_gradient": (192, (128, 128)),
         "swiglu": (256,), "swiglu_gradient": (128,), "layer_scale": (256,)}


def activation_problems(name, backward=False):
    """[Problem] of matmul_{name}_forward, or of its backward."""
    return [_activation_problem(*key) for key in _every_epilogue()
            if key[0].removesuffix("_gradient").removesuffix("_again") == name
            and key[0].endswith("_gradient") == backward]


def _activation_problem(epilogue, tile, rung, pairs):
    name, again = epilogue.removesuffix("_gradient"), "_again" in epilogue
    # each 64 columns have an epilogue of their own; a tile of SwiGLU's forward has half as many of each half
    width = tile if rung == 6 else tile[1]
    N = (width if epilogue != "swiglu" else width // 2) - 24
    columns = 2 * N if "swiglu" in name else N  # of u
    M = 136 if pairs else 8  # tiles below each other, of which the second has 8 rows
    u, vector = half(M, columns), single(columns)
    arguments = {"a": half(M, 8), "b": half(8, N) if epilogue != name else half(columns, 8)}
    if epilogue != name:
        arguments |= {"u": u, **({"again": True} if again else {})}
    else:
        arguments |= {"bias": vector, **({"scale": vector, "residual": u} if name == "layer_scale" else {})}
    narrowest = not pairs and tile == (128 if epilogue == "swiglu" else 64)
    return Problem(f"float16, {'again, ' * again}tile {tile}{', pairs' * pairs}", bfloat16=narrowest,
                   fast=not pairs and tile in QUICK[epilogue],
                   within=functools.partial(_with_epilogue, tile, rung, pairs), **arguments)


def gate_problems():
    """[Problem] of linear_gate_forward."""
    return [Problem(f"float16, tile {tile}", x=half(1, 16, 8), weight=half(tile - 24, 8), bias=single(tile - 24),
                    residual=half(1, 16, tile - 24), gate=half(1, tile - 24), fast=tile == 64, bfloat16=tile == 64,
                    within=functools.partial(with_tile, tile, 6))
            for tile, epilogue in kernel.ACTIVATION_KERNELS if epilogue == "gate"]


# Symmetric ------------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def _with_width(width):
    symmetric = sys.modules[f"{__package__}.symmetric"]
    before, symmetric.choose_symmetric = symmetric.choose_symmetric, lambda *_: width
    try:
        yield
    finally:
        symmetric.choose_symmetric = before


def _symmetric_problem(call, width, transpose_a, N, batch=1, K=64, fast=True):
    """X·Xᵀ or XᵀX; 128 rows have blocks on, below and above the diagonal, 256 a second row of tiles."""
    def residual(rng):
        numbers = rng.standard_normal((batch, N, N))
        return numbers + numbers.swapaxes(1, 2)

    x = half(batch, K, N) if transpose_a else half(batch, N, K)
    return Problem(f"float16, {'xᵀ·x' if transpose_a else 'x·xᵀ'}, {f'tile {width}' if width else 'by a pass'}",
                   x=x, residual=filled((batch, N, N), residual, np.float16), fast=fast, call=call,
                   transpose=transpose_a,
                   within=functools.partial(_with_width, width))


def symmetric_problems(call):
    """[Problem] of matmul_symmetric. call: the product of x with itself, from x, residual and transpose"""
    found = []
    for width, transpose_a, _ in kernel.SYMMETRIC_KERNELS:
        N, batch = (128, 1) if width != 128 else (256, 1) if transpose_a else (128, 2)
        found.append(_symmetric_problem(call, width, transpose_a, N, batch, fast=transpose_a == (width == 128)))
    return [*found, _symmetric_problem(call, None, False, 24, K=8)]
