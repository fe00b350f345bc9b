"""Patchify and unpatchify: an image as a row of tokens, one a square of pixels, and back.

MATHEMATICS
    patchify      token[b, i·w + j, r, s, c] = x[b, i·p + r, j·p + s, c]      h × w patches of p × p pixels
    unpatchify    the same equation read from right to left
    Each is the other's backward: elements only change places. The linear layer that follows
    patchify is a convolution with kernel and stride p: its weight (D, p, p, C) is the matrix (D,
    p·p·C) without a copy.
SHAPES
    x (B, h·p, w·p, C) float32, channels last; tokens (B, h·w, p·p·C), elements in the order (row,
    column, channel)
VERSIONS
    v1 naive: one thread an element: finds its pixel and channel by divisions.
    v2 vectorised: one thread four elements: a patch's row, p·C elements, is contiguous in both
       arrays, so where p·C is a multiple of 4 sixteen bytes move at a time and the divisions are
       shared.
LAUNCH
    v1 ceil(n / 256) blocks of 256 threads; v2 a quarter of them. No shared memory.
DETERMINISM
    each element has one reader and one writer.
COST
    bytes: 8 n. Roof: memory bandwidth. Far smaller than anything that follows.
SOURCE
    Dosovitskiy et al. 2021, arXiv:2010.11929, section 3.1; the order of unpatchify's elements is
    DiT's (arXiv:2212.09748).
READ NEXT
    chunk.py, which splits channels instead of pixels.
"""

import numpy as np

from ...device import cuda, empty, launch, load4, store4
from ...device.common import divide
from ...errors import TooManyElementsError
from ..operation import Problem, half, lacks_multiple, naive_and_vectorised, operation, single

BLOCK = 256  # threads


# References ---------------------------------------------------------------------------------------


