"""An operation's record: the only place where it is declared, and what everything else reads.

    record.py      versions, the choice among them, the registry
    versions.py    their names, and ceilings within which launchers choose
    problem.py     a problem: arguments of an operation, for checks, tests and benchmarks

READ NEXT
    record.py
"""

from .problem import (
    PURPOSE,
    SEED,
    Array,
    Problem,
    counters,
    filled,
    half,
    integers,
    numbers,
    positive,
    replaced,
    single,
)
from .record import (
    OPERATIONS,
    Operation,
    Unfit,
    Version,
    all_operations,
    first_on_device,
    kernel_modules,
    lacks_multiple,
    naive_and_vectorised,
    operation,
)

__all__ = [
    "Array",
    "OPERATIONS",
    "Operation",
    "PURPOSE",
    "Problem",
    "SEED",
    "Unfit",
    "Version",
    "all_operations",
    "counters",
    "filled",
    "first_on_device",
    "half",
    "integers",
    "kernel_modules",
    "lacks_multiple",
    "naive_and_vectorised",
    "numbers",
    "operation",
    "positive",
    "replaced",
    "single",
]
