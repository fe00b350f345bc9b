"""Matmul in E4M3, floats of 8 bits: by mma.sync, and as the top rung by Hopper's wgmma, with twice
float16's peak.

MATHEMATICS
    C = scale_a · scale_b · A·Bᵀ + bias + residual, or what the epilogues of kernels/matmul/hopper/ make of the product:
    GELU, SwiGLU, their derivatives. A and B are E4M3 (numdiff/float8.py), each with a scale: A
    stands for scale_a · A.
SHAPES
    a (M, K), b (N, K) uint8, the bits; scale_a, scale_b float32 (1,); bias (N,) float32; residual,
    results (M, N) float16; a weight's gradient (M, N) float32
WHAT IS NEW IN HOPPER'S VERSION, AND WHY IT PAYS
    Half the bytes, twice the products: wgmma m64nNk32 adds up 32 of k in the time in which
        float16's adds up 16, and a row of 128 bytes is 128 of k. So a stage of the pipeline, its
        tensor maps, descriptors and barriers are those of kernels/matmul/hopper/, byte for byte: the kernels here
        are its text with two other constants, FP8 and PROMOTED.
    Both operands along k: an 8-bit wgmma transposes nothing. So dx = dy·W needs a copy of Wᵀ
        (weights.py writes both), and a weight's gradient, whose sum runs over rows, dyᵀ and xᵀ
        (both.py). Its sum is split over blocks as kernels/matmul/hopper/work.py splits, in float32.
    PROMOTION: Hopper's tensor cores keep about 14 bits of a sum of E4M3 products, too few for a K
        of thousands. Every 128 of k, one stage, the accumulators start again from zero, and a
        float32 addition takes them into sums of full precision. The additions of one consumer
        overlap the products of the other.
        `promoted=False` leaves the sum to the tensor cores, as in kernels/matmul/hopper/.
    SCALES are on the device and are read by the kernel: the host knows none, so a training step can
    be replayed.
        They multiply the sums before the epilogue, which therefore is float16's.
WHAT REMAINS
    With promotion a thread holds two sets of accumulators, so a tile has at most 192 columns, and
    the L2 cache, from which 128 + BN rows of 128 bytes come for each stage, limits the kernel
    sooner than float16's. Blocks of a cluster that share what they fetch (PAIRS in
    kernels/matmul/hopper/producer.py) would help.
VERSIONS
    v1 mma: mma.sync m16n8k32, for capability 8.9, 10.0 and 12.0 (mma.py); not timed yet.
    v2 hopper: wgmma and TMA, in tiles of 128 × 64, 128, 192 and, without promotion, 256.
LAUNCH
    hopper: as kernels/matmul/hopper/kernel.py: grid min(tiles, multiprocessors); 384 threads; its shared memory and
    registers
NEEDS
    sm_89, or sm_90a; K a multiple of 16, because copies take 16 bytes of a row, N one of 8
DETERMINISM
    each output is summed in the order of k by one warpgroup.
SOURCE
    Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv:2209.05433; DeepSeek-AI 2024,
    "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 3.3.2, on promotion; PTX ISA, section
    9.7.15.
READ NEXT
    quantise.py, which makes A, B and their scales; mma.py.
"""

from typing import NamedTuple

import numpy as np

from ...device import empty, is_device, launch
from ...device.batch_invariance import nominal_extent
from ...device.limits import MULTIPROCESSORS
from ...device.requires import supports
from ...device.specialise import Variants
from ...device.tensor_map import tensor_map
from ...errors import NumdiffError
from ...float8 import numbers_of
from ...kernels.elementwise import gelu_backward, gelu_forward
from ...kernels.matmul.choice import HalfProduct, choose_half
from ...kernels.matmul.hopper.epilogue import SWIGLU_WIDTHS
from ...kernels.matmul.hopper.kernel import kernel_for
from ...kernels.matmul.hopper.launcher import map_of_halves
from ...kernels.matmul.hopper.layout import (
    BK,
    BM,
    BOX,
    THREADS,
    GemmEpilogue,
    GemmMaps,
    GemmPair,
    GemmWork,
    shared_bytes,
)
from ...kernels.matmul.hopper.producer import HALVES, MATRICES
from ...kernels.matmul.hopper.work import schedule
from ...kernels.matmul.product import ProductFused
from ...kernels.matmul.reference import matmul_forward_cost
from ...kernels.matmul.split_half import add_partials, unused
from ...kernels.operation import Version, half, operation, single
from ...kernels.transformer.swiglu import swiglu_backward, swiglu_forward
from . import problems
from .epilogues import EPILOGUES
from .mma import MMA_KERNELS, launch_mma_fp8
from .quantise import quantise_forward

