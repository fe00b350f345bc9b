"""Cases of the transformer's operations."""
import numpy as np

from ..quantise import HISTORY, PARTIALS, scale_update
from ..transformer import adaln, columns
from ..transformer.gate_adaln import launcher as gate_adaln
from ..transformer.gate_adaln.forward import EIGHT_KEYS, HALF_KEYS
from ..transformer.gate_adaln.forward import KEYS as GATE_ADALN_KEYS
from ..transformer.norms import Norm
from .case import HALF_TOLERANCE, Case, normal, with_plain_sums
from .half import halves

EIGHT_TOLERANCE = 0.02  # float32 and float64 round few numbers to neighbours, a bit of some byte


def seam_cases():
    """gate_adaln: every kernel, with and without a gate; then tokens of two warps in two blocks, and columns; backward
    of z, and of x, of which z is made again."""
    def in_two(run):
        """run() with two warps a block and two blocks an image."""
        def forced(a, version):
            choose = gate_adaln.choose_plan

            def few(B, T, C, itemsize, is_gated, *others):
                _, _, _, before, nbytes = choose(B, T, C, itemsize, is_gated, *others)
                return 2, 2, -(-T // 2), before, nbytes

            gate_adaln.choose_plan = few
            try:
                return run(a, version)
            finally:
                gate_adaln.choose_plan = choose
        return forced

    def parts(a, together):
        """(gate, shift, scale), of an array of their own each or of one."""
        return columns.columns_forward(a.modulation, 3) if together else (a.gate, a.shift, a.scale)

    def forward(a, v, gated, together):
        gate, shift, scale = parts(a, together)
        return gate_adaln.gate_adaln_forward(a.x, a.h if gated else None, gate if gated else None, shift, scale,
                                             version=v)[0 if gated else 1:]

    def backward(a, v, gated, together, of_x=False):
        gate, shift, scale = parts(a, together)
        dz = a.dz if gated else None
        dx, dh, *gradients = gate_adaln.gate_adaln_backward(
            dz, a.dy, None if of_x else a.x, a.h if gated else None, gate if gated else None, shift, scale, a.mean,
            a.rstd, version=v, x=a.x if of_x else None)
        if together:
            gradients = [columns.join_columns(gradients, a.modulation.dtype)]
        return tuple(g for g in (dx, dh, *gradients) if g is not None)

    for shape, versions, half, split in (((2, 3, 40), (1, 2), False, False), ((2, 11, 16), (2,), True, True),
                                         ((1, 3, 264), (2,), True, False),
                                         *(((1, 1, C), (2,), False, False) for C in (264, 520, 776, 1032))):
        B, _, C = shape
        vectors = {"modulation": (B, 3 * C)} if split else {"gate": (B, C), "shift": (B, C), "scale": (B, C)}

        def inputs(rng, half=half, shape=shape, vectors=vectors):
            made = (halves if half else normal)(x=shape, h=shape, dz=shape, dy=shape, **vectors)(rng)
            x = made["x"].astype(np.float64)
            made["mean"], made["rstd"] = x.mean(2).reshape(-1), 1 / np.sqrt(x.var(2) + 1e-6).reshape(-1)
            return made

        for gated in (True, False):
            if split and not gated:
                continue
            label = f"{'' if gated else 'no gate, '}{C} channels{', float16' if half else ''}"
            arguments = {"versions": versions, "tolerance": HALF_TOLERANCE if half else 1e-5, "label": label}

            def run(a, v, gated=gated, together=split):
                return forward(a, v, gated, together)

            yield Case("gate_adaln", inputs, run, **arguments)
            for of_x in (False, True) if gated and C < 256 else (False,):
                def run_back(a, v, gated=gated, together=split, of_x=of_x):
                    return backward(a, v, gated, together, of_x)

                yield Case("gate_adaln_backward", inputs, in_two(run_back) if split else run_back,
                           **arguments | {"label": f"{label}{', of x' * of_x}"})


def norm_cases():
    """adaln and gate_adaln with RMSNorm, a weight, no shift: every kernel of every norm but DiT's own."""
    def inputs(rng, shape, norm, half):
        B, _, C = shape
        vectors = {"gate": (B, C), "shift": (B, C), "scale": (B, C)}
        made = (halves if half else normal)(x=shape, h=shape, dz=shape, dy=shape, **vectors)(rng)
        made |= normal(weight=(C,), dweight=(C,))(rng)
        options = {"weight": made["weight"] if norm.weighted else None, "norm": norm.kind}
        _, mean, made["rstd"] = adaln.adaln_forward(made["x"].astype(np.float64), None, made["scale"], **options)
        return made if norm.rms else {**made, "mean": mean}

    def options(a, norm):
        return {"weight": a.weight if norm.weighted else None, "norm": norm.kind}

    def gradient_options(a, norm):
        return {"weight": a.weight, "dweight": a.dweight} if norm.weighted else {}

    def given(found, a, norm):
        """All results that there are."""
        return (*(array for array in found if array is not None), *((a.dweight,) if norm.weighted else ()))

    def seam(a, v, norm, gated):
        found = gate_adaln.gate_adaln_forward(a.x, *((a.h, a.gate) if gated else (None, None)),
                                              a.shift if norm.shifted else None, a.scale, version=v,
                                              **options(a, norm))
        return given(found[0 if gated else 1:], a, Norm())

    def seam_backward(a, v, norm, gated):
        return given(gate_adaln.gate_adaln_backward(
            a.dz, a.dy, a.x, *((a.h, a.gate) if gated else (None, None)), a.shift if norm.shifted else None, a.scale,
            None if norm.rms else a.mean, a.rstd, version=v, **gradient_options(a, norm)), a, norm)

    def cases(name, run, run_back, shape, versions, label, *arguments, half=False):
        norm, tolerance = arguments[0], HALF_TOLERANCE if half else 1e-5
        for operation, function in ((name, run), (f"{name}_backward", run_back)):
            yield Case(operation, lambda rng: inputs(rng, shape, norm, half), lambda a, v, function=function: function(
                a, v, *arguments), versions, tolerance, f"{label}{', float16' * half}")

    for sweeps, gated, norm in GATE_ADALN_KEYS:
        if norm != Norm():
            C = 256 * sweeps - 248
            yield from cases("gate_adaln", seam, with_plain_sums(seam_backward) if sweeps > 1 else seam_backward,
                             (1, 1, C), (2,),
                             f"{norm}, {'' if gated else 'no gate, '}{C} channels", norm, gated)
    for _, gated, norm in HALF_KEYS:
        if norm != Norm():
            yield next(cases("gate_adaln", seam, seam_backward, (1, 3, 264), (2,),
                             f"{norm}, {'' if gated else 'no gate, '}264 channels", norm, gated, half=True))
    for norm in (Norm(True, True, True), Norm(True, True, False)):  # LightningDiT's
        yield from cases("gate_adaln", seam, seam_backward, (1, 2, 16), (2,), f"{norm}, 16 channels", norm, True,
                         half=True)


def eight_cases():
    """gate_adaln for layers in FP8: every kernel whose y, or dh, is bytes; with them the scale that their largest
    magnitude gives."""
    def inputs(rng, shape, norm):
        B, _, C = shape
        # 1 + scale > 0, or a zero's sign would depend on whether 0 is added
        made = {name: rng.integers(-7, 9, of).astype(np.float16) / 8 for name, of in (
            ("x", shape), ("h", shape), ("dz", shape), ("dy", shape), ("gate", (B, C)), ("shift", (B, C)),
            ("scale", (B, C)))}
        z = made["x"].astype(np.float64)
        mean = np.zeros(B * shape[1]) if norm.rms else z.mean(2).reshape(-1)
        made["rstd"] = 1 / np.sqrt(((z - mean.reshape(*shape[:2], 1)) ** 2).mean(2).reshape(-1) + 1e-6)
        return {**made, "mean": mean, "weight": rng.integers(1, 4, C).astype(np.float32), "unit": np.float32([1]),
                "scale_8": np.float32([2.0**-5]), "history": np.zeros((1, HISTORY), np.float32),
                "amax": np.zeros(PARTIALS, np.uint32), "dweight": np.zeros(C)}

    def rounding(a, function):
        """What `function((scale, amax))` gives, bytes as their numbers, and the scale from amax."""
        amax = a.amax.copy() if isinstance(a.amax, np.ndarray) else a.amax
        found = function((a.scale_8, amax))
        scale_update(amax.reshape(1, PARTIALS), a.history, a.unit)
        return (a.unit, *(array for array in found if array is not None))

    def forward(a, v, norm):
        return rounding(a, lambda into: gate_adaln.gate_adaln_forward(
            a.x, a.h, a.gate, a.shift if norm.shifted else None, a.scale, weight=a.weight if norm.weighted else None,
            norm=norm.kind, version=v, into=into))

    def backward(a, v, norm):
        more = {"weight": a.weight, "dweight": a.dweight} if norm.weighted else {}
        return rounding(a, lambda into: gate_adaln.gate_adaln_backward(
            a.dz, a.dy, a.x, a.h, a.gate, a.shift if norm.shifted else None, a.scale, None if norm.rms else a.mean,
            a.rstd, version=v, dh_into=into, **more))

    for sweeps, _, norm in EIGHT_KEYS:
        C = 256 * sweeps - 240
        for name, function in (("gate_adaln", forward), ("gate_adaln_backward",
                                                         with_plain_sums(backward) if sweeps > 1 else backward)):
            yield Case(name, lambda rng, C=C, norm=norm: inputs(rng, (1, 2, C), norm),
                       lambda a, v, function=function, norm=norm: function(a, v, norm), (2,), EIGHT_TOLERANCE,
                       f"{norm}, to e4m3, {C} channels")


def transformer_cases():
    yield from eight_cases()
    yield from seam_cases()
    yield from norm_cases()
