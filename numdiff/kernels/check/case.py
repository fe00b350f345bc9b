"""What a case is, and how to write one in a few lines."""
from dataclasses import dataclass

import numpy as np

from ..versions import at_most

TOLERANCE = 1e-5  # relative error in the 2-norm against float64
HALF_TOLERANCE = 1e-3  # float16 results are rounded to 10 mantissa bits, and so are probabilities
BFLOAT16_TOLERANCE = 8e-3  # to 7 mantissa bits
FP8_TOLERANCE = 5e-4  # of 128 summed products of E4M3 tensor cores keep about 14 bits
SEED, PURPOSE = 1234567890123, 3


@dataclass
class Case:
    """One operation on one small problem.

    name: of the operation; inputs(rng): {name: NumPy array}; run(a, version): a tuple of arrays, from the inputs `a` on
        some device (an object with their names); versions: to be forced one by one (None: what the launcher chooses)
    label: which problem, where there are several
    bfloat16: bfloat16_cases (bfloat16.py) repeats it in that type
    fast: the quick tests run it; otherwise only the exhaustive ones do
    """

    name: str
    inputs: object
    run: object
    versions: tuple = (None,)
    tolerance: float = TOLERANCE
    label: str = ""
    fast: bool = True
    bfloat16: bool = False


class Arrays:
    def __init__(self, arrays):
        self.__dict__.update(arrays)


def normal(**shapes):
    """Inputs that are normal float64 arrays of these shapes (they become float32 on a device)."""
    return lambda rng: {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def with_counters(batch, **shapes):
    """As `normal`, with the step and sample numbers that count randomness."""
    def make(rng):
        return {**normal(**shapes)(rng), "step": np.array([5], np.uint32),
                "samples": rng.permutation(100)[:batch].astype(np.uint32)}
    return make


def with_timesteps(batch, steps=10, **shapes):
    """As `normal`, with timesteps and the two tables of a noise schedule."""
    def make(rng):
        alpha_bar = np.linspace(0.99, 0.05, steps)
        return {**normal(**shapes)(rng), "t": rng.integers(0, steps, batch).astype(np.int32),
                "signal": np.sqrt(alpha_bar), "noise": np.sqrt(1 - alpha_bar), "third": np.linspace(0, 0.3, steps)}
    return make


def in_place(function, *names):
    """run() of an operation that changes its arguments `names`: they are its results."""
    def run(a, version):
        function(a, version)
        return tuple(getattr(a, name) for name in names)
    return run


def with_plain_sums(function):
    """run() whose second pass, a sum down each column, is version 1, a thread a column. The other version adds up in a
    tree of a block's threads, for which the emulator would take longer than for all that comes before; the cases of few
    columns have it."""
    def run(*arguments):
        with at_most({"column_sum": 1}):
            return function(*arguments)
    return run


def one(function):
    """run() of an operation with one result."""
    return lambda a, version: (function(a, version),)
