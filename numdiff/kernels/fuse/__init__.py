"""Fusion by composition: a chain of small operations becomes one kernel, and its derivative
another.

    scaled = Operation(lambda x, scale, shift: x * scale + shift, PER_CHANNEL, PER_CHANNEL,
                       x=lambda dy, scale: dy * scale,
                       scale=lambda dy, x: dy * x,
                       shift=UNCHANGED)                                     # the derivative is dy itself
    activated = Operation(silu, x=silu_gradient)
    chain = fuse(EACH, scaled, activated, EACH)                             # read, operations, write
    y = chain.forward(x, scale, shift)                                      # one pass over x, where two would be needed
    dx, dscale, dshift = chain.backward(dy, x, scale, shift)
    print(chain.text("forward", 2))                                         # the kernel, as one would write it by hand

MATHEMATICS
    y_0 = x,  y_k = f_k(y_{k-1}, a_k),  y = y_n         a_k: the operation's operands, each read at its own place
    backward, from dy_n = dy down to k = 1:
        dy_{k-1} = dy_k · ∂f_k/∂y_{k-1}                 one operation's derivative after the other: the reversed chain
        da_k     = Σ dy_k · ∂f_k/∂a_k                   over all elements that read the same number of a_k
    A derivative is a function of dy and of whatever it names of f_k's arguments, or of f_k's result
    as y. What any of them names is needed again. Of that only x and the operands are kept: each y_k
    is computed again from them, since arithmetic is free compared with memory. `chain.kept` says
    which they are; what no derivative needs is not read.
SHAPES
    x, y and what stands EACH: any shape, channels last; PER_CHANNEL (C,); PER_SAMPLE (B, C), of an
    x (B, ..., C); NUMBER a float. Arrays float32, float16 or bfloat16, the arithmetic float32; sums
    of gradients float32.
RUNGS
    1, naive: one thread an element; where gradients are sums one thread a column, which goes down
    its rows.
    2, vectorised: one thread four neighbours, by 16-byte loads and stores. Where gradients are
       sums, blocks own a chunk of rows, write dx and add up on the way, in a tree; a second pass
       adds up the chunks (reduce/trees.py).
    3, eight: as before with eight neighbours, 16 bytes of float16. (sm_80; its accumulators take
    too many registers, so the
       launcher uses version 2 for them)
LAUNCH
    as elementwise.py, and reduce/trees.py where gradients are sums.
DETERMINISM
    no atomics; the order of each sum depends on the shape alone.
COST
    bytes: each array once. That is the point: n separate operations read and write 2 n arrays, a
    chain of them 2.
SOURCE
    The idea: Amoros et al. 2025, arXiv:2508.07071 (the Fused Kernel Library: read, compute and
    write operations, composed at compile time). The reversed chain: reverse-mode differentiation,
    Griewank and Walther 2008, chapter 3.
Read the files in this order:

    operations.py    what a chain is made of: places of numbers, operations with their derivatives
    kernel_text.py   a kernel as text, in three versions
    chain.py         the chain, its reversal, and how both are launched
    ../../extras/levels/fused.py  a chain as an operation, which the check and the tests run

READ NEXT
    operations.py
"""

from .chain import Fused, fuse
from .operations import (
    EACH,
    NUMBER,
    PER_CHANNEL,
    PER_SAMPLE,
    UNCHANGED,
    Operation,
    Place,
    as_it_is,
    select,
)

__all__ = [
    "EACH",
    "NUMBER",
    "PER_CHANNEL",
    "PER_SAMPLE",
    "UNCHANGED",
    "Fused",
    "Operation",
    "Place",
    "as_it_is",
    "fuse",
    "select",
]
