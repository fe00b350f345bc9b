"""Cases of flash attention."""
from .. import flash_attention
from ..flash_attention import launcher
from .case import Case, normal


def flash_cases():
    def case(HS, T=3, heads=1, order="legacy", versions=(1, 2), warps=4, chunks=(1, 1), passes=("forward", "backward")):
        width, label = heads * HS, f"{order}, HS {HS}, T {T}"

        def inputs(rng):
            made = normal(qkv=(1, T, 3 * width), dy=(1, T, width))(rng)
            made["y"], made["logsumexp"] = flash_attention.flash_attention_forward(made["qkv"], heads, order)
            return made

        def cut(run):  # the work as this case wants it, whatever the device would choose
            def forced(a, version):
                choices = launcher.choose_warps, launcher.choose_chunks
                launcher.choose_warps, launcher.choose_chunks = lambda *_: warps, lambda *_: chunks
                try:
                    return run(a, version)
                finally:
                    launcher.choose_warps, launcher.choose_chunks = choices
            return forced

        if "forward" in passes:
            yield Case("flash_attention", inputs, cut(lambda a, v: flash_attention.flash_attention_forward(
                a.qkv, heads, order, version=v)), versions, label=f"{label}, {warps} warps")
        if "backward" in passes:
            yield Case("flash_attention_backward", inputs, cut(lambda a, v: (flash_attention.flash_attention_backward(
                a.dy, a.qkv, a.y, a.logsumexp, heads, order, version=v),)), versions, label=f"{label}, chunks {chunks}")

    for HS, heads, order in ((32, 2, "new"), (64, 1, "legacy"), (72, 1, "new")):
        yield from case(HS, heads=heads, order=order)
        yield from case(HS, T=2, versions=(2,), warps=2, passes=("forward",))
    yield from case(32, T=66, versions=(2,), warps=2, chunks=(2, 1))  # two tiles of keys, two blocks of queries
    yield from case(32, T=65, versions=(2,), chunks=(1, 2), passes=("backward",))  # one block adds to its own dq
