"""Sparse-linear attention: softmax attention to the blocks of keys that matter, linear attention to
the rest.

Each block of 64 queries chooses some blocks of 64 keys by the products of their means. A query
attends to these as in flash attention. All other keys enter only through sums, computed once for
the whole image, from which those of the chosen blocks are subtracted. So time grows with the chosen
share of T², and training teaches the model to live with
it: the linear part passes through a layer that starts from zero.

The linear part has two definitions. By default the linear part leaves out the chosen blocks, as in
the branch SLA-1 of the authors' code (github.com/thu-ml/SLA). With `all_keys` it takes all keys, as
in their branch main. Weights tuned with one do not fit the other. The paper's third category,
negligible blocks that are skipped, is in neither branch, nor here.

Read the files in this order.

    reference.py       what is computed, how the backward does without most of it, what cancels, and what it costs
    choice.py          the choice, which all versions share, the same on every engine; totals; transposed lists
    simple.py          v1 naive: one thread a row; a block of 64 rows, and the list of its blocks
    tiles_half.py          what the others share: features of fragments, totals minus what is listed, in registers
    prepare_half.py    v2 mma: float16, mma.sync: means, φ(k), H and z of each block of keys in one pass
    forward_half.py    v2 mma: k, v and H of the next block in flight; the linear part in the same kernel
    rest_half.py       v3 product: S of all blocks of queries as one product of matrices
    queries_half.py    v2 mma: the backward of the linear part, five products that stay in shared memory
    lists_half.py      v2 mma: dq over the lists; dk and dv over their transpose
    problems.py            what the check, the tests and the benchmark run
    launcher.py        which of them runs

SHAPES
    qkv (B, T, 3C), C = heads · HS; y, dy (B, T, C); weight (HS, HS), all float32, float16 or
    bfloat16; bias (HS,) float32. T is at least 65; on a GPU HS is 32, 64 or 72.
VERSIONS
    v1 naive: one thread a row, float32 sums, all head sizes, any type v2 mma: float16 and bfloat16
    on tensor cores, the same heads; nine launches forward and backward, and the sums of
       dW and db
    v3 product: forward only; S by a product of zeros and ones with H, so that the forward reads k
       and v alone: what runs from 65 blocks on; an H200, T 16,384: 291 instead of 316 µs with top-k
       5 %, 771 instead of 929 with 20 %
COST
    4 · B · C · T · (64 · count) FLOPs forward and 10 backward for `count` of N = T / 64 blocks,
    instead of as many with T; and 6 and 14 · B · T · C · HS for the linear part: as much as 2
    blocks. H, S and A are HS² numbers a block of 64 · HS: for HS 64 as much as k, in the type of
    qkv.
SOURCE
    Zhang et al. 2025, arXiv:2509.24006.
READ NEXT
    reference.py
"""

from .choice import BLOCK, blocks_of, count_of
from .launcher import sla_backward, sla_forward
from .reference import (
    Kept,
    sla_backward_cost,
    sla_backward_reference,
    sla_forward_cost,
    sla_forward_reference,
)

__all__ = [
    "BLOCK",
    "Kept",
    "blocks_of",
    "count_of",
    "sla_backward",
    "sla_backward_cost",
    "sla_backward_reference",
    "sla_forward",
    "sla_forward_cost",
    "sla_forward_reference",
]
