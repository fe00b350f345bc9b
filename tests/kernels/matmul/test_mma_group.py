"""The schedule of several products in one launch of rung 5; `numdiff kernels check` has the
kernels."""

import numpy as np
import pytest

from numdiff.device import download, empty, upload
from numdiff.device.emulator import EmulatorDevice
from numdiff.device.planned import cards_with, collect
from numdiff.dtypes import bfloat16
from numdiff.kernels.linear.gradients import _by_mma, linear_gradients_backward
from numdiff.kernels.linear.layer import linear_backward, linear_gate_supports, linear_gelu_forward
from numdiff.kernels.matmul import matmul_forward, mma_group
from tests.conftest import exhaustive

B2 = (2304, 768), (768, 768), (3072, 768), (768, 3072)  # of a block of DiT-B/2
S2 = (1152, 384), (384, 384), (1536, 384), (384, 1536)


@pytest.mark.parametrize(
    "sizes, K, blocks",
    [
        (B2, 16384, 132),
        (S2, 16384, 132),
        (B2, 16384, 108),
        (((768, 768),), 16384, 132),
        (((8, 8),), 64, 5),
        (((8, 8), (136, 264)), 1000, 4),
        (((264, 512),), 32, 3),
        (((128, 256),) * 4, 4096, 2),
    ],
)
@pytest.mark.parametrize("shortest", [1, 8])
def test_each_step_of_each_tile_is_done_once(sizes, K, blocks, shortest):
    made = mma_group.schedule(sizes, K, blocks, shortest)
    units = made.units.reshape(-1, blocks, mma_group.FIELDS)
    done = {}
    for b in range(blocks):
        lengths = units[:, b, 4] - units[:, b, 3]
        assert (lengths[:-1] >= lengths[1:]).all() or (lengths[np.argmin(lengths) :] >= 0).all()
        assert not lengths[lengths.argmin() :].any() or lengths.all()  # empty units come last
        for p, row, column, k, k_end, part, M, N in units[lengths > 0, b].tolist():
            assert (
                (M, N) == sizes[p]
                and k % mma_group.STEP == 0
                and (k_end % mma_group.STEP == 0 or k_end == K)
            )
            done.setdefault((p, row, column), []).append((k, k_end, part))
    cut = {tuple(t[:3]): t for t in made.tiles.reshape(-1, mma_group.FIELDS).tolist()}
    assert len(done) == sum(-(-M // 128) * -(-N // 256) for M, N in sizes)
    for tile, shares in done.items():
        shares.sort()
        assert shares[0][0] == 0 and shares[-1][1] == K
        assert all(a[1] == b[0] for a, b in zip(shares, shares[1:], strict=False))
        if len(shares) > 1:
            assert [part for *_, part in shares] == [
                *range(cut[tile][3], cut[tile][3] + len(shares))
            ]
        else:
            assert tile not in cut and shares[0][2] == -1
    assert made.parts == sum(t[4] for t in cut.values())
    longest, total = (units[..., 4] - units[..., 3]).sum(0).max(), K * len(done)
    assert shortest == 8 and K < 2000 or longest <= total / blocks + K / 8 + 2 * mma_group.STEP


# What is launched on a card without Hopper's instructions -----------------------------------------


def launched_by(function, capability=(8, 0)):
    """The names of the kernels that a function of a device launches on a card of this capability."""
    return [key.name for key in collect(function, cards_with(capability)[0])]


def test_gelu_is_part_of_its_products():
    """…and a gate, which this rung lacks, is not requested."""

    def run(device):
        x, w = (empty(shape, np.float16, device) for shape in ((2048, 256), (512, 256)))
        u, _ = linear_gelu_forward(x, w, empty((512,), np.float32, device))
        linear_backward(
            empty((2048, 256), np.float16, device),
            u,
            empty((256, 512), np.float16, device),
            None,
            gelu_of=u,
        )
        assert not linear_gate_supports(
            x.reshape(2, 1024, 256), empty((2, 512), np.float16, device), w
        )

    assert [name.rpartition("x")[2].split("_", 1)[1] for name in launched_by(run)] == [
        "nt_gelu",
        "nn_gelu_gradient",
    ]


def test_one_weight_gradient_is_dealt_out_too():
    """…where slices would not fill the rounds; a product with few results in 16 bits is split."""

    def gradient(device):
        matmul_forward(
            *(empty((16384, n), np.float16, device) for n in (4096, 1024)),
            True,
            out_dtype=np.float32,
        )

    def few(device):
        matmul_forward(
            empty((64, 4608), np.float16, device),
            empty((4608, 768), np.float16, device),
            residual=empty((64, 768), np.float16, device),
        )

    assert launched_by(gradient)[1:] == ["add_tiles_kernel"] and launched_by(gradient)[0].endswith(
        "tn_plain_group"
    )
    names = launched_by(few)
    assert names[0].startswith("gemm_mma_64x64") and names[1] in (
        "add_partials_kernel",
        "add_many_partials_kernel",
    )
    # rung 6 does not split sums of 16-bit results, so that rung 5 takes them on Hopper, too
    assert launched_by(few, (9, 0))[0].startswith("gemm_mma_64x64")


@exhaustive
@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
def test_row_sums_of_some_products(dtype):
    """A layer without a bias stands between two with one; tiles of the first columns are cut."""
    generator, rows = np.random.default_rng(5), 72
    device, layers, wanted = EmulatorDevice(cc=(8, 0)), [], []
    for N, K, has_bias in ((8, 264, True), (16, 8, False), (136, 8, True)):
        dy, x = (generator.standard_normal((rows, n)).astype(dtype) for n in (N, K))
        bias = generator.standard_normal(N).astype(np.float32)
        dweight = empty((N, K), np.float32, device)
        dbias = upload(bias, device) if has_bias else None
        layers.append((upload(dy, device), upload(x, device), dweight, dbias))
        dy, x = dy.astype(np.float64), x.astype(np.float64)
        wanted.append((dy.T @ x, bias + dy.sum(0) if has_bias else None))
    with _by_mma():
        linear_gradients_backward(layers, False)
    for (_, _, dweight, dbias), (products, sums) in zip(layers, wanted, strict=True):
        np.testing.assert_allclose(download(dweight), products, rtol=1e-5, atol=1e-5)
        if sums is not None:
            np.testing.assert_allclose(download(dbias), sums, rtol=1e-5, atol=1e-5)
