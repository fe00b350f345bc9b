import numpy as np
import pytest

from numdiff.device import download
from numdiff.extras.qk_norm_rope import launcher as Q
from numdiff.nn import functional as F
from numdiff.nn.parameter import Parameter
from numdiff.nn.tensor import Tape, Tensor
from tests.conftest import numerical_gradient, on, quick, relative_error, versions

WHAT = pytest.mark.parametrize("norms, rotates", [(True, True), (True, False), (False, True)])


def make(rng, shape, norms=True, rotates=True, dtype=np.float64):
    """qkv, dqkv, then weights and rotation as arguments, float64 numbers that their types hold."""
    B, T, heads, HS = shape
    qkv, dy = (
        a.astype(dtype).astype(np.float64) for a in rng.standard_normal((2, B, T, 3 * heads * HS))
    )
    given = {}
    if norms:
        given["q_weight"], given["k_weight"] = rng.standard_normal((2, HS))
    if rotates:
        # no angle's: nothing is taken for granted
        given["rotation"] = rng.standard_normal((2, T, HS))
    return qkv, dy, {name: a.astype(np.float32).astype(np.float64) for name, a in given.items()}


def moved(engine, given):
    return {name: engine(a) for name, a in given.items()}


def check_backward(engine, qkv, dy, heads, given, wanted=(True, True), **options):
    """The gradients on an engine, of the weights that are wanted, against the CPU's."""
    sums, HS = np.zeros((2, qkv.shape[-1] // (3 * heads))), qkv.shape[-1] // (3 * heads)
    want = Q.qk_norm_rope_backward(dy, qkv, heads, **given, dq_weight=sums[0], dk_weight=sums[1])
    got = [engine.zeros(HS) if each else None for each in wanted]
    found = {"dq_weight": got[0], "dk_weight": got[1], **moved(engine, given)}
    dx = Q.qk_norm_rope_backward(engine(dy), engine(qkv), heads, **found, **options)
    engine.check(dx, want)
    for one, expected in zip(got, sums, strict=True):
        if one is not None:
            engine.check(one, expected)


@pytest.mark.parametrize("norms, rotates", [(True, True), (False, True)])
@pytest.mark.parametrize("in_place", [True, False])
@quick(lambda engine, norms, in_place: engine != "emulator" or norms and in_place)
def test_what_is_overwritten_and_kept(engine, rng, norms, rotates, in_place):
    """In place y is x, dx is dy and a copy of q and k is kept for the norm's gradient; else x itself
    is, and nothing changes. v passes through bit for bit."""
    qkv, dy, given = make(rng, (1, 3, 2, 8), norms, rotates)
    given, x, g = moved(engine, given), engine(qkv), engine(dy)
    y, kept = Q.qk_norm_rope_forward(x, 2, **given, in_place=in_place)
    _, none = Q.qk_norm_rope_forward(engine(qkv), 2, **given, in_place=in_place, keeps=False)
    assert none is None and (y is x) == in_place and (kept is not None) == norms
    if norms:
        engine.check(kept, qkv[..., :32] if in_place else qkv, 1e-7)
    if engine.computes:
        np.testing.assert_array_equal(download(y)[..., 32:], download(engine(qkv))[..., 32:])
    sums = [engine.zeros(8), engine.zeros(8)] if norms else [None, None]
    dx = Q.qk_norm_rope_backward(
        g, kept, 2, **given, dq_weight=sums[0], dk_weight=sums[1], in_place=in_place
    )
    assert (dx is g) == in_place
    if not in_place:
        engine.check(x, qkv, 1e-7)
        engine.check(g, dy, 1e-7)


def test_reference_against_the_definition(rng):
    qkv, _, given = make(rng, (2, 3, 2, 4))
    y, _ = Q.qk_norm_rope_forward(qkv, 2, **given, eps=0.1)
    for b, t, part, head in np.ndindex(2, 3, 2, 2):
        at = slice(part * 8 + head * 4, part * 8 + head * 4 + 4)
        x = qkv[b, t, at]
        z = x / np.sqrt(np.mean(x**2) + 0.1) * given[("q_weight", "k_weight")[part]]
        cos, sin = given["rotation"][:, t]
        np.testing.assert_allclose(
            y[b, t, at], z * cos + np.array([-z[1], z[0], -z[3], z[2]]) * sin, rtol=1e-6
        )


@WHAT
def test_gradient(rng, norms, rotates):
    qkv, dy, given = make(rng, (2, 2, 2, 4), norms, rotates)
    sums = np.zeros((2, 4))
    dx = Q.qk_norm_rope_backward(dy, qkv, 2, **given, dq_weight=sums[0], dk_weight=sums[1])
    assert (
        relative_error(
            dx, numerical_gradient(lambda a: Q.qk_norm_rope_forward(a, 2, **given)[0], qkv, dy)
        )
        < 1e-7
    )
    for name, found in zip(("q_weight", "k_weight"), sums, strict=True):
        if norms:
            want = numerical_gradient(
                lambda a, name=name: Q.qk_norm_rope_forward(qkv, 2, **{**given, name: a})[0],
                given[name],
                dy,
            )
            assert relative_error(found, want) < 1e-7


def test_blocks_of_several_images(engine, rng, monkeypatch):
    """Two images, then one, of a batch of three, which few images do not give."""
    monkeypatch.setattr(Q, "choose_chunk", lambda *_: 2)
    qkv, dy, given = make(rng, (3, 2, 3, 8))
    y, _ = Q.qk_norm_rope_forward(engine(qkv), 3, **moved(engine, given), in_place=True)
    engine.check(y, Q.qk_norm_rope_forward(qkv, 3, **given)[0])
    check_backward(engine, qkv, dy, 3, given, in_place=True)


@pytest.mark.parametrize(
    "B, T", [(1, 16), (64, 256), (65, 256), (1000, 4), (3, 4096), (100_000, 1)]
)
def test_chunks_fill_the_card_once(B, T):
    """As many blocks as run at once, or all that there are; what a block has grows only with the
    batch."""
    chunk = Q.choose_chunk(B, T, 2, 6, 132)
    blocks = -(-T // 4) * 2 * -(-B // chunk)
    assert 1 <= chunk <= B and -(-B // chunk) <= Q.MAX_CHUNKS
    assert chunk == 1 or -(-T // 4) * 2 > 6 * 132 or blocks <= 6 * 132 or B > Q.MAX_CHUNKS
    if (B, T) == (64, 256):
        assert (chunk, blocks) == (11, 768)


@versions(1, 2)
@pytest.mark.parametrize("wanted", [(False, True), (False, False)])
@quick(
    lambda engine, version, wanted: (
        engine != "emulator" or version == 2 or version == 1 and wanted[1]
    )
)
def test_a_gradient_that_is_not_wanted(engine, rng, wanted, version):
    """Of frozen weights: the others' are the same."""
    qkv, dy, given = make(rng, (1, 2, 2, 8))
    check_backward(engine, qkv, dy, 2, given, wanted, version=version)


@versions(1, 2)
def test_eps_counts_where_a_head_is_nearly_zero(engine, rng, version):
    qkv, _, given = make(rng, (1, 2, 2, 8))
    y, _ = Q.qk_norm_rope_forward(
        engine(1e-3 * qkv), 2, **moved(engine, given), eps=1e-4, version=version
    )
    engine.check(y, Q.qk_norm_rope_forward(1e-3 * qkv, 2, **given, eps=1e-4)[0])


def test_wrong_arguments_say_so(engine):
    x, w = engine(np.ones((1, 2, 24), np.float32)), engine(np.ones(4, np.float32))
    with pytest.raises(ValueError, match="HS even"):
        Q.qk_norm_rope_forward(x, 8, w, w)
    with pytest.raises(ValueError, match="for both q and k"):
        Q.qk_norm_rope_forward(x, 2, w)
    with pytest.raises(ValueError, match="shape of a head"):
        Q.qk_norm_rope_forward(x, 1, w, w)
    with pytest.raises(ValueError, match="cosines and sines"):
        Q.qk_norm_rope_forward(x, 2, rotation=engine(np.ones((2, 3, 4), np.float32)))
    with pytest.raises(ValueError, match="nothing to do"):
        Q.qk_norm_rope_forward(x, 2)
    if engine.has_versions:
        with pytest.raises(ValueError, match="multiple of 8 channels, at most 128"):
            Q.qk_norm_rope_forward(x, 2, w, w, version=2)


# On the tape --------------------------------------------------------------------------------------


def parameter(engine, value, dtype=np.float32):
    p = Parameter(value.shape, None)
    p.data, p.grad = engine(value), engine.zeros(value.shape)
    p.half = engine(value, np.float16) if dtype == np.float16 else None
    return p


@on("cpu", "cuda")  # attention takes the emulator long
@WHAT
def test_a_layer_then_attention_runs_in_place(engine, rng, norms, rotates):
    """linear, qk_norm_rope, attention: as without a layer, out of place; the layer's array, which
    its own backward does not read, is overwritten, the gradient's, too."""
    B, T, heads, HS = 2, 3, 2, 8
    _, _, given = make(rng, (B, T, heads, HS), norms, rotates)
    x, weight, dy = (rng.standard_normal(shape) for shape in ((B, T, 8), (48, 8), (B, T, 16)))
    rotation = engine(given["rotation"]) if rotates else None
    found = []
    for owned in (True, False):
        weights = [
            parameter(engine, given[name]) if norms else None for name in ("q_weight", "k_weight")
        ]
        leaf, p = Tensor(engine(x), requires_grad=True), parameter(engine, weight)
        with Tape() as tape:
            qkv = F.linear(leaf, p)
            before, qkv.owned = qkv.data, qkv.owned and owned
            turned = F.qk_norm_rope(qkv, heads, *weights, rotation)
            assert (turned.data is before) == owned and (qkv.data is None) == owned
            y = F.attention(turned, heads, "new")
        tape.backward(y, engine(dy))
        found.append([y.data, leaf.grad, p.grad, *(w.grad for w in weights if w)])
    for one, other in zip(*found, strict=True):
        engine.check_equal(one, other)
        assert np.abs(download(one)).max() > 0


def test_nothing_of_the_caller_is_overwritten(engine, rng):
    """A tensor of the caller's, and a gradient that another operation holds, too: gradients as by
    differences."""
    B, T, heads, HS = 1, 2, 1, 4
    qkv, dy, given = make(rng, (B, T, heads, HS))
    weights = [parameter(engine, given[name]) for name in ("q_weight", "k_weight")]
    leaf, addend, gradient = (Tensor(engine(a), requires_grad=True) for a in (qkv, qkv, dy))
    with Tape() as tape:
        y = F.add(F.qk_norm_rope(leaf, heads, *weights, engine(given["rotation"])), addend)
    tape.backward(y, gradient.data)
    want = numerical_gradient(lambda a: Q.qk_norm_rope_forward(a, heads, **given)[0], qkv, dy)
    engine.check(leaf.grad, want)
    for same, as_before in ((leaf.data, qkv), (addend.grad, dy), (gradient.data, dy)):
        engine.check(same, as_before, 1e-7)


@on("cpu", "cuda")
def test_a_frozen_weight_gets_no_gradient(engine, rng):
    qkv, dy, given = make(rng, (1, 2, 1, 8))
    weights = [parameter(engine, given[name]) for name in ("q_weight", "k_weight")]
    weights[0].frozen = True
    leaf = Tensor(engine(qkv), requires_grad=True)
    with Tape() as tape:
        y = F.qk_norm_rope(leaf, 1, *weights)
    tape.backward(y, engine(dy))
    assert (
        not download(weights[0].grad).any()
        and download(weights[1].grad).any()
        and download(leaf.grad).any()
    )


def test_without_anything_to_do_it_is_the_same_tensor():
    x = Tensor(np.ones((1, 2, 24), np.float32))
    assert F.qk_norm_rope(x, 2) is x


@WHAT
def test_an_image_has_the_same_bits_in_every_batch(rng, norms, rotates):
    """…by the loops of the CPU engine, whose results tests/kernels/test_operations.py compares with
    float64."""
    qkv, _, given = make(rng, (5, 3, 3, 6), norms, rotates)
    x, given = qkv.astype(np.float32), {k: a.astype(np.float32) for k, a in given.items()}
    together, _ = Q.qk_norm_rope_forward(x, 3, **given)
    for i in range(5):
        alone, _ = Q.qk_norm_rope_forward(x[i : i + 1], 3, **given)
        np.testing.assert_array_equal(alone[0], together[i])
