"""The elementwise steps of sampling: everything between two evaluations of the model.

MATHEMATICS
    combine         y = a · x + b · u + c · v            one to three terms: nearly every sampler's step is one of these
    estimate_x_0    x_0 = a · x + b · prediction         clipped to [-1, 1] if asked. What the model was trained to give
                    only changes a and b: numdiff/diffusion/denoiser.py has the table.
    guide           y = u + scale · (c - u)              of the conditional answer c and the unconditional answer u, in
                    the first channels; the other channels are those of c
    blend           y = known where mask is 1, x where it is 0
    model_input     x_t = a · x, once or twice over, and the timestep t for each of its samples
SHAPES
    x, u, v, x_0, noise, known (B, ..., C) float32, mask (B, ..., C) float32 of zeros and ones;
    prediction
    (B, ..., Cp), Cp ≥ C: only the first C channels count (Cp = 2C where the variance is learned)
    a, b, c, low, high, t: the step's numbers, the same for the whole batch, made on the host in
    float64. They come as one float32 array on the engine, so that a recorded step may be replayed
    with the next step's numbers in it; or as Python floats, of which such an array is made. scale:
    a Python float, as it is the same in all steps
VERSIONS
    v1 naive: one thread an element.
    v2 vectorised: combine, estimate_x_0 and model_input, one thread four elements, by 16-byte loads
    and stores.
LAUNCH
    v1 ceil(n / 256) blocks of 256 threads; v2 a quarter of them.
DETERMINISM
    elementwise.
COST
    bytes: 4 n for each array read or written. Roof: memory bandwidth, but all of them together take
    a negligible part of the time of one evaluation of a model.
SOURCE
    guide: Ho and Salimans 2022, arXiv:2207.12598, eq. 6, in the form whose scale 1 means no
    guidance;
    blend: Lugmayr et al. 2022, arXiv:2201.09865, eq. 8c.
READ NEXT
    numdiff/diffusion/samplers.py, where these steps become a sampler.
"""

import numpy as np

from ...device import (
    cuda,
    empty,
    empty_like,
    float32,
    is_device,
    launch,
    load4,
    store4,
    uint32,
    upload,
)
from ...device.four import scale4
from ..operation import Problem, filled, naive_and_vectorised, operation, single

BLOCK = 256  # threads


# References ---------------------------------------------------------------------------------------


def weighted_sum_reference(weights, x, u=None, v=None):
    y = weights[0] * x
    for k, array in enumerate((u, v), 1):
        if array is not None:
            y += weights[k] * array
    return y


def estimate_x_0_reference(x, prediction, weights, clip=True):
    a, b = weights[:2]
    y = b * prediction[..., : x.shape[-1]]
    if a:
        y += a * x
    return np.clip(y, -1, 1, out=y) if clip else y


def guide_reference(conditional, unconditional, scale, channels):
    y = conditional.copy()
    u = unconditional[..., :channels]
    y[..., :channels] = u + scale * (y[..., :channels] - u)
    return y


def blend_reference(mask, known, x):
    return np.where(mask > 0.5, known, x)


def model_input_reference(x, numbers, copies=1):
    t, a = numbers[:2]
    return np.concatenate([a * x] * copies), np.full(copies * len(x), t, x.dtype)


# Device function ----------------------------------------------------------------------------------


@cuda.jit(device=True)
def x_0_of(x, p, a, b, clip):
    y = a * x + b * p
    if clip:
        y = min(max(y, float32(-1)), float32(1))
    return y


# v1: one thread an element ------------------------------------------------------------------------


@cuda.jit
def combine_kernel_v1(y, terms, weights, x, u, v):
    i = cuda.grid(1)
    if i < y.size:
        value = weights[0] * x[i]
        if terms > 1:
            value += weights[1] * u[i]
        if terms > 2:
            value += weights[2] * v[i]
        y[i] = value


@cuda.jit
def estimate_x_0_kernel_v1(y, x, prediction, weights, channels, channels_p, clip):
    i = cuda.grid(1)
    if i < y.size:
        row = uint32(i) // channels  # pixel, and its channel c
        c = uint32(i) - row * channels
        y[i] = x_0_of(x[i], prediction[row * channels_p + c], weights[0], weights[1], clip)


@cuda.jit
def guide_kernel_v1(y, conditional, unconditional, scale, guided, channels_p):
    """Channels below `guided` of channels_p are guided."""
    i = cuda.grid(1)
    if i < y.size:
        value = conditional[i]
        if uint32(i) % channels_p < guided:
            u = unconditional[i]
            value = u + scale * (value - u)
        y[i] = value


@cuda.jit
def blend_kernel_v1(y, mask, known, x):
    i = cuda.grid(1)
    if i < y.size:
        y[i] = known[i] if mask[i] > float32(0.5) else x[i]


