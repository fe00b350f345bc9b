"""Gate, residual and adaptive norm: which version runs, and what its kernel is given.

VERSIONS
    v1 unfused: the kernels of ../gate.py and ../adaln.py, one after the other, and an addition.
    v2 fused: one kernel each way (forward.py, backward.py). C a multiple of 8, up to 1280; sm_80.
       For layers in FP8 y and dh are rounded to E4M3 there, with the bits of extras/fp8/quantise.py.
DETERMINISM
    no atomics: a warp adds its tokens in order, a block its warps in order, and ../columns.py (of
    dweight: reduce/trees.py) the blocks. What is added to what depends on the shape and on the GPU's
    multiprocessors.
SOURCE
    reference.py.
READ NEXT
    ../patchify.py
"""

import numpy as np

from ....device import empty, empty_like, is_device, launch, zeros
from ....device.limits import multiprocessors_of, shared_limit
from ....device.requires import supports
from ....dtypes import is_half
from ...cpu.gate_adaln import gate_adaln_backward_cpu, gate_adaln_forward_cpu
from ...elementwise import add_forward
from ...norms.row_norm import Norm, check_norm
from ...operation import Version, operation
from ...operation.versions import capped
from ...reduce.second_pass import add_rows
from ..adaln import adaln_backward, adaln_forward
from ..columns import RowColumns, as_columns
from ..gate import gate_backward, gate_forward
from .backward import BACKWARD, EIGHT_BACKWARD, Chunks, Factors, RowBackwardPlaces, choose_plan
from .forward import (
    BLOCK,
    EIGHT_FORWARD,
    FORWARD,
    MAX_SWEEPS,
    SWEEP,
    WARP,
    ForwardPlaces,
    RowForwardShape,
    forward_key_of,
    key_of,
    lanes_of,
)
from .problems import problems
from .reference import gate_adaln_backward_cost, gate_adaln_forward_cost

# What NumPy's arrays go to ------------------------------------------------------------------------


def forward_on_cpu(x, h, gate, shift, scale, eps=1e-6, weight=None, norm="layer", into=None):
    z, y, *others = gate_adaln_forward_cpu(x, h, gate, shift, scale, eps, weight, norm)
    return (z, y if into is None else into.rounded(y), *others)


def backward_on_cpu(
    dz, dy, z, h, modulation, mean, rstd, weight=None, dweight=None, dh_into=None, x=None
):
    z = gate_forward(x, h, modulation[0]) if z is None else z
    dy = np.zeros(z.shape, z.dtype) if dy is None else dy
    dx, dh, *others = gate_adaln_backward_cpu(
        dz, dy, z, h, *modulation, mean, rstd, weight, dweight
    )
    return (dx, dh if dh_into is None else dh_into.rounded(dh), *others)


# What the versions take ---------------------------------------------------------------------------


def _lacks_room(x):
    """What version 2 needs and tokens x lack; None if it takes them."""
    C, largest = x.shape[-1], SWEEP * MAX_SWEEPS
    if C % 8 or C > largest:
        return f"takes a multiple of 8 channels, at most {largest}, not {C}"
    if choose_plan(1, 1, C, x.dtype.itemsize, True, shared_limit(x)) is None:
        return "needs more shared memory than this device has"
    return None


def gate_adaln_supports(like, C):
    """Whether version 2 runs on tokens of C channels that are stored where the array `like` is, and
    have its type."""
    return (
        is_device(like)
        and capped("gate_adaln", 2) == 2
        and C % 8 == 0
        and C <= SWEEP * MAX_SWEEPS
        and (is_half(like.dtype) or like.dtype == np.float32)
        and supports(like, FORWARD, BACKWARD)
        and choose_plan(1, 1, C, like.dtype.itemsize, True, shared_limit(like)) is not None
    )


def _lacks_arrays(gate, shift, scale):
    if any(isinstance(vector, RowColumns) for vector in (gate, shift, scale)):
        return "takes whole arrays, not columns: use chunk"
    return None


def _two_versions(kernels, lacks, lacks_arrays):
    """kernels: those of version 2; lacks: what that needs and the tokens lack; lacks_arrays: what
    version 1 needs."""
    return [
        Version("unfused", fits=lacks_arrays),
        Version(
            "fused", kernels, fits=lacks, requires="7.5", dtypes=("float32", "float16", "bfloat16")
        ),
    ]


