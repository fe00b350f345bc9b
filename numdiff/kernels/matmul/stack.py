"""Products with weights that are at equal distances in memory, taken as one matrix: Hopper's
matmul, rung 6.

    forward    y (B, G·N) = x (B, K) · Wᵀ + bias        W (G·N, K): G weights (N, K), one below the other
    backward   dx (B, K) = dy (B, G·N) · W              the sum over all G·N in slices
               dW (G·N, K) = dyᵀ · x                    dbias (G·N,): the sums of dyᵀ's rows, by the same kernel

The tensor map of W has three dimensions, (k, row, weight), with the distance between weights as its
last stride; no box reaches over a weight's end, as tiles divide N. A tile of dW, or of the bias,
adds its weight's number times the gap between weights to its place.

DETERMINISM
    as hopper/kernel.py; the slices of dx are added in their order.
SOURCE
    PTX ISA, section 5.5.3, on tensor maps.
READ NEXT
    linear/stack.py, the caller.
"""

import numpy as np

from ...device import DeviceArray, empty, launch
from ...device.half import in_bfloat16
from ...device.specialise import Variants
from ...device.tensor_map import tensor_map
from .hopper.kernel import kernel_for
from .hopper.launcher import map_of
from .hopper.layout import (
    BK,
    BM,
    BOX,
    THREADS,
    Epilogue,
    Gaps,
    Maps,
    Stack,
    StackArrays,
    Work,
    shared_bytes,
)
from .hopper.producer import STACK
from .hopper.row_sums import ADD_ROW_SUMS
from .hopper.work import schedule
from .split_half import add_partials, unused

# of tiles, those that divide are taken, widest first
FORWARD_WIDTHS, BACKWARD_WIDTHS = (256, 128), (192, 128, 64)
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = (
    (False, False, True),
    (False, True, False),
    (True, True, False),
)
STACK_KERNELS = Variants(
    [
        (BN, *kind)
        for kind, widths in (
            (FORWARD, FORWARD_WIDTHS),
            (INPUT_GRADIENT, BACKWARD_WIDTHS),
            (WEIGHT_GRADIENT, BACKWARD_WIDTHS),
        )
        for BN in widths
    ],
    lambda key: kernel_for(
        *key[:3], "half_stack" if key[3] else "float_stack", STACK, module=__name__
    ),
)


def distance(arrays):
    """Bytes from each of the arrays to the next; None if they are not at equal distances, of 16
    bytes each."""
    first = arrays[0]
    if any(
        a.memory is not first.memory or a.shape != first.shape or a.dtype != first.dtype
        for a in arrays
    ):
        return None
    steps = {b.offset - a.offset for a, b in zip(arrays, arrays[1:], strict=False)} or {
        first.nbytes
    }
    step = steps.pop()
    return None if steps or step < first.nbytes or step % 16 or first.offset % 16 else step


def spanned(arrays):
    """The memory from the first array to the last as one flat array."""
    first, last = arrays[0], arrays[-1]
    length = (last.offset + last.nbytes - first.offset) // first.dtype.itemsize
    return DeviceArray(first.backend, (length,), first.dtype, first.memory, first.offset)


def fits(N, K):
    """Whether tiles divide weights (N, K)."""
    return N % BM == 0 and K % BK == 0


def widest(widths, extent):
    return next(width for width in widths if extent % width == 0)


def gap_of(arrays):
    """Elements between the end of one array and the start of the next."""
    return (distance(arrays) - arrays[0].nbytes) // arrays[0].dtype.itemsize


def map_of_weights(weights, box):
    """Boxes of `box` columns and rows of one weight (N, K)."""
    N, K = weights[0].shape
    return tensor_map(
        spanned(weights), (*box, 1), dims=(K, N, len(weights)), strides=(2 * K, distance(weights))
    )


def launch_stack(kind, width, a, b, c, sizes, rows, slices, maps, arrays, epilogue):
    """sizes: (M, N, K) of the whole product; rows: of one weight."""
    M, N, K = sizes
    tiles_m, tiles_n, k_tiles = -(-M // BM), -(-N // width), -(-K // BK)
    multiprocessors = a.backend.multiprocessors
    slice_tiles, slices, alone = schedule(tiles_m * tiles_n, slices, k_tiles, multiprocessors)
    units, target = slices * tiles_m * tiles_n, arrays.c
    if slices > 1:
        target = empty((slices * M * N,), np.float32, like=a)
    launch(
        in_bfloat16(STACK_KERNELS[(width, *kind)], a.dtype),
        min(units, multiprocessors),
        THREADS,
        maps,
        arrays._replace(c=target),
        Work(M, N, Stack(rows), k_tiles, slice_tiles, tiles_m, tiles_n, units, alone),
        epilogue,
        shared=shared_bytes(width),
    )
    if slices > 1:
        add_partials(target, c, slices, unused(a), 1.0, 0, False)


def stack_forward(x, weights, biases):
    """y (B, G·N) as a new array like x; weights (N, K) and float32 biases (N,) at equal distances."""
    (B, K), G, N = x.shape, len(weights), len(weights[0])
    y = empty((B, G * N), x.dtype, like=x)
    width = widest(FORWARD_WIDTHS, N)
    map_a, map_c = map_of(x, True, BM), tensor_map(y, (BOX, BOX))
    launch_stack(
        FORWARD,
        width,
        x,
        weights,
        y,
        (B, G * N, K),
        N,
        1,
        Maps(map_a, map_of_weights(weights, (BK, width)), map_c, map_a, map_a),
        StackArrays(x, spanned(biases), Gaps(gap_of(weights), gap_of(biases)), unused(x)),
        Epilogue(1.0, 1, 0, 0, 0, 0.0),
    )
    return y


def stack_input_gradient(dy, weights):
    """dx (B, K) float32 as a new array."""
    (B, _), G, (N, K) = dy.shape, len(weights), weights[0].shape
    dx, width = empty((B, K), np.float32, like=dy), widest(BACKWARD_WIDTHS, K)
    tiles = -(-B // BM) * (K // width)
    map_a = map_of(dy, True, BM)
    launch_stack(
        INPUT_GRADIENT,
        width,
        dy,
        weights,
        dx,
        (B, K, G * N),
        N,
        max(1, min(dy.backend.multiprocessors // tiles, G * N // BK)),
        Maps(map_a, map_of_weights(weights, (BOX, BK)), map_a, map_a, map_a),
        StackArrays(dx.reshape(-1), unused(dy), Gaps(gap_of(weights), 0), unused(dy)),
        Epilogue(1.0, 0, 0, 0, 0, 0.0),
    )
    return dx


def stack_weight_gradient(dy, x, dweights, dbiases, accumulate):
    """dW, float32 at equal distances: added to, or written; added to dbiases: the sums of dy's
    columns."""
    (B, _), G, (N, K) = dy.shape, len(dweights), dweights[0].shape
    width = widest(BACKWARD_WIDTHS, K)
    map_a = map_of(dy, False, BM)
    launch_stack(
        WEIGHT_GRADIENT,
        width,
        dy,
        x,
        dweights,
        (G * N, K, B),
        N,
        1,
        Maps(map_a, map_of(x, False, width), map_a, map_a, map_a),
        StackArrays(
            spanned(dweights),
            unused(dy),
            Gaps(gap_of(dweights), gap_of(dbiases)),
            spanned(dbiases),
        ),
        Epilogue(1.0, 0, 0, int(accumulate), ADD_ROW_SUMS, 0.0),
    )
