"""Many small linear layers of one input, in one launch: the timestep's vector as the input of every
block of a UNet.

MATHEMATICS
    forward   y_i[b, n] = bias_i[n] + Σ_k x[b, k] · weight_i[n, k]            layer i has N_i outputs
    backward  dx[b, k] = Σ_i Σ_n dy_i[b, n] · weight_i[n, k]
              dweight_i[n, k] += Σ_b dy_i[b, n] · x[b, k]          dbias_i[n] += Σ_b dy_i[b, n]
              or dweight_i = …, where nothing is to be added to
    Together they are one linear layer with N = Σ N_i outputs, whose rows are in different places of
    the model's flat buffer of parameters. A table says where: one row for each of the N outputs.
SHAPES
    x (B, K), weight_i (N_i, K), bias_i (N_i,), y_i (B, N_i), float32; all weights and biases views
    of one buffer
VERSIONS
    v1 one-by-one: the layers' own launches, of any K.
    v2 tiled: tiles in shared memory, brought by 16-byte loads that all start before the first is
       needed; 4 × 4 sums a thread; both gradients in one launch, as both need the same tile of dy.
       K and where weights begin: multiples of four.
LAUNCH
    v2, 256 threads a block: forward: a block 16 outputs for 32 samples, its warps share K, 50 KiB of shared memory.
    Backward: a block 32 outputs by 128 of K, for all samples, 42 KiB: 232 blocks for the UNet
    below, in both.
    Before the backward the gradients are copied side by side, eight layers a launch; after it the
    chunks' sums of dx are added in one more.
DETERMINISM
    each sum has a fixed order, which the shape alone decides.
COST
    forward 4 (B K + N K + N + B N) bytes, 2 B N K FLOPs. The UNet of unet.cu has 22 such layers of
    K = 256 and N_i = 64 to 256: one at a time they are 22 launches of microseconds each, and
    several times as many in the backward pass.
SOURCE
    the tree of a warp's sum as in norms/row_norm.py; grouping: the "grouped GEMM" of every inference
    library.
READ NEXT
    attention/unfused.py, three operations in a row.
"""

import numpy as np

from ...device import (
    DeviceArray,
    cuda,
    device_inline,
    empty,
    fill_zero,
    float32,
    int32,
    lasting,
    launch,
    load4,
    store4,
    upload,
    zeros,
)
from ...device.common import load4_or_zeros
from ...device.eight import array_of
from ...device.limits import WARP
from ..operation import Problem, Version, operation, single
from ..reduce.trees import column_sum
from .layer import (
    linear_backward,
    linear_backward_reference,
    linear_forward,
    linear_forward_reference,
)

BLOCK = 256  # threads
WEIGHT, BIAS, PLACE, STRIDE, COLUMNS = 0, 1, 2, 3, 4  # columns of the table, and how many there are
SAMPLES = 32  # of a tile (v2)
OUTPUTS, DEPTH = 16, 256  # of the forward's tile of weights
# floats from row to row: the rows that a warp reads at once begin four banks apart
PITCH = DEPTH + 4
SUM_PITCH = OUTPUTS + 4
BROUGHT = SAMPLES + OUTPUTS  # numbers that a thread brings: a vector of every fourth row
OUTPUT_ROWS = OUTPUTS * COLUMNS
FORWARD_SHARED = 4 * (SAMPLES + OUTPUTS) * PITCH  # bytes
LINES, WIDTH = 32, 128  # of the backward's tile of weights
TILE = LINES * WIDTH
DY_PITCH = LINES + 4
DY_TILE = LINES * DY_PITCH
LINE_ROWS = LINES * COLUMNS
GATHERED = 8  # arrays that one launch copies

_tables = {}  # where the layers are -> the table on the device


# References ---------------------------------------------------------------------------------------


def linear_group_forward_reference(x, layers):
    return [linear_forward_reference(x, weight, bias) for weight, bias in layers]


def linear_group_backward_reference(dys, x, layers, gradients, accumulate=True):
    dx = np.zeros_like(x)
    for dy, (weight, _), (dweight, dbias) in zip(dys, layers, gradients, strict=True):
        if dy is not None:
            dx += linear_backward_reference(dy, x, weight, dweight, dbias, accumulate=accumulate)
        elif not accumulate:
            dweight[...] = 0
    return dx


# v2 -----------------------------------------------------------------------------------------------


@device_inline
def table_rows(table, rows, first_n, count, N, t):
    """The rows of `count` outputs; weights that do not exist are at -1."""
    if t < count * COLUMNS:
        rows[t] = table[first_n * COLUMNS + t] if first_n + t // COLUMNS < N else int32(-1)


