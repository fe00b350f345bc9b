"""How an image is brought to the size of a network, as public programs do it.

    clean        bicubic with a filter as wide as the image shrinks (antialiased), within 0 … 255: clean-fid, and
                 what pillow's `resize` computes for an image of floats
    pytorch-fid  bilinear between the two nearest pixels, whose centres are half a pixel within the border
    tensorflow   bilinear, pixel i of n at i · (size / n): the first TensorFlow's, which the networks of EDM and
                 StyleGAN and guided-diffusion's evaluator have within them

Each is linear and separable, y = A_h x A_wᵀ: two matrices that are nearly empty. The three give
different figures for the same images, by far more than noise: Parmar et al. 2022, "On Aliased
Resizing and Surprising Subtleties in GAN Evaluation", arXiv:2104.11222.
"""

import functools

import numpy as np

from ...device import upload
from .kernels.resize import resize_forward

A = -0.5  # of the bicubic kernel: Keys 1981, "Cubic convolution interpolation", eq. 15
SUPPORT = 2  # half of its width


def cubic(x, a=A):
    """The bicubic kernel at x."""
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def clean_matrix(n, size):
    """float64 (size, n): antialiased bicubic."""
    scale = n / size
    wide = max(scale, 1)
    centre = (np.arange(size)[:, None] + 0.5) * scale
    pixel = np.arange(n)[None]
    first = np.maximum(np.floor(centre - SUPPORT * wide + 0.5), 0)
    last = np.minimum(np.floor(centre + SUPPORT * wide + 0.5), n)
    weight = cubic((pixel + 0.5 - centre) / wide)
    weight = np.where((pixel >= first) & (pixel < last), weight, 0)
    return weight / weight.sum(1, keepdims=True)


def bilinear_matrix(place, n):
    """float64 (size, n): between the two pixels around each place."""
    place = np.clip(place, 0, n - 1)
    left = np.floor(place).astype(int)
    matrix = np.zeros((len(place), n))
    rows = np.arange(len(place))
    matrix[rows, left] = 1 - (place - left)
    matrix[rows, np.minimum(left + 1, n - 1)] += place - left
    return matrix


METHODS = {
    "clean": clean_matrix,
    "pytorch-fid": lambda n, size: bilinear_matrix((np.arange(size) + 0.5) * n / size - 0.5, n),
    "tensorflow": lambda n, size: bilinear_matrix(np.arange(size) * n / size, n),
}


@functools.lru_cache(64)
def taps(method, n, size):
    """(weight float32 (size, T), start int32 (size,)) of a method: its matrix without the zeros."""
    matrix = METHODS[method](n, size)
    filled = matrix != 0
    start = filled.argmax(1)
    width = int((n - filled[:, ::-1].argmax(1) - start).max())
    start = np.minimum(start, n - width)
    weight = np.take_along_axis(matrix, start[:, None] + np.arange(width), 1)
    return weight.astype(np.float32), start.astype(np.int32)


def resize(images, size, method, backend=None):
    """uint8 images (B, H, W, C) as float32 (B, size, size, C), values 0 … 255, on the device.

    The values agree with the programs named above within 1e-4.
    """
    B, H, W, C = images.shape
    limit = method == "clean"
    weight, start = (upload(a, backend) for a in taps(method, H, size))
    x = resize_forward(upload(images, backend).reshape(B, H, W * C), weight, start)
    weight, start = (upload(a, backend) for a in taps(method, W, size))
    x = resize_forward(x.reshape(B * size, W, C), weight, start, limit)
    return x.reshape(B, size, size, C)
