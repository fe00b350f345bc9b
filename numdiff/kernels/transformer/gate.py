"""Gate and residual: a branch is scaled, channel by channel, by what its image is conditioned on, and added to x.

MATHEMATICS
        y[b, t, c] = x[b, t, c] + gate[b, c] · h[b, t, c]
        dx = dy          dh = gate · dy          dgate[b, c] = Σ_t dy · h
    With the gate at zero, as adaLN-Zero starts, every block of the network is the identity.
SHAPES
    x, h, y, dy, dh (B, ..., C) float32, channels last, T tokens; gate, dgate (B, C)
VERSIONS
    v1 naive: one thread an element; the backward a thread a channel of an image, which goes down all its tokens.
    v2 vectorised: one thread four neighbouring channels, by 16-byte loads and stores (C a multiple of 4). The
       backward's blocks own a chunk of tokens, write dh, and add up their sums in a tree; the chunks' sums are added in
       a second pass.
MEASURED
    NVIDIA H200, 2026-11-22, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    gate_forward, 64×256×768, 64×256×768, float16
        v1      80.1 µs      944 GB/s   23 % of memory
        v2*     25.2 µs    2,994 GB/s   73 % of memory   3.17 × v1
    gate_backward, 64×256×768, 64×256×768, float16
        v1       184 µs      413 GB/s   10 % of memory
        v2*     32.9 µs    2,304 GB/s   56 % of memory   5.58 × v1
LAUNCH
    forward: v1 ceil(n / 256) blocks of 256 threads, v2 a quarter. Backward: v1 ceil(B · C / 256) blocks; v2 grid
    (chunks, channel tiles, B), 256 threads, 4 KiB of shared memory.
DETERMINISM
    no atomics; the order of the sums depends on the shape alone (reduce.py).
COST
    bytes: 12 n forward, 12 n backward (dx is dy itself and costs nothing). Roof: memory bandwidth.
SOURCE
    Peebles and Xie 2023, arXiv:2212.09748, section 3.2 (adaLN-Zero: α); Goyal et al. 2017, arXiv:1706.02677, section
    5.1, for starting residual branches at zero.
READ NEXT
    bias_gelu.py, which stands inside the branch; gate_adaln.py, this and the norm that follows in one pass.
"""
import numpy as np

from ...device import cuda, empty, empty_like, float32, is_device, launch, load4, over_batch, store4
from ...dtypes import in_single
from ..reduce import BLOCK, cut, sample_sum, tree_sum
from ..versions import versions_by_name

BLOCK4 = 4 * BLOCK  # shared elements: a sum in each of a thread's four channels


# References -----------------------------------------------------------------------------------------------------------

@in_single()
def gate_forward_reference(x, h, gate):
    y = np.empty_like(x)
    rows, branch, out = (a.reshape(len(x), -1, x.shape[-1]) for a in (x, h, y))

    def images(i):
        np.multiply(branch[i], gate[i, None], out=out[i])
        out[i] += rows[i]

    over_batch(images, len(x), x.size)
    return y


@in_single(1)
def gate_backward_reference(dy, h, gate):
    dh, dgate = np.empty_like(h), np.empty_like(gate)
    g, branch, out = (a.reshape(len(h), -1, h.shape[-1]) for a in (dy, h, dh))

    def images(i):
        np.multiply(g[i], gate[i, None], out=out[i])
        np.einsum("btc,btc->bc", g[i], branch[i], out=dgate[i])

    over_batch(images, len(h), h.size)
    return dh, dgate


# v1: one thread an element, or a channel ------------------------------------------------------------------------------

