"""Scale and shift of every channel by the conditioning (scale-shift norm of the UNet, adaptive LayerNorm of the DiT).

MATHEMATICS
        y[b, p, c] = x[b, p, c] · (1 + scale[b, c]) + shift[b, c]
        dx = dy · (1 + scale)          dscale[b, c] = Σ_p dy · x          dshift[b, c] = Σ_p dy
    The 1 makes a network whose scale and shift are still zero the one without conditioning.
SHAPES
    x, y, dx, dy (B, ..., C) float32, channels last, P pixels; scale, shift, dscale, dshift (B, C)
VERSIONS
    v1 naive: one thread an element; the backward a thread a channel of a sample, which goes down all its pixels.
    v2 vectorised: one thread four neighbouring channels, by 16-byte loads and stores (C a multiple of 4). The
       backward's blocks own a chunk of pixels, write dx, and add up their sums in a tree; the chunks' sums are added in
       a second pass.
MEASURED
    NVIDIA H200, 2026-11-22, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    scale_shift_forward, 32×64×64×64, 32×64, float16
        v1      47.4 µs      708 GB/s   17 % of memory
        v2*     13.4 µs    2,512 GB/s   61 % of memory   3.55 × v1
    scale_shift_backward, 32×64×64×64, 32×64×64×64, float16
        v1     2,080 µs     24.2 GB/s    1 % of memory
        v2*     20.4 µs    2,474 GB/s   60 % of memory    102 × v1
LAUNCH
    forward: v1 ceil(n / 256) blocks of 256 threads, v2 a quarter. Backward: v1 ceil(B · C / 256) blocks; v2 grid
    (chunks, channel tiles, B), 256 threads, 8 KiB of shared memory.
DETERMINISM
    no atomics; the order of the sums depends on the shape alone (reduce.py).
COST
    bytes: 8 n forward, 12 n backward; 3 and 5 FLOPs an element. Roof: memory bandwidth.
SOURCE
    Perez et al. 2017, arXiv:1709.07871, eq. 2 (FiLM); Dhariwal and Nichol 2021, arXiv:2105.05233, eq. 3 (AdaGN).
READ NEXT
    groupnorm/reference.py, whose output this scales.
"""
import numpy as np

from ..device import cuda, empty, empty_like, float32, is_device, launch, load4, store4
from ..dtypes import in_single
from .reduce import BLOCK, cut, sample_sum, sample_sum_reference, tree_sum
from .versions import versions_by_name

BLOCK8 = 8 * BLOCK  # shared elements: two sums in each of a thread's four channels


# References -----------------------------------------------------------------------------------------------------------

@in_single()
def scale_shift_forward_reference(x, scale, shift):
    y = x.reshape(len(x), -1, x.shape[-1]) * (1 + scale)[:, None]
    y += shift[:, None]
    return y.reshape(x.shape)


@in_single(1, 2)
def scale_shift_backward_reference(dy, x, scale):
    g, pixels = (a.reshape(len(x), -1, x.shape[-1]) for a in (dy, x))
    dx = g * (1 + scale)[:, None]
    return dx.reshape(x.shape), np.einsum("bpc,bpc->bc", g, pixels), sample_sum_reference(g)


# v1: one thread an element, or a channel ------------------------------------------------------------------------------

@cuda.jit
def scale_shift_forward_kernel_v1(x, scale, shift, y, sample, C):
    i = cuda.grid(1)
    if i < y.size:
        k = i // sample * C + i % C  # sample b, channel c
        y[i] = float32(x[i]) * (float32(1) + float32(scale[k])) + float32(shift[k])


@cuda.jit
def scale_shift_backward_kernel_v1(dy, x, scale, dx, dscale, dshift, P, C):
    k = cuda.grid(1)
    if k < dscale.size:
        b, c = k // C, k % C
        sum_gx = sum_g = float32(0)
        for p in range(P):
            i = (b * P + p) * C + c
            dx[i] = float32(dy[i]) * (float32(1) + float32(scale[k]))
            sum_gx += float32(dy[i]) * float32(x[i])
            sum_g += float32(dy[i])
        dscale[k] = sum_gx
        dshift[k] = sum_g


# v2: four neighbouring channels a thread ------------------------------------------------------------------------------

@cuda.jit
def scale_shift_forward_kernel_v2(x, scale, shift, y, sample, C):
    i = cuda.grid(1) * 4
    if i < y.size:
        k = i // sample * C + i % C
        x0, x1, x2, x3 = load4(x, i)
        a0, a1, a2, a3 = load4(scale, k)
        b0, b1, b2, b3 = load4(shift, k)
        one = float32(1)
        store4(y, i, x0 * (one + a0) + b0, x1 * (one + a1) + b1, x2 * (one + a2) + b2, x3 * (one + a3) + b3)


# The backward in one reading of dy and x: dx is written on the way, and what remains of the sums is a row a chunk.

