"""A case of the check, and how to write one in a few lines."""

from dataclasses import dataclass

TOLERANCE = 1e-5  # relative error in the 2-norm against float64
HALF_TOLERANCE = 1e-3  # float16 results are rounded to 10 mantissa bits, and so are probabilities
BFLOAT16_TOLERANCE = 8e-3  # to 7 mantissa bits


@dataclass
class Case:
    """One operation on one small problem.

    name: of the operation; inputs(rng): {name: NumPy array}; run(a, version): a tuple of arrays,
        from the inputs `a` on some device (an object with their names); versions: to be forced one
        by one (None: what the launcher chooses)
    label: which problem, where there are several
    bfloat16: bfloat16_cases (bfloat16.py) repeats it in that type; "exhaustive": for the exhaustive
    tests
    fast: the quick tests run it; otherwise only the exhaustive ones do; or a list of the versions
    that they run
    once: tests run it in one thread order; only_compiled: they compile it and do not run it
    """

    name: str
    inputs: object
    run: object
    versions: tuple = (None,)
    tolerance: float = TOLERANCE
    label: str = ""
    fast: bool | list = True
    bfloat16: bool = False
    once: bool = False
    only_compiled: bool = False

    def is_fast(self, version):
        """Whether the quick tests run this version."""
        return self.fast if isinstance(self.fast, bool) else version in self.fast


class CaseArrays:
    def __init__(self, arrays):
        self.__dict__.update(arrays)


def normal(**shapes):
    """Inputs that are normal float64 arrays of these shapes (they become float32 on a device)."""
    return lambda rng: {name: rng.standard_normal(shape) for name, shape in shapes.items()}
