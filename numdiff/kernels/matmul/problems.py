"""Problems of matmul and of the products with what follows them in the same kernel: small ones for
each kernel.

The choice of a tile depends on the extents, and small ones get few of the tiles. So most problems
are solved with a tile that is given.

SHAPES
    as in reference.py, activations.py and linear/layer.py
SOURCE
    plain bookkeeping; operation/problem.py says what a problem is.
READ NEXT
    activations.py, whose records have them.
"""

import contextlib
import functools

import numpy as np

from ... import extensions
from ..operation import Problem, half, replaced, single
from ..operation.versions import at_most
from . import choice, mma, vectorised
from .hopper import kernel
from .hopper.layout import BK, BM, STAGES
from .mma_layout import TILES, TURING_STAGES
from .operands import Matrices

LAUNCHER = f"{__package__}.launcher"
RUNGS = {5: ("mma",), 6: ("hopper",)}


@contextlib.contextmanager
def with_tile(tile, rung, parts=1, pairs=False, stages=None):
    """Context: rung 5 or 6 has this tile, the sum over K in `parts` parts, and blocks alone or in
    pairs; stages: of rung 5, None for the device's."""
    before = choice.choose_half, choice.PAIRS, mma.stages_of
    choice.choose_half = lambda wanted, *given, **more: (
        before[0](wanted, *given, **more)
        if wanted != rung
        else (tile if rung == 5 else (BM, tile), parts, 0.0)
    )
    choice.PAIRS = pairs
    if stages:
        mma.stages_of = lambda *given: stages
    try:
        yield
    finally:
        choice.choose_half, choice.PAIRS, mma.stages_of = before


def in_tile(tile, rung, *more):
    """The arguments of a `Problem` that rung 5 or 6 solves with this tile; more: of `with_tile`."""
    return {
        "versions": RUNGS[rung],
        "within": functools.partial(with_tile, tile, rung, *more),
    }


def in_three_slices():
    """Context: a float32 product has tiles of 64 × 64, and its sum over K three slices."""
    return replaced(LAUNCHER, choose_tile=lambda *_: ((64, 64), 3))


# Float32 ------------------------------------------------------------------------------------------


def product(label, M, N, K, transpose_a=False, transpose_b=False, array=single, batch=(), **more):
    return Problem(
        label,
        a=array(*batch, *((K, M) if transpose_a else (M, K))),
        b=array(*batch, *((N, K) if transpose_b else (K, N))),
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        **more,
    )


def layout_of(transpose_a, transpose_b):
    """The operands as a label has them, such as a·bᵀ."""
    return f"{'a' + 'ᵀ' * transpose_a}·{'b' + 'ᵀ' * transpose_b}"


def _of_float32():
    """Rungs 1 to 4: each order of the operands that a model has, extents that are odd, each tile."""
    ladder = "naive", "tiled", "register-tiled", "vectorised"
    for transposes in ((False, False), (False, True), (True, False)):
        yield product(
            "".join("nt"[t] for t in transposes),
            20,
            24,
            12,
            *transposes,
            bias=single(24),
            alpha=0.5,
            versions=ladder,
            fast=transposes[0],
        )
    yield product("batch, odd", 5, 9, 7, batch=(3,), versions=ladder[:3], fast=False)
    # each tile is written over what others may still read
    yield product("several tiles of K", 20, 24, 40, versions=ladder[1:3])
    for tile in vectorised.TILES:
        yield product(
            f"tile {tile[0]}×{tile[1]}",
            68,
            68,
            8,
            versions=ladder[3:],
            fast=tile[0] == tile[1],
            within=functools.partial(replaced, vectorised.__name__, TILES=(tile,)),
        )
    for tile in vectorised.TILES:
        yield product(
            f"two tiles of {tile[0]}×{tile[1]}",
            tile[0] + 4,
            tile[1] + 8,
            12,
            True,
            True,
            versions=ladder[3:],
            fast=False,
            within=functools.partial(replaced, vectorised.__name__, TILES=(tile,)),
        )
    yield product("added", 5, 7, 3, out=single(5, 7), accumulate=True, versions=ladder[:3])
    yield product("both transposed", 12, 8, 20, True, True, versions=ladder, fast=False)
    # the last block of the sum over slices has few outputs
    yield product(
        "split K, odd",
        5,
        7,
        97,
        True,
        True,
        versions=ladder[2:3],
        within=in_three_slices,
    )
    yield product(
        "split K, added, both transposed",
        8,
        4,
        100,
        True,
        True,
        bias=single(4),
        alpha=0.5,
        out=single(8, 4),
        accumulate=True,
        versions=ladder[2:],
        within=in_three_slices,
    )
    yield product(
        "split K",
        8,
        4,
        44,
        versions=ladder[2:],
        within=in_three_slices,
    )


