"""Problems of plausible models, and for each every way in which a launcher could run it.

A PROBLEM is one call of an operation on arrays of certain shapes. A CANDIDATE is a context within
which the launcher takes a given version, tile, split or plan; without a context it takes its own
choice. choices.py times all candidates of all problems.

DRAWS. Shapes come from a seed. Those of a transformer: 192 to 1,152 channels, 64 to 4,096 tokens,
up to 512 images. Those of a UNet: 64 to 1,152 channels, images of 16 to 256 pixels and their lower
levels. A problem has at most MAX_FLOPS operations and MAX_BYTES bytes.
PRESETS. The calls of a training step of the presets, recorded on a stand-in for the card.

READ NEXT
    choices.py
"""

import contextlib
import functools
import math
from dataclasses import dataclass, field

import numpy as np

from ...dtypes import float16
from ...kernels.attention import flash_attention_backward, flash_attention_forward
from ...kernels.attention import launcher as attention
from ...kernels.conv2d import (
    conv2d_forward,
    conv2d_input_gradient,
    conv2d_weight_gradient,
    mma_halo,
    mma_halo_gradient,
)
from ...kernels.conv2d import mma as conv2d_mma
from ...kernels.conv2d.hopper import convolution as conv2d_hopper
from ...kernels.conv2d.hopper import plan as conv2d_plan
from ...kernels.conv2d.hopper import resampled as conv2d_resampled
from ...kernels.conv2d.hopper import weight_gradient_3x3 as gradient_3x3
from ...kernels.conv2d.hopper import weight_gradient_3x3_plan as gradient_plan
from ...kernels.conv2d.resampled import halved_conv2d_forward, upsampled_conv2d_forward
from ...kernels.linear.gradients import linear_gradients_backward, linear_gradients_supports
from ...kernels.matmul import choice, group, matmul_forward
from ...kernels.matmul import launcher as matmul_launcher
from ...kernels.matmul import products as matmul_products
from ...kernels.matmul.activations import matmul_gelu_backward, matmul_gelu_forward
from ...kernels.matmul.hopper import group_schedule
from ...kernels.matmul.hopper.layout import BK, BM
from ...kernels.matmul.mma_layout import ACTIVATION_TILES, TILES, takes
from ...kernels.matmul.product import Product, ProductFused, ProductOperand
from ...kernels.matmul.products import launch_products
from ...kernels.operation import replaced
from ...kernels.operation.versions import at_most

MAX_FLOPS, MAX_BYTES = 1e12, 1.5e9
SLICES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
MOST_UNITS = 6  # work tiles a block, above which no sum is split
MOST_PLANS = 16  # of a convolution: those with the lowest estimates, and OTHER_PLANS of the rest
OTHER_PLANS = 6


@dataclass
class Drawn:
    """A problem: one call of an operation.

    operation: its name in the figures; shape: {name: number} that determine it
    call: a function of (arrays) that runs it; arrays: {name: (shape, dtype)} of what it reads;
    results: the same of what it writes in place
    candidates: a function of a device that returns {label: a function that returns a context}
    preset: name of the preset whose step makes this call; None: drawn
    """

    operation: str
    shape: dict
    call: object
    arrays: dict
    candidates: object
    results: dict = field(default_factory=dict)
    preset: str | None = None

    @property
    def nbytes(self):
        """Bytes that it reads."""
        return sum(math.prod(s) * np.dtype(t).itemsize for s, t in self.arrays.values())

    @property
    def key(self):
        """What determines it, as text."""
        return self.operation + " " + " ".join(f"{k}={v}" for k, v in self.shape.items())


@contextlib.contextmanager
def forced(*contexts):
    """All contexts at once."""
    with contextlib.ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


def name_of(module):
    return module.__name__


# Matrix products ----------------------------------------------------------------------------------


