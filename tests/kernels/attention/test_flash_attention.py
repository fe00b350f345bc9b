import tracemalloc

import numpy as np
import pytest

from numdiff.kernels import attention as F
from numdiff.kernels.attention import launcher
from numdiff.kernels.attention import unfused as A
from tests.conftest import quick, shapes, versions, where

# (B, T, heads, HS) and the order of the channels. Tiles have 64 rows, blocks of the forward 64 or
# 128.
SHAPES = shapes(
    odd=(1, 3, 1, 32, "new"),
    one_token=(1, 1, 2, 32, "legacy"),
    one_group=(2, 64, 1, 64, "legacy"),
    not_aligned=(1, 67, 3, 72, "new"),
    not_aligned_64=(2, 49, 2, 64, "new"),
    two_tiles=(1, 128, 2, 72, "legacy"),
    large=(2, 300, 3, 32, "legacy"),
    large_64=(1, 257, 2, 64, "legacy"),
    large_72=(1, 200, 2, 72, "new"),
)


def make(rng, shape):
    """(qkv, dy, heads) of normal numbers; shape: (B, T, heads, HS)"""
    B, T, heads, HS = shape
    return (
        rng.standard_normal((B, T, 3 * heads * HS)),
        rng.standard_normal((B, T, heads * HS)),
        heads,
    )


@SHAPES
@versions(1, 2)  # None is version 4 wherever it can run
# 32 and 72 have all there is
@where(lambda engine, shape: engine not in ("launch", "ptx") or shape[3] != 64)
@quick(lambda engine, version, shape: engine != "emulator" or version == 1 or shape[1] < 3)
def test_flash_attention(engine, rng, shape, version):
    *shape, order = shape
    qkv, dy, heads = make(rng, shape)
    want, want_logsumexp = F.flash_attention_forward(qkv, heads, order)
    runs = [
        F.flash_attention_forward(engine(qkv), heads, order, version=version)
        for _ in range(engine.repeats)
    ]
    engine.check(runs[0][0], want, 1e-5)
    engine.check(runs[0][1], want_logsumexp, 1e-5)
    engine.check_equal(runs[0][0], runs[-1][0])
    engine.check_equal(runs[0][1], runs[-1][1])
    given = [engine(a) for a in (dy, qkv, want, want_logsumexp)]
    runs = [
        F.flash_attention_backward(*given, heads, order, version=version)
        for _ in range(engine.repeats)
    ]
    if shape[1] > 1:  # one key alone has no gradient but rounding errors, in q and k
        engine.check(
            runs[0], F.flash_attention_backward(dy, qkv, want, want_logsumexp, heads, order), 1e-5
        )
    engine.check_equal(runs[0], runs[-1])


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
    chunks, tiles = launcher.choose_chunks(batch, T, 132, 64, 4)
    assert 1 <= chunks <= launcher.LARGEST_CHUNKS
    assert (chunks - 1) * tiles < -(-T // 64) <= chunks * tiles


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
        engine.check(
            F.flash_attention_forward(engine(qkv), heads)[0],
            A.attention_forward(qkv, heads)[0],
            3e-6,
        )
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
