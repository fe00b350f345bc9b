"""Cases of the kernels of E4M3: bytes as operands, float32 scales, float16 results."""
import numpy as np

from ...float8 import bits_of
from ..matmul import hopper_fp8
from ..quantise import (
    HISTORY,
    PARTIALS,
    columns_of,
    matrices8,
    quantise_both,
    quantise_forward,
    quantise_weights,
    scale_update,
    share_largest,
)
from .case import FP8_TOLERANCE, HALF_TOLERANCE, Case


def with_width(width, function):
    """function() with tiles of this width."""
    return choosing("choose_width", width, function)


def choosing(name, choice, function):
    """function() where what matmul/hopper_fp8.py has of this name gives this choice."""
    choose = getattr(hopper_fp8, name)
    setattr(hopper_fp8, name, lambda *_: choice)
    try:
        return function()
    finally:
        setattr(hopper_fp8, name, choose)


def fp8_cases():
    """Every kernel of the product on one small tile; one on two tiles, and on more steps than stages."""
    def product(width, promoted, activation, M=8, K=16):
        name, backward = activation.removesuffix("_gradient"), activation.endswith("_gradient")
        function = getattr(hopper_fp8, f"matmul_fp8{'_' * bool(name)}{name}_{'backward' if backward else 'forward'}")
        # each 64 columns have an epilogue of their own; a tile of SwiGLU's forward has half as many of each half
        N = (width if activation != "swiglu" else width // 2) - 24
        columns = 2 * N if name == "swiglu" else N  # of u

        def run(a, v):
            given = a.a, a.b, a.scale_a, a.scale_b, *((a.u,) if backward else (a.bias,))
            more = {} if name else {"residual": a.u}
            found = with_width(width, lambda: function(*given, promoted=promoted, **more))
            return found if isinstance(found, tuple) else (found,)

        def inputs(rng):
            rows = columns if activation == "swiglu" else N
            return {"a": bits_of(rng.standard_normal((M, K))), "b": bits_of(rng.standard_normal((rows, K))),
                    "scale_a": np.float32([0.25]), "scale_b": np.float32([0.5]),
                    "u": rng.standard_normal((M, columns)).astype(np.float16),
                    "bias": rng.standard_normal(rows).astype(np.float32)}

        label = f"e4m3, tile {width}{', promoted' * promoted}{', two tiles' * (M > 128)}{f', K {K}' * (K > 16)}"
        return Case(f"matmul_fp8{'_' * bool(activation)}{activation}", inputs, run, (None,), HALF_TOLERANCE, label)

    for key in hopper_fp8.FP8_KERNELS:
        yield product(*key)
    yield product(64, False, "", M=136)
    yield product(64, True, "", K=9 * hopper_fp8.STEP + 16)

    def eight(width, promoted, activation, M=8, K=16):
        """Bytes as they come out of the epilogue, and the scale that their largest magnitude gives."""
        backward, N = activation == "gelu_gradient", width - 16

        def run(a, v):
            amax = a.amax.copy() if isinstance(a.amax, np.ndarray) else a.amax
            function = hopper_fp8.matmul_fp8_gelu_backward if backward else hopper_fp8.matmul_fp8_gelu_forward
            found = with_width(width, lambda: function(a.a, a.b, a.scale_a, a.scale_b, a.u if backward else a.bias,
                                                       promoted=promoted, into=(a.scale_c, amax)))
            scale_update(amax.reshape(1, PARTIALS), a.history, a.unit)
            return (a.unit, found) if backward else (a.unit, *found)

        def inputs(rng):
            # float32 and float64 sums round to the same bytes: whole numbers, and on the right of GELU's curve, as a
            # zero on its left may have either sign
            a, b = (bits_of(rng.integers(-2, 3, (rows, K))) for rows in (M, N))
            u = rng.choice(np.float16([12, 20]), (M, N))
            return {"a": a, "b": b, "scale_a": np.float32([1]), "scale_b": np.float32([1]), "u": u,
                    "bias": rng.choice(np.float32([40, 99]), N), "scale_c": np.float32([0.25]),
                    "history": np.zeros((1, HISTORY), np.float32), "unit": np.float32([1]),
                    "amax": np.zeros(PARTIALS, np.uint32)}

        label = f"e4m3 to e4m3, tile {width}{', promoted' * promoted}{', two tiles' * (M > 128)}"
        return Case(f"matmul_fp8_{activation}", inputs, run, (None,), HALF_TOLERANCE, label)

    for key in hopper_fp8.EIGHT_KERNELS:
        yield eight(*key)
    for width, activation in ((64, "gelu"), (128, "gelu_gradient")):
        yield eight(width, True, activation, M=136)

    def gradient(width, M=8, K=16, slices=1):
        def run(a, v):
            choosing("choose_slices", (width, slices), lambda: hopper_fp8.matmul_fp8_gradient(
                a.a, a.b, a.scale_a, a.scale_b, a.out, slices == 1))
            return (a.out,)

        def inputs(rng):
            return {"a": bits_of(rng.standard_normal((M, K))), "b": bits_of(rng.standard_normal((width - 24, K))),
                    "scale_a": np.float32([0.25]), "scale_b": np.float32([0.5]),
                    "out": rng.standard_normal((M, width - 24)).astype(np.float32)}

        label = f"e4m3, tile {width}{', two tiles' * (M > 128)}{f', {slices} slices' * (slices > 1)}"
        return Case("matmul_fp8_gradient", inputs, run, (None,), FP8_TOLERANCE, label)

    for key in hopper_fp8.FP8_GRADIENT_KERNELS:
        yield gradient(key)
    yield gradient(64, M=136, K=3 * hopper_fp8.STEP + 16, slices=2)


def quantise_cases():
    """Bytes, largest magnitudes and scales: without a tolerance."""
    def activations(a, v):
        amax = a.amax.copy() if isinstance(a.amax, np.ndarray) else a.amax
        y = quantise_forward(a.x, a.scale[:1], amax[:PARTIALS])
        scale_update(amax.reshape(1, PARTIALS), a.history, a.scale)
        return y, quantise_forward(a.x, a.scale[:1]), a.history, a.scale, amax

    def of_activations(rng):
        x = rng.standard_normal((3, 11, 32)).astype(np.float16)
        x[0, 0, :3] = 3e4, -3e4, 6e-8
        return {"x": x, "scale": np.float32([0.25]), "history": np.float32([[5] * (HISTORY - 1) + [6e4]]),
                "amax": np.array([5] * PARTIALS, np.uint32)}

    def weights(a, v):
        quantise_weights(a.flat, matrices8([(0, 80, 48), (80 * 48 + 64, 16, 144)], a.flat), a.rows, a.columns, a.scale)
        return a.rows, a.columns, a.scale

    def of_weights(rng):
        size = 80 * 48 + 16 * 144
        return {"flat": rng.standard_normal(size + 64).astype(np.float16), "rows": np.zeros(size, np.uint8),
                "columns": np.zeros(size, np.uint8), "scale": np.zeros(2, np.float32)}

    def both(a, v):
        """Beside bytes in both orientations the scale that their largest magnitude gives, and the columns' sums."""
        amax = a.amax.copy() if isinstance(a.amax, np.ndarray) else a.amax
        rows, columns = quantise_both(a.x.reshape(-1, 80), a.scale, amax[:PARTIALS], a.sums)
        history = a.history
        scale_update(amax.reshape(1, PARTIALS), history, a.unit)
        return rows, columns, a.sums, a.unit, columns_of(rows, a.scale, a.more), a.more

    def of_both(rng):
        x = (300 * rng.standard_normal((70, 80))).astype(np.float16)
        return {"x": x, "scale": np.float32([2]), "unit": np.float32([1]), "sums": np.arange(80, dtype=np.float32),
                "more": np.zeros(80, np.float32), "history": np.zeros((1, HISTORY), np.float32),
                "amax": np.zeros(PARTIALS, np.uint32)}

    def ranks(a, v):
        share_largest(a.amax, a.table, 1)
        return a.table, a.amax

    def of_ranks(rng):
        return {"amax": rng.integers(0, 1 << 31, (2, PARTIALS)).astype(np.uint32),
                "table": np.full((2, 3), 7, np.uint32)}

    yield Case("share_largest", of_ranks, ranks, tolerance=0.0, label="rank 1 of 3")
    yield Case("quantise_both", of_both, both, label="70 × 80")
    yield Case("quantise", of_activations, activations, tolerance=0.0, label="activations, twice, and their scale")
    yield Case("quantise_weights", of_weights, weights, tolerance=0.0, label="80 × 48 and 16 × 144")
