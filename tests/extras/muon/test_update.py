import math
import pathlib

import numpy as np
import pytest

from numdiff.device import download
from numdiff.extras.muon import newton_schulz as N
from numdiff.extras.muon import update as M
from numdiff.kernels.operation.versions import at_most
from numdiff.kernels.optimizer.adamw import AdamWCopies, State
from tests.conftest import on, quick, versions, where

SHAPES = {
    "minimal": (2, 2),
    "odd": (3, 5),
    "tall": (24, 8),
    "wide": (8, 24),
    "several blocks": (40, 36),
}
STORED = np.load(pathlib.Path(__file__).parents[2] / "reference" / "muon.npz")
SETTINGS = 0.95, 0.1, 1.0  # momentum, weight decay, clip norm


def unit(rng, *shape):
    """Matrices of Frobenius norm 1."""
    x = rng.standard_normal(shape)
    return x / np.linalg.norm(x, axis=(-2, -1), keepdims=True)


def polynomial(x, steps=N.STEPS):
    """U · p(S) · Vᵀ, by the singular value decomposition."""
    u, s, v = np.linalg.svd(x, full_matrices=False)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s[..., None, :]) @ v


def by_hand(w, g, m, step_size, momentum, decay, rate):
    """One matrix, as MATHEMATICS has it; g already clipped."""
    m = momentum * m + (1 - momentum) * g
    n = momentum * m + (1 - momentum) * g
    o = polynomial(n / np.linalg.norm(n))
    return (1 - rate * decay) * w - rate * step_size * o, m


@pytest.mark.parametrize("shape", [(4, 4), (12, 30), (30, 12)])
def test_five_iterations_are_the_polynomial_of_the_singular_values(rng, shape):
    x = unit(rng, 3, *shape)
    want = polynomial(x)
    np.testing.assert_allclose(N.newton_schulz(N.FIRST * x), want, atol=1e-10)
    np.testing.assert_allclose(N.newton_schulz_reference(x), want, atol=1e-10)


@pytest.mark.parametrize(
    "dtype, tolerance", [(np.float64, 0.0), (np.float32, 1e-4), (np.float16, 5e-3)]
)
def test_singular_values_come_close_to_one(rng, dtype, tolerance):
    """From those that are a fiftieth of the norm on: also where what is between is rounded to
    float16."""
    u, v = (np.linalg.qr(rng.standard_normal((n, 24)))[0] for n in (64, 24))
    s = np.geomspace(1, 1 / 20, 24)
    x = (u * (s / np.linalg.norm(s))) @ v.T
    got = N.newton_schulz((N.FIRST * x[None]).astype(dtype))
    assert got.dtype == dtype
    found = np.linalg.svd(got[0].astype(np.float64))[1]
    assert 0.68 - tolerance < found.min() and found.max() < 1.21 + tolerance


def hard(rng, kind, s=32, l=80):
    """A matrix that float16 has trouble with, of Frobenius norm 1."""
    u, v = (np.linalg.qr(rng.standard_normal((n, s)))[0] for n in (s, l))
    x = {
        "noise": rng.standard_normal((s, l)),
        "ill-conditioned": (u * np.geomspace(1, 1e-6, s)) @ v.T,
        "low rank": u[:, :4] @ v[:, :4].T + 1e-3 * rng.standard_normal((s, l)),
        "one large": (u * np.r_[50, np.ones(s - 1)]) @ v.T,
    }[kind]
    return x / np.linalg.norm(x)


@pytest.mark.parametrize(
    "dtype, parts", [(np.float16, (2, 1, 2)), (np.float32, (3, 2))], ids=["float16", "float32"]
)
@pytest.mark.parametrize("kind", ["noise", "ill-conditioned", "low rank", "one large"])
def test_iterations_in_a_row_lose_nothing(rng, monkeypatch, kind, dtype, parts):
    """By way of the Gram matrix, with X formed again in between, the result is as exact as by
    single iterations; in float32 on the host, without that, nearly."""
    x = hard(rng, kind)
    assert N.parts_of((1, *x.shape), dtype) == parts and N.parts_of((1, *x.shape), dtype, 1) == (1,)
    given, want = (N.FIRST * x[None]).astype(dtype), polynomial(x)
    in_a_row = np.linalg.norm(N.newton_schulz(given)[0] - want)
    monkeypatch.setattr(N, "WIDE", 3)
    assert N.parts_of((1, *x.shape), dtype) == (1,) * 5
    assert in_a_row < (
        2 * np.linalg.norm(N.newton_schulz(given)[0] - want)
        if dtype == np.float16
        else 3e-3 * np.linalg.norm(want)
    )


