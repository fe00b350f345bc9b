"""Winograd's convolution on the CPU engine: 16 products instead of 36 for four pixels of a 3 × 3
convolution.

MATHEMATICS
    In one dimension two outputs of three taps g, y0 = d0·g0 + d1·g1 + d2·g2 and y1 = d1·g0 + d2·g1
    + d3·g2, take four products instead of six:
        m0 = (d0 - d2)·g0                        y0 = m0 + m1 + m2
        m1 = (d1 + d2)·(g0 + g1 + g2) / 2        y1 = m1 - m2 - m3
        m2 = (d2 - d1)·(g0 - g1 + g2) / 2        or  y = Aᵀ·[(G·g) ∘ (Bᵀ·d)]
        m3 = (d1 - d3)·g2
    Rows, then columns: a tile of 2 × 2 outputs takes the 4 × 4 inputs around it and 4 · 4 products,
        Y = Aᵀ·[Σ_c (G·g_c·Gᵀ) ∘ (Bᵀ·d_c·B)]·A
    and the sum over channels makes each of the 16 a matrix product: (tiles, C_in) · (C_in, C_out).
    backward  the input gradient is such a convolution, too (conv2d/direct.py). Of the weight, by the chain rule,
        dg_c = Gᵀ·[Σ_tiles (A·dY·Aᵀ) ∘ (Bᵀ·d_c·B)]·G, 16 products (C_in, tiles) · (tiles, C_out)
SHAPES
    x (B, H, W, C_in), weight (C_out, 3, 3, C_in), y (B, H, W, C_out), float32, stride 1
    A tile becomes one row in each of 16 matrices: 16 × tiles × C numbers, four times the image. So
    they are made and used slice by slice (a few images, one image, or some rows of one), small
    enough to stay in a core's cache.
ON THE CORES
    BLAS multiplies; what is around it are loops compiled by Numba (`on_host`), one pass where NumPy
    has a dozen, with the same bits: 15 to 20 % less time on one core, and on two 1.5 instead of 1.2
    times as fast, as no thread waits for Python's lock. The cores share the images, or where an
    image has fewer tiles than outputs have channels, these: each then lays out its part of the
    weights alone.
DETERMINISM
    the size of a slice depends on the image's alone, so within `batch_invariant` an image has the
    same bits in any batch, where `rows_are_alike`; elsewhere winograd_rows.py has that.
COST
    16/36 of the multiply-adds, and about ten additions for each number of x and of y. On a core of
    an AMD EPYC (Zen 4), where three products of tap rows (convolution.py) take the time in
    brackets: 24 images of 32 × 32, 32 to 32 channels, 5.4 ms (6.7); 16 × 16, 64 to 64: 3.5 ms
    (6.2); 8 × 8, 128 to 128: 3.4 ms (5.2).
    All coefficients are 0, ±1 and ½: the error against float64 is no larger than that of the plain
    sum.
SOURCE
    Winograd 1980, "Arithmetic Complexity of Computations"; Lavin and Gray 2016, "Fast Algorithms
    for Convolutional Neural Networks", arXiv:1509.09308, section 4.1: F(2 × 2, 3 × 3).
READ NEXT
    winograd_rows.py.
"""

import numpy as np

from ...device import on_host, over_batch, workers
from ...device.batch_invariance import is_batch_invariant, kept, nominal_extent

G = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float32)
G_ROWS_AND_COLUMNS = np.kron(G, G)  # (16, 9): takes the nine taps to the sixteen factors
MIN_CHANNELS = 16  # on each side: below, the additions cost more than the products they save
# of the batch: below, the weight's transformation costs more than the products save
MIN_PIXELS = 256
ROWS = 128  # tiles of a product, if IMAGES images or fewer have that many
# of a slice, at most: a batch is cut into slices, and the last is computed as if it were full
IMAGES = 4
MAX_ROWS = 256  # tiles of a product: larger images are cut


