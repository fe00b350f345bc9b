"""Float16 convolution with few channels on one side: which layers these kernels take, and their
launches.

SHAPES
    x, weight, y, dy, dx float16; bias, dweight, dbias float32. 3 × 3 kernel, stride 1; one side up
    to NARROW channels, the other a multiple of 8. Elsewhere version 1 runs.
VERSIONS
    v3 narrow: of ../launcher.py for float16, by mma.sync: sm_80 and later. Nothing of the wide side
    passes through shared memory; the files say how each pass does it.
DETERMINISM
    a fixed order in each warp; the gradient's warps are added in a fixed order, and then its
    blocks.
COST
    bytes: both sides once, 2 bytes an element (to few: the wide side 1.3 times, from L2). Roof:
    memory.
SOURCE
    PTX ISA, section 9.7.14.5 (mma), whose fragments are written down in emulator/fragments.py.
READ NEXT
    ../../matmul/hopper/, where tensor cores read their operands straight from shared memory.
"""

import numpy as np

from ....device import empty, launch
from ....device.common import no_numbers
from ....device.half import in_bfloat16
from ....device.requires import supports
from ....dtypes import is_half
from . import from_few, to_few
from . import weight_gradient as gradient
from .weight_gradient import RESULTS, WARPS
from .windows import GROUP, SIZE, SLAB, TAPS, THREE

NARROW = 7  # channels of the narrow side, at most: other versions take eight
MAX_TURNS = 4  # groups of a warp in a chunk of the gradient
MAX_SHARED = 96 << 10  # bytes: what every GPU with these instructions gives a block


def _small(size, stride, wide):
    return size == SIZE and stride == 1 and wide % 8 == 0


def narrow_supports(x, weight, stride, plain):
    """Whether these kernels take the forward pass: to few channels, or from few; no addends but the
    bias (`plain`)."""
    n, size, _, c = weight.shape
    return (
        plain
        and (n <= NARROW and _small(size, stride, c) or c <= NARROW and _small(size, stride, n))
        and is_half(x.dtype)
        and supports(x, to_few.conv2d_to_narrow_kernel)
    )


def narrow_gradient_supports(x, weight, stride):
    """Whether they take the weight gradient: also the tile must fit."""
    few = min(weight.shape[0], weight.shape[3])
    return (
        bool(narrow_supports(x, weight, stride, True))
        and gradient_tile(1, x.shape[2], few) <= MAX_SHARED
    )


def narrow_input_gradient_supports(dy, weight, stride):
    """Whether they take the input gradient: of a layer to few channels."""
    return bool(narrow_supports(dy, weight, stride, True)) and weight.shape[0] <= NARROW


def _from_narrow(x, weight, bias, y, gradient):
    b, h, w, c = x.shape
    n, pixels = y.shape[3], b * h * w
    backend = x.backend
    blocks = min(
        -(-pixels // (GROUP * from_few.BLOCK // 32)), from_few.BLOCKS * backend.multiprocessors
    )
    kernel = in_bfloat16(from_few.conv2d_from_narrow_kernels[2 if TAPS * c <= 32 else 4], x.dtype)
    launch(
        kernel,
        (blocks, -(-n // SLAB)),
        from_few.BLOCK,
        x.reshape(-1),
        weight.reshape(-1),
        no_numbers(backend) if bias is None else bias,
        y.reshape(-1),
        h,
        w,
        c,
        n,
        pixels,
        int(bias is not None),
        gradient,
    )
    return y


def narrow_half_forward(x, weight, bias, y):
    """y = conv2d(x, weight) + bias."""
    b, h, w, c = x.shape
    n = y.shape[3]
    if n > NARROW:
        return _from_narrow(x, weight, bias, y, 0)
    kernel = in_bfloat16(to_few.conv2d_to_narrow_kernel, x.dtype)
    launch(
        kernel,
        (-(-w // to_few.TILE_W) * -(-h // to_few.TILE_H) * b, -(-n // THREE)),
        to_few.BLOCK,
        x.reshape(-1),
        weight.reshape(-1),
        no_numbers(x.backend) if bias is None else bias,
        y.reshape(-1),
        h,
        w,
        c,
        n,
        int(bias is not None),
    )
    return y


def narrow_half_input_gradient(dy, weight, dx):
    """dx of a layer to few channels."""
    return _from_narrow(dy, weight, None, dx, 1)


def gradient_tile(turns, width, channels):
    """Bytes of what a chunk sees of the narrow side."""
    return 4 * (turns * WARPS * GROUP + 2 * width + 2) * channels


def narrow_half_weight_gradient(dy, x, dweight, dbias=None):
    """dweight += …; dbias += … of a layer from few channels."""
    b, h, w, n = dy.shape
    c = x.shape[3]
    to_few = n <= NARROW
    wide, narrow, m, j = (x, dy, c, n) if to_few else (dy, x, n, c)
    slabs, threes, pixels = -(-m // SLAB), -(-j // THREE), b * h * w
    most = max(1, dy.backend.multiprocessors // (slabs * threes))
    turns = min(MAX_TURNS, -(-pixels // (WARPS * GROUP * most)))
    while turns > 1 and gradient_tile(turns, w, j) > MAX_SHARED:
        turns -= 1
    parts = min(-(-pixels // (GROUP * WARPS * turns)), most)
    partial = empty((parts, threes * slabs * RESULTS), np.float32, like=dy)
    kernel = in_bfloat16(gradient.conv2d_narrow_weight_gradient_kernel_half, x.dtype)
    launch(
        kernel,
        (slabs, threes, parts),
        gradient.BLOCK,
        wide.reshape(-1),
        narrow.reshape(-1),
        partial.reshape(-1),
        h,
        w,
        m,
        j,
        pixels,
        turns,
        shared=max(gradient_tile(turns, w, j), 4 * gradient.SLOTS * RESULTS),
    )
    has_bias = dbias is not None and not to_few
    launch(
        gradient.add_narrow_weight_gradient_kernel,
        threes * slabs * RESULTS // 32,
        (32, min(parts, gradient.ADD_ROWS)),
        partial.reshape(-1),
        dweight.reshape(-1),
        dbias if has_bias else no_numbers(dy.backend),
        parts,
        slabs,
        m,
        j,
        int(to_few),
        int(has_bias),
    )
    return has_bias