def _of_extensions():
    """Those of products of extensions (launcher.py)."""
    return [
        problem
        for module in extensions.available("matmul").values()
        for problem in module.problems()
    ]


# Float16 ------------------------------------------------------------------------------------------


def _in_tile(
    key,
    rung,
    M=8,
    N=8,
    K=8,
    parts=1,
    pairs=False,
    added=False,
    alpha=1.0,
    words="",
    stages=None,
    **more,
):
    """key: tile, whether a is contiguous along m and b along n, whether the result is float16."""
    tile, transpose_a, across, is_half = key
    label = f"float16, {layout_of(transpose_a, not across)}, tile {tile}, float{16 if is_half else 32}{words}"
    more |= {"residual": half(M, N)} if added else {}
    more |= {} if is_half else {"out_dtype": np.float32}
    more |= {"alpha": alpha} if alpha != 1 else {}
    return product(
        label,
        M,
        N,
        K,
        transpose_a,
        not across,
        half,
        **in_tile(tile, rung, parts, pairs, stages),
        **more,
    )


def _by_mma():
    """Rung 5: each kernel, with and without a residual; a sum over K in parts."""
    narrowest, K = min(TILES), 8 * TILES[64, 64].k + 8
    for tile, stages, transpose_a, across in dict.fromkeys(key[:4] for key in mma.KERNELS):
        key, is_first = (tile, transpose_a, across, True), not (transpose_a or across)
        if stages == TURING_STAGES:
            words, runs = ", Turing's stages", tile == narrowest and is_first
            more = {"stages": stages, "fast": False}
            yield _in_tile(key, 5, K=104, words=words, only_compiled=not runs, **more)
            words += ", with a residual"
            yield _in_tile(key, 5, added=True, words=words, only_compiled=True, **more)
            continue
        yield _in_tile(
            key,
            5,
            bfloat16=is_first and tile == narrowest,
            fast=False,
            only_compiled=not is_first and tile != max(TILES),
        )
        yield _in_tile(key, 5, added=True, words=", with a residual", fast=tile == narrowest)
    yield _in_tile(
        (narrowest, False, False, False),
        5,
        K=K,
        parts=9,
        alpha=0.5,
        words=", in 9 parts, times 0.5",
    )
    # one rounding, of the sum of all parts and a residual
    yield _in_tile(
        (narrowest, False, False, True), 5, K=200, parts=2, added=True, words=", in parts, residual"
    )


def _by_hopper():
    """Rung 6: each kernel; sums over K in parts, pairs of blocks, batches."""
    for key in kernel.KERNELS:
        tile, transpose_a, across, is_half = key
        is_first = not (transpose_a or across)
        yield _in_tile(
            key,
            6,
            bfloat16=is_first and tile == 64,
            fast=key == (128, False, True, True),
            only_compiled=not is_first and is_half == (tile in (64, 192)),
        )
    yield _in_tile(
        (64, False, False, False), 6, K=72, parts=2, alpha=0.5, words=", in parts, times 0.5"
    )
    for key in kernel.PAIR_KERNELS:
        yield _in_tile(key, 6, M=136, pairs=True, words=", pairs", fast=False)
    # stages are used again
    yield _in_tile(
        (256, False, False, True),
        6,
        M=264,
        K=4 * BK + 8,
        pairs=True,
        words=", pairs, three rows of tiles",
    )
    # each tile, each order
    run = (256, False, True), (192, True, False), (128, False, False), (64, True, True)
    for key in kernel.BATCH_KERNELS:
        tile, transpose_a, across = key
        yield product(
            f"float16, a batch, {layout_of(transpose_a, not across)}, tile {tile}",
            128,
            8,
            64,
            transpose_a,
            not across,
            half,
            (2,),
            residual=half(2, 128, 8),
            fast=tile == 64,
            only_compiled=key not in run,
            **in_tile(tile, 6),
        )


