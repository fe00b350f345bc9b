"""Sparse-linear attention against the formulas written out with masks, in float64, and every engine
against that."""

import importlib.util
import pathlib

import numpy as np
import pytest

from numdiff.device import download
from numdiff.device.emulator import EmulatorDevice
from numdiff.emulator import KernelFault
from numdiff.extras.kernel_check import run as check
from numdiff.extras.kernel_check.run import run_once
from numdiff.extras.sla import kernels as sla
from numdiff.extras.sla.kernels import choice, launcher, reference
from numdiff.kernels.attention import flash_attention_forward
from numdiff.kernels.attention import unfused as A
from tests.conftest import (
    exhaustive,
    numerical_gradient,
    on,
    quick,
    relative_error,
    shapes,
    where,
)
from tests.kernels.attention.test_flash_attention import make

SHAPES = shapes(
    minimal=(1, 65, 1, 8, "new"), odd=(2, 131, 3, 12, "legacy"), aligned=(1, 256, 2, 16, "new")
)
SHARES = pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
ALL_KEYS = pytest.mark.parametrize("all_keys", [False, True], ids=["rest", "all"])


def problem(rng, shape):
    """(qkv, dy, weight, bias, heads, order)"""
    *shape, order = shape
    qkv, dy, heads = make(rng, shape)
    HS = shape[-1]
    return (
        qkv,
        dy,
        rng.standard_normal((HS, HS)) / np.sqrt(HS),
        rng.standard_normal(HS),
        heads,
        order,
    )


def dense(qkv, weight, bias, heads, critical, order, all_keys=False):
    """y with all T × T numbers, of which a mask says which are critical: as the paper writes it, or
    with all keys in the linear part, as its authors' code has it."""
    q, k, v = A.split_heads(qkv, heads, order)
    T, HS = q.shape[-2:]
    N = critical.shape[-2]
    mask = np.zeros((*critical.shape[:2], N, N), bool)
    np.put_along_axis(mask, critical, True, -1)
    mask = mask.repeat(64, 2).repeat(64, 3)[..., :T, :T]
    p = np.where(mask, np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(HS)), 0)
    phi_q, phi_k = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (q, k))
    linear = np.where(mask & (not all_keys), 0, phi_q @ phi_k.swapaxes(-1, -2))
    total = linear.sum(-1, keepdims=True)
    linear = np.divide(linear, total, out=np.zeros_like(linear), where=total > 0)
    o = p / p.sum(-1, keepdims=True) @ v + linear @ v @ weight.T + bias
    return o.transpose(0, 2, 1, 3).reshape(*qkv.shape[:2], -1)


@SHAPES
@SHARES
@ALL_KEYS
@on("cpu")
def test_reference(engine, rng, shape, share, all_keys):
    qkv, _, weight, bias, heads, order = problem(rng, shape)
    y, kept = sla.sla_forward(qkv, weight, bias, heads, share, order, all_keys=all_keys)
    assert kept.critical.shape[-1] == sla.count_of(share, sla.blocks_of(shape[1]))
    want = dense(qkv, weight, bias, heads, kept.critical, order, all_keys)
    assert relative_error(y, want) < 1e-13
    assert not all_keys or (kept.r > 0).all()
    if share == 1 and not all_keys:  # the linear part has nothing left
        want = flash_attention_forward(qkv, heads, order)[0] + np.tile(bias, heads)
        assert relative_error(y, want) < 1e-13 and not kept.r.any()


@pytest.mark.parametrize("share", [0.4, 1.0])
@ALL_KEYS
def test_gradients(rng, share, all_keys):
    """Central differences of the dense formula, whose choice stays; along random directions, as
    there are many numbers.
    """
    qkv, dy, weight, bias, heads, order = problem(rng, (1, 131, 2, 4, "new"))
    y, kept = sla.sla_forward(qkv, weight, bias, heads, share, order, all_keys=all_keys)
    dweight, dbias = np.ones_like(weight), np.ones_like(bias)
    dqkv = sla.sla_backward(
        dy, qkv, y, kept, weight, bias, dweight, dbias, heads, order, all_keys=all_keys
    )
    directions = [rng.standard_normal((8, *a.shape)) for a in (qkv, weight, bias)]

    def along(steps):
        moved = (
            a + np.tensordot(steps, d, 1)
            for a, d in zip((qkv, weight, bias), directions, strict=True)
        )
        return dense(*moved, heads, kept.critical, order, all_keys)

    got = sum(
        np.tensordot(d, g, g.ndim)
        for d, g in zip(directions, (dqkv, dweight - 1, dbias - 1), strict=True)
    )
    assert relative_error(got, numerical_gradient(along, np.zeros(8), dy)) < 1e-7


