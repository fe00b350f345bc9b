"""Cases of flash attention."""
import numpy as np

from .. import attention as flash_attention
from ..attention import launcher
from .case import HALF_TOLERANCE, TOLERANCE, Case, normal

CHOICES = "choose_warps", "choose_chunks", "choose_queries", "choose_tile", "multiprocessors_of"


def flash_cases():
    def case(HS, T=3, heads=1, order="legacy", versions=(1, 2, 4), warps=4, chunks=(1, 1), queries=64, tile=(1, 4),
             passes=("forward", "backward"), half=False, multiprocessors=None):
        width, label = heads * HS, f"{'float16, ' if half else ''}{order}, HS {HS}, T {T}"

        def inputs(rng):
            made = normal(qkv=(1, T, 3 * width), dy=(1, T, width))(rng)
            if half:
                made = {name: a.astype(np.float16).astype(np.float64) for name, a in made.items()}
            made["y"], made["logsumexp"] = flash_attention.flash_attention_forward(made["qkv"], heads, order)
            if half:
                made.update({name: made[name].astype(np.float16) for name in ("qkv", "dy", "y")})
            return made

        def cut(run):  # the work as this case wants it, whatever the device would choose
            def forced(a, version):
                kept = {name: getattr(launcher, name) for name in CHOICES}
                for name, value in zip(CHOICES, (warps, chunks, queries, tile, multiprocessors), strict=True):
                    if value is not None:
                        setattr(launcher, name, lambda *_, value=value: value)
                try:
                    return run(a, version)
                finally:
                    for name, function in kept.items():
                        setattr(launcher, name, function)
            return forced

        tolerance = HALF_TOLERANCE if half else TOLERANCE
        if "forward" in passes:
            how = f"{queries} queries" if half else f"{warps} warps"
            yield Case("flash_attention", inputs, cut(lambda a, v: flash_attention.flash_attention_forward(
                a.qkv, heads, order, version=v)), versions, tolerance, f"{label}, {how}")
        if "backward" in passes:
            how = f"{16 * tile[0] * tile[1]} keys, " if half else ""
            yield Case("flash_attention_backward", inputs, cut(lambda a, v: (flash_attention.flash_attention_backward(
                a.dy, a.qkv, a.y, a.logsumexp, heads, order, version=v),)), versions, tolerance,
                f"{label}, {how}chunks {chunks}")

    for HS, heads, order in ((32, 2, "new"), (64, 1, "legacy"), (72, 1, "new")):
        yield from case(HS, heads=heads, order=order)
        yield from case(HS, T=2, versions=(2,), warps=2, passes=("forward",))
        yield from case(HS, heads=heads, order=order, versions=(1, 3), half=True)
        yield from case(HS, heads=heads, order=order, versions=(5,), half=True, multiprocessors=1)
        yield from case(HS, versions=(3,), queries=128, tile=(2, 8), half=True)
        yield from case(HS, versions=(3,), tile=(2, 4), passes=("backward",), half=True)
    yield from case(128, versions=(3,), tile=(1, 4), half=True)
    yield from case(128, versions=(3,), queries=128, tile=(1, 8), half=True)
    yield from case(32, T=66, versions=(2,), warps=2, chunks=(2, 1))  # two tiles of keys, two blocks of queries
    yield from case(32, T=65, versions=(2,), chunks=(1, 2), passes=("backward",))  # one block adds to its own dq
    for chunks in ((2, 1), (1, 2)):
        yield from case(32, T=65, versions=(3,), chunks=chunks, passes=("backward",), half=True)
    yield from case(32, T=65, versions=(3,), queries=128, passes=("forward",), half=True)
    yield from case(32, T=65, versions=(4,), chunks=(1, 2))
    yield from case(32, T=130, versions=(5,), passes=("forward",), half=True)  # two tiles of queries, and of keys
    # one block with more tiles than stages; that of a backward with two units is above
    yield from case(32, T=2, heads=5, versions=(5,), passes=("forward",), half=True, multiprocessors=1)
