"""Many small linear layers of one input, in one launch: the timestep's vector on its way into every block of a UNet.

MATHEMATICS
    forward   y_i[b, n] = bias_i[n] + Σ_k x[b, k] · weight_i[n, k]            layer i has N_i outputs
    backward  dx[b, k] = Σ_i Σ_n dy_i[b, n] · weight_i[n, k]
              dweight_i[n, k] += Σ_b dy_i[b, n] · x[b, k]          dbias_i[n] += Σ_b dy_i[b, n]
    Together they are one linear layer with N = Σ N_i outputs, whose rows lie in different places of the model's flat
    buffer of parameters. A table says where: one row for each of the N outputs.
SHAPES
    x (B, K), weight_i (N_i, K), bias_i (N_i,), y_i (B, N_i), float32; all weights and biases views of one buffer
VERSIONS
    v1 forward: a warp an output, for all samples; weight gradient: a thread an element; input gradient: N cut into
       chunks, whose sums a second pass adds.
LAUNCH
    256 threads a block; no shared memory. Forward: a block eight outputs. Backward: the gradients are copied side by
    side, then three launches.
DETERMINISM
    each sum has a fixed order, which the shape alone decides.
COST
    forward 4 (B K + N K + N + B N) bytes, 2 B N K FLOPs. The UNet of unet.cu has 22 such layers of K = 256 and N_i = 64
    to 256: one at a time they are 22 launches of microseconds each, and several times as many in the backward pass.
SOURCE
    the tree of a warp's sum as in layernorm.py; grouping: the "grouped GEMM" of every inference library.
READ NEXT
    conv2d.py, which adds y_i to its result.
"""
import numpy as np

from ..device import DeviceArray, copy_into, cuda, empty, fill_zero, float32, is_device, launch, upload
from .linear import linear_backward_reference, linear_forward_reference
from .reduce import column_sum

BLOCK = 256  # threads
WARP = 32
FULL = 0xFFFFFFFF
CHUNK = 64  # outputs that one block of the input gradient's first pass adds up
WEIGHT, BIAS, PLACE, STRIDE, COLUMNS = 0, 1, 2, 3, 4  # columns of the table, and how many there are

_tables = {}  # where the layers lie -> the table on the device


# References -----------------------------------------------------------------------------------------------------------

def linear_group_forward_reference(x, layers):
    return [linear_forward_reference(x, weight, bias) for weight, bias in layers]


def linear_group_backward_reference(dys, x, layers, gradients):
    dx = np.zeros_like(x)
    for dy, (weight, _), (dweight, dbias) in zip(dys, layers, gradients, strict=True):
        if dy is not None:
            dx += linear_backward_reference(dy, x, weight, dweight, dbias)
    return dx


# v1 -------------------------------------------------------------------------------------------------------------------

@cuda.jit
def linear_group_forward_kernel_v1(x, parameters, table, y, batch, K, N):
    lane = cuda.threadIdx.x % WARP
    n = cuda.blockIdx.x * (BLOCK // WARP) + cuda.threadIdx.x // WARP
    if n < N:  # the same for all lanes of a warp
        weight, bias = table[n, WEIGHT], table[n, BIAS]
        place, stride = table[n, PLACE], table[n, STRIDE]
        for b in range(batch):
            total = float32(0)
            for k in range(lane, K, WARP):
                total += parameters[weight + k] * x[b * K + k]
            distance = WARP // 2
            while distance > 0:
                total += cuda.shfl_xor_sync(FULL, total, distance)
                distance //= 2
            if lane == 0:
                y[place + b * stride] = parameters[bias] + total


@cuda.jit
def linear_group_weight_gradient_kernel_v1(dy, x, gradients, table, batch, K, N):
    i = cuda.grid(1)
    n, k = i // K, i % K
    if n < N:
        place, stride = table[n, PLACE], table[n, STRIDE]
        total = float32(0)
        for b in range(batch):
            total += dy[place + b * stride] * x[b * K + k]
        gradients[table[n, WEIGHT] + k] += total
        if k == 0:
            total = float32(0)
            for b in range(batch):
                total += dy[place + b * stride]
            gradients[table[n, BIAS]] += total


@cuda.jit
def linear_group_input_gradient_kernel_v1(dy, parameters, table, partial, batch, K, N):
    """partial[chunk, b, k] = the sum over the outputs of a chunk."""
    chunk, b = cuda.blockIdx.x, cuda.blockIdx.y
    for k in range(cuda.threadIdx.x, K, BLOCK):
        total = float32(0)
        for n in range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, N)):
            total += dy[table[n, PLACE] + b * table[n, STRIDE]] * parameters[table[n, WEIGHT] + k]
        partial[(chunk * batch + b) * K + k] = total


