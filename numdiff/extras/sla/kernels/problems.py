"""Problems of sparse-linear attention, both directions: small ones for each kernel, and a DiT's.

SHAPES
    as in reference.py
SOURCE
    plain bookkeeping; kernels/operation/problem.py says what a problem is.
READ NEXT
    launcher.py, whose records have them.
"""

import functools

import numpy as np

from ....kernels.attention.launcher import HEAD_SIZES
from ....kernels.operation import Problem, filled, half, replaced, single
from .choice import bits_left, blocks_of, count_of
from .reference import Kept, sla_forward_reference


def _kept(HS, T, heads, topk, array):
    """Arrays for a `Kept`."""
    N = blocks_of(T)
    count = count_of(topk, N)

    def lists(rng):
        return np.sort(rng.permuted(np.tile(np.arange(N), (1, heads, N, 1)), axis=-1)[..., :count])

    return Kept(
        filled((1, heads, N, count), lists, np.int32),
        single(1, heads, T),
        single(1, heads, T),
        array(1, heads, N, HS, HS),
        single(1, heads, N, HS),
    )


def _derived(layer, made):
    """What a forward leaves for its backward: y, and the arrays of `Kept`. layer: the forward's
    other arguments"""
    given = {name: made[name].astype(np.float64) for name in ("qkv", "weight", "bias")}
    y, kept = sla_forward_reference(**given, **layer)
    return {
        "y": y.astype(made["y"].dtype),
        **{f"kept.{i}": a.astype(made[f"kept.{i}"].dtype) for i, a in enumerate(kept)},
    }


def _problem(
    backward,
    HS,
    T,
    topk,
    *versions,
    heads=1,
    order="new",
    array=single,
    all_keys=False,
    label="",
    **more,
):
    width, layer = heads * HS, {"heads": heads, "order": order, "all_keys": all_keys}
    arrays = {
        "qkv": array(1, T, 3 * width),
        "weight": filled((HS, HS), lambda rng: rng.standard_normal((HS, HS)) / 8, array(1).dtype),
        "bias": single(HS),
    }
    label = f"{'float16, ' * (array is half)}{order}, HS {HS}, T {T}, share {topk}{', all keys' * all_keys}{label}"
    if not backward:
        return Problem(label, versions=versions, topk=topk, **arrays, **layer, **more)
    return Problem(
        label,
        versions=versions,
        dy=array(1, T, width),
        y=array(1, T, width),
        **arrays,
        kept=_kept(HS, T, heads, topk, array),
        dweight=single(HS, HS),
        dbias=single(HS),
        **layer,
        derived=functools.partial(_derived, {"topk": topk, **layer}),
        **more,
    )


def _rest(sum_rest, N=130, count=7):
    """S alone: two tiles of blocks of queries, and three of keys, for which the other problems are
    too short."""

    def inputs(rng):
        lists = np.sort(rng.permuted(np.tile(np.arange(N), (N, 1)), axis=-1)[:, :count])
        return {
            "H": rng.standard_normal((1, 1, N, 8, 8)).astype(np.float16),
            "left": bits_left(lists)[None, None],
            "S": np.full((1, 1, N, 8, 8), np.nan, np.float16),
        }

    def run(a, version):
        sum_rest(a.H, a.left, a.S)
        return (a.S,)

    return Problem(
        f"float16, S alone, {N} blocks",
        versions=("product",),
        inputs=inputs,
        run=run,
        tolerance=1e-3,
    )


def _of_a_model(backward):
    """Images of 256 × 256 and 512 × 512 pixels in patches of 4 by a DiT-B; the heads of a DiT-XL."""
    for T, heads, HS in ((4096, 12, 64), (16384, 12, 64), (4096, 16, 72)):
        versions = ("naive",) * (T == 4096) + (("mma",) if backward else ("mma", "product"))
        arguments = {
            "qkv": half(1, T, 3 * heads * HS),
            "weight": half(HS, HS),
            "bias": single(HS),
            "heads": heads,
            "order": "new",
            "versions": versions,
            "measured": True,
        }
        if backward:
            y = half(1, T, heads * HS)
            yield Problem(
                dy=y,
                y=y,
                kept=_kept(HS, T, heads, 0.05, half),
                dweight=single(HS, HS),
                dbias=single(HS),
                **arguments,
            )
        else:
            yield Problem(topk=0.05, **arguments)


def problems(backward, sum_rest=None):
    """[Problem] of a direction. sum_rest: the launcher's, for the forward"""
    of, tensor_cores = (
        functools.partial(_problem, backward),
        ("mma",) if backward else ("mma", "product"),
    )
    found = [
        of(8, 66, 0.5, "naive", order="legacy"),
        of(8, 66, 0.5, "naive", all_keys=True),
        # every block is critical
        of(
            8,
            65,
            1.0,
            "naive",
            heads=2,
            order="legacy",
            array=half,
            fast=False,
            bfloat16="exhaustive",
        ),
        of(32, 65, 1.0, "mma", heads=2, order="legacy", array=half, fast=False),
        of(
            32,
            65,
            0.5,
            *tensor_cores,
            all_keys=True,
            array=half,
            fast=("mma",),
            bfloat16="exhaustive",
        ),
    ]
    for HS in HEAD_SIZES:
        # a thread's loops in "naive" are those of heads of 8; heads of 72 have a tail
        found += [
            of(HS, 65, 0.5, "naive", only_compiled=True),
            of(
                HS,
                65,
                0.5,
                *tensor_cores,
                array=half,
                fast=("mma",) if backward == (HS == 32) else False,
                only_compiled=HS == 64,
                bfloat16="exhaustive" if HS == 32 else False,
            ),
        ]
    # lists of two, of keys, and of three, two and one, of queries
    lists = functools.partial(of, 32, 130, 0.7, "mma", array=half, fast=False)
    long = functools.partial(replaced, f"{__package__}.launcher", long_list=lambda count: 2)
    found += (
        [lists(label=", long lists first", within=long)] if backward else [lists(), _rest(sum_rest)]
    )
    return found + list(_of_a_model(backward))