STEP = 128  # of k in a stage: 128 bytes, the widest swizzle; and between two promotions
WIDTHS = {True: (64, 128, 192), False: (64, 128, 192, 256)}  # of a tile, with and without promotion
ACTIVATIONS = "", "gelu", "gelu_gradient", "swiglu", "swiglu_gradient"
NS_OF_ROW, NS_OF_COLUMN = (
    2.08,
    2.5,
)  # as estimated in kernels/matmul/choice.py: what a stage brings, an epilogue


class Fp8Arrays(NamedTuple):
    """`Arrays` of kernels/matmul/hopper/layout.py, with the scales of A and B, float32 (1,) each."""

    c: object
    bias: object
    residual: object
    row_sums: object
    scale_a: object
    scale_b: object


class EightArrays(NamedTuple):
    """`Fp8Arrays` where the result is bytes, too, with its scale and the place of its largest
    magnitudes."""

    c: object
    bias: object
    residual: object
    row_sums: object
    scale_a: object
    scale_b: object
    scale_c: object
    amax: object


def widths_of(promoted, activation=""):
    """Widths of a tile that there are."""
    return tuple(w for w in WIDTHS[promoted] if activation != "swiglu" or w in SWIGLU_WIDTHS)


FP8_KERNELS = Variants(
    [
        (BN, promoted, activation)
        for promoted in WIDTHS
        for activation in ACTIVATIONS
        for BN in widths_of(promoted, activation)
    ],
    lambda key: kernel_for(
        key[0],
        False,
        False,
        key[2] or "half",
        HALVES if key[2] == "swiglu" else MATRICES,
        fp8=True,
        promoted=key[1],
        module=__name__,
    ),
)
EIGHT_KERNELS = Variants(
    [
        (BN, promoted, activation)
        for promoted in WIDTHS
        for activation in ("gelu", "gelu_gradient")
        for BN in WIDTHS[promoted]
    ],
    lambda key: kernel_for(
        key[0],
        False,
        False,
        key[2] + "_eight",
        fp8=True,
        promoted=key[1],
        module=__name__,
        parts=EPILOGUES[key[2]],
    ),
)
FP8_GRADIENT_KERNELS = Variants(
    WIDTHS[True],
    lambda BN: kernel_for(BN, False, False, "float", fp8=True, promoted=True, module=__name__),
)


