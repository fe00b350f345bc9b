"""Every kernel of the project on a small case: right, the same bits in every run, and without a fault.

`CASES` has a small problem for each operation and version. `check_case` runs one on a device and holds the results
against the float64 reference, which is the same call with NumPy arrays. On the emulator it runs in several thread
orders, with every check on; on a GPU, twice. `compare_devices` says whether two devices give the same bits.

    numdiff kernels check                          all of them, in the emulator
    numdiff kernels check softmax --device cuda
    numdiff kernels check softmax --counts         and what each of their lines costs
"""
import importlib
import pkgutil
import re
import time
from dataclasses import dataclass, field

import numpy as np

from ..device import PtxError, download, get_backend, synchronize, upload
from ..device.emulator import EmulatorDevice
from ..emulator import KernelFault, LaunchRefused, Recorder, Tracer, Unsupported
from ..errors import UsageError
from . import (
    adamw,
    attention,
    bias,
    concat,
    conv2d,
    dropout,
    elementwise,
    ema,
    embedding,
    grad_norm,
    groupnorm,
    im2col,
    images,
    layernorm,
    linear,
    loss_scale,
    matmul,
    mse,
    q_sample,
    random,
    reduce,
    resample,
    sampler,
    scale_shift,
    softmax,
    step_state,
    telemetry,
)
from .matmul import launcher, vectorised

TOLERANCE = 1e-5  # relative error in the 2-norm against float64
ORDERS = ("forward", "shuffled", "reversed")  # in which the emulator's threads take turns; the first two always
# in PTX: a fused multiply-add, or a product (`mul` without its own rounding) and a sum that ptxas may join to one; an
# approximate instruction; a call of a function that was not inlined
FUSED = re.compile(r"\bfma\.rn\.|\.approx\.|\bcall\.uni\b|\bmul\.f32\b.*\b(?:add|sub)\.f32\b", re.DOTALL)
SEED, PURPOSE = 1234567890123, 3


@dataclass
class Case:
    """One operation on one small problem.

    name: of the operation; inputs(rng): {name: NumPy array}; run(a, version): a tuple of arrays, from the inputs `a` on
        some device (an object with their names); versions: to be forced one by one (None: what the launcher chooses)
    label: which problem, where there are several
    """

    name: str
    inputs: object
    run: object
    versions: tuple = (None,)
    tolerance: float = TOLERANCE
    label: str = ""


class Arrays:
    def __init__(self, arrays):
        self.__dict__.update(arrays)