def patchify_forward_reference(x, patch):
    B, H, W, C = x.shape
    squares = x.reshape(B, H // patch, patch, W // patch, patch, C).transpose(0, 1, 3, 2, 4, 5)
    return np.ascontiguousarray(squares).reshape(B, -1, patch * patch * C)


def unpatchify_forward_reference(tokens, patch, height, width):
    B, C = len(tokens), tokens.shape[2] // (patch * patch)
    squares = tokens.reshape(B, height // patch, width // patch, patch, patch, C).transpose(
        0, 1, 3, 2, 4, 5
    )
    return np.ascontiguousarray(squares).reshape(B, height, width, C)


def patchify_backward_reference(dtokens, patch, height, width):
    return unpatchify_forward_reference(dtokens, patch, height, width)


def unpatchify_backward_reference(dx, patch):
    return patchify_forward_reference(dx, patch)


# Device function ----------------------------------------------------------------------------------


@cuda.jit(device=True)
def token_element(i, width, row, patch):
    """The index among the tokens of element i of an image array (its rows of `width` pixels, `row`
    = p·C elements of a patch's row)."""
    patches = width // patch  # in a row of patches
    line, rest = divide(i, patches * row)  # image row (of all images), element in it
    j, within = divide(rest, row)  # patch column, element of the patch's row
    band, r = divide(line, patch)  # row of patches, row of the patch
    return ((band * patches + j) * patch + r) * row + within


# v1: one thread an element ------------------------------------------------------------------------


@cuda.jit
def patchify_kernel_v1(x, tokens, width, row, patch):
    i = cuda.grid(1)
    if i < x.size:
        tokens[token_element(i, width, row, patch)] = x[i]


@cuda.jit
def unpatchify_kernel_v1(tokens, x, width, row, patch):
    i = cuda.grid(1)
    if i < x.size:
        x[i] = tokens[token_element(i, width, row, patch)]


# v2: four elements of a patch's row ---------------------------------------------------------------


@cuda.jit
def patchify_kernel_v2(x, tokens, width, row, patch):
    i = cuda.grid(1) * 4
    if i < x.size:
        x0, x1, x2, x3 = load4(x, i)
        store4(tokens, token_element(i, width, row, patch), x0, x1, x2, x3)


@cuda.jit
def unpatchify_kernel_v2(tokens, x, width, row, patch):
    i = cuda.grid(1) * 4
    if i < x.size:
        store4(x, i, *load4(tokens, token_element(i, width, row, patch)))


# Cost ---------------------------------------------------------------------------------------------


def patchify_forward_cost(n):
    """(bytes, FLOPs) for n elements; all four operations cost the same."""
    return 8 * n, 0


# Operations ---------------------------------------------------------------------------------------


def _check_images(x, patch):
    if x.ndim != 4 or x.shape[1] % patch or x.shape[2] % patch:
        raise ValueError(
            f"patchify: images {tuple(x.shape)} must be (B, H, W, C) with H and W multiples of the patch "
            f"size {patch}"
        )


def _check_tokens(tokens, patch, height, width):
    count = height // patch * (width // patch)
    if (
        tokens.ndim != 3
        or height % patch
        or width % patch
        or tokens.shape[1] != count
        or tokens.shape[2] % (patch * patch)
    ):
        raise ValueError(
            f"unpatchify: tokens {tuple(tokens.shape)} must be (B, {count}, {patch * patch}·C) for images "
            f"of {height}×{width} in patches of {patch}"
        )


def _of_images(x, patch):
    """What v2 needs and images lack; None if a patch's row is made of fours."""
    return lacks_multiple(4, patch * x.shape[3], "elements of a patch's row")


def _of_tokens(tokens, patch):
    return lacks_multiple(4, tokens.shape[2] // patch, "elements of a patch's row")


def _launch(version, source, target, width, row, patch):
    if source.size >= 2**31:
        raise TooManyElementsError(
            f"{tuple(source.shape)} has too many elements for 32-bit indices: split the batch"
        )
    launch(
        version.kernel,
        -(-source.size // (version.width * BLOCK)),
        BLOCK,
        source.reshape(-1),
        target.reshape(-1),
        width,
        row,
        patch,
    )
    return target


SIZES = (2, 4), (3, 3), (4, 3)  # (patch, C) of the problems


def _image_problems(name):
    return [Problem(**{name: single(2, 2 * p, 3 * p, C)}, patch=p) for p, C in SIZES]


def _token_problems(name):
    return [
        Problem(**{name: single(2, 6, p * p * C)}, patch=p, height=2 * p, width=3 * p)
        for p, C in SIZES
    ]


@operation(
    reference=patchify_forward_reference,
    cost=patchify_forward_cost,
    check=_check_images,
    versions=naive_and_vectorised(patchify_kernel_v1, patchify_kernel_v2, _of_images),
    problems=[*_image_problems("x"), Problem(x=half(64, 32, 32, 4), patch=2, measured=True)],
)
def patchify_forward(x, patch, version=None):
    """Tokens (B, h·w, patch²·C) of images x (B, H, W, C)."""
    B, H, W, C = x.shape
    tokens = empty((B, H // patch * (W // patch), patch * patch * C), x.dtype, like=x)
    return _launch(version, x, tokens, W, patch * C, patch)


@operation(
    reference=unpatchify_forward_reference,
    cost=patchify_forward_cost,
    check=_check_tokens,
    versions=naive_and_vectorised(unpatchify_kernel_v1, unpatchify_kernel_v2, _of_tokens),
    problems=[
        *_token_problems("tokens"),
        Problem(tokens=single(64, 256, 32), patch=2, height=32, width=32, measured=True),
    ],
)
def unpatchify_forward(tokens, patch, height, width, version=None):
    """Images (B, height, width, C) of tokens (B, h·w, patch²·C)."""
    C = tokens.shape[2] // (patch * patch)
    x = empty((tokens.shape[0], height, width, C), tokens.dtype, like=tokens)
    return _launch(version, tokens, x, width, patch * C, patch)


@operation(
    reference=patchify_backward_reference,
    cost=patchify_forward_cost,
    versions=naive_and_vectorised(fits=lambda dtokens, patch: _of_tokens(dtokens, patch)),
    problems=_token_problems("dtokens"),
)
def patchify_backward(dtokens, patch, height, width, version=None):
    """dx: what was moved there moves back."""
    return unpatchify_forward(dtokens, patch, height, width, version=version.number)


@operation(
    reference=unpatchify_backward_reference,
    cost=patchify_forward_cost,
    versions=naive_and_vectorised(fits=lambda dx, patch: _of_images(dx, patch)),
    problems=_image_problems("dx"),
)
def unpatchify_backward(dx, patch, version=None):
    """dtokens."""
    return patchify_forward(dx, patch, version=version.number)