@device_inline
def keep4(values, i, v):
    """Vector i of a local array = v."""
    values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3] = v


@device_inline
def store_kept(target, at, values, i):
    """target[at … at + 3] = vector i of a local array."""
    store4(target, at, values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3])


@cuda.jit(launch_bounds=BLOCK)
def linear_group_forward_kernel_v2(x, parameters, table, y, batch, K, N):
    # SAMPLES rows of x, then OUTPUTS of weights; in the end sums of the warps
    tile = cuda.shared.array(0, float32)
    rows = cuda.shared.array(OUTPUT_ROWS, int32)
    t = int32(cuda.threadIdx.x)
    warp, lane = t >> 5, t & 31
    first_n, first_b = int32(cuda.blockIdx.x * OUTPUTS), int32(cuda.blockIdx.y * SAMPLES)
    table_rows(table, rows, first_n, OUTPUTS, N, t)
    values = cuda.local.array(BROUGHT, np.float32)
    # outputs lane % 4 + 4 · i of samples lane // 4 + 8 · j
    accumulators = cuda.local.array(16, np.float32)
    for k in range(16):
        accumulators[k] = float32(0)
    row, column = t >> 6, int32((t & 63) * 4)  # a thread brings every fourth row's vector
    for first_k in range(int32(0), K, int32(DEPTH)):
        cuda.syncthreads()  # the table's rows are there, and the tile has been read
        k = int32(first_k + column)
        for i in range((SAMPLES + OUTPUTS) // 4):
            line = int32(row + 4 * i)
            if i < SAMPLES // 4:
                v = load4_or_zeros(x, (first_b + line) * K + k, first_b + line < batch and k < K)
            else:
                begin = rows[(line - SAMPLES) * COLUMNS + WEIGHT]
                v = load4_or_zeros(parameters, begin + k, begin >= 0 and k < K)
            keep4(values, i, v)
        for i in range((SAMPLES + OUTPUTS) // 4):
            store_kept(tile, (row + 4 * i) * PITCH + column, values, i)
        cuda.syncthreads()
        for vector in range(DEPTH // 32):  # of the warp's eighth of the tile
            at = int32(warp * (DEPTH // 8) + 4 * vector)
            x_at, w_at = int32((lane >> 2) * PITCH + at), int32((SAMPLES + (lane & 3)) * PITCH + at)
            for i in range(4):
                w0, w1, w2, w3 = load4(tile, w_at + 4 * i * PITCH)
                for j in range(4):
                    x0, x1, x2, x3 = load4(tile, x_at + 8 * j * PITCH)
                    accumulators[4 * i + j] += w0 * x0
                    accumulators[4 * i + j] += w1 * x1
                    accumulators[4 * i + j] += w2 * x2
                    accumulators[4 * i + j] += w3 * x3
    cuda.syncthreads()
    for i in range(4):
        for j in range(4):
            tile[(warp * SAMPLES + (lane >> 2) + 8 * j) * SUM_PITCH + (lane & 3) + 4 * i] = (
                accumulators[4 * i + j]
            )
    cuda.syncthreads()
    for out in range(t, SAMPLES * OUTPUTS, BLOCK):
        b, n = out // OUTPUTS, out % OUTPUTS
        if first_b + b < batch and first_n + n < N:
            total = parameters[rows[n * COLUMNS + BIAS]]
            for part in range(BLOCK // WARP):
                total += tile[(part * SAMPLES + b) * SUM_PITCH + n]
            y[rows[n * COLUMNS + PLACE] + (first_b + b) * rows[n * COLUMNS + STRIDE]] = total


@device_inline
def add_outer(accumulators, left, left_at, left_pitch, right, right_at, right_pitch):
    """accumulators[4 · i + k] += Σ over a tile's rows of left[row][i] · right[row][k], for four by
    four of them."""
    for row in range(LINES):
        a0, a1, a2, a3 = load4(left, left_at + row * left_pitch)
        b = load4(right, right_at + row * right_pitch)
        for k in range(4):
            accumulators[k] += a0 * b[k]
            accumulators[4 + k] += a1 * b[k]
            accumulators[8 + k] += a2 * b[k]
            accumulators[12 + k] += a3 * b[k]


@cuda.jit(launch_bounds=(BLOCK, 2))
def linear_group_backward_kernel_v2(
    dy, x, parameters, table, gradients, gradient_table, partial, batch, K, N, accumulate
):
    """The gradients of a tile of weights += … (or = …), and partial[chunk of outputs, b, k] = its
    share of dx."""
    weights = cuda.shared.array(TILE, float32)
    inputs = cuda.shared.array(TILE, float32)
    by_sample = cuda.shared.array(DY_TILE, float32)  # dy [sample][output]
    by_output = cuda.shared.array(DY_TILE, float32)  # dy [output][sample]
    rows = cuda.shared.array(LINE_ROWS, int32)
    targets = cuda.shared.array(LINE_ROWS, int32)
    t = int32(cuda.threadIdx.x)
    warp, lane = t >> 5, t & 31
    first_n, first_k = int32(cuda.blockIdx.x * LINES), int32(cuda.blockIdx.y * WIDTH)
    table_rows(table, rows, first_n, LINES, N, t)
    table_rows(gradient_table, targets, first_n, LINES, N, t)
    cuda.syncthreads()
    line, column = (
        int32(((warp & 3) * 2 + (lane >> 4)) * 4),
        int32(((warp >> 2) * 16 + (lane & 15)) * 4),
    )
    # of a thread's sums; of the vectors that it brings
    k, mine = int32(first_k + column), int32(4 * lane)
    before = cuda.local.array(16, np.float32)  # of the gradients
    values = cuda.local.array(16, np.float32)
    for i in range(4):
        begin, old = rows[(warp + 8 * i) * COLUMNS + WEIGHT], targets[(line + i) * COLUMNS + WEIGHT]
        v = load4_or_zeros(parameters, begin + first_k + mine, begin >= 0 and first_k + mine < K)
        keep4(values, i, v)
        # zeros where it is not to be read
        v = load4_or_zeros(gradients, old + k, accumulate and old >= 0 and k < K)
        keep4(before, i, v)
    for i in range(4):
        store_kept(weights, (warp + 8 * i) * WIDTH + mine, values, i)
    accumulators = cuda.local.array(16, np.float32)
    part = cuda.local.array(16, np.float32)
    arrived = cuda.local.array(4, np.float32)
    for i in range(16):
        accumulators[i] = float32(0)
    bias_sum = float32(0)
    for first_b in range(int32(0), batch, int32(SAMPLES)):
        for i in range(4):
            b = int32(first_b + warp + 8 * i)
            v = load4_or_zeros(x, b * K + first_k + mine, b < batch and first_k + mine < K)
            keep4(values, i, v)
            arrived[i] = float32(0)
            if b < batch and first_n + lane < N:
                arrived[i] = dy[rows[lane * COLUMNS + PLACE] + b * rows[lane * COLUMNS + STRIDE]]
        cuda.syncthreads()  # the tiles have been read
        for i in range(4):
            store_kept(inputs, (warp + 8 * i) * WIDTH + mine, values, i)
            by_sample[(warp + 8 * i) * DY_PITCH + lane] = arrived[i]
            by_output[lane * DY_PITCH + warp + 8 * i] = arrived[i]
        cuda.syncthreads()
        add_outer(accumulators, by_sample, line, DY_PITCH, inputs, column, WIDTH)
        for i in range(16):
            part[i] = float32(0)
        add_outer(part, by_output, line, DY_PITCH, weights, column, WIDTH)
        for i in range(4):
            b = int32(first_b + line + i)
            if b < batch and k < K:
                store_kept(partial, (cuda.blockIdx.x * batch + b) * K + k, part, i)
        if t < LINES:
            for b in range(SAMPLES):
                bias_sum += by_sample[b * DY_PITCH + t]
    for i in range(4):
        old = targets[(line + i) * COLUMNS + WEIGHT]
        if old >= 0 and k < K:
            store4(
                gradients,
                old + k,
                before[4 * i] + accumulators[4 * i],
                before[4 * i + 1] + accumulators[4 * i + 1],
                before[4 * i + 2] + accumulators[4 * i + 2],
                before[4 * i + 3] + accumulators[4 * i + 3],
            )
    if t < LINES and first_n + t < N and first_k == 0:
        gradients[targets[t * COLUMNS + BIAS]] += bias_sum


@cuda.jit
def gather_kernel(arrays, counts, starts, target):
    """Eight arrays into `target`, each from its start on; a count of -n stands for n zeros."""
    which, i = int32(cuda.blockIdx.y), cuda.grid(1)
    count = counts[which]
    if i < abs(count):
        target[starts[which] + i] = array_of(which, arrays)[i] if count > 0 else float32(0)


# Launchers ----------------------------------------------------------------------------------------


def whole(arrays):
    """(the memory that flat float32 arrays are in, from the first to the last, as one array; their
    starts in it)."""
    first = min(arrays, key=lambda a: a.offset)
    last = max(arrays, key=lambda a: a.offset)
    if any(a.memory is not first.memory or a.dtype != np.float32 for a in arrays):
        raise ValueError(
            "linear_group takes float32 weights and biases that are views of one buffer; use linear for "
            "others"
        )
    length = (last.offset + last.nbytes - first.offset) // 4
    return (
        DeviceArray(first.backend, (length,), np.float32, first.memory, first.offset),
        [(a.offset - first.offset) // 4 for a in arrays],
    )


def _place(layers, batch):
    """(buffer, table) of layers [(weight, bias)] on a device."""
    buffer, starts = whole([a for layer in layers for a in layer])
    K, widths = layers[0][0].shape[1], tuple(weight.shape[0] for weight, _ in layers)
    key = buffer.backend, batch, K, tuple(starts), widths
    if key not in _tables:
        rows, begin = [], 0
        for i, width in enumerate(widths):
            n = np.arange(width)
            rows.append(
                np.stack(
                    [
                        starts[2 * i] + n * K,
                        starts[2 * i + 1] + n,
                        begin + n,
                        np.full(width, width),
                    ],
                    1,
                )
            )
            begin += batch * width
        with lasting(buffer.backend):
            table = upload(np.concatenate(rows).astype(np.int32), buffer)
        _tables.setdefault(key, table)  # two threads use the first
    return buffer, _tables[key]


def _lacks_vectors(x, layers):
    """None if vectors of four stay together in x and all weights, else what version 2 needs."""
    if x.shape[1] % 4 or any(a.offset % 16 for a in (x, *(weight for weight, _ in layers))):
        return (
            f"reads four numbers at a time: K ({x.shape[1]}) and the offsets of x and the weights must be "
            "multiples of 4"
        )
    return None


def _lacks_vectors_of_gradients(x, layers, gradients):
    return _lacks_vectors(x, [*layers, *gradients])


def _gather(parts, sizes, target):
    """target = the flat arrays `parts` side by side, zeros for None."""
    ends = np.cumsum(sizes).tolist()
    for i in range(0, len(parts), GATHERED):
        some = parts[i : i + GATHERED]
        given = [
            (target, -n, end - n) if part is None else (part.reshape(-1), n, end - n)
            for part, n, end in zip(some, sizes[i:], ends[i:], strict=False)
        ]
        given += [(target, 0, 0)] * (GATHERED - len(some))
        launch(
            gather_kernel,
            (-(-max(sizes[i : i + GATHERED]) // BLOCK), len(some)),
            BLOCK,
            *zip(*given, strict=True),
            target,
        )


def _check(x, layers):
    if x.ndim != 2 or any(
        w.ndim != 2 or w.shape[1] != x.shape[1] or tuple(b.shape) != w.shape[:1] for w, b in layers
    ):
        raise ValueError(
            f"x {tuple(x.shape)} must be (B, K), each weight (N, K) and each bias (N,), not "
            f"{[(tuple(w.shape), tuple(b.shape)) for w, b in layers]}"
        )


def split(flat, batch, widths):
    """The arrays (batch, N_i) that are one after the other in a flat one."""
    ends = np.cumsum([batch * width for width in widths]).tolist()
    return [
        flat[end - batch * width : end].reshape(batch, width)
        for end, width in zip(ends, widths, strict=True)
    ]


# Cost ---------------------------------------------------------------------------------------------


def linear_group_forward_cost(B, K, N):
    """(bytes, FLOPs) for N outputs in all."""
    return 4 * (B * K + N * K + N + B * N), 2 * B * N * K


def linear_group_backward_cost(B, K, N):
    """(bytes, FLOPs): the weights' gradients are read and written, and the two sums are 2 B N K
    each."""
    return 4 * (2 * B * K + 3 * N * K + 2 * N + B * N), 4 * B * N * K + B * N


# Problems: the weights are views of one array -----------------------------------------------------

SMALL = 5, 3  # outputs of the layers; K is 40, so that a warp has two iterations
# roughly those of a UNet's blocks, with K = 256
WIDTHS = 64, 64, 64, 128, 128, 192, 192, 256, 256, 256, 256
UNET = sum(WIDTHS) * (256 + 4)  # elements of its array


def _views(flat, K, widths):
    """[(weight (n, K), bias (n,))] in a flat array, each weight at a multiple of four elements."""
    layers, at = [], 0
    for n in widths:
        end = at + n * K
        layers.append((flat[at:end].reshape(n, K), flat[end : end + n]))
        at = end + -(-n // 4) * 4
    return layers


def _forward_of_views(x, flat, version=None, widths=SMALL):
    return linear_group_forward(x, _views(flat, x.shape[1], widths), version=version)


def _backward_of_views(x, flat, gradients, dys, accumulate=True, version=None, widths=SMALL):
    layers, targets = (_views(array, x.shape[1], widths) for array in (flat, gradients))
    return linear_group_backward(
        dys, x, layers, targets, accumulate=accumulate, version=version
    ), gradients


def _forward_of_unet(x, flat, version=None):
    return _forward_of_views(x, flat, version, WIDTHS)


def _backward_of_unet(x, flat, gradients, dys, version=None):
    return _backward_of_views(x, flat, gradients, dys, version=version, widths=WIDTHS)


def _backward_problem(label, **more):
    return Problem(
        label,
        x=single(2, 40),
        flat=single(340),
        gradients=single(340),
        dys=[single(2, n) for n in SMALL],
        call=_backward_of_views,
        versions=("one-by-one", "tiled"),
        **more,
    )


# Operations ---------------------------------------------------------------------------------------


@operation(
    reference=linear_group_forward_reference,
    cost=linear_group_forward_cost,
    check=_check,
    versions=[Version("one-by-one", measured=False), Version("tiled", fits=_lacks_vectors)],
    problems=[
        Problem(
            "",
            x=single(2, 40),
            flat=single(340),
            call=_forward_of_views,
            versions=("one-by-one", "tiled"),
        ),
        Problem(x=single(32, 256), flat=single(UNET), call=_forward_of_unet, measured=True),
    ],
)
def linear_group_forward(x, layers, version=None):
    """[x·weightᵀ + bias] for layers [(weight, bias)], as new arrays (B, N_i)."""
    if version.name == "one-by-one":
        return [linear_forward(x, weight, bias) for weight, bias in layers]
    (B, K), widths = x.shape, [weight.shape[0] for weight, _ in layers]
    N = sum(widths)
    buffer, table = _place(layers, B)
    y = empty((B * N,), np.float32, like=x)
    launch(
        linear_group_forward_kernel_v2,
        (-(-N // OUTPUTS), -(-B // SAMPLES)),
        BLOCK,
        x.reshape(-1),
        buffer,
        table.reshape(-1),
        y,
        B,
        K,
        N,
        shared=FORWARD_SHARED,
    )
    return split(y, B, widths)


def _one_by_one(dys, x, layers, gradients, accumulate):
    """dx, by the backward of one layer after the other."""
    dx = zeros(x.shape, x.dtype, like=x)
    for dy, (weight, _), (dweight, dbias) in zip(dys, layers, gradients, strict=True):
        if dy is not None:
            dx = linear_backward(dy, x, weight, dweight, dbias, residual=dx, accumulate=accumulate)
        elif not accumulate:
            fill_zero(dweight)
    return dx


@operation(
    reference=linear_group_backward_reference,
    cost=linear_group_backward_cost,
    check=_check,
    versions=[
        Version("one-by-one", measured=False),
        Version("tiled", fits=_lacks_vectors_of_gradients),
    ],
    problems=[
        _backward_problem(""),
        _backward_problem("written", accumulate=False, fast=False),
        Problem(
            x=single(32, 256),
            flat=single(UNET),
            gradients=single(UNET),
            dys=[single(32, n) for n in WIDTHS],
            call=_backward_of_unet,
            measured=True,
        ),
    ],
)
def linear_group_backward(dys, x, layers, gradients, version=None, accumulate=True):
    """dx as a new array; the parameters' gradients are added into `gradients` [(dweight, dbias)].

    dys: a list with dy_i (B, N_i), or None if nothing arrived
    accumulate: False: every dweight is written, whatever it held; each dbias is added to all the
    same
    """
    if version.name == "one-by-one":
        return _one_by_one(dys, x, layers, gradients, accumulate)
    (B, K), widths = x.shape, [weight.shape[0] for weight, _ in layers]
    N = sum(widths)
    dy = empty((B * N,), np.float32, like=x)
    _gather(dys, [B * width for width in widths], dy)
    buffer, table = _place(layers, B)
    target, gradient_table = _place(gradients, B)
    chunks = -(-N // LINES)
    partial = empty((chunks, B * K), np.float32, like=x)
    launch(
        linear_group_backward_kernel_v2,
        (chunks, -(-K // WIDTH)),
        BLOCK,
        dy,
        x.reshape(-1),
        buffer,
        table.reshape(-1),
        target,
        gradient_table.reshape(-1),
        partial.reshape(-1),
        B,
        K,
        N,
        int(accumulate),
    )
    return column_sum(partial).reshape(B, K)