def _check(x, h, gate, shift, scale, weight, norm="layer"):
    if x.ndim != 3 or h is not None and h.shape != x.shape:
        raise ValueError(
            f"gate_adaln takes tokens (B, T, C), x and h alike, not {tuple(x.shape)} and "
            f"{h if h is None else tuple(h.shape)}; reshape an image to (B, H·W, C)"
        )
    B, _, C = x.shape
    for vector in (gate, shift, scale):
        if vector is not None and tuple(vector.shape) != (B, C):
            raise ValueError(
                f"gate_adaln: gate, shift and scale must be (B, C) = {(B, C)}, not {tuple(vector.shape)}"
            )
    check_norm("gate_adaln", C, weight, norm)


def _check_backward(z, h, modulation, weight, x):
    if z is None and (x is None or h is None):
        raise ValueError(
            "gate_adaln_backward needs z, or x and h, of which it computes z again: give one of both"
        )
    _check(x if z is None else z, h, *modulation, weight)


# Operations ---------------------------------------------------------------------------------------


@operation(
    reference=forward_on_cpu,
    cost=gate_adaln_forward_cost,
    check=_check,
    versions=_two_versions(FORWARD, lambda x: _lacks_room(x), _lacks_arrays),
    problems=lambda: problems(gate_adaln_forward, False),
)
def gate_adaln_forward(
    x, h, gate, shift, scale, eps=1e-6, weight=None, norm="layer", into=None, version=None
):
    """(z, y, mean (B·T,), rstd (B·T,)): z = x + gate · h and its norm, times weight · (1 + scale),
    plus shift.

    x, h (B, T, C); h and gate None: z is x. gate, shift, scale: (B, C), arrays or `RowColumns`;
    weight: (C,) float32.
    shift, weight: None if there is none; norm: "layer", or "rms", which has no mean: None
    into: a `Scale8` (extras/fp8/quantise.py), by which y, float16, then is rounded: bytes, C a
    multiple of 16
    """
    (B, T, C), is_fused = x.shape, version.name == "fused"
    is_gated, which = h is not None, Norm(norm == "rms", weight is not None, shift is not None)
    key = (
        forward_key_of(C, is_gated, which, x.dtype.itemsize)
        if into is None
        else key_of(C, is_gated, which)
    )
    if into is not None and (not is_fused or key not in EIGHT_FORWARD or x.dtype != np.float16):
        z, y, *others = gate_adaln_forward(
            x, h, gate, shift, scale, eps, weight, norm, version=version.number
        )
        return (z, into.rounded(y), *others)
    if not is_fused:
        z = x if h is None else gate_forward(x, h, gate)
        return (z, *adaln_forward(z, shift, scale, eps, weight, norm))
    z, rstd = empty_like(x) if is_gated else x, empty((B * T,), np.float32, like=x)
    y = empty_like(x) if into is None else empty(x.shape, np.uint8, like=x)
    mean = None if which.rms else empty((B * T,), np.float32, like=x)
    scale = as_columns(scale)  # what stands for an absent array is not looked at
    shift, gate = (
        as_columns(shift) if which.shifted else scale,
        as_columns(gate) if is_gated else scale,
    )
    flat, branch = x.reshape(-1), (h if is_gated else x).reshape(-1)
    launch(
        (FORWARD if into is None else EIGHT_FORWARD)[key],
        -(-B * T // (BLOCK // lanes_of(key))),
        BLOCK,
        flat,
        branch,
        gate.flat,
        shift.flat,
        (scale.flat,) if weight is None else (scale.flat, weight),
        z.reshape(-1),
        (y.reshape(-1), *(into or ())),
        rstd if which.rms else mean,
        rstd,
        RowForwardShape(B * T, T, C),
        ForwardPlaces(gate.first, gate.pitch, shift.first, scale.first, scale.pitch),
        float(eps),
    )
    return z, y, mean, rstd


@operation(
    reference=backward_on_cpu,
    cost=gate_adaln_backward_cost,
    check=_check_backward,
    versions=_two_versions(
        BACKWARD,
        lambda z, x: _lacks_room(x if z is None else z),
        lambda modulation: _lacks_arrays(*modulation),
    ),
    problems=lambda: problems(gate_adaln_backward, True),
    writes=("dweight",),
)
def gate_adaln_backward(
    dz,
    dy,
    z,
    h,
    modulation,
    mean,
    rstd,
    weight=None,
    dweight=None,
    dh_into=None,
    x=None,
    version=None,
):
    """(dx, dh, dgate, dshift, dscale) from the gradients of z (None: nothing has arrived) and of y
    (None: so, too).

    z: what the forward gave, or None with x, of which it is computed again, with the same bits and,
    in version 2, within the kernel; modulation: (gate, shift, scale), as the forward takes them; of
    shift only the place is needed; mean None: of RMSNorm. dh and dgate are None if h is, dshift
    where shift is. The gradient of the weight is added into `dweight` (None: not wanted).
    dh_into: a `Scale8`, by which dh, float16, then is rounded: bytes, C a multiple of 16
    """
    (gate, shift, scale), of_x, is_fused = modulation, z is None, version.name == "fused"
    z = x if of_x else z
    B, T, C = z.shape
    if of_x and not is_fused:
        z, of_x = gate_forward(z, h, gate), False
    is_gated, which = h is not None, Norm(mean is None, weight is not None, shift is not None)
    key = key_of(C, is_gated, which)
    if dh_into is not None and (not is_fused or key not in EIGHT_BACKWARD or z.dtype != np.float16):
        dx, dh, *others = gate_adaln_backward(
            dz,
            dy,
            None if of_x else z,
            h,
            modulation,
            mean,
            rstd,
            weight,
            dweight,
            version=version.number,
            x=z,
        )
        return (dx, dh_into.rounded(dh), *others)
    if dy is None:
        dy = zeros(z.shape, z.dtype, like=z)
    if not is_fused:
        dx, dshift, dscale = adaln_backward(
            dy, z, scale, mean, rstd, weight, dweight, shift is not None
        )
        if dz is not None:
            dx = add_forward(dx, dz)
        dh, dgate = (None, None) if h is None else gate_backward(dx, h, gate)
        return dx, dh, dgate, dshift, dscale
    given = shift, scale, gate if is_gated else None
    vectors = [v if v is None else as_columns(v) for v in given]
    # of other columns
    agreed = min({v.sums.blocks for v in vectors if v is not None} - {None}, default=None)
    warps, chunks, chunk, before, nbytes = choose_plan(
        B,
        T,
        C,
        z.dtype.itemsize,
        is_gated,
        shared_limit(z),
        multiprocessors_of(z),
        agreed,
        key[0],
        which.shifted,
    )
    places, gradients = zip(
        *((None, None) if v is None else v.sums.place(v, chunks) for v in vectors), strict=True
    )
    # an absent one is not read
    _, scale_, gate_ = vectors = [vectors[1] if v is None else v for v in vectors]
    sums, scales, shares = (
        tuple(places[1] if p is None else p for p in places),
        (scale_.flat,),
        None,
    )
    if which.weighted:
        shares = empty((B * chunks, C), np.float32, like=z)
        sums, scales = (*sums, shares.reshape(-1)), (scale_.flat, weight)
    dx, dh, flat = empty_like(z), empty_like(z) if is_gated else None, z.reshape(-1)
    if dh_into is not None:
        dh = empty(z.shape, np.uint8, like=z)
    kernel = (BACKWARD if dh_into is None else EIGHT_BACKWARD)[key]
    launch(
        kernel,
        (chunks, B),
        WARP * warps,
        (
            dy.reshape(-1),
            flat,
            flat if dz is None else dz.reshape(-1),
            h.reshape(-1) if is_gated else flat,
        ),
        scales,
        gate_.flat,
        rstd if which.rms else mean,
        rstd,
        dx.reshape(-1),
        ((dh if is_gated else dx).reshape(-1), *(dh_into or ())),
        sums,
        Chunks(T, C, chunk, before // z.dtype.itemsize, int(dz is not None), int(of_x)),
        Factors(scale_.first, scale_.pitch, gate_.first, gate_.pitch),
        RowBackwardPlaces(*(n for v in vectors for n in (v.first, v.pitch))),
        shared=nbytes,
    )
    if dweight is not None and shares is not None:
        add_rows(shares, dweight)
    dshift, dscale, dgate = (
        g if g is None or isinstance(v, RowColumns) else g.whole()
        for v, g in zip(given, gradients, strict=True)
    )
    return dx, dh, dgate, dshift, dscale
