"""Problems of the products of E4M3: small ones for each kernel, and a DiT's.

The tile follows from the extents, and small ones get the smallest. So each is solved with a tile
that is given. The records are those of matmul.py, which reads this file: its
kernels are named through `sys.modules`.

SHAPES
    as in matmul.py
SOURCE
    plain bookkeeping; kernels/operation/problem.py says what a problem is.
READ NEXT
    linear.py
"""

import functools
import sys

import numpy as np

from ...device.rounded8 import PARTIALS
from ...float8 import bits_of
from ...kernels.operation import Problem, filled, half, numbers, replaced, single
from .quantise import HISTORY, scale_update

FP8, MMA = f"{__package__}.matmul", f"{__package__}.mma"
POOL = 1 << 20  # random bytes, used repeatedly
B, T, D = 64, 256, 768  # images, tokens and channels of a DiT-B/2
ROWS = B * T


def _bytes(*shape):
    """Normal numbers as E4M3."""
    return filled(
        shape,
        lambda rng: np.resize(bits_of(rng.standard_normal(min(POOL, int(np.prod(shape))))), shape),
        np.uint8,
    )


def _columns(width, activation):
    """Columns of a small result: each 64 have an epilogue of their own; a tile of SwiGLU's forward
    has half as many of each half."""
    return (width // 2 if activation == "swiglu" else width) - 24


def _of_width(width):
    return functools.partial(replaced, FP8, choose_width=lambda *_: width)


def _of_tile(tile, slices=1):
    return functools.partial(replaced, MMA, choose_mma_tile=lambda *_: (tile, slices))


# Small ones ---------------------------------------------------------------------------------------


def _product(width, promoted, activation, M=8, K=16, **more):
    label = (
        f"tile {width}{', promoted' * promoted}{', two tiles' * (M > 128)}{f', K {K}' * (K > 16)}"
    )
    given = {"versions": ("hopper",), "within": _of_width(width), **more}
    return _problem(label, _columns(width, activation), promoted, activation, M, K, **given)


def _mma_product(tile, promoted, activation, M=72, N=40, K=80, **more):
    label = f"by mma, tile {tile[0]} × {tile[1]}{', promoted' * promoted}{f', N {N}' * (N > 40)}"
    label += ", without residual" * ("residual" in more)
    given = {"versions": ("mma",), "within": _of_tile(tile), "once": True, **more}
    return _problem(label, N, promoted, activation, M, K, **given)


def _problem(label, N, promoted, activation, M, K, **more):
    backward = activation.endswith("_gradient")
    columns = 2 * N if "swiglu" in activation else N  # of u
    rows = columns if activation == "swiglu" else N
    given = (
        {"u" if backward else "residual": half(M, columns)} if backward or not activation else {}
    )
    given |= {} if backward else {"bias": single(rows)}
    return Problem(
        f"e4m3, {label}",
        a=_bytes(M, K),
        b=_bytes(rows, K),
        scale_a=numbers([0.25]),
        scale_b=numbers([0.5]),
        promoted=promoted,
        tolerance=1e-3,
        **{**given, **more},
    )


def products(activation=""):
    """[Problem] of the product with this epilogue, a small one for each of its kernels."""
    found = [
        _product(
            *key,
            fast=key in ((128, True, "swiglu"), (64, True, "swiglu_gradient")),
            only_compiled=key[2] in ("gelu", "gelu_gradient") and key[1] == (key[0] in (64, 192)),
        )
        for key in sys.modules[FP8].FP8_KERNELS
        if key[2] == activation
    ]
    if not activation:  # the others have one tile, and fewer steps than stages
        found += [
            _product(64, False, "", M=136, fast=False),
            _product(64, True, "", K=9 * sys.modules[FP8].STEP + 16),
        ]
    return found + mma_products(activation)


def mma_products(activation):
    """[Problem] of the same by mma.sync: tiles that two of the extents do not fill, and two tiles."""
    if "swiglu" in activation:  # a product, and a pass
        return [_mma_product((64, 64), True, activation, M=8, N=16, K=16)]
    small, large = sorted(sys.modules[MMA].FP8_TILES)
    plain = [(small, False), (large, True), (large, False)] if not activation else []
    return [
        *(_mma_product(*key, activation, residual=None, fast=False) for key in plain),
        _mma_product(small, True, activation, once=False),
        _mma_product(small, False, activation, N=72, fast=False),
        *(_mma_product(large, promoted, activation, fast=False) for promoted in (True, False)),
    ]


def _rounded(function, scale_c, amax, history, unit, version=None, **given):
    """What a product gives as bytes, and the scale that their largest magnitude gives."""
    found = function(**given, into=(scale_c, amax), version=version)
    scale_update(amax.reshape(1, PARTIALS), history, unit)
    return unit, found


def _rounding(function, width, promoted, activation, M=8, **more):
    label = f"tile {width}{', promoted' * promoted}{', two tiles' * (M > 128)}"
    given = {"versions": ("hopper",), "within": _of_width(width), **more}
    return _rounding_problem(function, label, promoted, activation, M, width - 16, 16, **given)


def _mma_rounding(function, tile, promoted, activation, **more):
    label = f"by mma, tile {tile[0]} × {tile[1]}{', promoted' * promoted}"
    given = {"versions": ("mma",), "within": _of_tile(tile), "once": True, **more}
    return _rounding_problem(function, label, promoted, activation, 24, 48, 16, **given)


def _rounding_problem(function, label, promoted, activation, M, N, K, **more):
    """float32 and float64 sums round to the same bytes: of whole numbers, and right of GELU's
    minimum, as a zero on its left may have either sign."""

    def whole(*shape):
        return filled(shape, lambda rng: bits_of(rng.integers(-2, 3, shape)), np.uint8)

    given = (
        {"bias": filled((N,), lambda rng: rng.choice([40, 99], N))}
        if activation == "gelu"
        else {"u": filled((M, N), lambda rng: rng.choice([12, 20], (M, N)), np.float16)}
    )
    return Problem(
        f"e4m3 to e4m3, {label}",
        a=whole(M, K),
        b=whole(N, K),
        scale_a=numbers([1]),
        scale_b=numbers([1]),
        promoted=promoted,
        scale_c=numbers([0.25]),
        amax=numbers(np.zeros(PARTIALS), np.uint32),
        history=numbers(np.zeros((1, HISTORY))),
        unit=numbers([1]),
        tolerance=1e-3,
        call=functools.partial(_rounded, function),
        **given,
        **more,
    )


def roundings(function, activation):
    """[Problem] of GELU or its derivative as bytes. function: the operation"""
    widest = 64 if activation == "gelu" else 128
    return [
        *(
            _rounding(function, *key, fast=False, only_compiled=key[1] == (key[0] not in (64, 192)))
            for key in sys.modules[FP8].EIGHT_KERNELS
            if key[2] == activation
        ),
        _rounding(function, widest, True, activation, M=136),
        *(
            _mma_rounding(function, tile, promoted, activation, fast=tile == (64, 64) and promoted)
            for tile in sys.modules[MMA].FP8_TILES
            for promoted in (True, False)
        ),
    ]


def gradients():
    """[Problem] of matmul_fp8_gradient."""

    def small(width, M=8, K=16, slices=1, **more):
        label = (
            f"e4m3, tile {width}{', two tiles' * (M > 128)}{f', {slices} slices' * (slices > 1)}"
        )
        return Problem(
            label,
            a=_bytes(M, K),
            b=_bytes(width - 24, K),
            scale_a=numbers([0.25]),
            scale_b=numbers([0.5]),
            out=single(M, width - 24),
            accumulate=slices == 1,
            tolerance=5e-4,  # of 128 summed products tensor cores keep about 14 bits
            versions=("hopper",),
            within=functools.partial(replaced, FP8, choose_slices=lambda *_: (width, slices)),
            **more,
        )

    def by_mma(tile, slices=1, M=72, N=40, K=144, accumulate=True, **more):
        label = f"e4m3 by mma, tile {tile[0]} × {tile[1]}{f', {slices} slices' * (slices > 1)}"
        return Problem(
            f"{label}{', written' * (not accumulate)}",
            a=_bytes(M, K),
            b=_bytes(N, K),
            scale_a=numbers([0.25]),
            scale_b=numbers([0.5]),
            out=single(M, N),
            accumulate=accumulate,
            tolerance=1e-4,
            versions=("mma",),
            within=_of_tile(tile, slices),
            **{"once": True, **more},
        )

    return [
        *(small(width, fast=False) for width in sys.modules[FP8].FP8_GRADIENT_KERNELS),
        small(64, M=136, K=3 * sys.modules[FP8].STEP + 16, slices=2),
        by_mma((64, 64), once=False),
        by_mma((64, 64), 2, fast=False),
        by_mma((64, 64), accumulate=False, fast=False),
        by_mma((128, 128), fast=False),
        # the weight of a DiT-B/2's fc1: dyᵀ and xᵀ
        Problem(
            a=_bytes(4 * D, ROWS),
            b=_bytes(D, ROWS),
            out=single(4 * D, D),
            accumulate=False,
            **MEASURED,
        ),
    ]


# Of a model's size --------------------------------------------------------------------------------

MEASURED = {"scale_a": single(1), "scale_b": single(1), "precision": "fp8", "measured": True}


def squares():
    """[Problem]: 8192 × 8192, with and without promotion."""
    given = {"a": _bytes(8192, 8192), "b": _bytes(8192, 8192), **MEASURED}
    return [Problem(**given), Problem(**given, promoted=False, note="not promoted")]


def layers(**given):
    """[Problem] of a DiT-B/2's fc1 with GELU: its forward, or its output's gradient. given: bias or
    u"""
    amax = numbers(np.zeros(PARTIALS), np.uint32)
    return [
        Problem(a=_bytes(ROWS, D), b=_bytes(4 * D, D), **given, **MEASURED, note=note, into=into)
        for note, into in (("to float16", None), ("to E4M3", [single(1), amax]))
    ]
