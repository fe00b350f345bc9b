"""Problems of plausible models, and for each every way in which a launcher could run it.

A PROBLEM is one call of an operation on arrays of certain shapes. A CANDIDATE is a context within
which the launcher takes a given version, tile, split or plan; without a context it takes its own
choice. choices.py times all candidates of all problems.

READ NEXT
    choice_draws.py
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
            for slices in sorted({1, *choice.SLICES, *fill} if can_split else {1}):
                most = min(K // choice.SHORTEST_HALF_SLICE, choice.MOST_UNITS * blocks // tiles)
                if slices > max(1, most):
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


def _hopper_plans(B, H, W, C, N, size, device, addends, rng):
    """{label: context} of rung 6's plans: those with the lowest estimates, and some others."""
    plans = []
    for bn, sub in conv2d_plan.VARIANTS:
        for taps in (1, 3) if size == 3 else (1,):
            for plan in conv2d_plan.plans(B, H, W, C, N, size, True, bn, sub, taps, addends):
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
            functools.partial(
                replaced, name_of(conv2d_hopper), plan_for=lambda *_, plan=plan, **__: plan
            )
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
            found |= _hopper_plans(B, H, W, C, N, size, device, not gradient, rng)
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