def test_choice(rng):
    """The largest products of means, of which adding a vector to all keys changes none; ties go to
    the first."""
    q, k = rng.standard_normal((2, 64 * 5 + 3, 8)).astype(np.float32)
    critical = choice.choose_blocks(q, k, 2)
    blocks = [slice(64 * i, 64 * i + 64) for i in range(6)]
    q_mean, k_mean = (np.stack([x[b].astype(np.float64).mean(0) for b in blocks]) for x in (q, k))
    want = np.sort(np.argsort(-q_mean @ k_mean.T)[:, :2])
    assert np.array_equal(critical, want) and critical.dtype == np.int32
    assert np.array_equal(choice.choose_blocks(q, k + np.float32(8), 2), want)
    assert np.array_equal(choice.choose_blocks(q, 0 * k, 3), [[0, 1, 2]] * 6)


@on("emulator", "cuda")
@quick(lambda engine: engine != "emulator")
@pytest.mark.parametrize("T, HS, version", [(323, 8, 1), (323, 32, 2), (581, 32, 1), (581, 32, 2)])
@where(lambda engine, T: engine == "cuda" or T == 323)
def test_every_engine_chooses_the_same(engine, rng, T, HS, version):
    """Blocks with the same rows in another order: their means differ by rounding alone."""
    dtype = np.float32 if version == 1 else np.float16
    q = rng.standard_normal((T, HS)).astype(dtype)
    k = np.concatenate([rng.permutation(q[:64]) for _ in range(sla.blocks_of(T))])[:T]
    qkv = engine(np.concatenate((q, k, q), 1)[None], dtype)
    HS, grid, problem = launcher.problem_of(qkv, 1, "new", 3)
    found = download(launcher.choose(qkv, HS, grid, problem, version)[0][0])[0, 0]
    want = choice.choose_blocks(q.astype(np.float32), k.astype(np.float32), 3)
    assert np.array_equal(found, want) and len(np.unique(want, axis=0)) > 1


@pytest.mark.parametrize(
    "share, blocks, count", [(0.2, 4, 1), (0.05, 256, 12), (1e-9, 8, 1), (1.0, 8, 8), (0.5, 3, 1)]
)
def test_how_many(share, blocks, count):
    assert sla.count_of(share, blocks) == count


def test_rounding_does_not_take_over(rng):
    """Critical blocks that hold all but 1e-12 of φ's sum: what float32 leaves of it is noise, and
    stays without effect.
    """
    T, HS = 256, 8
    qkv = rng.standard_normal((1, T, 3 * HS)).astype(np.float32) / 8
    q, k, _ = A.split_heads(qkv, 1, "new")
    q[..., 0] += 30
    k[..., 0] += np.where(np.arange(T) < 128, 30, -30)
    weight, bias = np.eye(HS, dtype=np.float32), np.zeros(HS, np.float32)
    y, kept = sla.sla_forward(qkv, weight, bias, 1, 0.5)
    assert (kept.r < 0).all() and np.isfinite(y).all()
    sparse = sla.sla_forward(qkv, 0 * weight, bias, 1, 0.5)[0]
    assert np.abs(y - sparse).max() < 1e-3 * np.abs(sparse).max()
    dqkv = sla.sla_backward(y, qkv, y, kept, weight, bias, None, None, 1)
    assert np.isfinite(dqkv).all()


