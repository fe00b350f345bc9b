"""Problems of flash attention for version 2 alone. The others' small problems run it, too, with two
warps and one chunk (kernels/attention/problems.py).

SOURCE
    plain bookkeeping; kernels/operation/problem.py says what a problem is.
READ NEXT
    kernels/attention/problems.py
"""

import functools

from ....kernels.attention.problems import problem
from ....kernels.operation.problem import replaced


def forward():
    four = functools.partial(replaced, __package__, choose_warps=lambda *_: 4)
    return [
        problem(False, HS, "register-tiled", how="4 warps", within=four, fast=HS == 72)
        for HS in (32, 64, 72)
    ]


def backward():
    return [problem(True, 32, "register-tiled", T=66, chunks=(2, 1))]
