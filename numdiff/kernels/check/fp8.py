"""Cases of the kernels of E4M3: bytes as operands, float32 scales, float16 results."""
import numpy as np

from ...float8 import bits_of
from ..matmul import hopper_fp8
from ..quantise import (
    HISTORY,
    PARTIALS,
    scale_update,
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