def winograd_supports(x, weight, stride):
    """Whether this convolution is computed here. Not in float64, which results are compared with."""
    n, kernel, _, c = weight.shape
    return (
        kernel == 3
        and stride == 1
        and min(n, c) >= MIN_CHANNELS
        and x.dtype == np.float32
        and nominal_extent(x.size // c) >= MIN_PIXELS
    )


# Transforms, compiled for the host: a tile stays in the core's first cache, and no thread waits for
# Tiles are numbered by image, row and column; those of a slice are (4, 4, images, rows, width,
# channels).


@on_host
def input_tiles(x, first, row, tiles):
    """Bᵀ·d·B of the tiles from this image and row on. x (B, H, W, C), zeros around it

    The inner loops cover a whole row of tiles. So the padded image's even columns and its odd ones
    are stored separately: tile j takes columns j and j + 1 of both.
    """
    b, h, w, channels = x.shape
    images, rows, width = tiles.shape[2:5]
    count = width * channels
    zeros = np.zeros((w, channels), np.float32)
    even = np.zeros((4, width + 1, channels), np.float32)  # Bᵀ·d of a row of tiles
    odd = np.zeros((4, width + 1, channels), np.float32)
    for image in range(images):
        for i in range(rows):
            n, y = first + image, 2 * (row + i) - 1
            d0 = x[n, y] if n < b and 0 <= y else zeros
            d1 = x[n, y + 1] if n < b else zeros
            d2 = x[n, y + 2] if n < b and y + 2 < h else zeros
            d3 = x[n, y + 3] if n < b and y + 3 < h else zeros
            for column in range(w):
                half = even if column % 2 else odd  # column 0 is the padded image's column 1
                j = (column + 1) // 2
                for k in range(channels):
                    half[0, j, k] = d0[column, k] - d2[column, k]
                    half[1, j, k] = d1[column, k] + d2[column, k]
                    half[2, j, k] = d2[column, k] - d1[column, k]
                    half[3, j, k] = d1[column, k] - d3[column, k]
            for p in range(4):
                e, o = even[p].reshape(-1), odd[p].reshape(-1)
                t0 = tiles[p, 0, image, i].reshape(-1)
                t1 = tiles[p, 1, image, i].reshape(-1)
                t2 = tiles[p, 2, image, i].reshape(-1)
                t3 = tiles[p, 3, image, i].reshape(-1)
                for k in range(count):
                    t0[k] = e[k] - e[k + channels]
                    t1[k] = o[k] + e[k + channels]
                    t2[k] = e[k + channels] - o[k]
                    t3[k] = o[k] - o[k + channels]


@on_host
def output_pixels(m, bias, channel, residual, first, row, start, y):
    """y = Aᵀ·m·A of the tiles from this image and row on, the addends with it. m: the products of a
    slice, for the channels from `start` on

    bias (1, N), channel (B, N) and residual, like y (B, H, W, N), are empty where there are none.
    Row 1 of Aᵀ's columns is (1, 1): what is added to m[1, 1] is added to all pixels of a tile.
    """
    b, h, w, _ = y.shape
    images, rows, width, channels = m.shape[2:]
    half = np.empty((2, 4, channels), np.float32)
    for image in range(min(images, b - first)):
        for i in range(rows):
            for j in range(width):
                for k in range(channels):
                    if len(bias):
                        m[1, 1, image, i, j, k] += bias[0, start + k]
                    if len(channel):
                        m[1, 1, image, i, j, k] += channel[first + image, start + k]
                for q in range(4):
                    for k in range(channels):
                        one, two = m[1, q, image, i, j, k], m[2, q, image, i, j, k]
                        half[0, q, k] = one + two + m[0, q, image, i, j, k]
                        half[1, q, k] = one - two - m[3, q, image, i, j, k]
                for p in range(min(2, h - 2 * (row + i))):
                    z = y[first + image, 2 * (row + i) + p, :, start:]
                    for k in range(channels):
                        z[2 * j, k] = half[p, 1, k] + half[p, 2, k] + half[p, 0, k]
                    if 2 * j + 1 < w:
                        for k in range(channels):
                            z[2 * j + 1, k] = half[p, 1, k] - half[p, 2, k] - half[p, 3, k]
                    for q in range(min(2, w - 2 * j) if len(residual) else 0):
                        for k in range(channels):
                            z[2 * j + q, k] += residual[
                                first + image, 2 * (row + i) + p, 2 * j + q, start + k
                            ]


@on_host
def gradient_tiles(dy, first, row, start, tiles):
    """A·dY·Aᵀ of the tiles from this image and row on, of the channels from `start` on; of images
    and pixels that are not there: zeros."""
    b, h, w, _ = dy.shape
    images, rows, width, channels = tiles.shape[2:]
    d, half = np.zeros((2, 2, channels), np.float32), np.empty((2, 4, channels), np.float32)
    for image in range(images):
        for i in range(rows):
            for j in range(width):
                for p in range(2):
                    for q in range(2):
                        inside = first + image < b and 2 * (row + i) + p < h and 2 * j + q < w
                        for k in range(channels):
                            d[p, q, k] = (
                                dy[first + image, 2 * (row + i) + p, 2 * j + q, start + k]
                                if inside
                                else 0
                            )
                for p in range(2):
                    for k in range(channels):
                        half[p, 0, k] = d[p, 0, k]
                        half[p, 1, k] = d[p, 0, k] + d[p, 1, k]
                        half[p, 2, k] = d[p, 0, k] - d[p, 1, k]
                        half[p, 3, k] = -d[p, 1, k]
                for q in range(4):
                    for k in range(channels):
                        tiles[0, q, image, i, j, k] = half[0, q, k]
                        tiles[1, q, image, i, j, k] = half[0, q, k] + half[1, q, k]
                        tiles[2, q, image, i, j, k] = half[0, q, k] - half[1, q, k]
                        tiles[3, q, image, i, j, k] = -half[1, q, k]


class Slices:
    """How the tiles of images are split: `images` images at a time, and of their tiles as many rows
    as fit a core's cache.

    Attributes: height, width (of an image, in tiles); starts: [(first row, rows)]
    """

    def __init__(self, h, w, images):
        self.height, self.width, self.images = (h + 1) // 2, (w + 1) // 2, images
        rows = max(1, min(self.height, MAX_ROWS // self.width))
        self.starts = [(row, min(rows, self.height - row)) for row in range(0, self.height, rows)]
        self.numbers = 16 * images * rows * self.width

    def buffer(self, channels):
        """Memory for the tiles of a slice: `tiles` gives it their shape."""
        return np.empty(self.numbers * channels, np.float32)

    def tiles(self, buffer, rows):
        """(4, 4, images, rows, width, channels), at the start of the buffer."""
        channels = len(buffer) // self.numbers
        shape = 4, 4, self.images, rows, self.width, channels
        return buffer[: 16 * self.images * rows * self.width * channels].reshape(shape)


def images_of_a_slice(tiles):
    """How many images of `tiles` tiles a product has: with `batch_invariant` its rows must be a
    multiple of 16."""
    return max(16 // tiles, min(IMAGES, ROWS // tiles)) if ROWS % tiles == 0 else 1


def factors_of(weight):
    """G·g·Gᵀ of a weight (N, 3, 3, C), as (16, C, N)."""
    n, _, _, c = weight.shape
    return (G_ROWS_AND_COLUMNS @ weight.transpose(1, 2, 3, 0).reshape(9, -1)).reshape(16, c, n)


def single_rows(array):
    """As the compiled loops take it: whole rows, float32, which addends of 16 bits become."""
    return np.ascontiguousarray(array, np.float32)


def shares_channels(tiles, channels):
    """Whether the cores share the outputs' channels instead of the images: where there are fewer
    tiles than channels, so that a product takes more time to lay out its weights than to multiply.
    """
    return workers() > 1 and tiles < channels


def winograd_forward(x, weight, bias=None, channel=None, residual=None):
    """As `conv2d_forward_cpu`."""
    b, h, w, c = x.shape
    n, x = weight.shape[0], single_rows(x)
    y = np.empty((b, h, w, n), x.dtype)
    bias = np.empty((0, n), np.float32) if bias is None else single_rows(bias)[None]
    channel = np.empty((0, n), np.float32) if channel is None else single_rows(channel)
    residual = y[:0] if residual is None else single_rows(residual)
    tiles_of_image = ((h + 1) // 2) * ((w + 1) // 2)
    fixed, size = is_batch_invariant(), images_of_a_slice(tiles_of_image)

    def convolve(first, last, images, start, factors):
        slices = Slices(h, w, images)
        d, products = slices.buffer(c), slices.buffer(factors.shape[-1])
        for k in range(first, last, images):
            for row, rows in slices.starts:
                tiles, m = slices.tiles(d, rows), slices.tiles(products, rows)
                input_tiles(x[:last], k, row, tiles)
                np.matmul(tiles.reshape(16, -1, c), factors, out=m.reshape(16, -1, m.shape[-1]))
                output_pixels(m, bias, channel, residual, k, row, start, y[:last])

    if not fixed and shares_channels(b * tiles_of_image, n):
        over_batch(
            lambda some: convolve(0, b, min(size, b), some.start, factors_of(weight[some])),
            n,
            3 * y.size,
        )
        return y
    factors = kept(factors_of, weight)

    def some_images(share):
        images = size if fixed else min(size, share.stop - share.start)
        first, last = (
            (size * share.start, min(size * share.stop, b)) if fixed else (share.start, share.stop)
        )
        convolve(first, last, images, 0, factors)

    over_batch(some_images, -(-b // size) if fixed else b, 3 * y.size)
    return y


def winograd_weight_gradient(dy, x, dweight):
    """The weight's gradient, added into dweight (C_out, 3, 3, C_in)."""
    b, h, w, n = dy.shape
    c, dy, x = x.shape[-1], single_rows(dy), single_rows(x)
    tiles_of_image = ((h + 1) // 2) * ((w + 1) // 2)
    size = images_of_a_slice(tiles_of_image)

    def gradient(some, channels):
        """(channels, 9, C_in): of these images and output channels."""
        images, count = min(size, some.stop - some.start), channels.stop - channels.start
        slices, total = Slices(h, w, images), None
        d, products = slices.buffer(c), slices.buffer(count)
        for k in range(some.start, some.stop, images):
            for row, rows in slices.starts:
                tiles, gradients = slices.tiles(d, rows), slices.tiles(products, rows)
                input_tiles(x[: some.stop], k, row, tiles)
                gradient_tiles(dy[: some.stop], k, row, channels.start, gradients)
                part = np.matmul(
                    gradients.reshape(16, -1, count).swapaxes(1, 2), tiles.reshape(16, -1, c)
                )
                total = part if total is None else np.add(total, part, out=total)
        return (
            (G_ROWS_AND_COLUMNS.T @ total.reshape(16, -1)).reshape(9, count, c).transpose(1, 0, 2)
        )

    def add(channels):
        dweight[channels] += gradient(slice(0, b), channels).reshape(dweight[channels].shape)

    if shares_channels(b * tiles_of_image, n):
        over_batch(add, n, 3 * dy.size)
    else:
        for part in over_batch(lambda some: gradient(some, slice(0, n)), b, 3 * dy.size):
            dweight += part.reshape(dweight.shape)
