import numpy as np
import pytest

from numdiff.kernels.transformer import patchify as P
from tests.conftest import shapes

SHAPES = shapes(
    minimal=(1, 2, 2, 1, 2),
    odd=(2, 6, 9, 5, 3),
    latents=(3, 8, 8, 4, 2),
    pixels=(2, 16, 8, 3, 4),
    one_patch=(2, 4, 4, 3, 4),
    large=(4, 64, 64, 3, 4),
)  # B, H, W, C, patch


def by_loops(x, patch):
    B, H, W, C = x.shape
    tokens = np.empty((B, H // patch * (W // patch), patch * patch * C), x.dtype)
    for b, h, w, c in np.ndindex(x.shape):
        token = h // patch * (W // patch) + w // patch
        tokens[b, token, (h % patch * patch + w % patch) * C + c] = x[b, h, w, c]
    return tokens


@SHAPES
def test_there_and_back(engine, rng, shape):
    *dims, patch = shape
    x = rng.standard_normal(dims).astype(np.float32)
    tokens = P.patchify_forward(engine(x), patch)
    want = by_loops(x, patch) if x.size < 5000 else P.patchify_forward_reference(x, patch)
    engine.check_equal(tokens, want)
    assert tuple(tokens.shape) == want.shape
    back = P.unpatchify_forward(engine(want), patch, dims[1], dims[2])
    engine.check_equal(back, x)
    engine.check_equal(P.patchify_backward(engine(want), patch, dims[1], dims[2]), x)
    engine.check_equal(P.unpatchify_backward(engine(x), patch), want)


def test_wrong_arguments_say_so(engine):
    with pytest.raises(ValueError, match="multiples of the patch size 4"):
        P.patchify_forward(engine(np.ones((1, 6, 8, 3), np.float32)), 4)
    with pytest.raises(ValueError, match=r"must be \(B, 4, 4·C\)"):
        P.unpatchify_forward(engine(np.ones((1, 5, 8), np.float32)), 2, 4, 4)
    if engine.has_versions:
        with pytest.raises(ValueError, match="use version=1"):
            P.patchify_forward(engine(np.ones((1, 2, 2, 3), np.float32)), 2, version=2)
