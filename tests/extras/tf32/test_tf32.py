"""Float32 on tensor cores by way of tf32: products and convolutions against float64, and the switch
that chooses them.

Of normal random operands a result errs by about 3e-4 in the 2-norm, which is what rounding both of
them to 10 mantissa bits does (0.29 · 2⁻¹⁰ each, as the root of a mean square); a wrong index errs
by 1.
"""

import numpy as np
import pytest

from numdiff.device import cuda, download, empty, launch, upload
from numdiff.device.bfloat16 import bfloat16_of_words, pack_bfloat2
from numdiff.device.tensor_core import float_of, word_of
from numdiff.emulator.namespace import TWINS
from numdiff.emulator.warp_matrix import tf32_of_words
from numdiff.extras.tf32 import matmul as tf32
from numdiff.extras.tf32.conv2d import launcher as conv2d_tf32
from numdiff.kernels import attention_backward, attention_forward
from numdiff.kernels import conv2d as C
from numdiff.kernels import matmul as P
from numdiff.kernels.conv2d import direct
from numdiff.kernels.matmul import launcher
from tests.conftest import exhaustive, large, on, quick
from tests.kernels.compile_logs import names_of_tests, ptx_of

TOLERANCE = 5e-4
# the CPU engine has no tensor cores, and a kernel takes seconds to compile: test_compile_logs.py
# compiles them all
pytestmark = on("launch", "emulator", "cuda")


def choose(monkeypatch, tile=(64, 64), slices=1):
    monkeypatch.setattr(tf32, "choose", lambda *_: (tile, slices))


def choose_small(engine, monkeypatch):
    if engine.name == "emulator":
        choose(monkeypatch)
        monkeypatch.setattr(
            conv2d_tf32,
            "choose",
            lambda r, c, steps, s, m, gradient: ((64, 128) if gradient else (64, 64), 1, steps),
        )


def operands(rng, M, N, K, transposes, batch=()):
    return (
        rng.standard_normal((*batch, *((K, M) if transposes[0] else (M, K)))),
        rng.standard_normal((*batch, *((N, K) if transposes[1] else (K, N)))),
    )


# Rounding -----------------------------------------------------------------------------------------


