import itertools

import numpy as np
import pytest

from numdiff.device import download
from numdiff.device.rounded8 import PARTIALS
from numdiff.extras.fp8.quantise import Scale8
from numdiff.kernels.cpu import gate_adaln as cpu
from numdiff.kernels.norms.row_norm import NORMS, Norm
from numdiff.kernels.transformer import columns as Co
from numdiff.kernels.transformer.gate_adaln import launcher as G
from numdiff.kernels.transformer.gate_adaln.reference import (
    gate_adaln_backward_reference,
    gate_adaln_forward_reference,
)
from numdiff.nn import functional as F
from numdiff.nn.parameter import Parameter
from numdiff.nn.tensor import Tape, Tensor
from tests.conftest import numerical_gradient, on, quick, relative_error, shapes, versions, where

TYPES = pytest.mark.parametrize("dtype", [np.float32, np.float16])
# NumPy computes in the type it is given
FITS = where(lambda engine, dtype: engine != "cpu" or dtype == np.float32)
USABLE = where(lambda version, shape: version != 2 or shape[-1] % 8 == 0)
GATED = pytest.mark.parametrize("gated", [True, False])


def compiled(engine, version, shape, dtype):
    """On `ptx`, version 2 for float16: gate.py's and adaln.py's tests compile the rest. In the
    emulator, None once."""
    if engine == "launch":
        return dtype == np.float16 and version is None
    if engine == "emulator":
        return version is not None or shape[-1] == 8
    return (
        engine != "ptx"
        or dtype == np.float16
        and (version != 1 or shape[-1] <= 33)
        and shape[-1] not in (8, 768, 1024)
    )


def make(rng, shape, dtype=np.float64):
    """x, h, dz, dy, gate, shift and scale, float64 numbers that the dtype holds."""
    B, _, C = shape
    arrays = [
        1 + 2 * rng.standard_normal(shape),
        *rng.standard_normal((3, *shape)),
        *rng.standard_normal((3, B, C)),
    ]
    return [a.astype(dtype).astype(np.float64) for a in arrays]


def tolerance(dtype):
    return 1e-3 if dtype == np.float16 else 1e-5


@versions(1, 2)
def test_eps_counts_where_hardly_anything_varies(engine, rng, version):
    """A variance of eps, which stands within the root."""
    x, (shift, scale) = 1e-3 * rng.standard_normal((2, 3, 8)), rng.standard_normal((2, 2, 8))
    got = G.gate_adaln_forward(engine(x), None, None, engine(shift), engine(scale), version=version)
    for one, expected in zip(got, G.gate_adaln_forward(x, None, None, shift, scale), strict=True):
        engine.check(one, expected, 1e-5)


@shapes(
    minimal=(1, 1, 8), odd=(2, 3, 16), not_aligned=(2, 3, 33), xl=(3, 256, 1152), base=(5, 256, 768)
)
@TYPES
@pytest.mark.parametrize("norm", (NORMS[0], NORMS[-1]), ids=str)
@versions(1, 2)
@USABLE
@where(lambda engine: engine not in ("ptx", "launch"))  # the kernels are those of test_backward
@where(compiled)
@quick(lambda engine, shape, norm: engine != "emulator" or shape[-1] == 16 and norm.shifted)
@quick(lambda engine, shape: engine != "cpu" or shape[-1] < 768)
def test_backward_of_x(engine, rng, shape, dtype, norm, version):
    """Given x instead of z, the backward has the same bits; so it does where dh becomes bytes."""
    x, h, dz, dy, gate, shift, scale, weight = (
        a if a is None else engine(a, dtype) for a in with_norm(rng, make(rng, shape, dtype), norm)
    )
    weight = weight if weight is None else engine(download(weight).astype(np.float32))
    z, _, *statistics = G.gate_adaln_forward(
        x, h, gate, shift, scale, weight=weight, norm=norm.kind, version=version
    )
    rest, found = (h, (gate, shift, scale), *statistics, weight), []
    for given, options in ((z, {}), (None, {"x": x})):
        into = Scale8(engine(np.float32([0.25])), engine(np.zeros(PARTIALS, np.uint32)))
        dweight = engine(np.ones(shape[-1], np.float32)) if norm.weighted else None
        found.append(
            [
                *G.gate_adaln_backward(dz, dy, given, *rest, dweight, version=version, **options),
                dweight,
            ]
        )
        if dtype == np.float16 and shape[-1] % 16 == 0:
            found[-1] += (
                *G.gate_adaln_backward(
                    dz, dy, given, *rest, dh_into=into, version=version, **options
                ),
                into.amax,
            )
    for one, other in zip(*found, strict=True):
        assert one is other is None or engine.check_equal(one, other) is None
    with pytest.raises(ValueError, match="needs z, or x and h"):
        G.gate_adaln_backward(dz, dy, None, *rest, version=version)


