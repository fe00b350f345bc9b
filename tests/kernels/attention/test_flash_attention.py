import tracemalloc

import numpy as np
import pytest

from numdiff.kernels import attention as F
from numdiff.kernels.attention import choice
from numdiff.kernels.attention import unfused as A
from tests.conftest import relative_error, shapes, versions


def make(rng, shape):
    """(qkv, dy, heads) of normal numbers; shape: (B, T, heads, HS)"""
    B, T, heads, HS = shape
    return (
        rng.standard_normal((B, T, 3 * heads * HS)),
        rng.standard_normal((B, T, heads * HS)),
        heads,
    )


@pytest.mark.parametrize("order", ["legacy", "new"])
@pytest.mark.parametrize("T", [1, 67, 300])
def test_numpys_tiles_give_the_attention_of_all_scores(rng, T, order):
    qkv, dy, heads = make(rng, (2, T, 3, 20))
    y, logsumexp = F.flash_attention_forward(qkv, heads, order)
    want, probabilities = A.attention_forward(qkv, heads, order)
    assert relative_error(y, want) < 1e-12
    dqkv = F.flash_attention_backward(dy, qkv, y, logsumexp, heads, order)
    want = A.attention_backward(dy, qkv, probabilities, heads, order)
    assert relative_error(dqkv, want) < 1e-12


@shapes(large=(1, 200, 1, 32))
@versions(1, 2)
@pytest.mark.parametrize("direction", [1, -1], ids=["rising", "falling"])
def test_scores_far_apart(engine, rng, shape, version, direction):
    """Scores beyond e^x's range, the largest in the last tile or the first: each tile moves the
    maximum, or none."""
    qkv, dy, heads = make(rng, shape)
    q, k, _ = A.split_heads(qkv, heads, "legacy")
    q[...] = np.abs(q)
    k[...] = np.linspace(-20, 20, shape[1])[::direction, None] + k
    # what the engine gets: a score near 100 keeps only its 5 digits
    qkv = qkv.astype(np.float32).astype(np.float64)
    want = F.flash_attention_forward(qkv, heads)
    y, logsumexp = F.flash_attention_forward(engine(qkv), heads, version=version)
    engine.check(y, want[0], 1e-4)
    engine.check(logsumexp, want[1], 1e-6)
    got = F.flash_attention_backward(*map(engine, (dy, qkv, *want)), heads, version=version)
    engine.check(got, F.flash_attention_backward(dy, qkv, *want, heads), 1e-3)


@pytest.mark.parametrize(
    "batch, T", [(1, 1), (1, 65), (4, 1000), (24, 256), (256, 64), (3, 5000), (2000, 4096)]
)
def test_the_chunks_hold_every_tile_once(batch, T):
    for tile in choice.BACKWARD.values():
        chunks, tiles, _ = choice.choose_chunks(batch, T, 64, 132, tile)
        assert 1 <= chunks <= choice.LARGEST_CHUNKS
        assert (chunks - 1) * tiles < -(-T // tile.keys) <= chunks * tiles
        assert chunks == 1 or 4 * chunks * batch * T * 64 <= choice.LARGEST_PARTS


def test_no_matrix_of_all_scores(rng):
    """Forward and backward in a fraction of the memory that the probabilities alone would take."""
    qkv, dy, heads = make(rng, (1, 2048, 4, 8))
    qkv, dy = qkv.astype(np.float32), dy.astype(np.float32)
    tracemalloc.start()
    try:
        F.flash_attention_backward(dy, qkv, *F.flash_attention_forward(qkv, heads), heads)
        assert tracemalloc.get_traced_memory()[1] < 4 * heads * 2048**2 / 8
    finally:
        tracemalloc.stop()


def test_other_head_sizes(engine, rng):
    """NumPy takes any; a GPU says who does."""
    qkv, _, heads = make(rng, (1, 3, 2, 20))
    if not engine.has_versions:
        return
    assert not F.flash_attention_supports(engine(qkv), heads)
    with pytest.raises(ValueError, match="not 20; use attention_forward"):
        F.flash_attention_forward(engine(qkv), heads)


def test_errors_say_what_to_do(engine, rng):
    qkv, dy, heads = make(rng, (1, 4, 2, 32))
    y, logsumexp = F.flash_attention_forward(qkv, heads)
    with pytest.raises(ValueError, match="multiple of heads"):
        F.flash_attention_forward(engine(qkv), 5)
    with pytest.raises(ValueError, match="use 'legacy' or 'new'"):
        F.flash_attention_forward(engine(qkv), heads, "old")
    with pytest.raises(ValueError, match="pass what flash_attention_forward gave"):
        F.flash_attention_backward(
            engine(dy[:, 1:]), engine(qkv), engine(y), engine(logsumexp), heads
        )
    if engine.has_versions:
        with pytest.raises(
            ValueError,
            match="is for float16 and bfloat16, and these arrays are float32: use naive, ",
        ):
            F.flash_attention_forward(engine(qkv), heads, version=3)
        with pytest.raises(ValueError, match="use cast_forward first"):
            F.flash_attention_backward(
                engine(dy, np.float16), engine(qkv), engine(y), engine(logsumexp), heads
            )
