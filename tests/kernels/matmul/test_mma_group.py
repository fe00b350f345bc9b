"""The schedule of several products in one launch of rung 5; `numdiff kernels check` has the kernels."""
import numpy as np
import pytest

from numdiff.kernels.matmul import mma_group

B2 = (2304, 768), (768, 768), (3072, 768), (768, 3072)  # of a block of DiT-B/2
S2 = (1152, 384), (384, 384), (1536, 384), (384, 1536)


@pytest.mark.parametrize("sizes, K, blocks", [
    (B2, 16384, 132), (S2, 16384, 132), (B2, 16384, 108), (((768, 768),), 16384, 132), (((8, 8),), 64, 5),
    (((8, 8), (136, 264)), 1000, 4), (((264, 512),), 32, 3), (((128, 256),) * 4, 4096, 2)])
@pytest.mark.parametrize("shortest", [1, 8])
def test_each_step_of_each_tile_is_done_once(sizes, K, blocks, shortest):
    made = mma_group.schedule(sizes, K, blocks, shortest)
    units = made.units.reshape(-1, blocks, mma_group.FIELDS)
    done = {}
    for b in range(blocks):
        lengths = units[:, b, 4] - units[:, b, 3]
        assert (lengths[:-1] >= lengths[1:]).all() or (lengths[np.argmin(lengths):] >= 0).all()
        assert not lengths[lengths.argmin():].any() or lengths.all()  # empty units come last
        for p, row, column, k, k_end, part, M, N in units[lengths > 0, b].tolist():
            assert (M, N) == sizes[p] and k % mma_group.STEP == 0 and (k_end % mma_group.STEP == 0 or k_end == K)
            done.setdefault((p, row, column), []).append((k, k_end, part))
    cut = {tuple(t[:3]): t for t in made.tiles.reshape(-1, mma_group.FIELDS).tolist()}
    assert len(done) == sum(-(-M // 128) * -(-N // 256) for M, N in sizes)
    for tile, shares in done.items():
        shares.sort()
        assert shares[0][0] == 0 and shares[-1][1] == K
        assert all(a[1] == b[0] for a, b in zip(shares, shares[1:], strict=False))
        if len(shares) > 1:
            assert [part for *_, part in shares] == [*range(cut[tile][3], cut[tile][3] + len(shares))]
        else:
            assert tile not in cut and shares[0][2] == -1
    assert made.parts == sum(t[4] for t in cut.values())
    longest, total = (units[..., 4] - units[..., 3]).sum(0).max(), K * len(done)
    assert shortest == 8 and K < 2000 or longest <= total / blocks + K / 8 + 2 * mma_group.STEP