def choose_width(M, N, K, multiprocessors, promoted, activation):
    """The width of a tile with the lowest estimate."""

    def estimate(width):
        columns = width // 2 if activation == "swiglu" else width
        rounds = -(-(-(-M // BM) * -(-N // columns)) // multiprocessors)
        return rounds * (-(-K // STEP) * NS_OF_ROW * (BM + width) + NS_OF_COLUMN * width)

    return min(widths_of(promoted, activation), key=estimate)


def choose_slices(M, N, K, multiprocessors):
    """(width of a tile, slices of K) with the lowest estimate for a float32 result: a stage takes
    float16's time."""
    product = HalfProduct(1, M, N, K * BK // STEP, nbytes=4)
    (_, width), slices, _ = choose_half(6, product, True, multiprocessors, WIDTHS[True])
    return width, slices


# one ladder for all operations of this file
VERSIONS = [Version("mma", MMA_KERNELS, measured=False), Version("hopper", FP8_KERNELS)]

# References ---------------------------------------------------------------------------------------


def product_reference(a, b, scale_a, scale_b):
    """float32 (M, N): products of what the bytes stand for."""
    c = numbers_of(a) @ numbers_of(b).T
    c *= scale_a[0] * scale_b[0]
    return c


def matmul_fp8_forward_reference(a, b, scale_a, scale_b, bias=None, residual=None, promoted=True):
    c = product_reference(a, b, scale_a, scale_b)
    if bias is not None:
        c += bias
    return (c if residual is None else c + residual).astype(np.float16)


def _rounded(x, into):
    """x as float16, or as `quantise_forward` gives it."""
    x = x.astype(np.float16, copy=False)
    return x if into is None else quantise_forward(x, *into)


def matmul_fp8_gelu_forward_reference(
    a, b, scale_a, scale_b, bias, keeps_u=True, promoted=True, into=None
):
    u = matmul_fp8_forward_reference(a, b, scale_a, scale_b, bias)
    return u, _rounded(gelu_forward(u), into)


def matmul_fp8_gelu_backward_reference(a, b, scale_a, scale_b, u, promoted=True, into=None):
    return _rounded(gelu_backward(matmul_fp8_forward_reference(a, b, scale_a, scale_b), u), into)


def matmul_fp8_swiglu_forward_reference(
    a, b, scale_a, scale_b, bias=None, keeps_u=True, promoted=True
):
    u = matmul_fp8_forward_reference(a, b, scale_a, scale_b, bias)
    return u, swiglu_forward(u)


def matmul_fp8_swiglu_backward_reference(a, b, scale_a, scale_b, u, promoted=True):
    return swiglu_backward(matmul_fp8_forward_reference(a, b, scale_a, scale_b), u)


def matmul_fp8_gradient_reference(a, b, scale_a, scale_b, out, accumulate=True):
    found = product_reference(a, b, scale_a, scale_b)
    out[...] = out + found if accumulate else found


# Costs --------------------------------------------------------------------------------------------


def matmul_fp8_forward_cost(M, N, K):
    """(bytes, FLOPs): both operands read, a byte each, the float16 result written."""
    return M * K + N * K + 2 * M * N, matmul_forward_cost(1, M, N, K)[1]


def matmul_fp8_gradient_cost(M, N, K, accumulate=True):
    """As `matmul_fp8_forward_cost`, of a float32 result, which is read, too, where it is added to."""
    return M * K + N * K + (8 if accumulate else 4) * M * N, matmul_forward_cost(1, M, N, K)[1]


def matmul_fp8_gelu_forward_cost(M, N, K):
    """As `matmul_fp8_forward_cost`, with a second result; of the backward, with u that comes in."""
    moved, flops = matmul_fp8_forward_cost(M, N, K)
    return moved + 2 * M * N, flops


def matmul_fp8_swiglu_forward_cost(M, N, K):
    """N: rows of b. As above; the second result has half as many columns."""
    moved, flops = matmul_fp8_forward_cost(M, N, K)
    return moved + M * N, flops


# Launcher -----------------------------------------------------------------------------------------


def fp8_supports(device):
    """Whether the device of an array, a backend or a capability multiplies E4M3; NumPy does, by the
    reference."""
    return isinstance(device, np.ndarray) or device is None or supports(device, MMA_KERNELS)


def _check(a, b, bias=None, halves=1):
    """halves: 2 where the rows of b are those of both halves of u"""
    K, N = a.shape[1], len(b) // halves
    if b.shape != (halves * N, K) or a.dtype != np.uint8 or b.dtype != np.uint8:
        raise ValueError(
            f"a {a.dtype} {a.shape} and b {b.dtype} {b.shape} must be bytes, (M, K) and (N, K)"
        )
    if bias is not None and tuple(bias.shape) != (len(b),):
        raise ValueError(f"bias has shape {bias.shape}, the product needs ({len(b)},)")
    if not is_device(a):
        return
    if not fp8_supports(a):
        raise NumdiffError(
            "products of E4M3 need a GPU of compute capability 8.9 or later: use float16 on others."
        )
    if K % 16 or N % 8:
        raise ValueError(
            f"16 bytes are moved at a time: K {K} must be a multiple of 16, and N {N} one of 8"
        )


def _check_forward(a, b, bias, residual):
    _check(a, b, bias)
    if residual is not None and tuple(residual.shape) != (len(a), len(b)):
        raise ValueError(f"residual has shape {residual.shape}, the product has {(len(a), len(b))}")


def _check_gradient(a, b, out):
    _check(a, b)
    if tuple(out.shape) != (len(a), len(b)) or is_device(out) and out.dtype != np.float32:
        raise ValueError(f"out is {out.dtype} {out.shape}, the product float32 {(len(a), len(b))}")


def _launch(version, a, b, c, scales, promoted, fused=ProductFused(), into=None):  # noqa: B008 - never changed
    """A product with what is fused to it, by the `Version`.

    into: (scale, amax) of what GELU or its derivative gives, where that is bytes
    """
    if version.name == "hopper":
        _launch_hopper(a, b, c, scales, promoted, fused, into)
    else:
        launch_mma_fp8(a, b, c, scales, promoted, fused, into, nominal_extent(len(a)))


def _launch_hopper(a, b, c, scales, promoted, fused, into):
    """As `launch_hopper`, of one product and without slices.

    into: (scale, amax) of what GELU or its derivative gives, where that is bytes
    """
    (M, K), N, activation, other = a.shape, len(b) // fused.halves, fused.activation, fused.other
    bias, residual, keeps_u = fused.bias, fused.residual, fused.keeps_u
    multiprocessors = getattr(a.backend, "multiprocessors", MULTIPROCESSORS)
    width = choose_width(nominal_extent(M), N, K, multiprocessors, promoted, activation)
    columns = width // 2 if activation == "swiglu" else width
    map_a, map_b = tensor_map(a, (STEP, BM)), tensor_map(b, (STEP, columns))
    map_d = map_a if other is None else map_of_result(other)
    if activation == "swiglu_gradient":
        map_c, map_d = map_of_halves(c), map_of_halves(other)
    else:
        rows = 16 if activation == "gelu_gradient" else BOX  # of bytes
        map_c = map_of_halves(c) if activation == "swiglu" and keeps_u else map_of_result(c, rows)
    nothing, tiles_m, tiles_n, steps = unused(a), -(-M // BM), -(-N // columns), -(-K // STEP)
    written = int(
        keeps_u and not activation.endswith("gradient") if activation else residual is not None
    )
    arrays = (
        nothing,
        nothing if bias is None else bias,
        nothing if residual is None else residual,
        nothing,
        *scales,
    )
    arrays = Fp8Arrays(*arrays) if into is None else EightArrays(*arrays, *into)
    kernels = FP8_KERNELS if into is None else EIGHT_KERNELS
    launch(
        kernels[width, promoted, activation],
        min(tiles_m * tiles_n, multiprocessors),
        THREADS,
        GemmMaps(map_a, map_b, map_c, map_d, map_a),
        arrays,
        GemmWork(
            M, N, GemmPair(max(N, K) + width), steps, steps, tiles_m, tiles_n, tiles_m * tiles_n, 0
        ),
        GemmEpilogue(1.0, int(bias is not None), written, 0, 0, 0.0),
        shared=shared_bytes(width, activation == "swiglu_gradient"),
    )


def map_of_result(x, rows=BOX):
    """The tensor map of a result: tiles of 64 columns and 64 rows, of bytes `rows` rows."""
    return tensor_map(x, (BOX, rows), 64) if x.dtype == np.uint8 else tensor_map(x, (BOX, BOX))


# Operations ---------------------------------------------------------------------------------------


@operation(
    reference=matmul_fp8_forward_reference,
    cost=matmul_fp8_forward_cost,
    versions=VERSIONS,
    check=_check_forward,
    problems=lambda: [*problems.products(), *problems.squares()],
)
def matmul_fp8_forward(
    a, b, scale_a, scale_b, bias=None, residual=None, promoted=True, version=None
):
    """scale_a · scale_b · a·bᵀ + bias + residual as a new float16 array (M, N).

    promoted: add up in float32 every 128 of k (mma: every 32); False leaves the sum to the tensor cores
    """
    M, N = len(a), len(b)
    c = empty((M, N), np.float16, like=a)
    _launch(version, a, b, c, (scale_a, scale_b), promoted, ProductFused(bias, residual))
    return c


@operation(
    reference=matmul_fp8_gelu_forward_reference,
    cost=matmul_fp8_gelu_forward_cost,
    versions=VERSIONS,
    check=lambda a, b, bias: _check(a, b, bias),
    problems=lambda: [
        *problems.products("gelu"),
        *problems.roundings(matmul_fp8_gelu_forward, "gelu"),
        *problems.layers(bias=single(4 * problems.D)),
    ],
)
def matmul_fp8_gelu_forward(
    a, b, scale_a, scale_b, bias, keeps_u=True, promoted=True, into=None, version=None
):
    """(u, GELU(u)) as new float16 arrays, u = scale_a · scale_b · a·bᵀ + bias.

    keeps_u: False if no backward needs u, which is then None
    into: (scale, amax) as of `quantise_forward`, which GELU(u) then has gone through; N is a
    multiple of 16
    """
    M, N = len(a), len(b)
    y = empty((M, N), np.float16 if into is None else np.uint8, like=a)
    u = empty((M, N), np.float16, like=a) if keeps_u else None
    fused = ProductFused(bias, activation="gelu", other=y, keeps_u=keeps_u)
    _launch(version, a, b, y if u is None else u, (scale_a, scale_b), promoted, fused, into)
    return u, y


@operation(
    reference=matmul_fp8_gelu_backward_reference,
    cost=matmul_fp8_gelu_forward_cost,
    versions=VERSIONS,
    check=lambda a, b: _check(a, b),
    problems=lambda: [
        *problems.products("gelu_gradient"),
        *problems.roundings(matmul_fp8_gelu_backward, "gelu_gradient"),
        *problems.layers(u=half(problems.ROWS, 4 * problems.D)),
    ],
)
def matmul_fp8_gelu_backward(a, b, scale_a, scale_b, u, promoted=True, into=None, version=None):
    """(scale_a · scale_b · a·bᵀ) ∘ GELU'(u (M, N)) as a new float16 array; into as above."""
    M, N = len(a), len(b)
    c = empty((M, N), np.float16 if into is None else np.uint8, like=a)
    fused = ProductFused(activation="gelu_gradient", other=u)
    _launch(version, a, b, c, (scale_a, scale_b), promoted, fused, into)
    return c


@operation(
    reference=matmul_fp8_swiglu_forward_reference,
    cost=matmul_fp8_swiglu_forward_cost,
    versions=VERSIONS,
    check=lambda a, b, bias: _check(a, b, bias, 2),
    problems=lambda: problems.products("swiglu"),
)
def matmul_fp8_swiglu_forward(
    a, b, scale_a, scale_b, bias=None, keeps_u=True, promoted=True, version=None
):
    """(u (M, 2 · H), SwiGLU(u) (M, H)) as new float16 arrays, u = scale_a · scale_b · a·bᵀ + bias,
    b (2 · H, K). By mma.sync SwiGLU is a separate pass."""
    if version.name == "mma":
        u = matmul_fp8_forward(
            a, b, scale_a, scale_b, bias, promoted=promoted, version=version.name
        )
        return u if keeps_u else None, swiglu_forward(u)
    M, H = len(a), len(b) // 2
    h, u = (
        empty((M, H), np.float16, like=a),
        empty((M, 2 * H), np.float16, like=a) if keeps_u else None,
    )
    fused = ProductFused(bias, activation="swiglu", other=h, keeps_u=keeps_u)
    _launch(version, a, b, h if u is None else u, (scale_a, scale_b), promoted, fused)
    return u, h


@operation(
    reference=matmul_fp8_swiglu_backward_reference,
    cost=matmul_fp8_swiglu_forward_cost,
    versions=VERSIONS,
    check=lambda a, b: _check(a, b),
    problems=lambda: problems.products("swiglu_gradient"),
)
def matmul_fp8_swiglu_backward(a, b, scale_a, scale_b, u, promoted=True, version=None):
    """du (M, 2 · H) as a new float16 array: SwiGLU's backward of dh = scale_a · scale_b · a·bᵀ (M,
    H) at u. By mma.sync SwiGLU's backward is a separate pass."""
    if version.name == "mma":
        dh = matmul_fp8_forward(a, b, scale_a, scale_b, promoted=promoted, version=version.name)
        return swiglu_backward(dh, u)
    M, H = len(a), len(b)
    du = empty((M, 2 * H), np.float16, like=a)
    fused = ProductFused(activation="swiglu_gradient", other=u)
    _launch(version, a, b, du, (scale_a, scale_b), promoted, fused)
    return du


@operation(
    reference=matmul_fp8_gradient_reference,
    cost=matmul_fp8_gradient_cost,
    versions=VERSIONS,
    check=_check_gradient,
    writes=("out",),
    problems=problems.gradients,
)
def matmul_fp8_gradient(a, b, scale_a, scale_b, out, accumulate=True, version=None):
    """out (M, N) float32 += scale_a · scale_b · a·bᵀ; a (M, K), b (N, K): dyᵀ and xᵀ of a layer
    whose weight's gradient this is. Always promoted, as the sum is over thousands of rows.

    accumulate: False: out is written, whatever it held
    """
    if version.name == "mma":
        fused = ProductFused(accumulate=accumulate)
        launch_mma_fp8(a, b, out, (scale_a, scale_b), True, fused, can_split=True)
        return
    (M, K), N = a.shape, len(b)
    multiprocessors = getattr(a.backend, "multiprocessors", MULTIPROCESSORS)
    width, slices = choose_slices(M, N, K, multiprocessors)
    tiles_m, tiles_n, steps = -(-M // BM), -(-N // width), -(-K // STEP)
    length, slices, alone = schedule(tiles_m * tiles_n, slices, steps, multiprocessors)
    units, nothing = slices * tiles_m * tiles_n, unused(a)
    target = out.reshape(-1) if slices == 1 else empty((slices * M * N,), np.float32, like=a)
    map_a = tensor_map(a, (STEP, BM))
    launch(
        FP8_GRADIENT_KERNELS[width],
        min(units, multiprocessors),
        THREADS,
        GemmMaps(map_a, tensor_map(b, (STEP, width)), map_a, map_a, map_a),
        Fp8Arrays(target, nothing, nothing, nothing, scale_a, scale_b),
        GemmWork(M, N, GemmPair(max(N, K) + width), steps, length, tiles_m, tiles_n, units, alone),
        GemmEpilogue(1.0, 0, 0, int(accumulate and slices == 1), 0, 0.0),
        shared=shared_bytes(width),
    )
    if slices > 1:
        add_partials(target, out, slices, nothing, 1.0, 0, accumulate)