# Launchers ------------------------------------------------------------------------------------------------------------

def whole(arrays):
    """(the memory that flat float32 arrays lie in, from the first to the last, as one array; their starts in it)."""
    first = min(arrays, key=lambda a: a.offset)
    last = max(arrays, key=lambda a: a.offset)
    if any(a.memory is not first.memory or a.dtype != np.float32 for a in arrays):
        raise ValueError("linear_group takes float32 weights and biases that are views of one buffer; use linear for "
                         "others")
    length = (last.offset + last.nbytes - first.offset) // 4
    return (DeviceArray(first.backend, (length,), np.float32, first.memory, first.offset),
            [(a.offset - first.offset) // 4 for a in arrays])


def _place(layers, batch):
    """(buffer, table) of layers [(weight, bias)] on a device."""
    buffer, starts = whole([a for layer in layers for a in layer])
    K, widths = layers[0][0].shape[1], tuple(weight.shape[0] for weight, _ in layers)
    key = buffer.backend, batch, K, tuple(starts), widths
    if key not in _tables:
        rows, begin = [], 0
        for i, width in enumerate(widths):
            n = np.arange(width)
            rows.append(np.stack([starts[2 * i] + n * K, starts[2 * i + 1] + n, begin + n, np.full(width, width)], 1))
            begin += batch * width
        _tables[key] = upload(np.concatenate(rows).astype(np.int32), buffer)
    return buffer, _tables[key]


def _check(x, layers):
    if x.ndim != 2 or any(w.ndim != 2 or w.shape[1] != x.shape[1] or tuple(b.shape) != w.shape[:1] for w, b in layers):
        raise ValueError(f"x {tuple(x.shape)} must be (B, K), each weight (N, K) and each bias (N,), not "
                         f"{[(tuple(w.shape), tuple(b.shape)) for w, b in layers]}")


def linear_group_forward(x, layers):
    """[x·weightᵀ + bias] for layers [(weight, bias)], as new arrays (B, N_i); on a device, neighbours in memory."""
    _check(x, layers)
    if not is_device(x):
        return linear_group_forward_reference(x, layers)
    (B, K), widths = x.shape, [weight.shape[0] for weight, _ in layers]
    N = sum(widths)
    buffer, table = _place(layers, B)
    y = empty((B * N,), np.float32, like=x)
    launch(linear_group_forward_kernel_v1, -(-N // (BLOCK // WARP)), BLOCK, x.reshape(-1), buffer, table, y, B, K, N)
    return split(y, B, widths)


def split(flat, batch, widths):
    """The arrays (batch, N_i) that lie one after the other in a flat one."""
    ends = np.cumsum([batch * width for width in widths]).tolist()
    return [flat[end - batch * width:end].reshape(batch, width) for end, width in zip(ends, widths, strict=True)]


def linear_group_backward(dys, x, layers, gradients):
    """dx as a new array; the parameters' gradients are added into `gradients` [(dweight, dbias)].

    dys: a list with dy_i (B, N_i), or None where nothing arrived
    """
    _check(x, layers)
    if not is_device(x):
        return linear_group_backward_reference(dys, x, layers, gradients)
    (B, K), widths = x.shape, [weight.shape[0] for weight, _ in layers]
    N = sum(widths)
    dy = empty((B * N,), np.float32, like=x)
    for place, part in zip(split(dy, B, widths), dys, strict=True):
        if part is None:
            fill_zero(place)
        else:
            copy_into(place, part)
    buffer, table = _place(layers, B)
    target, gradient_table = _place(gradients, B)
    launch(linear_group_weight_gradient_kernel_v1, -(-N * K // BLOCK), BLOCK, dy, x.reshape(-1), target,
           gradient_table, B, K, N)
    chunks = -(-N // CHUNK)
    partial = empty((chunks, B * K), np.float32, like=x)
    launch(linear_group_input_gradient_kernel_v1, (chunks, B), BLOCK, dy, buffer, table, partial.reshape(-1), B, K, N)
    return column_sum(partial).reshape(B, K)


# Cost -----------------------------------------------------------------------------------------------------------------

def linear_group_forward_cost(B, K, N):
    """(bytes, FLOPs) for N outputs in all."""
    return 4 * (B * K + N * K + N + B * N), 2 * B * N * K


def linear_group_backward_cost(B, K, N):
    """(bytes, FLOPs): the weights' gradients are read and written, and the two sums are 2 B N K each."""
    return 4 * (2 * B * K + 3 * N * K + 2 * N + B * N), 4 * B * N * K + B * N
