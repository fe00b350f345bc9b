"""Cases of the tensor-core kernels: float16 operands, float32 sums."""
import numpy as np

from .. import matmul
from ..matmul import hopper, launcher, mma
from .case import Case

HALF_TOLERANCE = 1e-3  # float16 results are rounded to 11 bits


def halves(**shapes):
    """Inputs that are normal float16 arrays of these shapes."""
    return lambda rng: {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}


def product_cases():
    """Every matmul kernel on one small tile, and a sum over K that two blocks share."""
    def product(key, version, parts, M=8, N=8, K=8):
        tile, transpose_a, across, half = key
        shapes = {"a": (K, M) if transpose_a else (M, K), "b": (K, N) if across else (N, K)}

        def run(a, v):
            choose = launcher.choose_half
            launcher.choose_half = lambda *_: (tile if version == 5 else (hopper.BM, tile), parts, 0.0)
            try:
                return (matmul.matmul_forward(a.a, a.b, transpose_a, not across, version=v,
                                              out_dtype=np.float16 if half else np.float32),)
            finally:
                launcher.choose_half = choose

        layout = f"{'a' + 'ᵀ' * transpose_a}·{'b' + 'ᵀ' * (not across)}"
        return Case("matmul", halves(**shapes), run, (version,), HALF_TOLERANCE,
                    f"float16, {layout}, tile {tile}, float{16 if half else 32}{', in parts' * (parts > 1)}")

    for module, version in ((mma, 5), (hopper, 6)):
        for key in module.KERNELS:
            yield product(key, version, 1)
        yield product((*list(module.KERNELS)[0][:3], False), version, 2, K=136)
