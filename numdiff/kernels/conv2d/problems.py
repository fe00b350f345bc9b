"""Problems of convolutions, all passes: small ones for each kernel, and a UNet's.

Which tile a kernel has depends on the shape, and small shapes get few of the tiles. So most
problems of tensor cores are solved with a tile that is given.

SHAPES
    as in direct.py
SOURCE
    plain bookkeeping; operation/problem.py says what a problem is.
READ NEXT
    launcher.py, whose records have them.
"""

import functools

from ... import extensions
from ..operation import Problem, half, replaced, single
from . import mma, mma_halo, mma_halo_gradient
from .hopper import convolution, weight_gradient
from .hopper.convolution import hopper_convolution
from .hopper.weight_gradient_3x3 import hopper_weight_gradient_3x3

OTHERS = tuple(extensions.entries("conv2d"))  # versions of extensions
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, BACKWARD = (
    "forward",
    "input_gradient",
    "weight_gradient",
    "backward",
)
FLOAT32_TOLERANCE = 1e-5  # of a weight gradient in float32


def problem_of(
    of, label, x, n, kernel, *versions, stride=1, array=single, biased=True, addends=False, **more
):
    """A problem of a pass. x: the shape (B, H, W, C); n: output channels; biased: with a bias or
    its gradient; addends: with a channel's vector and a residual"""
    (b, h, w, c), image = x, array(*x)
    result, weight = array(b, -(-h // stride), -(-w // stride), n), array(n, kernel, kernel, c)
    dweight, vector = single(n, kernel, kernel, c), single(n) if biased else None
    arguments = {
        FORWARD: {
            "x": image,
            "weight": weight,
            "bias": vector,
            **({"channel": single(b, n), "residual": result} if addends else {}),
        },
        INPUT_GRADIENT: {
            "dy": result,
            "weight": weight,
            "x": image,
            **({"residual": image} if addends else {}),
        },
        WEIGHT_GRADIENT: {"dy": result, "x": image, "dweight": dweight, "dbias": vector},
        BACKWARD: {"dy": result, "x": image, "weight": weight, "dweight": dweight, "dbias": vector},
    }[of]
    return Problem(label, versions=versions, stride=stride, **arguments, **more)


half_problem = functools.partial(problem_of, array=half)


def _given(module, function, **choice):
    """A context in which a module calls this function with a tile that is given."""
    return functools.partial(
        replaced, module.__name__, **{function.__name__: functools.partial(function, **choice)}
    )


# float32 ------------------------------------------------------------------------------------------


def _of_float32(of):
    """Each version, forward and backward."""
    ladder, backward = ("direct", "im2col", "implicit-gemm", *OTHERS), of == BACKWARD
    for label, (side, c, n, kernel, stride), versions, fast in (
        ("3×3", (3, 8, 20, 3, 1), ladder, False),
        ("wide", (3, 8, 68, 3, 1), ladder[2:3], True),
        ("odd", (4, 3, 19, 3, 1), ladder, ladder[1:2] if backward else (*ladder[:2], *OTHERS)),
        ("stride 2", (5, 4, 8, 3, 2), ladder, (ladder[0], ladder[2])),
        ("wide, stride 2", (4, 8, 20, 3, 2), ladder[2:3], False),
        ("5×5, stride 2", (4, 4, 8, 5, 2), ladder[3:], False),
        ("in parts", (2, 16, 4, 3, 1), ladder[3:], not backward),
        ("1×1, stride 2", (3, 4, 8, 1, 2), ladder[3:], backward),
        ("1×1, wide", (3, 8, 68, 1, 1), ladder[3:], False),
        ("to 3 channels", (4, 8, 3, 3, 1), ladder[2:3], not backward),
        ("1×1", (3, 8, 12, 1, 1), (), backward),
    ):
        if versions or label == "1×1":  # which is a linear layer
            yield problem_of(
                of, label, (1, side, side, c), n, kernel, *versions, stride=stride, fast=fast
            )


def _more_of_float32(of):
    """Steps of three, every addend, a residual of dx, the channels' gradient; gradients that are
    written."""
    leaping = "direct", "implicit-gemm", *OTHERS
    yield problem_of(of, "stride 3", (1, 7, 7, 4), 8, 3, *leaping, stride=3, fast=False)
    lines = {"fast": False, "biased": False}
    yield problem_of(of, "several images", (3, 2, 9, 4), 4, 3, *leaping, "im2col", **lines)
    if of == FORWARD:
        for label, versions in ("all addends", ("direct", *OTHERS)), ("chosen, all addends", ()):
            yield problem_of(of, label, (1, 3, 4, 4), 12, 3, *versions, addends=True)
        return
    x = 2, 4, 5, 8
    for kernel, stride in (1, 1), (3, 1), (3, 2):
        more = {"stride": stride, "residual": single(*x), "fast": kernel == 1}
        yield problem_of(of, f"residual, {kernel}, {stride}", x, 12, kernel, **more)
    for kernel, n in (1, 4), (3, 12):
        label = f"channel's, {kernel} × {kernel}"
        yield problem_of(of, label, (3, 2, 3, 8), n, kernel, need_channel=True, fast=kernel == 3)


def _written(of, array):
    """A weight's gradient that is written, whatever was there."""
    float32 = array is single
    versions = (
        ("direct", "im2col", "implicit-gemm", *OTHERS)
        if float32
        else ("direct", "mma", "hopper-columns", "hopper")
    )
    yield problem_of(
        of,
        f"{'' if float32 else 'float16, '}written",
        (1, 5, 4, 4 if float32 else 8),
        8,
        3,
        *versions,
        array=array,
        biased=False,
        need_dx=False,
        accumulate=False,
        fast=("im2col", *OTHERS) if float32 else ("hopper",),
        **({} if float32 else {"tolerance": FLOAT32_TOLERANCE}),
    )
    if not float32:
        yield half_problem(
            of,
            "float16, written, 3 → 64",
            (1, 4, 4, 3),
            64,
            3,
            "narrow",
            biased=False,
            need_dx=False,
            accumulate=False,
            fast=False,
            tolerance=2e-5,
        )


def _of_switches(of):
    """Those of extensions that a switch of the device chooses."""
    modules = extensions.available("conv2d_switched").values()
    return [problem for module in modules for problem in module.problems(of)]


# 16 bits ------------------------------------------------------------------------------------------


def _of_narrow_and_mma(of):
    """By mma.sync with strides, and with few channels on one side: from 3, from 5, to 3; by the
    direct kernel."""
    for version, (h, w, c, n, kernel, stride), words in (
        ("mma", (3, 2, 8, 8, 1, 2), ""),
        ("mma", (5, 2, 8, 8, 3, 2), ", 3 × 3"),
        ("mma", (5, 3, 40, 8, 1, 2), ""),
        ("narrow", (2, 3, 3, 8, 3, 1), ""),
        ("narrow", (2, 2, 5, 8, 3, 1), ""),
        ("narrow", (3, 2, 8, 3, 3, 1), ""),
        ("narrow", (3, 5, 16, 3, 3, 1), ""),
        ("direct", (3, 2, 3, 8, 3, 2), ", direct"),
    ):
        first = h < 5 and c < 16 and not words
        more = {"need_dx": version != "narrow" or n == 3} if of == BACKWARD else {}
        if not first:
            more |= {"need_channel": True} if of == BACKWARD else {"addends": version != "narrow"}
        yield half_problem(
            of,
            f"float16, {c} → {n}{words}",
            (1 if first else 2, h, w, c),
            n,
            kernel,
            version,
            stride=stride,
            bfloat16="exhaustive" if first and c != 5 else False,
            fast=(of == BACKWARD or c != 3) if first else words == ", 3 × 3",
            **more,
        )


# (BN, SUB, taps a stage, kernel)
HOPPER_TILES = [(64, 1, 1, 3), *((*key, key[2]) for key in convolution.KEYS)]
QUICK_TILES = {FORWARD: [(64, 2, 3, 3)], INPUT_GRADIENT: [(64, 1, 1, 3), (128, 1, 3, 3)]}


def _of_hopper(of):
    """Each tile; of one tap, where they can, as nine take long."""
    for bn, sub, taps, kernel in HOPPER_TILES:
        yield half_problem(
            of,
            f"float16, tile {(bn, sub)}, {kernel} × {kernel}, {taps} at once",
            (1, 2, 3, 8),
            8,
            kernel,
            "hopper",
            biased=False,
            bfloat16="exhaustive" if (bn, sub, kernel) == (32, 1, 1) else False,
            fast=(bn, sub, taps, kernel) in QUICK_TILES[of],
            within=_given(convolution, hopper_convolution, only=(bn, sub), taps_per_stage=taps),
        )


def _of_hopper_several_tiles(of):
    """More than one tile, block of channels and image, with every addend."""
    for bn, sub in (64, 2), (96, 1):
        whole = {"x": (1, 11, 10, 72), "n": 40}
        for version in "hopper", "hopper-columns":
            yield half_problem(
                of,
                f"float16, {version}, tile {(bn, sub)}, several tiles",
                whole["x"],
                whole["n"],
                3,
                version,
                addends=True,
                biased=False,
                fast=version == "hopper" and (bn, sub) == ((96, 1), (64, 2))[of == INPUT_GRADIENT],
                once=True,
                tolerance=2e-3,
                within=_given(convolution, hopper_convolution, only=(bn, sub)),
            )


def _of_statistics():
    """Rows of either width, tiles of either size."""
    for bn, sub in (32, 1), (64, 2), (96, 2), (128, 1):
        n = bn if sub == 2 else bn + 8  # a second tile, of which little exists
        width = 16 if bn == 32 else 8
        yield half_problem(
            FORWARD,
            f"float16, tile {(bn, sub)}, statistics",
            (1, 8, width, 8),
            n,
            1,
            "hopper",
            addends=True,
            bfloat16="exhaustive" if bn == 32 else False,
            fast=(bn, sub) in ((32, 1), (96, 2)),
            statistics=single(1, width // 8, 2, n // 2),
            within=_given(convolution, hopper_convolution, only=(bn, sub), taps_per_stage=1),
        )


def _of_hopper_weight_gradients():
    """Each tile of 3 × 3 taps, alone, in parts and in clusters; the kernel for others."""
    for width, parts, pixels, blocks in (
        (64, 2, 64, 2),
        (32, 4, 64, 2),
        (16, 5, 64, 5),
        (64, 1, 128, 1),
        (32, 1, 128, 1),
        (16, 2, 128, 1),
        *((n, 1, 256, 1) for n in (64, 32, 16)),
    ):
        # the share of every block has some; of two, each of its vectors
        channels = {5: 16, 2: width}.get(blocks, 8)
        yield half_problem(
            WEIGHT_GRADIENT,
            f"float16, tile of {width}, {pixels} pixels, {parts} parts, {blocks} blocks a cluster",
            (1, 2, 3 if parts == 1 else 33, channels),
            8,
            3,
            "hopper",
            need_channel=True,
            tolerance=FLOAT32_TOLERANCE,
            bfloat16="exhaustive" if (width, pixels) == (16, 128) else False,
            fast=(width, pixels) in ((32, 64), (64, 128), (32, 256)),
            within=_given(
                weight_gradient, hopper_weight_gradient_3x3, only=(width, parts, pixels, blocks)
            ),
        )
    yield half_problem(
        WEIGHT_GRADIENT,
        "float16, any kernel",
        (1, 2, 3, 8),
        8,
        1,
        "hopper",
        bfloat16=True,
        tolerance=FLOAT32_TOLERANCE,
    )


def _of_hopper_several_images():
    """Chunks of several images, rows of tiles and channels, in parts and clusters; v5's boxes."""
    for only, version in (
        ((32, 2, 64, 1), "hopper-columns"),
        ((16, 2, 64, 2), "hopper"),
        ((64, 1, None), "hopper"),
        ((16, 1, 128), "hopper"),
        ((32, 4, 64, 2), "hopper"),
    ):
        yield half_problem(
            WEIGHT_GRADIENT,
            f"float16, {version}, plan {only}, several images",
            (3, 3, 9, 8),
            16,
            3,
            version,
            need_channel=only[0] != 32,
            tolerance=FLOAT32_TOLERANCE,
            fast=only[:3] == (32, 2, 64),
            within=_given(weight_gradient, hopper_weight_gradient_3x3, only=only),
        )


def _of_mma_halo(of):
    """By mma.sync, 3 × 3 taps of stride 1 in every tile."""
    for seg, frags, flipped in mma_halo.KERNELS:
        if flipped == (of == INPUT_GRADIENT):
            yield half_problem(
                of,
                f"float16, mma, segments of {seg}, {64 * frags} pixels",
                (1, 2, 3, 8),
                8,
                3,
                "mma",
                addends=of == FORWARD,
                fast=(seg, frags) == (8, 2),
                within=_given(mma, mma_halo.halo_forward, only=(seg, frags)),
            )


def _of_mma_halo_weight_gradients():
    for seg, stages, sums in mma_halo_gradient.KERNELS:
        yield half_problem(
            WEIGHT_GRADIENT,
            f"float16, mma, segments of {seg}, {stages} stages{', and sums' * sums}",
            (1, 2, 3, 8),
            8,
            3,
            "mma",
            biased=sums,
            fast=(seg, stages) == (8, 2) and sums,
            within=_given(mma, mma_halo_gradient.halo_weight_gradient, only=(seg, stages)),
        )


# A model's ----------------------------------------------------------------------------------------

B, SIDE, C = 32, 64, 64  # the UNet's batch, image and channels


def measured(of, shape, n, *versions, kernel=3, array=half, **more):
    found = problem_of(
        of, None, shape, n, kernel, *versions, array=array, biased=False, measured=True, **more
    )
    found.versions = versions or None  # all that fit
    return found


def of_forward():
    """[Problem] of the forward."""
    wide, thin = (B, SIDE, SIDE, C), (B, SIDE, SIDE, 3)
    return [
        *_of_float32(FORWARD),
        *_more_of_float32(FORWARD),
        *_of_switches(FORWARD),
        *_of_narrow_and_mma(FORWARD),
        *_of_hopper(FORWARD),
        *_of_hopper_several_tiles(FORWARD),
        *_of_statistics(),
        *_of_mma_halo(FORWARD),
        measured(FORWARD, wide, C, "direct", "im2col", "implicit-gemm", *OTHERS, array=single),
        measured(FORWARD, wide, 3, "implicit-gemm", array=single),
        measured(FORWARD, wide, C),
        measured(FORWARD, thin, C, "narrow"),
        measured(FORWARD, wide, 3, "narrow"),
        measured(FORWARD, (B, 32, 32, 256), 256, "hopper"),
    ]


def of_input_gradient():
    """[Problem] of dx."""
    wide = B, SIDE, SIDE, C
    return [
        *_of_switches(INPUT_GRADIENT),
        *_of_hopper(INPUT_GRADIENT),
        *_of_hopper_several_tiles(INPUT_GRADIENT),
        *_of_mma_halo(INPUT_GRADIENT),
        half_problem(
            INPUT_GRADIENT,
            "float16, with a residual",
            (1, 3, 9, 8),
            8,
            3,
            "hopper-columns",
            "hopper",
            addends=True,
            fast=("hopper",),
        ),
        measured(INPUT_GRADIENT, wide, C, "im2col", "implicit-gemm", *OTHERS, array=single),
        measured(INPUT_GRADIENT, wide, C, "direct", "mma", "hopper-columns", "hopper"),
        measured(INPUT_GRADIENT, wide, 3, "narrow"),
    ]


def of_weight_gradient():
    """[Problem] of dweight and dbias."""
    wide, thin = (B, SIDE, SIDE, C), (B, SIDE, SIDE, 3)
    return [
        *_of_switches(WEIGHT_GRADIENT),
        *_of_hopper_weight_gradients(),
        *_of_hopper_several_images(),
        *_of_mma_halo_weight_gradients(),
        measured(WEIGHT_GRADIENT, wide, C, "im2col", "implicit-gemm", *OTHERS, array=single),
        measured(WEIGHT_GRADIENT, thin, C, "implicit-gemm", array=single),
        measured(WEIGHT_GRADIENT, wide, C, "direct", "mma", "hopper-columns", "hopper"),
        measured(
            WEIGHT_GRADIENT,
            (B, 32, 32, 128),
            128,
            "hopper-columns",
            "hopper",
            kernel=1,
            note="1 × 1 taps",
        ),
        measured(WEIGHT_GRADIENT, wide, 3, "narrow"),
    ]


def of_backward():
    """[Problem] of all gradients."""
    return [
        *_of_float32(BACKWARD),
        *_more_of_float32(BACKWARD),
        *_of_narrow_and_mma(BACKWARD),
        *_written(BACKWARD, single),
        *_written(BACKWARD, half),
    ]
