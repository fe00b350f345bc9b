"""Cases of the transformer's operations."""
import numpy as np

from .. import adaln, bias_gelu, chunk, class_dropout, gate, patchify, vlb
from .case import SEED, Case, normal, one, with_counters


def transformer_cases():
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
        yield Case("gate_backward", normal(**shapes), passes(gate, lambda a, v: gate.gate_backward(
            a.x, a.h, a.gate, version=v)), versions, label=label)
        shapes = {"x": (B, T, C), "dy": (B, T, C), "bias": (C,), "dbias": (C,)}
        yield Case("bias_gelu", normal(**shapes), one(lambda a, v: bias_gelu.bias_gelu_forward(a.x, a.bias, version=v)),
                   versions, label=label)
        yield Case("bias_gelu_backward", normal(**shapes), passes(bias_gelu, lambda a, v: (
            bias_gelu.bias_gelu_backward(a.dy, a.x, a.bias, a.dbias, version=v), a.dbias)), versions, label=label)
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
