"""Cases of the transformer's operations."""
import numpy as np

from ..diffusion import class_dropout, vlb
from ..fuse import chain as fused_chains
from ..quantise import HISTORY, PARTIALS, scale_update
from ..transformer import adaln, bias_gelu, chunk, columns, gate, patchify, qk_norm_rope, swiglu
from ..transformer.gate_adaln import launcher as gate_adaln
from ..transformer.gate_adaln.forward import EIGHT_KEYS, HALF_KEYS
from ..transformer.gate_adaln.forward import KEYS as GATE_ADALN_KEYS
from ..transformer.norms import NORMS, Norm
from .case import HALF_TOLERANCE, SEED, Case, normal, one, with_counters, with_plain_sums
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
            gradients = [columns.columns_backward(gradients, a.modulation.dtype)]
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


def turn_cases():
    """qk_norm_rope: heads that share a warp and heads that fill none; in place and not, norm and rotation alone."""
    def given(a, norms, rotates):
        weights = {"q_weight": a.q_weight, "k_weight": a.k_weight} if norms else {}
        return {**weights, **({"rotation": a.rotation} if rotates else {})}

    def case(shape, versions, norms, rotates, in_place, half):
        B, T, heads, HS = shape
        D = heads * HS

        def inputs(rng):
            made = (halves if half else normal)(qkv=(B, T, 3 * D), dy=(B, T, 3 * D), raw=(B, T, (2 if in_place else 3)
                                                                                          * D))(rng)
            return {**made, **normal(q_weight=(HS,), k_weight=(HS,), rotation=(2, T, HS), dq=(HS,), dk=(HS,))(rng)}

        def forward(a, v):
            y, kept = qk_norm_rope.qk_norm_rope_forward(a.qkv, heads, **given(a, norms, rotates), in_place=in_place,
                                                        version=v)
            return (y, kept) if norms else (y,)

        def backward(a, v):
            sums = {"dq_weight": a.dq, "dk_weight": a.dk} if norms else {}
            dqkv = qk_norm_rope.qk_norm_rope_backward(a.dy, a.raw if norms else None, heads, **given(a, norms, rotates),
                                                      **sums, in_place=in_place, version=v)
            return (dqkv, a.dq, a.dk) if norms else (dqkv,)

        label = (f"{heads} heads of {HS}{', in place' * in_place}{', no norm' * (not norms)}"
                 f"{', no rotation' * (not rotates)}{', float16' * half}")
        tolerance = HALF_TOLERANCE if half else 1e-5
        yield Case("qk_norm_rope", inputs, forward, versions, tolerance, label)
        yield Case("qk_norm_rope_backward", inputs, backward, versions, tolerance, label)

    for arguments in (((2, 9, 2, 8), (1, 2), True, True, True, False), ((1, 3, 3, 6), (1,), True, True, False, False),
                      ((1, 1, 4, 72), (2,), True, True, True, True), ((1, 1, 9, 128), (2,), True, False, False, False),
                      ((1, 1, 5, 64), (2,), True, True, True, True), ((1, 1, 5, 64), (2,), True, False, False, False),
                      ((1, 2, 2, 8), (1, 2), False, True, False, True)):
        yield from case(*arguments)


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

    def whole(a, v, norm):
        return given(adaln.adaln_forward(a.x, a.shift if norm.shifted else None, a.scale, version=v,
                                         **options(a, norm)), a, Norm())

    def whole_backward(a, v, norm):
        return given(adaln.adaln_backward(a.dy, a.x, a.scale, None if norm.rms else a.mean, a.rstd, version=v,
                                          need_dshift=norm.shifted, **gradient_options(a, norm)), a, norm)

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

    for norm in NORMS[1:]:
        yield from cases("adaln", whole, whole_backward, (2, 3, 36), (1, 2), str(norm), norm)
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
        yield from cases("adaln", whole, whole_backward, (1, 2, 12), (1, 2), str(norm), norm, half=True)
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
    yield from turn_cases()
    yield from norm_cases()

    def in_two(module, run):
        """run() with the sums over tokens in two chunks and a second pass, which else takes a thousand tokens."""
        def forced(a, version):
            cut = module.cut
            module.cut = lambda B, T, C, width: (*cut(B, T, C, width)[:2], -(-T // 2), 2)
            try:
                return run(a, version)
            finally:
                module.cut = cut
        return forced

    # one warp a token in v2: 9 of 32 lanes have channels, then the first has two turns; then the sums in two passes
    for (B, T, C), versions, label in (((2, 3, 36), (1, 2), ""), ((1, 2, 132), (1, 2), "wide"),
                                       ((2, 2, 7), (1,), "odd"), ((2, 5, 8), (2,), "two passes")):
        passes = in_two if label == "two passes" else lambda module, run: run
        yield Case("adaln", normal(x=(B, T, C), shift=(B, C), scale=(B, C)),
                   lambda a, v: adaln.adaln_forward(a.x, a.shift, a.scale, version=v), versions, label=label)

        def inputs(rng, shape=(B, T, C)):
            B, T, C = shape
            made = normal(dy=shape, x=shape, shift=(B, C), scale=(B, C))(rng)
            _, made["mean"], made["rstd"] = adaln.adaln_forward(made["x"], made.pop("shift"), made["scale"])
            return made

        yield Case("adaln_backward", inputs, passes(adaln, lambda a, v: adaln.adaln_backward(
            a.dy, a.x, a.scale, a.mean, a.rstd, version=v)), versions, label=label)
        shapes = {"x": (B, T, C), "h": (B, T, C), "gate": (B, C)}
        yield Case("gate", normal(**shapes), one(lambda a, v: gate.gate_forward(a.x, a.h, a.gate, version=v)), versions,
                   label=label)
        yield Case("gate_backward", normal(**shapes), passes(fused_chains, lambda a, v: gate.gate_backward(
            a.x, a.h, a.gate, version=v)), versions, label=label)
        shapes = {"x": (B, T, C), "dy": (B, T, C), "bias": (C,), "dbias": (C,)}
        yield Case("bias_gelu", normal(**shapes), one(lambda a, v: bias_gelu.bias_gelu_forward(a.x, a.bias, version=v)),
                   versions, label=label)
        yield Case("bias_gelu_backward", normal(**shapes), passes(fused_chains, lambda a, v: (
            bias_gelu.bias_gelu_backward(a.dy, a.x, a.bias, a.dbias, version=v), a.dbias)), versions, label=label)
    for H, versions, half in ((12, (1,), False), (8, (1, 2), False), (16, (1, 2), True)):
        arrays, tolerance = (halves, HALF_TOLERANCE) if half else (normal, 1e-5)
        label = f"{H} channels{', float16' * half}"
        yield Case("swiglu", arrays(x=(3, 2 * H)), one(lambda a, v: swiglu.swiglu_forward(a.x, version=v)), versions,
                   tolerance, label)
        yield Case("swiglu_backward", arrays(dy=(3, H), x=(3, 2 * H)), one(lambda a, v: swiglu.swiglu_backward(
            a.dy, a.x, version=v)), versions, tolerance, label)
    for count in (2, 6):
        yield Case("chunk", normal(x=(3, 4 * count)), lambda a, v, n=count: tuple(chunk.chunk_forward(a.x, n)),
                   label=f"{count} parts")
        yield Case("chunk_backward", normal(**{f"p{k}": (3, 4) for k in range(count)}),
                   one(lambda a, v, n=count: chunk.chunk_backward([getattr(a, f"p{k}") for k in range(n)])),
                   label=f"{count} parts")
    yield Case("chunk_backward", normal(p=(3, 4)), one(lambda a, v: chunk.chunk_backward([None, a.p])),
               label="unused part")
    # a patch's row is patch · C numbers: v2 where it is a multiple of 4
    for patch, C, versions in ((2, 4, (1, 2)), (3, 3, (1,)), (4, 3, (1, 2))):
        height, width = 2 * patch, 3 * patch
        tokens = (2, 6, patch * patch * C)
        label = f"{patch}×{patch}×{C}"
        yield Case("patchify", normal(x=(2, height, width, C)),
                   one(lambda a, v, p=patch: patchify.patchify_forward(a.x, p, version=v)), versions, label=label)
        yield Case("unpatchify", normal(x=tokens), one(lambda a, v, p=patch, h=height, w=width:
                   patchify.unpatchify_forward(a.x, p, h, w, version=v)), versions, label=label)

    def hybrid(rng, C):
        """Pixels at both edges of the range and within, the first timestep and later ones."""
        made = normal(target=(3, 2, 2, C), error=(3, 2, 2, C), v=(3, 2, 2, C))(rng)
        made["prediction"] = np.concatenate((made["target"] + 0.3 * made.pop("error"), made.pop("v")), axis=-1)
        made["x_0"] = np.clip(1.5 * rng.standard_normal((3, 2, 2, C)), -1, 1)
        made["t"] = np.array([0, 4, 9], np.int32)
        noise = np.linspace(0.01, 0.95, 10)  # 1 - alpha_bar
        beta = 1 - (1 - noise) / (1 - np.append(0.0, noise[:-1]))
        low = np.log(beta * np.append(noise[0], noise[:-1]) / noise)
        return {**made, "k": beta / np.sqrt(noise), "low": low, "width": np.log(beta) - low + 0.1}

    arguments = ("prediction", "target", "x_0", "t", "k", "low", "width")
    for C, versions in ((3, (1,)), (4, (1, 2))):
        def inputs(rng, C=C):
            return hybrid(rng, C)

        yield Case("hybrid_loss", inputs, one(lambda a, v: vlb.hybrid_loss_forward(
            *(getattr(a, name) for name in arguments), 1.4, version=v)), versions, 5e-5, label=f"of {C}")
        yield Case("hybrid_loss_backward", inputs, one(lambda a, v: vlb.hybrid_loss_backward(
            *(getattr(a, name) for name in arguments), 1.4, 0.5, version=v)), versions, 1e-4, label=f"of {C}")

    def labels(rng):
        return {**with_counters(7)(rng), "labels": np.arange(7, dtype=np.int32)}

    yield Case("class_dropout", labels, one(lambda a, v: class_dropout.class_dropout_forward(
        a.labels, 0.4, 7, SEED, a.step, a.samples)))