@cuda.jit
def round_kernel(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = float_of(tf32.nearest(word_of(x[i])))


def test_rounding(engine, rng):
    """To the nearest with 10 mantissa bits, just below a power of two to one of the two nearest;
    NaN if it is not finite."""
    drawn = rng.standard_normal(500) * 2.0 ** rng.integers(-100, 100, 500)
    below = 2 - np.arange(1, 20) * 2.0**-16
    x = np.concatenate([drawn, below, -below, [0.0, -0.0, 1.0, -1.5]]).astype(np.float32)
    special = np.array([1 + 2**-11, 1 + 3 * 2**-11, np.inf, -np.inf, np.nan], np.float32)
    y, z = (
        empty(x.shape, np.float32, engine.backend),
        empty(special.shape, np.float32, engine.backend),
    )
    launch(round_kernel, -(-x.size // 64), 64, upload(x, engine.backend), y)
    launch(round_kernel, 1, 64, upload(special, engine.backend), z)
    if engine.computes:
        y, z = download(y), download(z)
        fraction, exponent = np.frexp(np.abs(x))
        # of the last mantissa bit
        allowed = np.where(fraction < 0.9998, 0.5, 1.0) * 2.0 ** (exponent - 11)
        assert (np.abs(y.astype(np.float64) - x) <= allowed).all()
        assert not (y.view(np.uint32) & 0x1FFF).any()
        assert np.array_equal(z[:2], [1, 1 + 2**-9])  # ties go to the even ones
        assert not np.isfinite(z[2:]).any()


def test_results_are_not_biased(engine, rng, monkeypatch):
    """Of numbers of one sign all errors of a cut would add up: 5e-4. Rounded they cancel."""
    choose_small(engine, monkeypatch)
    K = 32 if engine.name == "emulator" else 256
    a, b = rng.uniform(1, 2, (16, K)), rng.uniform(1, 2, (16, K))
    engine.check(P.matmul_forward(engine(a), engine(b), False, True, version=5), a @ b.T, 1e-4)


# Products -----------------------------------------------------------------------------------------


# `numdiff kernels check` has the kernels, test_strides the distances
@quick(lambda engine: engine != "emulator")
def test_batches_and_strides(engine, rng, monkeypatch):
    """Attention multiplies slices of a packed array in place, an inner batch within an outer one."""
    choose_small(engine, monkeypatch)
    monkeypatch.setattr(engine.backend, "tf32", True)
    B, T, heads, HS = (2, 8, 2, 8) if engine.name == "emulator" else (3, 68, 5, 36)
    qkv, dy = rng.standard_normal((B, T, 3 * heads * HS)), rng.standard_normal((B, T, heads * HS))
    want_y, want_p = attention_forward(qkv, heads, "legacy")
    y, p = attention_forward(engine(qkv), heads, "legacy")
    engine.check(p, want_p, 2 * TOLERANCE)
    engine.check(y, want_y, 2 * TOLERANCE)
    dqkv = attention_backward(engine(dy), engine(qkv), engine(want_p), heads, "legacy")
    engine.check(dqkv, attention_backward(dy, qkv, want_p, heads, "legacy"), 2 * TOLERANCE)
    if engine.name == "emulator":
        assert any("gemm_tf32" in name for _, name in engine.backend.launched)


# The switch ---------------------------------------------------------------------------------------


@large
@on("launch")
def test_the_switch_chooses_kernels(engine, rng, monkeypatch):
    """…of tensor cores where the card has some."""
    ran, run = [], operations(engine, rng)
    for module in (tf32, launcher, conv2d_tf32, direct):
        monkeypatch.setattr(
            module, "launch", lambda kernel, *a, **k: ran.append("tf32" in kernel.py_func.__name__)
        )
    run()
    assert ran and not any(ran)
    monkeypatch.setattr(engine.backend, "tf32", True)
    ran.clear()
    run()
    assert ran[:2] == [True, True] and not any(ran[2:])
    monkeypatch.setattr(type(engine.backend), "capability", (7, 5))
    ran.clear()
    run()
    assert ran and not any(ran)


def operations(engine, rng):
    """Runs a product and a convolution whose channels come in fours; then a product and a
    convolution, forward and backward, whose do not."""
    a, b = map(engine, operands(rng, 12, 8, 12, (False, True)))
    odd_a, odd_b = map(engine, operands(rng, 9, 5, 7, (False, True)))
    x, odd_x, weight, odd_weight = (
        engine(rng.standard_normal(shape))
        for shape in ((1, 4, 4, 12), (1, 4, 4, 30), (12, 3, 3, 12), (12, 3, 3, 30))
    )

    def run():
        P.matmul_forward(a, b, False, True)
        C.conv2d_forward(x, weight)
        P.matmul_forward(odd_a, odd_b, False, True)
        C.conv2d_forward(odd_x, odd_weight)
        C.conv2d_backward(x, odd_x, odd_weight, engine.zeros(odd_weight.shape), engine.zeros(12))

    return run


def test_errors_say_what_to_do(engine):
    a, b = engine(np.ones((9, 7))), engine(np.ones((5, 7)))
    with pytest.raises(ValueError, match="multiples of 4; use version=3"):
        P.matmul_forward(a, b, False, True, version=5)
    with pytest.raises(
        ValueError, match=r"4 \(tf32\) of conv2d does not take .* on this device; use version=7"
    ):
        C.conv2d_forward(engine(np.ones((1, 4, 4, 3))), engine(np.ones((12, 3, 3, 3))), version=4)


# Choice and compilation ---------------------------------------------------------------------------


def test_choices_fill_a_gpu():
    """Few tiles are cut, many are not, and parts cover all steps."""
    assert tf32.choose(1, 8192, 8192, 8192, True, 132) == ((128, 128), 1)
    tile, slices = tf32.choose(1, 64, 64, 131072, True, 132)
    assert slices >= 64
    assert tf32.choose(1, 64, 64, 131072, False, 132)[1] == 1
    for pixels, c, n in ((131072, 64, 64), (32768, 128, 128), (8192, 192, 192), (2048, 512, 256)):
        tile, parts, part_steps = conv2d_tf32.choose(
            pixels, n, 9 * -(-c // 16), pixels * n, 132, False
        )
        assert (parts - 1) * part_steps < 9 * -(-c // 16) <= parts * part_steps
        assert -(-pixels // tile[0]) * -(-n // tile[1]) * parts >= 120
        tile, parts, part_steps = conv2d_tf32.choose(n, 9 * c, pixels // 16, 9 * c * n, 132, True)
        assert (parts - 1) * part_steps < pixels // 16 <= parts * part_steps
        assert -(-n // tile[0]) * -(-9 * c // tile[1]) * parts >= 120


@exhaustive
@pytest.mark.parametrize("name", names_of_tests()["tf32"])
def test_the_instruction(name):
    """…is the tf32 one; what ptxas says of it, and that no float64 crept in: test_compile_logs.py."""
    for text in ptx_of(name).values():
        assert "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32" in text


@pytest.mark.parametrize("scale", [1e-12, 1, 1e12])
def test_tf32_with_bfloat16_for_the_rest(rng, scale):
    """The product of attention/products.py, by the emulator's twins, misses less than 2⁻¹⁶ of it, however
    large the numbers."""

    def in_bfloat16(x):
        pack = TWINS[id(pack_bfloat2)][1]
        return bfloat16_of_words(
            np.array([pack(None, *pair) for pair in x.reshape(-1, 2)], np.uint32)
        ).reshape(-1)

    a, b = (scale * rng.standard_normal((2, 1000))).astype(np.float32)
    h_a, h_b = (tf32_of_words(x.view(np.uint32))[:, 0] for x in (a, b))
    parts = (
        (h_a, h_b),
        (in_bfloat16(a - h_a), in_bfloat16(b)),
        (in_bfloat16(a), in_bfloat16(b - h_b)),
    )
    got, want = sum(x.astype(np.float64) * y for x, y in parts), a.astype(np.float64) * b
    assert np.all(np.abs(got - want) < 2**-16 * np.abs(want))
