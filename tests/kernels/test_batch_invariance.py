"""An image's bits do not depend on its batch, where `batch_invariant` says so."""

import contextlib
import os

import numpy as np
import pytest

from numdiff.device import batch_invariance as A
from numdiff.device import download, upload, why_no_gpu
from numdiff.device.batch_invariance import batch_invariant, blocks, nominal_extent
from numdiff.device.ptx import PtxDevice
from numdiff.nn import DiT, Tensor, UNet
from tests.conftest import needs

UNETS = {
    "unet": {
        "image_size": 16,
        "model_channels": 32,
        "channel_mult": (1, 2),
        "num_res_blocks": 1,
        "attention_resolutions": (8,),
    },
    "odd sizes": {
        "image_size": 12,
        "model_channels": 32,
        "channel_mult": (1, 2),
        "num_res_blocks": 1,
        "attention_resolutions": (6,),
        "num_head_channels": 16,
        "resblock_updown": True,
        "use_scale_shift_norm": True,
    },
}
DITS = {
    "dit": {
        "image_size": 16,
        "in_channels": 3,
        "hidden_size": 64,
        "depth": 2,
        "num_heads": 2,
        "num_classes": 3,
    },
    "odd tokens": {
        "image_size": 6,
        "in_channels": 3,
        "hidden_size": 48,
        "depth": 1,
        "num_heads": 2,
        "num_classes": 3,
    },
}


def answers(build, batch, parts):
    """The model's answers to a whole batch, and to parts of it."""
    model, rng = build(), np.random.default_rng(1)
    model.parameters.load_flat(0.05 * rng.standard_normal(model.parameters.total))
    x = rng.standard_normal((batch, model.image_size, model.image_size, 3)).astype(np.float32)
    t = np.full(batch, 300.5, np.float32)
    labels = None if model.num_classes is None else (np.arange(batch) % 3).astype(np.int32)

    def answer(rows):
        put = [None if a is None else upload(a[rows], model.backend) for a in (x, t, labels)]
        with batch_invariant(len(x[rows])):
            return download(model(Tensor(put[0]), *put[1:]).data)

    return answer(slice(0, batch)), [(rows, answer(rows)) for rows in parts]


@pytest.mark.parametrize("name", [*UNETS, *DITS])
@pytest.mark.parametrize("device", ["cpu", *([] if why_no_gpu() else ["cuda"])])
def test_batch_invariance(device, name):
    kind, options = (UNet, UNETS[name]) if name in UNETS else (DiT, DITS[name])
    whole, parts = answers(
        lambda: kind(**options, device=device), 23, [slice(0, 1), slice(4, 9), slice(5, 23)]
    )
    for rows, part in parts:
        np.testing.assert_array_equal(part, whole[rows])


@needs("posix")
def test_processes_give_the_bits_of_threads(rng, monkeypatch):
    """…and weights that change later are seen."""
    monkeypatch.setattr(A, "can_fork", lambda: True)
    for module in ("numdiff.device.cpu", "numdiff.device.batch_invariance"):
        monkeypatch.setattr(f"{module}.workers", lambda: 2)
    x, weight = rng.standard_normal((2, 5, 8)).astype(np.float32), np.eye(8, dtype=np.float32)
    seen = []

    def function(x, other):
        return np.column_stack(
            [x @ weight if other is None else x + other, np.full(len(x), os.getpid())]
        )

    for other, slow in ((None, 1e9), (None, 0), (x[1], 0)):
        monkeypatch.setattr(A, "SLOW", slow)
        with A.many_evaluations():
            seen.append([A.evaluated(function, x[0], other) for _ in range(2)])
        weight *= 2
    (first, again), (before, after), (_, sums) = seen
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(before[:, :-1], 2 * first[:, :-1])
    np.testing.assert_array_equal(after[:, :-1], before[:, :-1])
    assert (
        {*first[:, -1]} == {os.getpid()}
        and {*before[:, -1]} == {*after[:, -1]}
        and len({*after[:, -1]}) == 2
    )
    assert before[0, -1] == os.getpid()
    np.testing.assert_array_equal(sums[:, :-1], x[0] + x[1])


def test_what_is_made_of_a_weight_is_kept_within_many_evaluations():
    weight, calls = np.ones(3, np.float32), []

    def double(array):
        calls.append(array)
        return 2 * array

    for _ in range(2):
        A.kept(double, weight)
    with A.many_evaluations():
        assert A.kept(double, weight) is A.kept(double, weight) is not A.kept(np.copy, weight)
        assert len(calls) == 3
        for k in range(3):  # arrays that are gone, maybe at one address
            np.testing.assert_array_equal(A.kept(np.negative, np.full(3, k)), [-k] * 3)
    weight *= 2
    with A.many_evaluations():
        np.testing.assert_array_equal(A.kept(double, weight), 4)


class Noting(PtxDevice):
    """Notes what is launched: kernels, and bytes of shared memory."""

    def launch(self, kernel, grid, block, args, shared=0, cluster=1):
        self.launched.append(
            (kernel.py_func.__module__, kernel.py_func.__qualname__, id(kernel), block, shared)
        )


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize("kind", ["unet", "dit"])
def test_a_gpu_runs_the_same_kernels_for_every_batch_size(kind, half):
    """The kernels' identities show versions and tiles; their number shows whether sums are split."""
    device = Noting()
    model = (
        UNet(image_size=64, device=device, seed=None)
        if kind == "unet"
        else DiT(image_size=32, hidden_size=384, depth=2, num_heads=6, device=device, seed=None)
    )
    if half:
        model.compute_in_half()

    def launches(batch, context=batch_invariant):
        shape, device.launched = (batch, model.image_size, model.image_size, model.in_channels), []
        x = upload(np.zeros(shape, np.float32), device)
        t, y = (upload(np.zeros(batch, dtype), device) for dtype in (np.float32, np.int32))
        with context(batch):
            model(Tensor(x), t, y if kind == "dit" else None)
        return device.launched

    assert (
        launches(1)
        == launches(7)
        == launches(32)
        == launches(32, contextlib.nullcontext)
        == launches(96)
    )
    assert launches(1, contextlib.nullcontext) != launches(32)


@pytest.mark.parametrize("alike, taken", [(True, [256, 16, 1, 1, 1]), (False, [1] * 5)])
def test_launchers_see_the_same_extents(monkeypatch, alike, taken):
    """alike: where BLAS does not give equal rows equal bits, the CPU engine takes each sample on
    its own."""
    monkeypatch.setattr(A, "rows_are_alike", lambda: alike)
    assert nominal_extent(7) == 7 and blocks(64, 256) is None
    for rows in (1, 2, 32, 50):
        with batch_invariant(rows):
            assert nominal_extent(rows * 64) == A.NOMINAL_BATCH * 64
            with batch_invariant(2 * rows):  # guidance
                assert nominal_extent(2 * rows * 64) == A.NOMINAL_BATCH * 64
            assert [blocks(n, 256) for n in (1, 16, 49, 256, 1024)] == taken
    assert nominal_extent(7) == 7