def matmul_candidates(M, N, K, batch, single, rungs, device, activation=False, across=False):
    """{label: context}: tiles and slices of rungs 6 and 5. single: a result of float32; across: A
    is transposed"""
    found = {}
    for rung in rungs:
        for tile in choice.HALF_TILES[rung]:
            if rung == 5 and not takes(tile, across):
                continue
            if activation and rung == 5 and tile not in ACTIVATION_TILES:
                continue
            can_split = batch == 1 and (rung == 5 or single) and not activation
            tiles = batch * -(-M // tile[0]) * -(-N // tile[1])
            blocks = device.multiprocessors * (TILES[tile].blocks if rung == 5 else 1)
            fill = {max(1, n * blocks // tiles) for n in (1, 2, 3)}
            for slices in sorted({*SLICES, *fill} if can_split else {1}):
                if slices > 1 and (K // slices < 192 or slices * tiles > MOST_UNITS * blocks):
                    continue
                pairs = rung == 6 and batch == 1 and choice.pairs_fit(M)
                for paired in (False, True)[: 1 + pairs]:
                    label = f"{rung} {tile[0]}x{tile[1]} {slices}{' paired' * paired}"
                    found[label] = functools.partial(_forced_product, rung, tile, slices, paired)
    return found


def _forced_product(rung, tile, slices, paired):
    return forced(
        at_most({"matmul": rung}),
        replaced(name_of(matmul_launcher), cheaper_rung=lambda *_: rung),
        replaced(
            name_of(matmul_products),
            half_tile=lambda *_: (tile, slices, paired),
            _goes_alone_to_group=lambda *_: False,
        ),
    )


def _one_group(decision=True):
    return forced(
        at_most({"matmul": 5}),
        replaced(name_of(matmul_products), _goes_alone_to_group=lambda *_: decision),
    )


def rungs_of(device):
    return (6, 5) if device.capability >= (9, 0) else (5,)


def product(M, N, K, layout="NT", batch=1, single=False, extra=(), operation=None):
    """A product of 16 bits. layout: of A and B, T: transposed; single: a result of float32; extra:
    of "bias", "residual", "sums" (of dyᵀ's rows)"""
    leading = (batch,) if batch > 1 else ()
    a = (*leading, K, M) if layout[0] == "T" else (*leading, M, K)
    b = (*leading, N, K) if layout[1] == "T" else (*leading, K, N)
    arrays = {"a": (a, float16), "b": (b, float16)}
    results = {}
    if "bias" in extra:
        arrays["bias"] = (N,), np.float32
    if "residual" in extra:
        arrays["residual"] = (*leading, M, N), float16
    if single:
        results["out"] = (*leading, M, N), np.float32
    if "sums" in extra:
        results["row_sums"] = (M,), np.float32

    def call(given):
        return matmul_forward(transpose_a=layout[0] == "T", transpose_b=layout[1] == "T", **given)

    def candidates(device):
        rungs = rungs_of(device)
        if batch > 1 and (M % BM or K % BK or single and layout != "NT"):
            rungs = (5,)  # rung 6 takes such batches alone (matmul/hopper/launcher.py)
        found = matmul_candidates(M, N, K, batch, single, rungs, device, across=layout == "TN")
        if layout == "TN" and single and batch == 1:
            found["5 group"] = _one_group
        return found

    shape = {"layout": layout, "batch": batch, "M": M, "N": N, "K": K, "single": int(single)}
    shape |= dict.fromkeys(extra, 1)
    name = operation or ("matmul weight gradient" if layout == "TN" and single else "matmul")
    return Drawn(name, shape, call, arrays, candidates, results)


def gelu_product(M, N, K, backward):
    """A product with GELU, or its derivative, in its epilogue."""
    arrays = {"a": ((M, K), float16), "b": ((K, N) if backward else (N, K), float16)}
    arrays |= {"u": ((M, N), float16)} if backward else {"bias": ((N,), np.float32)}

    def call(given):
        return matmul_gelu_backward(**given) if backward else matmul_gelu_forward(**given)

    def candidates(device):
        return matmul_candidates(M, N, K, 1, False, rungs_of(device), device, True)

    shape = {"backward": int(backward), "M": M, "N": N, "K": K}
    return Drawn("matmul GELU", shape, call, arrays, candidates)


def single_product(M, N, K, layout):
    """A product of float32 matrices, on rung 4."""
    a, b = ((K, M) if layout[0] == "T" else (M, K)), ((N, K) if layout[1] == "T" else (K, N))

    def call(given):
        return matmul_forward(transpose_a=layout[0] == "T", transpose_b=layout[1] == "T", **given)

    def candidates(device):
        found = {}
        for tile in choice.SINGLE_TILES:
            tiles = -(-M // tile[0]) * -(-N // tile[1])
            fill = {max(1, n * device.multiprocessors // tiles) for n in (1, 2, 3, 4)}
            for slices in sorted({1, 2, 4, 8, 16, 32, *fill}):
                if slices == 1 or K // slices >= 64 and slices * tiles <= 8 * 132:
                    found[f"4 {tile[0]}x{tile[1]} {slices}"] = functools.partial(
                        replaced,
                        name_of(matmul_launcher),
                        choose_tile=lambda *_, tile=tile, slices=slices: (tile, slices),
                    )
        return found

    shape = {"layout": layout, "M": M, "N": N, "K": K}
    arrays = {"a": (a, np.float32), "b": (b, np.float32)}
    return Drawn("matmul float32", shape, call, arrays, candidates)


def block_gradients(rows, sizes):
    """The weight gradients of several layers of one block, in one launch or one by one."""
    arrays, results = {}, {}
    for i, (N, K) in enumerate(sizes):
        arrays |= {f"dy_{i}": ((rows, N), float16), f"x_{i}": ((rows, K), float16)}
        results |= {f"dweight_{i}": ((N, K), np.float32), f"dbias_{i}": ((N,), np.float32)}

    def layers_of(given):
        names = ("dy", "x", "dweight", "dbias")
        return [tuple(given[f"{name}_{i}"] for name in names) for i in range(len(sizes))]

    def one_by_one(given):
        for dy, x, dweight, dbias in layers_of(given):
            fused = ProductFused(row_sums=dbias)
            launch_products(
                [
                    Product(
                        ProductOperand(dy, True), ProductOperand(x), ProductOperand(dweight), fused
                    )
                ]
            )

    def together(given):
        linear_gradients_backward(layers_of(given), False)

    how = {"function": None}

    def call(given):
        if how["function"] is not None:
            how["function"](given)
        elif linear_gradients_supports(given["x_0"], sizes):
            together(given)
        else:
            one_by_one(given)

    @contextlib.contextmanager
    def by(function, context=contextlib.nullcontext):
        before, how["function"] = how["function"], function
        try:
            with context():
                yield
        finally:
            how["function"] = before

    def candidates(device):
        found = {"one by one": functools.partial(by, one_by_one)}
        if device.capability < (9, 0):
            return found | {"together": functools.partial(by, together)}
        for width in group.WIDTHS:
            tiles = sum(m * n for m, n in group.tiles_of(sizes, width))
            for splits in (False, True):
                made = group_schedule.cut(
                    tiles, -(-rows // BK), device.multiprocessors, group.SHORTEST, splits
                )
                context = functools.partial(
                    replaced, name_of(group), choose=lambda *_, w=width, m=made: (w, m, 0)
                )
                label = f"together {width}{' cut' * splits}"
                found[label] = functools.partial(by, together, context)
        return found

    shape = {"rows": rows, "sizes": ",".join(f"{N}x{K}" for N, K in sizes)}
    return Drawn("block gradients", shape, call, arrays, candidates, results)


# Convolutions -------------------------------------------------------------------------------------


def _hopper_plans(B, H, W, C, N, size, device, addends, variants, rng, module, halo=True):
    """{label: context} of rung 6's plans: those with the lowest estimates, and some others."""
    plans = []
    for bn, sub in variants:
        for taps in (1, 3) if size == 3 and halo else (1,):
            for plan in conv2d_plan.plans(B, H, W, C, N, size, halo, bn, sub, taps, addends):
                ns = conv2d_plan.estimate(
                    plan, C, size, sub, device.multiprocessors, gradient=not addends
                )
                plans.append((ns, plan))
    plans.sort(key=lambda pair: pair[0])
    best_of_tile, others = {}, []
    for ns, plan in plans:
        tile = plan.bn, plan.pixels, plan.taps_per_stage
        if tile not in best_of_tile:
            best_of_tile[tile] = ns, plan
        elif ns < 2 * plans[0][0]:
            others.append((ns, plan))
    kept = list(best_of_tile.values()) + others[: max(0, MOST_PLANS - len(best_of_tile))]
    rest = others[max(0, MOST_PLANS - len(best_of_tile)) :]
    some = rng.permutation(len(rest))[:OTHER_PLANS]
    kept += [rest[i] for i in sorted(some)]
    return {
        f"6 {plan.bn}x{plan.width}x{plan.height}x{plan.images} {plan.taps_per_stage}": (
            functools.partial(replaced, name_of(module), plan_for=lambda *_, plan=plan, **__: plan)
        )
        for ns, plan in kept
        if ns < 4 * plans[0][0]
    }


def _with_version(contexts, version):
    """The candidates with `conv2d` at most of this version."""
    return {
        label: lambda context=context: forced(at_most({"conv2d": version}), context())
        for label, context in contexts.items()
    }


def _halo_tiles(device):
    found = {}
    for seg in (16, 8):
        for frags in (4, 2):
            if mma_halo.shared_bytes(seg, frags) <= device.shared_limit:
                found[f"4 {seg} {frags}"] = functools.partial(
                    replaced,
                    name_of(mma_halo),
                    choose_tile=lambda *_, seg=seg, frags=frags: (seg, frags),
                )
    return _with_version(found, 4)


def convolution(B, H, W, C, N, size=3, gradient=False, residual=False, seed=0):
    """A convolution of stride 1, or its input gradient (dy has C channels then)."""
    arrays = {"x": ((B, H, W, C), float16)}
    if gradient:
        arrays["weight"] = (C, size, size, N), float16
        if residual:
            arrays["residual"] = (B, H, W, N), float16
    else:
        arrays |= {"weight": ((N, size, size, C), float16), "bias": ((N,), np.float32)}
        if residual:
            arrays["residual"] = (B, H, W, N), float16

    def call(given):
        if not gradient:
            return conv2d_forward(**given)
        given = dict(given)
        dy, weight = given.pop("x"), given.pop("weight")
        like_x = type(dy)(dy.backend, (B, H, W, N), dy.dtype, dy.memory, dy.offset)
        return conv2d_input_gradient(dy, weight, like_x, **given)

    def candidates(device):
        found = {}
        if device.capability >= (9, 0):
            rng = np.random.default_rng([seed, B, H, W, C, N])
            variants = conv2d_plan.VARIANTS
            found |= _hopper_plans(
                B, H, W, C, N, size, device, not gradient, variants, rng, conv2d_hopper
            )
        if size == 3:
            found |= _halo_tiles(device)
        return found

    shape = {"B": B, "H": H, "W": W, "C": C, "N": N, "size": size, "residual": int(residual)}
    name = "conv2d input gradient" if gradient else "conv2d"
    return Drawn(name, shape, call, arrays, candidates)


def weight_gradient(B, H, W, C, N, stride=1, seed=0):
    """The weight gradient of a 3 × 3 convolution."""
    Ho, Wo = -(-H // stride), -(-W // stride)
    arrays = {"dy": ((B, Ho, Wo, N), float16), "x": ((B, H, W, C), float16)}
    results = {"dweight": ((N, 3, 3, C), np.float32), "dbias": ((N,), np.float32)}

    def call(given):
        return conv2d_weight_gradient(stride=stride, accumulate=False, **given)

    def hopper(device):
        rng, plans = np.random.default_rng([seed, B, H, W, C, N]), []
        mp = device.multiprocessors
        at_once = {
            blocks: max(1, n * mp // 132) for blocks, n in gradient_plan.CLUSTERS_AT_ONCE.items()
        }
        for channels in gradient_plan.WIDTHS:
            tiles = -(-C // channels) * -(-N // gradient_plan.TILE)
            for cut in gradient_plan.cuts(B, H, W, channels, True, None):
                for blocks, groups in gradient_plan.shares(tiles, at_once, None, None):
                    if 1 <= blocks * groups <= cut.chunks:
                        plan = gradient_plan.Gradient3x3Plan(*cut[:7], blocks, groups)
                        ns = gradient_plan.estimate(plan, cut, C, N, tiles, at_once[blocks])
                        plans.append((ns, plan))
        plans.sort(key=lambda pair: pair[0])
        near = [pair for pair in plans if pair[0] < 2 * plans[0][0]]
        rest = near[MOST_PLANS:]
        some = rng.permutation(len(rest))[: 2 * OTHER_PLANS]
        return {
            f"6 {p.channels} {p.width}x{p.height}x{p.images} {p.blocks} {p.groups}": (
                functools.partial(replaced, name_of(gradient_3x3), plan_for=lambda *_, plan=p: plan)
            )
            for _, p in near[:MOST_PLANS] + [rest[i] for i in sorted(some)]
        }

    def mma(device):
        found, mp = {}, device.multiprocessors
        if stride > 1:
            for n in (1, 2, 4, 8, 16):
                found[f"4 {n}"] = functools.partial(
                    replaced, name_of(conv2d_mma), THREADS_WANTED=mp * n * conv2d_mma.THREADS
                )
            return _with_version(found, 4)
        for seg in (16, 8):
            for tenths in (5, 10, 20, 30):
                found[f"4 halo {seg} {tenths}"] = functools.partial(
                    forced_halo_gradient, seg, mp * tenths // 10
                )
        found["4 taps"] = functools.partial(
            replaced, name_of(conv2d_mma), halo_fits=lambda x: False
        )
        return _with_version(found, 4)

    def candidates(device):
        if stride == 1 and device.capability >= (9, 0):
            return hopper(device) | mma(device)
        return mma(device)

    shape = {"B": B, "H": H, "W": W, "C": C, "N": N, "stride": stride}
    return Drawn("conv2d weight gradient", shape, call, arrays, candidates, results)


def forced_halo_gradient(seg, blocks):
    """Rung 4's weight gradient by segments of `seg` columns, in parts for `blocks` blocks."""

    def choose(b, h, w, c, n, *_):
        tiles = -(-b * -(-h // mma_halo_gradient.ROWS) * -(-w // seg) // (16 // seg))
        tile = mma_halo_gradient.TILE
        most = max(1, min(blocks // (-(-c // tile) * -(-n // tile)), tiles))
        return seg, -(-tiles // -(-tiles // most))

    return replaced(name_of(mma_halo_gradient), choose_cut=choose)


def resampled(B, H, W, C, N, halved, seed=0):
    """A convolution after nearest-neighbour upsampling, or of stride 2, in one kernel (Hopper)."""
    arrays = {
        "x": ((B, H, W, C), float16),
        "weight": ((N, 3, 3, C), float16),
        "bias": ((N,), np.float32),
    }

    def call(given):
        return halved_conv2d_forward(**given) if halved else upsampled_conv2d_forward(**given)

    def candidates(device):
        mp, plans = device.multiprocessors, []
        size, h, w = (3, H // 2, W // 2) if halved else (2, H, W)
        for bn, sub in conv2d_plan.RESAMPLED_VARIANTS:
            for plan in conv2d_plan.plans(B, h, w, C, N, size, True, bn, sub, 1, True, halved):
                plans.append((conv2d_plan.estimate(plan, C, size, sub, mp), plan))
        return {
            f"6 {p.bn}x{p.width}x{p.height}x{p.images}": functools.partial(
                replaced, name_of(conv2d_resampled), plan_for=lambda *_, p=p, **__: p
            )
            for _, p in sorted(plans, key=lambda pair: pair[0])[:MOST_PLANS]
        }

    shape = {"halved": int(halved), "B": B, "H": H, "W": W, "C": C, "N": N}
    return Drawn("conv2d resampled", shape, call, arrays, candidates)


# Attention ----------------------------------------------------------------------------------------


def attention_of(B, T, heads, HS, backward):
    """Flash attention, forward or backward."""
    C = heads * HS
    arrays = {"qkv": ((B, T, 3 * C), float16)}
    if backward:
        arrays |= {"dy": ((B, T, C), float16), "y": ((B, T, C), float16)}
        arrays["logsumexp"] = (B, heads, T), np.float32

    def call(given):
        if backward:
            return flash_attention_backward(heads=heads, **given)
        return flash_attention_forward(heads=heads, **given)

    def forced_version(version, **more):
        return forced(
            at_most({"flash_attention": version}),
            replaced(name_of(attention), hopper_pays=lambda *_: version == 5, **more),
        )

    def with_chunks(version, keys, prefix, **more):
        tiles, found = -(-T // keys), {}
        for chunks in (1, 2, 3, 4, 5, 6, 8, 11, 16):
            if chunks <= min(tiles, 16):
                chunk_tiles = -(-tiles // chunks)
                cut = -(-tiles // chunk_tiles), chunk_tiles
                found[f"{prefix} {cut[0]}"] = functools.partial(
                    forced_version, version, choose_chunks=lambda *_, cut=cut: cut, **more
                )
        return found

    def candidates(device):
        found = {}
        if device.capability >= (9, 0) and HS in attention.HEAD_SIZES:
            if not backward:
                found["5"] = functools.partial(forced_version, 5)
            else:
                found |= with_chunks(5, attention.backward_hopper.KEYS, "5")
        if not backward:
            for queries in (64, 128):
                found[f"3 {queries}"] = functools.partial(
                    forced_version, 3, choose_queries=lambda *_, q=queries: q
                )
            return found
        for M, warps in attention.HALF_TILES:
            nbytes = attention.backward_half.shared_bytes(HS, M, warps)
            if (HS, M, warps) in attention.backward_kernels_v3 and nbytes <= device.shared_limit:
                tile = {"choose_tile": lambda *_, tile=(M, warps): tile}
                found |= with_chunks(3, 16 * M * warps, f"3 {M} {warps}", **tile)
        return found

    shape = {"B": B, "T": T, "heads": heads, "HS": HS}
    name = "attention backward" if backward else "attention forward"
    return Drawn(name, shape, call, arrays, candidates)


# Draws --------------------------------------------------------------------------------------------

WIDTHS = 192, 256, 320, 384, 512, 640, 768, 1024, 1152
TOKENS = 64, 77, 144, 196, 256, 400, 576, 1024, 1600, 2304, 4096
SIDES = 7, 8, 12, 14, 16, 20, 24, 28, 32, 48, 56, 64, 96, 112, 128, 192, 256


class Draw:
    """Draws shapes by a random generator."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def one(self, values):
        return values[self.rng.integers(len(values))]

    def chance(self, share):
        return self.rng.random() < share

    def log_uniform(self, low, high, step=1):
        value = math.exp(self.rng.uniform(math.log(low), math.log(high)))
        return int(max(low, round(value / step) * step))

    def batch(self):
        """1 to 512, a power of two as often as not."""
        if self.chance(0.5):
            return 2 ** int(self.rng.integers(10))
        return self.log_uniform(1, 512)

    def channels(self):
        return self.log_uniform(64, 1152, self.one((8, 32, 32, 64)))

    def weight(self):
        """(outputs, inputs) of a linear layer."""
        D = self.one(WIDTHS)
        return self.one(
            ((3 * D, D), (D, D), (4 * D, D), (D, 4 * D), (8 * self.log_uniform(1, 12), D))
            + ((self.channels(), self.channels()), (6 * D, D))
        )

    def rows(self):
        return self.batch() * (self.one(TOKENS) if self.chance(0.7) else self.one(SIDES) ** 2)

    def image(self):
        return self.batch(), self.one(SIDES)

    def matmul(self):
        N, K = self.weight()
        if N > 4 * K:  # modulation: a row for each image
            M = 8 * -(-self.batch() // 8)
            return self.one((product(M, N, K, "NT", extra=("bias",)), product(M, K, N, "NN")))
        M = 8 * -(-self.rows() // 8)
        if self.chance(0.15):  # scores, and values, of attention without a fused kernel
            T, HS, batch = 8 * -(-self.one(TOKENS) // 8), self.one((64, 72, 80, 96)), self.batch()
            return self.one(
                (
                    product(T, T, HS, "NT", batch, single=True),
                    product(T, HS, T, "NN", batch),
                    product(T, HS, T, "TN", batch),
                )
            )
        extra = ("bias", "residual") if self.chance(0.3) else ("bias",)
        return self.one(
            (product(M, N, K, "NT", extra=extra), product(M, K, N, "NN"), product(M, N, K, "NT"))
        )

    def matmul_weight_gradient(self):
        N, K = self.weight()
        rows = 8 * -(-(self.batch() if N > 4 * K else self.rows()) // 8)
        return product(N, K, rows, "TN", single=True, extra=("sums",))

    def matmul_gelu(self):
        D, M = self.one(WIDTHS), 8 * -(-self.rows() // 8)
        backward = self.chance(0.5)
        return gelu_product(M, 4 * D, D, backward)

    def matmul_single(self):
        N, K = self.weight()
        M = 4 * -(-self.rows() // 4)
        return self.one(
            (
                single_product(M, N, K, "NT"),
                single_product(M, K, N, "NN"),
                single_product(N, K, M, "TN"),
            )
        )

    def block_gradients(self):
        D, rows = self.one(WIDTHS), 8 * -(-self.rows() // 8)
        sizes = (3 * D, D), (D, D), (4 * D, D), (D, 4 * D)
        return block_gradients(rows, self.one((sizes, sizes[:2], sizes[2:], sizes[:3])))

    def convolution(self, gradient=False):
        (B, S), C = self.image(), self.channels()
        N = C if self.chance(0.5) else self.channels()
        if self.chance(0.2):  # after a skip connection
            C, N = (N, 2 * C) if gradient else (2 * C, N)
        residual = self.chance(0.3)
        size = 5 if self.chance(0.04) else 3
        return convolution(B, S, S, min(C, 1152), min(N, 1152), size, gradient, residual)

    def weight_gradient(self):
        (B, S), C = self.image(), self.channels()
        N = C if self.chance(0.5) else self.channels()
        stride = 2 if self.chance(0.2) else 1
        return weight_gradient(B, S, S, C, N, stride)

    def resampled(self):
        B, S = self.image()
        C = 64 * -(-self.channels() // 64)
        return resampled(B, S + S % 2, S + S % 2, C, self.channels(), self.chance(0.5))

    def attention(self, backward=False):
        HS = self.one((32, 64, 64, 72, 128))
        heads = max(1, min(16, self.one(WIDTHS) // HS))
        return attention_of(self.batch(), self.one(TOKENS), heads, HS, backward)


def flops_of(problem):
    """Floating-point operations of a problem."""
    s = problem.shape
    if "T" in s:
        return (10 if problem.operation.endswith("backward") else 4) * (
            s["B"] * s["T"] ** 2 * s["heads"] * s["HS"]
        )
    if "sizes" in s:
        sizes = [map(int, pair.split("x")) for pair in s["sizes"].split(",")]
        return 2 * s["rows"] * sum(N * K for N, K in sizes)
    if "K" in s:
        return 2 * s.get("batch", 1) * s["M"] * s["N"] * s["K"]
    pixels = s["B"] * s["H"] * s["W"]
    if "halved" in s:
        return (18 / 4 if s["halved"] else 32) * pixels * s["C"] * s["N"]
    return 2 * s.get("size", 3) ** 2 * pixels // s.get("stride", 1) ** 2 * s["C"] * s["N"]


def written_bytes(problem):
    """Bytes of a result, about."""
    s = problem.shape
    if "sizes" in s or "T" in s:
        return problem.nbytes
    if "K" in s:
        return 4 * s.get("batch", 1) * s["M"] * s["N"]
    return 2 * s["B"] * s["H"] * s["W"] * s["N"] * (1 if s.get("halved", 1) else 4)


def fits(problem):
    """Whether a problem is neither tiny nor too large to be measured in a few milliseconds."""
    most = MAX_FLOPS / (8 if problem.operation == "matmul float32" else 1)
    return (
        2e7 < flops_of(problem) < most
        and problem.nbytes + written_bytes(problem) < MAX_BYTES
        and all(math.prod(shape) < 2**31 for shape, _ in problem.arrays.values())
    )


# how many of each kind are drawn
COUNTS = {
    "matmul": 60,
    "matmul_weight_gradient": 40,
    "matmul_gelu": 16,
    "matmul_single": 14,
    "block_gradients": 16,
    "convolution": 44,
    "input_gradient": 30,
    "weight_gradient": 36,
    "resampled": 10,
    "attention_forward": 14,
    "attention_backward": 20,
}
SPECIAL = {
    "input_gradient": ("convolution", True),
    "attention_forward": ("attention", False),
    "attention_backward": ("attention", True),
}


def drawn_problems(seed, hopper=True):
    """[Drawn] of a seed, in a random order. hopper: whether the device has Hopper's kernels"""
    found = []
    for i, (kind, count) in enumerate(COUNTS.items()):
        if kind == "resampled" and not hopper:
            continue
        draw = Draw([seed, i])
        name, *given = SPECIAL.get(kind, (kind,))
        kept = {}
        while len(kept) < count:
            problem = getattr(draw, name)(*given)
            if fits(problem):
                kept.setdefault(problem.key, problem)
        found += kept.values()
    order = np.random.default_rng(seed).permutation(len(found))
    return [found[i] for i in order]


# Presets ------------------------------------------------------------------------------------------


# the default presets, and two of DiT's own sizes
PRESETS = (
    {"model": "unet"},
    {"model": "dit"},
    {"model": "dit", "architecture": "DiT-B/2", "batch": 64},
    {"model": "dit", "architecture": "DiT-XL/2", "batch": 32},
)


def preset_problems(card):
    """[Drawn] of the calls of a training step of PRESETS in float16, each once."""
    from ...training.options import resolve
    from ..tune import planned_calls

    found = {}
    for given in PRESETS:
        options = resolve({**given, "precision": "fp16"}, capability=card.capability)
        for call in planned_calls(options, card):
            for problem in _of_call(call):
                problem.preset = given.get("architecture", given["model"])
                if fits(problem):
                    found.setdefault(problem.key, problem)
    return list(found.values())


def _of_call(call):
    """[Drawn] of a recorded call, none for operations without a choice."""
    given = call.arguments
    if call.name == "linear_gradients_backward":
        layers = given["layers"]
        sizes = tuple((dy.shape[1], x.shape[1]) for dy, x, *_ in layers)
        return [block_gradients(layers[0][0].shape[0], sizes)]
    if call.dtype != np.dtype(float16):
        return []
    if call.name == "conv2d_forward" and given["stride"] == 1 and given["weight"].shape[1] > 1:
        N, size, _, C = given["weight"].shape
        if C % 8 == N % 8 == 0 and C > 8 and N > 8:
            return [
                convolution(
                    *given["x"].shape[:3], C, N, size, residual=given["residual"] is not None
                )
            ]
    if call.name == "conv2d_backward" and given["stride"] == 1 and given["weight"].shape[1] == 3:
        N, size, _, C = given["weight"].shape
        B, H, W = given["x"].shape[:3]
        if C % 8 == N % 8 == 0 and C > 8 and N > 8:
            return [
                convolution(B, H, W, N, C, size, True, given["residual"] is not None),
                weight_gradient(B, H, W, C, N),
            ]
    if call.name in ("flash_attention_forward", "flash_attention_backward"):
        B, T, width = given["qkv"].shape
        HS = width // 3 // given["heads"]
        return [attention_of(B, T, given["heads"], HS, call.name.endswith("backward"))]
    if call.name == "matmul_forward" and len(given["a"].shape) == 2:
        layout = "NT"[given["transpose_a"]] + "NT"[given["transpose_b"]]
        M, K = given["a"].shape[::-1] if given["transpose_a"] else given["a"].shape
        N = given["b"].shape[0] if given["transpose_b"] else given["b"].shape[1]
        out = given["out"]
        single = np.float32 in (given["out_dtype"], None if out is None else out.dtype)
        extra = {"bias": "bias", "residual": "residual", "row_sums": "sums"}
        extra = tuple(word for name, word in extra.items() if given[name] is not None)
        if M % 8 == N % 8 == K % 8 == 0:
            return [product(M, N, K, layout, single=bool(single), extra=extra)]
    if call.name in ("matmul_gelu_forward", "matmul_gelu_backward"):
        (M, K), backward = given["a"].shape, call.name.endswith("backward")
        return [gelu_product(M, given["b"].shape[backward], K, backward)]
    return []
