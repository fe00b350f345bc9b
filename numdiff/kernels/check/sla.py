"""Cases of sparse-linear attention."""
import numpy as np

from ..attention import sla
from ..attention.sla import launcher
from ..attention.sla.choice import bits_left
from .case import HALF_TOLERANCE, TOLERANCE, Case


def sla_cases():
    def case(HS, T, share, versions, heads=1, order="new", half=False, long=0, all_keys=False):
        label = f"{'float16, ' if half else ''}{order}, HS {HS}, T {T}, share {share}"
        label += ", long lists first" * (long > 0) + ", all keys" * all_keys
        rounded = np.float16 if half else np.float32

        def inputs(rng):
            made = {name: rng.standard_normal(shape).astype(rounded) for name, shape in (
                ("qkv", (1, T, 3 * heads * HS)), ("dy", (1, T, heads * HS)), ("weight", (HS, HS)))}
            made["weight"] /= rounded(8)
            made["bias"], made["dbias"] = rng.standard_normal((2, HS)).astype(np.float32)
            made["dweight"] = rng.standard_normal((HS, HS)).astype(np.float32)
            exact = (made[name].astype(np.float64) for name in ("qkv", "weight", "bias"))
            y, kept = sla.sla_forward(*exact, heads, share, order, all_keys=all_keys)
            made["y"] = y.astype(rounded)
            made |= {name: a.astype(np.int32 if name == "critical" else rounded if name == "S" else np.float32)
                     for name, a in kept._asdict().items()}
            return made

        def forward(a, version):
            y, kept = sla.sla_forward(a.qkv, a.weight, a.bias, heads, share, order, version=version,
                                      all_keys=all_keys)
            return y, *kept

        def backward(a, version):
            kept = sla.Kept(a.critical, a.logsumexp, a.r, a.S, a.Z)
            given, launcher.long_list = launcher.long_list, lambda count: long
            try:
                dqkv = sla.sla_backward(a.dy, a.qkv, a.y, kept, a.weight, a.bias, a.dweight, a.dbias, heads, order,
                                        version=version, all_keys=all_keys)
            finally:
                launcher.long_list = given
            return dqkv, a.dweight, a.dbias

        tolerance = HALF_TOLERANCE if half else TOLERANCE
        if not long:
            yield Case("sla", inputs, forward, versions, tolerance, label)
        if versions != (3,):
            yield Case("sla_backward", inputs, backward, versions, tolerance, label)

    yield from case(8, 66, 0.5, (1,), order="legacy")
    yield from case(8, 65, 1.0, (1,), heads=2, half=True, order="legacy")  # every block is critical
    for HS in (32, 64, 72):
        yield from case(HS, 65, 0.5, (1,))
        yield from case(HS, 65, 0.5, (2,), half=True)
        yield from case(HS, 65, 0.5, (3,), half=True)
    yield from case(32, 130, 0.7, (2,), half=True)  # lists of two, of keys, and of three, two and one, of queries
    yield from case(32, 65, 1.0, (2,), half=True, heads=2, order="legacy")
    yield from case(32, 130, 0.7, (2,), half=True, long=2)
    yield from case(8, 66, 0.5, (1,), all_keys=True)
    yield from case(32, 65, 0.5, (2,), half=True, all_keys=True)
    yield from case(32, 65, 0.5, (3,), half=True, all_keys=True)
    yield rest_case(130, 7)


def rest_case(N, count):
    """S alone: two tiles of blocks of queries, and three of keys, which the cases above are too short for."""
    def inputs(rng):
        lists = np.sort(rng.permuted(np.tile(np.arange(N), (N, 1)), axis=-1)[:, :count])
        return {"H": rng.standard_normal((1, 1, N, 8, 8)).astype(np.float16),
                "left": bits_left(lists)[None, None], "S": np.full((1, 1, N, 8, 8), np.nan, np.float16)}

    def run(a, version):
        launcher.sum_rest(a.H, a.left, a.S)
        return (a.S,)

    return Case("sla", inputs, run, (3,), HALF_TOLERANCE, f"float16, S alone, {N} blocks")