def with_norm(rng, arrays, norm):
    """x, h, dz, dy, gate, shift, scale as `make` gives them: gate, h and what a norm has not are
    None; (…, weight)."""
    *rest, shift, scale = arrays
    return (
        *rest,
        shift if norm.shifted else None,
        scale,
        1 + rng.standard_normal(scale.shape[1]) / 2 if norm.weighted else None,
    )


@pytest.mark.parametrize("norm", [NORMS[0], Norm(True, True, True)], ids=str)
def test_warps_and_blocks_that_share_an_image(engine, rng, monkeypatch, norm):
    """Three turns of two warps in each of two blocks, which few tokens do not give."""
    choose = G.choose_plan
    monkeypatch.setattr(
        G, "choose_plan", lambda B, T, *rest: (2, 2, -(-T // 2), *choose(B, T, *rest)[3:])
    )
    z, h, dz, dy, gate, shift, scale, weight = with_norm(rng, make(rng, (2, 11, 16)), norm)
    _, _, *statistics = G.gate_adaln_forward(
        z, None, None, shift, scale, weight=weight, norm=norm.kind
    )
    given = (
        *(dz, dy, z, h),
        (gate, shift, scale),
        *(*statistics, weight, np.ones(16) if norm.weighted else None),
    )

    def upload(given):
        if isinstance(given, tuple):
            return tuple(map(upload, given))
        return None if given is None else engine(given)

    there = upload(given)
    for got, want in zip(G.gate_adaln_backward(*there), G.gate_adaln_backward(*given), strict=True):
        engine.check(got, want)
    if norm.weighted:
        engine.check(there[-1], given[-1])


@TYPES
@FITS
@pytest.mark.parametrize(
    "norm", [NORMS[0], Norm(True, True, False), Norm(True, True, True)], ids=str
)
@where(lambda engine, norm: engine != "ptx" or norm == NORMS[0])
@quick(
    lambda engine, norm, dtype: (
        engine != "emulator"
        or norm.rms
        and norm.shifted == (dtype == np.float32)
        or norm == NORMS[0]
        and dtype == np.float16
    )
)
def test_columns_of_one_array_and_its_gradient(engine, rng, dtype, norm):
    """A chain as in a DiT: a norm, then twice a gate with a norm, whose vectors are parts of one
    array."""
    x, h, _, dy, *_ = make(rng, (2, 3, 16), dtype)
    modulation = (rng.standard_normal((2, 16 * 6)) / 2).astype(dtype).astype(np.float64)
    weights = 1 + rng.standard_normal((2, 16)) / 2

    def run(engine, dtype, parts_of):
        given = [Tensor(engine(a, dtype), requires_grad=True) for a in (x, h, modulation)]
        parameters = [Parameter((16,), None) for _ in weights] if norm.weighted else [None] * 2
        for parameter, value in zip(parameters, weights, strict=True):
            if parameter is not None:
                kind = np.float32 if dtype == np.float16 else dtype
                parameter.data, parameter.grad = engine(value, kind), engine(np.zeros(16), kind)
        options = [{"weight": p, "norm": norm.kind} for p in parameters]
        with Tape() as tape:
            tokens, branch, wide = given
            shift, scale, gate, shift_2, scale_2, _ = parts_of(wide)
            y = F.adaln(tokens, shift if norm.shifted else None, scale, **options[0])
            z, y = F.gate_adaln(
                tokens,
                F.add(branch, y),
                gate,
                shift_2 if norm.shifted else None,
                scale_2,
                **options[1],
            )
            out = F.add(z, y)
        tape.backward(out, engine(dy, dtype))
        return [t.grad for t in given] + [p.grad for p in parameters if p is not None]

    want = run(lambda a, dtype: np.asarray(a, np.float64), dtype, lambda m: F.chunk(m, 6))
    for got, expected in zip(run(engine, dtype, lambda m: F.columns(m, 6)), want, strict=True):
        engine.check(got, expected, 3 * tolerance(dtype))


@pytest.mark.parametrize(
    "norm, weighted, shifted",
    [
        ("rms", True, True),
        ("rms", True, False),
        ("layer", False, False),
        ("rms", False, True),
        ("layer", True, True),
    ],
)
def test_gradients_of_every_norm_through_the_tape(rng, norm, weighted, shifted):
    """As in a block: a norm, then a gate with a norm, one weight for both; against differences."""
    x, h, _, dy, gate, shift, scale = make(rng, (2, 3, 8))
    given = {
        "x": x,
        "h": h,
        "gate": gate,
        "scale": scale,
        "weight": 1 + rng.standard_normal(8) / 2,
        "shift": shift,
    }

    def run(tape=None, **changed):
        arrays = {**given, **changed}
        tensors = {name: Tensor(a, requires_grad=tape is not None) for name, a in arrays.items()}
        weight = Parameter((8,), None) if weighted else None
        if weighted:
            weight.data, weight.grad = arrays["weight"], np.zeros(8)
        vectors, options = (
            (tensors["shift"] if shifted else None, tensors["scale"]),
            {"weight": weight, "norm": norm},
        )
        y = F.adaln(tensors["x"], *vectors, **options)
        z, y = F.gate_adaln(
            tensors["x"], F.add(tensors["h"], y), tensors["gate"], *vectors, **options
        )
        out = F.add(z, y)
        if tape:
            tape.backward(out, dy)
        return out.data, {
            **{n: t.grad for n, t in tensors.items()},
            "weight": weight and weight.grad,
        }

    with Tape() as tape:
        _, gradients = run(tape)
    for name in (
        given.keys()
        - ({"weight"} if not weighted else set())
        - ({"shift"} if not shifted else set())
    ):
        want = numerical_gradient(lambda a, name=name: run(**{name: a})[0], given[name], dy)
        assert relative_error(gradients[name], want) < 1e-7, name


def test_the_weight_of_a_norm_of_constants_has_a_gradient(rng):
    x, h, _, dy, gate, shift, scale = map(Tensor, make(rng, (2, 3, 8)))
    weight = Parameter((8,), None)
    weight.data, weight.grad = np.ones(8), np.zeros(8)
    with Tape() as tape:
        _, y = F.gate_adaln(x, h, gate, shift, scale, weight=weight, norm="rms")
    tape.backward(y, dy.data)
    assert weight.grad.all()


@on()  # views of a NumPy array need no such rule
def test_columns_are_used_once(engine, rng):
    z, _, dz, dy, _, shift, scale = make(rng, (1, 1, 8))
    _, _, mean, rstd = G.gate_adaln_forward(z, None, None, shift, scale)
    shift, scale = Co.columns_forward(engine(np.concatenate((shift, scale), axis=1)), 2)
    given = (
        *map(engine, (dz, dy, z)),
        None,
        (None, shift, scale),
        *map(engine, (mean, rstd)),
    )
    dx, _, _, *parts = G.gate_adaln_backward(*given)
    with pytest.raises(ValueError, match="one gradient"):
        G.gate_adaln_backward(*given)
    both = Co.join_columns(parts)
    if engine.computes:
        np.testing.assert_array_equal(download(both)[:, :8], download(engine(dy))[:, 0])
    G.gate_adaln_backward(*given)  # what was collected has been taken away


def test_plans():
    for B, T, C, itemsize in (
        (64, 256, 768, 2),
        (1, 1, 8, 4),
        (256, 256, 384, 2),
        (7, 1000, 1280, 4),
        (3, 5, 1152, 2),
    ):
        for gated, shifted, sweeps in itertools.product(
            (True, False), (True, False), (None, G.MAX_SWEEPS)
        ):
            for limit in (99 << 10, 163 << 10, 227 << 10):
                warps, chunks, chunk, before, nbytes = G.choose_plan(
                    B, T, C, itemsize, gated, limit, shifted=shifted, sweeps=sweeps
                )
                assert nbytes <= limit and warps >= 1 and (chunks - 1) * chunk < T <= chunks * chunk
                # the warps' sums take the same memory
                assert nbytes >= 4 * warps * C and before % 16 == 0
    assert G.choose_plan(64, 256, 768, 2, True)[:2] == (12, 2)  # 128 blocks for 132 multiprocessors
    # a third of the sums less to hold
    assert G.choose_plan(64, 256, 768, 2, True, shifted=False)[:2] == (16, 2)


def test_wrong_arguments_say_so(engine):
    x, v = engine(np.ones((2, 3, 6), np.float32)), engine(np.ones((2, 6), np.float32))
    with pytest.raises(ValueError, match=r"\(2, 6\)"):
        G.gate_adaln_forward(x, x, v, v, engine(np.ones(6, np.float32)))
    with pytest.raises(ValueError, match="reshape an image"):
        G.gate_adaln_forward(engine(np.ones((2, 3, 3, 6), np.float32)), None, None, v, v)
    if engine.name != "cpu":
        with pytest.raises(ValueError, match="multiple of 8"):
            G.gate_adaln_forward(x, x, v, v, v, version=2)


@GATED
@pytest.mark.parametrize("which", NORMS, ids=str)
@pytest.mark.parametrize("shape", [(5, 3, 33), (2, 7, 64)], ids=str)
def test_the_loops_of_the_cpu_engine(rng, shape, which, gated):
    """float32 compared with the reference in float64; an image has the same bits in every batch."""
    x, h, dz, dy, gate, shift, scale = make(rng, shape)
    h, gate, shift = h if gated else None, gate if gated else None, shift if which.shifted else None
    weight = rng.standard_normal(shape[2]) if which.weighted else None
    dz = None if gated else dz
    single = [a if a is None else a.astype(np.float32) for a in (x, h, gate, shift, scale)]
    own = None if weight is None else weight.astype(np.float32)
    want = gate_adaln_forward_reference(x, h, gate, shift, scale, 1e-3, weight, which.kind)
    got = cpu.gate_adaln_forward_cpu(*single, 1e-3, own, which.kind)
    sums, exact = (
        (None, None) if weight is None else (np.ones(shape[2], np.float32), np.ones(shape[2]))
    )
    wanted = gate_adaln_backward_reference(
        dz, dy, want[0], *(h, gate, shift, scale), *want[2:], weight, exact
    )
    found = cpu.gate_adaln_backward_cpu(
        None if dz is None else dz.astype(np.float32),
        dy.astype(np.float32),
        got[0],
        *single[1:],
        *got[2:],
        own,
        sums,
    )
    for a, b in zip((*got, *found, sums), (*want, *wanted, exact), strict=True):
        assert (a is None) == (b is None)
        assert a is None or a.dtype == np.float32 and relative_error(a, b) < 3e-6
    alone = [
        cpu.gate_adaln_forward_cpu(
            *(a if a is None else a[i : i + 1] for a in single), 1e-3, own, which.kind
        )[1]
        for i in range(len(x))
    ]
    np.testing.assert_array_equal(np.concatenate(alone), got[1])