@cuda.jit
def scale_shift_backward_kernel_v2(dy, x, scale, dx, partial, P, C, lanes, chunk):
    """dx, and Σ dy · x and Σ dy of every channel in every chunk: (2, B, chunks, C)."""
    tile = cuda.shared.array(BLOCK8, float32)
    t = cuda.threadIdx.x
    rows = BLOCK // lanes
    row, b = t // lanes, cuda.blockIdx.z
    c = (cuda.blockIdx.y * lanes + t % lanes) * 4
    start = cuda.blockIdx.x * chunk
    a0 = a1 = a2 = a3 = s0 = s1 = s2 = s3 = float32(0)
    if row < rows and c < C:
        k0, k1, k2, k3 = load4(scale, b * C + c)
        k0, k1, k2, k3 = float32(1) + k0, float32(1) + k1, float32(1) + k2, float32(1) + k3
        for p in range(start + row, min(start + chunk, P), rows):
            i = (b * P + p) * C + c
            g0, g1, g2, g3 = load4(dy, i)
            x0, x1, x2, x3 = load4(x, i)
            store4(dx, i, g0 * k0, g1 * k1, g2 * k2, g3 * k3)
            a0 += g0 * x0
            a1 += g1 * x1
            a2 += g2 * x2
            a3 += g3 * x3
            s0 += g0
            s1 += g1
            s2 += g2
            s3 += g3
    tile[t], tile[BLOCK + t], tile[2 * BLOCK + t], tile[3 * BLOCK + t] = a0, a1, a2, a3
    tile[4 * BLOCK + t], tile[5 * BLOCK + t], tile[6 * BLOCK + t], tile[7 * BLOCK + t] = s0, s1, s2, s3
    tree_sum(tile, 8, t, lanes, rows)
    if row == 0 and c < C:
        i = (b * cuda.gridDim.x + cuda.blockIdx.x) * C + c
        store4(partial, i, tile[t], tile[BLOCK + t], tile[2 * BLOCK + t], tile[3 * BLOCK + t])
        i += cuda.gridDim.z * cuda.gridDim.x * C
        store4(partial, i, tile[4 * BLOCK + t], tile[5 * BLOCK + t], tile[6 * BLOCK + t], tile[7 * BLOCK + t])


# Launchers ------------------------------------------------------------------------------------------------------------

def _check(x, version, *vectors):
    """(B, P, C, version)."""
    B, C = x.shape[0], x.shape[-1]
    for vector in vectors:
        if tuple(vector.shape) != (B, C):
            raise ValueError(f"scale_shift: scale and shift must be (B, C) = {(B, C)}, not {tuple(vector.shape)}")
    if version is None:
        version = 2 if C % 4 == 0 else 1
    if version == 2 and C % 4:
        raise ValueError(f"version 2 (vectorised) takes four channels at a time, and {C} is not a multiple of 4; use "
                         "version=1")
    return B, x.size // (B * C), C, version


@versions_by_name
def scale_shift_forward(x, scale, shift, version=None):
    """x (B, ..., C) · (1 + scale (B, C)) + shift (B, C) at every pixel, as a new array."""
    B, P, C, version = _check(x, version, scale, shift)
    if not is_device(x):
        return scale_shift_forward_reference(x, scale, shift)
    y = empty_like(x)
    kernel, width = (scale_shift_forward_kernel_v1, 1) if version == 1 else (scale_shift_forward_kernel_v2, 4)
    launch(kernel, -(-x.size // (width * BLOCK)), BLOCK, x.reshape(-1), scale.reshape(-1), shift.reshape(-1),
           y.reshape(-1), P * C, C)
    return y


@versions_by_name
def scale_shift_backward(dy, x, scale, version=None):
    """(dx, dscale (B, C), dshift (B, C))."""
    B, P, C, version = _check(x, version, scale)
    if not is_device(x):
        return scale_shift_backward_reference(dy, x, scale)
    dx, arrays = empty_like(x), (dy.reshape(-1), x.reshape(-1), scale.reshape(-1))
    if version == 1:
        dscale, dshift = empty((B, C), np.float32, like=x), empty((B, C), np.float32, like=x)
        launch(scale_shift_backward_kernel_v1, -(-B * C // BLOCK), BLOCK, *arrays, dx.reshape(-1), dscale.reshape(-1),
               dshift.reshape(-1), P, C)
        return dx, dscale, dshift
    lanes, tiles, chunk, chunks = cut(B, P, C, 4)
    partial = empty((2 * B, chunks, C), np.float32, like=x)
    launch(scale_shift_backward_kernel_v2, (chunks, tiles, B), BLOCK, *arrays, dx.reshape(-1), partial.reshape(-1), P,
           C, lanes, chunk)
    sums = partial.reshape(2 * B, C) if chunks == 1 else sample_sum(partial)
    return dx, sums[:B], sums[B:]


# Cost -----------------------------------------------------------------------------------------------------------------

def scale_shift_forward_cost(B, P, C):
    """(bytes, FLOPs) over B samples of P pixels of C channels."""
    return 4 * (2 * B * P * C + 2 * B * C), 3 * B * P * C


def scale_shift_backward_cost(B, P, C):
    return 4 * (3 * B * P * C + 3 * B * C), 5 * B * P * C