@cuda.jit
def model_input_kernel_v1(y, t, x, numbers, copies):
    i = cuda.grid(1)
    if i < x.size:
        value = numbers[1] * x[i]
        for k in range(copies):
            y[i + k * x.size] = value
    if i < t.size:
        t[i] = numbers[0]


# v2: four elements a thread -----------------------------------------------------------------------


@cuda.jit
def combine_kernel_v2(y, terms, weights, x, u, v):
    i = cuda.grid(1) * 4
    if i < y.size:
        a = weights[0]
        x0, x1, x2, x3 = load4(x, i)
        y0, y1, y2, y3 = a * x0, a * x1, a * x2, a * x3
        if terms > 1:
            b = weights[1]
            u0, u1, u2, u3 = load4(u, i)
            y0, y1, y2, y3 = y0 + b * u0, y1 + b * u1, y2 + b * u2, y3 + b * u3
        if terms > 2:
            c = weights[2]
            v0, v1, v2, v3 = load4(v, i)
            y0, y1, y2, y3 = y0 + c * v0, y1 + c * v1, y2 + c * v2, y3 + c * v3
        store4(y, i, y0, y1, y2, y3)


@cuda.jit
def estimate_x_0_kernel_v2(y, x, prediction, weights, channels, channels_p, clip):
    i = cuda.grid(1) * 4
    if i < y.size:
        a, b = weights[0], weights[1]
        x0, x1, x2, x3 = load4(x, i)
        p0, p1, p2, p3 = load4(prediction, i)
        store4(
            y,
            i,
            x_0_of(x0, p0, a, b, clip),
            x_0_of(x1, p1, a, b, clip),
            x_0_of(x2, p2, a, b, clip),
            x_0_of(x3, p3, a, b, clip),
        )


@cuda.jit
def model_input_kernel_v2(y, t, x, numbers, copies):
    thread = cuda.grid(1)
    i = thread * 4
    if i < x.size:
        a = numbers[1]
        scaled = scale4(a, load4(x, i))
        for k in range(copies):
            store4(y, i + k * x.size, *scaled)
    if thread < t.size:
        t[thread] = numbers[0]


# Cost ---------------------------------------------------------------------------------------------


def weighted_sum_cost(n, terms=3):
    return 4 * n * (terms + 1), n * (2 * terms - 1)


def estimate_x_0_cost(n):
    return 12 * n, 3 * n


def guide_cost(n):
    return 12 * n, 3 * n


def blend_cost(n):
    return 16 * n, 0


def model_input_cost(n, copies=1):
    return 4 * n * (1 + copies), n


# Operations ---------------------------------------------------------------------------------------


def check_shapes(shape, **others):
    for name, array in others.items():
        if tuple(array.shape) != tuple(shape):
            raise ValueError(f"{name} has shape {tuple(array.shape)}, and must have {tuple(shape)}")


def check_prediction(x, prediction, parts=1):
    if prediction.shape[:-1] != x.shape[:-1] or prediction.shape[-1] < parts * x.shape[-1]:
        raise ValueError(
            f"prediction {tuple(prediction.shape)} must have the shape of x {tuple(x.shape)}, with at "
            f"least {parts} × {x.shape[-1]} channels"
        )


def on_engine(numbers, like):
    """A step's numbers as float32 on the device of `like`; for NumPy's arrays whatever they are."""
    if not is_device(like) or is_device(numbers):
        return numbers
    return upload(np.array(numbers, np.float32), like)


