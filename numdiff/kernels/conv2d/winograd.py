"""Winograd's convolution on the CPU engine: 16 products instead of 36 for four pixels of a 3 × 3 convolution.

MATHEMATICS
    In one dimension two outputs of three taps g, y0 = d0·g0 + d1·g1 + d2·g2 and y1 = d1·g0 + d2·g1 + d3·g2, take four
    products instead of six:
        m0 = (d0 - d2)·g0                        y0 = m0 + m1 + m2
        m1 = (d1 + d2)·(g0 + g1 + g2) / 2        y1 = m1 - m2 - m3
        m2 = (d2 - d1)·(g0 - g1 + g2) / 2        or  y = Aᵀ·[(G·g) ∘ (Bᵀ·d)]
        m3 = (d1 - d3)·g2
    Rows, then columns: a tile of 2 × 2 outputs takes the 4 × 4 inputs around it and 4 · 4 products,
        Y = Aᵀ·[Σ_c (G·g_c·Gᵀ) ∘ (Bᵀ·d_c·B)]·A
    and the sum over channels makes each of the 16 a matrix product: (tiles, C_in) · (C_in, C_out).
    backward  the input gradient is such a convolution, too (direct.py). Of the weight, by the chain rule,
        dg_c = Gᵀ·[Σ_tiles (A·dY·Aᵀ) ∘ (Bᵀ·d_c·B)]·G, 16 products (C_in, tiles) · (tiles, C_out)
SHAPES
    x (B, H, W, C_in), weight (C_out, 3, 3, C_in), y (B, H, W, C_out), float32, stride 1
    A tile becomes one row in each of 16 matrices: 16 × tiles × C numbers, four times the image. So they are made and
    used slice by slice (a few images, one image, or some rows of one), small enough to stay in a core's cache.
DETERMINISM
    the size of a slice depends on the image's alone, so within `any_batch` an image has the same bits in any batch,
    where `rows_are_alike`; elsewhere winograd_rows.py has that.
COST
    16/36 of the multiply-adds, and about ten additions for each number of x and of y. On a core of an AMD EPYC (Zen 4),
    where three products of tap rows (cpu.py) take the time in brackets: 24 images of 32 × 32, 32 to 32 channels, 5.4 ms
    (6.7); 16 × 16, 64 to 64: 3.5 ms (6.2); 8 × 8, 128 to 128: 3.4 ms (5.2).
    All coefficients are 0, ±1 and ½: the error against float64 is no larger than that of the plain sum.
SOURCE
    Winograd 1980, "Arithmetic Complexity of Computations"; Lavin and Gray 2016, "Fast Algorithms for Convolutional
    Neural Networks", arXiv:1509.09308, section 4.1: F(2 × 2, 3 × 3).
READ NEXT
    winograd_rows.py.
"""
import numpy as np

from ...device import over_batch
from ..any_batch import assumed, is_any_batch, kept

G = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float32)
G_ROWS_AND_COLUMNS = np.kron(G, G)  # (16, 9): takes the nine taps to the sixteen factors
MIN_CHANNELS = 16  # on each side: below, the additions cost more than the products they save
MIN_PIXELS = 1024  # of the batch: below, the weight's transformation costs more
ROWS = 128  # tiles of a product, if IMAGES images or fewer have that many
IMAGES = 4  # of a slice, at most: a batch is cut into slices, and the last is computed as if it were full
MAX_ROWS = 256  # tiles of a product: larger images are cut


