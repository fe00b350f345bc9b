"""Patchify and unpatchify: an image as a row of tokens, one a square of pixels, and back.

MATHEMATICS
    patchify      token[b, i·w + j, r, s, c] = x[b, i·p + r, j·p + s, c]      h × w patches of p × p pixels
    unpatchify    the same equation read from right to left
    Each is the other's backward: elements only change places. The linear layer that follows patchify is a convolution
    with kernel and stride p: its weight (D, p, p, C) is the matrix (D, p·p·C) without a copy.
SHAPES
    x (B, h·p, w·p, C) float32, channels last; tokens (B, h·w, p·p·C), elements in the order (row, column, channel)
VERSIONS
    v1 naive: one thread an element: finds its pixel and channel by divisions.
    v2 vectorised: one thread four elements: a patch's row, p·C elements, lies together in both arrays, so where p·C is
       a multiple of 4 sixteen bytes move at a time and the divisions are shared.
LAUNCH
    v1 ceil(n / 256) blocks of 256 threads; v2 a quarter of them. No shared memory.
DETERMINISM
    each element has one reader and one writer.
COST
    bytes: 8 n. Roof: memory bandwidth. Far smaller than anything that follows.
SOURCE
    Dosovitskiy et al. 2021, arXiv:2010.11929, section 3.1; the order of unpatchify's elements is DiT's
    (arXiv:2212.09748).
READ NEXT
    chunk.py, where channels are cut apart instead of pixels.
"""
import numpy as np

from ...device import cuda, empty, is_device, launch, load4, store4
from ...errors import TooManyElementsError
from ..common import divide
from ..versions import versions_by_name

BLOCK = 256  # threads


# References -----------------------------------------------------------------------------------------------------------

def patchify_forward_reference(x, patch):
    B, H, W, C = x.shape
    squares = x.reshape(B, H // patch, patch, W // patch, patch, C).transpose(0, 1, 3, 2, 4, 5)
    return np.ascontiguousarray(squares).reshape(B, -1, patch * patch * C)


def unpatchify_forward_reference(tokens, patch, height, width):
    B, C = len(tokens), tokens.shape[2] // (patch * patch)
    squares = tokens.reshape(B, height // patch, width // patch, patch, patch, C).transpose(0, 1, 3, 2, 4, 5)
    return np.ascontiguousarray(squares).reshape(B, height, width, C)


# Device function ------------------------------------------------------------------------------------------------------

@cuda.jit(device=True)
def token_element(i, width, row, patch):
    """Where element i of an image array (its rows of `width` pixels, `row` = p·C elements of a patch's row) lies among
    the tokens."""
    patches = width // patch  # in a row of patches
    line, rest = divide(i, patches * row)  # image row (of all images), element in it
    j, within = divide(rest, row)  # patch column, element of the patch's row
    band, r = divide(line, patch)  # row of patches, row of the patch
    return ((band * patches + j) * patch + r) * row + within


# v1: one thread an element --------------------------------------------------------------------------------------------

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


# v2: four elements of a patch's row -----------------------------------------------------------------------------------

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
        x0, x1, x2, x3 = load4(tokens, token_element(i, width, row, patch))
        store4(x, i, x0, x1, x2, x3)


# Launchers ------------------------------------------------------------------------------------------------------------

def _launch(kernels, source, target, width, row, patch, version):
    if source.size >= 2**31:
        raise TooManyElementsError(f"{tuple(source.shape)} has too many elements for 32-bit indices: split the batch")
    if version is None:
        version = 2 if row % 4 == 0 else 1
    if version == 2 and row % 4:
        raise ValueError(f"version 2 (vectorised) moves four elements of a patch's row, and its {row} are no multiple "
                         "of 4; use version=1")
    threads = source.size if version == 1 else source.size // 4
    launch(kernels[version - 1], -(-threads // BLOCK), BLOCK, source.reshape(-1), target.reshape(-1), width, row, patch)
    return target


@versions_by_name
def patchify_forward(x, patch, version=None):
    """Tokens (B, h·w, patch²·C) of images x (B, H, W, C)."""
    if x.ndim != 4 or x.shape[1] % patch or x.shape[2] % patch:
        raise ValueError(f"patchify: images {tuple(x.shape)} must be (B, H, W, C) with H and W multiples of the patch "
                         f"size {patch}")
    if not is_device(x):
        return patchify_forward_reference(x, patch)
    B, H, W, C = x.shape
    tokens = empty((B, H // patch * (W // patch), patch * patch * C), x.dtype, like=x)
    return _launch((patchify_kernel_v1, patchify_kernel_v2), x, tokens, W, patch * C, patch, version)


@versions_by_name
def unpatchify_forward(tokens, patch, height, width, version=None):
    """Images (B, height, width, C) of tokens (B, h·w, patch²·C)."""
    count = height // patch * (width // patch)
    if (tokens.ndim != 3 or height % patch or width % patch or tokens.shape[1] != count
            or tokens.shape[2] % (patch * patch)):
        raise ValueError(f"unpatchify: tokens {tuple(tokens.shape)} must be (B, {count}, {patch * patch}·C) for images "
                         f"of {height}×{width} in patches of {patch}")
    if not is_device(tokens):
        return unpatchify_forward_reference(tokens, patch, height, width)
    C = tokens.shape[2] // (patch * patch)
    x = empty((tokens.shape[0], height, width, C), tokens.dtype, like=tokens)
    return _launch((unpatchify_kernel_v1, unpatchify_kernel_v2), tokens, x, width, patch * C, patch, version)


@versions_by_name
def patchify_backward(dtokens, patch, height, width, version=None):
    """dx: what was moved there moves back."""
    return unpatchify_forward(dtokens, patch, height, width, version)


@versions_by_name
def unpatchify_backward(dx, patch, version=None):
    """dtokens."""
    return patchify_forward(dx, patch, version)


# Cost -----------------------------------------------------------------------------------------------------------------

def patchify_forward_cost(n):
    """(bytes, FLOPs) for n elements; all four operations cost the same."""
    return 8 * n, 0