@cuda.jit
def gate_forward_kernel_v1(x, h, gate, y, sample, C):
    i = cuda.grid(1)
    if i < y.size:
        y[i] = float32(x[i]) + float32(gate[i // sample * C + i % C]) * float32(h[i])  # image b, channel c


@cuda.jit
def gate_backward_kernel_v1(dy, h, gate, dh, dgate, T, C):
    k = cuda.grid(1)
    if k < dgate.size:
        b, c = k // C, k % C
        total = float32(0)
        for t in range(T):
            i = (b * T + t) * C + c
            g = float32(dy[i])
            dh[i] = g * float32(gate[k])
            total += g * float32(h[i])
        dgate[k] = total


# v2: four neighbouring channels a thread ------------------------------------------------------------------------------

@cuda.jit
def gate_forward_kernel_v2(x, h, gate, y, sample, C):
    i = cuda.grid(1) * 4
    if i < y.size:
        x0, x1, x2, x3 = load4(x, i)
        h0, h1, h2, h3 = load4(h, i)
        k0, k1, k2, k3 = load4(gate, i // sample * C + i % C)
        store4(y, i, x0 + k0 * h0, x1 + k1 * h1, x2 + k2 * h2, x3 + k3 * h3)


@cuda.jit
def gate_backward_kernel_v2(dy, h, gate, dh, partial, T, C, lanes, chunk):
    """dh, and Σ dy · h of every channel in every chunk: (B, chunks, C)."""
    tile = cuda.shared.array(BLOCK4, float32)
    thread = cuda.threadIdx.x
    rows = BLOCK // lanes
    row, b = thread // lanes, cuda.blockIdx.z
    c = (cuda.blockIdx.y * lanes + thread % lanes) * 4
    start = cuda.blockIdx.x * chunk
    s0 = s1 = s2 = s3 = float32(0)
    if row < rows and c < C:
        k0, k1, k2, k3 = load4(gate, b * C + c)
        for t in range(start + row, min(start + chunk, T), rows):
            i = (b * T + t) * C + c
            g0, g1, g2, g3 = load4(dy, i)
            h0, h1, h2, h3 = load4(h, i)
            store4(dh, i, g0 * k0, g1 * k1, g2 * k2, g3 * k3)
            s0 += g0 * h0
            s1 += g1 * h1
            s2 += g2 * h2
            s3 += g3 * h3
    tile[thread], tile[BLOCK + thread], tile[2 * BLOCK + thread], tile[3 * BLOCK + thread] = s0, s1, s2, s3
    tree_sum(tile, 4, thread, lanes, rows)
    if row == 0 and c < C:
        store4(partial, (b * cuda.gridDim.x + cuda.blockIdx.x) * C + c, tile[thread], tile[BLOCK + thread],
               tile[2 * BLOCK + thread], tile[3 * BLOCK + thread])


# Launchers ------------------------------------------------------------------------------------------------------------

def _check(h, gate, version):
    """(B, T, C, version)."""
    B, C = h.shape[0], h.shape[-1]
    if tuple(gate.shape) != (B, C):
        raise ValueError(f"gate: the gate must be (B, C) = {(B, C)}, not {tuple(gate.shape)}")
    if version is None:
        version = 2 if C % 4 == 0 else 1
    if version == 2 and C % 4:
        raise ValueError(f"version 2 (vectorised) takes four channels at a time, and {C} is not a multiple of 4; use "
                         "version=1")
    return B, h.size // (B * C), C, version


@versions_by_name
def gate_forward(x, h, gate, version=None):
    """x (B, ..., C) + gate (B, C) · h (B, ..., C), as a new array."""
    B, T, C, version = _check(h, gate, version)
    if x.shape != h.shape:
        raise ValueError(f"gate: x {tuple(x.shape)} and h {tuple(h.shape)} differ in shape")
    if not is_device(x):
        return gate_forward_reference(x, h, gate)
    y = empty_like(x)
    kernel, width = (gate_forward_kernel_v1, 1) if version == 1 else (gate_forward_kernel_v2, 4)
    launch(kernel, -(-x.size // (width * BLOCK)), BLOCK, x.reshape(-1), h.reshape(-1), gate.reshape(-1), y.reshape(-1),
           T * C, C)
    return y


@versions_by_name
def gate_backward(dy, h, gate, version=None):
    """(dh, dgate (B, C)); the gradient of x is `dy` itself."""
    B, T, C, version = _check(h, gate, version)
    if not is_device(h):
        return gate_backward_reference(dy, h, gate)
    dh, arrays = empty_like(h), (dy.reshape(-1), h.reshape(-1), gate.reshape(-1))
    if version == 1:
        dgate = empty((B, C), np.float32, like=h)
        launch(gate_backward_kernel_v1, -(-B * C // BLOCK), BLOCK, *arrays, dh.reshape(-1), dgate.reshape(-1), T, C)
        return dh, dgate
    lanes, tiles, chunk, chunks = cut(B, T, C, 4)
    partial = empty((B, chunks, C), np.float32, like=h)
    launch(gate_backward_kernel_v2, (chunks, tiles, B), BLOCK, *arrays, dh.reshape(-1), partial.reshape(-1), T, C,
           lanes, chunk)
    return dh, partial.reshape(B, C) if chunks == 1 else sample_sum(partial)


# Cost -----------------------------------------------------------------------------------------------------------------

def gate_forward_cost(B, T, C):
    """(bytes, FLOPs) over B images of T tokens of C channels."""
    return 4 * (3 * B * T * C + B * C), 2 * B * T * C


def gate_backward_cost(B, T, C):
    return 4 * (3 * B * T * C + 2 * B * C), 3 * B * T * C
