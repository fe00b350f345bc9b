"""Winograd's convolution for rows alone, image by image: for sampling where BLAS gives equal rows
no equal bits.

MATHEMATICS
    As in winograd.py, two rows of outputs take four products instead of six,
        Y = Aᵀ·[Σ_s,c (G·g)_s,c · (Bᵀ·d)_s,c],   s the three taps of a row, c the channels
    and within a row the taps are summed as convolution.py does it, as one run of 3·C numbers. The
    products are half as many and three times as long: (tiles, 3·C_in) · (3·C_in, C_out).
SHAPES
    as in winograd.py. A tile is two rows and one column.
DETERMINISM
    an image's products have extents of its own, and do not depend on its batch. The bits differ
    from winograd.py's.
COST
    24/36 of the multiply-adds, in products that are nearer to what a core can do, and half of
    winograd.py's additions. 12 images on a core of an AMD EPYC (Zen 3), in brackets winograd.py
    with one image at a time, both with the weight's factors at hand: 32 × 32, 32 to 32 channels,
    3.2 ms (3.8); 16 × 16, 64 to 64: 2.5 ms (2.8); 8 × 8, 128 to 128: 2.5 ms (2.8). With four images
    at a time winograd.py is the faster one for small images.
    The error against float64 is that of the plain sum.
SOURCE
    winograd.py's.
READ NEXT
    conv2d/implicit.py.
"""

import numpy as np

from ...device import over_batch
from ...device.batch_invariance import kept
from .winograd import G

MAX_NUMBERS = 1 << 20  # in a slice's runs; larger images are cut


def differences(d0, d1, d2, d3, out):
    """Bᵀ·d."""
    np.subtract(d0, d2, out=out[0])
    np.add(d1, d2, out=out[1])
    np.subtract(d2, d1, out=out[2])
    np.subtract(d1, d3, out=out[3])


class Runs:
    """The runs of an image's tiles, slice by slice. Attributes: rows (of tiles in a slice), starts
    (the first ones)."""

    def __init__(self, h, w, c, dtype):
        height = (h + 1) // 2
        slices = -(-height // max(1, MAX_NUMBERS // (4 * w * 3 * c)))
        self.rows = -(-height // slices)
        # the last may compute some again
        self.starts = [min(k * self.rows, height - self.rows) for k in range(slices)]
        self.padded = np.zeros((2 * height + 2, w + 2, c), dtype)
        self.tiles = np.empty((4, self.rows, w + 2, c), dtype)
        self.windows = np.ndarray(
            (4, self.rows, w, 3 * c), dtype, self.tiles, strides=self.tiles.strides
        )
        self.runs = np.empty(self.windows.shape, dtype)

    def load(self, image):
        h, w, _ = image.shape
        self.padded[1 : h + 1, 1 : w + 1] = image

    def of(self, start):
        """(4, tiles, 3 · C): Bᵀ·d of the slice whose first tile this is."""
        d = self.padded[2 * start : 2 * (start + self.rows) + 2]
        differences(d[:-2:2], d[1:-2:2], d[2::2], d[3::2], self.tiles)
        self.runs[...] = self.windows
        return self.runs.reshape(4, -1, self.runs.shape[-1])


def factors_of(weight):
    """G·g of a weight (N, 3, 3, C), as (4, 3 · C, N)."""
    n, _, _, c = weight.shape
    return (G @ weight.transpose(1, 2, 3, 0).reshape(3, -1)).reshape(4, 3 * c, n)


def winograd_rows_forward(x, weight, bias=None, channel=None, residual=None):
    """As `conv2d_forward_cpu`."""
    b, h, w, c = x.shape
    n = len(weight)
    factors, y = kept(factors_of, weight), np.empty((b, h, w, n), x.dtype)

    def convolve(share):
        image = Runs(h, w, c, x.dtype)
        m = np.empty((4, image.rows, w, n), x.dtype)
        for k in range(share.start, share.stop):
            image.load(x[k])
            for start in image.starts:
                np.matmul(image.of(start), factors, out=m.reshape(4, -1, n))
                for addend in (bias, channel if channel is None else channel[k]):
                    if addend is not None:
                        m[1] += addend  # Aᵀ's column (1, 1): it is added to both rows
                even, odd = (y[k, 2 * start + i : 2 * (start + image.rows) : 2] for i in (0, 1))
                m[0] += m[1]
                np.add(m[0], m[2], out=even)
                m[1] -= m[2]
                # an odd height has one row less of these
                np.subtract(m[1, : len(odd)], m[3, : len(odd)], out=odd)
            if residual is not None:  # here, while the image is still in the core's cache
                y[k] += residual[k]

    over_batch(convolve, b, 3 * y.size)
    return y