@on("cuda")
@pytest.mark.parametrize("shape", [(4, 768, 768), (2, 3072, 768), (1, 768, 3072)])
def test_large_ones_in_float16(engine, rng, shape):
    x = unit(rng, *shape)
    engine.check(
        N.newton_schulz(engine((N.FIRST * x).astype(np.float16), np.float16)), polynomial(x), 3e-2
    )


def laid_out(rng, shape):
    """(flat arrays, starts): two matrices, the second first, with numbers of others around them."""
    size = math.prod(shape)
    room = -(-size // 4) * 4
    return rng.standard_normal((4, 2 * room + 12)), np.array([room + 8, 4])


def state(engine, norm, unscale=None):
    """Of the fourth step, at a learning rate of 0.01."""
    return State(
        engine(np.array([3], np.uint32)),
        engine(np.array([1e-2])),
        engine(np.array([norm])),
        unscale if unscale is None else engine(np.array([unscale])),
    )


def update(version, *arguments, **options):
    """`muon_update` by this version of its two kernels; None: by what is chosen."""
    with at_most({} if version is None else {"muon_momentum": version, "muon_apply": version}):
        M.muon_update(*arguments, **options)


def check_update(engine, version, arrays, stack, starts, extents, monkeypatch):
    """All that an update does to two or more matrices, with one iteration instead of five where
    each is emulated; what is between them stays."""
    w, g, m, e = arrays
    if engine.name == "emulator":
        monkeypatch.setattr(M, "newton_schulz", lambda x: engine(polynomial(download(x) / N.FIRST)))
    results, norm, scale = [], 5.0, 0.5
    for _ in range(engine.repeats):
        W, G, V, E = map(engine, arrays)
        half = engine.zeros(w.size, np.float16) if engine.name in ("cpu", "cuda") else None
        copies = AdamWCopies(E, 0.9, half)
        update(version, W, G, V, stack, state(engine, norm, scale), *SETTINGS, copies)
        engine.check_equal(G, g.astype(np.float32))
        results.append((W, V, E))
    want_w, want_m, want_e = w.copy(), m.copy(), e.copy()
    inside = np.zeros(w.size, bool)
    for start, shape in zip(starts, extents, strict=True):
        at = slice(start, start + math.prod(shape))
        inside[at] = True
        new, moment = by_hand(
            w[at].reshape(shape),
            scale / (norm + 1e-6) * g[at].reshape(shape),
            m[at].reshape(shape),
            0.2 * math.sqrt(max(shape)),
            0.95,
            0.1,
            1e-2,
        )
        want_w[at], want_m[at] = new.ravel(), moment.ravel()
        want_e[at] += max(0.1, 9 / 13) * (want_w[at] - want_e[at])
    tolerance = 2e-4 if half is not None and engine.name == "cuda" else 2e-6
    for got, want in zip(results[0], (want_w, want_m, want_e), strict=True):
        engine.check(got, want, tolerance)
    if half is not None:
        wanted = np.where(inside, download(results[0][0]), 0).astype(np.float16)
        np.testing.assert_array_equal(download(half), wanted)
    for first, *others in zip(*results, strict=True):
        for other in others:
            engine.check_equal(first, other)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@versions(1, 2)
@where(lambda version, shape: version != 2 or shape[0] * shape[1] % 4 == 0)
@quick(lambda engine, shape, version: engine != "emulator" or version and shape == SHAPES["odd"])
def test_update(engine, rng, shape, version, monkeypatch):
    arrays, starts = laid_out(rng, shape)
    stack = M.MuonStack(engine(starts), *shape)
    check_update(engine, version, arrays, stack, starts, [shape] * 2, monkeypatch)


@versions(1, 2)
def test_matrices_of_several_shapes_in_one_stack(engine, rng, version, monkeypatch):
    """X has each in its corner, zeros around it; each moves by its own scale, and the padding does
    not."""
    extents, starts = np.array([[6, 12], [8, 16], [8, 4]]), np.array([212, 4, 140])
    w, g, m, e = arrays = rng.standard_normal((4, 288))
    stack = M.MuonStack(engine(starts), 8, 16, engine(extents.ravel()))
    x = M.muon_momentum(engine(g), engine(m), stack, engine(np.ones(1)), 0.95, version=version)
    if engine.computes:
        for matrix, (rows, columns) in zip(download(x), extents, strict=True):
            corner = matrix[:rows, :columns]
            assert np.count_nonzero(matrix) == np.count_nonzero(corner) == rows * columns
    check_update(engine, version, arrays, stack, starts, extents, monkeypatch)


def test_which_shapes_share_a_stack():
    """Few small ones do, those of which there are many or which are large do not; wide and tall
    ones never."""
    many = {(768, 768): 48, (3072, 768): 12, (768, 3072): 12}
    assert M.alike(many, 132) == {shape: shape for shape in many}
    few = {(64, 576): 7, (64, 1152): 2, (128, 1152): 6, (768, 256): 6, (576, 192): 5, (64, 6): 1}
    assert M.alike(few, 132) == {
        **dict.fromkeys([(64, 576), (64, 1152), (128, 1152)], (128, 1152)),
        **dict.fromkeys([(768, 256), (576, 192)], (768, 256)),
        (64, 6): (64, 6),
    }


@pytest.mark.parametrize("number", range(3), ids=["wide", "tall", "square"])
def test_four_steps_of_torchs_muon(number):
    """Of torch.optim.Muon, in float64: see tests/reference/make_muon.py."""
    weight, gradients = STORED[f"weight_{number}"].ravel(), STORED[f"gradient_{number}"]
    stack, m = M.MuonStack(np.array([0]), *gradients.shape[1:]), np.zeros(weight.size)
    for step, gradient in enumerate(gradients):
        M.muon_update(
            weight,
            gradient.ravel(),
            m,
            stack,
            State(np.array([step], np.uint32), STORED["rate"][None], np.ones(1)),
            float(STORED["momentum"]),
            float(STORED["decay"]),
        )
    np.testing.assert_allclose(weight, STORED[f"after_{number}"].ravel(), rtol=1e-9)


@versions(1, 2)
@pytest.mark.parametrize("norm", [np.nan, np.inf])
@quick(lambda engine, version, norm: engine != "emulator" or version == 1 and np.isnan(norm))
def test_nothing_changes_when_the_norm_is_not_finite(engine, rng, version, norm, monkeypatch):
    monkeypatch.setattr(M, "newton_schulz", lambda x: x)
    (w, g, m, e), starts = laid_out(rng, (4, 8))
    g[5] = norm
    arrays = [engine(a) for a in (w, m, e)]
    half = engine(w, np.float16)
    update(
        version,
        arrays[0],
        engine(g),
        arrays[1],
        M.MuonStack(engine(starts), 4, 8),
        state(engine, norm),
        *SETTINGS,
        AdamWCopies(arrays[2], 0.9, half),
    )
    for array, old in zip(arrays, (w, m, e), strict=True):
        engine.check_equal(array, old.astype(np.float32))
    engine.check_equal(half, w.astype(np.float16))


def test_a_gradient_of_zeros_moves_nothing(engine):
    """As that of a block's first layers is, whose gate begins at zero: no division by its norm."""
    arrays = [engine(np.zeros(64)) for _ in range(3)]
    x = M.muon_momentum(
        arrays[1], arrays[2], M.MuonStack(engine(np.array([0])), 8, 8), engine(np.ones(1)), 0.95
    )
    engine.check_equal(x, np.zeros((1, 8, 8), np.float32))


def test_bad_input_says_so(engine):
    x, norm, stack = (
        engine(np.zeros(15)),
        engine(np.ones(1)),
        M.MuonStack(engine(np.array([0])), 3, 5),
    )
    with pytest.raises(ValueError, match="one length"):
        M.muon_momentum(x, engine(np.zeros(16)), stack, norm, 0.95)
    with pytest.raises(ValueError, match="momentum < 1"):
        M.muon_momentum(x, x, stack, norm, 1.0)
    with pytest.raises(ValueError, match="hold 1 matrices of 3 × 5"):
        M.muon_apply(x, engine(np.zeros((1, 5, 3))), stack, State(norm, norm, norm), 0.0)
    with pytest.raises(ValueError, match="a batch of matrices"):
        N.newton_schulz(engine(np.zeros((3, 5))))
    if engine.has_versions:
        with pytest.raises(ValueError, match="use version=1"):
            M.muon_momentum(x, x, stack, norm, 0.95, version=2)


def test_cost():
    assert M.muon_momentum_cost(10, 2) == (220, 110)
    assert M.muon_apply_cost(10, 2, True, True) == (200, 70)
    s, l = 768, 3072
    assert N.newton_schulz_cost((12, s, s), itemsize=2) == (
        5 * 12 * 2 * 7 * s * s,
        5 * 12 * 4 * s**3,
    )
    assert N.newton_schulz_cost((12, l, s), itemsize=2) == (
        12 * 2 * (3 * (3 * s * l + 2 * s * s) + (13 + 2 + 13) * s * s),
        12 * (3 * 3 * s * s * l + (5 + 1 + 5) * s**3),
    )
