"""Adding one vector to every pixel: a bias to all samples, or a vector of its own to each sample.

MATHEMATICS
    bias_add      y[b, p, c] = x[b, p, c] + bias[c]         dx = dy,  dbias[c] += Σ_{b,p} dy[b, p, c]
    channel_add   y[b, p, c] = x[b, p, c] + e[b, c]         dx = dy,  de[b, c] = Σ_p dy[b, p, c]
    A broadcast's backward is a sum over what was broadcast: see reduce.py.
SHAPES
    x, y (B, ..., C) float32, channels last; bias (C,); e (B, C)
VERSIONS
    v1 naive: one thread an element.
    v2 vectorised: one thread four neighbouring channels, by 16-byte loads and one 16-byte store (C a multiple of 4).
MEASURED
    NVIDIA H200, 2026-11-22, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    bias_add_forward, 16384×768, 768, float16
        v1      69.1 µs      728 GB/s   18 % of memory
        v2*     19.6 µs    2,563 GB/s   62 % of memory   3.52 × v1
    channel_add_forward, 32×64×64×64, 32×64, float32
        v1      42.8 µs    1,566 GB/s   38 % of memory
        v2*     17.8 µs    3,760 GB/s   92 % of memory   2.40 × v1
LAUNCH
    v1 ceil(n / 256) blocks of 256 threads; v2 a quarter of the blocks. No shared memory.
DETERMINISM
    each output is written by one thread; the sums of the backward have a fixed order (reduce.py).
COST
    bytes: 8 n forward, 4 n backward; one addition an element. Roof: memory bandwidth. So where a matmul or convolution
    comes before, its epilogue adds the bias at no cost.
SOURCE
    the timestep's vector e added after a ResBlock's first convolution: Ho et al. 2020, arXiv:2006.11239, appendix B.
READ NEXT
    scale_shift.py, which multiplies as well.
"""
from ..device import cuda, empty_like, float32, is_device, launch, load4, store4
from ..dtypes import in_single
from .reduce import column_sum, column_sum_cost, sample_sum, sample_sum_cost
from .versions import versions_by_name

BLOCK = 256  # threads: eight warps, enough to hide memory latency, and any GPU runs several such blocks at once


# References -----------------------------------------------------------------------------------------------------------

@in_single()
def bias_add_forward_reference(x, bias):
    return x + bias


@in_single()
def channel_add_forward_reference(x, e):
    return (x.reshape(len(x), -1, x.shape[-1]) + e[:, None]).reshape(x.shape)


# v1: one thread an element --------------------------------------------------------------------------------------------
# One kernel serves both: the bias is the case of a single sample that is as long as the whole array.

@cuda.jit
def channel_add_forward_kernel_v1(x, e, y, sample, C):
    i = cuda.grid(1)
    if i < y.size:
        y[i] = float32(x[i]) + float32(e[i // sample * C + i % C])  # sample b, channel c


# v2: four neighbouring channels a thread ------------------------------------------------------------------------------
# There are fewer memory instructions, and the two integer divisions are now shared by four elements.

@cuda.jit
def channel_add_forward_kernel_v2(x, e, y, sample, C):
    i = cuda.grid(1) * 4
    if i < y.size:
        x0, x1, x2, x3 = load4(x, i)
        e0, e1, e2, e3 = load4(e, i // sample * C + i % C)
        store4(y, i, x0 + e0, x1 + e1, x2 + e2, x3 + e3)


# Launchers ------------------------------------------------------------------------------------------------------------

def _launch_channel_add(x, e, sample, version):
    C, n = x.shape[-1], x.size
    if version is None:
        version = 2 if C % 4 == 0 else 1
    if version == 2 and C % 4:
        raise ValueError(f"version 2 (vectorised) takes four channels at a time, and {C} is not a multiple of 4; use "
                         "version=1")
    y = empty_like(x)
    kernel, width = (channel_add_forward_kernel_v1, 1) if version == 1 else (channel_add_forward_kernel_v2, 4)
    launch(kernel, -(-n // (width * BLOCK)), BLOCK, x.reshape(-1), e.reshape(-1), y.reshape(-1), sample, C)
    return y


@versions_by_name
def bias_add_forward(x, bias, version=None):
    """x (..., C) + bias (C,), as a new array."""
    if tuple(bias.shape) != (x.shape[-1],):
        raise ValueError(f"bias_add: the bias must have shape ({x.shape[-1]},), x's last axis, not {tuple(bias.shape)}")
    if not is_device(x):
        return bias_add_forward_reference(x, bias)
    return _launch_channel_add(x, bias, x.size, version)


def bias_add_backward(dy, dbias):
    """Adds the gradient of the bias into `dbias`; the gradient of x is `dy` itself."""
    column_sum(dy, out=dbias)


@versions_by_name
def channel_add_forward(x, e, version=None):
    """x (B, ..., C) + e (B, C) at every pixel, as a new array."""
    if tuple(e.shape) != (x.shape[0], x.shape[-1]):
        raise ValueError(f"channel_add: e must be (B, C) = {(x.shape[0], x.shape[-1])}, not {tuple(e.shape)}")
    if not is_device(x):
        return channel_add_forward_reference(x, e)
    return _launch_channel_add(x, e, x.size // x.shape[0], version)


def channel_add_backward(dy):
    """de (B, C); the gradient of x is `dy` itself."""
    return sample_sum(dy)


# Cost -----------------------------------------------------------------------------------------------------------------

def bias_add_forward_cost(M, C):
    """(bytes, FLOPs) over M rows of C channels."""
    return 4 * (2 * M * C + C), M * C


def bias_add_backward_cost(M, C):
    return column_sum_cost(M, C)


def channel_add_forward_cost(B, P, C):
    """(bytes, FLOPs) over B samples of P pixels of C channels."""
    return 4 * (2 * B * P * C + B * C), B * P * C


def channel_add_backward_cost(B, P, C):
    return sample_sum_cost(B, P, C)
