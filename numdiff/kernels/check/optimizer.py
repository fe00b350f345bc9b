"""Cases of the optimisers, and of all that a step writes besides: averages, rates, scales, counts, telemetry."""
import numpy as np

from ..diffusion import ahead
from ..optimizer import (
    adamw,
    ema,
    loss_scale,
    muon,
    newton_schulz,
    power_ema,
    step_state,
    telemetry,
    zero_ranges,
)
from .case import HALF_TOLERANCE, Case, in_place, normal, one


def muon_cases():
    for rows, columns, versions, extents in ((3, 5, (1,), None), (24, 16, (1, 2), None),
                                             (24, 16, (1, 2), (20, 12, 24, 16))):
        n = -(-rows * columns // 8) * 8

        def inputs(rng, rows=rows, columns=columns, n=n):
            return {**normal(weight=(3 * n,), gradient=(3 * n,), m=(3 * n,), ema=(3 * n,), x=(2, rows, columns))(rng),
                    "extents": np.array((20, 12, 24, 16)),
                    "half": np.zeros(3 * n, np.float16), "starts": np.array([0, 2 * n]), "norm": np.array([4.0]),
                    "unscale": np.array([0.5]), "rate": np.array([1e-2]), "step": np.array([3], np.uint32)}

        def stack(a, rows=rows, columns=columns, extents=extents):
            return muon.Stack(a.starts, rows, columns, extents and a.extents)

        label = f"{rows} × {columns}{', and a smaller one' if extents else ''}"
        yield Case("muon_momentum", inputs, lambda a, v, s=stack: (muon.muon_momentum(
            a.gradient, a.m, s(a), a.norm, 0.95, 1.0, a.unscale, version=v), a.m), versions, label=label)
        yield Case("muon_apply", inputs, in_place(lambda a, v, s=stack: muon.muon_apply(
            a.weight, a.x, s(a), a.step, a.rate, a.norm, 0.1, a.ema, 0.99, a.half, version=v), "weight", "ema", "half"),
            versions, 1e-3, label=label)
    for shape, dtype, tolerance in (((2, 3, 2), np.float64, 1e-5), ((2, 8, 16), np.float16, HALF_TOLERANCE)):
        yield Case("newton_schulz", lambda rng, s=shape, d=dtype: {"x": (newton_schulz.A * unit(rng, s)).astype(d)},
                   one(lambda a, v: newton_schulz.newton_schulz(a.x, 1)), tolerance=tolerance,
                   label=f"{shape[1]} × {shape[2]}")  # one iteration: the others launch the same kernels


def unit(rng, shape):
    """Matrices of Frobenius norm 1."""
    x = rng.standard_normal(shape)
    return x / np.linalg.norm(x, axis=(1, 2), keepdims=True)


def update_cases():
    def state(rng):
        made = normal(weight=(24,), gradient=(24,), m=(24,), ema=(24,), rate=(1,), loss=(1,))(rng)
        return {**made, "v": rng.random(24), "step": np.array([3], np.uint32), "norm": np.array([4.0]),
                "first_bad": np.array([-1], np.int32), "ring": np.zeros((4, 5)), "rate": np.array([1e-3]),
                "half": np.zeros(24, np.float16), "scale": np.array([1024.0]), "unscale": np.array([0.5]),
                "counts": np.array([3, 0, 0], np.int32)}

    yield Case("adamw", state, in_place(lambda a, v: adamw.adamw_update(
        a.weight, a.gradient, a.m, a.v, a.step, a.rate, a.norm, 0.9, 0.999, 1e-8, 0.01, 1.0, version=v),
        "weight", "m", "v"), (1, 2))
    yield Case("adamw", state, in_place(lambda a, v: adamw.adamw_update(
        a.weight, a.gradient, a.m, a.v, a.step, a.rate, a.norm, 0.9, 0.999, 1e-8, 0.01, 1.0, a.unscale, a.ema, 0.99,
        a.half, version=v), "weight", "m", "v", "ema", "half"), (3,), 1e-3, label="fused")
    parts = zero_ranges.pieces([(0, 8), (16, 24)])
    yield Case("adamw", lambda rng: {**state(rng), "pieces": parts}, in_place(lambda a, v: adamw.adamw_update(
        a.weight, a.gradient, a.m, a.v, a.step, a.rate, a.norm, 0.9, 0.999, 1e-8, 0.01, 1.0, a.unscale, a.ema, 0.99,
        a.half, version=v, ranges=adamw.Ranges(a.pieces, 16)), "weight", "m", "v", "ema", "half"), (3,), 1e-3,
        label="ranges")
    for rule in loss_scale.RULES:
        yield Case("loss_scale", state, in_place(lambda a, v, r=rule: loss_scale.loss_scale_update(
            a.norm, a.scale, a.unscale, a.counts, r, 4), "norm", "scale", "unscale", "counts"), label=rule)
    yield Case("ema", state, in_place(
        lambda a, v: ema.ema_update(a.ema, a.weight, a.step, a.norm, 0.99, version=v), "ema"), (1, 2))
    yield Case("power_ema", lambda rng: {**state(rng), "emas": rng.standard_normal((2, 24)),
                                         "exponents": power_ema.exponents_of((0.05, 0.1))}, in_place(
        lambda a, v: power_ema.power_ema_update(a.emas, a.weight, a.step, a.norm, a.exponents, version=v), "emas"),
        (1, 2))
    for cosine in (False, True):
        yield Case("learning_rate", state, in_place(lambda a, v, c=cosine: step_state.learning_rate_forward(
            a.step, a.rate, 1e-3, 2, 10, c), "rate"), label="cosine" if cosine else "constant")
    yield Case("step_advance", state, in_place(lambda a, v: step_state.step_advance(a.step), "step"))
    yield Case("next_row", lambda rng: {"table": rng.integers(0, 2**32, (3, 40)).astype(np.uint32),
                                        "step": np.array([1], np.uint32), "row": np.zeros(40, np.uint32)},
               in_place(lambda a, v: step_state.next_row(a.table, a.step, a.row), "step", "row"))
    for label, columns in (("rows of 16 bytes", (12, 8)), ("odd", (7, 3))):
        n = sum(columns)
        for name, function, written in (
                ("place", lambda a, v, at=columns[0]: ahead.place(a.ahead, a.source, at, version=v), "ahead"),
                ("take", lambda a, v: ahead.take(a.ahead, a.step, a.begin, a.row, version=v), "row")):
            yield Case(name, lambda rng, n=n, m=columns[1]: {
                "ahead": rng.standard_normal((5, n)), "source": rng.standard_normal((5, m)), "row": np.zeros(n),
                "step": np.array([9], np.uint32), "begin": np.array([6], np.uint32)}, in_place(function, written),
                (1, 2) if n % 4 == 0 else (1,), label=label)
    yield Case("timesteps_ahead", lambda rng: {
        "table": rng.standard_normal((4, 3)).astype(np.float32).view(np.uint32), "t": np.zeros(15),
        "step": np.array([2], np.uint32), "begin": np.zeros(1, np.uint32)},
        in_place(lambda a, v: ahead.timesteps_ahead(a.table, a.step, a.begin, a.t, 3), "begin", "t"))
    yield Case("latch_nonfinite", state, in_place(
        lambda a, v: step_state.latch_nonfinite(a.first_bad, a.loss, a.norm, a.step), "first_bad", "norm"))
    yield Case("zero_ranges", lambda rng: {"flat": rng.standard_normal(2500),
                                           "ranges": zero_ranges.pieces([(8, 13), (40, 2100), (2100, 2103)])},
               in_place(lambda a, v: zero_ranges.zero_ranges(a.flat, a.ranges), "flat"))
    yield Case("telemetry", state, in_place(
        lambda a, v: telemetry.telemetry_record(a.ring, a.step, a.loss, a.norm, a.rate, a.scale, a.counts, 0.5),
        "ring"))
    yield Case("latch_skips", state, in_place(
        lambda a, v: step_state.latch_skips(a.first_bad, a.counts, a.norm, a.step, 0), "first_bad", "norm"))
    yield Case("count_update", state, in_place(lambda a, v: step_state.count_update(a.step, a.norm), "step"))