def _scores():
    """A batch with float32 results, in each tile."""
    for tile in kernel.BATCH_FLOAT_KERNELS:
        yield product(
            f"float16, a batch, float32, tile {tile}",
            128,
            8,
            64,
            False,
            True,
            half,
            (2,),
            out_dtype=np.float32,
            alpha=0.5,
            fast=False,
            only_compiled=tile != 64,
            **in_tile(tile, 6),
        )


def _several_tiles():
    """A tile and a bit of either extent, so that a block's edges and its second tile are seen."""
    for rung, tile in (*((5, tile) for tile in TILES), *((6, n) for n in STAGES)):
        rows, columns = tile if rung == 5 else (BM, tile)
        yield _in_tile(
            (tile, False, rung == 5, True),
            rung,
            rows + 8 if columns == 64 else 40,
            columns + 8,
            40,
            words=", two tiles",
            fast=columns == 64,
        )


def _every_addend():
    """alpha, bias and residual, rounded once; a result that is added to what there was."""
    for rung, tile in (2, None), (5, min(TILES)), (6, 64):
        words = f"float16, rung {rung}"
        more = {
            "transpose_b": True,
            "array": half,
            "bias": single(40),
            "alpha": 0.5,
            **(in_tile(tile, rung) if tile else {"versions": ("tiled",)}),
        }
        yield product(f"{words}, all addends", 24, 40, 24, residual=half(24, 40), **more)
        yield product(
            f"{words}, added", 24, 40, 24, out=single(24, 40), accumulate=True, fast=False, **more
        )
        if tile:
            more |= {**in_tile(tile, rung, 3), "fast": rung == 6}
            yield product(
                f"{words}, in parts, added",
                24,
                40,
                264,
                out=single(24, 40),
                accumulate=True,
                **more,
            )
    yield product(
        "float16, a batch, rung 5",
        24,
        16,
        24,
        False,
        True,
        half,
        (2, 1),
        residual=half(2, 1, 24, 16),
        **in_tile(min(TILES), 5),
    )


def _row_sums():
    """A weight's gradient with its bias's: sums of one part, two and nine."""
    # of two tiles of columns one sums
    yield product(
        "float16, row sums, rung 6, two tiles",
        24,
        72,
        136,
        True,
        False,
        half,
        row_sums=single(24),
        out=single(24, 72),
        accumulate=True,
        **in_tile(64, 6, 2),
    )
    yield product(
        "float16, row sums, tiled",
        24,
        16,
        40,
        True,
        False,
        half,
        row_sums=single(24),
        out_dtype=np.float32,
        versions=("tiled",),
    )
    for rung, tile, short, long in (
        (5, min(TILES), 200, 8 * TILES[64, 64].k + 8),
        (6, 64, 72, 8 * BK + 8),
    ):
        for parts, K in (1, long), (2, short), (9, long):
            yield product(
                f"float16, row sums, rung {rung}, {parts} parts",
                8,
                8,
                K,
                True,
                False,
                half,
                row_sums=single(8),
                out_dtype=np.float32,
                bfloat16=parts == 1,
                fast=parts == 7 - rung,
                **in_tile(tile, rung, parts),
            )


def matmul_problems():
    """[Problem] of matmul_forward: small ones, and square ones for the ladder."""
    square, large = (2048, 2048), (8192, 8192)
    return [
        *_of_float32(),
        *_of_extensions(),
        *_by_mma(),
        *_by_hopper(),
        *_scores(),
        *_several_tiles(),
        *_every_addend(),
        *_row_sums(),
        # extents that no tensor core takes
        product(
            "float16, a·bᵀ, K of 12",
            5,
            3,
            12,
            False,
            True,
            half,
            versions=("tiled",),
            bfloat16=True,
        ),
        Problem(
            a=single(*square),
            b=single(*square),
            measured=True,
            versions=("naive", "tiled", "register-tiled", "vectorised"),
        ),
        Problem(
            a=half(*large),
            b=half(*large),
            transpose_b=True,
            measured=True,
            versions=("mma", "hopper"),
        ),
    ]