def launch_elementwise(kernel, width, y, *args):
    """Launch a kernel whose threads have `width` elements of y each."""
    flat = [a.reshape(-1) if is_device(a) else a for a in args]
    launch(kernel, -(-y.size // (width * BLOCK)), BLOCK, y.reshape(-1), *flat)
    return y


def _check_terms(x, u, v):
    check_shapes(
        x.shape, **{name: array for name, array in (("u", u), ("v", v)) if array is not None}
    )


X = single(2, 3, 4)


@operation(
    reference=weighted_sum_reference,
    cost=lambda x, u, v: weighted_sum_cost(x.size, 1 + (u is not None) + (v is not None)),
    check=_check_terms,
    versions=naive_and_vectorised(combine_kernel_v1, combine_kernel_v2),
    problems=[
        Problem("1 term", weights=[0.3], x=X),
        Problem("2 terms", weights=[0.3, -1.2], x=X, u=X),
        Problem("3 terms", weights=[0.3, -1.2, 0.7], x=X, u=X, v=X),
        Problem("odd", weights=[0.3, -1.2], x=single(3, 5, 7), u=single(3, 5, 7)),
    ],
)
def weighted_sum(weights, x, u=None, v=None, version=None):
    """weights[0] · x + weights[1] · u + weights[2] · v, arrays of one shape, as a new array.

    weights: at least as many numbers as arrays: floats, or float32 on the engine
    """
    arrays = [array for array in (x, u, v) if array is not None]
    return launch_elementwise(
        version.kernel,
        version.width,
        empty_like(x),
        len(arrays),
        on_engine(weights, x),
        *arrays,
        *[x] * (3 - len(arrays)),
    )


def combine(*terms):
    """Σ scalar · array over one to three pairs (scalar, array), as a new array; the arrays have one
    shape."""
    if not 1 <= len(terms) <= 3:
        raise ValueError(
            f"combine takes one to three pairs of a scalar and an array, got {len(terms)}"
        )
    return weighted_sum([scalar for scalar, _ in terms], *(array for _, array in terms))


@operation(
    reference=estimate_x_0_reference,
    cost=estimate_x_0_cost,
    check=lambda x, prediction: check_prediction(x, prediction),
    versions=naive_and_vectorised(
        estimate_x_0_kernel_v1,
        estimate_x_0_kernel_v2,
        lambda x, prediction: (
            f"needs equal shapes of a multiple of 4 elements, not {x.shape} and {prediction.shape}"
            if x.size % 4 or prediction.shape != x.shape
            else None
        ),
    ),
    problems=[
        Problem("clipped", x=X, prediction=X, weights=(1.3, -0.8)),
        Problem("not clipped", x=X, prediction=X, weights=(1.3, -0.8), clip=False),
        Problem(
            "of more channels", x=single(3, 5, 7), prediction=single(3, 5, 10), weights=(0.7, -1.9)
        ),
        Problem(
            x=single(32, 64, 64, 3),
            prediction=single(32, 64, 64, 3),
            weights=(1.3, -0.8),
            measured=True,
        ),
    ],
)
def estimate_x_0(x, prediction, weights, clip=True, version=None):
    """a · x + b · prediction over x's channels, clipped to [-1, 1] if asked, as a new array like x;
    weights: a, b."""
    return launch_elementwise(
        version.kernel,
        version.width,
        empty_like(x),
        x,
        prediction,
        on_engine(weights, x),
        uint32(x.shape[-1]),
        uint32(prediction.shape[-1]),
        int(clip),
    )


def _check_guide(conditional, unconditional, channels):
    check_shapes(conditional.shape, unconditional=unconditional)
    if not 1 <= channels <= conditional.shape[-1]:
        raise ValueError(f"channels must be 1 to {conditional.shape[-1]}, got {channels}")


@operation(
    reference=guide_reference,
    cost=lambda conditional: guide_cost(conditional.size),
    check=_check_guide,
    problems=[Problem(conditional=X, unconditional=X, scale=2.5, channels=3)],
)
def guide(conditional, unconditional, scale, channels):
    """unconditional + scale · (conditional - unconditional) in the first `channels` channels, else
    conditional."""
    return launch_elementwise(
        guide_kernel_v1,
        1,
        empty_like(conditional),
        conditional,
        unconditional,
        float(scale),
        uint32(channels),
        uint32(conditional.shape[-1]),
    )


@operation(
    reference=blend_reference,
    cost=blend_cost,
    check=lambda mask, known, x: check_shapes(x.shape, mask=mask, known=known),
    problems=[
        Problem(mask=filled((2, 3, 4), lambda rng: rng.integers(0, 2, (2, 3, 4))), known=X, x=X)
    ],
)
def blend(mask, known, x):
    """known where mask is 1, x where it is 0, as a new array."""
    return launch_elementwise(blend_kernel_v1, 1, empty_like(x), mask, known, x)


@operation(
    reference=model_input_reference,
    cost=model_input_cost,
    versions=naive_and_vectorised(model_input_kernel_v1, model_input_kernel_v2),
    problems=[
        Problem("1 copy", x=X, numbers=single(2)),
        Problem("2 copies", x=X, numbers=single(2), copies=2),
        Problem("odd", x=single(3, 5, 7), numbers=single(2), copies=2),
        Problem(x=single(32, 64, 64, 3), numbers=single(32), measured=True),
    ],
)
def model_input(x, numbers, copies=1, version=None):
    """(a · x, `copies` times over: (copies · B, ...); t for each sample of that: float32 (copies ·
    B,)), as new arrays.

    numbers: t, a
    """
    y, t = (empty((copies * x.shape[0], *more), np.float32, like=x) for more in (x.shape[1:], ()))
    threads = x.size // version.width
    launch(
        version.kernel,
        -(-max(threads, t.size) // BLOCK),
        BLOCK,
        y.reshape(-1),
        t,
        x.reshape(-1),
        on_engine(numbers, x),
        int(copies),
    )
    return y, t