def winograd_supports(x, weight, stride):
    """Whether this convolution is computed here. Not in float64, which results are compared with."""
    n, kernel, _, c = weight.shape
    return (kernel == 3 and stride == 1 and min(n, c) >= MIN_CHANNELS and x.dtype == np.float32
            and assumed(x.size // c) >= MIN_PIXELS)


class Tiles:
    """Bᵀ·d·B of slices of x. Attributes: height, width (of an image, in tiles), rows (of tiles at a time), images."""

    def __init__(self, x, images):
        _, h, w, c = x.shape
        self.x, self.images, self.height, self.width = x, images, (h + 1) // 2, (w + 1) // 2
        self.rows = max(1, min(self.height, MAX_ROWS // self.width))
        # The padded images, their rows and columns each apart in even and odd ones: d0 and d2 of all tiles are even
        self.padded = np.zeros((2, 2, images, self.height + 1, self.width + 1, c), x.dtype)
        self.half = np.empty((4, 2, images, self.rows, self.width + 1, c), x.dtype)
        self.tiles = np.empty((4, 4, images, self.rows, self.width, c), x.dtype)

    def load(self, part):
        """Take the images of the slice `part`, at most `images`."""
        x = self.x[part]
        for odd_row in (0, 1):
            for odd_column in (0, 1):  # pixel (0, 0) is at (1, 1) of the padded image
                from_row, from_column = 1 - odd_row, 1 - odd_column
                pixels = x[:, from_row::2, from_column::2]
                self.padded[odd_row, odd_column, :len(x), from_row:from_row + pixels.shape[1],
                            from_column:from_column + pixels.shape[2]] = pixels

    def parts(self):
        """Slices of the rows of tiles."""
        return [slice(t, min(t + self.rows, self.height)) for t in range(0, self.height, self.rows)]

    def transformed(self, part):
        """(16, tiles, C) of the images taken, the tiles' rows being those of the slice `part`."""
        count, below = part.stop - part.start, slice(part.start + 1, part.stop + 1)
        (even, odd), half, tiles = self.padded, self.half[:, :, :, :count], self.tiles[:, :, :, :count]
        differences(even[:, :, part], odd[:, :, part], even[:, :, below], odd[:, :, below], half)
        even, odd = half[:, 0], half[:, 1]
        differences(even[..., :-1, :], odd[..., :-1, :], even[..., 1:, :], odd[..., 1:, :], tiles.swapaxes(0, 1))
        return tiles.reshape(16, -1, tiles.shape[-1])


def differences(d0, d1, d2, d3, out):
    """Bᵀ·d."""
    np.subtract(d0, d2, out=out[0])
    np.add(d1, d2, out=out[1])
    np.subtract(d2, d1, out=out[2])
    np.subtract(d1, d3, out=out[3])


def two_of_four(m, out):
    """Aᵀ·m."""
    np.add(m[1], m[2], out=out[0])
    np.subtract(m[1], m[2], out=out[1])
    out[0] += m[0]
    out[1] -= m[3]


def four_of_two(y, out):
    """A·y."""
    out[0] = y[0]
    np.add(y[0], y[1], out=out[1])
    np.subtract(y[0], y[1], out=out[2])
    np.negative(y[1], out=out[3])


def images_of_a_slice(tiles):
    """How many images of `tiles` tiles a product has: with `any_batch` its rows must be a multiple of 16."""
    return max(16 // tiles, min(IMAGES, ROWS // tiles)) if ROWS % tiles == 0 else 1


def factors_of(weight):
    """G·g·Gᵀ of a weight (N, 3, 3, C), as (16, C, N)."""
    n, _, _, c = weight.shape
    return (G_ROWS_AND_COLUMNS @ weight.transpose(1, 2, 3, 0).reshape(9, -1)).reshape(16, c, n)


def winograd_forward(x, weight, bias=None, channel=None, residual=None):
    """As `conv2d_forward_cpu`."""
    b, h, w, _ = x.shape
    n = weight.shape[0]
    y = np.empty((b, h, w, n), x.dtype)
    factors = kept(factors_of, weight)
    height, width = (h + 1) // 2, (w + 1) // 2
    fixed, size = is_any_batch(), images_of_a_slice(height * width)

    def convolve(share):
        images = size if fixed else min(size, share.stop - share.start)
        first, last = (size * share.start, min(size * share.stop, b)) if fixed else (share.start, share.stop)
        tiles = Tiles(x, images)
        for k in range(first, last, images):
            part = slice(k, min(k + images, last))
            count = part.stop - k
            tiles.load(part)
            for rows in tiles.parts():
                shape = images, rows.stop - rows.start, width, n
                m = np.matmul(tiles.transformed(rows), factors).reshape(4, 4, *shape)
                # Row 1 of Aᵀ's columns is (1, 1): what is added to m[1, 1] is added to all pixels of a tile
                if bias is not None:
                    m[1, 1] += bias
                if channel is not None:
                    m[1, 1, :count] += channel[part, None, None]
                half, pixels = np.empty((2, 4, *shape), x.dtype), m[:2, :2]
                two_of_four(m, half)
                two_of_four(half.swapaxes(0, 1), pixels.swapaxes(0, 1))
                put(pixels[:, :, :count], y[part, 2 * rows.start:2 * rows.stop])
            if residual is not None:  # here, while the part is still in the core's cache
                y[part] += residual[part]

    over_batch(convolve, -(-b // size) if fixed else b, 3 * y.size)
    return y


def put(pixels, y):
    """Pixels (2, 2, images, rows, width, n) of tiles into y (images, 2·rows, 2·width, n), which may have odd sides."""
    for i in (0, 1):
        for j in (0, 1):
            out = y[:, i::2, j::2]
            out[...] = pixels[i, j, :, :out.shape[1], :out.shape[2]]


def winograd_weight_gradient(dy, x, dweight):
    """The weight's gradient, added into dweight (C_out, 3, 3, C_in)."""
    b, h, w, n = dy.shape
    height, width = (h + 1) // 2, (w + 1) // 2
    size = images_of_a_slice(height * width)

    def gradient(share):
        images = min(size, share.stop - share.start)
        tiles, total = Tiles(x, images), np.zeros((16, n, x.shape[-1]), x.dtype)
        for k in range(share.start, share.stop, images):
            part = slice(k, min(k + images, share.stop))
            tiles.load(part)
            for rows in tiles.parts():
                shape = images, rows.stop - rows.start, width, n
                pixels = np.zeros((2, 2, *shape), x.dtype)  # of images and pixels that are not there: none
                take(dy[part, 2 * rows.start:2 * rows.stop], pixels)
                half, products = np.empty((2, 4, *shape), x.dtype), np.empty((4, 4, *shape), x.dtype)
                four_of_two(pixels.swapaxes(0, 1), half.swapaxes(0, 1))
                four_of_two(half, products)
                total += np.matmul(products.reshape(16, -1, n).swapaxes(1, 2), tiles.transformed(rows))
        return total

    for part in over_batch(gradient, b, 3 * dy.size):
        taps = (G_ROWS_AND_COLUMNS.T @ part.reshape(16, -1)).reshape(9, n, -1)
        dweight += taps.transpose(1, 0, 2).reshape(dweight.shape)


def take(dy, pixels):
    """The reverse of `put`."""
    for i in (0, 1):
        for j in (0, 1):
            given = dy[:, i::2, j::2]
            pixels[i, j, :len(dy), :given.shape[1], :given.shape[2]] = given
