"""AdamW and the average of the weights on the CPU engine: one pass over memory, shared by the cores.

MATHEMATICS
    that of optimizer/adamw.py and of optimizer/ema.py, in the same order and so with the same
    bits. The references take about fifteen NumPy passes over chunks, on one core.
SHAPES
    flat (n,) float32; ema is empty where there is none
DETERMINISM
    elementwise.
READ NEXT
    optimizer/adamw.py.
"""

from typing import NamedTuple

import numpy as np

from ...device import on_host, over_batch

CHUNK = 16384  # elements: their five arrays stay in a core's own cache from one loop to the next
COST = 2  # an element takes about twice the time of one that `over_batch` expects


class Factors(NamedTuple):
    """What multiplies in an update, float32.

    m, gradient: in the first moment; v, square: in the second; eps: added to √v; step: multiplies
    m / (√v + eps); weight: decay; average: by which the average moves to the weight
    """

    m: np.float32
    gradient: np.float32
    v: np.float32
    square: np.float32
    eps: np.float32
    step: np.float32
    weight: np.float32
    average: np.float32


@on_host
def update_elements(weight, gradient, m, v, ema, factors):
    for i in range(len(weight)):
        g = gradient[i]
        m_i = m[i] * factors.m + g * factors.gradient
        v_i = v[i] * factors.v + g * g * factors.square
        m[i], v[i] = m_i, v_i
        step = m_i / (np.sqrt(v_i) + factors.eps) * factors.step
        weight[i] = weight[i] * factors.weight - step
    for i in range(len(ema)):
        ema[i] += (weight[i] - ema[i]) * factors.average


def adamw_cpu(weight, gradient, m, v, ema, factors):
    """Update these arrays in place. ema: the average, or None; factors: a `Factors`"""
    average = weight[:0] if ema is None else ema
    factors = Factors(*map(np.float32, factors))

    def update(share):
        for start in range(share.start, share.stop, CHUNK):
            i = slice(start, min(start + CHUNK, share.stop))
            update_elements(weight[i], gradient[i], m[i], v[i], average[i], factors)

    over_batch(update, len(weight), COST * len(weight))


def can_update(*arrays):
    """Whether these flat arrays (None: not there) are those that `adamw_cpu` takes."""
    return all(a is None or (a.dtype == np.float32 and a.flags.c_contiguous) for a in arrays)