def normal(**shapes):
    """Inputs that are normal float64 arrays of these shapes (they become float32 on a device)."""
    return lambda rng: {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def with_counters(batch, **shapes):
    """As `normal`, with the step and sample numbers that count randomness."""
    def make(rng):
        return {**normal(**shapes)(rng), "step": np.array([5], np.uint32),
                "samples": rng.permutation(100)[:batch].astype(np.uint32)}
    return make


def with_timesteps(batch, steps=10, **shapes):
    """As `normal`, with timesteps and the two tables of a noise schedule."""
    def make(rng):
        alpha_bar = np.linspace(0.99, 0.05, steps)
        return {**normal(**shapes)(rng), "t": rng.integers(0, steps, batch).astype(np.int32),
                "signal": np.sqrt(alpha_bar), "noise": np.sqrt(1 - alpha_bar), "third": np.linspace(0, 0.3, steps)}
    return make


def in_place(function, *names):
    """run() of an operation that changes its arguments `names`: they are its results."""
    def run(a, version):
        function(a, version)
        return tuple(getattr(a, name) for name in names)
    return run


def one(function):
    """run() of an operation with one result."""
    return lambda a, version: (function(a, version),)


# The cases ------------------------------------------------------------------------------------------------------------

def _elementwise():
    for shape in ((3, 5), (4, 8)):
        four = shape[1] % 4 == 0
        versions, label = ((1, 2) if four else (1,)), str(shape)
        yield Case("add", normal(a=shape, b=shape), one(lambda a, v: elementwise.add_forward(a.a, a.b, version=v)),
                   versions, label=label)
        for name in ("silu", "gelu"):
            forward = getattr(elementwise, f"{name}_forward")
            backward = getattr(elementwise, f"{name}_backward")
            yield Case(name, normal(x=shape), one(lambda a, v, f=forward: f(a.x, version=v)), versions, label=label)
            yield Case(f"{name}_backward", normal(dy=shape, x=shape),
                       one(lambda a, v, f=backward: f(a.dy, a.x, version=v)), versions, label=label)
    for shape in ((3, 4), (3, 5)):
        yield Case("cast", normal(x=shape), one(lambda a, v: elementwise.cast_forward(a.x, np.float16, version=v)),
                   (1, 2) if shape[1] == 4 else (1,), 1e-3, str(shape))


def _reductions():
    yield Case("column_sum", normal(x=(37, 12)), one(lambda a, v: reduce.column_sum(a.x, version=v)), (1, 2, 3))
    yield Case("column_sum", normal(x=(1100, 8)), one(lambda a, v: reduce.column_sum(a.x, version=v)), (2, 3),
               label="two passes")
    yield Case("sample_sum", normal(x=(2, 9, 8)), one(lambda a, v: reduce.sample_sum(a.x, version=v)), (1, 2, 3))
    yield Case("total_sum", normal(x=(3, 41)), one(lambda a, v: reduce.total_sum(a.x, version=v)), (1, 2))
    yield Case("bias_add", normal(x=(5, 8), bias=(8,)), one(lambda a, v: bias.bias_add_forward(a.x, a.bias, version=v)),
               (1, 2))
    yield Case("channel_add", normal(x=(2, 3, 8), e=(2, 8)),
               one(lambda a, v: bias.channel_add_forward(a.x, a.e, version=v)), (1, 2))
    yield Case("scale_shift", normal(x=(2, 3, 8), scale=(2, 8), shift=(2, 8)),
               one(lambda a, v: scale_shift.scale_shift_forward(a.x, a.scale, a.shift, version=v)), (1, 2))
    yield Case("scale_shift_backward", normal(dy=(2, 3, 8), x=(2, 3, 8), scale=(2, 8)),
               lambda a, v: scale_shift.scale_shift_backward(a.dy, a.x, a.scale, version=v), (1, 2))
    yield Case("softmax", normal(x=(3, 36)), one(lambda a, v: softmax.softmax_forward(a.x, 0.7, version=v)), (1, 2, 3))
    yield Case("softmax_backward", lambda rng: {"dy": rng.standard_normal((3, 36)),
                                                "y": rng.dirichlet(np.ones(36), 3)},
               one(lambda a, v: softmax.softmax_backward(a.dy, a.y, 0.7, version=v)), (1, 2, 3))
    yield Case("global_norm", normal(x=(1000,)), one(lambda a, v: grad_norm.global_norm(a.x, version=v)), (1, 2))
    for channels, versions in ((3, (1,)), (4, (1, 2))):
        yield Case("mse", normal(prediction=(2, 4, 4, 4), target=(2, 4, 4, channels)),
                   one(lambda a, v: mse.mse_forward(a.prediction, a.target, version=v)), versions,
                   label=f"of {channels}")
    yield Case("mse_backward", normal(prediction=(2, 4, 4, 4), target=(2, 4, 4, 4)),
               one(lambda a, v: mse.mse_backward(a.prediction, a.target, 0.5, version=v)), (1, 2))


def _norms():
    C, G = 16, 4
    for silu in (False, True):
        label = "silu" if silu else ""
        yield Case("groupnorm", normal(x=(1, 3, 3, C), weight=(C,), bias=(C,)),
                   lambda a, v, s=silu: groupnorm.groupnorm_forward(a.x, a.weight, a.bias, G, silu=s, version=v),
                   (1, 2), label=label)

        def inputs(rng, silu=silu):
            made = normal(dy=(1, 3, 3, C), x=(1, 3, 3, C), weight=(C,), bias=(C,), dweight=(C,), dbias=(C,))(rng)
            _, made["mean"], made["rstd"] = groupnorm.groupnorm_forward(made["x"], made["weight"], made["bias"], G)
            return made

        yield Case("groupnorm_backward", inputs, lambda a, v, s=silu: (groupnorm.groupnorm_backward(
            a.dy, a.x, a.weight, a.bias, a.mean, a.rstd, a.dweight, a.dbias, G, silu=s, version=v), a.dweight, a.dbias),
            (1, 2), label=label)
    yield Case("layernorm", normal(x=(5, 36), weight=(36,), bias=(36,)),
               lambda a, v: layernorm.layernorm_forward(a.x, a.weight, a.bias, version=v), (1, 2))

    def inputs(rng):
        made = normal(dy=(5, 36), x=(5, 36), weight=(36,), dweight=(36,), dbias=(36,))(rng)
        _, made["mean"], made["rstd"] = layernorm.layernorm_forward(made["x"])
        return made

    yield Case("layernorm_backward", inputs, lambda a, v: (layernorm.layernorm_backward(
        a.dy, a.x, a.weight, a.mean, a.rstd, a.dweight, a.dbias, version=v), a.dweight, a.dbias), (1, 2))


def _products():
    for transposes in ((False, False), (False, True), (True, False)):
        shape_a, shape_b = ((20, 12), (12, 24))
        yield Case("matmul", normal(a=shape_a[::-1] if transposes[0] else shape_a,
                                    b=shape_b[::-1] if transposes[1] else shape_b, bias=(24,)),
                   one(lambda a, v, t=transposes: matmul.matmul_forward(a.a, a.b, *t, bias=a.bias, alpha=0.5,
                                                                        version=v)),
                   (1, 2, 3, 4), label="".join("nt"[t] for t in transposes))
    yield Case("matmul", normal(a=(3, 5, 7), b=(3, 7, 9)), one(lambda a, v: matmul.matmul_forward(a.a, a.b, version=v)),
               (1, 2, 3), label="batch, odd")

    def tiled(tile):
        def run(a, version):
            tiles, vectorised.TILES = vectorised.TILES, (tile,)
            try:
                return (matmul.matmul_forward(a.a, a.b, version=version),)
            finally:
                vectorised.TILES = tiles
        return run

    for tile in vectorised.TILES:
        yield Case("matmul", normal(a=(68, 8), b=(8, 68)), tiled(tile), (4,), label=f"tile {tile[0]}×{tile[1]}")

    def split(a, version):
        choose, launcher.choose_tile = launcher.choose_tile, lambda *_: ((64, 64), 3)
        try:
            return (matmul.matmul_forward(a.a, a.b, version=version),)
        finally:
            launcher.choose_tile = choose

    yield Case("matmul", normal(a=(8, 44), b=(44, 4)), split, (3, 4), label="split K")
    yield Case("linear", normal(x=(5, 12), weight=(8, 12), bias=(8,)),
               one(lambda a, v: linear.linear_forward(a.x, a.weight, a.bias, version=v)), (None,))
    yield Case("linear_backward", normal(dy=(5, 8), x=(5, 12), weight=(8, 12), dweight=(8, 12), dbias=(8,)),
               lambda a, v: (linear.linear_backward(a.dy, a.x, a.weight, a.dweight, a.dbias), a.dweight, a.dbias))
    for order in ("legacy", "new"):
        yield Case("attention", normal(qkv=(1, 5, 24)),
                   lambda a, v, o=order: attention.attention_forward(a.qkv, 2, o), label=order)

        def inputs(rng, order=order):
            made = normal(qkv=(1, 5, 24), dy=(1, 5, 8))(rng)
            made["p"] = attention.attention_forward(made["qkv"], 2, order)[1]
            return made

        yield Case("attention_backward", inputs,
                   one(lambda a, v, o=order: attention.attention_backward(a.dy, a.qkv, a.p, 2, o)), label=order)


def _convolutions():
    for label, (size, c, n, kernel, stride), versions in (
            ("3×3", (3, 8, 20, 3, 1), (1, 2, 3)), ("wide", (3, 8, 68, 3, 1), (3,)),
            ("odd", (4, 3, 19, 3, 1), (1, 2, 3)),
            ("stride 2", (5, 4, 8, 3, 2), (1, 2, 3)), ("to 3 channels", (4, 8, 3, 3, 1), (3,)),
            ("1×1", (3, 8, 12, 1, 1), (None,))):
        shapes = {"x": (1, size, size, c), "weight": (n, kernel, kernel, c), "bias": (n,)}
        yield Case("conv2d", normal(**shapes), one(lambda a, v, s=stride: conv2d.conv2d_forward(
            a.x, a.weight, a.bias, s, version=v)), versions, label=label)
        out = -(-size // stride)
        shapes |= {"dy": (1, out, out, n), "dweight": (n, kernel, kernel, c), "dbias": (n,)}
        yield Case("conv2d_backward", normal(**shapes), lambda a, v, s=stride: (conv2d.conv2d_backward(
            a.dy, a.x, a.weight, a.dweight, a.dbias, s, version=v), a.dweight, a.dbias), versions, label=label)
    yield Case("im2col", normal(x=(1, 4, 5, 4)), one(lambda a, v: im2col.im2col_forward(a.x, 3, 1, version=v)), (1, 2))
    yield Case("im2col_backward", normal(dcol=(1, 4, 5, 3, 3, 4)),
               one(lambda a, v: im2col.im2col_backward(a.dcol, (1, 4, 5, 4), 3, 1, version=v)), (1, 2))


def _movement():
    for name, shape in (("avgpool_forward", (2, 4, 4, 8)), ("avgpool_backward", (2, 2, 2, 8)),
                        ("upsample_forward", (2, 2, 2, 8)), ("upsample_backward", (2, 4, 4, 8))):
        function = getattr(resample, name)
        yield Case(name.removesuffix("_forward"), normal(x=shape), one(lambda a, v, f=function: f(a.x, version=v)),
                   (1, 2))
    yield Case("concat", normal(a=(6, 8), b=(6, 4)), one(lambda a, v: concat.concat_forward(a.a, a.b, version=v)),
               (1, 2))
    yield Case("concat_backward", normal(dy=(6, 12)), lambda a, v: concat.concat_backward(a.dy, 8, version=v), (1, 2))

    def pictures(rng):
        return {"images": rng.integers(0, 256, (2, 3, 4, 3)).astype(np.uint8), "flip": np.array([0, 1], np.int32)}

    yield Case("images", pictures, one(lambda a, v: images.images_forward(a.images, a.flip, version=v)), (1, 2))

    def labels(rng):
        return {"labels": np.array([2, 0, 2, 1], np.int32), **normal(weight=(3, 8), dy=(4, 8), dweight=(3, 8))(rng)}

    yield Case("embedding", labels, one(lambda a, v: embedding.embedding_forward(a.labels, a.weight, version=v)),
               (1, 2))
    yield Case("embedding_backward", labels, in_place(
        lambda a, v: embedding.embedding_backward(a.dy, a.labels, a.dweight, version=v), "dweight"), (1, 2))
    yield Case("timestep_embedding", lambda rng: {"t": np.array([0, 7, 999], np.int32)},
               one(lambda a, v: embedding.timestep_embedding_forward(a.t, 9)), tolerance=5e-5)


def _diffusion():
    x = {"x_0": (2, 3, 4), "eps": (2, 3, 4)}
    yield Case("q_sample", with_timesteps(2, **x),
               one(lambda a, v: q_sample.q_sample_forward(a.x_0, a.eps, a.t, a.signal, a.noise, version=v)), (1, 2))
    yield Case("velocity", with_timesteps(2, **x),
               one(lambda a, v: q_sample.velocity_forward(a.x_0, a.eps, a.t, a.signal, a.noise, version=v)), (1, 2))
    for kind in ("eps", "v", "x_0"):
        yield Case("predict_x_0", with_timesteps(2, x_t=(2, 3, 4), prediction=(2, 3, 4)),
                   one(lambda a, v, k=kind: sampler.predict_x_0(a.x_t, a.prediction, a.t, a.signal, a.noise, k,
                                                                version=v)), (1, 2), label=kind)
    yield Case("ddim_step", with_timesteps(2, x_t=(2, 3, 4), x_0=(2, 3, 4), eps=(2, 3, 4)),
               one(lambda a, v: sampler.ddim_step(a.x_t, a.x_0, a.t, a.signal, a.noise, a.third, a.eps, version=v)),
               (1, 2))


def _randomness():
    shape = (2, 3, 4)
    for name in ("random_uniform", "random_normal"):
        function = getattr(random, name)
        yield Case(name, with_counters(2), one(lambda a, v, f=function: f(shape, SEED, PURPOSE, a.step, a.samples,
                                                                         version=v)), (1, 2))
    yield Case("random_integers", with_counters(5),
               one(lambda a, v: random.random_integers(SEED, PURPOSE, a.step, a.samples, 1000)))
    yield Case("dropout", with_counters(2, x=shape),
               one(lambda a, v: dropout.dropout_forward(a.x, 0.3, SEED, 1, a.step, a.samples, version=v)), (1, 2))
    yield Case("dropout_backward", with_counters(2, x=shape),
               one(lambda a, v: dropout.dropout_backward(a.x, 0.3, SEED, 1, a.step, a.samples, version=v)), (1, 2))


def _update():
    def state(rng):
        made = normal(weight=(24,), gradient=(24,), m=(24,), ema=(24,), rate=(1,), loss=(1,))(rng)
        return {**made, "v": rng.random(24), "step": np.array([3], np.uint32), "norm": np.array([4.0]),
                "first_bad": np.array([-1], np.int32), "ring": np.zeros((4, 3)), "rate": np.array([1e-3]),
                "half": np.zeros(24, np.float16), "scale": np.array([1024.0]), "unscale": np.array([0.5]),
                "counts": np.array([3, 0, 0], np.int32)}

    yield Case("adamw", state, in_place(lambda a, v: adamw.adamw_update(
        a.weight, a.gradient, a.m, a.v, a.step, a.rate, a.norm, 0.9, 0.999, 1e-8, 0.01, 1.0, version=v),
        "weight", "m", "v"), (1, 2))
    yield Case("adamw", state, in_place(lambda a, v: adamw.adamw_update(
        a.weight, a.gradient, a.m, a.v, a.step, a.rate, a.norm, 0.9, 0.999, 1e-8, 0.01, 1.0, a.unscale, a.ema, 0.99,
        a.half, version=v), "weight", "m", "v", "ema", "half"), (3,), 1e-3, label="fused")
    for rule in loss_scale.RULES:
        yield Case("loss_scale", state, in_place(lambda a, v, r=rule: loss_scale.loss_scale_update(
            a.norm, a.scale, a.unscale, a.counts, r, 4), "norm", "scale", "unscale", "counts"), label=rule)
    yield Case("ema", state, in_place(
        lambda a, v: ema.ema_update(a.ema, a.weight, a.step, a.norm, 0.99, version=v), "ema"), (1, 2))
    for cosine in (False, True):
        yield Case("learning_rate", state, in_place(lambda a, v, c=cosine: step_state.learning_rate_forward(
            a.step, a.rate, 1e-3, 2, 10, c), "rate"), label="cosine" if cosine else "constant")
    yield Case("step_advance", state, in_place(lambda a, v: step_state.step_advance(a.step), "step"))
    yield Case("latch_nonfinite", state, in_place(
        lambda a, v: step_state.latch_nonfinite(a.first_bad, a.loss, a.norm, a.step), "first_bad", "norm"))
    yield Case("telemetry", state, in_place(
        lambda a, v: telemetry.telemetry_record(a.ring, a.step, a.loss, a.norm, a.rate, 0.5), "ring"))


def all_cases():
    groups = (_elementwise, _reductions, _norms, _products, _convolutions, _movement, _diffusion, _randomness, _update)
    return [case for group in groups for case in group()]


CASES = all_cases()


def cases_named(names):
    """The cases of these operations (all for none); a `UsageError` for a name that is none."""
    known = sorted({case.name for case in CASES})
    for name in names:
        if not any(k == name or k.startswith(name + "_") for k in known):
            raise UsageError(f"there is no operation {name!r}: use some of {', '.join(known)}.")
    return [c for c in CASES if not names or any(c.name == n or c.name.startswith(n + "_") for n in names)]


# Running them ---------------------------------------------------------------------------------------------------------

@dataclass
class Outcome:
    """What a case's version did on a device. error: relative, the largest of its results; fault: text or None."""

    case: Case
    version: int | None
    error: float = 0.0
    same: bool = True
    fault: str | None = None
    seconds: float = 0.0
    results: list = field(default_factory=list)

    @property
    def passed(self):
        return self.fault is None and self.same and self.error <= self.case.tolerance

    @property
    def name(self):
        label = f" ({self.case.label})" if self.case.label else ""
        return f"{self.case.name}{label}" + ("" if self.version is None else f" v{self.version}")


def _inputs(case):
    return case.inputs(np.random.default_rng(list(f"{case.name} {case.label}".encode())))


def _on_device(arrays, backend):
    """The inputs on a device: float64 becomes float32."""
    return Arrays({name: upload(a.astype(np.float32) if a.dtype == np.float64 else a, backend)
                   for name, a in arrays.items()})


def run_once(case, version, backend):
    """The results of a case as NumPy arrays."""
    results = case.run(_on_device(_inputs(case), backend), version)
    synchronize(backend)
    return [download(r) for r in results]


def reference(case):
    """The results in float64 by NumPy, from inputs rounded to float32 as those of a device are."""
    arrays = {name: a.astype(np.float32).astype(np.float64) if a.dtype == np.float64 else a.copy()
              for name, a in _inputs(case).items()}
    return case.run(Arrays(arrays), None)


def relative_error(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if not np.array_equal(np.isfinite(got), np.isfinite(want)):
        return np.inf
    finite = np.isfinite(want)
    scale = np.linalg.norm(want[finite])
    return float(np.linalg.norm((got - want)[finite]) / (scale or 1.0))


def check_case(case, version, device, orders=ORDERS[:2], seed=0):
    """Run one version of a case on a device ("emulator", "cuda", "ptx", "cpu") and judge it: an `Outcome`."""
    backend, outcome, start = get_backend(device), Outcome(case, version), time.perf_counter()
    runs = []
    try:
        for order in orders if device == "emulator" else ORDERS[:1 if device == "ptx" else 2]:
            if device == "emulator":
                backend.machine.order, backend.machine.seed = order, seed
            runs.append(run_once(case, None if device == "cpu" else version, backend))
    except (KernelFault, LaunchRefused, Unsupported, PtxError, ValueError) as error:
        outcome.fault = str(error)
    finally:
        if device == "emulator":
            backend.machine.order = "forward"
    if outcome.fault is None and device != "ptx":
        outcome.results = runs[0]
        outcome.same = all(a.tobytes() == b.tobytes() for other in runs[1:]
                           for a, b in zip(runs[0], other, strict=True))
        outcome.error = max(relative_error(a, b) for a, b in zip(runs[0], reference(case), strict=True))
    outcome.seconds = time.perf_counter() - start
    return outcome


def check(names=(), device="emulator", orders=ORDERS[:2], seed=0, version=None):
    """Check the operations of these names (all for none), one `Outcome` after the other; version: only this one."""
    for case in cases_named(names):
        for each in case.versions if device != "cpu" else (None,):
            if version is None or each in (version, None):
                yield check_case(case, each, device, orders, seed)


def counts_of(case, version):
    """A `Recorder` (numdiff/emulator/counts.py) that has counted one run of a case in the emulator."""
    recorder = Recorder()
    run_once(case, version, EmulatorDevice(recorder=recorder, on_fault="collect"))
    return recorder


def trace_of(case, version):
    """A `Tracer` (numdiff/emulator/trace.py) of one run of a case in the emulator."""
    tracer = Tracer()
    run_once(case, version, EmulatorDevice(tracer=tracer, on_fault="collect"))
    return tracer


def compare_devices(case, version, first="emulator", second="cuda"):
    """(whether two devices give the same bits, their largest difference relative to the result's 2-norm)."""
    a, b = (run_once(case, version, get_backend(d)) for d in (first, second))
    same = all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))
    return same, max(relative_error(x, y) for x, y in zip(a, b, strict=True))


def fused_kernels(case, version):
    """Which of a case's kernels have fused multiply-adds or a float32 function of NVIDIA's in their sm_90a code.

    The emulator rounds after each operation and takes functions from the C library; these kernels may differ from it in
    their last bits, all others must not.
    """
    backend = get_backend("ptx")
    del backend.launched[:]
    run_once(case, version, backend)
    return sorted({key[1] for key in backend.launched if key[3][0] == 9 and FUSED.search(backend.texts[key])})


def all_kernels():
    """{(module, name)} of every kernel in numdiff.kernels that a launch can name."""
    package = importlib.import_module(__package__)
    found = set()
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        for value in vars(importlib.import_module(info.name)).values():
            for kernel in value.values() if isinstance(value, dict) else [value]:
                if hasattr(kernel, "py_func") and not kernel.targetoptions.get("device"):
                    found.add((kernel.py_func.__module__, kernel.py_func.__name__))
    return found


__all__ = ["CASES", "Case", "Outcome", "all_kernels", "cases_named", "check", "check_case", "compare_devices",
           "counts_of", "fused_kernels", "trace_of"]
