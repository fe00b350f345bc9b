"""Problems of flash attention, both directions: small ones for each kernel, and those of models.

How the work is divided depends on the shape and the device, and small shapes get few of the ways.
So each problem is solved with a division that is given.

SHAPES
    as in reference.py
SOURCE
    plain bookkeeping; operation/problem.py says what a problem is.
READ NEXT
    launcher.py, whose records have them.
"""

import functools

import numpy as np

from ... import extensions
from ..operation import Problem, half, positive, replaced, single
from .reference import flash_attention_forward_reference


def _derived(heads, order, made):
    """y and logsumexp of the forward."""
    y, logsumexp = flash_attention_forward_reference(made["qkv"].astype(np.float64), heads, order)
    return {"y": y.astype(made["y"].dtype), "logsumexp": logsumexp.astype(np.float32)}


def _arguments(backward, B, T, HS, heads, order, array):
    width, layer = heads * HS, {"heads": heads, "order": order}
    if not backward:
        return {"qkv": array(B, T, 3 * width), **layer}
    return {
        "dy": array(B, T, width),
        "qkv": array(B, T, 3 * width),
        "y": array(B, T, width),
        "logsumexp": positive(B, heads, T),
        **layer,
    }


def problem(
    backward,
    HS,
    *versions,
    T=3,
    heads=1,
    order="legacy",
    chunks=(1, 1),
    queries=64,
    tile=(1, 4),
    multiprocessors=None,
    array=single,
    how="",
    within=None,
    **more,
):
    """chunks, queries, tile: what the launcher's functions of these names choose, unless a context is
    given; how: words for the label."""
    if backward:
        how += f"{16 * tile[0] * tile[1]} keys, " * (array is half) + f"chunks {chunks}"
        more["derived"] = functools.partial(_derived, heads, order)
    elif array is half:
        how = f"{queries} queries"
    given = {
        "choose_chunks": chunks,
        "choose_queries": queries,
        "choose_tile": tile,
    }
    if multiprocessors:
        given["multiprocessors_of"] = multiprocessors
    within = within or functools.partial(
        replaced,
        f"{__package__}.launcher",
        **{name: lambda *_, value=value: value for name, value in given.items()},
    )
    return Problem(
        f"{'float16, ' * (array is half)}{order}, HS {HS}, T {T}{', ' * bool(how)}{how}",
        versions=versions,
        within=within,
        **_arguments(backward, 1, T, HS, heads, order, array),
        **more,
    )


def problems(backward):
    """[Problem] of a direction."""
    of, of_half = (
        functools.partial(problem, backward),
        functools.partial(problem, backward, array=half),
    )
    extended = extensions.entries("flash_attention")
    naive = [name for name, entry in extended.items() if entry.text["number"] == 1]
    found = []
    for HS, heads, order in ((32, 2, "new"), (64, 1, "legacy"), (72, 1, "new")):
        last = HS == 72  # which has a tail: a size that is no multiple of 16
        found += [
            of(
                HS,
                *extended,
                heads=heads,
                order=order,
                fast=last and (backward or tuple(set(extended) - set(naive))),
            ),
            of_half(
                HS,
                *naive,
                "mma",
                "hopper",
                heads=heads,
                order=order,
                multiprocessors=1,
                fast=("mma", "hopper")
                if last and backward
                else ("hopper",)
                if last
                else tuple(naive) * (HS == 32),
                bfloat16="exhaustive" if HS == (32 if backward else 64) else False,
            ),
            of_half(HS, "mma", queries=128, tile=(2, 8), fast=last and backward),
        ]
        if backward:
            found.append(of_half(HS, "mma", tile=(2, 4)))
    found += [
        of_half(128, "mma"),
        of_half(128, "mma", queries=128, tile=(1, 8)),
        # two tiles of keys, two blocks of queries; a block adds to its own dq
        of(32, *(name for name in extended if name not in naive), T=65, chunks=(1, 2)),
    ]
    if backward:
        found += [of_half(32, "mma", T=65, chunks=chunks) for chunks in ((2, 1), (1, 2))]
    else:
        found += [
            of_half(32, "mma", T=65, queries=128),
            of_half(32, "hopper", T=130),  # two tiles of queries, and of keys
            # one block with more tiles than stages; that of a backward with two units is
            # above
            of_half(32, "hopper", T=2, heads=5, multiprocessors=1),
        ]
    for shape, heads, array, order in (
        ((64, 256), 12, half, "new"),
        ((8, 1024), 8, single, "legacy"),
    ):
        found.append(
            Problem(measured=True, **_arguments(backward, *shape, 64, heads, order, array))
        )
    return found