def backward_problems():
    """[Problem] of matmul_backward."""
    return [
        Problem(
            dc=single(4, 6),
            a=single(5, 4),
            b=single(6, 5),
            transpose_a=True,
            transpose_b=True,
            versions=(),
        )
    ]


def strided_problems():
    """[Problem] of matmul_strided: every second head of packed arrays."""
    B, heads, T, HS = 2, 2, 8, 8
    row = 2 * heads * HS
    left = Matrices(single(B, T, row), row, 1, outer=T * row, inner=2 * HS)
    right = left._replace(array=single(B, T, row), start=HS).T
    target = Matrices(single(B, heads, T, T), T, 1, outer=heads * T * T, inner=T * T)
    return [
        Problem(
            a=left,
            b=right,
            c=target,
            M=T,
            N=T,
            K=HS,
            outer=B,
            inner=heads,
            versions=("naive", "tiled", "register-tiled", "vectorised"),
        )
    ]


# Epilogues ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _with_epilogue(tile, rung, pairs, stages):
    with at_most({"matmul": rung}), with_tile(tile, rung, 1, pairs, stages):
        yield


def _every_epilogue():
    """Yields (epilogue, tile, rung, whether blocks are in pairs, stages) of each kernel; stages None:
    the device's."""
    for rung, pairs, keys in (
        (6, False, kernel.ACTIVATION_KERNELS),
        (6, True, kernel.PAIR_ACTIVATION_KERNELS),
        (5, False, mma.ACTIVATION_KERNELS),
    ):
        for tile, *stages, epilogue in keys:
            if epilogue != "gate":
                yield epilogue, tile, rung, pairs, *(stages or [None])


# {epilogue: tiles} that the quick tests run: of each one of 64 columns or of several times 64, and
# of rung 5 one
QUICK = {
    "gelu": (128, (128, 128)),
    "gelu_gradient": (128, (128, 128)),
    "gelu_again_gradient": (192, (128, 128)),
    "swiglu": (256,),
    "swiglu_gradient": (128,),
    "layer_scale": (256,),
}


def activation_problems(name, backward=False):
    """[Problem] of matmul_{name}_forward, or of its backward."""
    return [
        _activation_problem(*key)
        for key in _every_epilogue()
        if key[0].removesuffix("_gradient").removesuffix("_again") == name
        and key[0].endswith("_gradient") == backward
    ]


def _activation_problem(epilogue, tile, rung, pairs, stages):
    name, again = epilogue.removesuffix("_gradient"), "_again" in epilogue
    # each 64 columns have an epilogue of their own; a tile of SwiGLU's forward has half as many of
    # each half
    width = tile if rung == 6 else tile[1]
    N = (width if epilogue != "swiglu" else width // 2) - 24
    columns = 2 * N if "swiglu" in name else N  # of u
    M = 136 if pairs else 8  # tiles below each other, of which the second has 8 rows
    u, vector = half(M, columns), single(columns)
    arguments = {"a": half(M, 8), "b": half(8, N) if epilogue != name else half(columns, 8)}
    if epilogue != name:
        arguments |= {"u": u, **({"again": True} if again else {})}
    else:
        arguments |= {
            "bias": vector,
            **({"scale": vector, "residual": u} if name == "layer_scale" else {}),
        }
    narrowest = not pairs and tile == (128 if epilogue == "swiglu" else 64)
    turing = ", Turing's stages" if stages == TURING_STAGES else ""
    return Problem(
        f"float16, {'again, ' * again}tile {tile}{', pairs' * pairs}{turing}",
        bfloat16=narrowest,
        fast=not (pairs or turing) and tile in QUICK[epilogue],
        only_compiled=bool(turing) or pairs and tile == 192 and "gelu" in name,
        within=functools.partial(_with_epilogue, tile, rung, pairs, stages),
        **arguments,
    )


def gate_problems():
    """[Problem] of linear_gate_forward."""
    return [
        Problem(
            f"float16, tile {tile}",
            x=half(1, 16, 8),
            weight=half(tile - 24, 8),
            bias=single(tile - 24),
            residual=half(1, 16, tile - 24),
            gate=half(1, tile - 24),
            fast=tile == 64,
            bfloat16=tile == 64,
            within=functools.partial(with_tile, tile, 6),
        )
        for tile, epilogue in kernel.ACTIVATION_KERNELS
        if epilogue == "gate"
    ]
