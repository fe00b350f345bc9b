"""Convolution to a few channels: where a GEMM's tile would be nearly empty.

MATHEMATICS
    as in direct.py. A UNet's last convolution has 3 output channels (6 with a learned sigma): a 128
    × 64 tile of implicit.py would compute 64 columns to keep 3.
SHAPES
    as in direct.py, C_out ≤ NARROW
VERSIONS
    v3 implicit-gemm: of launcher.py, for these shapes. Forward: one thread a pixel, four output
    channels. Each number of x it loads feeds four products; the weights are the same for all
    threads, one broadcast from the cache for a warp.
    Weight gradient: one thread a column k = (r, s, c) of col, four output channels, over a part of
    the image rows. A warp reads 32 neighbouring channels of x; here dy is the same for all threads.
LAUNCH
    forward: grid (pixels / 128, C_out / 4), weight gradient: grid (K / 128, C_out / 4, parts); 128
    threads. No shared
    memory: the caches hold what neighbours share.
DETERMINISM
    fixed order in every thread; the gradient's parts are added in order by a second pass.
COST
    FLOPs as in direct.py; they are so few that the caches are the roof: every pixel's channels are
    read once for each tap.
SOURCE
    Chetlur et al. 2014, "cuDNN", arXiv:1410.0759, section 3, for the implicit GEMM that it stands
    in for.
READ NEXT
    attention/unfused.py.
"""

from ...device import cuda, empty, float32, int32, launch
from ...device.common import divide
from .direct import Geometry
from .tiles import add_parts, fetch, within

NARROW = 8  # output channels up to which these kernels run
BLOCK = 128  # threads
# in the weight gradient's grid: light threads, 2048 fit on a multiprocessor
THREADS_WANTED = 1 << 18


# Forward: one thread a pixel, four output channels ------------------------------------------------


@cuda.jit(device=True)
def dot4(total, a, b):
    return total + a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3]


@cuda.jit
def conv2d_narrow_forward_kernel(x, weight, bias, y, geometry, pixels, has_bias, by_four):
    H, W, C, Ho, Wo, N, kernel, stride = geometry
    pixel = int32(cuda.grid(1))
    if pixel < pixels:
        image, rest = divide(pixel, int32(Ho * Wo))
        i, j = divide(rest, Wo)
        n = cuda.blockIdx.y * 4
        K = kernel * kernel * C
        row_0, row_1, row_2, row_3 = (
            n * K,
            min(n + 1, N - 1) * K,
            min(n + 2, N - 1) * K,
            min(n + 3, N - 1) * K,
        )
        t0 = t1 = t2 = t3 = float32(0)
        for r in range(kernel):
            h = int32(i * stride + r - kernel // 2)
            for s in range(kernel):
                w = int32(j * stride + s - kernel // 2)
                if within(h, w, H, W):
                    at = int32(((image * H + h) * W + w) * C)
                    k = int32((r * kernel + s) * C)
                    for c in range(0, C, 4):
                        v = fetch(x, at + c, True, C - c, by_four)
                        t0 = dot4(t0, v, fetch(weight, row_0 + k + c, True, C - c, by_four))
                        t1 = dot4(t1, v, fetch(weight, row_1 + k + c, True, C - c, by_four))
                        t2 = dot4(t2, v, fetch(weight, row_2 + k + c, True, C - c, by_four))
                        t3 = dot4(t3, v, fetch(weight, row_3 + k + c, True, C - c, by_four))
        write_narrow(y, pixel * N + n, 1, n, N, t0, t1, t2, t3, bias, has_bias)


@cuda.jit(device=True)
def write_narrow(out, at, distance, n, N, t0, t1, t2, t3, bias, has_bias):
    """Up to four output channels from n on, `distance` apart."""
    out[at] = t0 + bias[n] if has_bias else t0
    if n + 1 < N:
        out[at + distance] = t1 + bias[n + 1] if has_bias else t1
    if n + 2 < N:
        out[at + 2 * distance] = t2 + bias[n + 2] if has_bias else t2
    if n + 3 < N:
        out[at + 3 * distance] = t3 + bias[n + 3] if has_bias else t3


# Weight gradient: one thread a column of col, four output channels --------------------------------


@cuda.jit
def conv2d_narrow_weight_gradient_kernel(dy, x, partial, geometry, lines, part_lines):
    H, W, C, Ho, Wo, N, kernel, stride = geometry
    K = kernel * kernel * C
    k = int32(cuda.grid(1))
    if k < K:
        tap, c = divide(k, C)
        r, s = divide(tap, kernel)
        n = cuda.blockIdx.y * 4
        n1, n2, n3 = min(n + 1, N - 1), min(n + 2, N - 1), min(n + 3, N - 1)
        first = cuda.blockIdx.z * part_lines
        t0 = t1 = t2 = t3 = float32(0)
        for line in range(first, min(first + part_lines, lines)):  # a line is one row of one image
            image, i = divide(line, Ho)
            h = int32(i * stride + r - kernel // 2)
            if h >= 0 and h < H:
                for j in range(Wo):
                    w = j * stride + s - kernel // 2
                    if w >= 0 and w < W:
                        v = x[((image * H + h) * W + w) * C + c]
                        at = (line * Wo + j) * N
                        t0 += v * dy[at + n]
                        t1 += v * dy[at + n1]
                        t2 += v * dy[at + n2]
                        t3 += v * dy[at + n3]
        write_narrow(partial, (cuda.blockIdx.z * N + n) * K + k, K, n, N, t0, t1, t2, t3, dy, False)


# Launchers ----------------------------------------------------------------------------------------


def narrow_forward(x, weight, bias, y, stride):
    """y = conv2d(x, weight) + bias, for arrays that launcher.py has checked."""
    _, h, w, c = x.shape
    n, kernel = weight.shape[:2]
    b, ho, wo, _ = y.shape
    launch(
        conv2d_narrow_forward_kernel,
        (-(-b * ho * wo // BLOCK), -(-n // 4)),
        BLOCK,
        x.reshape(-1),
        weight.reshape(-1),
        weight.reshape(-1) if bias is None else bias,
        y.reshape(-1),
        Geometry(h, w, c, ho, wo, n, kernel, stride),
        b * ho * wo,
        int(bias is not None),
        int(c % 4 == 0),
    )


def narrow_weight_gradient(dy, x, dweight, stride, accumulate=True):
    """dweight += the gradient, or = it, for arrays that launcher.py has checked."""
    _, h, w, c = x.shape
    b, ho, wo, n = dy.shape
    kernel = dweight.shape[1]
    grid = -(-kernel * kernel * c // BLOCK), -(-n // 4)
    part_lines = -(-b * ho // max(1, min(b * ho, THREADS_WANTED // (grid[0] * grid[1] * BLOCK))))
    parts = -(-b * ho // part_lines)
    partial = empty((parts, dweight.size), like=dy)
    launch(
        conv2d_narrow_weight_gradient_kernel,
        (*grid, parts),
        BLOCK,
        dy.reshape(-1),
        x.reshape(-1),
        partial.reshape(-1),
        Geometry(h, w, c, ho, wo, n, kernel, stride),
        b * ho,
        part_lines,
    )
    add_parts(partial, dweight, accumulate=accumulate)