@pytest.mark.parametrize("N, batch", [(2, 1), (256, 12), (64, 48), (64, 300), (1024, 6)])
def test_the_queries_are_shared_out(N, batch):
    """In as many rounds of thread blocks as there are, or few more; every query is covered."""
    some = launcher.choose_some(N, batch, 132)
    shares = -(-N // some)
    assert (shares - 1) * some < N <= shares * some
    assert -(-shares * batch // 264) * some <= 1.2 * max(1, N * batch / 264)


@pytest.mark.parametrize("scores", [1, reference.MAX_SCORES])
def test_however_it_is_cut(rng, monkeypatch, scores):
    qkv, dy, weight, bias, heads, order = problem(rng, (2, 200, 2, 8, "new"))
    want = sla.sla_forward(qkv, weight, bias, heads, 0.5, order)
    gradient = sla.sla_backward(dy, qkv, want[0], want[1], weight, bias, None, None, heads, order)
    monkeypatch.setattr(reference, "MAX_SCORES", scores)
    y, kept = sla.sla_forward(qkv, weight, bias, heads, 0.5, order)
    assert relative_error(y, want[0]) < 1e-14
    got = sla.sla_backward(dy, qkv, y, kept, weight, bias, None, None, heads, order)
    assert relative_error(got, gradient) < 1e-14


def test_errors_say_what_to_do(engine, rng):
    qkv, _, weight, bias, heads, order = problem(rng, (1, 130, 1, 8, "new"))
    dtype = np.float64 if not engine.has_versions else np.float32
    qkv, weight, bias = (engine(a, dtype) for a in (qkv, weight, bias))
    share = "is no share of the blocks; use more than 0 and at most 1"
    short = engine(np.zeros((1, 64, 24)), dtype)
    cases = [
        ((short, weight, bias, 1, 0.5), "64 are one block; use flash_attention_forward"),
        ((qkv, weight, bias, 1, 0), share),
        ((qkv, weight, bias, 1, 1.5), share),
        ((qkv, bias, bias, 1, 0.5), "the head size of qkv"),
    ]
    if engine.has_versions:
        twelve = [engine(np.zeros(shape)) for shape in ((1, 130, 36), (12, 12), 12)]
        half = engine(np.zeros((8, 8)), np.float16)
        cases += [
            ((*twelve, 1, 0.5), "kernels for heads of 32, 64 and 72 channels, not 12"),
            ((qkv, half, bias, 1, 0.5), "use cast_forward first"),
        ]
    for given, message in cases:
        with pytest.raises(ValueError, match=message):
            sla.sla_forward(*given, order)


SYNC = "cuda.syncthreads()"
# (file, what is changed, into what, the kernels that it makes, the kind of fault)
PLANTED = [
    ("forward_half", f"{SYNC}  # the block is there", "pass  # ", "forward", "race"),
    (
        "forward_half",
        f"cp_async_wait(0)\n        {SYNC}  # the block",
        f"{SYNC}  # the block",
        "forward",
        "cp.async",
    ),
    ("lists_half", f"{SYNC}  # dy comes where q was", "pass", "dq", "race"),
    (
        "lists_half",
        "lists[listed + min(n + 2, count - 1)]\n        stage = int32(4",
        "lists[listed + n + 2]\n        stage = int32(4",
        "dkv",
        "bounds",
    ),
]


@exhaustive
@pytest.mark.parametrize("file, before, after, kernel, kind", PLANTED)
def test_a_fault_planted_in_a_tensor_core_kernel_is_found(
    monkeypatch, tmp_path, file, before, after, kernel, kind
):
    original = importlib.import_module(f"numdiff.extras.sla.kernels.{file}")
    source = pathlib.Path(original.__file__).read_text()
    assert source.count(before) == 1
    path = tmp_path / f"{file}.py"
    path.write_text(source.replace(before, after))
    spec = importlib.util.spec_from_file_location(
        f"{original.__package__}.planted_{kernel}_{len(after)}", path
    )
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    monkeypatch.setitem(
        getattr(launcher, f"{kernel}_kernels_v2"), 32, getattr(copy, f"make_{kernel}")(32)
    )
    name = "sla" if kernel == "forward" else "sla_backward"
    case = next(c for c in check.CASES if c.name == name and "float16, new, HS 32, T 65" in c.label)
    with pytest.raises(KernelFault) as caught:
        run_once(case, 2, EmulatorDevice(order="shuffled", seed=1, float64=False, on_fault="raise"))
    assert kind in {fault.kind for fault in caught.value.faults}, caught.value
